// A recording replayed through a cache manager: the calls an engine would make (create, append,
// compress, attend), and what came of each.
#ifndef VERKV_EXAMPLES_REPLAY_RUN_HPP
#define VERKV_EXAMPLES_REPLAY_RUN_HPP

#include <cmath>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <verkv/kv_cache_manager.hpp>
#include <verkv/recorded_cache.hpp>

#include "options.hpp"
#include "reference.hpp"
#include "statistics.hpp"

namespace verkv::replay {

// What one query head's step came to.
struct Decision {
  double output_error = 0;
  double estimated_error = 0;  // by the step itself, relative to the true output
  double denominator_error = 0;
  double rounding = 0;  // of the comparison itself
  double certificate = 0;
  bool certified = false;
  std::int64_t planned = 0;

  // Whether it says anything about its error that could turn out wrong.
  bool is_trial(const Method& method) const {
    switch (method.promise) {
      case Promise::none:
        return true;
      case Promise::epsilon:
        return certified;
      case Promise::certificate:
        return std::isfinite(certificate);
    }
    return true;
  }

  bool failed(const Method& method) const {
    const double tolerance =
        method.promise == Promise::certificate ? certificate : method.tolerance;
    return !(denominator_error <= tolerance + rounding);
  }
};

// One layer under one draw, step by step.
struct LayerTrace {
  std::vector<Decision> decisions;  // [step][query head]
  std::vector<double> step_ns;
  // Sums over steps and KV heads.
  std::int64_t fetched = 0;
  std::int64_t moved = 0;
  std::int64_t moved_bytes = 0;
  std::int64_t resident = 0;
  std::int64_t cached = 0;
  std::int64_t head_steps = 0;
};

// One manager under one draw. The layers of a unit share the manager.
struct UnitTrace {
  std::vector<LayerTrace> layers;
  MemoryReport memory;
};

// The layers of one manager.
struct Unit {
  std::vector<std::size_t> places;  // in the list of selected layers
};

// A cache of the unit's layers under one method, at some step of the recording.
class Replay {
 public:
  Replay(const RecordedCache& cache, const std::vector<std::size_t>& places, const Unit& unit,
         const std::vector<Reference>& references, const Method& method, DType storage,
         std::int64_t threads, std::uint64_t draw, BackendKind backend);

  std::size_t layers() const { return layers_.size(); }
  std::int64_t tokens(std::size_t i) const {
    return manager_->tokens(sequence_, static_cast<std::int64_t>(i));
  }
  KvCacheManager& manager() { return *manager_; }

  // Adds the new token of a step to every layer.
  void append(std::int64_t step);

  void redraw(std::uint64_t draw) { manager_->redraw(sequence_, draw); }

  // Attends in one layer; the decisions are those of its query heads, valid until the next call.
  std::span<const Decision> attend(std::size_t i, std::int64_t step);

  std::span<const KvHeadReport> kv_reports() const { return kv_reports_; }
  double attend_ns() const { return attend_ns_; }
  const Method& method() const { return method_; }

 private:
  const Method& method_;
  std::vector<const RecordedLayer*> layers_;
  std::vector<const Reference*> references_;
  std::unique_ptr<KvCacheManager> manager_;
  SequenceId sequence_;
  std::vector<float> output_;
  std::vector<float> lse_;
  std::vector<QueryHeadReport> query_reports_;
  std::vector<KvHeadReport> kv_reports_;
  std::vector<Decision> decisions_;
  double attend_ns_ = 0;
};

// Failure (b) and everything else that is measured along the steps.
UnitTrace follow_steps(Replay& replay, std::int64_t steps);

// Failure (a): for each layer, the rates of its queries.
std::vector<std::vector<Rate>> redraw_steps(Replay& replay, const std::vector<std::int64_t>& steps,
                                            std::int64_t redraws);

}  // namespace verkv::replay

#endif  // VERKV_EXAMPLES_REPLAY_RUN_HPP
