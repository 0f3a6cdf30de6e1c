// KvCacheManager on a backend (support/test_backend.hpp): several tokens of a sequence in one batch,
// rows that fail alone, append and attend in one call.
#include <cmath>
#include <cstdint>
#include <optional>
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

namespace {

struct BurstCase {
  const char* name;
  std::int64_t group;
  std::int64_t tokens;
  CacheConfig config = small_config();
};

std::vector<BurstCase> burst_cases() {
  std::vector<BurstCase> cases = {{"group 3", 3, 5},   {"group 1", 1, 9},      {"group 4", 4, 20},
                                  {"group 12", 12, 3}, {"exact sketch", 2, 7}, {"plain", 3, 8},
                                  {"soft cap", 3, 4},  {"limited", 5, 6},      {"always", 3, 4},
                                  {"never", 3, 4},     {"order", 3, 3},        {"scalar", 3, 8},
                                  {"threads", 2, 33}};
  for (BurstCase& c : cases) {
    const std::string name = c.name;
    c.config.layers = {layer_of(2, c.group, 64, 48)};
    c.config.storage = name == "plain" ? DType::bf16 : DType::f16;
    c.config.fetch.risk = 1e-4;
    if (name == "exact sketch") c.config.sketch.kind = SketchKind::exact;
    if (name == "plain") c.config.study.estimator = Estimator::plain;
    if (name == "soft cap") c.config.layers[0].soft_cap = 5;
    if (name == "limited") c.config.fetch.limit_tokens = 6;
    if (name == "always") c.config.fetch.mode = FetchMode::always;
    if (name == "never") c.config.fetch.mode = FetchMode::never;
    if (name == "order") c.config.study.order = orders().back();
    if (name == "scalar") c.config.study.vector_code = vector_codes().size() == 1;
    if (name == "threads") c.config.threads = 3;
  }
  if (backend().thinning > 1) {
    cases.erase(cases.begin() + 4, cases.end() - 1);
    cases.erase(cases.begin() + 1, cases.begin() + 3);
  }
  return cases;
}

Result one_of_rows(KvCacheManager& cache, SequenceId id, const Block& queries, std::int64_t row) {
  return attend(cache, 0, {id}, queries.part(row, 1));
}

}  // namespace

TEST_CASE("A burst is as many steps") {
  for (const BurstCase& c : burst_cases()) {
    const Passage passage(150, 61, c.config.layers[0]);
    INFO(c.name);
    Reader steps(c.config, passage, 60);
    Reader burst(c.config, passage, 60);
    // Of more than 32 tokens the first do not score, so what is compressed later may differ.
    const bool all_score = c.tokens < 32;
    for (const std::int64_t tokens : {c.tokens, std::int64_t{1}, c.tokens + 1}) {
      if (!all_score && tokens < c.tokens) break;
      for (Reader* reader : {&steps, &burst}) reader->cache->reserve(reader->sequence, tokens);
      std::vector<Result> alone;
      for (std::int64_t i = 0; i < tokens; ++i) {
        steps.append(1);
        alone.push_back(steps.attend_last());
      }
      burst.append(tokens);
      const Result together = burst.attend_burst(tokens);
      for (std::int64_t i = 0; i < tokens; ++i) {
        INFO("row " << i << " of " << tokens);
        REQUIRE(same(row_of(together, size(i), size(tokens)), alone[size(i)]));
      }
      const LayerStatistics a = steps.cache->statistics(0);
      const LayerStatistics b = burst.cache->statistics(0);
      CHECK(a.steps == b.steps);
      CHECK(a.decisions == b.decisions);
      CHECK(a.certified == b.certified);
      CHECK(a.planned_tokens == b.planned_tokens);
      CHECK(a.moved_tokens == b.moved_tokens);
      CHECK(a.resident_tokens == b.resident_tokens);
      CHECK(a.cached_tokens == b.cached_tokens);
    }
    // What the last queries gave waits in a row for each, until the next append.
    for (Reader* reader : {&steps, &burst}) reader->append(1);
    if (all_score) check_same_future(steps, burst);
  }
}

