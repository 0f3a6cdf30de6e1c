// KvCacheManager::fork on a backend (support/test_backend.hpp): every fork is compared, bit for bit,
// with a sequence that was never forked and got the same calls.
#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <vector>

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

CacheConfig fork_config() {
  CacheConfig config = small_config();
  config.layers = {layer_of(2, 2, 64, 48), layer_of(1, 2, 80, 80)};
  config.layers[1].dense = true;
  config.storage = DType::f16;
  return config;
}

// A call, which its seed names: equal calls of one kind get equal numbers.
struct Call {
  enum Kind : std::uint8_t { append, compress, redraw, attend, back, reserve };
  Kind kind = append;
  std::int64_t count = 0;  // of append, back and reserve: tokens
  std::uint32_t seed = 0;
};

std::int64_t all_bytes(const MemoryReport& m) {
  return m.fast_bytes() + m.host_bytes + m.basis_bytes + m.reserved_bytes;
}

// The answers where it attends.
std::vector<Result> make(KvCacheManager& cache, SequenceId id, const Call& call) {
  const CacheConfig& config = cache.config();
  Random random(call.seed);
  std::vector<Result> results;
  std::vector<Scores> scores;
  for (std::int64_t l = 0; l < static_cast<std::int64_t>(config.layers.size()); ++l) {
    const LayerConfig& layer = config.layers[size(l)];
    switch (call.kind) {
      case Call::append:
        cache.append(id, l,
                     random_block(random, call.count, layer.kv_heads, layer.key_dim, 1).view(),
                     random_block(random, call.count, layer.kv_heads, layer.value_dim, 1).view());
        break;
      case Call::compress:
        scores.push_back(random_scores(random, layer.kv_heads,
                                       cache.tokens(id, l) - cache.compressed_tokens(id, l),
                                       ScoreKind::random));
        break;
      case Call::redraw:
      case Call::back:
      case Call::reserve:
        break;
      case Call::attend:
        results.push_back(test::attend(
            cache, l, {id}, random_block(random, 1, layer.query_heads, layer.key_dim, 1)));
        break;
    }
  }
  if (call.kind == Call::compress) test::compress(cache, id, scores);
  if (call.kind == Call::redraw) cache.redraw(id, call.seed);
  if (call.kind == Call::reserve) cache.reserve(id, call.count);
  if (call.kind == Call::back) {
    const std::int64_t tokens = cache.tokens(id, 0);
    cache.truncate(id, std::max(cache.compressed_tokens(id, 0), tokens - call.count));
  }
  return results;
}

// A sequence with a twin in another cache, where nothing is ever forked.
struct Pair {
  SequenceId forked;
  SequenceId alone;
  std::uint64_t draw = 0;
  std::vector<Call> calls;
};

class Family {
 public:
  explicit Family(const CacheConfig& config)
      : forking_(make_cache(config)), twins_(make_cache(config)) {}

  Pair create(std::uint64_t draw) {
    return {forking_->create_sequence(draw), twins_->create_sequence(draw), draw, {}};
  }
  void call(Pair& pair, const Call& call) {
    const std::vector<Result> results = make(*forking_, pair.forked, call);
    const std::vector<Result> expected = make(*twins_, pair.alone, call);
    pair.calls.push_back(call);
    REQUIRE(results.size() == expected.size());
    for (std::size_t i = 0; i < results.size(); ++i) {
      INFO("layer " << i << ", call " << pair.calls.size());
      CHECK(same_all(results[i].query, expected[i].query));
      CHECK(same_all(results[i].kv, expected[i].kv));
      CHECK(same_floats(results[i].output, expected[i].output));
      CHECK(same_floats(results[i].lse, expected[i].lse));
    }
  }
  Pair fork(const Pair& of) {
    Pair result = of;
    result.forked = forking_->fork(of.forked);
    result.alone = twins_->create_sequence(of.draw);
    for (const Call& call : of.calls) make(*twins_, result.alone, call);
    return result;
  }
  void erase(const Pair& pair) {
    forking_->erase(pair.forked);
    twins_->erase(pair.alone);
  }
  // Bytes in use are those of the twin.
  void check_memory(const Pair& pair) {
    const MemoryReport actual = forking_->memory(pair.forked);
    const MemoryReport expected = twins_->memory(pair.alone);
    CHECK(actual.resident_bytes == expected.resident_bytes);
    CHECK(actual.sketch_bytes == expected.sketch_bytes);
    CHECK(actual.metadata_bytes == expected.metadata_bytes);
    CHECK(actual.host_bytes == expected.host_bytes);
    CHECK(actual.basis_bytes == expected.basis_bytes);
    CHECK(actual.shared_bytes >= 0);
    CHECK(actual.shared_bytes <= all_bytes(actual));
  }
  KvCacheManager& cache() { return *forking_; }

