// First launch of a step: the query goes to the sketch's basis and is rounded to bytes, the sketch
// is streamed once, and every token gets a logit for every query head of its group; so do the
// residents, exactly. The maxima that the plan's shift is made of come by slice.
#include <cmath>

#include <verkv/attention.hpp>

#include "device_math.cuh"
#include "launch.hpp"
#include "step_kernels.hpp"

namespace verkv::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// Tokens that a warp takes at a time: two groups of the sketch.
constexpr int kUnitTokens = 32;

struct Constants {
  float shift[kScoreHeads];
  float factor[kScoreHeads];
  std::int32_t sum[kScoreHeads];
};

// Dynamic shared memory of a block: floats of queries, of the same in the basis, bytes of them.
struct ScoreShared {
  int query_stride;  // floats
  int code_stride;   // bytes: a multiple of 16, and no two heads' words in one bank

  __host__ __device__ explicit ScoreShared(const LayerView& layer)
      : query_stride((layer.key_dim + 15) / 16 * 16),
        code_stride((layer.sketch.padded_dim() + 31) / 32 * 32 + 16) {}
  __host__ __device__ int code_offset() const { return 2 * kScoreHeads * query_stride * 4; }
  __host__ __device__ int bytes() const { return code_offset() + kScoreHeads * code_stride; }
};

VERKV_DEVICE float load_query(const StepView& step, std::int64_t at) {
  switch (step.query_type) {
    case DType::f32:
      return static_cast<const float*>(step.queries)[at];
    case DType::f16:
      return as_float(static_cast<const Half*>(step.queries)[at]);
    default:
      return as_float(static_cast<const BFloat16*>(step.queries)[at]);
  }
}

// ---- One warp prepares one head's query ---------------------------------------------------------

// encode_query() of sketch.hpp. `code` is zero up to its stride.
VERKV_DEVICE void encode_by_warp(const float* x, int dim, float unit, std::int8_t* code, int head,
                                 Constants& out) {
  const int lane = threadIdx.x % 32;
  float largest = 0;
  for (int i = lane; i < dim; i += 32) largest = raise(largest, fabsf(x[i]));
  const float scale = warp_top(largest) / 127;
  int sum = 0;
  if (scale > 0) {
    for (int i = lane; i < dim; i += 32) {
      const int level = max(-127, min(127, __float2int_rn(x[i] / scale)));
      code[i] = static_cast<std::int8_t>(level);
      sum += level;
    }
  }
  sum = __reduce_add_sync(kWholeWarp, sum);
  if (lane == 0) {
    out.sum[head] = sum;
    out.factor[head] = scale * unit;
  }
}

// The share of the channel means in every sketched logit: a sum in order, so one thread's.
VERKV_DEVICE float mean_share(const float* query, const float* mean, int dim) {
  double share = 0;
#pragma unroll 8
  for (int j = 0; j < dim; ++j)
    share += static_cast<double>(query[j]) * static_cast<double>(mean[j]);
  return static_cast<float>(share);
}

// ---- Exact logits: four threads a row -----------------------------------------------------------

// Calls emit(row, head, logit) for rows [begin, end), each by one thread, with the sums of
// dot_rows.
template <class Element, class Emit>
VERKV_DEVICE void dot_rows(const Element* rows, std::int64_t stride, int dim, std::int64_t begin,
                           std::int64_t end, const float* query, int query_stride, int heads,
                           bool aligned, Emit emit) {
  const int part = threadIdx.x % 4;
  // The same number of rounds for the whole warp: its sums need all lanes.
  for (std::int64_t first = begin + threadIdx.x / 32 * 8; first < end; first += kThreads / 4) {
    const std::int64_t row = first + threadIdx.x % 32 / 4;
    const bool there = row < end;
    const Element* at = rows + (there ? row : first) * stride;
    float4 sum[kScoreHeads];
#pragma unroll
    for (int h = 0; h < kScoreHeads; ++h) sum[h] = make_float4(0, 0, 0, 0);
    for (int j = 4 * part; j < query_stride; j += 16) {
      const float4 x = load_four(at, j, dim, aligned);
#pragma unroll
      for (int h = 0; h < kScoreHeads; ++h) {
        if (h >= heads) break;
        sum[h] =
            fma_four(x, *reinterpret_cast<const float4*>(query + h * query_stride + j), sum[h]);
      }
    }
#pragma unroll
    for (int h = 0; h < kScoreHeads; ++h) {
      if (h >= heads) break;
      const float logit = fold16(sum[h]);
      if (there && part == h % 4) emit(row, h, logit);
    }
  }
}

