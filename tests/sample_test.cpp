// The draw is tested for what PoissonComp needs: each token with its own probability, all of them
// independently, the same everywhere; a spread sample for what it needs instead: a fixed number, no
// two tokens that attract each other. A test of randomness that accepts everything proves nothing,
// so each one also runs on a sampler with one deliberate fault and has to reject it.

#include <verkv/sample.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "catch.hpp"
#include "reference/reference.hpp"
#include "reference/statistics.hpp"

namespace {

using verkv::DrawId;
using verkv::reference::Random;

// One redraw of a whole cache is one sequence number.
DrawId redraw(std::int64_t trial) {
  DrawId key;
  key.seed = 0x5eed;
  key.sequence = static_cast<std::uint64_t>(trial);
  key.layer = 3;
  key.kv_head = 1;
  return key;
}

bool honest(const DrawId& key, std::uint64_t position, double r) {
  return verkv::drawn(key, position, r);
}

constexpr std::int64_t kTrials = 40000;

std::vector<double> probabilities() {
  std::vector<double> r;
  Random random(21);
  for (int i = 0; i < 64; ++i) r.push_back(random.uniform(0.02, 0.9));
  r.push_back(0.001);
  r.push_back(0.999);
  return r;
}

// Each count against Binomial(trials, r), by Chernoff's bound.
template <class Draw>
bool counts_fit(Draw&& draw) {
  const std::vector<double> r = probabilities();
  std::vector<std::int64_t> count(r.size(), 0);
  for (std::int64_t trial = 0; trial < kTrials; ++trial) {
    for (std::size_t i = 0; i < r.size(); ++i) count[i] += draw(redraw(trial), i, r[i]);
  }
  bool fits = true;
  for (std::size_t i = 0; i < r.size(); ++i) {
    fits = fits &&
           verkv::reference::binomial_fits(count[i], kTrials, r[i], static_cast<double>(r.size()));
  }
  return fits;
}

// Independent draws make the sample size vary by sigma^2 = sum r (1 - r). The mean square of
// (size - sum r) over N redraws has variance (2 sigma^4 + kappa_4) / N, kappa_4 = sum v (1 - 6 v),
// v = r (1 - r); it is near normal, and 6 deviations are passed once in 5e8.
template <class Draw>
bool size_variance_fits(Draw&& draw) {
  const std::vector<double> r = probabilities();
  double mean = 0;
  double variance = 0;
  double kappa = 0;
  for (const double x : r) {
    const double v = x * (1 - x);
    mean += x;
    variance += v;
    kappa += v * (1 - 6 * v);
  }
  double square = 0;
  for (std::int64_t trial = 0; trial < kTrials; ++trial) {
    double size = 0;
    for (std::size_t i = 0; i < r.size(); ++i) size += draw(redraw(trial), i, r[i]) ? 1 : 0;
    square += (size - mean) * (size - mean);
  }
  const double n = static_cast<double>(kTrials);
  const double deviation = std::sqrt((2 * variance * variance + kappa) / n);
  return std::fabs(square / n - variance) <= 6 * deviation;
}

// Normalised products of two tokens' deviations have mean 0 and variance 1 where the tokens are
// independent, and none is above the product of the largest deviations: Bernstein, over all pairs.
template <class Draw>
bool covariances_vanish(Draw&& draw) {
  const std::vector<double> r = {0.5, 0.5, 0.3, 0.3, 0.7, 0.2, 0.8, 0.5, 0.4, 0.6, 0.25, 0.5};
  const std::size_t n = r.size();
  std::vector<double> covariance(n * n, 0.0);
  std::vector<double> z(n);
  for (std::int64_t trial = 0; trial < kTrials; ++trial) {
    for (std::size_t i = 0; i < n; ++i) {
      z[i] = ((draw(redraw(trial), i, r[i]) ? 1 : 0) - r[i]) / std::sqrt(r[i] * (1 - r[i]));
    }
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t j = 0; j < i; ++j) covariance[i * n + j] += z[i] * z[j];
    }
  }
  const auto largest = [&](std::size_t i) {
    return std::max(r[i], 1 - r[i]) / std::sqrt(r[i] * (1 - r[i]));
  };
  bool vanish = true;
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      const double bound = verkv::reference::bernstein_bound(
          static_cast<double>(kTrials), largest(i) * largest(j), static_cast<double>(n * n) / 2);
      vanish = vanish && std::fabs(covariance[i * n + j]) <= bound;
    }
  }
  return vanish;
}

