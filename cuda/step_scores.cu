// First launch of a step: the query goes to the sketch's basis and is rounded to bytes, the sketch
// is streamed once, and every token gets a logit for every query head of its group; so do the
// residents, exactly. The maxima that the plan's shift is made of come by slice.
#include <cmath>

#include <verkv/attention.hpp>

#include "device_math.cuh"
#include "launch.hpp"
#include "query.cuh"
#include "step_kernels.hpp"

namespace verkv::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
// Query heads of one matrix product: each has two of its eight columns.
constexpr int kSetHeads = 4;
// Tokens that a warp takes at a time: four groups of the sketch.
constexpr int kUnitTokens = 64;
constexpr int kUnitGroups = kUnitTokens / static_cast<int>(kSketchGroup);
// A warp asks for codes so many of its units before it reads them.
constexpr int kUnitsAhead = 2;

constexpr int sets_of(int heads) { return (heads + kSetHeads - 1) / kSetHeads; }

// Values that one block makes and others of its threads read.
struct Constants {
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
      : query_stride((layer.key_dim + 15) & ~15),
        column_stride((((layer.sketch.dim + 15) >> 4) | 1) * 4) {}
  __host__ __device__ int query_bytes() const { return kHeads * query_stride * 4; }
  __host__ __device__ int basis_offset() const {
    const int columns = sets_of(kHeads) * 8 * column_stride * 8;
    return columns > query_bytes() ? columns : query_bytes();
  }
  __host__ __device__ int bytes() const { return basis_offset() + query_bytes(); }
};

// Pieces of `unit` elements that a split takes. Positions have 32 bits, so their numbers fit.
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

// ---- The query ----------------------------------------------------------------------------------

// The scaled queries of `heads` heads from `first` on, zero up to the stride and for heads that are
// not there.
template <int kHeads>
VERKV_DEVICE void load_queries(const StepView& step, std::int64_t row, std::int64_t first,
                               int heads, float* query, int stride) {
  constexpr int kPart = kThreads / kHeads;
  const int h = threadIdx.x / kPart;
  for (int j = threadIdx.x % kPart; j < stride; j += kPart) {
    const bool there = h < heads && j < step.layer.key_dim;
    query[h * stride + j] = there ? step.layer.scale * query_number(step, row, first + h, j) : 0.0F;
  }
}

// encode_query() of sketch.hpp by one warp. Column 2h of the products takes the first tokens of
// pairs and column 2h + 1 the second ones: for each quad of coordinates (0, 2) and (1, 3) lie in
// two words, in their lower half for the first tokens and in the upper for the second, the other
// halves are zero. Quads are zero up to a multiple of four. Returns the factor of the logits. A
// head that is not there gets zeros.
VERKV_DEVICE float encode_by_warp(const float* x, int dim, bool there, float unit, uint2* columns,
                                  int stride) {
  const int lane = threadIdx.x % 32;
  float largest = 0;
  if (there) {
    for (int i = lane; i < dim; i += 32) largest = raise(largest, fabsf(x[i]));
  }
  const float scale = warp_top(largest) / 127;
  const int quads = (dim + 15) / 16 * 4;
  for (int quad = lane; quad < quads; quad += 32) {
    unsigned byte[4] = {0, 0, 0, 0};
    if (scale > 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (4 * quad + i >= dim) continue;
        const int level = max(-127, min(127, __float2int_rn(x[4 * quad + i] / scale)));
        byte[i] = static_cast<unsigned>(level) & 0xffu;
      }
    }
    const unsigned even = byte[0] | (byte[2] << 8);
    const unsigned odd = byte[1] | (byte[3] << 8);
    columns[quad] = make_uint2(even, odd);
    columns[stride + quad] = make_uint2(even << 16, odd << 16);
  }
  return scale * unit;
}

// The share of the channel means in every sketched logit: a sum in order, so one thread's, and a
// long chain of additions.
VERKV_DEVICE float mean_share(const float* query, const float* mean, int dim) {
  double share = 0;
#pragma unroll 8
  for (int j = 0; j < dim; ++j)
    share += static_cast<double>(query[j]) * static_cast<double>(mean[j]);
  return static_cast<float>(share);
}

// ---- Exact products: four threads a row ---------------------------------------------------------