template <class Emit>
VERKV_DEVICE void dot_rows(DType type, const std::byte* rows, std::int64_t stride, int dim,
                           std::int64_t begin, std::int64_t end, const float* query,
                           int query_stride, int heads, Emit emit) {
  const bool aligned = dim % 4 == 0 && stride % 4 == 0;
  switch (type) {
    case DType::f32:
      dot_rows(reinterpret_cast<const float*>(rows), stride, dim, begin, end, query, query_stride,
               heads, aligned, emit);
      break;
    case DType::f16:
      dot_rows(reinterpret_cast<const Half*>(rows), stride, dim, begin, end, query, query_stride,
               heads, aligned, emit);
      break;
    case DType::bf16:
      dot_rows(reinterpret_cast<const BFloat16*>(rows), stride, dim, begin, end, query,
               query_stride, heads, aligned, emit);
      break;
  }
}

// ---- Sketched logits on the tensor cores --------------------------------------------------------

// Two bytes of 2-bit codes (two tokens) to eight nibbles.
VERKV_DEVICE unsigned spread_pairs(unsigned x) {
  x = (x | (x << 8)) & 0x00ff00ffu;
  x = (x | (x << 4)) & 0x0f0f0f0fu;
  return (x | (x << 2)) & 0x33333333u;
}

// Bytes of (low, high) by the four lowest nibbles of `selector`, each below 8; higher ones are
// free.
VERKV_DEVICE unsigned pick_bytes(unsigned low, unsigned high, unsigned selector) {
  unsigned x;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(low), "r"(high), "r"(selector));
  return x;
}

// Level bytes of four coordinates (4c .. 4c + 3) of two tokens from their bytes of the low plane
// and of the high plane, in bits 0-7 and 8-15.
template <int kBits>
VERKV_DEVICE void expand_levels(const unsigned (&level)[4], unsigned low, unsigned high,
                                unsigned (&out)[2]) {
  unsigned code = spread_pairs(low);
  if constexpr (kBits == 2) {
    out[0] = pick_bytes(level[0], level[0], code);
    out[1] = pick_bytes(level[0], level[0], code >> 16);
  } else {
    const unsigned pairs = spread_pairs(high);
    code |= (pairs & 0x11111111u) << 2;
    const unsigned upper = 0x32103210u | ((pairs & 0x22222222u) << 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned below = pick_bytes(level[0], level[1], code >> (16 * i));
      const unsigned above = pick_bytes(level[2], level[3], code >> (16 * i));
      out[i] = pick_bytes(below, above, upper >> (16 * i));
    }
  }
}

