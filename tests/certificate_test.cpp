#include <verkv/certificate.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include <verkv/sample.hpp>
#include <verkv/shrinkage.hpp>

#include "catch.hpp"
#include "reference/reference.hpp"
#include "reference/statistics.hpp"
#include "tolerance.hpp"

namespace {

using verkv::TailTerms;
using verkv::reference::LowCase;
using verkv::reference::Random;
using verkv::reference::random_low_case;
using Vector = std::vector<double>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

TailTerms terms_of(const Vector& w, const Vector& rho) {
  return verkv::tail_terms<double, double>(w, rho, verkv::shrinkage_beta<double, double>(w, rho));
}

double certificate_of(const Vector& w, const Vector& rho, double denominator, double delta) {
  return verkv::certificate(terms_of(w, rho), denominator, verkv::log_two_over(delta));
}

TEST_CASE("odds form against Lemma 1 in the paper's terms") {
  Random random(41);
  for (int trial = 0; trial < 1000; ++trial) {
    const LowCase c = random_low_case(random, 1 + random.below(100));
    const double delta = std::pow(10.0, random.uniform(-6, -0.05));
    const TailTerms terms = terms_of(c.w, c.odds());
    const auto expected = verkv::reference::terms(c.w, c.r);
    INFO("trial " << trial << ", n " << c.w.size());
    const auto agree = [](double a, double b) {
      return std::fabs(a - b) <=
             std::max(verkv::tolerance::kNothing, verkv::tolerance::kFormula * std::fabs(b));
    };
    REQUIRE(agree(terms.beta, expected.beta));
    REQUIRE(agree(terms.variance, expected.variance));
    REQUIRE(agree(terms.max_jump, expected.max_jump));
    REQUIRE(agree(terms.mean_square_error(),
                  verkv::reference::mean_square_error(c.w, c.r, expected.lambda)));
    REQUIRE(agree(certificate_of(c.w, c.odds(), c.denominator, delta),
                  verkv::reference::certificate(expected, c.denominator, delta)));
  }
}

TEST_CASE("settled tokens join with the terms that they would have had") {
  Random random(47);
  for (int trial = 0; trial < 500; ++trial) {
    const LowCase c = random_low_case(random, 2 + random.below(100));
    const Vector rho = c.odds();
    const TailTerms all = terms_of(c.w, rho);
    verkv::SettledTerms settled;
    Vector open_w, open_rho;
    for (std::size_t i = 0; i < c.w.size(); ++i) {
      const double w = c.w[i];
      if (random.below(2) == 0) {
        open_w.push_back(w);
        open_rho.push_back(rho[i]);
      } else if (w > all.beta * rho[i]) {
        settled.above_weight += w;
        settled.above_odds += rho[i];
        settled.above_largest_odds =
            std::max(settled.above_largest_odds, static_cast<float>(std::max(rho[i], 1.0)));
      } else if (w > 0) {
        settled.below_variance += w * w / rho[i];
        settled.below_jump =
            std::max(settled.below_jump, static_cast<float>(w / rho[i] * std::max(rho[i], 1.0)));
      }
    }
    const TailTerms open = verkv::tail_terms<double, double>(open_w, open_rho, all.beta);
    const TailTerms joined = verkv::joined(open, settled);
    INFO("trial " << trial);
    REQUIRE(joined.beta == all.beta);
    REQUIRE_THAT(joined.variance, Catch::WithinRel(all.variance, verkv::tolerance::kIdentity));
    REQUIRE_THAT(joined.max_jump,
                 Catch::WithinRel(all.max_jump, verkv::tolerance::kThroughBinary32));
  }
  CHECK(verkv::joined({2, 3, 4}, {}).variance == 3);
  CHECK(verkv::joined({2, 3, 4}, {}).max_jump == 4);
}

TEST_CASE("D computes if it is positive and finite; a step's certificate is enlarged") {
  CHECK(verkv::is_computable(1e-300));
  for (const double d : {0.0, -1.0, kInfinity, kNaN}) CHECK_FALSE(verkv::is_computable(d));
  const TailTerms terms{1, 2, 3};
  CHECK(verkv::outward_certificate(terms, 10, 3) ==
        verkv::certificate(terms, 10, 3) * verkv::kOutward);
}

TEST_CASE("removing tokens from L never raises the certificate") {
  Random random(42);
  int violations = 0;
  for (int trial = 0; trial < 1000; ++trial) {
    const LowCase c = random_low_case(random, 2 + random.below(60));
    const Vector rho = c.odds();
    const double delta = std::pow(10.0, random.uniform(-6, -0.05));
    const double share = random.uniform();
    Vector w = c.w;
    Vector odds = rho;
    double before = certificate_of(w, odds, c.denominator, delta);
    while (!w.empty()) {  // down to nothing, a random part at a time
      Vector rest_w;
      Vector rest_odds;
      for (std::size_t i = 0; i < w.size(); ++i) {
        if (random.uniform() < share) continue;
        rest_w.push_back(w[i]);
        rest_odds.push_back(odds[i]);
      }
      if (rest_w.size() == w.size()) {
        rest_w.pop_back();
        rest_odds.pop_back();
      }
      const double after = certificate_of(rest_w, rest_odds, c.denominator, delta);
      violations += !(after <= before * (1 + verkv::tolerance::kInequality));
      before = after;
      w = rest_w;
      odds = rest_odds;
    }
    REQUIRE(before == 0);
  }
  CHECK(violations == 0);
}

TEST_CASE("scaling all weights and D changes nothing") {
  Random random(43);
  for (int trial = 0; trial < 100; ++trial) {
    LowCase c = random_low_case(random, 50);
    const double before = certificate_of(c.w, c.odds(), c.denominator, 0.1);
    for (double& w : c.w) w *= 0x1p-200;  // exact
    REQUIRE(certificate_of(c.w, c.odds(), c.denominator * 0x1p-200, 0.1) == before);
  }
}

TEST_CASE("a smaller delta asks for more, a larger D for less") {
  Random random(44);
  for (int trial = 0; trial < 100; ++trial) {
    const LowCase c = random_low_case(random, 30);
    double before = 0;
    for (const double delta : {0.9, 0.5, 0.1, 1e-2, 1e-6, 1e-12}) {
      const double now = certificate_of(c.w, c.odds(), c.denominator, delta);
      REQUIRE(now >= before);
      before = now;
    }
    REQUIRE_THAT(certificate_of(c.w, c.odds(), 2 * c.denominator, 0.1),
                 Catch::WithinRel(certificate_of(c.w, c.odds(), c.denominator, 0.1) / 2,
                                  verkv::tolerance::kIdentity));
  }
}

TEST_CASE("edges: L empty, weightless, never drawn, H") {
  const double l = verkv::log_two_over(0.1);
  CHECK(certificate_of({}, {}, 1, 0.1) == 0);
  CHECK(certificate_of({}, {}, 0, 0.1) == 0);
  CHECK(certificate_of({0, 0}, {0, 1}, 1, 0.1) == 0);
  CHECK(certificate_of({3}, {kInfinity}, 3, 0.1) == 0);
  // One token that is never drawn: V = 0, beta = b = w.
  const TailTerms never = terms_of({2}, {0});
  CHECK(never.beta == 2);
  CHECK(never.variance == 0);
  CHECK(never.max_jump == 2);
  CHECK_THAT(verkv::certificate(never, 4, l),
             Catch::WithinRel((2 + 4 * l / 3) / 4, verkv::tolerance::kClosedForm));
  // One token: beta = w / (1 + rho), V = rho beta^2, b = beta max(rho, 1).
  const TailTerms one = terms_of({3}, {2});
  CHECK(one.beta == 1);
  CHECK(one.variance == 2);
  CHECK(one.max_jump == 2);
  CHECK_THAT(verkv::log_two_over(0.1),
             Catch::WithinRel(std::log(20.0), verkv::tolerance::kClosedForm));
}

TEST_CASE("only what was promised is certified") {
  CHECK(verkv::is_certified(0, 0.3));
  CHECK(verkv::is_certified(0.3, 0.3));
  CHECK_FALSE(verkv::is_certified(0.31, 0.3));
  CHECK_FALSE(verkv::is_certified(kInfinity, 0.3));
  CHECK_FALSE(verkv::is_certified(kNaN, 0.3));
  CHECK_FALSE(verkv::is_certified(0, kInfinity));
  CHECK_FALSE(verkv::is_certified(kInfinity, kInfinity));
}

TEST_CASE("what cannot be computed is never certified") {
  const double l = verkv::log_two_over(0.1);
  CHECK(verkv::certificate({kNaN, 1, 1}, 1, l) == kInfinity);
  CHECK(verkv::certificate({1, kNaN, 1}, 1, l) == kInfinity);
  CHECK(verkv::certificate({1, 1, kNaN}, 1, l) == kInfinity);
  CHECK(verkv::certificate({1, 1, 1}, kNaN, l) == kInfinity);
  CHECK(verkv::certificate({0, 0, 0}, kNaN, l) == kInfinity);
  CHECK(verkv::certificate({1, 1, 1}, 0, l) == kInfinity);
  CHECK(verkv::certificate({1, 1, 1}, -1, l) == kInfinity);
  CHECK(verkv::certificate({kInfinity, 1, 1}, kInfinity, l) == kInfinity);
  CHECK(verkv::certificate({1, 1, 1}, kInfinity, l) == kInfinity);
  CHECK(verkv::certificate({1, 1, 1}, 1, kNaN) == kInfinity);
  CHECK(certificate_of({1, kNaN, 1}, {0.1, 0.1, 0.1}, 3, 0.1) == kInfinity);
  CHECK(certificate_of({1, 1}, {0.1, kNaN}, 3, 0.1) == kInfinity);
}

// ---- The promise itself ------------------------------------------------------------------------

// Redraws L `trials` times and counts how often |D_hat - D| / D is above `bound`.
template <class Draw>
std::int64_t failures(const LowCase& c, double bound, std::int64_t trials, Draw&& draw) {
  const Vector rho = c.odds();
  const double beta = verkv::shrinkage_beta<double, double>(c.w, rho);
  double low_weight = 0;
  Vector contribution;
  for (std::size_t i = 0; i < c.w.size(); ++i) {
    low_weight += c.w[i];
    contribution.push_back(
        c.r[i] > 0 ? c.w[i] * verkv::drawn_coefficient(c.w[i], c.w[i], rho[i], beta, kInfinity)
                   : 0.0);
  }
  std::int64_t count = 0;
  for (std::int64_t trial = 0; trial < trials; ++trial) {
    verkv::DrawId key;
    key.seed = 45;
    key.sequence = static_cast<std::uint64_t>(trial);
    double estimate = 0;
    for (std::size_t i = 0; i < c.w.size(); ++i) {
      if (draw(key, i, c.r[i])) estimate += contribution[i];
    }
    count += std::fabs(estimate - low_weight) > bound * c.denominator;
  }
  return count;
}

bool honest(const verkv::DrawId& key, std::uint64_t position, double r) {
  return verkv::drawn(key, position, r);
}

// The spread sample of L along its order of indices.
class Spread {
 public:
  explicit Spread(const LowCase& c) : r_(c.r), position_(c.r.size()), kept_(c.r.size()) {
    std::iota(position_.begin(), position_.end(), 0u);
  }
  bool operator()(const verkv::DrawId& key, std::uint64_t position, double) {
    if (position == 0) verkv::pivotal_draw(key, position_, r_, kept_);
    return kept_[static_cast<std::size_t>(position)] != 0;
  }

