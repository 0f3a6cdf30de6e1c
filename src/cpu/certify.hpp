// beta (Definition 2) and the certificate (Eq. 7) of a step's query heads, from sums of the
// kernels.
#ifndef VERKV_SRC_CPU_CERTIFY_HPP
#define VERKV_SRC_CPU_CERTIFY_HPP

#include <verkv/reports.hpp>

#include "cpu/workspace.hpp"

namespace verkv::cpu {

// HeadState::beta over the tokens of L that still have a weight, for every head of the group.
void solve_beta(HeadGroup& group);

// HeadState::bound over the same tokens, at HeadState::beta. Infinite where D does not compute.
void solve_certificate(HeadGroup& group);

// The sketch error of a head, over drawn tokens of L by the weights of the plan.
double measure_sketch(HeadGroup& group, int h);

// The certificate over what is not fetched, enlarged for the sketch's error, and what the step
// reports of it. The weights of the first `fetched` tokens of Workspace::fetched become 0.
// is_known: the states hold beta and certificate over all tokens, and none is fetched.
void certify_rest(HeadGroup& group, std::int64_t fetched, bool is_known,
                  QueryHeadReport* out_reports);

}  // namespace verkv::cpu

#endif  // VERKV_SRC_CPU_CERTIFY_HPP
