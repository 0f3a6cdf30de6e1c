// The results of the GPU benchmark: JSON, lines for a person, the Markdown table of the docs.
#ifndef VERKV_BENCH_CUDA_REPORT_HPP
#define VERKV_BENCH_CUDA_REPORT_HPP

#include <cstdint>
#include <optional>
#include <string>

#include <nlohmann/json.hpp>

#include "cuda_machine.hpp"
#include "cuda_timing.hpp"

namespace verkv::bench {

// Something that has been timed.
struct Result {
  std::int64_t tokens = 0;
  int batch = 1;
  std::string rule;  // empty: dense
  std::string what;
  std::string cache;   // what the second-level cache held before
  std::string detail;  // how the work is cut into blocks
  Timing timing;       // of one layer
  // Bytes that have to be read at least once.
  std::int64_t device_bytes = 0;
  std::int64_t host_bytes = 0;
  bool whole = true;  // an attention from queries to outputs, so that dense can be compared
  std::optional<double> moved_share;   // of the cached tokens
  std::optional<double> output_error;  // median over query heads, relative to dense
};

class Report {
 public:
  Report(const Machine& machine, const ProbeSizes& probes, nlohmann::json settings);

  // Dense results of a (tokens, batch) come before what is compared with them. Prints a line.
  void add(const Result& result);
  // Whether worst_error is within the tolerance; a check that fails is printed.
  bool check(std::int64_t tokens, int batch, const std::string& what, double worst_error,
             double tolerance);
  // Prints the reason.
  void leave_out(std::int64_t tokens, int batch, const std::string& what,
                 const std::string& reason);

  bool passed() const { return passed_; }
  const nlohmann::json& document() const { return json_; }

 private:
  // Seconds of a result that is there, of these tokens and batch.
  std::optional<double> seconds_of(const Result& like, const std::string& what) const;

  Machine machine_;
  nlohmann::json json_;
  bool passed_ = true;
};

// The tables of docs/performance.md. Columns of times stay empty where the JSON says that its times
// mean nothing. Throws nlohmann::json::exception if it is not the JSON of this program.
std::string markdown(const nlohmann::json& json);

}  // namespace verkv::bench

#endif  // VERKV_BENCH_CUDA_REPORT_HPP
