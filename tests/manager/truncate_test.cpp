// KvCacheManager on a backend (support/test_backend.hpp): room that is reserved, tokens that are
// taken back, steps that leave no trace, appends of many sequences.
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "catch.hpp"
#include "reference/statistics.hpp"
#include "support/allocations.hpp"
#include "support/blocks.hpp"
#include "support/comparison.hpp"
#include "support/configurations.hpp"
#include "support/dense.hpp"
#include "support/mirror.hpp"
#include "support/passage.hpp"
#include "support/results.hpp"
#include "support/test_backend.hpp"
#include "support/victim.hpp"

using namespace verkv;
using namespace verkv::test;
using verkv::reference::Random;

TEST_CASE("Attending again leaves no trace") {
  const Passage passage(140);
  for (const DType storage : {DType::f32, DType::f16, DType::bf16}) {
    CacheConfig config = small_config();
    config.storage = storage;
    Reader once(config, passage, 60);
    Reader thrice(config, passage, 60);
    INFO(verkv::name(storage));
    for (std::int64_t step = 0; step < scene(40, 20); ++step) {
      once.append(1);
      thrice.append(1);
      if (step % scene(1, 5) != 0) continue;
      const Result want = once.attend_last();
      for (int i = 0; i < 3; ++i) REQUIRE(same(thrice.attend_last(), want));
    }
    REQUIRE(once.compressed() > 60);
    check_same_future(once, thrice);
  }
}

TEST_CASE("What is taken back has never been there") {
  const Passage passage(220);
  const CacheConfig config = small_config();
  // Windows of every length between two chunks, so that a chunk goes before some of the drafts.
  for (std::int64_t steps = 0; steps < 18; steps += scene(1, 11)) {
    for (const std::int64_t drafts : {1, 3, 6}) {
      if (backend().thinning > 1 && drafts != 3) continue;
      Reader plain(config, passage, 60);
      Reader drafting(config, passage, 60);
      for (Reader* reader : {&plain, &drafting}) {
        for (std::int64_t i = 0; i < steps; ++i) {
          reader->append(1);
          if (i % scene(1, 5) == 0) reader->attend_last();
        }
        reader->cache->reserve(reader->sequence, 20);
      }
      INFO(steps << " steps, " << drafts << " drafts");
      for (std::int64_t kept = 0; kept < drafts; ++kept) {
        if (kept > 0) plain.append(kept);
        drafting.append(drafts);
        drafting.attend_last();
        REQUIRE(drafting.truncate(plain.tokens()));
        check_same_use(plain, drafting);
        REQUIRE(same(plain.attend_last(), drafting.attend_last()));
      }
      check_same_future(plain, drafting);
    }
  }
}

TEST_CASE("A rejected token does not set off a compression that shows") {
  const Passage passage(160);
  Reader plain(small_config(), passage, 60);
  Reader drafting(small_config(), passage, 60);
  // Without a reservation the chunk goes with the next append, whatever that appends.
  for (std::int64_t step = 0; step < scene(50, 20); ++step) {
    const bool attends = step % scene(1, 4) == 0;
    plain.append(1);
    if (attends) plain.attend_last();
    drafting.append(1);
    if (attends) drafting.attend_last();
    drafting.append(4);
    if (attends) drafting.attend_last();
    REQUIRE(drafting.truncate(plain.tokens()));
    if (!attends) continue;
    REQUIRE(same(plain.attend_last(), drafting.attend_last()) ==
            (plain.compressed() == drafting.compressed()));
  }
  REQUIRE(plain.compressed() > 60);
  plain.append(1);
  drafting.append(1);
  check_same_future(plain, drafting);
}

