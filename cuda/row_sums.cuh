// Sums of weighted value rows by a block of the attention, four query heads (a tile) at a time: on
// the tensor cores where values have 16 bits, by fused multiply-adds where they have 32.
//
// Both kinds have the same functions; all threads of the block call them.
//   place(arrays, h, r)         where the weight of a row for a head is; kPlaces on, that of the
//                               32nd row after it
//   put(place, p)               writes it; rows are weighed up to a multiple of kRowStep
//   scale(factor)               of each head, before more is added
//   add(values, stride, ...)    `count` rows `stride` elements apart, in any memory; a row starts
//                               at a multiple of 16 bytes and is readable up to one
//   write(part)                 leaves [subset][head, padded to tiles][unit], a unit being four
//                               coordinates; subsets() says how many there are to be added up
#ifndef VERKV_CUDA_ROW_SUMS_CUH
#define VERKV_CUDA_ROW_SUMS_CUH

#include <cstdint>

#include "device_math.cuh"
#include "step_workspace.hpp"
#include "tuning.hpp"

namespace verkv::cuda {

// Rows that are weighed at once.
inline constexpr int kChunk = kAttentionThreads;
inline constexpr int kAttentionWarps = kAttentionThreads / 32;
// Rows of a product of the tensor cores.
inline constexpr int kProductRows = 16;
inline constexpr int kChunkProducts = kChunk / kProductRows;

// Weights of 16 rows as the threads of a warp hand them to the tensor cores: thread 4 g + t has
// those of limb g / 4 of head g % 4, and (in the second word of each pair) of limb 2 of the same
// head, of rows t, 4 + t (in a word), 8 + t and 12 + t, so that threads read neighbouring rows.
struct alignas(16) WeightLimbs {
  std::uint16_t of_thread[32][2][2][2];  // [thread][half of the rows][which limb][row]
};

// In shared memory.
struct WeightArrays {
  float4* number;     // [tile][kChunk]: logits, then, for multiply-adds, weights
  WeightLimbs* limb;  // [tile][kChunkProducts]; only for the tensor cores
};

VERKV_DEVICE int warp_index() { return static_cast<int>(threadIdx.x) / 32; }
VERKV_DEVICE int lane_index() { return static_cast<int>(threadIdx.x) % 32; }

// A number of 32 bits as a sum of three of 16: limb i counts for kUnit^i. The unit keeps the later
// ones of small numbers in the range of the type.
template <class Element>
struct Limb;
template <>
struct Limb<Half> {
  static constexpr float kUnit = 1.0f / 2048;
  VERKV_DEVICE static Half round(float x) {
    Half y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
  }
};
template <>
struct Limb<BFloat16> {
  static constexpr float kUnit = 1;
  VERKV_DEVICE static BFloat16 round(float x) {
    BFloat16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
  }
};

// c += a (limbs of heads, limb 2 twice; 16 tokens) * b (16 tokens, 8 coordinates).
VERKV_DEVICE void multiply(Half, float4& c, uint4 a, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w)
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
VERKV_DEVICE void multiply(BFloat16, float4& c, uint4 a, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w)
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// Halfword `i` of two words, side by side.
VERKV_DEVICE unsigned pair_halves(unsigned first, unsigned second, int i) {
  return __byte_perm(first, second, i == 0 ? 0x5410 : 0x7632);
}

// A warp has kColumns columns: 64 coordinates of a tile. Where there are fewer columns than warps,
// several subsets of rows are added up side by side.
template <class Element, int kColumns>
class TensorSums {
 public:
  static_assert(sizeof(Element) == 2, "the products of the tensor cores are of 16-bit elements");
  // Whether weights are handed over as WeightArrays::limb.
  static constexpr bool kHasLimbs = true;
  static constexpr int kRowStep = kProductRows;
  using Place = std::uint16_t*;
  static constexpr int kPlaces = 32 / kProductRows * sizeof(WeightLimbs) / sizeof(std::uint16_t);
  static constexpr int kWidth = 64;

