// Inclusion probabilities of PoissonComp: Eq. 3 of the paper by water-filling.
//
//   r_i = min(1, c tau_i),  c such that  sum r_i = budget                                  (Eq. 3)
//
// Everything downstream works with the odds rho = r / (1 - r): with them the closed forms of
// shrinkage.hpp and certificate.hpp have no division by 1 - r, "always resident" is rho = infinity
// and "never drawn" is rho = 0.
#ifndef VERKV_INCLUSION_HPP
#define VERKV_INCLUSION_HPP

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>

#include <verkv/config.hpp>
#include <verkv/types.hpp>

namespace verkv {

// rho = r / (1 - r); infinite at r >= 1.
template <class T>
VERKV_HD constexpr T odds_from_probability(T r) {
  return r >= T(1) ? std::numeric_limits<T>::infinity() : r / (T(1) - r);
}

// r = rho / (1 + rho); 1 at rho = infinity.
template <class T>
VERKV_HD constexpr T probability_from_odds(T rho) {
  return rho == std::numeric_limits<T>::infinity() ? T(1) : rho / (T(1) + rho);
}

// What the backend stores per token and draws with. Rounding the odds *before* the draw keeps the
// estimator unbiased: the probability used later is exactly the one that was drawn with. Odds above
// 2^16 become infinite (r = 1): such a token would be drawn in all but one case in 65,536 anyway,
// and finite odds stay summable in binary32.
VERKV_HD constexpr Positive16 stored_odds(double r) {
  const double rho = odds_from_probability(r);
  return rho > 65536.0 ? kPositive16Infinity : to_positive16(static_cast<float>(rho));
}

// First index whose importance is NaN, negative or infinite.
template <class T>
std::optional<std::int64_t> first_invalid_importance(std::span<const T> tau) {
  for (std::size_t i = 0; i < tau.size(); ++i) {
    if (!(tau[i] >= T(0)) || tau[i] == std::numeric_limits<T>::infinity()) {
      return static_cast<std::int64_t>(i);
    }
  }
  return std::nullopt;
}

// The solution of Eq. 3 for one pool.
struct Inclusion {
  double scale = 0;               // c; infinite when every token with tau > 0 is kept
  std::optional<double> uniform;  // r of every token, whatever its tau (all tau equal to 0)

  // r of a token with importance tau >= 0. tau = 0 gives 0 even when c is infinite.
  VERKV_HD double probability(double tau) const {
    if (uniform) return *uniform;
    if (tau <= 0) return 0;
    const double r = scale * tau;
    return r < 1 ? r : 1;
  }
};

// Solves Eq. 3 for the pool `tau` (n >= 0 valid scores) and a budget in tokens (any real >= 0).
// scratch: at least tau.size() elements; holds the sorted scores afterwards. O(n log n), no
// allocation.
//  - budget >= n keeps every token.
//  - all tau 0: uniform r = budget / n.
//  - fewer positive scores than the budget: those are kept, the others have r = 0, the rest of the
//    budget is not spent.
template <class T>
Inclusion solve_inclusion(std::span<const T> tau, double budget_tokens, std::span<T> scratch) {
  const std::size_t n = tau.size();
  Inclusion result;
  if (n == 0) return result;
  if (budget_tokens >= static_cast<double>(n)) {
    result.uniform = 1;
    return result;
  }
  if (!(budget_tokens > 0)) return result;

  std::copy(tau.begin(), tau.end(), scratch.begin());
  const auto sorted = scratch.first(n);
  std::sort(sorted.begin(), sorted.end(), std::greater<T>());
  std::size_t positive = n;
  while (positive > 0 && sorted[positive - 1] <= T(0)) --positive;
  if (positive == 0) {
    result.uniform = budget_tokens / static_cast<double>(n);
    return result;
  }
  if (budget_tokens >= static_cast<double>(positive)) {
    result.scale = std::numeric_limits<double>::infinity();
    return result;
  }

  // Walk from the least important up: with h saturated, c = (budget - h) / (sum of the rest). The
  // smallest h at which the largest unsaturated score does not pass 1 is the solution, and going
  // down in h keeps the running sum free of cancellation.
  double rest = 0;
  double scale = 0;
  for (std::size_t h = positive; h-- > 0;) {
    rest += static_cast<double>(sorted[h]);
    const double room = budget_tokens - static_cast<double>(h);
    if (room <= 0) continue;
    const double c = room / rest;
    if (c * static_cast<double>(sorted[h]) > 1) break;
    scale = c;
  }
  result.scale = scale;
  return result;
}

// As solve_inclusion, with every token kept drawable: r_i = floor + (1 - floor) min(1, c tau_i),
// still summing to the budget. Needs 0 <= floor < 1 and floor * n <= budget; floor = 0 is Eq. 3
// itself.
struct FlooredInclusion {
  Inclusion above;
  double floor = 0;

  VERKV_HD double probability(double tau) const {
    return floor + (1 - floor) * above.probability(tau);
  }
};

template <class T>
FlooredInclusion solve_inclusion(std::span<const T> tau, double budget_tokens, double floor,
                                 std::span<T> scratch) {
  FlooredInclusion result;
  result.floor = floor;
  const double paid = floor * static_cast<double>(tau.size());
  result.above = solve_inclusion(tau, std::max(0.0, (budget_tokens - paid) / (1 - floor)), scratch);
  return result;
}

}  // namespace verkv

#endif  // VERKV_INCLUSION_HPP
