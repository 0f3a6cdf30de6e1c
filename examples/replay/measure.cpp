#include "measure.hpp"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>

#include "parallel.hpp"
#include "reference.hpp"
#include "run.hpp"

namespace verkv::replay {

namespace {

constexpr std::int64_t kRedrawSteps = 4;

// Keys and values are stored as they were recorded, so that nothing is lost; mixed types in f32.
DType storage_type(const RecordedCache& cache, const std::vector<std::size_t>& places) {
  const DType first = cache.layers()[places.front()].key.type;
  for (const std::size_t place : places) {
    const RecordedLayer& layer = cache.layers()[place];
    for (const TensorView* view : {&layer.key, &layer.value, &layer.new_key, &layer.new_value}) {
      if (view->type != first) return DType::f32;
    }
  }
  return first;
}

// Refuses a backend that is not there, or that does not do what a method asks for.
void check_backend(const Options& options, const std::vector<Method>& methods) {
  for (const Method& method : methods) {
    const std::string refusal = backend_refusal(options.backend, method.config);
    if (!refusal.empty()) throw UsageError("--backend cuda: " + refusal);
  }
}

// Everything known about one layer under one method.
struct LayerResult {
  std::vector<LayerTrace> traces;  // one a seed
  std::vector<Rate> redraws;       // one a query
};

// Everything known about one method.
struct MethodResult {
  std::vector<LayerResult> layers;
  std::vector<MemoryReport> memory;  // one a unit
};

MemoryReport sum_of(const std::vector<MemoryReport>& reports) {
  MemoryReport sum;
  for (const MemoryReport& report : reports) {
    sum.resident_bytes += report.resident_bytes;
    sum.sketch_bytes += report.sketch_bytes;
    sum.metadata_bytes += report.metadata_bytes;
    sum.host_bytes += report.host_bytes;
    sum.workspace_bytes += report.workspace_bytes;
  }
  return sum;
}

double share(std::int64_t part, std::int64_t whole) {
  return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : kNone;
}

double median_ns(const LayerResult& result) {
  std::vector<double> values;
  for (const LayerTrace& trace : result.traces)
    values.insert(values.end(), trace.step_ns.begin(), trace.step_ns.end());
  return quantile(values, 0.5);
}

// Shares of the full cache that the sketch adds to what a step reads.
double sketch_share(const Method& method, const Row& row, double key_share) {
  const FetchConfig& fetch = method.config.fetch;
  const bool unused =
      method.name == "dense" || fetch.mode == FetchMode::always ||
      (fetch.mode == FetchMode::never && method.config.study.select == Selection::topk);
  if (unused) return 0;
  if (!has_codes(method.config.sketch.kind)) return key_share;
  return row.sketch_bytes / row.cache_bytes;
}

// What a row is made of, summed over draws and layers.
struct Sums {
  std::vector<double> errors;
  std::vector<double> denominator_errors;
  std::vector<double> certificates;
  std::int64_t decisions = 0;
  std::int64_t trials = 0;
  std::int64_t fetching = 0;
  std::int64_t planned = 0;
  LayerTrace trace;
  std::vector<bool> failed_step;  // [draw][step]
};

// One layer under one draw, whose steps begin at first_step of failed_step.
void add_trace(const Method& method, const LayerTrace& trace, std::size_t query_heads,
               std::size_t first_step, Sums& sums, Row& row) {
  for (std::size_t k = 0; k < trace.decisions.size(); ++k) {
    const Decision& decision = trace.decisions[k];
    sums.errors.push_back(decision.output_error);
    if (decision.estimated_error > 0 && std::isfinite(decision.estimated_error)) {
      row.above_estimate.add(decision.output_error > decision.estimated_error);
      row.above_two_estimates.add(decision.output_error > 2 * decision.estimated_error);
    }
    sums.denominator_errors.push_back(decision.denominator_error);
    sums.certificates.push_back(decision.certificate);
    ++sums.decisions;
    sums.fetching += decision.planned > 0;
    sums.planned += decision.planned;
    if (!decision.is_trial(method)) continue;
    ++sums.trials;
    const bool failed = decision.failed(method);
    row.steps.add(failed);
    (decision.planned > 0 ? row.steps_fetched : row.steps_unfetched).add(failed);
    if (failed) sums.failed_step[first_step + k / query_heads] = true;
  }
  sums.trace.fetched += trace.fetched;
  sums.trace.moved += trace.moved;
  sums.trace.resident += trace.resident;
  sums.trace.cached += trace.cached;
  sums.trace.head_steps += trace.head_steps;
}

void fill_shares(Sums& sums, Row& row) {
  row.output_error_median = quantile(sums.errors, 0.5);
  row.output_error_p95 = quantile(sums.errors, 0.95);
  row.output_error_worst = quantile(sums.errors, 1);
  double square = 0;
  for (const double error : sums.denominator_errors) square += error * error;
  row.denominator_error_rms =
      std::sqrt(square / static_cast<double>(sums.denominator_errors.size()));
  row.denominator_error_median = quantile(sums.denominator_errors, 0.5);
  row.denominator_error_p95 = quantile(sums.denominator_errors, 0.95);
  row.certificate_median = quantile(sums.certificates, 0.5);
  row.certificate_p95 = quantile(sums.certificates, 0.95);
  row.uncertified = 1 - share(sums.trials, sums.decisions);
  row.fetching_share = share(sums.fetching, sums.decisions);
  row.fetched_per_fetching = sums.fetching > 0 ? share(sums.planned, sums.fetching) : kNone;
  row.resident_fraction = share(sums.trace.resident, sums.trace.cached);
  row.fetched_fraction = share(sums.trace.fetched, sums.trace.cached);
  row.moved_fraction = share(sums.trace.moved, sums.trace.cached);
  row.moved_tokens = share(sums.trace.moved, sums.trace.head_steps);
  row.read_fraction = row.resident_fraction + row.moved_fraction;
}

void fill_memory(const MemoryReport& memory, Row& row) {
  row.resident_bytes = static_cast<double>(memory.resident_bytes);
  row.sketch_bytes = static_cast<double>(memory.sketch_bytes);
  row.metadata_bytes = static_cast<double>(memory.metadata_bytes);
  row.host_bytes = static_cast<double>(memory.host_bytes);
  row.workspace_bytes = static_cast<double>(memory.workspace_bytes);
}

// One row over the given layers (one, or all).
Row summarise(const Method& method, const std::vector<const RecordedLayer*>& layers,
              const std::vector<const LayerResult*>& results,
              const std::optional<MemoryReport>& memory, std::int64_t steps, DType storage) {
  Row row;
  row.method = &method;
  double key_bytes = 0;
  double moved_bytes = 0;
  row.cache_bytes = row.step_ns = 0;
  const std::size_t seeds = results.front()->traces.size();
  Sums sums;
  sums.failed_step.assign(seeds * static_cast<std::size_t>(steps), false);
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const RecordedLayer& layer = *layers[i];
    const LayerResult& result = *results[i];
    for (std::size_t seed = 0; seed < seeds; ++seed) {
      add_trace(method, result.traces[seed], static_cast<std::size_t>(layer.query_heads),
                seed * static_cast<std::size_t>(steps), sums, row);
      moved_bytes += static_cast<double>(result.traces[seed].moved_bytes) /
                     static_cast<double>(steps * static_cast<std::int64_t>(seeds));
    }
    for (const Rate& query : result.redraws) {
      row.redraws.add(query);
      if (query.trials > 0 && !(query.value() <= row.worst_query.value())) row.worst_query = query;
    }
    row.step_ns += median_ns(result);
    const double rows = static_cast<double>((layer.key.tokens + steps) * layer.kv_heads) *
                        static_cast<double>(size_bytes(storage));
    row.cache_bytes += rows * static_cast<double>(layer.key_dim + layer.value_dim);
    key_bytes += rows * static_cast<double>(layer.key_dim);
    row.fetched_bytes = moved_bytes;
  }
  for (std::size_t s = 0; s < sums.failed_step.size(); ++s) row.any_head.add(sums.failed_step[s]);
  fill_shares(sums, row);
  if (memory) fill_memory(*memory, row);
  row.read_with_sketch_fraction =
      row.read_fraction + sketch_share(method, row, key_bytes / row.cache_bytes);
  return row;
}

// All methods over one recording, in tasks of one manager each.
class Measuring {
 public:
  Measuring(const RecordedCache& cache, const Options& options, const std::vector<Method>& methods,
            const Progress& progress)
      : cache_(cache),
        options_(options),
        progress_(progress),
        places_(select_layers(options, cache)),
        baseline_(dense_method(options, methods.front().importance)) {
    for (const std::size_t place : places_) {
      layers_.push_back(&cache.layers()[place]);
      out_.layers.push_back(layers_.back()->index);
    }
    out_.steps = select_steps(options, cache);
    out_.threads = options.threads > 0
                       ? options.threads
                       : std::max<std::int64_t>(1, std::thread::hardware_concurrency());
    out_.storage = storage_type(cache, places_);
    const std::int64_t redraw_count = std::min(kRedrawSteps, out_.steps);
    for (std::int64_t i = 0; i < redraw_count; ++i)
      out_.redraw_steps.push_back((2 * i + 1) * out_.steps / (2 * redraw_count));
    references_ = make_references(cache, places_, out_.steps, out_.threads);

    // A pool of the whole sequence needs all layers in one manager.
    for (std::size_t i = 0; i < places_.size(); ++i) {
      if (options.pool != Pool::sequence || units_.empty()) units_.emplace_back();
      units_.back().places.push_back(i);
    }
    // Dense attention by the same kernels comes first: its time is what the others are set beside.
    first_row_ = methods.front().name == "dense" ? 0 : 1;
    if (first_row_ == 1) runs_.push_back(&baseline_);
    for (const Method& method : methods) runs_.push_back(&method);
    plan_tasks();
  }

