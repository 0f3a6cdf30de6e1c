// First launch of a step: the query goes to the sketch's basis and is rounded to bytes, the sketch
// is streamed once, and every token gets a logit for every query head of its group; so do the
// residents, exactly. The maxima that the plan's shift is made of come by slice.
#include <cmath>

#include <verkv/attention.hpp>

#include "device_math.cuh"
#include "exact_products.cuh"
#include "launch.hpp"
#include "query.cuh"
#include "sketch_products.cuh"
#include "step_kernels.hpp"
#include "tuning.hpp"

namespace verkv::cuda {
namespace {

constexpr int kWarps = kScoreThreads / 32;
// Tokens that a warp takes at a time: four groups of the sketch.
constexpr int kUnitTokens = 64;
constexpr int kUnitGroups = kUnitTokens / static_cast<int>(kSketchGroup);

// Values that one block makes and others of its threads read.
struct Constants {
  std::uint32_t residents;  // that the row sees; there is no register for it
  float shift[kScoreHeads];
  float factor[kScoreHeads];
};

// Dynamic shared memory of a block: floats of queries, in their place later their bytes in the
// sketch's basis by column, and floats of queries in the basis.
template <int kHeads>
struct ScoreShared {
  int query_stride;   // floats
  int column_stride;  // pairs of words, one for each quad of coordinates; an odd multiple of four,
                      // so that a warp's loads meet no bank twice

  __host__ __device__ explicit ScoreShared(const LayerView& layer)
      : query_stride((layer.key_dim + kLanes - 1) & ~(kLanes - 1)),
        column_stride((((layer.sketch.dim + 15) >> 4) | 1) * 4) {}
  __host__ __device__ int query_bytes() const { return kHeads * query_stride * 4; }
  __host__ __device__ int basis_offset() const {
    const int columns = sets_of(kHeads) * 8 * column_stride * 8;
    return columns > query_bytes() ? columns : query_bytes();
  }
  __host__ __device__ int bytes() const { return basis_offset() + query_bytes(); }
};

// Pieces of `unit` elements that a split takes. Places have 32 bits, so their numbers fit.
struct Part {
  int begin;
  int end;
};
VERKV_DEVICE Part part_of(std::int64_t count, unsigned unit, const StepGrid& grid) {
  const auto pieces = static_cast<unsigned>((static_cast<std::uint64_t>(count) + unit - 1) / unit);
  const auto splits = static_cast<unsigned>(grid.score_splits);
  const unsigned each = (pieces + splits - 1) / splits;
  const unsigned begin = min(pieces, blockIdx.y * each);
  return {static_cast<int>(begin), static_cast<int>(min(pieces, begin + each))};
}

// The scaled queries of `heads` heads from `first` on, zero up to the stride and for heads that are
// not there.
template <int kHeads>
VERKV_DEVICE void load_queries(const StepView& step, std::int64_t row, std::int64_t first,
                               int heads, float* query, int stride) {
  constexpr int kPart = kScoreThreads / kHeads;
  const int h = threadIdx.x / kPart;
  for (int j = threadIdx.x % kPart; j < stride; j += kPart) {
    const bool there = h < heads && j < step.layer.key_dim;
    query[h * stride + j] = there ? step.layer.scale * query_number(step, row, first + h, j) : 0.0F;
  }
}

// ---- The kernel ---------------------------------------------------------------------------------

// What a block works on.
struct Work {
  const StepArguments& arguments;
  const HeadView& head;
  Part units;               // of compressed tokens
  std::int64_t query_head;  // the first, counted over rows
  int heads;
  float* query;
  int query_stride;
  float* in_basis;  // strides of the query
  uint2* columns;
  int column_stride;

