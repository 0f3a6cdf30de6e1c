// Eq. 10 on the order of worth, without sorting: the threshold above which tokens are fetched so
// that the rest certifies. A bisection over worth in which tokens leave the arrays as soon as their
// role is settled, so that the whole search costs a few passes over all tokens.
#ifndef VERKV_SRC_CPU_FETCH_SEARCH_HPP
#define VERKV_SRC_CPU_FETCH_SEARCH_HPP

#include <verkv/fetch_plan.hpp>

#include "cpu/kernels.hpp"

namespace verkv::cpu {

// plan: from Kernels::plan_start (w > 0, worth at some beta), destroyed. beta_all: beta over all of
// it. Needs: the certificate over all of the plan exceeds target. The result's rest certifies with
// outward_certificate <= target, and fetching one token less in the order (worth descending,
// place ascending) does not.
FetchThreshold search_fetch_threshold(const Kernels& kernels, PlanArrays& plan, float beta_all,
                                      double denominator, double log_term, double target);

}  // namespace verkv::cpu

#endif  // VERKV_SRC_CPU_FETCH_SEARCH_HPP
