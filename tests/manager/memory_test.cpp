// KvCacheManager on a backend (support/test_backend.hpp): every byte is counted, running out of
// memory changes nothing, a step allocates nothing, and its buffers are as large and as many as what
// attends needs.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <optional>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "catch.hpp"
#include "reference/statistics.hpp"
#include "reference/step.hpp"
#include "support/allocations.hpp"
#include "support/blocks.hpp"
#include "support/configurations.hpp"
#include "support/dense.hpp"
#include "support/mirror.hpp"
#include "support/results.hpp"
#include "support/test_backend.hpp"
#include "support/victim.hpp"

using namespace verkv;
using namespace verkv::test;
using verkv::reference::Random;

TEST_CASE("Every byte is accounted for") {
  for (const SketchKind kind : {SketchKind::exact, SketchKind::calibrated}) {
    for (const int bits : {2, 3, 4}) {
      if (kind == SketchKind::exact && bits > 2) continue;  // has no codes
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
          sum.basis_bytes += one.basis_bytes;
          sum.reserved_bytes += one.reserved_bytes;
          sum.fast_reserved_bytes += one.fast_reserved_bytes;
          sum.host_reserved_bytes += one.host_reserved_bytes;
        }
        sum.workspace_bytes = cache->memory().workspace_bytes;
        CHECK(same(cache->memory(), sum));
        CHECK(sum.workspace_bytes > 0);
        for (const SequenceId id : ids) cache->erase(id);
        MemoryReport none;
        none.workspace_bytes = cache->memory().workspace_bytes;
        CHECK(none.workspace_bytes <= sum.workspace_bytes);
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
      const double slack = reference::bernstein_bound(config.keep * static_cast<double>(n), 1, 1) /
                           static_cast<double>(n);
      CHECK(std::fabs(actual - share) < 1.02 * slack + 1e-3);
    }
  }
  const LayerConfig layer = layer_of(1, 1, 128, 128);
  CHECK(verkv::keep_for_fast_share(1, layer, DType::f16, {SketchKind::exact, 2}) <= 1);
  check_names(
      error_of<InvalidArgument>([&] { verkv::keep_for_fast_share(0.05, layer, DType::f16, {}); }),
      {"0.05", "0.07"});  // (32 + 2 + 2) / 512 = 0.0703
  // Whole bytes at any number of bits: codes, scale and odds of a token, row and position of a
  // resident.
  for (const int bits : {2, 3, 4}) {
    // A centroid and a spread for 64 tokens.
    CHECK(verkv::keep_for_fast_share(0.5, layer, DType::f16, {SketchKind::calibrated, bits}) ==
          (0.5 * 512 - (16 * bits + 4 + (256 + 2) / 64.0)) / 516);
    CHECK(verkv::keep_for_fast_share(0.5, layer, DType::f16, {SketchKind::calibrated, bits},
                                     Estimator::plain) == (0.5 * 512 - (16 * bits + 4)) / 516);
  }
  // An exact sketch has no codes and ignores its bits.
  CHECK(verkv::keep_for_fast_share(0.5, layer, DType::f16, {SketchKind::exact, 1 << 30},
                                   Estimator::plain) == (0.5 * 512 - 2) / 516);
  const auto refused = [&](const LayerConfig& of, DType storage, const SketchConfig& sketch,
                           const std::vector<std::string>& parts) {
    check_names(
        error_of<InvalidArgument>([&] { verkv::keep_for_fast_share(0.5, of, storage, sketch); }),
        parts);
  };
  refused(layer, static_cast<DType>(7), {}, {"storage type 7"});
  refused(layer, DType::f16, {static_cast<SketchKind>(9), 2}, {"sketch kind 9"});
  refused(layer, DType::f16, {SketchKind::calibrated, 1}, {"1 bits", "2, 3 and 4"});
  refused(layer, DType::f16, {SketchKind::calibrated, 5}, {"5 bits", "2, 3 and 4"});
  refused(layer_of(1, 1, 0, 128), DType::f16, {}, {"0 and 128", "576"});
  refused(layer_of(1, 1, 128, 577), DType::f16, {}, {"577", "576"});
  for (const double share : {0.0, -1.0, 1.1, std::numeric_limits<double>::quiet_NaN()}) {
    check_names(error_of<InvalidArgument>(
                    [&] { verkv::keep_for_fast_share(share, layer, DType::f16, {}); }),
                {"(0, 1]"});
  }
}

