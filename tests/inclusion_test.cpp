#include <verkv/inclusion.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "catch.hpp"
#include "reference/reference.hpp"
#include "reference/statistics.hpp"
#include "tolerance.hpp"

namespace {

using verkv::reference::Random;
using Vector = std::vector<double>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

verkv::Inclusion solve(const Vector& tau, double budget) {
  Vector scratch(tau.size());
  return verkv::solve_inclusion<double>(tau, budget, scratch);
}

Vector probabilities(const Vector& tau, double budget) {
  const verkv::Inclusion solution = solve(tau, budget);
  Vector r;
  for (const double t : tau) r.push_back(solution.probability(t));
  return r;
}

double total(const Vector& x) { return std::accumulate(x.begin(), x.end(), 0.0); }

// A sum of n rounded terms of the same sign is off by at most n units; r itself by two more.
bool sums_to(const Vector& r, double budget) {
  return std::fabs(total(r) - budget) <= verkv::tolerance::kFormula * std::max(1.0, budget);
}

// Scores of several shapes: log-normal to very heavy tails, rounded ones with many ties, some
// zeros.
Vector random_scores(Random& random, std::size_t n) {
  const double spread = random.uniform(0, 6);
  const std::size_t kind = random.below(4);
  Vector tau;
  for (std::size_t i = 0; i < n; ++i) {
    double t = std::exp(spread * random.normal());
    if (kind == 1) t = std::ceil(4 * random.uniform()) / 4;
    if (kind == 2 && random.below(3) == 0) t = 0;
    if (kind == 3) t = 1 / random.uniform();  // infinite mean
    tau.push_back(t);
  }
  return tau;
}

TEST_CASE("Eq. 3: the probabilities sum to the budget and agree with bisection on c") {
  Random random(11);
  for (int trial = 0; trial < 500; ++trial) {
    const std::size_t n = 1 + random.below(300);
    const Vector tau = random_scores(random, n);
    const double budget = random.uniform(0, 1.1 * static_cast<double>(n));
    const Vector r = probabilities(tau, budget);
    const auto reference = verkv::reference::inclusion(tau, budget);
    const auto positive =
        static_cast<double>(std::count_if(tau.begin(), tau.end(), [](double t) { return t > 0; }));
    INFO("trial " << trial << ", n " << n << ", budget " << budget << ", positive " << positive);
    if (budget <= positive) {
      CHECK(sums_to(r, budget));
    } else if (budget < static_cast<double>(n)) {
      CHECK(total(r) == positive);  // nothing else may be drawn
    } else {
      CHECK(total(r) == static_cast<double>(n));
    }
    for (std::size_t i = 0; i < n; ++i) {
      REQUIRE(r[i] >= 0);
      REQUIRE(r[i] <= 1);
      REQUIRE_THAT(
          r[i], Catch::WithinAbs(reference.r[i], verkv::tolerance::kIdentity +
                                                     verkv::tolerance::kFormula * reference.r[i]));
    }
    if (reference.has_scale) {
      CHECK_THAT(solve(tau, budget).scale,
                 Catch::WithinRel(reference.c, verkv::tolerance::kFormula));
    }
  }
}

TEST_CASE("Eq. 3: binary32 scores") {
  Random random(12);
  for (int trial = 0; trial < 50; ++trial) {
    std::vector<float> tau;
    for (const double t : random_scores(random, 200)) tau.push_back(static_cast<float>(t) + 1e-6f);
    std::vector<float> scratch(tau.size());
    const auto solution =
        verkv::solve_inclusion(std::span<const float>(tau), 12.5, std::span<float>(scratch));
    double sum = 0;
    for (const float t : tau) sum += solution.probability(static_cast<double>(t));
    CHECK_THAT(sum, Catch::WithinRel(12.5, verkv::tolerance::kFormula));
    CHECK(std::is_sorted(scratch.begin(), scratch.end(), std::greater<float>()));
  }
}

TEST_CASE("a larger score never has a smaller probability") {
  Random random(13);
  for (int trial = 0; trial < 100; ++trial) {
    Vector tau = random_scores(random, 1 + random.below(100));
    std::sort(tau.begin(), tau.end());
    const Vector r = probabilities(tau, random.uniform(0, static_cast<double>(tau.size())));
    CHECK(std::is_sorted(r.begin(), r.end()));
  }
}

TEST_CASE("only ratios of scores matter") {
  Random random(14);
  for (int trial = 0; trial < 100; ++trial) {
    const Vector tau = random_scores(random, 100);
    const double budget = random.uniform(0, 100);
    const Vector r = probabilities(tau, budget);
    // A power of two scales every operation exactly.
    Vector doubled = tau;
    for (double& t : doubled) t *= 0x1p-20;
    CHECK(probabilities(doubled, budget) == r);
    Vector scaled = tau;
    for (double& t : scaled) t *= 1e7 / 3;
    const Vector s = probabilities(scaled, budget);
    for (std::size_t i = 0; i < r.size(); ++i)
      REQUIRE_THAT(s[i], Catch::WithinAbs(r[i], verkv::tolerance::kIdentity));
  }
}

TEST_CASE("the order of the tokens does not matter") {
  Random random(15);
  for (int trial = 0; trial < 100; ++trial) {
    const Vector tau = random_scores(random, 80);
    const double budget = random.uniform(0, 80);
    std::vector<std::size_t> shuffled(tau.size());
    std::iota(shuffled.begin(), shuffled.end(), std::size_t{0});
    for (std::size_t i = shuffled.size(); i > 1; --i) {
      std::swap(shuffled[i - 1], shuffled[random.below(i)]);
    }
    Vector permuted;
    for (const std::size_t i : shuffled) permuted.push_back(tau[i]);
    const Vector r = probabilities(tau, budget);
    const Vector s = probabilities(permuted, budget);
    for (std::size_t i = 0; i < s.size(); ++i) REQUIRE(s[i] == r[shuffled[i]]);
  }
}

TEST_CASE("a larger budget lowers no probability") {
  Random random(16);
  for (int trial = 0; trial < 50; ++trial) {
    const Vector tau = random_scores(random, 60);
    Vector before(tau.size(), 0.0);
    for (double budget = 0; budget <= 61; budget += 0.37) {
      const Vector r = probabilities(tau, budget);
      for (std::size_t i = 0; i < r.size(); ++i)
        REQUIRE(r[i] >= before[i] * (1 - verkv::tolerance::kInequality));
      before = r;
    }
  }
}

TEST_CASE("a token with score 0 changes nothing for the others") {
  Random random(17);
  Vector tau = random_scores(random, 50);
  tau.push_back(1);  // at least one positive score
  const Vector r = probabilities(tau, 7.5);
  tau.insert(tau.begin(), 0.0);
  const Vector s = probabilities(tau, 7.5);
  CHECK(s[0] == 0);
  for (std::size_t i = 0; i < r.size(); ++i) CHECK(s[i + 1] == r[i]);
}

TEST_CASE("edges of the budget and of n") {
  CHECK(solve({}, 3).probability(1) == 0);
  CHECK(probabilities({0.3}, 1) == Vector{1});
  CHECK(probabilities({0.3}, 0.25) == Vector{0.25});
  CHECK(probabilities({0.0}, 1) == Vector{1});
  CHECK(probabilities({0.0}, 0.25) == Vector{0.25});

  const Vector tau = {4, 1, 0, 1};
  CHECK(probabilities(tau, 0) == Vector{0, 0, 0, 0});
  CHECK(probabilities(tau, 4) == Vector{1, 1, 1, 1});
  CHECK(probabilities(tau, 1e9) == Vector{1, 1, 1, 1});
  CHECK(probabilities(tau, 3) == Vector{1, 1, 0, 1});
  CHECK(probabilities({49, 50, 0}, 2) == Vector{1, 1, 0});  // (1 / 49) * 49 rounds to below 1
  CHECK(probabilities(tau, 3.5) == Vector{1, 1, 0, 1});     // half a token cannot be spent
  CHECK(probabilities(tau, 2) == Vector{1, 0.5, 0, 0.5});
  CHECK(probabilities(tau, 1.5) == Vector{1, 0.25, 0, 0.25});  // 4 saturates exactly here
  CHECK(probabilities(tau, 0.75) == Vector{0.5, 0.125, 0, 0.125});
}

TEST_CASE("equal scores share alike, also across a saturation") {
  for (const double score : {1e-300, 0.5, 1.0, 1e30}) {
    const Vector r = probabilities(Vector(64, score), 8);
    for (const double x : r) CHECK_THAT(x, Catch::WithinRel(0.125, verkv::tolerance::kIdentity));
  }
  const Vector zeros = probabilities(Vector(64, 0.0), 8);
  for (const double x : zeros) CHECK(x == 0.125);
}

TEST_CASE("scores of very different size: small ones keep their share") {
  Vector tau(1000, 1e-12);
  tau[7] = 1;
  const Vector r = probabilities(tau, 11);
  CHECK(r[7] == 1);
  CHECK_THAT(r[0], Catch::WithinRel(10.0 / 999, verkv::tolerance::kIdentity));
}

TEST_CASE("floor: every token stays drawable, the sum stays the budget") {
  Random random(18);
  for (int trial = 0; trial < 100; ++trial) {
    Vector tau = random_scores(random, 100);
    for (double& t : tau) t += 1e-9;  // all positive: the whole budget can be spent
    const double budget = random.uniform(5, 99);
    const double floor = random.uniform(0, budget / 100);
    Vector scratch(tau.size());
    const auto solution =
        verkv::solve_inclusion<double>(tau, budget, floor, std::span<double>(scratch));
    double sum = 0;
    for (const double t : tau) {
      const double r = solution.probability(t);
      REQUIRE(r >= floor);
      REQUIRE(r <= 1 + verkv::tolerance::kInequality);
      sum += r;
    }
    REQUIRE_THAT(sum, Catch::WithinRel(budget, verkv::tolerance::kFormula));
    CHECK(solution.probability(0) == floor);
  }
  const Vector tau = {3, 1, 1};
  Vector scratch(3);
  const auto none = verkv::solve_inclusion<double>(tau, 1.5, 0.0, std::span<double>(scratch));
  for (const double t : tau) CHECK(none.probability(t) == solve(tau, 1.5).probability(t));
  const auto all = verkv::solve_inclusion<double>(tau, 3, 0.25, std::span<double>(scratch));
  for (const double t : tau) CHECK(all.probability(t) == 1);
}

TEST_CASE("the first score that is no score is named") {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  constexpr float inf = std::numeric_limits<float>::infinity();
  const auto first = [](const std::vector<float>& tau) {
    return verkv::first_invalid_importance(std::span<const float>(tau));
  };
  CHECK_FALSE(first({}));
  CHECK_FALSE(first({0.0f, 1.0f, 3e38f}));
  CHECK_FALSE(first({0.0f, -0.0f}));
  CHECK(first({0.0f, nan, -1.0f}) == 1);
  CHECK(first({0.0f, 1.0f, -1e-30f}) == 2);
  CHECK(first({inf}) == 0);
  CHECK(first({1.0f, -inf}) == 1);
}

TEST_CASE("odds and probability") {
  CHECK(verkv::odds_from_probability(0.0) == 0);
  CHECK(verkv::odds_from_probability(0.5) == 1);
  CHECK(verkv::odds_from_probability(1.0) == kInfinity);
  CHECK(verkv::probability_from_odds(kInfinity) == 1);
  CHECK(verkv::probability_from_odds(0.0) == 0);
  for (double r = 1e-9; r < 1; r += 0.00137) {
    CHECK_THAT(verkv::probability_from_odds(verkv::odds_from_probability(r)),
               Catch::WithinRel(r, verkv::tolerance::kIdentity));
  }
}

TEST_CASE(
    "stored odds: 0 and 1 are exact, the rest within 2^-9, nearly certain tokens are certain") {
  CHECK(verkv::to_float(verkv::stored_odds(0)) == 0.0f);
  CHECK(verkv::stored_odds(1).bits == verkv::kPositive16Infinity.bits);
  CHECK(verkv::to_float(verkv::stored_odds(0.5)) == 1.0f);
  CHECK(verkv::stored_odds(1 - 1e-6).bits == verkv::kPositive16Infinity.bits);
  CHECK(verkv::to_float(verkv::stored_odds(65536.0 / 65537.0)) == 65536.0f);
  Random random(19);
  float previous = 0;
  for (double r = 1e-7; r < 0.9999; r += 1e-4 * random.uniform()) {
    const float rho = verkv::to_float(verkv::stored_odds(r));
    // 2^-9 from 8 bits of mantissa, a little for the conversion of double to float before it
    REQUIRE_THAT(static_cast<double>(rho), Catch::WithinRel(r / (1 - r), 0x1p-9 + 1e-6));
    REQUIRE(rho >= previous);
    previous = rho;
  }
}

}  // namespace
