#include "cache_decoder.hpp"

#include <algorithm>
#include <utility>

namespace verkv::llm {

namespace {

LayerConfig layer_config(const AttentionLayer& layer) {
  LayerConfig config;
  config.kv_heads = layer.kv_heads;
  config.query_heads = layer.query_heads;
  config.key_dim = layer.key_dim;
  config.value_dim = layer.value_dim;
  config.scale = layer.scale;
  if (layer.soft_cap > 0) config.soft_cap = layer.soft_cap;
  config.global_layer = layer.index;
  return config;
}

}  // namespace

CacheDecoder::CacheDecoder(const Prompt& prompt, const Importance& importance, BackendKind backend,
                           CacheConfig config, std::uint64_t draw) {
  config.layers.clear();
  for (const PromptLayer& layer : prompt.layers) {
    places_.emplace(layer.shape.index, static_cast<std::int64_t>(config.layers.size()));
    config.layers.push_back(layer_config(layer.shape));
  }
  cache_ = make_cache(backend, std::move(config));
  sequence_ = cache_->create_sequence(draw);

  const auto tokens = static_cast<std::int64_t>(prompt.tokens.size());
  const auto positions = static_cast<std::int64_t>(prompt.query_positions.size());
  std::vector<ImportanceView> scores;
  std::vector<TensorView> queries;
  for (std::size_t i = 0; i < prompt.layers.size(); ++i) {
    const PromptLayer& layer = prompt.layers[i];
    const AttentionLayer& shape = layer.shape;
    cache_->append(
        sequence_, static_cast<std::int64_t>(i),
        token_major(layer.keys.data(), DType::f16, tokens, shape.kv_heads, shape.key_dim),
        token_major(layer.values.data(), DType::f16, tokens, shape.kv_heads, shape.value_dim));
    scores.push_back({importance[i].data(), shape.kv_heads, tokens, tokens});
    queries.push_back(
        token_major(layer.queries.data(), DType::f32, positions, shape.query_heads, shape.key_dim));
  }
  cache_->compress(sequence_, scores, queries);
}

bool CacheDecoder::attention(const LayerCall& call, std::span<float> output) {
  const AttentionLayer& shape = *call.layer;
  const auto place = places_.find(shape.index);
  if (place == places_.end()) return false;
  query_reports_.resize(static_cast<std::size_t>(shape.query_heads));
  const std::int64_t query_row = shape.query_heads * shape.key_dim;
  const std::int64_t key_row = shape.kv_heads * shape.key_dim;
  const std::int64_t value_row = shape.kv_heads * shape.value_dim;
  for (std::int64_t t = 0; t < call.tokens; ++t) {
    // A token attends to itself, so it goes in first.
    cache_->append(
        sequence_, place->second,
        token_major(call.keys + t * key_row, DType::f32, 1, shape.kv_heads, shape.key_dim),
        token_major(call.values + t * value_row, DType::f32, 1, shape.kv_heads, shape.value_dim));
    AttendBatch batch;
    batch.sequences = {&sequence_, 1};
    batch.queries =
        token_major(call.queries + t * query_row, DType::f32, 1, shape.query_heads, shape.key_dim);
    const std::int64_t output_row = shape.query_heads * shape.value_dim;
    batch.output = output.subspan(static_cast<std::size_t>(t * output_row),
                                  static_cast<std::size_t>(output_row));
    batch.query_reports = query_reports_;
    cache_->attend(place->second, batch);
    for (const QueryHeadReport& report : query_reports_) certificates_.push_back(report.epsilon);
  }
  if (disturbance_ > 0) {
    for (std::size_t i = 0; i < output.size(); i += disturbance_) output[i] = 0;
  }
  return true;
}

DecodeCost CacheDecoder::cost() const {
  LayerStatistics sum;
  double bytes = 0;
  for (const auto& [layer, place] : places_) {
    const LayerStatistics one = cache_->statistics(place);
    sum.steps = std::max(sum.steps, one.steps);
    sum.decisions += one.decisions;
    sum.certified += one.certified;
    sum.fetching += one.fetching;
    sum.moved_tokens += one.moved_tokens;
    sum.moved_bytes += one.moved_bytes;
    sum.cached_tokens += one.cached_tokens;
    sum.resident_tokens += one.resident_tokens;
    const LayerConfig& shape = cache_->config().layers[static_cast<std::size_t>(place)];
    bytes += static_cast<double>(cache_->tokens(sequence_, place) * shape.kv_heads *
                                 (shape.key_dim + shape.value_dim)) *
             static_cast<double>(size_bytes(cache_->config().storage));
  }
  std::int64_t kv_heads = 0;
  for (const LayerConfig& shape : cache_->config().layers) kv_heads += shape.kv_heads;
  const double steps = static_cast<double>(std::max<std::int64_t>(1, sum.steps));
  const double decisions = static_cast<double>(std::max<std::int64_t>(1, sum.decisions));
  const double held = static_cast<double>(std::max<std::int64_t>(1, sum.cached_tokens));
  DecodeCost cost;
  cost.resident_fraction = static_cast<double>(sum.resident_tokens) / held;
  cost.fetching_share = static_cast<double>(sum.fetching) / decisions;
  cost.certified_share = static_cast<double>(sum.certified) / decisions;
  cost.moved_fraction = static_cast<double>(sum.moved_tokens) / held;
  cost.moved_tokens =
      static_cast<double>(sum.moved_tokens) / (steps * static_cast<double>(kv_heads));
  cost.moved_bytes = static_cast<double>(sum.moved_bytes) / steps;
  cost.read_fraction = cost.resident_fraction + cost.moved_fraction;
  cost.fast_bytes = static_cast<double>(cache_->memory(sequence_).fast_bytes());
  cost.cache_bytes = bytes;
  return cost;
}

}  // namespace verkv::llm
