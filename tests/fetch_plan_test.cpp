#include <verkv/fetch_plan.hpp>

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

using verkv::reference::Indices;
using verkv::reference::LowCase;
using verkv::reference::Random;
using verkv::reference::random_low_case;
using Vector = std::vector<double>;
using Order = std::vector<std::uint32_t>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

double certificate_of(const Vector& w, const Vector& rho, double denominator, double delta) {
  const double beta = verkv::shrinkage_beta<double, double>(w, rho);
  return verkv::certificate(verkv::tail_terms<double, double>(w, rho, beta), denominator,
                            verkv::log_two_over(delta));
}

Vector gains_of(const Vector& w, const Vector& rho, double denominator, double delta) {
  Vector scratch(verkv::kGainScratchDoubles * (w.size() + 1), kNaN);
  Order indices(w.size());
  Vector gain(w.size());
  verkv::exact_gains(w, rho, denominator, verkv::log_two_over(delta), scratch, indices, gain);
  return gain;
}

Order order_of(const Vector& value) {
  Order order(value.size());
  verkv::order_by_descending<double>(value, order);
  return order;
}

std::size_t k_star_of(const Vector& w, const Vector& rho, const Order& order, double denominator,
                      double delta, double epsilon) {
  Vector a(w.size());
  Vector b(w.size());
  return verkv::certified_prefix<double>(w, rho, order, denominator, verkv::log_two_over(delta),
                                         epsilon, a, b);
}

// Largest difference between the gains and Eq. 9 by brute force, relative to eps(L).
double gain_error(const LowCase& c, double delta) {
  const Vector gain = gains_of(c.w, c.odds(), c.denominator, delta);
  const Vector expected = verkv::reference::gains(c.w, c.r, c.denominator, delta);
  const double before = verkv::reference::certificate(c.w, c.r, c.denominator, delta);
  double worst = 0;
  for (std::size_t i = 0; i < gain.size(); ++i) {
    const double error =
        std::fabs(gain[i] - expected[i]) / std::max(before, verkv::tolerance::kNothing);
    worst = std::isnan(error) ? kInfinity : std::max(worst, error);
  }
  return worst;
}

// ---- Eq. 9 -------------------------------------------------------------------------------------

TEST_CASE("exact gains against removing each token in turn") {
  Random random(51);
  for (int trial = 0; trial < 600; ++trial) {
    const LowCase c = random_low_case(random, 1 + random.below(trial < 590 ? 60 : 300));
    const double delta = std::pow(10.0, random.uniform(-6, -0.05));
    INFO("trial " << trial << ", n " << c.w.size());
    REQUIRE(gain_error(c, delta) <= verkv::tolerance::kInequality);
  }
}

// One token holds nearly all of the odds, or of the variance of the unclipped tokens, and what is
// left without it is below the rounding of the sum: no gain may suffer.
TEST_CASE("exact gains where a difference of sums cancels") {
  Random random(52);
  for (int trial = 0; trial < 500; ++trial) {
    LowCase c;
    const auto add = [&c](double w, double rho) {
      c.w.push_back(w);
      c.r.push_back(rho / (1 + rho));
    };
    for (std::size_t i = random.below(3); i > 0; --i) add(random.uniform(0.1, 1), 0);
    const double rho = std::pow(10.0, random.uniform(2, 4));
    add(random.uniform(0.3, 3) * rho, rho);
    for (std::size_t i = random.below(20); i > 0; --i) {
      const double small = std::pow(10.0, random.uniform(-15, -8));
      add(small * std::pow(10.0, random.uniform(-2, 2)), small);
    }
    c.denominator = verkv::reference::sum(c.w);
    INFO("trial " << trial << ", n " << c.w.size());
    REQUIRE(gain_error(c, 0.1) <= verkv::tolerance::kInequality);
  }
}

// Many tokens close to the corner t = beta with odds above and below 1: there the largest jump
// belongs now to a clipped token, now to an unclipped one, and often to the token that is removed.
TEST_CASE("exact gains where the largest jump changes hands") {
  Random random(64);
  for (int trial = 0; trial < 500; ++trial) {
    LowCase c;
    const double spread = std::pow(10.0, random.uniform(-3, 0));
    for (std::size_t i = 1 + random.below(15); i > 0; --i) {
      const double rho = std::exp(random.uniform(-1, 2));
      c.r.push_back(rho / (1 + rho));
      c.w.push_back(rho * std::exp(spread * random.normal()));
    }
    c.denominator = verkv::reference::sum(c.w);
    INFO("trial " << trial << ", n " << c.w.size());
    REQUIRE(gain_error(c, 0.5) <= verkv::tolerance::kInequality);
  }
}

