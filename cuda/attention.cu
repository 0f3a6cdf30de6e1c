// Last launch of a step: residents with their coefficients, centroids, and the fetched rows, which
// are read from mapped host memory once, straight into shared memory, while those of the fast tier
// are added up.
// Splits leave partial states; the last one of a KV head merges them in order.
#include <verkv/attention.hpp>

#include "attention_split.cuh"
#include "bad_number.hpp"
#include "device_math.cuh"
#include "launch.hpp"
#include "query.cuh"
#include "step_kernels.hpp"
#include "tuning.hpp"
#include "window_score.hpp"

namespace verkv::cuda {
namespace {

// What the query gives to the scores of the local window, in place of what it gave before.
VERKV_DEVICE void score_window(const StepArguments& arguments, const HeadView& view,
                               std::int64_t first_head) {
  const StepWorkspace& ws = arguments.workspace;
  const int group = arguments.view.layer.group;
  const int back = arguments.view.batch[blockIdx.x / arguments.view.layer.kv_heads].back;
  const std::int64_t given_row = view.tokens - 1 - back - view.first_scored;
  if (view.given == nullptr || given_row < 0) return;
  const std::int64_t window = view.tokens - back - view.compressed;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.y) * kAttentionThreads;
  if (begin >= window) return;
  bool computable = true;
  for (int h = 0; h < group; ++h)
    computable = computable && ws.heads[first_head + h].computable != 0;
  if (begin + threadIdx.x == 0) view.has_given[given_row] = computable ? 1 : 0;
  if (!computable) return;
  float* given = view.given + given_row * view.given_stride;
#pragma unroll 1
  for (std::int64_t i = begin + threadIdx.x; i < window;
       i += static_cast<std::int64_t>(gridDim.y) * kAttentionThreads) {
    float square = 0;
#pragma unroll 1
    for (int h = 0; h < group; ++h) {
      const HeadState& state = ws.heads[first_head + h];
      const float logit = ws.resident_logit[(first_head + h) * ws.resident_stride + view.drawn + i];
      square += window_square(logit, state.shift, static_cast<float>(1 / state.denominator));
    }
    given[i] = square;
  }
}

// A query that is not finite spoils its own head's answer; without this nobody would be told.
VERKV_DEVICE void check_queries(const StepView& step, std::int64_t row, std::int64_t first_head,
                                int heads) {
  const int key_dim = step.layer.key_dim;
#pragma unroll 1
  for (int i = threadIdx.x; i < heads * key_dim; i += kAttentionThreads) {
    const float x = query_number(step, row, first_head + i / key_dim, i % key_dim);
    if (fabsf(x) <= kLargestFloat) continue;  // false for NaN
    if (atomicCAS(&step.bad->claimed, 0u, 1u) != 0u) continue;
    step.bad->source = NumberSource::queries;
    step.bad->layer = step.layer_index;
    step.bad->token = row;
    step.bad->head = first_head + i / key_dim;
    step.bad->coordinate = i % key_dim;
    step.bad->number = x;
  }
}

// The answer of a row that is there only to fill the batch.
VERKV_DEVICE void answer_padding(const StepView& step, std::int64_t query_head, int heads) {
  const LayerView& layer = step.layer;
  const int tid = threadIdx.x;
#pragma unroll 1
  for (int i = tid; i < heads * layer.value_dim; i += kAttentionThreads)
    step.output[query_head * layer.value_dim + i] = 0;
  if (step.lse != nullptr && tid < heads) step.lse[query_head + tid] = minus_infinity();
}

// Grid: (rows x KV heads, splits, parts of a group).
template <class Element, int kColumns>
__global__ void __launch_bounds__(kAttentionThreads, kColumns > 1 ? 1 : 2)
    attention_kernel(const StepArguments arguments) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ HeadSums sums;
  __shared__ bool is_last;
  const StepView& step = arguments.view;
  const LayerView& layer = step.layer;
  const StepWorkspace& ws = arguments.workspace;
  const StepGrid& grid = arguments.grid;
  const int pair = blockIdx.x;
  const int split = blockIdx.y;
  const int splits = grid.attention_splits;
  const int row = pair / layer.kv_heads;
  const int kv_head = pair % layer.kv_heads;
  const int first = blockIdx.z * grid.part_heads;
  const int heads = min(grid.part_heads, layer.group - first);
  const std::int64_t query_head = static_cast<std::int64_t>(pair) * layer.group + first;
  const int slot = step.batch[row].slot;
  if (slot < 0) {
    if (split != 0) return;
    answer_padding(step, query_head, heads);
    return;
  }
  const HeadView& view = step.heads[static_cast<std::int64_t>(slot) * layer.kv_heads + kv_head];
  AttentionSplit<Element, kColumns> part(arguments, view, heads, query_head,
                                         ws.fetched + pair * ws.mask_stride, memory, sums);

