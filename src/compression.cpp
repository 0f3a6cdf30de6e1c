#include "compression.hpp"

#include <algorithm>
#include <cmath>
#include <exception>
#include <numeric>
#include <optional>
#include <utility>

#include <verkv/clusters.hpp>
#include <verkv/inclusion.hpp>

#include "invalid.hpp"
#include "settings.hpp"
#include "window_score.hpp"

namespace verkv {
namespace {

// Stored rows of a head as calibrate_sketch reads them, centred by their own mean: `most` of the
// first odds.size(), evenly spaced.
class StoredTokens final : public CalibrationTokens {
 public:
  StoredTokens(const Rows& rows, std::span<const Positive16> odds, const float* importance,
               std::int64_t most)
      : rows_(rows), odds_(odds), importance_(importance) {
    key_dim = rows.dim;
    count = std::min(static_cast<std::int64_t>(odds.size()), most);
    std::vector<double> sum(static_cast<std::size_t>(key_dim));
    for (std::int64_t i = 0; i < count; ++i) {
      each_number(row_of(i), [&](std::size_t j, float x) { sum[j] += static_cast<double>(x); });
    }
    for (const double x : sum) mean_.push_back(static_cast<float>(x / static_cast<double>(count)));
  }
  void centred_key(std::int64_t token, std::span<float> out_key) const override {
    each_number(row_of(token), [&](std::size_t j, float x) { out_key[j] = x - mean_[j]; });
  }
  double weight(std::int64_t token) const override {
    const std::int64_t row = row_of(token);
    const bool low = odds_[static_cast<std::size_t>(row)].bits < kPositive16Infinity.bits;
    return low && importance_ != nullptr ? static_cast<double>(importance_[row]) : 0.0;
  }

 private:
  std::int64_t row_of(std::int64_t token) const {
    return token * static_cast<std::int64_t>(odds_.size()) / count;
  }
  template <class F>
  void each_number(std::int64_t row, F&& f) const {
    with_element(rows_.type, [&](auto zero) {
      const auto* x = verkv::row_of<decltype(zero)>(rows_, row);
      for (std::size_t j = 0; j < static_cast<std::size_t>(rows_.dim); ++j) f(j, to_float(x[j]));
    });
  }

