#include "run.hpp"

#include <chrono>
#include <limits>
#include <utility>

namespace verkv::replay {

namespace {

// Draws of failure (a) come from far beyond those that are followed through the steps.
constexpr std::uint64_t kFirstRedraw = 1'000'000;

// One token of a view.
TensorView slice(const TensorView& view, std::int64_t token) {
  TensorView one = view;
  one.data = view.row(token, 0);
  one.tokens = 1;
  return one;
}

Decision judge(const Reference& reference, std::int64_t index, std::span<const float> output,
               float lse, const QueryHeadReport& report) {
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
  decision.estimated_error = report.output_error / norm;
  decision.denominator_error =
      std::fabs(std::expm1(static_cast<double>(lse) - reference.lse[place]));
  // The LSE is a float, and so are the sums behind it.
  decision.rounding = 1e-5 + std::ldexp(std::fabs(reference.lse[place]), -22);
  decision.certificate = report.epsilon;
  decision.certified = report.certified;
  decision.planned = report.planned_tokens;
  return decision;
}

}  // namespace

Replay::Replay(const RecordedCache& cache, const std::vector<std::size_t>& places, const Unit& unit,
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

void Replay::append(std::int64_t step) {
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    manager_->append(sequence_, static_cast<std::int64_t>(i), slice(layers_[i]->new_key, step),
                     slice(layers_[i]->new_value, step));
  }
}

std::span<const Decision> Replay::attend(std::size_t i, std::int64_t step) {
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

}  // namespace verkv::replay