// Thread t of four neighbours ends with the heads 4i + t that there are.
VERKV_DEVICE int head_of(int set) { return kSetHeads * set + static_cast<int>(threadIdx.x % 4); }

// load_four() of what no kernel of the step writes, with one conversion instruction for each half.
VERKV_DEVICE float4 load_aligned(const float* from) {
  return __ldg(reinterpret_cast<const float4*>(from));
}
VERKV_DEVICE float4 load_aligned(const Half* from) {
  const uint2 x = __ldg(reinterpret_cast<const uint2*>(from));
  float4 y;
  asm("{\n.reg .f16 a, b, c, d;\nmov.b32 {a, b}, %4;\nmov.b32 {c, d}, %5;\n"
      "cvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\ncvt.f32.f16 %2, c;\ncvt.f32.f16 %3, d;\n}"
      : "=f"(y.x), "=f"(y.y), "=f"(y.z), "=f"(y.w)
      : "r"(x.x), "r"(x.y));
  return y;
}
VERKV_DEVICE float4 load_aligned(const BFloat16* from) {
  const uint2 x = __ldg(reinterpret_cast<const uint2*>(from));
  return make_float4(__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xffff0000u),
                     __uint_as_float(x.y << 16), __uint_as_float(x.y & 0xffff0000u));
}

// Rows of one type, numbered in 32 bits as positions are.
struct Rows {
  DType type = DType::f16;
  const std::byte* data = nullptr;
  int stride = 0;         // elements
  std::uint32_t end = 0;  // so many are there
};

// Rows that a warp takes at a time: each thread a quarter of kRows of them. Two share their loads
// of the query; with eight heads registers suffice for one.
template <int kHeads>
constexpr int kRows = kHeads > kSetHeads ? 1 : 2;
template <int kHeads>
constexpr int kChunkRows = 8 * kRows<kHeads>;

// The head whose sum a thread keeps in `slot`. It differs between the four threads of a row, so
// that fold_heads() finds without selecting what to send and what to keep.
template <int kHeads>
VERKV_DEVICE int head_in_slot(int slot) {
  const int part = threadIdx.x % 4;
  return slot ^ (part & (kHeads < kSetHeads ? kHeads - 1 : kSetHeads - 1));
}

VERKV_DEVICE float4 add_from(float4 x, float4 y, int distance) {
  x.x += __shfl_xor_sync(kWholeWarp, y.x, distance);
  x.y += __shfl_xor_sync(kWholeWarp, y.y, distance);
  x.z += __shfl_xor_sync(kWholeWarp, y.z, distance);
  x.w += __shfl_xor_sync(kWholeWarp, y.w, distance);
  return x;
}

// Dialect of sum_order.hpp: fold16 of kHeads (1, 2 or 4) sums over the four threads of a row; each
// thread gets that of one head, the one in its first slot.
template <int kHeads>
VERKV_DEVICE float fold_heads(const float4* sum) {
  float4 x = add_from(sum[0], sum[kHeads == 4 ? 2 : 0], 2);
  float4 y = x;
  if constexpr (kHeads == 2) y = add_from(sum[1], sum[1], 2);
  if constexpr (kHeads == 4) y = add_from(sum[1], sum[3], 2);
  x = add_from(x, y, 1);
  x.x += x.z;
  x.y += x.w;
  return x.x + x.y;
}

// This thread's row in a chunk.
VERKV_DEVICE std::uint32_t row_of(std::uint32_t first, int r) {
  return first + 8 * r + threadIdx.x % 32 / 4;
}

// Of this thread's rows with the heads head_of(set).
template <int kHeads>
struct Products {
  float of[kRows<kHeads>][sets_of(kHeads)];
};

