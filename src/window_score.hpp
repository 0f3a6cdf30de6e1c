// Importance of tokens of the local window, from what steps gave them: once for both backends.
#ifndef VERKV_SRC_WINDOW_SCORE_HPP
#define VERKV_SRC_WINDOW_SCORE_HPP

#include <cmath>
#include <cstdint>

#include <verkv/attention.hpp>
#include <verkv/config.hpp>

namespace verkv {

// Of the tokens of one append, so many at the end score with their queries. What a query gives waits
// apart until the next append: a bound on the memory of it.
inline constexpr std::int64_t kMostScoredTokens = 32;

// Of a token of the window: the sum of squares and the steps.
inline constexpr std::int64_t kWindowScoreBytes = sizeof(float) + sizeof(std::uint32_t);

// Numbers that wait where `count` tokens have come at once and the window then has `window`: a row
// of the window for each that scores.
constexpr std::int64_t given_numbers(std::int64_t count, std::int64_t window) {
  return (count < kMostScoredTokens ? count : kMostScoredTokens) * window;
}

// The first of tokens [before, tokens) whose query scores; `tokens` where none does.
VERKV_HD constexpr std::int64_t first_scored(std::int64_t before, std::int64_t tokens,
                                             bool scores) {
  if (!scores) return tokens;
  return tokens - before > kMostScoredTokens ? tokens - kMostScoredTokens : before;
}

// What one step of one query head gives to a token of the local window: its squared attention
// probability under the plan's shift and D, which do not depend on the draw. per_denominator: 1 / D.
VERKV_HD inline float window_square(float logit, float shift, float per_denominator) {
  const float p = weight_exp(logit - shift) * per_denominator;
  return p * p;
}

// Importance of a token of the local window: the root mean square of the attention probabilities
// that `steps` steps gave it, whose squares sum to `square`. 0 where no step attended to it.
inline float window_score(float square, std::uint32_t steps) {
  return steps == 0 ? 0.0f : std::sqrt(square / static_cast<float>(steps));
}

}  // namespace verkv

#endif  // VERKV_SRC_WINDOW_SCORE_HPP
