// What a step is compared with on the same card: dense attention over all tokens, held in device
// memory, or copied from the host in every step.
#ifndef VERKV_BENCH_CUDA_DENSE_HPP
#define VERKV_BENCH_CUDA_DENSE_HPP

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "cuda_kernels.hpp"
#include "cuda_scene.hpp"
#include "cuda_timing.hpp"
#include "device_memory.hpp"

namespace verkv::bench {

// Memory of partial states, and the output [pair][kDenseGroup][kDenseDim].
struct DenseBuffers {
  DenseBuffers(int all_pairs, int splits);
  DenseStates states(int splits) const;

  int pairs;
  cuda::DeviceBuffer<float> top;
  cuda::DeviceBuffer<float> sum;
  cuda::DeviceBuffer<float> partial;
  cuda::DeviceBuffer<float> output;
};

// All keys and values of the first rows of a scene in device memory.
class ResidentDense {
 public:
  // scene must outlive it. Throws DeviceError if the rows do not fit. Waits for the device.
  ResidentDense(const Scene& scene, int rows, int multiprocessors, cudaStream_t stream);

  // Numbers of splits to choose from: which is fastest depends on the card.
  const std::vector<int>& splits() const { return splits_; }
  void enqueue(int splits, cudaStream_t stream) const;
  const float* output() const { return buffers_.output.data(); }
  std::int64_t bytes() const { return rows_.bytes(); }

 private:
  const Scene& scene_;
  int pairs_;
  std::vector<int> splits_;
  cuda::DeviceBuffer<std::byte> rows_;
  DenseBuffers buffers_;
};

// All keys and values in pinned host memory. The copy engine brings them in pieces of one (row, KV
// head), while the kernel works on the piece before.
class OffloadedDense {
 public:
  // scene must outlive it.
  OffloadedDense(const Scene& scene, int rows, std::int64_t piece_bytes);

  // Begins after what is on the stream, and ends on it.
  void enqueue(cudaStream_t stream);
  const float* output() const { return buffers_.output.data(); }
  std::int64_t bytes() const;

 private:
  const Scene& scene_;
  int rows_;
  std::int64_t piece_tokens_;
  int piece_splits_;
  int pieces_;  // of a pair
  DenseBuffers buffers_;
  cuda::DeviceBuffer<std::byte> piece_[2];
  Stream copies_;
  Event start_;
  Event copied_[2];
  Event computed_[2];
};

// Attention over the stored rows of one (row, KV head) in double: [kDenseGroup][kDenseDim].
std::vector<double> reference_attention(const Scene& scene, int row, std::int64_t head);

}  // namespace verkv::bench

#endif  // VERKV_BENCH_CUDA_DENSE_HPP
