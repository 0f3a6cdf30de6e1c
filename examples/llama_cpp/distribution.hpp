// Next-token distributions and what they have in common.
#ifndef VERKV_EXAMPLES_LLAMA_CPP_DISTRIBUTION_HPP
#define VERKV_EXAMPLES_LLAMA_CPP_DISTRIBUTION_HPP

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

namespace verkv::llm {

// The place of the largest logit, the first of equals: the greedy choice.
inline std::int64_t largest(std::span<const float> logits) {
  return std::max_element(logits.begin(), logits.end()) - logits.begin();
}

// log of the sum of exp(logits).
inline double log_sum_exp(std::span<const float> logits) {
  const float top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float x : logits) sum += static_cast<double>(std::exp(x - top));
  return top + std::log(sum);
}

inline double log_probability(std::span<const float> logits, std::int64_t token) {
  return static_cast<double>(logits[static_cast<std::size_t>(token)]) - log_sum_exp(logits);
}

// KL(p || q) in nats, from logits; not below 0.
inline double kl_divergence(std::span<const float> p, std::span<const float> q) {
  const double p_total = log_sum_exp(p);
  const double shift = p_total - log_sum_exp(q);
  double sum = 0;
  for (std::size_t i = 0; i < p.size(); ++i) {
    const double gap = static_cast<double>(p[i]) - static_cast<double>(q[i]);
    sum += static_cast<double>(std::exp(p[i] - static_cast<float>(p_total))) * (gap - shift);
  }
  return std::max(0.0, sum);
}

}  // namespace verkv::llm

#endif  // VERKV_EXAMPLES_LLAMA_CPP_DISTRIBUTION_HPP