TEST_CASE("exact gains of huge ranges of weights and odds") {
  Random random(53);
  for (int trial = 0; trial < 200; ++trial) {
    LowCase c;
    const std::size_t n = 1 + random.below(60);
    for (std::size_t i = 0; i < n; ++i) {
      const double rho = std::pow(10.0, random.uniform(-12, 4));
      c.w.push_back(std::pow(10.0, random.uniform(-40, 40)));
      c.r.push_back(rho / (1 + rho));
    }
    c.denominator = verkv::reference::sum(c.w);
    INFO("trial " << trial << ", n " << n);
    REQUIRE(gain_error(c, 0.1) <= verkv::tolerance::kInequality);
  }
}

TEST_CASE("exact gains of equal tokens are equal, of weightless ones 0, of a single one all") {
  const Vector equal = gains_of(Vector(50, 1.0), Vector(50, 0.3), 60, 0.1);
  for (const double g : equal)
    CHECK_THAT(g, Catch::WithinRel(equal[0], verkv::tolerance::kFormula));
  const Vector some = gains_of({1, 0, 2, 0}, {0.1, 0, 0.2, 5}, 4, 0.1);
  CHECK(some[1] == 0);
  CHECK_THAT(some[3], Catch::WithinAbs(0, verkv::tolerance::kClosedForm));
  CHECK(some[0] > 0);
  CHECK_THAT(gains_of({2}, {0.5}, 3, 0.1)[0],
             Catch::WithinRel(certificate_of({2}, {0.5}, 3, 0.1), verkv::tolerance::kClosedForm));
  CHECK(gains_of({}, {}, 1, 0.1).empty());
  const Vector never = gains_of({1, 2}, {0, 0}, 4, 0.1);
  CHECK(never[1] > never[0]);
}

TEST_CASE("exact gains are never negative: the certificate is monotone") {
  Random random(54);
  for (int trial = 0; trial < 200; ++trial) {
    const LowCase c = random_low_case(random, 100);
    const double before = certificate_of(c.w, c.odds(), c.denominator, 0.1);
    for (const double g : gains_of(c.w, c.odds(), c.denominator, 0.1)) {
      REQUIRE(g >= -verkv::tolerance::kInequality * before);
    }
  }
}

// ---- Eq. 10 ------------------------------------------------------------------------------------

TEST_CASE("k* by bisection equals the linear scan, on any order") {
  Random random(55);
  for (int trial = 0; trial < 300; ++trial) {
    const LowCase c = random_low_case(random, 1 + random.below(50));
    const Vector rho = c.odds();
    const double delta = 0.1;
    const double before = verkv::reference::certificate(c.w, c.r, c.denominator, delta);
    if (!(before > 0)) continue;
    // Away from 0: Eq. 10 asks for less than epsilon, the library for no more than epsilon.
    const double epsilon = before * random.uniform(1e-6, 1.2);
    Order order = order_of(gains_of(c.w, rho, c.denominator, delta));
    if (trial % 3 == 1) order = order_of(c.w);
    if (trial % 3 == 2) {
      for (std::size_t i = order.size(); i > 1; --i) {
        std::swap(order[i - 1], order[random.below(i)]);
      }
    }
    const Indices plain(order.begin(), order.end());
    INFO("trial " << trial << ", n " << c.w.size() << ", epsilon " << epsilon);
    REQUIRE(k_star_of(c.w, rho, order, c.denominator, delta, epsilon) ==
            verkv::reference::k_star(c.w, c.r, plain, c.denominator, delta, epsilon));
  }
}

TEST_CASE("k* falls as epsilon grows; 0 fetches all that weighs, infinity nothing") {
  Random random(56);
  for (int trial = 0; trial < 50; ++trial) {
    const LowCase c = random_low_case(random, 60);
    const Vector rho = c.odds();
    const Order order = order_of(gains_of(c.w, rho, c.denominator, 0.1));
    std::size_t before = order.size();
    for (const double epsilon : {1e-12, 1e-6, 1e-3, 0.01, 0.05, 0.1, 0.3, 1.0, 10.0}) {
      const std::size_t k = k_star_of(c.w, rho, order, c.denominator, 0.1, epsilon);
      REQUIRE(k <= before);
      before = k;
    }
    CHECK(k_star_of(c.w, rho, order, c.denominator, 0.1, kInfinity) == 0);
    const std::size_t all = k_star_of(c.w, rho, order, c.denominator, 0.1, 0);
    for (std::size_t p = all; p < order.size(); ++p) CHECK(c.w[order[p]] == 0);
  }
}

