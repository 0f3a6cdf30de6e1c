#include "report.hpp"

#include <fmt/format.h>

#include <fstream>

#include "log.hpp"

namespace verkv_ggml {

std::string Report::sentence() const {
  return fmt::format("{} rows answered exactly in {:.3f} s, {} rows left to ggml", dense_rows,
                     static_cast<double>(dense_ns) * 1e-9, passed_rows);
}

std::string Report::json() const {
  return fmt::format(R"({{"dense_rows": {}, "dense_seconds": {:.9f}, "passed_rows": {}}})",
                     dense_rows, static_cast<double>(dense_ns) * 1e-9, passed_rows);
}

void append_line(const std::string& file, const std::string& line) {
  std::ofstream out(file, std::ios::app);
  out << line << '\n';
  out.close();
  if (!out) log_error("VERKV_GGML_REPORT=" + file + ": the report cannot be written there");
}

}  // namespace verkv_ggml
