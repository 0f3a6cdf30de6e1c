// The bounded shrinkage estimator (Definition 2, Theorem 1) in closed form.
//
// With t_i = w_i / rho_i the fixed point of Definition 2 is
//   lambda_i = min(1, beta rho_i / w_i) = min(1, beta / t_i)                                  (1)
//   beta     = max over subsets A of L of  W_A / (1 + R_A)                                    (2)
// where W_A, R_A are the sums of w and rho over A; the maximiser is A = {i : t_i > beta}.
// The derivation is in docs/math/shrinkage.md.
#ifndef VERKV_SHRINKAGE_HPP
#define VERKV_SHRINKAGE_HPP

#include <cstddef>
#include <limits>
#include <span>

#include <verkv/config.hpp>

namespace verkv {

// lambda_i of (1). Finite for every w >= 0, rho >= 0, beta >= 0; 1 where w = 0.
template <class T>
VERKV_HD constexpr T shrinkage_lambda(T w, T rho, T beta) {
  return w <= beta * rho ? T(1) : beta * rho / w;
}

// What a drawn token's weight is multiplied with: lambda_i / r_i = lambda_i (1 + rho_i) / rho_i,
// with lambda_i additionally capped by its *exact* weight, lambda_i <= cap * beta * rho_i /
// w_exact_i. The cap is a function of the token alone (never of the draw) and bounds the
// contribution of a token whose sketch was too small: coefficient * w_exact <= cap * beta * (1 +
// rho). cap = infinity switches it off.
//
// Dialect: cuda/terms.cuh: drawn_logit
// Dialect: src/cpu/simd/weights-inl.hpp: drawn_coefficient
template <class T>
VERKV_HD constexpr T drawn_coefficient(T w_sketched, T w_exact, T rho, T beta, T cap) {
  T lambda = shrinkage_lambda(w_sketched, rho, beta);
  if (cap < std::numeric_limits<T>::infinity()) {
    const T bound = cap * beta * rho;
    if (lambda * w_exact > bound) lambda = bound / w_exact;
  }
  return lambda * (T(1) + rho) / rho;
}

// W_A / (1 + R_A) of (2).
VERKV_HD constexpr double beta_of_sums(double weight, double odds) { return weight / (1 + odds); }

// W_A and R_A of (2).
struct BetaSums {
  double weight = 0;
  double odds = 0;
};

// Rounds of the iteration below after which a step stops. The set A only shrinks, in practice
// within ten rounds; the bound keeps sums that are not numbers from going round for ever.
inline constexpr int kMostBetaRounds = 100;

// beta of (2) by Newton's (Dinkelbach's) iteration from below: beta <- W_A / (1 + R_A),
// A <- {i : w_i > beta rho_i}. It rises monotonically and stops after finitely many rounds.
// sums(beta) returns the BetaSums over A; `start` must not exceed the solution. The value is
// rounded to T each round: a step's kernels compare in binary32. NaN where a sum is.
//
// Dialect: src/cpu/certify.cpp: solve_beta
// Dialect: cuda/head_passes.cuh: solve_beta
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class T, class Sums>
VERKV_HD constexpr T newton_beta(T start, Sums&& sums, int most_rounds = kMostBetaRounds) {
  T beta = start;
  for (int round = 0; round < most_rounds; ++round) {
    const BetaSums at = sums(beta);
    const T next = static_cast<T>(beta_of_sums(at.weight, at.odds));
    if (next != next) return next;
    if (!(next > beta)) break;
    beta = next;
  }
  return beta;
}

// beta of (2), and the rounds that it took.
struct Shrinkage {
  double beta = 0;
  int rounds = 0;
};

// Solves (2) over L = {i : rho_i finite}; tokens with rho = infinity (H) and w = 0 are skipped. A
// NaN weight makes the result NaN. Sums in double. O(n) a round, no allocation.
template <class W, class R>
Shrinkage solve_shrinkage(std::span<const W> w, std::span<const R> rho) {
  Shrinkage result;
  const auto sums = [&](double beta) {
    ++result.rounds;
    BetaSums above;
    for (std::size_t i = 0; i < w.size(); ++i) {
      const double wi = static_cast<double>(w[i]);
      const double ri = static_cast<double>(rho[i]);
      if (ri == std::numeric_limits<double>::infinity()) continue;
      if (wi <= beta * ri) continue;  // written so that NaN falls through to the sum
      above.weight += wi;
      above.odds += ri;
    }
    return above;
  };
  result.beta = newton_beta(0.0, sums, std::numeric_limits<int>::max());
  return result;
}

// beta of (2) alone.
template <class W, class R>
double shrinkage_beta(std::span<const W> w, std::span<const R> rho) {
  return solve_shrinkage(w, rho).beta;
}

}  // namespace verkv

#endif  // VERKV_SHRINKAGE_HPP
