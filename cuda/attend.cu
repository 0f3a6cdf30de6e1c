// Last launch of a step: residents with their coefficients and the fetched rows, which are read
// from mapped host memory once, straight into shared memory. Splits leave partial states; the last
// one of a KV head merges them in order.
#include <cmath>

#include <verkv/attention.hpp>
#include <verkv/shrinkage.hpp>

#include "compress.hpp"
#include "device_math.cuh"
#include "launch.hpp"
#include "query.cuh"
#include "step_kernels.hpp"

namespace verkv::cuda {
namespace {

constexpr int kThreads = kAttendThreads;
constexpr int kWarps = kThreads / 32;

// Dynamic shared memory of a block.
struct AttendShared {
  int query_stride;  // floats
  int key_stride;    // bytes; rows start in different banks
  int value_stride;  // bytes
  int query_bytes;
  int logit_bytes;
  int tile_bytes;

  __host__ __device__ AttendShared(const LayerView& layer, const StepGrid& grid)
      : query_stride((layer.key_dim + 15) / 16 * 16) {
    const int element = static_cast<int>(size_bytes(layer.storage));
    key_stride = ((layer.key_dim + 3) / 4 * 4 * element + 127) / 128 * 128 + 32;
    value_stride = (4 * grid.units * element + 15) / 16 * 16;
    query_bytes = grid.part_heads * query_stride * 4;
    logit_bytes = grid.part_heads * kMostTile * 4;
    tile_bytes = grid.tile * (key_stride + value_stride);
    // The sums of the row subsets meet there at the end.
    if (tile_bytes < kThreads * 16) tile_bytes = kThreads * 16;
  }
  __host__ __device__ int bytes() const { return query_bytes + logit_bytes + tile_bytes; }
};

// Copies a row of first + second elements to two places, by `workers` threads. wide: in pieces of
// 16 bytes, of which a thread has several on their way before it stores the first; otherwise both
// parts are padded with zeros to multiples of 4.
template <class Element>
VERKV_DEVICE void copy_row(const Element* from, int first, int second, bool wide, Element* to_first,
                           Element* to_second, int worker, int workers) {
  if (wide) {
    constexpr int kAhead = 4;
    const uint4* source = reinterpret_cast<const uint4*>(from);
    const int split = first * static_cast<int>(sizeof(Element)) / 16;
    const int count = split + second * static_cast<int>(sizeof(Element)) / 16;
    for (int begin = worker; begin < count; begin += kAhead * workers) {
      uint4 piece[kAhead];
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        if (begin + u * workers < count) piece[u] = source[begin + u * workers];
      }
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const int i = begin + u * workers;
        if (i < split) {
          reinterpret_cast<uint4*>(to_first)[i] = piece[u];
        } else if (i < count) {
          reinterpret_cast<uint4*>(to_second)[i - split] = piece[u];
        }
      }
    }
    return;
  }
  for (int j = worker; j < (first + 3) / 4 * 4; j += workers)
    to_first[j] = j < first ? from[j] : Element{};
  for (int j = worker; j < (second + 3) / 4 * 4; j += workers)
    to_second[j] = j < second ? from[first + j] : Element{};
}

// Where the logarithm of a drawn token's summand is: logit + log(coefficient). beta, odds and
// sketched weights are in the plan's units, relative to `shift`.
VERKV_DEVICE float drawn_logit(float logit, float sketched, float rho, float beta, float shift,
                               float cap) {
  const float lambda = shrinkage_lambda(sketched, rho, beta);
  if (lambda == 0) return logit == logit ? minus_infinity() : logit;
  float x = logit + logf(lambda);
  if (cap < __int_as_float(0x7f800000)) {
    const float most = shift + logf(cap * beta * rho);
    if (x > most) x = most;
  }
  return x + logf((1.0f + rho) / rho);
}