 private:
  Vector r_;
  std::vector<std::uint32_t> position_;
  std::vector<std::uint8_t> kept_;
};

TEST_CASE("with exact weights the bound fails no more often than delta") {
  Random random(46);
  for (int trial = 0; trial < 60; ++trial) {
    const LowCase c = random_low_case(random, 1 + random.below(60));
    for (const double delta : {0.05, 0.1, 0.3, 0.9}) {
      const double bound = certificate_of(c.w, c.odds(), c.denominator, delta);
      const std::int64_t trials = 2000;
      INFO("trial " << trial << ", delta " << delta);
      REQUIRE(
          verkv::reference::binomial_not_above(failures(c, bound, trials, honest), trials, delta));
      REQUIRE(verkv::reference::binomial_not_above(failures(c, bound, trials, Spread(c)), trials,
                                                   delta));
    }
  }
}

TEST_CASE("a wrong certificate and a wrong draw are noticed") {
  LowCase c;  // equal weights, many tokens: little bias, much variance
  c.w.assign(400, 1.0);
  c.r.assign(400, 0.2);
  c.denominator = 400;
  const double delta = 0.1;
  const std::int64_t trials = 4000;
  const TailTerms terms = terms_of(c.w, c.odds());
  const double l = verkv::log_two_over(delta);
  const double right = verkv::certificate(terms, c.denominator, l);
  CHECK(verkv::reference::binomial_not_above(failures(c, right, trials, honest), trials, delta));

  TailTerms too_small = terms;
  too_small.variance /= 25;
  const double wrong = verkv::certificate(too_small, c.denominator, l);
  CHECK_FALSE(
      verkv::reference::binomial_not_above(failures(c, wrong, trials, honest), trials, delta));

  const auto stingy = [](const verkv::DrawId& key, std::uint64_t position, double r) {
    return verkv::drawn(key, position, r / 2);
  };
  CHECK_FALSE(
      verkv::reference::binomial_not_above(failures(c, right, trials, stingy), trials, delta));

  // Draws that are right one by one and not independent: neighbours share one.
  const auto shared = [](const verkv::DrawId& key, std::uint64_t position, double r) {
    return verkv::drawn(key, position / 16, r);
  };
  CHECK_FALSE(
      verkv::reference::binomial_not_above(failures(c, right, trials, shared), trials, delta));
}

}  // namespace
