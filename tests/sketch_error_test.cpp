#include <verkv/sketch_error.hpp>

#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "catch.hpp"
#include "reference/statistics.hpp"

namespace {

using verkv::reference::Random;

constexpr double kInfinite = std::numeric_limits<double>::infinity();

struct Token {
  double exact;  // logits, less the shift
  double sketched;
  double r;
};

// From the definition, in double.
double expected(const std::vector<Token>& tokens) {
  double weight = 0;
  double squares = 0;
  double errors = 0;
  for (const Token& t : tokens) {
    const double g = std::exp(t.sketched / 2) / t.r;
    weight += g;
    squares += g * g;
    errors += g * std::pow(t.exact - t.sketched, 2);
  }
  if (weight == 0) return kInfinite;
  return std::sqrt(errors / weight * (1 + 4 / (weight * weight / squares)));
}

double measured(const std::vector<Token>& tokens) {
  double weight = 0;
  double squares = 0;
  double errors = 0;
  for (const Token& t : tokens) {
    const verkv::SketchErrorTerms terms =
        verkv::sketch_error_terms(verkv::weight_exp(static_cast<float>(t.sketched)),
                                  static_cast<float>(t.exact), static_cast<float>(t.r / (1 - t.r)));
    weight += static_cast<double>(terms.weight);
    squares += static_cast<double>(terms.weight_square);
    errors += static_cast<double>(terms.error_square);
  }
  return verkv::sketch_error(weight, squares, errors);
}

TEST_CASE("weight_log undoes weight_exp, on every exponent and at its borders") {
  Random random(1);
  for (int i = 0; i < 100000; ++i) {
    const double x = -87 * random.uniform(0, 1);
    const float w = verkv::weight_exp(static_cast<float>(x));
    INFO("w = " << w);
    REQUIRE(std::fabs(static_cast<double>(verkv::weight_log(w)) -
                      std::log(static_cast<double>(w))) <= 1e-5);
  }
  for (int exponent = -126; exponent <= 0; ++exponent) {
    for (const double mantissa : {1.0, std::sqrt(2.0), std::nextafter(2.0f, 0.0f) / 2.0}) {
      const float w = static_cast<float>(std::ldexp(mantissa, exponent));
      REQUIRE(std::fabs(static_cast<double>(verkv::weight_log(w)) -
                        std::log(static_cast<double>(w))) <= 1e-5);
    }
  }
  CHECK(verkv::weight_log(1.0f) == 0.0f);
  CHECK(std::isnan(verkv::weight_log(std::numeric_limits<float>::quiet_NaN())));
}

TEST_CASE("The sketch error is that of its definition") {
  Random random(2);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<Token> tokens(1 + random.below(300));
    for (Token& t : tokens) {
      t.sketched = -20 * random.uniform(0, 1);
      t.exact = t.sketched + 2 * random.normal();
      t.r = random.uniform(0.01, 0.99);
    }
    CHECK_THAT(measured(tokens), Catch::WithinRel(expected(tokens), 1e-5));
  }
  CHECK(measured({}) == kInfinite);
  CHECK(measured({{-3.0, -3.0, 0.5}}) < 1e-5);
  // One token is worth one: its error counts sqrt(5) times.
  CHECK_THAT(measured({{-3.0, -4.0, 0.5}}), Catch::WithinRel(std::sqrt(5.0), 1e-5));
  // What the sketch takes for nothing is far off if it is something, and right if it is not.
  CHECK(measured({{5.0, -200.0, 0.5}}) > 90);
  CHECK(measured({{-150.0, -200.0, 0.5}}) == 0);
  CHECK(measured({{std::nan(""), -4.0, 0.5}}) > 1e5);
  CHECK(measured({{-4.0, std::nan(""), 0.5}, {-4.0, -4.0, 0.5}}) == kInfinite);
}

TEST_CASE("What is known of drawn tokens is true of all tokens") {
  // Errors of deviation 0.7 that do not depend on the draw: the mean over many draws of s^2, which
  // is sketch_error^2 less its doubt, is their mean square over all tokens, weighed by sqrt(w).
  Random random(3);
  std::vector<Token> all(2000);
  double weight = 0;
  double errors = 0;
  for (Token& t : all) {
    t.sketched = -3 + 2 * random.normal();
    t.exact = t.sketched + 0.7 * random.normal();
    t.r = random.uniform(0.05, 0.9);
    weight += std::exp(t.sketched / 2);
    errors += std::exp(t.sketched / 2) * std::pow(t.exact - t.sketched, 2);
  }
  double mean = 0;
  double square = 0;
  constexpr int draws = 400;
  for (int i = 0; i < draws; ++i) {
    double w = 0;
    double e = 0;
    for (const Token& t : all) {
      if (random.uniform(0, 1) >= t.r) continue;
      const verkv::SketchErrorTerms terms = verkv::sketch_error_terms(
          verkv::weight_exp(static_cast<float>(t.sketched - 10)), static_cast<float>(t.exact - 10),
          static_cast<float>(t.r / (1 - t.r)));
      w += static_cast<double>(terms.weight);
      e += static_cast<double>(terms.error_square);
    }
    mean += e / w / draws;
    square += (e / w) * (e / w) / draws;
  }
  // Four deviations of the mean, and the bias of a ratio, of the order of one over the sample.
  const double deviation = std::sqrt((square - mean * mean) / draws);
  CHECK(std::fabs(mean - errors / weight) < 4 * deviation + 0.01 * mean);
}

TEST_CASE("A certificate is enlarged from a sketch error of 1 on, and never made smaller") {
  CHECK(verkv::enlarged_for_sketch(0.5, 0) == 0.5);
  CHECK(verkv::enlarged_for_sketch(0.5, 1) == 0.5);
  double last = 1;
  for (double error = 1.001; error < 7.5; error += 0.01) {
    const double now = verkv::enlarged_for_sketch(1, error);
    REQUIRE_THAT(now, Catch::WithinRel(std::exp(error * error - 1), 1e-5));
    REQUIRE(now >= last);
    last = now;
    REQUIRE(verkv::enlarges(error));
  }
  CHECK_FALSE(verkv::enlarges(1));
  for (const double none : {7.5, kInfinite, std::nan("")}) {
    CHECK(verkv::enlarged_for_sketch(1, none) == kInfinite);
    CHECK(verkv::enlarges(none));
  }
  // Nothing weighs anything: so it stays unless the sketch is known to be far off.
  CHECK(verkv::enlarged_for_sketch(0, 3) == 0);
  CHECK(verkv::enlarged_for_sketch(0, kInfinite) == 0);
  CHECK(verkv::enlarged_for_sketch(0, 100) == kInfinite);
  CHECK(verkv::enlarged_for_sketch(kInfinite, 0.1) == kInfinite);
}

TEST_CASE("At most 512 slots are measured, spread over all") {
  CHECK(verkv::measured_stride(0) == 0);
  for (std::int64_t drawn = 1; drawn < 5000; ++drawn) {
    const std::int64_t stride = verkv::measured_stride(drawn);
    REQUIRE(stride >= 1);
    const std::int64_t taken = (drawn + stride - 1) / stride;
    REQUIRE(taken <= verkv::kMeasuredTokens);
    REQUIRE(2 * taken > std::min(drawn, verkv::kMeasuredTokens));
  }
}

}  // namespace
