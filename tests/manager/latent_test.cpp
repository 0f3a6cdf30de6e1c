// KvCacheManager on the CPU: layers whose values are the first numbers of their keys, as MLA's latent.
// A layer that is given those values as rows of their own answers the same, bit for bit.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
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

Block prefix_of(const Block& keys, std::int64_t dim) {
  Block values = constant_block(keys.tokens, keys.heads, dim, 0);
  for (std::int64_t t = 0; t < keys.tokens; ++t) {
    for (std::int64_t h = 0; h < keys.heads; ++h) {
      for (std::int64_t j = 0; j < dim; ++j) values.at(t, h, j) = keys.at(t, h, j);
    }
  }
  return values;
}

// Two caches that are told the same.
struct Both {
  CacheConfig config;
  std::unique_ptr<KvCacheManager> latent, plain;
  SequenceId a, b;

  explicit Both(CacheConfig from) : config(std::move(from)) {
    CacheConfig apart = config;
    for (LayerConfig& layer : apart.layers) layer.value_is_key_prefix = false;
    latent = make_cache(config);
    plain = make_cache(apart);
    a = latent->create_sequence(5);
    b = plain->create_sequence(5);
  }
  void append(std::int64_t layer, const Block& keys) {
    latent->append(a, layer, keys.view(), {});
    plain->append(b, layer, keys.view(),
                  prefix_of(keys, config.layers[size(layer)].value_dim).view());
  }
  void check(Random& random, std::int64_t layer, std::int64_t rows) {
    const LayerConfig& l = config.layers[size(layer)];
    const Block queries = random_block(random, rows, l.query_heads, l.key_dim, 1);
    Result x = attend(*latent, layer, std::vector<SequenceId>(size(rows), a), queries);
    const Result y = attend(*plain, layer, std::vector<SequenceId>(size(rows), b), queries);
    moved += std::ranges::any_of(x.kv, [](const auto& kv) { return kv.moved_tokens > 0; });
    for (std::size_t i = 0; i < x.kv.size(); ++i) {
      CHECK(x.kv[i].moved_bytes * (l.key_dim + l.value_dim) == y.kv[i].moved_bytes * l.key_dim);
      x.kv[i].moved_bytes = y.kv[i].moved_bytes;
    }
    CHECK(same(x, y));
  }
  // What the values take is not there.
  void check_memory() const {
    const MemoryReport x = latent->memory(a), y = plain->memory(b);
    const LayerConfig& l = config.layers[0];
    CHECK(x.host_bytes * (l.key_dim + l.value_dim) == y.host_bytes * l.key_dim);
    CHECK(x.resident_bytes * (l.key_dim + l.value_dim) == y.resident_bytes * l.key_dim);
    CHECK(x.sketch_bytes == y.sketch_bytes);
    CHECK(x.metadata_bytes == y.metadata_bytes);
  }

  int moved = 0;
};

CacheConfig latent_config(std::int64_t heads, std::int64_t key_dim, std::int64_t value_dim) {
  CacheConfig config = small_config();
  config.layers = {layer_of(1, heads, key_dim, value_dim)};
  config.layers[0].value_is_key_prefix = true;
  config.local_tokens = 8;
  config.chunk_tokens = 16;
  config.compress_from = 0;
  return config;
}

void live(Random& random, const CacheConfig& config) {
  Both both(config);
  const LayerConfig& l = config.layers[0];
  const auto keys = [&](std::int64_t tokens) {
    return random_block(random, tokens, l.kv_heads, l.key_dim, 1);
  };
  both.append(0, keys(90));
  both.check(random, 0, 2);
  both.check_memory();
  const Scores scores = random_scores(random, l.kv_heads, 90, ScoreKind::random);
  compress(*both.latent, both.a, {scores});
  compress(*both.plain, both.b, {scores});
  both.check(random, 0, 1);
  both.check_memory();
  for (int i = 0; i < 12; ++i) {
    both.append(0, keys(i % 4 == 1 ? 9 : 1));
    both.check(random, 0, 1 + i % 3);
  }
  both.check_memory();
  const std::int64_t tokens = both.latent->tokens(both.a, 0);
  CHECK(both.latent->truncate(both.a, tokens - 3).exact ==
        both.plain->truncate(both.b, tokens - 3).exact);
  both.check(random, 0, 1);
  // Back into what is compressed.
  REQUIRE(both.latent->truncate(both.a, 61).done == both.plain->truncate(both.b, 61).done);
  both.check(random, 0, 1);
  both.append(0, keys(30));
  both.latent->redraw(both.a, 8);
  both.plain->redraw(both.b, 8);
  both.check(random, 0, 1);
  both.a = both.latent->fork(both.a);
  both.b = both.plain->fork(both.b);
  both.append(0, keys(5));
  both.check(random, 0, 1);
  std::vector<std::byte> bytes;
  both.latent->save(both.a, [&](std::span<const std::byte> piece) {
    bytes.insert(bytes.end(), piece.begin(), piece.end());
  });
  std::size_t at = 0;
  both.a = both.latent->restore([&](std::span<std::byte> to) {
    std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(at), to.size(), to.begin());
    at += to.size();
    return to.size();
  });
  both.append(0, keys(20));
  both.check(random, 0, 3);
  both.check_memory();
  const std::int64_t count = 7;
  std::vector<std::byte> x(size(count * l.kv_heads * l.value_dim) * size_bytes(config.storage)),
      y = x;
  const std::int64_t first = both.latent->tokens(both.a, 0) - count;
  both.latent->read(both.a, 0, first, count, {}, x);
  both.plain->read(both.b, 0, first, count, {}, y);
  CHECK(x == y);
  if (!l.window) CHECK(both.moved > 0);
}

}  // namespace

