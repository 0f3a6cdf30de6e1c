// beta (Definition 2) and the certificate (Eq. 7) of a step's query heads, from sums of the
// kernels.
#ifndef VERKV_SRC_CPU_CERTIFY_HPP
#define VERKV_SRC_CPU_CERTIFY_HPP

#include <verkv/reports.hpp>
#include <verkv/shrinkage.hpp>

#include "cpu/workspace.hpp"

namespace verkv::cpu {

// beta by Newton's iteration; sums(beta) returns {weight, odds} over the tokens with
// w > beta * rho. `start` must not exceed the solution. The value is a binary32 number: the kernels
// compare in binary32. NaN where a sum is.
template <class Sums>
float newton_beta(float start, Sums&& sums) {
  float beta = start;
  for (int round = 0; round < kMostBetaRounds; ++round) {
    const auto [weight, odds] = sums(beta);
    const float next = static_cast<float>(beta_of_sums(weight, odds));
    if (next != next) return next;
    if (!(next > beta)) break;
    beta = next;
  }
  return beta;
}

// HeadState::beta over the tokens of L that still have a weight, for every head of the group.
void solve_beta(HeadGroup& group);

// HeadState::bound over the same tokens, at HeadState::beta. Infinite where D does not compute.
void solve_certificate(HeadGroup& group);

// The certificate over what is not fetched, and what the step reports of it. The weights of the
// first `fetched` tokens of Workspace::fetched become 0. is_known: the states hold beta and
// certificate over all tokens, and none is fetched.
void certify_rest(HeadGroup& group, std::int64_t fetched, bool is_known,
                  QueryHeadReport* out_reports);

}  // namespace verkv::cpu

#endif  // VERKV_SRC_CPU_CERTIFY_HPP
