// The logits of a step, for all its rows together: the sketch and the residents are read once for
// as many query heads as a kernel takes.
#ifndef VERKV_SRC_CPU_LOGITS_HPP
#define VERKV_SRC_CPU_LOGITS_HPP

#include <span>

#include "cpu/step.hpp"
#include "cpu/workspace.hpp"

namespace verkv::cpu {

// Fills queries, exact logits of residents, sketched logits of compressed tokens and the odds of
// drawn slots; of each head, HeadState::shift is the largest sketched logit over L. group: all of
// the rows.
void compute_logits(HeadGroup& group, std::span<const StepArguments> rows);

// Sets the sinks of one row's heads, and raises their shifts to those and to the exact logits of H, of
// the residents that the row sees.
void find_shifts(HeadGroup& group, const StepArguments& row);

}  // namespace verkv::cpu

#endif  // VERKV_SRC_CPU_LOGITS_HPP
