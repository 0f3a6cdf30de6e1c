// What one token adds to a certificate, whether it is worth fetching, and what it adds to the
// attention, with the fewest divisions. Dialects; each function names the header and the function
// that it follows.
#ifndef VERKV_CUDA_TERMS_CUH
#define VERKV_CUDA_TERMS_CUH

#include <cstdint>

#include <verkv/attention.hpp>

#include "device_math.cuh"

namespace verkv::cuda {

struct Tail {
  float variance;
  float jump;
  float worth;
};

// What a token adds to the certificate, and what fetching it is worth, from t = weight / odds: a
// division is most of each of them.
// Dialect of verkv/certificate.hpp: variance_term, jump_term.
// Dialect of verkv/fetch_plan.hpp: fetch_worth.
VERKV_DEVICE Tail tail_of(float w, float rho, float beta, float t) {
  const float edge = beta * rho;
  const bool inside = !(w > edge);  // odds that are no number give a jump that is none
  return {inside ? w * t : beta * beta * rho, (inside ? t : beta) * fmaxf(rho, 1.0f),
          inside ? w * t : beta * (2.0f * w - edge)};
}

// w / rho, correctly rounded, where quickness(w) >= kQuick and w <= beta * rho. Odds have 9
// significant bits, so no quotient is nearer than 2^-10 of its last place to where rounding
// changes; the remainder is exact, and corrects a product with a reciprocal that is off by a place
// or two. Both bounds keep out what underflows: beta is below 2^32.
VERKV_DEVICE float quick_quotient(float w, float rho) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(rho));
  const float q = w * y;
  return fmaf(fmaf(-rho, q, w), y, q);
}

// In the order of the weights, but 0, which has a quick quotient, is on top.
VERKV_DEVICE std::uint32_t quickness(float w) { return __float_as_uint(w) - 1; }
constexpr std::uint32_t kQuick = 0x10fd8000;  // of about 1e-28

// w / rho, for any weight; where w > beta * rho, the quick way gives none.
VERKV_DEVICE float quotient(float w, float rho) {
  return quickness(w) >= kQuick ? quick_quotient(w, rho) : w / rho;
}

// is_ruled_out(w, rho, ruled_out_below(threshold)) is true of no token that is worth more than the
// threshold, and of nearly all others, without a division: worth is at most w * w / rho. The margin
// of 2^-20 is far larger than the five roundings of 2^-24 on the two sides.
// Thresholds below this rule nobody out: their margin, 2^-20 of them, would come near the smallest
// normal number (1.2e-38), below which roundings are no longer relative.
constexpr float kLeastRulingThreshold = 1e-30f;
// Some hundred times that number, so that products which underflow on both sides rule nobody out.
constexpr float kUnderflowMargin = 1e-36f;
VERKV_DEVICE float ruled_out_below(float threshold) {
  return threshold >= kLeastRulingThreshold ? threshold * (1 - 0x1p-20f) : -1.0f;
}
VERKV_DEVICE bool is_ruled_out(float w, float rho, float below) {
  return w * w < fmaf(below, rho, -kUnderflowMargin);
}

// Exponentials and logarithms to a few units in the last place, in one instruction each: outputs
// hang on them, decisions do not.
VERKV_DEVICE float approximate_exp(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * exp_terms::kPerLog2));
  return y;
}
VERKV_DEVICE float approximate_log(float x) { return __log2f(x) * exp_terms::kLog2; }

// The logarithm of a drawn token's summand, min(lambda w, cap beta rho) (1 + rho) / rho: logit +
// log(coefficient), at most `most` + log(1 + rho). beta and sketched weights are in the plan's
// units, `most` is shift + log(cap * beta). Of a token in the plan lambda (1 + rho) / rho is 1 or
// more, or 0 where beta is.
// Dialect of verkv/shrinkage.hpp: drawn_coefficient, in logarithms.
VERKV_DEVICE float drawn_logit(float logit, float sketched, float rho, float beta, float most) {
  const bool whole = sketched <= beta * rho;  // lambda is 1
  const float coefficient = (whole ? 1.0f : beta) / (whole ? rho : sketched) * (1.0f + rho);
  if (coefficient == 0) return logit == logit ? minus_infinity() : logit;
  const float x = logit + approximate_log(coefficient);
  if (!(x > most)) return x;
  const float limit = most + approximate_log(1.0f + rho);
  return x > limit ? limit : x;
}

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_TERMS_CUH
