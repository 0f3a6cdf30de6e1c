// What one token adds to a certificate and whether it is worth fetching, with the fewest divisions.
#ifndef VERKV_CUDA_VERIFY_TERMS_CUH
#define VERKV_CUDA_VERIFY_TERMS_CUH

#include <cstdint>

#include "device_math.cuh"

namespace verkv::cuda {

// Dialect of verkv/certificate.hpp: variance_term, jump_term.
// Dialect of verkv/fetch_plan.hpp: fetch_worth.
// From t = weight / odds: a division is most of each of them.
struct Tail {
  float variance;
  float jump;
  float key;
};

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

// is_ruled_out(w, rho, ruled_out_below(threshold)) is true of no token whose fetch_worth is above
// the threshold, and of nearly all others, without a division: the key is at most w * w / rho, and
// the margins are far larger than what rounding does to either side.
VERKV_DEVICE float ruled_out_below(float threshold) {
  return threshold >= 1e-30f ? threshold * (1 - 0x1p-20f) : -1.0f;
}
VERKV_DEVICE bool is_ruled_out(float w, float rho, float below) {
  return w * w < fmaf(below, rho, -1e-36f);
}

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_VERIFY_TERMS_CUH