  VERKV_DEVICE bool has_units() const { return units.begin < units.end; }
};

// Exact products with the block's part of the residents, and before them with the rows of the
// sketch's basis, which every split takes, or with the keys of its tokens themselves.
template <bool kSketched, int kHeads>
VERKV_DEVICE void exact_products(const Work& work, const Constants& constants,
                                 float (&top)[sets_of(kHeads)]) {
  constexpr int kChunk = kChunkRows<kHeads>;
  const LayerView& layer = work.arguments.view.layer;
  const StepWorkspace& ws = work.arguments.workspace;
  const HeadView& head = work.head;
  const int dim = layer.key_dim;
  const Part basis{0, work.has_units() ? (head.sketch_dim + kChunk - 1) / kChunk : 0};
  const Part before = kSketched ? basis : part_of(head.compressed, kChunk, work.arguments.grid);
  const Part residents = part_of(head.residents(), kChunk, work.arguments.grid);
  // The last warp has the mean's share to add up.
  constexpr int kWorkers = kSketched ? kWarps - 1 : kWarps;
  const int warp = threadIdx.x / 32;
  if (warp == kWorkers) return;
  const int before_chunks = before.end - before.begin;
  const int chunks = before_chunks + residents.end - residents.begin;
  for (int chunk = warp; chunk < chunks; chunk += kWorkers) {
    const bool is_resident = chunk >= before_chunks;
    KeyRows rows{layer.storage, head.resident_keys, dim,
                 static_cast<std::uint32_t>(head.residents())};
    std::uint32_t row_begin = kChunk * (residents.begin + chunk - before_chunks);
    if (!is_resident) {
      row_begin = kChunk * (before.begin + chunk);
      rows = kSketched ? KeyRows{DType::f16, reinterpret_cast<const std::byte*>(head.basis_query),
                                 dim, static_cast<std::uint32_t>(head.sketch_dim)}
                       : KeyRows{layer.storage, head.host_rows, dim + layer.value_dim,
                                 static_cast<std::uint32_t>(head.compressed), head.place_position};
    }
    // Asked for before the products, of whose rows it decides later whether they count.
    std::uint32_t place[kRowsPerThread<kHeads>];
#pragma unroll
    for (int r = 0; r < kRowsPerThread<kHeads>; ++r) {
      const std::uint32_t i = min(row_of(row_begin, r), rows.end - 1);
      place[r] = is_resident && i < head.drawn ? __ldg(head.resident_place + i) : i;
    }
    const Products<kHeads> products =
        dot_chunk<kHeads>(rows, dim, row_begin, work.query, work.query_stride);
#pragma unroll
    for (int r = 0; r < kRowsPerThread<kHeads>; ++r) {
      const std::uint32_t i = row_of(row_begin, r);
      if (i >= rows.end) continue;
      // The shift may use every logit that does not depend on the draw, of tokens that the row
      // sees.
      bool counts = is_resident && i >= head.drawn && i < constants.residents;
      if (!counts && (is_resident ? i < head.drawn : !kSketched))
        counts = (head.odds[place[r]].bits < kPositive16Infinity.bits) != is_resident;
#pragma unroll
      for (int set = 0; set < sets_of(kHeads); ++set) {
        const int h = head_of(set);
        if (h >= work.heads) continue;
        if (kSketched && !is_resident) {
          work.in_basis[h * work.query_stride + i] = products.of[r][set];
          continue;
        }
        const float logit = soft_capped(products.of[r][set], layer.soft_cap);
        float* out = is_resident ? ws.resident_logit + (work.query_head + h) * ws.resident_stride
                                 : ws.weight + (work.query_head + h) * ws.token_stride;
        out[i] = logit;
        if (counts) top[set] = raise(top[set], logit);
      }
    }
  }
}

// sketch_of() where the sketch has codes: a constant kind, so that code_bytes() asks nothing. The
// products know the codes of this kind only.
VERKV_DEVICE SketchShape coded_shape(const HeadView& head) {
  return {SketchKind::calibrated, head.sketch_dim, head.sketch_fine};
}

// Asks for the first codes of a block, each thread for a line.
VERKV_DEVICE void prefetch_codes(const Work& work) {
  const HeadView& head = work.head;
  const std::int64_t group_bytes = kSketchGroup * coded_shape(head).code_bytes();
  const auto groups = static_cast<int>((head.compressed + kSketchGroup - 1) / kSketchGroup);
  const std::int64_t at = kUnitGroups * work.units.begin * group_bytes + kLineBytes * threadIdx.x;
  if (at < min(groups, kUnitGroups * work.units.end) * group_bytes) prefetch_line(head.codes + at);
}

// The sketched logits of the block's part of the compressed tokens.
// Dialect of verkv/sketch.hpp: sketch_logit; the dots come without the bias of the levels.
template <int kSets>
VERKV_DEVICE void sketched_logits(const Work& work, const Constants& constants,
                                  float (&top)[kSets]) {
  const LayerView& layer = work.arguments.view.layer;
  const StepWorkspace& ws = work.arguments.workspace;
  const HeadView& head = work.head;
  const SketchShape sketch = coded_shape(head);
  const int lane = threadIdx.x % 32;
  const int group_bytes = static_cast<int>(kSketchGroup) * sketch.code_bytes();
  const auto compressed = static_cast<std::uint32_t>(head.compressed);
  const auto last_group = static_cast<int>((compressed - 1) / kSketchGroup);
  const std::uint8_t* codes = head.codes;
  const Positive16* all_scales = head.scales;
  const Positive16* all_odds = head.odds;
  const int unit_bytes = kUnitGroups * group_bytes;
  const int first_unit = work.units.begin + static_cast<int>(threadIdx.x) / 32;
  const int whole_end = min(work.units.end, static_cast<int>(compressed / kUnitTokens));
  const bool asks = kLineBytes * lane < unit_bytes;
  const std::uint8_t* ahead =
      codes + (std::int64_t{first_unit} + kUnitsAhead * kWarps) * unit_bytes + kLineBytes * lane;
  float factor[kSets];
  float shift[kSets];
#pragma unroll
  for (int set = 0; set < kSets; ++set) {
    const int h = head_of(set);
    const bool there = h < work.heads && work.has_units();
    factor[set] = there ? constants.factor[h] : 0.0F;
    shift[set] = there ? constants.shift[h] : 0.0F;
  }
  for (int unit = first_unit; unit < work.units.end; unit += kWarps) {
    const std::uint32_t token = std::uint32_t{kUnitTokens} * unit + lane / 4 * 8;
    const auto group = static_cast<int>(token / kSketchGroup);
    if (asks && unit + kUnitsAhead * kWarps < whole_end) prefetch_line(ahead);
    ahead += std::int64_t{kWarps} * unit_bytes;
    // A group that is not there is read as the last one. All loads begin before the products.
    const int read = min(group, last_group);
    const std::int64_t token_read = kSketchGroup * read + lane / 4 % 2 * 8;
    const uint4 scales = __ldg(reinterpret_cast<const uint4*>(all_scales + token_read));
    uint4 odds = __ldg(reinterpret_cast<const uint4*>(all_odds + token_read));
    const SketchSums<kSets> sums = sketch_dots<kSets>(
        sketch, codes + std::int64_t{read} * group_bytes, work.columns, work.column_stride);
    if (group > last_group) continue;
    if (token + 8 > compressed) odds = infinite_from(odds, static_cast<int>(compressed - token));
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      float logit[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const auto dot = static_cast<float>(sums.of[set][j / 4][j % 4]);
        logit[j] = fmaf(factor[set] * scale_of(scales, j), dot, shift[set]);
      }
      if (layer.soft_cap != 0) {
#pragma unroll
        for (int j = 0; j < 8; ++j) logit[j] = soft_capped(logit[j], layer.soft_cap);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (has_finite_odds(odds, j)) top[set] = fmaxf(top[set], logit[j]);
      }
      if (head_of(set) >= work.heads) continue;
      float4* out = reinterpret_cast<float4*>(
          ws.weight + (work.query_head + head_of(set)) * ws.token_stride + token);
      out[0] = make_float4(logit[0], logit[1], logit[2], logit[3]);
      out[1] = make_float4(logit[4], logit[5], logit[6], logit[7]);
    }
  }
}

// Grid: (rows x KV heads, splits, parts of a group). kHeads: 1, 2, 4 or 8, not below the query
// heads of a part. kSketched: not the exact sketch.
template <bool kSketched, int kHeads>
__global__ void __launch_bounds__(kScoreThreads, 1) scores_kernel(const StepArguments arguments) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ Constants constants;
  __shared__ float warp_tops[kWarps][kScoreHeads];
  constexpr int kSets = sets_of(kHeads);
  const StepView& step = arguments.view;
  const LayerView& layer = step.layer;
  const StepWorkspace& ws = arguments.workspace;
  const int pair = blockIdx.x;
  const int row = pair / layer.kv_heads;
  const int kv_head = pair % layer.kv_heads;
  const int first = kv_head * layer.group + static_cast<int>(blockIdx.z) * kScoreHeads;
  const int slot = step.batch[row].slot;
  if (slot < 0) return;
  const ScoreShared<kHeads> shared(layer);
  const HeadView& head = step.heads[static_cast<std::int64_t>(slot) * layer.kv_heads + kv_head];
  const Work work{arguments,
                  head,
                  part_of(head.compressed, kUnitTokens, arguments.grid),
                  static_cast<std::int64_t>(row) * layer.query_heads() + first,
                  min(kScoreHeads, (kv_head + 1) * layer.group - first),
                  reinterpret_cast<float*>(memory),
                  shared.query_stride,
                  reinterpret_cast<float*>(memory + shared.basis_offset()),
                  reinterpret_cast<uint2*>(memory),
                  shared.column_stride};
  const int tid = threadIdx.x;
  const int warp = tid / 32;
  const int lane = tid % 32;

