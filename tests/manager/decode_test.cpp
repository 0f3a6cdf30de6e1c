// KvCacheManager on a backend (support/test_backend.hpp): growth during decode: chunks leave the
// local window, the reference follows.
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

using namespace verkv;
using namespace verkv::test;
using verkv::reference::kInfinite;
using verkv::reference::Random;

TEST_CASE("A long decode stays small, follows the reference and keeps its promise") {
  for (const Pool pool : {Pool::head, Pool::layer, Pool::sequence}) {
    Random random(16);
    CacheConfig config = small_config();
    config.layers = {layer_of(2, 2, 64, 64)};
    config.pool = pool;
    config.keep = 0.25;
    config.local_tokens = 32;
    config.chunk_tokens = scene(64, 16);
    config.sink_tokens = 4;
    config.sketch.kind = SketchKind::exact;
    config.fetch.epsilon = 0.1;
    config.fetch.delta = 0.1;
    // Layer 2 waits for 0.24 of a chunk.
    config.chunks_in_turn = pool != Pool::head;
    config.layers[0].global_layer = 2;
    const std::int64_t wait = config.chunks_in_turn ? scene(15, 3) : 0;
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
      REQUIRE(held - compressed <= config.local_tokens + wait + *config.chunk_tokens);
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
    CHECK(reference::binomial_not_above(failures, decisions, config.fetch.delta));
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
  // Half of the coordinates take all bits of the sketch, and the queries of the steps, unlike those of
  // the prompt, do not look at them.
  Block keys = random_block(random, 2000, 1, 64, 30);
  for (std::int64_t t = 0; t < 2000; ++t) {
    for (std::int64_t j = 0; j < 32; ++j) keys.at(t, 0, j) *= 50;
  }
  std::int64_t residents = 0;
  int far_off = 0;
  cache->append(sequence, 0, keys.view(), random_block(random, 2000, 1, 64, 1).view());
  Block prompt = random_block(random, 64, 1, 64, 1);
  for (std::int64_t t = 0; t < 64; ++t) {
    for (std::int64_t j = 32; j < 64; ++j) prompt.at(t, 0, j) = 0;
  }
  compress(*cache, sequence, {random_scores(random, 1, 2000, ScoreKind::random)}, {prompt});
  for (int step = 0; step < 100; ++step) {
    const Block key = random_block(random, 1, 1, 64, 1);
    Block query = random_block(random, 1, 1, 64, 36);
    for (std::int64_t j = 0; j < 32; ++j) query.at(0, 0, j) = 0;
    cache->append(sequence, 0, key.view(), random_block(random, 1, 1, 64, 1).view());
    const Result result = attend(*cache, 0, {sequence}, query);
    for (const float x : result.output) REQUIRE(std::isfinite(x));
    far_off += result.query[0].sketch_error > 7.5;
    residents = result.kv[0].resident_tokens;
  }
  // Half of 2100 tokens, and at most 24 of the window. A NaN score would count as one that is always
  // kept.
  CHECK(far_off > 10);
  CHECK(residents > 900);
  CHECK(residents < 1200);
}

TEST_CASE("Tokens at once, in pieces and one by one leave the same cache") {
  for (const std::optional<std::int64_t> from :
       {std::optional<std::int64_t>(), std::optional<std::int64_t>(0),
        std::optional<std::int64_t>(40)}) {
    CacheConfig config = small_config();
    config.layers = {layer_of(2, 2, 16, 16)};
    config.keep = 0.25;
    config.local_tokens = 32;
    config.chunk_tokens = 16;
    config.compress_from = from;
    const std::int64_t prompt = 20;  // within the local window
    const std::int64_t tokens = 200;
    Random random(61);
    // Later keys lie elsewhere, so that a basis tells what it was made of.
    Block keys = random_block(random, prompt + tokens, 2, 16, 1);
    for (std::int64_t t = 0; t < keys.tokens; ++t) {
      for (std::int64_t j = 0; j < 16; ++j) {
        keys.at(t, 0, j) *= t < 100 || j % 2 == 0 ? 1 : 4;
        keys.at(t, 1, j) += t < 100 ? 0 : static_cast<float>(j);
      }
    }
    const Block values = random_block(random, prompt + tokens, 2, 16, 1);
    const Scores scores = random_scores(random, 2, prompt, ScoreKind::random);
    const Block queries = random_block(random, 1, 4, 16, 1.2);
    std::vector<Result> results;
    for (const std::int64_t piece : {tokens, std::int64_t{1}, std::int64_t{7}, std::int64_t{64}}) {
      const auto cache = make_cache(config);
      const SequenceId id = cache->create_sequence(3);
      const auto append = [&](std::int64_t begin, std::int64_t count) {
        cache->append(id, 0, keys.part(begin, count).view(), values.part(begin, count).view());
      };
      append(0, prompt);
      compress(*cache, id, {scores});
      REQUIRE(cache->compressed_tokens(id, 0) == 0);
      for (std::int64_t begin = 0; begin < tokens; begin += piece)
        append(prompt + begin, std::min(piece, tokens - begin));
      cache->reserve(id, 0);  // compresses what the last piece has left
      CHECK(cache->compressed_tokens(id, 0) == 176);
      results.push_back(attend(*cache, 0, {id}, queries));
      INFO("compress_from " << shown(from) << ", pieces of " << piece);
      CHECK(same(results.back(), results.front()));
    }
  }
}