  // The first fetched rows are on their way while those of the fast tier are added up.
  const bool aligned = part.aligned();
  const Range moved(ws.groups[pair].moved, splits, split);
  const int moved_count = static_cast<int>(moved.count);
  const std::uint32_t* positions = ws.moved + pair * ws.token_stride + moved.begin;
  if (aligned) part.fetch(positions, min(grid.tile, moved_count));

  const std::int64_t first_head = static_cast<std::int64_t>(kv_head) * layer.group + first;
  if (step.bad != nullptr && split == 0) check_queries(step, row, first_head, heads);
  if (moved_count > 0) part.load_queries(step, row, first_head);
  sums.start(ws.heads + query_head, heads, layer.cap);
  __syncthreads();

  const Range residents(residents_of(view, step.batch[row]), splits, split);
  const Range centroids(part.clusters(), splits, split);
  const std::int64_t near_count = residents.count + centroids.count;
  for (std::int64_t done = 0; done < near_count + moved_count;) {
    int count;
    const std::byte* values = nullptr;
    if (done >= near_count) {
      const int from = static_cast<int>(done - near_count);
      count = min(grid.tile, moved_count - from);
      if (from > 0 || !aligned) part.fetch(positions + from, count);
      wait_for_copies();
      __syncthreads();
      part.fetched_logits(count);
    } else {
      const int most = aligned ? kChunk : grid.tile;
      values = part.near_logits(residents, centroids, done, most, count);
      if (!aligned) {
        part.copy_values(values, count);
        values = nullptr;
      }
    }
    __syncthreads();
    part.weigh(count);
    __syncthreads();
    part.add(values, count);
    __syncthreads();
    done += count;
  }
  part.write_partial(splits, split);
  if (blockIdx.z == 0) score_window(arguments, view, static_cast<std::int64_t>(pair) * layer.group);

  const auto finished = [&]() -> std::uint32_t& {
    return ws.finished[static_cast<std::int64_t>(pair) * grid.attention_parts + blockIdx.z];
  };
  if (comes_last(finished, static_cast<unsigned>(splits), is_last)) part.merge(step, splits);
}

template <class Element>
cudaError_t launch_for(const StepArguments& arguments, cudaStream_t stream) {
  const StepGrid& grid = arguments.grid;
  const dim3 blocks(static_cast<unsigned>(arguments.view.rows * arguments.view.layer.kv_heads),
                    static_cast<unsigned>(grid.attention_splits),
                    static_cast<unsigned>(grid.attention_parts));
  const int shared = AttentionShared(arguments.view.layer, grid).bytes();
  const auto launch_one = [&](auto* kernel) {
    if (shared > (40 << 10)) {  // above what needs no permission, less the static part
      const cudaError_t error =
          cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
      if (error != cudaSuccess) return error;
    }
    return launch(kernel, blocks, kAttentionThreads, static_cast<std::size_t>(shared), stream,
                  arguments);
  };
  if constexpr (!std::is_same_v<Element, float>) {
    if (grid.warp_columns > 1) return launch_one(attention_kernel<Element, 2>);
  }
  return launch_one(attention_kernel<Element, 1>);
}

}  // namespace

int attention_shared_bytes(const LayerView& layer, const StepGrid& grid) {
  return AttentionShared(layer, grid).bytes() + static_cast<int>(sizeof(HeadSums) + sizeof(bool));
}

cudaError_t launch_attention(const StepArguments& arguments, cudaStream_t stream) {
  return with_element(arguments.view.layer.storage,
                      [&](auto zero) { return launch_for<decltype(zero)>(arguments, stream); });
}

}  // namespace verkv::cuda
