// What was answered and what it took, told at the end of a context.
#ifndef VERKV_SRC_GGML_REPORT_HPP
#define VERKV_SRC_GGML_REPORT_HPP

#include <cstdint>
#include <string>

namespace verkv_ggml {

// A row is one token in one layer.
struct Report {
  std::int64_t dense_rows = 0;   // answered from all rows that they see
  std::int64_t passed_rows = 0;  // left to ggml: prompts, and what is not understood
  std::int64_t dense_ns = 0;

  std::string sentence() const;
  // One line of JSON.
  std::string json() const;
};

// Adds the line to the file; says so in the log where that fails.
void append_line(const std::string& file, const std::string& line);

}  // namespace verkv_ggml

#endif  // VERKV_SRC_GGML_REPORT_HPP