TEST_CASE("A sequence goes back as far as its window, and says how far") {
  CacheConfig config = small_config();
  config.layers = {layer_of(2, 3, 64, 64), layer_of(2, 3, 64, 64), layer_of(2, 3, 64, 64)};
  config.layers[2].dense = true;
  const auto cache = make_cache(config);
  const SequenceId id = cache->create_sequence(1);
  const SequenceId other = cache->create_sequence(2);
  const Passage passage(90);
  const auto append = [&](SequenceId to, std::int64_t layer, std::int64_t first,
                          std::int64_t count) {
    const Block keys = passage.keys.part(first, count);
    const Block values = passage.values.part(first, count);
    cache->append(to, layer, keys.view(), values.view());
  };
  for (std::int64_t layer = 0; layer < 3; ++layer) append(id, layer, 0, 80);
  for (std::int64_t layer = 0; layer < 2; ++layer) append(other, layer, 0, 80);
  Random random(43);
  const Scores scores = random_scores(random, 2, 80, ScoreKind::random);
  compress(*cache, id, {scores, scores, {}});
  for (std::int64_t layer = 0; layer < 3; ++layer) append(id, layer, 80, 3);
  append(id, 0, 83, 1);  // only one layer has got the next token
  const Block query = passage.queries.part(83, 1);
  const Result before = attend(*cache, 0, {id}, query);
  const MemoryReport memory = cache->memory();

  if (!backend().shortens) {
    const Truncation refused = cache->truncate(id, 71);
    CHECK_FALSE(refused);
    CHECK(refused.layer == 0);
    CHECK(refused.least_tokens == 72);
    CHECK(cache->tokens(id, 0) == 84);
    CHECK(cache->tokens(id, 2) == 83);
    CHECK(same(cache->memory(), memory));
    CHECK(same(attend(*cache, 0, {id}, query), before));
  }
  check_names(error_of<InvalidArgument>([&] { cache->truncate(id, -1); }), {"-1"});
  check_names(error_of<InvalidArgument>([&] { cache->truncate(id, 85); }), {"85", "84"});
  check_names(error_of<InvalidArgument>([&] { cache->truncate(SequenceId{9}, 1); }), {"9"});
  check_names(error_of<InvalidArgument>([&] { cache->truncate(kNoSequence, 1); }), {"-1"});
  CHECK(same(cache->memory(), memory));

  // Layers that hold fewer stay as they are.
  CHECK(cache->truncate(id, 84));
  CHECK(cache->truncate(id, 83));
  for (std::int64_t layer = 0; layer < 3; ++layer) CHECK(cache->tokens(id, layer) == 83);
  CHECK(cache->truncate(id, 72).exact);
  for (std::int64_t layer = 0; layer < 3; ++layer) CHECK(cache->tokens(id, layer) == 72);
  if (backend().shortens) {
    const SequenceId sibling = cache->fork(id);
    const Result untouched = attend(*cache, 0, {sibling}, query);
    const Truncation shorter = cache->truncate(id, 71);
    CHECK(shorter);
    CHECK_FALSE(shorter.exact);
    CHECK(shorter.layer == 0);
    CHECK(shorter.least_tokens == 72);
    for (std::int64_t layer = 0; layer < 3; ++layer) CHECK(cache->tokens(id, layer) == 71);
    for (std::int64_t layer = 0; layer < 2; ++layer)
      CHECK(cache->compressed_tokens(id, layer) == 71);
    CHECK(cache->truncate(id, 0));
    for (std::int64_t layer = 0; layer < 3; ++layer) CHECK(cache->tokens(id, layer) == 0);
    CHECK(cache->memory(id).host_bytes == 0);
    CHECK(same(attend(*cache, 0, {sibling}, query), untouched));
    cache->erase(sibling);
  }
  // A layer that is not compressed goes back to nothing; the third has never held anything.
  CHECK(cache->truncate(other, 0));
  for (std::int64_t layer = 0; layer < 3; ++layer) CHECK(cache->tokens(other, layer) == 0);
  CHECK(cache->memory(other).host_bytes == 0);
  CHECK(attend(*cache, 0, {other}, query).lse[0] == -kInfinity);
  CHECK(cache->truncate(other, 0));
}

