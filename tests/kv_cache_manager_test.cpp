// KvCacheManager on the CPU backend: whole steps against the reference in double, exactness where it is promised,
// bitwise independence of everything that must not matter, growth during decode, bad input, memory, statistics,
// allocations, and the independence of every decision from the draw.

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
#include <sstream>
#include <string>
#include <vector>

#include <verkv/attention.hpp>
#include <verkv/kv_cache_manager.hpp>
#include <verkv/sketch.hpp>

#include "catch.hpp"
#include "reference/statistics.hpp"
#include "reference/step.hpp"

// ---- A count of all allocations of the program ----------------------------------------------------

namespace {

std::atomic<std::int64_t> allocations{0};

void* allocate(std::size_t size, std::size_t alignment) {
  ++allocations;
  const std::size_t rounded = (std::max<std::size_t>(size, 1) + alignment - 1) / alignment * alignment;
  void* const result = std::aligned_alloc(alignment, rounded);
  if (result == nullptr) throw std::bad_alloc();
  return result;
}

}  // namespace

void* operator new(std::size_t size) { return allocate(size, alignof(std::max_align_t)); }
void* operator new[](std::size_t size) { return allocate(size, alignof(std::max_align_t)); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return allocate(size, std::max(alignof(std::max_align_t), static_cast<std::size_t>(alignment)));
}
void* operator new[](std::size_t size, std::align_val_t alignment) {
  return allocate(size, std::max(alignof(std::max_align_t), static_cast<std::size_t>(alignment)));
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }

namespace {

using verkv::AttendBatch;
using verkv::CacheConfig;
using verkv::CapacityError;
using verkv::DType;
using verkv::FetchMode;
using verkv::FetchOrder;
using verkv::ImportanceView;
using verkv::InvalidArgument;
using verkv::KvCacheManager;
using verkv::KvHeadReport;
using verkv::kNoSequence;
using verkv::kOff;
using verkv::LayerConfig;
using verkv::LayerStatistics;
using verkv::MemoryReport;
using verkv::Pool;
using verkv::QueryHeadReport;
using verkv::Selection;
using verkv::SequenceId;
using verkv::SketchKind;
using verkv::TensorView;
using verkv::reference::Random;
using verkv::reference::Vector;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

// ---- Data -----------------------------------------------------------------------------------------

// A dense [token][head][dim] block.
struct Block {
  std::int64_t tokens = 0;
  std::int64_t heads = 0;
  std::int64_t dim = 0;
  std::vector<float> data;

