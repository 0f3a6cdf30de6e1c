// KvCacheManager on a backend (support/test_backend.hpp): whole steps against the reference in
// double, exactness where it is promised, bitwise independence of everything that must not matter,
// growth during decode, bad input, memory, statistics, allocations, and the independence of every
// decision from the draw.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <verkv/attention.hpp>
#include <verkv/kv_cache_manager.hpp>
#include <verkv/sketch.hpp>

#include "catch.hpp"
#include "reference/statistics.hpp"
#include "reference/step.hpp"
#include "support/test_backend.hpp"

// ---- A count of all allocations of the program ----

namespace {

std::atomic<std::int64_t> allocations{0};
// How many allocations may still succeed; negative: all.
std::atomic<std::int64_t> allowed{-1};

void* allocate(std::size_t size, std::size_t alignment) {
  ++allocations;
  if (allowed >= 0 && --allowed < 0) {
    allowed = 0;  // stays so until the caller lifts it
    throw std::bad_alloc();
  }
  const std::size_t rounded =
      (std::max<std::size_t>(size, 1) + alignment - 1) / alignment * alignment;
  void* const result = std::aligned_alloc(alignment, rounded);
  if (result == nullptr) throw std::bad_alloc();
  return result;
}

}  // namespace

// Inlined, a deletion looks to the compiler like memory freed by the wrong function.
#if defined(__GNUC__)
#define VERKV_NO_INLINE [[gnu::noinline]]
#else
#define VERKV_NO_INLINE
#endif

