// KvCacheManager on a backend (support/test_backend.hpp): compression in slices gives the bits of one
// call, whatever comes in between.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <verkv/error.hpp>
#include <verkv/kv_cache_manager.hpp>

#include "catch.hpp"
#include "reference/statistics.hpp"
#include "support/allocations.hpp"
#include "support/blocks.hpp"
#include "support/configurations.hpp"
#include "support/results.hpp"
#include "support/test_backend.hpp"
#include "support/victim.hpp"

using namespace verkv;
using namespace verkv::test;
using verkv::reference::Random;

namespace {

// Layers of different shapes; the second is dense, the third not cached.
CacheConfig slices_config() {
  CacheConfig config = small_config();
  config.layers = {layer_of(2, 2, 32, 24), layer_of(1, 2, 16, 16), layer_of(1, 1, 16, 16),
                   layer_of(3, 1, 24, 32), layer_of(1, 4, 64, 16)};
  config.layers[1].dense = true;
  config.layers[2].cached = false;
  return config;
}

// KV heads of slices_config() that are compressed.
constexpr std::int64_t kHeads = 2 + 3 + 1;

// What every sequence is told that has so many tokens.
struct SlicedStory {
  explicit SlicedStory(const CacheConfig& c) : config(c) {}

  template <class F>
  void each_layer(F&& f) const {
    for (std::size_t l = 0; l < config.layers.size(); ++l) {
      if (config.layers[l].cached) f(config.layers[l], static_cast<std::int64_t>(l));
    }
  }

  void append(KvCacheManager& cache, SequenceId id, std::int64_t count) const {
    each_layer([&](const LayerConfig& layer, std::int64_t l) {
      Block keys{count, layer.kv_heads, layer.key_dim, {}};
      Block values{count, layer.kv_heads, layer.value_dim, {}};
      for (std::int64_t t = 0; t < count; ++t) {
        Random random(static_cast<std::uint64_t>(1000 * l + cache.tokens(id, l) + t));
        for (Block* block : {&keys, &values}) {
          const Block row = random_block(random, 1, block->heads, block->dim, 1);
          block->data.insert(block->data.end(), row.data.begin(), row.data.end());
        }
      }
      cache.append(id, l, keys.view(), values.view());
    });
  }

  Result step(KvCacheManager& cache, SequenceId id, std::int64_t only = -1) const {
    Result all;
    each_layer([&](const LayerConfig& layer, std::int64_t l) {
      if (only >= 0 && l != only) return;
      Random random(static_cast<std::uint64_t>(77 + 1000 * l + cache.tokens(id, l)));
      append_result(all, attend(cache, l, {id},
                                random_block(random, 1, layer.query_heads, layer.key_dim, 1)));
    });
    return all;
  }

  // Of the tokens that each layer has not compressed.
  std::vector<Scores> scores(const KvCacheManager& cache, SequenceId id) const {
    std::vector<Scores> all(config.layers.size());
    each_layer([&](const LayerConfig& layer, std::int64_t l) {
      Random random(static_cast<std::uint64_t>(5 + l));
      all[size(l)] =
          random_scores(random, layer.kv_heads,
                        cache.tokens(id, l) - cache.compressed_tokens(id, l), ScoreKind::random);
    });
    return all;
  }

  std::vector<Block> queries() const {
    std::vector<Block> all(config.layers.size());
    each_layer([&](const LayerConfig& layer, std::int64_t l) {
      Random random(static_cast<std::uint64_t>(9 + l));
      all[size(l)] = random_block(random, 5, layer.query_heads, layer.key_dim, 1);
    });
    return all;
  }

  // The arguments are gone when it returns.
  std::int64_t begin(KvCacheManager& cache, SequenceId id, bool with_queries = true) const {
    const std::vector<Scores> given = scores(cache, id);
    const std::vector<Block> prompt = queries();
    std::vector<ImportanceView> importance;
    for (const Scores& layer : given) importance.push_back(layer.view());
    std::vector<TensorView> views;
    for (const Block& layer : prompt) views.push_back(layer.view());
    if (!with_queries) views.clear();
    return cache.begin_compress(id, importance, views);
  }

