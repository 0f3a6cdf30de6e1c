// The blocks that the stores of a sequence would ask for.
#include "cpu/sequence_bytes.hpp"

#include <algorithm>
#include <cmath>
#include <thread>
#include <vector>

#include <verkv/clusters.hpp>

#include "compression.hpp"
#include "cpu/head_store.hpp"
#include "cpu/workspace.hpp"
#include "fetch_rules.hpp"
#include "window_score.hpp"

namespace verkv::cpu {
namespace {

// Odds are stored with 8 bits of mantissa, so that the probabilities of a pool may add up to somewhat
// more than its budget.
constexpr double kStoredOdds = 1 + 1.0 / 256;

// Heads that share a budget.
struct Budget {
  double tokens = 0;
  std::int64_t heads = 0;
  std::int64_t sinks = 0;
  std::int64_t most = 0;  // compressed tokens beside sinks
  std::int64_t row_bytes = 0;

  double mean() const { return std::min(std::max(0.0, tokens), static_cast<double>(most)); }
  std::int64_t worst(Selection select) const {
    std::int64_t drawn = most;
    switch (select) {
      case Selection::poisson:  // every one of them may be drawn
        break;
      case Selection::topk:
        drawn = static_cast<std::int64_t>(mean() + 0.5);
        break;
      case Selection::spread:
        drawn = static_cast<std::int64_t>(std::ceil(mean() * kStoredOdds)) + heads;
        break;
    }
    return sinks + std::min(drawn, most);
  }
};

class SequenceEstimate {
 public:
  SequenceEstimate(const CacheConfig& config, std::int64_t tokens)
      : config_(config), compressor_(config), rules_(fetch_rules(config)), tokens_(tokens) {
    for (std::size_t i = 0; i < config.layers.size(); ++i) {
      const LayerShape shape = layer_shape(config, i);
      if (!shape.config.cached) continue;
      most_kv_heads_ = std::max(most_kv_heads_, shape.config.kv_heads);
      most_query_heads_ = std::max(most_query_heads_, shape.config.query_heads);
      empty_.cover(shape, rules_, {});
      append(shape);
      compress(shape, i);
    }
    draw();
  }

  SequenceBytes result() {
    SequenceBytes result;
    result.appended = appended_;
    result.compressed = compressed_;
    result.mean_resident_bytes = mean_resident_bytes_;
    WorkspaceSizes both = before_;
    both.cover(after_);
    result.appended.workspace_bytes = workspaces(before_);
    result.compressed.workspace_bytes = workspaces(after_);
    // Workspaces are replaced one by one.
    const std::int64_t appending = result.appended.fast_held_bytes() + empty_.bytes();
    const std::int64_t compressing =
        appended_.fast_held_bytes() + beside_ + workspaces(both) + before_.bytes();
    const std::int64_t giving_back =
        compressed_.fast_held_bytes() + workspaces(both) + after_.bytes();
    result.most_fast_bytes = std::max({appending, compressing, giving_back});
    result.most_host_bytes = appended_.host_held_bytes();
    return result;
  }

 private:
  // A block of so many rows in new pages.
  static std::int64_t held(const PagedRows& rows, std::int64_t count) {
    return rows.bytes_to_reserve(0, count);
  }
  static void add(MemoryReport& report, std::int64_t MemoryReport::*purpose,
                  std::int64_t MemoryReport::*reserved, std::int64_t heads, const PagedRows& rows,
                  std::int64_t count) {
    const std::int64_t used = count * rows.row_bytes();
    report.*purpose += heads * used;
    const std::int64_t spare = heads * (held(rows, count) - used);
    report.*reserved += spare;
    report.reserved_bytes += spare;
  }

  void append(const LayerShape& shape) {
    before_.cover(shape, rules_, {0, 0, tokens_});
    if (tokens_ == 0) return;
    add_host(shape, appended_);
    add_window(appended_, shape, tokens_, tokens_);
    appended_.metadata_bytes += score_bytes(shape, tokens_);
  }

  // A sliding window has none.
  static std::int64_t score_bytes(const LayerShape& shape, std::int64_t tokens) {
    return shape.config.window ? 0 : shape.config.kv_heads * tokens * kWindowScoreBytes;
  }

