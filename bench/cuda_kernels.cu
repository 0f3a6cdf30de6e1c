// Dense attention over f16 rows, split over blocks, with all query heads of a group on each load;
// and probes of the machine.
#include <cstdint>

#include <verkv/types.hpp>

#include "cuda_kernels.hpp"
#include "device_math.cuh"

namespace verkv::bench {
namespace {

using cuda::as_float;
using cuda::fold16;
using cuda::half_of;
using cuda::minus_infinity;

constexpr int kThreads = 128;
// Sixteen lanes read the 256 bytes of a key, 16 bytes each.
constexpr int kRowLanes = 16;
constexpr int kLaneDims = kDenseDim / kRowLanes;
constexpr int kWorkers = kThreads / kRowLanes;
constexpr int kPieces = static_cast<int>(kRowBytes) / 16;
// Rows that a worker has under way.
constexpr int kAhead = 4;
// Below every logit, but finite: a worker without tokens must not come to infinity - infinity.
constexpr float kLeast = -1e30f;
constexpr float kLog2E = 1.44269504f;

VERKV_DEVICE void unpack(uint4 x, float (&y)[kLaneDims]) {
  const unsigned word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    y[2 * i] = as_float(half_of(word[i]));
    y[2 * i + 1] = as_float(half_of(word[i] >> 16));
  }
}

// What a worker knows of its tokens: an online softmax for each query head.
struct Worker {
  float top[kDenseGroup];
  float sum[kDenseGroup];
  float output[kDenseGroup][kLaneDims];
};

VERKV_DEVICE void add_rows(Worker& worker, const float (&query)[kDenseGroup][kLaneDims],
                           const uint4 (&key)[kAhead], const uint4 (&value)[kAhead], int count) {
  float weight[kAhead][kDenseGroup];
#pragma unroll
  for (int u = 0; u < kAhead; ++u) {
    float k[kLaneDims];
    unpack(key[u], k);
#pragma unroll
    for (int h = 0; h < kDenseGroup; ++h) {
      float dot = 0;
#pragma unroll
      for (int j = 0; j < kLaneDims; ++j) dot = fmaf(query[h][j], k[j], dot);
      dot = fold16(dot);
      weight[u][h] = u < count ? dot : minus_infinity();
    }
  }
#pragma unroll
  for (int h = 0; h < kDenseGroup; ++h) {
    float top = worker.top[h];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) top = fmaxf(top, weight[u][h]);
    const float factor = exp2f(worker.top[h] - top);
    worker.top[h] = top;
    worker.sum[h] *= factor;
#pragma unroll
    for (int j = 0; j < kLaneDims; ++j) worker.output[h][j] *= factor;
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      weight[u][h] = exp2f(weight[u][h] - top);
      worker.sum[h] += weight[u][h];
    }
  }
#pragma unroll
  for (int u = 0; u < kAhead; ++u) {
    float v[kLaneDims];
    unpack(value[u], v);
#pragma unroll
    for (int h = 0; h < kDenseGroup; ++h) {
#pragma unroll
      for (int j = 0; j < kLaneDims; ++j)
        worker.output[h][j] = fmaf(weight[u][h], v[j], worker.output[h][j]);
    }
  }
}

// Grid: (pairs, splits).
__global__ void __launch_bounds__(kThreads, 3)
    dense_kernel(const DensePart part, const DenseStates states) {
  __shared__ float tops[kWorkers][kDenseGroup];
  __shared__ float sums[kWorkers][kDenseGroup];
  __shared__ float outputs[kWorkers][kDenseGroup][kDenseDim];
  const int lane = threadIdx.x % kRowLanes;
  const int worker_id = threadIdx.x / kRowLanes;
  const std::int64_t pair = blockIdx.x;
  const std::int64_t each = (part.tokens + part.splits - 1) / part.splits;
  const std::int64_t begin = min(part.tokens, blockIdx.y * each);
  const std::int64_t end = min(part.tokens, begin + each);
  const uint4* rows = reinterpret_cast<const uint4*>(part.rows + pair * part.pair_bytes);

  float query[kDenseGroup][kLaneDims];
  Worker worker;
#pragma unroll
  for (int h = 0; h < kDenseGroup; ++h) {
    worker.top[h] = kLeast;
    worker.sum[h] = 0;
#pragma unroll
    for (int j = 0; j < kLaneDims; ++j) {
      query[h][j] = part.scale * kLog2E *
                    part.queries[(pair * kDenseGroup + h) * kDenseDim + lane * kLaneDims + j];
      worker.output[h][j] = 0;
    }
  }
  for (std::int64_t first = begin; first < end; first += kWorkers * kAhead) {
    uint4 key[kAhead];
    uint4 value[kAhead];
    int count = 0;
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const std::int64_t token = first + u * kWorkers + worker_id;
      count += token < end;
      const std::int64_t at = min(token, end - 1) * kPieces + lane;
      key[u] = rows[at];
      value[u] = rows[at + kRowLanes];
    }
    add_rows(worker, query, key, value, count);
  }

