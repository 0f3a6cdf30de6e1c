// KvCacheManager on a backend (support/test_backend.hpp): heads over several ranks. What is not refused
// answers as one cache with all heads; that compressed layers whose KV heads are split do so is in
// invariance_test.cpp.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "catch.hpp"
#include "reference/statistics.hpp"
#include "support/blocks.hpp"
#include "support/configurations.hpp"
#include "support/dense.hpp"
#include "support/results.hpp"
#include "support/test_backend.hpp"

using namespace verkv;
using namespace verkv::test;
using verkv::reference::Random;

namespace {

// Rank with KV heads [first, first + kv_heads) of 4 and so many query heads of each, of 6.
CacheConfig rank_config(std::int64_t first, std::int64_t kv_heads, std::int64_t group) {
  CacheConfig config = small_config();
  config.layers = {layer_of(kv_heads, group, 64, 64)};
  config.layers[0].first_global_kv_head = first;
  config.layers[0].global_kv_heads = 4;
  config.layers[0].global_query_heads = 24;
  return config;
}

bool is_refused(const CacheConfig& config, const std::string& why) {
  const std::vector<std::string> reasons = reasons_against(config);
  return reasons.size() == 1 && reasons[0].find(why) != std::string::npos;
}

}  // namespace

TEST_CASE("Whole groups of heads on a rank are served, parts and wider pools refused") {
  CHECK(reasons_against(rank_config(0, 4, 6)).empty());
  CHECK(reasons_against(rank_config(2, 2, 6)).empty());
  CHECK(reasons_against(rank_config(3, 1, 6)).empty());
  CHECK(is_refused(rank_config(3, 2, 6), "4 that the model has"));
  CHECK(is_refused(rank_config(0, 2, 3), "3 of the 6 query heads"));
  for (const Pool pool : {Pool::layer, Pool::sequence}) {
    CacheConfig config = rank_config(0, 2, 6);
    config.pool = pool;
    CHECK(is_refused(config, "2 of the 4 KV heads"));
    config.layers[0].dense = true;
    CHECK(reasons_against(config).empty());
    config.layers[0].dense = false;
    config.keep = 1;
    CHECK(reasons_against(config).empty());
    config = rank_config(0, 4, 6);
    config.pool = pool;
    CHECK(reasons_against(config).empty());
  }
  CacheConfig config = rank_config(0, 4, 6);
  config.layers[0].global_query_heads = 23;
  CHECK(is_refused(config, "23 query heads"));
  config.layers[0].global_query_heads = 20;
  CHECK(is_refused(config, "20 query heads"));
  for (const std::int64_t none : {std::int64_t{0}, std::int64_t{-4}}) {
    config = rank_config(0, 4, 6);
    config.layers[0].global_kv_heads = none;
    CHECK(reasons_against(config).size() == 1);
    config = rank_config(0, 4, 6);
    config.layers[0].global_query_heads = none;
    CHECK(reasons_against(config).size() == 1);
  }
}

TEST_CASE(
    "A KV head of a dense layer is held by several ranks, each with some of its query heads") {
  Random random(471);
  CacheConfig whole = rank_config(0, 4, 6);
  whole.layers[0].dense = true;
  const Block keys = random_block(random, 70, 4, 64, 1);
  const Block values = random_block(random, 70, 4, 64, 1);
  const Block queries = random_block(random, 1, 24, 64, 1);
  const Filled all = fill(whole, {keys}, {values}, {});
  const Result expected = attend(*all.cache, 0, {all.sequence}, queries);
  const auto heads = [](const Block& block, std::int64_t first, std::int64_t count) {
    Block part = constant_block(block.tokens, count, block.dim, 0);
    for (std::int64_t t = 0; t < block.tokens; ++t) {
      for (std::int64_t h = 0; h < count; ++h) {
        for (std::int64_t j = 0; j < block.dim; ++j) part.at(t, h, j) = block.at(t, first + h, j);
      }
    }
    return part;
  };
  // Eight ranks: two for each KV head.
  for (std::int64_t rank = 0; rank < 8; ++rank) {
    CacheConfig config = rank_config(rank / 2, 1, 3);
    config.layers[0].dense = true;
    const Filled part = fill(config, {heads(keys, rank / 2, 1)}, {heads(values, rank / 2, 1)}, {});
    const Result result = attend(*part.cache, 0, {part.sequence}, heads(queries, 3 * rank, 3));
    const auto begin = expected.output.begin() + 3 * rank * 64;
    CHECK(same_floats(result.output, {begin, begin + 3 * 64}));
  }
}

TEST_CASE("A layer waits for its own number of tokens before it is compressed") {
  Random random(472);
  CacheConfig config = small_config();
  config.layers.assign(3, layer_of(1, 2, 64, 64));
  config.compress_from = 100;
  config.layers[0].compress_from = 0;
  config.layers[2].compress_from = 1 << 20;
  const Block rows = random_block(random, 120, 1, 64, 1);
  const auto compressed = [&](std::int64_t tokens) {
    const Block part = rows.part(0, tokens);
    const Scores scores = random_scores(random, 1, tokens, ScoreKind::random);
    const Filled filled =
        fill(config, {part, part, part}, {part, part, part}, {scores, scores, scores});
    std::vector<std::int64_t> result;
    for (std::int64_t layer = 0; layer < 3; ++layer)
      result.push_back(filled.cache->compressed_tokens(filled.sequence, layer));
    return result;
  };
  CHECK(compressed(60) == std::vector<std::int64_t>{52, 0, 0});
  CHECK(compressed(120) == std::vector<std::int64_t>{112, 112, 0});
  config.layers[1].compress_from = -1;
  CHECK(is_refused(config, "layer 1: compression from -1"));
}
