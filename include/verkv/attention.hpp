// Attention over a set of tokens: exponentials of logits in a fixed sequence of operations, and the
// dense answer.
//
// Dialect: src/cpu/simd/weights-inl.hpp: weight_exp
// Dialect: cuda/head_passes.cuh: to_weights
#ifndef VERKV_ATTENTION_HPP
#define VERKV_ATTENTION_HPP

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>

#include <verkv/config.hpp>

namespace verkv {

// ---- The exponential ----------------------------------------------------------------------------

// The numbers of weight_exp, for all its dialects: exp(x) = 2^n exp(r) with n the integer nearest
// to x / log 2 and exp(r) = 1 + r + r^2 (c2 + c3 r + ... + c7 r^5). Coefficients of Cephes
// (Moshier).
namespace exp_terms {
// Below, the result is 0. exp(-87) is the last whole power of e that is a normal number.
inline constexpr float kLowest = -87.0f;
// Above, the result is exp(60) = 1.1e26: a million such weights times the largest binary16 number,
// 65504, still sum to a finite number in binary32.
inline constexpr float kHighest = 60.0f;
// 1.5 * 2^23: adding it rounds to the nearest integer, ties to even, and leaves the integer in the
// low bits of the sum.
inline constexpr float kRounder = 12582912.0f;
inline constexpr float kPerLog2 = 1.44269504088896341f;
inline constexpr float kLog2 = 0.693147181f;
// The same in two parts. The first has 9 significant bits, so n times it is exact.
inline constexpr float kLog2High = 0.693359375f;
inline constexpr float kLog2Low = -2.12194440e-4f;
inline constexpr float kC2 = 5.0000001201e-1f;
inline constexpr float kC3 = 1.6666665459e-1f;
inline constexpr float kC4 = 4.1665795894e-2f;
inline constexpr float kC5 = 8.3334519073e-3f;
inline constexpr float kC6 = 1.3981999507e-3f;
inline constexpr float kC7 = 1.9875691500e-4f;
}  // namespace exp_terms

// weight_exp without its cuts: for x in [-87, 60], and NaN where x is NaN.
VERKV_HD inline float weight_exp_within(float x) {
  using namespace exp_terms;
  const float shifted = std::fma(x, kPerLog2, kRounder);
  const float n = shifted - kRounder;
  float r = std::fma(n, -kLog2High, x);
  r = std::fma(n, -kLog2Low, r);
  float p = kC7;
  p = std::fma(p, r, kC6);
  p = std::fma(p, r, kC5);
  p = std::fma(p, r, kC4);
  p = std::fma(p, r, kC3);
  p = std::fma(p, r, kC2);
  const float y = std::fma(p, r * r, r) + 1.0f;
  return y * std::bit_cast<float>(std::bit_cast<std::uint32_t>(shifted) * 0x800000u + 0x3f800000u);
}

// exp(x) in binary32 by one fixed sequence of operations (all fused), so that scalar code, vectors
// and kernels agree bit for bit. Relative error below 2e-7 on [-87, 60]; below -87 it is 0, above
// 60 it is exp(60): weights are relative to a common shift, and only a resident whose sketch was
// wildly wrong gets there. NaN stays NaN.
VERKV_HD inline float weight_exp(float x) {
  if (x < exp_terms::kLowest) return 0.0f;
  return weight_exp_within(x > exp_terms::kHighest ? exp_terms::kHighest : x);
}

// tanh(x) in binary32 by one fixed sequence of operations, for the reason that weight_exp has one:
// C libraries of host and device differ in the last bits, and decisions rest on capped logits.
// Relative error below 4e-7; coefficients of Cephes (Moshier). NaN stays NaN.
VERKV_HD inline float fixed_tanh(float x) {
  const float size = std::fabs(x);
  if (size < 0.625f) {
    const float z = x * x;
    float p = -5.70498872745e-3f;
    p = std::fma(p, z, 2.06390887954e-2f);
    p = std::fma(p, z, -5.37397155531e-2f);
    p = std::fma(p, z, 1.33314422036e-1f);
    p = std::fma(p, z, -3.33332819422e-1f);
    return std::fma(p * z, x, x);
  }
  const float y = 1.0f - 2.0f / (weight_exp(2.0f * size) + 1.0f);
  return std::copysign(y, x);
}

// Logit after soft-capping, cap * tanh(l / cap); cap = 0 switches it off.
template <class T>
VERKV_HD T soft_capped(T logit, T cap) {
  if constexpr (std::is_same_v<T, float>) {
    return cap > 0.0f ? cap * fixed_tanh(logit / cap) : logit;
  } else {
    return cap > T(0) ? cap * std::tanh(logit / cap) : logit;
  }
}

// Dense attention of one query over n tokens in double: the answer everything is measured against.
//   key(i, j), value(i, j): coordinate j of token i, convertible to double
//   out_output: value_dim elements. scratch_logit: n elements. Returns the natural-log LSE.
template <class Key, class Value>
double dense_attention(std::int64_t n, std::span<const double> query, double scale, double soft_cap,
                       Key&& key, Value&& value, std::span<double> scratch_logit,
                       std::span<double> out_output) {
  for (double& x : out_output) x = 0;
  double top = -std::numeric_limits<double>::infinity();
  for (std::int64_t i = 0; i < n; ++i) {
    double dot = 0;
    for (std::size_t j = 0; j < query.size(); ++j) {
      dot += query[j] * static_cast<double>(key(i, static_cast<std::int64_t>(j)));
    }
    const double logit = soft_capped(scale * dot, soft_cap);
    scratch_logit[static_cast<std::size_t>(i)] = logit;
    if (logit > top) top = logit;
  }
  if (n == 0) return top;
  double denominator = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const double w = std::exp(scratch_logit[static_cast<std::size_t>(i)] - top);
    denominator += w;
    for (std::size_t j = 0; j < out_output.size(); ++j) {
      out_output[j] += w * static_cast<double>(value(i, static_cast<std::int64_t>(j)));
    }
  }
  for (double& x : out_output) x /= denominator;
  return top + std::log(denominator);
}

}  // namespace verkv

#endif  // VERKV_ATTENTION_HPP
