// What was answered and what it took, told at the end of a context.
#ifndef VERKV_SRC_GGML_REPORT_HPP
#define VERKV_SRC_GGML_REPORT_HPP

#include <cstdint>
#include <string>

namespace verkv_ggml {

// A row is one token in one layer.
struct Report {
  std::int64_t compressed_rows = 0;  // answered by the library's cache
  std::int64_t dense_rows = 0;       // answered from all rows that they see
  std::int64_t passed_rows = 0;      // left to ggml: prompts, and what is not understood
  std::int64_t compressed_ns = 0;
  std::int64_t dense_ns = 0;
  // Prompts that were compressed, which is not in the times above.
  std::int64_t compressions = 0;
  std::int64_t compress_ns = 0;
  // Queries that importance rested on, over all layers; 0: on the norms of keys.
  std::int64_t late_queries = 0;
  // Of the library's cache: query heads of rows, of which certified; tokens moved, and what it keeps
  // beside the engine's rows, at most.
  std::int64_t decisions = 0;
  std::int64_t certified = 0;
  std::int64_t moved_tokens = 0;
  std::int64_t own_bytes = 0;
  // Residents that differed from the engine's row (VERKV_GGML_CHECK).
  std::int64_t stale_rows = 0;

  std::string sentence() const;
  // One line of JSON.
  std::string json() const;
};

// Adds the line to the file; says so in the log where that fails.
void append_line(const std::string& file, const std::string& line);

}  // namespace verkv_ggml

#endif  // VERKV_SRC_GGML_REPORT_HPP
