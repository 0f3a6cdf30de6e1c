#include "prompt.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>

namespace verkv::llm {

namespace {

constexpr std::int64_t kQueryStride = 8;

std::vector<std::int64_t> late_positions(std::int64_t tokens, std::int64_t count) {
  std::vector<std::int64_t> positions;
  for (std::int64_t p = (tokens - 1) / kQueryStride * kQueryStride;
       p >= 0 && static_cast<std::int64_t>(positions.size()) < count; p -= kQueryStride) {
    positions.push_back(p);
  }
  std::reverse(positions.begin(), positions.end());
  return positions;
}

void append(std::vector<Half>& to, const float* from, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) to.push_back(to_half(from[i]));
}

}  // namespace

PromptReader::PromptReader(const AttentionHook& hook, std::span<const Token> tokens,
                           std::int64_t query_count) {
  const auto count = static_cast<std::int64_t>(tokens.size());
  prompt_.tokens.assign(tokens.begin(), tokens.end());
  prompt_.query_positions = late_positions(count, query_count);
  for (const AttentionLayer& shape : hook.layers()) {
    if (shape.window_tokens > 0) continue;
    places_.emplace(shape.index, prompt_.layers.size());
    PromptLayer& layer = prompt_.layers.emplace_back();
    layer.shape = shape;
    layer.keys.reserve(static_cast<std::size_t>(count * shape.kv_heads * shape.key_dim));
    layer.values.reserve(static_cast<std::size_t>(count * shape.kv_heads * shape.value_dim));
  }
}

bool PromptReader::attention(const LayerCall& call, std::span<float>) {
  if (!has(*call.layer)) return false;
  PromptLayer& layer = prompt_.layers[place(*call.layer)];
  const AttentionLayer& shape = layer.shape;
  append(layer.keys, call.keys, call.tokens * shape.kv_heads * shape.key_dim);
  append(layer.values, call.values, call.tokens * shape.kv_heads * shape.value_dim);
  const std::vector<std::int64_t>& positions = prompt_.query_positions;
  const std::int64_t row = shape.query_heads * shape.key_dim;
  for (std::int64_t t = 0; t < call.tokens; ++t) {
    if (!std::binary_search(positions.begin(), positions.end(), call.position + t)) continue;
    const float* queries = call.queries + t * row;
    layer.queries.insert(layer.queries.end(), queries, queries + row);
  }
  return false;
}

ScoredReader::ScoredReader(const AttentionHook& hook, std::span<const Token> tokens)
    : PromptReader(hook, tokens) {
  for (const PromptLayer& layer : prompt().layers) {
    importance_.emplace_back(static_cast<std::size_t>(layer.shape.kv_heads) * tokens.size());
  }
}

void ScoredReader::probabilities(const AttentionLayer& layer, std::int64_t position,
                                 std::int64_t count, std::int64_t cells, const float* data) {
  std::vector<float>& sums = importance_[place(layer)];
  const std::int64_t group = layer.query_heads / layer.kv_heads;
  for (std::int64_t head = 0; head < layer.query_heads; ++head) {
    float* const sum = sums.data() + head / group * tokens();
    for (std::int64_t t = 0; t < count; ++t) {
      const float* row = data + (head * count + t) * cells;
      const std::int64_t seen = position + t + 1;
      if (head == 0 && t == 0) check_cells(layer, row, seen);
      for (std::int64_t i = 0; i < seen; ++i) sum[i] += row[i];
    }
  }
}

void check_cells(const AttentionLayer& layer, const float* row, std::int64_t seen) {
  double all = 0;
  for (std::int64_t i = 0; i < seen; ++i) all += static_cast<double>(row[i]);
  if (!(std::abs(all - 1) < 1e-2)) {
    throw EngineError(
        fmt::format("layer {}: the probabilities of {} tokens add up to {:.3g} instead of 1; the "
                    "engine does not keep its cells in the order of positions",
                    layer.index, seen, all));
  }
}

void read(Engine& engine, const AttentionHook& hook, std::span<const Token> text,
          AttentionVisitor& visitor, const ReadProgress& progress) {
  constexpr std::size_t slice_tokens = 512;
  for (std::size_t first = 0; first < text.size(); first += slice_tokens) {
    const std::size_t size = std::min(slice_tokens, text.size() - first);
    hook.decode(engine, text.subspan(first, size), visitor, nullptr);
    if (progress) progress(static_cast<std::int64_t>(first + size));
  }
}

}  // namespace verkv::llm
