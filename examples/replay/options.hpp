// The command line of verkv_replay and what it selects.
#ifndef VERKV_EXAMPLES_REPLAY_OPTIONS_HPP
#define VERKV_EXAMPLES_REPLAY_OPTIONS_HPP

#include <array>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <verkv/kv_cache_manager.hpp>
#include <verkv/recorded_cache.hpp>

#include "../common/backend.hpp"

namespace verkv::replay {

// Something the user asked for that cannot be: exit code 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline constexpr int kExitData = 1;
inline constexpr int kExitUsage = 2;

// The error of D that counts as a failure where the method promises none.
inline constexpr double kPlainTolerance = 0.05;

// Shares of tokens resident that --compare and --promise run at.
inline constexpr std::array<double, 3> kRates{1.0 / 8, 1.0 / 16, 1.0 / 32};
// The promises of --promise.
inline constexpr std::array<double, 5> kPromiseEpsilons{0.01, 0.05, 0.1, 0.3, 0.5};
inline constexpr std::array<double, 3> kPromiseDeltas{0.05, 0.1, 0.2};

struct Options {
  std::string file;
  std::vector<std::string> files;  // all that are named; several with promise only
  bool compare = false;
  bool promise = false;   // the grid of promises (promise.hpp)
  bool by_layer = false;  // with compare: print the rows of single layers too
  double keep = CacheConfig{}.keep;
  std::optional<double> epsilon;
  double delta = FetchConfig{}.delta;
  std::optional<double> risk;
  std::optional<double> probability;
  std::optional<double> cap = StudyConfig{}.cap;
  std::string sketch = "2";           // exact, 2, 3, 4
  std::vector<std::string> sketches;  // with promise: those of the grid
  Selection select = StudyConfig{}.select;
  Estimator estimator = StudyConfig{}.estimator;
  FetchMode fetch = FetchMode::verified;
  FetchOrder order = FetchOrder::worth;
  std::string importance;  // empty: kvzip_mean for sampling, kvzip for top-k
  Pool pool = Pool::head;
  std::int64_t sink = CacheConfig{}.sink_tokens;
  std::int64_t local = CacheConfig{}.local_tokens;
  std::int64_t seeds = 2;
  std::int64_t redraws = 32;
  std::int64_t threads = 0;          // 0: one per hardware thread
  std::int64_t steps = 0;            // 0: all that are recorded
  std::vector<std::int64_t> layers;  // empty: all that are recorded
  bool vector_code = true;
  BackendKind backend = BackendKind::cpu;
  std::string json;  // empty: none
};

// Options, or what to print instead of working: the help (exit code 0) or one line about the error
// (kExitUsage).
struct Parsed {
  std::optional<Options> options;
  int exit_code = 0;
  std::string text;
};

// arguments: without the program's name.
Parsed parse_options(const std::vector<std::string>& arguments);

// What a method says about the error of D.
enum class Promise {
  none,        // nothing; failures are counted beyond kPlainTolerance (or --epsilon)
  epsilon,     // at most epsilon, in all but delta of the draws
  certificate  // at most the certificate it reports, in all but delta of the draws
};

// One way to run a cache: a row of the table for each layer.
struct Method {
  // As in the JSON: dense, dense_offload, topk, topk_fetch, poisson, spread, certificate, risk.
  std::string name;
  std::string label;       // for people
  std::string importance;  // name in the recording
  CacheConfig config;      // without layers
  Promise promise = Promise::none;
  double tolerance = kPlainTolerance;  // unless the promise is the certificate
  bool random = true;                  // its residents are drawn
};

// Dense attention over everything: what times are compared with.
Method dense_method(const Options& options, const std::string& importance);
// The method that the options describe; with --compare or --promise all of them, in the order of
// the table.
std::vector<Method> select_methods(const Options& options, const RecordedCache& cache);
// The recorded layers that the options name, by place in cache.layers(). Throws UsageError naming
// those available.
std::vector<std::size_t> select_layers(const Options& options, const RecordedCache& cache);
// How many steps to replay. Throws UsageError where more are asked for than are recorded.
std::int64_t select_steps(const Options& options, const RecordedCache& cache);

// The words of the command line and of the JSON.
const char* name(Promise promise);
std::string word(const SketchConfig& sketch);
// "2-bit sketch".
std::string sketch_label(const SketchConfig& sketch);

// "16x" for 0.0625, "0.07" where 1 / keep is not a whole number.
std::string rate_label(double keep);
// "1e-4", "3.5e-5".
std::string price_label(double price);

}  // namespace verkv::replay

#endif  // VERKV_EXAMPLES_REPLAY_OPTIONS_HPP