void* operator new(std::size_t size) { return allocate(size, alignof(std::max_align_t)); }
void* operator new[](std::size_t size) { return allocate(size, alignof(std::max_align_t)); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return allocate(size, std::max(alignof(std::max_align_t), static_cast<std::size_t>(alignment)));
}
void* operator new[](std::size_t size, std::align_val_t alignment) {
  return allocate(size, std::max(alignof(std::max_align_t), static_cast<std::size_t>(alignment)));
}
// The sorting of the standard library asks this way; a sanitizer would otherwise answer with its
// own.
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  try {
    return operator new(size);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void* operator new[](std::size_t size, const std::nothrow_t& tag) noexcept {
  return operator new(size, tag);
}
VERKV_NO_INLINE void operator delete(void* p) noexcept { std::free(p); }
VERKV_NO_INLINE void operator delete[](void* p) noexcept { std::free(p); }
VERKV_NO_INLINE void operator delete(void* p, std::size_t) noexcept { std::free(p); }
VERKV_NO_INLINE void operator delete[](void* p, std::size_t) noexcept { std::free(p); }
VERKV_NO_INLINE void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
VERKV_NO_INLINE void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
VERKV_NO_INLINE void operator delete(void* p, std::size_t, std::align_val_t) noexcept {
  std::free(p);
}
VERKV_NO_INLINE void operator delete[](void* p, std::size_t, std::align_val_t) noexcept {
  std::free(p);
}

namespace {

using verkv::AttendBatch;
using verkv::CacheConfig;
using verkv::CapacityError;
using verkv::DType;
using verkv::FetchMode;
using verkv::FetchOrder;
using verkv::ImportanceView;
using verkv::InvalidArgument;
using verkv::kNoSequence;
using verkv::KvCacheManager;
using verkv::KvHeadReport;
using verkv::LayerConfig;
using verkv::LayerStatistics;
using verkv::MemoryReport;
using verkv::Pool;
using verkv::QueryHeadReport;
using verkv::Selection;
using verkv::SequenceId;
using verkv::SketchKind;
using verkv::TensorView;
using verkv::reference::kInfinite;
using verkv::reference::Random;
using verkv::reference::Vector;
using verkv::test::backend;
using verkv::test::make_cache;
using verkv::test::reasons_against;
using verkv::test::trials;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
const std::vector<std::optional<double>> kCaps{1, 2, std::nullopt};

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

template <class T>
std::string shown(const std::optional<T>& setting) {
  if (!setting) return "off";
  std::ostringstream text;
  text << *setting;
  return text.str();
}

// ---- Data ----

// A dense [token][head][dim] block.
struct Block {
  std::int64_t tokens = 0;
  std::int64_t heads = 0;
  std::int64_t dim = 0;
  std::vector<float> data;

  TensorView view() const {
    return verkv::token_major(data.data(), DType::f32, tokens, heads, dim);
  }
  float& at(std::int64_t t, std::int64_t h, std::int64_t j) {
    return data[size((t * heads + h) * dim + j)];
  }
  float at(std::int64_t t, std::int64_t h, std::int64_t j) const {
    return data[size((t * heads + h) * dim + j)];
  }
  std::vector<float> row(std::int64_t t, std::int64_t h) const {
    const auto begin = data.begin() + (t * heads + h) * dim;
    return {begin, begin + dim};
  }
  Block part(std::int64_t begin, std::int64_t count) const {
    const auto from = data.begin() + begin * heads * dim;
    return {count, heads, dim, {from, from + count * heads * dim}};
  }
};

Block constant_block(std::int64_t tokens, std::int64_t heads, std::int64_t dim, float value) {
  return {tokens, heads, dim, std::vector<float>(size(tokens * heads * dim), value)};
}

// Normal numbers around a centre of each (head, coordinate), as keys have them.
Block random_block(Random& random, std::int64_t tokens, std::int64_t heads, std::int64_t dim,
                   double spread, double centre = 0) {
  Block block = constant_block(tokens, heads, dim, 0);
  std::vector<double> middle;
  for (std::int64_t i = 0; i < heads * dim; ++i) middle.push_back(centre * random.normal());
  for (std::size_t i = 0; i < block.data.size(); ++i) {
    block.data[i] = static_cast<float>(middle[i % middle.size()] + spread * random.normal());
  }
  return block;
}

// Importance [head][token] of one layer.
struct Scores {
  std::int64_t heads = 0;
  std::int64_t tokens = 0;
  std::vector<float> data;

  ImportanceView view() const { return {data.data(), heads, tokens, tokens}; }
};

enum class ScoreKind { random, zero, equal, with_zeros };

Scores random_scores(Random& random, std::int64_t heads, std::int64_t tokens, ScoreKind kind) {
  Scores scores{heads, tokens, {}};
  for (std::int64_t i = 0; i < heads * tokens; ++i) {
    double x = std::exp(2 * random.normal());
    if (kind == ScoreKind::zero) x = 0;
    if (kind == ScoreKind::equal) x = 0.25;
    if (kind == ScoreKind::with_zeros && random.below(3) == 0) x = 0;
    scores.data.push_back(static_cast<float>(x));
  }
  return scores;
}

void compress(KvCacheManager& cache, SequenceId sequence, const std::vector<Scores>& scores,
              const std::vector<Block>& prompt_queries = {}) {
  std::vector<ImportanceView> views;
  for (const Scores& s : scores) views.push_back(s.view());
  std::vector<TensorView> queries;
  for (const Block& block : prompt_queries) queries.push_back(block.view());
  cache.compress(sequence, views, queries);
}

// ---- One step and its answer ----

struct Result {
  std::vector<float> output;
  std::vector<float> lse;
  std::vector<QueryHeadReport> query;
  std::vector<KvHeadReport> kv;
};

Result attend(KvCacheManager& cache, std::int64_t layer, const std::vector<SequenceId>& sequences,
              const TensorView& queries) {
  const LayerConfig& shape = cache.config().layers[size(layer)];
  const std::size_t rows = sequences.size();
  Result result;
  result.output.assign(rows * size(shape.query_heads * shape.value_dim), kNaN);
  result.lse.assign(rows * size(shape.query_heads), kNaN);
  result.query.resize(rows * size(shape.query_heads));
  result.kv.resize(rows * size(shape.kv_heads));
  AttendBatch batch;
  batch.sequences = sequences;
  batch.queries = queries;
  batch.output = result.output;
  batch.lse = result.lse;
  batch.query_reports = result.query;
  batch.kv_reports = result.kv;
  cache.attend(layer, batch);
  return result;
}

Result attend(KvCacheManager& cache, std::int64_t layer, const std::vector<SequenceId>& sequences,
              const Block& queries) {
  return attend(cache, layer, sequences, queries.view());
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

bool same(const QueryHeadReport& a, const QueryHeadReport& b) {
  return std::memcmp(&a.epsilon, &b.epsilon, sizeof(double)) == 0 && a.certified == b.certified &&
         a.planned_tokens == b.planned_tokens;
}

bool same(const KvHeadReport& a, const KvHeadReport& b) {
  return a.fetched_tokens == b.fetched_tokens && a.moved_tokens == b.moved_tokens &&
         a.moved_bytes == b.moved_bytes && a.resident_tokens == b.resident_tokens &&
         a.limited == b.limited;
}

template <class T>
bool same_all(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(),
                                            [](const T& x, const T& y) { return same(x, y); });
}

// The same bits, or to rounding where the backend promises no more.
bool same_floats(const std::vector<float>& a, const std::vector<float>& b) {
  if (backend().equal_outputs) return same_bits(a, b);
  float largest = 1;
  for (const float x : a) {
    if (std::isfinite(x)) largest = std::max(largest, std::fabs(x));
  }
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [&](float x, float y) {
           return x == y || std::fabs(x - y) <= 2e-5f * largest;
         });
}

bool same(const Result& a, const Result& b) {
  return same_floats(a.output, b.output) && same_floats(a.lse, b.lse) &&
         same_all(a.query, b.query) && same_all(a.kv, b.kv);
}

// Row `row` of a batch of `rows`.
Result row_of(const Result& all, std::size_t row, std::size_t rows) {
  const auto part = [row, rows](const auto& x) {
    const std::size_t each = x.size() / rows;
    const auto begin = x.begin() + static_cast<std::ptrdiff_t>(row * each);
    return std::remove_cvref_t<decltype(x)>(begin, begin + static_cast<std::ptrdiff_t>(each));
  };
  return {part(all.output), part(all.lse), part(all.query), part(all.kv)};
}

void append_result(Result& to, const Result& from) {
  to.output.insert(to.output.end(), from.output.begin(), from.output.end());
  to.lse.insert(to.lse.end(), from.lse.begin(), from.lse.end());
  to.query.insert(to.query.end(), from.query.begin(), from.query.end());
  to.kv.insert(to.kv.end(), from.kv.begin(), from.kv.end());
}

// ---- A sequence in the reference ----

struct MirrorHead {
  std::vector<std::vector<float>> key;
  std::vector<std::vector<float>> value;
  Vector odds;
  std::vector<bool> resident;
  std::size_t mean_tokens = 0;
  verkv::SketchBasis basis;
  Vector window_square;  // of the tokens that are not compressed
  Vector window_steps;
};

// Follows one sequence of a manager, call by call.
class Mirror {
 public:
  Mirror(const CacheConfig& config, std::uint64_t draw) : config_(config), draw_(draw) {
    for (const LayerConfig& layer : config.layers) {
      layers_.emplace_back(layer.cached ? size(layer.kv_heads) : 0);
      compressed_before_.push_back(false);
    }
  }

  const MirrorHead& head(std::int64_t layer, std::int64_t h) const {
    return layers_[size(layer)][size(h)];
  }

  void append(std::int64_t layer, const Block& keys, const Block& values) {
    std::vector<MirrorHead>& heads = layers_[size(layer)];
    for (std::size_t h = 0; h < heads.size(); ++h) {
      for (std::int64_t t = 0; t < keys.tokens; ++t) {
        heads[h].key.push_back(stored(keys.row(t, static_cast<std::int64_t>(h))));
        heads[h].value.push_back(stored(values.row(t, static_cast<std::int64_t>(h))));
        heads[h].window_square.push_back(0);
        heads[h].window_steps.push_back(0);
      }
    }
    if (!compressed_before_[size(layer)] || !config_.chunk_tokens || config_.keep >= 1) return;
    const std::size_t chunk = size(*config_.chunk_tokens);
    while (heads[0].window_square.size() >= size(config_.local_tokens) + chunk) {
      std::vector<verkv::reference::PoolHead> pool;
      for (const MirrorHead& head : heads) {
        verkv::reference::PoolHead part{{}, head.odds.size(), 0};
        for (std::size_t i = 0; i < chunk; ++i) {
          const double steps = head.window_steps[i];
          part.tau.push_back(steps > 0 ? std::sqrt(head.window_square[i] / steps) : 0.0);
        }
        pool.push_back(part);
      }
      std::vector<Vector> odds;
      if (config_.pool == Pool::head) {
        for (const auto& part : pool)
          odds.push_back(verkv::reference::pool_odds(config_, {part})[0]);
      } else {
        odds = verkv::reference::pool_odds(config_, pool);
      }
      for (std::size_t h = 0; h < heads.size(); ++h) {
        // A first compression during decode knows no queries, and its scores do not count.
        if (config_.sketch.kind == SketchKind::calibrated && heads[h].odds.empty())
          calibrate(layer, h, odds[h], Vector(odds[h].size(), 0.0), {});
        take(layer, h, odds[h]);
      }
    }
  }

  void compress(const std::vector<Scores>& scores, const std::vector<Block>& prompt_queries = {}) {
    if (config_.keep >= 1) return;
    std::vector<verkv::reference::PoolHead> pool;
    std::vector<std::pair<std::int64_t, std::size_t>> owner;
    const auto solve = [&] {
      const std::vector<Vector> odds = pool_odds(config_, pool);
      for (std::size_t i = 0; i < owner.size(); ++i) {
        const auto [layer, h] = owner[i];
        if (config_.sketch.kind == SketchKind::calibrated && pool[i].begin == 0)
          calibrate(layer, h, odds[i], pool[i].tau, prompt_queries);
        take(layer, h, odds[i]);
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
        verkv::reference::PoolHead part{{}, head.odds.size(), head.odds.empty() ? local : 0};
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
        head.resident =
            verkv::reference::draw(head.odds, key(static_cast<std::int64_t>(layer), h), 0);
      }
    }
  }

  verkv::reference::HeadCase head_case(std::int64_t layer, std::int64_t h) const {
    const MirrorHead& m = head(layer, h);
    verkv::reference::HeadCase result;
    result.layer = config_.layers[size(layer)];
    result.fetch = config_.fetch;
    result.study = config_.study;
    result.sketch = config_.sketch;
    result.key = m.key;
    result.value = m.value;
    result.odds = m.odds;
    result.resident = m.resident;
    result.mean_tokens = m.mean_tokens;
    result.basis = &m.basis;
    return result;
  }

  // Query row `row` of `queries`; adds to the scores of the local window as the manager does. The
  // scores do not depend on the plan, so a caller that only needs them saves the time of planning.
  std::vector<verkv::reference::StepAnswer> attend(std::int64_t layer, const Block& queries,
                                                   std::int64_t row, bool plan = true) {
    const LayerConfig& shape = config_.layers[size(layer)];
    const std::int64_t group = shape.query_heads / shape.kv_heads;
    std::vector<verkv::reference::StepAnswer> answers;
    for (std::int64_t h = 0; h < shape.kv_heads; ++h) {
      std::vector<std::vector<float>> own;
      for (std::int64_t g = 0; g < group; ++g) own.push_back(queries.row(row, h * group + g));
      verkv::reference::HeadCase head = head_case(layer, h);
      if (!plan) head.fetch.mode = FetchMode::never;
      answers.push_back(verkv::reference::step(head, own));
      if (!compressed_before_[size(layer)]) continue;
      MirrorHead& m = layers_[size(layer)][size(h)];
      for (std::size_t i = 0; i < m.window_square.size(); ++i) {
        for (const auto& query : answers.back().query) {
          m.window_square[i] += query.window_probability[i] * query.window_probability[i];
        }
        m.window_steps[i] += 1;
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
        report.host_bytes += static_cast<std::int64_t>(head.key.size()) * row;
        report.resident_bytes += residents * row;
        // 4 bytes a resident's position, 2 bytes of odds a compressed token (in whole groups of the
        // sketch), a sum and a count for each token of the window.
        report.metadata_bytes += 4 * residents + 2 * whole_groups + 8 * window;
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
  std::vector<float> stored(std::vector<float> row) const {
    for (float& x : row) x = verkv::reference::as_stored(x, config_.storage);
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
    const std::vector<float> mean =
        verkv::reference::channel_means(head.key, odds.size(), size(c.key_dim));
    head.basis = verkv::calibrate_sketch(config_.sketch.bits,
                                         verkv::reference::BasisTokens(head.key, mean, odds, tau),
                                         queries, config_.seed);
  }

  void take(std::int64_t layer, std::size_t h, const Vector& odds) {
    MirrorHead& head = layers_[size(layer)][h];
    const std::vector<bool> drawn = verkv::reference::draw(odds, key(layer, h), head.odds.size());
    if (head.odds.empty()) head.mean_tokens = odds.size();
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
};

// ---- Comparison with the reference ----

struct Tally {
  std::int64_t heads = 0;     // query heads compared
  std::int64_t boundary = 0;  // of them, plans that differ by one token
  std::vector<std::string> failures;

  void fail(const std::string& text) {
    if (failures.size() < 20) failures.push_back(text);
  }
};

double norm(const Vector& x) {
  double square = 0;
  for (const double v : x) square += v * v;
  return std::sqrt(square);
}

// The step computes in binary32, the reference in double. A logit l has an error of about 1e-6 |l|
// (64 to 256 rounded products), so a weight has that relative error; D, the certificate and the
// output inherit it. 1e-3 leaves room for logits up to a few hundred. A plan may end one token
// earlier or later where the certificate of a prefix meets epsilon (or a key the price) to within
// these errors; outputs are then of different plans and not compared. Certificates below 1e-18 lose
// their variance, which is a sum of squares, to the smallest binary32 number.
struct Tolerance {
  double epsilon = 1e-3;
  double lse = 1e-4;
  double output = 1e-3;
};

void compare(const CacheConfig& config, std::int64_t layer, const Result& result, std::size_t row,
             const std::vector<verkv::reference::StepAnswer>& answers, const std::string& what,
             Tally& tally, const Tolerance& tolerance = {}) {
  const LayerConfig& shape = config.layers[size(layer)];
  const std::size_t group = size(shape.query_heads / shape.kv_heads);
  for (std::size_t h = 0; h < answers.size(); ++h) {
    const verkv::reference::StepAnswer& answer = answers[h];
    const KvHeadReport& kv = result.kv[row * size(shape.kv_heads) + h];
    const std::int64_t row_bytes = (shape.key_dim + shape.value_dim) *
                                   static_cast<std::int64_t>(verkv::size_bytes(config.storage));
    std::ostringstream place;
    place << what << ", layer " << layer << ", row " << row << ", KV head " << h << ": ";
    if (kv.resident_tokens != static_cast<std::int64_t>(answer.residents)) {
      tally.fail(place.str() + "residents " + std::to_string(kv.resident_tokens) + ", expected " +
                 std::to_string(answer.residents));
    }
    if (kv.moved_bytes != kv.moved_tokens * row_bytes) tally.fail(place.str() + "moved bytes");
    bool equal_plans = true;
    for (std::size_t g = 0; g < group; ++g) {
      const std::size_t at = row * size(shape.query_heads) + h * group + g;
      const std::int64_t planned = result.query[at].planned_tokens;
      const std::int64_t expected = static_cast<std::int64_t>(answer.query[g].planned);
      ++tally.heads;
      if (planned == expected) continue;
      equal_plans = false;
      ++tally.boundary;
      if (std::abs(planned - expected) > 1) {
        tally.fail(place.str() + "planned " + std::to_string(planned) + ", expected " +
                   std::to_string(expected));
      }
    }
    if (!equal_plans) continue;
    if (kv.fetched_tokens != static_cast<std::int64_t>(answer.fetched.size()) ||
        kv.moved_tokens != static_cast<std::int64_t>(answer.moved.size()) ||
        kv.limited != answer.limited) {
      std::ostringstream text;
      text << place.str() << "fetched " << kv.fetched_tokens << " moved " << kv.moved_tokens
           << " limited " << kv.limited << ", expected " << answer.fetched.size() << " "
           << answer.moved.size() << " " << answer.limited;
      tally.fail(text.str());
      continue;
    }
    for (std::size_t g = 0; g < group; ++g) {
      const std::size_t at = row * size(shape.query_heads) + h * group + g;
      const verkv::reference::QueryAnswer& query = answer.query[g];
      std::ostringstream text;
      text << place.str() << "query head " << g << ", planned " << query.planned << ", ";
      const double epsilon = result.query[at].epsilon;
      if (!(std::fabs(epsilon - query.epsilon) <= tolerance.epsilon * query.epsilon + 1e-18)) {
        text << "epsilon " << epsilon << ", expected " << query.epsilon;
        tally.fail(text.str());
      }
      const bool certified =
          epsilon < kInfinite && epsilon <= config.fetch.epsilon.value_or(kInfinite);
      if (result.query[at].certified != certified) {
        tally.fail(text.str() + "certified at " + std::to_string(epsilon));
      }
      const double lse = static_cast<double>(result.lse[at]);
      const bool empty = query.lse == -kInfinite;
      if (empty ? lse != -kInfinite
                : !(std::fabs(lse - query.lse) <= tolerance.lse + 1e-6 * std::fabs(query.lse))) {
        tally.fail(text.str() + "LSE " + std::to_string(lse) + ", expected " +
                   std::to_string(query.lse));
      }
      Vector difference;
      double largest = 0;
      for (std::size_t j = 0; j < query.output.size(); ++j) {
        const double x = static_cast<double>(result.output[at * query.output.size() + j]);
        difference.push_back(x - query.output[j]);
        largest = std::max(largest, std::fabs(query.output[j]));
      }
      // An output that nearly cancels keeps the error of its summands, of size about 1.
      if (!(norm(difference) <= tolerance.output * (norm(query.output) + 0.01))) {
        tally.fail(text.str() + "output off by " + std::to_string(norm(difference)) + " of " +
                   std::to_string(norm(query.output)));
      }
    }
  }
}

void report(const Tally& tally) {
  std::string all;
  for (const std::string& text : tally.failures) all += text + "\n";
  INFO(all);
  CHECK(tally.failures.empty());
}

// ---- What the backend can do ----

std::vector<FetchOrder> orders() {
  return backend().exact_order ? std::vector<FetchOrder>{FetchOrder::worth, FetchOrder::exact}
                               : std::vector<FetchOrder>{FetchOrder::worth};
}

std::vector<bool> vector_codes() {
  return backend().vector_code ? std::vector<bool>{true, false} : std::vector<bool>{true};
}

// ---- Configurations ----

LayerConfig layer_of(std::int64_t kv_heads, std::int64_t group, std::int64_t key_dim,
                     std::int64_t value_dim) {
  LayerConfig layer;
  layer.kv_heads = kv_heads;
  layer.query_heads = kv_heads * group;
  layer.key_dim = key_dim;
  layer.value_dim = value_dim;
  return layer;
}

CacheConfig small_config() {
  CacheConfig config;
  config.layers = {layer_of(2, 3, 64, 64)};
  config.storage = DType::f32;
  config.keep = 0.2;
  config.sink_tokens = 2;
  config.local_tokens = 8;
  config.chunk_tokens = 16;
  config.fetch.epsilon = 0.2;
  config.fetch.risk.reset();
  config.threads = 1;
  config.seed = 7;
  return config;
}

template <class T>
T one_of(Random& random, const std::vector<T>& from) {
  return from[random.below(from.size())];
}

struct Drawn {
  CacheConfig config;
  std::int64_t tokens = 0;
  double logit_spread = 1;
  ScoreKind scores = ScoreKind::random;
  std::string text;
};

// A sample of the product of everything that the configuration offers.
Drawn random_setting(Random& random) {
  Drawn drawn;
  CacheConfig& c = drawn.config;
  c.keep = one_of(random, std::vector<double>{0.0625, 0.1, 0.25, 0.5, 0.9});
  const std::vector<std::int64_t> lengths = {0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129};
  drawn.tokens = random.below(24) == 0 ? 2049 : one_of(random, lengths);
  c.storage = one_of(random, std::vector<DType>{DType::f32, DType::f16, DType::bf16});
  c.pool = one_of(random, std::vector<Pool>{Pool::head, Pool::layer, Pool::sequence});
  c.study.select = random.below(4) == 0 ? Selection::topk : Selection::poisson;
  c.study.inclusion_floor = random.below(4) == 0 ? c.keep / 4 : 0;
  c.seed = random.bits();
  c.threads = 1;
  c.chunk_tokens.reset();
  const std::int64_t budget = static_cast<std::int64_t>(c.keep * static_cast<double>(drawn.tokens));
  c.sink_tokens = one_of(random, std::vector<std::int64_t>{0, 1, 4});
  // The window: none, some, exactly what the budget can pay or one to either side, larger than
  // everything.
  c.local_tokens = std::max<std::int64_t>(
      0, one_of(random, std::vector<std::int64_t>{0, 0, 2, budget - c.sink_tokens - 1,
                                                  budget - c.sink_tokens,
                                                  budget - c.sink_tokens + 1, drawn.tokens + 5}));
  if (random.below(12) == 0) c.sink_tokens = drawn.tokens + 3;
  c.sketch = one_of(random, std::vector<verkv::SketchConfig>{{SketchKind::exact, 2},
                                                             {SketchKind::calibrated, 2},
                                                             {SketchKind::calibrated, 2},
                                                             {SketchKind::calibrated, 3},
                                                             {SketchKind::calibrated, 4}});
  c.fetch.epsilon.reset();
  c.fetch.risk.reset();
  c.fetch.delta = one_of(random, std::vector<double>{0.05, 0.1, 0.3});
  const double epsilon = one_of(random, std::vector<double>{0.02, 0.1, 0.3, 0.8});
  const double risk = one_of(random, std::vector<double>{1e-6, 1e-4, 1e-2});
  switch (random.below(7)) {
    case 0:
      c.fetch.epsilon = epsilon;
      break;
    case 1:
      c.fetch.risk = risk;
      break;
    case 2:
      c.fetch.epsilon = epsilon;
      c.fetch.risk = risk;
      break;
    case 3:
      c.study.probability = one_of(random, std::vector<double>{1e-3, 1e-2, 0.1});
      break;
    case 4:
      c.fetch.mode = FetchMode::never;
      break;
    case 5:
      c.fetch.mode = FetchMode::always;
      break;
    default:
      c.fetch.epsilon = epsilon;
      c.fetch.risk = 1e-3;
      c.study.probability = 0.01;
      break;
  }
  if (backend().exact_order && drawn.tokens <= 65 && random.below(4) == 0)
    c.study.order = FetchOrder::exact;
  c.study.cap = one_of(random, kCaps);
  if (random.below(6) == 0)
    c.fetch.limit_tokens = one_of(random, std::vector<std::int64_t>{1, 5, 20});

  const std::size_t layers = 1 + random.below(2);
  for (std::size_t l = 0; l < layers; ++l) {
    const std::int64_t dim =
        one_of(random, std::vector<std::int64_t>{64, 80, 96, 100, 112, 128, 256});
    const std::int64_t group = one_of(random, std::vector<std::int64_t>{1, 2, 5, 6, 7, 8, 12, 16});
    LayerConfig layer = layer_of(1 + static_cast<std::int64_t>(random.below(2)), group, dim,
                                 random.below(3) == 0 ? 48 : dim);
    if (drawn.tokens > 200) layer.kv_heads = 1;
    if (drawn.tokens > 200) layer.query_heads = group;
    if (random.below(4) == 0) layer.soft_cap = 5;
    if (random.below(4) == 0) layer.scale = 0.11;
    layer.first_global_kv_head = random.below(3) == 0 ? 4 : 0;
    c.layers.push_back(layer);
  }
  if (layers > 1 && random.below(4) == 0) c.layers[1].dense = true;
  drawn.logit_spread = one_of(random, std::vector<double>{0.5, 1.5, 4});
  drawn.scores = one_of(
      random, std::vector<ScoreKind>{ScoreKind::random, ScoreKind::random, ScoreKind::random,
                                     ScoreKind::zero, ScoreKind::equal, ScoreKind::with_zeros});

  std::ostringstream text;
  text << "n " << drawn.tokens << ", d " << c.layers[0].key_dim << ", group "
       << c.layers[0].query_heads / c.layers[0].kv_heads << ", layers " << layers << ", "
       << verkv::name(c.storage) << ", keep " << c.keep << ", floor " << c.study.inclusion_floor
       << ", pool " << static_cast<int>(c.pool) << ", select " << static_cast<int>(c.study.select)
       << ", sink " << c.sink_tokens << ", local " << c.local_tokens << ", sketch "
       << static_cast<int>(c.sketch.kind) << "/" << c.sketch.bits << ", mode "
       << static_cast<int>(c.fetch.mode) << ", eps " << shown(c.fetch.epsilon) << ", risk "
       << shown(c.fetch.risk) << ", p " << shown(c.study.probability) << ", order "
       << static_cast<int>(c.study.order) << ", cap " << shown(c.study.cap) << ", limit "
       << shown(c.fetch.limit_tokens) << ", spread " << drawn.logit_spread << ", scores "
       << static_cast<int>(drawn.scores) << ", soft cap " << shown(c.layers[0].soft_cap);
  drawn.text = text.str();
  return drawn;
}

}  // namespace

// ---- Whole steps against the reference ----

TEST_CASE("Steps of random configurations agree with the reference") {
  Random random(20240601);
  Tally tally;
  std::int64_t with_fetch = 0;
  for (int trial = 0; trial < trials(300); ++trial) {
    const Drawn setting = random_setting(random);
    const CacheConfig& config = setting.config;
    REQUIRE(reasons_against(config).empty());
    const auto cache = make_cache(config);
    const std::uint64_t draw = random.bits();
    const SequenceId sequence = cache->create_sequence(draw);
    Mirror mirror(config, draw);
    std::vector<Scores> scores;
    std::vector<Block> prompt_queries;
    const bool calibrate = random.below(4) > 0;
    const std::int64_t last = setting.tokens > 0 ? static_cast<std::int64_t>(random.below(3)) : 0;
    for (std::size_t l = 0; l < config.layers.size(); ++l) {
      const LayerConfig& layer = config.layers[l];
      const std::int64_t index = static_cast<std::int64_t>(l);
      const double spread = setting.logit_spread /
                            std::sqrt(verkv::reference::attention_scale(layer)) /
                            std::pow(static_cast<double>(layer.key_dim), 0.25);
      const Block keys =
          random_block(random, setting.tokens, layer.kv_heads, layer.key_dim, spread, 0.5);
      const Block values =
          random_block(random, setting.tokens, layer.kv_heads, layer.value_dim, 1, 0.2);
      // The last tokens arrive after the compression.
      const std::int64_t before = std::max<std::int64_t>(0, setting.tokens - last);
      cache->append(sequence, index, keys.part(0, before).view(), values.part(0, before).view());
      mirror.append(index, keys.part(0, before), values.part(0, before));
      scores.push_back(random_scores(random, layer.kv_heads, before, setting.scores));
      if (calibrate) {
        const std::int64_t positions = one_of(random, std::vector<std::int64_t>{0, 1, 30});
        prompt_queries.push_back(
            random_block(random, positions, layer.query_heads, layer.key_dim, spread, 0.5));
      }
    }
    compress(*cache, sequence, scores, prompt_queries);
    mirror.compress(scores, prompt_queries);
    for (std::size_t l = 0; l < config.layers.size(); ++l) {
      const LayerConfig& layer = config.layers[l];
      const std::int64_t index = static_cast<std::int64_t>(l);
      const Block keys = random_block(random, last, layer.kv_heads, layer.key_dim, 1);
      const Block values = random_block(random, last, layer.kv_heads, layer.value_dim, 1);
      cache->append(sequence, index, keys.view(), values.view());
      mirror.append(index, keys, values);
      CHECK(cache->compressed_tokens(sequence, index) ==
            static_cast<std::int64_t>(mirror.head(index, 0).odds.size()));
      const double spread = setting.logit_spread /
                            std::sqrt(verkv::reference::attention_scale(layer)) /
                            std::pow(static_cast<double>(layer.key_dim), 0.25);
      const Block queries = random_block(random, 2, layer.query_heads, layer.key_dim, spread);
      const Result result = attend(*cache, index, {kNoSequence, sequence}, queries);
      const auto answers = mirror.attend(index, queries, 1);
      compare(config, index, result, 1, answers,
              "trial " + std::to_string(trial) + " (" + setting.text + ")", tally);
      for (const auto& answer : answers) with_fetch += !answer.fetched.empty();
    }
  }
  report(tally);
  INFO(tally.heads << " query heads, " << tally.boundary << " plans off by one, " << with_fetch
                   << " fetches");
  CHECK(tally.heads > trials(2500));
  CHECK(with_fetch > trials(150));
  // Certificates meet epsilon to within 1e-5, relative, by chance in far fewer plans than this.
  CHECK(tally.boundary * 50 < tally.heads);
}

// ---- Exactness ----

namespace {

struct Filled {
  std::unique_ptr<KvCacheManager> cache;
  SequenceId sequence;
  std::vector<Block> keys;  // per layer
  std::vector<Block> values;
  std::vector<Scores> scores;
};

// One sequence with all of its tokens appended at once; compressed unless scores is empty.
Filled fill(const CacheConfig& config, const std::vector<Block>& keys,
            const std::vector<Block>& values, const std::vector<Scores>& scores,
            std::uint64_t draw = 0) {
  Filled filled{make_cache(config), {}, keys, values, scores};
  filled.sequence = filled.cache->create_sequence(draw);
  for (std::size_t l = 0; l < keys.size(); ++l) {
    filled.cache->append(filled.sequence, static_cast<std::int64_t>(l), keys[l].view(),
                         values[l].view());
  }
  if (!scores.empty()) compress(*filled.cache, filled.sequence, scores);
  return filled;
}

struct Dense {
  Vector output;
  double lse = 0;
};

// Dense attention over the values as stored.
Dense dense(const CacheConfig& config, std::int64_t layer, const Block& keys, const Block& values,
            const std::vector<float>& query, std::int64_t query_head) {
  const LayerConfig& shape = config.layers[size(layer)];
  const std::int64_t h = query_head / (shape.query_heads / shape.kv_heads);
  const Vector q(query.begin(), query.end());
  Vector logit(size(keys.tokens));
  Dense result;
  result.output.resize(size(shape.value_dim));
  const auto element = [&](const Block& block, std::int64_t i, std::int64_t j) {
    return verkv::reference::as_stored(block.at(i, h, j), config.storage);
  };
  result.lse = verkv::dense_attention(
      keys.tokens, std::span<const double>(q), verkv::reference::attention_scale(shape),
      shape.soft_cap.value_or(0),
      [&](std::int64_t i, std::int64_t j) { return element(keys, i, j); },
      [&](std::int64_t i, std::int64_t j) { return element(values, i, j); },
      std::span<double>(logit), std::span<double>(result.output));
  return result;
}

// Relative error of the outputs and absolute error of the LSE of one row, the worst over its heads.
struct Error {
  double output = 0;
  double lse = 0;
};

Error worst_error(const CacheConfig& config, std::int64_t layer, const Filled& filled,
                  const Block& queries, std::int64_t row, const Result& result) {
  const LayerConfig& shape = config.layers[size(layer)];
  Error worst;
  for (std::int64_t h = 0; h < shape.query_heads; ++h) {
    const Dense expected = dense(config, layer, filled.keys[size(layer)],
                                 filled.values[size(layer)], queries.row(row, h), h);
    const std::size_t at = size(row * shape.query_heads + h);
    Vector difference;
    for (std::size_t j = 0; j < expected.output.size(); ++j) {
      difference.push_back(static_cast<double>(result.output[at * expected.output.size() + j]) -
                           expected.output[j]);
    }
    const double output = norm(difference) / (norm(expected.output) + 0.01);
    const double lse = std::fabs(static_cast<double>(result.lse[at]) - expected.lse);
    // A comparison that NaN fails.
    if (!(output <= worst.output)) worst.output = output;
    if (!(lse <= worst.lse)) worst.lse = lse;
  }
  return worst;
}

}  // namespace

TEST_CASE("Everything resident, and everything fetched, reproduce dense attention to rounding") {
  Random random(5);
  struct Case {
    const char* name;
    double keep;
    FetchMode mode;
    bool dense;
  };
  for (const Case& c : {Case{"keep 1", 1.0, FetchMode::verified, false},
                        Case{"always", 0.1, FetchMode::always, false},
                        Case{"dense layer", 0.1, FetchMode::verified, true}}) {
    for (const DType storage : {DType::f32, DType::f16, DType::bf16}) {
      for (const std::int64_t n : {1, 17, 129, 700}) {
        if (n > 200 && backend().thinning > 1) continue;
        for (const std::optional<double> soft_cap : {std::optional<double>(), std::optional(4.0)}) {
          CacheConfig config = small_config();
          config.storage = storage;
          config.keep = c.keep;
          config.fetch.mode = c.mode;
          config.layers = {layer_of(2, 5, 80, 64)};
          config.layers[0].soft_cap = soft_cap;
          config.layers[0].dense = c.dense;
          const Filled filled = fill(config, {random_block(random, n, 2, 80, 1.5, 0.5)},
                                     {random_block(random, n, 2, 64, 1)},
                                     {random_scores(random, 2, n, ScoreKind::with_zeros)});
          const Block queries = random_block(random, 1, 10, 80, 1.5);
          const Result result = attend(*filled.cache, 0, {filled.sequence}, queries);
          const Error error = worst_error(config, 0, filled, queries, 0, result);
          INFO(c.name << ", " << verkv::name(storage) << ", n " << n << ", soft cap "
                      << shown(soft_cap));
          // 80 rounded products of a logit of some tens, then binary32 sums.
          CHECK(error.output < 2e-5);
          CHECK(error.lse < 2e-5);
          for (const QueryHeadReport& query : result.query) {
            CHECK(query.epsilon == 0);
            CHECK(query.certified);
          }
          if (c.mode == FetchMode::always) {
            CHECK(result.kv[0].fetched_tokens >= result.kv[0].moved_tokens);
            CHECK(result.kv[0].resident_tokens + result.kv[0].moved_tokens == n);
          } else {
            CHECK(result.kv[0].moved_tokens == 0);
            CHECK(result.kv[0].resident_tokens == n);
          }
        }
      }
    }
  }
}

TEST_CASE("Logits of plus and minus 1e4 stay exact where everything is read") {
  Random random(6);
  for (const bool vector_code : vector_codes()) {
    for (const double keep : {1.0, 0.1}) {
      CacheConfig config = small_config();
      config.study.vector_code = vector_code;
      config.keep = keep;
      config.fetch.mode = keep < 1 ? FetchMode::always : FetchMode::verified;
      const std::int64_t n = 300;
      // Keys and queries of size 36: logits 36 * 36 * 8 = 1e4 where they agree.
      Block keys = random_block(random, n, 2, 64, 1);
      for (float& x : keys.data) x = x > 0 ? 36.0f : -36.0f;
      Block queries = random_block(random, 1, 6, 64, 1);
      for (float& x : queries.data) x = x > 0 ? 36.0f : -36.0f;
      for (std::int64_t j = 0; j < 64; ++j) {
        for (std::int64_t h = 0; h < 2; ++h) {
          keys.at(100, h, j) = queries.at(0, 3 * h, j);   // logit 1e4
          keys.at(200, h, j) = -queries.at(0, 3 * h, j);  // and -1e4
        }
      }
      const Filled filled = fill(config, {keys}, {random_block(random, n, 2, 64, 1)},
                                 {random_scores(random, 2, n, ScoreKind::random)});
      const Result result = attend(*filled.cache, 0, {filled.sequence}, queries);
      const Error error = worst_error(config, 0, filled, queries, 0, result);
      // Products and sums of these integers are exact; only the scale and the exponentials round.
      CHECK(error.output < 2e-3);
      CHECK(error.lse < 4e-3);
      CHECK(result.lse[0] > 9000);
    }
  }
}

TEST_CASE("A step with logits of plus and minus 1e4 agrees with the reference") {
  // The sketch is off by hundreds here, so exact logits lie far above and below what the plan
  // believes.
  Random random(61);
  Tally tally;
  for (int trial = 0; trial < trials(60); ++trial) {
    CacheConfig config = small_config();
    config.sketch.bits = 2 + trial % 3;
    config.study.cap = one_of(random, kCaps);
    config.fetch.mode = trial % 2 == 0 ? FetchMode::never : FetchMode::verified;
    if (trial % 4 == 1) config.fetch.limit_tokens = 2;
    config.sink_tokens = trial % 5 == 0 ? 0 : 2;
    config.local_tokens = trial % 5 == 0 ? 0 : 8;
    config.keep = 0.5;
    const double size_of_key = one_of(random, std::vector<double>{4, 10, 36});
    const Block keys = random_block(random, 120, 2, 64, size_of_key);
    const Block values = random_block(random, 120, 2, 64, 1);
    const std::vector<Scores> scores = {random_scores(random, 2, 120, ScoreKind::random)};
    const Filled filled = fill(config, {keys}, {values}, scores, 9);
    Mirror mirror(config, 9);
    mirror.append(0, keys, values);
    mirror.compress(scores);
    const Block queries = random_block(random, 1, 6, 64, size_of_key);
    const Result result = attend(*filled.cache, 0, {filled.sequence}, queries);
    // Logits of 1e4 are known to 1e-3 in binary32, and so are weights and all that is made of them;
    // the certificate of such a plan can be that of a single token 1e-10 below the rest.
    compare(config, 0, result, 0, mirror.attend(0, queries, 0), "trial " + std::to_string(trial),
            tally, Tolerance{0.02, 0.01, 0.02});
  }
  report(tally);
}

TEST_CASE("A drawn token that the plan takes for nothing is capped, wherever the shift goes") {
  // Coordinate 0 has most of the keys' energy, coordinate 40 is not in the sketch. A needle whose
  // weight is far overestimated is fetched and leaves beta = 0 behind; a drawn token whose sketched
  // weight is 0 has an exact logit far above the needle's.
  for (const double cap : {1.0, 2.0, 1e6}) {
    Random random(62);
    CacheConfig config = small_config();
    config.layers = {layer_of(1, 1, 64, 64)};
    config.keep = 0.5;
    config.sink_tokens = 0;
    config.local_tokens = 0;
    config.study.cap = cap;
    const std::int64_t n = 400;
    const std::vector<Scores> scores = {random_scores(random, 1, n, ScoreKind::equal)};
    Block keys = random_block(random, n, 1, 64, 1);
    Mirror draws(config, 9);
    draws.append(0, keys, keys);
    draws.compress(scores);
    const std::vector<bool>& resident = draws.head(0, 0).resident;
    const std::int64_t drawn = std::find(resident.begin(), resident.end(), true) - resident.begin();
    const std::int64_t needle =
        std::find(resident.begin(), resident.end(), false) - resident.begin();
    for (std::int64_t t = 0; t < n; ++t) {
      for (std::int64_t j = 0; j < 32; ++j) keys.at(t, 0, j) *= 50;
    }
    keys.at(needle, 0, 0) = 400;
    keys.at(needle, 0, 40) = -20;
    keys.at(drawn, 0, 0) = 0;
    keys.at(drawn, 0, 40) = 50;
    Block queries = constant_block(1, 1, 64, 0);
    queries.at(0, 0, 0) = 10;
    queries.at(0, 0, 40) = 80;
    const Block values = random_block(random, n, 1, 64, 1);
    const Filled filled = fill(config, {keys}, {values}, scores, 9);
    Mirror mirror(config, 9);
    mirror.append(0, keys, values);
    mirror.compress(scores);
    const Result result = attend(*filled.cache, 0, {filled.sequence}, queries);
    REQUIRE(result.kv[0].moved_tokens > 0);
    REQUIRE(result.lse[0] < 350);  // the drawn token's logit is 500
    Tally tally;
    compare(config, 0, result, 0, mirror.attend(0, queries, 0), "cap " + std::to_string(cap), tally,
            Tolerance{0.02, 0.01, 0.02});
  }
}

TEST_CASE("Equal keys give equal weights") {
  for (const DType storage : {DType::f32, DType::f16}) {
    for (const SketchKind sketch : {SketchKind::exact, SketchKind::calibrated}) {
      CacheConfig config = small_config();
      config.storage = storage;
      config.sketch.kind = sketch;
      Random random(8);
      const std::int64_t n = 200;
      const Block one = random_block(random, 1, 2, 64, 1);
      Block keys = constant_block(n, 2, 64, 0);
      for (std::int64_t t = 0; t < n; ++t)
        std::copy(one.data.begin(), one.data.end(), keys.data.begin() + t * 128);
      const Block values = random_block(random, n, 2, 64, 1);
      const std::vector<Scores> scores = {random_scores(random, 2, n, ScoreKind::random)};
      Tally tally;
      const Filled filled = fill(config, {keys}, {values}, scores, 3);
      Mirror mirror(config, 3);
      mirror.append(0, keys, values);
      mirror.compress(scores);
      const Block queries = random_block(random, 1, 6, 64, 1);
      compare(config, 0, attend(*filled.cache, 0, {filled.sequence}, queries), 0,
              mirror.attend(0, queries, 0), "equal keys", tally);
      report(tally);
    }
  }
}

TEST_CASE("One dominant key that is not resident is fetched by either rule") {
  for (const bool certificate : {true, false}) {
    for (const ScoreKind kind :
         {ScoreKind::random, ScoreKind::zero, ScoreKind::equal, ScoreKind::with_zeros}) {
      for (const SketchKind sketch : {SketchKind::exact, SketchKind::calibrated}) {
        Random random(9);
        CacheConfig config = small_config();
        config.layers = {layer_of(1, 2, 128, 128)};
        config.keep = 0.05;
        config.sketch.kind = sketch;
        config.fetch.epsilon.reset();
        config.fetch.risk.reset();
        if (certificate) config.fetch.epsilon = 0.05;
        if (!certificate) config.fetch.risk = 1e-4;
        const std::int64_t n = 400;
        Block keys = random_block(random, n, 1, 128, 1);
        const Block queries = random_block(random, 1, 2, 128, 1);
        for (std::int64_t j = 0; j < 128; ++j)
          keys.at(211, 0, j) = 2 * queries.at(0, 0, j);  // a logit of about 22
        Scores scores = random_scores(random, 1, n, kind);
        scores.data[211] = 0;
        const Filled filled = fill(config, {keys}, {random_block(random, n, 1, 128, 1)}, {scores});
        const Result result = attend(*filled.cache, 0, {filled.sequence}, queries);
        INFO("certificate " << certificate << ", scores " << static_cast<int>(kind) << ", sketch "
                            << static_cast<int>(sketch));
        CHECK(result.query[0].planned_tokens >= 1);
        CHECK(result.kv[0].fetched_tokens >= 1);
        if (kind != ScoreKind::zero) CHECK(result.kv[0].moved_tokens >= 1);
        const Dense expected = dense(config, 0, keys, filled.values[0], queries.row(0, 0), 0);
        CHECK(std::fabs(static_cast<double>(result.lse[0]) - expected.lse) < 1e-3);
        if (certificate) CHECK(result.query[0].certified);
      }
    }
  }
}

TEST_CASE("Importance without any information keeps what the budget allows") {
  for (const ScoreKind kind : {ScoreKind::zero, ScoreKind::equal, ScoreKind::with_zeros}) {
    for (const Pool pool : {Pool::head, Pool::layer, Pool::sequence}) {
      for (const Selection select : {Selection::poisson, Selection::topk}) {
        Random random(10);
        CacheConfig config = small_config();
        config.layers = {layer_of(2, 1, 64, 64), layer_of(3, 1, 64, 64)};
        config.pool = pool;
        config.study.select = select;
        config.keep = 0.25;
        config.sketch.kind = SketchKind::exact;  // no matter here, and quickly made
        const std::int64_t n = 1000;
        std::vector<Block> keys, values;
        std::vector<Scores> scores;
        for (const LayerConfig& layer : config.layers) {
          keys.push_back(random_block(random, n, layer.kv_heads, 64, 1));
          values.push_back(random_block(random, n, layer.kv_heads, 64, 1));
          scores.push_back(random_scores(random, layer.kv_heads, n, kind));
        }
        const Filled filled = fill(config, keys, values, scores);
        double residents = 0;
        for (std::int64_t l = 0; l < 2; ++l) {
          const LayerConfig& layer = config.layers[size(l)];
          const Result result = attend(*filled.cache, l, {filled.sequence},
                                       random_block(random, 1, layer.query_heads, 64, 1));
          for (const KvHeadReport& kv : result.kv)
            residents += static_cast<double>(kv.resident_tokens);
        }
        const double expected = 5 * 250.0;
        // A sum of independent Bernoulli numbers with variance at most its mean; rounding of 5
        // top-k budgets.
        const double slack =
            select == Selection::topk ? 5 : verkv::reference::bernstein_bound(expected, 1, 1);
        CHECK(std::fabs(residents - expected) <= slack);
      }
    }
  }
}

// ---- What must not matter, bit for bit ----

namespace {

// A prefill, a compression and a decode long enough to compress twice, all answers one after the
// other.
struct Story {
  std::vector<Block> keys, values, queries;  // per layer
  std::vector<Scores> scores;
};

const std::int64_t kPrefill = backend().thinning > 1 ? 70 : 200;
const std::int64_t kDecode = backend().thinning > 1 ? 18 : 34;

Story make_story(const CacheConfig& config, std::uint64_t seed) {
  Random random(seed);
  Story story;
  for (const LayerConfig& layer : config.layers) {
    story.keys.push_back(
        random_block(random, kPrefill + kDecode, layer.kv_heads, layer.key_dim, 1.5, 0.5));
    story.values.push_back(
        random_block(random, kPrefill + kDecode, layer.kv_heads, layer.value_dim, 1));
    story.queries.push_back(random_block(random, kDecode, layer.query_heads, layer.key_dim, 1.5));
    story.scores.push_back(random_scores(random, layer.kv_heads, kPrefill, ScoreKind::with_zeros));
  }
  return story;
}

Result tell(const CacheConfig& config, const Story& story, std::int64_t first_chunk = kPrefill) {
  const auto cache = make_cache(config);
  const SequenceId sequence = cache->create_sequence(17);
  for (std::size_t l = 0; l < config.layers.size(); ++l) {
    for (std::int64_t begin = 0; begin < kPrefill; begin += first_chunk) {
      const std::int64_t count = std::min(first_chunk, kPrefill - begin);
      cache->append(sequence, static_cast<std::int64_t>(l), story.keys[l].part(begin, count).view(),
                    story.values[l].part(begin, count).view());
    }
  }
  compress(*cache, sequence, story.scores);
  Result all;
  for (std::int64_t step = 0; step < kDecode; ++step) {
    for (std::size_t l = 0; l < config.layers.size(); ++l) {
      const std::int64_t layer = static_cast<std::int64_t>(l);
      cache->append(sequence, layer, story.keys[l].part(kPrefill + step, 1).view(),
                    story.values[l].part(kPrefill + step, 1).view());
      append_result(all, attend(*cache, layer, {sequence}, story.queries[l].part(step, 1)));
    }
  }
  CHECK(cache->compressed_tokens(sequence, 0) > kPrefill);
  return all;
}

std::vector<CacheConfig> story_configs() {
  std::vector<CacheConfig> configs;
  for (const int kind : {0, 1, 2, 3, 4}) {
    CacheConfig config = small_config();
    config.storage = kind == 0 ? DType::f32 : kind == 1 ? DType::bf16 : DType::f16;
    config.layers = {layer_of(2, kind == 2 ? 12 : 3, kind == 3 ? 100 : 64, 80),
                     layer_of(3, 5, 128, 128)};
    config.pool = kind == 0 ? Pool::head : kind == 1 ? Pool::layer : Pool::sequence;
    if (kind == 1) config.sketch = {SketchKind::exact, 2};
    if (kind == 3) config.sketch.bits = 3;
    if (kind == 4) config.sketch.bits = 4;
    if (kind == 1 && backend().exact_order) config.study.order = FetchOrder::exact;
    if (kind == 3) config.fetch.risk = 1e-4;
    if (kind == 4) config.fetch.limit_tokens = 10;
    configs.push_back(config);
  }
  if (backend().thinning > 1) {
    configs = {configs[3]};
    configs[0].layers[1] = layer_of(1, 5, 128, 128);
  }
  return configs;
}

}  // namespace

TEST_CASE("Threads and vector code change no bit", "[cpu]") {
  for (const CacheConfig& base : story_configs()) {
    const Story story = make_story(base, 11);
    const Result expected = tell(base, story);
    struct Case {
      int threads;
      bool vector_code;
    };
    for (const Case& c : {Case{2, true}, Case{3, true}, Case{1, false}}) {
      CacheConfig config = base;
      config.threads = c.threads;
      config.study.vector_code = c.vector_code;
      INFO("threads " << c.threads << ", vector code " << c.vector_code << ", sketch "
                      << static_cast<int>(base.sketch.kind) << "/" << base.sketch.bits);
      CHECK(same(tell(config, story), expected));
    }
  }
}

TEST_CASE("The size of appended chunks changes no bit") {
  for (const CacheConfig& config : story_configs()) {
    const Story story = make_story(config, 12);
    const Result expected = tell(config, story);
    for (const std::int64_t chunk : {7, 1, 128}) CHECK(same(tell(config, story, chunk), expected));
  }
}

TEST_CASE("A row does not depend on its neighbours in the batch") {
  for (const CacheConfig& config : story_configs()) {
    Random random(13);
    const auto cache = make_cache(config);
    const std::int64_t kRows = backend().thinning > 1 ? 9 : 33;
    std::vector<SequenceId> sequences;
    for (std::int64_t row = 0; row < kRows; ++row) {
      if (row % 8 == 5) {
        sequences.push_back(kNoSequence);
        continue;
      }
      const SequenceId sequence = cache->create_sequence();
      sequences.push_back(sequence);
      const std::int64_t n = row == 3 ? 0 : row * row % 150 + 1;  // an empty sequence among them
      std::vector<Scores> scores;
      for (std::size_t l = 0; l < config.layers.size(); ++l) {
        const LayerConfig& layer = config.layers[l];
        cache->append(sequence, static_cast<std::int64_t>(l),
                      random_block(random, n, layer.kv_heads, layer.key_dim, 1.5).view(),
                      random_block(random, n, layer.kv_heads, layer.value_dim, 1).view());
        scores.push_back(random_scores(random, layer.kv_heads, n, ScoreKind::random));
      }
      if (row % 3 != 1) compress(*cache, sequence, scores);
    }
    for (std::size_t l = 0; l < config.layers.size(); ++l) {
      const std::int64_t layer = static_cast<std::int64_t>(l);
      const LayerConfig& shape = config.layers[l];
      const Block queries = random_block(random, kRows, shape.query_heads, shape.key_dim, 1.5);
      const Result all = attend(*cache, layer, sequences, queries);
      for (std::int64_t row = 0; row < kRows; ++row) {
        INFO("row " << row);
        const Result alone = attend(*cache, layer, {sequences[size(row)]}, queries.part(row, 1));
        CHECK(same(row_of(all, size(row), size(kRows)), alone));
      }
      // In another order, and between other neighbours.
      std::vector<SequenceId> reversed(sequences.rbegin(), sequences.rend());
      Block turned = queries;
      for (std::int64_t row = 0; row < kRows; ++row) {
        const Block one = queries.part(kRows - 1 - row, 1);
        std::copy(one.data.begin(), one.data.end(),
                  turned.data.begin() + row * shape.query_heads * shape.key_dim);
      }
      const Result other = attend(*cache, layer, reversed, turned);
      for (std::size_t row = 0; row < size(kRows); ++row) {
        CHECK(
            same(row_of(all, row, size(kRows)), row_of(other, size(kRows) - 1 - row, size(kRows))));
      }
      // Padding rows and empty sequences give the empty answer.
      for (const std::size_t row : {std::size_t{5}, std::size_t{3}}) {
        const Result empty = row_of(all, row, size(kRows));
        for (const float x : empty.output) CHECK(x == 0);
        for (const float x : empty.lse) CHECK(x == -kInfinity);
        for (const QueryHeadReport& query : empty.query)
          CHECK((query.epsilon == 0 && query.planned_tokens == 0));
        for (const KvHeadReport& kv : empty.kv)
          CHECK((kv.resident_tokens == 0 && kv.fetched_tokens == 0));
      }
    }
  }
}

TEST_CASE("Layout and type of the views change no bit") {
  CacheConfig config = small_config();
  config.storage = DType::f16;
  config.layers = {layer_of(3, 2, 64, 80)};
  Random random(14);
  const std::int64_t n = 150;
  Block keys = random_block(random, n, 3, 64, 1.5);
  Block values = random_block(random, n, 3, 80, 1);
  Block queries = random_block(random, 2, 6, 64, 1);
  for (Block* block : {&keys, &values, &queries}) {
    for (float& x : block->data)
      x = verkv::reference::as_stored(x, DType::f16);  // so that f16 input is the same
  }
  const Scores scores = random_scores(random, 3, n, ScoreKind::random);

  // Copies `block` to memory with the given strides (in elements) and gaps of NaN.
  const auto laid_out = [](const Block& block, std::int64_t token_stride, std::int64_t head_stride,
                           bool half, std::vector<float>& floats,
                           std::vector<verkv::Half>& halves) {
    const std::size_t room =
        size((block.tokens - 1) * token_stride + (block.heads - 1) * head_stride + block.dim);
    floats.assign(room, kNaN);
    halves.assign(room, verkv::to_half(kNaN));
    for (std::int64_t t = 0; t < block.tokens; ++t) {
      for (std::int64_t h = 0; h < block.heads; ++h) {
        for (std::int64_t j = 0; j < block.dim; ++j) {
          const float x = block.at(t, h, j);
          floats[size(t * token_stride + h * head_stride + j)] = x;
          halves[size(t * token_stride + h * head_stride + j)] = verkv::to_half(x);
        }
      }
    }
    return TensorView{half ? static_cast<const void*>(halves.data()) : floats.data(),
                      half ? DType::f16 : DType::f32,
                      block.tokens,
                      block.heads,
                      block.dim,
                      token_stride,
                      head_stride};
  };

  std::vector<Result> results;
  for (const int layout : {0, 1, 2, 3}) {
    const auto cache = make_cache(config);
    const SequenceId a = cache->create_sequence(1);
    const SequenceId b = cache->create_sequence(2);
    const auto view = [&](const Block& block, std::vector<float>& floats,
                          std::vector<verkv::Half>& halves) {
      switch (layout) {
        case 0:
          return laid_out(block, block.heads * block.dim, block.dim, false, floats, halves);
        case 1:
          return laid_out(block, block.dim, block.tokens * block.dim, false, floats, halves);
        case 2:
          return laid_out(block, block.heads * (block.dim + 3) + 5, block.dim + 3, false, floats,
                          halves);
        default:
          return laid_out(block, block.dim + 1, block.tokens * (block.dim + 1) + 7, true, floats,
                          halves);
      }
    };
    std::vector<float> f0, f1, f2;
    std::vector<verkv::Half> h0, h1, h2;
    const TensorView key_view = view(keys, f0, h0);
    const TensorView value_view = view(values, f1, h1);
    for (const SequenceId id : {a, b}) {
      cache->append(id, 0, key_view, value_view);
      if (layout == 0) {
        compress(*cache, id, {scores});
      } else {
        // Scores with gaps between the heads.
        std::vector<float> spaced(size(3 * (n + 9)), kNaN);
        for (std::int64_t h = 0; h < 3; ++h) {
          std::copy(scores.data.begin() + h * n, scores.data.begin() + (h + 1) * n,
                    spaced.begin() + h * (n + 9));
        }
        const ImportanceView one{spaced.data(), 3, n, n + 9};
        cache->compress(id, std::span(&one, 1));
      }
    }
    results.push_back(attend(*cache, 0, {a, b}, view(queries, f2, h2)));
  }
  for (const Result& result : results) CHECK(same(result, results[0]));
  CHECK_FALSE(
      same(row_of(results[0], 0, 2), row_of(results[0], 1, 2)));  // other draws, other queries
}

TEST_CASE("Heads split over two managers answer as in one") {
  for (const SketchKind kind : {SketchKind::calibrated, SketchKind::exact}) {
    if (kind == SketchKind::exact && backend().thinning > 1) continue;
    CacheConfig whole = small_config();
    whole.sketch.kind = kind;
    whole.layers = {layer_of(4, 3, 64, 64), layer_of(4, 3, 64, 64)};
    const Story story = make_story(whole, 15);
    const Result expected = tell(whole, story);
    for (const std::int64_t first : {0, 2}) {
      CacheConfig part = whole;
      Story own = story;
      for (std::size_t l = 0; l < 2; ++l) {
        part.layers[l] = layer_of(2, 3, 64, 64);
        part.layers[l].first_global_kv_head = first;
        const auto cut = [](const Block& block, std::int64_t begin, std::int64_t heads) {
          Block result = constant_block(block.tokens, heads, block.dim, 0);
          for (std::int64_t t = 0; t < block.tokens; ++t) {
            for (std::int64_t h = 0; h < heads; ++h) {
              const std::vector<float> row = block.row(t, begin + h);
              std::copy(row.begin(), row.end(), result.data.begin() + (t * heads + h) * block.dim);
            }
          }
          return result;
        };
        own.keys[l] = cut(story.keys[l], first, 2);
        own.values[l] = cut(story.values[l], first, 2);
        own.queries[l] = cut(story.queries[l], 3 * first, 6);
        own.scores[l] = {2, kPrefill,
                         std::vector<float>(story.scores[l].data.begin() + first * kPrefill,
                                            story.scores[l].data.begin() + (first + 2) * kPrefill)};
      }
      const Result result = tell(part, own);
      for (std::size_t row = 0; row < size(2 * kDecode); ++row) {
        const Result all = row_of(expected, row, size(2 * kDecode));
        const Result half = row_of(result, row, size(2 * kDecode));
        const Result same_half = row_of(all, size(first / 2), 2);
        CHECK(same(half, same_half));
      }
    }
    // The second of two layers on another rank.
    CacheConfig last = whole;
    last.layers = {whole.layers[1]};
    last.layers[0].global_layer = 1;
    const Story own{{story.keys[1]}, {story.values[1]}, {story.queries[1]}, {story.scores[1]}};
    const Result result = tell(last, own);
    for (std::size_t step = 0; step < size(kDecode); ++step) {
      CHECK(same(row_of(result, step, size(kDecode)),
                 row_of(expected, 2 * step + 1, size(2 * kDecode))));
    }
  }
}

// ---- Growth during decode ----

TEST_CASE("A long decode stays small, follows the reference and keeps its promise") {
  for (const Pool pool : {Pool::head, Pool::layer, Pool::sequence}) {
    Random random(16);
    CacheConfig config = small_config();
    config.layers = {layer_of(2, 2, 64, 64)};
    config.pool = pool;
    config.keep = 0.25;
    config.local_tokens = 32;
    config.chunk_tokens = 64;
    config.sink_tokens = 4;
    config.sketch.kind = SketchKind::exact;
    config.fetch.epsilon = 0.1;
    config.fetch.delta = 0.1;
    const std::int64_t prefill = 200;
    const std::int64_t steps = trials(600);
    Filled filled = fill(config, {random_block(random, prefill, 2, 64, 1)},
                         {random_block(random, prefill, 2, 64, 1)},
                         {random_scores(random, 2, prefill, ScoreKind::random)}, 4);
    Mirror mirror(config, 4);
    mirror.append(0, filled.keys[0], filled.values[0]);
    mirror.compress(filled.scores);
    Tally tally;
    std::int64_t failures = 0;
    std::int64_t decisions = 0;
    std::int64_t not_certified = 0;
    for (std::int64_t step = 0; step < steps; ++step) {
      const Block keys = random_block(random, 1, 2, 64, 1);
      const Block values = random_block(random, 1, 2, 64, 1);
      const Block queries = random_block(random, 1, 4, 64, 1.2);
      filled.cache->append(filled.sequence, 0, keys.view(), values.view());
      mirror.append(0, keys, values);
      for (Block* block : {&filled.keys[0], &filled.values[0]}) ++block->tokens;
      filled.keys[0].data.insert(filled.keys[0].data.end(), keys.data.begin(), keys.data.end());
      filled.values[0].data.insert(filled.values[0].data.end(), values.data.begin(),
                                   values.data.end());

      const std::int64_t held = filled.cache->tokens(filled.sequence, 0);
      const std::int64_t compressed = filled.cache->compressed_tokens(filled.sequence, 0);
      REQUIRE(held == prefill + step + 1);
      REQUIRE(compressed == static_cast<std::int64_t>(mirror.head(0, 0).odds.size()));
      REQUIRE(held - compressed < config.local_tokens + *config.chunk_tokens);
      REQUIRE(held - compressed >= config.local_tokens);
      const Result result = attend(*filled.cache, 0, {filled.sequence}, queries);
      const bool checked = step % 20 == 0;
      const auto answers = mirror.attend(0, queries, 0, checked);
      // Scores come from binary32 probabilities: at an odds' rounding boundary a draw may differ,
      // hence the residents.
      if (checked) compare(config, 0, result, 0, answers, "step " + std::to_string(step), tally);
      for (std::int64_t h = 0; h < 4; ++h) {
        const Dense expected =
            dense(config, 0, filled.keys[0], filled.values[0], queries.row(0, h), h);
        const QueryHeadReport& query = result.query[size(h)];
        ++decisions;
        not_certified += !query.certified;
        const double off =
            std::fabs(std::exp(static_cast<double>(result.lse[size(h)]) - expected.lse) - 1);
        failures += off > query.epsilon + 1e-5;  // and binary32's share
      }
    }
    report(tally);
    CHECK(not_certified == 0);
    CHECK(verkv::reference::binomial_not_above(failures, decisions, config.fetch.delta));
    const double n = static_cast<double>(prefill + steps);
    const Result last =
        attend(*filled.cache, 0, {filled.sequence}, random_block(random, 1, 4, 64, 1));
    double residents = 0;
    for (const KvHeadReport& kv : last.kv) residents += static_cast<double>(kv.resident_tokens) / 2;
    // The window's extra tokens (fewer than local + chunk) come on top of the share.
    CHECK(residents > config.keep * n - 60);
    CHECK(residents < config.keep * n + 60 + 96);
  }
}

TEST_CASE("A window token that always gets the attention is kept") {
  CacheConfig config = small_config();
  config.layers = {layer_of(1, 2, 64, 64)};
  config.keep = 0.1;
  config.local_tokens = 8;
  config.chunk_tokens = 32;
  config.sketch.kind = SketchKind::exact;
  for (std::uint64_t draw = 0; draw < static_cast<std::uint64_t>(trials(20)); ++draw) {
    Random random(17);
    const Filled filled =
        fill(config, {random_block(random, 50, 1, 64, 0.1)}, {random_block(random, 50, 1, 64, 1)},
             {random_scores(random, 1, 50, ScoreKind::random)}, draw);
    Mirror mirror(config, draw);
    mirror.append(0, filled.keys[0], filled.values[0]);
    mirror.compress(filled.scores);
    const Block queries = random_block(random, 1, 2, 64, 1);
    Block same_queries = queries;
    for (std::int64_t j = 0; j < 64; ++j) same_queries.at(0, 1, j) = queries.at(0, 0, j);
    // Position 60 answers every query; 49 is the first of the chunk, 80 the last that is
    // compressed.
    for (std::int64_t step = 0; step < 60; ++step) {
      Block key = random_block(random, 1, 1, 64, 0.1);
      if (50 + step == 60) {
        for (std::int64_t j = 0; j < 64; ++j) key.at(0, 0, j) = 2 * queries.at(0, 0, j);
      }
      const Block value = random_block(random, 1, 1, 64, 1);
      filled.cache->append(filled.sequence, 0, key.view(), value.view());
      mirror.append(0, key, value);
      attend(*filled.cache, 0, {filled.sequence}, same_queries);
      mirror.attend(0, same_queries, 0, false);
    }
    REQUIRE(filled.cache->compressed_tokens(filled.sequence, 0) > 60);
    CHECK(mirror.head(0, 0).odds[60] == kInfinite);
    // Its weight is nearly all of D, so what the step reports tells whether it is resident: nothing
    // to fetch.
    const Result result = attend(*filled.cache, 0, {filled.sequence}, same_queries);
    CHECK(result.query[0].certified);
    CHECK(result.query[0].planned_tokens == 0);
  }
}

TEST_CASE("Window scores survive a sketch that is far off") {
  // A drawn token's exact logit lies hundreds above everything the plan knows; the window's
  // probabilities under the attention's shift would be 0 times infinity.
  Random random(18);
  CacheConfig config = small_config();
  config.layers = {layer_of(1, 1, 64, 64)};
  config.fetch.mode = FetchMode::never;
  config.study.cap.reset();
  config.keep = 0.5;
  config.sink_tokens = 0;
  config.chunk_tokens = 16;
  const auto cache = make_cache(config);
  const SequenceId sequence = cache->create_sequence(1);
  // Half of the coordinates take all bits of the sketch, and the query does not look at them.
  Block keys = random_block(random, 100, 1, 64, 30);
  for (std::int64_t t = 0; t < 100; ++t) {
    for (std::int64_t j = 0; j < 32; ++j) keys.at(t, 0, j) *= 50;
  }
  std::int64_t residents = 0;
  cache->append(sequence, 0, keys.view(), random_block(random, 100, 1, 64, 1).view());
  compress(*cache, sequence, {random_scores(random, 1, 100, ScoreKind::random)});
  for (int step = 0; step < 100; ++step) {
    const Block key = random_block(random, 1, 1, 64, 1);
    Block query = random_block(random, 1, 1, 64, 36);
    for (std::int64_t j = 0; j < 32; ++j) query.at(0, 0, j) = 0;
    cache->append(sequence, 0, key.view(), random_block(random, 1, 1, 64, 1).view());
    const Result result = attend(*cache, 0, {sequence}, query);
    for (const float x : result.output) REQUIRE(std::isfinite(x));
    REQUIRE(std::isfinite(result.query[0].epsilon));
    residents = result.kv[0].resident_tokens;
  }
  // Half of 200 tokens, and at most 24 of the window. A NaN score would count as one that is always
  // kept.
  CHECK(residents > 70);
  CHECK(residents < 140);
}

// ---- Bad input ----

namespace {

// Runs f, which must throw an E, and returns its text.
template <class E, class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    FAIL_CHECK("another exception: " << error.what());
    return {};
  }
  FAIL_CHECK("no exception");
  return {};
}

void check_names(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    INFO("\"" << text << "\" should name " << part);
    CHECK(text.find(part) != std::string::npos);
  }
}

bool same(const MemoryReport& a, const MemoryReport& b) {
  return a.resident_bytes == b.resident_bytes && a.sketch_bytes == b.sketch_bytes &&
         a.metadata_bytes == b.metadata_bytes && a.host_bytes == b.host_bytes &&
         a.workspace_bytes == b.workspace_bytes && a.reserved_bytes == b.reserved_bytes;
}

// A cache with two sequences, one compressed, and what it looked like before it was mistreated.
struct Victim {
  CacheConfig config;
  std::unique_ptr<KvCacheManager> cache;
  SequenceId a, b;
  Block queries;
  std::vector<Result> answers;
  MemoryReport memory;

  explicit Victim(CacheConfig c) : config(std::move(c)), cache(make_cache(config)) {
    Random random(20);
    a = cache->create_sequence();
    b = cache->create_sequence();
    queries = random_block(random, 2, 6, 64, 1);
    for (const SequenceId id : {a, b}) {
      for (std::int64_t l = 0; l < 3; ++l) {
        if (l == 1) continue;
        cache->append(id, l, random_block(random, 80, 2, 64, 1).view(),
                      random_block(random, 80, 2, 48, 1).view());
      }
    }
    const Scores scores = random_scores(random, 2, 80, ScoreKind::random);
    compress(*cache, a, {scores, {}, scores});
    for (const std::int64_t l : {0, 2}) answers.push_back(attend(*cache, l, {a, b}, queries));
    memory = cache->memory();
  }

  void check_unchanged() const {
    CHECK(same(cache->memory(), memory));
    for (const SequenceId id : {a, b}) {
      for (const std::int64_t l : {0, 2}) {
        CHECK(cache->tokens(id, l) == 80);
        CHECK(cache->compressed_tokens(id, l) == (id == a ? 72 : 0));
      }
    }
    CHECK(same(attend(*cache, 0, {a, b}, queries), answers[0]));
    CHECK(same(attend(*cache, 2, {a, b}, queries), answers[1]));
  }

  template <class E, class F>
  void refuses(F&& f, const std::vector<std::string>& parts) const {
    check_names(error_of<E>(f), parts);
    check_unchanged();
  }
};

CacheConfig victim_config() {
  CacheConfig config = small_config();
  LayerConfig layer = layer_of(2, 3, 64, 48);
  LayerConfig skipped = layer;
  skipped.cached = false;
  config.layers = {layer, skipped, layer};
  return config;
}

}  // namespace

TEST_CASE("Bad keys and values are refused and change nothing") {
  for (const DType storage : {DType::f32, DType::f16, DType::bf16}) {
    CacheConfig config = victim_config();
    config.storage = storage;
    const Victim victim(config);
    KvCacheManager& cache = *victim.cache;
    Random random(21);
    const Block keys = random_block(random, 3, 2, 64, 1);
    const Block values = random_block(random, 3, 2, 48, 1);
    const auto append = [&](const TensorView& k, const TensorView& v) {
      return [&cache, &victim, k, v] { cache.append(victim.a, 0, k, v); };
    };
    struct Number {
      float value;
      std::string text;
    };
    std::vector<Number> numbers = {{kNaN, "nan"}, {kInfinity, "inf"}, {-kInfinity, "-inf"}};
    if (storage == DType::f16) numbers.push_back({1e5f, "100000"});
    if (storage == DType::f16) numbers.push_back({-65520.0f, "-65520"});
    // The largest bfloat16 is 3.3895e38; the largest float would be rounded up to infinity.
    if (storage == DType::bf16) numbers.push_back({3.4e38f, "3.4e+38"});
    for (const Number& number : numbers) {
      Block bad = keys;
      bad.at(1, 1, 5) = number.value;
      victim.refuses<InvalidArgument>(append(bad.view(), values.view()),
                                      {"keys", "token 1", "head 1", "5", number.text});
      bad = values;
      bad.at(2, 0, 7) = number.value;
      victim.refuses<InvalidArgument>(append(keys.view(), bad.view()),
                                      {"values", "token 2", "head 0", "7", number.text});
    }
    if (storage == DType::f16) {
      Block bad = keys;
      bad.at(0, 0, 0) = 1e5f;
      victim.refuses<InvalidArgument>(append(bad.view(), values.view()),
                                      {"100000", "65504", "f16"});
    }
    // The same in the views' own types.
    std::vector<verkv::BFloat16> brain(keys.data.size());
    brain[77] = {0x7fc0};
    victim.refuses<InvalidArgument>(
        append(verkv::token_major(brain.data(), DType::bf16, 3, 2, 64), values.view()),
        {"keys", "nan"});
    std::vector<verkv::Half> half(keys.data.size());
    half[77] = {0x7c00};
    victim.refuses<InvalidArgument>(
        append(verkv::token_major(half.data(), DType::f16, 3, 2, 64), values.view()),
        {"keys", "inf"});
  }
}

TEST_CASE("Wrong shapes, sequences and layers are refused and change nothing") {
  const Victim victim(victim_config());
  KvCacheManager& cache = *victim.cache;
  Random random(22);
  const Block keys = random_block(random, 3, 2, 64, 1);
  const Block values = random_block(random, 3, 2, 48, 1);
  const auto append = [&](std::int64_t layer, const TensorView& k, const TensorView& v,
                          SequenceId id) {
    return [&cache, layer, k, v, id] { cache.append(id, layer, k, v); };
  };
  TensorView view = keys.view();
  view.heads = 3;
  victim.refuses<InvalidArgument>(append(0, view, values.view(), victim.a), {"keys", "3", "2"});
  view = keys.view();
  view.dim = 63;
  victim.refuses<InvalidArgument>(append(0, view, values.view(), victim.a), {"keys", "63", "64"});
  view = values.view();
  view.heads = 1;
  victim.refuses<InvalidArgument>(append(0, keys.view(), view, victim.a), {"values", "1", "2"});
  view = values.view();
  view.dim = 64;
  victim.refuses<InvalidArgument>(append(0, keys.view(), view, victim.a), {"values", "64", "48"});
  view = values.view();
  view.tokens = 2;
  victim.refuses<InvalidArgument>(append(0, keys.view(), view, victim.a), {"3", "2"});
  view = keys.view();
  view.tokens = -1;
  victim.refuses<InvalidArgument>(append(0, view, values.view(), victim.a), {"keys", "-1"});
  view = keys.view();
  view.data = nullptr;
  victim.refuses<InvalidArgument>(append(0, view, values.view(), victim.a), {"keys", "null", "3"});
  view = values.view();
  view.data = nullptr;
  victim.refuses<InvalidArgument>(append(0, keys.view(), view, victim.a), {"values", "null"});
  TensorView many_keys = keys.view();
  TensorView many_values = values.view();
  many_keys.tokens = many_values.tokens = std::int64_t{1} << 32;
  victim.refuses<CapacityError>(append(0, many_keys, many_values, victim.a),
                                {"4294967376", "4294967295"});

  const SequenceId unknown{12345};
  victim.refuses<InvalidArgument>(append(0, keys.view(), values.view(), unknown), {"12345"});
  victim.refuses<InvalidArgument>(append(0, keys.view(), values.view(), kNoSequence), {"-1"});
  victim.refuses<InvalidArgument>(append(3, keys.view(), values.view(), victim.a),
                                  {"layer 3", "2"});
  victim.refuses<InvalidArgument>(append(-1, keys.view(), values.view(), victim.a), {"layer -1"});
  victim.refuses<InvalidArgument>(append(1, keys.view(), values.view(), victim.a),
                                  {"layer 1", "no cache"});
  victim.refuses<InvalidArgument>([&] { cache.erase(unknown); }, {"12345"});
  victim.refuses<InvalidArgument>([&] { cache.tokens(unknown, 0); }, {"12345"});
  victim.refuses<InvalidArgument>([&] { cache.compressed_tokens(victim.a, 9); }, {"layer 9"});
  victim.refuses<InvalidArgument>([&] { cache.redraw(unknown, 1); }, {"12345"});
  victim.refuses<InvalidArgument>([&] { (void)cache.memory(unknown); }, {"12345"});
  victim.refuses<InvalidArgument>([&] { (void)cache.statistics(3); }, {"layer 3"});

  // Fine: nothing at all.
  cache.append(victim.a, 0, TensorView{nullptr, DType::f32, 0, 2, 64, 128, 64},
               TensorView{nullptr, DType::f32, 0, 2, 48, 96, 48});
  victim.check_unchanged();
  AttendBatch empty;
  empty.queries = TensorView{nullptr, DType::f32, 0, 6, 64, 384, 64};
  cache.attend(0, empty);
  victim.check_unchanged();
}

TEST_CASE("Bad importance is refused and changes nothing") {
  const Victim victim(victim_config());
  KvCacheManager& cache = *victim.cache;
  Random random(23);
  const Scores good = random_scores(random, 2, 80, ScoreKind::random);
  const auto give = [&](const Scores& third) {
    return [&cache, &victim, &good, third] { compress(cache, victim.b, {good, {}, third}); };
  };
  struct Number {
    float value;
    std::string text;
  };
  for (const Number& number :
       {Number{kNaN, "nan"}, Number{-0.5f, "-0.5"}, Number{kInfinity, "inf"}}) {
    Scores bad = good;
    bad.data[80 + 33] = number.value;
    victim.refuses<InvalidArgument>(give(bad), {"layer 2", "head 1", "token 33", number.text});
    bad = good;
    bad.data[79] = number.value;  // in the local window: never used, refused all the same
    victim.refuses<InvalidArgument>(give(bad), {"layer 2", "head 0", "token 79", number.text});
  }
  Scores few = random_scores(random, 2, 79, ScoreKind::random);
  victim.refuses<InvalidArgument>(give(few), {"layer 2", "79", "80"});
  victim.refuses<InvalidArgument>(give(random_scores(random, 1, 80, ScoreKind::random)),
                                  {"layer 2", "1 head", "2 head"});
  victim.refuses<InvalidArgument>(
      [&] {
        std::vector<ImportanceView> views = {good.view(), {}, {nullptr, 2, 80, 80}};
        cache.compress(victim.b, views);
      },
      {"layer 2", "null", "80"});
  victim.refuses<InvalidArgument>([&] { compress(cache, victim.b, {good, {}}); }, {"2", "3"});
  victim.refuses<InvalidArgument>(
      [&] {
        compress(cache, SequenceId{77}, {good, {}, good});
      },
      {"77"});
  // A second compression is about the tokens that are not compressed yet: 8 of them.
  victim.refuses<InvalidArgument>(
      [&] {
        compress(cache, victim.a, {good, {}, good});
      },
      {"layer 0", "80", "8"});

  // Fine: an empty sequence, whatever the stride.
  const SequenceId empty = cache.create_sequence();
  const std::vector<ImportanceView> none(3, ImportanceView{nullptr, 2, 0, 80});
  cache.compress(empty, none);
  cache.erase(empty);
  CHECK(same_bits(attend(cache, 0, {victim.a, victim.b}, victim.queries).output,
                  victim.answers[0].output));
}

TEST_CASE("Bad batches are refused and change nothing") {
  const Victim victim(victim_config());
  KvCacheManager& cache = *victim.cache;
  const LayerStatistics before = cache.statistics(0);
  std::vector<float> output(2 * 6 * 48, 5.0f);
  std::vector<QueryHeadReport> query_reports(12);
  std::vector<KvHeadReport> kv_reports(4);
  const std::vector<SequenceId> both = {victim.a, victim.b};
  AttendBatch good;
  good.sequences = both;
  good.queries = victim.queries.view();
  good.output = output;
  const auto refused = [&](const AttendBatch& batch, std::int64_t layer,
                           const std::vector<std::string>& parts) {
    check_names(error_of<InvalidArgument>([&] { cache.attend(layer, batch); }), parts);
    CHECK(std::all_of(output.begin(), output.end(), [](float x) { return x == 5.0f; }));
    CHECK(cache.statistics(0).steps == before.steps);
    CHECK(same(cache.memory(), victim.memory));
  };
  AttendBatch bad = good;
  bad.queries.heads = 7;
  refused(bad, 0, {"queries", "7", "6"});
  bad = good;
  bad.queries.dim = 65;
  refused(bad, 0, {"queries", "65", "64"});
  bad = good;
  bad.queries.tokens = 1;
  refused(bad, 0, {"1", "2"});
  bad = good;
  bad.queries.tokens = 3;
  refused(bad, 0, {"3", "2"});
  bad = good;
  bad.queries.data = nullptr;
  refused(bad, 0, {"queries", "null"});
  bad = good;
  bad.output = {};
  refused(bad, 0, {"output", "0", "2"});
  bad.output = std::span(output).first(output.size() - 1);
  refused(bad, 0, {"output", "575", "2", "6", "48"});
  bad = good;
  bad.lse = std::span(output).first(11);
  refused(bad, 0, {"LSE", "11", "2", "6"});
  bad = good;
  bad.query_reports = std::span(query_reports).first(11);
  refused(bad, 0, {"11", "2", "6"});
  bad = good;
  bad.kv_reports = std::span(kv_reports).first(3);
  refused(bad, 0, {"3", "2"});
  const std::vector<SequenceId> twice = {victim.a, victim.a};
  bad = good;
  bad.sequences = twice;
  refused(bad, 0, {"sequence " + std::to_string(victim.a.value), "twice"});
  const std::vector<SequenceId> unknown = {victim.a, SequenceId{99}};
  bad.sequences = unknown;
  refused(bad, 0, {"99"});
  refused(good, 1, {"layer 1"});
  refused(good, 3, {"layer 3"});
  for (const float x : {kNaN, kInfinity, -kInfinity}) {
    Block queries = victim.queries;
    queries.at(1, 4, 13) = x;
    bad = good;
    bad.queries = queries.view();
    refused(bad, 0, {"row 1", "head 4", "13"});
  }
  victim.check_unchanged();

  // A padding row's query is not looked at, and several padding rows are no repetition.
  const std::vector<SequenceId> padding = {kNoSequence, kNoSequence};
  Block queries = victim.queries;
  queries.at(1, 4, 13) = kNaN;
  bad = good;
  bad.sequences = padding;
  bad.queries = queries.view();
  cache.attend(0, bad);
  CHECK(std::all_of(output.begin(), output.end(), [](float x) { return x == 0; }));
}

TEST_CASE("A configuration that cannot be served is refused with every reason") {
  const auto refused = [](const auto& change, const std::vector<std::string>& parts) {
    CacheConfig config = small_config();
    change(config);
    const std::vector<std::string> reasons = reasons_against(config);
    REQUIRE_FALSE(reasons.empty());
    check_names(reasons[0], parts);
    check_names(error_of<InvalidArgument>([&] { make_cache(config); }), parts);
  };
  CHECK(reasons_against(small_config()).empty());
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double x : {0.0, 1.0, -0.1, 1.5, nan, -kInfinite, kInfinite}) {
    refused([x](CacheConfig& c) { c.fetch.epsilon = x; }, {"epsilon", "(0, 1)"});
    refused([x](CacheConfig& c) { c.fetch.delta = x; }, {"delta", "(0, 1)"});
  }
  refused([](CacheConfig& c) { c.fetch.epsilon = 1.5; }, {"1.5"});
  refused([](CacheConfig& c) { c.fetch.delta = kInfinite; }, {"delta"});
  for (const double x : {0.0, -0.25, 1.25, nan, kInfinite}) {
    refused([x](CacheConfig& c) { c.keep = x; }, {"keep", "(0, 1]"});
  }
  refused([](CacheConfig& c) { c.keep = 1.25; }, {"1.25"});
  for (const double x : {0.0, -1.0, nan, kInfinite}) {
    refused([x](CacheConfig& c) { c.fetch.risk = x; }, {"risk", "0"});
    refused([x](CacheConfig& c) { c.study.probability = x; }, {"probability", "0"});
  }
  for (const double x : {0.0, 0.99, -2.0, nan, kInfinite}) {
    refused([x](CacheConfig& c) { c.study.cap = x; }, {"cap", "1"});
  }
  for (const double x : {-0.1, 0.3, nan}) {
    refused([x](CacheConfig& c) { c.study.inclusion_floor = x; }, {"floor", "0.2"});
  }
  const std::int64_t huge = std::numeric_limits<std::int64_t>::max();
  refused([](CacheConfig& c) { c.layers.clear(); }, {"layer"});
  refused([](CacheConfig& c) { c.layers[0].kv_heads = 0; }, {"layer 0", "0"});
  refused([huge](CacheConfig& c) { c.layers[0].kv_heads = huge; }, {"layer 0", "65536"});
  refused([huge](CacheConfig& c) { c.layers[0].first_global_kv_head = huge; },
          {"layer 0", "65536"});
  refused([](CacheConfig& c) { c.layers[0].first_global_kv_head = -1; }, {"layer 0", "-1"});
  refused([](CacheConfig& c) { c.layers[0].query_heads = 5; }, {"layer 0", "5", "2"});
  refused([](CacheConfig& c) { c.layers[0].query_heads = 0; }, {"layer 0", "0", "2"});
  refused([](CacheConfig& c) { c.layers[0].query_heads = std::int64_t{1} << 40; },
          {"layer 0", "1099511627776", "65536"});
  for (const std::int64_t dim : {std::int64_t{0}, std::int64_t{-64}, std::int64_t{513}, huge}) {
    refused([dim](CacheConfig& c) { c.layers[0].key_dim = dim; },
            {"layer 0", "key", std::to_string(dim), "512"});
    refused([dim](CacheConfig& c) { c.layers[0].value_dim = dim; },
            {"layer 0", "value", std::to_string(dim), "512"});
  }
  for (const double x : {0.0, -1.0, nan, kInfinite}) {
    refused([x](CacheConfig& c) { c.layers[0].scale = x; }, {"layer 0", "scale"});
    refused([x](CacheConfig& c) { c.layers[0].soft_cap = x; }, {"layer 0", "soft cap"});
  }
  refused([](CacheConfig& c) { c.layers[0].window = 4096; }, {"layer 0", "4096", "window"});
  refused([](CacheConfig& c) { c.layers[0].global_layer = 65536; }, {"layer 0", "65536", "65535"});
  refused([](CacheConfig& c) { c.layers[0].window = 0; }, {"layer 0", "0", "window"});
  refused([](CacheConfig& c) { c.layers[0].global_layer = -2; }, {"layer 0", "-2"});
  refused([](CacheConfig& c) { c.layers[0].global_layer = -1; }, {"layer 0", "-1"});
  refused([](CacheConfig& c) { c.sink_tokens = -1; }, {"-1", "sink"});
  refused([](CacheConfig& c) { c.local_tokens = -3; }, {"-3", "local"});
  refused([](CacheConfig& c) { c.chunk_tokens = -2; }, {"-2", "chunk"});
  refused([](CacheConfig& c) { c.chunk_tokens = 0; }, {"0", "chunk"});
  refused([](CacheConfig& c) { c.sketch.bits = 5; }, {"5", "2, 3 and 4"});
  refused([](CacheConfig& c) { c.sketch.bits = 1; }, {"1", "2, 3 and 4"});
  refused([](CacheConfig& c) { c.fetch.limit_tokens = -7; }, {"-7", "limit"});
  refused([](CacheConfig& c) { c.fetch.limit_tokens = 0; }, {"0", "limit"});
  refused([](CacheConfig& c) { c.threads = 0; }, {"0 threads", "1"});
  refused([](CacheConfig& c) { c.fast_bytes_limit = -8; }, {"-8", "fast"});
  refused([](CacheConfig& c) { c.host_bytes_limit = -9; }, {"-9", "host"});

  // Every reason at once, one sentence each.
  CacheConfig bad = small_config();
  bad.keep = 2;
  bad.fetch.delta = 0;
  bad.sketch.bits = 9;
  CHECK(reasons_against(bad).size() == 3);
  check_names(error_of<InvalidArgument>([&] { make_cache(bad); }), {"keep 2", "delta 0", "9 bits"});

  // Layers that are not cached may look like anything.
  CacheConfig skipped = small_config();
  skipped.layers.push_back({});
  skipped.layers[1].cached = false;
  skipped.layers[1].window = 1024;
  CHECK(reasons_against(skipped).empty());
  CHECK(make_cache(skipped) != nullptr);
}

