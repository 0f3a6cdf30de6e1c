// Kernels of the GPU benchmark: the dense attention that a step is compared with, and probes of
// the machine. Each function enqueues on the stream and returns the error of its launch; none
// synchronises or allocates.
#ifndef VERKV_BENCH_CUDA_KERNELS_HPP
#define VERKV_BENCH_CUDA_KERNELS_HPP

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace verkv::bench {

// Head size and query heads per KV head that the dense kernel is made for.
inline constexpr int kDenseDim = 128;
inline constexpr int kDenseGroup = 4;
// A row is the key and the value of a token side by side, f16, as on the host tier.
inline constexpr std::int64_t kRowBytes = 4 * kDenseDim;

// Partial results of dense attention. A pair is one (row of the batch, KV head); logits are in
// powers of two.
struct DenseStates {
  float* top = nullptr;     // [pair][split][kDenseGroup]
  float* sum = nullptr;     // [pair][split][kDenseGroup]
  float* output = nullptr;  // [pair][split][kDenseGroup][kDenseDim]
  int splits = 1;           // of a pair, over all parts

  DenseStates of_pair(std::int64_t pair) const {
    const std::int64_t heads = pair * splits * kDenseGroup;
    return {top + heads, sum + heads, output + heads * kDenseDim, splits};
  }
};

// Some tokens of some pairs.
struct DensePart {
  const std::byte* rows = nullptr;  // of the first pair, device memory
  std::int64_t pair_bytes = 0;      // from one pair to the next
  std::int64_t tokens = 0;          // of each pair, > 0
  const float* queries = nullptr;   // of the first pair: [pair][kDenseGroup][kDenseDim]
  float scale = 1;
  int pairs = 1;
  int splits = 1;       // blocks that share the tokens of a pair
  int first_split = 0;  // where their states go
};

cudaError_t launch_dense_part(const DensePart& part, const DenseStates& states,
                              cudaStream_t stream);
// output [pair][kDenseGroup][kDenseDim].
cudaError_t launch_dense_merge(const DenseStates& states, int pairs, float* output,
                               cudaStream_t stream);

// Threads of launch_read_rows for so many blocks: elements of its `out`.
inline constexpr std::int64_t kReadThreads = 256;
// Reads `count` rows of kRowBytes, a power of two, once each, a warp a row by 16-byte loads; row
// i * factor modulo count is the i-th, so an odd factor scatters them. out: [blocks *
// kReadThreads], something that depends on every byte.
cudaError_t launch_read_rows(const std::byte* rows, std::int64_t count, std::int64_t factor,
                             std::uint32_t* out, int blocks, cudaStream_t stream);

// One thread that does nothing.
cudaError_t launch_empty(cudaStream_t stream);

}  // namespace verkv::bench

#endif  // VERKV_BENCH_CUDA_KERNELS_HPP
