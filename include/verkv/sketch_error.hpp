// How far off the sketch is in a step, measured on drawn tokens, whose keys and so exact logits are
// there. The certificate (certificate.hpp) speaks of sketched weights; this is what it knows of the
// sketch. docs/math/certificate.md has the reasons for the numbers.
//
// Over drawn tokens i of L, fetched or not, with exact logit l_i, sketched logit m_i, sketched
// weight w_i and inclusion probability r_i:
//
//   e_i = l_i - m_i       g_i = sqrt(w_i) / r_i
//   s^2 = sum g_i e_i^2 / sum g_i      estimates the mean over L with weights sqrt(w_i)
//   n   = (sum g_i)^2 / sum g_i^2      tokens that the mean is worth
//   sketch error = s sqrt(1 + 4 / n)
//
// The certificate is multiplied by exp(max(0, sketch error^2 - 1)). The plan does not look at it:
// what is fetched does not depend on the draw.
#ifndef VERKV_SKETCH_ERROR_HPP
#define VERKV_SKETCH_ERROR_HPP

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include <verkv/attention.hpp>
#include <verkv/config.hpp>

namespace verkv {

// Most tokens that a step measures. More would not be known better than the certificate needs.
inline constexpr std::int64_t kMeasuredTokens = 512;

// Every so many drawn slots one is measured, the first among them.
VERKV_HD constexpr std::int64_t measured_stride(std::int64_t drawn) {
  return (drawn + kMeasuredTokens - 1) / kMeasuredTokens;
}

// log(w) in binary32 by one fixed sequence of operations, for the reason that weight_exp has one.
// w > 0 and normal, as weight_exp gives it; NaN stays NaN. Absolute error below 1e-5 on
// [exp(-87), 1].
VERKV_HD inline float weight_log(float w) {
  if (w != w) return w;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(w);
  // Mantissa in [sqrt(1/2), sqrt(2)): its bits are those from 0x3f3504f3 on.
  const std::int32_t shifted = static_cast<std::int32_t>(bits - 0x3f3504f3u);
  const std::int32_t exponent = shifted >> 23;
  const float m = std::bit_cast<float>(bits - (static_cast<std::uint32_t>(exponent) << 23));
  // log(m) = 2 atanh(t); what is left out after four terms is below 3e-8.
  const float t = (m - 1.0f) / (m + 1.0f);
  const float z = t * t;
  // Not fused: a processor's baseline calls a function for that.
  const float p = (((1.0f / 7) * z + 1.0f / 5) * z + 1.0f / 3) * z * t + t;
  return static_cast<float>(exponent) * 0.693147181f + 2.0f * p;
}

// What one token adds to the sums.
struct SketchErrorTerms {
  float weight = 0;
  float weight_square = 0;
  float error_square = 0;
};

// A sketched weight of 0 has a logit below -87 (attention.hpp). It counts as this, the smallest
// normal number, exp(-87.3).
inline constexpr float kLeastWeight = std::numeric_limits<float>::min();

// weight: sketched. `exact`: the token's exact logit less the shift of the weights. rho: its odds,
// above 0. What is not a number counts as far off.
VERKV_HD inline SketchErrorTerms sketch_error_terms(float weight, float exact, float rho) {
  const float w = weight < kLeastWeight ? kLeastWeight : weight;
  const float e = exact - weight_log(w);
  constexpr float most = 1e12f;
  float square = e * e < most ? e * e : most;
  if (weight < kLeastWeight && e < 0) square = 0;
  const float g = std::sqrt(w) * ((1.0f + rho) / rho);
  return {g, g * g, g * square};
}

// The sketch error from the sums of the terms; infinite where nothing was measured, or nothing that
// is a number.
VERKV_HD inline double sketch_error(double weight, double weight_square, double error_square) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  if (!(weight > 0)) return infinity;
  constexpr double doubt = 4;
  const double square = error_square / weight * (1 + doubt * weight_square / (weight * weight));
  return square < infinity ? std::sqrt(square) : infinity;
}

// Whether it says that the certificate may be too small.
VERKV_HD constexpr bool enlarges(double sketch_error) { return !(sketch_error <= 1); }

// From here on the certificate says nothing: weight_exp ends at exp(60).
inline constexpr double kLargestSketchError = 7.5;

// Whether drawn tokens say that the sketch is of no use: what it takes for nothing may be anything.
VERKV_HD constexpr bool is_useless(double sketch_error) {
  return sketch_error >= kLargestSketchError &&
         sketch_error < std::numeric_limits<double>::infinity();
}

// The certificate of what is not fetched, where anything is left, as the sketch's error leaves it.
// A bound of 0 says that nothing of that weighs anything. It stands unless the sketch is useless.
VERKV_HD inline double enlarged_for_sketch(double bound, double sketch_error) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  if (!enlarges(sketch_error)) return bound;
  if (bound == 0 && !is_useless(sketch_error)) return bound;
  if (!(sketch_error < kLargestSketchError)) return infinity;
  const double beyond = sketch_error * sketch_error - 1;
  return bound * static_cast<double>(weight_exp(static_cast<float>(beyond)));
}

}  // namespace verkv

#endif  // VERKV_SKETCH_ERROR_HPP