TEST_CASE("Running out of memory changes nothing", "[cpu]") {
  for (const int what : {0, 1, 2, 3, 4, 5, 6, 7, 8}) {
    CacheConfig config = victim_config();
    if (what == 1) config.sketch.kind = SketchKind::exact;
    const Victim victim(config);
    KvCacheManager& cache = *victim.cache;
    Random random(36);
    const Block keys = random_block(random, 100, 2, 64, 1);
    const Block values = random_block(random, 100, 2, 48, 1);
    const Scores scores = random_scores(random, 2, 80, ScoreKind::random);
    const std::vector<ImportanceView> views = {scores.view(), {}, scores.view()};
    // More rows than sequences have made room for: their reports need it.
    const std::vector<SequenceId> nobody(50, kNoSequence);
    const Block queries = random_block(random, 50, 6, 64, 1);
    std::vector<float> output(size(50 * 6 * 48));
    AttendBatch padding;
    padding.sequences = nobody;
    padding.queries = queries.view();
    padding.output = output;
    // Of both sequences.
    std::vector<SequenceId> rows(50, victim.a);
    rows.resize(100, victim.b);
    const AppendBatch mixed{rows, keys.view(), values.view()};
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
        if (what == 5) cache.attend(0, padding);
        if (what == 6) static_cast<void>(cache.description());
        if (what == 7) cache.append(0, mixed);
        if (what == 8) cache.reserve(victim.a, 500);
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
    if (what == 3 || what == 5 || what == 6 || what == 8) continue;
    const Result result = attend(cache, 0, {victim.a, victim.b}, victim.queries);
    CHECK_FALSE(same(result, victim.answers[0]));
  }
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
  // Padding rows ask for no more than there is where the caller has room for their reports.
  const auto cache = make_cache(small_config());
  cache->create_sequence();
  const std::int64_t workspace = cache->memory().workspace_bytes;
  const LayerConfig layer = cache->config().layers[0];
  const std::vector<SequenceId> padding(50, kNoSequence);
  const std::vector<float> queries(padding.size() * size(layer.query_heads * layer.key_dim));
  std::vector<float> output(padding.size() * size(layer.query_heads * layer.value_dim));
  std::vector<QueryHeadReport> query_reports(padding.size() * size(layer.query_heads));
  std::vector<KvHeadReport> kv_reports(padding.size() * size(layer.kv_heads));
  AttendBatch batch;
  batch.sequences = padding;
  batch.queries =
      verkv::token_major(queries.data(), DType::f32, 50, layer.query_heads, layer.key_dim);
  batch.output = output;
  batch.query_reports = query_reports;
  batch.kv_reports = kv_reports;
  std::int64_t before = allocations;
  cache->attend(0, batch);
  CHECK(allocations - before == 0);
  CHECK(cache->memory().workspace_bytes == workspace);
  // Where it has none, each kind of report grows by itself, and both are counted.
  batch.kv_reports = {};
  cache->attend(0, batch);
  const std::int64_t own = 50 * layer.kv_heads * static_cast<std::int64_t>(sizeof(KvHeadReport));
  CHECK(cache->memory().workspace_bytes > workspace);
  CHECK(cache->memory().workspace_bytes < workspace + 2 * own);
  batch.query_reports = {};
  cache->attend(0, batch);
  CHECK(cache->memory().workspace_bytes >=
        own + 50 * layer.query_heads * static_cast<std::int64_t>(sizeof(QueryHeadReport)));
  before = allocations;
  cache->attend(0, batch);
  CHECK(allocations - before == 0);
  // The counter counts.
  before = allocations;
  const auto some = std::make_unique<std::vector<int>>(100);
  CHECK(some->size() == 100);
  CHECK(allocations - before == 2);
}

namespace {

constexpr std::int64_t kHeads = 2;

CacheConfig config_of(int threads) {
  CacheConfig config = small_config();
  config.layers = {layer_of(kHeads, 1, 64, 64)};
  config.keep = 1.0 / 16;
  config.threads = threads;
  return config;
}

struct Prompt {
  explicit Prompt(std::uint32_t seed, std::int64_t n)
      : random(seed),
        keys(random_block(random, n, kHeads, 64, 1)),
        values(random_block(random, n, kHeads, 64, 1)),
        scores({random_scores(random, kHeads, n, ScoreKind::random)}) {}

  SequenceId append_to(KvCacheManager& cache) const {
    const SequenceId id = cache.create_sequence(7);
    cache.append(id, 0, keys.view(), values.view());
    return id;
  }

  Random random;
  Block keys;
  Block values;
  std::vector<Scores> scores;
};

std::int64_t workspace(const KvCacheManager& cache) { return cache.memory().workspace_bytes; }

}  // namespace