  void compress(KvCacheManager& cache, SequenceId id, bool with_queries = true) const {
    test::compress(cache, id, scores(cache, id), with_queries ? queries() : std::vector<Block>{});
  }

  // All slices, of so many heads.
  void finish(KvCacheManager& cache, SequenceId id, std::int64_t heads = 2) const {
    while (cache.continue_compress(id, heads) > 0) {
    }
  }

  CacheConfig config;
};

void check_equal_use(const KvCacheManager& cache, SequenceId a, SequenceId b) {
  const MemoryReport x = cache.memory(a);
  const MemoryReport y = cache.memory(b);
  CHECK(x.resident_bytes == y.resident_bytes);
  CHECK(x.sketch_bytes == y.sketch_bytes);
  CHECK(x.metadata_bytes == y.metadata_bytes);
  CHECK(x.host_bytes == y.host_bytes);
  CHECK(x.basis_bytes == y.basis_bytes);
}

void check_sums(const KvCacheManager& cache, const std::vector<SequenceId>& all) {
  MemoryReport sum;
  for (const SequenceId id : all) {
    const MemoryReport one = cache.memory(id);
    sum.resident_bytes += one.resident_bytes;
    sum.sketch_bytes += one.sketch_bytes;
    sum.metadata_bytes += one.metadata_bytes;
    sum.basis_bytes += one.basis_bytes;
    sum.host_bytes += one.host_bytes;
    sum.reserved_bytes += one.reserved_bytes;
  }
  const MemoryReport total = cache.memory();
  CHECK(total.basis_bytes == sum.basis_bytes);
  CHECK(total.host_bytes == sum.host_bytes);
  CHECK(total.sketch_bytes == sum.sketch_bytes);
  CHECK(total.metadata_bytes == sum.metadata_bytes);
  // Of what forks have shared, rows in use may count as room.
  CHECK(total.resident_bytes + total.reserved_bytes == sum.resident_bytes + sum.reserved_bytes);
}

// Both do the same from here on.
void check_equal_future(const SlicedStory& story, KvCacheManager& cache, SequenceId a, SequenceId b,
                        std::int64_t tokens = scene(20, 9)) {
  check_equal_use(cache, a, b);
  for (std::int64_t i = 0; i < tokens; ++i) {
    story.append(cache, a, 1);
    story.append(cache, b, 1);
    if (i % scene(4, 18) == 0) REQUIRE(same(story.step(cache, a), story.step(cache, b)));
  }
  check_equal_use(cache, a, b);
}

}  // namespace

TEST_CASE("Slices give the bits of one call, for every pool") {
  for (const Pool pool : {Pool::head, Pool::layer, Pool::sequence}) {
    for (const std::int64_t heads : {1, 2, 5, 100}) {
      if (backend().thinning > 1 && (heads != 1 || pool == Pool::layer)) continue;
      INFO("pool " << static_cast<int>(pool) << ", " << heads << " heads at a time");
      CacheConfig config = slices_config();
      config.pool = pool;
      config.threads = 2;
      if (heads == 5) {
        config.sketch.kind = SketchKind::exact;
        config.study.estimator = Estimator::plain;
      }
      const SlicedStory story(config);
      const auto cache = make_cache(config);
      const SequenceId once = cache->create_sequence(7);
      const SequenceId sliced = cache->create_sequence(7);
      const SequenceId other = cache->create_sequence(8);
      for (const SequenceId id : {once, sliced}) story.append(*cache, id, 150);
      story.append(*cache, other, 60);
      // The second prompt goes on from the first one's sketch, in the middle of a group and a cluster.
      for (int prompt = 0; prompt < 2; ++prompt) {
        story.compress(*cache, once, heads != 2);
        std::int64_t left = story.begin(*cache, sliced, heads != 2);
        REQUIRE(left == kHeads);
        while (left > 0) {
          const std::int64_t before = left;
          left = cache->continue_compress(sliced, heads);
          REQUIRE(left < before);
          if (backend().thinning == 1) CHECK(before - left == std::min(heads, before));
          story.append(*cache, other, 1);
          story.step(*cache, other);
          check_sums(*cache, {once, sliced, other});
        }
        for (const std::int64_t layer : {0, 1, 3, 4}) {
          REQUIRE(cache->compressed_tokens(sliced, layer) == cache->compressed_tokens(once, layer));
        }
        check_equal_future(story, *cache, once, sliced, prompt == 0 ? 37 : scene(20, 9));
      }
      CHECK(cache->statistics(3).compress_ns > 0);
      CHECK(cache->continue_compress(sliced, 1) == 0);
    }
  }
}