// Two streams at r = 1/2, position by position: products of +-1, as above with jump 1.
template <class Draw>
bool streams_independent(const DrawId& a, const DrawId& b, Draw&& draw) {
  double covariance = 0;
  for (std::int64_t position = 0; position < kTrials; ++position) {
    const auto at = static_cast<std::uint64_t>(position);
    covariance += draw(a, at, 0.5) == draw(b, at, 0.5) ? 1 : -1;
  }
  return std::fabs(covariance) <=
         verkv::reference::bernstein_bound(static_cast<double>(kTrials), 1, 10);
}

TEST_CASE("each token is drawn with its own probability") {
  CHECK(counts_fit(honest));
  SECTION("5 % more is noticed") {
    CHECK_FALSE(counts_fit([](const DrawId& key, std::uint64_t position, double r) {
      return verkv::drawn(key, position, 1.05 * r);
    }));
  }
  SECTION("one token of 66 that is never drawn is noticed") {
    CHECK_FALSE(counts_fit([](const DrawId& key, std::uint64_t position, double r) {
      return position != 64 && verkv::drawn(key, position, r);
    }));
  }
}

TEST_CASE("the sample size varies as independent draws make it") {
  CHECK(size_variance_fits(honest));
  SECTION("draws shared by neighbours are noticed") {
    CHECK_FALSE(size_variance_fits([](const DrawId& key, std::uint64_t position, double r) {
      return verkv::drawn(key, position / 2, r);
    }));
  }
  SECTION("a sample of nearly fixed size is noticed") {
    // Systematic sampling: one uniform number a redraw, token i taken where the running sum of r
    // passes an integer offset by it. Every inclusion probability is right; nothing is independent.
    const std::vector<double> r = probabilities();
    const auto systematic = [&](const DrawId& key, std::uint64_t position, double) {
      double before = static_cast<double>(verkv::draw_bits(key, 0)) * 0x1p-64;
      for (std::size_t i = 0; i < position; ++i) before += r[i];
      return std::floor(before + r[position]) > std::floor(before);
    };
    CHECK_FALSE(size_variance_fits(systematic));
    CHECK(counts_fit(systematic));
  }
}

TEST_CASE("tokens are drawn independently of each other") {
  CHECK(covariances_vanish(honest));
  SECTION("draws shared by neighbours are noticed") {
    CHECK_FALSE(covariances_vanish([](const DrawId& key, std::uint64_t position, double r) {
      return verkv::drawn(key, position / 2, r);
    }));
  }
  SECTION("a weak dependence is noticed: every eighth redraw shares one number") {
    CHECK_FALSE(covariances_vanish([](const DrawId& key, std::uint64_t position, double r) {
      return verkv::drawn(key, key.sequence % 8 == 0 ? 0 : position, r);
    }));
  }
}

TEST_CASE("streams differ in every field of their name") {
  DrawId base;
  base.seed = 7;
  base.sequence = 11;
  base.layer = 5;
  base.kv_head = 2;
  std::vector<DrawId> others(10, base);
  others[0].seed = 8;
  others[1].seed |= std::uint64_t{1} << 40;
  others[2].sequence = 12;
  others[3].sequence |= std::uint64_t{1} << 40;
  others[4].layer = 6;
  others[5].kv_head = 3;
  std::swap(others[6].layer, others[6].kv_head);
  std::swap(others[7].seed, others[7].sequence);
  others[8].layer = 0xffff;
  others[9].kv_head = 0xffff;
  for (std::size_t i = 0; i < others.size(); ++i) {
    INFO("stream " << i);
    CHECK(streams_independent(base, others[i], honest));
  }
  SECTION("a name that leaves out the head is noticed") {
    CHECK_FALSE(
        streams_independent(base, others[5], [](DrawId key, std::uint64_t position, double r) {
          key.kv_head = 0;
          return verkv::drawn(key, position, r);
        }));
  }
}

TEST_CASE("a draw depends on its name and position only") {
  const DrawId key = redraw(5);
  std::vector<bool> forward;
  for (std::uint64_t i = 0; i < 1000; ++i) forward.push_back(verkv::drawn(key, i, 0.3));
  for (std::uint64_t i = 1000; i-- > 0;) {
    CHECK(verkv::drawn(key, i, 0.3) == forward[static_cast<std::size_t>(i)]);
  }
  CHECK(verkv::draw_bits(key, 17) == verkv::draw_bits(redraw(5), 17));
  CHECK(verkv::draw_bits(key, 0xffffffffull) != verkv::draw_bits(key, 0));
}