// c += a (16 tokens x 32 coordinates, unsigned) * b (32 coordinates x 8 heads, signed); exact.
VERKV_DEVICE void multiply(int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                           unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// One step over 32 coordinates, quads c and c + 4 of this thread.
enum class Bits {
  fine,    // both quads are there and have 4 bits
  coarse,  // both are there and have 2
  any      // the first `fine` quads, a multiple of 4 or all of them, have 4, the others 2
};
template <Bits kBits>
VERKV_DEVICE void dot_step(const unsigned (&level)[4], unsigned coarse, int fine,
                           const std::uint8_t* low, const std::uint8_t* high,
                           const std::int8_t* column, int c, int quads, int (&sum)[2][4]) {
  unsigned a[2][4];  // [first or second half of the step][token]
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int quad = c + 4 * i;
    unsigned low_word = 0;
    unsigned high_word = 0;
    const bool is_fine = kBits == Bits::fine || (kBits == Bits::any && quad < fine);
    if (kBits != Bits::any || quad < quads) {
      low_word = *reinterpret_cast<const unsigned*>(low + kSketchGroup * quad);
      if (is_fine) high_word = *reinterpret_cast<const unsigned*>(high + kSketchGroup * quad);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      unsigned pair[2];
      const unsigned low_half = (low_word >> (16 * j)) & 0xffffu;
      const unsigned high_half = (high_word >> (16 * j)) & 0xffffu;
      if (is_fine) {
        expand_levels<4>(level, low_half, high_half, pair);
      } else {
        const unsigned only[4] = {coarse, 0, 0, 0};
        expand_levels<2>(only, low_half, 0, pair);
      }
      a[i][2 * j] = pair[0];
      a[i][2 * j + 1] = pair[1];
    }
  }
  const unsigned b0 = *reinterpret_cast<const unsigned*>(column + 4 * c);
  const unsigned b1 = *reinterpret_cast<const unsigned*>(column + 4 * c + 16);
  multiply(sum[0], a[0][0], a[0][1], a[1][0], a[1][1], b0, b1);
  multiply(sum[1], a[0][2], a[0][3], a[1][2], a[1][3], b0, b1);
}

// The dots of 32 tokens with eight heads. Thread (g, t) of a warp reads tokens 4g .. 4g + 3, one
// word of a plane of their group, and gets their dots with heads 2t and 2t + 1: out[token][head -
// 2t].
VERKV_DEVICE void sketch_dots(const SketchShape& shape, const unsigned (&level)[4], unsigned coarse,
                              const std::uint8_t* group, const std::int8_t* code, int code_stride,
                              int (&out)[4][2]) {
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int quads = shape.low_bytes();
  const int fine = shape.high_bytes();
  const std::uint8_t* low = group + g % 4 * 4;
  const std::uint8_t* high = low + kSketchGroup * quads;
  const std::int8_t* column = code + g * code_stride;
  int sum[2][4] = {};
  // Whole steps have no condition, so that their loads are on their way before the first is used.
  const int whole = quads / 8 * 8;
  int c = t;  // c - t is the same in the whole warp, which the products need
#pragma unroll 4
  for (; c - t + 8 <= fine && c - t < whole; c += 8)
    dot_step<Bits::fine>(level, coarse, fine, low, high, column, c, quads, sum);
  // At most one step has both kinds, or is cut short while the first kind lasts.
  if (c - t < fine) {
    dot_step<Bits::any>(level, coarse, fine, low, high, column, c, quads, sum);
    c += 8;
  }
#pragma unroll 4
  for (; c - t < whole; c += 8)
    dot_step<Bits::coarse>(level, coarse, fine, low, high, column, c, quads, sum);
  if (c - t < quads) dot_step<Bits::any>(level, coarse, fine, low, high, column, c, quads, sum);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    out[2 * i][0] = sum[i][0];
    out[2 * i][1] = sum[i][1];
    out[2 * i + 1][0] = sum[i][2];
    out[2 * i + 1][1] = sum[i][3];
  }
}

VERKV_DEVICE unsigned half_word(uint2 x, int i) {
  return ((i < 2 ? x.x : x.y) >> (16 * (i % 2))) & 0xffffu;
}

// ---- The kernel ---------------------------------------------------------------------------------

