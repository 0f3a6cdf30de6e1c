// Both tiers in main memory. This backend is the specification: what the device backend computes is
// compared with it.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include <verkv/kv_cache_manager.hpp>
#include <verkv/sample.hpp>

#include "backend.hpp"
#include "cpu/calibration.hpp"
#include "cpu/head_store.hpp"
#include "cpu/kernels.hpp"
#include "cpu/step.hpp"
#include "cpu/workspace.hpp"
#include "fetch_rules.hpp"
#include "inclusion_pool.hpp"
#include "settings.hpp"
#include "thread_pool.hpp"

namespace verkv::cpu {
namespace {

struct Sequence {
  std::uint64_t draw = 0;
  std::vector<std::vector<HeadStore>> layers;  // [layer][KV head]
  std::vector<bool> compressed_before;         // [layer]; only then does decode compress by itself
};

// One head's share of a compression: odds of positions [begin, begin + odds.size()).
struct HeadPlan {
  std::size_t layer = 0;
  std::size_t head = 0;
  std::int64_t begin = 0;
  const float* importance = nullptr;  // of the same positions
  std::vector<Positive16> odds;
};

// Throws InvalidArgument unless every number is finite and fits the storage type.
void check_fits(const char* what, const TensorView& view, DType storage) {
  const float limit = largest_number(storage);
  with_element(view.type, [&](auto zero) {
    for (std::int64_t t = 0; t < view.tokens; ++t) {
      for (std::int64_t h = 0; h < view.heads; ++h) {
        const auto* row = static_cast<const decltype(zero)*>(view.row(t, h));
        for (std::int64_t j = 0; j < view.dim; ++j) {
          const float x = to_float(row[j]);
          if (std::fabs(x) <= limit) continue;  // false for NaN
          throw InvalidArgument(fmt::format(
              "{}: token {}, head {}, coordinate {} is {}; it must be finite and, stored as {}, "
              "not above {} in size",
              what, t, h, j, x, name(storage), limit));
        }
      }
    }
  });
}

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const CacheConfig& config)
      : config_(config),
        kernels_(config.study.vector_code ? vector_kernels() : scalar_kernels()),
        pool_(config.threads.value_or(0)),
        workspaces_(pool_.size(), fetch_rules(config)) {
    for (std::size_t i = 0; i < config.layers.size(); ++i) {
      LayerShape shape;
      shape.config = config.layers[i];
      shape.storage = config.storage;
      if (shape.config.cached) {
        shape.group = static_cast<int>(shape.config.query_heads / shape.config.kv_heads);
        shape.scale = logit_scale(shape.config);
        shape.soft_cap = static_cast<float>(shape.config.soft_cap.value_or(0));
        shape.sketch_bits = config.sketch.bits;
        shape.sketch = largest_sketch_shape(config.sketch.kind, config.sketch.bits,
                                            static_cast<int>(shape.config.key_dim));
      }
      shapes_.push_back(std::move(shape));
    }
  }

  std::string description() const override {
    return fmt::format("cpu ({}, {} thread{})", kernels_.name, pool_.size(),
                       pool_.size() == 1 ? "" : "s");
  }

  void create(SequenceId id, std::uint64_t draw) override {
    auto sequence = std::make_unique<Sequence>();
    sequence->draw = draw;
    sequence->layers.resize(shapes_.size());
    sequence->compressed_before.resize(shapes_.size(), false);
    for (std::size_t i = 0; i < shapes_.size(); ++i) {
      if (!shapes_[i].config.cached) continue;
      sequence->layers[i].resize(static_cast<std::size_t>(shapes_[i].config.kv_heads));
      workspaces_.reserve(shapes_[i], 0, 0);
    }
    sequences_.emplace(id.value, std::move(sequence));
  }

  void release(SequenceId id) noexcept override { sequences_.erase(id.value); }

  std::int64_t tokens(SequenceId id, std::int64_t layer) const override {
    return find(id).layers[static_cast<std::size_t>(layer)].front().tokens();
  }

  std::int64_t compressed_tokens(SequenceId id, std::int64_t layer) const override {
    return find(id).layers[static_cast<std::size_t>(layer)].front().compressed();
  }

