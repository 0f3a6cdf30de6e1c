// The vectors of an instruction set as 16 lanes: groups of 16 tokens, and the order of sums.
//
// Everything that is summed in 16 lanes is held in kParts vectors of kN lanes, lane l in part l /
// kN: one vector of AVX-512, two of AVX2, four of NEON.
//
// The guard opens once for every instruction set.
#if defined(VERKV_SRC_CPU_SIMD_LANES_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef VERKV_SRC_CPU_SIMD_LANES_INL_HPP
#undef VERKV_SRC_CPU_SIMD_LANES_INL_HPP
#else
#define VERKV_SRC_CPU_SIMD_LANES_INL_HPP
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include <verkv/types.hpp>

#include "sum_order.hpp"

// Highway 1.0 looks for AVX512_VNNI before it chooses this target, but does not tell the compiler.
#if HWY_TARGET == HWY_AVX3_DL && HWY_MAJOR == 1 && HWY_MINOR == 0 && defined(HWY_TARGET_STR)
#undef HWY_TARGET_STR
#define HWY_TARGET_STR                                                       \
  HWY_TARGET_STR_AVX3                                                        \
  ",vpclmulqdq,avx512vbmi,avx512vbmi2,vaes,avxvnni,avx512vnni,avx512bitalg," \
  "avx512vpopcntdq"
#endif

// Whether an instruction set has what the kernels need. The sums are fused multiply-adds; without
// them it gets the scalar kernels.
#undef VERKV_VECTORS
#if HWY_NATIVE_FMA && !HWY_HAVE_SCALABLE
#define VERKV_VECTORS 1
#else
#define VERKV_VECTORS 0
#endif

// Inlined wherever it is called, so that arrays of vectors stay in registers.
#undef VERKV_LAMBDA
#define VERKV_LAMBDA HWY_ATTR __attribute__((always_inline))

