// KvCacheManager on a backend (support/test_backend.hpp): calls from several threads.
#include <cstddef>
#include <cstdint>
#include <span>
#include <thread>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "catch.hpp"
#include "reference/statistics.hpp"
#include "support/blocks.hpp"
#include "support/results.hpp"
#include "support/test_backend.hpp"

using namespace verkv;
using namespace verkv::test;
using verkv::reference::Random;

TEST_CASE("Calls from several threads take turns") {
  CacheConfig config;
  config.layers = {LayerConfig{.kv_heads = 1, .query_heads = 2, .key_dim = 16, .value_dim = 16}};
  config.threads = 2;
  config.chunk_tokens = 8;
  config.compress_from = 0;
  const auto cache = make_cache(config);
  Random random(37);
  const std::vector<float> rows = random_block(random, 403, 1, 16, 1).data;
  const std::vector<float> scores(400, 1.0f);
  // Each with rows and a draw of its own.
  const auto life = [&](std::uint64_t which) {
    const verkv::SequenceId id = cache->create_sequence(which);
    const auto view = [&](std::int64_t tokens) {
      return verkv::token_major(rows.data() + which * 16, DType::f32, tokens, 1, 16);
    };
    cache->append(id, 0, view(400), view(400));
    const verkv::ImportanceView importance{scores.data(), 1, 400, 400};
    cache->compress(id, std::span(&importance, 1));
    std::vector<float> output(32);
    for (int step = 0; step < (backend().thinning > 1 ? 10 : 60); ++step) {
      cache->append(id, 0, view(1), view(1));
      verkv::AttendBatch batch;
      batch.sequences = std::span(&id, 1);
      batch.queries = verkv::token_major(rows.data(), DType::f32, 1, 2, 16);
      batch.output = output;
      cache->attend(0, batch);
    }
    return output;
  };
  std::vector<std::vector<float>> alone;
  for (std::uint64_t which = 0; which < 3; ++which) alone.push_back(life(which));
  REQUIRE_FALSE(same_floats(alone[0], alone[1]));
  REQUIRE_FALSE(same_floats(alone[1], alone[2]));
  std::vector<std::vector<float>> result(3);
  std::vector<std::thread> threads;
  for (std::uint64_t which = 0; which < 3; ++which)
    threads.emplace_back([&, which] { result[which] = life(which); });
  for (std::thread& thread : threads) thread.join();
  for (std::size_t which = 0; which < 3; ++which) CHECK(same_floats(result[which], alone[which]));
}