  Measurement run() {
    const std::int64_t total = static_cast<std::int64_t>(tasks_.size());
    // Layers that share a manager cannot run in parallel; their heads can.
    manager_threads_ =
        options_.pool == Pool::sequence ? std::max<std::int64_t>(1, out_.threads / total) : 1;
    out_.rows.resize((runs_.size() - first_row_) * row_count());
    run_parallel(total, out_.threads, [this](std::int64_t index) { run_task(index); });
    for (std::size_t i = 0; i < out_.rows.size(); ++i)
      out_.rows[i].dense_ns = dense_ns_[i % row_count()];
    return std::move(out_);
  }

 private:
  struct Task {
    std::size_t run = 0;
    std::size_t unit = 0;
    std::size_t seed = 0;
    bool redraws = false;
  };

  // The rows of a run: its layers, then all.
  std::size_t row_count() const { return layers_.size() + 1; }

  void plan_tasks() {
    results_.resize(runs_.size());
    left_.resize(runs_.size());
    for (std::size_t run = 0; run < runs_.size(); ++run) {
      // What is not random needs no second draw. Where everything is fetched nothing is left to
      // chance either.
      const bool random = runs_[run]->random && runs_[run]->config.fetch.mode != FetchMode::always;
      const std::size_t seeds = random ? static_cast<std::size_t>(options_.seeds) : 1;
      results_[run].layers.resize(places_.size());
      results_[run].memory.resize(units_.size());
      for (LayerResult& result : results_[run].layers) result.traces.resize(seeds);
      for (std::size_t unit = 0; unit < units_.size(); ++unit) {
        for (std::size_t seed = 0; seed < seeds; ++seed) tasks_.push_back({run, unit, seed, false});
        if (random && options_.redraws > 0) tasks_.push_back({run, unit, 0, true});
      }
    }
    for (const Task& task : tasks_) ++left_[task.run];
  }

