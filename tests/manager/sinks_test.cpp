// KvCacheManager on a backend (support/test_backend.hpp): learned sinks of the softmax. That whole
// steps follow the reference with sinks is in reference_test.cpp.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
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

// One layer of one KV head and two query heads; never fetches.
CacheConfig sink_config(const std::vector<float>& sinks) {
  CacheConfig config = small_config();
  config.layers = {layer_of(1, 2, 64, 64)};
  config.layers[0].sink_logits = sinks;
  config.fetch.mode = FetchMode::never;
  return config;
}

double off(double a, double b) { return std::abs(a - b) / b; }

}  // namespace

TEST_CASE("A sink is a token of value 0 that is always seen") {
  // The last token of the longer sequence has the value 0 and, for both heads, the logit 2.
  Random random(171);
  CacheConfig config = sink_config({});
  config.layers[0].scale = 1;
  Block keys = random_block(random, 40, 1, 64, 0.2), values = random_block(random, 40, 1, 64, 1);
  Block queries = random_block(random, 1, 2, 64, 1);
  for (std::int64_t h = 0; h < 2; ++h) queries.at(0, h, 0) = 1;
  for (std::int64_t j = 0; j < 64; ++j) {
    keys.at(39, 0, j) = j == 0 ? 2.0f : 0.0f;
    values.at(39, 0, j) = 0;
  }
  const Filled with_token = fill(config, {keys}, {values}, {});
  const Result expected = attend(*with_token.cache, 0, {with_token.sequence}, queries);
  config.layers[0].sink_logits = {2, 2};
  const Filled with_sink = fill(config, {keys.part(0, 39)}, {values.part(0, 39)}, {});
  const Result result = attend(*with_sink.cache, 0, {with_sink.sequence}, queries);
  for (std::size_t i = 0; i < result.output.size(); ++i)
    CHECK(std::abs(static_cast<double>(result.output[i]) -
                   static_cast<double>(expected.output[i])) < tolerance::kDense);
  for (std::size_t h = 0; h < 2; ++h)
    CHECK(std::abs(static_cast<double>(result.lse[h]) - static_cast<double>(expected.lse[h])) <
          tolerance::kDense);
}

TEST_CASE("The bound is of D with the sink") {
  Random random(172);
  const std::int64_t n = 300;
  const Block keys = random_block(random, n, 1, 64, 1), values = random_block(random, n, 1, 64, 1);
  const Scores scores = random_scores(random, 1, n, ScoreKind::random);
  const Block queries = random_block(random, 1, 2, 64, 1);
  const auto ask = [&](const std::vector<float>& sinks) {
    const Filled filled = fill(sink_config(sinks), {keys}, {values}, {scores}, 5);
    return attend(*filled.cache, 0, {filled.sequence}, queries);
  };
  const Result without = ask({});
  // The first head's sink weighs three times what all tokens do, the second's next to nothing.
  const float heavy = without.lse[0] + std::log(3.0f);
  const Result with = ask({heavy, without.lse[1] - 30});
  REQUIRE(without.query[0].epsilon > 0.01);
  CHECK(off(with.query[0].sketch_error, without.query[0].sketch_error) < 1e-5);
  // D by the sketch is not quite that of the LSE.
  CHECK(with.query[0].epsilon < 0.4 * without.query[0].epsilon);
  CHECK(with.query[0].epsilon > 0.15 * without.query[0].epsilon);
  CHECK(with.query[0].output_error < 0.4 * without.query[0].output_error);
  CHECK(off(with.query[1].epsilon, without.query[1].epsilon) < 1e-5);
  CHECK(std::abs(with.lse[0] - without.lse[0] - std::log(4.0f)) < 0.05f);
}