// The products of dot_rows in src/cpu/kernels.hpp for a warp's rows from `first` on.
template <int kHeads, bool kAligned, class Element>
VERKV_DEVICE Products<kHeads> dot_chunk(const Rows& rows, int dim, std::uint32_t first,
                                        const float* query, int query_stride) {
  constexpr int kMine = kRows<kHeads>;
  const int part = threadIdx.x % 4;
  const Element* at[kMine];
#pragma unroll
  for (int r = 0; r < kMine; ++r) {
    // The whole warp sums: a row that is not there is read as the last one.
    const std::int64_t row = min(row_of(first, r), rows.end - 1);
    at[r] = reinterpret_cast<const Element*>(rows.data) + row * rows.stride + 4 * part;
  }
  const float* of_slot[kHeads];
#pragma unroll
  for (int s = 0; s < kHeads; ++s)
    of_slot[s] = query + head_in_slot<kHeads>(s) * query_stride + 4 * part;
  float4 sum[kMine][kHeads];
#pragma unroll
  for (int r = 0; r < kMine; ++r) {
#pragma unroll
    for (int s = 0; s < kHeads; ++s) sum[r][s] = make_float4(0, 0, 0, 0);
  }
  const auto add = [&](int j, const float4(&x)[kMine]) {
#pragma unroll
    for (int s = 0; s < kHeads; ++s) {
      const float4 q = *reinterpret_cast<const float4*>(of_slot[s] + j);
#pragma unroll
      for (int r = 0; r < kMine; ++r) sum[r][s] = fma_four(x[r], q, sum[r][s]);
    }
  };
  // So many loads are on their way as registers allow.
  constexpr int kUnroll = (sizeof(Element) == 4 ? 2 : 4) / (kHeads > kSetHeads ? 2 : 1);
  int j = 0;
  if constexpr (kAligned) {
#pragma unroll(kUnroll)
    for (; j + 16 <= dim; j += 16) {
      float4 x[kMine];
#pragma unroll
      for (int r = 0; r < kMine; ++r) x[r] = load_aligned(at[r] + j);
      add(j, x);
    }
  }
#pragma unroll 1
  for (; j < query_stride; j += 16) {
    float4 x[kMine];
#pragma unroll
    for (int r = 0; r < kMine; ++r) x[r] = load_four(at[r], j, dim - 4 * part, kAligned);
    add(j, x);
  }
  Products<kHeads> products;
#pragma unroll
  for (int r = 0; r < kMine; ++r) {
#pragma unroll
    for (int set = 0; set < sets_of(kHeads); ++set)
      products.of[r][set] =
          fold_heads<(kHeads < kSetHeads ? kHeads : kSetHeads)>(sum[r] + kSetHeads * set);
  }
  return products;
}

template <int kHeads, class Element>
VERKV_DEVICE Products<kHeads> dot_chunk(const Rows& rows, int dim, std::uint32_t first,
                                        const float* query, int query_stride) {
  if (dim % 4 == 0 && rows.stride % 4 == 0)
    return dot_chunk<kHeads, true, Element>(rows, dim, first, query, query_stride);
  return dot_chunk<kHeads, false, Element>(rows, dim, first, query, query_stride);
}

template <int kHeads>
VERKV_DEVICE Products<kHeads> dot_chunk(const Rows& rows, int dim, std::uint32_t first,
                                        const float* query, int query_stride) {
  switch (rows.type) {
    case DType::f32:
      return dot_chunk<kHeads, float>(rows, dim, first, query, query_stride);
    case DType::f16:
      return dot_chunk<kHeads, Half>(rows, dim, first, query, query_stride);
    default:
      return dot_chunk<kHeads, BFloat16>(rows, dim, first, query, query_stride);
  }
}

// ---- Sketched logits on the tensor cores --------------------------------------------------------

// Levels without their bias are signed bytes, and of those with 4 bits the lower half is negative.
// Tables of their sizes have no sign bit, so that a selector of prmt whose bit 3 is set, which
// repeats that bit, gives zero: one look-up for the negative levels, whose sums are subtracted, and
// one for the others, and nothing to choose between the two.
constexpr unsigned negative_sizes(int first) {
  unsigned word = 0;
  for (int i = 0; i < 4; ++i)
    word |= static_cast<unsigned>(kLevelBias - kSketchLevels.byte[first + i]) << (8 * i);
  return word;
}
constexpr unsigned positive_sizes(int first) {
  unsigned word = 0;
  for (int i = 0; i < 4; ++i)
    word |= static_cast<unsigned>(kSketchLevels.byte[first + i] - kLevelBias) << (8 * i);
  return word;
}
constexpr unsigned coarse_levels() {
  unsigned word = 0;
  for (int i = 0; i < 4; ++i)
    word |= (static_cast<unsigned>(kSketchLevels.coarse_byte[i] - kLevelBias) & 0xffu) << (8 * i);
  return word;
}
constexpr unsigned kNegativeLow = negative_sizes(0);
constexpr unsigned kNegativeHigh = negative_sizes(4);
constexpr unsigned kPositiveLow = positive_sizes(8);
constexpr unsigned kPositiveHigh = positive_sizes(12);
constexpr unsigned kCoarse = coarse_levels();
static_assert(((kNegativeLow | kNegativeHigh | kPositiveLow | kPositiveHigh) & 0x80808080u) == 0);