VERKV_DEVICE bool in_mask(const std::uint32_t* mask, std::int64_t i) {
  return (mask[i / kBlockTokens * kLanes + i % kLanes] >> (i % kBlockTokens / kLanes) & 1u) != 0;
}

// Adds this step to the scores of the local window: squares of the probabilities under the plan's
// D.
VERKV_DEVICE void score_window(const StepArguments& arguments, const HeadView& view,
                               std::int64_t first_head) {
  const StepWorkspace& ws = arguments.workspace;
  const int group = arguments.view.layer.group;
  for (int h = 0; h < group; ++h) {
    if (ws.heads[first_head + h].usable == 0) return;
  }
  const std::int64_t window = view.tokens - view.compressed;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x; i < window;
       i += static_cast<std::int64_t>(gridDim.y) * kThreads) {
    float square = 0;
    for (int h = 0; h < group; ++h) {
      const HeadState& state = ws.heads[first_head + h];
      const float logit = ws.resident_logit[(first_head + h) * ws.resident_stride + view.drawn + i];
      const float p = weight_exp(logit - state.shift) * static_cast<float>(1 / state.denominator);
      square += p * p;
    }
    view.window_square[i] += square;
    ++view.window_steps[i];
  }
}

// A query that is not finite spoils its own head's answer; without this nobody would be told.
VERKV_DEVICE void check_queries(const StepView& step, std::int64_t row, std::int64_t first_head,
                                int heads) {
  const int key_dim = step.layer.key_dim;
  for (int i = threadIdx.x; i < heads * key_dim; i += kThreads) {
    const float x = query_number(step, row, first_head + i / key_dim, i % key_dim);
    if (fabsf(x) <= 3.402823466e+38f) continue;  // false for NaN
    if (atomicCAS(&step.bad->claimed, 0u, 1u) != 0u) continue;
    step.bad->source = NumberSource::queries;
    step.bad->layer = step.layer_index;
    step.bad->token = row;
    step.bad->head = first_head + i / key_dim;
    step.bad->coordinate = i % key_dim;
    step.bad->number = x;
  }
}