// Pinned: a change of the stream's layout would silently change every sample that exists.
TEST_CASE("draw_bits is the first two words of Philox at (position, layer | head, sequence)") {
  DrawId key;
  key.seed = 0x299f31d0a4093822ull;
  key.sequence = 0x0370734413198a2eull;
  key.layer = 0x85a3;
  key.kv_head = 0x08d3;
  CHECK(verkv::draw_bits(key, 0x243f6a88) == 0xd16cfe0994fdccebull);
}

TEST_CASE("more probability never loses a token") {
  const DrawId key = redraw(6);
  for (std::uint64_t i = 0; i < 2000; ++i) {
    bool before = false;
    for (double r = 0; r <= 1; r += 0.05) {
      const bool now = verkv::drawn(key, i, r);
      REQUIRE((now || !before));
      before = now;
    }
  }
}

TEST_CASE("probabilities 0 and 1, tiny, beyond, not a number") {
  for (std::uint64_t i = 0; i < 10000; ++i) {
    const DrawId key = redraw(static_cast<std::int64_t>(i));
    REQUIRE(verkv::drawn(key, i, 1));
    REQUIRE(verkv::drawn(key, i, 1.5));
    REQUIRE_FALSE(verkv::drawn(key, i, 0));
    REQUIRE_FALSE(verkv::drawn(key, i, -0.5));
    REQUIRE_FALSE(verkv::drawn(key, i, 1e-30));
    REQUIRE_FALSE(verkv::drawn(key, i, std::numeric_limits<double>::quiet_NaN()));
    REQUIRE(verkv::drawn(key, i, 1 - 0x1p-53) == (verkv::draw_bits(key, i) < ~std::uint64_t{2047}));
  }
}

// ---- Ordered pivotal sampling ------------------------------------------------------------------

struct Walk {
  std::vector<std::uint32_t> position;
  std::vector<double> r;
};

Walk random_walk(Random& random, std::size_t n) {
  Walk walk;
  for (std::size_t i = 0; i < n; ++i) {
    walk.position.push_back(static_cast<std::uint32_t>(i * 11 % n + 100));
    walk.r.push_back(random.below(8) == 0 ? random.uniform(0.9, 1) : random.uniform(0.01, 0.6));
  }
  return walk;
}

// The walk of most tests: also tokens that are always and never in.
Walk mixed_walk() {
  Random random(31);
  Walk walk = random_walk(random, 29);
  walk.r[3] = 1;
  walk.r[4] = 0;
  walk.r[5] = 0.001;
  walk.r[6] = 0.999;
  walk.r[28] = 0;
  return walk;
}

using Kept = std::vector<std::uint8_t>;

Kept spread(const DrawId& id, const Walk& walk) {
  Kept kept(walk.r.size(), 7);
  verkv::pivotal_draw(id, walk.position, walk.r, kept);
  return kept;
}

template <class Draw>
bool walk_counts_fit(Draw&& draw) {
  const Walk walk = mixed_walk();
  std::vector<std::int64_t> count(walk.r.size());
  for (std::int64_t trial = 0; trial < kTrials; ++trial) {
    const Kept kept = draw(redraw(trial), walk);
    for (std::size_t i = 0; i < kept.size(); ++i) count[i] += kept[i];
  }
  bool fits = true;
  for (std::size_t i = 0; i < count.size(); ++i) {
    fits = fits && verkv::reference::binomial_fits(count[i], kTrials, walk.r[i],
                                                   static_cast<double>(count.size()));
  }
  return fits;
}

// Whether every sample has the expected number of tokens, rounded up or down.
template <class Draw>
bool walk_size_is_fixed(Draw&& draw) {
  const Walk walk = mixed_walk();
  double expected = 0;
  for (const double x : walk.r) expected += x;
  bool is_fixed = true;
  for (std::int64_t trial = 0; trial < 2000; ++trial) {
    double size = 0;
    for (const std::uint8_t kept : draw(redraw(trial), walk)) size += kept;
    is_fixed = is_fixed && std::fabs(size - expected) < 1;
  }
  return is_fixed;
}

// Whether no pair attracts, and neighbours of the order repel. Products of two deviations are at
// most 1 in size; where their mean is not above 0, their sum passes Bernstein's bound with
// probability kFalseAlarm.
template <class Draw>
bool walk_repels(Draw&& draw) {
  const Walk walk = mixed_walk();
  const std::size_t n = walk.r.size();
  std::vector<double> product(n * n);
  for (std::int64_t trial = 0; trial < kTrials; ++trial) {
    const Kept kept = draw(redraw(trial), walk);
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t j = 0; j < i; ++j)
        product[i * n + j] += (kept[i] - walk.r[i]) * (kept[j] - walk.r[j]);
    }
  }
  const double trials = static_cast<double>(kTrials);
  bool repels = true;
  double neighbours = 0;
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      const double most = std::max(walk.r[i], 1 - walk.r[i]) * std::max(walk.r[j], 1 - walk.r[j]);
      const double bound = verkv::reference::bernstein_bound(trials * most * most, 2 * most,
                                                             static_cast<double>(n * n));
      repels = repels && product[i * n + j] <= bound;
    }
    if (i > 0) neighbours += product[i * n + i - 1];
  }
  // Of independent draws the products are uncorrelated and their sum has less variance than that.
  const double size = static_cast<double>(n - 1);
  return repels && neighbours < -verkv::reference::bernstein_bound(trials * size, size, 1);
}