// Bytes of (low, high) by the four lowest nibbles of `selector`: the byte of its three lower bits,
// and if the fourth is set the sign of that in all bits. Higher nibbles are free.
VERKV_DEVICE unsigned pick_bytes(unsigned low, unsigned high, unsigned selector) {
  unsigned x;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(low), "r"(high), "r"(selector));
  return x;
}

// Levels of four coordinates of four tokens, as the rows of a product want them: coordinates 0 and
// 2 of the first two tokens, the same of the others, coordinates 1 and 3 of the first two, of the
// others. So a row is a pair of tokens, nibbles need no sorting by token, and the two columns that
// a head has fill the eight of a product with four heads.
struct Levels {
  unsigned row[4];
};

VERKV_DEVICE Levels look_up(unsigned low, unsigned high, unsigned even, unsigned odd) {
  return {pick_bytes(low, high, even), pick_bytes(low, high, even >> 16),
          pick_bytes(low, high, odd), pick_bytes(low, high, odd >> 16)};
}

// c += a (16 pairs of tokens x 32) * b (32 x two columns of four heads), signed bytes; exact.
VERKV_DEVICE void multiply(int (&c)[4], const Levels& a, uint2 b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a.row[0]), "r"(a.row[1]), "r"(a.row[2]), "r"(a.row[3]), "r"(b.x), "r"(b.y));
}

constexpr unsigned kPairs = 0x33333333u;

// Sums over the coordinates of four tokens, twice, for one head of each set.
template <int kSets>
struct Sums {
  int of[kSets][2][4] = {};
};

// The planes of a thread's eight tokens, from its quad of the first step on, and its column.
struct Operands {
  const std::uint8_t* low;
  const std::uint8_t* high;
  const uint2* column;
  int set_stride;  // pairs of words from a column to that of the next set
};

// Steps over 16 coordinates, `at` quads on: thread t of four takes the quad that is t further.
// `read`: the same for the planes. All loads come before the first use. `below`, for codes with 4
// bits: the sums of the sizes of negative levels.
template <int kSets, bool kFine, int kSteps>
VERKV_DEVICE void dot_steps(const Operands& from, int at, int read, Sums<kSets>& sums,
                            Sums<kSets>* below = nullptr) {
  const std::uint8_t* first_low = from.low + kSketchGroup * read;
  const std::uint8_t* first_high = from.high + kSketchGroup * read;
  const uint2* column = from.column + at;
  uint2 low[kSteps];
  uint2 high[kSteps];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    low[s] = __ldg(reinterpret_cast<const uint2*>(first_low + 4 * kSketchGroup * s));
    if constexpr (kFine)
      high[s] = __ldg(reinterpret_cast<const uint2*>(first_high + 4 * kSketchGroup * s));
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    uint2 query[kSets];
#pragma unroll
    for (int set = 0; set < kSets; ++set) query[set] = column[set * from.set_stride + 4 * s];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned x = i == 0 ? low[s].x : low[s].y;
      Levels levels;
      if constexpr (kFine) {
        const unsigned y = i == 0 ? high[s].x : high[s].y;
        // Nibbles of whole codes. For the other look-up bit 3 is inverted, and bit 2 with it: the
        // words of its table are exchanged.
        const unsigned even = (x & kPairs) | ((y << 2) & ~kPairs);
        const unsigned odd = ((x >> 2) & kPairs) | (y & ~kPairs);
        const Levels negative = look_up(kNegativeLow, kNegativeHigh, even, odd);
        levels = look_up(kPositiveHigh, kPositiveLow, even ^ ~kPairs, odd ^ ~kPairs);
#pragma unroll
        for (int set = 0; set < kSets; ++set) multiply(below->of[set][i], negative, query[set]);
      } else {
        levels = look_up(kCoarse, kCoarse, x & kPairs, (x >> 2) & kPairs);
      }
#pragma unroll
      for (int set = 0; set < kSets; ++set) multiply(sums.of[set][i], levels, query[set]);
    }
  }
}

