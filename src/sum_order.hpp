// The order of every sum that a decision rests on, for every backend: with fused multiply-adds and
// this order all implementations give the same bits, hence the same decisions.
//
// A lane sum over tokens (or over entries of a list) takes them in blocks of kBlockTokens. Token i
// of a block is added to lane i % kLanes in binary32, ascending; the lanes are folded (fold16) in
// binary32; the sums of the blocks are added ascending in double. A token that does not count adds
// 0 or nothing: no term is negative, so both give the same bits.
//
// Dialect: src/cpu/simd/lanes-inl.hpp: fold
// Dialect: cuda/device_math.cuh: fold16
// Dialect: cuda/sums.cuh: fold_lanes
// Dialect: cuda/exact_products.cuh: fold_heads
#ifndef VERKV_SRC_SUM_ORDER_HPP
#define VERKV_SRC_SUM_ORDER_HPP

#include <verkv/certificate.hpp>
#include <verkv/config.hpp>

namespace verkv {

// The lanes of the widest vector (AVX-512, binary32); narrower vectors take several, a warp of a
// GPU two blocks at a time.
inline constexpr int kLanes = 16;
// Longer blocks round more, shorter ones fold more often; a fold costs about as much as 4 groups of
// 16 tokens. A guess within a wide optimum.
inline constexpr int kBlockTokens = 512;

// Folds 16 partial sums: l + 8, then l + 4, l + 2, l + 1.
VERKV_HD inline float fold16(const float* lane) {
  float s[kLanes];
  for (int i = 0; i < kLanes; ++i) s[i] = lane[i];
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) s[i] += s[i + half];
  }
  return s[0];
}

// Roundings that a term can go through within a block: those of its lane after the first, and four
// folds. Each is off by at most 2^-24, relatively. All terms are positive, so their number bounds
// the relative error of a sum; additions in double and the terms' own roundings hardly add to it.
inline constexpr int kSumRoundings = kBlockTokens / kLanes - 1 + 4;
inline constexpr double kSumError = kSumRoundings * 0x1p-24;
// What the factor has to cover: certificate.hpp.
static_assert(kOutward - 1 > 4 * kSumError);

}  // namespace verkv

#endif  // VERKV_SRC_SUM_ORDER_HPP
