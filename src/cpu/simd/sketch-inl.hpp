// Logits of all tokens from their sketch: sketch_logits.
//
// Four rows of a plane of codes are 4 bytes for each of 16 tokens. Put side by side (byte k of a
// 32-bit lane is row k of that lane's token) and mapped to level bytes, one lane's 4 bytes meet 4
// query bytes that are the same in all lanes: coordinates j, 4 + j, 8 + j, 12 + j of the block.
//
// The guard opens once for every instruction set.
#if defined(VERKV_SRC_CPU_SIMD_SKETCH_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef VERKV_SRC_CPU_SIMD_SKETCH_INL_HPP
#undef VERKV_SRC_CPU_SIMD_SKETCH_INL_HPP
#else
#define VERKV_SRC_CPU_SIMD_SKETCH_INL_HPP
#endif

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include <verkv/sketch.hpp>
#include <verkv/types.hpp>

#include "cpu/kernels.hpp"
#include "cpu/simd/lanes-inl.hpp"

// Whether four products of bytes are one instruction.
#undef VERKV_BYTE_DOT
#if HWY_TARGET <= HWY_AVX3_DL && HWY_ARCH_X86
#define VERKV_BYTE_DOT 1
#else
#define VERKV_BYTE_DOT 0
#endif

HWY_BEFORE_NAMESPACE();
namespace verkv::cpu {
namespace HWY_NAMESPACE {
#if VERKV_VECTORS
namespace {

// A block of codes: bytes of a lane, coordinates, bytes.
constexpr int kPlaneRows = 4;
constexpr int kBlockDims = 16;
constexpr int kBlockBytes = kPlaneRows * 16;
// Words of 32 bits with the query's share of one head, block and j.
constexpr int kQueryWords = VERKV_BYTE_DOT ? 1 : 2;
// Larger sketches take the scalar kernel. Twice the largest head size that a cache supports, and
// 32 KiB of the stack for the query.
constexpr int kMostSketchDim = 1024;

#if VERKV_BYTE_DOT

HWY_INLINE VU8 permute(VU8 v, VU8 index) { return VU8{_mm512_permutexvar_epi8(index.raw, v.raw)}; }
// table: 64 entries, a function of the low 4 bits of the index.
HWY_INLINE VU8 lookup(VU8 table, VU8 index) { return permute(table, index); }

#else

HWY_INLINE VU8 lookup(VU8 table, VU8 index) {
  return hn::TableLookupBytes(table, hn::And(index, hn::Set(du8, 0x0f)));
}

#endif

// yes where mask has a bit, no elsewhere.
HWY_INLINE VU8 select_bits(VU8 mask, VU8 yes, VU8 no) {
#if HWY_MAX_BYTES == 64
  return hn::IfVecThenElse(mask, yes, no);
#else
  return hn::Or(hn::And(mask, yes), hn::AndNot(mask, no));
#endif
}

// The 4 rows at p side by side. Tokens of the lanes: natural_order() below.
HWY_INLINE void load_rows(const std::uint8_t* p, VU8 (&out)[kParts]) {
#if VERKV_BYTE_DOT
  alignas(64) static constexpr std::uint8_t kIndex[64] = {
      0,  16, 32, 48, 1,  17, 33, 49, 2,  18, 34, 50, 3,  19, 35, 51, 4,  20, 36, 52, 5,  21,
      37, 53, 6,  22, 38, 54, 7,  23, 39, 55, 8,  24, 40, 56, 9,  25, 41, 57, 10, 26, 42, 58,
      11, 27, 43, 59, 12, 28, 44, 60, 13, 29, 45, 61, 14, 30, 46, 62, 15, 31, 47, 63};
  out[0] = permute(hn::LoadU(du8, p), hn::Load(du8, kIndex));
#elif HWY_MAX_BYTES == 64
  alignas(64) static constexpr std::int32_t kIndex[16] = {0, 4, 8,  12, 1, 5, 9,  13,
                                                          2, 6, 10, 14, 3, 7, 11, 15};
  alignas(16) static constexpr std::uint8_t kBytes[16] = {0, 4, 8,  12, 1, 5, 9,  13,
                                                          2, 6, 10, 14, 3, 7, 11, 15};
  const auto words =
      hn::TableLookupLanes(hn::BitCast(du32, hn::LoadU(du8, p)), hn::SetTableIndices(du32, kIndex));
  out[0] = hn::TableLookupBytes(hn::BitCast(du8, words), hn::LoadDup128(du8, kBytes));
#elif HWY_MAX_BYTES == 32
  alignas(32) static constexpr std::int32_t kIndex[8] = {0, 1, 4, 5, 2, 3, 6, 7};
  alignas(16) static constexpr std::uint8_t kBytes[16] = {0, 8,  1, 9,  2, 10, 3, 11,
                                                          4, 12, 5, 13, 6, 14, 7, 15};
  const auto pairs = [&](const std::uint8_t* two_rows) VERKV_LAMBDA {
    const auto words = hn::TableLookupLanes(hn::BitCast(du32, hn::LoadU(du8, two_rows)),
                                            hn::SetTableIndices(du32, kIndex));
    return hn::TableLookupBytes(hn::BitCast(du8, words), hn::LoadDup128(du8, kBytes));
  };
  const hn::Repartition<std::uint16_t, DU8> d16;
  const auto a = hn::BitCast(d16, pairs(p));
  const auto b = hn::BitCast(d16, pairs(p + 32));
  out[0] = hn::BitCast(du8, hn::InterleaveLower(d16, a, b));
  out[1] = hn::BitCast(du8, hn::InterleaveUpper(d16, a, b));
#else
  const hn::Repartition<std::uint16_t, DU8> d16;
  const VU8 row0 = hn::LoadU(du8, p);
  const VU8 row1 = hn::LoadU(du8, p + 16);
  const VU8 row2 = hn::LoadU(du8, p + 32);
  const VU8 row3 = hn::LoadU(du8, p + 48);
  const auto a0 = hn::BitCast(d16, hn::InterleaveLower(du8, row0, row1));
  const auto a1 = hn::BitCast(d16, hn::InterleaveUpper(du8, row0, row1));
  const auto b0 = hn::BitCast(d16, hn::InterleaveLower(du8, row2, row3));
  const auto b1 = hn::BitCast(d16, hn::InterleaveUpper(du8, row2, row3));
  out[0] = hn::BitCast(du8, hn::InterleaveLower(d16, a0, b0));
  out[1] = hn::BitCast(du8, hn::InterleaveUpper(d16, a0, b0));
  out[2] = hn::BitCast(du8, hn::InterleaveLower(d16, a1, b1));
  out[3] = hn::BitCast(du8, hn::InterleaveUpper(d16, a1, b1));
#endif
}

// Lane l of part p is token p * kN + l afterwards.
HWY_INLINE void natural_order([[maybe_unused]] VI32 (&x)[kParts]) {
#if HWY_MAX_BYTES == 32
  const VI32 low = x[0];
  const VI32 high = x[1];
  x[0] = hn::ConcatLowerLower(di32, high, low);
  x[1] = hn::ConcatUpperUpper(di32, high, low);
#endif
}

// The tables of one call as vectors.
template <int kBits>
struct Decoder {
  alignas(64) std::uint8_t table[2][64];

