// Small kernels whose PTX is kept beside as samples.ptx (see README.md), each for one thing that
// the CPU device must run or find. Those with a bool parameter come in a correct and a faulty form.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <cuda_runtime.h>

#ifdef SAMPLES_WITH_HOST
#include "samples.hpp"
#endif

namespace samples {

constexpr int kBlock = 128;

__global__ void axpy(float a, const float* __restrict__ x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = fmaf(a, x[i], y[i]);
}

// Inclusive scan of kBlock numbers a block: warps by shuffles, then their sums by the first warp.
__global__ void __launch_bounds__(kBlock) block_scan(const int* in, int* out, int* totals) {
  __shared__ int sums[kBlock / 32];
  __shared__ int total;
  const int i = blockIdx.x * kBlock + threadIdx.x;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  int value = in[i];
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(~0U, value, step);
    if (lane >= step) value += below;
  }
  if (lane == 31) sums[warp] = value;
  __syncthreads();
  int before = 0;
  for (int w = 0; w < warp; ++w) before += sums[w];
  __syncthreads();
  if (threadIdx.x == kBlock - 1) total = before + value;
  if (lane == 31) sums[warp] = before + value;  // the inclusive sums, over the others
  __syncthreads();
  out[i] = value + (warp > 0 ? sums[warp - 1] : 0);
  if (threadIdx.x == 0) totals[blockIdx.x] = total;
}

// Each thread reads what its neighbour wrote to shared memory.
template <bool kBarrier>
__global__ void neighbour(int* out) {
  __shared__ int tile[kBlock];
  tile[threadIdx.x] = threadIdx.x;
  if (kBarrier) __syncthreads();
  out[threadIdx.x] = tile[(threadIdx.x + 1) % kBlock];
}

// The same within a warp; a shuffle is no barrier for memory.
template <bool kSync>
__global__ void warp_neighbour(int* out) {
  __shared__ int tile[32];
  tile[threadIdx.x] = threadIdx.x;
  if (kSync)
    __syncwarp();
  else
    out[32 + threadIdx.x] = __shfl_xor_sync(~0U, static_cast<int>(threadIdx.x), 1);
  out[threadIdx.x] = tile[threadIdx.x ^ 1];
}

// Overwrites a tile while others may still read it.
template <bool kBarrier>
__global__ void reuse(int* out) {
  __shared__ int tile[kBlock];
  tile[threadIdx.x] = threadIdx.x;
  __syncthreads();
  const int value = tile[(threadIdx.x + 1) % kBlock];
  if (kBarrier) __syncthreads();
  tile[threadIdx.x] = value + 1;
  out[threadIdx.x] = value;
}

// The last block to finish adds up what all have written.
template <bool kFence>
__global__ void last_block_sum(const int* x, int* partial, unsigned* counter, int* out) {
  __shared__ bool last;
  atomicAdd(&partial[blockIdx.x], x[blockIdx.x * blockDim.x + threadIdx.x]);
  __syncthreads();
  if (threadIdx.x == 0) {
    partial[gridDim.x + blockIdx.x] = atomicAdd(&partial[blockIdx.x], 0);
    if (kFence) __threadfence();
    last = atomicAdd(counter, 1) == gridDim.x - 1;
    if (kFence) __threadfence();
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    int sum = 0;
    for (int b = 0; b < gridDim.x; ++b) sum += partial[gridDim.x + b];
    *out = sum;
    *counter = 0;
  }
}

// Asynchronous copies to shared memory, with or without the wait for them.
template <bool kWait>
__global__ void async_tile(const int4* in, int4* out) {
  __shared__ int4 tile[kBlock];
  __pipeline_memcpy_async(&tile[threadIdx.x], &in[threadIdx.x], sizeof(int4));
  __pipeline_commit();
  if (kWait) __pipeline_wait_prior(0);
  __syncthreads();
  out[threadIdx.x] = tile[kBlock - 1 - threadIdx.x];
}

// Two warps hand tiles to the two others through named barriers.
template <bool kFree>
__global__ void producer_consumer(int* out, int rounds) {
  __shared__ int tile[64];
  const bool produces = threadIdx.x < 64;
  const int i = threadIdx.x % 64;
  for (int r = 0; r < rounds; ++r) {
    if (produces) {
      if (kFree) asm volatile("bar.sync 2, 128;" ::: "memory");
      tile[i] = r * 100 + i;
      asm volatile("bar.arrive 1, 128;" ::: "memory");
    } else {
      if (kFree) asm volatile("bar.arrive 2, 128;" ::: "memory");
      asm volatile("bar.sync 1, 128;" ::: "memory");
      out[r * 64 + i] = tile[63 - i];
    }
  }
}

__global__ void early_exit(int* out) {
  if (threadIdx.x >= 96) return;
  out[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] += 1;
}

// A barrier in either branch.
__global__ void divergent(int* out) {
  __shared__ int tile[kBlock];
  tile[threadIdx.x] = 0;
  if (threadIdx.x < 64) {
    tile[threadIdx.x] = 1;
    __syncthreads();
  } else {
    tile[threadIdx.x] = 2;
    __syncthreads();
    tile[threadIdx.x] += 1;
  }
  out[threadIdx.x] = tile[threadIdx.x];
}

