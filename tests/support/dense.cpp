#include "support/dense.hpp"

#include <cmath>
#include <span>

#include <verkv/attention.hpp>

#include "support/comparison.hpp"
#include "support/test_backend.hpp"
#include "tolerance.hpp"

namespace verkv::test {

Filled fill(const CacheConfig& config, const std::vector<Block>& keys,
            const std::vector<Block>& values, const std::vector<Scores>& scores,
            std::uint64_t draw) {
  Filled filled{make_cache(config), {}, keys, values, scores};
  filled.sequence = filled.cache->create_sequence(draw);
  for (std::size_t l = 0; l < keys.size(); ++l) {
    filled.cache->append(filled.sequence, static_cast<std::int64_t>(l), keys[l].view(),
                         values[l].view());
  }
  if (!scores.empty()) compress(*filled.cache, filled.sequence, scores);
  return filled;
}

Dense dense(const CacheConfig& config, std::int64_t layer, const Block& keys, const Block& values,
            const std::vector<float>& query, std::int64_t query_head) {
  const LayerConfig& shape = config.layers[size(layer)];
  const std::int64_t h = query_head / (shape.query_heads / shape.kv_heads);
  const Vector q(query.begin(), query.end());
  Vector logit(size(keys.tokens));
  Dense result;
  result.output.resize(size(shape.value_dim));
  const auto element = [&](const Block& block, std::int64_t i, std::int64_t j) {
    return reference::as_stored(block.at(i, h, j), config.storage);
  };
  result.lse = verkv::dense_attention(
      keys.tokens, std::span<const double>(q), reference::attention_scale(shape),
      shape.soft_cap.value_or(0),
      [&](std::int64_t i, std::int64_t j) { return element(keys, i, j); },
      [&](std::int64_t i, std::int64_t j) { return element(values, i, j); },
      std::span<double>(logit), std::span<double>(result.output));
  if (shape.sink_logits.empty()) return result;
  const double tokens = result.lse;
  result.lse =
      reference::log_sum_exp({tokens, static_cast<double>(shape.sink_logits[size(query_head)])});
  for (double& x : result.output) x *= std::exp(tokens - result.lse);
  return result;
}

WorstError worst_error(const CacheConfig& config, std::int64_t layer, const Filled& filled,
                       const Block& queries, std::int64_t row, const Result& result) {
  const LayerConfig& shape = config.layers[size(layer)];
  WorstError worst;
  for (std::int64_t h = 0; h < shape.query_heads; ++h) {
    const Dense expected = dense(config, layer, filled.keys[size(layer)],
                                 filled.values[size(layer)], queries.row(row, h), h);
    const std::size_t at = size(row * shape.query_heads + h);
    Vector difference;
    for (std::size_t j = 0; j < expected.output.size(); ++j) {
      difference.push_back(static_cast<double>(result.output[at * expected.output.size() + j]) -
                           expected.output[j]);
    }
    const double output = norm(difference) / (norm(expected.output) + tolerance::kStepOutputFloor);
    const double lse = std::fabs(static_cast<double>(result.lse[at]) - expected.lse);
    // A comparison that NaN fails.
    if (!(output <= worst.output)) worst.output = output;
    if (!(lse <= worst.lse)) worst.lse = lse;
  }
  return worst;
}

}  // namespace verkv::test