TEST_CASE("A token that fails half-way through the layers is taken back") {
  CacheConfig config = small_config();
  config.layers.assign(4, layer_of(2, 3, 64, 64));
  const std::int64_t row = 2 * 128 * 4;
  const std::int64_t page = 64;  // where memory is needed next, on either backend
  const Passage passage(page + 1);
  const auto append = [&](KvCacheManager& cache, SequenceId id, std::int64_t layer,
                          std::int64_t first, std::int64_t count) {
    const Block keys = passage.keys.part(first, count);
    const Block values = passage.values.part(first, count);
    cache.append(id, layer, keys.view(), values.view());
  };
  const auto filled = [&] {
    auto cache = make_cache(config);
    const SequenceId id = cache->create_sequence(1);
    for (std::int64_t layer = 0; layer < 4; ++layer) append(*cache, id, layer, 0, page);
    return std::pair(std::move(cache), id);
  };
  // Two layers get so much.
  const auto [free, other] = filled();
  for (const std::int64_t layer : {0, 1}) append(*free, other, layer, page, 1);
  config.host_bytes_limit = free->memory().host_held_bytes() + 100;
  const auto [cache, id] = filled();
  const Result before = attend(*cache, 0, {id}, passage.queries.part(page - 1, 1));
  std::int64_t done = 0;
  const auto step = [&] {
    for (done = 0; done < 4; ++done) append(*cache, id, done, page, 1);
  };
  CHECK_THROWS_AS(step(), CapacityError);
  CHECK(done == 2);
  CHECK(cache->tokens(id, 0) == page + 1);
  CHECK(cache->truncate(id, page));
  for (std::int64_t layer = 0; layer < 4; ++layer) CHECK(cache->tokens(id, layer) == page);
  CHECK(cache->memory().host_bytes == 4 * page * row);
  CHECK(same(attend(*cache, 0, {id}, passage.queries.part(page - 1, 1)), before));
  // Room that is asked for first shows it before anything has changed.
  check_names(error_of<CapacityError>([&, &kv = *cache, of = id] { kv.reserve(of, 1); }), {"host"});
  CHECK(cache->tokens(id, 0) == page);
}

TEST_CASE("Within a reservation nothing is compressed, whatever is appended how") {
  const Passage passage(200);
  const CacheConfig config = small_config();
  for (std::int64_t steps = 0; steps < 17; steps += scene(2, 12)) {
    Reader one_by_one(config, passage, 60);
    Reader together(config, passage, 60);
    for (Reader* reader : {&one_by_one, &together}) {
      for (std::int64_t i = 0; i < steps; ++i) {
        reader->append(1);
        if (i % scene(1, 5) == 0) reader->attend_last();
      }
      reader->cache->reserve(reader->sequence, 30);
    }
    const std::int64_t compressed = together.compressed();
    for (int i = 0; i < 30; ++i) one_by_one.append(1);
    together.append(30);
    CHECK(together.compressed() == compressed);
    CHECK(one_by_one.compressed() == compressed);
    REQUIRE(same(one_by_one.attend_last(), together.attend_last()));
    // The next one is beyond it.
    together.append(1);
    CHECK(together.compressed() == compressed + (60 + steps + 30 - 8 - compressed) / 16 * 16);
    one_by_one.append(1);
    check_same_future(one_by_one, together);
  }
}

