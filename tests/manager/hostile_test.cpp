// KvCacheManager on a backend (support/test_backend.hpp): keys that a sketch of few bits cannot hold.
// A decision that is certified must hold, or the cache must not certify it.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <verkv/kv_cache_manager.hpp>
#include <verkv/sketch_error.hpp>

#include "catch.hpp"
#include "reference/statistics.hpp"
#include "support/blocks.hpp"
#include "support/configurations.hpp"
#include "support/dense.hpp"
#include "support/results.hpp"
#include "support/test_backend.hpp"

using namespace verkv;
using namespace verkv::test;
using verkv::reference::Random;

namespace {

constexpr double kEpsilon = 0.05;

// One head's keys and queries: key(random, position) and query(random) have `dim` numbers, and
// logits q.k / sqrt(dim).
struct Scene {
  std::string name;
  std::int64_t dim;
  std::int64_t tokens;
  int bits;
  double keep = 1.0 / 16;
  std::function<std::vector<float>(Random&, std::int64_t)> key;
  std::function<std::vector<float>(Random&, std::int64_t)> query;  // at a position
};

std::vector<float> normals(Random& random, std::int64_t dim, double size) {
  std::vector<float> x;
  for (std::int64_t j = 0; j < dim; ++j) x.push_back(static_cast<float>(size * random.normal()));
  return x;
}

// Normal keys, and logits of this deviation.
Scene wide(std::int64_t dim, std::int64_t tokens, int bits, double deviation) {
  return {
      "logits of deviation " + std::to_string(deviation),
      dim,
      tokens,
      bits,
      1.0 / 16,
      [dim](Random& random, std::int64_t) { return normals(random, dim, 1); },
      [dim, deviation](Random& random, std::int64_t) { return normals(random, dim, deviation); }};
}

// The first `channels` channels of the keys are `times` larger, those of the queries smaller.
Scene outliers(std::int64_t dim, std::int64_t tokens, int bits, std::int64_t channels,
               double times) {
  Scene scene = wide(dim, tokens, bits, 2);
  scene.name = std::to_string(channels) + " channels " + std::to_string(times) + " times";
  const auto scaled = [channels](std::vector<float> x, double by) {
    for (std::int64_t j = 0; j < channels; ++j)
      x[size(j)] = static_cast<float>(static_cast<double>(x[size(j)]) * by);
    return x;
  };
  scene.key = [=](Random& random, std::int64_t) { return scaled(normals(random, dim, 1), times); };
  scene.query = [=](Random& random, std::int64_t) {
    return scaled(normals(random, dim, 2), 1 / times);
  };
  return scene;
}

// A bias of 100 in one rotary pair of the keys and of 3 in the queries, as in Qwen2.
Scene biased(std::int64_t dim, std::int64_t tokens, int bits) {
  Scene scene = wide(dim, tokens, bits, 2);
  scene.name = "biased pair";
  const std::int64_t pair = dim / 2 * 5 / 8;
  const double turn =
      std::pow(10000.0, -2.0 * static_cast<double>(pair) / static_cast<double>(dim));
  const auto add = [=](std::vector<float> x, std::int64_t position, double bias) {
    const double angle = turn * static_cast<double>(position);
    x[size(pair)] += static_cast<float>(bias * std::cos(angle));
    x[size(pair + dim / 2)] += static_cast<float>(bias * std::sin(angle));
    return x;
  };
  scene.key = [=](Random& random, std::int64_t t) { return add(normals(random, dim, 1), t, 100); };
  scene.query = [=](Random& random, std::int64_t t) { return add(normals(random, dim, 2), t, 3); };
  return scene;
}

struct Promises {
  int decisions = 0;
  int certified = 0;
  int broken = 0;   // certified, and off by more than epsilon
  int blindly = 0;  // the same, had the certificate not seen the sketch's error
};

Promises run(const Scene& scene, int sequences) {
  CacheConfig config;
  config.layers = {layer_of(1, 4, scene.dim, 16)};
  config.storage = DType::f32;
  config.keep = scene.keep;
  config.sketch.bits = scene.bits;
  config.fetch.risk.reset();
  config.fetch.epsilon = kEpsilon;
  config.chunk_tokens.reset();
  config.compress_from = 0;
  config.threads = 1;
  config.study.estimator = Estimator::plain;  // of which the certificate speaks
  Promises tally;
  for (int s = 0; s < sequences; ++s) {
    Random random(static_cast<std::uint64_t>(100 + s));
    Block keys{scene.tokens, 1, scene.dim, {}};
    for (std::int64_t t = 0; t < scene.tokens; ++t) {
      const std::vector<float> k = scene.key(random, t);
      keys.data.insert(keys.data.end(), k.begin(), k.end());
    }
    Block prompt{64, 4, scene.dim, {}};
    for (std::int64_t t = 0; t < 64 * 4; ++t) {
      const std::vector<float> q = scene.query(random, scene.tokens - 64 + t / 4);
      prompt.data.insert(prompt.data.end(), q.begin(), q.end());
    }
    const Block values = random_block(random, scene.tokens, 1, 16, 1);
    config.seed = static_cast<std::uint64_t>(s);
    const auto cache = make_cache(config);
    const SequenceId id = cache->create_sequence();
    cache->append(id, 0, keys.view(), values.view());
    const Scores even{1, scene.tokens, std::vector<float>(size(scene.tokens), 1.0f)};
    const ImportanceView importance = even.view();
    const TensorView queries = prompt.view();
    cache->compress(id, {&importance, 1}, {&queries, 1});
    for (int step = 0; step < 2; ++step) {
      Block query{1, 4, scene.dim, {}};
      for (int h = 0; h < 4; ++h) {
        const std::vector<float> q = scene.query(random, scene.tokens);
        query.data.insert(query.data.end(), q.begin(), q.end());
      }
      const Result result = attend(*cache, 0, {id}, query);
      for (std::int64_t h = 0; h < 4; ++h) {
        const double lse = dense(config, 0, keys, values, query.row(0, h), h).lse;
        const double off = std::fabs(std::expm1(static_cast<double>(result.lse[size(h)]) - lse));
        const QueryHeadReport& report = result.query[size(h)];
        ++tally.decisions;
        tally.certified += report.certified;
        tally.broken += report.certified && off > kEpsilon;
        // Without a limit on fetching the plan always meets epsilon by sketched weights.
        tally.blindly += off > kEpsilon;
      }
    }
  }
  return tally;
}

}  // namespace