HWY_BEFORE_NAMESPACE();
namespace verkv::cpu {
namespace HWY_NAMESPACE {
#if VERKV_VECTORS
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::CappedTag<float, kLanes>;
using DU32 = hn::Rebind<std::uint32_t, DF>;
using DI32 = hn::Rebind<std::int32_t, DF>;
using DU16 = hn::Rebind<std::uint16_t, DF>;
using VF = hn::Vec<DF>;
using VI32 = hn::Vec<DI32>;
using VU32 = hn::Vec<DU32>;
using MF = hn::Mask<DF>;
constexpr DF df;
constexpr DU32 du32;
constexpr DI32 di32;
constexpr DU16 du16;

constexpr int kN = static_cast<int>(hn::MaxLanes(DF{}));
constexpr int kParts = kLanes / kN;
// Byte vectors of the same width; kParts of them hold 4 bytes for each of 16 tokens.
using DU8 = hn::Repartition<std::uint8_t, DF>;
using VU8 = hn::Vec<DU8>;
constexpr DU8 du8;

// Whether arrays of vectors end up in registers, given that all indices are constants. Where the
// optimiser is off or a sanitizer watches memory they do not, and less code is generated for the
// sake of the compile time.
#if defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && \
    !HWY_IS_ASAN && !HWY_IS_TSAN && !HWY_IS_MSAN
constexpr bool kInRegisters = true;
#else
constexpr bool kInRegisters = false;
#endif

// Calls f(0), ..., f(kCount - 1).
template <int kCount, class F>
HWY_INLINE void unroll(F&& f) {
  if constexpr (kInRegisters) {
    [&]<int... i>(std::integer_sequence<int, i...>) VERKV_LAMBDA {
      (f(std::integral_constant<int, i>{}), ...);
    }
    (std::make_integer_sequence<int, kCount>{});
  } else {
    for (int i = 0; i < kCount; ++i) f(i);
  }
}

// ---- Groups of 16 tokens -----------------------------------------------------------------------

// All lanes of a part.
struct AllLanes {
  HWY_INLINE VF load(const float* p) const { return hn::LoadU(df, p); }
  HWY_INLINE void store(VF v, float* p) const { hn::StoreU(v, df, p); }
  HWY_INLINE MF only(MF m) const { return m; }
};

// The lanes below the end of the array. Loads give 0 in the others.
struct FirstLanes {
  MF mask;
  HWY_INLINE VF load(const float* p) const { return hn::MaskedLoad(mask, df, p); }
  HWY_INLINE void store(VF v, float* p) const { hn::BlendedStore(v, mask, df, p); }
  HWY_INLINE MF only(MF m) const { return hn::And(m, mask); }
};

HWY_INLINE MF first_lanes(std::int64_t count, int part) {
  const std::int64_t rest = std::clamp<std::int64_t>(count - part * kN, 0, kN);
  return hn::FirstN(df, static_cast<std::size_t>(rest));
}

// Calls f(i, part, lanes) for the parts of the tokens [begin, end), begin at a multiple of 16: the
// first token, which part of its group it is, AllLanes or FirstLanes.
template <class F>
HWY_INLINE void each_part(std::int64_t begin, std::int64_t end, F&& f) {
  std::int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    unroll<kParts>([&](auto part) VERKV_LAMBDA { f(i + part * kN, part, AllLanes{}); });
  }
  if (i < end) {
    unroll<kParts>([&](auto part) VERKV_LAMBDA {
      f(i + part * kN, part, FirstLanes{first_lanes(end - i, part)});
    });
  }
}

// 16 bits of a Positive16 or a bfloat16 to binary32.
template <int kShift, class T>
HWY_INLINE VF load_upper(const T* p) {
  const auto bits = hn::LoadU(du16, reinterpret_cast<const std::uint16_t*>(p));
  return hn::BitCast(df, hn::ShiftLeft<kShift>(hn::PromoteTo(du32, bits)));
}
HWY_INLINE VF load(const Positive16* p) { return load_upper<15>(p); }

HWY_INLINE VF infinity() { return hn::Set(df, std::numeric_limits<float>::infinity()); }

// ---- Folding of lanes --------------------------------------------------------------------------

// Adds the halves of every stretch of 2 * kHalf lanes of a and of b. The sums of a and of b
// alternate in the result, kHalf lanes each.
template <int kHalf>
HWY_INLINE VF fold_pair(VF a, VF b) {
  if constexpr (kHalf == 8) {
    return hn::Add(hn::ConcatUpperLower(df, b, a), hn::ConcatLowerUpper(df, b, a));
  } else if constexpr (kHalf == 4) {
    return hn::Add(hn::OddEvenBlocks(b, a), hn::SwapAdjacentBlocks(hn::OddEvenBlocks(a, b)));
  } else if constexpr (kHalf == 2) {
    const hn::Repartition<std::uint64_t, DF> du64;
    const auto x = hn::BitCast(du64, a);
    const auto y = hn::BitCast(du64, b);
    return hn::Add(hn::BitCast(df, hn::InterleaveLower(du64, x, y)),
                   hn::BitCast(df, hn::InterleaveUpper(du64, x, y)));
  } else {
    return hn::Add(hn::OddEven(b, a), hn::Shuffle2301(hn::OddEven(a, b)));
  }
}

// Folds kCount vectors, a power of two not above 2 * kHalf at the start, in the order of fold16:
// the sum of v[i] is in the lanes from i * kN / kCount on.
template <int kHalf, int kCount>
HWY_INLINE VF fold_tree(const VF (&v)[kCount]) {
  constexpr int kNext = kCount > 1 ? kCount / 2 : 1;
  VF half[kNext];
  unroll<kNext>([&](auto i)
                    VERKV_LAMBDA { half[i] = fold_pair<kHalf>(v[i], v[(i + kCount / 2)]); });
  if constexpr (kHalf > 1) {
    return fold_tree<kHalf / 2>(half);
  } else {
    return half[0];
  }
}

constexpr int power_of_two_from(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

// Dialect of sum_order.hpp: out[i] = fold16 of acc[i]. out has room for a power of two.
template <int kCount>
HWY_INLINE void fold(const VF (&acc)[kCount][kParts], float* out) {
  constexpr int kPadded = power_of_two_from(kCount);
  if constexpr (kPadded > kN) {
    VF low[kN][kParts];
    VF high[kCount - kN][kParts];
    unroll<kParts>([&](auto part) VERKV_LAMBDA {
      unroll<kN>([&](auto i) VERKV_LAMBDA { low[i][part] = acc[i][part]; });
      unroll<kCount - kN>([&](auto i) VERKV_LAMBDA { high[i][part] = acc[kN + i][part]; });
    });
    fold(low, out);
    fold(high, out + kN);
  } else {
    VF v[kPadded];
    unroll<kPadded>([&](auto i) VERKV_LAMBDA {
      const int at = i < kCount ? i : 0;
      if constexpr (kParts == 1) {
        v[i] = acc[at][0];
      } else if constexpr (kParts == 2) {
        v[i] = hn::Add(acc[at][0], acc[at][1]);
      } else {
        v[i] = hn::Add(hn::Add(acc[at][0], acc[at][2]), hn::Add(acc[at][1], acc[at][3]));
      }
    });
    if constexpr (kPadded == kN) {
      hn::StoreU(fold_tree<kN / 2>(v), df, out);
    } else {
      alignas(64) float sums[kN];
      hn::Store(fold_tree<kN / 2>(v), df, sums);
      unroll<kPadded>([&](auto i) VERKV_LAMBDA { out[i] = sums[i * (kN / kPadded)]; });
    }
  }
}

// total[i] += fold16 of acc[i], in double.
template <int kCount>
HWY_INLINE void add_folds(const VF (&acc)[kCount][kParts], double* total) {
  float sums[power_of_two_from(kCount)];
  fold(acc, sums);
  for (int i = 0; i < kCount; ++i) total[i] += static_cast<double>(sums[i]);
}

template <int kCount>
HWY_INLINE void zero(VF (&acc)[kCount][kParts]) {
  unroll<kCount>([&](auto i) VERKV_LAMBDA {
    unroll<kParts>([&](auto part) VERKV_LAMBDA { acc[i][part] = hn::Zero(df); });
  });
}

// The largest lane; no lane is NaN.
HWY_INLINE float largest(const VF (&acc)[kParts], float start) {
  alignas(64) float lane[kLanes];
  unroll<kParts>([&](auto part) VERKV_LAMBDA { hn::Store(acc[part], df, lane + part * kN); });
  float result = start;
  for (const float x : lane) result = x > result ? x : result;
  return result;
}

// The larger of x and top in the lanes of mask, top elsewhere and where x is NaN.
HWY_INLINE void raise(VF& top, VF x, MF mask) {
#if HWY_ARCH_X86
  top = hn::IfThenElse(mask, hn::Max(x, top), top);  // Max returns its second operand beside NaN
#else
  top = hn::IfThenElse(hn::And(mask, hn::Gt(x, top)), x, top);
#endif
}

// Calls f(head, n) with compile-time n of 4 heads at a time, then the rest.
template <class F>
HWY_INLINE void each_heads(int heads, F&& f) {
  int h = 0;
  for (; h + 4 <= heads; h += 4) f(h, std::integral_constant<int, 4>{});
  if constexpr (kInRegisters) {
    switch (heads - h) {
      case 1:
        f(h, std::integral_constant<int, 1>{});
        break;
      case 2:
        f(h, std::integral_constant<int, 2>{});
        break;
      case 3:
        f(h, std::integral_constant<int, 3>{});
        break;
      default:
        break;
    }
  } else {
    for (; h < heads; ++h) f(h, std::integral_constant<int, 1>{});
  }
}

}  // namespace
#endif  // VERKV_VECTORS
}  // namespace HWY_NAMESPACE
}  // namespace verkv::cpu
HWY_AFTER_NAMESPACE();

#endif  // VERKV_SRC_CPU_SIMD_LANES_INL_HPP