 private:
  std::unique_ptr<KvCacheManager> forking_;
  std::unique_ptr<KvCacheManager> twins_;
};

// What a sequence has been through when it is forked.
const std::vector<std::pair<const char*, std::vector<Call>>>& stages() {
  using K = Call;
  static const std::vector<std::pair<const char*, std::vector<Call>>> list = {
      {"empty", {}},
      {"a token", {{K::append, 1, 1}}},
      {"not compressed", {{K::append, 70, 1}, {K::attend, 0, 2}}},
      {"whole pages", {{K::append, 128, 1}}},
      {"compressed", {{K::append, 140, 1}, {K::compress, 0, 2}}},
      {"compressed, and attended", {{K::append, 140, 1}, {K::compress, 0, 2}, {K::attend, 0, 3}}},
      {"in the window",
       {{K::append, 140, 1}, {K::compress, 0, 2}, {K::append, 5, 3}, {K::attend, 0, 4}}},
      {"after chunks",
       {{K::append, 600, 1},
        {K::compress, 0, 2},
        {K::append, 9, 3},
        {K::attend, 0, 4},
        {K::append, 40, 5},
        {K::attend, 0, 6},
        {K::append, 17, 7}}},
      {"reserved, and gone back",
       {{K::append, 100, 1},
        {K::compress, 0, 2},
        {K::reserve, 40, 3},
        {K::append, 6, 4},
        {K::attend, 0, 5},
        {K::back, 4, 6}}},
      {"drawn anew", {{K::append, 100, 1}, {K::compress, 0, 2}, {K::redraw, 0, 9}}},
  };
  return list;
}

// A continuation: decode through several chunks, a second compression, a redraw.
std::vector<Call> continuation(std::uint32_t seed) {
  using K = Call;
  std::vector<Call> calls;
  const auto add = [&](K::Kind kind, std::int64_t count) {
    calls.push_back({kind, count, ++seed});
  };
  add(K::attend, 0);
  add(K::append, 1);
  add(K::attend, 0);
  for (int i = 0; i < 3; ++i) {
    add(K::append, 9);
    add(K::attend, 0);
  }
  add(K::append, 1 + seed % 70);
  add(K::attend, 0);
  add(K::back, 3);
  add(K::append, 2);
  add(K::attend, 0);
  add(K::compress, 0);
  add(K::attend, 0);
  for (int i = 0; i < 3; ++i) {
    add(K::append, 11 + seed % 5);
    add(K::attend, 0);
  }
  add(K::redraw, 0);
  add(K::attend, 0);
  return calls;
}

}  // namespace

TEST_CASE("Forks at every stage continue as if they had never been forked") {
  for (const Estimator estimator : {Estimator::clusters, Estimator::plain}) {
    CacheConfig config = fork_config();
    config.study.estimator = estimator;
    if (estimator == Estimator::plain) config.sketch.kind = SketchKind::exact;
    for (std::size_t s = 0; s < stages().size(); ++s) {
      // Where time is short: a window that was never scored, and all that a sequence can have.
      const bool thin = backend().thinning > 1;
      if (thin && s != (estimator == Estimator::plain ? 2 : 7)) continue;
      INFO(stages()[s].first);
      Family family(config);
      const MemoryReport none = family.cache().memory();
      Pair parent = family.create(5);
      for (const Call& call : stages()[s].second) family.call(parent, call);
      const MemoryReport before = family.cache().memory();
      Pair fork = family.fork(parent);
      // In turns, call by call, with different numbers.
      const std::vector<Call> one = continuation(100);
      const std::vector<Call> other = continuation(200);
      for (std::size_t i = 0; i < one.size(); ++i) {
        family.call(parent, one[i]);
        family.check_memory(parent);
        family.check_memory(fork);
        family.call(fork, other[i]);
      }
      Pair late = family.fork(fork);
      // The parent goes first, or last.
      family.erase(s % 2 == 0 ? parent : fork);
      Pair& left = s % 2 == 0 ? fork : parent;
      for (const Call& call : continuation(300)) {
        if (thin) break;
        family.call(left, call);
        family.call(late, {call.kind, call.count, call.seed + 50});
      }
      family.erase(left);
      family.call(late, {Call::attend, 0, 1});
      family.erase(late);
      const MemoryReport after = family.cache().memory();
      CHECK(all_bytes(after) == all_bytes(none));
      CHECK(all_bytes(before) >= all_bytes(none));
    }
  }
}