  HWY_INLINE explicit Decoder(const std::uint8_t* byte) {
    for (unsigned i = 0; i < 64; ++i) {
      if constexpr (kBits == 2) {
        table[0][i] = byte[i & 3u];
        table[1][i] = byte[(i >> 2) & 3u];
      } else {
        table[0][i] = byte[i & 15u];
        table[1][i] = 0;
      }
    }
  }

  // Level bytes of the 4 coordinates j of every byte of one block. high: the block's rows of the
  // high plane.
  HWY_INLINE void levels(const std::uint8_t* low, const std::uint8_t* high,
                         VU8 (&out)[4][kParts]) const {
    const hn::Repartition<std::uint16_t, DU8> d16;
    const auto right = [&](VU8 v, auto bits) VERKV_LAMBDA {
      return hn::BitCast(du8, hn::ShiftRight<bits>(hn::BitCast(d16, v)));
    };
    VU8 x[kParts];
    load_rows(low, x);
    constexpr std::integral_constant<int, 4> four;
    if constexpr (kBits == 2) {
      unroll<kParts>([&](auto part) VERKV_LAMBDA {
        // Two codes in the low 4 bits; then the other two.
        const VU8 first = hn::Load(du8, table[0]);
        const VU8 second = hn::Load(du8, table[1]);
        const VU8 rest = right(x[part], four);
        out[0][part] = lookup(first, x[part]);
        out[1][part] = lookup(second, x[part]);
        out[2][part] = lookup(first, rest);
        out[3][part] = lookup(second, rest);
      });
    } else {
      VU8 y[kParts];
      load_rows(high, y);
      unroll<kParts>([&](auto part) VERKV_LAMBDA {
        constexpr std::integral_constant<int, 2> two;
        const VU8 low_bits = hn::Set(du8, 0x33);
        // Codes 0 and 2 in the halves of each byte; then codes 1 and 3.
        const VU8 high_even = hn::BitCast(du8, hn::ShiftLeft<2>(hn::BitCast(d16, y[part])));
        const VU8 even = select_bits(low_bits, x[part], high_even);
        const VU8 odd = select_bits(low_bits, right(x[part], two), y[part]);
        const VU8 t = hn::Load(du8, table[0]);
        out[0][part] = lookup(t, even);
        out[1][part] = lookup(t, odd);
        out[2][part] = lookup(t, right(even, four));
        out[3][part] = lookup(t, right(odd, four));
      });
    }
  }
};

// Partial sums of one head and part.
struct DotSum {
  VI32 sum;
#if !VERKV_BYTE_DOT
  VI32 other;
#endif

