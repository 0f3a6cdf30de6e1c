// The method in double, by brute force, from the equations of the paper: what every stage header is
// compared with. Nothing here is clever or fast, and nothing is shared with the headers under test.
//
// All formulas are in the paper's terms, inclusion probabilities r (not odds). L, the low set, is
// whatever is passed: the caller leaves tokens with r = 1 out. Where r = 0 makes a formula 0/0, its
// limit for r -> 0 is written out and named.
#ifndef VERKV_TESTS_REFERENCE_HPP
#define VERKV_TESTS_REFERENCE_HPP

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include <verkv/types.hpp>

namespace verkv::reference {

using Vector = std::vector<double>;
using Indices = std::vector<std::size_t>;

inline double sum(const Vector& x) { return std::accumulate(x.begin(), x.end(), 0.0); }

// ---- Equation 3: inclusion probabilities -------------------------------------------------------

struct Inclusion {
  double c = 0;            // of Eq. 3; infinite where every positive score is kept
  bool has_scale = false;  // false where r does not come from a finite c
  Vector r;
};

// r_i = min(1, c tau_i) with sum r_i = budget. c by bisection: the sum grows with c.
inline Inclusion inclusion(const Vector& tau, double budget) {
  const std::size_t n = tau.size();
  Inclusion result;
  result.r.assign(n, 0.0);
  result.c = std::numeric_limits<double>::infinity();
  if (n == 0) return result;
  if (budget >= static_cast<double>(n)) {
    result.r.assign(n, 1.0);
    return result;
  }
  std::size_t positive = 0;
  for (const double t : tau) positive += t > 0;
  if (positive == 0) {  // all scores alike: uniform
    result.r.assign(n, std::max(0.0, budget) / static_cast<double>(n));
    return result;
  }
  if (!(budget > 0)) {
    result.c = 0;
    return result;
  }
  if (budget >= static_cast<double>(positive)) {
    for (std::size_t i = 0; i < n; ++i) result.r[i] = tau[i] > 0 ? 1.0 : 0.0;
    return result;
  }
  const auto spent = [&](double c) {
    double total = 0;
    for (const double t : tau) total += std::min(1.0, c * t);
    return total;
  };
  double low = 0;
  double high = 1;
  while (spent(high) < budget) high *= 2;
  for (;;) {
    const double middle = low + (high - low) / 2;
    if (middle <= low || middle >= high) break;
    (spent(middle) < budget ? low : high) = middle;
  }
  result.c = high;
  result.has_scale = true;
  for (std::size_t i = 0; i < n; ++i) result.r[i] = std::min(1.0, high * tau[i]);
  return result;
}

// ---- Weights -----------------------------------------------------------------------------------

struct Weights {
  double shift = 0;        // the largest logit
  Vector w;                // exp(logit - shift)
  double denominator = 0;  // D
};

inline Weights weights(const Vector& logit) {
  Weights result;
  result.shift = -std::numeric_limits<double>::infinity();
  for (const double l : logit) result.shift = std::max(result.shift, l);
  for (const double l : logit) result.w.push_back(std::exp(l - result.shift));
  result.denominator = sum(result.w);
  return result;
}

// ---- Definition 2: the bounded shrinkage estimator ---------------------------------------------

inline double clip(double x, double low, double high) { return std::min(high, std::max(low, x)); }

// lambda_i of Definition 2 at a given beta. A token without weight has lambda = 1: it contributes
// nothing either way, and the formula tends to 1 as w tends to 0.
inline double lambda_at(double w, double r, double beta) {
  if (w == 0) return 1;
  return clip(beta * r / (w * (1 - r)), r, 1);
}

// sum over L of w_i (1 - lambda_i): the bias that lambda leaves.
inline double bias(const Vector& w, const Vector& lambda) {
  double total = 0;
  for (std::size_t i = 0; i < w.size(); ++i) total += w[i] * (1 - lambda[i]);
  return total;
}

struct Shrinkage {
  double beta = 0;
  Vector lambda;
};

// beta = sum w_i (1 - lambda_i(beta)): the left side rises with beta and the right side falls, so
// there is one solution, found by bisection to the last bit.
inline Shrinkage shrinkage(const Vector& w, const Vector& r) {
  const auto lambda_of = [&](double beta) {
    Vector lambda;
    for (std::size_t i = 0; i < w.size(); ++i) lambda.push_back(lambda_at(w[i], r[i], beta));
    return lambda;
  };
  const auto rest = [&](double beta) {
    double total = 0;
    for (std::size_t i = 0; i < w.size(); ++i) total += w[i] * (1 - lambda_at(w[i], r[i], beta));
    return total;
  };
  double low = 0;
  double high = sum(w);
  for (;;) {
    const double middle = low + (high - low) / 2;
    if (middle <= low || middle >= high) break;
    (rest(middle) > middle ? low : high) = middle;
  }
  return {high, lambda_of(high)};
}

// Equation 6, for any lambda. A token with r = 0 is never drawn: its summand is taken in the limit,
// lambda^2 w^2 (1 - r) / r with lambda = O(r), which is 0.
inline double variance(const Vector& w, const Vector& r, const Vector& lambda) {
  double total = 0;
  for (std::size_t i = 0; i < w.size(); ++i) {
    if (r[i] > 0) total += lambda[i] * lambda[i] * w[i] * w[i] * (1 - r[i]) / r[i];
  }
  return total;
}

inline double mean_square_error(const Vector& w, const Vector& r, const Vector& lambda) {
  const double b = bias(w, lambda);
  return b * b + variance(w, r, lambda);
}

// Equation 5 for one draw: what L contributes. Z is 0 wherever r is 0.
inline double estimate(const Vector& w, const Vector& r, const Vector& lambda,
                       const std::vector<bool>& z) {
  double total = 0;
  for (std::size_t i = 0; i < w.size(); ++i) {
    if (z[i]) total += lambda[i] * w[i] / r[i];
  }
  return total;
}

// ---- Lemma 1: the certificate ------------------------------------------------------------------

struct Terms {
  double beta = 0;
  double variance = 0;
  double max_jump = 0;
  Vector lambda;
};

// beta, V and b of Lemma 1. For r -> 0 with w > 0, lambda w / r tends to beta / (1 - r) = beta.
inline Terms terms(const Vector& w, const Vector& r) {
  Terms result;
  const Shrinkage s = shrinkage(w, r);
  result.lambda = s.lambda;
  result.beta = s.beta;
  result.variance = variance(w, r, s.lambda);
  for (std::size_t i = 0; i < w.size(); ++i) {
    if (w[i] == 0) continue;
    const double jump = r[i] > 0 ? s.lambda[i] * w[i] / r[i] * std::max(r[i], 1 - r[i]) : s.beta;
    result.max_jump = std::max(result.max_jump, jump);
  }
  return result;
}

// Equation 7.
inline double certificate(const Terms& t, double denominator, double delta) {
  const double l = std::log(2 / delta);
  const double a = t.max_jump * l / 3;
  const double numerator = t.beta + a + std::sqrt(a * a + 2 * t.variance * l);
  return numerator == 0 ? 0.0 : numerator / denominator;
}

inline double certificate(const Vector& w, const Vector& r, double denominator, double delta) {
  return certificate(terms(w, r), denominator, delta);
}

// ---- Equations 9 and 10: order and number of tokens to fetch -----------------------------------

inline Vector without(const Vector& x, std::size_t removed) {
  Vector rest;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (i != removed) rest.push_back(x[i]);
  }
  return rest;
}