TEST_CASE("Settings beyond every length of a cache are served") {
  Random random(24);
  const std::int64_t huge = std::numeric_limits<std::int64_t>::max();
  for (const int which : {0, 1, 2, 3}) {
    CacheConfig config = small_config();
    if (which == 0) config.local_tokens = huge;
    if (which == 1) config.sink_tokens = huge;
    if (which == 2) config.chunk_tokens = huge;
    if (which == 3) config.fetch.limit_tokens = huge;
    const Filled filled =
        fill(config, {random_block(random, 100, 2, 64, 1)}, {random_block(random, 100, 2, 64, 1)},
             {random_scores(random, 2, 100, ScoreKind::random)});
    for (int step = 0; step < 40; ++step) {
      filled.cache->append(filled.sequence, 0, random_block(random, 1, 2, 64, 1).view(),
                           random_block(random, 1, 2, 64, 1).view());
    }
    const Result result =
        attend(*filled.cache, 0, {filled.sequence}, random_block(random, 1, 6, 64, 1));
    INFO("setting " << which);
    for (const float x : result.output) CHECK(std::isfinite(x));
    CHECK(result.query[0].certified);
    if (which <= 1) CHECK(result.query[0].epsilon == 0);
  }
  // The number of bits means nothing to the exact sketch.
  for (const int bits : {-1, 0, 1, 8, 31, 1000}) {
    CacheConfig config = small_config();
    config.sketch = {SketchKind::exact, bits};
    const Filled filled =
        fill(config, {random_block(random, 60, 2, 64, 1)}, {random_block(random, 60, 2, 64, 1)},
             {random_scores(random, 2, 60, ScoreKind::random)});
    CHECK(attend(*filled.cache, 0, {filled.sequence}, random_block(random, 1, 6, 64, 1))
              .query[0]
              .certified);
    CHECK(filled.cache->memory().sketch_bytes == 0);
  }
}