TEST_CASE("a weight that is not a number has to be fetched") {
  const Vector w = {1, kNaN, 2, 1};
  const Vector rho = {0.5, 0.5, 0.5, 0.5};
  const Order first = {1, 0, 2, 3};
  CHECK(k_star_of(w, rho, first, 10, 0.1, 0.9) >= 1);
  const Order last = {0, 2, 3, 1};
  CHECK(k_star_of(w, rho, last, 10, 0.1, 0.9) == 4);
  CHECK(order_of(gains_of(w, rho, 10, 0.1)) == Order{1, 0, 2, 3});
  CHECK(order_of(gains_of({1, 2, 3}, {0.5, kNaN, kNaN}, 10, 0.1)) == Order{1, 2, 0});
  // Without a D no gain is a number; an order of them has to be a permutation all the same.
  CHECK(order_of(gains_of({1, 2, 3}, {0.5, 0.5, 0.5}, kNaN, 0.1)) == Order{0, 1, 2});
}

TEST_CASE("a certificate equal to epsilon is met") {
  const auto at = [](std::size_t k) { return k >= 5 ? 0.0 : k >= 3 ? 0.25 : 1.0; };
  CHECK(verkv::smallest_certified_prefix(5, 0.25, at) == 3);
  CHECK(verkv::smallest_certified_prefix(5, 0.2499, at) == 5);
  CHECK(verkv::smallest_certified_prefix(5, 1.0, at) == 0);
  CHECK(verkv::smallest_certified_prefix(5, 0.0, at) == 5);
}

TEST_CASE("the search for k* evaluates at most 2 + log2(n) certificates") {
  for (const std::size_t n : {0u, 1u, 2u, 3u, 64u, 65u, 1000u, 1000000u}) {
    for (const std::size_t answer : {std::size_t{0}, n / 3, n / 2, n}) {
      int evaluations = 0;
      const std::size_t k = verkv::smallest_certified_prefix(n, 0.5, [&](std::size_t at) {
        ++evaluations;
        return at >= answer ? 0.0 : 1.0;
      });
      CHECK(k == std::min(answer, n));
      CHECK(evaluations <= 2 + std::log2(std::max<double>(1.0, static_cast<double>(n))));
    }
  }
}

// The order of Eq. 9 is greedy. For small n the best set of any kind is known by trying all.
TEST_CASE("k* of the exact order is never below the size of the best subset") {
  Random random(57);
  int cases = 0;
  int equal = 0;
  int worth_equal = 0;
  std::size_t most = 0;
  for (int trial = 0; trial < 100; ++trial) {
    const LowCase c = random_low_case(random, 2 + random.below(11));
    const Vector rho = c.odds();
    const double before = certificate_of(c.w, rho, c.denominator, 0.1);
    if (!(before > 0)) continue;
    const double epsilon = before * random.uniform(0.02, 0.9);
    std::size_t best = c.w.size();
    for (std::size_t subset = 0; subset < (std::size_t{1} << c.w.size()); ++subset) {
      Vector rest_w;
      Vector rest_rho;
      for (std::size_t i = 0; i < c.w.size(); ++i) {
        if ((subset >> i & 1) != 0) continue;
        rest_w.push_back(c.w[i]);
        rest_rho.push_back(rho[i]);
      }
      const std::size_t fetched = c.w.size() - rest_w.size();
      if (fetched < best && certificate_of(rest_w, rest_rho, c.denominator, 0.1) <= epsilon) {
        best = fetched;
      }
    }
    const Order exact = order_of(gains_of(c.w, rho, c.denominator, 0.1));
    const std::size_t k = k_star_of(c.w, rho, exact, c.denominator, 0.1, epsilon);
    REQUIRE(k >= best);
    const double beta = verkv::shrinkage_beta<double, double>(c.w, rho);
    Vector worth;
    for (std::size_t i = 0; i < c.w.size(); ++i) {
      worth.push_back(verkv::fetch_worth(c.w[i], rho[i], beta));
    }
    const std::size_t by_worth = k_star_of(c.w, rho, order_of(worth), c.denominator, 0.1, epsilon);
    REQUIRE(by_worth >= best);
    ++cases;
    equal += k == best;
    worth_equal += by_worth == best;
    most = std::max(most, std::max(k, by_worth) - best);
  }
  REQUIRE(cases > 50);
  WARN("of " << cases
             << " random cases the exact order needs no more tokens than the best subset in "
             << equal << ", the order of worth in " << worth_equal << "; at most " << most
             << " more");
}

