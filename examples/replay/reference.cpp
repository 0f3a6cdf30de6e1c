#include "reference.hpp"

#include <cmath>
#include <utility>

#include <verkv/attention.hpp>

#include "parallel.hpp"

namespace verkv::replay {

namespace {

float element(const TensorView& view, std::int64_t token, std::int64_t head, std::int64_t i) {
  const void* row = view.row(token, head);
  return with_element(
      view.type, [&](auto zero) { return to_float(static_cast<const decltype(zero)*>(row)[i]); });
}

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

}  // namespace

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

}  // namespace verkv::replay
