#include "measure.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <span>
#include <thread>
#include <utility>

#include <verkv/attention.hpp>
#include <verkv/kv_cache_manager.hpp>

#include "../common/backend.hpp"

namespace verkv::replay {

namespace {

// Draws of failure (a) come from far beyond those that are followed through the steps.
constexpr std::uint64_t kFirstRedraw = 1'000'000;
constexpr std::int64_t kRedrawSteps = 4;

// Runs f(index) for 0 <= index < count on up to `threads` threads, in order of index; rethrows the
// first exception.
template <class F>
void run_parallel(std::int64_t count, std::int64_t threads, F&& f) {
  std::atomic<std::int64_t> next{0};
  std::exception_ptr failure;
  std::mutex mutex;
  const auto work = [&] {
    for (;;) {
      const std::int64_t index = next.fetch_add(1);
      if (index >= count) return;
      try {
        f(index);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
        next = count;
        return;
      }
    }
  };
  std::vector<std::thread> workers;
  for (std::int64_t i = 1; i < std::min(threads, count); ++i) workers.emplace_back(work);
  work();
  for (std::thread& worker : workers) worker.join();
  if (failure) std::rethrow_exception(failure);
}

// One token of a view.
TensorView slice(const TensorView& view, std::int64_t token) {
  TensorView one = view;
  one.data = view.row(token, 0);
  one.tokens = 1;
  return one;
}

float element(const TensorView& view, std::int64_t token, std::int64_t head, std::int64_t i) {
  const void* row = view.row(token, head);
  return with_element(
      view.type, [&](auto zero) { return to_float(static_cast<const decltype(zero)*>(row)[i]); });
}

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

// The truth of one layer: dense attention in double over what is stored.
struct Reference {
  std::vector<double> output;  // [step][query head][value_dim]
  std::vector<double> norm;    // [step][query head], of the output
  std::vector<double> lse;