  TensorView view() const { return verkv::token_major(data.data(), DType::f32, tokens, heads, dim); }
  float& at(std::int64_t t, std::int64_t h, std::int64_t j) {
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

void compress(KvCacheManager& cache, SequenceId sequence, const std::vector<Scores>& scores) {
  std::vector<ImportanceView> views;
  for (const Scores& s : scores) views.push_back(s.view());
  cache.compress(sequence, views);
}

// ---- One step and its answer -----------------------------------------------------------------------

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
  batch.output = result.output.data();
  batch.lse = result.lse.data();
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
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

bool same(const QueryHeadReport& a, const QueryHeadReport& b) {
  return std::memcmp(&a.epsilon, &b.epsilon, sizeof(double)) == 0 && a.certified == b.certified &&
         a.planned_tokens == b.planned_tokens;
}

bool same(const KvHeadReport& a, const KvHeadReport& b) {
  return a.fetched_tokens == b.fetched_tokens && a.moved_tokens == b.moved_tokens &&
         a.moved_bytes == b.moved_bytes && a.resident_tokens == b.resident_tokens && a.limited == b.limited;
}

template <class T>
bool same_all(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](const T& x, const T& y) { return same(x, y); });
}

bool same(const Result& a, const Result& b) {
  return same_bits(a.output, b.output) && same_bits(a.lse, b.lse) && same_all(a.query, b.query) &&
         same_all(a.kv, b.kv);
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

// ---- A sequence in the reference ----------------------------------------------------------------------

struct MirrorHead {
  std::vector<std::vector<float>> key;
  std::vector<std::vector<float>> value;
  Vector odds;
  std::vector<bool> resident;
  std::size_t mean_tokens = 0;
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

  const MirrorHead& head(std::int64_t layer, std::int64_t h) const { return layers_[size(layer)][size(h)]; }

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
    if (!compressed_before_[size(layer)] || config_.chunk_tokens == 0 || config_.keep >= 1) return;
    const std::size_t chunk = size(config_.chunk_tokens);
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
        for (const auto& part : pool) odds.push_back(verkv::reference::pool_odds(config_, {part})[0]);
      } else {
        odds = verkv::reference::pool_odds(config_, pool);
      }
      for (std::size_t h = 0; h < heads.size(); ++h) take(layer, h, odds[h]);
    }
  }

  void compress(const std::vector<Scores>& scores) {
    if (config_.keep >= 1) return;
    std::vector<verkv::reference::PoolHead> pool;
    std::vector<std::pair<std::int64_t, std::size_t>> owner;
    const auto solve = [&] {
      const std::vector<Vector> odds = pool_odds(config_, pool);
      for (std::size_t i = 0; i < owner.size(); ++i) take(owner[i].first, owner[i].second, odds[i]);
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
          part.tau.push_back(static_cast<double>(scores[layer].data[h * size(scores[layer].tokens) + i]));
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
        head.resident = verkv::reference::draw(head.odds, key(static_cast<std::int64_t>(layer), h), 0);
      }
    }
  }

  verkv::reference::HeadCase head_case(std::int64_t layer, std::int64_t h) const {
    const MirrorHead& m = head(layer, h);
    verkv::reference::HeadCase result;
    result.layer = config_.layers[size(layer)];
    result.fetch = config_.fetch;
    result.sketch = config_.sketch;
    result.seed = config_.seed;
    result.key = m.key;
    result.value = m.value;
    result.odds = m.odds;
    result.resident = m.resident;
    result.mean_tokens = m.mean_tokens;
    return result;
  }

  // Query row `row` of `queries`; adds to the scores of the local window as the manager does.
  std::vector<verkv::reference::StepAnswer> attend(std::int64_t layer, const Block& queries, std::int64_t row) {
    const LayerConfig& shape = config_.layers[size(layer)];
    const std::int64_t group = shape.query_heads / shape.kv_heads;
    std::vector<verkv::reference::StepAnswer> answers;
    for (std::int64_t h = 0; h < shape.kv_heads; ++h) {
      std::vector<std::vector<float>> own;
      for (std::int64_t g = 0; g < group; ++g) own.push_back(queries.row(row, h * group + g));
      answers.push_back(verkv::reference::step(head_case(layer, h), own));
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
        // 4 bytes a resident's position, 2 bytes of odds a compressed token (in whole groups of the sketch), a
        // sum and a count for each token of the window.
        report.metadata_bytes += 4 * residents + 2 * whole_groups + 8 * window;
        if (compressed == 0 || config_.sketch.kind == SketchKind::exact) continue;
        const bool minmax = config_.sketch.kind == SketchKind::minmax;
        const std::int64_t bits = config_.sketch.bits;
        // Whole bytes of every plane: 4 coordinates a byte of 2 bits, 8 a byte of 1 bit.
        const std::int64_t quarter = bits == 3 ? (layer.key_dim + 7) / 8 * 2 : (layer.key_dim + 3) / 4;
        const std::int64_t codes = bits == 2 ? quarter : bits == 3 ? quarter / 2 * 3 : quarter * 2;
        report.sketch_bytes += whole_groups * (codes + (minmax ? 4 : 2)) + (minmax ? 0 : 4 * layer.key_dim);
      }
    }
    return report;
  }

 private:
  std::vector<float> stored(std::vector<float> row) const {
    for (float& x : row) x = verkv::reference::as_stored(x, config_.storage);
    return row;
  }

  verkv::DrawKey key(std::int64_t layer, std::size_t h) const {
    const LayerConfig& c = config_.layers[size(layer)];
    return {config_.seed, draw_, static_cast<std::uint32_t>(c.global_layer < 0 ? layer : c.global_layer),
            static_cast<std::uint32_t>(c.first_global_kv_head) + static_cast<std::uint32_t>(h)};
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

// ---- Comparison with the reference ------------------------------------------------------------------

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

// The step computes in binary32, the reference in double. A logit l has an error of about 1e-6 |l| (64 to 256
// rounded products), so a weight has that relative error; D, the certificate and the output inherit it. 1e-3 leaves
// room for logits up to a few hundred. A plan may end one token earlier or later where the certificate of a prefix
// meets epsilon (or a key the price) to within these errors; outputs are then of different plans and not compared.
// Certificates below 1e-18 lose their variance, which is a sum of squares, to the smallest binary32 number.
struct Tolerance {
  double epsilon = 1e-3;
  double lse = 1e-4;
  double output = 1e-3;
};

void compare(const CacheConfig& config, std::int64_t layer, const Result& result, std::size_t row,
             const std::vector<verkv::reference::StepAnswer>& answers, const std::string& what, Tally& tally,
             const Tolerance& tolerance = {}) {
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
        tally.fail(place.str() + "planned " + std::to_string(planned) + ", expected " + std::to_string(expected));
      }
    }
    if (!equal_plans) continue;
    if (kv.fetched_tokens != static_cast<std::int64_t>(answer.fetched.size()) ||
        kv.moved_tokens != static_cast<std::int64_t>(answer.moved.size()) || kv.limited != answer.limited) {
      std::ostringstream text;
      text << place.str() << "fetched " << kv.fetched_tokens << " moved " << kv.moved_tokens << " limited "
           << kv.limited << ", expected " << answer.fetched.size() << " " << answer.moved.size() << " "
           << answer.limited;
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
      if (result.query[at].certified != (epsilon < kOff && epsilon <= config.fetch.epsilon)) {
        tally.fail(text.str() + "certified at " + std::to_string(epsilon));
      }
      const double lse = static_cast<double>(result.lse[at]);
      const bool empty = query.lse == -kOff;
      if (empty ? lse != -kOff : !(std::fabs(lse - query.lse) <= tolerance.lse + 1e-6 * std::fabs(query.lse))) {
        tally.fail(text.str() + "LSE " + std::to_string(lse) + ", expected " + std::to_string(query.lse));
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

// ---- Configurations -------------------------------------------------------------------------------

LayerConfig layer_of(std::int64_t kv_heads, std::int64_t group, std::int64_t key_dim, std::int64_t value_dim) {
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
  config.fetch.risk = kOff;
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
  c.select = random.below(4) == 0 ? Selection::topk : Selection::poisson;
  c.inclusion_floor = random.below(4) == 0 ? c.keep / 4 : 0;
  c.seed = random.bits();
  c.threads = 1;
  c.chunk_tokens = 0;
  const std::int64_t budget = static_cast<std::int64_t>(c.keep * static_cast<double>(drawn.tokens));
  c.sink_tokens = one_of(random, std::vector<std::int64_t>{0, 1, 4});
  // The window: none, some, exactly what the budget can pay or one to either side, larger than everything.
  c.local_tokens = std::max<std::int64_t>(
      0, one_of(random, std::vector<std::int64_t>{0, 0, 2, budget - c.sink_tokens - 1, budget - c.sink_tokens,
                                                  budget - c.sink_tokens + 1, drawn.tokens + 5}));
  if (random.below(12) == 0) c.sink_tokens = drawn.tokens + 3;
  switch (random.below(6)) {
    case 0: c.sketch = {SketchKind::exact, 2}; break;
    case 1: c.sketch = {SketchKind::minmax, 2}; break;
    case 2: c.sketch = {SketchKind::lloyd_max, 3}; break;
    case 3: c.sketch = {SketchKind::lloyd_max, 4}; break;
    default: c.sketch = {SketchKind::lloyd_max, 2}; break;
  }
  c.fetch.epsilon = kOff;
  c.fetch.risk = kOff;
  c.fetch.delta = one_of(random, std::vector<double>{0.05, 0.1, 0.3});
  const double epsilon = one_of(random, std::vector<double>{0.02, 0.1, 0.3, 0.8});
  const double risk = one_of(random, std::vector<double>{1e-6, 1e-4, 1e-2});
  switch (random.below(7)) {
    case 0: c.fetch.epsilon = epsilon; break;
    case 1: c.fetch.risk = risk; break;
    case 2: c.fetch.epsilon = epsilon; c.fetch.risk = risk; break;
    case 3: c.fetch.probability = one_of(random, std::vector<double>{1e-3, 1e-2, 0.1}); break;
    case 4: c.fetch.mode = FetchMode::never; break;
    case 5: c.fetch.mode = FetchMode::always; break;
    default: c.fetch.epsilon = epsilon; c.fetch.risk = 1e-3; c.fetch.probability = 0.01; break;
  }
  if (drawn.tokens <= 65 && random.below(4) == 0) c.fetch.order = FetchOrder::exact;
  if (drawn.tokens <= 65 && random.below(4) == 0) c.fetch.shortlist = 5;
  c.fetch.cap = one_of(random, std::vector<double>{1, 2, kOff});
  if (random.below(6) == 0) c.fetch.limit_tokens = one_of(random, std::vector<std::int64_t>{1, 5, 20});

  const std::size_t layers = 1 + random.below(2);
  for (std::size_t l = 0; l < layers; ++l) {
    const std::int64_t dim = one_of(random, std::vector<std::int64_t>{64, 80, 96, 100, 112, 128, 256});
    const std::int64_t group = one_of(random, std::vector<std::int64_t>{1, 2, 5, 6, 7, 8, 12, 16});
    LayerConfig layer = layer_of(1 + static_cast<std::int64_t>(random.below(2)), group, dim,
                                 random.below(3) == 0 ? 48 : dim);
    if (drawn.tokens > 200) layer.kv_heads = 1;
    if (drawn.tokens > 200) layer.query_heads = group;
    layer.soft_cap = random.below(4) == 0 ? 5 : 0;
    layer.scale = random.below(4) == 0 ? 0.11 : 0;
    layer.first_global_kv_head = random.below(3) == 0 ? 4 : 0;
    c.layers.push_back(layer);
  }
  if (layers > 1 && random.below(4) == 0) c.layers[1].dense = true;
  drawn.logit_spread = one_of(random, std::vector<double>{0.5, 1.5, 4});
  drawn.scores = one_of(random, std::vector<ScoreKind>{ScoreKind::random, ScoreKind::random, ScoreKind::random,
                                                       ScoreKind::zero, ScoreKind::equal, ScoreKind::with_zeros});

  std::ostringstream text;
  text << "n " << drawn.tokens << ", d " << c.layers[0].key_dim << ", group "
       << c.layers[0].query_heads / c.layers[0].kv_heads << ", layers " << layers << ", "
       << verkv::name(c.storage) << ", keep " << c.keep << ", floor " << c.inclusion_floor << ", pool "
       << static_cast<int>(c.pool) << ", select " << static_cast<int>(c.select) << ", sink " << c.sink_tokens
       << ", local " << c.local_tokens << ", sketch " << static_cast<int>(c.sketch.kind) << "/" << c.sketch.bits
       << ", mode " << static_cast<int>(c.fetch.mode) << ", eps " << c.fetch.epsilon << ", risk " << c.fetch.risk
       << ", p " << c.fetch.probability << ", order " << static_cast<int>(c.fetch.order) << ", shortlist "
       << c.fetch.shortlist << ", cap " << c.fetch.cap << ", limit " << c.fetch.limit_tokens << ", spread "
       << drawn.logit_spread << ", scores " << static_cast<int>(drawn.scores) << ", soft cap "
       << c.layers[0].soft_cap;
  drawn.text = text.str();
  return drawn;
}

}  // namespace

// ---- Whole steps against the reference -----------------------------------------------------------------

TEST_CASE("Steps of random configurations agree with the reference") {
  Random random(20240601);
  Tally tally;
  std::int64_t with_fetch = 0;
  for (int trial = 0; trial < 400; ++trial) {
    const Drawn setting = random_setting(random);
    const CacheConfig& config = setting.config;
    REQUIRE(verkv::unsupported_reasons(config).empty());
    const auto cache = verkv::make_cpu_cache(config);
    const std::uint64_t draw = random.bits();
    const SequenceId sequence = cache->create_sequence(draw);
    Mirror mirror(config, draw);
    std::vector<Scores> scores;
    const std::int64_t last = setting.tokens > 0 ? static_cast<std::int64_t>(random.below(3)) : 0;
    for (std::size_t l = 0; l < config.layers.size(); ++l) {
      const LayerConfig& layer = config.layers[l];
      const std::int64_t index = static_cast<std::int64_t>(l);
      const double spread = setting.logit_spread / std::sqrt(verkv::reference::attention_scale(layer)) /
                            std::pow(static_cast<double>(layer.key_dim), 0.25);
      const Block keys = random_block(random, setting.tokens, layer.kv_heads, layer.key_dim, spread, 0.5);
      const Block values = random_block(random, setting.tokens, layer.kv_heads, layer.value_dim, 1, 0.2);
      // The last tokens arrive after the compression.
      const std::int64_t before = std::max<std::int64_t>(0, setting.tokens - last);
      cache->append(sequence, index, keys.part(0, before).view(), values.part(0, before).view());
      mirror.append(index, keys.part(0, before), values.part(0, before));
      scores.push_back(random_scores(random, layer.kv_heads, before, setting.scores));
    }
    compress(*cache, sequence, scores);
    mirror.compress(scores);
    for (std::size_t l = 0; l < config.layers.size(); ++l) {
      const LayerConfig& layer = config.layers[l];
      const std::int64_t index = static_cast<std::int64_t>(l);
      const Block keys = random_block(random, last, layer.kv_heads, layer.key_dim, 1);
      const Block values = random_block(random, last, layer.kv_heads, layer.value_dim, 1);
      cache->append(sequence, index, keys.view(), values.view());
      mirror.append(index, keys, values);
      CHECK(cache->compressed_tokens(sequence, index) ==
            static_cast<std::int64_t>(mirror.head(index, 0).odds.size()));
      const double spread = setting.logit_spread / std::sqrt(verkv::reference::attention_scale(layer)) /
                            std::pow(static_cast<double>(layer.key_dim), 0.25);
      const Block queries = random_block(random, 2, layer.query_heads, layer.key_dim, spread);
      const Result result = attend(*cache, index, {kNoSequence, sequence}, queries);
      const auto answers = mirror.attend(index, queries, 1);
      compare(config, index, result, 1, answers, "trial " + std::to_string(trial) + " (" + setting.text + ")", tally);
      for (const auto& answer : answers) with_fetch += !answer.fetched.empty();
    }
  }
  report(tally);
  INFO(tally.heads << " query heads, " << tally.boundary << " plans off by one, " << with_fetch << " fetches");
  CHECK(tally.heads > 3000);
  CHECK(with_fetch > 200);
  // Certificates meet epsilon to within 1e-5, relative, by chance in far fewer plans than this.
  CHECK(tally.boundary * 50 < tally.heads);
}

// ---- Exactness ------------------------------------------------------------------------------------------

namespace {

struct Filled {
  std::unique_ptr<KvCacheManager> cache;
  SequenceId sequence;
  std::vector<Block> keys;  // per layer
  std::vector<Block> values;
};

// One sequence with all of its tokens appended at once; compressed unless scores is empty.
Filled fill(const CacheConfig& config, const std::vector<Block>& keys, const std::vector<Block>& values,
            const std::vector<Scores>& scores, std::uint64_t draw = 0) {
  Filled filled{verkv::make_cpu_cache(config), {}, keys, values};
  filled.sequence = filled.cache->create_sequence(draw);
  for (std::size_t l = 0; l < keys.size(); ++l) {
    filled.cache->append(filled.sequence, static_cast<std::int64_t>(l), keys[l].view(), values[l].view());
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
    return verkv::reference::as_stored(block.data[size((i * block.heads + h) * block.dim + j)], config.storage);
  };
  result.lse = verkv::dense_attention(
      keys.tokens, std::span<const double>(q), verkv::reference::attention_scale(shape), shape.soft_cap,
      [&](std::int64_t i, std::int64_t j) { return element(keys, i, j); },
      [&](std::int64_t i, std::int64_t j) { return element(values, i, j); }, std::span<double>(logit),
      std::span<double>(result.output));
  return result;
}

// Relative error of the outputs and absolute error of the LSE of one row, the worst over its heads.
struct Error {
  double output = 0;
  double lse = 0;
};

Error worst_error(const CacheConfig& config, std::int64_t layer, const Filled& filled, const Block& queries,
                  std::int64_t row, const Result& result) {
  const LayerConfig& shape = config.layers[size(layer)];
  Error worst;
  for (std::int64_t h = 0; h < shape.query_heads; ++h) {
    const Dense expected = dense(config, layer, filled.keys[size(layer)], filled.values[size(layer)],
                                 queries.row(row, h), h);
    const std::size_t at = size(row * shape.query_heads + h);
    Vector difference;
    for (std::size_t j = 0; j < expected.output.size(); ++j) {
      difference.push_back(static_cast<double>(result.output[at * expected.output.size() + j]) - expected.output[j]);
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
  for (const Case& c : {Case{"keep 1", 1.0, FetchMode::verified, false}, Case{"always", 0.1, FetchMode::always, false},
                        Case{"dense layer", 0.1, FetchMode::verified, true}}) {
    for (const DType storage : {DType::f32, DType::f16, DType::bf16}) {
      for (const std::int64_t n : {1, 17, 129, 700}) {
        for (const double soft_cap : {0.0, 4.0}) {
          CacheConfig config = small_config();
          config.storage = storage;
          config.keep = c.keep;
          config.fetch.mode = c.mode;
          config.layers = {layer_of(2, 5, 80, 64)};
          config.layers[0].soft_cap = soft_cap;
          config.layers[0].dense = c.dense;
          const Filled filled =
              fill(config, {random_block(random, n, 2, 80, 1.5, 0.5)}, {random_block(random, n, 2, 64, 1)},
                   {random_scores(random, 2, n, ScoreKind::with_zeros)});
          const Block queries = random_block(random, 1, 10, 80, 1.5);
          const Result result = attend(*filled.cache, 0, {filled.sequence}, queries);
          const Error error = worst_error(config, 0, filled, queries, 0, result);
          INFO(c.name << ", " << verkv::name(storage) << ", n " << n << ", soft cap " << soft_cap);
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
  for (const bool vector_code : {true, false}) {
    for (const double keep : {1.0, 0.1}) {
      CacheConfig config = small_config();
      config.vector_code = vector_code;
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
  // The sketch is off by hundreds here, so exact logits lie far above and below what the plan believes.
  Random random(61);
  Tally tally;
  for (int trial = 0; trial < 60; ++trial) {
    CacheConfig config = small_config();
    config.sketch = trial % 3 == 0 ? verkv::SketchConfig{SketchKind::minmax, 2}
                                   : verkv::SketchConfig{SketchKind::lloyd_max, 2 + trial % 3};
    config.fetch.cap = one_of(random, std::vector<double>{1, 2, kOff});
    config.fetch.mode = trial % 2 == 0 ? FetchMode::never : FetchMode::verified;
    config.fetch.limit_tokens = trial % 4 == 1 ? 2 : 0;
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
    // Logits of 1e4 are known to 1e-3 in binary32, and so are weights and all that is made of them; the
    // certificate of such a plan can be that of a single token 1e-10 below the rest.
    compare(config, 0, result, 0, mirror.attend(0, queries, 0), "trial " + std::to_string(trial), tally,
            Tolerance{0.02, 0.01, 0.02});
  }
  report(tally);
}