// Equation 9: each token is removed in turn and everything is computed again.
inline Vector gains(const Vector& w, const Vector& r, double denominator, double delta) {
  const double before = certificate(w, r, denominator, delta);
  Vector gain;
  for (std::size_t i = 0; i < w.size(); ++i) {
    gain.push_back(before - certificate(without(w, i), without(r, i), denominator, delta));
  }
  return gain;
}

// Indices by descending value, equal ones by ascending index.
inline Indices descending(const Vector& value) {
  Indices order(value.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return value[a] > value[b]; });
  return order;
}

// The certificate of L without the first k tokens of an order.
inline double certificate_after(const Vector& w, const Vector& r, const Indices& order,
                                std::size_t k, double denominator, double delta) {
  Vector rest_w;
  Vector rest_r;
  for (std::size_t p = k; p < order.size(); ++p) {
    rest_w.push_back(w[order[p]]);
    rest_r.push_back(r[order[p]]);
  }
  return certificate(rest_w, rest_r, denominator, delta);
}

// Equation 10: k = 0, 1, 2, ... until the certificate is below epsilon.
inline std::size_t k_star(const Vector& w, const Vector& r, const Indices& order,
                          double denominator, double delta, double epsilon) {
  for (std::size_t k = 0; k < order.size(); ++k) {
    if (certificate_after(w, r, order, k, denominator, delta) < epsilon) return k;
  }
  return order.size();
}

// ---- Dense attention ---------------------------------------------------------------------------

struct Attention {
  Vector output;
  double log_sum = -std::numeric_limits<double>::infinity();  // natural logarithm of D, unshifted
};

// Rows of key and value are tokens. soft_cap = 0 is off.
inline Attention attention(const Vector& query, const std::vector<Vector>& key,
                           const std::vector<Vector>& value, double scale, double soft_cap) {
  Attention result;
  if (key.empty()) return result;
  Vector logit;
  for (const Vector& k : key) {
    double l = scale * std::inner_product(k.begin(), k.end(), query.begin(), 0.0);
    if (soft_cap > 0) l = soft_cap * std::tanh(l / soft_cap);
    logit.push_back(l);
  }
  const Weights s = weights(logit);
  result.output.assign(value[0].size(), 0.0);
  for (std::size_t i = 0; i < key.size(); ++i) {
    for (std::size_t j = 0; j < value[i].size(); ++j) {
      result.output[j] += s.w[i] / s.denominator * value[i][j];
    }
  }
  result.log_sum = s.shift + std::log(s.denominator);
  return result;
}

// ---- 16-bit formats ----------------------------------------------------------------------------

// The value of an IEEE binary16 from its fields; NaN for all of its NaNs.
inline double value_of_half(Half h) {
  const int sign = h.bits >> 15 != 0 ? -1 : 1;
  const int exponent = (h.bits >> 10) & 31;
  const int mantissa = h.bits & 1023;
  if (exponent == 31) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

// ---- The sketch --------------------------------------------------------------------------------

// Cells of a symmetric quantiser end half way between levels; the code is the index of the nearest
// level.
inline std::size_t nearest_level(const Vector& levels, double x) {
  std::size_t best = 0;
  for (std::size_t i = 1; i < levels.size(); ++i) {
    if (std::fabs(x - levels[i]) < std::fabs(x - levels[best])) best = i;
  }
  return best;
}

// Density and distribution function of the standard normal.
inline double normal_density(double x) {
  return std::exp(-x * x / 2) / std::sqrt(2 * std::acos(-1.0));
}
inline double normal_cdf(double x) { return std::erfc(-x / std::sqrt(2.0)) / 2; }

// Mean of a standard normal variable in (a, b): what a Lloyd-Max level has to be for its cell.
inline double normal_mean_in(double a, double b) {
  return (normal_density(a) - normal_density(b)) / (normal_cdf(b) - normal_cdf(a));
}

}  // namespace verkv::reference

#endif  // VERKV_TESTS_REFERENCE_HPP