// The integer scores of a warp's 64 tokens, less their bias. Thread (g, t) reads tokens 8g .. 8g +
// 7, whose group starts at `group`, and gets their scores for head t of each set.
template <int kSets>
VERKV_DEVICE Sums<kSets> sketch_dots(const SketchShape& shape, const std::uint8_t* group,
                                     const uint2* columns, int column_stride) {
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int quads = shape.low_bytes();
  const int fine = shape.high_bytes();  // a multiple of four, or all
  const std::uint8_t* low = group + g % 2 * 8 + kSketchGroup * t;
  const Operands from{low, low + kSketchGroup * quads, columns + g * column_stride + t,
                      8 * column_stride};
  // The last step may lack quads. Their queries are zero, so any are read.
  const auto there = [&](int at) { return min(at, quads - 1 - t); };
  Sums<kSets> sums;
  int at = 0;
  if (fine > 0) {
    Sums<kSets> below;
#pragma unroll 1
    for (; at + 8 <= fine; at += 8) dot_steps<kSets, true, 2>(from, at, at, sums, &below);
#pragma unroll 1
    for (; at < fine; at += 4) dot_steps<kSets, true, 1>(from, at, there(at), sums, &below);
#pragma unroll
    for (int i = 0; i < 8 * kSets; ++i)
      sums.of[i / 8][i / 4 % 2][i % 4] -= below.of[i / 8][i / 4 % 2][i % 4];
  }
#pragma unroll 1
  for (; at + 16 <= quads; at += 16) dot_steps<kSets, false, 4>(from, at, at, sums);
#pragma unroll 1
  for (; at + 8 <= quads; at += 8) dot_steps<kSets, false, 2>(from, at, at, sums);
#pragma unroll 1
  for (; at < quads; at += 4) dot_steps<kSets, false, 1>(from, at, there(at), sums);
  return sums;
}

// Halves of two tokens in a word of scales or odds.
VERKV_DEVICE unsigned word_of(const uint4& x, int i) {
  return i < 2 ? (i == 0 ? x.x : x.y) : (i == 2 ? x.z : x.w);
}
VERKV_DEVICE float scale_of(const uint4& scales, int token) {
  const unsigned word = word_of(scales, token / 2);
  return __uint_as_float((token % 2 == 0 ? word << 15 : word >> 1) & 0x7fff8000u);
}
VERKV_DEVICE bool has_finite_odds(const uint4& odds, int token) {
  const unsigned word = word_of(odds, token / 2);
  constexpr unsigned kInfinity = static_cast<unsigned>(kPositive16Infinity.bits) << 16;
  return (token % 2 == 0 ? word << 16 : word) < kInfinity;
}

// The odds of eight tokens, infinite from the token `left` on.
VERKV_DEVICE uint4 infinite_from(uint4 odds, int left) {
  const auto beyond = [left](int token) {
    return (token >= left ? 0xffffu : 0u) | (token + 1 >= left ? 0xffff0000u : 0u);
  };
  return make_uint4(odds.x | beyond(0), odds.y | beyond(2), odds.z | beyond(4), odds.w | beyond(6));
}

constexpr int kLine = 128;

