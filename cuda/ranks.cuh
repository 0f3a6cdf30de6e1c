// How many of a block's threads come before one, by flags and by counts.
#ifndef VERKV_CUDA_RANKS_CUH
#define VERKV_CUDA_RANKS_CUH

#include <cstdint>

#include "device_math.cuh"
#include "head_shared.cuh"

namespace verkv::cuda {

// The number of threads before this one whose flag is set; out_total: of all. All threads call.
VERKV_DEVICE int rank_in_block(HeadShared& shared, bool flag, int& out_total) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const unsigned bits = __ballot_sync(kWholeWarp, flag);
  if (lane == 0) shared.count[warp] = __popc(bits);
  __syncthreads();
  const int own = lane < kHeadWarps ? shared.count[lane] : 0;
  out_total = __reduce_add_sync(kWholeWarp, own);
  const int before = __reduce_add_sync(kWholeWarp, lane < warp ? own : 0);
  __syncthreads();
  return before + __popc(bits & ((1u << lane) - 1));
}

// The counts of all threads before this one; out_total: of all. All threads call.
VERKV_DEVICE int rank_by_count(HeadShared& shared, int count, int& out_total) {
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
  const int own = lane < kHeadWarps ? shared.count[lane] : 0;
  out_total = __reduce_add_sync(kWholeWarp, own);
  const int before = __reduce_add_sync(kWholeWarp, lane < warp ? own : 0);
  __syncthreads();
  return before + sum - count;
}

// The counts of all half warps before this one; out_total: of all. `count` is that of a thread, and
// is summed over its half warp first. All threads call.
VERKV_DEVICE int rank_of_half_warp(HeadShared& shared, int count, int& out_total) {
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
VERKV_DEVICE std::int64_t count_in_block(HeadShared& shared, int count) {
  const int sum = __reduce_add_sync(kWholeWarp, count);
  if (threadIdx.x % 32 == 0) shared.count[threadIdx.x / 32] = sum;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  const int all = __reduce_add_sync(kWholeWarp, lane < kHeadWarps ? shared.count[lane] : 0);
  __syncthreads();
  return all;
}

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_RANKS_CUH