TEST_CASE("Byte limits hold on both tiers") {
  Random random(25);
  const Block keys = random_block(random, 10, 2, 64, 1);
  const Block values = random_block(random, 10, 2, 64, 1);
  // 10 tokens of 2 heads with 128 numbers of 4 bytes.
  const std::int64_t rows = 10 * 2 * 128 * 4;
  const auto usage = [](const KvCacheManager& cache, bool host) {
    return host ? cache.memory().host_bytes : cache.memory().fast_bytes();
  };
  for (const bool host : {true, false}) {
    for (const std::int64_t limit :
         {rows - 1, rows, rows + 100, 2 * rows, 2 * rows + 2 * 10 * 2 * 12}) {
      CacheConfig config = small_config();
      (host ? config.host_bytes_limit : config.fast_bytes_limit) = limit;
      const auto cache = make_cache(config);
      const SequenceId a = cache->create_sequence();
      const SequenceId b = cache->create_sequence();
      INFO("host " << host << ", limit " << limit);
      bool refused = false;
      for (const SequenceId id : {a, b, a}) {
        const MemoryReport before = cache->memory();
        const std::int64_t held = cache->tokens(id, 0);
        try {
          cache->append(id, 0, keys.view(), values.view());
        } catch (const CapacityError& error) {
          refused = true;
          check_names(error.what(), {host ? "host" : "fast", std::to_string(limit)});
          CHECK(same(cache->memory(), before));
          CHECK(cache->tokens(id, 0) == held);
        }
        CHECK(usage(*cache, host) <= limit);
      }
      CHECK(refused);
      // What is erased is free again.
      cache->erase(a);
      cache->erase(b);
      const SequenceId c = cache->create_sequence();
      if (limit >= rows + (host ? 0 : 10 * 2 * 12)) cache->append(c, 0, keys.view(), values.view());
    }
  }
}

