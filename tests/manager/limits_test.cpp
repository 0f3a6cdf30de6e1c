// KvCacheManager on a backend (support/test_backend.hpp): limits on bytes and on fetched tokens,
// and settings beyond every length.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "catch.hpp"
#include "reference/statistics.hpp"
#include "support/blocks.hpp"
#include "support/comparison.hpp"
#include "support/configurations.hpp"
#include "support/dense.hpp"
#include "support/mirror.hpp"
#include "support/results.hpp"
#include "support/test_backend.hpp"
#include "support/victim.hpp"

using namespace verkv;
using namespace verkv::test;
using verkv::reference::Random;

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
    config.study.estimator = Estimator::plain;
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
  const Block keys = random_block(random, 100, 2, 64, 1);
  const Block values = random_block(random, 100, 2, 64, 1);
  const auto usage = [](const KvCacheManager& cache, bool host) {
    return host ? cache.memory().host_held_bytes() : cache.memory().fast_held_bytes();
  };
  // On a device growing buffers of a step are only counted once they are there, and so is what a
  // compression allocates beyond its use.
  const bool exact = !backend().window_places;
  // What a first append takes, with all that is allocated.
  const auto first = make_cache(small_config());
  first->append(first->create_sequence(), 0, keys.view(), values.view());
  for (const bool host : {true, false}) {
    const std::int64_t one = usage(*first, host);
    CHECK(one > (host ? first->memory().host_bytes : first->memory().fast_bytes()));
    // Buffers of a step are replaced, and on the fast tier.
    const std::int64_t enough = one + (host ? 0 : 10'000);
    for (const std::int64_t limit : {one - 1, enough, enough + 100, 2 * enough, 3 * enough}) {
      CacheConfig config = small_config();
      (host ? config.host_bytes_limit : config.fast_bytes_limit) = limit;
      const auto cache = make_cache(config);
      INFO("host " << host << ", limit " << limit);
      const SequenceId a = cache->create_sequence();
      // They may find no room for another sequence.
      const SequenceId b = limit > enough + 100 ? cache->create_sequence() : a;
      bool refused = false;
      for (const SequenceId id : {a, b, a, b}) {
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
        const std::int64_t buffers = exact || host ? 0 : cache->memory().workspace_bytes;
        CHECK(usage(*cache, host) <= limit + buffers);
      }
      if (exact || limit <= 2 * enough) CHECK(refused);
      if (exact || host) CHECK((cache->tokens(a, 0) > 0) == (limit >= one));
      // What is erased is free again.
      cache->erase(a);
      if (b != a) cache->erase(b);
      if (limit < one) continue;
      cache->append(cache->create_sequence(), 0, keys.view(), values.view());
    }
  }
}

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

TEST_CASE("A compression that takes more than it saves respects the limit on the fast tier") {
  // Of few tokens the basis alone is larger than what leaves.
  CacheConfig config = small_config();
  config.storage = DType::f16;
  config.compress_from = 0;
  config.local_tokens = 4;
  Random random(7);
  int larger = 0;
  for (int trial = 0; trial < trials(12); ++trial) {
    config.layers = {layer_of(2, 1, one_of(random, std::vector<std::int64_t>{64, 96, 256}), 40),
                     layer_of(1, 2, 80, 80)};
    config.sketch.kind = trial % 4 == 3 ? SketchKind::exact : SketchKind::calibrated;
    config.study.estimator = one_of(random, std::vector{Estimator::clusters, Estimator::plain});
    config.keep = one_of(random, std::vector<double>{0.25, 0.9, 0.99});
    const std::int64_t tokens = 30 + static_cast<std::int64_t>(random.below(60));
    std::vector<Block> keys;
    std::vector<Block> values;
    std::vector<Scores> scores;
    for (const LayerConfig& layer : config.layers) {
      keys.push_back(random_block(random, tokens, layer.kv_heads, layer.key_dim, 1));
      values.push_back(random_block(random, tokens, layer.kv_heads, layer.value_dim, 1));
      scores.push_back(random_scores(random, layer.kv_heads, tokens, ScoreKind::random));
    }
    const Block queries = random_block(random, 1, 2, config.layers[0].key_dim, 1);
    const SequenceId id{0};
    const auto filled = [&](std::optional<std::int64_t> limit) {
      config.fast_bytes_limit = limit;
      auto cache = make_cache(config);
      REQUIRE(cache->create_sequence(3) == id);
      for (std::size_t l = 0; l < 2; ++l)
        cache->append(id, static_cast<std::int64_t>(l), keys[l].view(), values[l].view());
      return cache;
    };
    const auto free = filled(std::nullopt);
    const MemoryReport before = free->memory();
    compress(*free, id, scores);
    if (free->memory().fast_bytes() <= before.fast_bytes()) continue;
    ++larger;
    // Until the compression finds room, and what it replaces beside it.
    bool refused = false;
    for (std::int64_t limit = before.fast_held_bytes();; limit += 8192) {
      REQUIRE(limit < 8 * before.fast_held_bytes());
      INFO("trial " << trial << ", limit " << limit);
      std::unique_ptr<KvCacheManager> limited;
      try {
        limited = filled(limit);
      } catch (const CapacityError&) {
        continue;
      }
      const Result answer = attend(*limited, 0, {id}, queries);
      const MemoryReport held = limited->memory();
      try {
        compress(*limited, id, scores);
      } catch (const CapacityError& error) {
        refused = true;
        check_names(error.what(), {"fast", std::to_string(limit)});
        CHECK(limited->memory().fast_bytes() == held.fast_bytes());
        if (!backend().window_places) CHECK(limited->memory().fast_held_bytes() <= limit);
        CHECK(limited->compressed_tokens(id, 0) == 0);
        CHECK(same(attend(*limited, 0, {id}, queries), answer));
        continue;
      }
      CHECK(limited->memory().fast_bytes() == free->memory().fast_bytes());
      CHECK((backend().window_places ? limited->memory().fast_bytes()
                                     : limited->memory().fast_held_bytes()) <= limit);
      break;
    }
    CHECK(refused);
  }
  CHECK(larger > 0);
}
