// Last launch of a step: residents with their coefficients and the fetched rows, which are read
// from mapped host memory once, straight into shared memory, while the residents are added up.
// Splits leave partial states; the last one of a KV head merges them in order.
#include <cmath>

#include <verkv/attention.hpp>

#include "attend_sums.cuh"
#include "compress.hpp"
#include "device_math.cuh"
#include "launch.hpp"
#include "query.cuh"
#include "step_kernels.hpp"

namespace verkv::cuda {
namespace {

constexpr int kThreads = kAttendThreads;
constexpr int kWarps = kAttendWarps;
// How far the largest weight of a head may be from e^0: the sums have room beyond that, also those
// of 16 bits.
constexpr float kMostAbove = 10;
constexpr float kMostBelow = 12;

__host__ __device__ constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }

// Dynamic shared memory of a block.
struct AttendShared {
  int query_stride;  // floats
  int value_offset;  // bytes, of the value in a fetched row
  int row_stride;    // bytes; rows start in different banks
  int query_bytes;
  int number_bytes;
  int limb_bytes;
  int row_bytes;

  __host__ __device__ AttendShared(const LayerView& layer, const StepGrid& grid)
      : query_stride(round_up(layer.key_dim, 16)) {
    const int element = static_cast<int>(size_bytes(layer.storage));
    const int tiles = round_up(grid.part_heads, kTileHeads) / kTileHeads;
    value_offset = round_up(layer.key_dim * element, 16);
    row_stride = round_up(value_offset + layer.value_dim * element, 128) + 16 * element;
    query_bytes = tiles * kTileHeads * query_stride * 4;
    number_bytes = tiles * kChunk * static_cast<int>(sizeof(float4));
    limb_bytes = element == 4 ? 0 : tiles * kChunkProducts * static_cast<int>(sizeof(WeightLimbs));
    // The sums of the row subsets meet there at the end.
    const int sum_bytes = kThreads * kTileHeads * static_cast<int>(sizeof(float4));
    row_bytes = grid.tile * row_stride < sum_bytes ? sum_bytes : grid.tile * row_stride;
  }
  __host__ __device__ int bytes() const {
    return query_bytes + number_bytes + limb_bytes + row_bytes;
  }
};

// What a block knows of its query heads.
struct HeadSums {
  float factor[kAttendHeads];  // of what was added up before the last chunk
  // Of the plan where it is a number: logits are relative to it, or a logit of some thousands would
  // swallow the logarithm of a coefficient.
  float base[kAttendHeads];
  float shift[kAttendHeads];  // weights are relative to it; relative to base itself
  float sum[kAttendHeads];    // of weights
  float beta[kAttendHeads];
  float most[kAttendHeads];      // first shift + log(cap * beta)
  double inverse[kAttendHeads];  // of the sum over all splits