TEST_CASE("Overflowing logits never certify") {
  for (const bool vector_code : vector_codes()) {
    for (const SketchKind kind : {SketchKind::exact, SketchKind::calibrated}) {
      for (const FetchMode mode : {FetchMode::verified, FetchMode::never, FetchMode::always}) {
        for (const FetchOrder order : orders()) {
          for (const float magnitude : {1e30f, 3.4e38f}) {
            Random random(26);
            CacheConfig config = small_config();
            config.study.vector_code = vector_code;
            config.sketch.kind = kind;
            config.fetch.mode = mode;
            config.study.order = order;
            config.fetch.risk = 1e-4;
            Block keys = random_block(random, 100, 2, 64, 1);
            for (float& x : keys.data) x = x > 0 ? magnitude : -magnitude;
            Block queries = random_block(random, 1, 6, 64, 1);
            for (float& x : queries.data) x = x > 0 ? 1e30f : -1e30f;
            const Filled filled = fill(config, {keys}, {random_block(random, 100, 2, 64, 1)},
                                       {random_scores(random, 2, 100, ScoreKind::random)});
            for (int step = 0; step < (backend().thinning > 1 ? 8 : 40); ++step) {
              filled.cache->append(filled.sequence, 0, random_block(random, 1, 2, 64, 1).view(),
                                   random_block(random, 1, 2, 64, 1).view());
              const Result result = attend(*filled.cache, 0, {filled.sequence}, queries);
              for (const QueryHeadReport& query : result.query) {
                REQUIRE(query.epsilon == kInfinite);
                REQUIRE_FALSE(query.certified);
              }
            }
            // The next query is an ordinary one and must see nothing of it.
            const Block tame = constant_block(1, 6, 64, 0);
            const Result after = attend(*filled.cache, 0, {filled.sequence}, tame);
            if (kind == SketchKind::exact) {
              for (const float x : after.output) CHECK(std::isfinite(x));
              for (const QueryHeadReport& query : after.query) CHECK(query.epsilon < kInfinite);
            }
          }
        }
      }
    }
  }
}

