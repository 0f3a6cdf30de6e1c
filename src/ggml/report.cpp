#include "report.hpp"

#include <fmt/format.h>

#include <fstream>

#include "log.hpp"

namespace verkv_ggml {

namespace {

double seconds(std::int64_t ns) { return static_cast<double>(ns) * 1e-9; }

}  // namespace

std::string Report::sentence() const {
  std::string line = fmt::format("{} rows answered exactly in {:.3f} s, {} rows left to ggml",
                                 dense_rows, seconds(dense_ns), passed_rows);
  if (compressions == 0) return line;
  return fmt::format(
      "{} rows answered from {} compressions in {:.3f} s and {:.3f} s for compressing: {} tokens "
      "moved, {} of {} heads certified, {:.1f} MB beside the cache; {}",
      compressed_rows, compressions, seconds(compressed_ns), seconds(compress_ns), moved_tokens,
      certified, decisions, static_cast<double>(own_bytes) * 1e-6, line);
}

std::string Report::json() const {
  return fmt::format(
      R"({{"compressed_rows": {}, "compressed_seconds": {:.9f}, "dense_rows": {}, )"
      R"("dense_seconds": {:.9f}, "passed_rows": {}, "compressions": {}, )"
      R"("compress_seconds": {:.9f}, "late_queries": {}, )"
      R"("decisions": {}, "certified": {}, "moved_tokens": {}, "own_bytes": {}, "stale_rows": {}}})",
      compressed_rows, seconds(compressed_ns), dense_rows, seconds(dense_ns), passed_rows,
      compressions, seconds(compress_ns), late_queries, decisions, certified, moved_tokens,
      own_bytes, stale_rows);
}

void append_line(const std::string& file, const std::string& line) {
  std::ofstream out(file, std::ios::app);
  out << line << '\n';
  out.close();
  if (!out) log_error("VERKV_GGML_REPORT=" + file + ": the report cannot be written there");
}

}  // namespace verkv_ggml