// Grid: (rows x KV heads, splits, parts of a group). A thread keeps kUnits times four coordinates.
template <class Element, int kUnits>
__global__ void __launch_bounds__(kThreads, kUnits > 1 ? 1 : 2)
    attend_kernel(const StepArguments arguments) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ float tops[kAttendHeads];
  __shared__ float sums[kAttendHeads];
  __shared__ float factors[kAttendHeads];
  __shared__ HeadState states[kAttendHeads];
  __shared__ bool is_last;
  const StepView& step = arguments.view;
  const LayerView& layer = step.layer;
  const StepWorkspace& ws = arguments.workspace;
  const StepGrid& grid = arguments.grid;
  const int tid = threadIdx.x;
  const int warp = tid / 32;
  const int lane = tid % 32;
  const std::int64_t pair = blockIdx.x;
  const int split = blockIdx.y;
  const std::int64_t row = pair / layer.kv_heads;
  const int first = blockIdx.z * grid.part_heads;
  const int heads = min(grid.part_heads, layer.group - first);
  const std::int64_t query_head = pair * layer.group + first;
  const int slot = step.slots[row];
  if (slot < 0) {
    if (split != 0) return;
    for (int i = tid; i < heads * layer.value_dim; i += kThreads)
      step.output[query_head * layer.value_dim + i] = 0;
    if (step.lse != nullptr && tid < heads) step.lse[query_head + tid] = minus_infinity();
    return;
  }
  const HeadView view =
      step.heads[static_cast<std::int64_t>(slot) * layer.kv_heads + pair % layer.kv_heads];
  const AttendShared shared(layer, grid);
  float* query = reinterpret_cast<float*>(memory);
  float* logit = reinterpret_cast<float*>(memory + shared.query_bytes);  // [head][kMostTile]
  unsigned char* tile = memory + shared.query_bytes + shared.logit_bytes;
  unsigned char* tile_values = tile + grid.tile * shared.key_stride;

  const int key_dim = layer.key_dim;
  const int value_dim = layer.value_dim;
  const std::int64_t residents = view.residents();
  const std::int64_t moved = ws.groups[pair].moved;
  const std::int64_t first_head = pair % layer.kv_heads * layer.group + first;
  if (step.bad != nullptr && split == 0) check_queries(step, row, first_head, heads);
  if (tid < heads) {
    tops[tid] = minus_infinity();
    sums[tid] = 0;
    states[tid] = ws.heads[query_head + tid];
  }
  if (moved > 0) {
    for (int i = tid; i < heads * shared.query_stride; i += kThreads) {
      const int j = i % shared.query_stride;
      const std::int64_t head = first_head + i / shared.query_stride;
      query[i] = j < key_dim ? layer.scale * query_number(step, row, head, j) : 0.0f;
    }
  }

  // The unit of this thread: four coordinates of a head. Where a part has fewer units than the
  // block has threads, several subsets of rows are summed side by side.
  const int units = heads * grid.units;
  const int subsets = kUnits == 1 ? max(1, kThreads / units) : 1;
  const int subset = kUnits == 1 ? tid / units : 0;
  float acc[kUnits][4];
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
#pragma unroll
    for (int d = 0; d < 4; ++d) acc[k][d] = 0;
  }

  const bool wide = key_dim * sizeof(Element) % 16 == 0 && value_dim * sizeof(Element) % 16 == 0;
  const std::int64_t resident_each = (residents + grid.attend_splits - 1) / grid.attend_splits;
  const std::int64_t resident_begin = min(residents, split * resident_each);
  const std::int64_t resident_end = min(residents, resident_begin + resident_each);
  const std::int64_t moved_each = (moved + grid.attend_splits - 1) / grid.attend_splits;
  const std::int64_t moved_begin = min(moved, split * moved_each);
  const std::int64_t moved_end = min(moved, moved_begin + moved_each);
  const std::int64_t resident_tiles = (resident_end - resident_begin + grid.tile - 1) / grid.tile;
  const std::int64_t moved_tiles = (moved_end - moved_begin + grid.tile - 1) / grid.tile;
  __syncthreads();

  for (std::int64_t t = 0; t < resident_tiles + moved_tiles; ++t) {
    const bool from_host = t >= resident_tiles;
    const std::int64_t begin =
        from_host ? moved_begin + (t - resident_tiles) * grid.tile : resident_begin + t * grid.tile;
    const int count = static_cast<int>(
        min(std::int64_t{grid.tile}, (from_host ? moved_end : resident_end) - begin));
    // Rows to shared memory: a quarter of a warp a row.
    for (int r = tid / 8; r < count; r += kThreads / 8) {
      Element* value = reinterpret_cast<Element*>(tile_values + r * shared.value_stride);
      if (from_host) {
        const std::int64_t position = ws.moved[pair * ws.token_stride + begin + r];
        const Element* source =
            reinterpret_cast<const Element*>(view.host_rows) + position * (key_dim + value_dim);
        copy_row(source, key_dim, value_dim, wide,
                 reinterpret_cast<Element*>(tile + r * shared.key_stride), value, tid % 8, 8);
      } else {
        copy_row(reinterpret_cast<const Element*>(view.resident_values) + (begin + r) * value_dim,
                 0, value_dim, wide, value, value, tid % 8, 8);
      }
    }
    if (!from_host) {
      for (int i = tid; i < heads * count; i += kThreads) {
        const int h = i / count;
        const std::int64_t r = begin + i % count;
        float x = ws.resident_logit[(query_head + h) * ws.resident_stride + r];
        if (r < view.drawn) {
          const std::int64_t position = view.resident_position[r];
          const Positive16 odds = view.odds[position];
          if (odds.bits < kPositive16Infinity.bits &&
              !in_mask(ws.fetched + pair * ws.mask_stride, position)) {
            const float sketched = ws.weight[(query_head + h) * ws.token_stride + position];
            if (sketched >= 0) {
              x = drawn_logit(x, sketched, to_float(odds), states[h].beta, states[h].shift,
                              layer.cap);
            }
          }
        }
        logit[h * kMostTile + i % count] = x;
      }
    }
    __syncthreads();
    if (from_host) {
      // Four threads a row, half of the warps take the even heads.
      const int r = warp % 4 * 8 + lane / 4;
      const Element* key =
          reinterpret_cast<const Element*>(tile + (r < count ? r : 0) * shared.key_stride);
      for (int h = warp / 4; h < heads; h += 2) {
        float4 sum = make_float4(0, 0, 0, 0);
        for (int j = 4 * (lane % 4); j < key_dim; j += 16) {
          sum =
              fma_four(load_four(key + j),
                       *reinterpret_cast<const float4*>(query + h * shared.query_stride + j), sum);
        }
        const float x = fold16(sum);
        if (r < count && lane % 4 == 0) logit[h * kMostTile + r] = soft_capped(x, layer.soft_cap);
      }
      __syncthreads();
    }
    // Weights of the tile under the largest logit so far. Where every logit is -infinity the plan's
    // shift stands in.
    for (int h = warp; h < heads; h += kWarps) {
      const float own = lane < count ? logit[h * kMostTile + lane] : minus_infinity();
      const float before = tops[h];
      const float sum = sums[h];
      const float top = warp_top(raise(before, own));
      const float shift = states[h].shift;
      const float from = before == minus_infinity() ? shift : before;
      const float to = top == minus_infinity() ? shift : top;
      const float factor = sum == 0 ? 0.0f : weight_exp(from - to);
      const float p = lane < count ? weight_exp(own - to) : 0.0f;
      float all = p;
#pragma unroll
      for (int half = 16; half > 0; half /= 2) all += __shfl_xor_sync(kWholeWarp, all, half);
      if (lane < count) logit[h * kMostTile + lane] = p;
      __syncwarp();
      if (lane == 0) {
        tops[h] = top;
        sums[h] = fmaf(sum, factor, all);
        factors[h] = factor;
      }
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      const int unit = kUnits == 1 ? tid % units : tid + k * kThreads;
      if (unit >= units || subset >= subsets) break;
      const int h = unit / grid.units;
      const float factor = factors[h];
      float4 sum = make_float4(acc[k][0] * factor, acc[k][1] * factor, acc[k][2] * factor,
                               acc[k][3] * factor);
      const unsigned char* at = tile_values + unit % grid.units * (4 * sizeof(Element));
      for (int r = subset; r < count; r += subsets) {
        const float p = logit[h * kMostTile + r];
        sum = fma_four(make_float4(p, p, p, p),
                       load_four(reinterpret_cast<const Element*>(at + r * shared.value_stride)),
                       sum);
      }
      acc[k][0] = sum.x;
      acc[k][1] = sum.y;
      acc[k][2] = sum.z;
      acc[k][3] = sum.w;
    }
    __syncthreads();
  }

  // The partial state of this split.
  const int padded = 4 * grid.units;
  if (kUnits == 1 && subsets > 1) {
    float4* part = reinterpret_cast<float4*>(tile);
    if (subset < subsets) part[tid] = make_float4(acc[0][0], acc[0][1], acc[0][2], acc[0][3]);
    __syncthreads();
    if (tid < units) {
      for (int s = 1; s < subsets; ++s) {
        const float4 x = part[s * units + tid];
        acc[0][0] += x.x;
        acc[0][1] += x.y;
        acc[0][2] += x.z;
        acc[0][3] += x.w;
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const int unit = tid + k * kThreads;
    if (unit >= units) break;
    float* out = ws.partial_output +
                 ((query_head + unit / grid.units) * grid.attend_splits + split) * padded +
                 unit % grid.units * 4;
    *reinterpret_cast<float4*>(out) = make_float4(acc[k][0], acc[k][1], acc[k][2], acc[k][3]);
  }
  if (tid < heads) {
    const std::int64_t at = (query_head + tid) * grid.attend_splits + split;
    ws.partial_top[at] = tops[tid] == minus_infinity() ? states[tid].shift : tops[tid];
    ws.partial_sum[at] = sums[tid];
  }
  if (step.score_window && blockIdx.z == 0) score_window(arguments, view, pair * layer.group);

  __syncthreads();
  if (tid == 0) {
    __threadfence();
    is_last = atomicAdd(&ws.attended[pair * grid.attend_parts + blockIdx.z], 1u) + 1 ==
              static_cast<unsigned>(grid.attend_splits);
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return;

  // The merge. One warp a head finds the common shift and the denominator.
  double* estimate = reinterpret_cast<double*>(tile);  // [head]
  for (int h = warp; h < heads; h += kWarps) {
    const std::int64_t at = (query_head + h) * grid.attend_splits;
    float top = minus_infinity();
    for (int s = lane; s < grid.attend_splits; s += 32) {
      if (ws.partial_sum[at + s] != 0) top = raise(top, ws.partial_top[at + s]);
    }
    top = warp_top(top);
    if (lane == 0) {
      double sum = 0;
      for (int s = 0; s < grid.attend_splits; ++s) {
        const float x = ws.partial_sum[at + s];
        if (x != 0)
          sum += static_cast<double>(x) *
                 static_cast<double>(weight_exp(ws.partial_top[at + s] - top));
      }
      tops[h] = top;
      estimate[h] = sum;
      if (step.lse != nullptr) {
        step.lse[query_head + h] =
            sum == 0 ? minus_infinity() : static_cast<float>(static_cast<double>(top) + log(sum));
      }
    }
  }
  __syncthreads();
  for (int i = tid; i < heads * value_dim; i += kThreads) {
    const int h = i / value_dim;
    const int d = i % value_dim;
    const std::int64_t at = (query_head + h) * grid.attend_splits;
    float sum = 0;
    for (int s = 0; s < grid.attend_splits; ++s) {
      if (ws.partial_sum[at + s] == 0) continue;
      sum = fmaf(ws.partial_output[(at + s) * padded + d],
                 weight_exp(ws.partial_top[at + s] - tops[h]), sum);
    }
    step.output[(query_head + h) * value_dim + d] =
        estimate[h] == 0 ? 0.0f : static_cast<float>(static_cast<double>(sum) / estimate[h]);
  }
}

template <class Element>
cudaError_t launch_for(const StepArguments& arguments, cudaStream_t stream) {
  const StepGrid& grid = arguments.grid;
  const dim3 blocks(static_cast<unsigned>(arguments.view.rows * arguments.view.layer.kv_heads),
                    static_cast<unsigned>(grid.attend_splits),
                    static_cast<unsigned>(grid.attend_parts));
  const int shared = AttendShared(arguments.view.layer, grid).bytes();
  const auto launch_one = [&](auto* kernel) {
    if (shared > (40 << 10)) {  // above what needs no permission, less the static part
      const cudaError_t error =
          cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
      if (error != cudaSuccess) return error;
    }
    return launch(kernel, blocks, kThreads, static_cast<std::size_t>(shared), stream, arguments);
  };
  const int units = grid.part_heads * grid.units;
  if (units <= kThreads) return launch_one(attend_kernel<Element, 1>);
  if (units <= 2 * kThreads) return launch_one(attend_kernel<Element, 2>);
  return launch_one(attend_kernel<Element, 8>);
}

}  // namespace

cudaError_t launch_attend(const StepArguments& arguments, cudaStream_t stream) {
  switch (arguments.view.layer.storage) {
    case DType::f32:
      return launch_for<float>(arguments, stream);
    case DType::f16:
      return launch_for<Half>(arguments, stream);
    default:
      return launch_for<BFloat16>(arguments, stream);
  }
}

}  // namespace verkv::cuda