  VERKV_DEVICE TensorSums(int tiles, int value_dim)
      : tiles_(tiles),
        value_dim_(value_dim),
        blocks_((value_dim + kWidth - 1) / kWidth),
        columns_(tiles * blocks_),
        subsets_(kColumns > 1 ? 1 : kAttentionWarps / columns_),
        subset_(kColumns > 1 ? 0 : warp_index() / columns_),
        column_(kColumns > 1 ? warp_index() : warp_index() % columns_) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int i = 0; i < 8; ++i) sum_[c][i] = make_float4(0, 0, 0, 0);
    }
  }

  VERKV_DEVICE int subsets() const { return subsets_; }

  VERKV_DEVICE static Place place(const WeightArrays& arrays, int h, int r) {
    WeightLimbs& to = arrays.limb[h / kTileHeads * kChunkProducts + r / kProductRows];
    const int q = r % kProductRows / 4;
    return &to.of_thread[h % kTileHeads * 4 + r % 4][q / 2][0][q % 2];
  }

  VERKV_DEVICE static void put(Place to, float p) {
    constexpr float kNext = 1 / Limb<Element>::kUnit;
    constexpr int kHalf = sizeof(WeightLimbs) / sizeof(std::uint16_t) / 2;  // of the threads
    const Element first = Limb<Element>::round(p);
    p = (p - as_float(first)) * kNext;
    const Element second = Limb<Element>::round(p);
    const Element third = Limb<Element>::round((p - as_float(second)) * kNext);
    to[0] = first.bits;
    to[kHalf] = second.bits;
    to[2] = third.bits;
    to[kHalf + 2] = third.bits;
  }

  VERKV_DEVICE void scale(const float* factor) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (!has(c)) break;
      const float x = factor[tile_of(c) * kTileHeads + lane_index() / 4 % kTileHeads];
      if (x == 1) continue;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float4& sum = sum_[c][i];
        sum = make_float4(sum.x * x, sum.y * x, sum.z * x, sum.w * x);
      }
    }
  }

  VERKV_DEVICE void add(const Element* values, int stride, int count, const WeightArrays& arrays) {
    const int g = lane_index() / 4;
    const int t = lane_index() % 4;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (!has(c)) break;
      // Coordinates that are not there are read as the last eight, and not written.
      const auto* at = reinterpret_cast<const unsigned char*>(
          values + min(block_of(c) * kWidth + 8 * g, (value_dim_ - 1) / 8 * 8));
      const unsigned bytes = stride * static_cast<unsigned>(sizeof(Element));
      const WeightLimbs* weight = arrays.limb + tile_of(c) * kChunkProducts;
#pragma unroll 1
      for (int product = subset_; product * kProductRows < count; product += subsets_) {
        uint4 x[4];  // of rows t, 4 + t, 8 + t and 12 + t; the weights of those beyond are zeros
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const unsigned r = min(product * kProductRows + 4 * q + t, count - 1);
          x[q] = *reinterpret_cast<const uint4*>(at + static_cast<std::uint64_t>(r) * bytes);
        }
        const uint4 limbs = reinterpret_cast<const uint4*>(weight + product)[lane_index()];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          multiply(Element{}, sum_[c][i], limbs,
                   pair_halves(word(x[0], i / 2), word(x[1], i / 2), i % 2),
                   pair_halves(word(x[2], i / 2), word(x[3], i / 2), i % 2));
        }
      }
    }
  }

  VERKV_DEVICE void write(float4* part) const {
    const int g = lane_index() / 4;
    const int t = lane_index() % 4;
    const int units = (value_dim_ + 3) / 4;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (!has(c)) break;
      float total[2][8];  // coordinates 16 t .. 16 t + 15 of head g, which is below 4
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 sum = sum_[c][i];
        constexpr float kUnit = Limb<Element>::kUnit;
        const float second_x = __shfl_xor_sync(kWholeWarp, sum.x, 16);
        const float second_y = __shfl_xor_sync(kWholeWarp, sum.y, 16);
        total[0][i] = fmaf(fmaf(sum.z, kUnit, second_x), kUnit, sum.x);
        total[1][i] = fmaf(fmaf(sum.w, kUnit, second_y), kUnit, sum.y);
      }
      const int first = block_of(c) * (kWidth / 4) + 4 * t;
      float4* to = part + ((subset_ * tiles_ + tile_of(c)) * kTileHeads + g) * units;
