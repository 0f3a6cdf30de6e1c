// Equal bit for bit to HeadStore::append (src/cpu/head_store.cpp).
#include "append.hpp"

#include <algorithm>
#include <cstdint>

#include "device_math.cuh"
#include "elements.cuh"
#include "launch.hpp"
#include "window_score.hpp"

namespace verkv::cuda {
namespace {

// TensorView::row, which is the host's.
VERKV_DEVICE const void* view_row(const TensorView& view, std::int64_t token, std::int64_t head) {
  return static_cast<const char*>(view.data) +
         (token * view.token_stride + head * view.head_stride) *
             static_cast<std::int64_t>(size_bytes(view.type));
}

// By a block, for one head. Equal bit for bit to WindowScores::settle (src/cpu/window_scores.cpp).
VERKV_DEVICE void settle(HeadView& head) {
  const std::int64_t rows = head.tokens - head.first_scored;
  const std::int64_t before = head.first_scored - head.compressed;
  for (std::int64_t i = threadIdx.x; i < head.tokens - head.compressed; i += kAppendThreads) {
    float square = head.window_square[i];
    std::uint32_t steps = head.window_steps[i];
    for (std::int64_t r = i <= before ? 0 : i - before; r < rows; ++r) {
      if (head.has_given[r] == 0) continue;
      square += head.given[r * head.given_stride + i];
      ++steps;
    }
    head.window_square[i] = square;
    head.window_steps[i] = steps;
  }
  __syncthreads();
  if (threadIdx.x < kMostScoredTokens) head.has_given[threadIdx.x] = 0;
}

__global__ void __launch_bounds__(kAppendThreads) settle_kernel(HeadView* heads) {
  HeadView& head = heads[blockIdx.x];
  settle(head);
  if (threadIdx.x == 0) head.first_scored = head.tokens;
}

__global__ void __launch_bounds__(kAppendThreads)
    append_kernel(LayerView layer, AppendArguments arguments, float limit) {
  const std::int64_t element = static_cast<std::int64_t>(size_bytes(layer.storage));
  const std::int64_t items = arguments.keys.tokens * layer.kv_heads;
  for (std::int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const std::int64_t token = item / layer.kv_heads;
    const std::int64_t h = item % layer.kv_heads;
    const HeadView& head = arguments.heads[h];
    const std::int64_t position = arguments.first + token;
    const std::int64_t slot = head.drawn + (position - head.compressed);
    std::byte* host = const_cast<std::byte*>(head.host_rows) + position * layer.row_bytes();
    std::byte* key = head.resident_keys + slot * layer.key_dim * element;
    std::byte* value = head.resident_values + slot * layer.value_dim * element;
    for (int j = static_cast<int>(threadIdx.x); j < layer.key_dim + layer.value_dim;
         j += kAppendThreads) {
      const bool is_value = j >= layer.key_dim;
      const int at = is_value ? j - layer.key_dim : j;
      const TensorView& view = is_value ? arguments.values : arguments.keys;
      const float x = load(view_row(view, token, h), view.type, at);
      store(is_value ? value : key, layer.storage, at, x);
      store(host, layer.storage, j, x);
      if (fabsf(x) <= limit) continue;  // false for NaN
      if (atomicCAS(&arguments.bad->claimed, 0u, 1u) == 0u) {
        arguments.bad->source = is_value ? NumberSource::values : NumberSource::keys;
        arguments.bad->sequence = arguments.sequence;
        arguments.bad->layer = arguments.layer_index;
        arguments.bad->token = arguments.token_offset + token;
        arguments.bad->head = h;
        arguments.bad->coordinate = at;
        arguments.bad->number = x;
      }
    }
    const bool counts = arguments.counts && token == 0;
    const bool scores = head.given != nullptr;
    if (counts && scores) settle(arguments.heads[h]);
    if (threadIdx.x == 0) {
      head.resident_place[slot] = static_cast<std::uint32_t>(position);
      head.window_square[position - head.compressed] = 0;
      head.window_steps[position - head.compressed] = 0;
      if (counts) {
        const std::int64_t all = arguments.first + arguments.keys.tokens;
        arguments.heads[h].tokens = all;
        arguments.heads[h].first_scored = first_scored(arguments.first, all, scores);
      }
    }
  }
}

// 2 KiB of the 4 that the parameters of a launch may take everywhere.
constexpr int kRowsPerLaunch = 256;

struct RowBatch {
  StepRow row[kRowsPerLaunch];
};

__global__ void __launch_bounds__(kRowsPerLaunch)
    write_rows_kernel(RowBatch batch, int count, StepRow* out_rows) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < count) out_rows[i] = batch.row[i];
}

}  // namespace

cudaError_t launch_append(const LayerView& layer, const AppendArguments& arguments,
                          cudaStream_t stream) {
  if (arguments.keys.tokens == 0) return cudaSuccess;
  return launch(append_kernel, blocks_for(arguments.keys.tokens * layer.kv_heads), kAppendThreads,
                0, stream, layer, arguments, largest_number(layer.storage));
}

cudaError_t launch_settle(const LayerView& layer, HeadView* heads, cudaStream_t stream) {
  return launch(settle_kernel, static_cast<unsigned>(layer.kv_heads), kAppendThreads, 0, stream,
                heads);
}

cudaError_t launch_write_rows(const StepRow* rows, int count, StepRow* out_rows,
                              cudaStream_t stream) {
  for (int first = 0; first < count; first += kRowsPerLaunch) {
    RowBatch batch = {};
    const int here = std::min(count - first, kRowsPerLaunch);
    std::copy(rows + first, rows + first + here, batch.row);
    const cudaError_t error =
        launch(write_rows_kernel, 1, kRowsPerLaunch, 0, stream, batch, here, out_rows + first);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace verkv::cuda