TEST_CASE("Workspaces are as many as tasks, and as large as what attends", "[cpu]") {
  const std::int64_t n = 3000;
  const Prompt prompt(1, n);
  Random random(2);
  const Block queries = random_block(random, 1, kHeads, 64, 1);
  const auto one = make_cache(config_of(1));
  const auto many = make_cache(config_of(16));
  const std::int64_t nothing = workspace(*many);
  CHECK(nothing == 0);
  const SequenceId a = prompt.append_to(*one);
  const SequenceId b = prompt.append_to(*many);
  // Logits of 8 rows together, and weights of one.
  CHECK(workspace(*one) > n * 36);
  CHECK(workspace(*one) < n * 36 * 9 / 8 + 20'000);
  CHECK(workspace(*many) > workspace(*one));
  CHECK(workspace(*many) < kHeads * workspace(*one));
  CHECK(same(attend(*many, 0, {b}, queries), attend(*one, 0, {a}, queries)));
  compress(*one, a, prompt.scores);
  compress(*many, b, prompt.scores);
  // Logits of 8 rows, what the plan knows of a token, and two lists of tokens, in both cases; the
  // prompt's residents no more.
  CHECK(workspace(*one) < n * (32 + 16 + 8 + 1) * 9 / 8 + 80'000);
  CHECK(workspace(*many) < kHeads * workspace(*one));
  CHECK(same(attend(*many, 0, {b}, queries), attend(*one, 0, {a}, queries)));
  one->erase(a);
  many->erase(b);
  // Reports and slices of 8 rows.
  CHECK(workspace(*many) < 10'000);
  CHECK(workspace(*many) == workspace(*one));
}

TEST_CASE("A long sequence that ends gives its workspace back, and the others go on", "[cpu]") {
  const auto cache = make_cache(config_of(2));
  const SequenceId little = Prompt(3, 100).append_to(*cache);
  const std::int64_t before = workspace(*cache);
  Random random(4);
  const Block queries = random_block(random, 1, kHeads, 64, 1);
  const Result answer = attend(*cache, 0, {little}, queries);
  const Prompt prompt(5, 4000);
  const SequenceId large = prompt.append_to(*cache);
  compress(*cache, large, prompt.scores);
  CHECK(workspace(*cache) > 10 * before);
  const SequenceId child = cache->fork(large);
  cache->erase(large);
  CHECK(workspace(*cache) > 10 * before);
  cache->erase(child);
  CHECK(workspace(*cache) < before + 10'000);
  std::vector<float> output(size(kHeads * 64));
  AttendBatch batch;
  batch.sequences = {&little, 1};
  batch.queries = queries.view();
  batch.output = output;
  const std::int64_t allocated = allocations;
  cache->attend(0, batch);
  CHECK(allocations == allocated);
  CHECK(same(attend(*cache, 0, {little}, queries), answer));
}

TEST_CASE("The size of workspaces does not depend on how tokens came", "[cpu]") {
  const Prompt prompt(6, 700);
  std::vector<std::int64_t> sizes;
  for (const std::int64_t piece : {1, 64, 700}) {
    const auto cache = make_cache(config_of(2));
    const SequenceId id = cache->create_sequence(7);
    for (std::int64_t at = 0; at < 700; at += piece) {
      const std::int64_t count = std::min(piece, 700 - at);
      TensorView keys = prompt.keys.view();
      TensorView values = prompt.values.view();
      for (TensorView* view : {&keys, &values}) {
        view->data = view->row(at, 0);
        view->tokens = count;
      }
      cache->append(id, 0, keys, values);
    }
    sizes.push_back(workspace(*cache));
  }
  CHECK(sizes[1] == sizes[0]);
  CHECK(sizes[2] == sizes[0]);
}

TEST_CASE("Running out of memory for workspaces changes nothing", "[cpu]") {
  // Only the first rows of a batch larger than ever, and a longer sequence, ask for more.
  const auto cache = make_cache(config_of(4));
  const Prompt prompt(8, 200);
  const SequenceId id = prompt.append_to(*cache);
  Random random(9);
  const Block queries = random_block(random, 100, kHeads, 64, 1);
  const std::vector<SequenceId> rows(100, id);
  const Result expected = attend(*cache, 0, {id}, random_block(random, 1, kHeads, 64, 1));
  std::vector<float> output(size(100 * kHeads * 64));
  AttendBatch batch;
  batch.sequences = rows;
  batch.queries = queries.view();
  batch.output = output;
  std::int64_t failed = 0;
  for (std::int64_t limit = 0;; ++limit) {
    REQUIRE(limit < 1000);
    bool threw = false;
    allowed = limit;
    try {
      cache->attend(0, batch);
    } catch (const std::bad_alloc&) {
      threw = true;
    }
    allowed = -1;
    if (!threw) break;
    ++failed;
    CHECK(cache->statistics(0).steps == 1);
  }
  CHECK(failed > 0);
  const auto single = make_cache(config_of(1));
  const SequenceId other = prompt.append_to(*single);
  const Result all = attend(*single, 0, std::vector<SequenceId>(100, other), queries);
  CHECK(all.output == output);
  CHECK(expected.output.size() == size(kHeads * 64));
}
