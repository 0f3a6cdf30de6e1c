#include <verkv/shrinkage.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <verkv/sample.hpp>

#include "catch.hpp"
#include "reference/reference.hpp"
#include "reference/statistics.hpp"
#include "tolerance.hpp"

namespace {

using verkv::reference::LowCase;
using verkv::reference::Random;
using verkv::reference::random_low_case;
using Vector = std::vector<double>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

verkv::Shrinkage solve(const Vector& w, const Vector& rho) {
  return verkv::solve_shrinkage<double, double>(w, rho);
}

double beta_of(const Vector& w, const Vector& rho) {
  return verkv::shrinkage_beta<double, double>(w, rho);
}

Vector lambda_of(const Vector& w, const Vector& rho, double beta) {
  Vector lambda;
  for (std::size_t i = 0; i < w.size(); ++i) {
    lambda.push_back(verkv::shrinkage_lambda(w[i], rho[i], beta));
  }
  return lambda;
}

TEST_CASE("closed form against bisection on Definition 2") {
  Random random(31);
  int most_rounds = 0;
  for (int trial = 0; trial < 1000; ++trial) {
    const LowCase c = random_low_case(random, 1 + random.below(200));
    const Vector rho = c.odds();
    const auto [beta, rounds] = solve(c.w, rho);
    REQUIRE(beta_of(c.w, rho) == beta);
    most_rounds = std::max(most_rounds, rounds);
    const auto expected = verkv::reference::shrinkage(c.w, c.r);
    INFO("trial " << trial << ", n " << c.w.size());
    REQUIRE_THAT(beta, Catch::WithinRel(expected.beta, verkv::tolerance::kShrinkage) ||
                           Catch::WithinAbs(0, verkv::tolerance::kNothing));
    const Vector lambda = lambda_of(c.w, rho, beta);
    for (std::size_t i = 0; i < c.w.size(); ++i) {
      REQUIRE_THAT(lambda[i], Catch::WithinAbs(expected.lambda[i], verkv::tolerance::kShrinkage));
    }
  }
  // Newton's method from below settles fast: each round drops at least one token, in practice most.
  CHECK(most_rounds <= 12);
}

TEST_CASE("lambda lies in [r, 1] and beta is at least each token's own bias") {
  Random random(32);
  for (int trial = 0; trial < 500; ++trial) {
    const LowCase c = random_low_case(random, 1 + random.below(60));
    const double beta = beta_of(c.w, c.odds());
    const Vector lambda = lambda_of(c.w, c.odds(), beta);
    for (std::size_t i = 0; i < c.w.size(); ++i) {
      REQUIRE(lambda[i] >= c.r[i] * (1 - verkv::tolerance::kInequality));
      REQUIRE(lambda[i] <= 1);
      REQUIRE(beta >= c.w[i] * (1 - lambda[i]) * (1 - verkv::tolerance::kInequality));
    }
    REQUIRE_THAT(
        beta, Catch::WithinRel(verkv::reference::bias(c.w, lambda), verkv::tolerance::kFormula) ||
                  Catch::WithinAbs(0, verkv::tolerance::kNothing));
  }
}

TEST_CASE("beta is the largest W_A / (1 + R_A) over all subsets") {
  Random random(33);
  for (int trial = 0; trial < 40; ++trial) {
    const LowCase c = random_low_case(random, 1 + random.below(10));
    const Vector rho = c.odds();
    double best = 0;
    for (std::size_t subset = 0; subset < (std::size_t{1} << c.w.size()); ++subset) {
      double weight = 0;
      double odds = 0;
      for (std::size_t i = 0; i < c.w.size(); ++i) {
        if ((subset >> i & 1) == 0) continue;
        weight += c.w[i];
        odds += rho[i];
      }
      best = std::max(best, weight / (1 + odds));
    }
    REQUIRE_THAT(beta_of(c.w, rho), Catch::WithinRel(best, verkv::tolerance::kIdentity) ||
                                        Catch::WithinAbs(0, verkv::tolerance::kNothing));
  }
}

TEST_CASE("Theorem 1: no other lambda has a smaller mean square error") {
  Random random(34);
  for (int trial = 0; trial < 200; ++trial) {
    const LowCase c = random_low_case(random, 1 + random.below(30));
    const Vector best = lambda_of(c.w, c.odds(), beta_of(c.w, c.odds()));
    const double minimum = verkv::reference::mean_square_error(c.w, c.r, best);
    for (int other = 0; other < 50; ++other) {
      Vector lambda = best;
      const double size = std::pow(10.0, random.uniform(-6, 0));
      const bool all = random.below(2) == 0;
      const std::size_t one = random.below(lambda.size());
      for (std::size_t i = 0; i < lambda.size(); ++i) {
        // With r = 0 the token is never drawn and lambda = 0 is the only choice of finite variance.
        if (c.r[i] == 0 && c.w[i] > 0) continue;
        if (all || i == one) {
          lambda[i] = verkv::reference::clip(lambda[i] + size * random.normal(), 0, 1);
        }
      }
      const double error = verkv::reference::mean_square_error(c.w, c.r, lambda);
      REQUIRE(error >= minimum * (1 - verkv::tolerance::kInequality));
    }
  }
}

TEST_CASE("scaling all weights scales beta and leaves lambda") {
  Random random(35);
  for (int trial = 0; trial < 100; ++trial) {
    const LowCase c = random_low_case(random, 50);
    const Vector rho = c.odds();
    const double beta = beta_of(c.w, rho);
    const double factor = 0x1p-300;  // a power of two: exact
    Vector scaled = c.w;
    for (double& w : scaled) w *= factor;
    REQUIRE(beta_of(scaled, rho) == factor * beta);
    REQUIRE(lambda_of(scaled, rho, factor * beta) == lambda_of(c.w, rho, beta));
  }
}

TEST_CASE("the order of the tokens does not matter") {
  Random random(36);
  for (int trial = 0; trial < 100; ++trial) {
    LowCase c = random_low_case(random, 80);
    const double beta = beta_of(c.w, c.odds());
    std::reverse(c.w.begin(), c.w.end());
    std::reverse(c.r.begin(), c.r.end());
    REQUIRE_THAT(beta_of(c.w, c.odds()), Catch::WithinRel(beta, verkv::tolerance::kIdentity));
  }
}

TEST_CASE("edges: no token, one token, H, weightless, never drawn, ties") {
  CHECK(solve({}, {}).beta == 0);
  CHECK(solve({}, {}).rounds == 1);
  // One token: beta = w / (1 + rho) = w (1 - r) and lambda = r.
  CHECK(beta_of({3.0}, {0.5}) == 2.0);
  CHECK(verkv::shrinkage_lambda(3.0, 0.5, 2.0) == 0.5 / 1.5);
  CHECK(beta_of({3.0}, {0.0}) == 3.0);
  CHECK(verkv::shrinkage_lambda(3.0, 0.0, 3.0) == 0.0);
  // Tokens of H and weightless ones are passed over.
  CHECK(beta_of({5.0, 3.0, 0.0, 0.0}, {kInfinity, 0.5, 0.0, 7.0}) == 2.0);
  CHECK(beta_of({5.0}, {kInfinity}) == 0);
  CHECK(beta_of({0.0, 0.0}, {0.0, 1.0}) == 0);
  CHECK(verkv::shrinkage_lambda(0.0, 0.0, 0.0) == 1.0);
  CHECK(verkv::shrinkage_lambda(0.0, 2.0, 0.0) == 1.0);
  // n equal tokens: beta = n w / (1 + n rho).
  CHECK_THAT(beta_of(Vector(1000, 1.0), Vector(1000, 0.25)),
             Catch::WithinRel(1000.0 / 251, verkv::tolerance::kIdentity));
  // Only tokens that are never drawn: all of it is bias.
  CHECK(beta_of({1.0, 2.0, 4.0}, {0.0, 0.0, 0.0}) == 7.0);
}

TEST_CASE("a weight that is not a number is not hidden") {
  CHECK(std::isnan(beta_of({1.0, kNaN, 2.0}, {0.1, 0.1, 0.1})));
  CHECK(std::isnan(beta_of({kNaN}, {0.0})));
  CHECK(std::isnan(beta_of({1.0, 1.0}, {kNaN, 0.1})));
  CHECK(std::isnan(verkv::shrinkage_lambda(kNaN, 0.1, 1.0)));
  CHECK(std::isnan(verkv::shrinkage_lambda(1.0, 0.1, kNaN)));
}

TEST_CASE("binary32 weights and odds give the beta of the same numbers in binary64") {
  Random random(37);
  for (int trial = 0; trial < 50; ++trial) {
    const LowCase c = random_low_case(random, 100);
    std::vector<float> w;
    std::vector<float> rho;
    for (const double x : c.w) w.push_back(static_cast<float>(x));
    for (const double x : c.odds()) rho.push_back(static_cast<float>(x));
    const double beta = verkv::shrinkage_beta<float, float>(w, rho);
    CHECK(beta == beta_of(Vector(w.begin(), w.end()), Vector(rho.begin(), rho.end())));
  }
}

// ---- The coefficient of a drawn token ----------------------------------------------------------

TEST_CASE("drawn coefficient: lambda / r, and with a cap a bounded contribution") {
  Random random(38);
  for (int trial = 0; trial < 2000; ++trial) {
    const double rho = std::exp(4 * random.normal());
    const double r = rho / (1 + rho);
    const double beta = std::exp(2 * random.normal());
    const double sketched = std::exp(3 * random.normal());
    const double exact = sketched * std::exp(3 * random.normal());
    const double lambda = verkv::shrinkage_lambda(sketched, rho, beta);
    const double plain = verkv::drawn_coefficient(sketched, exact, rho, beta, kInfinity);
    REQUIRE_THAT(plain, Catch::WithinRel(lambda / r, verkv::tolerance::kIdentity));
    const double cap = random.uniform(1, 4);
    const double capped = verkv::drawn_coefficient(sketched, exact, rho, beta, cap);
    REQUIRE(capped <= plain);
    REQUIRE(capped * exact <= cap * beta * (1 + rho) * (1 + verkv::tolerance::kInequality));
    if (lambda * exact <= cap * beta * rho) REQUIRE(capped == plain);
    // A sketch that is right is never capped (cap >= 1).
    REQUIRE_THAT(verkv::drawn_coefficient(exact, exact, rho, beta, cap),
                 Catch::WithinRel(verkv::drawn_coefficient(exact, exact, rho, beta, kInfinity),
                                  verkv::tolerance::kIdentity));
  }
}

// ---- The estimator over redraws ----------------------------------------------------------------

// Mean over redraws of sum of Z lambda w / r over `tokens`, against `expected`: each redraw is an
// independent variable of variance sum lambda^2 w^2 (1 - r) / r, and Bernstein bounds their mean.
template <class Draw>
bool mean_fits(const LowCase& c, const Vector& lambda, const std::vector<std::size_t>& tokens,
               double expected, Draw&& draw) {
  constexpr std::int64_t trials = 20000;
  double variance = 0;
  double jump = 0;
  for (const std::size_t i : tokens) {
    const double part = lambda[i] * c.w[i] / c.r[i];
    variance += part * part * c.r[i] * (1 - c.r[i]);
    jump = std::max(jump, part * std::max(c.r[i], 1 - c.r[i]));
  }
  double sum = 0;
  for (std::int64_t trial = 0; trial < trials; ++trial) {
    verkv::DrawId key;
    key.seed = 39;
    key.sequence = static_cast<std::uint64_t>(trial);
    for (const std::size_t i : tokens) {
      if (draw(key, i, c.r[i])) sum += lambda[i] * c.w[i] / c.r[i];
    }
  }
  const double n = static_cast<double>(trials);
  // The summands are the tokens of all redraws, independent, each at most `jump` from its mean.
  return std::fabs(sum - n * expected) <= verkv::reference::bernstein_bound(n * variance, jump, 10);
}

TEST_CASE("the estimator is unbiased where lambda = 1 and short by beta in all") {
  Random random(40);
  LowCase c;
  for (int i = 0; i < 200; ++i) {
    c.w.push_back(std::exp(1.5 * random.normal()));
    c.r.push_back(random.uniform(0.05, 0.95));
  }
  const double beta = beta_of(c.w, c.odds());
  const Vector lambda = lambda_of(c.w, c.odds(), beta);
  std::vector<std::size_t> unshrunk;
  std::vector<std::size_t> all;
  double weight = 0;
  for (std::size_t i = 0; i < c.w.size(); ++i) {
    all.push_back(i);
    if (lambda[i] == 1) {
      unshrunk.push_back(i);
      weight += c.w[i];
    }
  }
  REQUIRE(unshrunk.size() > 20);
  REQUIRE(unshrunk.size() < c.w.size());
  const auto honest = [](const verkv::DrawId& key, std::uint64_t position, double r) {
    return verkv::drawn(key, position, r);
  };
  const auto generous = [](const verkv::DrawId& key, std::uint64_t position, double r) {
    return verkv::drawn(key, position, 1.05 * r);
  };
  CHECK(mean_fits(c, lambda, unshrunk, weight, honest));
  const double total = verkv::reference::sum(c.w);
  CHECK(mean_fits(c, lambda, all, total - beta, honest));
  // The biased twin, and a wrong claim.
  CHECK_FALSE(mean_fits(c, lambda, unshrunk, weight, generous));
  CHECK_FALSE(mean_fits(c, lambda, all, total, honest));
}

}  // namespace