TEST_CASE("A layer is exact until its last head is done, and nothing shows before") {
  const SlicedStory story(slices_config());
  const auto cache = make_cache(story.config);
  const SequenceId id = cache->create_sequence();
  const SequenceId dense = cache->create_sequence();
  for (const SequenceId each : {id, dense}) story.append(*cache, each, 120);
  const MemoryReport before = cache->memory(id);
  story.begin(*cache, id);
  CHECK(cache->memory(id).basis_bytes > before.basis_bytes);
  std::int64_t left = kHeads;
  const std::vector<std::pair<std::int64_t, std::int64_t>> ends{{0, 4}, {3, 1}, {4, 0}};
  while (true) {
    for (const auto& [layer, done_at] : ends) {
      INFO("layer " << layer << ", " << left << " left");
      const bool done = left <= done_at;
      CHECK(cache->compressed_tokens(id, layer) == (done ? 112 : 0));
      CHECK(same(story.step(*cache, id, layer), story.step(*cache, dense, layer)) == !done);
    }
    if (left == kHeads - 1) CHECK(cache->memory(id).fast_bytes() == before.fast_bytes());
    if (left == 0) break;
    left = cache->continue_compress(id, 1);
  }
  // What it was given is gone.
  const SequenceId once = cache->create_sequence();
  story.append(*cache, once, 120);
  story.compress(*cache, once);
  CHECK(cache->memory(once).basis_bytes == cache->memory(id).basis_bytes);
}

TEST_CASE("Tokens may come while their sequence is being compressed") {
  for (const std::int64_t count : {1, 5}) {
    for (const bool second : {false, true}) {
      INFO(count << " tokens after each slice" << (second ? " of a second prompt" : ""));
      const SlicedStory story(slices_config());
      const auto cache = make_cache(story.config);
      const SequenceId once = cache->create_sequence(3);
      const SequenceId sliced = cache->create_sequence(3);
      for (const SequenceId id : {once, sliced}) {
        story.append(*cache, id, 100);
        if (!second) continue;
        story.compress(*cache, id);
        story.append(*cache, id, 37);
      }
      story.compress(*cache, once);
      story.begin(*cache, sliced);
      cache->reserve(sliced, 3 * count);
      const std::int64_t before = cache->tokens(sliced, 0);
      std::int64_t left = kHeads;
      while (left > 0) {
        left = cache->continue_compress(sliced, 1);
        // With 5 the windows outgrow a chunk: of a layer that is not done, no chunk goes.
        story.append(*cache, sliced, count);
      }
      const std::int64_t more = cache->tokens(sliced, 0) - before;
      for (std::int64_t i = 0; i < more; ++i) story.append(*cache, once, 1);
      // What is due goes with the next tokens.
      for (const SequenceId id : {once, sliced}) cache->reserve(id, 0);
      for (const std::int64_t layer : {0, 3, 4})
        REQUIRE(cache->compressed_tokens(sliced, layer) == cache->compressed_tokens(once, layer));
      check_equal_future(story, *cache, once, sliced);
    }
  }
}

