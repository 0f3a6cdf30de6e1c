#include <verkv/row_attention.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include <verkv/attention.hpp>

#include "cpu/kernels.hpp"
#include "fetch_rules.hpp"
#include "invalid.hpp"
#include "rows.hpp"
#include "settings.hpp"
#include "thread_pool.hpp"
#include "view_checks.hpp"

namespace verkv {
struct RowAttention::Impl {
  // What a row sees is answered in parts of so many tokens, for threads to share. Their number must
  // not depend on the threads, or the bits would. Whole blocks of weighted_rows.
  static constexpr std::int64_t kPartTokens = 1024;
  static_assert(kPartTokens % cpu::kBlockRows == 0);
  static constexpr std::int64_t kMaxHeads = cpu::kMaxHeads;
  static constexpr float kInfinity = std::numeric_limits<float>::infinity();

  // The tokens of a list, and where they are neighbours the first of them instead.
  struct Tokens {
    std::int64_t first = 0;
    const std::uint32_t* index = nullptr;
    std::int64_t count = 0;
  };
  // Memory of one thread, for the query heads that a kernel takes at once.
  struct Scratch {
    std::vector<float> query;   // [head][padded key_dim]
    std::vector<float> weight;  // [head][kPartTokens]
  };
  // One row's tokens of one part.
  struct Part {
    std::int64_t row = 0;
    std::int64_t begin = 0;
    std::int64_t end = 0;
  };

  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
  static std::int64_t padded(std::int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }
  static Rows rows_of(const TensorView& view, std::int64_t head, std::int64_t first_token) {
    return {view.row(first_token, head), view.type, view.token_stride, static_cast<int>(view.dim)};
  }
  static Tokens tokens_of(std::span<const std::uint32_t> list) {
    const std::int64_t count = static_cast<std::int64_t>(list.size());
    if (count > 0 && std::int64_t{list.back()} - std::int64_t{list.front()} == count - 1)
      return {list.front(), nullptr, count};
    return {0, list.data(), count};
  }

  explicit Impl(const CacheConfig& config)
      : layers(config.layers),
        kernels(config.study.vector_code ? cpu::vector_kernels() : cpu::scalar_kernels()),
        pool(config.executor ? ThreadPool(config.threads.value_or(0), config.executor)
                             : ThreadPool(config.threads.value_or(0))),
        no_odds(at(kPartTokens)),
        scratch(at(pool.size())) {
    std::int64_t dim = 0;
    std::int64_t value_dim = 0;
    for (const LayerConfig& layer : layers) {
      // Its numbers are nobody's.
      if (!layer.cached) continue;
      dim = std::max(dim, layer.key_dim);
      value_dim = std::max(value_dim, layer.value_dim);
    }
    joined.resize(at(value_dim));
    for (Scratch& of_thread : scratch) {
      of_thread.query.resize(at(kMaxHeads * padded(dim)));
      of_thread.weight.resize(at(kMaxHeads * kPartTokens));
    }
  }

  const LayerConfig& layer_of(std::int64_t layer) const {
    if (layer < 0 || layer >= static_cast<std::int64_t>(layers.size()) ||
        !layers[at(layer)].cached) {
      invalid(ErrorCode::unknown_layer, {.layer = layer}, "layer {}: not one of {} that are cached",
              layer, layers.size());
    }
    return layers[at(layer)];
  }

  void check(const LayerConfig& layer, const RowAttentionBatch& batch, bool values_too) const;
  void cut(const RowAttentionBatch& batch);
  void load_queries(const LayerConfig& layer, const TensorView& queries, std::int64_t row,
                    std::int64_t first_head, int heads, float* out) const;
  void logits(const LayerConfig& layer, const TensorView& keys, std::int64_t kv_head,
              const Tokens& tokens, int heads, Scratch& mine) const;
  void weights(const Tokens& tokens, int heads, const float* shift, float* weight,
               double* sum) const;
  void answer_part(const LayerConfig& layer, const RowAttentionBatch& batch, std::int64_t part,
                   std::int64_t kv_head, Scratch& mine);
  void answer_parts(const LayerConfig& layer, const RowAttentionBatch& batch);
  void join_parts(const LayerConfig& layer, const RowAttentionBatch& batch,
                  std::span<float> out_lse);
  void add_squares(const LayerConfig& layer, const RowAttentionBatch& batch, std::int64_t kv_head,
                   std::int64_t begin, std::int64_t end, Scratch& mine, float* out) const;