#pragma unroll
  for (int h = 0; h < kDenseGroup; ++h) {
    if (lane == 0) {
      tops[worker_id][h] = worker.top[h];
      sums[worker_id][h] = worker.sum[h];
    }
#pragma unroll
    for (int j = 0; j < kLaneDims; ++j)
      outputs[worker_id][h][lane * kLaneDims + j] = worker.output[h][j];
  }
  __syncthreads();
  const int d = threadIdx.x;
  for (int h = 0; h < kDenseGroup; ++h) {
    float top = kLeast;
    for (int w = 0; w < kWorkers; ++w) top = fmaxf(top, tops[w][h]);
    float sum = 0;
    float output = 0;
    for (int w = 0; w < kWorkers; ++w) {
      const float factor = exp2f(tops[w][h] - top);
      sum = fmaf(factor, sums[w][h], sum);
      output = fmaf(factor, outputs[w][h][d], output);
    }
    const std::int64_t at =
        (pair * states.splits + part.first_split + blockIdx.y) * kDenseGroup + h;
    states.output[at * kDenseDim + d] = output;
    if (d == 0) {
      states.top[at] = top;
      states.sum[at] = sum;
    }
  }
}
static_assert(kThreads == kDenseDim, "a thread merges one coordinate");

// Grid: (pairs, query heads of the group).
__global__ void __launch_bounds__(kThreads) merge_kernel(const DenseStates states, float* out) {
  const std::int64_t pair = blockIdx.x;
  const int h = blockIdx.y;
  const int d = threadIdx.x;
  const std::int64_t first = pair * states.splits * kDenseGroup + h;
  float top = kLeast;
  for (int s = 0; s < states.splits; ++s) top = fmaxf(top, states.top[first + s * kDenseGroup]);
  float sum = 0;
  float output = 0;
  for (int s = 0; s < states.splits; ++s) {
    const std::int64_t at = first + s * kDenseGroup;
    const float factor = exp2f(states.top[at] - top);
    sum = fmaf(factor, states.sum[at], sum);
    output = fmaf(factor, states.output[at * kDenseDim + d], output);
  }
  out[(pair * kDenseGroup + h) * kDenseDim + d] = output / sum;
}

__global__ void __launch_bounds__(kReadThreads)
    read_rows_kernel(const uint4* rows, std::int64_t count, std::int64_t factor,
                     std::uint32_t* out) {
  constexpr int kRowsAhead = 8;
  const std::int64_t thread = blockIdx.x * kReadThreads + threadIdx.x;
  const std::int64_t warps = gridDim.x * kReadThreads / 32;
  std::uint32_t all = 0;
  for (std::int64_t first = thread / 32; first < count; first += kRowsAhead * warps) {
    uint4 piece[kRowsAhead];
#pragma unroll
    for (int u = 0; u < kRowsAhead; ++u) {
      const std::int64_t i = first + u * warps;
      const std::int64_t row = i * factor & (count - 1);
      piece[u] = i < count ? rows[row * kPieces + thread % 32] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int u = 0; u < kRowsAhead; ++u) all ^= piece[u].x ^ piece[u].y ^ piece[u].z ^ piece[u].w;
  }
  out[thread] = all;
}

__global__ void empty_kernel() {}

}  // namespace

cudaError_t launch_dense_part(const DensePart& part, const DenseStates& states,
                              cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(part.pairs), static_cast<unsigned>(part.splits));
  dense_kernel<<<blocks, kThreads, 0, stream>>>(part, states);
  return cudaGetLastError();
}

cudaError_t launch_dense_merge(const DenseStates& states, int pairs, float* output,
                               cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(pairs), kDenseGroup);
  merge_kernel<<<blocks, kThreads, 0, stream>>>(states, output);
  return cudaGetLastError();
}

cudaError_t launch_read_rows(const std::byte* rows, std::int64_t count, std::int64_t factor,
                             std::uint32_t* out, int blocks, cudaStream_t stream) {
  read_rows_kernel<<<static_cast<unsigned>(blocks), kReadThreads, 0, stream>>>(
      reinterpret_cast<const uint4*>(rows), count, factor, out);
  return cudaGetLastError();
}

cudaError_t launch_empty(cudaStream_t stream) {
  empty_kernel<<<1, 1, 0, stream>>>();
  return cudaGetLastError();
}

}  // namespace verkv::bench
