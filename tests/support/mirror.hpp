// Follows one sequence of a manager, call by call, in the reference.
#ifndef VERKV_TESTS_SUPPORT_MIRROR_HPP
#define VERKV_TESTS_SUPPORT_MIRROR_HPP

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <verkv/sketch.hpp>

#include "catch.hpp"
#include "compression.hpp"
#include "reference/step.hpp"
#include "support/blocks.hpp"
#include "support/test_backend.hpp"

namespace verkv::test {

using reference::Vector;

struct MirrorHead {
  // By position.
  std::vector<std::vector<float>> key;
  std::vector<std::vector<float>> value;
  Vector odds;
  std::vector<bool> resident;
  std::vector<float> mean;
  verkv::SketchBasis basis;
  verkv::OrderDirections directions;
  // Positions of the compressed tokens in their order, prompt or chunk by prompt or chunk.
  std::vector<std::vector<std::uint32_t>> walks;
  Vector window_square;  // of the tokens that are not compressed
  Vector window_steps;
  // What queries gave to the window's tokens since the last append, by position of the query.
  std::map<std::size_t, Vector> given;
};

// Follows one sequence of a manager, call by call.
class Mirror {
 public:
  Mirror(const CacheConfig& config, std::uint64_t draw) : config_(config), draw_(draw) {
    for (const LayerConfig& layer : config.layers) {
      layers_.emplace_back(layer.cached ? size(layer.kv_heads) : 0);
      compressed_before_.push_back(false);
      reserved_.push_back(0);
      first_scored_.push_back(0);
    }
  }

  const MirrorHead& head(std::int64_t layer, std::int64_t h) const {
    return layers_[size(layer)][size(h)];
  }

  void append(std::int64_t layer, const Block& keys, const Block& values) {
    if (keys.tokens == 0) return;
    std::vector<MirrorHead>& heads = layers_[size(layer)];
    settle(layer);
    const std::size_t held = heads[0].key.size();
    const std::size_t all = held + size(keys.tokens);
    if (all > reserved_[size(layer)]) compress_outgrown(layer);
    for (std::size_t h = 0; h < heads.size(); ++h) {
      for (std::int64_t t = 0; t < keys.tokens; ++t) {
        heads[h].key.push_back(stored(keys.row(t, static_cast<std::int64_t>(h))));
        heads[h].value.push_back(stored(values.row(t, static_cast<std::int64_t>(h))));
        heads[h].window_square.push_back(0);
        heads[h].window_steps.push_back(0);
      }
    }
    first_scored_[size(layer)] =
        scores(layer) ? std::max(held, all - std::min<std::size_t>(all, 32)) : all;
  }

  void reserve(std::int64_t tokens) {
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
      if (layers_[layer].empty()) continue;
      settle(static_cast<std::int64_t>(layer));
      compress_outgrown(static_cast<std::int64_t>(layer));
      reserved_[layer] = layers_[layer][0].key.size() + size(tokens);
    }
  }

