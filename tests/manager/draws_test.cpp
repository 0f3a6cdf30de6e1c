// KvCacheManager on a backend (support/test_backend.hpp): the draw: equal draws answer equally,
// and no decision depends on one.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <verkv/kv_cache_manager.hpp>
#include <verkv/sketch_error.hpp>

#include "catch.hpp"
#include "reference/statistics.hpp"
#include "reference/step.hpp"
#include "support/blocks.hpp"
#include "support/configurations.hpp"
#include "support/dense.hpp"
#include "support/mirror.hpp"
#include "support/results.hpp"
#include "support/test_backend.hpp"
#include "tolerance.hpp"

using namespace verkv;
using namespace verkv::test;
using verkv::reference::Random;

TEST_CASE("An equal draw gives an equal answer, another draw another one") {
  CacheConfig config = small_config();
  config.fetch.mode = FetchMode::never;
  Random random(33);
  const std::vector<Block> keys = {random_block(random, 300, 2, 64, 1)};
  const std::vector<Block> values = {random_block(random, 300, 2, 64, 1)};
  const std::vector<Scores> scores = {random_scores(random, 2, 300, ScoreKind::random)};
  const Block queries = random_block(random, 1, 6, 64, 1);
  const Filled one = fill(config, keys, values, scores, 5);
  const Filled two = fill(config, keys, values, scores, 6);
  const Result five = attend(*one.cache, 0, {one.sequence}, queries);
  const Result six = attend(*two.cache, 0, {two.sequence}, queries);
  CHECK_FALSE(same(five, six));
  one.cache->redraw(one.sequence, 6);
  two.cache->redraw(two.sequence, 5);
  CHECK(same(attend(*one.cache, 0, {one.sequence}, queries), six));
  CHECK(same(attend(*two.cache, 0, {two.sequence}, queries), five));
  // The draw of tokens that are compressed later is the new one too.
  CacheConfig other = config;
  other.seed = config.seed + 1;
  other.sketch.kind = SketchKind::exact;
  CacheConfig base = config;
  base.sketch.kind = SketchKind::exact;
  const Filled three = fill(base, keys, values, scores, 5);
  const Filled four = fill(other, keys, values, scores, 5);
  CHECK_FALSE(same(attend(*three.cache, 0, {three.sequence}, queries),
                   attend(*four.cache, 0, {four.sequence}, queries)));
}

namespace {

// A manager that is drawn anew again and again, and the denominators it answers with, relative to
// the true one.
struct Redraws {
  std::vector<double> ratio;  // D_hat / D, [draw][query head]
  std::vector<QueryHeadReport> query;
  std::vector<KvHeadReport> kv;
  bool decisions_equal = true;
};

// What is asked for is the same, and so is the bound but for the sketch's error, which is measured on
// drawn tokens.
bool same_plan(const QueryHeadReport& a, const QueryHeadReport& b) {
  const double bound_a = a.epsilon / enlarged_for_sketch(1, a.sketch_error);
  const double bound_b = b.epsilon / enlarged_for_sketch(1, b.sketch_error);
  return a.planned_tokens == b.planned_tokens &&
         (!(std::isfinite(bound_a) && std::isfinite(bound_b)) ||
          std::fabs(bound_a - bound_b) <= tolerance::kInequality * bound_b);
}

Redraws redraw_often(const CacheConfig& config, const Filled& filled, const Block& queries,
                     int draws) {
  const LayerConfig& shape = config.layers[0];
  std::vector<double> lse;
  for (std::int64_t h = 0; h < shape.query_heads; ++h) {
    lse.push_back(dense(config, 0, filled.keys[0], filled.values[0], queries.row(0, h), h).lse);
  }
  Redraws all;
  for (int draw = 0; draw < draws; ++draw) {
    filled.cache->redraw(filled.sequence, static_cast<std::uint64_t>(draw));
    const Result result = attend(*filled.cache, 0, {filled.sequence}, queries);
    for (std::size_t h = 0; h < lse.size(); ++h) {
      all.ratio.push_back(std::exp(static_cast<double>(result.lse[h]) - lse[h]));
    }
    if (draw == 0) {
      all.query = result.query;
      all.kv = result.kv;
    }
    for (std::size_t h = 0; h < result.query.size(); ++h)
      all.decisions_equal = all.decisions_equal && same_plan(result.query[h], all.query[h]);
    for (std::size_t h = 0; h < result.kv.size(); ++h) {
      all.decisions_equal =
          all.decisions_equal && result.kv[h].fetched_tokens == all.kv[h].fetched_tokens;
    }
  }
  return all;
}

}  // namespace