TEST_CASE("One part of a context that is split has the sink") {
  Random random(173);
  const std::vector<float> sinks{0.5f, 4};
  const CacheConfig all_config = sink_config(sinks);
  const auto with = make_cache(all_config), without = make_cache(sink_config({}));
  const Block keys = random_block(random, 90, 1, 64, 1);
  const Block values = random_block(random, 90, 1, 64, 1);
  const Block queries = random_block(random, 1, 2, 64, 1);
  // The part with the sink may be empty: its LSE is the sink.
  for (const std::int64_t first : {0, 60}) {
    std::vector<Result> parts;
    const auto ask = [&](KvCacheManager& cache, std::int64_t begin, std::int64_t count) {
      const SequenceId part = cache.create_sequence();
      cache.append(part, 0, keys.part(begin, count).view(), values.part(begin, count).view());
      parts.push_back(attend(cache, 0, {part}, queries));
    };
    ask(*with, 0, first);
    ask(*without, first, 90 - first);
    if (first == 0) {
      CHECK(same_bits(parts[0].lse, sinks));
      CHECK(std::ranges::all_of(parts[0].output, [](float x) { return x == 0; }));
      for (const QueryHeadReport& report : parts[0].query)
        CHECK((report.epsilon == 0 && report.certified));
    }
    for (std::int64_t head = 0; head < 2; ++head) {
      const Dense all = dense(all_config, 0, keys, values, queries.row(0, head), head);
      double denominator = 0;
      for (const Result& part : parts)
        denominator += std::exp(static_cast<double>(part.lse[size(head)]));
      CHECK(std::abs(std::log(denominator) - all.lse) < tolerance::kDense);
      for (std::int64_t j = 0; j < 64; ++j) {
        double sum = 0;
        for (const Result& part : parts)
          sum += std::exp(static_cast<double>(part.lse[size(head)])) *
                 static_cast<double>(part.output[size(head * 64 + j)]);
        CHECK(std::abs(sum / denominator - all.output[size(j)]) <
              tolerance::kDense * norm(all.output));
      }
    }
  }
}

TEST_CASE("Sinks far above and far below all logits; padding has none") {
  Random random(174);
  const std::int64_t n = 200;
  const Block keys = random_block(random, n, 1, 64, 1), values = random_block(random, n, 1, 64, 1);
  const Scores scores = random_scores(random, 1, n, ScoreKind::random);
  const Block queries = random_block(random, 2, 2, 64, 1);
  const auto ask = [&](const std::vector<float>& sinks) {
    const Filled filled = fill(sink_config(sinks), {keys}, {values}, {scores}, 5);
    return attend(*filled.cache, 0, {filled.sequence, kNoSequence}, queries);
  };
  const Result without = ask({});
  const Result with = ask({1e30f, -1e30f});
  for (std::size_t i = 0; i < 64; ++i) CHECK(with.output[i] == 0);
  CHECK(with.lse[0] == 1e30f);
  CHECK(with.query[0].epsilon == 0);
  CHECK(
      std::equal(with.output.begin() + 64, with.output.begin() + 128, without.output.begin() + 64));
  CHECK(with.lse[1] == without.lse[1]);
  for (std::size_t h = 2; h < 4; ++h) CHECK(with.lse[h] == -kInfinity);
}

TEST_CASE("Sink logits are one for each query head, and finite") {
  for (const std::vector<float>& sinks :
       {std::vector<float>{1}, {1, 2, 3}, {1, kNaN}, {kInfinity, 1}, {1, -kInfinity}}) {
    CHECK(reasons_against(sink_config(sinks)).size() == 1);
    CHECK_THROWS_AS(make_cache(sink_config(sinks)), InvalidArgument);
  }
}

TEST_CASE("A saved sequence is of the same sinks") {
  if (!backend().saves) return;
  Random random(175);
  const Block keys = random_block(random, 30, 1, 64, 1);
  const Filled filled = fill(sink_config({1, 2}), {keys}, {keys}, {});
  std::vector<std::byte> bytes;
  filled.cache->save(filled.sequence, [&](std::span<const std::byte> piece) {
    bytes.insert(bytes.end(), piece.begin(), piece.end());
  });
  const auto restore = [&](const std::vector<float>& sinks) {
    std::size_t at = 0;
    const auto cache = make_cache(sink_config(sinks));
    const auto read = [&](std::span<std::byte> to) {
      std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(at), to.size(), to.begin());
      at += to.size();
      return to.size();
    };
    try {
      cache->restore(read);
    } catch (const FormatError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(restore({1, 2}).empty());
  CHECK(restore({1, 3}).find("sink logits") != std::string::npos);
  CHECK(restore({}).find("another configuration") != std::string::npos);
}
