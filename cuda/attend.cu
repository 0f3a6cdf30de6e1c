// Last launch of a step: residents with their coefficients and the fetched rows, which are read
// from mapped host memory once, straight into shared memory, while the residents are added up.
// Splits leave partial states; the last one of a KV head merges them in order.
#include <cmath>

#include <verkv/attention.hpp>

#include "compress.hpp"
#include "device_math.cuh"
#include "launch.hpp"
#include "query.cuh"
#include "step_kernels.hpp"

namespace verkv::cuda {
namespace {

constexpr int kThreads = kAttendThreads;
constexpr int kWarps = kThreads / 32;
// Residents that are weighed at once, each by one thread.
constexpr int kChunk = kThreads;
// How far the largest weight of a head may be from e^0: float has room beyond that for the sums
// above and for small weights below.
constexpr float kMostAbove = 20;
constexpr float kMostBelow = 40;

// Numbers of the query heads that a thread takes at once.
template <int kHeads>
struct alignas(4 * kHeads) HeadTile {
  float head[kHeads];
};

// Dynamic shared memory of a block.
struct AttendShared {
  int query_stride;  // floats
  int value_offset;  // bytes, of the value in a fetched row
  int row_stride;    // bytes; rows start in different banks
  int query_bytes;
  int weight_bytes;
  int tile_bytes;

  __host__ __device__ AttendShared(const LayerView& layer, const StepGrid& grid, int tile_heads)
      : query_stride((layer.key_dim + 15) / 16 * 16) {
    const int element = static_cast<int>(size_bytes(layer.storage));
    value_offset = (layer.key_dim + 3) / 4 * 4 * element;
    row_stride = (value_offset + 4 * grid.units * element + 127) / 128 * 128 + 16 * element;
    query_bytes = grid.part_heads * query_stride * 4;
    weight_bytes = (grid.part_heads + tile_heads - 1) / tile_heads * tile_heads * kChunk * 4;
    tile_bytes = grid.tile * row_stride;
    // The sums of the row subsets meet there at the end.
    const int sum_bytes = kThreads * tile_heads * 16;
    if (tile_bytes < sum_bytes) tile_bytes = sum_bytes;
  }
  __host__ __device__ int bytes() const { return query_bytes + weight_bytes + tile_bytes; }
};

// What a block knows of its query heads.
struct HeadSums {
  alignas(16) float factor[kAttendHeads];  // of what was added up before the last chunk
  float shift[kAttendHeads];               // weights are relative to it
  float sum[kAttendHeads];                 // of weights
  float beta[kAttendHeads];
  float most[kAttendHeads];      // shift + log(cap * beta)
  double inverse[kAttendHeads];  // of the sum over all splits
  float top[kAttendHeads];       // what that is relative to

  VERKV_DEVICE void start(const HeadState& state, float cap, int h) {
    shift[h] = state.shift;
    sum[h] = 0;
    beta[h] = state.beta;
    // In double, where the product neither overflows nor vanishes.
    const double product = static_cast<double>(cap) * static_cast<double>(state.beta);
    most[h] = cap < __int_as_float(0x7f800000) ? state.shift + static_cast<float>(log(product))
                                               : __int_as_float(0x7f800000);
  }
};

// 16 bytes to shared memory without a register that waits for them.
VERKV_DEVICE void copy_async(unsigned char* to, const unsigned char* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(to))),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}
VERKV_DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// `dim` elements, padded with zeros to a multiple of 4, by a warp.
template <class Element>
VERKV_DEVICE void copy_padded(const Element* from, int dim, unsigned char* to) {
  for (int j = threadIdx.x % 32; j < (dim + 3) / 4 * 4; j += 32)
    reinterpret_cast<Element*>(to)[j] = j < dim ? from[j] : Element{};
}