namespace {

// Whether so many of the decisions of `sequences` sequences are more than delta = 0.1 of them. Heads
// and steps of a sequence share its draw, so a sequence is one trial: four deviations of a binomial
// share.
bool is_above_delta(int broken, int decisions, int sequences) {
  return broken > decisions * (0.1 + 4 * std::sqrt(0.1 * 0.9 / sequences));
}

}  // namespace

TEST_CASE("A certified decision is broken in at most delta of the cases, whatever the keys",
          "[cpu]") {
  // What a device decides is what the CPU decides, and a simulated one takes minutes for it.
  const int sequences = 24;
  // Scenes that would break a certificate of sketched weights alone, and others, each pooled.
  Promises hard;
  Promises other;
  for (const int bits : {2, 3, 4}) {
    std::vector<Scene> scenes;
    for (const double deviation : {3.0, 4.0, 6.0})
      scenes.push_back(wide(64, 1000, bits, deviation));
    scenes.push_back(biased(64, 1000, bits));
    scenes.push_back(biased(128, 1000, bits));
    const std::size_t spoiled = scenes.size();
    scenes.push_back(wide(4, 1000, bits, 4));
    scenes.push_back(outliers(64, 1000, bits, 1, 100));
    scenes.push_back(outliers(80, 1000, bits, 4, 1000));
    for (std::size_t i = 0; i < scenes.size(); ++i) {
      const Promises one = run(scenes[i], sequences);
      INFO(scenes[i].name << ", head size " << scenes[i].dim << ", " << bits << " bits: certified "
                          << one.certified << ", broken " << one.broken << " (" << one.blindly
                          << " without looking at the sketch) of " << one.decisions);
      CHECK_FALSE(is_above_delta(one.broken, one.decisions, sequences));
      Promises& pool = bits == 2 && i > 0 && i < spoiled ? hard : other;
      pool.decisions += one.decisions;
      pool.broken += one.broken;
      pool.blindly += one.blindly;
    }
  }
  CHECK_FALSE(is_above_delta(hard.broken, hard.decisions, 4 * sequences));
  CHECK_FALSE(is_above_delta(other.broken, other.decisions, 20 * sequences));
  CHECK(is_above_delta(hard.blindly, hard.decisions, 4 * sequences));
}

TEST_CASE("Where everything is fetched the answer is exact, however far off the sketch is") {
  CacheConfig config = small_config();
  config.layers = {layer_of(1, 1, 64, 64)};
  config.fetch.mode = FetchMode::always;
  Random random(18);
  Block keys = random_block(random, 300, 1, 64, 30);
  const std::vector<Scores> scores = {random_scores(random, 1, 300, ScoreKind::equal)};
  const Filled filled = fill(config, {keys}, {random_block(random, 300, 1, 64, 1)}, scores, 3);
  int far_off = 0;
  for (int step = 0; step < 8; ++step) {
    const Result result =
        attend(*filled.cache, 0, {filled.sequence}, random_block(random, 1, 1, 64, 9));
    far_off += result.query[0].sketch_error > 7.5;
    CHECK(result.query[0].epsilon == 0);
    CHECK(result.query[0].certified);
  }
  CHECK(far_off > 0);
}

TEST_CASE("What the sketch can hold is certified, with an outlier channel too") {
  for (Scene scene : {wide(64, 400, 2, 1.5), outliers(64, 400, 2, 1, 100)}) {
    scene.keep = 0.25;
    const Promises tally = run(scene, trials(8));
    INFO(scene.name << ", " << scene.bits << " bits: certified " << tally.certified << " of "
                    << tally.decisions);
    CHECK(tally.certified >= 0.9 * tally.decisions);
  }
}