TEST_CASE("The reference follows bursts, causal and by position") {
  Random random(62);
  CacheConfig config = small_config();
  config.sketch.kind = SketchKind::exact;
  const Passage passage(200, 63);
  Reader reader(config, passage, 60);
  Mirror mirror(config, 5);
  mirror.append(0, passage.keys.part(0, 60), passage.values.part(0, 60));
  Random scores(42);
  mirror.compress({random_scores(scores, 2, 60, ScoreKind::random)});
  Tally tally;
  for (int step = 0; step < scene(16, 5); ++step) {
    const std::int64_t at = reader.tokens();
    const std::int64_t count = 1 + static_cast<std::int64_t>(random.below(7));
    reader.append(count);
    mirror.append(0, passage.keys.part(at, count), passage.values.part(at, count));
    const std::int64_t rows = std::min(count, reader.tokens() - reader.compressed());
    const Result result = reader.attend_burst(rows);
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::size_t back = size(rows - 1 - row);
      compare(config, 0, result, size(row),
              mirror.attend(0, passage.queries, reader.tokens() - rows + row, true, back),
              "step " + std::to_string(step) + " row " + std::to_string(row), tally);
    }
    const std::int64_t kept =
        reader.tokens() - static_cast<std::int64_t>(random.below(size(count) + 1));
    REQUIRE(reader.truncate(kept));
    mirror.truncate(kept);
    REQUIRE(reader.compressed() == static_cast<std::int64_t>(mirror.head(0, 0).odds.size()));
  }
  if (backend().thinning == 1) CHECK(reader.compressed() > 60);
  report(tally);
}

TEST_CASE("Rejected drafts of bursts leave nothing, at every place") {
  const Passage passage(220, 64);
  const CacheConfig config = small_config();
  for (const std::int64_t drafts : {4, 7}) {
    if (backend().thinning > 1 && drafts == 7) continue;
    Reader plain(config, passage, 60);
    Reader drafting(config, passage, 60);
    INFO(drafts << " drafts");
    for (std::int64_t round = 0; round < scene(30, 8); ++round) {
      const std::int64_t kept = 1 + round % drafts;
      for (Reader* reader : {&plain, &drafting}) reader->cache->reserve(reader->sequence, drafts);
      plain.append(kept);
      const Result want = plain.attend_burst(kept);
      drafting.append(drafts);
      const Result got = drafting.attend_burst(drafts);
      drafting.attend_burst(drafts);  // a retried step
      REQUIRE(drafting.truncate(plain.tokens()));
      for (std::int64_t row = 0; row < kept; ++row) {
        REQUIRE(same(row_of(got, size(row), size(drafts)), row_of(want, size(row), size(kept))));
      }
      check_same_use(plain, drafting);
    }
    CHECK(plain.compressed() > 60);
    check_same_future(plain, drafting);
  }
}

TEST_CASE("Steps, bursts, padding and empty sequences stand in one batch") {
  const CacheConfig config = small_config();
  const Passage passage(100, 65);
  const auto cache = make_cache(config);
  std::vector<SequenceId> ids;
  Random random(66);
  for (const std::int64_t n : {70, 40, 0, 25}) {
    ids.push_back(cache->create_sequence());
    cache->append(ids.back(), 0, passage.keys.part(0, n).view(), passage.values.part(0, n).view());
    if (n == 25) continue;
    compress(*cache, ids.back(), {random_scores(random, 2, n, ScoreKind::random)});
  }
  const std::vector<SequenceId> rows = {ids[1], kNoSequence, ids[0], ids[0],     ids[0],
                                        ids[2], ids[3],      ids[3], kNoSequence};
  const std::vector<std::int64_t> back = {0, 0, 2, 1, 0, 0, 1, 0, 0};
  const Block queries = passage.queries.part(20, 9);
  const Result all = attend(*cache, 0, rows, queries);
  for (std::int64_t row = 0; row < 9; ++row) {
    const SequenceId id = rows[size(row)];
    INFO("row " << row);
    if (id != kNoSequence && back[size(row)] > 0) {
      // The same sequence without the tokens that the row does not see.
      const std::int64_t n = cache->tokens(id, 0);
      REQUIRE(cache->truncate(id, n - back[size(row)]));
      CHECK(same(row_of(all, size(row), 9), one_of_rows(*cache, id, queries, row)));
      const std::int64_t from = n - back[size(row)];
      cache->append(id, 0, passage.keys.part(from, back[size(row)]).view(),
                    passage.values.part(from, back[size(row)]).view());
    } else {
      CHECK(same(row_of(all, size(row), 9), one_of_rows(*cache, id, queries, row)));
    }
  }
}