  std::span<const double> row(std::int64_t index, std::int64_t dim) const {
    return std::span(output).subspan(static_cast<std::size_t>(index * dim),
                                     static_cast<std::size_t>(dim));
  }
};

// Prompt and new tokens of one KV head as floats, [token][dim].
std::vector<float> joined(const TensorView& prompt, const TensorView& added, std::int64_t head,
                          std::int64_t steps) {
  std::vector<float> rows;
  rows.reserve(static_cast<std::size_t>((prompt.tokens + steps) * prompt.dim));
  for (std::int64_t t = 0; t < prompt.tokens; ++t) {
    for (std::int64_t i = 0; i < prompt.dim; ++i) rows.push_back(element(prompt, t, head, i));
  }
  for (std::int64_t t = 0; t < steps; ++t) {
    for (std::int64_t i = 0; i < prompt.dim; ++i) rows.push_back(element(added, t, head, i));
  }
  return rows;
}

void make_reference(const RecordedCache& cache, const RecordedLayer& layer, std::int64_t steps,
                    std::int64_t kv_head, Reference& out) {
  const std::vector<float> keys = joined(layer.key, layer.new_key, kv_head, steps);
  const std::vector<float> values = joined(layer.value, layer.new_value, kv_head, steps);
  const std::int64_t group = layer.query_heads / layer.kv_heads;
  std::vector<double> query(static_cast<std::size_t>(layer.key_dim));
  std::vector<double> logits(static_cast<std::size_t>(layer.key.tokens + steps));
  for (std::int64_t step = 0; step < steps; ++step) {
    for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (std::int64_t i = 0; i < layer.key_dim; ++i) {
        query[static_cast<std::size_t>(i)] =
            static_cast<double>(element(layer.query, step, head, i));
      }
      const std::size_t index = static_cast<std::size_t>(step * layer.query_heads + head);
      const std::span<double> output =
          std::span(out.output)
              .subspan(index * static_cast<std::size_t>(layer.value_dim),
                       static_cast<std::size_t>(layer.value_dim));
      out.lse[index] = dense_attention(
          layer.key.tokens + step + 1, std::span<const double>(query), cache.scale(),
          cache.soft_cap().value_or(0),
          [&](std::int64_t t, std::int64_t i) {
            return keys[static_cast<std::size_t>(t * layer.key_dim + i)];
          },
          [&](std::int64_t t, std::int64_t i) {
            return values[static_cast<std::size_t>(t * layer.value_dim + i)];
          },
          std::span<double>(logits), output);
      double square = 0;
      for (const double x : output) square += x * x;
      out.norm[index] = std::sqrt(square);
    }
  }
}

std::vector<Reference> make_references(const RecordedCache& cache,
                                       const std::vector<std::size_t>& places, std::int64_t steps,
                                       std::int64_t threads) {
  std::vector<Reference> references(places.size());
  std::vector<std::pair<std::size_t, std::int64_t>> heads;
  for (std::size_t i = 0; i < places.size(); ++i) {
    const RecordedLayer& layer = cache.layers()[places[i]];
    const std::size_t rows = static_cast<std::size_t>(steps * layer.query_heads);
    references[i].output.resize(rows * static_cast<std::size_t>(layer.value_dim));
    references[i].norm.resize(rows);
    references[i].lse.resize(rows);
    for (std::int64_t head = 0; head < layer.kv_heads; ++head) heads.emplace_back(i, head);
  }
  run_parallel(static_cast<std::int64_t>(heads.size()), threads, [&](std::int64_t index) {
    const auto [i, head] = heads[static_cast<std::size_t>(index)];
    make_reference(cache, cache.layers()[places[i]], steps, head, references[i]);
  });
  return references;
}

// What one query head's step came to.
struct Decision {
  double output_error = 0;
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

// Refuses a backend that is not there, or that does not do what a method asks for.
void check_backend(const Options& options, const std::vector<Method>& methods) {
  for (const Method& method : methods) {
    const std::string refusal = backend_refusal(options.backend, method.config);
    if (!refusal.empty()) throw UsageError("--backend cuda: " + refusal);
  }
}

// A cache of the unit's layers under one method, at some step of the recording.
class Replay {
 public:
  Replay(const RecordedCache& cache, const std::vector<std::size_t>& places, const Unit& unit,
         const std::vector<Reference>& references, const Method& method, DType storage,
         std::int64_t threads, std::uint64_t draw, BackendKind backend)
      : method_(method) {
    CacheConfig config = method.config;
    config.storage = storage;
    config.threads = static_cast<int>(threads);
    std::vector<ImportanceView> importance;
    std::vector<TensorView> prompt_queries;
    for (const std::size_t place : unit.places) {
      const RecordedLayer& layer = cache.layers()[places[place]];
      LayerConfig shape;
      shape.kv_heads = layer.kv_heads;
      shape.query_heads = layer.query_heads;
      shape.key_dim = layer.key_dim;
      shape.value_dim = layer.value_dim;
      shape.scale = cache.scale();
      shape.soft_cap = cache.soft_cap();
      shape.window = cache.window();
      shape.global_layer = layer.index;
      config.layers.push_back(shape);
      importance.push_back(layer.importance.at(method.importance));
      prompt_queries.push_back(layer.prompt_query);
      layers_.push_back(&layer);
      references_.push_back(&references[place]);
    }
    manager_ = make_cache(backend, std::move(config));
    sequence_ = manager_->create_sequence(draw);
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      manager_->append(sequence_, static_cast<std::int64_t>(i), layers_[i]->key, layers_[i]->value);
    }
    manager_->compress(sequence_, importance, prompt_queries);
  }

  std::size_t layers() const { return layers_.size(); }
  std::int64_t tokens(std::size_t i) const {
    return manager_->tokens(sequence_, static_cast<std::int64_t>(i));
  }
  KvCacheManager& manager() { return *manager_; }

  // Adds the new token of a step to every layer.
  void append(std::int64_t step) {
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      manager_->append(sequence_, static_cast<std::int64_t>(i), slice(layers_[i]->new_key, step),
                       slice(layers_[i]->new_value, step));
    }
  }

  void redraw(std::uint64_t draw) { manager_->redraw(sequence_, draw); }

  // Attends in one layer; the decisions are those of its query heads, valid until the next call.
  std::span<const Decision> attend(std::size_t i, std::int64_t step) {
    const RecordedLayer& layer = *layers_[i];
    const std::size_t heads = static_cast<std::size_t>(layer.query_heads);
    const std::size_t dim = static_cast<std::size_t>(layer.value_dim);
    output_.resize(heads * dim);
    lse_.resize(heads);
    query_reports_.resize(heads);
    kv_reports_.resize(static_cast<std::size_t>(layer.kv_heads));
    AttendBatch batch;
    batch.sequences = std::span(&sequence_, 1);
    batch.queries = slice(layer.query, step);
    batch.output = output_;
    batch.lse = lse_;
    batch.query_reports = query_reports_;
    batch.kv_reports = kv_reports_;
    const auto begin = std::chrono::steady_clock::now();
    manager_->attend(static_cast<std::int64_t>(i), batch);
    const auto end = std::chrono::steady_clock::now();
    attend_ns_ = static_cast<double>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(end - begin).count());