// The logarithm of a drawn token's summand, min(lambda w, cap beta rho) (1 + rho) / rho: logit +
// log(coefficient), at most `most` + log(1 + rho). beta and sketched weights are in the plan's
// units, `most` is shift + log(cap * beta). Of a token in the plan lambda (1 + rho) / rho is 1 or
// more, or 0 where beta is.
VERKV_DEVICE float drawn_logit(float logit, float sketched, float rho, float beta, float most) {
  const bool whole = sketched <= beta * rho;  // lambda is 1
  const float coefficient = (whole ? 1.0f : beta) / (whole ? rho : sketched) * (1.0f + rho);
  if (coefficient == 0) return logit == logit ? minus_infinity() : logit;
  const float x = logit + logf(coefficient);
  if (!(x > most)) return x;
  const float limit = most + logf(1.0f + rho);
  return x > limit ? limit : x;
}

VERKV_DEVICE bool in_mask(const std::uint32_t* mask, std::uint32_t i) {
  return (mask[i / kBlockTokens * kLanes + i % kLanes] >> (i % kBlockTokens / kLanes) & 1u) != 0;
}

// Adds this step to the scores of the local window: squares of the probabilities under the plan's
// D.
VERKV_DEVICE void score_window(const StepArguments& arguments, const HeadView& view,
                               std::int64_t first_head) {
  const StepWorkspace& ws = arguments.workspace;
  const int group = arguments.view.layer.group;
  const std::int64_t window = view.tokens - view.compressed;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.y) * kThreads;
  if (begin >= window) return;
  for (int h = 0; h < group; ++h) {
    if (ws.heads[first_head + h].usable == 0) return;
  }
  for (std::int64_t i = begin + threadIdx.x; i < window;
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

// The rows of one split for the query heads of one part.
template <class Element, int kHeads>
class Split {
 public:
  VERKV_DEVICE Split(const StepArguments& arguments, const HeadView& view, int heads,
                     std::int64_t query_head, const std::uint32_t* fetched, unsigned char* memory,
                     HeadSums& sums)
      : layer_(arguments.view.layer),
        ws_(arguments.workspace),
        view_(view),
        shared_(layer_, arguments.grid, kHeads),
        sums_(sums),
        heads_(heads),
        tiles_((heads + kHeads - 1) / kHeads),
        units_(arguments.grid.units),
        query_head_(query_head),
        fetched_(fetched),
        query_(reinterpret_cast<float*>(memory)),
        weight_(reinterpret_cast<HeadTile<kHeads>*>(memory + shared_.query_bytes)),
        rows_(memory + shared_.query_bytes + shared_.weight_bytes) {
    // A thread's column is four coordinates of a tile of heads. Where there are fewer columns than
    // threads, several subsets of rows are added up side by side.
    columns_ = tiles_ * units_;
    subsets_ = kThreads / columns_;
    subset_ = static_cast<int>(threadIdx.x) / columns_;
    tile_ = static_cast<int>(threadIdx.x) % columns_ / units_;
    unit_ = static_cast<int>(threadIdx.x) % columns_ % units_;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) acc_[h] = make_float4(0, 0, 0, 0);
  }

  // Starts to copy fetched rows, a warp a row.
  VERKV_DEVICE void fetch(const std::uint32_t* positions, int count) {
    const int row_bytes = static_cast<int>(layer_.row_bytes());
    const bool wide = layer_.key_dim * sizeof(Element) % 16 == 0 && row_bytes % 16 == 0;
    for (int r = warp(); r < count; r += kWarps) {
      const auto* from = reinterpret_cast<const unsigned char*>(view_.host_rows) +
                         static_cast<std::int64_t>(positions[r]) * row_bytes;
      unsigned char* to = rows_ + r * shared_.row_stride;
      if (wide) {
        for (int i = 16 * lane(); i < row_bytes; i += 16 * 32) copy_async(to + i, from + i);
      } else {
        const Element* elements = reinterpret_cast<const Element*>(from);
        copy_padded(elements, layer_.key_dim, to);
        copy_padded(elements + layer_.key_dim, layer_.value_dim, to + shared_.value_offset);
      }
    }
  }

  // The queries times the attention scale, which only fetched rows need.
  VERKV_DEVICE void load_queries(const StepView& step, std::int64_t row, std::int64_t first_head) {
    for (int h = 0; h < heads_; ++h) {
      for (int j = threadIdx.x; j < shared_.query_stride; j += kThreads) {
        query_[h * shared_.query_stride + j] =
            j < layer_.key_dim ? layer_.scale * query_number(step, row, first_head + h, j) : 0.0f;
      }
    }
  }

  // Logits of residents begin .. begin + count - 1 and the logarithms of their coefficients.
  VERKV_DEVICE void resident_logits(std::int64_t begin, int count) {
    const int r = threadIdx.x;
    if (r >= count) return;
    const std::int64_t i = begin + r;
    std::uint32_t position = 0;
    float rho = 0;
    bool drawn = i < view_.drawn;
    if (drawn) {
      position = view_.resident_position[i];
      const Positive16 odds = view_.odds[position];
      drawn = odds.bits < kPositive16Infinity.bits && !in_mask(fetched_, position);
      rho = to_float(odds);
    }
    const float* logit = ws_.resident_logit + query_head_ * ws_.resident_stride + i;
    const float* sketched = ws_.weight + query_head_ * ws_.token_stride + position;
    for (int t = 0; t < tiles_; ++t) {
      HeadTile<kHeads> x;
#pragma unroll
      for (int k = 0; k < kHeads; ++k) {
        const int h = t * kHeads + k;
        x.head[k] = 0;  // the weight of a head that is not there
        if (h >= heads_) continue;
        x.head[k] = *logit;
        if (drawn && *sketched >= 0) {
          x.head[k] = drawn_logit(x.head[k], *sketched, rho, sums_.beta[h], sums_.most[h]);
        }
        logit += ws_.resident_stride;
        sketched += ws_.token_stride;
      }
      weight_[t * kChunk + r] = x;
    }
  }

  // Logits of the fetched rows in shared memory, in the order of sums of kernels.hpp: four threads
  // a row, half of the warps take every other tile of heads.
  VERKV_DEVICE void fetched_logits(int count) {
    const int r = warp() % 4 * 8 + lane() / 4;
    const Element* key =
        reinterpret_cast<const Element*>(rows_ + (r < count ? r : 0) * shared_.row_stride);
    for (int t = warp() / 4; t < tiles_; t += kWarps / 4) {
      const float* query = query_ + t * kHeads * shared_.query_stride;
      float4 sum[kHeads];
#pragma unroll
      for (int k = 0; k < kHeads; ++k) sum[k] = make_float4(0, 0, 0, 0);
      for (int j = 4 * (lane() % 4); j < layer_.key_dim; j += 16) {
        const float4 x = load_four(key + j);
#pragma unroll
        for (int k = 0; k < kHeads; ++k) {
          if (t * kHeads + k >= heads_) break;
          sum[k] = fma_four(
              x, *reinterpret_cast<const float4*>(query + k * shared_.query_stride + j), sum[k]);
        }
      }
      HeadTile<kHeads> x;
#pragma unroll
      for (int k = 0; k < kHeads; ++k) x.head[k] = soft_capped(fold16(sum[k]), layer_.soft_cap);
      if (r < count && lane() % 4 == 0) weight_[t * kChunk + r] = x;
    }
  }

  // Logits to weights, a warp a head. They stay relative to the plan's shift while the largest is
  // near it, so that sums seldom have to change.
  VERKV_DEVICE void weigh(int count) {
    for (int h = warp(); h < heads_; h += kWarps) {
      float* x = reinterpret_cast<float*>(weight_ + h / kHeads * kChunk) + h % kHeads;
      float top = minus_infinity();
      for (int r = lane(); r < count; r += 32) top = raise(top, x[r * kHeads]);
      top = warp_top(top);
      const float before = sums_.shift[h];
      const float sum = sums_.sum[h];
      const bool moves = !(top <= before + kMostAbove) ||
                         (sum == 0 && top < before - kMostBelow && top > minus_infinity());
      const float shift = moves ? top : before;
      float all = 0;
      for (int r = lane(); r < count; r += 32) {
        const float p = weight_exp(x[r * kHeads] - shift);
        x[r * kHeads] = p;
        all += p;
      }
#pragma unroll
      for (int half = 16; half > 0; half /= 2) all += __shfl_xor_sync(kWholeWarp, all, half);
      __syncwarp();  // all lanes have read what changes
      if (lane() == 0) {
        const float factor = !moves ? 1.0f : sum == 0 ? 0.0f : weight_exp(before - shift);
        sums_.factor[h] = factor;
        sums_.shift[h] = shift;
        sums_.sum[h] = fmaf(sum, factor, all);
      }
    }
  }

  VERKV_DEVICE void add_residents(std::int64_t begin, int count) {
    const int dim = layer_.value_dim;
    const Element* values = reinterpret_cast<const Element*>(view_.resident_values) + begin * dim;
    if (dim % 4 == 0) {
      add_rows<true>(values, dim, count);
    } else {
      add_rows<false>(values, dim, count);
    }
  }
  VERKV_DEVICE void add_fetched(int count) {
    add_rows<true>(reinterpret_cast<const Element*>(rows_ + shared_.value_offset),
                   shared_.row_stride / static_cast<int>(sizeof(Element)), count);
  }

  // Adds the subsets up and leaves the state of the split.
  VERKV_DEVICE void write_partial(int splits, int split) {
    float4* part = reinterpret_cast<float4*>(rows_);  // [head of a tile][subset][column]
    if (subset_ < subsets_) {
#pragma unroll
      for (int k = 0; k < kHeads; ++k) part[k * kThreads + threadIdx.x] = acc_[k];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < heads_ * units_; i += kThreads) {
      const int h = i / units_;
      const int unit = i % units_;
      const float4* from = part + h % kHeads * kThreads + h / kHeads * units_ + unit;
      float4 sum = from[0];
      for (int s = 1; s < subsets_; ++s) {
        const float4 x = from[s * columns_];
        sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
      }
      const std::int64_t at = (query_head_ + h) * splits + split;
      reinterpret_cast<float4*>(ws_.partial_output)[at * units_ + unit] = sum;
    }
    if (static_cast<int>(threadIdx.x) < heads_) {
      const std::int64_t at = (query_head_ + threadIdx.x) * splits + split;
      ws_.partial_top[at] = sums_.shift[threadIdx.x];
      ws_.partial_sum[at] = sums_.sum[threadIdx.x];
    }
  }

  // Outputs and LSE of all splits.
  VERKV_DEVICE void merge(const StepView& step, int splits) {
    for (int h = warp(); h < heads_; h += kWarps) merge_sums(step, splits, h);
    __syncthreads();
    for (int i = threadIdx.x; i < heads_ * units_; i += kThreads) {
      const int h = i / units_;
      const int unit = i % units_;
      const std::int64_t at = (query_head_ + h) * splits;
      const float4* from = reinterpret_cast<const float4*>(ws_.partial_output) + at * units_ + unit;
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
      for (int s = 0; s < splits; ++s) {
        const float factor = split_factor(at + s, sums_.top[h]);
        if (factor == 0) continue;
        sum = fma_four(make_float4(factor, factor, factor, factor),
                       from[static_cast<std::int64_t>(s) * units_], sum);
      }
      const float all[4] = {sum.x, sum.y, sum.z, sum.w};
      float* out = step.output + (query_head_ + h) * layer_.value_dim + 4 * unit;
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        if (4 * unit + d < layer_.value_dim)
          out[d] = static_cast<float>(static_cast<double>(all[d]) * sums_.inverse[h]);
      }
    }
  }

 private:
  VERKV_DEVICE static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  VERKV_DEVICE static int lane() { return static_cast<int>(threadIdx.x) % 32; }

  // Adds weighted rows to this thread's column.
  template <bool kAligned>
  VERKV_DEVICE void add_rows(const Element* values, int stride, int count) {
    if (subset_ >= subsets_) return;
    const HeadTile<kHeads> factor =
        *reinterpret_cast<const HeadTile<kHeads>*>(sums_.factor + tile_ * kHeads);
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
      if (factor.head[k] == 1) continue;
      acc_[k] = make_float4(acc_[k].x * factor.head[k], acc_[k].y * factor.head[k],
                            acc_[k].z * factor.head[k], acc_[k].w * factor.head[k]);
    }
    const HeadTile<kHeads>* weight = weight_ + tile_ * kChunk;
    const Element* at = values + static_cast<std::int64_t>(subset_) * stride + 4 * unit_;
    const std::int64_t next = static_cast<std::int64_t>(subsets_) * stride;
