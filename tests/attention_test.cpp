#include <verkv/attention.hpp>

#include <Eigen/Dense>
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <verkv/sample.hpp>
#include <verkv/shrinkage.hpp>

#include "catch.hpp"
#include "reference/reference.hpp"
#include "reference/statistics.hpp"
#include "tolerance.hpp"

namespace {

using verkv::reference::Attention;
using verkv::reference::Random;
using Vector = std::vector<double>;

constexpr float kInfinityF = std::numeric_limits<float>::infinity();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// ---- weight_exp --------------------------------------------------------------------------------

double exp_error(float x) {
  return std::fabs(static_cast<double>(verkv::weight_exp(x)) / std::exp(static_cast<double>(x)) -
                   1);
}

// 2^-24 for the last rounding, about as much for rounding y, the polynomial's own 1e-8, and the
// reduced argument's error: together below 2e-7.
TEST_CASE("weight_exp: relative error below 2e-7 on [-87, 60]") {
  double worst = 0;
  for (float x = -87; x <= 60; x += 0.000103f) worst = std::max(worst, exp_error(x));
  // Every 4001st of all binary32 numbers of the range, so small arguments too.
  for (std::uint32_t bits = 0; bits <= std::bit_cast<std::uint32_t>(60.0f); bits += 4001) {
    worst = std::max(worst, exp_error(std::bit_cast<float>(bits)));
  }
  for (std::uint32_t bits = 0; bits <= std::bit_cast<std::uint32_t>(87.0f); bits += 4001) {
    worst = std::max(worst, exp_error(-std::bit_cast<float>(bits)));
  }
  // Around the borders of the reduction, (k + 1/2) log 2.
  for (int k = -125; k <= 86; ++k) {
    float x = static_cast<float>((k + 0.5) * std::log(2.0));
    for (int i = 0; i < 8; ++i) x = std::nextafter(x, -kInfinityF);
    for (int i = 0; i < 16; ++i, x = std::nextafter(x, kInfinityF)) {
      if (x >= -87 && x <= 60) worst = std::max(worst, exp_error(x));
    }
  }
  CHECK(worst < verkv::tolerance::kExponential);
}

TEST_CASE("weight_exp: exact at 0, cut off outside, NaN kept") {
  CHECK(verkv::weight_exp(0.0f) == 1.0f);
  CHECK(verkv::weight_exp(-0.0f) == 1.0f);
  CHECK(verkv::weight_exp(-87.0f) > 0.0f);
  CHECK(std::isnormal(verkv::weight_exp(-87.0f)));
  CHECK(verkv::weight_exp(std::nextafter(-87.0f, -100.0f)) == 0.0f);
  CHECK(verkv::weight_exp(-1e30f) == 0.0f);
  CHECK(verkv::weight_exp(-kInfinityF) == 0.0f);
  CHECK(std::isfinite(verkv::weight_exp(60.0f)));
  CHECK(verkv::weight_exp(61.0f) == verkv::weight_exp(60.0f));
  CHECK(verkv::weight_exp(kInfinityF) == verkv::weight_exp(60.0f));
  CHECK(std::isnan(verkv::weight_exp(std::numeric_limits<float>::quiet_NaN())));
}

TEST_CASE("weight_exp_within is weight_exp between the cuts") {
  int differ = 0;
  for (float x = -87; x <= 60; x += 0.00103f)
    differ += verkv::weight_exp_within(x) != verkv::weight_exp(x);
  CHECK(differ == 0);
  CHECK(verkv::weight_exp_within(-87.0f) == verkv::weight_exp(-87.0f));
  CHECK(verkv::weight_exp_within(60.0f) == verkv::weight_exp(60.0f));
  CHECK(std::isnan(verkv::weight_exp_within(std::numeric_limits<float>::quiet_NaN())));
}

TEST_CASE("weight_exp never falls by more than its rounding") {
  float before = 0;
  int falls = 0;
  for (float x = -87; x <= 60; x += 0.0013f) {
    const float now = verkv::weight_exp(x);
    falls += now < before;
    before = now;
  }
  CHECK(falls == 0);
}

TEST_CASE("soft cap") {
  CHECK(verkv::soft_capped(3.5, 0.0) == 3.5);
  CHECK_THAT(verkv::soft_capped(3.5, 30.0),
             Catch::WithinRel(30 * std::tanh(3.5 / 30), verkv::tolerance::kClosedForm));
  CHECK(verkv::soft_capped(1e9, 30.0) == 30.0);
  CHECK(verkv::soft_capped(-1e9f, 30.0f) == -30.0f);
  // In binary32 by a sequence of its own, on both sides of its seam.
  for (double x = -12; x <= 12; x += 1.0 / 512) {
    const double expected = std::tanh(x);
    REQUIRE(std::fabs(static_cast<double>(verkv::fixed_tanh(static_cast<float>(x))) - expected) <=
            verkv::tolerance::kTanh * std::fabs(expected));
  }
  CHECK(verkv::fixed_tanh(0.0f) == 0.0f);
  CHECK(verkv::fixed_tanh(1e-30f) == 1e-30f);
  CHECK(std::isnan(verkv::fixed_tanh(std::numeric_limits<float>::quiet_NaN())));
  CHECK(std::isnan(verkv::soft_capped(std::numeric_limits<double>::quiet_NaN(), 30.0)));
}

// ---- Dense attention ---------------------------------------------------------------------------

struct Problem {
  Vector query;
  std::vector<Vector> key;
  std::vector<Vector> value;
  double scale = 1;
  double soft_cap = 0;
};

Problem random_problem(Random& random, std::size_t n, std::size_t dim, std::size_t value_dim) {
  Problem p;
  p.scale = random.uniform(0.01, 2);
  p.soft_cap = random.below(2) == 0 ? 0.0 : random.uniform(1, 50);
  const double size = std::exp(2 * random.normal());
  for (std::size_t j = 0; j < dim; ++j) p.query.push_back(size * random.normal());
  for (std::size_t i = 0; i < n; ++i) {
    p.key.emplace_back();
    p.value.emplace_back();
    for (std::size_t j = 0; j < dim; ++j) p.key[i].push_back(random.normal());
    for (std::size_t j = 0; j < value_dim; ++j) p.value[i].push_back(random.normal());
  }
  return p;
}

// Tokens [begin, end) of a problem by the function under test.
Attention attend(const Problem& p, std::size_t begin, std::size_t end, std::size_t value_dim) {
  Attention result;
  result.output.assign(value_dim, -7.0);  // has to be overwritten
  Vector scratch(end - begin);
  const auto at = [begin](const std::vector<Vector>& rows) {
    return [&rows, begin](std::int64_t i, std::int64_t j) {
      return rows[begin + static_cast<std::size_t>(i)][static_cast<std::size_t>(j)];
    };
  };
  result.log_sum =
      verkv::dense_attention(static_cast<std::int64_t>(end - begin), p.query, p.scale, p.soft_cap,
                             at(p.key), at(p.value), scratch, result.output);
  return result;
}

bool near(const Attention& a, const Attention& b, double tolerance) {
  bool same = std::fabs(a.log_sum - b.log_sum) <= tolerance * (1 + std::fabs(b.log_sum)) &&
              a.output.size() == b.output.size();
  for (std::size_t i = 0; same && i < a.output.size(); ++i) {
    same = std::fabs(a.output[i] - b.output[i]) <= tolerance * (1 + std::fabs(b.output[i]));
  }
  return same;
}

TEST_CASE("dense attention against matrix products and against the reference") {
  Random random(81);
  for (int trial = 0; trial < 200; ++trial) {
    const std::size_t n = 1 + random.below(100);
    const std::size_t dim = 1 + random.below(70);
    const std::size_t value_dim = 1 + random.below(70);
    const Problem p = random_problem(random, n, dim, value_dim);

    Eigen::MatrixXd key(n, dim);
    Eigen::MatrixXd value(n, value_dim);
    for (std::size_t i = 0; i < n; ++i) {
      key.row(static_cast<Eigen::Index>(i)) =
          Eigen::Map<const Eigen::RowVectorXd>(p.key[i].data(), static_cast<Eigen::Index>(dim));
      value.row(static_cast<Eigen::Index>(i)) = Eigen::Map<const Eigen::RowVectorXd>(
          p.value[i].data(), static_cast<Eigen::Index>(value_dim));
    }
    const Eigen::Map<const Eigen::VectorXd> query(p.query.data(), static_cast<Eigen::Index>(dim));
    Eigen::ArrayXd logit = p.scale * (key * query).array();
    if (p.soft_cap > 0) logit = p.soft_cap * (logit / p.soft_cap).tanh();
    const double top = logit.maxCoeff();
    const Eigen::VectorXd weight = (logit - top).exp();
    const Eigen::VectorXd output = value.transpose() * weight / weight.sum();
    Attention expected;
    expected.output.assign(output.data(), output.data() + output.size());
    expected.log_sum = top + std::log(weight.sum());

    const Attention actual = attend(p, 0, n, value_dim);
    INFO("trial " << trial << ", n " << n << ", dim " << dim);
    REQUIRE(near(actual, expected, verkv::tolerance::kAttention));
    REQUIRE(near(actual, verkv::reference::attention(p.query, p.key, p.value, p.scale, p.soft_cap),
                 verkv::tolerance::kAttention));
  }
}

TEST_CASE("dense attention: no token, one token, equal logits, logits beyond exp") {
  Random random(82);
  Problem p = random_problem(random, 5, 8, 3);
  const Attention none = attend(p, 0, 0, 3);
  CHECK(none.log_sum == -kInfinity);
  CHECK(none.output == Vector(3, 0.0));
  const Attention one = attend(p, 2, 3, 3);
  CHECK(one.output == p.value[2]);

  std::fill(p.query.begin(), p.query.end(), 0.0);
  const Attention equal = attend(p, 0, 5, 3);
  CHECK_THAT(equal.log_sum, Catch::WithinRel(std::log(5.0), verkv::tolerance::kClosedForm));

  p.soft_cap = 0;
  p.scale = 1;
  p.query.assign(8, 0.0);
  p.query[0] = 1;
  for (std::size_t i = 0; i < 5; ++i) p.key[i][0] = 4000 + static_cast<double>(i);
  const Attention far = attend(p, 0, 5, 3);
  Problem shifted = p;
  for (Vector& k : shifted.key) k[0] -= 4000;
  const Attention home = attend(shifted, 0, 5, 3);
  CHECK_THAT(far.log_sum, Catch::WithinRel(home.log_sum + 4000, verkv::tolerance::kClosedForm));
  for (std::size_t j = 0; j < 3; ++j) {
    CHECK_THAT(far.output[j], Catch::WithinAbs(home.output[j], verkv::tolerance::kClosedForm));
  }
}

TEST_CASE("dense attention: a logit that is not a number is not hidden") {
  Random random(83);
  Problem p = random_problem(random, 4, 8, 2);
  p.key[1][3] = std::numeric_limits<double>::quiet_NaN();
  const Attention bad = attend(p, 0, 4, 2);
  CHECK(std::isnan(bad.log_sum));
  CHECK(std::isnan(bad.output[0]));
}

// ---- The estimate of the output ----------------------------------------------------------------

// With a_i the coefficient of a token of L (0 where it was not drawn),
//   o_hat - o = (1 / D_hat) sum over L of (a_i - 1) w_i (v_i - o)
// ties the output's error to the same summands that the certificate bounds.
TEST_CASE("the error of the output is the weighted sum of the low tokens' deviations") {
  Random random(85);
  for (int trial = 0; trial < 100; ++trial) {
    const std::size_t n = 2 + random.below(60);
    const std::size_t high = 1 + random.below(n - 1);  // tokens below are resident
    Vector logit;
    Vector value;
    for (std::size_t i = 0; i < n; ++i) {
      logit.push_back(2 * random.normal());
      value.push_back(random.normal());
    }
    const auto s = verkv::reference::weights(logit);
    Vector w(s.w.begin() + static_cast<std::ptrdiff_t>(high), s.w.end());
    Vector rho;
    for (std::size_t i = 0; i < w.size(); ++i) rho.push_back(std::exp(random.normal()));
    const double beta = verkv::shrinkage_beta<double, double>(w, rho);
    double numerator = 0;
    double denominator = 0;
    double dense = 0;
    Vector coefficient(n, 1.0);
    for (std::size_t i = 0; i < n; ++i) {
      if (i >= high) {
        const double odds = rho[i - high];
        const bool z = random.uniform() < verkv::probability_from_odds(odds);
        coefficient[i] = z ? verkv::drawn_coefficient(s.w[i], s.w[i], odds, beta, kInfinity) : 0.0;
      }
      numerator += coefficient[i] * s.w[i] * value[i];
      denominator += coefficient[i] * s.w[i];
      dense += s.w[i] * value[i] / s.denominator;
    }
    double identity = 0;
    for (std::size_t i = high; i < n; ++i) {
      identity += (coefficient[i] - 1) * s.w[i] * (value[i] - dense) / denominator;
    }
    REQUIRE_THAT(numerator / denominator - dense,
                 Catch::WithinAbs(identity, verkv::tolerance::kAttention));
  }
}

}  // namespace