TEST_CASE("A reservation counts against the limits and is kept") {
  CacheConfig config = small_config();
  config.layers.assign(2, layer_of(2, 3, 64, 64));
  const std::int64_t page = 64;  // where memory is needed next, on either backend
  const Passage passage(page + 1);
  const auto append_to = [&](KvCacheManager& cache, SequenceId id, std::int64_t layer,
                             std::int64_t count) {
    const Block keys = passage.keys.part(0, count);
    const Block values = passage.values.part(0, count);
    cache.append(id, layer, keys.view(), values.view());
  };
  // A reservation, and a layer of another sequence.
  const auto free = make_cache(config);
  const SequenceId first = free->create_sequence();
  const SequenceId second = free->create_sequence();
  free->reserve(first, page);
  append_to(*free, second, 0, page);
  for (const bool host : {true, false}) {
    const MemoryReport memory = free->memory();
    CacheConfig limited = config;
    (host ? limited.host_bytes_limit : limited.fast_bytes_limit) =
        host ? memory.host_held_bytes() : memory.fast_held_bytes();
    const auto cache = make_cache(limited);
    const SequenceId a = cache->create_sequence();
    const SequenceId b = cache->create_sequence();
    const auto append = [&](SequenceId id, std::int64_t layer, std::int64_t count) {
      append_to(*cache, id, layer, count);
    };
    INFO((host ? "host" : "fast"));
    cache->reserve(a, page);
    const MemoryReport before = cache->memory();
    CHECK_THROWS_AS(cache->reserve(b, page), CapacityError);
    CHECK_THROWS_AS(append(b, 0, page + 1), CapacityError);
    CHECK(same(cache->memory(), before));
    append(b, 0, page);
    CHECK_THROWS_AS(append(b, 1, 1), CapacityError);
    for (const std::int64_t layer : {0, 1}) append(a, layer, page);
    CHECK_THROWS_AS(append(a, 0, 1), CapacityError);
    // What is taken back or given up stays with the sequence.
    CHECK(cache->truncate(a, 10));
    cache->reserve(a, 0);
    CHECK_THROWS_AS(append(b, 1, 1), CapacityError);
    cache->erase(a);
    append(b, 1, page);
    CHECK(cache->memory().host_bytes == 2 * page * 2 * 128 * 4);
    cache->erase(b);
    const SequenceId c = cache->create_sequence();
    cache->reserve(c, page);
    cache->erase(c);
    cache->reserve(cache->create_sequence(), page);
  }
  const Victim victim(victim_config());
  victim.refuses<InvalidArgument>([&] { victim.cache->reserve(victim.a, -1); }, {"-1"});
  victim.refuses<InvalidArgument>([&] { victim.cache->reserve(SequenceId{77}, 1); }, {"77"});
  victim.refuses<CapacityError>([&] { victim.cache->reserve(victim.a, std::int64_t{1} << 40); },
                                {std::to_string((std::int64_t{1} << 40) + 80), "4294967295"});
}

TEST_CASE("What is reserved needs no memory", "[cpu]") {
  CacheConfig config = small_config();
  config.layers.assign(2, layer_of(2, 3, 64, 64));
  const auto cache = make_cache(config);
  const Passage passage(120);
  std::vector<SequenceId> ids;
  Random random(44);
  for (int i = 0; i < 2; ++i) {
    ids.push_back(cache->create_sequence());
    std::vector<Scores> scores;
    for (const std::int64_t layer : {0, 1}) {
      const Block keys = passage.keys.part(0, 70);
      const Block values = passage.values.part(0, 70);
      cache->append(ids[size(i)], layer, keys.view(), values.view());
      scores.push_back(random_scores(random, 2, 70, ScoreKind::random));
    }
    compress(*cache, ids[size(i)], scores);
    const Block keys = passage.keys.part(70, 20);
    const Block values = passage.values.part(70, 20);
    for (const std::int64_t layer : {0, 1})
      cache->append(ids[size(i)], layer, keys.view(), values.view());
  }
  const std::int64_t compressed = cache->compressed_tokens(ids[0], 0);
  // A reservation that fails leaves everything as it was, in every layer.
  std::int64_t failed = 0;
  for (std::int64_t limit = 0;; ++limit) {
    REQUIRE(limit < 1000);
    const MemoryReport before = cache->memory();
    allowed = limit;
    bool threw = false;
    try {
      cache->reserve(ids[0], 9);
    } catch (const std::bad_alloc&) {
      threw = true;
    }
    allowed = -1;
    if (!threw) break;
    ++failed;
    for (const std::int64_t layer : {0, 1})
      REQUIRE(cache->compressed_tokens(ids[0], layer) == compressed);
    REQUIRE(cache->memory().fast_bytes() <= before.fast_bytes());
    REQUIRE(cache->memory().host_bytes == before.host_bytes);
  }
  CHECK(failed > 10);
  for (const std::int64_t layer : {0, 1})
    CHECK(cache->compressed_tokens(ids[0], layer) == compressed + 16);
  cache->reserve(ids[1], 9);
  // Also where a redraw comes between.
  cache->redraw(ids[0], 99);
  const Block keys = passage.keys.part(90, 16);
  const Block values = passage.values.part(90, 16);
  const Block one_key = passage.keys.part(106, 1);
  const Block one_value = passage.values.part(106, 1);
  std::vector<SequenceId> rows(8, ids[0]);
  rows.resize(16, ids[1]);
  const AppendBatch batch{rows, keys.view(), values.view()};
  const std::int64_t before = allocations;
  allowed = 0;
  for (const std::int64_t layer : {0, 1}) {
    cache->append(layer, batch);
    cache->append(ids[0], layer, one_key.view(), one_value.view());
  }
  allowed = -1;
  CHECK(allocations - before == 0);
  CHECK(cache->tokens(ids[0], 1) == 99);
  CHECK(cache->compressed_tokens(ids[0], 1) == compressed + 16);
}