Kept one_uniform_for_all(const DrawId& id, const Walk& walk) {
  Kept kept;
  for (const double r : walk.r) kept.push_back(verkv::draw_uniform(id, 0) < r ? 1 : 0);
  return kept;
}

Kept independent(const DrawId& id, const Walk& walk) {
  Kept kept;
  for (std::size_t i = 0; i < walk.r.size(); ++i)
    kept.push_back(verkv::drawn(id, walk.position[i], walk.r[i]) ? 1 : 0);
  return kept;
}

TEST_CASE("a spread sample: each token with its own probability") {
  CHECK(walk_counts_fit(spread));
  SECTION("5 % more is noticed") {
    CHECK_FALSE(walk_counts_fit([](const DrawId& id, Walk walk) {
      for (double& r : walk.r) r *= 1.05;
      return spread(id, walk);
    }));
  }
  SECTION("a duel that the stronger one always wins is noticed") {
    CHECK_FALSE(walk_counts_fit([](const DrawId& id, Walk walk) {
      for (std::size_t i = 0; i + 1 < walk.r.size(); i += 2) {
        const double both = walk.r[i] + walk.r[i + 1];
        if (both >= 1) continue;
        const bool first = walk.r[i] > walk.r[i + 1];
        walk.r[i] = first ? both : 0;
        walk.r[i + 1] = first ? 0 : both;
      }
      return spread(id, walk);
    }));
  }
}

TEST_CASE("a spread sample: its size is fixed to within one") {
  CHECK(walk_size_is_fixed(spread));
  CHECK_FALSE(walk_size_is_fixed(independent));
}

TEST_CASE("a spread sample: no two tokens attract, neighbours repel") {
  CHECK(walk_repels(spread));
  SECTION("one number for all is noticed, though each probability is right") {
    CHECK(walk_counts_fit(one_uniform_for_all));
    CHECK_FALSE(walk_repels(one_uniform_for_all));
  }
  SECTION("independent draws are told apart") { CHECK_FALSE(walk_repels(independent)); }
}

// The samples of a walk and their probabilities, by following both ends of every duel.
void follow(const std::vector<double>& r, std::size_t next, std::size_t hand, double a,
            std::uint32_t kept, double probability, std::vector<double>& out_of) {
  if (probability == 0) return;
  if (next == r.size()) {
    out_of[kept | (std::uint32_t{1} << hand)] += probability * a;
    out_of[kept] += probability * (1 - a);
    return;
  }
  const double b = r[next];
  if (a + b < 1) {
    follow(r, next + 1, hand, a + b, kept, probability * a / (a + b), out_of);
    follow(r, next + 1, next, a + b, kept, probability * b / (a + b), out_of);
  } else {
    const double hand_is_in = (1 - b) / (2 - a - b);
    follow(r, next + 1, next, a + b - 1, kept | (std::uint32_t{1} << hand),
           probability * hand_is_in, out_of);
    follow(r, next + 1, hand, a + b - 1, kept | (std::uint32_t{1} << next),
           probability * (1 - hand_is_in), out_of);
  }
}

std::vector<double> samples_of(const std::vector<double>& r) {
  std::vector<double> of(std::size_t{1} << r.size());
  follow(r, 1, 0, r[0], 0, 1, of);
  return of;
}

TEST_CASE("a spread sample: every sample as often as the duels say") {
  Random random(32);
  for (int trial = 0; trial < 3; ++trial) {
    const Walk walk = random_walk(random, 5);
    const std::vector<double> of = samples_of(walk.r);
    std::vector<std::int64_t> count(of.size());
    for (std::int64_t draw = 0; draw < kTrials; ++draw) {
      const Kept kept = spread(redraw(draw), walk);
      std::size_t sample = 0;
      for (std::size_t i = 0; i < kept.size(); ++i) sample |= std::size_t{kept[i]} << i;
      ++count[sample];
    }
    for (std::size_t sample = 0; sample < of.size(); ++sample) {
      CAPTURE(trial, sample);
      CHECK(verkv::reference::binomial_fits(count[sample], kTrials, of[sample],
                                            static_cast<double>(of.size())));
    }
  }
}