  // An implicit constructor would be compiled for the wrong instruction set.
  HWY_INLINE DotSum() {
    sum = hn::Zero(di32);
#if !VERKV_BYTE_DOT
    other = hn::Zero(di32);
#endif
  }
  HWY_INLINE void add(VU8 levels, const std::int32_t* query) {
#if VERKV_BYTE_DOT
    sum = VI32{_mm512_dpbusd_epi32(sum.raw, levels.raw, hn::Set(di32, *query).raw)};
#else
    // Sums of two products of bytes do not fit into 16 bits, so widen first: bytes 0 and 2, then 1
    // and 3.
    const hn::Repartition<std::uint16_t, DU8> du;
    const hn::Repartition<std::int16_t, DU8> d;
    const auto v = hn::BitCast(du, levels);
    const auto even = hn::BitCast(d, hn::And(v, hn::Set(du, 0x00ff)));
    const auto odd = hn::BitCast(d, hn::ShiftRight<8>(v));
    sum = hn::ReorderWidenMulAccumulate(di32, even, hn::BitCast(d, hn::Set(di32, query[0])), sum,
                                        other);
    sum = hn::ReorderWidenMulAccumulate(di32, odd, hn::BitCast(d, hn::Set(di32, query[1])), sum,
                                        other);
#endif
  }
  HWY_INLINE VI32 total() const {
#if VERKV_BYTE_DOT
    return sum;
#else
    return hn::RearrangeToOddPlusEven(sum, other);
#endif
  }
};

// query[(block * 4 + j) * heads + h]: the words that DotSum::add takes.
template <int kHeads>
void arrange_query(int padded_dim, const std::int8_t* q, std::int64_t q_stride,
                   std::int32_t* query) {
  for (int begin = 0; begin < padded_dim; begin += kBlockDims) {
    for (int j = 0; j < 4; ++j) {
      for (int h = 0; h < kHeads; ++h) {
        std::int8_t byte[4];
        for (int k = 0; k < 4; ++k) {
          const int at = begin + 4 * k + j;
          byte[k] = at < padded_dim ? q[h * q_stride + at] : std::int8_t{0};
        }
#if VERKV_BYTE_DOT
        std::memcpy(query, byte, sizeof(byte));
#else
        const std::int16_t wide[4] = {byte[0], byte[2], byte[1], byte[3]};
        std::memcpy(query, wide, sizeof(wide));
#endif
        query += kQueryWords;
      }
    }
  }
}

// How the codes of a group of 16 tokens are cut into blocks of kPlaneRows rows.
struct Blocks {
  int rows;
  int fine;   // blocks with a high plane
  int whole;  // all blocks but an incomplete one at the end
  std::size_t rest_bytes;