#pragma unroll 4
    for (int r = subset_; r < count; r += subsets_) {
      const HeadTile<kHeads> p = weight[r];
      const float4 x =
          kAligned ? load_four(at) : load_four(at, 0, layer_.value_dim - 4 * unit_, false);
#pragma unroll
      for (int k = 0; k < kHeads; ++k)
        acc_[k] = fma_four(make_float4(p.head[k], p.head[k], p.head[k], p.head[k]), x, acc_[k]);
      at += next;
    }
  }

  // What a split's sums count relative to `top`; 0 where it has none.
  VERKV_DEVICE float split_factor(std::int64_t at, float top) const {
    if (ws_.partial_sum[at] == 0) return 0;
    const float own = ws_.partial_top[at];
    return own == top ? 1.0f : weight_exp(own - top);
  }

  // The common shift and the denominator of a head, by a warp.
  VERKV_DEVICE void merge_sums(const StepView& step, int splits, int h) {
    const std::int64_t at = (query_head_ + h) * splits;
    float top = minus_infinity();
    for (int s = lane(); s < splits; s += 32) {
      if (ws_.partial_sum[at + s] != 0) top = raise(top, ws_.partial_top[at + s]);
    }
    top = warp_top(top);
    double sum = 0;
    for (int s = lane(); s < splits; s += 32) {
      const float factor = split_factor(at + s, top);
      if (factor != 0)
        sum += static_cast<double>(ws_.partial_sum[at + s]) * static_cast<double>(factor);
    }
#pragma unroll
    for (int half = 16; half > 0; half /= 2) sum += __shfl_xor_sync(kWholeWarp, sum, half);
    if (lane() != 0) return;
    sums_.top[h] = top;
    sums_.inverse[h] = sum == 0 ? 0 : 1 / sum;
    if (step.lse != nullptr) {
      step.lse[query_head_ + h] =
          sum == 0 ? minus_infinity() : static_cast<float>(static_cast<double>(top) + log(sum));
    }
  }

  const LayerView& layer_;
  const StepWorkspace& ws_;
  const HeadView& view_;
  AttendShared shared_;
  HeadSums& sums_;
  int heads_;
  int tiles_;
  int units_;
  std::int64_t query_head_;
  const std::uint32_t* fetched_;
  float* query_;              // [head][query_stride]
  HeadTile<kHeads>* weight_;  // [tile][kChunk]: logits, then weights
  unsigned char* rows_;       // [row][row_stride]
  int columns_;
  int subsets_;
  int subset_;
  int tile_;
  int unit_;
  float4 acc_[kHeads];
};