    decisions_.resize(heads);
    for (std::size_t head = 0; head < heads; ++head) {
      decisions_[head] =
          judge(*references_[i], step * layer.query_heads + static_cast<std::int64_t>(head),
                std::span(output_).subspan(head * dim, dim), lse_[head], query_reports_[head]);
    }
    return decisions_;
  }

  std::span<const KvHeadReport> kv_reports() const { return kv_reports_; }
  double attend_ns() const { return attend_ns_; }
  const Method& method() const { return method_; }

 private:
  static Decision judge(const Reference& reference, std::int64_t index,
                        std::span<const float> output, float lse, const QueryHeadReport& report) {
    const std::size_t place = static_cast<std::size_t>(index);
    const std::span<const double> truth =
        reference.row(index, static_cast<std::int64_t>(output.size()));
    double square = 0;
    for (std::size_t i = 0; i < truth.size(); ++i) {
      const double difference = static_cast<double>(output[i]) - truth[i];
      square += difference * difference;
    }
    Decision decision;
    const double norm = reference.norm[place];
    decision.output_error = square == 0 ? 0.0 : std::sqrt(square) / norm;
    if (std::isnan(decision.output_error))
      decision.output_error = std::numeric_limits<double>::infinity();
    decision.denominator_error =
        std::fabs(std::expm1(static_cast<double>(lse) - reference.lse[place]));
    // The LSE is a float, and so are the sums behind it.
    decision.rounding = 1e-5 + std::ldexp(std::fabs(reference.lse[place]), -22);
    decision.certificate = report.epsilon;
    decision.certified = report.certified;
    decision.planned = report.planned_tokens;
    return decision;
  }

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
UnitTrace follow_steps(Replay& replay, std::int64_t steps) {
  UnitTrace trace;
  trace.layers.resize(replay.layers());
  for (std::int64_t step = 0; step < steps; ++step) {
    replay.append(step);
    for (std::size_t i = 0; i < replay.layers(); ++i) {
      LayerTrace& layer = trace.layers[i];
      const std::span<const Decision> decisions = replay.attend(i, step);
      layer.decisions.insert(layer.decisions.end(), decisions.begin(), decisions.end());
      layer.step_ns.push_back(replay.attend_ns());
      const std::int64_t tokens = replay.tokens(i);
      for (const KvHeadReport& report : replay.kv_reports()) {
        layer.fetched += report.fetched_tokens;
        layer.moved += report.moved_tokens;
        layer.moved_bytes += report.moved_bytes;
        layer.resident += report.resident_tokens;
        layer.cached += tokens;
        ++layer.head_steps;
      }
    }
  }
  trace.memory = replay.manager().memory();
  return trace;
}

// Failure (a): for each layer, the rates of its queries.
std::vector<std::vector<Rate>> redraw_steps(Replay& replay, const std::vector<std::int64_t>& steps,
                                            std::int64_t redraws) {
  std::vector<std::vector<Rate>> rates(replay.layers());
  std::int64_t appended = 0;
  for (const std::int64_t step : steps) {
    while (appended <= step) replay.append(appended++);
    std::vector<std::vector<Rate>> here(replay.layers());
    for (std::int64_t draw = 0; draw < redraws; ++draw) {
      replay.redraw(kFirstRedraw + static_cast<std::uint64_t>(draw));
      for (std::size_t i = 0; i < replay.layers(); ++i) {
        const std::span<const Decision> decisions = replay.attend(i, step);
        here[i].resize(decisions.size());
        for (std::size_t head = 0; head < decisions.size(); ++head) {
          if (decisions[head].is_trial(replay.method()))
            here[i][head].add(decisions[head].failed(replay.method()));
        }
      }
    }
    for (std::size_t i = 0; i < here.size(); ++i)
      rates[i].insert(rates[i].end(), here[i].begin(), here[i].end());
  }
  return rates;
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
  if (method.config.sketch.kind == SketchKind::exact) return key_share;
  return row.sketch_bytes / row.cache_bytes;
}