TEST_CASE("What is reserved outlives slices") {
  CacheConfig config = slices_config();
  const SlicedStory story(config);
  const auto cache = make_cache(config);
  const SequenceId id = cache->create_sequence();
  story.append(*cache, id, 100);
  story.begin(*cache, id);
  cache->reserve(id, 12);
  story.finish(*cache, id);
  const MemoryReport before = cache->memory(id);
  story.append(*cache, id, 12);
  // Room that was there is used, and none made.
  const auto all = [](const MemoryReport& report) {
    return report.fast_bytes() + report.host_bytes + report.basis_bytes + report.reserved_bytes;
  };
  CHECK(all(cache->memory(id)) == all(before));
  CHECK(cache->compressed_tokens(id, 0) == 92);
}

TEST_CASE("A compression that is cancelled leaves whole layers, and can be begun again") {
  const SlicedStory story(slices_config());
  const auto cache = make_cache(story.config);
  const SequenceId once = cache->create_sequence(3);
  const SequenceId id = cache->create_sequence(3);
  const SequenceId dense = cache->create_sequence(3);
  for (const SequenceId each : {once, id, dense}) story.append(*cache, each, 100);
  story.begin(*cache, id);
  cache->cancel_compress(id);
  CHECK(cache->continue_compress(id, 1) == 0);
  check_equal_use(*cache, id, dense);
  CHECK(same(story.step(*cache, id), story.step(*cache, dense)));
  story.begin(*cache, id);
  REQUIRE(cache->continue_compress(id, 3) <= 3);  // one layer, and a part of the next
  cache->cancel_compress(id);
  cache->cancel_compress(id);  // there is nothing to cancel
  story.compress(*cache, once);
  CHECK(same(story.step(*cache, id, 0), story.step(*cache, once, 0)));
  CHECK(same(story.step(*cache, id, 4), story.step(*cache, dense, 4)));
  CHECK(cache->compressed_tokens(id, 0) == 92);
  CHECK(cache->compressed_tokens(id, 4) == 0);
  check_sums(*cache, {once, id, dense});
  CHECK(story.begin(*cache, id) < kHeads);
  story.finish(*cache, id);
  check_equal_future(story, *cache, once, id);
  // Erased half-way.
  story.begin(*cache, dense);
  cache->continue_compress(dense, 3);
  cache->erase(dense);
  check_sums(*cache, {once, id});
}

TEST_CASE("A fork has the same left to compress") {
  const SlicedStory story(slices_config());
  const auto cache = make_cache(story.config);
  const SequenceId once = cache->create_sequence(3);
  const SequenceId id = cache->create_sequence(3);
  for (const SequenceId each : {once, id}) {
    story.append(*cache, each, 100);
    story.compress(*cache, each);
    story.append(*cache, each, 33);
  }
  story.compress(*cache, once);
  story.begin(*cache, id);
  cache->continue_compress(id, 3);
  const SequenceId fork = cache->fork(id);
  const SequenceId idle = cache->fork(id);
  const Result before = story.step(*cache, idle);
  story.finish(*cache, fork, 1);
  story.finish(*cache, id, 1);
  CHECK(same(story.step(*cache, idle), before));
  cache->erase(idle);
  const SequenceId late = cache->fork(id);
  cache->erase(fork);
  for (const SequenceId each : {id, late}) {
    for (const std::int64_t layer : {0, 3, 4})
      REQUIRE(cache->compressed_tokens(each, layer) == cache->compressed_tokens(once, layer));
  }
  cache->erase(late);
  check_sums(*cache, {once, id});
  check_equal_future(story, *cache, once, id);
}

TEST_CASE("Going back below what is being compressed cancels it") {
  const SlicedStory story(slices_config());
  const auto cache = make_cache(story.config);
  const SequenceId id = cache->create_sequence();
  story.append(*cache, id, 100);
  story.begin(*cache, id);
  CHECK(cache->truncate(id, 92).exact);
  CHECK(cache->continue_compress(id, 1) > 0);
  CHECK(cache->compressed_tokens(id, 0) == (backend().thinning > 1 ? 92 : 0));
  if (backend().thinning > 1) return;
  CHECK(cache->truncate(id, 91).exact);
  CHECK(cache->continue_compress(id, 1) == 0);
  CHECK(cache->compressed_tokens(id, 0) == 0);
  CHECK(cache->tokens(id, 0) == 91);
}