  HWY_INLINE explicit Blocks(const SketchShape& shape)
      : rows(shape.low_bytes()),
        fine(shape.high_bytes() / kPlaneRows),
        whole(rows / kPlaneRows),
        rest_bytes(static_cast<std::size_t>(rows % kPlaneRows) * 16) {}
};

// Calls add(decoder, low, high) for every block of a group of 16 tokens. kCoarse: coordinates past
// SketchShape::fine exist.
template <bool kCoarse, class Add>
HWY_INLINE void each_block(const Blocks& blocks, const Decoder<4>& fine, const Decoder<2>& coarse,
                           const std::uint8_t* codes, Add&& add) {
  const std::uint8_t* low = codes;
  const std::uint8_t* high = codes + kSketchGroup * blocks.rows;
  int block = 0;
  for (; block < blocks.fine; ++block) {
    add(fine, low, high);
    low += kBlockBytes;
    high += kBlockBytes;
  }
  if constexpr (kCoarse) {
    for (; block < blocks.whole; ++block) {
      add(coarse, low, high);
      low += kBlockBytes;
    }
  }
  if (blocks.rest_bytes == 0) return;
  alignas(64) std::uint8_t last_low[kBlockBytes] = {};
  alignas(64) std::uint8_t last_high[kBlockBytes] = {};
  std::memcpy(last_low, low, blocks.rest_bytes);
  if constexpr (kCoarse) {
    add(coarse, last_low, last_high);
  } else {
    std::memcpy(last_high, high, blocks.rest_bytes);
    add(fine, last_low, last_high);
  }
}

// Dialect of verkv/sketch.hpp: sketch_dot, sketch_logit.
template <bool kCoarse, int kHeads>
void sketch_logits_of(const SketchShape& shape, const std::uint8_t* codes, const Positive16* scale,
                      const Positive16* odds, std::int64_t count, const std::int8_t* q,
                      std::int64_t q_stride, const HeadConstants* constants, float* out,
                      std::int64_t out_stride, float* out_largest) {
  // Enough independent sums to hide the latency of the dot products.
  constexpr int kSets = VERKV_BYTE_DOT ? (kHeads <= 2 ? 4 : 2) : 1;
  alignas(64) std::int32_t query[kMostSketchDim / 4 * kHeads * kQueryWords];
  arrange_query<kHeads>(shape.padded_dim(), q, q_stride, query);
  const Decoder<4> fine_decoder(kSketchLevels.byte);
  const Decoder<2> coarse_decoder(kSketchLevels.coarse_byte);
  const Blocks blocks(shape);
  const std::int64_t group_bytes = kSketchGroup * std::int64_t{shape.code_bytes()};

  VF top[kHeads][kParts];
  unroll<kHeads>([&](auto h) VERKV_LAMBDA {
    unroll<kParts>([&](auto part) VERKV_LAMBDA { top[h][part] = hn::Neg(infinity()); });
  });
  for (std::int64_t i = 0; i < count; i += kLanes, codes += group_bytes) {
    DotSum sum[kSets][kHeads][kParts];
    const std::int32_t* words = query;
    const auto add_block = [&](const auto& decode, const std::uint8_t* low,
                               const std::uint8_t* high) VERKV_LAMBDA {
      VU8 level[4][kParts];
      decode.levels(low, high, level);
      unroll<4>([&](auto j) VERKV_LAMBDA {
        unroll<kHeads>([&](auto h) VERKV_LAMBDA {
          unroll<kParts>([&](auto part) VERKV_LAMBDA {
            sum[j % kSets][h][part].add(level[j][part], words + (j * kHeads + h) * kQueryWords);
          });
        });
      });
      words += 4 * kHeads * kQueryWords;
    };
    each_block<kCoarse>(blocks, fine_decoder, coarse_decoder, codes, add_block);

    VI32 dot[kHeads][kParts];
    unroll<kHeads>([&](auto h) VERKV_LAMBDA {
      unroll<kParts>([&](auto part) VERKV_LAMBDA {
        VI32 all = hn::Set(di32, -kLevelBias * constants[h].query_sum);
        unroll<kSets>([&](auto set)
                          VERKV_LAMBDA { all = hn::Add(all, sum[set][h][part].total()); });
        dot[h][part] = all;
      });
      natural_order(dot[h]);
    });
    const auto finish = [&](auto part, auto lanes) VERKV_LAMBDA {
      const std::int64_t at = i + part * kN;
      const VF s = load(scale + at);
      const MF finite = lanes.only(hn::Lt(load(odds + at), infinity()));
      unroll<kHeads>([&](auto h) VERKV_LAMBDA {
        const VF x = hn::ConvertTo(df, dot[h][part]);
        const VF factor = hn::Set(df, constants[h].factor);
        const VF shift = hn::Set(df, constants[h].shift);
        const VF logit = hn::MulAdd(hn::Mul(factor, s), x, shift);
        lanes.store(logit, out + h * out_stride + at);
        raise(top[h][part], logit, finite);
      });
    };
    if (i + kLanes <= count) {
      unroll<kParts>([&](auto part) VERKV_LAMBDA { finish(part, AllLanes{}); });
    } else {
      unroll<kParts>([&](auto part)
                         VERKV_LAMBDA { finish(part, FirstLanes{first_lanes(count - i, part)}); });
    }
  }
  unroll<kHeads>([&](auto h) VERKV_LAMBDA {
    out_largest[h] = largest(top[h], -std::numeric_limits<float>::infinity()) + 0.0f;
  });
}

void sketch_logits(const SketchShape& shape, const std::uint8_t* codes, const Positive16* scale,
                   const Positive16* odds, std::int64_t count, const std::int8_t* q, int heads,
                   std::int64_t q_stride, const HeadConstants* constants, float* out,
                   std::int64_t out_stride, float* out_largest) {
  if (shape.padded_dim() > kMostSketchDim) {
    return scalar_kernels().sketch_logits(shape, codes, scale, odds, count, q, heads, q_stride,
                                          constants, out, out_stride, out_largest);
  }
  each_heads(heads, [&](int h, auto n) HWY_ATTR {
    const auto run = [&](auto coarse) HWY_ATTR {
      sketch_logits_of<coarse, n>(shape, codes, scale, odds, count, q + h * q_stride, q_stride,
                                  constants + h, out + h * out_stride, out_stride, out_largest + h);
    };
    if (shape.fine < shape.dim) {
      run(std::true_type{});
    } else {
      run(std::false_type{});
    }
  });
}

}  // namespace
#endif  // VERKV_VECTORS
}  // namespace HWY_NAMESPACE
}  // namespace verkv::cpu
HWY_AFTER_NAMESPACE();

#endif  // VERKV_SRC_CPU_SIMD_SKETCH_INL_HPP