  void run_task(std::int64_t index) {
    const Task& task = tasks_[static_cast<std::size_t>(index)];
    const Unit& unit = units_[task.unit];
    report(task.run, 0);
    Replay replay(cache_, places_, unit, references_, *runs_[task.run], out_.storage,
                  manager_threads_, task.seed, options_.backend);
    MethodResult& result = results_[task.run];
    if (task.redraws) {
      std::vector<std::vector<Rate>> rates =
          redraw_steps(replay, out_.redraw_steps, options_.redraws);
      for (std::size_t i = 0; i < unit.places.size(); ++i)
        result.layers[unit.places[i]].redraws = std::move(rates[i]);
    } else {
      UnitTrace trace = follow_steps(replay, out_.steps);
      for (std::size_t i = 0; i < unit.places.size(); ++i)
        result.layers[unit.places[i]].traces[task.seed] = std::move(trace.layers[i]);
      if (task.seed == 0) result.memory[task.unit] = trace.memory;
    }
    if (index == 0) out_.description = replay.manager().description();
    // A run's decisions are let go with its last task, so that few runs are held at a time.
    const bool last = [&] {
      const std::lock_guard lock(mutex_);
      return --left_[task.run] == 0;
    }();
    if (last) finish_run(task.run);
    report(task.run, 1);
  }