TEST_CASE("Calls that cannot come between slices are refused") {
  const SlicedStory story(slices_config());
  const auto cache = make_cache(story.config);
  const SequenceId id = cache->create_sequence();
  story.append(*cache, id, 100);
  CHECK_THROWS_AS(cache->continue_compress(SequenceId{99}, 1), InvalidArgument);
  CHECK_THROWS_AS(cache->cancel_compress(SequenceId{99}), InvalidArgument);
  story.begin(*cache, id);
  const auto refused = [](auto&& call) {
    try {
      call();
    } catch (const InvalidArgument& error) {
      return error.code();
    }
    return ErrorCode::other;
  };
  CHECK(refused([&] { story.begin(*cache, id); }) == ErrorCode::being_compressed);
  CHECK(refused([&] { story.compress(*cache, id); }) == ErrorCode::being_compressed);
  CHECK(refused([&] { cache->redraw(id, 5); }) == ErrorCode::being_compressed);
  if (backend().saves) {
    const auto save = [&] { cache->save(id, [](std::span<const std::byte>) {}); };
    CHECK(refused(save) == ErrorCode::being_compressed);
  }
  check_names(error_of<InvalidArgument>([&] { cache->redraw(id, 5); }), {"6 KV heads", "redraw"});
  check_names(error_of<InvalidArgument>([&] { cache->continue_compress(id, 0); }), {"0 KV heads"});
  cache->cancel_compress(id);
  cache->redraw(id, 5);
  // Numbers are looked at when it begins.
  std::vector<Scores> scores = story.scores(*cache, id);
  std::vector<ImportanceView> views;
  for (const Scores& layer : scores) views.push_back(layer.view());
  scores[3].data[150] = kNaN;
  CHECK(refused([&] { cache->begin_compress(id, views); }) == ErrorCode::number);
  scores[3].data[150] = 0;
  std::vector<Block> queries = story.queries();
  queries[4].at(2, 3, 7) = kNaN;
  std::vector<TensorView> prompt;
  for (const Block& layer : queries) prompt.push_back(layer.view());
  CHECK(refused([&] { cache->begin_compress(id, views, prompt); }) == ErrorCode::number);
  CHECK(cache->continue_compress(id, 1) == 0);
}

TEST_CASE("There may be nothing to compress in slices") {
  CacheConfig config = slices_config();
  config.compress_from = 100;
  const SlicedStory story(config);
  const auto cache = make_cache(config);
  const SequenceId once = cache->create_sequence(1);
  const SequenceId id = cache->create_sequence(1);
  for (const SequenceId each : {once, id}) story.append(*cache, each, 60);
  story.compress(*cache, once);
  CHECK(story.begin(*cache, id) == 0);
  // Both compress during decode.
  check_equal_future(story, *cache, once, id, 70);
  CHECK(cache->compressed_tokens(id, 0) > 0);
}

