// Runs methods over a recorded cache and measures them against dense attention in double.
#ifndef VERKV_EXAMPLES_REPLAY_MEASURE_HPP
#define VERKV_EXAMPLES_REPLAY_MEASURE_HPP

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "options.hpp"
#include "statistics.hpp"

#include <verkv/recorded_cache.hpp>

namespace verkv::replay {

// What a method did in one layer, or in all of them together. docs/replay.md explains each number.
// A decision is one (draw, step, query head). kNone where a number does not apply.
struct Row {
  const Method* method = nullptr;
  std::optional<std::int64_t> layer;  // none: all layers

  // |o_hat - o| / |o| over all decisions.
  double output_error_median = kNone;
  double output_error_p95 = kNone;
  double output_error_worst = kNone;
  // Decisions with an estimate of it: whose error is above one and above two of it.
  Rate above_estimate;
  Rate above_two_estimates;
  // Of the softmax denominator, relative.
  double denominator_error_rms = kNone;
  double denominator_error_median = kNone;
  double denominator_error_p95 = kNone;

  // |D_hat - D| / D beyond what was promised (or beyond a plain tolerance, where nothing is).
  Rate redraws;          // (a) fixed queries, many draws
  Rate worst_query;      // ... the query with the highest rate
  Rate steps;            // (b) one draw, all steps
  Rate steps_unfetched;  // ... those that fetched nothing
  Rate steps_fetched;    // ... those that fetched
  Rate any_head;         // (c) steps in which any head of any layer failed; only over all layers
  double uncertified = kNone;  // share of decisions without a certificate; no trials

  double fetching_share = kNone;        // of decisions
  double fetched_per_fetching = kNone;  // tokens
  double resident_fraction = kNone;     // shares of the cache, mean over steps and KV heads
  double fetched_fraction = kNone;
  double moved_fraction = kNone;
  double moved_tokens = kNone;   // of one KV head
  double read_fraction = kNone;  // residents and moved tokens
  double read_with_sketch_fraction = kNone;
  double certificate_median = kNone;
  double certificate_p95 = kNone;

  double step_ns = kNone;  // sum over the layers of the row, median over steps
  double dense_ns = kNone;

  // At the last step; of single layers unknown where all share one manager.
  double cache_bytes = kNone;  // all keys and values
  double resident_bytes = kNone;
  double sketch_bytes = kNone;
  double metadata_bytes = kNone;
  double host_bytes = kNone;
  double workspace_bytes = kNone;
  double fetched_bytes = kNone;  // moved per step

  double fast_fraction() const {
    return (resident_bytes + sketch_bytes + metadata_bytes) / cache_bytes;
  }
};

struct Measurement {
  std::vector<Row> rows;             // for each method: its layers, then all
  std::string description;           // backend and instruction set
  std::vector<std::int64_t> layers;  // indices in the model
  std::vector<std::int64_t> redraw_steps;
  std::int64_t steps = 0;
  std::int64_t threads = 0;
  DType storage = DType::f16;
};

// Called from worker threads, one at a time: tasks done, all tasks, and the method that was begun
// last.
using Progress = std::function<void(std::int64_t done, std::int64_t total, std::size_t method)>;

// Throws what the library throws, and UsageError for layers that are not recorded. The rows point
// into `methods`.
Measurement measure(const RecordedCache& cache, const Options& options,
                    const std::vector<Method>& methods, const Progress& progress);

}  // namespace verkv::replay

#endif  // VERKV_EXAMPLES_REPLAY_MEASURE_HPP
