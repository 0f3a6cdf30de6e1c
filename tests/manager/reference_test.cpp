// KvCacheManager on a backend (support/test_backend.hpp): whole steps against the reference in
// double.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "catch.hpp"
#include "reference/statistics.hpp"
#include "reference/step.hpp"
#include "support/blocks.hpp"
#include "support/comparison.hpp"
#include "support/configurations.hpp"
#include "support/dense.hpp"
#include "support/mirror.hpp"
#include "support/results.hpp"
#include "support/test_backend.hpp"
#include "tolerance.hpp"

using namespace verkv;
using namespace verkv::test;
using verkv::reference::Random;

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
      const double spread = setting.logit_spread / std::sqrt(reference::attention_scale(layer)) /
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
      const double spread = setting.logit_spread / std::sqrt(reference::attention_scale(layer)) /
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
    compare(config, 0, result, 0, mirror.attend(0, queries, 0), "trial " + std::to_string(trial),
            tally,
            Tolerance{tolerance::kStepLargeEpsilon, tolerance::kStepLargeLse,
                      tolerance::kStepLargeOutput});
  }
  report(tally);
}