  void truncate(std::int64_t tokens) {
    const std::size_t n = size(tokens);
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
      for (MirrorHead& head : layers_[layer]) {
        if (head.key.size() <= n) continue;
        head.key.resize(n);
        head.value.resize(n);
        if (n < head.odds.size()) {
          head.odds.resize(n);
          head.resident.resize(n);
          for (std::vector<std::uint32_t>& walk : head.walks)
            std::erase_if(walk, [n](std::uint32_t position) { return position >= n; });
          std::erase_if(head.walks, [](const auto& walk) { return walk.empty(); });
          reserved_[layer] = 0;
        }
        head.window_square.resize(n - head.odds.size());
        head.window_steps.resize(n - head.odds.size());
        head.given.erase(head.given.lower_bound(n), head.given.end());
        first_scored_[layer] = std::min(first_scored_[layer], n);
      }
    }
  }

  void compress(const std::vector<Scores>& scores, const std::vector<Block>& prompt_queries = {}) {
    if (config_.keep >= 1) return;
    std::vector<reference::PoolHead> pool;
    std::vector<std::pair<std::int64_t, std::size_t>> owner;
    const auto solve = [&] {
      const std::vector<Vector> odds = pool_odds(config_, pool);
      for (std::size_t i = 0; i < owner.size(); ++i) {
        const auto [layer, h] = owner[i];
        if (config_.sketch.kind == SketchKind::calibrated && pool[i].begin == 0)
          calibrate(layer, h, odds[i], pool[i].tau, prompt_queries);
        take(layer, h, odds[i], pool[i].tau);
      }
      pool.clear();
      owner.clear();
    };
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
      if (!config_.layers[layer].cached || config_.layers[layer].dense) continue;
      compressed_before_[layer] = true;
      for (std::size_t h = 0; h < layers_[layer].size(); ++h) {
        const MirrorHead& head = layers_[layer][h];
        const std::size_t open = head.key.size() - head.odds.size();
        const std::size_t local = size(config_.local_tokens);
        if (open <= local) continue;
        reference::PoolHead part{{}, head.odds.size(), head.odds.empty() ? local : 0};
        for (std::size_t i = 0; i < open - local; ++i) {
          part.tau.push_back(
              static_cast<double>(scores[layer].data[h * size(scores[layer].tokens) + i]));
        }
        pool.push_back(part);
        owner.emplace_back(static_cast<std::int64_t>(layer), h);
        if (config_.pool == Pool::head) solve();
      }
      if (config_.pool == Pool::layer) solve();
    }
    if (!pool.empty()) solve();
  }

  void redraw(std::uint64_t draw) {
    draw_ = draw;
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
      for (std::size_t h = 0; h < layers_[layer].size(); ++h) {
        MirrorHead& head = layers_[layer][h];
        head.resident = reference::draw(head.odds, key(static_cast<std::int64_t>(layer), h), 0,
                                        competing(head.walks));
      }
    }
  }

  // Compressed tokens by place: where two are worth the same, the plan takes the first.
  // back: newest tokens that are left out.
  reference::HeadCase head_case(std::int64_t layer, std::int64_t h, std::size_t back = 0) const {
    const MirrorHead& m = head(layer, h);
    reference::HeadCase result;
    result.layer = config_.layers[size(layer)];
    const std::vector<float>& sinks = result.layer.sink_logits;
    const std::int64_t group = result.layer.query_heads / result.layer.kv_heads;
    if (!sinks.empty())
      result.sinks.assign(sinks.begin() + h * group, sinks.begin() + (h + 1) * group);
    result.fetch = config_.fetch;
    result.study = config_.study;
    result.sketch = config_.sketch;
    const auto take = [&](std::size_t position) {
      result.key.push_back(m.key[position]);
      result.value.push_back(m.value[position]);
    };
    for (const std::vector<std::uint32_t>& walk : m.walks) {
      for (const std::uint32_t position : walk) {
        take(position);
        result.odds.push_back(m.odds[position]);
        result.resident.push_back(m.resident[position]);
      }
    }
    for (std::size_t position = m.odds.size(); position < m.key.size() - back; ++position)
      take(position);
    result.mean = m.mean;
    result.basis = &m.basis;
    result.storage = config_.storage;
    return result;
  }

  // Query row `row` of `queries`, of the last token but `back`; adds to the scores of the local window as the manager does. The
  // scores do not depend on the plan, so a caller that only needs them saves the time of planning.
  std::vector<reference::StepAnswer> attend(std::int64_t layer, const Block& queries,
                                            std::int64_t row, bool plan = true,
                                            std::size_t back = 0) {
    const LayerConfig& shape = config_.layers[size(layer)];
    const std::int64_t group = shape.query_heads / shape.kv_heads;
    std::vector<reference::StepAnswer> answers;
    for (std::int64_t h = 0; h < shape.kv_heads; ++h) {
      std::vector<std::vector<float>> own;
      for (std::int64_t g = 0; g < group; ++g) own.push_back(queries.row(row, h * group + g));
      reference::HeadCase head = head_case(layer, h, back);
      if (!plan) head.fetch.mode = FetchMode::never;
      answers.push_back(reference::step(head, own));
      MirrorHead& m = layers_[size(layer)][size(h)];
      const std::size_t own_position = m.key.size() - 1 - back;
      if (own_position < first_scored_[size(layer)]) continue;
      Vector& squares = m.given[own_position];
      squares.assign(m.window_square.size() - back, 0);
      for (std::size_t i = 0; i < squares.size(); ++i) {
        for (const auto& query : answers.back().query)
          squares[i] += query.window_probability[i] * query.window_probability[i];
      }
    }
    return answers;
  }

  // Everything but what is reserved, counted token by token.
  MemoryReport memory() const {
    MemoryReport report;
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      const LayerConfig& layer = config_.layers[l];
      const std::int64_t row = (layer.key_dim + layer.value_dim) *
                               static_cast<std::int64_t>(verkv::size_bytes(config_.storage));
      for (const MirrorHead& head : layers_[l]) {
        const std::int64_t compressed = static_cast<std::int64_t>(head.odds.size());
        const std::int64_t window = static_cast<std::int64_t>(head.key.size()) - compressed;
        const std::int64_t whole_groups = (compressed + 15) / 16 * 16;
        std::int64_t residents = window;
        for (const bool resident : head.resident) residents += resident;
        // A centroid of values and a spread of two bytes for 64 tokens.
        if (config_.study.estimator == Estimator::clusters) {
          const std::int64_t element =
              static_cast<std::int64_t>(verkv::size_bytes(config_.storage));
          report.sketch_bytes += (compressed + 63) / 64 * (layer.value_dim * element + 2);
        }
        report.host_bytes += static_cast<std::int64_t>(head.key.size()) * row;
        report.resident_bytes += residents * row;
        // 4 bytes a resident's place, 2 bytes of odds a compressed token (in whole groups of the
        // sketch), a sum and a count for each token of the window, and a number for each that a
        // query may give it.
        const std::int64_t queries = static_cast<std::int64_t>(head.key.size() - first_scored_[l]);
        const std::int64_t places = backend().window_places ? residents : residents - window;
        report.metadata_bytes += 4 * places + 2 * whole_groups + 8 * window + 4 * queries * window;
        // 4 bytes a token's position and 4 a walk; directions in binary32.
        if (compressed > 0) {
          if (config_.study.estimator == Estimator::clusters && backend().window_places)
            report.basis_bytes += 2 * (compressed % 64);
          for (const auto& walk : head.walks)
            report.basis_bytes += 4 * (static_cast<std::int64_t>(walk.size()) + 1);
          report.basis_bytes += 4 * (std::min<std::int64_t>(8, layer.key_dim) * layer.key_dim +
                                     std::min<std::int64_t>(4, layer.value_dim) * layer.value_dim);
        }
        if (compressed == 0 || config_.sketch.kind == SketchKind::exact) continue;
        // 2 bits of every stored coordinate, 2 more of the fine ones, in whole bytes; a scale; the
        // means in binary32; the query's matrix in binary16, the keys' in binary32 on the host.
        const std::int64_t dim = head.basis.shape.dim;
        const std::int64_t fine = head.basis.shape.fine;
        report.sketch_bytes += whole_groups * ((dim + 3) / 4 + (fine + 3) / 4 + 2) +
                               4 * layer.key_dim + 2 * dim * layer.key_dim;
        report.basis_bytes += 4 * dim * layer.key_dim;
        // Never more than the bits that were asked for.
        CHECK(4 * fine + 2 * (dim - fine) <= config_.sketch.bits * layer.key_dim);
      }
    }
    return report;
  }

 private:
  bool scores(std::int64_t layer) const {
    return compressed_before_[size(layer)] && config_.chunk_tokens;
  }

  void settle(std::int64_t layer) {
    for (MirrorHead& head : layers_[size(layer)]) {
      for (const auto& [position, squares] : head.given) {
        for (std::size_t i = 0; i < squares.size(); ++i) {
          head.window_square[i] += squares[i];
          head.window_steps[i] += 1;
        }
      }
      head.given.clear();
      first_scored_[size(layer)] = head.key.size();
    }
  }

  void compress_outgrown(std::int64_t layer) {
    std::vector<MirrorHead>& heads = layers_[size(layer)];
    if (!compressed_before_[size(layer)] || !config_.chunk_tokens || config_.keep >= 1) return;
    const std::size_t chunk = size(*config_.chunk_tokens);
    double turn = 0;
    if (config_.chunks_in_turn) {
      const LayerConfig& of = config_.layers[size(layer)];
      turn =
          std::fmod(static_cast<double>(of.global_layer.value_or(layer)) * 0.6180339887498949, 1);
    }
    const std::size_t wait = static_cast<std::size_t>(turn * static_cast<double>(chunk));
    while (heads[0].window_square.size() >= size(config_.local_tokens) + wait + chunk) {
      std::vector<reference::PoolHead> pool;
      for (const MirrorHead& head : heads) {
        reference::PoolHead part{{}, head.odds.size(), 0};
        for (std::size_t i = 0; i < chunk; ++i) {
          const double steps = head.window_steps[i];
          part.tau.push_back(steps > 0 ? std::sqrt(head.window_square[i] / steps) : 0.0);
        }
        pool.push_back(part);
      }
      std::vector<Vector> odds;
      if (config_.pool == Pool::head) {
        for (const auto& part : pool) odds.push_back(reference::pool_odds(config_, {part})[0]);
      } else {
        odds = reference::pool_odds(config_, pool);
      }
      for (std::size_t h = 0; h < heads.size(); ++h) {
        // A first compression during decode knows no queries, and its scores do not count.
        const Vector none(odds[h].size(), 0.0);
        if (config_.sketch.kind == SketchKind::calibrated && heads[h].odds.empty())
          calibrate(layer, h, odds[h], none, {});
        take(layer, h, odds[h], none);
      }
    }
  }

  std::vector<float> stored(std::vector<float> row) const {
    for (float& x : row) x = reference::as_stored(x, config_.storage);
    return row;
  }

  verkv::DrawId key(std::int64_t layer, std::size_t h) const {
    const LayerConfig& c = config_.layers[size(layer)];
    return {config_.seed, draw_, static_cast<std::uint32_t>(c.global_layer.value_or(layer)),
            static_cast<std::uint32_t>(c.first_global_kv_head) + static_cast<std::uint32_t>(h)};
  }

  void calibrate(std::int64_t layer, std::size_t h, const Vector& odds, const Vector& tau,
                 const std::vector<Block>& prompt_queries) {
    const LayerConfig& c = config_.layers[size(layer)];
    const std::int64_t group = c.query_heads / c.kv_heads;
    std::vector<float> queries;
    if (!prompt_queries.empty()) {
      const Block& block = prompt_queries[size(layer)];
      for (std::int64_t t = 0; t < block.tokens; ++t) {
        for (std::int64_t g = 0; g < group; ++g) {
          const auto row = block.row(t, static_cast<std::int64_t>(h) * group + g);
          queries.insert(queries.end(), row.begin(), row.end());
        }
      }
    }
    MirrorHead& head = layers_[size(layer)][h];
    head.mean = reference::channel_means(head.key, odds.size(), size(c.key_dim));
    head.basis = verkv::calibrate_sketch(
        config_.sketch.bits, reference::BasisTokens(head.key, head.mean, odds, tau), queries,
        config_.seed, verkv::kOrderKeys, &head.directions.key);
  }

  // Rows of binary32, one after the other.
  static std::vector<float> flat(const std::vector<std::vector<float>>& rows) {
    std::vector<float> all;
    for (const std::vector<float>& row : rows) all.insert(all.end(), row.begin(), row.end());
    return all;
  }
  static verkv::Rows rows_of(const std::vector<float>& all, std::int64_t dim) {
    return {all.data(), DType::f32, dim, static_cast<int>(dim)};
  }

  // The order is the library's, from the rows and scores as the mirror knows them.
  std::vector<std::uint32_t> new_walk(std::int64_t layer, MirrorHead& head, const Vector& odds,
                                      const Vector& tau) const {
    const LayerConfig& c = config_.layers[size(layer)];
    const std::vector<float> keys = flat(head.key);
    const std::vector<float> values = flat(head.value);
    const std::vector<float> importance(tau.begin(), tau.end());
    std::vector<verkv::Positive16> stored_odds;
    for (const double rho : odds)
      stored_odds.push_back(verkv::to_positive16(static_cast<float>(rho)));
    if (head.odds.empty()) {
      if (config_.sketch.kind == SketchKind::exact) {
        head.directions.key = verkv::order_directions(rows_of(keys, c.key_dim), stored_odds,
                                                      importance.data(), verkv::kOrderKeys, 1);
      }
      head.directions.value =
          verkv::order_directions(rows_of(values, c.value_dim), stored_odds, importance.data(),
                                  verkv::kOrderValues, verkv::kOrderValueWeight);
    }
    std::vector<std::uint32_t> walk;
    for (std::size_t i = 0; i < odds.size(); ++i)
      walk.push_back(static_cast<std::uint32_t>(head.odds.size() + i));
    verkv::spread_order(head.directions, rows_of(keys, c.key_dim), rows_of(values, c.value_dim),
                        walk);
    return walk;
  }

  // Those walks of which neighbours compete.
  std::vector<std::vector<std::uint32_t>> competing(
      const std::vector<std::vector<std::uint32_t>>& walks) const {
    if (config_.study.select != Selection::spread) return {};
    return walks;
  }

  void take(std::int64_t layer, std::size_t h, const Vector& odds, const Vector& tau) {
    settle(layer);
    MirrorHead& head = layers_[size(layer)][h];
    const std::vector<std::uint32_t> walk = new_walk(layer, head, odds, tau);
    const std::vector<bool> drawn =
        reference::draw(odds, key(layer, h), head.odds.size(), competing({walk}));
    head.walks.push_back(walk);
    head.odds.insert(head.odds.end(), odds.begin(), odds.end());
    head.resident.insert(head.resident.end(), drawn.begin(), drawn.end());
    const auto gone = static_cast<std::ptrdiff_t>(odds.size());
    head.window_square.erase(head.window_square.begin(), head.window_square.begin() + gone);
    head.window_steps.erase(head.window_steps.begin(), head.window_steps.begin() + gone);
  }

  CacheConfig config_;
  std::uint64_t draw_;
  std::vector<std::vector<MirrorHead>> layers_;
  std::vector<bool> compressed_before_;
  std::vector<std::size_t> reserved_;      // [layer], tokens
  std::vector<std::size_t> first_scored_;  // [layer], position of the first whose query scores
};

}  // namespace verkv::test

#endif  // VERKV_TESTS_SUPPORT_MIRROR_HPP