TEST_CASE("Equal continuations of a fork and its parent give equal bits") {
  Family family(fork_config());
  Pair parent = family.create(5);
  for (const Call& call : stages()[7].second) family.call(parent, call);
  const SequenceId fork = family.cache().fork(parent.forked);
  std::vector<Call> calls = continuation(40);
  if (backend().thinning > 1) calls.resize(5);
  for (const Call& call : calls) {
    const std::vector<Result> a = make(family.cache(), parent.forked, call);
    const std::vector<Result> b = make(family.cache(), fork, call);
    for (std::size_t i = 0; i < a.size(); ++i) {
      CHECK(same_all(a[i].query, b[i].query));
      CHECK(same_all(a[i].kv, b[i].kv));
      CHECK(same_floats(a[i].output, b[i].output));
    }
  }
}

TEST_CASE("Random calls for forks of forks equal those for their twins") {
  for (std::uint32_t seed = 0; seed < static_cast<std::uint32_t>(trials(8)); ++seed) {
    Random random(1000 + seed);
    CacheConfig config = fork_config();
    if (seed % 4 == 3) config.sketch.kind = SketchKind::exact;
    if (seed % 4 == 3) config.study.estimator = Estimator::plain;
    if (seed % 3 == 2) config.compress_from = 40;
    Family family(config);
    std::vector<Pair> pairs = {family.create(3)};
    for (int step = 0; step < scene(90, 12); ++step) {
      const std::size_t at = random.below(pairs.size());
      const std::uint32_t name = static_cast<std::uint32_t>(random.bits());
      INFO("seed " << seed << ", step " << step);
      switch (random.below(10)) {
        case 0:
        case 1:
          if (pairs.size() < 6) pairs.push_back(family.fork(pairs[at]));
          break;
        case 2:
          if (pairs.size() == 1) break;
          family.erase(pairs[at]);
          pairs.erase(pairs.begin() + static_cast<std::ptrdiff_t>(at));
          break;
        case 3:
          family.call(pairs[at], {Call::compress, 0, name});
          break;
        case 4:
          family.call(pairs[at], {random.below(2) == 0 ? Call::redraw : Call::reserve, 30, name});
          family.call(pairs[at], {Call::back, static_cast<std::int64_t>(random.below(20)), name});
          break;
        case 5:
        case 6:
          family.call(pairs[at], {Call::append, static_cast<std::int64_t>(random.below(90)), name});
          break;
        default:
          family.call(pairs[at], {Call::append, 1, name});
          family.call(pairs[at], {Call::attend, 0, name});
          break;
      }
      for (const Pair& pair : pairs) family.check_memory(pair);
    }
    for (const Pair& pair : pairs) family.erase(pair);
    MemoryReport none;
    none.workspace_bytes = family.cache().memory().workspace_bytes;
    CHECK(same(family.cache().memory(), none));
  }
}