// What Bernstein's inequality is derived from, for coefficients of one sign.
TEST_CASE("a spread sample: exponential moments are at most those of independent draws") {
  Random random(33);
  for (int trial = 0; trial < 300; ++trial) {
    const Walk walk = random_walk(random, 2 + random.below(9));
    const std::vector<double> of = samples_of(walk.r);
    std::vector<double> coefficient;
    for (std::size_t i = 0; i < walk.r.size(); ++i)
      coefficient.push_back(std::exp(random.normal()));
    for (const double s : {-3.0, -0.3, 0.3, 3.0}) {
      double together = 0;
      for (std::size_t sample = 0; sample < of.size(); ++sample) {
        double sum = 0;
        for (std::size_t i = 0; i < coefficient.size(); ++i)
          sum += (sample >> i & 1) != 0 ? coefficient[i] : 0.0;
        together += of[sample] * std::exp(s * sum);
      }
      double apart = 1;
      for (std::size_t i = 0; i < coefficient.size(); ++i)
        apart *= 1 + walk.r[i] * (std::exp(s * coefficient[i]) - 1);
      CAPTURE(trial, s, together, apart);
      CHECK(together <= apart * (1 + 1e-9));
    }
  }
}

TEST_CASE("a spread sample: nothing, one token, probabilities 0, 1, beyond, not a number") {
  CHECK(spread(redraw(0), {}).empty());
  const double nan = std::numeric_limits<double>::quiet_NaN();
  std::int64_t alone = 0;
  std::int64_t halves = 0;
  for (std::int64_t trial = 0; trial < kTrials; ++trial) {
    const DrawId id = redraw(trial);
    alone += spread(id, {{9}, {0.25}})[0];
    const Kept kept = spread(id, {{9, 3, 4, 8, 2, 1}, {1, 0.5, 0, 1.5, nan, 0.5}});
    halves += kept[1];
    REQUIRE(kept == Kept{1, kept[1], 0, 1, 0, static_cast<std::uint8_t>(1 - kept[1])});
  }
  CHECK(verkv::reference::binomial_fits(alone, kTrials, 0.25, 1));
  CHECK(verkv::reference::binomial_fits(halves, kTrials, 0.5, 1));
}

// ---- Top-k -------------------------------------------------------------------------------------

std::vector<std::uint8_t> top_k(const std::vector<float>& score, std::size_t k) {
  std::vector<std::uint32_t> scratch(score.size());
  std::vector<std::uint8_t> kept(score.size(), 7);
  verkv::select_top_k(std::span<const float>(score), k, std::span<std::uint32_t>(scratch),
                      std::span<std::uint8_t>(kept));
  return kept;
}

TEST_CASE("top-k against a stable sort, ties to the lower index") {
  Random random(22);
  for (int trial = 0; trial < 300; ++trial) {
    const std::size_t n = random.below(200);
    const std::size_t levels = 1 + random.below(50);
    std::vector<float> score;
    for (std::size_t i = 0; i < n; ++i) {
      score.push_back(static_cast<float>(random.below(levels)) / static_cast<float>(levels));
    }
    const std::size_t k = random.below(n + 3);
    std::vector<std::uint8_t> expected(n, 0);
    const auto order =
        verkv::reference::descending(std::vector<double>(score.begin(), score.end()));
    for (std::size_t i = 0; i < std::min(k, n); ++i) expected[order[i]] = 1;
    INFO("trial " << trial << ", n " << n << ", k " << k);
    REQUIRE(top_k(score, k) == expected);
  }
}

TEST_CASE("top-k edges") {
  CHECK(top_k({}, 0).empty());
  CHECK(top_k({}, 5).empty());
  CHECK(top_k({1, 2, 3}, 0) == std::vector<std::uint8_t>{0, 0, 0});
  CHECK(top_k({1, 2, 3}, 1) == std::vector<std::uint8_t>{0, 0, 1});
  CHECK(top_k({1, 2, 3}, 3) == std::vector<std::uint8_t>{1, 1, 1});
  CHECK(top_k({1, 2, 3}, 9) == std::vector<std::uint8_t>{1, 1, 1});
  CHECK(top_k({5, 5, 5, 5}, 2) == std::vector<std::uint8_t>{1, 1, 0, 0});
  CHECK(top_k({0.0f, -0.0f, 0.0f}, 1) == std::vector<std::uint8_t>{1, 0, 0});
}

}  // namespace