TEST_CASE("Tokens come anew where others went that were there before a reservation") {
  const Passage passage(140);
  Reader plain(small_config(), passage, 60);
  Reader back(small_config(), passage, 60);
  for (std::int64_t step = 0; step < 6; ++step) {
    for (Reader* reader : {&plain, &back}) {
      reader->append(1);
      reader->attend_last();
    }
  }
  for (int i = 0; i < 4; ++i) back.append(1);
  back.cache->reserve(back.sequence, 0);
  plain.cache->reserve(plain.sequence, 4);
  REQUIRE(back.truncate(plain.tokens()));
  // Four at once, though none of the steps before had more than one.
  for (Reader* reader : {&plain, &back}) reader->append(4);
  REQUIRE(same(plain.attend_burst(4), back.attend_burst(4)));
  check_same_future(plain, back);
}

namespace {

// Runs f with ever more memory until it has enough; how often it had not.
template <class F>
int times_refused(F&& f) {
  for (int limit = 0;; ++limit) {
    allowed = limit;
    try {
      f();
      allowed = -1;
      return limit;
    } catch (const std::bad_alloc&) {
      allowed = -1;
    }
  }
}

}  // namespace

TEST_CASE("Short of memory, tokens that come anew leave what was there", "[cpu]") {
  const Passage passage(140);
  Reader back(small_config(), passage, 60);
  for (int i = 0; i < 10; ++i) back.append(1);
  back.cache->reserve(back.sequence, 0);
  // A chunk goes, and with it the room of the window's scores.
  back.append(7);
  back.cache->reserve(back.sequence, 0);
  REQUIRE(back.compressed() == 68);
  const std::int64_t left = back.tokens() - 4;
  REQUIRE(back.truncate(left));
  CHECK(times_refused([&] {
          REQUIRE(back.tokens() == left);
          back.append(4);
        }) > 0);
  CHECK(back.tokens() == left + 4);
}

TEST_CASE("An append that is short of memory does not count what queries gave so far", "[cpu]") {
  const Passage passage(140);
  Reader plain(small_config(), passage, 60);
  Reader failing(small_config(), passage, 60);
  for (Reader* reader : {&plain, &failing}) {
    reader->append(4);
    reader->attend_last();
  }
  allowed = 0;
  CHECK_THROWS_AS(failing.cache->append(failing.sequence, 0, passage.keys.part(64, 70).view(),
                                        passage.values.part(64, 70).view()),
                  std::bad_alloc);
  allowed = -1;
  // The last token asks again, with another query, which takes the place of the first.
  for (Reader* reader : {&plain, &failing})
    attend(*reader->cache, 0, {reader->sequence}, passage.queries.part(3, 1));
  check_same_future(plain, failing);
}