  void append(SequenceId id, std::int64_t layer_index, const TensorView& keys,
              const TensorView& values) override {
    const std::size_t layer = static_cast<std::size_t>(layer_index);
    const LayerShape& shape = shapes_[layer];
    Sequence& sequence = find(id);
    check_fits("keys", keys, config_.storage);
    check_fits("values", values, config_.storage);
    std::vector<HeadStore>& heads = sequence.layers[layer];
    std::int64_t residents = 0;
    for (HeadStore& head : heads) {
      head.reserve_append(shape, keys.tokens);
      residents = std::max(residents, head.residents() + keys.tokens);
    }
    workspaces_.reserve(shape, heads.front().compressed(), residents);
    for (std::size_t h = 0; h < heads.size(); ++h) {
      heads[h].append(shape, keys, values, static_cast<std::int64_t>(h));
    }
    if (!sequence.compressed_before[layer]) return;
    try {
      compress_outgrown_window(sequence, layer);
    } catch (const std::bad_alloc&) {
      // The tokens are in and correct; the window only stays larger until a later append finds the
      // memory.
    }
  }

  void compress(SequenceId id, std::span<const ImportanceView> importance,
                std::span<const TensorView> prompt_queries) override {
    if (config_.keep >= 1) return;  // the budget covers every token: all stay resident and exact
    Sequence& sequence = find(id);
    std::vector<HeadPlan> plans;
    for (std::size_t layer = 0; layer < shapes_.size(); ++layer) {
      if (!compressible(layer)) continue;
      for (std::size_t h = 0; h < sequence.layers[layer].size(); ++h) {
        const HeadStore& store = sequence.layers[layer][h];
        const ImportanceView& view = importance[layer];
        if (store.tokens() == store.compressed()) continue;  // its view may be null
        plan_head(sequence, layer, h, store.tokens() - config_.local_tokens,
                  view.data + static_cast<std::int64_t>(h) * view.head_stride, plans);
      }
    }
    solve_pools(sequence, plans, config_.pool, true);
    run_compression(sequence, plans, prompt_queries);
    for (std::size_t layer = 0; layer < shapes_.size(); ++layer) {
      if (compressible(layer)) sequence.compressed_before[layer] = true;
    }
  }

  void redraw(SequenceId id, std::uint64_t draw) override {
    Sequence& sequence = find(id);
    // All heads are drawn before one changes, so that running out of memory half-way leaves the old
    // draw whole.
    std::vector<HeadStore::Residents> drawn;
    for (std::size_t layer = 0; layer < sequence.layers.size(); ++layer) {
      std::int64_t residents = 0;
      for (std::size_t h = 0; h < sequence.layers[layer].size(); ++h) {
        drawn.push_back(sequence.layers[layer][h].redraw(shapes_[layer], draw_id(draw, layer, h)));
        residents = std::max(residents, static_cast<std::int64_t>(drawn.back().position.size()));
      }
      if (sequence.layers[layer].empty()) continue;
      workspaces_.reserve(shapes_[layer], sequence.layers[layer].front().compressed(), residents);
    }
    std::size_t next = 0;
    for (std::vector<HeadStore>& heads : sequence.layers) {
      for (HeadStore& head : heads) head.take(std::move(drawn[next++]));
    }
    sequence.draw = draw;
  }

  void attend(std::int64_t layer_index, const AttendBatch& batch,
              std::span<QueryHeadReport> query_reports,
              std::span<KvHeadReport> kv_reports) override {
    const std::size_t layer = static_cast<std::size_t>(layer_index);
    const LayerShape& shape = shapes_[layer];
    const LayerConfig& c = shape.config;
    const auto task = [&](int worker, std::int64_t index) {
      const std::int64_t row = index / c.kv_heads;
      const std::int64_t head = index % c.kv_heads;
      const std::int64_t first_query = row * c.query_heads + head * shape.group;
      StepArguments step;
      step.query = batch.queries.row(row, head * shape.group);
      step.query_type = batch.queries.type;
      step.query_stride = batch.queries.head_stride;
      step.output = batch.output.data() + first_query * c.value_dim;
      step.lse = batch.lse.empty() ? nullptr : batch.lse.data() + first_query;
      step.query_reports = query_reports.data() + first_query;
      step.kv_report = kv_reports.data() + index;
      const SequenceId id = batch.sequences[static_cast<std::size_t>(row)];
      if (id == kNoSequence) {
        std::fill(step.output, step.output + shape.group * c.value_dim, 0.0f);
        if (step.lse != nullptr) {
          std::fill(step.lse, step.lse + shape.group, -std::numeric_limits<float>::infinity());
        }
        std::fill(step.query_reports, step.query_reports + shape.group, QueryHeadReport{});
        *step.kv_report = {};
        return;
      }
      Sequence& sequence = find(id);
      step.score_window = sequence.compressed_before[layer] && config_.chunk_tokens;
      run_step(kernels_, shape, workspaces_.rules(),
               sequence.layers[layer][static_cast<std::size_t>(head)], workspaces_.of(worker),
               step);
    };
    pool_.run(static_cast<std::int64_t>(batch.sequences.size()) * c.kv_heads, task);
  }