  // The host tier is the same before and after.
  void add_host(const LayerShape& shape, MemoryReport& report) const {
    const std::int64_t heads = shape.config.kv_heads;
    if (shape.config.window) return;
    if (config_.host == HostTier::engine) {
      report.engine_bytes += heads * tokens_ * shape.row_bytes();
      report.basis_bytes += 2 * tokens_ * static_cast<std::int64_t>(sizeof(const std::byte*));
      return;
    }
    if (config_.host == HostTier::file) {
      const std::int64_t bytes = heads * file_rows_added(0, tokens_) * shape.row_bytes();
      report.host_bytes += bytes;
      report.file_bytes += bytes;
      return;
    }
    add(report, &MemoryReport::host_bytes, &MemoryReport::host_reserved_bytes, heads,
        {kPageShift, shape.row_bytes()}, tokens_);
  }

  // Rows of the window, in blocks for `room` rows.
  void add_window(MemoryReport& report, const LayerShape& shape, std::int64_t rows,
                  std::int64_t room) const {
    if (config_.host == HostTier::engine || room == 0) return;
    const std::int64_t heads = shape.config.kv_heads;
    const Window window(shape);
    const std::int64_t used = rows * shape.row_bytes();
    const std::int64_t spare = held(window.key, room) + held(window.value, room) - used;
    report.resident_bytes += heads * used;
    report.fast_reserved_bytes += heads * spare;
    report.reserved_bytes += heads * spare;
  }

  void compress(const LayerShape& shape, std::size_t layer) {
    const std::int64_t count = tokens_ - config_.local_tokens;
    const std::int64_t least = compressor_.least_tokens(layer);
    const std::int64_t heads = shape.config.kv_heads;
    if (tokens_ > 0) add_host(shape, compressed_);
    if (!compressor_.compresses(layer) || config_.keep >= 1 || count <= 0 || shape.config.window ||
        (least > 0 && count - config_.sink_tokens < least)) {
      after_.cover(shape, rules_, {0, 0, tokens_});
      add_window(compressed_, shape, tokens_, tokens_);
      compressed_.metadata_bytes += score_bytes(shape, tokens_);
      mean_resident_bytes_ += resident_window(shape, tokens_);
      return;
    }
    const std::int64_t window = tokens_ - count;
    const MemoryReport before = compressed_;
    add_sketch(shape, count);
    beside_ += compressed_.fast_held_bytes() - before.fast_held_bytes();
    // A block of which less than a page goes stays as it is.
    const bool stays = count < kPageRows && window > 0;
    add_window(compressed_, shape, window, stays ? tokens_ : window);
    if (!stays && config_.host != HostTier::engine) {
      const Window rest(shape);
      beside_ += heads * (held(rest.key, window) + held(rest.value, window));
    }
    compressed_.metadata_bytes += heads * window * kWindowScoreBytes;
    // Room for scores that is more than half empty is given back.
    const std::int64_t room = tokens_ > 2 * window ? window : tokens_;
    compressed_.fast_reserved_bytes += heads * (room - window) * kWindowScoreBytes;
    compressed_.reserved_bytes += heads * (room - window) * kWindowScoreBytes;
    mean_resident_bytes_ += resident_window(shape, window);

    const std::int64_t sinks = std::min(config_.sink_tokens, count);
    add_budget(shape, sinks, count, window);
    const Budget one{own_budget(sinks, count, window), 1, sinks, count - sinks, 0};
    const std::int64_t drawn = config_.pool == Pool::head ? one.worst(config_.study.select) : count;
    after_.cover(shape, rules_, {count, drawn, window});
  }

  double resident_window(const LayerShape& shape, std::int64_t rows) const {
    if (config_.host == HostTier::engine) return 0;
    return static_cast<double>(shape.config.kv_heads * rows * shape.row_bytes());
  }

  double own_budget(std::int64_t sinks, std::int64_t count, std::int64_t window) const {
    const double kept = config_.keep * static_cast<double>(tokens_);
    const double least = config_.study.inclusion_floor * static_cast<double>(count);
    return std::max(kept - static_cast<double>(sinks + window), least);
  }

  void add_budget(const LayerShape& shape, std::int64_t sinks, std::int64_t count,
                  std::int64_t window) {
    const std::int64_t heads = shape.config.kv_heads;
    const auto join = [&](Budget& budget, std::int64_t parts) {
      budget.tokens += static_cast<double>(parts) * own_budget(sinks, count, window);
      budget.heads += parts;
      budget.sinks += parts * sinks;
      budget.most += parts * (count - sinks);
      budget.row_bytes = std::max(budget.row_bytes, shape.row_bytes());
    };
    switch (config_.pool) {
      case Pool::head:
        for (std::int64_t h = 0; h < heads; ++h) join(budgets_.emplace_back(), 1);
        return;
      case Pool::layer:
        join(budgets_.emplace_back(), heads);
        return;
      case Pool::sequence:
        if (budgets_.empty()) budgets_.emplace_back();
        join(budgets_.front(), heads);
        return;
    }
    detail::unreachable();
  }