  Rows rows_;
  std::span<const Positive16> odds_;
  const float* importance_;
  std::vector<float> mean_;
};

double inclusion_of(Positive16 odds) {
  return probability_from_odds(static_cast<double>(to_float(odds)));
}

void check_importance(const ImportanceView& view, std::size_t layer) {
  for (std::int64_t h = 0; h < view.heads; ++h) {
    const std::span<const float> scores(view.data + h * view.head_stride,
                                        static_cast<std::size_t>(view.tokens));
    const std::optional<std::int64_t> bad = first_invalid_importance(scores);
    if (!bad) continue;
    invalid(ErrorCode::number, {static_cast<std::int64_t>(layer), -1, h, *bad},
            "layer {}, head {}, token {}: importance {}; scores must be finite and not negative",
            layer, h, *bad, scores[static_cast<std::size_t>(*bad)]);
  }
}

// Multiples of the golden section lie evenly in [0, 1), however many there are.
std::int64_t chunk_delay(std::int64_t chunk, std::uint32_t layer) {
  constexpr double kGolden = 0.6180339887498949;
  const double at = static_cast<double>(layer) * kGolden;
  return static_cast<std::int64_t>((at - std::floor(at)) * static_cast<double>(chunk));
}

// The first of the new clusters may have begun before.
void add_clusters(HeadCompression& head, const HeadRows& rows) {
  std::vector<std::uint32_t> position(
      rows.positions.end() - static_cast<std::ptrdiff_t>(rows.open_odds.size()),
      rows.positions.end());
  position.insert(position.end(), head.order.position.begin(), head.order.position.end());
  std::vector<Positive16> odds(rows.open_odds.begin(), rows.open_odds.end());
  odds.insert(odds.end(), head.odds.begin(), head.odds.end());
  if (rows.open_values.empty()) {
    head.clusters = make_clusters(rows.values, position, odds);
  } else {
    head.clusters = make_clusters_of_both(rows, position, odds);
  }
  const std::ptrdiff_t open = static_cast<std::ptrdiff_t>(odds.size() % kClusterTokens);
  head.order.open_odds.assign(odds.end() - open, odds.end());
}

}  // namespace

Compressor::Compressor(const CacheConfig& config) : config_(config) {
  for (std::size_t i = 0; i < config.layers.size(); ++i) {
    const LayerConfig& from = config.layers[i];
    Layer layer;
    layer.compresses = verkv::compresses(from);
    layer.kv_heads = static_cast<std::size_t>(from.kv_heads);
    layer.group = from.cached ? from.query_heads / from.kv_heads : 1;
    layer.key_dim = from.key_dim;
    layer.compress_from = from.compress_from ? from.compress_from : config.compress_from;
    layer.global_layer =
        static_cast<std::uint32_t>(from.global_layer.value_or(static_cast<std::int64_t>(i)));
    layer.first_global_kv_head = static_cast<std::uint32_t>(from.first_global_kv_head);
    if (config.chunks_in_turn)
      layer.chunk_delay = chunk_delay(config.chunk_tokens.value_or(0), layer.global_layer);
    layers_.push_back(layer);
  }
}

DrawId Compressor::draw_id(std::uint64_t sequence, std::size_t layer, std::size_t head) const {
  const Layer& l = layers_[layer];
  return {config_.seed, sequence, l.global_layer,
          l.first_global_kv_head + static_cast<std::uint32_t>(head)};
}

std::vector<HeadCompression> Compressor::prompt(std::uint64_t sequence,
                                                std::span<const LayerLengths> lengths,
                                                std::span<const ImportanceView> importance) const {
  std::vector<HeadCompression> heads;
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    if (!compresses(layer)) continue;
    const auto [tokens, compressed] = lengths[layer];
    if (tokens == compressed) continue;  // its view may be null
    const ImportanceView& view = importance[layer];
    check_importance(view, layer);
    const std::int64_t count = tokens - config_.local_tokens - compressed;
    if (count <= 0 || config_.keep >= 1 || !suffices(layer, compressed, count)) continue;
    for (std::size_t h = 0; h < layers_[layer].kv_heads; ++h) {
      HeadCompression head;
      head.layer = layer;
      head.head = h;
      head.begin = compressed;
      head.tokens = tokens;
      head.importance = view.data + static_cast<std::int64_t>(h) * view.head_stride;
      head.draw = draw_id(sequence, layer, h);
      head.odds.resize(static_cast<std::size_t>(count));
      head.walk_tokens = count;
      head.first_tokens = count;
      heads.push_back(std::move(head));
    }
  }
  solve_pools(heads, config_.pool, true);
  return heads;
}

std::int64_t Compressor::least_tokens(std::size_t layer) const {
  if (layers_[layer].compress_from) return *layers_[layer].compress_from;
  switch (config_.sketch.kind) {
    case SketchKind::exact:
      return 0;
    case SketchKind::calibrated:
      return std::max(config_.chunk_tokens.value_or(1), 2 * layers_[layer].key_dim);
  }
  detail::unreachable();
}

bool Compressor::suffices(std::size_t layer, std::int64_t compressed, std::int64_t count) const {
  const std::int64_t least = least_tokens(layer);
  return compressed > 0 || least == 0 || count - config_.sink_tokens >= least;
}

std::int64_t Compressor::outgrown(std::size_t layer, const LayerLengths& lengths,
                                  std::int64_t added) const {
  if (!config_.chunk_tokens || config_.keep >= 1) return 0;
  const std::int64_t chunk = *config_.chunk_tokens;
  const std::int64_t more = lengths.tokens + added - lengths.compressed - config_.local_tokens -
                            layers_[layer].chunk_delay;
  const std::int64_t whole = std::max<std::int64_t>(0, more) / chunk * chunk;
  return suffices(layer, lengths.compressed, whole) ? whole : 0;
}

