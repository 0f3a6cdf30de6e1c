// The Bernstein certificate (Lemma 1, Eq. 7) of the shrinkage estimator, in terms of weights and
// odds. With t_i = w_i / rho_i:
//
//   V = sum rho_i min(beta, t_i)^2                                                            (3)
//   b = max over i of  min(t_i, beta) max(rho_i, 1)                                           (4)
//   eps(L) = (beta + b l/3 + sqrt((b l/3)^2 + 2 V l)) / D,   l = log(2 / delta)           (Eq. 7)
//
// (4) is the paper's max lambda_i w_i / r_i max(r_i, 1 - r_i) rewritten with r = rho / (1 + rho).
// Removing tokens from L never raises eps(L). Scaling all weights and D by one number changes
// nothing.
//
// Dialect: src/cpu/simd/weights-inl.hpp: tail_of
// Dialect: src/cpu/simd/plan-inl.hpp: plan_compact
// Dialect: cuda/terms.cuh: tail_of
// Dialect: include/verkv/fetch_plan.hpp: sum_up
// Dialect: include/verkv/fetch_plan.hpp: without_large
// Dialect: include/verkv/fetch_plan.hpp: without_small
#ifndef VERKV_CERTIFICATE_HPP
#define VERKV_CERTIFICATE_HPP

#include <cmath>
#include <cstddef>
#include <limits>
#include <span>

#include <verkv/config.hpp>

namespace verkv {

// Bias, variance and largest deviation of one summand of the estimator over L.
struct TailTerms {
  double beta = 0;
  double variance = 0;
  double max_jump = 0;

  // Mean square error of D_hat (Eq. 6 at its minimum).
  VERKV_HD constexpr double mean_square_error() const { return beta * beta + variance; }
};

// log(2 / delta), the l of Eq. 7. delta in (0, 1).
inline double log_two_over(double delta) { return std::log(2 / delta); }

// The contribution of one token of L to V (3).
template <class T>
VERKV_HD constexpr T variance_term(T w, T rho, T beta) {
  return w <= beta * rho ? w * (w / rho) : beta * beta * rho;
}

// max(rho, 1) of (4); 1 where rho is no number.
template <class T>
VERKV_HD constexpr T jump_odds(T rho) {
  return rho > T(1) ? rho : T(1);
}

// The candidate of one token of L for b (4); w > 0.
template <class T>
VERKV_HD constexpr T jump_term(T w, T rho, T beta) {
  const T clipped = w <= beta * rho ? w / rho : beta;
  return clipped * jump_odds(rho);
}

// What is known of tokens that a search for the fetch threshold no longer looks at: beta, whatever
// it turns out to be, lies between two bounds, and they are outside of these.
struct SettledTerms {
  // Tokens with t > beta: sums of w and rho, and the largest max(rho, 1); 0 where there are none.
  double above_weight = 0;
  double above_odds = 0;
  float above_largest_odds = 0;
  // Tokens with t <= beta: their V (3) and b (4), which do not depend on beta.
  double below_variance = 0;
  float below_jump = 0;
};

// V and b of open and settled tokens together, at the open tokens' beta.
VERKV_HD constexpr TailTerms joined(const TailTerms& open, const SettledTerms& settled) {
  TailTerms all = open;
  all.variance += settled.below_variance + open.beta * open.beta * settled.above_odds;
  const double below = static_cast<double>(settled.below_jump);
  if (all.max_jump < below) all.max_jump = below;
  const double above = open.beta * static_cast<double>(settled.above_largest_odds);
  if (all.max_jump < above) all.max_jump = above;
  return all;
}

// V and b at a given beta (from shrinkage_beta) over L = {rho finite}. O(n), double, no allocation.
template <class W, class R>
TailTerms tail_terms(std::span<const W> w, std::span<const R> rho, double beta) {
  TailTerms terms;
  terms.beta = beta;
  for (std::size_t i = 0; i < w.size(); ++i) {
    const double wi = static_cast<double>(w[i]);
    const double ri = static_cast<double>(rho[i]);
    if (ri == std::numeric_limits<double>::infinity() || wi == 0) continue;
    terms.variance += variance_term(wi, ri, beta);
    const double jump = jump_term(wi, ri, beta);
    if (jump > terms.max_jump) terms.max_jump = jump;
  }
  return terms;
}

// Eq. 7. L empty (all terms 0) gives 0. NaN in any argument, or a D that is not positive and finite
// beside terms that are not 0, gives infinity: what cannot be computed is never certified.
VERKV_HD inline double certificate(const TailTerms& terms, double denominator, double log_term) {
  const double linear = terms.max_jump * log_term / 3;
  const double numerator =
      terms.beta + linear + std::sqrt(linear * linear + 2 * terms.variance * log_term);
  if (numerator == 0 && denominator == denominator) return 0;
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const double bound = numerator / denominator;
  return bound >= 0 && denominator < infinity ? bound : infinity;
}

// Whether D can divide: a positive finite number.
VERKV_HD constexpr bool is_computable(double denominator) {
  return denominator > 0 && denominator < std::numeric_limits<double>::infinity();
}

// The bound where no token is compressed, so that nothing is estimated. Without any token there is
// no D, and an answer of zeros is exact.
VERKV_HD constexpr double bound_without_estimate(bool computable, bool any_token) {
  return computable || !any_token ? 0 : std::numeric_limits<double>::infinity();
}

// Whether a step reports a bound as certified. epsilon = infinity: nothing was promised.
VERKV_HD constexpr bool is_certified(double bound, double epsilon) {
  return epsilon < std::numeric_limits<double>::infinity() && bound <= epsilon;
}

// Certificates of a step are enlarged by this factor, so that the rounding of the sums in them (W
// and R of beta, V, D) does not turn an upper bound into a lower one. The sums' terms are positive,
// and their relative error is at most 35 * 2^-24 = 2.1e-6 (src/sum_order.hpp, which checks this
// factor). That of D enters eps(L) once, that of V is halved by its root. A beta that is off leaves
// a bias of W_A - beta R_A instead of beta: up to 1 + 2 R_A such errors of beta, beside a root of
// at least beta sqrt(2 l R_A). At delta = 0.1 the factor covers all of it, however the errors fall,
// while the odds R_A of the tokens with t > beta sum to less than 20. Errors that do not all fall
// one way are far smaller.
inline constexpr double kOutward = 1 + 1e-5;

// The certificate that a step reports and decides by.
VERKV_HD inline double outward_certificate(const TailTerms& terms, double denominator,
                                           double log_term) {
  return certificate(terms, denominator, log_term) * kOutward;
}

}  // namespace verkv

#endif  // VERKV_CERTIFICATE_HPP
