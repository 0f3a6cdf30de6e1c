// KvCacheManager on a backend (support/test_backend.hpp): what engines need of it and no other topic
// shows. The table of needs is in docs/embedding.md.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
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

// One layer of one KV head and two query heads, and everything read.
CacheConfig exact_config() {
  CacheConfig config = small_config();
  config.layers = {layer_of(1, 2, 64, 64)};
  config.fetch.mode = FetchMode::always;
  return config;
}

}  // namespace

TEST_CASE("Lengths around every border, head sizes and groups are served") {
  const std::vector<std::int64_t> lengths{0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129};
  const std::vector<std::int64_t> dims{64, 80, 96, 100, 112, 128, 256, 512, 576};
  const std::vector<std::int64_t> groups{1, 2, 5, 6, 7, 8, 12, 16};
  Random random(71);
  // All of each, not all pairs.
  const std::size_t stride = backend().thinning > 1 ? 5 : 1;
  for (std::size_t i = 0; i < lengths.size(); i += stride) {
    const std::int64_t n = lengths[i];
    const std::int64_t dim = dims[i % dims.size()];
    const std::int64_t group = groups[i * 3 % groups.size()];
    CAPTURE(n, dim, group);
    CacheConfig config = small_config();
    config.layers = {layer_of(1, group, dim, dim)};
    config.compress_from = 0;
    config.local_tokens = 4;
    const Block keys = random_block(random, n, 1, dim, 1);
    const Block values = random_block(random, n, 1, dim, 1);
    const Scores scores =
        random_scores(random, 1, n, i % 2 == 0 ? ScoreKind::zero : ScoreKind::equal);
    const Block queries = random_block(random, 1, group, dim, 1);
    for (const FetchMode mode : {FetchMode::always, FetchMode::verified}) {
      config.fetch.mode = mode;
      const Filled filled = fill(config, {keys}, {values}, {scores});
      const Result result = attend(*filled.cache, 0, {filled.sequence}, queries);
      CHECK(filled.cache->tokens(filled.sequence, 0) == n);
      bool exact = true;
      for (const QueryHeadReport& query : result.query) exact = exact && query.epsilon == 0;
      if (mode == FetchMode::always || n <= 4) CHECK(exact);
      if (n == 0) {
        CHECK(std::ranges::all_of(result.output, [](float x) { return x == 0; }));
        CHECK(std::ranges::all_of(result.lse, [](float x) { return x == -kInfinity; }));
      } else if (exact) {
        const WorstError error = worst_error(config, 0, filled, queries, 0, result);
        CHECK(error.output < tolerance::kDense);
        CHECK(error.lse < tolerance::kDense);
      } else {
        CHECK(std::ranges::all_of(result.output, [](float x) { return std::isfinite(x); }));
        CHECK(std::ranges::all_of(result.lse, [](float x) { return std::isfinite(x); }));
      }
    }
  }
}

TEST_CASE("Answers over parts of a context are joined by their LSE") {
  Random random(72);
  const CacheConfig config = exact_config();
  const Block keys = random_block(random, 90, 1, 64, 1),
              values = random_block(random, 90, 1, 64, 1);
  const Block queries = random_block(random, 1, 2, 64, 1);
  const auto cache = make_cache(config);
  std::vector<Result> parts;
  for (const auto& [begin, count] : {std::pair{0, 60}, std::pair{60, 30}, std::pair{90, 0}}) {
    const SequenceId part = cache->create_sequence();
    cache->append(part, 0, keys.part(begin, count).view(), values.part(begin, count).view());
    parts.push_back(attend(*cache, 0, {part}, queries));
  }
  for (std::int64_t head = 0; head < 2; ++head) {
    const Dense all = dense(config, 0, keys, values, queries.row(0, head), head);
    double denominator = 0;
    for (const Result& part : parts)
      denominator += std::exp(static_cast<double>(part.lse[size(head)]));
    CHECK(std::abs(std::log(denominator) - all.lse) < tolerance::kDense);
    for (std::int64_t j = 0; j < 64; ++j) {
      double sum = 0;
      for (const Result& part : parts)
        sum +=
            std::exp(static_cast<double>(part.lse[size(head)])) * part.output[size(head * 64 + j)];
      CHECK(std::abs(sum / denominator - all.output[size(j)]) <
            tolerance::kDense * norm(all.output));
    }
  }
}

TEST_CASE("Layers that share keys and values ask one layer, several times a step") {
  // Only the last that asks is seen in the scores of the window, of which chunks are compressed.
  Random random(74);
  CacheConfig config = small_config();
  config.layers = {layer_of(1, 2, 64, 64)};
  config.local_tokens = 4;
  config.chunk_tokens = 8;
  config.compress_from = 0;
  const std::int64_t n = 60, steps = 14;
  const Block keys = random_block(random, n + steps, 1, 64, 1);
  const Block values = random_block(random, n + steps, 1, 64, 1);
  const Block first = random_block(random, steps, 2, 64, 2);
  const Block second = random_block(random, steps, 2, 64, 2);
  const Scores scores = random_scores(random, 1, n, ScoreKind::random);
  const auto tell = [&](bool twice) {
    const Filled filled = fill(config, {keys.part(0, n)}, {values.part(0, n)}, {scores}, 3);
    Result all;
    for (std::int64_t t = 0; t < steps; ++t) {
      filled.cache->append(filled.sequence, 0, keys.part(n + t, 1).view(),
                           values.part(n + t, 1).view());
      if (twice) attend(*filled.cache, 0, {filled.sequence}, first.part(t, 1));
      append_result(all, attend(*filled.cache, 0, {filled.sequence}, second.part(t, 1)));
    }
    CHECK(filled.cache->compressed_tokens(filled.sequence, 0) > n);
    return all;
  };
  CHECK(same(tell(true), tell(false)));
}

TEST_CASE("A sequence sees nothing of one that was emptied or erased before it") {
  Random random(75);
  CacheConfig config = small_config();
  config.layers = {layer_of(2, 2, 64, 64)};
  const std::int64_t n = 120;
  const Filled fresh =
      fill(config, {random_block(random, n, 2, 64, 1)}, {random_block(random, n, 2, 64, 1)},
           {random_scores(random, 2, n, ScoreKind::random)}, 3);
  const Block queries = random_block(random, 1, 4, 64, 1);
  const Result expected = attend(*fresh.cache, 0, {fresh.sequence}, queries);

  const auto cache = make_cache(config);
  const Block others = random_block(random, 150, 2, 64, 2);
  const SequenceId erased = cache->create_sequence(3);
  cache->append(erased, 0, others.view(), others.view());
  compress(*cache, erased, {random_scores(random, 2, 150, ScoreKind::random)});
  attend(*cache, 0, {erased}, queries);
  cache->erase(erased);
  const SequenceId emptied = cache->create_sequence(3);
  cache->append(emptied, 0, others.view(), others.view());
  attend(*cache, 0, {emptied}, queries);
  REQUIRE(cache->truncate(emptied, 0));
  CHECK(cache->tokens(emptied, 0) == 0);
  cache->append(emptied, 0, fresh.keys[0].view(), fresh.values[0].view());
  compress(*cache, emptied, fresh.scores);
  const Result result = attend(*cache, 0, {emptied}, queries);
  CHECK(same(result, expected));
}