  VERKV_DEVICE void start(const HeadState& state, float cap, int h) {
    base[h] = fabsf(state.shift) <= 3.402823466e+38f ? state.shift : 0.0f;
    shift[h] = state.shift - base[h];
    sum[h] = 0;
    beta[h] = state.beta;
    // In double, where the product neither overflows nor vanishes.
    const double product = static_cast<double>(cap) * static_cast<double>(state.beta);
    most[h] = cap < __int_as_float(0x7f800000) ? shift[h] + static_cast<float>(log(product))
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

// Asks for `bytes` bytes that another thread will want soon.
VERKV_DEVICE void prefetch(const void* from, int bytes) {
  const auto* at = static_cast<const unsigned char*>(from);
#pragma unroll 1
  for (int i = 0; i < bytes; i += 128)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(at + i)));
}

// `dim` elements, padded with zeros to a multiple of 16 bytes, by a warp.
template <class Element>
VERKV_DEVICE void copy_padded(const Element* from, int dim, unsigned char* to) {
  constexpr int kPiece = 16 / static_cast<int>(sizeof(Element));
#pragma unroll 1
  for (int j = lane_index(); j < round_up(dim, kPiece); j += 32)
    reinterpret_cast<Element*>(to)[j] = j < dim ? from[j] : Element{};
}

// Exponentials and logarithms to a few units in the last place, in one instruction each: outputs
// hang on them, decisions do not.
VERKV_DEVICE float approximate_exp(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
  return y;
}
VERKV_DEVICE float approximate_log(float x) { return __log2f(x) * 0.693147181f; }

// The logarithm of a drawn token's summand, min(lambda w, cap beta rho) (1 + rho) / rho: logit +
// log(coefficient), at most `most` + log(1 + rho). beta and sketched weights are in the plan's
// units, `most` is shift + log(cap * beta). Of a token in the plan lambda (1 + rho) / rho is 1 or
// more, or 0 where beta is.
VERKV_DEVICE float drawn_logit(float logit, float sketched, float rho, float beta, float most) {
  const bool whole = sketched <= beta * rho;  // lambda is 1
  const float coefficient = (whole ? 1.0f : beta) / (whole ? rho : sketched) * (1.0f + rho);
  if (coefficient == 0) return logit == logit ? minus_infinity() : logit;
  const float x = logit + approximate_log(coefficient);
  if (!(x > most)) return x;
  const float limit = most + approximate_log(1.0f + rho);
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
#pragma unroll 1
  for (std::int64_t i = begin + threadIdx.x; i < window;
       i += static_cast<std::int64_t>(gridDim.y) * kThreads) {
    float square = 0;
#pragma unroll 1
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
#pragma unroll 1
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
template <class Element, int kColumns>
class Split {
 public:
  VERKV_DEVICE Split(const StepArguments& arguments, const HeadView& view, int heads,
                     std::int64_t query_head, const std::uint32_t* fetched, unsigned char* memory,
                     HeadSums& sums)
      : layer_(arguments.view.layer),
        ws_(arguments.workspace),
        view_(view),
        shared_(layer_, arguments.grid),
        sums_(sums),
        heads_(heads),
        tiles_((heads + kTileHeads - 1) / kTileHeads),
        units_(arguments.grid.units),
        query_head_(query_head),
        fetched_(fetched),
        query_(reinterpret_cast<float*>(memory)),
        rows_(memory + shared_.query_bytes + shared_.number_bytes + shared_.limb_bytes),
        row_sums_(tiles_, layer_.value_dim) {
    memory += shared_.query_bytes;
    weights_.number = reinterpret_cast<float4*>(memory);
    weights_.limb = reinterpret_cast<WeightLimbs*>(memory + shared_.number_bytes);
  }

  // Starts to copy fetched rows, a warp a row.
  VERKV_DEVICE void fetch(const std::uint32_t* positions, int count) {
    const int row_bytes = (layer_.key_dim + layer_.value_dim) * static_cast<int>(sizeof(Element));
    const bool wide = (layer_.key_dim * sizeof(Element) | row_bytes) % 16 == 0;
#pragma unroll 1
    for (int r = warp_index(); r < count; r += kWarps) {
      const auto* from = reinterpret_cast<const unsigned char*>(view_.host_rows) +
                         static_cast<std::int64_t>(positions[r]) * row_bytes;
      unsigned char* to = rows_ + r * shared_.row_stride;
      if (wide) {
#pragma unroll 1
        for (int i = 16 * lane_index(); i < row_bytes; i += 16 * 32) copy_async(to + i, from + i);
      } else {
        const Element* elements = reinterpret_cast<const Element*>(from);
        copy_padded(elements, layer_.key_dim, to);
        copy_padded(elements + layer_.key_dim, layer_.value_dim, to + shared_.value_offset);
      }
    }
  }

  // The queries times the attention scale, which only fetched rows need.
  VERKV_DEVICE void load_queries(const StepView& step, std::int64_t row, std::int64_t first_head) {
    const std::int64_t at = row * step.query_row_stride + first_head * step.query_head_stride;
    switch (step.query_type) {
      case DType::f32:
        return load_queries(static_cast<const float*>(step.queries) + at, step.query_head_stride);
      case DType::f16:
        return load_queries(static_cast<const Half*>(step.queries) + at, step.query_head_stride);
      default:
        return load_queries(static_cast<const BFloat16*>(step.queries) + at,
                            step.query_head_stride);
    }
  }

  // Logits of residents begin .. begin + count - 1 and the logarithms of their coefficients. Their
  // values are on the way meanwhile.
  VERKV_DEVICE void resident_logits(std::int64_t begin, int count) {
    const int r = threadIdx.x;
    if (r >= count) return;
    const std::int64_t i = begin + r;
    const int value_bytes = layer_.value_dim * static_cast<int>(sizeof(Element));
    prefetch(view_.resident_values + i * value_bytes, value_bytes);
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
    float* out = reinterpret_cast<float*>(weights_.number + r);
    for (int t = 0; t < tiles_; ++t) {
#pragma unroll
      for (int k = 0; k < kTileHeads; ++k) {
        const int h = t * kTileHeads + k;
        if (h >= heads_) break;
        float x = *logit - sums_.base[h];
        if (drawn && *sketched >= 0)
          x = drawn_logit(x, *sketched, rho, sums_.beta[h], sums_.most[h]);
        out[k] = x;
        logit += ws_.resident_stride;
        sketched += ws_.token_stride;
      }
      out += kTileHeads * kChunk;
    }
  }

  // Logits of the fetched rows in shared memory, in the order of sums of kernels.hpp: four threads
  // a row, half of the warps take every other pair of heads.
  VERKV_DEVICE void fetched_logits(int count) {
    if (warp_index() % 4 * 8 >= count) return;
    const int r = warp_index() % 4 * 8 + lane_index() / 4;
    const Element* key =
        reinterpret_cast<const Element*>(rows_ + (r < count ? r : 0) * shared_.row_stride);
    for (int h = warp_index() / 4 * 2; h < heads_; h += 4) {
      const float* query = query_ + h * shared_.query_stride;
      float4 sum[2] = {make_float4(0, 0, 0, 0), make_float4(0, 0, 0, 0)};
#pragma unroll 4
      for (int j = 4 * (lane_index() % 4); j < layer_.key_dim; j += 16) {
        const float4 x = load_four(key + j);
        sum[0] = fma_four(x, *reinterpret_cast<const float4*>(query + j), sum[0]);
        sum[1] =
            fma_four(x, *reinterpret_cast<const float4*>(query + shared_.query_stride + j), sum[1]);
      }
      const float2 x =
          make_float2(soft_capped(fold16(sum[0]), layer_.soft_cap) - sums_.base[h],
                      soft_capped(fold16(sum[1]), layer_.soft_cap) - sums_.base[h + 1]);
      float4* out = weights_.number + h / kTileHeads * kChunk + r;
      if (r < count && lane_index() % 4 == 0)
        reinterpret_cast<float2*>(out)[h % kTileHeads / 2] = x;
    }
  }

  // Logits to weights, a warp a head. They stay relative to the plan's shift while the largest is
  // near it, so that sums seldom have to change.
  VERKV_DEVICE void weigh(int count) {
    const int rows = round_up(count, Sums::kRowStep);
    for (int h = warp_index(); h < tiles_ * kTileHeads; h += kWarps) {
      if (h >= heads_) {
        for (int r = lane_index(); r < rows; r += 32) Sums::put(Sums::place(weights_, h, r), 0);
        continue;
      }
      const float* logit =
          reinterpret_cast<const float*>(weights_.number + h / kTileHeads * kChunk) +
          h % kTileHeads;
      float top = minus_infinity();
      for (int r = lane_index(); r < count; r += 32) top = raise(top, logit[r * kTileHeads]);
      top = warp_top(top);
      const float before = sums_.shift[h];
      const float sum = sums_.sum[h];
      const bool moves = !(top <= before + kMostAbove) ||
                         (sum == 0 && top < before - kMostBelow && top > minus_infinity());
      const float shift = moves ? top : before;
      float all = 0;
      typename Sums::Place place = Sums::place(weights_, h, lane_index());
      for (int r = lane_index(); r < rows; r += 32) {
        const float p = r < count ? approximate_exp(logit[r * kTileHeads] - shift) : 0.0f;
        Sums::put(place, p);
        place += Sums::kPlaces;
        all += p;
      }
#pragma unroll
      for (int half = 16; half > 0; half /= 2) all += __shfl_xor_sync(kWholeWarp, all, half);
      __syncwarp();  // all lanes have read what changes
      if (lane_index() == 0) {
        const float factor = !moves ? 1.0f : sum == 0 ? 0.0f : weight_exp(before - shift);
        sums_.factor[h] = factor;
        sums_.shift[h] = shift;
        sums_.sum[h] = fmaf(sum, factor, all);
      }
    }
  }

  // Whether values of residents can be added where they lie; otherwise they come to shared memory
  // too.
  VERKV_DEVICE bool aligned() const { return layer_.value_dim * sizeof(Element) % 16 == 0; }
  VERKV_DEVICE void copy_residents(std::int64_t begin, int count) {
    const int dim = layer_.value_dim;
    for (int r = warp_index(); r < count; r += kWarps) {
      copy_padded(reinterpret_cast<const Element*>(view_.resident_values) + (begin + r) * dim, dim,
                  rows_ + r * shared_.row_stride + shared_.value_offset);
    }
  }

  // Adds the residents from `begin` on, or the rows in shared memory.
  VERKV_DEVICE void add(bool in_shared, std::int64_t begin, int count) {
    const Element* values = reinterpret_cast<const Element*>(rows_ + shared_.value_offset);
    int stride = shared_.row_stride / static_cast<int>(sizeof(Element));
    if (!in_shared) {
      stride = layer_.value_dim;
      values = reinterpret_cast<const Element*>(view_.resident_values) + begin * stride;
    }
    row_sums_.scale(sums_.factor);
    row_sums_.add(values, stride, count, weights_);
  }

  // Adds the subsets up and leaves the state of the split.
  VERKV_DEVICE void write_partial(int splits, int split) {
    float4* part = reinterpret_cast<float4*>(rows_);
    row_sums_.write(part);
    __syncthreads();
    for (int i = threadIdx.x; i < heads_ * units_; i += kThreads) {
      float4 sum = part[i];
      for (int s = 1; s < row_sums_.subsets(); ++s) {
        const float4 x = part[s * tiles_ * kTileHeads * units_ + i];
        sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
      }
      const std::int64_t at = (query_head_ + i / units_) * splits + split;
      reinterpret_cast<float4*>(ws_.partial_output)[at * units_ + i % units_] = sum;
    }
    if (static_cast<int>(threadIdx.x) < heads_) {
      const std::int64_t at = (query_head_ + threadIdx.x) * splits + split;
      ws_.partial_top[at] = sums_.shift[threadIdx.x];
      ws_.partial_sum[at] = sums_.sum[threadIdx.x];
    }
  }

  // Outputs and LSE of all splits.
  VERKV_DEVICE void merge(const StepView& step, int splits) {
    for (int h = warp_index(); h < heads_; h += kWarps) merge_sums(step, splits, h);
    __syncthreads();
    for (int i = threadIdx.x; i < heads_ * units_; i += kThreads) {
      const int h = i / units_;
      const int unit = i % units_;
      const float* factor = split_factors(splits, h);
      const float4* from = reinterpret_cast<const float4*>(ws_.partial_output) +
                           (query_head_ + h) * splits * units_ + unit;
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
      for (int s = 0; s < splits; ++s) {
        const float x = factor[s];
        sum = fma_four(make_float4(x, x, x, x), from[s * units_], sum);
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
  using Sums = RowSums<Element, kColumns>;

  // A warp a head.
  template <class Number>
  VERKV_DEVICE void load_queries(const Number* from, std::int64_t head_stride) {
#pragma unroll 1
    for (int h = warp_index(); h < tiles_ * kTileHeads; h += kWarps) {
#pragma unroll 4
      for (int j = lane_index(); j < shared_.query_stride; j += 32) {
        const bool there = h < heads_ && j < layer_.key_dim;
        query_[h * shared_.query_stride + j] =
            there ? layer_.scale * as_float(from[h * head_stride + j]) : 0.0f;
      }
    }
  }

  // What the sums of each split count in the end; where the weights were.
  VERKV_DEVICE float* split_factors(int splits, int h) const {
    static_assert(kMostAttendSplits <= kChunk);
    return reinterpret_cast<float*>(weights_.number) + h * splits;
  }

  // The common shift, the factors and the denominator of a head, by a warp.
  VERKV_DEVICE void merge_sums(const StepView& step, int splits, int h) {
    const std::int64_t at = (query_head_ + h) * splits;
    float* factor = split_factors(splits, h);
    float top = minus_infinity();
    for (int s = lane_index(); s < splits; s += 32) {
      if (ws_.partial_sum[at + s] != 0) top = raise(top, ws_.partial_top[at + s]);
    }
    top = warp_top(top);
    double sum = 0;
    for (int s = lane_index(); s < splits; s += 32) {
      const float own = ws_.partial_sum[at + s];
      factor[s] = own == 0 ? 0.0f : weight_exp(ws_.partial_top[at + s] - top);
      sum += static_cast<double>(own) * static_cast<double>(factor[s]);
    }
#pragma unroll
    for (int half = 16; half > 0; half /= 2) sum += __shfl_xor_sync(kWholeWarp, sum, half);
    if (lane_index() != 0) return;
    sums_.inverse[h] = sum == 0 ? 0 : 1 / sum;
    if (step.lse != nullptr) {
      step.lse[query_head_ + h] = sum == 0
                                      ? minus_infinity()
                                      : static_cast<float>(static_cast<double>(sums_.base[h]) +
                                                           static_cast<double>(top) + log(sum));
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
  float* query_;         // [head, padded to tiles][query_stride]
  unsigned char* rows_;  // [row][row_stride]
  WeightArrays weights_;
  Sums row_sums_;
};

VERKV_DEVICE std::int64_t part_begin(std::int64_t all, int splits, int split) {
  return min(all, split * ((all + splits - 1) / splits));
}

// Grid: (rows x KV heads, splits, parts of a group).
template <class Element, int kColumns>
__global__ void __launch_bounds__(kThreads, kColumns > 1 ? 1 : 2)
    attend_kernel(const StepArguments arguments) {
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
  const HeadView& view = step.heads[static_cast<std::int64_t>(slot) * layer.kv_heads + kv_head];
  Split<Element, kColumns> part(arguments, view, heads, query_head,
                                ws.fetched + pair * ws.mask_stride, memory, sums);

  // The first fetched rows are on their way while the residents are added up.
  const bool aligned = part.aligned();
  const std::int64_t moved = ws.groups[pair].moved;
  const std::int64_t moved_begin = part_begin(moved, splits, split);
  const int moved_count = static_cast<int>(part_begin(moved, splits, split + 1) - moved_begin);
  const std::uint32_t* positions = ws.moved + pair * ws.token_stride + moved_begin;
  if (aligned) part.fetch(positions, min(grid.tile, moved_count));

  const std::int64_t first_head = static_cast<std::int64_t>(kv_head) * layer.group + first;
  if (step.bad != nullptr && split == 0) check_queries(step, row, first_head, heads);
  if (moved_count > 0) part.load_queries(step, row, first_head);
  if (tid < kAttendHeads) {
    sums.factor[tid] = 1;
    sums.base[tid] = 0;
  }
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
      if (from > 0 || !aligned) part.fetch(positions + from, count);
      wait_for_copies();
      __syncthreads();
      part.fetched_logits(count);
    } else {
      const int most = aligned ? kChunk : grid.tile;
      count = static_cast<int>(min(std::int64_t{most}, resident_count - done));
      if (!aligned) part.copy_residents(resident_begin + done, count);
      part.resident_logits(resident_begin + done, count);
    }
    __syncthreads();
    part.weigh(count);
    __syncthreads();
    part.add(fetched || !aligned, resident_begin + done, count);
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
  if constexpr (!std::is_same_v<Element, float>) {
    if (grid.warp_columns > 1) return launch_one(attend_kernel<Element, 2>);
  }
  return launch_one(attend_kernel<Element, 1>);
}

}  // namespace

int attend_shared_bytes(const LayerView& layer, const StepGrid& grid) {
  return AttendShared(layer, grid).bytes() + static_cast<int>(sizeof(HeadSums) + sizeof(bool));
}

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
