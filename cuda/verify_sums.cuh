// Sums of a block of threads over tokens in the fixed order of src/cpu/kernels.hpp: neighbouring
// threads take a block of 512 tokens, each of them one lane or several; block sums are added
// ascending in double.
#ifndef VERKV_CUDA_VERIFY_SUMS_CUH
#define VERKV_CUDA_VERIFY_SUMS_CUH

#include "device_math.cuh"
#include "step_workspace.hpp"

namespace verkv::cuda {

// Four lanes each, they take 32K tokens at once. Two such blocks fill a multiprocessor's registers.
inline constexpr int kVerifyThreads = 256;
inline constexpr int kVerifyBlocks = 2;
inline constexpr int kVerifyWarps = kVerifyThreads / 32;
inline constexpr int kHalfWarps = kVerifyThreads / kLanes;
static_assert(kHalfWarps <= 32, "a warp scans what the half warps have");
// Lanes that a thread adds up, side by side, so that one load brings the tokens of all of them and
// few threads fold.
inline constexpr std::size_t kEach = 4;
inline constexpr int kParts = kLanes / static_cast<int>(kEach);
inline constexpr int kRows = kBlockTokens / kLanes;
// Block sums kept at a time: 2^20 tokens.
inline constexpr int kSumSlots = 2048;
inline constexpr int kMostSums = 3;
inline constexpr int kMostTops = 2;
static_assert(kMostSums + kMostTops <= kVerifyWarps);

// What the search for a threshold holds beside its brackets; one thread writes it.
struct SearchShared {
  double denominator;
  double log_term;
  double epsilon;
  std::uint32_t* active;
  // Sums over tokens that left the search.
  double in_weight;
  double in_odds;
  double out_variance;
  float in_largest_odds;
  float out_jump;
  float beta_all;
};

struct VerifyShared {
  SearchShared search;
  float sum[kMostSums][kSumSlots];
  double total[kMostSums];
  float warp_top[kMostTops][kVerifyWarps];
  float top[kMostTops];
  int count[kHalfWarps];
  unsigned histogram[256];
  float sample[64];
  float sorted[64];
  int distinct;
  unsigned digit;
  std::int64_t left;
  std::int64_t ties;
  float pivot;
};

// total + sum[0] + sum[1] + ..., as if added one after the other in double. The whole warp calls
// and gets it.
VERKV_DEVICE double add_ascending(double total, const float* sum, int count) {
  const int lane = threadIdx.x % 32;
  if (total == 0) {
    // Where no addition can round, the order does not matter: all sums are multiples of the last
    // place of the smallest, and their total stays below 2^53 of it.
    double quick = 0;
    float smallest = __int_as_float(0x7f800000);
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
VERKV_DEVICE float top_of_warps(const VerifyShared& shared, unsigned t) {
  const int lane = threadIdx.x % 32;
  return warp_top(lane < kVerifyWarps ? shared.warp_top[t][lane] : minus_infinity());
}

// Dialect of sum_order.hpp: fold16 where thread t of 16 / kEach neighbours holds lanes kEach * t
// and on. The whole warp calls.
VERKV_DEVICE float fold_lanes(float (&lane)[kEach]) {
#pragma unroll
  for (int half = kLanes / static_cast<int>(kEach) / 2; half > 0; half /= 2) {
#pragma unroll
    for (float& x : lane) x += __shfl_xor_sync(kWholeWarp, x, half);
  }
#pragma unroll
  for (int half = static_cast<int>(kEach) / 2; half > 0; half /= 2) {
#pragma unroll
    for (int j = 0; j < half; ++j) lane[j] += lane[j + half];
  }
  return lane[0];
}

// out[s] = lane sums over `blocks` blocks, out_top[t] = max of 0 and of what the threads have in
// their top[t], for kTops of them; none is written where that is 0.
// terms(block, part, sums, top) adds lanes kEach * part and on of a block up, ascending, to
// sums[s][lane - kEach * part]; it is called for 16 / kEach neighbours together, and must not
// synchronise beyond them. All threads call and get the results.
template <std::size_t kTops, std::size_t kSums, class Terms>
VERKV_DEVICE void lane_sums(VerifyShared& shared, int blocks, Terms&& terms, double (&out)[kSums],
                            float (&out_top)[kTops > 0 ? kTops : 1]) {
  const int part = threadIdx.x % kParts;
  const unsigned warp = threadIdx.x / 32;
  double total = 0;
  float top[kTops > 0 ? kTops : 1] = {};
  const auto put_tops = [&] {
#pragma unroll
    for (std::size_t t = 0; t < kTops; ++t) {
      const float x = warp_top(top[t]);
      if (threadIdx.x % 32 == 0) shared.warp_top[t][warp] = x;
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
    const int own = threadIdx.x / kParts;
    for (int b = own; b - own % (32 / kParts) < count; b += kVerifyThreads / kParts) {
      float sum[kSums][kEach] = {};
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
#pragma unroll
  for (std::size_t t = 0; t < kTops; ++t) out_top[t] = shared.top[t];
}

// The number of threads before this one whose flag is set; out_total: of all. All threads call.
VERKV_DEVICE int rank_in_block(VerifyShared& shared, bool flag, int& out_total) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const unsigned bits = __ballot_sync(kWholeWarp, flag);
  if (lane == 0) shared.count[warp] = __popc(bits);
  __syncthreads();
  const int own = lane < kVerifyWarps ? shared.count[lane] : 0;
  out_total = __reduce_add_sync(kWholeWarp, own);
  const int before = __reduce_add_sync(kWholeWarp, lane < warp ? own : 0);
  __syncthreads();
  return before + __popc(bits & ((1u << lane) - 1));
}

// The counts of all threads before this one; out_total: of all. All threads call.
VERKV_DEVICE int rank_by_count(VerifyShared& shared, int count, int& out_total) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  int sum = count;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kWholeWarp, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) shared.count[warp] = sum;
  __syncthreads();
  const int own = lane < kVerifyWarps ? shared.count[lane] : 0;
  out_total = __reduce_add_sync(kWholeWarp, own);
  const int before = __reduce_add_sync(kWholeWarp, lane < warp ? own : 0);
  __syncthreads();
  return before + sum - count;
}

// The counts of all half warps before this one; out_total: of all. `count` is that of a thread, and
// is summed over its half warp first. All threads call.
VERKV_DEVICE int rank_of_half_warp(VerifyShared& shared, int count, int& out_total) {
  const int lane = threadIdx.x % 32;
  const int half = threadIdx.x / kLanes;
#pragma unroll
  for (int step = 8; step > 0; step /= 2) count += __shfl_xor_sync(kWholeWarp, count, step);
  if (threadIdx.x % kLanes == 0) shared.count[half] = count;
  __syncthreads();
  const int own = lane < kHalfWarps ? shared.count[lane] : 0;
  out_total = __reduce_add_sync(kWholeWarp, own);
  int before = __reduce_add_sync(kWholeWarp, lane < half / 2 * 2 ? own : 0);
  if (half % 2 != 0) before += shared.count[half - 1];
  __syncthreads();
  return before;
}

// Sum of counts over the block; all threads call and get it.
VERKV_DEVICE std::int64_t count_in_block(VerifyShared& shared, int count) {
  const int sum = __reduce_add_sync(kWholeWarp, count);
  if (threadIdx.x % 32 == 0) shared.count[threadIdx.x / 32] = sum;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  const int all = __reduce_add_sync(kWholeWarp, lane < kVerifyWarps ? shared.count[lane] : 0);
  __syncthreads();
  return all;
}

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_VERIFY_SUMS_CUH