VERKV_DEVICE std::int64_t part_begin(std::int64_t all, int splits, int split) {
  return min(all, split * ((all + splits - 1) / splits));
}

// Grid: (rows x KV heads, splits, parts of a group). A thread takes kHeads query heads at once.
template <class Element, int kHeads>
__global__ void __launch_bounds__(kThreads, 2) attend_kernel(const StepArguments arguments) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ HeadSums sums;
  __shared__ bool is_last;
  const StepView& step = arguments.view;
  const LayerView& layer = step.layer;
  const StepWorkspace& ws = arguments.workspace;
  const StepGrid& grid = arguments.grid;
  const int tid = threadIdx.x;
  const int pair = blockIdx.x;
  const int split = blockIdx.y;
  const int splits = grid.attend_splits;
  const int row = pair / layer.kv_heads;
  const int kv_head = pair % layer.kv_heads;
  const int first = blockIdx.z * grid.part_heads;
  const int heads = min(grid.part_heads, layer.group - first);
  const std::int64_t query_head = static_cast<std::int64_t>(pair) * layer.group + first;
  const int slot = step.slots[row];
  if (slot < 0) {
    if (split != 0) return;
    for (int i = tid; i < heads * layer.value_dim; i += kThreads)
      step.output[query_head * layer.value_dim + i] = 0;
    if (step.lse != nullptr && tid < heads) step.lse[query_head + tid] = minus_infinity();
    return;
  }
  const HeadView view = step.heads[static_cast<std::int64_t>(slot) * layer.kv_heads + kv_head];
  Split<Element, kHeads> part(arguments, view, heads, query_head,
                              ws.fetched + pair * ws.mask_stride, memory, sums);

  // The first fetched rows are on their way while the residents are added up.
  const std::int64_t moved = ws.groups[pair].moved;
  const std::int64_t moved_begin = part_begin(moved, splits, split);
  const int moved_count = static_cast<int>(part_begin(moved, splits, split + 1) - moved_begin);
  const std::uint32_t* positions = ws.moved + pair * ws.token_stride + moved_begin;
  part.fetch(positions, min(grid.tile, moved_count));

  const std::int64_t first_head = static_cast<std::int64_t>(kv_head) * layer.group + first;
  if (step.bad != nullptr && split == 0) check_queries(step, row, first_head, heads);
  if (moved_count > 0) part.load_queries(step, row, first_head);
  if (tid < kAttendHeads) sums.factor[tid] = 1;
  if (tid < heads) sums.start(ws.heads[query_head + tid], layer.cap, tid);
  __syncthreads();

  const std::int64_t residents = view.residents();
  const std::int64_t resident_begin = part_begin(residents, splits, split);
  const std::int64_t resident_count = part_begin(residents, splits, split + 1) - resident_begin;
  for (std::int64_t done = 0; done < resident_count + moved_count;) {
    const bool fetched = done >= resident_count;
    int count;
    if (fetched) {
      const int from = static_cast<int>(done - resident_count);
      count = min(grid.tile, moved_count - from);
      if (from > 0) part.fetch(positions + from, count);
      wait_for_copies();
      __syncthreads();
      part.fetched_logits(count);
    } else {
      count = static_cast<int>(min(std::int64_t{kChunk}, resident_count - done));
      part.resident_logits(resident_begin + done, count);
    }
    __syncthreads();
    part.weigh(count);
    __syncthreads();
    if (fetched) {
      part.add_fetched(count);
    } else {
      part.add_residents(resident_begin + done, count);
    }
    __syncthreads();
    done += count;
  }
  part.write_partial(splits, split);
  if (step.score_window && blockIdx.z == 0)
    score_window(arguments, view, static_cast<std::int64_t>(pair) * layer.group);

  __syncthreads();
  if (tid == 0) {
    __threadfence();
    is_last =
        atomicAdd(&ws.attended[static_cast<std::int64_t>(pair) * grid.attend_parts + blockIdx.z],
                  1u) +
            1 ==
        static_cast<unsigned>(splits);
    __threadfence();
  }
  __syncthreads();
  if (is_last) part.merge(step, splits);
}

template <class Element>
cudaError_t launch_for(const StepArguments& arguments, cudaStream_t stream) {
  const StepGrid& grid = arguments.grid;
  const dim3 blocks(static_cast<unsigned>(arguments.view.rows * arguments.view.layer.kv_heads),
                    static_cast<unsigned>(grid.attend_splits),
                    static_cast<unsigned>(grid.attend_parts));
  const auto launch_one = [&](auto* kernel, int tile_heads) {
    const int shared = AttendShared(arguments.view.layer, grid, tile_heads).bytes();
    if (shared > (40 << 10)) {  // above what needs no permission, less the static part
      const cudaError_t error =
          cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
      if (error != cudaSuccess) return error;
    }
    return launch(kernel, blocks, kThreads, static_cast<std::size_t>(shared), stream, arguments);
  };
  if (grid.part_heads == 1) return launch_one(attend_kernel<Element, 1>, 1);
  if (grid.part_heads == 2) return launch_one(attend_kernel<Element, 2>, 2);
  static_assert(kTileHeads == 4);
  return launch_one(attend_kernel<Element, kTileHeads>, kTileHeads);
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
