// KvCacheManager on the CPU: layers with a sliding window. What they answer is what a dense layer
// answers that was given the last tokens alone, bit for bit.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "catch.hpp"
#include "reference/statistics.hpp"
#include "support/blocks.hpp"
#include "support/comparison.hpp"
#include "support/configurations.hpp"
#include "support/dense.hpp"
#include "support/results.hpp"
#include "support/test_backend.hpp"
#include "tolerance.hpp"

using namespace verkv;
using namespace verkv::test;
using verkv::reference::Random;

namespace {

constexpr std::int64_t kWindow = 70;
constexpr std::int64_t kMargin = 9;

// One layer, two KV heads of three query heads.
CacheConfig sliding_config(std::int64_t window = kWindow) {
  CacheConfig config = small_config();
  config.layers = {layer_of(2, 3, 40, 24)};
  config.layers[0].window = window;
  config.window_margin = kMargin;
  return config;
}

struct KeysAndValues {
  Block keys;
  Block values;
};

KeysAndValues random_rows(Random& random, std::int64_t tokens) {
  return {random_block(random, tokens, 2, 40, 1), random_block(random, tokens, 2, 24, 1)};
}

// The answer for token `at` of `rows`, from a dense layer that has got its window alone.
Result windowed(const CacheConfig& config, const KeysAndValues& rows, std::int64_t at,
                const Block& queries) {
  CacheConfig dense = config;
  dense.layers = {config.layers[0]};
  dense.fast_bytes_limit.reset();
  dense.host_bytes_limit.reset();
  const std::int64_t first = std::max<std::int64_t>(0, at + 1 - *dense.layers[0].window);
  dense.layers[0].window.reset();
  dense.layers[0].dense = true;
  const auto cache = make_cache(dense);
  const SequenceId sequence = cache->create_sequence();
  cache->append(sequence, 0, rows.keys.part(first, at + 1 - first).view(),
                rows.values.part(first, at + 1 - first).view());
  return attend(*cache, 0, {sequence}, queries);
}

// Of one sequence with a sliding window: what it has got, and what it must answer.
struct Follower {
  CacheConfig config;
  KvCacheManager& cache;
  SequenceId sequence;
  KeysAndValues rows;
  std::int64_t tokens = 0;

  void append(std::int64_t count) {
    cache.append(sequence, 0, rows.keys.part(tokens, count).view(),
                 rows.values.part(tokens, count).view());
    tokens += count;
  }
  // The last `count` tokens together.
  void check(Random& random, std::int64_t count) {
    const Block queries = random_block(random, count, 6, 40, 1);
    const std::vector<SequenceId> all(size(count), sequence);
    const Result result = attend(cache, 0, all, queries);
    for (std::int64_t r = 0; r < count; ++r) {
      CAPTURE(tokens, r);
      CHECK(same(row_of(result, size(r), size(count)),
                 windowed(config, rows, tokens - count + r, queries.part(r, 1))));
    }
  }
};

Follower follow(const CacheConfig& config, KvCacheManager& cache, Random& random,
                std::int64_t tokens) {
  return {config, cache, cache.create_sequence(), random_rows(random, tokens)};
}

std::vector<std::byte> saved_window(const KvCacheManager& cache, SequenceId sequence) {
  std::vector<std::byte> bytes;
  cache.save(sequence, [&](std::span<const std::byte> piece) {
    bytes.insert(bytes.end(), piece.begin(), piece.end());
  });
  return bytes;
}

SequenceId restored_window(KvCacheManager& cache, const std::vector<std::byte>& bytes) {
  std::size_t at = 0;
  return cache.restore([&](std::span<std::byte> to) {
    const std::size_t count = std::min(to.size(), bytes.size() - at);
    std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(at), count, to.begin());
    at += count;
    return count;
  });
}

}  // namespace