  MemoryReport memory(SequenceId id) const override {
    MemoryReport report;
    const Sequence& sequence = find(id);
    for (std::size_t layer = 0; layer < shapes_.size(); ++layer) {
      for (const HeadStore& head : sequence.layers[layer]) head.add_memory(shapes_[layer], report);
    }
    return report;
  }

  std::int64_t workspace_bytes() const override { return workspaces_.bytes(); }

 private:
  Sequence& find(SequenceId id) { return *sequences_.find(id.value)->second; }
  const Sequence& find(SequenceId id) const { return *sequences_.find(id.value)->second; }

  bool compressible(std::size_t layer) const {
    return shapes_[layer].config.cached && !shapes_[layer].config.dense;
  }

  DrawId draw_id(std::uint64_t draw, std::size_t layer, std::size_t head) const {
    const LayerConfig& c = shapes_[layer].config;
    return {config_.seed, draw,
            static_cast<std::uint32_t>(c.global_layer.value_or(static_cast<std::int64_t>(layer))),
            static_cast<std::uint32_t>(c.first_global_kv_head + static_cast<std::int64_t>(head))};
  }

  // Adds the plan of compressing one head up to position `end`, if there is anything to compress.
  // importance: of the positions from the first one that is not compressed.
  void plan_head(Sequence& sequence, std::size_t layer, std::size_t head, std::int64_t end,
                 const float* importance, std::vector<HeadPlan>& plans) const {
    const HeadStore& store = sequence.layers[layer][head];
    if (end <= store.compressed()) return;
    HeadPlan plan;
    plan.layer = layer;
    plan.head = head;
    plan.begin = store.compressed();
    plan.importance = importance;
    plan.odds.resize(static_cast<std::size_t>(end - plan.begin));
    plans.push_back(std::move(plan));
  }

  // Solves inclusion over the pools.
  void solve_pools(const Sequence& sequence, std::vector<HeadPlan>& plans, Pool pool,
                   bool pays_window) const {
    for (std::size_t begin = 0; begin < plans.size();) {
      std::size_t end = begin + 1;
      while (end < plans.size() && pool != Pool::head &&
             (pool == Pool::sequence || plans[end].layer == plans[begin].layer)) {
        ++end;
      }
      std::vector<PoolHead> heads;
      for (; begin < end; ++begin) {
        HeadPlan& plan = plans[begin];
        heads.push_back({plan.begin, sequence.layers[plan.layer][plan.head].tokens(),
                         plan.importance, plan.odds});
      }
      solve_pool(config_, heads, pays_window);
    }
  }

  // Compresses by solved plans, one a head. May fail only before anything has changed.
  void run_compression(Sequence& sequence, const std::vector<HeadPlan>& plans,
                       std::span<const TensorView> prompt_queries) {
    std::vector<SketchBasis> bases = calibrate(sequence, plans, prompt_queries);
    std::int64_t largest_dim = 0;
    for (std::size_t i = 0; i < plans.size(); ++i) {
      const HeadPlan& plan = plans[i];
      const LayerShape& shape = shapes_[plan.layer];
      HeadStore& store = sequence.layers[plan.layer][plan.head];
      const std::int64_t end = plan.begin + static_cast<std::int64_t>(plan.odds.size());
      const bool has_basis = !bases.empty() && plan.begin == 0;
      store.reserve_compress(shape, has_basis ? bases[i].shape : store.sketch(shape), end);
      workspaces_.reserve(shape, end, store.residents());
      largest_dim = std::max(largest_dim, shape.config.key_dim);
    }
    const std::size_t scratch_size = static_cast<std::size_t>(2 * round_up(largest_dim, kLanes));
    std::vector<float> scratch(static_cast<std::size_t>(pool_.size()) * scratch_size);
    // Nothing fails from here on.
    for (std::size_t i = 0; i < bases.size(); ++i) {
      if (plans[i].begin == 0)
        sequence.layers[plans[i].layer][plans[i].head].take(std::move(bases[i]));
    }
    const auto task = [&](int worker, std::int64_t index) {
      const HeadPlan& plan = plans[static_cast<std::size_t>(index)];
      sequence.layers[plan.layer][plan.head].compress(
          shapes_[plan.layer], kernels_, plan.odds, draw_id(sequence.draw, plan.layer, plan.head),
          std::span(scratch).subspan(static_cast<std::size_t>(worker) * scratch_size,
                                     scratch_size));
    };
    pool_.run(static_cast<std::int64_t>(plans.size()), task);
  }