TEST_CASE("A fork costs a few pages, and its bytes are counted once", "[cpu]") {
  CacheConfig config = fork_config();
  config.layers = {layer_of(2, 2, 64, 64)};
  config.keep = 1.0 / 16;
  const auto cache = make_cache(config);
  const SequenceId parent = cache->create_sequence(1);
  make(*cache, parent, {Call::append, 8000, 1});
  // Before the prompt is compressed, and after it.
  for (const bool compressed : {false, true}) {
    if (compressed) make(*cache, parent, {Call::compress, 0, 2});
    const MemoryReport before = cache->memory();
    CHECK(cache->memory(parent).shared_bytes == 0);
    std::vector<SequenceId> forks;
    for (int i = 0; i < 8; ++i) forks.push_back(cache->fork(parent));
    const MemoryReport shared = cache->memory();
    INFO("compressed " << compressed);
    // Their tables, and 8 bytes a token of the window for scores.
    const std::int64_t window = cache->tokens(parent, 0) - cache->compressed_tokens(parent, 0);
    const std::int64_t scores = 2 * 8 * window;
    CHECK(all_bytes(shared) - all_bytes(before) < 8 * (16'000 + scores));
    CHECK(shared.host_bytes == before.host_bytes);
    CHECK(shared.shared_bytes == 0);
    const MemoryReport one = cache->memory(forks[0]);
    CHECK(one.host_bytes == before.host_bytes);
    CHECK(one.shared_bytes > all_bytes(one) - 16'000 - scores);
    CHECK(cache->memory(parent).shared_bytes > all_bytes(before) - 40'000 - 2 * scores);
    for (const SequenceId id : forks) make(*cache, id, {Call::append, 1, 3});
    // A page of each array: rows of 256 bytes on both tiers, and their tables.
    const std::int64_t pages = 2 * (2 * 64 * 256 + 64 * 16);
    CHECK(all_bytes(cache->memory()) - all_bytes(shared) < 8 * (pages + 4'000 + scores));
    // The parent goes, and its bytes with the last fork.
    const SequenceId left = cache->fork(parent);
    if (compressed) cache->erase(parent);
    for (const SequenceId id : forks) cache->erase(id);
    if (compressed) {
      CHECK(cache->memory(left).shared_bytes == 0);
      CHECK(all_bytes(cache->memory()) == all_bytes(cache->memory(left)));
      make(*cache, left, {Call::attend, 0, 4});
    }
    cache->erase(left);
    if (!compressed) CHECK(all_bytes(cache->memory()) == all_bytes(before));
  }
  CHECK(all_bytes(cache->memory()) == 0);
}

TEST_CASE("A batch that finds no memory for a fork compresses nothing", "[cpu]") {
  CacheConfig config = small_config();
  const auto cache = make_cache(config);
  const SequenceId due = cache->create_sequence();
  const SequenceId parent = cache->create_sequence();
  Random random(45);
  // More than a page, so that the fork shares a block that its parent adds to.
  const Block keys = random_block(random, 100, 2, 64, 1);
  const Block values = random_block(random, 100, 2, 64, 1);
  for (const SequenceId id : {due, parent}) {
    cache->append(id, 0, keys.view(), values.view());
    compress(*cache, id, {random_scores(random, 2, 100, ScoreKind::random)});
  }
  for (int i = 0; i < 16; ++i)
    cache->append(due, 0, keys.part(i, 1).view(), values.part(i, 1).view());
  cache->reserve(parent, 4);
  cache->fork(parent);
  const std::vector<SequenceId> rows = {due, parent};
  const Block two_keys = keys.part(0, 2);
  const Block two_values = values.part(0, 2);
  REQUIRE(cache->compressed_tokens(due, 0) == 92);
  std::int64_t failed = 0;
  for (std::int64_t limit = 0;; ++limit) {
    REQUIRE(limit < 1000);
    bool threw = false;
    allowed = limit;
    try {
      cache->append(0, {rows, two_keys.view(), two_values.view()});
    } catch (const std::bad_alloc&) {
      threw = true;
    }
    allowed = -1;
    if (!threw) break;
    ++failed;
    REQUIRE(cache->compressed_tokens(due, 0) == 92);
    REQUIRE(cache->tokens(due, 0) == 116);
    REQUIRE(cache->tokens(parent, 0) == 100);
  }
  CHECK(failed > 10);
  CHECK(cache->compressed_tokens(due, 0) == 108);
}

TEST_CASE("A fork that finds no memory changes nothing", "[cpu]") {
  const Victim victim(victim_config());
  KvCacheManager& cache = *victim.cache;
  std::int64_t failed = 0;
  for (std::int64_t limit = 0;; ++limit) {
    REQUIRE(limit < 1000);
    bool threw = false;
    allowed = limit;
    try {
      cache.fork(victim.a);
    } catch (const std::bad_alloc&) {
      threw = true;
    }
    allowed = -1;
    if (!threw) break;
    ++failed;
    CHECK(all_bytes(cache.memory()) == all_bytes(victim.memory));
    CHECK(same(attend(cache, 0, {victim.a, victim.b}, victim.queries), victim.answers[0]));
  }
  CHECK(failed > 5);
  check_names(error_of<InvalidArgument>([&] { cache.fork(SequenceId{99}); }), {"99", "unknown"});
}
