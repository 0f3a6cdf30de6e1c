// What the GPU benchmark times: a synthetic prompt, one layer of a batch of sequences that hold it,
// and several layers behind the public interface.
#ifndef VERKV_BENCH_CUDA_SCENE_HPP
#define VERKV_BENCH_CUDA_SCENE_HPP

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <verkv/cuda_cache.hpp>

#include "cuda_kernels.hpp"
#include "cuda_timing.hpp"
#include "device_memory.hpp"
#include "host_buffer.hpp"
#include "step_workspace.hpp"
#include "store.hpp"
#include "synthetic.hpp"

namespace verkv::bench {

inline constexpr double kKeep = 1.0 / 16;
inline constexpr std::int64_t kSinkTokens = 4;
inline constexpr std::int64_t kLocalTokens = 32;
inline constexpr SketchConfig kSketch{SketchKind::calibrated, 2};

// A stop rule alone.
struct Rule {
  std::string name;
  std::optional<double> epsilon;  // with FetchConfig's delta
  std::optional<double> risk;
};

// Keys, values and queries, on the device; the same in all runs. The host's copies of keys and
// values are given up.
class Prompt {
 public:
  // rows: queries of so many rows of a batch, one step each. Waits for the device.
  Prompt(std::int64_t tokens, std::int64_t kv_heads, int rows);

  const SyntheticShape& shape() const { return cache_.shape; }
  std::int64_t query_heads() const { return shape().kv_heads * shape().group; }
  int rows() const { return rows_; }
  TensorView key_view() const { return rows_view(keys_); }
  TensorView value_view() const { return rows_view(values_); }
  // [row][query head][dim], device memory.
  TensorView queries() const;
  // The query of one row and query head, host memory.
  const float* host_query(int row, std::int64_t query_head) const {
    return cache_.queries.data() + (row * query_heads() + query_head) * shape().dim;
  }
  // Of other steps: what a calibrated sketch is made for. Host or device memory.
  TensorView prompt_queries(MemorySpace space) const;
  // [KV head][token], host or device memory.
  ImportanceView importance(MemorySpace space) const;

 private:
  TensorView rows_view(const cuda::DeviceBuffer<float>& rows) const;

  int rows_;
  SyntheticCache cache_;
  cuda::DeviceBuffer<float> keys_;
  cuda::DeviceBuffer<float> values_;
  cuda::DeviceBuffer<float> queries_;
  cuda::DeviceBuffer<float> importance_;
};

// One layer of a batch: the first row is compressed as the backend does it, the others are copies
// of it at other addresses, with queries of their own.
class Scene {
 public:
  // Bytes of pinned memory that so many rows take.
  static std::int64_t pinned_bytes(std::int64_t tokens, std::int64_t kv_heads, int rows) {
    return rows * kv_heads * tokens * kRowBytes;
  }

  // prompt must outlive it. Waits for the device.
  Scene(const Prompt& prompt, int rows, cudaStream_t stream);
  Scene(const Scene&) = delete;
  Scene& operator=(const Scene&) = delete;

  std::int64_t tokens() const { return store_.tokens(); }
  std::int64_t kv_heads() const { return layer_.kv_heads; }
  float scale() const { return layer_.scale; }
  const Prompt& prompt() const { return prompt_; }
  // The first `rows` rows under a rule.
  cuda::StepArguments step(const Rule& rule, int rows) const;
  // The host tier's rows of one (row, KV head), host memory.
  const std::byte* host_rows(int row, std::int64_t head) const;
  const float* output() const { return output_.data(); }  // of the last step, device memory
  // Tokens that the last step of so many rows copied from the host. Waits for the device.
  std::int64_t moved_tokens(int rows) const;

  // Bytes of one row that each part of a step reads at least once, and residents of its heads.
  struct Sizes {
    std::int64_t residents = 0;
    std::int64_t sketch = 0;  // codes, scales, and the basis
    std::int64_t odds = 0;
    std::int64_t resident_keys = 0;
    std::int64_t resident_values = 0;
    std::int64_t centroids = 0;
    // Values on the fast tier.
    std::int64_t near_values() const { return resident_values + centroids; }
  };
  Sizes sizes() const;

 private:
  void append();
  void compress();
  // The other rows' heads, [row - 1][KV head].
  void copy_rows(int rows);
  std::vector<cuda::HeadView> copy_row();
  void allocate_step(int rows);

  const Prompt& prompt_;
  cudaStream_t stream_;
  cuda::LayerView layer_;
  cuda::LayerStore store_;
  cuda::DeviceBuffer<cuda::HeadView> table_;
  std::vector<cuda::DeviceBuffer<std::byte>> device_copies_;
  std::vector<cuda::HostBuffer> host_copies_;  // [row - 1]
  cuda::DeviceBuffer<cuda::StepRow> batch_;
  cuda::DeviceBuffer<float> output_;
  cuda::DeviceBuffer<float> lse_;
  cuda::DeviceBuffer<QueryHeadReport> query_reports_;
  cuda::DeviceBuffer<KvHeadReport> kv_reports_;
  cuda::DeviceBuffer<std::byte> workspace_;
};

// Layers of one sequence behind make_cuda_cache, all with the same prompt, captured in a graph.
class CapturedLayers {
 public:
  // stream and prompt must outlive it. Waits for the device.
  CapturedLayers(const Prompt& prompt, const Rule& rule, int layers, cudaStream_t stream);

  int layers() const { return static_cast<int>(cache_->config().layers.size()); }
  void launch() const { graph_->launch(stream_); }
  // Bytes that a step of one layer reads at least once on the fast tier.
  std::int64_t fast_bytes() const;
  // Tokens that a step of one layer copied from the host, mean over layers and steps. Waits for the
  // device.
  double moved_tokens() const;
  const float* output() const { return output_.data(); }  // of the last layer, device memory

 private:
  void attend();

  cudaStream_t stream_;
  const Prompt& prompt_;
  std::unique_ptr<KvCacheManager> cache_;
  SequenceId sequence_;
  cuda::DeviceBuffer<float> output_;
  std::optional<Graph> graph_;
};

}  // namespace verkv::bench

#endif  // VERKV_BENCH_CUDA_SCENE_HPP
