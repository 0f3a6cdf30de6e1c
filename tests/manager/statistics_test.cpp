// KvCacheManager on a backend (support/test_backend.hpp): statistics are the sums of the reports.
#include <cstddef>
#include <cstdint>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "catch.hpp"
#include "reference/statistics.hpp"
#include "support/blocks.hpp"
#include "support/configurations.hpp"
#include "support/results.hpp"
#include "support/test_backend.hpp"

using namespace verkv;
using namespace verkv::test;
using verkv::reference::Random;

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
  for (int step = 0; step < scene(20, 5); ++step) {
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
          ++s.bounds[bound_bucket(query.epsilon)];
          s.certified += query.certified ? 1 : 0;
          s.enlarged += query.sketch_error <= 1 ? 0 : 1;
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
    CHECK(actual.enlarged == s.enlarged);
    CHECK(actual.fetching == s.fetching);
    CHECK(actual.planned_tokens == s.planned_tokens);
    CHECK(actual.fetched_tokens == s.fetched_tokens);
    CHECK(actual.moved_tokens == s.moved_tokens);
    CHECK(actual.moved_bytes == s.moved_bytes);
    CHECK(actual.cached_tokens == s.cached_tokens);
    CHECK(actual.resident_tokens == s.resident_tokens);
    for (int i = 0; i <= kBoundEdges; ++i) CHECK(actual.bounds[i] == s.bounds[i]);
  };
  for (std::int64_t l = 0; l < 2; ++l) check(l, expected[size(l)]);
  CHECK(expected[0].moved_tokens > 0);
  CHECK(expected[0].bounds[0] > 0);
  CHECK(expected[0].bounds[0] < expected[0].decisions);
  CHECK(cache->statistics(0).attend_ns > 0);
  CHECK(cache->statistics(1).append_ns > 0);
  CHECK(cache->statistics(1).compress_ns > 0);
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
  CHECK(cache->statistics().attend_ns == 0);
  CHECK(cache->statistics().append_ns == 0);
  CHECK(cache->statistics().compress_ns == 0);
}