// ---- The limit on fetched tokens ----

TEST_CASE("A limit on fetched tokens is kept, reported, and the certificate stays honest") {
  Random random(27);
  Tally tally;
  std::int64_t missed = 0;
  for (const std::int64_t limit : {1, 4, 16, 1000}) {
    for (const FetchMode mode : {FetchMode::verified, FetchMode::always}) {
      for (const FetchOrder order : orders()) {
        CacheConfig config = small_config();
        config.fetch.mode = mode;
        config.study.order = order;
        config.fetch.limit_tokens = limit;
        config.fetch.epsilon = 0.05;
        const std::int64_t n = 100;
        const std::vector<Scores> scores = {random_scores(random, 2, n, ScoreKind::random)};
        const Filled filled = fill(config, {random_block(random, n, 2, 64, 1)},
                                   {random_block(random, n, 2, 64, 1)}, scores);
        Mirror mirror(config, 0);
        mirror.append(0, filled.keys[0], filled.values[0]);
        mirror.compress(scores);
        const Block queries = random_block(random, 1, 6, 64, 1);
        const Result result = attend(*filled.cache, 0, {filled.sequence}, queries);
        compare(config, 0, result, 0, mirror.attend(0, queries, 0),
                "limit " + std::to_string(limit), tally);
        for (std::size_t h = 0; h < 2; ++h) {
          CHECK(result.kv[h].fetched_tokens <= limit);
          CHECK(result.kv[h].moved_tokens <= result.kv[h].fetched_tokens);
          CHECK(result.kv[h].limited == (limit < 1000));
        }
        for (const QueryHeadReport& query : result.query) missed += !query.certified;
      }
    }
  }
  report(tally);
  CHECK(missed > 0);
}

