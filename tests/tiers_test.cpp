// Memory of the two tiers on the CPU: the engine's allocators are asked for all of it, it is what is
// reported, and where they have none nothing changes.
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "catch.hpp"
#include "support/blocks.hpp"
#include "support/configurations.hpp"
#include "support/results.hpp"
#include "support/test_backend.hpp"
#include "support/tier_counter.hpp"
#include "support/victim.hpp"

using namespace verkv;
using namespace verkv::test;
using verkv::reference::Random;

namespace {

CacheConfig with(CacheConfig config, TierCounter& fast, TierCounter& host) {
  config.fast_allocator = fast.allocator();
  config.host_allocator = host.allocator();
  return config;
}

std::string saved(const KvCacheManager& cache, SequenceId id) {
  std::string bytes;
  cache.save(id, [&](std::span<const std::byte> piece) {
    bytes.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  });
  return bytes;
}

SequenceId restored(KvCacheManager& cache, const std::string& bytes) {
  std::size_t at = 0;
  return cache.restore([&](std::span<std::byte> to) {
    const std::size_t count = std::min(to.size(), bytes.size() - at);
    std::copy_n(reinterpret_cast<const std::byte*>(bytes.data()) + at, count, to.begin());
    at += count;
    return count;
  });
}

// Blocks that end where a page begins which nobody may touch.
struct Fence {
  struct Place {
    std::size_t block;
    std::size_t mapped;
    std::size_t page;
  };
  static Place place(std::size_t bytes, std::size_t alignment) {
    const auto up = [](std::size_t n, std::size_t unit) { return (n + unit - 1) / unit * unit; };
    const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t block = up(bytes, alignment);
    return {block, up(block, page) + page, page};
  }
  static void* allocate(void*, std::size_t bytes, std::size_t alignment) {
    const Place p = place(bytes, alignment);
    void* const memory =
        mmap(nullptr, p.mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    std::byte* const fence = static_cast<std::byte*>(memory) + p.mapped - p.page;
    if (mprotect(fence, p.page, PROT_NONE) != 0) return nullptr;
    return fence - p.block;
  }
  static void release(void*, void* memory, std::size_t bytes, std::size_t alignment) {
    const Place p = place(bytes, alignment);
    munmap(static_cast<std::byte*>(memory) + p.block + p.page - p.mapped, p.mapped);
  }
};

TEST_CASE("The tiers come from the engine's allocators, byte by byte as reported") {
  TierCounter fast;
  TierCounter host;
  Random random(1);
  for (const SketchKind kind : {SketchKind::calibrated, SketchKind::exact}) {
    CacheConfig config = small_config();
    config.sketch.kind = kind;
    config.layers = {layer_of(2, 3, 64, 64), layer_of(1, 1, 40, 72)};
    config.layers[1].dense = true;
    config.threads = 3;
    const auto cache = make_cache(with(config, fast, host));
    const auto check = [&](const char* when) {
      INFO(when);
      const MemoryReport memory = cache->memory();
      CHECK(memory.fast_held_bytes() == fast.live);
      CHECK(memory.host_held_bytes() == host.live);
      CHECK(memory.fast_reserved_bytes + memory.host_reserved_bytes <= memory.reserved_bytes);
    };
    check("at the start");
    CHECK(fast.live == 0);
    const SequenceId id = cache->create_sequence();
    check("created");
    std::vector<Scores> scores;
    for (std::int64_t l = 0; l < 2; ++l) {
      const LayerConfig& layer = config.layers[size(l)];
      cache->append(id, l, random_block(random, 300, layer.kv_heads, layer.key_dim, 1).view(),
                    random_block(random, 300, layer.kv_heads, layer.value_dim, 1).view());
      scores.push_back(random_scores(random, layer.kv_heads, 300, ScoreKind::random));
    }
    check("appended");
    CHECK(host.live >= cache->memory().host_bytes);
    compress(*cache, id, scores);
    check("compressed");
    const SequenceId child = cache->fork(id);
    check("forked");
    const SequenceId again = restored(*cache, saved(*cache, id));
    check("restored");
    cache->reserve(child, 100);
    check("reserved");
    for (const SequenceId one : {id, child, again}) {
      cache->append(one, 0, random_block(random, 90, 2, 64, 1).view(),
                    random_block(random, 90, 2, 64, 1).view());
      check("decoded");
    }
    cache->redraw(child, 99);
    check("drawn anew");
    cache->truncate(again, 200);
    check("went back");
    attend(*cache, 0, std::vector<SequenceId>(40, id), random_block(random, 40, 6, 64, 1));
    check("asked for many rows");
    for (const SequenceId one : {child, id, again}) {
      cache->erase(one);
      check("erased");
    }
    CHECK(host.live == 0);
  }
  CHECK(fast.live == 0);
  CHECK(fast.calls > 100);
  CHECK(host.calls > 10);
  CHECK(fast.wrong + host.wrong == 0);
}

// What is read or written beyond a block ends the program.
TEST_CASE("Steps stay within the blocks of the tiers") {
  for (const std::optional<std::int64_t> window :
       {std::optional<std::int64_t>(), std::optional<std::int64_t>(20)}) {
    CacheConfig config = small_config();
    config.layers = {layer_of(2, 3, 40, 24)};
    config.layers[0].window = window;
    config.window_margin = 8;
    config.fast_allocator = {Fence::allocate, Fence::release, nullptr};
    config.host_allocator = config.fast_allocator;
    const auto cache = make_cache(config);
    const SequenceId id = cache->create_sequence();
    Random random(3);
    std::int64_t tokens = 0;
    for (const std::int64_t count : {100, 1, 8, 8, 1}) {
      cache->append(id, 0, random_block(random, count, 2, 40, 1).view(),
                    random_block(random, count, 2, 24, 1).view());
      tokens += count;
      const std::int64_t rows = std::min<std::int64_t>(count, 8);
      attend(*cache, 0, std::vector<SequenceId>(size(rows), id),
             random_block(random, rows, 6, 40, 1));
      if (count == 100) compress(*cache, id, {random_scores(random, 2, tokens, ScoreKind::random)});
    }
    CHECK(cache->tokens(id, 0) == tokens);
  }
}

TEST_CASE("A tier without memory changes nothing") {
  for (const bool on_host : {false, true}) {
    for (int what = 0; what < 8; ++what) {
      TierCounter fast;
      TierCounter host;
      TierCounter& tier = on_host ? host : fast;
      const Victim victim(with(victim_config(), fast, host));
      KvCacheManager& cache = *victim.cache;
      Random random(36);
      const Block keys = random_block(random, 100, 2, 64, 1);
      const Block values = random_block(random, 100, 2, 48, 1);
      const Scores scores = random_scores(random, 2, 80, ScoreKind::random);
      const std::vector<ImportanceView> views = {scores.view(), {}, scores.view()};
      const std::string bytes = saved(cache, victim.a);
      const std::vector<std::function<void()>> calls = {
          [&] { cache.append(victim.b, 0, keys.view(), values.view()); },
          [&] { cache.append(victim.a, 0, keys.view(), values.view()); },
          [&] { cache.compress(victim.b, views); },
          [&] { cache.redraw(victim.a, 99); },
          [&] { cache.create_sequence(); },
          [&] { restored(cache, bytes); },
          [&] { cache.reserve(victim.a, 500); },
          [&] { cache.fork(victim.a); },
      };
      const bool asks = on_host ? what == 0 || what == 1 || what == 5 || what == 6 : what != 4;
      std::int64_t failed = 0;
      for (std::int64_t limit = 0;; ++limit) {
        REQUIRE(limit < 1000);
        bool threw = false;
        tier.allowed = limit;
        try {
          calls[size(what)]();
        } catch (const std::bad_alloc&) {
          threw = true;
        }
        tier.allowed = -1;
        CHECK(cache.memory().fast_held_bytes() == fast.live);
        CHECK(cache.memory().host_held_bytes() == host.live);
        if (!threw) break;
        ++failed;
        INFO("host " << on_host << ", call " << what << ", allocation " << limit);
        CHECK(cache.memory().fast_bytes() == victim.memory.fast_bytes());
        CHECK(cache.memory().host_bytes == victim.memory.host_bytes);
        for (const SequenceId id : {victim.a, victim.b}) CHECK(cache.tokens(id, 0) == 80);
        CHECK(same(attend(cache, 0, {victim.a, victim.b}, victim.queries), victim.answers[0]));
        CHECK(same(attend(cache, 2, {victim.a, victim.b}, victim.queries), victim.answers[1]));
      }
      INFO("host " << on_host << ", call " << what);
      if (asks) CHECK(failed > 0);
      CHECK(fast.wrong + host.wrong == 0);
    }
  }
}

// Whether b has room for a, purpose by purpose.
void check_within(const MemoryReport& a, const MemoryReport& b) {
  CHECK(a.resident_bytes <= b.resident_bytes);
  CHECK(a.sketch_bytes <= b.sketch_bytes);
  CHECK(a.metadata_bytes <= b.metadata_bytes);
  CHECK(a.basis_bytes <= b.basis_bytes);
  CHECK(a.workspace_bytes <= b.workspace_bytes);
  CHECK(a.fast_held_bytes() <= b.fast_held_bytes());
}

TEST_CASE("What a sequence takes is known before it is there") {
  Random random(11);
  double mean = 0;
  double drawn = 0;
  for (int trial = 0; trial < 60; ++trial) {
    CacheConfig config = small_config();
    config.layers = {layer_of(2, 3, one_of(random, std::vector<std::int64_t>{16, 64, 100}), 72),
                     layer_of(1, 1, 64, 40), layer_of(3, 2, 32, 32)};
    config.layers[1].dense = trial % 3 == 0;
    config.layers[2].cached = trial % 4 != 0;
    config.storage = one_of(random, std::vector{DType::f32, DType::f16});
    config.keep = one_of(random, std::vector<double>{0.05, 0.25, 0.8, 1});
    config.local_tokens = one_of(random, std::vector<std::int64_t>{0, 8, 32, 90});
    config.pool = one_of(random, std::vector{Pool::head, Pool::layer, Pool::sequence});
    config.sketch = {one_of(random, std::vector{SketchKind::calibrated, SketchKind::exact}),
                     2 + static_cast<int>(random.below(3))};
    config.study.select =
        one_of(random, std::vector{Selection::spread, Selection::poisson, Selection::topk});
    config.study.estimator = one_of(random, std::vector{Estimator::clusters, Estimator::plain});
    if (random.below(2) == 0) config.compress_from = 0;
    config.threads = 1 + static_cast<int>(random.below(3));
    const std::int64_t tokens =
        static_cast<std::int64_t>(random.below(random.below(2) == 0 ? 140 : 900));
    std::vector<Block> keys;
    std::vector<Block> values;
    std::vector<Scores> scores;
    for (const LayerConfig& layer : config.layers) {
      keys.push_back(random_block(random, tokens, layer.kv_heads, layer.key_dim, 1));
      values.push_back(random_block(random, tokens, layer.kv_heads, layer.value_dim, 1));
      scores.push_back(random_scores(random, layer.kv_heads, tokens, ScoreKind::random));
    }
    const SequenceBytes bytes = sequence_bytes(config, tokens);
    // With limits of what it says is the most: nothing is refused.
    config.fast_bytes_limit = bytes.most_fast_bytes;
    config.host_bytes_limit = bytes.most_host_bytes;
    TierCounter fast;
    TierCounter host;
    const auto cache = make_cache(with(config, fast, host));
    const SequenceId id = cache->create_sequence(random.bits());
    for (std::size_t l = 0; l < config.layers.size(); ++l) {
      if (config.layers[l].cached)
        cache->append(id, static_cast<std::int64_t>(l), keys[l].view(), values[l].view());
    }
    INFO("trial " << trial << ", " << tokens << " tokens, " << name(config.pool) << ", "
                  << name(config.study.select) << ", local " << config.local_tokens << ", keep "
                  << config.keep);
    MemoryReport memory = cache->memory();
    CHECK(memory.host_bytes == bytes.appended.host_bytes);
    CHECK(memory.resident_bytes == bytes.appended.resident_bytes);
    CHECK(memory.sketch_bytes == bytes.appended.sketch_bytes);
    CHECK(memory.metadata_bytes == bytes.appended.metadata_bytes);
    CHECK(memory.basis_bytes == bytes.appended.basis_bytes);
    CHECK(memory.workspace_bytes == bytes.appended.workspace_bytes);
    CHECK(memory.fast_reserved_bytes == bytes.appended.fast_reserved_bytes);
    CHECK(memory.host_reserved_bytes == bytes.appended.host_reserved_bytes);
    CHECK(fast.live == bytes.appended.fast_held_bytes());
    CHECK(host.live == bytes.appended.host_held_bytes());
    CHECK(bytes.appended.reserved_bytes ==
          bytes.appended.fast_reserved_bytes + bytes.appended.host_reserved_bytes);
    compress(*cache, id, scores);
    memory = cache->memory();
    check_within(memory, bytes.compressed);
    CHECK(memory.host_held_bytes() == bytes.compressed.host_held_bytes());
    mean += bytes.mean_resident_bytes;
    drawn += static_cast<double>(memory.resident_bytes);
    // Nor is it far off: but for draws that may be of all tokens, and whole pages of small heads.
    if (config.study.select != Selection::poisson && config.pool == Pool::head) {
      CHECK(bytes.most_fast_bytes < fast.peak * 3 / 2 + 150'000);
      CHECK(bytes.compressed.resident_bytes < memory.resident_bytes * 5 / 4 + 20'000);
    }
  }
  CHECK(std::fabs(mean / drawn - 1) < 0.05);
  CHECK_THROWS_AS(sequence_bytes(small_config(), -1), InvalidArgument);
  CHECK_THROWS_AS(sequence_bytes(CacheConfig{}, 10), InvalidArgument);
}

TEST_CASE("Half an allocator is refused") {
  TierCounter tier;
  CacheConfig config = small_config();
  config.host_allocator = tier.allocator();
  config.host_allocator.release = nullptr;
  check_names(error_of<InvalidArgument>([&] { make_cache(config); }), {"host tier", "release"});
  config.fast_allocator = tier.allocator();
  config.fast_allocator.allocate = nullptr;
  check_names(error_of<InvalidArgument>([&] { make_cache(config); }), {"fast tier", "allocate"});
}

}  // namespace