  // The largest form of the codes: no split of the bits has more.
  void add_sketch(const LayerShape& shape, std::int64_t count) {
    const std::int64_t heads = shape.config.kv_heads;
    const std::int64_t padded = round_up(count, kSketchGroup);
    const std::int64_t clusters = clusters_of(count);
    const Sketched s(shape, shape.sketch);
    const auto add_fast = [&](std::int64_t MemoryReport::*purpose, const PagedRows& rows,
                              std::int64_t size) {
      add(compressed_, purpose, &MemoryReport::fast_reserved_bytes, heads, rows, size);
    };
    add_fast(&MemoryReport::metadata_bytes, s.odds, padded);
    std::int64_t main = count * static_cast<std::int64_t>(sizeof(std::uint32_t)) +
                        static_cast<std::int64_t>(sizeof(std::uint32_t));
    const std::int64_t key = shape.config.key_dim;
    const std::int64_t value = shape.config.value_dim;
    main += static_cast<std::int64_t>(sizeof(float)) *
            (std::min<std::int64_t>(kOrderKeys, key) * key +
             std::min<std::int64_t>(kOrderValues, value) * value);
    if (has_codes(shape.sketch.kind)) {
      // 4 bits of the fine coordinates and 2 of the others are no more than `bits` a coordinate.
      const std::int64_t most = (config_.sketch.bits * key / 2 + 6) / 4;
      const std::int64_t code = std::min<std::int64_t>(shape.sketch.code_bytes(), most);
      add_fast(&MemoryReport::sketch_bytes, {kPlaceShift - 4, kSketchGroup * code, nullptr, 1, 0},
               padded / kSketchGroup);
      add_fast(&MemoryReport::sketch_bytes, s.scale, padded);
      const std::int64_t numbers = shape.sketch.dim * key;
      compressed_.sketch_bytes += heads * (numbers * static_cast<std::int64_t>(sizeof(Half)) +
                                           key * static_cast<std::int64_t>(sizeof(float)));
      main += numbers * static_cast<std::int64_t>(sizeof(float));
    }
    if (shape.clusters) {
      add_fast(&MemoryReport::sketch_bytes, s.centroid, clusters);
      add_fast(&MemoryReport::sketch_bytes, s.spread, clusters);
    }
    compressed_.basis_bytes += heads * main;
  }

  // Rows, places and pages of all that is drawn.
  void draw() {
    for (const Budget& budget : budgets_) {
      const std::int64_t drawn = budget.worst(config_.study.select);
      const std::int64_t place = sizeof(std::uint32_t);
      const std::int64_t spare = budget.heads * ((kPageRows - 1) * (budget.row_bytes + place) +
                                                 3 * PageBlock::kHeaderBytes);
      compressed_.resident_bytes += drawn * budget.row_bytes;
      compressed_.metadata_bytes += drawn * place;
      compressed_.fast_reserved_bytes += spare;
      compressed_.reserved_bytes += spare;
      beside_ += drawn * (budget.row_bytes + place) + spare;
      mean_resident_bytes_ += (static_cast<double>(budget.sinks) + budget.mean()) *
                              static_cast<double>(budget.row_bytes);
    }
  }

  // Of a cache with this sequence alone.
  std::int64_t workspaces(const WorkspaceSizes& sizes) const {
    const std::int64_t threads = config_.threads.value_or(
        static_cast<int>(std::max(1u, std::thread::hardware_concurrency())));
    return std::min(threads, most_kv_heads_) * sizes.bytes() +
           step_rows_bytes(1, most_query_heads_, most_kv_heads_);
  }

  const CacheConfig& config_;
  const Compressor compressor_;
  const FetchRules rules_;
  std::int64_t tokens_;
  std::int64_t most_kv_heads_ = 0;
  std::int64_t most_query_heads_ = 0;
  // Of workspaces, for no tokens, for the prompt, and once it is compressed.
  WorkspaceSizes empty_;
  WorkspaceSizes before_;
  WorkspaceSizes after_;
  MemoryReport appended_;
  MemoryReport compressed_;
  double mean_resident_bytes_ = 0;
  // Blocks of a compression, while those that it replaces are there.
  std::int64_t beside_ = 0;
  std::vector<Budget> budgets_;
};

}  // namespace

SequenceBytes estimated_bytes(const CacheConfig& config, std::int64_t tokens) {
  return SequenceEstimate(config, tokens).result();
}

}  // namespace verkv::cpu
