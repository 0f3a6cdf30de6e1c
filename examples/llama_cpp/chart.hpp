// Charts of an evaluation, as SVG in ASCII on a white background.
#ifndef VERKV_EXAMPLES_LLAMA_CPP_CHART_HPP
#define VERKV_EXAMPLES_LLAMA_CPP_CHART_HPP

#include <span>
#include <string>

#include "eval_row.hpp"

namespace verkv::llm {

// What quality costs: mean KL divergence against the share of the cache that a step moves, both
// logarithmic, a curve for each method and a panel for each model, text, context and keep. Rows
// whose keep is not between 0 and 1 are references and stand in every panel of their text. Rows of
// tasks are left out, and so is "dense", whose divergence is zero by definition.
std::string kl_against_moved_chart(std::span<const EvalRow> rows, std::string title);

// What is left of the dense model's score at each rate of keep, in %, averaged over the tasks that
// the dense model solves at least half of; a line for each method and its parameter, a panel for
// each model and context. A point that lacks some of the tasks is hollow.
std::string quality_against_rate_chart(std::span<const EvalRow> rows, std::string title);

}  // namespace verkv::llm

#endif  // VERKV_EXAMPLES_LLAMA_CPP_CHART_HPP