// One row over the given layers (one, or all).
Row summarise(const Method& method, const std::vector<const RecordedLayer*>& layers,
              const std::vector<const LayerResult*>& results,
              const std::optional<MemoryReport>& memory, std::int64_t steps, DType storage) {
  Row row;
  row.method = &method;
  std::vector<double> errors;
  std::vector<double> certificates;
  std::int64_t decisions = 0, trials = 0, fetching = 0, planned = 0;
  LayerTrace sum;
  double key_bytes = 0;
  double moved_bytes = 0;
  row.cache_bytes = row.step_ns = 0;
  const std::size_t seeds = results.front()->traces.size();
  std::vector<bool> failed_step(seeds * static_cast<std::size_t>(steps), false);

  for (std::size_t i = 0; i < layers.size(); ++i) {
    const RecordedLayer& layer = *layers[i];
    const LayerResult& result = *results[i];
    for (std::size_t seed = 0; seed < seeds; ++seed) {
      const LayerTrace& trace = result.traces[seed];
      for (std::size_t k = 0; k < trace.decisions.size(); ++k) {
        const Decision& decision = trace.decisions[k];
        errors.push_back(decision.output_error);
        certificates.push_back(decision.certificate);
        ++decisions;
        fetching += decision.planned > 0;
        planned += decision.planned;
        if (!decision.is_trial(method)) continue;
        ++trials;
        const bool failed = decision.failed(method);
        row.steps.add(failed);
        (decision.planned > 0 ? row.steps_fetched : row.steps_unfetched).add(failed);
        if (failed) {
          failed_step[seed * static_cast<std::size_t>(steps) +
                      k / static_cast<std::size_t>(layer.query_heads)] = true;
        }
      }
      sum.fetched += trace.fetched;
      sum.moved += trace.moved;
      sum.resident += trace.resident;
      sum.cached += trace.cached;
      sum.head_steps += trace.head_steps;
      moved_bytes += static_cast<double>(trace.moved_bytes) /
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
  for (std::size_t s = 0; s < failed_step.size(); ++s) row.any_head.add(failed_step[s]);

  row.output_error_median = quantile(errors, 0.5);
  row.output_error_p95 = quantile(errors, 0.95);
  row.output_error_worst = quantile(errors, 1);
  row.certificate_median = quantile(certificates, 0.5);
  row.certificate_p95 = quantile(certificates, 0.95);
  row.uncertified = 1 - share(trials, decisions);
  row.fetching_share = share(fetching, decisions);
  row.fetched_per_fetching = fetching > 0 ? share(planned, fetching) : kNone;
  row.resident_fraction = share(sum.resident, sum.cached);
  row.fetched_fraction = share(sum.fetched, sum.cached);
  row.moved_fraction = share(sum.moved, sum.cached);
  row.moved_tokens = share(sum.moved, sum.head_steps);
  row.read_fraction = row.resident_fraction + row.moved_fraction;

  if (memory) {
    row.resident_bytes = static_cast<double>(memory->resident_bytes);
    row.sketch_bytes = static_cast<double>(memory->sketch_bytes);
    row.metadata_bytes = static_cast<double>(memory->metadata_bytes);
    row.host_bytes = static_cast<double>(memory->host_bytes);
    row.workspace_bytes = static_cast<double>(memory->workspace_bytes);
  }
  row.read_with_sketch_fraction =
      row.read_fraction + sketch_share(method, row, key_bytes / row.cache_bytes);
  return row;
}

}  // namespace

Measurement measure(const RecordedCache& cache, const Options& options,
                    const std::vector<Method>& methods, const Progress& progress) {
  check_backend(options, methods);
  Measurement out;
  const std::vector<std::size_t> places = select_layers(options, cache);
  std::vector<const RecordedLayer*> layers;
  for (const std::size_t place : places) {
    layers.push_back(&cache.layers()[place]);
    out.layers.push_back(layers.back()->index);
  }
  out.steps = select_steps(options, cache);
  out.threads = options.threads > 0
                    ? options.threads
                    : std::max<std::int64_t>(1, std::thread::hardware_concurrency());
  out.storage = storage_type(cache, places);
  const std::int64_t redraw_count = std::min(kRedrawSteps, out.steps);
  for (std::int64_t i = 0; i < redraw_count; ++i)
    out.redraw_steps.push_back((2 * i + 1) * out.steps / (2 * redraw_count));

  const std::vector<Reference> references = make_references(cache, places, out.steps, out.threads);

  // A pool of the whole sequence needs all layers in one manager.
  std::vector<Unit> units;
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (options.pool != Pool::sequence || units.empty()) units.emplace_back();
    units.back().places.push_back(i);
  }

  // Dense attention by the same kernels comes first: its time is what the others are set beside.
  std::vector<const Method*> runs;
  const Method baseline = dense_method(options, methods.front().importance);
  const std::size_t first_row = methods.front().name == "dense" ? 0 : 1;
  if (first_row == 1) runs.push_back(&baseline);
  for (const Method& method : methods) runs.push_back(&method);

  struct Task {
    std::size_t run = 0;
    std::size_t unit = 0;
    std::size_t seed = 0;
    bool redraws = false;
  };
  std::vector<Task> tasks;
  std::vector<MethodResult> results(runs.size());
  std::vector<std::int64_t> left(runs.size());  // tasks of each run
  for (std::size_t run = 0; run < runs.size(); ++run) {
    // What is not random needs no second draw. Where everything is fetched nothing is left to
    // chance either.
    const bool random = runs[run]->random && runs[run]->config.fetch.mode != FetchMode::always;
    const std::size_t seeds = random ? static_cast<std::size_t>(options.seeds) : 1;
    results[run].layers.resize(places.size());
    results[run].memory.resize(units.size());
    for (LayerResult& result : results[run].layers) result.traces.resize(seeds);
    for (std::size_t unit = 0; unit < units.size(); ++unit) {
      for (std::size_t seed = 0; seed < seeds; ++seed) tasks.push_back({run, unit, seed, false});
      if (random && options.redraws > 0) tasks.push_back({run, unit, 0, true});
    }
  }
  for (const Task& task : tasks) ++left[task.run];

  // The rows of a run: its layers, then all.
  const std::size_t row_count = layers.size() + 1;
  out.rows.resize((runs.size() - first_row) * row_count);
  std::vector<double> dense_ns;  // of each layer, then of all
  const auto summarise_run = [&](std::size_t run) {
    const MethodResult& result = results[run];
    Row* rows = &out.rows[(run - first_row) * row_count];
    std::vector<const LayerResult*> all;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      all.push_back(&result.layers[i]);
      std::optional<MemoryReport> memory;
      if (units.size() == layers.size()) memory = result.memory[i];
      rows[i] = summarise(*runs[run], {layers[i]}, {all[i]}, memory, out.steps, out.storage);
      rows[i].layer = layers[i]->index;
      rows[i].any_head = {};
    }
    rows[layers.size()] =
        summarise(*runs[run], layers, all, sum_of(result.memory), out.steps, out.storage);
  };

  std::mutex mutex;
  std::int64_t done = 0;
  std::size_t begun = 0;
  const std::int64_t total = static_cast<std::int64_t>(tasks.size());
  const auto report = [&](std::size_t run, std::int64_t finished) {
    const std::lock_guard lock(mutex);
    done += finished;
    begun = std::max(begun, run - std::min(run, first_row));
    if (progress) progress(done, total, begun);
  };
  // Layers that share a manager cannot run in parallel; their heads can.
  const std::int64_t manager_threads =
      options.pool == Pool::sequence ? std::max<std::int64_t>(1, out.threads / total) : 1;
  run_parallel(total, out.threads, [&](std::int64_t index) {
    const Task& task = tasks[static_cast<std::size_t>(index)];
    const Unit& unit = units[task.unit];
    report(task.run, 0);
    Replay replay(cache, places, unit, references, *runs[task.run], out.storage, manager_threads,
                  task.seed, options.backend);
    MethodResult& result = results[task.run];
    if (task.redraws) {
      std::vector<std::vector<Rate>> rates =
          redraw_steps(replay, out.redraw_steps, options.redraws);
      for (std::size_t i = 0; i < unit.places.size(); ++i)
        result.layers[unit.places[i]].redraws = std::move(rates[i]);
    } else {
      UnitTrace trace = follow_steps(replay, out.steps);
      for (std::size_t i = 0; i < unit.places.size(); ++i) {
        result.layers[unit.places[i]].traces[task.seed] = std::move(trace.layers[i]);
      }
      if (task.seed == 0) result.memory[task.unit] = trace.memory;
    }
    if (index == 0) out.description = replay.manager().description();
    // A run's decisions are let go with its last task, so that few runs are held at a time.
    const bool last = [&] {
      const std::lock_guard lock(mutex);
      return --left[task.run] == 0;
    }();
    if (last) {
      if (task.run == 0) {
        for (const LayerResult& layer : result.layers) dense_ns.push_back(median_ns(layer));
        dense_ns.push_back(std::accumulate(dense_ns.begin(), dense_ns.end(), 0.0));
      }
      if (task.run >= first_row) summarise_run(task.run);
      result = {};
    }
    report(task.run, 1);
  });

  for (std::size_t i = 0; i < out.rows.size(); ++i) out.rows[i].dense_ns = dense_ns[i % row_count];
  return out;
}

}  // namespace verkv::replay
