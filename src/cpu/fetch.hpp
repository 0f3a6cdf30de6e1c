// What a step fetches: the stop rules of every query head, the union over the group, the limit.
#ifndef VERKV_SRC_CPU_FETCH_HPP
#define VERKV_SRC_CPU_FETCH_HPP

#include <cstdint>

#include <verkv/reports.hpp>

#include "cpu/workspace.hpp"

namespace verkv::cpu {

struct FetchPlan {
  // Of Workspace::fetched, ascending.
  std::int64_t tokens = 0;
  // Tokens were left out for the limit.
  bool limited = false;
  // The heads' states hold beta and certificate over all tokens, and none is fetched.
  bool is_certified = false;
};

// Needs weights and D of every head. Sets QueryHeadReport::planned_tokens. Nothing in here looks at
// which tokens are resident (Theorem 2).
FetchPlan plan_fetch(HeadGroup& group, QueryHeadReport* out_reports);

}  // namespace verkv::cpu

#endif  // VERKV_SRC_CPU_FETCH_HPP