std::vector<HeadCompression> Compressor::window(std::uint64_t sequence, std::size_t layer,
                                                const LayerLengths& lengths,
                                                std::span<const float> score) const {
  const std::int64_t all = outgrown(layer, lengths);
  std::vector<HeadCompression> whole(layers_[layer].kv_heads);
  for (std::size_t h = 0; h < whole.size(); ++h) {
    whole[h].layer = layer;
    whole[h].head = h;
    whole[h].begin = lengths.compressed;
    whole[h].tokens = lengths.tokens;
    whole[h].draw = draw_id(sequence, layer, h);
  }
  const std::int64_t chunk = config_.chunk_tokens.value_or(0);
  std::int64_t first = chunk;
  while (first < all && !suffices(layer, lengths.compressed, first)) first += chunk;
  for (HeadCompression& head : whole) {
    head.walk_tokens = chunk;
    head.first_tokens = first;
  }
  for (std::int64_t at = 0; at < all; at += chunk) {
    std::vector<HeadCompression> part = whole;
    for (std::size_t h = 0; h < part.size(); ++h) {
      part[h].begin = lengths.compressed + at;
      part[h].importance = score.data() + static_cast<std::int64_t>(h) * all + at;
      part[h].odds.assign(static_cast<std::size_t>(chunk), Positive16{});
    }
    solve_pools(part, config_.pool == Pool::head ? Pool::head : Pool::layer, false);
    for (std::size_t h = 0; h < part.size(); ++h)
      whole[h].odds.insert(whole[h].odds.end(), part[h].odds.begin(), part[h].odds.end());
  }
  return whole;
}

void Compressor::solve_pools(std::span<HeadCompression> heads, Pool pool, bool pays_window) const {
  const auto together = [pool](const HeadCompression& a, const HeadCompression& b) {
    switch (pool) {
      case Pool::head:
        return false;
      case Pool::layer:
        return a.layer == b.layer;
      case Pool::sequence:
        return true;
    }
    detail::unreachable();
  };
  for (std::size_t begin = 0; begin < heads.size();) {
    std::size_t end = begin + 1;
    while (end < heads.size() && together(heads[begin], heads[end])) ++end;
    solve_pool(heads.subspan(begin, end - begin), pays_window);
    begin = end;
  }
}

// Eq. 3 or top-k over one pool. Sinks belong to H: they are out of the pool, paid from its budget.
// pays_window: the budget of positions from 0 on includes the local window, which is paid once, at
// the first compression.
void Compressor::solve_pool(std::span<HeadCompression> heads, bool pays_window) const {
  const auto sinks_of = [this](const HeadCompression& head) {
    return std::clamp<std::int64_t>(config_.sink_tokens - head.begin, 0, head.end() - head.begin);
  };
  double budget = 0;
  std::vector<float> tau;
  for (const HeadCompression& head : heads) {
    const std::int64_t sinks = sinks_of(head);
    const std::int64_t count = head.end() - head.begin;
    const std::int64_t window = pays_window && head.begin == 0 ? head.tokens - count : 0;
    budget +=
        config_.keep * static_cast<double>(count + window) - static_cast<double>(sinks + window);
    tau.insert(tau.end(), head.importance + sinks, head.importance + count);
  }
  budget = std::max(0.0, budget);

  std::size_t next = 0;
  const auto assign = [&](auto&& odds_of) {
    for (HeadCompression& head : heads) {
      const std::size_t sinks = static_cast<std::size_t>(sinks_of(head));
      std::fill_n(head.odds.begin(), sinks, kPositive16Infinity);
      for (std::size_t i = sinks; i < head.odds.size(); ++i) head.odds[i] = odds_of(next++);
    }
  };
  switch (config_.study.select) {
    case Selection::topk: {
      std::vector<std::uint32_t> index(tau.size());
      std::vector<std::uint8_t> kept(tau.size());
      select_top_k(std::span<const float>(tau), static_cast<std::size_t>(budget + 0.5), index,
                   kept);
      assign([&](std::size_t i) { return kept[i] != 0 ? kPositive16Infinity : Positive16{}; });
      return;
    }
    case Selection::poisson:
    case Selection::spread: {
      std::vector<float> scratch(tau.size());
      const FlooredInclusion inclusion = solve_inclusion(
          std::span<const float>(tau), budget, config_.study.inclusion_floor, std::span(scratch));
      assign([&](std::size_t i) {
        return stored_odds(inclusion.probability(static_cast<double>(tau[i])));
      });
      return;
    }
  }
  detail::unreachable();
}