  void finish_run(std::size_t run) {
    MethodResult& result = results_[run];
    if (run == 0) {
      for (const LayerResult& layer : result.layers) dense_ns_.push_back(median_ns(layer));
      dense_ns_.push_back(std::accumulate(dense_ns_.begin(), dense_ns_.end(), 0.0));
    }
    if (run >= first_row_) summarise_run(run);
    result = {};
  }

  void summarise_run(std::size_t run) {
    const MethodResult& result = results_[run];
    Row* rows = &out_.rows[(run - first_row_) * row_count()];
    std::vector<const LayerResult*> all;
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      all.push_back(&result.layers[i]);
      std::optional<MemoryReport> memory;
      if (units_.size() == layers_.size()) memory = result.memory[i];
      rows[i] = summarise(*runs_[run], {layers_[i]}, {all[i]}, memory, out_.steps, out_.storage);
      rows[i].layer = layers_[i]->index;
      rows[i].any_head = {};
    }
    rows[layers_.size()] =
        summarise(*runs_[run], layers_, all, sum_of(result.memory), out_.steps, out_.storage);
  }

  void report(std::size_t run, std::int64_t finished) {
    const std::lock_guard lock(mutex_);
    done_ += finished;
    begun_ = std::max(begun_, run - std::min(run, first_row_));
    if (progress_) progress_(done_, static_cast<std::int64_t>(tasks_.size()), begun_);
  }

  const RecordedCache& cache_;
  const Options& options_;
  const Progress& progress_;
  const std::vector<std::size_t> places_;
  const Method baseline_;
  std::vector<const RecordedLayer*> layers_;
  std::vector<Reference> references_;
  std::vector<Unit> units_;
  std::vector<const Method*> runs_;
  std::size_t first_row_ = 0;  // the first run that has rows
  std::vector<Task> tasks_;
  std::int64_t manager_threads_ = 1;
  Measurement out_;
  std::vector<MethodResult> results_;  // of each run
  std::vector<std::int64_t> left_;     // tasks of each run
  std::vector<double> dense_ns_;       // of each layer, then of all
  std::mutex mutex_;
  std::int64_t done_ = 0;
  std::size_t begun_ = 0;
};

}  // namespace

Measurement measure(const RecordedCache& cache, const Options& options,
                    const std::vector<Method>& methods, const Progress& progress) {
  check_backend(options, methods);
  return Measuring(cache, options, methods, progress).run();
}

}  // namespace verkv::replay