// Asks for a line of memory that will be read, so that the wait for it passes meanwhile.
VERKV_DEVICE void prefetch(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from)));
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
VERKV_DEVICE void exact_products(const Work& work, float (&top)[sets_of(kHeads)]) {
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
    Rows rows{layer.storage, head.resident_keys, dim, static_cast<std::uint32_t>(head.residents())};
    std::uint32_t row_begin = kChunk * (residents.begin + chunk - before_chunks);
    if (!is_resident) {
      row_begin = kChunk * (before.begin + chunk);
      rows = kSketched ? Rows{DType::f16, reinterpret_cast<const std::byte*>(head.basis_query), dim,
                              static_cast<std::uint32_t>(head.sketch_dim)}
                       : Rows{layer.storage, head.host_rows, dim + layer.value_dim,
                              static_cast<std::uint32_t>(head.compressed)};
    }
    // Asked for before the products, of whose rows it decides later whether they count.
    std::uint32_t position[kRows<kHeads>];
#pragma unroll
    for (int r = 0; r < kRows<kHeads>; ++r) {
      const std::uint32_t i = min(row_of(row_begin, r), rows.end - 1);
      position[r] = is_resident && i < head.drawn ? __ldg(head.resident_position + i) : i;
    }
    const Products<kHeads> products =
        dot_chunk<kHeads>(rows, dim, row_begin, work.query, work.query_stride);
#pragma unroll
    for (int r = 0; r < kRows<kHeads>; ++r) {
      const std::uint32_t i = row_of(row_begin, r);
      if (i >= rows.end) continue;
      // The shift may use every logit that does not depend on the draw.
      bool counts = is_resident && i >= head.drawn;
      if (!counts && (is_resident || !kSketched))
        counts = (head.odds[position[r]].bits < kPositive16Infinity.bits) != is_resident;
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

// sketch_of() where the sketch has codes.
VERKV_DEVICE SketchShape coded_shape(const HeadView& head) {
  return {SketchKind::calibrated, head.sketch_dim, head.sketch_fine};
}

// Asks for the first codes of a block, each thread for a line.
VERKV_DEVICE void prefetch_codes(const Work& work) {
  const HeadView& head = work.head;
  const std::int64_t group_bytes = kSketchGroup * coded_shape(head).code_bytes();
  const auto groups = static_cast<int>((head.compressed + kSketchGroup - 1) / kSketchGroup);
  const std::int64_t at = kUnitGroups * work.units.begin * group_bytes + kLine * threadIdx.x;
  if (at < min(groups, kUnitGroups * work.units.end) * group_bytes) prefetch(head.codes + at);
}

// The sketched logits of the block's part of the compressed tokens.
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
  const bool asks = kLine * lane < unit_bytes;
  const std::uint8_t* ahead =
      codes + (std::int64_t{first_unit} + kUnitsAhead * kWarps) * unit_bytes + kLine * lane;
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
    if (asks && unit + kUnitsAhead * kWarps < whole_end) prefetch(ahead);
    ahead += std::int64_t{kWarps} * unit_bytes;
    // A group that is not there is read as the last one. All loads begin before the products.
    const int read = min(group, last_group);
    const std::int64_t token_read = kSketchGroup * read + lane / 4 % 2 * 8;
    const uint4 scales = __ldg(reinterpret_cast<const uint4*>(all_scales + token_read));
    uint4 odds = __ldg(reinterpret_cast<const uint4*>(all_odds + token_read));
    const Sums<kSets> sums = sketch_dots<kSets>(sketch, codes + std::int64_t{read} * group_bytes,
                                                work.columns, work.column_stride);
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
__global__ void __launch_bounds__(kThreads, 1) scores_kernel(const StepArguments arguments) {
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
  const int slot = step.slots[row];
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
    for (int p = 0; p < arguments.grid.attend_parts; ++p)
      ws.attended[static_cast<std::int64_t>(pair) * arguments.grid.attend_parts + p] = 0;
  }

  if constexpr (kSketched) prefetch_codes(work);
  load_queries<kHeads>(step, row, first, work.heads, work.query, work.query_stride);
  __syncthreads();
  float top[kSets];  // of the heads head_of(set)
#pragma unroll
  for (int set = 0; set < kSets; ++set) top[set] = minus_infinity();
  exact_products<kSketched, kHeads>(work, top);
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
  return launch(scores_kernel<kSketched, kHeads>, grid, kThreads,
                static_cast<std::size_t>(ScoreShared<kHeads>(layer).bytes()), stream, arguments);
}

}  // namespace

cudaError_t launch_scores(const StepArguments& arguments, cudaStream_t stream) {
  const LayerView& layer = arguments.view.layer;
  const int heads = layer.group;
  if (layer.sketch.kind == SketchKind::exact) {
    return heads <= kSetHeads ? launch_for<false, kSetHeads>(arguments, stream)
                              : launch_for<false, kScoreHeads>(arguments, stream);
  }
  if (heads == 1) return launch_for<true, 1>(arguments, stream);
  if (heads == 2) return launch_for<true, 2>(arguments, stream);
  return heads <= kSetHeads ? launch_for<true, kSetHeads>(arguments, stream)
                            : launch_for<true, kScoreHeads>(arguments, stream);
}

}  // namespace verkv::cuda