bool Compressor::needs_basis(const HeadCompression& head) const {
  return has_codes(config_.sketch.kind) && head.begin == 0;
}

void Compressor::complete_head(HeadCompression& head, const HeadRows& rows,
                               std::span<const TensorView> prompt_queries) const {
  const bool opens = head.begin == 0;
  const std::span<const Positive16> first(head.odds.data(),
                                          static_cast<std::size_t>(head.first_tokens));
  if (needs_basis(head)) {
    std::vector<float> queries;
    if (!prompt_queries.empty()) {
      const std::int64_t group = layers_[head.layer].group;
      queries = gather_queries(prompt_queries[head.layer], head.layer,
                               static_cast<std::int64_t>(head.head) * group, group);
    }
    head.basis = make_basis(config_.sketch.bits, rows.keys, first, head.importance, queries,
                            config_.seed, &head.order.directions.key);
  } else if (opens) {
    head.order.directions.key = order_directions(rows.keys, first, head.importance, kOrderKeys, 1);
  }
  if (opens) {
    head.order.directions.value =
        order_directions(rows.values, first, head.importance, kOrderValues, kOrderValueWeight);
  } else {
    head.order.directions = *rows.directions;
  }
  add_places(head.order, rows.keys, rows.values, head.begin,
             static_cast<std::int64_t>(head.odds.size()), head.walk_tokens);
  head.odds = odds_by_place(head.odds, head.begin, head.order);
  head.drawn = draw_places(head.draw, config_.study.select, head.odds, head.begin, head.order);
  switch (config_.study.estimator) {
    case Estimator::plain:
      break;
    case Estimator::clusters:
      add_clusters(head, rows);
      break;
  }
}

void Compressor::complete(std::span<HeadCompression> heads,
                          const std::function<HeadRows(const HeadCompression&)>& rows,
                          std::span<const TensorView> prompt_queries,
                          const std::function<void(std::int64_t, const Task&)>& run) const {
  std::vector<std::exception_ptr> failed(heads.size());
  const Task task = [&](std::int64_t index) {
    const std::size_t i = static_cast<std::size_t>(index);
    try {
      complete_head(heads[i], rows(heads[i]), prompt_queries);
    } catch (...) {
      failed[i] = std::current_exception();
    }
  };
  run(static_cast<std::int64_t>(heads.size()), task);
  for (const std::exception_ptr& failure : failed) {
    if (failure) std::rethrow_exception(failure);
  }
}

std::int64_t added_fast_bytes(const CacheConfig& config, const HeadCompression& head,
                              const SketchShape& codes) {
  const LayerConfig& layer = config.layers[head.layer];
  const std::int64_t element = static_cast<std::int64_t>(size_bytes(config.storage));
  const std::int64_t row = row_elements(layer) * element;
  // The engine's rows are read where they are.
  const std::int64_t window_row = config.host == HostTier::engine ? 0 : row;
  const auto in_groups = [](std::int64_t count) {
    return (count + kSketchGroup - 1) / kSketchGroup * kSketchGroup;
  };
  const std::int64_t metadata = static_cast<std::int64_t>(sizeof(Positive16));
  const std::int64_t padded = in_groups(head.end()) - in_groups(head.begin);
  const std::int64_t drawn = static_cast<std::int64_t>(head.drawn.size());
  std::int64_t added = drawn * (row + static_cast<std::int64_t>(sizeof(std::uint32_t))) +
                       padded * metadata -
                       (head.end() - head.begin) * (window_row + kWindowScoreBytes);
  if (has_codes(codes.kind)) {
    added += padded * metadata + code_storage_bytes(codes, head.end()) -
             code_storage_bytes(codes, head.begin);
    if (head.begin == 0) {
      const std::int64_t column = codes.dim * static_cast<std::int64_t>(sizeof(Half));
      added += layer.key_dim * (column + static_cast<std::int64_t>(sizeof(float)));
    }
  }
  if (config.study.estimator == Estimator::clusters) {
    added += (clusters_of(head.end()) - clusters_of(head.begin)) *
             (layer.value_dim * element + metadata);
  }
  return added;
}