TEST_CASE("A step that is short of memory for its reports appends nothing", "[cpu]") {
  const Passage passage(140);
  Reader reader(small_config(), passage, 60);
  const LayerConfig& l = reader.cache->config().layers[0];
  // So much padding that room for reports grows.
  std::vector<SequenceId> rows(60, kNoSequence);
  rows[0] = reader.sequence;
  std::vector<float> output(60 * size(l.query_heads * l.value_dim));
  const Block keys = passage.keys.part(60, 60);
  const Block values = passage.values.part(60, 60);
  const Block queries = passage.queries.part(60, 60);
  CHECK(times_refused([&] {
          REQUIRE(reader.tokens() == 60);
          reader.cache->step(0, keys.view(), values.view(),
                             {rows, queries.view(), output, {}, {}, {}, {}});
        }) > 3);
  CHECK(reader.tokens() == 61);
}

TEST_CASE("Of tokens that were taken back no room is kept for forks and compressions", "[cpu]") {
  const Passage passage(4000);
  CacheConfig config = small_config();
  const auto cache = make_cache(config);
  std::int64_t reserved[2] = {};
  for (const bool taken_back : {false, true}) {
    const SequenceId id = cache->create_sequence(1);
    const std::int64_t tokens = taken_back ? 4000 : 200;
    const Block keys = passage.keys.part(0, tokens);
    const Block values = passage.values.part(0, tokens);
    cache->append(id, 0, keys.view(), values.view());
    cache->truncate(id, 200);
    const MemoryReport before = cache->memory();
    const SequenceId fork = cache->fork(id);
    CHECK(cache->memory().reserved_bytes - before.reserved_bytes < 10'000);
    cache->erase(fork);
    Random random(3);
    compress(*cache, id, {random_scores(random, 2, 200, ScoreKind::random)});
    reserved[taken_back] = cache->memory(id).reserved_bytes;
    cache->erase(id);
  }
  // Rows of 512 bytes of two heads on the host stay, and none on the fast tier.
  CHECK(reserved[1] - reserved[0] < 3900 * 2 * 512);
}

TEST_CASE("A batched append is as many appends") {
  CacheConfig config = small_config();
  const Passage passage(120);
  const auto one_by_one = make_cache(config);
  const auto batched = make_cache(config);
  std::vector<SequenceId> ids;
  Random random(45);
  const std::vector<Scores> scores = {random_scores(random, 2, 60, ScoreKind::random)};
  for (int i = 0; i < 3; ++i) {
    for (const auto& cache : {one_by_one.get(), batched.get()}) {
      const SequenceId id = cache->create_sequence(static_cast<std::uint64_t>(i));
      const Block keys = passage.keys.part(i, 60);
      cache->append(id, 0, keys.view(), passage.values.part(i, 60).view());
      if (i < 2) compress(*cache, id, scores);
      if (cache == batched.get()) ids.push_back(id);
    }
  }
  const std::vector<SequenceId> rows = {ids[1], ids[1], kNoSequence, ids[0],
                                        ids[2], ids[2], ids[2],      kNoSequence};
  for (std::int64_t step = 0; step < 12; ++step) {
    const Block keys = passage.keys.part(4 * step, 8);
    const Block values = passage.values.part(4 * step, 8);
    for (std::size_t row = 0; row < 8;) {
      std::size_t end = row + 1;
      while (end < 8 && rows[end] == rows[row]) ++end;
      const std::int64_t first = static_cast<std::int64_t>(row);
      const std::int64_t count = static_cast<std::int64_t>(end - row);
      if (rows[row] != kNoSequence) {
        one_by_one->append(rows[row], 0, keys.part(first, count).view(),
                           values.part(first, count).view());
      }
      row = end;
    }
    batched->append(0, {rows, keys.view(), values.view()});
    if (step % scene(1, 5) != 0) continue;
    const Block queries = passage.queries.part(step, 3);
    REQUIRE(same(attend(*one_by_one, 0, ids, queries), attend(*batched, 0, ids, queries)));
    for (const SequenceId id : ids) REQUIRE(batched->tokens(id, 0) == one_by_one->tokens(id, 0));
  }
  CHECK(batched->compressed_tokens(ids[1], 0) > 60);

  // Nothing of a batch that is refused is there.
  const MemoryReport before = batched->memory();
  const Block keys = passage.keys.part(0, 8);
  Block bad = passage.values.part(0, 8);
  const auto refused = [&](const std::vector<SequenceId>& sequences, const Block& values,
                           const std::vector<std::string>& parts) {
    check_names(error_of<InvalidArgument>([&] {
                  batched->append(0, {sequences, keys.view(), values.view()});
                }),
                parts);
    const MemoryReport after = batched->memory();
    CHECK(after.host_bytes == before.host_bytes);
    CHECK(after.fast_bytes() == before.fast_bytes());
  };
  std::vector<SequenceId> torn = rows;
  torn[7] = ids[0];
  refused(torn, bad, {"row 7", "consecutive"});
  torn[7] = SequenceId{55};
  refused(torn, bad, {"55"});
  torn.pop_back();
  refused(torn, bad, {"8 rows", "7 sequences"});
  bad.at(6, 1, 3) = kNaN;
  refused(rows, bad, {"nan"});
  // Padding may hold anything, and a batch may hold nothing.
  bad.at(6, 1, 3) = 0;
  bad.at(7, 0, 0) = kNaN;
  batched->append(0, {rows, keys.view(), bad.view()});
  CHECK(batched->memory().host_bytes == before.host_bytes + 6 * 2 * 128 * 4);
  batched->append(0, AppendBatch{});
  batched->attend(0, AttendBatch{});
  CHECK(batched->memory().host_bytes == before.host_bytes + 6 * 2 * 128 * 4);
}

TEST_CASE("The reference follows appends, reservations and tokens that are taken back") {
  for (int trial = 0; trial < trials(12); ++trial) {
    Random random(50 + static_cast<std::uint64_t>(trial));
    CacheConfig config = small_config();
    config.sketch.kind = trial % 3 == 0 ? SketchKind::calibrated : SketchKind::exact;
    config.pool = one_of(random, std::vector<Pool>{Pool::head, Pool::layer});
    const Passage passage(600, random.bits());
    Reader reader(config, passage, 60);
    Mirror mirror(config, 5);
    mirror.append(0, passage.keys.part(0, 60), passage.values.part(0, 60));
    Random scores(42);
    mirror.compress({random_scores(scores, 2, 60, ScoreKind::random)});
    Tally tally;
    for (int step = 0; step < scene(80, 30); ++step) {
      const std::int64_t at = reader.tokens();
      const std::size_t what = random.below(8);
      if (what == 0) {
        const std::int64_t count = static_cast<std::int64_t>(random.below(20));
        reader.cache->reserve(reader.sequence, count);
        mirror.reserve(count);
      } else if (what == 1) {
        const std::int64_t window = at - reader.compressed();
        // Into what is compressed, too, but not so far that the prompt is gone.
        const bool far = backend().shortens && random.below(3) == 0 && at > 80;
        const std::int64_t most = far ? at - 40 : window;
        const std::int64_t kept =
            at - static_cast<std::int64_t>(random.below(static_cast<std::size_t>(most) + 1));
        REQUIRE(reader.truncate(kept));
        mirror.truncate(kept);
        if (far) {
          const std::uint64_t draw = random.bits();
          reader.cache->redraw(reader.sequence, draw);
          mirror.redraw(draw);
        }
      } else {
        const std::int64_t count =
            random.below(10) == 0 ? 40 : 1 + static_cast<std::int64_t>(random.below(4));
        reader.append(count);
        mirror.append(0, passage.keys.part(at, count), passage.values.part(at, count));
      }
      REQUIRE(reader.compressed() == static_cast<std::int64_t>(mirror.head(0, 0).odds.size()));
      REQUIRE(reader.cache->memory(reader.sequence).metadata_bytes ==
              mirror.memory().metadata_bytes);
      if (random.below(backend().thinning > 1 ? 2 : 3) == 0) continue;
      const std::int64_t row = reader.tokens() - 1;
      const bool checked = step % 8 == 0;
      const Result result = reader.attend_last();
      const auto answers = mirror.attend(0, passage.queries, row, checked);
      if (checked) compare(config, 0, result, 0, answers, "step " + std::to_string(step), tally);
    }
    report(tally);
  }
}