TEST_CASE("A whole prompt that is not compressed is asked in one batch") {
  CacheConfig config = small_config();
  const std::int64_t n = scene(70, 20);
  const Passage passage(n, 67);
  const auto cache = make_cache(config);
  const SequenceId id = cache->create_sequence();
  cache->append(id, 0, passage.keys.view(), passage.values.view());
  const Result result = attend(*cache, 0, std::vector<SequenceId>(size(n), id), passage.queries);
  for (std::int64_t row = 0; row < n; ++row) {
    for (std::int64_t h = 0; h < 6; ++h) {
      const Dense want = dense(config, 0, passage.keys.part(0, row + 1),
                               passage.values.part(0, row + 1), passage.queries.row(row, h), h);
      const std::size_t at = size(row * 6 + h);
      REQUIRE(std::fabs(static_cast<double>(result.lse[at]) - want.lse) < tolerance::kDense);
      double square = 0;
      for (std::int64_t j = 0; j < 64; ++j) {
        const double off =
            static_cast<double>(result.output[at * 64 + size(j)]) - want.output[size(j)];
        square += off * off;
      }
      REQUIRE(std::sqrt(square) < tolerance::kDense * norm(want.output));
    }
    CHECK(result.kv[size(row * 2)].resident_tokens == row + 1);
  }
}

TEST_CASE("A burst that cannot be is refused") {
  const Victim victim(victim_config());
  KvCacheManager& cache = *victim.cache;
  Random random(68);
  const Block queries = random_block(random, 12, 6, 64, 1);
  const auto rows_of = [&](std::vector<SequenceId> rows) {
    attend(cache, 0, rows, queries.part(0, static_cast<std::int64_t>(rows.size())));
  };
  victim.refuses<InvalidArgument>(
      [&] {
        rows_of({victim.a, victim.b, victim.a});
      },
      {std::to_string(victim.a.value), "row 2", "consecutive"});
  victim.refuses<InvalidArgument>(
      [&] {
        rows_of({victim.a, kNoSequence, victim.a});
      },
      {"row 2", "consecutive"});
  victim.refuses<InvalidArgument>([&] { rows_of(std::vector<SequenceId>(9, victim.a)); },
                                  {"9 rows", "last 8"});
  rows_of(std::vector<SequenceId>(8, victim.a));
  rows_of(std::vector<SequenceId>(12, victim.b));
  const SequenceId empty = cache.create_sequence();
  CHECK_THROWS_AS(rows_of({empty, empty}), InvalidArgument);
  rows_of({empty});
}