TEST_CASE("A sliding window is seen exactly, whatever came before, one by one and in bursts",
          "[cpu]") {
  Random random(271);
  for (const bool vector_code : {true, false}) {
    for (const std::int64_t window : {std::int64_t{1}, std::int64_t{64}, kWindow}) {
      CacheConfig config = sliding_config(window);
      config.study.vector_code = vector_code;
      if (window == 64) {
        config.layers[0].soft_cap = 3;
        config.layers[0].sink_logits = random_sinks(random, 6);
      }
      const auto cache = make_cache(config);
      Follower one = follow(config, *cache, random, 700);
      CHECK(cache->memory(one.sequence).resident_bytes == 0);
      for (const std::int64_t count : {1, 30, 39, 1, 1, 5, 200, 1, 1, 64, 20, 3}) {
        one.append(count);
        one.check(random, 1);
        one.check(random, std::min<std::int64_t>(count, 11));
      }
      CHECK(cache->tokens(one.sequence, 0) == 366);
      CHECK(cache->compressed_tokens(one.sequence, 0) == 0);
    }
  }
}

TEST_CASE("A window longer than the context is a dense layer", "[cpu]") {
  Random random(272);
  const CacheConfig config = sliding_config(1 << 20);
  const auto cache = make_cache(config);
  Follower one = follow(config, *cache, random, 150);
  one.append(150);
  one.check(random, 30);
}

TEST_CASE("A step with a sliding window takes a chunk of a prompt with all its rows", "[cpu]") {
  Random random(273);
  const CacheConfig config = sliding_config();
  const auto cache = make_cache(config);
  Follower one = follow(config, *cache, random, 400);
  for (const std::int64_t count : {100, 120, 90}) {
    const Block queries = random_block(random, count, 6, 40, 1);
    const std::vector<SequenceId> all(size(count), one.sequence);
    Result result;
    result.output.resize(size(count * 6 * 24));
    result.lse.resize(size(count * 6));
    result.query.resize(size(count * 6));
    result.kv.resize(size(count * 2));
    cache->step(0, one.rows.keys.part(one.tokens, count).view(),
                one.rows.values.part(one.tokens, count).view(),
                {all, queries.view(), result.output, result.lse, result.query, result.kv, {}});
    one.tokens += count;
    for (std::int64_t r = 0; r < count; r += 7) {
      CAPTURE(one.tokens, r);
      CHECK(same(row_of(result, size(r), size(count)),
                 windowed(config, one.rows, one.tokens - count + r, queries.part(r, 1))));
    }
  }
}

TEST_CASE("A sliding window goes back by its margin, or says that it cannot", "[cpu]") {
  Random random(274);
  const CacheConfig config = sliding_config();
  const auto cache = make_cache(config);
  Follower one = follow(config, *cache, random, 600);
  one.append(300);
  one.append(1);  // more than the window and its margin leaves here
  for (int round = 0; round < 40; ++round) {
    const std::int64_t drafted = 1 + static_cast<std::int64_t>(random.below(size(kMargin)));
    for (std::int64_t i = 0; i < drafted; ++i) one.append(1);
    REQUIRE(cache->truncate(one.sequence, one.tokens - drafted));
    one.tokens -= drafted;
    CHECK(cache->tokens(one.sequence, 0) == one.tokens);
    // Others come in their place.
    const KeysAndValues others = random_rows(random, 600 - one.tokens);
    std::copy(others.keys.data.begin(), others.keys.data.end(),
              one.rows.keys.data.end() - std::ssize(others.keys.data));
    std::copy(others.values.data.begin(), others.values.data.end(),
              one.rows.values.data.end() - std::ssize(others.values.data));
    if (round % 4 == 0) one.check(random, 1);
    one.append(2);
    one.check(random, 2);
  }
  const MemoryReport before = cache->memory(one.sequence);
  const Truncation refused = cache->truncate(one.sequence, one.tokens - 3 * kMargin);
  CHECK_FALSE(refused.done);
  CHECK(refused.layer == 0);
  CHECK(cache->tokens(one.sequence, 0) == one.tokens);
  CHECK(same(cache->memory(one.sequence), before));
  one.check(random, 1);
  CHECK_FALSE(cache->truncate(one.sequence, refused.least_tokens - 1).done);
  const Truncation least = cache->truncate(one.sequence, refused.least_tokens);
  CHECK((least.done && least.exact));
  one.tokens = refused.least_tokens;
  one.check(random, 1);
  REQUIRE(cache->truncate(one.sequence, 0));
  one.tokens = 0;
  CHECK(cache->memory(one.sequence).resident_bytes == 0);
  one.append(90);
  one.check(random, 4);
}