  // The counters of the later launches start at zero in every step, also in a replayed one.
  if (blockIdx.y == 0 && blockIdx.z == 0 && tid == 0) {
    ws.groups[pair].planned_heads = 0;
    for (int p = 0; p < arguments.grid.attention_parts; ++p)
      ws.finished[static_cast<std::int64_t>(pair) * arguments.grid.attention_parts + p] = 0;
  }

  if (tid == 0)
    constants.residents = static_cast<std::uint32_t>(residents_of(head, step.batch[row]));
  if constexpr (kSketched) prefetch_codes(work);
  load_queries<kHeads>(step, row, first, work.heads, work.query, work.query_stride);
  __syncthreads();
  float top[kSets];  // of the heads head_of(set)
#pragma unroll
  for (int set = 0; set < kSets; ++set) top[set] = minus_infinity();
  exact_products<kSketched, kHeads>(work, constants, top);
  if constexpr (kSketched) {
    if (work.has_units() && warp == kWarps - 1 && lane < work.heads)
      constants.shift[lane] =
          mean_share(work.query + lane * work.query_stride, head.channel_means, layer.key_dim);
    __syncthreads();
    if (work.has_units() && warp < kSetHeads * kSets) {
      const float factor = encode_by_warp(
          work.in_basis + warp * work.query_stride, head.sketch_dim, warp < work.heads,
          head.basis_unit, work.columns + 2 * warp * work.column_stride, work.column_stride);
      if (lane == 0) constants.factor[warp] = factor;
    }
    __syncthreads();
    sketched_logits<kSets>(work, constants, top);
  }

#pragma unroll
  for (int set = 0; set < kSets; ++set) {
#pragma unroll
    for (int distance = 16; distance >= 4; distance /= 2)
      top[set] = raise(top[set], __shfl_xor_sync(kWholeWarp, top[set], distance));
    if (lane < kSetHeads) warp_tops[warp][head_of(set)] = top[set];
  }
  __syncthreads();
  if (tid < work.heads) {
    float x = minus_infinity();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) x = raise(x, warp_tops[w][tid]);
    ws.slice_top[(work.query_head + tid) * arguments.grid.score_splits + blockIdx.y] = x;
  }
}

