// The largest of the tokens of a mask, by the bits of their ranks.
#ifndef VERKV_CUDA_RADIX_SELECT_CUH
#define VERKV_CUDA_RADIX_SELECT_CUH

#include <cstdint>

#include "device_math.cuh"
#include "head_shared.cuh"
#include "masks.cuh"
#include "ranks.cuh"

namespace verkv::cuda {

// The bits of `row` in the words of a half warp, one for each lane. The whole warp calls.
VERKV_DEVICE unsigned half_warp_row(bool bit) {
  const int half_lanes = threadIdx.x % 32 / kLanes * kLanes;
  return (__ballot_sync(kWholeWarp, bit) >> half_lanes) & 0xffffu;
}

// Keeps the `limit` tokens of the mask with the largest rank_of(token), ties by place. The mask
// has `blocks` blocks of 512 tokens and more than `limit` bits. A half warp has a block, a thread a
// word. All threads call.
template <class Rank>
VERKV_DEVICE void keep_largest(HeadShared& shared, std::int64_t blocks, std::uint32_t* mask,
                               std::int64_t limit, Rank&& rank_of) {
  static_assert(kHeadThreads >= 256, "a thread has a place of the histogram");
  const int half = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  // The rank of the last one kept, a byte at a time.
  unsigned prefix = 0;
  std::int64_t left = limit;
  for (int shift = 24; shift >= 0; shift -= 8) {
    if (threadIdx.x < 256) shared.histogram[threadIdx.x] = 0;
    __syncthreads();
    for (std::int64_t block = half; block < blocks; block += kHalfWarps) {
      for (std::uint32_t bits = mask[block * kLanes + lane]; bits != 0; bits &= bits - 1) {
        const int k = __ffs(static_cast<int>(bits)) - 1;
        const unsigned rank = rank_of(block * kBlockTokens + k * kLanes + lane);
        if (shift == 24 || rank >> (shift + 8) == prefix >> (shift + 8))
          atomicAdd(&shared.histogram[(rank >> shift) & 255u], 1u);
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      unsigned digit = 255;
      while (digit > 0 && shared.histogram[digit] < left) left -= shared.histogram[digit--];
      shared.digit = digit;
      shared.left = left;
    }
    __syncthreads();
    prefix |= shared.digit << shift;
    left = shared.left;
  }
  std::int64_t before = 0;
  for (std::int64_t first = 0; first < blocks; first += kHalfWarps) {
    const std::int64_t block = first + half;
    std::uint32_t above = 0;
    std::uint32_t equal = 0;
    if (block < blocks) {
      for (std::uint32_t bits = mask[block * kLanes + lane]; bits != 0; bits &= bits - 1) {
        const int k = __ffs(static_cast<int>(bits)) - 1;
        const unsigned rank = rank_of(block * kBlockTokens + k * kLanes + lane);
        if (rank > prefix) above |= 1u << k;
        if (rank == prefix) equal |= 1u << k;
      }
    }
    int total = 0;
    std::int64_t rank = before + rank_of_half_warp(shared, __popc(equal), total);
    before += total;
#pragma unroll 4
    for (int k = 0; k < kRowsPerBlock; ++k) {
      const unsigned row = half_warp_row((equal >> k & 1u) != 0);
      const int own = __popc(row & ((1u << lane) - 1));
      if ((equal >> k & 1u) != 0 && rank + own < left) above |= 1u << k;
      rank += __popc(row);
    }
    // Only this thread reads the word again in this launch.
    if (block < blocks) mask[block * kLanes + lane] = above;
  }
}

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_RADIX_SELECT_CUH