TEST_CASE("A sliding window takes the bytes of its tokens, on the fast tier alone", "[cpu]") {
  Random random(275);
  CacheConfig config = sliding_config();
  const std::int64_t row = 2 * (40 + 24) * 4;
  // Pages of the window, those beside them while it moves, and the buffers of a step.
  config.fast_bytes_limit = 180'000;
  config.host_bytes_limit = 0;
  const auto cache = make_cache(config);
  Follower one = follow(config, *cache, random, 700);
  const auto held = [&] { return cache->memory(one.sequence).resident_bytes / row; };
  for (std::int64_t i = 0; i < 40; ++i) {
    one.append(i % 2 == 0 ? 3 : 1);
    CHECK(held() <= kWindow + kMargin + 3);
    CHECK(cache->memory().resident_bytes == cache->memory(one.sequence).resident_bytes);
  }
  CHECK(one.tokens == 80);
  for (std::int64_t i = 0; i < 100; ++i) one.append(3);
  CHECK(held() == kWindow + kMargin + 3);
  CHECK(cache->memory(one.sequence).host_bytes == 0);
  CHECK(cache->memory(one.sequence).metadata_bytes == 0);
  // Pages that have left are free.
  CHECK(cache->memory(one.sequence).reserved_bytes < 3 * 64 * row);
  CHECK_THROWS_AS(cache->append(one.sequence, 0, one.rows.keys.part(380, 320).view(),
                                one.rows.values.part(380, 320).view()),
                  CapacityError);
  one.check(random, 1);
  cache->reserve(one.sequence, 3);
  CHECK(held() == kWindow + kMargin);
  CHECK_THROWS_AS(cache->reserve(one.sequence, 320), CapacityError);
  for (int i = 0; i < 3; ++i) one.append(1);
  one.check(random, 3);
  // A long prompt's memory is given back when the next token comes.
  config.fast_bytes_limit.reset();
  const auto roomy = make_cache(config);
  Follower other = follow(config, *roomy, random, 700);
  other.append(640);
  CHECK(roomy->memory(other.sequence).resident_bytes == 640 * row);
  other.append(1);
  const MemoryReport after = roomy->memory(other.sequence);
  CHECK(after.resident_bytes == (kWindow + kMargin + 1) * row);
  CHECK(after.reserved_bytes < 3 * 64 * row);
  other.check(random, 1);
}

TEST_CASE("Forks and saved sequences go on with their sliding window", "[cpu]") {
  Random random(276);
  const CacheConfig config = sliding_config();
  const auto cache = make_cache(config);
  Follower one = follow(config, *cache, random, 400);
  one.append(200);
  one.append(30);
  Follower fork = one;
  fork.sequence = cache->fork(one.sequence);
  const std::vector<std::byte> bytes = saved_window(*cache, one.sequence);
  Follower other = one;
  other.sequence = restored_window(*cache, bytes);
  CHECK(saved_window(*cache, other.sequence) == bytes);
  CHECK(cache->truncate(other.sequence, 221));
  other.tokens = 221;
  for (Follower* each : {&one, &fork, &other}) {
    each->rows.keys.at(each->tokens, 0, 0) += static_cast<float>(each->sequence.value);
    for (int i = 0; i < 5; ++i) {
      each->append(i == 3 ? 70 : 1);
      each->check(random, 1);
    }
  }
  cache->erase(one.sequence);
  fork.append(2);
  fork.check(random, 2);
  // What is cut or lies about what has left is refused.
  for (std::size_t end = 0; end < bytes.size(); end += 1 + bytes.size() / 37)
    CHECK_THROWS_AS(
        restored_window(*cache, {bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(end)}),
        FormatError);
  CacheConfig longer = config;
  longer.layers[0].window = kWindow + 1;
  CHECK_THROWS_AS(restored_window(*make_cache(longer), bytes), FormatError);
  cache->erase(fork.sequence);
  cache->erase(other.sequence);
  CHECK(cache->memory().fast_bytes() == 0);
}

