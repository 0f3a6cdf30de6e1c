// Equal bit for bit to src/cpu/head_store.cpp: the formulas are those of the stage headers, and
// every sum runs in the same order. Compiled without contraction (-fmad=false).
#include <algorithm>
#include <cstdint>

#include <verkv/sketch.hpp>

#include "compress.hpp"
#include "device_math.cuh"
#include "elements.cuh"
#include "launch.hpp"

namespace verkv::cuda {
namespace {

constexpr int kThreads = kCompressThreads;
constexpr int kWarps = kThreads / 32;

// ---- Means and encoding -------------------------------------------------------------------------

// One thread a channel: the sum over the tokens is in double and in order. Loads run ahead of it.
__global__ void __launch_bounds__(kThreads)
    channel_means_kernel(LayerView layer, const HeadView* heads, std::int64_t end) {
  const int parts = (layer.key_dim + kThreads - 1) / kThreads;
  const HeadView& head = heads[blockIdx.x / parts];
  const int j = static_cast<int>(blockIdx.x) % parts * kThreads + static_cast<int>(threadIdx.x);
  if (j >= layer.key_dim) return;
  const std::int64_t row = layer.key_dim * static_cast<std::int64_t>(size_bytes(layer.storage));
  double sum = 0;
  std::int64_t i = 0;
  for (; i + kMeansAhead <= end; i += kMeansAhead) {
    float x[kMeansAhead];
#pragma unroll
    for (int k = 0; k < kMeansAhead; ++k) {
      x[k] = load(head.resident_keys + (i + k) * row, layer.storage, j);
    }
#pragma unroll
    for (int k = 0; k < kMeansAhead; ++k) sum += static_cast<double>(x[k]);
  }
  for (; i < end; ++i) {
    sum += static_cast<double>(load(head.resident_keys + i * row, layer.storage, j));
  }
  head.channel_means[j] = static_cast<float>(sum / static_cast<double>(end));
}

// Row `row` of a matrix times x, in the order of dot_rows in src/cpu/kernels.hpp; by one thread.
VERKV_DEVICE float dot_row(const float* row, const float* x, int dim) {
  float lane[kLanes] = {};
  for (int begin = 0; begin < dim; begin += kLanes) {
#pragma unroll
    for (int k = 0; k < kLanes; ++k)
      if (begin + k < dim) lane[k] = fmaf(row[begin + k], x[begin + k], lane[k]);
  }
  return verkv::fold16(lane);
}

// A block takes one group of places: all threads load, warps go to the basis, then one thread a
// token runs the encoder of sketch.hpp, whose sums are in order, on codes in shared memory. Shared:
// float [kSketchGroup][row_stride], then the codes of a group.
__global__ void __launch_bounds__(kThreads)
    encode_kernel(LayerView layer, const HeadView* heads, std::int64_t end, int row_stride) {
  extern __shared__ float shared[];
  constexpr int kGroup = static_cast<int>(kSketchGroup);
  std::uint8_t* codes = reinterpret_cast<std::uint8_t*>(shared + kGroup * row_stride);
  const int dim = layer.key_dim;
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t begin = heads[0].compressed;
  const std::int64_t first_group = begin / kGroup;
  const std::int64_t groups = (end + kGroup - 1) / kGroup - first_group;
  const std::int64_t row_bytes = dim * static_cast<std::int64_t>(size_bytes(layer.storage));
  for (std::int64_t item = blockIdx.x; item < groups * layer.kv_heads; item += gridDim.x) {
    const HeadView& head = heads[item / groups];
    const SketchShape sketch = sketch_of(layer, head);
    const int code_bytes = sketch.code_bytes();
    const std::int64_t base = (first_group + item % groups) * kGroup;
    // Only tokens [from, to) of the group are new.
    const int from = static_cast<int>(base < begin ? begin - base : 0);
    const int to = static_cast<int>(end - base < kGroup ? end - base : kGroup);
    // Asked for by each warp at once: main memory is far.
    const int lane = thread % 32;
    const std::uint32_t positions =
        lane >= from && lane < to ? head.place_position[base + lane] : 0;
    for (int token = from + thread / 32; token < to; token += kWarps) {
      float* y = shared + token * row_stride;
      const std::int64_t position = __shfl_sync(kWholeWarp, positions, token);
      const std::byte* key = head.resident_keys + (head.drawn + position - begin) * row_bytes;
      for (int j = lane; j < dim; j += 32)
        y[j] = load(key, layer.storage, j) - head.channel_means[j];
      __syncwarp();
      // Held until all have read y, whose place they take.
      constexpr int kMost = 18;  // rows of a lane, up to 576 coordinates
      float x[kMost];
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        const int row = lane + 32 * i;
        x[i] = row < sketch.dim
                   ? dot_row(head.basis_encode + static_cast<std::int64_t>(row) * dim, y, dim)
                   : 0.0f;
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kMost; ++i)
        if (lane + 32 * i < sketch.dim) y[lane + 32 * i] = x[i];
    }
    for (int i = thread; i < kGroup * code_bytes; i += kThreads) codes[i] = 0;
    __syncthreads();
    if (thread >= from && thread < to) {
      const std::span<const float> x(shared + thread * row_stride,
                                     static_cast<std::size_t>(sketch.dim));
      head.scales[base + thread] =
          encode_key(sketch, layer.levels, head.sketch_bands, x, codes, thread);
    }
    __syncthreads();
    std::uint8_t* out = head.codes + base * code_bytes;
    for (int i = thread; i < kGroup * code_bytes; i += kThreads) {
      const int token = i % kGroup;
      if (token >= from && token < to) out[i] = codes[i];
    }
    // The next group needs no barrier: each thread clears the codes that it has read.
  }
}

// ---- Ordered compaction -------------------------------------------------------------------------

template <class Unit>
VERKV_DEVICE void copy_row(std::byte* to, const std::byte* from, std::int64_t bytes, int lane) {
  const int count = static_cast<int>(bytes / static_cast<std::int64_t>(sizeof(Unit)));
  for (int i = lane; i < count; i += 32) {
    reinterpret_cast<Unit*>(to)[i] = reinterpret_cast<const Unit*>(from)[i];
  }
}

// One warp a row. Unit divides the bytes of keys and of values.
template <class Unit>
__global__ void __launch_bounds__(kThreads)
    gather_residents_kernel(LayerView layer, GatherArguments arguments) {
  const std::int64_t element = static_cast<std::int64_t>(size_bytes(layer.storage));
  const std::int64_t key_bytes = layer.key_dim * element;
  const std::int64_t value_bytes = layer.value_dim * element;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t items = arguments.most_residents * layer.kv_heads;
  for (std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
       item < items; item += static_cast<std::int64_t>(gridDim.x) * kWarps) {
    const std::int64_t h = item / arguments.most_residents;
    const std::int64_t k = item % arguments.most_residents;
    const HeadView& from = arguments.from[h];
    const HeadView& to = arguments.to[h];
    if (k >= to.residents()) continue;
    const std::int64_t kept = arguments.keeps_drawn ? from.drawn : 0;
    std::int64_t place = to.compressed + (k - to.drawn);
    std::int64_t position = place;
    if (k < kept) {
      place = from.resident_place[k];
    } else if (k < to.drawn) {
      place = arguments.place[h * arguments.stride + k - kept];
      position = to.place_position[place];
    }
    const std::byte* key = nullptr;
    const std::byte* value = nullptr;
    if (arguments.keeps_drawn) {
      const std::int64_t slot = k < kept ? k : from.drawn + (position - from.compressed);
      key = from.resident_keys + slot * key_bytes;
      value = from.resident_values + slot * value_bytes;
    } else {
      key = from.host_rows + position * layer.row_bytes();
      value = key + key_bytes;
    }
    copy_row<Unit>(to.resident_keys + k * key_bytes, key, key_bytes, lane);
    copy_row<Unit>(to.resident_values + k * value_bytes, value, value_bytes, lane);
    if (lane == 0) to.resident_place[k] = static_cast<std::uint32_t>(place);
  }
}

__global__ void __launch_bounds__(kThreads)
    move_window_kernel(const HeadView* from, const HeadView* to) {
  const HeadView& old = from[blockIdx.x];
  const HeadView& now = to[blockIdx.x];
  const std::int64_t gone = now.compressed - old.compressed;
  for (std::int64_t i = threadIdx.x; i < now.tokens - now.compressed; i += kThreads) {
    now.window_square[i] = old.window_square[i + gone];
    now.window_steps[i] = old.window_steps[i + gone];
  }
}

}  // namespace