// Grid: (rows x KV heads, splits, parts of a group). kSketched: not the exact sketch.
template <bool kSketched>
__global__ void __launch_bounds__(kThreads) scores_kernel(const StepArguments arguments) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ Constants constants;
  __shared__ float warp_tops[kWarps][kScoreHeads];
  const StepView& step = arguments.view;
  const LayerView& layer = step.layer;
  const StepWorkspace& ws = arguments.workspace;
  const int pair = blockIdx.x;
  const int split = blockIdx.y;
  const int splits = arguments.grid.score_splits;
  const int row = pair / layer.kv_heads;
  const int kv_head = pair % layer.kv_heads;
  const int first = blockIdx.z * kScoreHeads;
  const int heads = min(kScoreHeads, layer.group - first);
  const int slot = step.slots[row];
  if (slot < 0) return;
  const HeadView head = step.heads[static_cast<std::int64_t>(slot) * layer.kv_heads + kv_head];
  const SketchShape sketch = sketch_of(layer, head);
  const int tid = threadIdx.x;
  const int warp = tid / 32;
  const int lane = tid % 32;
  const int dim = layer.key_dim;
  const std::int64_t query_head =
      static_cast<std::int64_t>(row) * layer.query_heads() + kv_head * layer.group + first;

  // The counters of the later launches start at zero in every step, also in a replayed one.
  if (split == 0 && blockIdx.z == 0 && tid == 0) {
    ws.groups[pair].planned_heads = 0;
    for (int p = 0; p < arguments.grid.attend_parts; ++p)
      ws.attended[static_cast<std::int64_t>(pair) * arguments.grid.attend_parts + p] = 0;
  }

  const ScoreShared shared(layer);
  float* query = reinterpret_cast<float*>(memory);
  float* in_basis = query + kScoreHeads * shared.query_stride;
  std::int8_t* code = reinterpret_cast<std::int8_t*>(memory + shared.code_offset());
  for (int i = tid; i < heads * shared.query_stride; i += kThreads) {
    const int h = i / shared.query_stride;
    const int j = i % shared.query_stride;
    float x = 0;
    if (j < dim) {
      const std::int64_t at = row * step.query_row_stride +
                              (kv_head * layer.group + first + h) * step.query_head_stride + j;
      x = layer.scale * load_query(step, at);
    }
    query[i] = x;
  }
  if constexpr (kSketched) {
    for (int i = tid; i < kScoreHeads * shared.code_stride / 4; i += kThreads)
      reinterpret_cast<unsigned*>(code)[i] = 0;
  }
  if (tid < kScoreHeads) {
    constants.shift[tid] = 0;
    constants.factor[tid] = 0;
    constants.sum[tid] = 0;
  }
  __syncthreads();
  if constexpr (kSketched) {
    if (head.compressed > 0) {
      dot_rows(head.basis_query, dim, dim, 0, sketch.dim, query, shared.query_stride, heads,
               dim % 4 == 0, [&](std::int64_t i, int h, float x) {
                 in_basis[h * shared.query_stride + static_cast<int>(i)] = x;
               });
    }
    __syncthreads();
    if (head.compressed > 0) {
      for (int task = warp; task < 2 * heads; task += kWarps) {
        const int h = task % heads;
        if (task < heads) {
          encode_by_warp(in_basis + h * shared.query_stride, sketch.dim, head.basis_unit,
                         code + h * shared.code_stride, h, constants);
        } else if (lane == 0) {
          constants.shift[h] = mean_share(query + h * shared.query_stride, head.channel_means, dim);
        }
      }
    }
  }
  __syncthreads();

  float top[kScoreHeads];
