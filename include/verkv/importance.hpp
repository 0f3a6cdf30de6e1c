// Importance scores tau from attention probabilities (docs/math/importance.md). The engine runs
// whatever pass the recipe asks for; these are the reductions. Only ratios of scores matter to
// Eq. 3.
#ifndef VERKV_IMPORTANCE_HPP
#define VERKV_IMPORTANCE_HPP

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

namespace verkv {

// Running reductions over rows of attention probabilities, one element a token. From KVzip's repeat
// pass `largest` gives its own score, `mean` and `root_mean_square` the variants that sampling
// wants; from all prompt queries `sum` is H2O's score. The spans are the caller's, zero at the
// start.
struct ProbabilityMoments {
  std::span<float> largest;
  std::span<double> sum;
  std::span<double> sum_of_squares;
  std::int64_t rows = 0;

  // Adds the probabilities that one query head at one position gives to all tokens.
  void add(std::span<const float> probability) {
    for (std::size_t i = 0; i < probability.size(); ++i) {
      const float p = probability[i];
      largest[i] = std::max(largest[i], p);
      sum[i] += static_cast<double>(p);
      sum_of_squares[i] += static_cast<double>(p) * static_cast<double>(p);
    }
    ++rows;
  }

  double mean(std::size_t token) const {
    return rows > 0 ? sum[token] / static_cast<double>(rows) : 0.0;
  }

  // r proportional to sqrt(E p^2) minimises the expected Horvitz-Thompson variance (Neyman
  // allocation).
  double root_mean_square(std::size_t token) const {
    return rows > 0 ? std::sqrt(sum_of_squares[token] / static_cast<double>(rows)) : 0.0;
  }
};

// SnapKV: the sum of probabilities over an observation window, smoothed by a running maximum over
// `width` (odd) neighbouring tokens. out_score must not alias window_sum.
template <class T>
void snapkv_importance(std::span<const T> window_sum, std::int64_t width,
                       std::span<float> out_score) {
  const std::int64_t n = static_cast<std::int64_t>(window_sum.size());
  const std::int64_t reach = width / 2;
  for (std::int64_t i = 0; i < n; ++i) {
    T best = window_sum[static_cast<std::size_t>(i)];
    for (std::int64_t j = std::max<std::int64_t>(0, i - reach); j <= std::min(n - 1, i + reach);
         ++j) {
      best = std::max(best, window_sum[static_cast<std::size_t>(j)]);
    }
    out_score[static_cast<std::size_t>(i)] = static_cast<float>(best);
  }
}

// The Euclidean norm of a key.
template <class T>
double key_norm(std::span<const T> key) {
  double square = 0;
  for (const T x : key) square += static_cast<double>(x) * static_cast<double>(x);
  return std::sqrt(square);
}

// Shorter keys count as that long, so that a zero key has a finite score, 1e6.
inline constexpr double kShortestKey = 1e-6;

// 1 / norm of the key: in real models short keys draw attention (Devoto et al. 2024). Needs no
// attention at all.
template <class T>
double key_norm_importance(std::span<const T> key) {
  return 1 / std::max(key_norm(key), kShortestKey);
}

}  // namespace verkv

#endif  // VERKV_IMPORTANCE_HPP
