#include "compression.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <verkv/clusters.hpp>
#include <verkv/error.hpp>

#include "catch.hpp"
#include "reference/reference.hpp"
#include "reference/statistics.hpp"
#include "reference/step.hpp"
#include "tolerance.hpp"
#include "window_score.hpp"

namespace {

using verkv::CacheConfig;
using verkv::Compressor;
using verkv::DType;
using verkv::HeadCompression;
using verkv::HeadRows;
using verkv::ImportanceView;
using verkv::LayerLengths;
using verkv::Pool;
using verkv::Positive16;
using verkv::Rows;
using verkv::Selection;
using verkv::SketchKind;
using verkv::TensorView;
using verkv::reference::Random;
using verkv::reference::Vector;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::int64_t between(Random& random, std::int64_t low, std::int64_t high) {
  return low + static_cast<std::int64_t>(random.below(static_cast<std::size_t>(high - low + 1)));
}

// A sequence that waits for its compression: lengths and scores of each layer.
struct Case {
  CacheConfig config;
  std::vector<LayerLengths> lengths;
  std::vector<std::vector<float>> scores;  // [layer][KV head][position - compressed]

  std::vector<ImportanceView> importance() const {
    std::vector<ImportanceView> views;
    for (std::size_t i = 0; i < scores.size(); ++i) {
      const std::int64_t open = lengths[i].tokens - lengths[i].compressed;
      views.push_back(
          {open == 0 ? nullptr : scores[i].data(), config.layers[i].kv_heads, open, open});
    }
    return views;
  }
};

Case random_case(Random& random) {
  Case c;
  c.config.keep = random.uniform(0.01, 0.5);
  c.config.sink_tokens = between(random, 0, 6);
  c.config.local_tokens = between(random, 0, 20);
  c.config.chunk_tokens = between(random, 1, 40);
  c.config.compress_from = 0;
  c.config.pool = static_cast<Pool>(random.below(3));
  const std::size_t select = random.below(4);
  c.config.study.select = select == 0   ? Selection::topk
                          : select == 1 ? Selection::spread
                                        : Selection::poisson;
  if (random.below(3) == 0) c.config.study.inclusion_floor = c.config.keep / 3;
  const std::size_t layers = 1 + random.below(4);
  for (std::size_t i = 0; i < layers; ++i) {
    verkv::LayerConfig layer;
    layer.kv_heads = between(random, 1, 3);
    layer.query_heads = layer.kv_heads * between(random, 1, 3);
    layer.key_dim = layer.value_dim = 8;
    layer.cached = random.below(6) > 0;
    layer.dense = random.below(6) == 0;
    c.config.layers.push_back(layer);
    LayerLengths lengths;
    lengths.compressed = random.below(3) == 0 ? between(random, 1, 50) : 0;
    lengths.tokens = lengths.compressed + (random.below(6) == 0 ? 0 : between(random, 1, 200));
    c.lengths.push_back(lengths);
    std::vector<float> scores;
    const double spread = random.uniform(0, 3);
    const bool flat = random.below(8) == 0;
    for (std::int64_t k = 0; k < layer.kv_heads * (lengths.tokens - lengths.compressed); ++k) {
      const bool zero = flat || random.below(10) == 0;
      scores.push_back(zero ? 0.0f : static_cast<float>(std::exp(spread * random.normal())));
    }
    c.scores.push_back(std::move(scores));
  }
  return c;
}

// The number of heads at position `at` of `heads` that share a pool, by their names alone.
bool share(Pool pool, const HeadCompression& a, const HeadCompression& b) {
  return pool == Pool::sequence ||
         (a.layer == b.layer && (pool == Pool::layer || a.head == b.head));
}

// Odds of the heads by the reference in double, given the scores of their positions.
std::vector<Vector> reference_odds(const CacheConfig& config,
                                   const std::vector<HeadCompression>& heads, Pool pool,
                                   bool pays_window) {
  std::vector<Vector> result(heads.size());
  std::vector<bool> done(heads.size(), false);
  for (std::size_t i = 0; i < heads.size(); ++i) {
    if (done[i]) continue;
    std::vector<std::size_t> members;
    std::vector<verkv::reference::PoolHead> parts;
    for (std::size_t j = i; j < heads.size(); ++j) {
      if (!share(pool, heads[i], heads[j])) continue;
      const HeadCompression& head = heads[j];
      verkv::reference::PoolHead part;
      part.begin = static_cast<std::size_t>(head.begin);
      part.window =
          pays_window && head.begin == 0 ? static_cast<std::size_t>(head.tokens - head.end()) : 0;
      for (std::size_t k = 0; k < head.odds.size(); ++k)
        part.tau.push_back(static_cast<double>(head.importance[k]));
      members.push_back(j);
      parts.push_back(std::move(part));
      done[j] = true;
    }
    const std::vector<Vector> odds = verkv::reference::pool_odds(config, parts);
    for (std::size_t k = 0; k < members.size(); ++k) result[members[k]] = odds[k];
  }
  return result;
}

// Both sides round c to 16 bits each in their own way, so a step of the last place is allowed.
bool agree(const std::vector<Positive16>& odds, const Vector& expected) {
  if (odds.size() != expected.size()) return false;
  for (std::size_t i = 0; i < odds.size(); ++i) {
    const Positive16 other = verkv::to_positive16(static_cast<float>(expected[i]));
    if (std::abs(odds[i].bits - other.bits) > 1) return false;
  }
  return true;
}

double inclusion_of(Positive16 odds) {
  return verkv::probability_from_odds(static_cast<double>(to_float(odds)));
}

TEST_CASE("Prompt: each pool shares its budget as the reference has it") {
  Random random(1);
  int compressed_heads = 0;
  for (int trial = 0; trial < 400; ++trial) {
    CAPTURE(trial);
    const Case c = random_case(random);
    const std::vector<ImportanceView> importance = c.importance();
    const std::vector<HeadCompression> heads =
        Compressor(c.config).prompt(7, c.lengths, importance);
    // Which heads, by their definition.
    std::size_t next = 0;
    for (std::size_t layer = 0; layer < c.config.layers.size(); ++layer) {
      const verkv::LayerConfig& l = c.config.layers[layer];
      const auto [tokens, compressed] = c.lengths[layer];
      if (!l.cached || l.dense || tokens - c.config.local_tokens <= compressed) continue;
      for (std::int64_t h = 0; h < l.kv_heads; ++h) {
        REQUIRE(next < heads.size());
        const HeadCompression& head = heads[next++];
        CHECK(head.layer == layer);
        CHECK(head.head == static_cast<std::size_t>(h));
        CHECK(head.begin == compressed);
        CHECK(head.end() == tokens - c.config.local_tokens);
        CHECK(head.tokens == tokens);
        CHECK(head.importance == importance[layer].data + h * (tokens - compressed));
        CHECK(head.basis.shape.dim == 0);
      }
    }
    REQUIRE(next == heads.size());
    const std::vector<Vector> expected = reference_odds(c.config, heads, c.config.pool, true);
    for (std::size_t i = 0; i < heads.size(); ++i) CHECK(agree(heads[i].odds, expected[i]));
    compressed_heads += static_cast<int>(heads.size());
  }
  CHECK(compressed_heads > 1000);
}

TEST_CASE("Prompt: sinks stay, and the expected number of residents is the budget") {
  Random random(2);
  for (int trial = 0; trial < 200; ++trial) {
    CAPTURE(trial);
    Case c = random_case(random);
    c.config.study.select = Selection::poisson;
    c.config.pool = Pool::head;
    const std::vector<HeadCompression> heads =
        Compressor(c.config).prompt(7, c.lengths, c.importance());
    for (const HeadCompression& head : heads) {
      double expected = head.begin == 0 ? static_cast<double>(head.tokens - head.end()) : 0;
      std::int64_t positive = 0;
      const std::int64_t sinks =
          std::clamp<std::int64_t>(c.config.sink_tokens - head.begin, 0, head.end() - head.begin);
      const double fixed = expected + static_cast<double>(sinks);
      for (std::size_t i = 0; i < head.odds.size(); ++i) {
        expected += inclusion_of(head.odds[i]);
        if (static_cast<std::int64_t>(i) < sinks) {
          CHECK(head.odds[i].bits == verkv::kPositive16Infinity.bits);
        } else {
          positive += head.importance[i] > 0;
        }
      }
      const double paid =
          static_cast<double>(head.begin == 0 ? head.tokens : head.end() - head.begin);
      const double budget = std::max(c.config.keep * paid, fixed);
      // With fewer tokens that matter than the budget, the rest is not spent; a floor spends it.
      const bool saturated = positive > 0 && budget - fixed >= static_cast<double>(positive);
      if (saturated || c.config.study.inclusion_floor > 0) {
        CHECK(expected >= fixed);
      } else {
        CHECK(std::fabs(expected - budget) <= 0.004 * budget + 1e-9);
      }
    }
  }
}

// Draws each token of a compression for many sequences, with drawn_with(r) where its odds stand for
// r. Whether all counts fit the odds.
template <class DrawnWith>
bool draws_fit(const Case& c, DrawnWith&& drawn_with) {
  constexpr std::int64_t kTrials = 4000;
  std::vector<std::vector<std::int64_t>> counts;
  std::vector<HeadCompression> heads;
  for (std::int64_t trial = 0; trial < kTrials; ++trial) {
    heads =
        Compressor(c.config).prompt(static_cast<std::uint64_t>(trial), c.lengths, c.importance());
    counts.resize(heads.size());
    for (std::size_t h = 0; h < heads.size(); ++h) {
      counts[h].resize(heads[h].odds.size());
      for (std::size_t i = 0; i < heads[h].odds.size(); ++i) {
        const std::uint64_t position = static_cast<std::uint64_t>(heads[h].begin) + i;
        counts[h][i] +=
            verkv::drawn(heads[h].draw, position, drawn_with(inclusion_of(heads[h].odds[i])));
      }
    }
  }
  double tests = 0;
  for (const HeadCompression& head : heads) tests += static_cast<double>(head.odds.size());
  for (std::size_t h = 0; h < heads.size(); ++h) {
    std::int64_t all = 0;
    double expected = 0;
    double variance = 0;
    for (std::size_t i = 0; i < heads[h].odds.size(); ++i) {
      const double r = inclusion_of(heads[h].odds[i]);
      if (!verkv::reference::binomial_fits(counts[h][i], kTrials, r, tests)) return false;
      all += counts[h][i];
      expected += r * kTrials;
      variance += r * (1 - r) * kTrials;
    }
    if (std::fabs(static_cast<double>(all) - expected) >
        verkv::reference::bernstein_bound(variance, 1, tests)) {
      return false;
    }
  }
  return true;
}

TEST_CASE("Prompt: tokens are drawn as often as their odds say, and a biased twin is rejected") {
  Random random(3);
  Case c;
  c.config.keep = 0.25;
  c.config.local_tokens = 4;
  c.config.compress_from = 0;
  for (int i = 0; i < 2; ++i) {
    verkv::LayerConfig layer;
    layer.kv_heads = layer.query_heads = 2;
    layer.key_dim = layer.value_dim = 8;
    c.config.layers.push_back(layer);
    c.lengths.push_back({64, 0});
    std::vector<float> scores;
    for (int k = 0; k < 2 * 64; ++k)
      scores.push_back(static_cast<float>(std::exp(random.normal())));
    c.scores.push_back(scores);
  }
  CHECK(draws_fit(c, [](double r) { return r; }));
  CHECK_FALSE(draws_fit(c, [](double r) { return 1.05 * r; }));
}

TEST_CASE("Names of draws: by the place in the whole model, and of one sequence") {
  CacheConfig whole;
  whole.seed = 11;
  whole.layers.resize(3);
  for (verkv::LayerConfig& layer : whole.layers) layer.kv_heads = layer.query_heads = 4;
  CacheConfig part = whole;  // KV heads 2 and 3 of layers 2 and 0
  part.layers.resize(2);
  for (verkv::LayerConfig& layer : part.layers) {
    layer.kv_heads = layer.query_heads = 2;
    layer.first_global_kv_head = 2;
  }
  part.layers[0].global_layer = 2;
  part.layers[1].global_layer = 0;
  const auto same = [](const verkv::DrawId& a, const verkv::DrawId& b) {
    return a.seed == b.seed && a.sequence == b.sequence && a.layer == b.layer &&
           a.kv_head == b.kv_head;
  };
  for (std::size_t h = 0; h < 2; ++h) {
    CHECK(same(Compressor(part).draw_id(5, 0, h), Compressor(whole).draw_id(5, 2, h + 2)));
    CHECK(same(Compressor(part).draw_id(5, 1, h), Compressor(whole).draw_id(5, 0, h + 2)));
  }
  CHECK_FALSE(same(Compressor(whole).draw_id(5, 1, 0), Compressor(whole).draw_id(6, 1, 0)));
  CHECK_FALSE(same(Compressor(whole).draw_id(5, 1, 0), Compressor(whole).draw_id(5, 1, 1)));
}

TEST_CASE("Window: outgrown in whole chunks, found one chunk at a time") {
  Random random(4);
  for (int trial = 0; trial < 500; ++trial) {
    CacheConfig config;
    config.layers.resize(1);
    config.local_tokens = between(random, 0, 50);
    const std::int64_t chunk = between(random, 1, 60);
    config.chunk_tokens = chunk;
    config.sink_tokens = between(random, 0, 6);
    config.compress_from = between(random, 1, 80);
    LayerLengths lengths;
    lengths.compressed = random.below(2) == 0 ? 0 : between(random, 1, 100);
    lengths.tokens = lengths.compressed + between(random, 0, 300);
    const std::int64_t added = between(random, 0, 100);
    std::int64_t window = lengths.tokens + added - lengths.compressed;
    std::int64_t expected = 0;
    while (window - chunk >= config.local_tokens) {
      window -= chunk;
      expected += chunk;
    }
    if (lengths.compressed == 0 && expected - config.sink_tokens < *config.compress_from)
      expected = 0;
    CAPTURE(config.local_tokens, chunk, config.sink_tokens, *config.compress_from, lengths.tokens,
            lengths.compressed, added);
    CHECK(Compressor(config).outgrown(0, lengths, added) == expected);
    config.keep = 1;  // all tokens stay
    CHECK(Compressor(config).outgrown(0, lengths, added) == 0);
    config.keep = 0.5;
    config.chunk_tokens.reset();
    CHECK(Compressor(config).outgrown(0, lengths, added) == 0);
  }
}

TEST_CASE("A first compression waits for as many tokens as its basis needs") {
  CacheConfig config;
  config.layers.resize(2);
  config.layers[0].key_dim = 64;
  config.layers[1].key_dim = 128;
  config.sink_tokens = 4;
  config.local_tokens = 10;
  const auto least = [&config](std::size_t layer) {
    return Compressor(config).least_tokens(layer);
  };
  CHECK(least(0) == 128);  // a chunk, and twice 64
  CHECK(least(1) == 256);
  config.chunk_tokens = 200;
  CHECK(least(0) == 200);
  CHECK(least(1) == 256);
  config.chunk_tokens.reset();
  CHECK(least(0) == 128);
  config.sketch.kind = SketchKind::exact;
  CHECK(least(0) == 0);
  config.compress_from = 77;
  CHECK(least(0) == 77);
  config = CacheConfig{.layers = config.layers};

  // By layer: the first has enough, the second has not, and once compressed any number is enough.
  const std::vector<float> score(2000, 1.0f);
  const auto layers_of = [&](std::int64_t tokens, std::int64_t compressed) {
    const std::vector<LayerLengths> lengths(2, {tokens, compressed});
    const ImportanceView view{score.data(), 1, tokens - compressed, tokens - compressed};
    std::vector<std::size_t> layers;
    for (const HeadCompression& head :
         Compressor(config).prompt(0, lengths, std::vector{view, view}))
      layers.push_back(head.layer);
    return layers;
  };
  const std::int64_t kept = config.sink_tokens + config.local_tokens;
  CHECK(layers_of(kept + 127, 0).empty());
  CHECK(layers_of(kept + 128, 0) == std::vector<std::size_t>{0});
  CHECK(layers_of(kept + 255, 0) == std::vector<std::size_t>{0});
  CHECK(layers_of(kept + 256, 0) == std::vector<std::size_t>{0, 1});
  CHECK(layers_of(300 + config.local_tokens + 1, 300) == std::vector<std::size_t>{0, 1});
}

TEST_CASE("Window: a score is the root mean square of what the steps gave") {
  CHECK(verkv::window_score(0.0f, 0) == 0.0f);
  CHECK(verkv::window_score(0.25f, 1) == 0.5f);
  CHECK(verkv::window_score(1.0f, 4) == 0.5f);
  CHECK(verkv::window_score(0.0f, 9) == 0.0f);
}

TEST_CASE("Window: layers in turn wait for different parts of a chunk, each for its own") {
  for (const std::int64_t chunk : {1, 5, 16, 128}) {
    CacheConfig config;
    config.layers.resize(32);
    config.chunk_tokens = chunk;
    config.chunks_in_turn = true;
    const Compressor compressor(config);
    // By how many tokens each layer's window outgrows local_tokens before a chunk falls due.
    const auto due = [&](const Compressor& by, std::size_t layer, std::int64_t times) {
      LayerLengths lengths{1000 + config.local_tokens, 1000};
      while (by.outgrown(layer, lengths) < times * chunk) ++lengths.tokens;
      CHECK(by.outgrown(layer, lengths) == times * chunk);
      return lengths.tokens - 1000 - config.local_tokens;
    };
    CHECK(due(compressor, 0, 1) == chunk);
    std::vector<std::int64_t> together(static_cast<std::size_t>(chunk));
    for (std::size_t layer = 0; layer < 32; ++layer) {
      const std::int64_t wait = due(compressor, layer, 1) - chunk;
      REQUIRE(wait >= 0);
      REQUIRE(wait < chunk);
      CHECK(due(compressor, layer, 3) == wait + 3 * chunk);
      ++together[static_cast<std::size_t>(wait)];
      CacheConfig split = config;
      split.layers.resize(1);
      split.layers[0].global_layer = static_cast<std::int64_t>(layer);
      CHECK(due(Compressor(split), 0, 1) == wait + chunk);
    }
    const std::int64_t most = *std::max_element(together.begin(), together.end());
    CHECK(most <= (32 + chunk - 1) / chunk + (chunk > 1 && chunk < 32 ? 1 : 0));
  }
}

TEST_CASE("Window: each chunk has a budget of its own, as the reference has it") {
  Random random(5);
  int chunks = 0;
  for (int trial = 0; trial < 200; ++trial) {
    CAPTURE(trial);
    const Case c = random_case(random);
    const Compressor compressor(c.config);
    const std::int64_t chunk_tokens = c.config.chunk_tokens.value();
    for (std::size_t layer = 0; layer < c.config.layers.size(); ++layer) {
      const LayerLengths lengths = c.lengths[layer];
      const std::int64_t outgrown = compressor.outgrown(layer, lengths);
      if (outgrown == 0) continue;
      const std::int64_t kv_heads = c.config.layers[layer].kv_heads;
      std::vector<float> score;
      for (std::int64_t i = 0; i < kv_heads * outgrown; ++i)
        score.push_back(static_cast<float>(std::exp(random.normal())));
      const std::vector<HeadCompression> heads = compressor.window(9, layer, lengths, score);
      REQUIRE(heads.size() == static_cast<std::size_t>(kv_heads));
      std::vector<Vector> expected(heads.size());
      for (std::int64_t at = 0; at < outgrown; at += chunk_tokens, ++chunks) {
        std::vector<HeadCompression> chunk = heads;
        for (std::size_t h = 0; h < chunk.size(); ++h) {
          chunk[h].begin = lengths.compressed + at;
          chunk[h].importance = score.data() + static_cast<std::int64_t>(h) * outgrown + at;
          chunk[h].odds.resize(static_cast<std::size_t>(chunk_tokens));
        }
        const Pool pool = c.config.pool == Pool::head ? Pool::head : Pool::layer;
        const std::vector<Vector> odds = reference_odds(c.config, chunk, pool, false);
        for (std::size_t h = 0; h < odds.size(); ++h)
          expected[h].insert(expected[h].end(), odds[h].begin(), odds[h].end());
      }
      for (std::size_t h = 0; h < heads.size(); ++h) {
        CHECK(heads[h].layer == layer);
        CHECK(heads[h].head == h);
        CHECK(heads[h].begin == lengths.compressed);
        CHECK(heads[h].end() == lengths.compressed + outgrown);
        CHECK(heads[h].importance == nullptr);
        CHECK(agree(heads[h].odds, expected[h]));
      }
    }
  }
  CHECK(chunks > 300);
}

TEST_CASE("Prompt: nothing to do, and scores that are none") {
  Random random(6);
  Case c = random_case(random);
  c.config.layers.resize(1);
  c.config.layers[0].cached = true;
  c.config.layers[0].dense = false;
  c.config.layers[0].kv_heads = c.config.layers[0].query_heads = 2;
  c.config.local_tokens = 10;
  c.lengths = {{40, 0}};
  c.scores = {std::vector<float>(80, 1.0f)};
  CHECK(Compressor(c.config).prompt(0, c.lengths, c.importance()).size() == 2);
  const auto message = [&c] {
    try {
      (void)Compressor(c.config).prompt(0, c.lengths, c.importance());
    } catch (const verkv::InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  for (const float bad : {std::nanf(""), kInfinity, -1.0f}) {
    CAPTURE(bad);
    c.scores[0][40 + 35] = bad;  // of the local window, which is checked too
    CHECK(message().find("layer 0, head 1, token 35") != std::string::npos);
    c.config.keep = 1;  // checked although nothing is compressed
    CHECK(message().find("layer 0, head 1, token 35") != std::string::npos);
    c.config.keep = 0.25;
  }
  c.scores[0][40 + 35] = 1;
  c.config.keep = 1;
  CHECK(Compressor(c.config).prompt(0, c.lengths, c.importance()).empty());
  c.config.keep = 0.25;
  c.config.local_tokens = 40;
  CHECK(Compressor(c.config).prompt(0, c.lengths, c.importance()).empty());
  c.config.local_tokens = 10;
  c.config.layers[0].dense = true;
  CHECK_FALSE(Compressor(c.config).compresses(0));
  CHECK(Compressor(c.config).prompt(0, c.lengths, c.importance()).empty());
  c.config.layers[0].dense = false;
  c.config.layers[0].cached = false;
  CHECK_FALSE(Compressor(c.config).compresses(0));
  CHECK(Compressor(c.config).prompt(0, c.lengths, c.importance()).empty());
}

// ---- Bases --------------------------------------------------------------------------------------

// What complete should give to calibrate_sketch, written out.
class Tokens final : public verkv::CalibrationTokens {
 public:
  Tokens(const std::vector<float>& keys, int dim, const HeadCompression& head) : head_(head) {
    key_dim = dim;
    count = static_cast<std::int64_t>(head.odds.size());
    const std::size_t d = static_cast<std::size_t>(dim);
    centred_.assign(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(head.odds.size() * d));
    for (std::size_t j = 0; j < d; ++j) {
      double mean = 0;
      for (std::size_t i = 0; i < head.odds.size(); ++i)
        mean += static_cast<double>(keys[i * d + j]);
      mean /= static_cast<double>(count);
      for (std::size_t i = 0; i < head.odds.size(); ++i)
        centred_[i * d + j] -= static_cast<float>(mean);
    }
  }
  void centred_key(std::int64_t token, std::span<float> out_key) const override {
    std::copy_n(centred_.begin() + token * key_dim, key_dim, out_key.begin());
  }
  double weight(std::int64_t token) const override {
    const std::size_t i = static_cast<std::size_t>(token);
    const bool always = to_float(head_.odds[i]) == kInfinity;
    return always || head_.importance == nullptr ? 0.0 : static_cast<double>(head_.importance[i]);
  }

 private:
  const HeadCompression& head_;
  std::vector<float> centred_;
};

bool same(const verkv::SketchBasis& a, const verkv::SketchBasis& b) {
  const auto bits = [](verkv::Half x, verkv::Half y) { return x.bits == y.bits; };
  return a.shape.dim == b.shape.dim && a.shape.fine == b.shape.fine && a.unit == b.unit &&
         a.encode == b.encode &&
         std::equal(a.query.begin(), a.query.end(), b.query.begin(), b.query.end(), bits);
}

struct Bases {
  explicit Bases(Random& random) {
    c.config.local_tokens = 8;
    c.config.compress_from = 0;
    c.config.keep = 0.2;
    for (int i = 0; i < 2; ++i) {
      verkv::LayerConfig layer;
      layer.kv_heads = 2;
      layer.query_heads = 4;
      layer.key_dim = layer.value_dim = kDim;
      c.config.layers.push_back(layer);
      c.lengths.push_back({100, 0});
      std::vector<float> scores;
      for (int k = 0; k < 200; ++k) scores.push_back(static_cast<float>(std::exp(random.normal())));
      c.scores.push_back(scores);
      queries.emplace_back();
      for (int k = 0; k < kPositions * 4 * kDim; ++k)
        queries.back().push_back(static_cast<float>(random.normal()));
    }
    for (int k = 0; k < 4; ++k) {
      keys.emplace_back();
      for (int j = 0; j < 100 * kDim; ++j)
        keys.back().push_back(static_cast<float>(3 + random.normal()));
    }
  }
  std::vector<TensorView> views() const {
    std::vector<TensorView> result;
    for (const std::vector<float>& q : queries)
      result.push_back(verkv::token_major(q.data(), DType::f32, kPositions, 4, kDim));
    return result;
  }
  const std::vector<float>& keys_of(const HeadCompression& head) const {
    return keys[2 * head.layer + head.head];
  }
  template <class Run>
  void make(std::span<HeadCompression> heads, std::span<const TensorView> prompt_queries,
            Run&& run) const {
    Compressor(c.config).complete(
        heads,
        [this](const HeadCompression& head) {
          const Rows rows{keys_of(head).data(), DType::f32, kDim, kDim};
          return HeadRows{rows, rows, &order.directions, order.position, order.open_odds};
        },
        prompt_queries, run);
  }
  void make(std::span<HeadCompression> heads, std::span<const TensorView> prompt_queries) const {
    make(heads, prompt_queries, [](std::int64_t count, const Compressor::Task& task) {
      for (std::int64_t i = 0; i < count; ++i) task(i);
    });
  }

  static constexpr int kDim = 16;
  static constexpr int kPositions = 3;
  Case c;
  verkv::HeadOrder order;                   // of heads compressed before
  std::vector<std::vector<float>> keys;     // [layer, KV head]
  std::vector<std::vector<float>> queries;  // [layer][position][query head]
};

TEST_CASE("Bases: of the head's own keys, scores and queries, at the first compression") {
  Random random(7);
  Bases s(random);
  const Compressor compressor(s.c.config);
  const std::vector<TensorView> views = s.views();
  for (const bool with_queries : {true, false}) {
    std::vector<HeadCompression> heads = compressor.prompt(0, s.c.lengths, s.c.importance());
    REQUIRE(heads.size() == 4);
    const std::vector<HeadCompression> before = heads;  // odds by position
    s.make(heads,
           with_queries ? std::span<const TensorView>(views) : std::span<const TensorView>());
    for (std::size_t h = 0; h < heads.size(); ++h) {
      const HeadCompression& head = heads[h];
      CHECK(compressor.needs_basis(head));
      std::vector<float> own;
      for (int t = 0; with_queries && t < Bases::kPositions; ++t) {
        const auto first = s.queries[head.layer].begin() +
                           (t * 4 + 2 * static_cast<std::ptrdiff_t>(head.head)) * Bases::kDim;
        own.insert(own.end(), first, first + 2 * Bases::kDim);
      }
      CHECK(same(head.basis,
                 verkv::calibrate_sketch(2, Tokens(s.keys_of(head), Bases::kDim, before[h]), own,
                                         s.c.config.seed)));
    }
    // In another order, the same.
    std::vector<HeadCompression> backwards = compressor.prompt(0, s.c.lengths, s.c.importance());
    s.make(backwards,
           with_queries ? std::span<const TensorView>(views) : std::span<const TensorView>(),
           [](std::int64_t count, const Compressor::Task& task) {
             for (std::int64_t i = count; i-- > 0;) task(i);
           });
    for (std::size_t i = 0; i < heads.size(); ++i) CHECK(same(heads[i].basis, backwards[i].basis));
  }
}

TEST_CASE(
    "Bases: none later, none where the sketch is exact; queries are looked at where they are "
    "used") {
  Random random(8);
  Bases s(random);
  s.c.lengths[1] = {150, 50};
  s.queries[1][5] = std::nanf("");
  s.c.config.study.select = Selection::poisson;  // needs no directions of heads compressed before
  std::vector<TensorView> views = s.views();
  std::vector<HeadCompression> heads =
      Compressor(s.c.config).prompt(0, s.c.lengths, s.c.importance());
  REQUIRE(heads.size() == 4);
  s.make(heads, views);
  for (const HeadCompression& head : heads) CHECK((head.basis.shape.dim > 0) == (head.layer == 0));

  s.queries[0][(1 * 4 + 3) * Bases::kDim + 6] = kInfinity;  // position 1, head 3, coordinate 6
  views = s.views();
  try {
    s.make(heads, views);
    FAIL("a query that is not finite went through");
  } catch (const verkv::InvalidArgument& error) {
    CHECK(std::string(error.what()).find("layer 0, position 1, head 3, coordinate 6") !=
          std::string::npos);
  }

  s.c.config.sketch.kind = SketchKind::exact;
  heads = Compressor(s.c.config).prompt(0, s.c.lengths, s.c.importance());
  s.make(heads, views);
  for (const HeadCompression& head : heads) CHECK(head.basis.shape.dim == 0);
}

// ---- Draws --------------------------------------------------------------------------------------

// A head that is compressed from its prompt on, then chunk after chunk, as a backend does it.
struct Life {
  Life(Random& random, const CacheConfig& given) : config(given) {
    config.layers.resize(1);
    config.layers[0].kv_heads = config.layers[0].query_heads = 1;
    config.layers[0].key_dim = config.layers[0].value_dim = kDim;
    config.keep = 0.3;
    config.sink_tokens = 3;
    config.local_tokens = 5;
    config.chunk_tokens = 20;
    config.compress_from = 0;
    for (int k = 0; k < kTokens * kDim; ++k) {
      keys.push_back(static_cast<float>(random.normal()));
      values.push_back(static_cast<float>(random.normal()));
    }
    for (int i = 0; i < kTokens; ++i) score.push_back(static_cast<float>(random.uniform()));
  }

  // Compresses positions up to `end`; the first time as a prompt. Returns the clusters.
  verkv::Clusters compress(std::uint64_t sequence, std::int64_t end) {
    const Compressor compressor(config);
    const LayerLengths lengths{end + config.local_tokens, static_cast<std::int64_t>(odds.size())};
    const std::int64_t open = lengths.tokens - lengths.compressed;
    const ImportanceView view{score.data() + lengths.compressed, 1, open, open};
    std::vector<HeadCompression> heads =
        odds.empty()
            ? compressor.prompt(sequence, {&lengths, 1}, {&view, 1})
            : compressor.window(sequence, 0, lengths, std::span(score).subspan(odds.size(), 200));
    REQUIRE(heads.size() == 1);
    REQUIRE(heads[0].end() == end);
    compressor.complete(
        heads,
        [this](const HeadCompression&) {
          return HeadRows{{keys.data(), DType::f32, kDim, kDim},
                          {values.data(), DType::f32, kDim, kDim},
                          &order.directions,
                          order.position,
                          order.open_odds};
        },
        {}, [](std::int64_t, const Compressor::Task& task) { task(0); });
    odds.insert(odds.end(), heads[0].odds.begin(), heads[0].odds.end());
    drawn.insert(drawn.end(), heads[0].drawn.begin(), heads[0].drawn.end());
    verkv::reserve_places(order, heads[0].order);
    verkv::take_places(order, std::move(heads[0].order));
    return std::move(heads[0].clusters);
  }

  static constexpr int kDim = 16;
  static constexpr int kTokens = 400;
  CacheConfig config;
  std::vector<float> keys;
  std::vector<float> values;
  std::vector<float> score;
  std::vector<Positive16> odds;
  std::vector<std::uint32_t> drawn;
  verkv::HeadOrder order;
};

TEST_CASE("Draws: a redraw gives what compressing under that draw gives, chunk after chunk") {
  for (const Selection select : {Selection::poisson, Selection::spread, Selection::topk}) {
    for (const SketchKind kind : {SketchKind::exact, SketchKind::calibrated}) {
      CAPTURE(static_cast<int>(select), static_cast<int>(kind));
      CacheConfig config;
      config.study.select = select;
      config.sketch.kind = kind;
      const auto life = [&](std::uint64_t sequence, const std::vector<std::int64_t>& ends) {
        Random random(9);
        Life result(random, config);
        for (const std::int64_t end : ends) result.compress(sequence, end);
        return result;
      };
      const Life five = life(5, {150, 170, 210});
      const Life six = life(6, {150, 170, 210});
      const Life whole = life(6, {150, 210});  // two chunks and one as three at a time
      CHECK(six.drawn == whole.drawn);
      CHECK(six.order.position == whole.order.position);
      CHECK(six.order.walk_end == whole.order.walk_end);
      CHECK((five.drawn != six.drawn) == (select != Selection::topk));
      const verkv::DrawId id = Compressor(five.config).draw_id(6, 0, 0);
      CHECK(verkv::draw_places(id, select, five.odds, 0, five.order) == six.drawn);
      CHECK(five.order.walk_end == std::vector<std::uint32_t>{150, 170, 190, 210});
    }
  }
}

TEST_CASE("Draws: spread, each chunk has its number of tokens, and each token its probability") {
  Random random(10);
  CacheConfig config;
  config.study.select = Selection::spread;
  Life life(random, config);
  life.compress(0, 150);
  life.compress(0, 190);
  constexpr std::int64_t kTrials = 4000;
  std::vector<std::int64_t> count(life.odds.size());
  const std::vector<std::size_t> ends = {150, 170, 190};
  for (std::int64_t trial = 0; trial < kTrials; ++trial) {
    const verkv::DrawId id =
        Compressor(life.config).draw_id(static_cast<std::uint64_t>(trial), 0, 0);
    const std::vector<std::uint32_t> drawn =
        verkv::draw_places(id, Selection::spread, life.odds, 0, life.order);
    for (const std::uint32_t place : drawn) ++count[place];
    std::size_t begin = 0;
    for (const std::size_t end : ends) {
      double expected = 0;
      for (std::size_t i = begin; i < end; ++i) expected += inclusion_of(life.odds[i]);
      const auto in = [&](std::uint32_t place) { return place >= begin && place < end; };
      const double size = static_cast<double>(std::count_if(drawn.begin(), drawn.end(), in));
      REQUIRE(std::fabs(size - expected) < 1);
      begin = end;
    }
  }
  for (std::size_t i = 0; i < count.size(); ++i) {
    CAPTURE(i);
    CHECK(verkv::reference::binomial_fits(count[i], kTrials, inclusion_of(life.odds[i]),
                                          static_cast<double>(count.size())));
  }
}

// ---- The order ----------------------------------------------------------------------------------

// Tokens in clusters around random centres; the cluster of each.
struct Clusters {
  Clusters(Random& random, std::size_t clusters, std::size_t each, bool by_value) {
    constexpr std::size_t dim = static_cast<std::size_t>(kDim);
    std::vector<std::vector<double>> centre(clusters, std::vector<double>(dim));
    for (auto& row : centre) {
      for (double& x : row) x = 10 * random.normal();
    }
    for (std::size_t i = 0; i < clusters * each; ++i) {
      cluster.push_back(i % clusters);
      for (std::size_t j = 0; j < dim; ++j) {
        const float near = static_cast<float>(centre[i % clusters][j] + 0.01 * random.normal());
        keys.push_back(by_value ? 1.0f : near);
        values.push_back(by_value ? near : 1.0f);
      }
    }
    const std::vector<Positive16> odds(cluster.size(), verkv::stored_odds(0.2));
    directions.key = verkv::order_directions(rows(keys), odds, nullptr, verkv::kOrderKeys, 1);
    directions.value = verkv::order_directions(rows(values), odds, nullptr, verkv::kOrderValues,
                                               verkv::kOrderValueWeight);
  }
  static Rows rows(const std::vector<float>& all) { return {all.data(), DType::f32, kDim, kDim}; }

  std::vector<std::uint32_t> order() const {
    std::vector<std::uint32_t> position(cluster.size());
    for (std::size_t i = 0; i < position.size(); ++i) position[i] = static_cast<std::uint32_t>(i);
    verkv::spread_order(directions, rows(keys), rows(values), position);
    return position;
  }

  static constexpr int kDim = 24;
  std::vector<float> keys;
  std::vector<float> values;
  std::vector<std::size_t> cluster;
  verkv::OrderDirections directions;
};

std::size_t changes(const Clusters& c, const std::vector<std::uint32_t>& order) {
  std::size_t count = 0;
  for (std::size_t k = 1; k < order.size(); ++k)
    count += c.cluster[order[k]] != c.cluster[order[k - 1]];
  return count;
}

TEST_CASE("The order is a permutation, always the same, and clusters of tokens stay together") {
  for (const bool by_value : {false, true}) {
    Random random(11);
    const Clusters c(random, 8, 16, by_value);
    const std::vector<std::uint32_t> order = c.order();
    CHECK(order == c.order());
    std::vector<std::uint32_t> sorted = order;
    std::sort(sorted.begin(), sorted.end());
    for (std::size_t i = 0; i < sorted.size(); ++i) REQUIRE(sorted[i] == i);
    CHECK(changes(c, order) == 7);
    CHECK(changes(c, sorted) == 127);  // in the order of positions none does
  }
}

TEST_CASE("The order of equal tokens is that of their positions") {
  Random random(12);
  Clusters c(random, 1, 50, false);
  std::fill(c.keys.begin(), c.keys.end(), 2.0f);
  const std::vector<std::uint32_t> order = c.order();
  CHECK(std::is_sorted(order.begin(), order.end()));
}

TEST_CASE("The order knows tokens of a later chunk by the first directions, whatever their size") {
  Random random(13);
  Clusters c(random, 8, 16, false);
  for (const float size : {1e-30f, 1.0f, 1e30f}) {
    std::vector<float> sized = c.keys;
    for (float& x : sized) x *= size;
    std::vector<std::uint32_t> chunk;
    for (std::uint32_t i = 30; i < 94; ++i) chunk.push_back(i);
    verkv::spread_order(c.directions, Clusters::rows(sized), Clusters::rows(c.values), chunk);
    std::vector<std::uint32_t> sorted = chunk;
    std::sort(sorted.begin(), sorted.end());
    CHECK(sorted.front() == 30);
    CHECK(sorted.back() == 93);
    CHECK(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end());
    if (size == 1.0f) CHECK(changes(c, chunk) == 7);
  }
}

// ---- Clusters -----------------------------------------------------------------------------------

// Of tokens with these values and odds, as the definition has it, in double.
struct Expected {
  std::vector<double> centroid;
  double spread = 0;
};

Expected cluster_of(const std::vector<std::vector<double>>& value,
                    const std::vector<double>& odds) {
  Expected result;
  result.centroid.assign(value.front().size(), 0.0);
  double total = 0;
  for (const double rho : odds) total += std::isfinite(rho) ? 1 : 0;
  if (total == 0) return result;
  double square = 0;
  for (const bool spread : {false, true}) {
    for (std::size_t i = 0; i < odds.size(); ++i) {
      if (!std::isfinite(odds[i])) continue;
      for (std::size_t j = 0; j < value[i].size(); ++j) {
        if (!spread) result.centroid[j] += value[i][j] / total;
        if (spread) square += std::pow(value[i][j] - result.centroid[j], 2) / total;
      }
    }
  }
  result.spread = std::sqrt(square);
  return result;
}

TEST_CASE("Clusters: centroid and spread of the tokens of L, 64 at a time, in the rows' type") {
  Random random(14);
  constexpr std::size_t kTokens = 200;
  constexpr std::size_t kDim = 5;
  std::vector<float> values(kTokens * kDim);
  for (float& x : values) x = static_cast<float>(random.normal());
  std::vector<std::uint32_t> position(kTokens);
  for (std::size_t i = 0; i < kTokens; ++i)
    position[i] = static_cast<std::uint32_t>(i * 77 % kTokens);
  std::vector<Positive16> odds;
  for (std::size_t i = 0; i < kTokens; ++i) {
    // The second cluster has nothing that can be drawn, the third nothing of L.
    const double r = i / 64 == 1 ? (i % 3 == 0 ? 1.0 : 0.0) : i / 64 == 2 ? 1.0 : random.uniform();
    odds.push_back(verkv::stored_odds(r));
  }
  const Rows rows{values.data(), DType::f32, kDim, static_cast<int>(kDim)};
  const verkv::Clusters clusters = verkv::make_clusters(rows, position, odds);
  REQUIRE(clusters.spread.size() == 4);
  REQUIRE(clusters.centroids.size() == 4 * kDim * sizeof(float));
  std::vector<float> centroid(4 * kDim);
  std::memcpy(centroid.data(), clusters.centroids.data(), clusters.centroids.size());
  for (std::size_t c = 0; c < 4; ++c) {
    std::vector<std::vector<double>> value;
    std::vector<double> rho;
    for (std::size_t i = 64 * c; i < std::min(kTokens, 64 * c + 64); ++i) {
      const float* row = values.data() + position[i] * kDim;
      value.emplace_back(row, row + kDim);
      rho.push_back(static_cast<double>(to_float(odds[i])));
    }
    const Expected expected = cluster_of(value, rho);
    for (std::size_t j = 0; j < kDim; ++j) {
      CHECK(std::fabs(static_cast<double>(centroid[c * kDim + j]) - expected.centroid[j]) <
            verkv::tolerance::kThroughBinary32);
    }
    // 8 bits of mantissa.
    CHECK(std::fabs(static_cast<double>(to_float(clusters.spread[c])) - expected.spread) <=
          expected.spread / 256);
  }
  CHECK(centroid[2 * kDim] == 0);
  CHECK(to_float(clusters.spread[2]) == 0);

  // Halves are rounded once.
  std::vector<verkv::Half> half;
  for (const float x : values) half.push_back(verkv::to_half(x));
  const Rows halves{half.data(), DType::f16, kDim, static_cast<int>(kDim)};
  CHECK(verkv::make_clusters(halves, position, odds).centroids.size() == 4 * kDim * 2);
}

TEST_CASE("Clusters: a chunk completes the last cluster, so that all are as if made at once") {
  Random random(15);
  CacheConfig config;
  Life life(random, config);
  std::vector<std::byte> centroids;
  std::vector<Positive16> spread;
  for (const std::int64_t end : {150, 170, 210, 250, 270}) {
    const verkv::Clusters more = life.compress(2, end);
    const std::size_t row = Life::kDim * sizeof(float);
    centroids.resize(static_cast<std::size_t>(verkv::clusters_of(end)) * row);
    spread.resize(static_cast<std::size_t>(verkv::clusters_of(end)));
    REQUIRE(more.centroids.size() == more.spread.size() * row);
    std::copy(more.centroids.begin(), more.centroids.end(),
              centroids.end() - static_cast<std::ptrdiff_t>(more.centroids.size()));
    std::copy(more.spread.begin(), more.spread.end(),
              spread.end() - static_cast<std::ptrdiff_t>(more.spread.size()));
    const Rows rows{life.values.data(), DType::f32, Life::kDim, Life::kDim};
    const verkv::Clusters whole = verkv::make_clusters(rows, life.order.position, life.odds);
    CHECK(centroids == whole.centroids);
    REQUIRE(spread.size() == whole.spread.size());
    for (std::size_t c = 0; c < spread.size(); ++c) CHECK(spread[c].bits == whole.spread[c].bits);
  }
  config.study.estimator = verkv::Estimator::plain;
  Life plain(random, config);
  CHECK(plain.compress(2, 150).centroids.empty());
  CHECK(plain.order.open_odds.empty());
}

}  // namespace
