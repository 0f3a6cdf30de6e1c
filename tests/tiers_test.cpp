// Memory of the two tiers on the CPU: the engine's allocators are asked for all of it, it is what is
// reported, and where they have none nothing changes.
#include <sys/mman.h>
#include <unistd.h>

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