TEST_CASE("The limit on the fast tier holds for every slice") {
  // Of few tokens the basis alone is larger than what leaves.
  CacheConfig config = small_config();
  config.layers = {layer_of(2, 1, 256, 40)};
  config.storage = DType::f16;
  config.local_tokens = 4;
  config.keep = 0.9;
  const SlicedStory story(config);
  const auto bytes_after = [&](bool compressed) {
    const auto cache = make_cache(config);
    const SequenceId id = cache->create_sequence(3);
    story.append(*cache, id, 40);
    if (compressed) story.compress(*cache, id);
    return cache->memory(id).fast_bytes();
  };
  const std::int64_t before = bytes_after(false);
  const std::int64_t after = bytes_after(true);
  REQUIRE(after > before + 1000);
  // Room for one that is compressed and one that is not.
  const auto free = make_cache(config);
  const SequenceId first = free->create_sequence(3);
  story.append(*free, first, 40);
  story.compress(*free, first);
  story.append(*free, free->create_sequence(3), 40);
  config.fast_bytes_limit = free->memory().fast_held_bytes() + 900;
  const auto cache = make_cache(config);
  const SequenceId other = cache->create_sequence(3);
  story.append(*cache, other, 40);
  story.compress(*cache, other);
  const SequenceId id = cache->create_sequence(3);
  story.append(*cache, id, 40);
  story.begin(*cache, id);
  const Result exact = story.step(*cache, id);
  for (int again = 0; again < 2; ++again) {
    check_names(error_of<CapacityError>([&] { story.finish(*cache, id, 1); }), {"fast"});
    CHECK(same(story.step(*cache, id), exact));
    CHECK(cache->memory(id).fast_bytes() == before);
  }
  const Result drawn = story.step(*cache, other);
  cache->erase(other);
  story.finish(*cache, id);
  CHECK(same(story.step(*cache, id), drawn));
  CHECK(cache->memory().fast_bytes() == after);
}

TEST_CASE("A slice that is short of memory changes nothing", "[cpu]") {
  CacheConfig config = slices_config();
  config.layers = {layer_of(2, 1, 16, 16), layer_of(1, 1, 16, 16)};
  const SlicedStory story(config);
  const auto cache = make_cache(config);
  const SequenceId once = cache->create_sequence(3);
  const SequenceId id = cache->create_sequence(3);
  for (const SequenceId each : {once, id}) {
    story.append(*cache, each, 60);
    story.compress(*cache, each);
    story.append(*cache, each, 21);
  }
  story.compress(*cache, once);
  int failures = 0;
  // The same allocations, one more of them at a time.
  const auto insist = [&](auto&& call) {
    for (std::int64_t limit = 0;; ++limit) {
      allowed = limit;
      try {
        call();
        allowed = -1;
        return;
      } catch (const std::bad_alloc&) {
        allowed = -1;
        ++failures;
      }
      check_sums(*cache, {once, id});
    }
  };
  const std::vector<Scores> scores = story.scores(*cache, id);
  std::vector<ImportanceView> views;
  for (const Scores& layer : scores) views.push_back(layer.view());
  insist([&] { cache->begin_compress(id, views); });
  std::int64_t left = 3;
  while (left > 0) insist([&] { left = cache->continue_compress(id, 1); });
  CHECK(failures > 20);
  check_equal_future(story, *cache, once, id);
}

TEST_CASE("Others go on in threads of their own between slices") {
  CacheConfig config = slices_config();
  config.threads = 2;
  const SlicedStory story(config);
  const auto cache = make_cache(config);
  const SequenceId once = cache->create_sequence(3);
  const SequenceId id = cache->create_sequence(3);
  const SequenceId gone = cache->create_sequence(4);
  const SequenceId other = cache->create_sequence(5);
  for (const SequenceId each : {once, id, gone, other}) story.append(*cache, each, 100);
  story.compress(*cache, once);
  const Result expected = story.step(*cache, other);
  std::atomic<bool> done = false;
  std::atomic<bool> same_answers = true;
  std::thread decoder([&] {
    do {
      if (!same(story.step(*cache, other), expected)) same_answers = false;
    } while (!done);
  });
  std::thread eraser([&] {
    try {
      story.begin(*cache, gone);
      story.finish(*cache, gone, 1);
    } catch (const InvalidArgument& error) {
      if (error.code() != ErrorCode::unknown_sequence) throw;
    }
  });
  story.begin(*cache, id);
  cache->continue_compress(id, 1);
  cache->erase(gone);
  story.finish(*cache, id, 1);
  eraser.join();
  done = true;
  decoder.join();
  CHECK(same_answers);
  check_equal_future(story, *cache, once, id);
}