  std::vector<LayerConfig> layers;
  const cpu::Kernels& kernels;
  ThreadPool pool;
  std::vector<Positive16> no_odds;
  std::vector<Scratch> scratch;
  // Of a call: its parts row by row, and of each part and query head the largest logit, the sum of
  // weights below it and the weighted sum of values.
  std::vector<Part> parts;
  std::vector<float> top;
  std::vector<double> sum;
  std::vector<float> weighted;
  std::vector<float> lse;
  std::vector<double> joined;  // [value_dim]
};

void RowAttention::Impl::check(const LayerConfig& layer, const RowAttentionBatch& batch,
                               bool values_too) const {
  const std::int64_t rows = static_cast<std::int64_t>(batch.visible.size());
  check_rows("keys", batch.keys, layer.kv_heads, layer.key_dim);
  if (values_too) {
    check_rows("values", batch.values, layer.kv_heads, layer.value_dim);
    if (batch.keys.tokens != batch.values.tokens)
      invalid("{} tokens of keys but {} of values", batch.keys.tokens, batch.values.tokens);
  }
  if (rows > 0) check_rows("queries", batch.queries, layer.query_heads, layer.key_dim);
  if (batch.queries.tokens != rows)
    invalid("queries of {} rows, visible tokens of {}", batch.queries.tokens, rows);
  const std::size_t heads = at(rows * layer.query_heads);
  if (values_too && batch.output.size() != heads * at(layer.value_dim)) {
    invalid("output of {} numbers for {} rows of {} heads of {}", batch.output.size(), rows,
            layer.query_heads, layer.value_dim);
  }
  if (!batch.lse.empty() && batch.lse.size() != heads) {
    invalid("LSE of {} numbers for {} rows of {} heads", batch.lse.size(), rows, layer.query_heads);
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::span<const std::uint32_t> visible = batch.visible[at(r)];
    if (visible.empty()) continue;
    bool rising = true;
    for (std::size_t i = 1; i < visible.size(); ++i) rising = rising && visible[i - 1] < visible[i];
    if (!rising) {
      invalid(ErrorCode::shape, {.row = r}, "row {}: visible tokens that do not ascend, each once",
              r);
    }
    if (std::int64_t{visible.back()} >= batch.keys.tokens) {
      invalid(ErrorCode::shape, {.row = r, .token = std::int64_t{visible.back()}},
              "row {}: visible token {}; there are {}", r, visible.back(), batch.keys.tokens);
    }
  }
}

void RowAttention::Impl::cut(const RowAttentionBatch& batch) {
  parts.clear();
  for (std::size_t r = 0; r < batch.visible.size(); ++r) {
    const std::int64_t count = static_cast<std::int64_t>(batch.visible[r].size());
    for (std::int64_t begin = 0; begin < count; begin += kPartTokens) {
      parts.push_back({static_cast<std::int64_t>(r), begin, std::min(begin + kPartTokens, count)});
    }
  }
}

// The queries times the attention scale, zero-padded.
void RowAttention::Impl::load_queries(const LayerConfig& layer, const TensorView& queries,
                                      std::int64_t row, std::int64_t first_head, int heads,
                                      float* out) const {
  const std::int64_t stride = padded(layer.key_dim);
  const float scale = logit_scale(layer);
  std::fill_n(out, heads * stride, 0.0f);
  for (int h = 0; h < heads; ++h) {
    const Rows query = rows_of(queries, first_head + h, row);
    for (std::int64_t j = 0; j < layer.key_dim; ++j)
      out[h * stride + j] = scale * load_element(query, 0, j);
  }
}

// Of the loaded queries, into `weight`.
void RowAttention::Impl::logits(const LayerConfig& layer, const TensorView& keys,
                                std::int64_t kv_head, const Tokens& tokens, int heads,
                                Scratch& mine) const {
  kernels.dot_rows(rows_of(keys, kv_head, tokens.first), tokens.index, tokens.count,
                   mine.query.data(), heads, padded(layer.key_dim), mine.weight.data(),
                   kPartTokens);
  const float cap = static_cast<float>(layer.soft_cap.value_or(0));
  if (!(cap > 0)) return;
  for (int h = 0; h < heads; ++h) {
    float* logit = mine.weight.data() + h * kPartTokens;
    for (std::int64_t i = 0; i < tokens.count; ++i) logit[i] = soft_capped(logit[i], cap);
  }
}

void RowAttention::Impl::weights(const Tokens& tokens, int heads, const float* shift, float* weight,
                                 double* out_sum) const {
  std::fill_n(out_sum, heads, 0.0);
  kernels.weights(weight, kPartTokens, no_odds.data(), tokens.count, heads, shift, out_sum);
}

void RowAttention::Impl::answer_part(const LayerConfig& layer, const RowAttentionBatch& batch,
                                     std::int64_t part, std::int64_t kv_head, Scratch& mine) {
  const Part& which = parts[at(part)];
  const std::int64_t group = layer.query_heads / layer.kv_heads;
  const Tokens tokens =
      tokens_of(batch.visible[at(which.row)].subspan(at(which.begin), at(which.end - which.begin)));
  for (std::int64_t first = 0; first < group; first += kMaxHeads) {
    const int heads = static_cast<int>(std::min(kMaxHeads, group - first));
    const std::int64_t query_head = kv_head * group + first;
    const std::int64_t place = part * layer.query_heads + query_head;
    load_queries(layer, batch.queries, which.row, query_head, heads, mine.query.data());
    logits(layer, batch.keys, kv_head, tokens, heads, mine);
    for (int h = 0; h < heads; ++h) {
      const float* logit = mine.weight.data() + h * kPartTokens;
      float largest = -kInfinity;
      for (std::int64_t i = 0; i < tokens.count; ++i) largest = std::max(largest, logit[i]);
      top[at(place + h)] = largest;
    }
    weights(tokens, heads, &top[at(place)], mine.weight.data(), &sum[at(place)]);
    if (batch.output.empty()) continue;
    float* out = weighted.data() + place * layer.value_dim;
    std::fill_n(out, heads * layer.value_dim, 0.0f);
    kernels.weighted_rows(rows_of(batch.values, kv_head, tokens.first), tokens.index, tokens.count,
                          mine.weight.data(), heads, kPartTokens, out, layer.value_dim);
  }
}

void RowAttention::Impl::answer_parts(const LayerConfig& layer, const RowAttentionBatch& batch) {
  cut(batch);
  const std::size_t places = parts.size() * at(layer.query_heads);
  if (top.size() < places) top.resize(places);
  if (sum.size() < places) sum.resize(places);
  const std::size_t numbers = batch.output.empty() ? 0 : places * at(layer.value_dim);
  if (weighted.size() < numbers) weighted.resize(numbers);
  pool.run(static_cast<std::int64_t>(parts.size()) * layer.kv_heads, [&](int worker,
                                                                         std::int64_t task) {
    answer_part(layer, batch, task / layer.kv_heads, task % layer.kv_heads, scratch[at(worker)]);
  });
}

// The parts of a row, in order.
void RowAttention::Impl::join_parts(const LayerConfig& layer, const RowAttentionBatch& batch,
                                    std::span<float> out_lse) {
  const std::int64_t dim = layer.value_dim;
  std::int64_t begin = 0;
  for (std::int64_t r = 0; r < static_cast<std::int64_t>(batch.visible.size()); ++r) {
    std::int64_t end = begin;
    while (end < static_cast<std::int64_t>(parts.size()) && parts[at(end)].row == r) ++end;
    for (std::int64_t h = 0; h < layer.query_heads; ++h) {
      const float sink = layer.sink_logits.empty() ? -kInfinity : layer.sink_logits[at(h)];
      float largest = sink;
      for (std::int64_t p = begin; p < end; ++p)
        largest = std::max(largest, top[at(p * layer.query_heads + h)]);
      double denominator = sink > -kInfinity
                               ? std::exp(static_cast<double>(sink) - static_cast<double>(largest))
                               : 0.0;
      std::fill(joined.begin(), joined.end(), 0.0);
      for (std::int64_t p = begin; p < end; ++p) {
        const std::int64_t place = p * layer.query_heads + h;
        const double factor = std::exp(static_cast<double>(top[at(place)] - largest));
        denominator += factor * sum[at(place)];
        if (batch.output.empty()) continue;
        const float* part = weighted.data() + place * dim;
        for (std::int64_t j = 0; j < dim; ++j)
          joined[at(j)] += factor * static_cast<double>(part[j]);
      }
      const std::int64_t head = r * layer.query_heads + h;
      if (!out_lse.empty()) {
        out_lse[at(head)] =
            begin == end ? sink
                         : static_cast<float>(static_cast<double>(largest) + std::log(denominator));
      }
      if (batch.output.empty()) continue;
      float* out = batch.output.data() + head * dim;
      for (std::int64_t j = 0; j < dim; ++j)
        out[j] = begin == end ? 0.0f : static_cast<float>(joined[at(j)] / denominator);
    }
    begin = end;
  }
}

// Adds to out[i - begin] the squared probabilities of tokens i in [begin, end) of one KV head.
void RowAttention::Impl::add_squares(const LayerConfig& layer, const RowAttentionBatch& batch,
                                     std::int64_t kv_head, std::int64_t begin, std::int64_t end,
                                     Scratch& mine, float* out) const {
  const std::int64_t group = layer.query_heads / layer.kv_heads;
  for (std::size_t r = 0; r < batch.visible.size(); ++r) {
    const std::span<const std::uint32_t> visible = batch.visible[r];
    const auto from = std::lower_bound(visible.begin(), visible.end(), begin);
    const auto to = std::lower_bound(from, visible.end(), end);
    if (from == to) continue;
    const Tokens tokens = tokens_of({from, to});
    for (std::int64_t first = 0; first < group; first += kMaxHeads) {
      const int heads = static_cast<int>(std::min(kMaxHeads, group - first));
      const std::int64_t query_head = kv_head * group + first;
      load_queries(layer, batch.queries, static_cast<std::int64_t>(r), query_head, heads,
                   mine.query.data());
      logits(layer, batch.keys, kv_head, tokens, heads, mine);
      std::array<double, kMaxHeads> unused;
      weights(tokens, heads, &lse[r * at(layer.query_heads) + at(query_head)], mine.weight.data(),
              unused.data());
      for (int h = 0; h < heads; ++h) {
        const float* p = mine.weight.data() + h * kPartTokens;
        for (std::int64_t i = 0; i < tokens.count; ++i)
          out[std::int64_t{from[i]} - begin] += p[i] * p[i];
      }
    }
  }
}

RowAttention::RowAttention(const CacheConfig& config) {
  check_config(config);
  impl_ = std::make_unique<Impl>(config);
}

RowAttention::~RowAttention() = default;

void RowAttention::attend(std::int64_t layer, const RowAttentionBatch& batch) try {
  const LayerConfig& config = impl_->layer_of(layer);
  impl_->check(config, batch, true);
  if (batch.visible.empty()) return;
  impl_->answer_parts(config, batch);
  impl_->join_parts(config, batch, batch.lse);
} catch (Error& error) {
  error.add_place({.layer = layer});
  throw;
}

void RowAttention::importance(std::int64_t layer, const RowAttentionBatch& batch,
                              std::span<float> out) try {
  const LayerConfig& config = impl_->layer_of(layer);
  RowAttentionBatch keys_only = batch;
  keys_only.output = {};
  impl_->check(config, keys_only, false);
  const std::int64_t tokens = batch.keys.tokens;
  // Divided, since the product of what a caller says may not be a number.
  if (std::ssize(out) % config.kv_heads != 0 || std::ssize(out) / config.kv_heads != tokens) {
    invalid("importance of {} numbers for {} KV heads and {} tokens", out.size(), config.kv_heads,
            tokens);
  }
  std::fill(out.begin(), out.end(), 0.0f);
  if (batch.visible.empty()) return;
  Impl& impl = *impl_;
  impl.lse.resize(batch.visible.size() * Impl::at(config.query_heads));
  impl.answer_parts(config, keys_only);
  impl.join_parts(config, keys_only, impl.lse);
  std::copy_n(impl.lse.begin(), batch.lse.size(), batch.lse.begin());
  const std::int64_t pieces = (tokens + Impl::kPartTokens - 1) / Impl::kPartTokens;
  const float rows = static_cast<float>(static_cast<std::int64_t>(batch.visible.size()) *
                                        (config.query_heads / config.kv_heads));
  impl.pool.run(pieces * config.kv_heads, [&](int worker, std::int64_t task) {
    const std::int64_t kv_head = task / pieces;
    const std::int64_t begin = task % pieces * Impl::kPartTokens;
    const std::int64_t end = std::min(begin + Impl::kPartTokens, tokens);
    float* squares = out.data() + kv_head * tokens + begin;
    impl.add_squares(config, keys_only, kv_head, begin, end, impl.scratch[Impl::at(worker)],
                     squares);
    for (std::int64_t i = 0; i < end - begin; ++i) squares[i] = std::sqrt(squares[i] / rows);
  });
} catch (Error& error) {
  error.add_place({.layer = layer});
  throw;
}

}  // namespace verkv
