// Sums of a block of threads over tokens in the fixed order of src/sum_order.hpp: neighbouring
// threads take a block of 512 tokens, each of them one lane or several; block sums are added
// ascending in double.
#ifndef VERKV_CUDA_SUMS_CUH
#define VERKV_CUDA_SUMS_CUH

#include <cstdint>

#include "device_math.cuh"
#include "head_shared.cuh"
#include "tuning.hpp"

namespace verkv::cuda {

// total + sum[0] + sum[1] + ..., as if added one after the other in double. The whole warp calls
// and gets it.
VERKV_DEVICE double add_ascending(double total, const float* sum, int count) {
  const int lane = threadIdx.x % 32;
  if (total == 0) {
    // Where no addition can round, the order does not matter: all sums are multiples of the last
    // place of the smallest, and their total stays below 2^53 of it.
    double quick = 0;
    float smallest = infinity();
    for (int i = lane; i < count; i += 32) {
      const float x = sum[i];
      quick += static_cast<double>(x);
      if (x > 0) smallest = fminf(smallest, x);
    }
#pragma unroll
    for (int half = 16; half > 0; half /= 2) {
      quick += __shfl_xor_sync(kWholeWarp, quick, half);
      smallest = fminf(smallest, __shfl_xor_sync(kWholeWarp, smallest, half));
    }
    if (quick >= 0 && quick < static_cast<double>(smallest) * 268435456.0) return quick;
  }
#pragma unroll 4
  for (int i = 0; i < count; ++i) total += static_cast<double>(sum[i]);
  return total;
}

// The largest of shared.warp_top[t]; the whole warp calls.
VERKV_DEVICE float top_of_warps(const HeadShared& shared, unsigned t) {
  const int lane = threadIdx.x % 32;
  return warp_top(lane < kHeadWarps ? shared.warp_top[t][lane] : minus_infinity());
}

// Dialect of sum_order.hpp: fold16 where thread t of kLaneParts neighbours holds lanes
// kLanesPerThread * t and on. The whole warp calls.
VERKV_DEVICE float fold_lanes(float (&lane)[kLanesPerThread]) {
#pragma unroll
  for (int half = kLanes / static_cast<int>(kLanesPerThread) / 2; half > 0; half /= 2) {
#pragma unroll
    for (float& x : lane) x += __shfl_xor_sync(kWholeWarp, x, half);
  }
#pragma unroll
  for (int half = static_cast<int>(kLanesPerThread) / 2; half > 0; half /= 2) {
#pragma unroll
    for (int j = 0; j < half; ++j) lane[j] += lane[j + half];
  }
  return lane[0];
}

// out[s] = lane sums over `blocks` blocks, out_top[t] = max of 0 and of what the threads have in
// their top[t], for kTops of them; none is written where that is 0. terms(block, part, sums, top)
// adds lanes kLanesPerThread * part and on of a block up, ascending, to sums[s][lane -
// kLanesPerThread * part]; it is called for kLaneParts neighbours together, and must not
// synchronise beyond them. All threads call and get the results.
template <std::size_t kTops, std::size_t kSums, class Terms>
VERKV_DEVICE void lane_sums(HeadShared& shared, int blocks, Terms&& terms, double (&out)[kSums],
                            float (&out_top)[kTops > 0 ? kTops : 1]) {
  const int part = threadIdx.x % kLaneParts;
  const unsigned warp = threadIdx.x / 32;
  double total = 0;
  float top[kTops > 0 ? kTops : 1] = {};
  const auto put_tops = [&] {
    if constexpr (kTops > 0) {
#pragma unroll
      for (std::size_t t = 0; t < kTops; ++t) {
        const float x = warp_top(top[t]);
        if (threadIdx.x % 32 == 0) shared.warp_top[t][warp] = x;
      }
    }
  };
  // The barrier of the loop, where it does not run: the last call's results have been read.
  if (blocks == 0) {
    put_tops();
    __syncthreads();
  }
  for (int first = 0; first < blocks; first += kSumSlots) {
    const int count = min(kSumSlots, blocks - first);
    // All of a warp makes the same rounds: its folds are one instruction.
    const int own = threadIdx.x / kLaneParts;
    for (int b = own; b - own % (32 / kLaneParts) < count; b += kHeadThreads / kLaneParts) {
      float sum[kSums][kLanesPerThread] = {};
      if (b < count) terms(first + b, part, sum, top);
#pragma unroll
      for (std::size_t s = 0; s < kSums; ++s) {
        const float folded = fold_lanes(sum[s]);
        if (b < count && part == 0) shared.sum[s][b] = folded;
      }
    }
    if (first + count >= blocks) put_tops();
    __syncthreads();
    if (warp < kSums) total = add_ascending(total, shared.sum[warp], count);
    if (first + count < blocks) __syncthreads();
  }
  if (warp < kSums && threadIdx.x % 32 == 0) shared.total[warp] = total;
  if (warp >= kSums && warp < kSums + kTops) {
    const float x = top_of_warps(shared, warp - kSums);
    if (threadIdx.x % 32 == 0) shared.top[warp - kSums] = x;
  }
  __syncthreads();
#pragma unroll
  for (std::size_t s = 0; s < kSums; ++s) out[s] = shared.total[s];
  if constexpr (kTops > 0) {
#pragma unroll
    for (std::size_t t = 0; t < kTops; ++t) out_top[t] = shared.top[t];
  }
}

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_SUMS_CUH