SketchBasis make_basis(int bits, const Rows& keys, std::span<const Positive16> odds,
                       const float* importance, std::span<const float> queries, std::uint64_t seed,
                       std::vector<float>* out_leading) {
  const StoredTokens tokens(keys, odds, importance, static_cast<std::int64_t>(odds.size()));
  return calibrate_sketch(bits, tokens, queries, seed, kOrderKeys, out_leading);
}

std::vector<float> order_directions(const Rows& rows, std::span<const Positive16> odds,
                                    const float* importance, int count, double size) {
  return leading_directions(StoredTokens(rows, odds, importance, kOrderTokens), count, size);
}

void add_places(HeadOrder& order, const Rows& keys, const Rows& values, std::int64_t begin,
                std::int64_t count, std::int64_t walk_tokens) {
  for (std::int64_t walk = 0; walk < count; walk += walk_tokens) {
    const std::size_t first = order.position.size();
    for (std::int64_t i = walk; i < std::min(count, walk + walk_tokens); ++i)
      order.position.push_back(static_cast<std::uint32_t>(begin + i));
    spread_order(order.directions, keys, values, std::span(order.position).subspan(first));
    order.walk_end.push_back(static_cast<std::uint32_t>(order.position.size()));
  }
}

std::vector<Positive16> odds_by_place(std::span<const Positive16> odds, std::int64_t begin,
                                      const HeadOrder& order) {
  std::vector<Positive16> result;
  result.reserve(odds.size());
  for (const std::uint32_t position : order.position)
    result.push_back(odds[position - static_cast<std::size_t>(begin)]);
  return result;
}

std::vector<std::uint32_t> draw_places(const DrawId& id, Selection select,
                                       std::span<const Positive16> odds, std::int64_t begin,
                                       const HeadOrder& order) {
  const std::span<const std::uint32_t> position(order.position);
  std::vector<double> r;
  for (const Positive16 x : odds) r.push_back(inclusion_of(x));
  std::vector<std::uint8_t> kept(odds.size());
  switch (select) {
    case Selection::spread: {
      std::size_t first = 0;
      for (const std::uint32_t end : order.walk_end) {
        const std::size_t count = end - first;
        pivotal_draw(id, position.subspan(first, count),
                     std::span<const double>(r).subspan(first, count),
                     std::span(kept).subspan(first, count));
        first = end;
      }
      break;
    }
    case Selection::poisson:
    case Selection::topk:  // r is 0 or 1
      for (std::size_t i = 0; i < kept.size(); ++i) kept[i] = drawn(id, position[i], r[i]);
      break;
  }
  std::vector<std::uint32_t> result;
  for (std::size_t i = 0; i < kept.size(); ++i) {
    if (kept[i] != 0)
      result.push_back(static_cast<std::uint32_t>(static_cast<std::uint64_t>(begin) + i));
  }
  return result;
}

std::vector<float> gather_queries(const TensorView& view, std::size_t layer,
                                  std::int64_t first_head, std::int64_t group) {
  std::vector<float> result;
  result.reserve(static_cast<std::size_t>(view.tokens * group * view.dim));
  for (std::int64_t t = 0; t < view.tokens; ++t) {
    for (std::int64_t head = first_head; head < first_head + group; ++head) {
      const Rows row{view.row(t, head), view.type, 0, static_cast<int>(view.dim)};
      for (std::int64_t j = 0; j < view.dim; ++j) {
        const float x = load_element(row, 0, j);
        if (!std::isfinite(x)) {
          invalid(ErrorCode::number, {static_cast<std::int64_t>(layer), -1, head, t},
                  "prompt query of layer {}, position {}, head {}, coordinate {} is {}; it must be "
                  "finite",
                  layer, t, head, j, x);
        }
        result.push_back(x);
      }
    }
  }
  return result;
}

}  // namespace verkv
