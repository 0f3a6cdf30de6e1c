// Integer products of queries with the codes of the sketch on the tensor cores, and the scales and
// odds that lie beside the codes.
#ifndef VERKV_CUDA_SKETCH_PRODUCTS_CUH
#define VERKV_CUDA_SKETCH_PRODUCTS_CUH

#include <cstdint>

#include <verkv/sketch.hpp>

#include "device_math.cuh"
#include "query.cuh"

namespace verkv::cuda {

// LevelRows without their bias are signed bytes, and of those with 4 bits the lower half is
// negative. Tables of their sizes have no sign bit, so that a selector of prmt whose bit 3 is set,
// which repeats that bit, gives zero: one look-up for the negative levels, whose sums are
// subtracted, and one for the others, and nothing to choose between the two.
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
inline constexpr unsigned kNegativeLow = negative_sizes(0);
inline constexpr unsigned kNegativeHigh = negative_sizes(4);
inline constexpr unsigned kPositiveLow = positive_sizes(8);
inline constexpr unsigned kPositiveHigh = positive_sizes(12);
inline constexpr unsigned kCoarseLevels = coarse_levels();
static_assert(((kNegativeLow | kNegativeHigh | kPositiveLow | kPositiveHigh) & 0x80808080u) == 0);

// Bytes of (low, high) by the four lowest nibbles of `selector`: the byte of its three lower bits,
// and if the fourth is set the sign of that in all bits. Higher nibbles are free.
VERKV_DEVICE unsigned pick_bytes(unsigned low, unsigned high, unsigned selector) {
  unsigned x;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(low), "r"(high), "r"(selector));
  return x;
}

// LevelRows of four coordinates of four tokens, as the rows of a product want them: coordinates 0
// and 2 of the first two tokens, the same of the others, coordinates 1 and 3 of the first two, of
// the others. So a row is a pair of tokens, nibbles need no sorting by token, and the two columns
// that a head has fill the eight of a product with four heads.
struct LevelRows {
  unsigned row[4];
};

VERKV_DEVICE LevelRows look_up(unsigned low, unsigned high, unsigned even, unsigned odd) {
  return {pick_bytes(low, high, even), pick_bytes(low, high, even >> 16),
          pick_bytes(low, high, odd), pick_bytes(low, high, odd >> 16)};
}

// c += a (16 pairs of tokens x 32) * b (32 x two columns of four heads), signed bytes; exact.
VERKV_DEVICE void multiply(int (&c)[4], const LevelRows& a, uint2 b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a.row[0]), "r"(a.row[1]), "r"(a.row[2]), "r"(a.row[3]), "r"(b.x), "r"(b.y));
}

inline constexpr unsigned kPairs = 0x33333333u;

// SketchSums over the coordinates of four tokens, twice, for one head of each set.
template <int kSets>
struct SketchSums {
  int of[kSets][2][4] = {};
};

// The planes of a thread's eight tokens, from its quad of the first step on, and its column.
struct SketchOperands {
  const std::uint8_t* low;
  const std::uint8_t* high;
  const uint2* column;
  int set_stride;  // pairs of words from a column to that of the next set
};

// Steps over 16 coordinates, `at` quads on: thread t of four takes the quad that is t further.
// `read`: the same for the planes. All loads come before the first use. `below`, for codes with 4
// bits: the sums of the sizes of negative levels.
template <int kSets, bool kFine, int kSteps>
VERKV_DEVICE void dot_steps(const SketchOperands& from, int at, int read, SketchSums<kSets>& sums,
                            SketchSums<kSets>* below = nullptr) {
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
      LevelRows levels;
      if constexpr (kFine) {
        const unsigned y = i == 0 ? high[s].x : high[s].y;
        // Nibbles of whole codes. For the other look-up bit 3 is inverted, and bit 2 with it: the
        // words of its table are exchanged.
        const unsigned even = (x & kPairs) | ((y << 2) & ~kPairs);
        const unsigned odd = ((x >> 2) & kPairs) | (y & ~kPairs);
        const LevelRows negative = look_up(kNegativeLow, kNegativeHigh, even, odd);
        levels = look_up(kPositiveHigh, kPositiveLow, even ^ ~kPairs, odd ^ ~kPairs);
#pragma unroll
        for (int set = 0; set < kSets; ++set) multiply(below->of[set][i], negative, query[set]);
      } else {
        levels = look_up(kCoarseLevels, kCoarseLevels, x & kPairs, (x >> 2) & kPairs);
      }
#pragma unroll
      for (int set = 0; set < kSets; ++set) multiply(sums.of[set][i], levels, query[set]);
    }
  }
}

// The integer scores of a warp's 64 tokens, less their bias. Thread (g, t) reads tokens 8g to 8g +
// 7, whose group starts at `group`, and gets their scores for head t of each set.
// Dialect of verkv/sketch.hpp: sketch_dot.
template <int kSets>
VERKV_DEVICE SketchSums<kSets> sketch_dots(const SketchShape& shape, const std::uint8_t* group,
                                           const uint2* columns, int column_stride) {
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int quads = shape.low_bytes();
  const int fine = shape.high_bytes();  // a multiple of four, or all
  const std::uint8_t* low = group + g % 2 * 8 + kSketchGroup * t;
  const SketchOperands from{low, low + kSketchGroup * quads, columns + g * column_stride + t,
                            8 * column_stride};
  // The last step may lack quads. Their queries are zero, so any are read.
  const auto there = [&](int at) { return min(at, quads - 1 - t); };
  SketchSums<kSets> sums;
  int at = 0;
  if (fine > 0) {
    SketchSums<kSets> below;
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

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_SKETCH_PRODUCTS_CUH