TEST_CASE("What the certificate's plan fetches does certify") {
  // Many tokens of little weight each: the certificate passes epsilon in tiny steps, and the sums
  // of the plan and of the verification round differently.
  for (const FetchOrder order : orders()) {
    Random random(28);
    CacheConfig config = small_config();
    config.layers = {layer_of(1, 4, 64, 64)};
    config.study.order = order;
    const bool thin = order == FetchOrder::exact || backend().thinning > 1;
    const std::int64_t n = thin ? 2000 : 8000;
    Filled filled{};
    std::int64_t decisions = 0;
    for (const double epsilon : {0.01, 0.02, 0.05}) {
      config.fetch.epsilon = epsilon;
      filled =
          fill(config, {random_block(random, n, 1, 64, 0.5)}, {random_block(random, n, 1, 64, 1)},
               {random_scores(random, 1, n, ScoreKind::random)});
      for (int step = 0; step < (thin ? 4 : 20); ++step) {
        const Result result =
            attend(*filled.cache, 0, {filled.sequence}, random_block(random, 1, 4, 64, 1));
        for (const QueryHeadReport& query : result.query) {
          INFO("epsilon " << epsilon << ", reached " << query.epsilon / epsilon - 1
                          << " above, step " << step);
          CHECK(query.certified);
          ++decisions;
        }
      }
    }
    CHECK(decisions > 0);
  }
}

// ---- Memory and statistics ----

TEST_CASE("Every byte is accounted for") {
  for (const SketchKind kind : {SketchKind::exact, SketchKind::calibrated}) {
    for (const int bits : {2, 3, 4}) {
      for (const DType storage : {DType::f32, DType::f16}) {
        CacheConfig config = small_config();
        config.storage = storage;
        config.sketch = {kind, bits};
        config.layers = {layer_of(2, 3, 100, 72), layer_of(1, 1, 64, 64)};
        config.layers[1].dense = true;
        const auto cache = make_cache(config);
        std::vector<SequenceId> ids;
        std::vector<Mirror> mirrors;
        Random random(29);
        for (const std::int64_t n : {0, 1, 33, 150}) {
          ids.push_back(cache->create_sequence(ids.size()));
          mirrors.emplace_back(config, ids.size() - 1);
          std::vector<Scores> scores;
          for (std::int64_t l = 0; l < 2; ++l) {
            const LayerConfig& layer = config.layers[size(l)];
            const Block keys = random_block(random, n, layer.kv_heads, layer.key_dim, 1);
            const Block values = random_block(random, n, layer.kv_heads, layer.value_dim, 1);
            cache->append(ids.back(), l, keys.view(), values.view());
            mirrors.back().append(l, keys, values);
            scores.push_back(random_scores(random, layer.kv_heads, n, ScoreKind::random));
          }
          const auto check = [&](const char* when) {
            const MemoryReport actual = cache->memory(ids.back());
            const MemoryReport expected = mirrors.back().memory();
            INFO(when << ", n " << n << ", sketch " << static_cast<int>(kind) << "/" << bits);
            CHECK(actual.resident_bytes == expected.resident_bytes);
            CHECK(actual.sketch_bytes == expected.sketch_bytes);
            CHECK(actual.metadata_bytes == expected.metadata_bytes);
            CHECK(actual.host_bytes == expected.host_bytes);
            CHECK(actual.basis_bytes == expected.basis_bytes);
            CHECK(actual.workspace_bytes == 0);
          };
          check("appended");
          compress(*cache, ids.back(), scores);
          mirrors.back().compress(scores);
          check("compressed");
          // The layers decode without attention in between: scores are 0, odds uniform.
          for (int step = 0; step < 40; ++step) {
            for (std::int64_t l = 0; l < 2; ++l) {
              const LayerConfig& layer = config.layers[size(l)];
              const Block keys = random_block(random, 1, layer.kv_heads, layer.key_dim, 1);
              const Block values = random_block(random, 1, layer.kv_heads, layer.value_dim, 1);
              cache->append(ids.back(), l, keys.view(), values.view());
              mirrors.back().append(l, keys, values);
            }
          }
          check("decoded");
          cache->redraw(ids.back(), 1000 + ids.size());
          mirrors.back().redraw(1000 + ids.size());
          check("drawn anew");
        }
        MemoryReport sum;
        for (const SequenceId id : ids) {
          const MemoryReport one = cache->memory(id);
          sum.resident_bytes += one.resident_bytes;
          sum.sketch_bytes += one.sketch_bytes;
          sum.metadata_bytes += one.metadata_bytes;
          sum.host_bytes += one.host_bytes;
          sum.reserved_bytes += one.reserved_bytes;
        }
        sum.workspace_bytes = cache->memory().workspace_bytes;
        CHECK(same(cache->memory(), sum));
        CHECK(sum.workspace_bytes > 0);
        for (const SequenceId id : ids) cache->erase(id);
        MemoryReport none;
        none.workspace_bytes = sum.workspace_bytes;
        CHECK(same(cache->memory(), none));
      }
    }
  }
}

TEST_CASE("A share of the fast tier is met by the keep that is computed for it", "[cpu]") {
  Random random(30);
  for (const int bits : {2, 4}) {
    for (const double share : {0.2, 0.4}) {
      CacheConfig config = small_config();
      config.storage = DType::f16;
      config.sketch.bits = bits;
      config.layers = {layer_of(1, 1, 128, 128)};
      config.sink_tokens = 0;
      config.local_tokens = 0;
      config.keep =
          verkv::keep_for_fast_share(share, config.layers[0], config.storage, config.sketch);
      const std::int64_t n = 8000;
      const Filled filled =
          fill(config, {random_block(random, n, 1, 128, 1)}, {random_block(random, n, 1, 128, 1)},
               {random_scores(random, 1, n, ScoreKind::random)});
      const MemoryReport memory = filled.cache->memory();
      const double actual =
          static_cast<double>(memory.fast_bytes()) / static_cast<double>(memory.host_bytes);
      // The number of residents is a sum of Bernoulli numbers.
      const double slack =
          verkv::reference::bernstein_bound(config.keep * static_cast<double>(n), 1, 1) /
          static_cast<double>(n);
      CHECK(std::fabs(actual - share) < 1.02 * slack + 1e-3);
    }
  }
  const LayerConfig layer = layer_of(1, 1, 128, 128);
  CHECK(verkv::keep_for_fast_share(1, layer, DType::f16, {SketchKind::exact, 2}) <= 1);
  check_names(
      error_of<InvalidArgument>([&] { verkv::keep_for_fast_share(0.05, layer, DType::f16, {}); }),
      {"0.05", "0.07"});  // (32 + 2 + 2) / 512 = 0.0703
  for (const double share : {0.0, -1.0, 1.1, std::numeric_limits<double>::quiet_NaN()}) {
    check_names(error_of<InvalidArgument>(
                    [&] { verkv::keep_for_fast_share(share, layer, DType::f16, {}); }),
                {"(0, 1]"});
  }
}

TEST_CASE("Running out of memory changes nothing", "[cpu]") {
  for (const int what : {0, 1, 2, 3, 4}) {
    CacheConfig config = victim_config();
    if (what == 1) config.sketch.kind = SketchKind::exact;
    const Victim victim(config);
    KvCacheManager& cache = *victim.cache;
    Random random(36);
    const Block keys = random_block(random, 100, 2, 64, 1);
    const Block values = random_block(random, 100, 2, 48, 1);
    const Scores scores = random_scores(random, 2, 80, ScoreKind::random);
    const std::vector<ImportanceView> views = {scores.view(), {}, scores.view()};
    std::int64_t failed = 0;
    for (std::int64_t limit = 0;; ++limit) {
      REQUIRE(limit < 1000);
      bool threw = false;
      allowed = limit;
      try {
        if (what == 0) cache.append(victim.b, 0, keys.view(), values.view());
        if (what == 1 || what == 4) cache.compress(victim.b, views);
        if (what == 2) cache.redraw(victim.a, 99);
        if (what == 3) cache.create_sequence();
      } catch (const std::bad_alloc&) {
        threw = true;
      }
      allowed = -1;
      if (!threw) break;
      ++failed;
      INFO("call " << what << ", allocation " << limit);
      const MemoryReport memory = cache.memory();
      CHECK(memory.fast_bytes() == victim.memory.fast_bytes());
      CHECK(memory.host_bytes == victim.memory.host_bytes);
      CHECK(memory.basis_bytes == victim.memory.basis_bytes);
      for (const SequenceId id : {victim.a, victim.b}) {
        CHECK(cache.tokens(id, 0) == 80);
        CHECK(cache.compressed_tokens(id, 0) == (id == victim.a ? 72 : 0));
      }
      CHECK(same(attend(cache, 0, {victim.a, victim.b}, victim.queries), victim.answers[0]));
      CHECK(same(attend(cache, 2, {victim.a, victim.b}, victim.queries), victim.answers[1]));
    }
    CHECK(failed > 0);
    // And then it has happened as a whole.
    if (what == 0) CHECK(cache.tokens(victim.b, 0) == 180);
    if (what == 1 || what == 4) CHECK(cache.compressed_tokens(victim.b, 2) == 72);
    if (what == 3) continue;
    const Result result = attend(cache, 0, {victim.a, victim.b}, victim.queries);
    CHECK_FALSE(same(result, victim.answers[0]));
  }
}

TEST_CASE("Statistics are the sums of the reports") {
  CacheConfig config = small_config();
  config.layers = {layer_of(2, 3, 64, 64), layer_of(2, 2, 64, 64)};
  config.fetch.limit_tokens = 12;
  Random random(31);
  const auto cache = make_cache(config);
  std::vector<SequenceId> ids = {kNoSequence};
  for (const std::int64_t n : {0, 50, 120}) {
    ids.push_back(cache->create_sequence());
    std::vector<Scores> scores;
    for (std::int64_t l = 0; l < 2; ++l) {
      cache->append(ids.back(), l, random_block(random, n, 2, 64, 1).view(),
                    random_block(random, n, 2, 64, 1).view());
      scores.push_back(random_scores(random, 2, n, ScoreKind::random));
    }
    compress(*cache, ids.back(), scores);
  }
  std::vector<LayerStatistics> expected(2);
  for (int step = 0; step < 20; ++step) {
    for (std::int64_t l = 0; l < 2; ++l) {
      for (std::size_t i = 1; i < ids.size(); ++i) {
        cache->append(ids[i], l, random_block(random, 1, 2, 64, 1).view(),
                      random_block(random, 1, 2, 64, 1).view());
      }
      const std::int64_t heads = config.layers[size(l)].query_heads;
      const Result result = attend(*cache, l, ids, random_block(random, 4, heads, 64, 1));
      LayerStatistics& s = expected[size(l)];
      for (std::size_t row = 1; row < ids.size(); ++row) {
        ++s.steps;
        for (std::size_t h = 0; h < size(heads); ++h) {
          const QueryHeadReport& query = result.query[row * size(heads) + h];
          ++s.decisions;
          s.certified += query.certified ? 1 : 0;
          s.fetching += query.planned_tokens > 0 ? 1 : 0;
          s.planned_tokens += query.planned_tokens;
        }
        for (std::size_t h = 0; h < 2; ++h) {
          const KvHeadReport& kv = result.kv[row * 2 + h];
          s.fetched_tokens += kv.fetched_tokens;
          s.moved_tokens += kv.moved_tokens;
          s.moved_bytes += kv.moved_bytes;
          s.resident_tokens += kv.resident_tokens;
          s.cached_tokens += cache->tokens(ids[row], l);
        }
      }
    }
  }
  const auto check = [&](std::int64_t l, const LayerStatistics& s) {
    const LayerStatistics actual = cache->statistics(l);
    CHECK(actual.steps == s.steps);
    CHECK(actual.decisions == s.decisions);
    CHECK(actual.certified == s.certified);
    CHECK(actual.fetching == s.fetching);
    CHECK(actual.planned_tokens == s.planned_tokens);
    CHECK(actual.fetched_tokens == s.fetched_tokens);
    CHECK(actual.moved_tokens == s.moved_tokens);
    CHECK(actual.moved_bytes == s.moved_bytes);
    CHECK(actual.cached_tokens == s.cached_tokens);
    CHECK(actual.resident_tokens == s.resident_tokens);
  };
  for (std::int64_t l = 0; l < 2; ++l) check(l, expected[size(l)]);
  CHECK(expected[0].moved_tokens > 0);
  // Without reports of the caller's the same is counted.
  std::vector<float> output(4 * 6 * 64);
  const Block queries = random_block(random, 4, 6, 64, 1);
  const Result seen = attend(*cache, 0, ids, queries);
  const LayerStatistics middle = cache->statistics(0);
  AttendBatch batch;
  batch.sequences = ids;
  batch.queries = queries.view();
  batch.output = output;
  cache->attend(0, batch);
  CHECK(same_bits(output, seen.output));
  CHECK(cache->statistics(0).moved_tokens - middle.moved_tokens ==
        middle.moved_tokens - expected[0].moved_tokens);
  CHECK(cache->statistics(0).steps == middle.steps + 3);
  cache->reset_statistics();
  for (std::int64_t l = 0; l < 2; ++l) check(l, {});
}