// ---- Stop rules and the first pivot -------------------------------------------------------------

TEST_CASE(
    "stop rules in units of a head's weights; infinite where off or where D does not compute") {
  const float none = std::numeric_limits<float>::infinity();
  verkv::StopRules rules;
  CHECK_FALSE(rules.certifies());
  CHECK_FALSE(rules.asks_for_more());
  const verkv::RuleThresholds off = verkv::thresholds(rules, 8);
  CHECK(off.worth == std::numeric_limits<float>::max());  // nothing is worth more
  CHECK(off.weight == none);
  CHECK(off.target == kInfinity);

  rules = {.epsilon = 0.25, .log_term = 3, .risk = 0.5, .probability = 0.125};
  CHECK(rules.certifies());
  CHECK(rules.asks_for_more());
  const verkv::RuleThresholds on = verkv::thresholds(rules, 8);
  CHECK(on.worth == 32);
  CHECK(on.weight == 1);
  CHECK(on.target < 0.25);
  CHECK_THAT(on.target * verkv::kOutward, Catch::WithinRel(0.25, verkv::tolerance::kClosedForm));
  CHECK(verkv::thresholds(rules, 1e30).worth == std::numeric_limits<float>::max());

  for (const double d : {0.0, -1.0, kInfinity, kNaN}) {
    const verkv::RuleThresholds nothing = verkv::thresholds(rules, d);
    CHECK(nothing.worth == none);
    CHECK(nothing.weight == none);
    CHECK(nothing.target == kInfinity);
  }
}

TEST_CASE("the first pivot: where the sample's worth sums to its share of the variance") {
  const std::vector<float> sorted = {1, 2, 4, 8};
  // 40 tokens, 10 a sample: sums 10, 30, 70. V = 0.18 (target D)^2 / l.
  const auto pivot = [&](double variance) {
    return verkv::first_pivot(sorted, 40, 0.5, std::sqrt(variance * 3 / 0.18) / 0.5, 3);
  };
  CHECK(pivot(9) == 1);
  CHECK(pivot(11) == 2);
  CHECK(pivot(29) == 2);
  CHECK(pivot(31) == 4);
  CHECK(pivot(69) == 4);
  CHECK(pivot(71) == 8);
  CHECK(pivot(1e9) == 8);
  CHECK(verkv::first_pivot(std::vector<float>{3}, 1, 0.5, 1, 3) == 3);
}

// ---- The order of worth ------------------------------------------------------------------------

TEST_CASE("worth is the integral of the mean square error's slope in the weight") {
  Random random(58);
  for (int trial = 0; trial < 200; ++trial) {
    const double rho = trial % 10 == 0 ? 0.0 : std::exp(3 * random.normal());
    const double w = std::exp(2 * random.normal());
    const double beta = std::exp(2 * random.normal());
    // The slope 2 min(x / rho, beta) is linear up to the corner x = beta rho and constant beyond,
    // so the midpoint rule on the two parts is exact.
    const double corner = std::min(w, beta * rho);
    const double low = rho > 0 ? corner * 2 * std::min(corner / 2 / rho, beta) : 0.0;
    const double high = (w - corner) * 2 * beta;
    REQUIRE_THAT(verkv::fetch_worth(w, rho, beta),
                 Catch::WithinRel(low + high, verkv::tolerance::kIdentity));
  }
}

// Envelope theorem: at the minimum over lambda the slope in w_i is that at fixed lambda and beta.
TEST_CASE("the slope of the mean square error in a weight is 2 min(t, beta)") {
  Random random(59);
  for (int trial = 0; trial < 100; ++trial) {
    const LowCase c = random_low_case(random, 20);
    const std::size_t i = random.below(20);
    if (c.w[i] == 0 || c.r[i] == 0) continue;
    const Vector rho = c.odds();
    const auto error_at = [&](double w) {
      Vector changed = c.w;
      changed[i] = w;
      const double beta = verkv::shrinkage_beta<double, double>(changed, rho);
      return verkv::tail_terms<double, double>(changed, rho, beta).mean_square_error();
    };
    const double h = 1e-4 * c.w[i];
    const double slope = (error_at(c.w[i] + h) - error_at(c.w[i] - h)) / (2 * h);
    const double beta = verkv::shrinkage_beta<double, double>(c.w, rho);
    const double expected = 2 * std::min(c.w[i] / rho[i], beta);
    // The error of a central difference: (h^2 / 6) times the third derivative, and rounding of the
    // error itself, 1e-16 MSE / h; a corner within h costs up to h times the second derivative,
    // which is at most 2 / rho.
    const double rounding = 1e-15 * error_at(c.w[i]) / h;
    REQUIRE(std::fabs(slope - expected) <= 2e-4 * expected + 2 * h / rho[i] + rounding);
  }
}

