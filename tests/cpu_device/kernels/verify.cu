// A kernel with the parts of a verification step: scores from a 2-bit sketch, inclusion
// probabilities by Newton rounds, a Philox draw, ordered compaction, the largest weights by a sort.
// Block-wide operations are CUB's.
#include <cuda_runtime.h>

#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/device/device_select.cuh>

#include "verify.hpp"

namespace samples {
namespace {

__device__ __forceinline__ uint4 philox(uint4 c, unsigned k0, unsigned k1) {
  for (int round = 0; round < 10; ++round) {
    const unsigned h0 = __umulhi(0xD2511F53U, c.x), l0 = 0xD2511F53U * c.x;
    const unsigned h1 = __umulhi(0xCD9E8D57U, c.z), l1 = 0xCD9E8D57U * c.z;
    c = make_uint4(h1 ^ c.y ^ k0, l1, h0 ^ c.w ^ k1, l0);
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  return c;
}

constexpr int kThreads = 256;
constexpr int kItems = kVerifyKeys / kThreads;

using ReduceFloat = cub::BlockReduce<float, kThreads>;
using ReduceInt = cub::BlockReduce<int, kThreads>;
using Scan = cub::BlockScan<int, kThreads>;
using Sort = cub::BlockRadixSort<float, kThreads, kItems>;

struct Shared {
  union {
    ReduceFloat::TempStorage reduce_float;
    ReduceInt::TempStorage reduce_int;
    Scan::TempStorage scan;
    Sort::TempStorage sort;
  };
  float query[128];
  float largest[kThreads / 32];
  float broadcast;
};

}  // namespace

// One block a head.
__global__ void __launch_bounds__(kThreads)
    verify_kernel(const uint4* __restrict__ sketch, const float* __restrict__ scale,
                  const float* __restrict__ query, int keys, float budget, unsigned seed,
                  VerifyOutput out) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int tid = threadIdx.x;
  const int head = blockIdx.x;
  const int lane = tid & 31;
  for (int d = tid; d < 128; d += kThreads) shared.query[d] = query[head * 128 + d];
  __syncthreads();
  float weight[kItems];
  float largest = -INFINITY;
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    const int i = j * kThreads + tid;
    weight[j] = -INFINITY;
    if (i >= keys) continue;
    float sum = 0;
    for (int half = 0; half < 2; ++half) {
      const uint4 v = sketch[(size_t(head) * keys + i) * 2 + half];
      const unsigned word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
#pragma unroll
        for (int c = 0; c < 16; ++c) {
          const float level = int((word[w] >> (2 * c)) & 3) * 2 - 3;
          sum = fmaf(level, shared.query[half * 64 + w * 16 + c], sum);
        }
      }
    }
    weight[j] = sum * scale[size_t(head) * keys + i];
    largest = fmaxf(largest, weight[j]);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, step));
  if (lane == 0) shared.largest[tid / 32] = largest;
  __syncthreads();
  for (int w = 0; w < kThreads / 32; ++w) largest = fmaxf(largest, shared.largest[w]);
  float mass = 0;
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    weight[j] = weight[j] == -INFINITY ? 0 : exp2f((weight[j] - largest) * 1.44269504F);
    mass += weight[j];
  }
  const float all = ReduceFloat(shared.reduce_float).Sum(mass);
  if (tid == 0) shared.broadcast = budget / all;
  __syncthreads();
  float beta = shared.broadcast;
  for (int round = 0; round < 32; ++round) {
    int saturated = 0;
    float rest = 0;
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      if (beta * weight[j] >= 1)
        ++saturated;
      else
        rest += weight[j];
    }
    __syncthreads();
    const float rest_sum = ReduceFloat(shared.reduce_float).Sum(rest);
    __syncthreads();
    const int saturated_sum = ReduceInt(shared.reduce_int).Sum(saturated);
    if (tid == 0) shared.broadcast = rest_sum > 0 ? (budget - saturated_sum) / rest_sum : beta;
    __syncthreads();
    const float next = shared.broadcast;
    if (!(next > beta)) break;
    beta = next;
  }
  int base = 0;
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    const int i = j * kThreads + tid;
    const uint4 random = philox(make_uint4(i, head, 0, 0), seed, 0x5eed);
    const int keep = i < keys && float(random.x >> 8) * 0x1p-24F < beta * weight[j];
    int position, kept;
    __syncthreads();
    Scan(shared.scan).ExclusiveSum(keep, position, kept);
    if (keep) {
      const size_t at = size_t(head) * keys + base + position;
      out.index[at] = i;
      out.probability[at] = fminf(1, beta * weight[j]);
    }
    base += kept;
  }
  if (tid == 0) {
    out.count[head] = base;
    atomicAdd(out.total, base);
  }
  __syncthreads();
  Sort(shared.sort).SortDescending(weight);
  if (tid == 0) {
    for (int j = 0; j < kVerifyTop; ++j) out.top[head * kVerifyTop + j] = weight[j];
  }
}

cudaError_t launch_verify(const unsigned* sketch, const float* scale, const float* query, int heads,
                          int keys, float budget, unsigned seed, const VerifyOutput& out,
                          cudaStream_t stream) {
  verify_kernel<<<heads, kThreads, sizeof(Shared), stream>>>(reinterpret_cast<const uint4*>(sketch),
                                                             scale, query, keys, budget, seed, out);
  return cudaGetLastError();
}

cudaError_t launch_select(const int* in, const char* flags, int n, int* out, int* out_count,
                          cudaStream_t stream) {
  size_t bytes = 0;
  cudaError_t error =
      cub::DeviceSelect::Flagged(nullptr, bytes, in, flags, out, out_count, n, stream);
  if (error != cudaSuccess) return error;
  void* scratch = nullptr;
  error = cudaMallocAsync(&scratch, bytes, stream);
  if (error != cudaSuccess) return error;
  error = cub::DeviceSelect::Flagged(scratch, bytes, in, flags, out, out_count, n, stream);
  const cudaError_t freed = cudaFreeAsync(scratch, stream);
  return error != cudaSuccess ? error : freed;
}

}  // namespace samples