__global__ void halves(const __nv_bfloat16* a, const __half* b, float* sum, __nv_bfloat162* pairs,
                       __half* products) {
  const int i = threadIdx.x;
  sum[i] = __bfloat162float(a[i]) + __half2float(b[i]);
  pairs[i] = __floats2bfloat162_rn(__bfloat162float(a[i]) * 3.0F, __half2float(b[i]) * 5.0F);
  products[i] = __hfma(b[i], __float2half(1.5F), __float2half(0.25F));
}

__global__ void store_far(unsigned char* bytes, long long offset) {
  bytes[offset + threadIdx.x] = static_cast<unsigned char>(threadIdx.x);
}

__constant__ float table[16];
__device__ int table_reads = 5;

__global__ void use_table(float* out) {
  out[threadIdx.x] = table[threadIdx.x % 16] * 2.0F;
  if (threadIdx.x == 0) atomicAdd(&table_reads, 1);
}

// 2-bit sketch scores on tensor cores, exact in integers. query: [4 heads][128], |q| <= 16383;
// sketch: [n][8] words of 16 codes, code c means level 2 c - 3; out: [4][n]. The 8 columns of the
// second matrix are 4 heads x 2 limbs of 7 bits and the rest.
__global__ void __launch_bounds__(256)
    sketch_scores(const uint2* __restrict__ sketch, const short* __restrict__ query, int n,
                  int* __restrict__ out) {
  const int lane = threadIdx.x & 31;
  const int group = lane >> 2;
  const int in_group = lane & 3;
  const int warp = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
  const int head = group >> 1;
  const int limb = group & 1;
  unsigned b[4][2];
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      unsigned word = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int q = query[head * 128 + 32 * in_group + 16 * w + step + 4 * i];
        const int high = (q + 64) >> 7;
        const unsigned part = limb ? q - 128 * high : high;
        word |= (part & 255U) << (8 * i);
      }
      b[step][w] = word;
    }
  }
  int query_sum = 0;
  for (int d = 0; d < 128; ++d) query_sum += query[in_group * 128 + d];
  const int row0 = warp * 16 + group;
  const int row1 = row0 + 8;
  const uint2 zero = {0, 0};
  const uint2 w0 = row0 < n ? sketch[size_t(row0) * 4 + in_group] : zero;
  const uint2 w1 = row1 < n ? sketch[size_t(row1) * 4 + in_group] : zero;
  int d[4] = {0, 0, 0, 0};
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const unsigned a[4] = {(w0.x >> (2 * step)) & 0x03030303U, (w1.x >> (2 * step)) & 0x03030303U,
                           (w0.y >> (2 * step)) & 0x03030303U, (w1.y >> (2 * step)) & 0x03030303U};
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[step][0]), "r"(b[step][1]));
  }
  if (row0 < n) out[size_t(in_group) * n + row0] = 2 * (128 * d[0] + d[1]) - 3 * query_sum;
  if (row1 < n) out[size_t(in_group) * n + row1] = 2 * (128 * d[2] + d[3]) - 3 * query_sum;
}

template __global__ void neighbour<true>(int*);
template __global__ void neighbour<false>(int*);
template __global__ void warp_neighbour<true>(int*);
template __global__ void warp_neighbour<false>(int*);
template __global__ void reuse<true>(int*);
template __global__ void reuse<false>(int*);
template __global__ void last_block_sum<true>(const int*, int*, unsigned*, int*);
template __global__ void last_block_sum<false>(const int*, int*, unsigned*, int*);
template __global__ void async_tile<true>(const int4*, int4*);
template __global__ void async_tile<false>(const int4*, int4*);
template __global__ void producer_consumer<true>(int*, int);
template __global__ void producer_consumer<false>(int*, int);

#ifdef SAMPLES_WITH_HOST
cudaError_t launch_axpy(float a, const float* x, float* y, int n, cudaStream_t stream) {
  axpy<<<(n + 255) / 256, 256, 0, stream>>>(a, x, y, n);
  return cudaGetLastError();
}
cudaError_t launch_block_scan(const int* in, int* out, int* totals, int blocks,
                              cudaStream_t stream) {
  block_scan<<<blocks, kBlock, 0, stream>>>(in, out, totals);
  return cudaGetLastError();
}
cudaError_t launch_sketch_scores(const void* sketch, const short* query, int n, int* out,
                                 cudaStream_t stream) {
  sketch_scores<<<(n + 127) / 128, 256, 0, stream>>>(static_cast<const uint2*>(sketch), query, n,
                                                     out);
  return cudaGetLastError();
}
cudaError_t launch_axpy_extended(float a, const float* x, float* y, int n, unsigned cluster,
                                 cudaStream_t stream) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((n + 255) / 256);
  config.blockDim = dim3(256);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, axpy, a, x, y, n);
}
cudaError_t set_table(const float (&values)[16]) {
  return cudaMemcpyToSymbol(table, values, sizeof values);
}
cudaError_t launch_table(float* out, cudaStream_t stream) {
  use_table<<<1, 32, 0, stream>>>(out);
  return cudaGetLastError();
}
#endif

}  // namespace samples