  // One basis for each head that is compressed for the first time; empty where the sketch has none.
  std::vector<SketchBasis> calibrate(const Sequence& sequence, const std::vector<HeadPlan>& plans,
                                     std::span<const TensorView> prompt_queries) {
    std::vector<SketchBasis> bases;
    if (config_.sketch.kind != SketchKind::calibrated) return bases;
    bases.resize(plans.size());
    std::vector<std::exception_ptr> failed(plans.size());
    const auto task = [&](int, std::int64_t index) {
      const std::size_t i = static_cast<std::size_t>(index);
      const HeadPlan& plan = plans[i];
      if (plan.begin != 0) return;
      try {
        const std::vector<float> queries =
            prompt_queries.empty()
                ? std::vector<float>()
                : gather_queries(prompt_queries[plan.layer], static_cast<std::int64_t>(plan.layer),
                                 static_cast<std::int64_t>(plan.head) * shapes_[plan.layer].group,
                                 shapes_[plan.layer].group);
        bases[i] = sequence.layers[plan.layer][plan.head].calibrate(
            shapes_[plan.layer], plan.odds, plan.importance, queries, config_.seed);
      } catch (...) {
        failed[i] = std::current_exception();
      }
    };
    pool_.run(static_cast<std::int64_t>(plans.size()), task);
    for (const std::exception_ptr& failure : failed) {
      if (failure) std::rethrow_exception(failure);
    }
    return bases;
  }

  // Decode: the oldest chunk of a local window that has outgrown its size, by the attention it
  // received. The layer's heads share a pool unless each has its own; layers are appended one by
  // one, so they cannot share one here.
  void compress_outgrown_window(Sequence& sequence, std::size_t layer) {
    if (!config_.chunk_tokens || config_.keep >= 1) return;
    const std::int64_t chunk = *config_.chunk_tokens;
    std::vector<HeadStore>& heads = sequence.layers[layer];
    const std::int64_t compressed = heads.front().compressed();
    const std::int64_t outgrown = heads.front().tokens() - compressed - config_.local_tokens;
    if (outgrown < chunk) return;
    // Each chunk has its own budget, but the window is rebuilt once: an append may bring many
    // chunks.
    std::vector<HeadPlan> whole(heads.size());
    std::vector<std::vector<float>> score(heads.size());
    for (std::size_t h = 0; h < heads.size(); ++h) {
      whole[h].layer = layer;
      whole[h].head = h;
      whole[h].begin = compressed;
      for (std::int64_t i = 0; i < outgrown; ++i) score[h].push_back(heads[h].window_score(i));
    }
    for (std::int64_t at = 0; at + chunk <= outgrown; at += chunk) {
      std::vector<HeadPlan> plans(heads.size());
      for (std::size_t h = 0; h < heads.size(); ++h) {
        plans[h].layer = layer;
        plans[h].head = h;
        plans[h].begin = compressed + at;
        plans[h].importance = score[h].data() + at;
        plans[h].odds.assign(static_cast<std::size_t>(chunk), Positive16{});
      }
      solve_pools(sequence, plans, config_.pool == Pool::head ? Pool::head : Pool::layer, false);
      for (std::size_t h = 0; h < heads.size(); ++h) {
        whole[h].odds.insert(whole[h].odds.end(), plans[h].odds.begin(), plans[h].odds.end());
      }
    }
    run_compression(sequence, whole, {});
  }

  CacheConfig config_;
  const Kernels& kernels_;
  ThreadPool pool_;
  std::vector<LayerShape> shapes_;
  Workspaces workspaces_;
  std::unordered_map<std::int64_t, std::unique_ptr<Sequence>> sequences_;
};

}  // namespace
}  // namespace verkv::cpu

namespace verkv {

std::unique_ptr<KvCacheManager> make_cpu_cache(CacheConfig config) {
  check_config(config);
  auto backend = std::make_unique<cpu::CpuBackend>(config);
  return std::make_unique<KvCacheManager>(std::move(config), std::move(backend));
}

}  // namespace verkv