TEST_CASE("A row with a bad query fails alone, where its status is asked for") {
  const CacheConfig config = small_config();
  const Passage passage(110, 69);
  Reader told(config, passage, 60);
  Reader sound(config, passage, 60);
  for (Reader* reader : {&told, &sound}) {
    reader->cache->reserve(reader->sequence, 5);
    reader->append(5);
  }
  const SequenceId id = told.sequence;
  const std::vector<SequenceId> rows = {id, id, id, id, id, kNoSequence};
  const Block queries = passage.queries.part(60, 6);
  const Result want = attend(*sound.cache, 0, rows, queries);
  Block bad = queries;
  bad.at(1, 4, 7) = kNaN;
  bad.at(3, 0, 0) = -kInfinity;
  bad.at(5, 0, 0) = kNaN;  // of a padding row
  Result got = want;
  for (float& x : got.output) x = kNaN;
  std::vector<RowStatus> status(6, RowStatus::bad_query);
  AttendBatch batch;
  batch.sequences = rows;
  batch.queries = bad.view();
  batch.output = got.output;
  batch.lse = got.lse;
  batch.query_reports = got.query;
  batch.kv_reports = got.kv;
  check_names(error_of<InvalidArgument>([&] { told.cache->attend(0, batch); }),
              {"row 1", "head 4", "coordinate 7"});
  CHECK(std::isnan(got.output[0]));
  batch.row_status = std::span(status).first(5);
  check_names(error_of<InvalidArgument>([&] { told.cache->attend(0, batch); }), {"5", "6 rows"});
  batch.row_status = status;
  told.cache->attend(0, batch);
  const Result nothing = row_of(want, 5, 6);
  for (std::size_t row = 0; row < 6; ++row) {
    const bool fails = row == 1 || row == 3;
    INFO("row " << row);
    CHECK(status[row] == (fails ? RowStatus::bad_query : RowStatus::answered));
    CHECK(same(row_of(got, row, 6), fails ? nothing : row_of(want, row, 6)));
  }
  CHECK(told.cache->statistics(0).steps == 3);
  CHECK(sound.cache->statistics(0).steps == 5);
  // The sound queries are asked again, and then nothing tells the two apart.
  CHECK(same(attend(*told.cache, 0, rows, queries), want));
  check_same_future(told, sound);
}

TEST_CASE("A step appends and attends, or does neither") {
  const CacheConfig config = small_config();
  const Passage passage(130, 70);
  Reader apart(config, passage, 60);
  Reader joined(config, passage, 60);
  for (int step = 0; step < scene(10, 4); ++step) {
    const std::int64_t at = apart.tokens();
    const std::vector<SequenceId> rows = {kNoSequence, apart.sequence, apart.sequence};
    const Block keys = passage.keys.part(at - 1, 3);
    const Block values = passage.values.part(at - 1, 3);
    Block queries = passage.queries.part(at - 1, 3);
    apart.cache->append(0, {rows, keys.view(), values.view()});
    const Result want = attend(*apart.cache, 0, rows, queries);
    Result got = want;
    for (float& x : got.output) x = kNaN;
    AttendBatch batch;
    batch.sequences = rows;
    batch.output = got.output;
    batch.lse = got.lse;
    batch.query_reports = got.query;
    batch.kv_reports = got.kv;
    Block bad = queries;
    bad.at(2, 5, 63) = kNaN;
    batch.queries = bad.view();
    CHECK_THROWS_AS(joined.cache->step(0, keys.view(), values.view(), batch), InvalidArgument);
    batch.queries = queries.view();
    CHECK_THROWS_AS(joined.cache->step(0, keys.part(0, 2).view(), values.part(0, 2).view(), batch),
                    InvalidArgument);
    CHECK(joined.tokens() == at);
    joined.cache->step(0, keys.view(), values.view(), batch);
    REQUIRE(same(got, want));
  }
  joined.cache->step(0, TensorView{}, TensorView{}, AttendBatch{});
  check_same_future(apart, joined);
}

TEST_CASE("Bursts of eight tokens a sequence allocate nothing", "[cpu]") {
  for (const int threads : {1, 2}) {
    CacheConfig config = small_config();
    config.threads = threads;
    const Passage passage(120, 71);
    const auto cache = make_cache(config);
    std::vector<SequenceId> rows;
    Random random(72);
    for (int i = 0; i < 3; ++i) {
      const SequenceId id = cache->create_sequence();
      cache->append(id, 0, passage.keys.part(0, 60).view(), passage.values.part(0, 60).view());
      compress(*cache, id, {random_scores(random, 2, 60, ScoreKind::random)});
      rows.resize(rows.size() + 8, id);
    }
    const Block queries = passage.queries.part(0, 24);
    std::vector<float> output(24 * 6 * 64);
    std::vector<RowStatus> status(24);
    AttendBatch batch;
    batch.sequences = rows;
    batch.queries = queries.view();
    batch.output = output;
    batch.row_status = status;
    const std::int64_t before = allocations;
    cache->attend(0, batch);
    CHECK(allocations - before == 0);
  }
}