TEST_CASE("A step allocates nothing", "[cpu]") {
  struct Case {
    const char* name;
    FetchMode mode;
    std::optional<double> epsilon;
    std::optional<double> risk;
    FetchOrder order;
    std::optional<std::int64_t> limit;
    SketchKind sketch;
  };
  for (const Case& c :
       {Case{"certificate",
             FetchMode::verified,
             0.1,
             {},
             FetchOrder::worth,
             {},
             SketchKind::calibrated},
        Case{"risk", FetchMode::verified, {}, 1e-4, FetchOrder::worth, {}, SketchKind::calibrated},
        Case{"both, limited", FetchMode::verified, 0.1, 1e-4, FetchOrder::worth, 7,
             SketchKind::calibrated},
        Case{"exact order",
             FetchMode::verified,
             0.1,
             1e-4,
             FetchOrder::exact,
             {},
             SketchKind::exact},
        Case{"always", FetchMode::always, 0.1, {}, FetchOrder::worth, 9, SketchKind::calibrated},
        Case{"never", FetchMode::never, 0.1, {}, FetchOrder::worth, {}, SketchKind::calibrated}}) {
    for (const int threads : {1, 2}) {
      CacheConfig config = small_config();
      config.threads = threads;
      config.layers = {layer_of(2, 12, 64, 64), layer_of(1, 3, 128, 96)};
      config.fetch.mode = c.mode;
      config.fetch.epsilon = c.epsilon;
      config.fetch.risk = c.risk;
      config.study.order = c.order;
      config.fetch.limit_tokens = c.limit;
      config.sketch.kind = c.sketch;
      Random random(32);
      const auto cache = make_cache(config);
      std::vector<SequenceId> ids = {kNoSequence};
      for (const std::int64_t n : {0, 9, 300, 700}) {
        ids.push_back(cache->create_sequence());
        std::vector<Scores> scores;
        for (std::int64_t l = 0; l < 2; ++l) {
          const LayerConfig& layer = config.layers[size(l)];
          cache->append(ids.back(), l,
                        random_block(random, n, layer.kv_heads, layer.key_dim, 1).view(),
                        random_block(random, n, layer.kv_heads, layer.value_dim, 1).view());
          scores.push_back(random_scores(random, layer.kv_heads, n, ScoreKind::random));
        }
        compress(*cache, ids.back(), scores);
      }
      for (std::int64_t l = 0; l < 2; ++l) {
        const LayerConfig& layer = config.layers[size(l)];
        const std::size_t rows = ids.size();
        const Block queries = random_block(random, static_cast<std::int64_t>(rows),
                                           layer.query_heads, layer.key_dim, 1);
        std::vector<float> output(rows * size(layer.query_heads * layer.value_dim));
        std::vector<float> lse(rows * size(layer.query_heads));
        AttendBatch batch;
        batch.sequences = ids;
        batch.queries = queries.view();
        batch.output = output;
        batch.lse = lse;
        cache->attend(l, batch);
        const std::int64_t before = allocations;
        for (int step = 0; step < 5; ++step) cache->attend(l, batch);
        const std::int64_t after = allocations;
        INFO(c.name << ", layer " << l << ", threads " << threads);
        CHECK(after - before == 0);
      }
    }
  }
  // The counter counts.
  const std::int64_t before = allocations;
  const auto some = std::make_unique<std::vector<int>>(100);
  CHECK(some->size() == 100);
  CHECK(allocations - before == 2);
}

// ---- The draw ----

TEST_CASE("An equal draw gives an equal answer, another draw another one") {
  CacheConfig config = small_config();
  config.fetch.mode = FetchMode::never;
  Random random(33);
  const std::vector<Block> keys = {random_block(random, 300, 2, 64, 1)};
  const std::vector<Block> values = {random_block(random, 300, 2, 64, 1)};
  const std::vector<Scores> scores = {random_scores(random, 2, 300, ScoreKind::random)};
  const Block queries = random_block(random, 1, 6, 64, 1);
  const Filled one = fill(config, keys, values, scores, 5);
  const Filled two = fill(config, keys, values, scores, 6);
  const Result five = attend(*one.cache, 0, {one.sequence}, queries);
  const Result six = attend(*two.cache, 0, {two.sequence}, queries);
  CHECK_FALSE(same(five, six));
  one.cache->redraw(one.sequence, 6);
  two.cache->redraw(two.sequence, 5);
  CHECK(same(attend(*one.cache, 0, {one.sequence}, queries), six));
  CHECK(same(attend(*two.cache, 0, {two.sequence}, queries), five));
  // The draw of tokens that are compressed later is the new one too.
  CacheConfig other = config;
  other.seed = config.seed + 1;
  other.sketch.kind = SketchKind::exact;
  CacheConfig base = config;
  base.sketch.kind = SketchKind::exact;
  const Filled three = fill(base, keys, values, scores, 5);
  const Filled four = fill(other, keys, values, scores, 5);
  CHECK_FALSE(same(attend(*three.cache, 0, {three.sequence}, queries),
                   attend(*four.cache, 0, {four.sequence}, queries)));
}

namespace {

// A manager that is drawn anew again and again, and the denominators it answers with, relative to
// the true one.
struct Redraws {
  std::vector<double> ratio;  // D_hat / D, [draw][query head]
  std::vector<QueryHeadReport> query;
  std::vector<KvHeadReport> kv;
  bool decisions_equal = true;
};

Redraws redraw_often(const CacheConfig& config, const Filled& filled, const Block& queries,
                     int draws) {
  const LayerConfig& shape = config.layers[0];
  std::vector<double> lse;
  for (std::int64_t h = 0; h < shape.query_heads; ++h) {
    lse.push_back(dense(config, 0, filled.keys[0], filled.values[0], queries.row(0, h), h).lse);
  }
  Redraws all;
  for (int draw = 0; draw < draws; ++draw) {
    filled.cache->redraw(filled.sequence, static_cast<std::uint64_t>(draw));
    const Result result = attend(*filled.cache, 0, {filled.sequence}, queries);
    for (std::size_t h = 0; h < lse.size(); ++h) {
      all.ratio.push_back(std::exp(static_cast<double>(result.lse[h]) - lse[h]));
    }
    if (draw == 0) {
      all.query = result.query;
      all.kv = result.kv;
    }
    all.decisions_equal = all.decisions_equal && same_all(result.query, all.query);
    for (std::size_t h = 0; h < result.kv.size(); ++h) {
      all.decisions_equal =
          all.decisions_equal && result.kv[h].fetched_tokens == all.kv[h].fetched_tokens;
    }
  }
  return all;
}

}  // namespace

TEST_CASE("Redraws: decisions stand, the mean is right, failures stay below delta") {
  const int draws = trials(400);
  for (const SketchKind kind : {SketchKind::exact, SketchKind::calibrated}) {
    for (const bool certificate : {true, false}) {
      for (const FetchOrder order : orders()) {
        Random random(34);
        CacheConfig config = small_config();
        config.layers = {layer_of(1, 4, 64, 64)};
        config.sketch.kind = kind;
        config.keep = 0.15;
        config.fetch.delta = 0.2;
        config.study.order = order;
        config.fetch.epsilon.reset();
        config.fetch.risk.reset();
        if (certificate) config.fetch.epsilon = 0.15;
        if (!certificate) config.fetch.risk = 1e-4;
        const std::int64_t n = 400;
        const std::vector<Block> keys = {random_block(random, n, 1, 64, 1)};
        const std::vector<Block> values = {random_block(random, n, 1, 64, 1)};
        const std::vector<Scores> scores = {random_scores(random, 1, n, ScoreKind::with_zeros)};
        const Filled filled = fill(config, keys, values, scores);
        const Block queries = random_block(random, 1, 4, 64, 1.2);
        const Redraws redraws = redraw_often(config, filled, queries, draws);
        INFO("sketch " << static_cast<int>(kind) << ", certificate " << certificate << ", order "
                       << static_cast<int>(order));
        CHECK(redraws.decisions_equal);
        CHECK(redraws.kv[0].fetched_tokens > 0);
        CHECK(redraws.kv[0].fetched_tokens < n);
        if (kind != SketchKind::exact) continue;
        Mirror mirror(config, 0);
        mirror.append(0, keys[0], values[0]);
        mirror.compress(scores);
        for (std::size_t h = 0; h < 4; ++h) {
          double sum = 0;
          double square = 0;
          std::int64_t failures = 0;
          for (int draw = 0; draw < draws; ++draw) {
            const double ratio = redraws.ratio[static_cast<std::size_t>(draw) * 4 + h];
            sum += ratio;
            square += ratio * ratio;
            failures += std::fabs(ratio - 1) > redraws.query[h].epsilon;
          }
          const double mean = sum / draws;
          const double deviation = std::sqrt(std::max(0.0, square / draws - mean * mean));
          // D_hat is short by the bias, beta / D, which is part of epsilon: what Eq. 7 has besides
          // is at least sqrt(2 V l) / D, and the deviation is sqrt(V) / D.
          const double l = std::log(2 / config.fetch.delta);
          const double bias = redraws.query[h].epsilon - 0.9 * deviation * std::sqrt(2 * l);
          const double noise = 5.5 * deviation / std::sqrt(static_cast<double>(draws)) + 1e-5;
          INFO("head " << h << ", mean " << mean << ", deviation " << deviation << ", epsilon "
                       << redraws.query[h].epsilon);
          CHECK(mean <= 1 + noise);
          CHECK(mean >= 1 - std::max(0.0, bias) - noise);
          CHECK(verkv::reference::binomial_not_above(failures, draws, config.fetch.delta));
        }
      }
    }
  }
}

TEST_CASE("The check of independence rejects a plan that peeks at the draw") {
  Random random(35);
  CacheConfig config = small_config();
  config.layers = {layer_of(1, 2, 64, 64)};
  config.sketch.kind = SketchKind::exact;
  config.keep = 0.3;
  config.fetch.epsilon = 0.2;
  Mirror mirror(config, 0);
  mirror.append(0, random_block(random, 120, 1, 64, 1), random_block(random, 120, 1, 64, 1));
  mirror.compress({random_scores(random, 1, 120, ScoreKind::random)});
  const Block queries = random_block(random, 1, 2, 64, 1.2);
  for (const bool peeks : {false, true}) {
    bool equal = true;
    verkv::reference::StepAnswer first;
    for (std::uint64_t draw = 0; draw < 20; ++draw) {
      mirror.redraw(draw);
      verkv::reference::HeadCase head = mirror.head_case(0, 0);
      head.peeks = peeks;
      const auto answer = verkv::reference::step(head, {queries.row(0, 0), queries.row(0, 1)});
      if (draw == 0) first = answer;
      equal = equal && answer.fetched.size() == first.fetched.size();
      for (std::size_t h = 0; h < 2; ++h) {
        equal = equal && answer.query[h].planned == first.query[h].planned &&
                answer.query[h].epsilon == first.query[h].epsilon;
      }
    }
    CHECK(equal == !peeks);
  }
}

TEST_CASE("Calls from several threads take turns") {
  CacheConfig config;
  config.layers = {LayerConfig{.kv_heads = 1, .query_heads = 2, .key_dim = 16, .value_dim = 16}};
  config.threads = 2;
  config.chunk_tokens = 8;
  const auto cache = make_cache(config);
  Random random(37);
  const std::vector<float> rows = random_block(random, 403, 1, 16, 1).data;
  const std::vector<float> scores(400, 1.0f);
  // Each with rows and a draw of its own.
  const auto life = [&](std::uint64_t which) {
    const verkv::SequenceId id = cache->create_sequence(which);
    const auto view = [&](std::int64_t tokens) {
      return verkv::token_major(rows.data() + which * 16, DType::f32, tokens, 1, 16);
    };
    cache->append(id, 0, view(400), view(400));
    const verkv::ImportanceView importance{scores.data(), 1, 400, 400};
    cache->compress(id, std::span(&importance, 1));
    std::vector<float> output(32);
    for (int step = 0; step < (backend().thinning > 1 ? 10 : 60); ++step) {
      cache->append(id, 0, view(1), view(1));
      verkv::AttendBatch batch;
      batch.sequences = std::span(&id, 1);
      batch.queries = verkv::token_major(rows.data(), DType::f32, 1, 2, 16);
      batch.output = output;
      cache->attend(0, batch);
    }
    return output;
  };
  std::vector<std::vector<float>> alone;
  for (std::uint64_t which = 0; which < 3; ++which) alone.push_back(life(which));
  REQUIRE_FALSE(same_floats(alone[0], alone[1]));
  REQUIRE_FALSE(same_floats(alone[1], alone[2]));
  std::vector<std::vector<float>> result(3);
  std::vector<std::thread> threads;
  for (std::uint64_t which = 0; which < 3; ++which)
    threads.emplace_back([&, which] { result[which] = life(which); });
  for (std::thread& thread : threads) thread.join();
  for (std::size_t which = 0; which < 3; ++which) CHECK(same_floats(result[which], alone[which]));
}

TEST_CASE("What a forgotten stride or a number beyond binary32 would do is refused") {
  CacheConfig config;
  config.layers = {LayerConfig{.kv_heads = 2, .query_heads = 2, .key_dim = 16, .value_dim = 16}};
  const auto cache = make_cache(config);
  const verkv::SequenceId id = cache->create_sequence();
  const std::vector<float> rows(4 * 2 * 16, 0.5f);
  const verkv::TensorView good = verkv::token_major(rows.data(), DType::f32, 4, 2, 16);
  for (const bool token : {true, false}) {
    verkv::TensorView bad = good;
    (token ? bad.token_stride : bad.head_stride) = 0;
    CHECK_THROWS_AS(cache->append(id, 0, bad, good), verkv::InvalidArgument);
    CHECK_THROWS_AS(cache->append(id, 0, good, bad), verkv::InvalidArgument);
  }
  CHECK(cache->tokens(id, 0) == 0);
  for (const double factor : {1e-60, 1e300, -1.0}) {
    CacheConfig wrong = config;
    wrong.layers[0].scale = factor;
    CHECK_THROWS_AS(make_cache(wrong), verkv::InvalidArgument);
    wrong = config;
    wrong.layers[0].soft_cap = factor;
    CHECK_THROWS_AS(make_cache(wrong), verkv::InvalidArgument);
  }
  CacheConfig wrong = config;
  wrong.threads = -5;
  CHECK_THROWS_AS(make_cache(wrong), verkv::InvalidArgument);
}
