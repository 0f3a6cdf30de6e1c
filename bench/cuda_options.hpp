// The command line of the GPU benchmark, and what is run.
#ifndef VERKV_BENCH_CUDA_OPTIONS_HPP
#define VERKV_BENCH_CUDA_OPTIONS_HPP

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_machine.hpp"
#include "cuda_scene.hpp"

namespace verkv::bench {

extern const char* const kCudaBenchHelp;

struct OptionError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Options {
  std::string json;
  std::string table;
  bool quick = false;
  bool help = false;
  std::vector<std::int64_t> tokens;   // empty: the default
  std::vector<std::int64_t> batches;  // empty: the default
  std::int64_t repetitions = 0;       // 0: the default
  std::int64_t time_limit = 540;      // seconds
};

// Throws OptionError.
Options parse_options(const std::vector<std::string>& arguments);

// What is run.
struct Plan {
  std::int64_t kv_heads = 8;
  std::vector<std::int64_t> tokens{32768, 131072};
  std::vector<std::int64_t> batches{1, 16};
  int warm_up = 3;
  int repetitions = 30;
  std::int64_t flush_bytes = std::int64_t{256} << 20;
  std::int64_t piece_bytes = std::int64_t{16} << 20;
  // Layers of the captured steps: few where each pins much memory.
  int short_layers = 8;
  int long_layers = 4;
  std::int64_t long_tokens = 65536;  // from here on
  ProbeSizes probes;
  std::vector<Rule> rules{{"risk 1e-4", {}, 1e-4}, {"eps 0.1", 0.1, {}}};
};

Plan plan_of(const Options& options);

}  // namespace verkv::bench

#endif  // VERKV_BENCH_CUDA_OPTIONS_HPP