TEST_CASE("worth: continuous at the corner, (5) without a clip, finite without odds, rising in w") {
  Random random(60);
  for (int trial = 0; trial < 200; ++trial) {
    const double rho = std::exp(3 * random.normal());
    const double beta = std::exp(2 * random.normal());
    const double corner = beta * rho;
    constexpr double kStep = verkv::tolerance::kAcross / 10;
    const double below = verkv::fetch_worth(corner * (1 - kStep), rho, beta);
    const double above = verkv::fetch_worth(corner * (1 + kStep), rho, beta);
    REQUIRE_THAT(above, Catch::WithinRel(below, verkv::tolerance::kAcross));
    REQUIRE_THAT(below, Catch::WithinRel(beta * beta * rho, verkv::tolerance::kAcross));
    const double w = std::exp(2 * random.normal());
    REQUIRE_THAT(verkv::fetch_worth(w, rho, kInfinity),
                 Catch::WithinRel(w * w / rho, verkv::tolerance::kClosedForm));
    REQUIRE(verkv::fetch_worth(w, 0.0, beta) == 2 * beta * w);
    REQUIRE(verkv::fetch_worth(1.01 * w, rho, beta) > verkv::fetch_worth(w, rho, beta));
    REQUIRE(verkv::fetch_worth(w, 1.01 * rho, beta) < verkv::fetch_worth(w, rho, beta));
  }
  CHECK(verkv::fetch_worth(0.0, 0.0, 1.0) == 0);
  CHECK(verkv::fetch_worth(0.0, 0.0, 0.0) == 0);
  CHECK(verkv::fetch_worth(0.0f, 2.0f, 1.0f) == 0.0f);
  CHECK(verkv::fetch_worth(3.0, kInfinity, 1.0) == 0);  // a token of H has nothing to gain
}

TEST_CASE("worth scales with the square of the weights: the order does not see a shift of logits") {
  Random random(61);
  const LowCase c = random_low_case(random, 50);
  const Vector rho = c.odds();
  const double beta = verkv::shrinkage_beta<double, double>(c.w, rho);
  for (std::size_t i = 0; i < c.w.size(); ++i) {
    CHECK(verkv::fetch_worth(0x1p-30 * c.w[i], rho[i], 0x1p-30 * beta) ==
          0x1p-60 * verkv::fetch_worth(c.w[i], rho[i], beta));
  }
}

// ---- Sorting -----------------------------------------------------------------------------------

TEST_CASE("descending order, ties to the lower index") {
  CHECK(order_of({}).empty());
  CHECK(order_of({3}) == Order{0});
  CHECK(order_of({1, 3, 2, 3, 1}) == Order{1, 3, 2, 0, 4});
  CHECK(order_of({0.0, -0.0, kInfinity, -1, kInfinity}) == Order{2, 4, 0, 1, 3});
  Random random(62);
  for (int trial = 0; trial < 100; ++trial) {
    Vector value;
    for (std::size_t i = random.below(300); i > 0; --i) {
      value.push_back(static_cast<double>(random.below(20)));
    }
    const Indices expected = verkv::reference::descending(value);
    REQUIRE(order_of(value) == Order(expected.begin(), expected.end()));
  }
}

TEST_CASE("values that are not numbers come first and break nothing") {
  CHECK(order_of({1, kNaN, 3, kNaN, 2}) == Order{1, 3, 2, 4, 0});
  Random random(63);
  for (int trial = 0; trial < 50; ++trial) {
    Vector value;
    for (int i = 0; i < 500; ++i) value.push_back(random.below(3) == 0 ? kNaN : random.normal());
    Order order = order_of(value);
    std::sort(order.begin(), order.end());
    Order all(500);
    std::iota(all.begin(), all.end(), std::uint32_t{0});
    REQUIRE(order == all);
  }
}

}  // namespace
