// Eq. 10 on the one-key order, without sorting: the threshold above which tokens are fetched so
// that the rest certifies. A bisection over keys in which tokens leave the arrays as soon as their
// role is settled, so that the whole search costs a few passes over all tokens.
#ifndef VERKV_SRC_CPU_FETCH_SEARCH_HPP
#define VERKV_SRC_CPU_FETCH_SEARCH_HPP

#include <cstdint>

#include <verkv/certificate.hpp>

#include "cpu/kernels.hpp"

namespace verkv::cpu {

// beta by Newton's iteration over kernel sums; sums(beta) returns {weight, odds} over the tokens
// with w > beta * rho. `start` must not exceed the solution. The value is a binary32 number: the
// kernels compare in binary32.
template <class Sums>
float newton_beta(float start, Sums&& sums) {
  float beta = start;
  // The set shrinks with every round that raises beta, so this ends; the bound only guards against
  // NaN.
  for (int round = 0; round < 100; ++round) {
    const auto [weight, odds] = sums(beta);
    const float next = static_cast<float>(weight / (1 + odds));
    if (next != next) return next;
    if (!(next > beta)) break;
    beta = next;
  }
  return beta;
}

// Summation in binary32 within blocks of 512 is off by at most about 33 units in the last place
// (2e-6, relative, all terms positive); certificates computed from such sums are enlarged by this
// factor, so that they stay upper bounds.
inline constexpr double kOutward = 1 + 1e-5;

struct FetchThreshold {
  float key = 0;          // fetch every token with a key above it
  std::int64_t ties = 0;  // and so many tokens with exactly this key, lowest positions first
};

// plan: from Kernels::plan_start (w > 0, keys of some beta), destroyed. beta_all: beta over all of
// it. Needs: the certificate over all of the plan exceeds epsilon. The result's rest certifies with
// `certificate * kOutward <= epsilon`, and fetching one token less in the order (key descending,
// position ascending) does not.
FetchThreshold search_fetch_threshold(const Kernels& kernels, PlanArrays& plan, float beta_all,
                                      double denominator, double log_term, double epsilon);

}  // namespace verkv::cpu

#endif  // VERKV_SRC_CPU_FETCH_SEARCH_HPP