#pragma unroll
  for (int h = 0; h < kScoreHeads; ++h) top[h] = minus_infinity();
  float sketched_top[2] = {minus_infinity(), minus_infinity()};  // of heads 2t and 2t + 1

  // Residents of this split.
  {
    const std::int64_t all = head.residents();
    const std::int64_t each = (all + splits - 1) / splits;
    const std::int64_t begin = min(all, split * each);
    const std::int64_t end = min(all, begin + each);
    dot_rows(layer.storage, head.resident_keys, dim, dim, begin, end, query, shared.query_stride,
             heads, [&](std::int64_t i, int h, float logit) {
               logit = soft_capped(logit, layer.soft_cap);
               ws.resident_logit[(query_head + h) * ws.resident_stride + i] = logit;
               // The shift may use every logit that does not depend on the draw.
               const bool high = i >= head.drawn || head.odds[head.resident_position[i]].bits >=
                                                        kPositive16Infinity.bits;
               if (high) top[h] = raise(top[h], logit);
             });
  }

  // Compressed tokens of this split.
  const std::int64_t units = (head.compressed + kUnitTokens - 1) / kUnitTokens;
  const std::int64_t each = (units + splits - 1) / splits;
  const std::int64_t begin = min(units, split * each);
  const std::int64_t end = min(units, begin + each);
  if constexpr (!kSketched) {
    const std::int64_t stride = dim + layer.value_dim;
    dot_rows(layer.storage, head.host_rows, stride, dim, begin * kUnitTokens,
             min(head.compressed, end * kUnitTokens), query, shared.query_stride, heads,
             [&](std::int64_t i, int h, float logit) {
               logit = soft_capped(logit, layer.soft_cap);
               ws.weight[(query_head + h) * ws.token_stride + i] = logit;
               if (head.odds[i].bits < kPositive16Infinity.bits) top[h] = raise(top[h], logit);
             });
  } else {
    const int g = lane / 4;
    const int t = lane % 4;
    unsigned level[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      level[i] = layer.levels.byte[4 * i] | (layer.levels.byte[4 * i + 1] << 8) |
                 (layer.levels.byte[4 * i + 2] << 16) |
                 (static_cast<unsigned>(layer.levels.byte[4 * i + 3]) << 24);
    }
    const unsigned coarse = layer.levels.coarse_byte[0] | (layer.levels.coarse_byte[1] << 8) |
                            (layer.levels.coarse_byte[2] << 16) |
                            (static_cast<unsigned>(layer.levels.coarse_byte[3]) << 24);
    for (std::int64_t unit = begin + warp; unit < end; unit += kWarps) {
      const std::int64_t token = unit * kUnitTokens + 4 * g;
      const std::int64_t group = token / kSketchGroup;
      const bool there = group * kSketchGroup < head.compressed;
      int dot[4][2];
      // A group that is not there is read as the one before it, which is.
      sketch_dots(sketch, level, coarse,
                  head.codes + (there ? group : group - 1) * (kSketchGroup * sketch.code_bytes()),
                  code, shared.code_stride, dot);
      if (!there) continue;
      const uint2 scale = *reinterpret_cast<const uint2*>(head.scales + token);
      const uint2 odds = *reinterpret_cast<const uint2*>(head.odds + token);
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const int h = 2 * t + column;
        if (h >= heads) continue;
        float logit[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float x = sketch_logit(dot[j][column], constants.sum[h],
                                       Positive16{static_cast<std::uint16_t>(half_word(scale, j))},
                                       constants.factor[h], constants.shift[h]);
          logit[j] = soft_capped(x, layer.soft_cap);
          if (token + j < head.compressed && half_word(odds, j) < kPositive16Infinity.bits)
            sketched_top[column] = raise(sketched_top[column], logit[j]);
        }
        *reinterpret_cast<float4*>(ws.weight + (query_head + h) * ws.token_stride + token) =
            make_float4(logit[0], logit[1], logit[2], logit[3]);
      }
    }
  }

#pragma unroll
  for (int h = 0; h < kScoreHeads; ++h) {
    const float x = warp_top(lane % 4 == h / 2 ? raise(top[h], sketched_top[h % 2]) : top[h]);
    if (lane == 0) warp_tops[warp][h] = x;
  }
  __syncthreads();
  if (tid < heads) {
    float x = minus_infinity();
    for (int w = 0; w < kWarps; ++w) x = raise(x, warp_tops[w][tid]);
    ws.slice_top[(query_head + tid) * splits + split] = x;
  }
}

}  // namespace

cudaError_t launch_scores(const StepArguments& arguments, cudaStream_t stream) {
  const LayerView& layer = arguments.view.layer;
  const dim3 grid(static_cast<unsigned>(arguments.view.rows * layer.kv_heads),
                  static_cast<unsigned>(arguments.grid.score_splits),
                  static_cast<unsigned>(arguments.grid.score_parts));
  const std::size_t shared = static_cast<std::size_t>(ScoreShared(layer).bytes());
  const auto launch_one = [&](auto* kernel) {
    return launch(kernel, grid, kThreads, shared, stream, arguments);
  };
  return layer.sketch.kind == SketchKind::exact ? launch_one(scores_kernel<false>)
                                                : launch_one(scores_kernel<true>);
}

}  // namespace verkv::cuda