template <bool kSketched, int kHeads>
cudaError_t launch_for(const StepArguments& arguments, cudaStream_t stream) {
  const LayerView& layer = arguments.view.layer;
  const dim3 grid(static_cast<unsigned>(arguments.view.rows * layer.kv_heads),
                  static_cast<unsigned>(arguments.grid.score_splits),
                  static_cast<unsigned>(arguments.grid.score_parts));
  return launch(scores_kernel<kSketched, kHeads>, grid, kScoreThreads,
                static_cast<std::size_t>(ScoreShared<kHeads>(layer).bytes()), stream, arguments);
}

}  // namespace

cudaError_t launch_scores(const StepArguments& arguments, cudaStream_t stream) {
  const LayerView& layer = arguments.view.layer;
  const int heads = layer.group;
  if (!has_codes(layer.sketch.kind)) {
    return heads <= kSetHeads ? launch_for<false, kSetHeads>(arguments, stream)
                              : launch_for<false, kScoreHeads>(arguments, stream);
  }
  if (heads == 1) return launch_for<true, 1>(arguments, stream);
  if (heads == 2) return launch_for<true, 2>(arguments, stream);
  return heads <= kSetHeads ? launch_for<true, kSetHeads>(arguments, stream)
                            : launch_for<true, kScoreHeads>(arguments, stream);
}

}  // namespace verkv::cuda