TEST_CASE("What has left a sliding window is neither read nor asked for", "[cpu]") {
  Random random(277);
  const CacheConfig config = sliding_config();
  const auto cache = make_cache(config);
  Follower one = follow(config, *cache, random, 300);
  one.append(250);
  one.append(1);
  const std::int64_t held = kWindow + kMargin + 1;
  std::vector<std::byte> keys(size(held * 2 * 40 * 4));
  cache->read(one.sequence, 0, one.tokens - held, held, keys, {});
  CHECK(std::equal(
      keys.begin(), keys.end(),
      reinterpret_cast<const std::byte*>(&one.rows.keys.data[size((one.tokens - held) * 2 * 40)])));
  CHECK_THROWS_AS(cache->read(one.sequence, 0, one.tokens - held - 1, 1, {}, {}), InvalidArgument);
  one.check(random, held - kWindow + 1);
  CHECK_THROWS_AS(one.check(random, held - kWindow + 2), InvalidArgument);
}

TEST_CASE("Sliding windows stand beside compressed layers", "[cpu]") {
  Random random(278);
  CacheConfig config = sliding_config();
  config.layers.push_back(layer_of(2, 3, 40, 24));
  config.layers.push_back(config.layers[0]);
  CacheConfig plain = config;
  plain.layers[0].cached = plain.layers[2].cached = false;
  const auto cache = make_cache(config), other = make_cache(plain);
  Follower one = follow(config, *cache, random, 500);
  const SequenceId there = other->create_sequence(4);
  one.sequence = cache->create_sequence(4);
  const auto append = [&](std::int64_t count) {
    const Block keys = one.rows.keys.part(one.tokens, count);
    const Block values = one.rows.values.part(one.tokens, count);
    cache->append(one.sequence, 2, keys.view(), values.view());
    cache->append(one.sequence, 1, keys.view(), values.view());
    other->append(there, 1, keys.view(), values.view());
    one.append(count);
  };
  append(300);
  const Scores scores = random_scores(random, 2, 300, ScoreKind::random);
  compress(*cache, one.sequence, {{}, scores, {}});
  compress(*other, there, {{}, scores, {}});
  for (int i = 0; i < 40; ++i) {
    append(1 + i % 3);
    const Block queries = random_block(random, 1, 6, 40, 1);
    CHECK(same(attend(*cache, 1, {one.sequence}, queries), attend(*other, 1, {there}, queries)));
    one.check(random, 1);
    CHECK(same(attend(*cache, 2, {one.sequence}, queries),
               windowed(config, one.rows, one.tokens - 1, queries)));
  }
  CHECK(cache->compressed_tokens(one.sequence, 1) > 300);
  CHECK(cache->statistics(0).cached_tokens == cache->statistics(0).resident_tokens);
}

TEST_CASE("Windows of no tokens and margins below none are refused", "[cpu]") {
  for (const std::int64_t window : {std::int64_t{0}, std::int64_t{-1}, std::int64_t{1} << 40})
    CHECK(reasons_against(sliding_config(window)).size() == 1);
  for (const std::int64_t margin : {std::int64_t{-1}, std::int64_t{1} << 40}) {
    CacheConfig config = sliding_config();
    config.window_margin = margin;
    CHECK(reasons_against(config).size() == 1);
  }
  CacheConfig engine = sliding_config();
  engine.host = HostTier::engine;
  CHECK(reasons_against(engine).size() == 1);
  engine.layers[0].cached = false;
  CHECK(reasons_against(engine).empty());
}