#pragma unroll
      for (int u = 0; u < 4; ++u) {
        const float* x = total[u / 2] + u % 2 * 4;
        if (g < kTileHeads && first + u < units)
          to[first + u] = make_float4(x[0], x[1], x[2], x[3]);
      }
    }
  }

 private:
  // The same in the whole warp.
  VERKV_DEVICE bool has(int c) const {
    return subset_ < subsets_ && column_ + c * kAttentionWarps < columns_;
  }
  VERKV_DEVICE int tile_of(int c) const { return (column_ + c * kAttentionWarps) / blocks_; }
  VERKV_DEVICE int block_of(int c) const { return (column_ + c * kAttentionWarps) % blocks_; }
  VERKV_DEVICE static unsigned word(const uint4& x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
  }

  int tiles_;
  int value_dim_;
  int blocks_;
  int columns_;
  int subsets_;
  int subset_;
  int column_;
  // Of limb g / 4 and head g % 4, then (z and w) limb 2 and head g: coordinates i of eights 2 t and
  // 2 t + 1.
  float4 sum_[kColumns][8];
};

// A thread has one column: four coordinates of a tile.
class FmaSums {
 public:
  static constexpr bool kHasLimbs = false;
  static constexpr int kRowStep = 1;
  using Place = float*;
  static constexpr int kPlaces = 32 * kTileHeads;

  VERKV_DEVICE FmaSums(int tiles, int value_dim)
      : units_((value_dim + 3) / 4),
        columns_(tiles * units_),
        subsets_(kAttentionThreads / columns_),
        subset_(static_cast<int>(threadIdx.x) / columns_),
        tile_(static_cast<int>(threadIdx.x) % columns_ / units_),
        unit_(static_cast<int>(threadIdx.x) % columns_ % units_) {
#pragma unroll
    for (int k = 0; k < kTileHeads; ++k) sum_[k] = make_float4(0, 0, 0, 0);
  }

  VERKV_DEVICE int subsets() const { return subsets_; }

  VERKV_DEVICE static Place place(const WeightArrays& arrays, int h, int r) {
    return reinterpret_cast<float*>(arrays.number + h / kTileHeads * kChunk + r) + h % kTileHeads;
  }

  VERKV_DEVICE static void put(Place to, float p) { *to = p; }

  VERKV_DEVICE void scale(const float* factor) {
#pragma unroll
    for (int k = 0; k < kTileHeads; ++k) {
      const float x = factor[tile_ * kTileHeads + k];
      sum_[k] = make_float4(sum_[k].x * x, sum_[k].y * x, sum_[k].z * x, sum_[k].w * x);
    }
  }

  VERKV_DEVICE void add(const float* values, int stride, int count, const WeightArrays& arrays) {
    if (subset_ >= subsets_) return;
    const float4* weight = arrays.number + tile_ * kChunk;
    const float* at = values + static_cast<std::int64_t>(subset_) * stride + 4 * unit_;
    const std::int64_t next = static_cast<std::int64_t>(subsets_) * stride;
#pragma unroll 4
    for (int r = subset_; r < count; r += subsets_) {
      const float4 p = weight[r];
      const float4 x = load_four(at);
      sum_[0] = fma_four(make_float4(p.x, p.x, p.x, p.x), x, sum_[0]);
      sum_[1] = fma_four(make_float4(p.y, p.y, p.y, p.y), x, sum_[1]);
      sum_[2] = fma_four(make_float4(p.z, p.z, p.z, p.z), x, sum_[2]);
      sum_[3] = fma_four(make_float4(p.w, p.w, p.w, p.w), x, sum_[3]);
      at += next;
    }
  }

  VERKV_DEVICE void write(float4* part) const {
    if (subset_ >= subsets_) return;
    const int tiles = columns_ / units_;
#pragma unroll
    for (int k = 0; k < kTileHeads; ++k)
      part[((subset_ * tiles + tile_) * kTileHeads + k) * units_ + unit_] = sum_[k];
  }

 private:
  int units_;
  int columns_;
  int subsets_;
  int subset_;
  int tile_;
  int unit_;
  float4 sum_[kTileHeads];
};

template <class Element, int kColumns>
struct RowSumsOf {
  using type = TensorSums<Element, kColumns>;
};
template <int kColumns>
struct RowSumsOf<float, kColumns> {
  using type = FmaSums;
};
template <class Element, int kColumns>
using RowSums = typename RowSumsOf<Element, kColumns>::type;

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_ROW_SUMS_CUH