cudaError_t launch_channel_means(const LayerView& layer, const HeadView* heads, std::int64_t end,
                                 cudaStream_t stream) {
  const int parts = (layer.key_dim + kThreads - 1) / kThreads;
  return launch(channel_means_kernel, static_cast<unsigned>(layer.kv_heads * parts), kThreads, 0,
                stream, layer, heads, end);
}

cudaError_t launch_encode(const LayerView& layer, const HeadView* heads, std::int64_t end,
                          cudaStream_t stream) {
  // Odd, so that threads which walk along rows of their own meet different banks.
  const int row_stride = layer.key_dim | 1;
  const std::size_t shared = static_cast<std::size_t>(kSketchGroup) *
                             (static_cast<std::size_t>(row_stride) * sizeof(float) +
                              static_cast<std::size_t>(layer.sketch.code_bytes()));
  const unsigned blocks = blocks_for((end / kSketchGroup + 1) * layer.kv_heads);
  return launch(encode_kernel, blocks, kThreads, shared, stream, layer, heads, end, row_stride);
}

cudaError_t launch_gather_residents(const LayerView& layer, const GatherArguments& arguments,
                                    cudaStream_t stream) {
  if (arguments.most_residents == 0) return cudaSuccess;
  const std::int64_t element = static_cast<std::int64_t>(size_bytes(layer.storage));
  const unsigned blocks =
      blocks_for((arguments.most_residents * layer.kv_heads + kWarps - 1) / kWarps);
  const bool wide = layer.key_dim * element % 16 == 0 && layer.value_dim * element % 16 == 0;
  with_element(layer.storage, [](auto zero) {
    static_assert(sizeof(zero) % sizeof(std::uint16_t) == 0, "narrow rows are copied by 16 bits");
  });
  return launch(wide ? gather_residents_kernel<uint4> : gather_residents_kernel<std::uint16_t>,
                blocks, kThreads, 0, stream, layer, arguments);
}

cudaError_t launch_move_window(const LayerView& layer, const HeadView* from, const HeadView* to,
                               cudaStream_t stream) {
  return launch(move_window_kernel, static_cast<unsigned>(layer.kv_heads), kThreads, 0, stream,
                from, to);
}

}  // namespace verkv::cuda