TEST_CASE("Redraws: decisions stand, the mean is right, failures stay below delta") {
  const int draws = trials(400);
  for (const SketchKind kind : {SketchKind::exact, SketchKind::calibrated}) {
    for (const bool certificate : {true, false}) {
      for (const FetchOrder order : orders()) {
        // Clusters promise twice the bound of the plain estimate, and have no bias that is known.
        const bool plain = order == orders().front();
        Random random(34);
        CacheConfig config = small_config();
        config.layers = {layer_of(1, 4, 64, 64)};
        config.sketch.kind = kind;
        config.keep = 0.15;
        config.fetch.delta = 0.2;
        config.study.order = order;
        config.study.estimator = plain ? Estimator::plain : Estimator::clusters;
        config.fetch.epsilon.reset();
        config.fetch.risk.reset();
        if (certificate) config.fetch.epsilon = 0.15;
        if (!certificate) config.fetch.risk = 1e-4;
        const std::int64_t n = 400;
        const std::vector<Block> keys = {random_block(random, n, 1, 64, 1)};
        const std::vector<Block> values = {random_block(random, n, 1, 64, 1)};
        const std::vector<Scores> scores = {random_scores(random, 1, n, ScoreKind::with_zeros)};
        const Filled filled = fill(config, keys, values, scores);
        const Block queries = random_block(random, 1, 4, 64, 1.2);
        const Redraws redraws = redraw_often(config, filled, queries, draws);
        INFO("sketch " << static_cast<int>(kind) << ", certificate " << certificate << ", order "
                       << static_cast<int>(order));
        CHECK(redraws.decisions_equal);
        CHECK(redraws.kv[0].fetched_tokens > 0);
        CHECK(redraws.kv[0].fetched_tokens < n);
        if (kind != SketchKind::exact) continue;
        Mirror mirror(config, 0);
        mirror.append(0, keys[0], values[0]);
        mirror.compress(scores);
        for (std::size_t h = 0; h < 4; ++h) {
          double sum = 0;
          double square = 0;
          std::int64_t failures = 0;
          for (int draw = 0; draw < draws; ++draw) {
            const double ratio = redraws.ratio[static_cast<std::size_t>(draw) * 4 + h];
            sum += ratio;
            square += ratio * ratio;
            failures += std::fabs(ratio - 1) > (plain ? 1 : 2) * redraws.query[h].epsilon;
          }
          const double mean = sum / draws;
          const double deviation = std::sqrt(std::max(0.0, square / draws - mean * mean));
          // D_hat is short by the bias, beta / D, which is part of epsilon: what Eq. 7 has besides
          // is at least sqrt(2 V l) / D, and the deviation is sqrt(V) / D.
          const double l = std::log(2 / config.fetch.delta);
          const double bias = redraws.query[h].epsilon - 0.9 * deviation * std::sqrt(2 * l);
          const double noise =
              5.5 * deviation / std::sqrt(static_cast<double>(draws)) + tolerance::kRedrawBias;
          INFO("head " << h << ", mean " << mean << ", deviation " << deviation << ", epsilon "
                       << redraws.query[h].epsilon);
          if (plain) CHECK(mean <= 1 + noise);
          if (plain) CHECK(mean >= 1 - std::max(0.0, bias) - noise);
          CHECK(reference::binomial_not_above(failures, draws, config.fetch.delta));
        }
      }
    }
  }
}

TEST_CASE("The check of independence rejects a plan that peeks at the draw") {
  Random random(35);
  CacheConfig config = small_config();
  config.layers = {layer_of(1, 2, 64, 64)};
  config.sketch.kind = SketchKind::exact;
  config.keep = 0.3;
  config.fetch.epsilon = 0.2;
  Mirror mirror(config, 0);
  mirror.append(0, random_block(random, 120, 1, 64, 1), random_block(random, 120, 1, 64, 1));
  mirror.compress({random_scores(random, 1, 120, ScoreKind::random)});
  const Block queries = random_block(random, 1, 2, 64, 1.2);
  for (const bool peeks : {false, true}) {
    bool equal = true;
    reference::StepAnswer first;
    for (std::uint64_t draw = 0; draw < 20; ++draw) {
      mirror.redraw(draw);
      reference::HeadCase head = mirror.head_case(0, 0);
      head.peeks = peeks;
      const auto answer = reference::step(head, {queries.row(0, 0), queries.row(0, 1)});
      if (draw == 0) first = answer;
      equal = equal && answer.fetched.size() == first.fetched.size();
      for (std::size_t h = 0; h < 2; ++h) {
        equal = equal && answer.query[h].planned == first.query[h].planned &&
                answer.query[h].epsilon == first.query[h].epsilon;
      }
    }
    CHECK(equal == !peeks);
  }
}