TEST_CASE("Values that are the first numbers of keys answer as values of their own", "[cpu]") {
  Random random(371);
  for (const DType storage : {DType::f32, DType::bf16}) {
    CacheConfig config = latent_config(12, 40, 24);
    config.storage = storage;
    config.layers[0].kv_heads = storage == DType::f32 ? 1 : 2;
    live(random, config);
  }
  CacheConfig plain = latent_config(4, 24, 24);
  plain.study.vector_code = false;
  plain.study.estimator = Estimator::plain;
  plain.sketch.kind = SketchKind::exact;
  live(random, plain);
  CacheConfig sliding = latent_config(4, 24, 16);
  sliding.layers[0].window = 33;
  sliding.layers[0].sink_logits = random_sinks(random, 4);
  sliding.window_margin = 200;
  live(random, sliding);
}

TEST_CASE("The latent of MLA: keys of 576 numbers, values of 512, 128 query heads", "[cpu]") {
  Random random(372);
  CacheConfig config = latent_config(128, 576, 512);
  config.storage = DType::f16;
  config.fetch.mode = FetchMode::always;
  const Block keys = random_block(random, 150, 1, 576, 1);
  const auto cache = make_cache(config);
  const SequenceId sequence = cache->create_sequence();
  cache->append(sequence, 0, keys.view(), {});
  compress(*cache, sequence, {random_scores(random, 1, 150, ScoreKind::random)});
  CHECK(cache->compressed_tokens(sequence, 0) > 100);
  CHECK(cache->memory(sequence).host_bytes == 150 * 576 * 2);
  const Block queries = random_block(random, 1, 128, 576, 1);
  const Filled filled{nullptr, {}, {keys}, {prefix_of(keys, 512)}, {}};
  const Result result = attend(*cache, 0, {sequence}, queries);
  const WorstError error = worst_error(config, 0, filled, queries, 0, result);
  CHECK(error.output < tolerance::kDense);
  CHECK(error.lse < tolerance::kDense);
}

TEST_CASE("Values that are the first numbers of keys are not given, in batches neither", "[cpu]") {
  Random random(373);
  const CacheConfig config = latent_config(4, 24, 16);
  Both both(config);
  const Block keys = random_block(random, 3, 1, 24, 1);
  const Block values = prefix_of(keys, 16);
  CHECK_THROWS_AS(both.latent->append(both.a, 0, keys.view(), values.view()), InvalidArgument);
  const std::vector<SequenceId> rows{kNoSequence, both.a, both.a},
      others{kNoSequence, both.b, both.b};
  CHECK_THROWS_AS(both.latent->append(0, {rows, keys.view(), values.view()}), InvalidArgument);
  CHECK(both.latent->tokens(both.a, 0) == 0);
  both.latent->append(0, {rows, keys.view(), {}});
  both.plain->append(0, {others, keys.view(), values.view()});
  both.check(random, 0, 2);
  const Block queries = random_block(random, 3, 4, 24, 1);
  std::vector<float> x(3 * 4 * 16), y = x;
  both.latent->step(0, keys.view(), {}, {rows, queries.view(), x, {}, {}, {}, {}});
  both.plain->step(0, keys.view(), values.view(), {others, queries.view(), y, {}, {}, {}, {}});
  CHECK(same_bits(x, y));
  CHECK(reasons_against(latent_config(4, 24, 24)).empty());
  CHECK(reasons_against(latent_config(4, 24, 25)).size() == 1);
  CacheConfig engine = latent_config(4, 24, 16);
  engine.host = HostTier::engine;
  CHECK(reasons_against(engine).size() == 1);
}
