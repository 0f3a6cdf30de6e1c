// KvCacheManager on a backend (support/test_backend.hpp): where exactness is promised: everything
// read, dominant and equal keys, extreme logits.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
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
using verkv::reference::kInfinite;
using verkv::reference::Random;

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
          const WorstError error = worst_error(config, 0, filled, queries, 0, result);
          INFO(c.name << ", " << verkv::name(storage) << ", n " << n << ", soft cap "
                      << shown(soft_cap));
          CHECK(error.output < tolerance::kDense);
          CHECK(error.lse < tolerance::kDense);
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
      const WorstError error = worst_error(config, 0, filled, queries, 0, result);
      CHECK(error.output < tolerance::kDenseLargeOutput);
      CHECK(error.lse < tolerance::kDenseLargeLse);
      CHECK(result.lse[0] > 9000);
    }
  }
}

TEST_CASE("A drawn token that the plan takes for nothing is capped, wherever the shift goes") {
  // The first 32 coordinates have most of the keys' energy, and the prompt's queries look at nothing
  // else, so coordinate 40 is not in the sketch. A needle whose
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
    config.study.select = Selection::poisson;  // a draw that the keys do not change
    const std::int64_t n = 2000;
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
    Block prompt = random_block(random, 64, 1, 64, 1);
    for (std::int64_t t = 0; t < 64; ++t) {
      for (std::int64_t j = 32; j < 64; ++j) prompt.at(t, 0, j) = 0;
    }
    const Filled filled = fill(config, {keys}, {values}, {}, 9);
    compress(*filled.cache, filled.sequence, scores, {prompt});
    Mirror mirror(config, 9);
    mirror.append(0, keys, values);
    mirror.compress(scores, {prompt});
    const Result result = attend(*filled.cache, 0, {filled.sequence}, queries);
    REQUIRE(result.kv[0].moved_tokens > 0);
    REQUIRE(result.lse[0] < 350);  // the drawn token's logit is 500
    Tally tally;
    compare(config, 0, result, 0, mirror.attend(0, queries, 0), "cap " + std::to_string(cap), tally,
            Tolerance{tolerance::kStepLargeEpsilon, tolerance::kStepLargeLse,
                      tolerance::kStepLargeOutput});
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
        const std::int64_t n = scene(400, 250);
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
        CHECK(std::fabs(static_cast<double>(result.lse[0]) - expected.lse) <
              tolerance::kDominantLse);
        if (certificate) CHECK(result.query[0].certified);
      }
    }
  }
}

TEST_CASE("Importance without any information keeps what the budget allows") {
  for (const ScoreKind kind : {ScoreKind::zero, ScoreKind::equal, ScoreKind::with_zeros}) {
    for (const Pool pool : {Pool::head, Pool::layer, Pool::sequence}) {
      for (const Selection select : {Selection::poisson, Selection::spread, Selection::topk}) {
        Random random(10);
        CacheConfig config = small_config();
        config.layers = {layer_of(2, 1, 64, 64), layer_of(3, 1, 64, 64)};
        config.pool = pool;
        config.study.select = select;
        config.keep = 0.25;
        config.sketch.kind = SketchKind::exact;  // no matter here, and quickly made
        const std::int64_t n = scene(1000, 300);
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
        const double expected = 5 * config.keep * static_cast<double>(n);
        // A sum of independent Bernoulli numbers with variance at most its mean; rounding of 5
        // top-k budgets; 5 spread samples, each within one, by odds of 8 bits.
        const double slack = select == Selection::topk ? 5
                             : select == Selection::spread
                                 ? 5 + expected / 256
                                 : reference::bernstein_bound(expected, 1, 1);
        CHECK(std::fabs(residents - expected) <= slack);
      }
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
