// The kernels over vectors, compiled once for every instruction set and chosen at run time.
//
// Everything that kernels.hpp sums in 16 lanes is held in kParts vectors of kN lanes, lane l in
// part l / kN: one vector of AVX-512, two of AVX2, four of NEON. The sums need a fused
// multiply-add, so instruction sets without one get the scalar kernels.

// Arm has one (HWY_NEON), but the tests of these kernels have not passed there yet.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_NEON | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif
#ifndef HWY_WANT_AVX3_DL
#define HWY_WANT_AVX3_DL
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels_simd.cpp"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include <verkv/attention.hpp>
#include <verkv/sketch.hpp>
#include <verkv/types.hpp>

#include "cpu/kernels.hpp"

// Highway 1.0 looks for AVX512_VNNI before it chooses this target, but does not tell the compiler.
#if HWY_TARGET == HWY_AVX3_DL && HWY_MAJOR == 1 && HWY_MINOR == 0 && defined(HWY_TARGET_STR)
#undef HWY_TARGET_STR
#define HWY_TARGET_STR                                                       \
  HWY_TARGET_STR_AVX3                                                        \
  ",vpclmulqdq,avx512vbmi,avx512vbmi2,vaes,avxvnni,avx512vnni,avx512bitalg," \
  "avx512vpopcntdq"
#endif

HWY_BEFORE_NAMESPACE();
namespace verkv::cpu {
namespace HWY_NAMESPACE {

#if !HWY_NATIVE_FMA || HWY_HAVE_SCALABLE

const Kernels* target_kernels() { return &scalar_kernels(); }

#else

namespace {

namespace hn = hwy::HWY_NAMESPACE;

// Inlined wherever it is called, so that arrays of vectors stay in registers.
#define VERKV_LAMBDA HWY_ATTR __attribute__((always_inline))

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

// ---- Groups of 16 tokens
// ----------------------------------------------------------------------------

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
HWY_INLINE VF load(const BFloat16* p) { return load_upper<16>(p); }

HWY_INLINE VF infinity() { return hn::Set(df, std::numeric_limits<float>::infinity()); }

// ---- Folding of lanes
// -------------------------------------------------------------------------------

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

// ---- Rows
// -------------------------------------------------------------------------------------------

HWY_INLINE VF load(const float* p) { return hn::LoadU(df, p); }
HWY_INLINE VF load(const Half* p) {
  const hn::Rebind<hwy::float16_t, DF> df16;
  return hn::PromoteTo(df, hn::LoadU(df16, reinterpret_cast<const hwy::float16_t*>(p)));
}

// The first `rest` of 16 elements, 0 after them. Reads no others.
template <class T>
HWY_INLINE void load_first(const T* p, int rest, VF (&out)[kParts]) {
#if HWY_MAX_BYTES == 64
  if constexpr (sizeof(T) == 2) {
    const auto mask = hn::FirstN(du16, static_cast<std::size_t>(rest));
    const auto bits = hn::MaskedLoad(mask, du16, reinterpret_cast<const std::uint16_t*>(p));
    if constexpr (std::is_same_v<T, Half>) {
      out[0] = hn::PromoteTo(df, hn::BitCast(hn::Rebind<hwy::float16_t, DF>(), bits));
    } else {
      out[0] = hn::BitCast(df, hn::ShiftLeft<16>(hn::PromoteTo(du32, bits)));
    }
  } else {
    out[0] = hn::MaskedLoad(first_lanes(rest, 0), df, p);
  }
#else
  T copy[kLanes] = {};
  std::memcpy(copy, p, static_cast<std::size_t>(rest) * sizeof(T));
  unroll<kParts>([&](auto part) VERKV_LAMBDA { out[part] = load(copy + part * kN); });
#endif
}

// Rows of a list lie anywhere, so the machine does not load them ahead by itself.
template <class T>
HWY_INLINE void prefetch(const T* p, int elements) {
  constexpr int kLine = 64 / static_cast<int>(sizeof(T));
  for (int j = 0; j < elements; j += kLine) hwy::Prefetch(p + j);
}

template <class T, int kHeads>
void dot_rows_of(const Rows& rows, const std::uint32_t* index, std::int64_t count, const float* q,
                 std::int64_t q_stride, float* out, std::int64_t out_stride) {
  // As many rows at a time as there are registers for their sums.
  constexpr int kHeadsUp = power_of_two_from(kHeads);
  constexpr int kRows = (kN == kLanes ? 16 : 4) / kHeadsUp;
  const T* data = static_cast<const T*>(rows.data);
  const int whole = rows.dim / kLanes * kLanes;
  const int rest = rows.dim - whole;
  for (std::int64_t i = 0; i < count; i += kRows) {
    const T* row[kRows];
    unroll<kRows>([&](auto r) VERKV_LAMBDA {
      const std::int64_t at = i + r < count ? i + r : count - 1;
      row[r] = data + (index != nullptr ? std::int64_t{index[at]} : at) * rows.stride;
    });
    if (index != nullptr && i + 3 * kRows <= count) {
      for (std::int64_t r = i + 2 * kRows; r < i + 3 * kRows; ++r) {
        prefetch(data + std::int64_t{index[r]} * rows.stride, rows.dim);
      }
    }
    VF acc[kHeads * kRows][kParts];
    zero(acc);
    for (int j = 0; j < whole; j += kLanes) {
      unroll<kParts>([&](auto part) VERKV_LAMBDA {
        VF x[kRows];
        unroll<kRows>([&](auto r) VERKV_LAMBDA { x[r] = load(row[r] + j + part * kN); });
        unroll<kHeads>([&](auto h) VERKV_LAMBDA {
          const VF y = hn::LoadU(df, q + h * q_stride + j + part * kN);
          unroll<kRows>([&](auto r) VERKV_LAMBDA {
            acc[h * kRows + r][part] = hn::MulAdd(x[r], y, acc[h * kRows + r][part]);
          });
        });
      });
    }
    if (rest != 0) {
      unroll<kRows>([&](auto r) VERKV_LAMBDA {
        VF x[kParts];
        load_first(row[r] + whole, rest, x);
        unroll<kParts>([&](auto part) VERKV_LAMBDA {
          const MF mask = first_lanes(rest, part);
          unroll<kHeads>([&](auto h) VERKV_LAMBDA {
            const VF y = hn::LoadU(df, q + h * q_stride + whole + part * kN);
            VF& sum = acc[h * kRows + r][part];
            sum = hn::IfThenElse(mask, hn::MulAdd(x[part], y, sum), sum);
          });
        });
      });
    }
    float sums[kHeadsUp * kRows];
    fold(acc, sums);
    if (i + kRows <= count) {
      unroll<kHeads>([&](auto h) VERKV_LAMBDA {
        std::memcpy(out + h * out_stride + i, sums + h * kRows, kRows * sizeof(float));
      });
    } else {
      for (int h = 0; h < kHeads; ++h) {
        for (std::int64_t r = 0; i + r < count; ++r)
          out[h * out_stride + i + r] = sums[h * kRows + r];
      }
    }
  }
}

template <class T>
void dot_rows_of(const Rows& rows, const std::uint32_t* index, std::int64_t count, const float* q,
                 int heads, std::int64_t q_stride, float* out, std::int64_t out_stride) {
  each_heads(heads, [&](int h, auto n) HWY_ATTR {
    dot_rows_of<T, n>(rows, index, count, q + h * q_stride, q_stride, out + h * out_stride,
                      out_stride);
  });
}

void dot_rows(const Rows& rows, const std::uint32_t* index, std::int64_t count, const float* q,
              int heads, std::int64_t q_stride, float* out, std::int64_t out_stride) {
  switch (rows.type) {
    case DType::f32:
      return dot_rows_of<float>(rows, index, count, q, heads, q_stride, out, out_stride);
    case DType::f16:
      return dot_rows_of<Half>(rows, index, count, q, heads, q_stride, out, out_stride);
    case DType::bf16:
      return dot_rows_of<BFloat16>(rows, index, count, q, heads, q_stride, out, out_stride);
  }
}

// One block of rows, the coordinates from j on that fit into kVectors vectors.
template <class T, int kHeads, int kVectors>
void add_weighted(const Rows& rows, const std::uint32_t* index, std::int64_t begin,
                  std::int64_t end, const float* c, std::int64_t c_stride, int j, float* out,
                  std::int64_t out_stride) {
  constexpr std::int64_t kAhead = 8;
  const T* data = static_cast<const T*>(rows.data) + j;
  VF acc[kHeads][kVectors];
  unroll<kHeads>([&](auto h) VERKV_LAMBDA {
    unroll<kVectors>([&](auto k) VERKV_LAMBDA { acc[h][k] = hn::Zero(df); });
  });
  for (std::int64_t i = begin; i < end; ++i) {
    const T* row = data + (index != nullptr ? std::int64_t{index[i]} : i) * rows.stride;
    if (index != nullptr && i + kAhead < end) {
      prefetch(data + std::int64_t{index[i + kAhead]} * rows.stride, kVectors * kN);
    }
    VF factor[kHeads];
    unroll<kHeads>([&](auto h) VERKV_LAMBDA { factor[h] = hn::Set(df, c[h * c_stride + i]); });
    unroll<kVectors>([&](auto k) VERKV_LAMBDA {
      const VF x = load(row + k * kN);
      unroll<kHeads>([&](auto h) VERKV_LAMBDA { acc[h][k] = hn::MulAdd(factor[h], x, acc[h][k]); });
    });
  }
  unroll<kHeads>([&](auto h) VERKV_LAMBDA {
    unroll<kVectors>([&](auto k) VERKV_LAMBDA {
      float* at = out + h * out_stride + j + k * kN;
      hn::StoreU(hn::Add(hn::LoadU(df, at), acc[h][k]), df, at);
    });
  });
}

// The last dim % kN coordinates of one block of rows.
template <class T, int kHeads>
void add_weighted_rest(const Rows& rows, const std::uint32_t* index, std::int64_t begin,
                       std::int64_t end, const float* c, std::int64_t c_stride, int j, float* out,
                       std::int64_t out_stride) {
  const T* data = static_cast<const T*>(rows.data) + j;
  const int rest = rows.dim - j;
  VF acc[kHeads];
  unroll<kHeads>([&](auto h) VERKV_LAMBDA { acc[h] = hn::Zero(df); });
  for (std::int64_t i = begin; i < end; ++i) {
    VF x[kParts];
    load_first(data + (index != nullptr ? std::int64_t{index[i]} : i) * rows.stride, rest, x);
    unroll<kHeads>([&](auto h) VERKV_LAMBDA {
      acc[h] = hn::MulAdd(hn::Set(df, c[h * c_stride + i]), x[0], acc[h]);
    });
  }
  unroll<kHeads>([&](auto h) VERKV_LAMBDA {
    alignas(64) float sums[kN];
    hn::Store(acc[h], df, sums);
    for (int k = 0; k < rest; ++k) out[h * out_stride + j + k] += sums[k];
  });
}

template <class T, int kHeads>
void weighted_rows_of(const Rows& rows, const std::uint32_t* index, std::int64_t count,
                      const float* c, std::int64_t c_stride, float* out, std::int64_t out_stride) {
  constexpr std::int64_t kBlock = 256;
  constexpr int kVectors = (kN == kLanes ? 16 : 8) / power_of_two_from(kHeads);
  constexpr int kMost = kVectors < 8 ? kVectors : 8;
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const std::int64_t end = begin + kBlock < count ? begin + kBlock : count;
    int j = 0;
    for (; j + kMost * kN <= rows.dim; j += kMost * kN) {
      add_weighted<T, kHeads, kMost>(rows, index, begin, end, c, c_stride, j, out, out_stride);
    }
    if constexpr (kMost > 4) {
      for (; j + 4 * kN <= rows.dim; j += 4 * kN) {
        add_weighted<T, kHeads, 4>(rows, index, begin, end, c, c_stride, j, out, out_stride);
      }
    }
    if constexpr (kMost > 2) {
      for (; j + 2 * kN <= rows.dim; j += 2 * kN) {
        add_weighted<T, kHeads, 2>(rows, index, begin, end, c, c_stride, j, out, out_stride);
      }
    }
    for (; j + kN <= rows.dim; j += kN) {
      add_weighted<T, kHeads, 1>(rows, index, begin, end, c, c_stride, j, out, out_stride);
    }
    if (j < rows.dim) {
      add_weighted_rest<T, kHeads>(rows, index, begin, end, c, c_stride, j, out, out_stride);
    }
  }
}

template <class T>
void weighted_rows_of(const Rows& rows, const std::uint32_t* index, std::int64_t count,
                      const float* c, int heads, std::int64_t c_stride, float* out,
                      std::int64_t out_stride) {
  each_heads(heads, [&](int h, auto n) HWY_ATTR {
    weighted_rows_of<T, n>(rows, index, count, c + h * c_stride, c_stride, out + h * out_stride,
                           out_stride);
  });
}

void weighted_rows(const Rows& rows, const std::uint32_t* index, std::int64_t count, const float* c,
                   int heads, std::int64_t c_stride, float* out, std::int64_t out_stride) {
  switch (rows.type) {
    case DType::f32:
      return weighted_rows_of<float>(rows, index, count, c, heads, c_stride, out, out_stride);
    case DType::f16:
      return weighted_rows_of<Half>(rows, index, count, c, heads, c_stride, out, out_stride);
    case DType::bf16:
      return weighted_rows_of<BFloat16>(rows, index, count, c, heads, c_stride, out, out_stride);
  }
}

// ---- Sketch
// ----------------------------------------------------------------------------------------- Four
// rows of a plane are 4 bytes for each of 16 tokens. Put side by side (byte k of a 32-bit lane is
// row k of that lane's token) and mapped to level bytes, one lane's 4 bytes meet 4 query bytes that
// are the same in all lanes: coordinates j, 4 + j, 8 + j, 12 + j of the block.

#if HWY_TARGET <= HWY_AVX3_DL && HWY_ARCH_X86
#define VERKV_BYTE_DOT 1
#else
#define VERKV_BYTE_DOT 0
#endif

constexpr int kBlockRows = 4;
constexpr int kBlockDims = 16;
constexpr int kBlockBytes = kBlockRows * 16;
// Words of 32 bits with the query's share of one head, block and j.
constexpr int kQueryWords = VERKV_BYTE_DOT ? 1 : 2;
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

// kCoarse: coordinates past SketchShape::fine exist.
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
  const int rows = shape.low_bytes();
  const int fine_blocks = shape.high_bytes() / kBlockRows;
  const int whole_blocks = rows / kBlockRows;
  const std::size_t rest_bytes = static_cast<std::size_t>(rows % kBlockRows) * 16;
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
    const std::uint8_t* low = codes;
    const std::uint8_t* high = codes + kSketchGroup * rows;
    int block = 0;
    for (; block < fine_blocks; ++block) {
      add_block(fine_decoder, low, high);
      low += kBlockBytes;
      high += kBlockBytes;
    }
    if constexpr (kCoarse) {
      for (; block < whole_blocks; ++block) {
        add_block(coarse_decoder, low, high);
        low += kBlockBytes;
      }
    }
    if (rest_bytes != 0) {
      alignas(64) std::uint8_t last_low[kBlockBytes] = {};
      alignas(64) std::uint8_t last_high[kBlockBytes] = {};
      std::memcpy(last_low, low, rest_bytes);
      if constexpr (kCoarse) {
        add_block(coarse_decoder, last_low, last_high);
      } else {
        std::memcpy(last_high, high, rest_bytes);
        add_block(fine_decoder, last_low, last_high);
      }
    }

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

// ---- Weights and their sums
// -------------------------------------------------------------------------

// Dialect of verkv/attention.hpp: weight_exp where `keep`, 0 elsewhere.
HWY_INLINE VF weight_exp(VF x, MF keep) {
  using namespace exp_terms;
  const MF below = hn::Lt(x, hn::Set(df, kLowest));
  const VF highest = hn::Set(df, kHighest);
#if HWY_ARCH_X86
  const VF top = hn::Min(highest, x);  // NaN where x is
#else
  const VF top = hn::IfThenElse(hn::Gt(x, highest), highest, x);
#endif
  // 127 more than weight_exp adds, so that the low bits are a biased exponent. It moves no
  // rounding: the product is never half-way between integers, as the constant has 24 significant
  // bits.
  const VF magic = hn::Set(df, kRounder + 127.0f);
  const VF shifted = hn::MulAdd(top, hn::Set(df, kPerLog2), magic);
  const VF n = hn::Sub(shifted, magic);
  VF r = hn::MulAdd(n, hn::Set(df, -kLog2High), top);
  r = hn::MulAdd(n, hn::Set(df, -kLog2Low), r);
  VF p = hn::Set(df, kC7);
  p = hn::MulAdd(p, r, hn::Set(df, kC6));
  p = hn::MulAdd(p, r, hn::Set(df, kC5));
  p = hn::MulAdd(p, r, hn::Set(df, kC4));
  p = hn::MulAdd(p, r, hn::Set(df, kC3));
  p = hn::MulAdd(p, r, hn::Set(df, kC2));
  const VF y = hn::Add(hn::MulAdd(p, hn::Mul(r, r), r), hn::Set(df, 1.0f));
  const VF power = hn::BitCast(df, hn::ShiftLeft<23>(hn::BitCast(du32, shifted)));
  return hn::IfThenElseZero(hn::AndNot(below, keep), hn::Mul(y, power));
}

template <int kHeads>
void weights_of(float* w, std::int64_t stride, const Positive16* odds, std::int64_t count,
                const float* shift, double* out_sum) {
  double total[kHeads] = {};
  for (std::int64_t begin = 0; begin < count; begin += kBlockTokens) {
    VF lane[kHeads][kParts];
    zero(lane);
    each_part(begin, std::min(begin + kBlockTokens, count),
              [&](std::int64_t i, auto part, auto lanes) VERKV_LAMBDA {
                const MF finite = lanes.only(hn::Lt(load(odds + i), infinity()));
                unroll<kHeads>([&](auto h) VERKV_LAMBDA {
                  float* at = w + h * stride + i;
                  const VF x = hn::Sub(lanes.load(at), hn::Set(df, shift[h]));
                  const VF weight = weight_exp(x, finite);
                  lanes.store(weight, at);
                  lane[h][part] = hn::Add(lane[h][part], weight);
                });
              });
    add_folds(lane, total);
  }
  for (int h = 0; h < kHeads; ++h) out_sum[h] = total[h];
}

void weights(float* w, std::int64_t stride, const Positive16* odds, std::int64_t count, int heads,
             const float* shift, double* out_sum) {
  each_heads(heads, [&](int h, auto n) HWY_ATTR {
    weights_of<n>(w + h * stride, stride, odds, count, shift + h, out_sum + h);
  });
}

template <int kHeads>
void beta_sums_of(const float* w, std::int64_t stride, const Positive16* odds, std::int64_t count,
                  const float* beta, double* out_weight, double* out_odds) {
  double total[2 * kHeads] = {};
  for (std::int64_t begin = 0; begin < count; begin += kBlockTokens) {
    VF lane[2 * kHeads][kParts];
    zero(lane);
    each_part(begin, std::min(begin + kBlockTokens, count),
              [&](std::int64_t i, auto part, auto lanes) VERKV_LAMBDA {
                const VF rho = load(odds + i);
                unroll<kHeads>([&](auto h) VERKV_LAMBDA {
                  const VF x = lanes.load(w + h * stride + i);
                  const MF in = lanes.only(hn::Gt(x, hn::Mul(hn::Set(df, beta[h]), rho)));
                  VF& weight = lane[h][part];
                  VF& odd = lane[kHeads + h][part];
                  weight = hn::IfThenElse(in, hn::Add(weight, x), weight);
                  odd = hn::IfThenElse(in, hn::Add(odd, rho), odd);
                });
              });
    add_folds(lane, total);
  }
  for (int h = 0; h < kHeads; ++h) {
    out_weight[h] = total[h];
    out_odds[h] = total[kHeads + h];
  }
}

void beta_sums(const float* w, std::int64_t stride, const Positive16* odds, std::int64_t count,
               int heads, const float* beta, double* out_weight, double* out_odds) {
  each_heads(heads, [&](int h, auto n) HWY_ATTR {
    beta_sums_of<n>(w + h * stride, stride, odds, count, beta + h, out_weight + h, out_odds + h);
  });
}

// Dialect of verkv/certificate.hpp: variance_term, jump_term.
struct Tail {
  VF variance;
  VF jump;
};
HWY_INLINE Tail tail_of(VF w, VF rho, VF beta) {
  const MF inside = hn::Le(w, hn::Mul(beta, rho));
  const VF t = hn::Div(w, rho);
  const VF variance = hn::IfThenElse(inside, hn::Mul(w, t), hn::Mul(hn::Mul(beta, beta), rho));
  const VF clipped = hn::IfThenElse(inside, t, beta);
  const VF jump = hn::IfThenElse(hn::Gt(rho, hn::Set(df, 1.0f)), hn::Mul(clipped, rho), clipped);
  return {variance, jump};
}

template <int kHeads>
void tail_sums_of(const float* w, std::int64_t stride, const Positive16* odds, std::int64_t count,
                  const float* beta, double* out_variance, float* out_jump) {
  double total[kHeads] = {};
  VF jump[kHeads][kParts];
  zero(jump);
  for (std::int64_t begin = 0; begin < count; begin += kBlockTokens) {
    VF lane[kHeads][kParts];
    zero(lane);
    each_part(begin, std::min(begin + kBlockTokens, count),
              [&](std::int64_t i, auto part, auto lanes) VERKV_LAMBDA {
                const VF rho = load(odds + i);
                unroll<kHeads>([&](auto h) VERKV_LAMBDA {
                  const VF x = lanes.load(w + h * stride + i);
                  const MF positive = hn::Gt(x, hn::Zero(df));
                  const Tail tail = tail_of(x, rho, hn::Set(df, beta[h]));
                  VF& variance = lane[h][part];
                  variance = hn::IfThenElse(positive, hn::Add(variance, tail.variance), variance);
                  raise(jump[h][part], tail.jump, positive);
                });
              });
    add_folds(lane, total);
  }
  unroll<kHeads>([&](auto h) VERKV_LAMBDA {
    out_variance[h] = total[h];
    out_jump[h] = largest(jump[h], 0.0f);
  });
}

void tail_sums(const float* w, std::int64_t stride, const Positive16* odds, std::int64_t count,
               int heads, const float* beta, double* out_variance, float* out_jump) {
  each_heads(heads, [&](int h, auto n) HWY_ATTR {
    tail_sums_of<n>(w + h * stride, stride, odds, count, beta + h, out_variance + h, out_jump + h);
  });
}

// ---- The plan
// ---------------------------------------------------------------------------------------

// Dialect of verkv/fetch_plan.hpp: fetch_worth, where w > 0.
HWY_INLINE VF fetch_worth(VF w, VF rho, VF beta) {
  const VF edge = hn::Mul(beta, rho);
  const VF inside = hn::Mul(w, hn::Div(w, rho));
  // Twice w is exact, so this is the difference rounded once.
  const VF outside = hn::Mul(beta, hn::MulSub(hn::Set(df, 2.0f), w, edge));
  return hn::IfThenElse(hn::Le(w, edge), inside, outside);
}

HWY_INLINE VU32 positions(std::int64_t first) {
  return hn::Iota(du32, static_cast<std::uint32_t>(first));
}
HWY_INLINE std::int64_t count_true(MF mask) {
  return static_cast<std::int64_t>(hn::CountTrue(df, mask));
}

#if HWY_TARGET == HWY_AVX2
// Lane numbers of the set bits of every mask of 8 lanes, ascending. Highway has the same table, but
// as a local constant that GCC copies to the stack for every use.
struct CompressTable {
  alignas(64) std::uint8_t lane[256][8] = {};
};
constexpr CompressTable compress_table() {
  CompressTable table;
  for (unsigned bits = 0; bits < 256; ++bits) {
    int at = 0;
    for (unsigned lane = 0; lane < 8; ++lane) {
      if ((bits >> lane & 1u) != 0) table.lane[bits][at++] = static_cast<std::uint8_t>(lane);
    }
  }
  return table;
}
constexpr CompressTable kCompressTable = compress_table();
#endif

// Moves the lanes of a mask to the front of a vector.
class Compressor {
 public:
#if HWY_TARGET == HWY_AVX2
  HWY_INLINE explicit Compressor(MF mask) {
    std::uint8_t bits[8] = {};
    hn::StoreMaskBits(df, mask, bits);
    const hn::Rebind<std::uint8_t, DF> d8;
    lanes_ =
        hn::IndicesFromVec(du32, hn::PromoteTo(du32, hn::LoadU(d8, kCompressTable.lane[bits[0]])));
  }
  // Whole vectors are written; what follows the lanes of the mask is arbitrary.
  HWY_INLINE void store(VU32 v, std::uint32_t* p) const {
    hn::StoreU(hn::TableLookupLanes(v, lanes_), du32, p);
  }
  HWY_INLINE void store(VF v, float* p) const {
    hn::StoreU(hn::BitCast(df, hn::TableLookupLanes(hn::BitCast(du32, v), lanes_)), df, p);
  }

 private:
  decltype(hn::IndicesFromVec(du32, hn::Zero(du32))) lanes_;
#else
  HWY_INLINE explicit Compressor(MF mask) : mask_(mask) {}
  HWY_INLINE void store(VU32 v, std::uint32_t* p) const {
    hn::StoreU(hn::Compress(v, hn::RebindMask(du32, mask_)), du32, p);
  }
  HWY_INLINE void store(VF v, float* p) const { hn::StoreU(hn::Compress(v, mask_), df, p); }

 private:
  MF mask_;
#endif
};

// kHeads of 0: any number of heads, given at run time.
template <int kHeads>
std::int64_t select_tokens_of(const float* w, std::int64_t stride, const Positive16* odds,
                              std::int64_t count, int heads, const float* beta,
                              const float* worth_threshold, const float* weight_threshold,
                              std::uint32_t* out, std::int64_t* out_planned) {
  // With thresholds of at least 0, w > 0 needs no test of its own: worth is 0 or NaN where w is 0.
  float least_worth[kMaxHeads] = {};
  float least_weight[kMaxHeads] = {};
  std::int64_t planned[kMaxHeads] = {};
  for (int h = 0; h < heads; ++h) {
    const bool all = worth_threshold[h] < 0;
    least_worth[h] = all ? 0.0f : worth_threshold[h];
    least_weight[h] = all || weight_threshold[h] < 0 ? 0.0f : weight_threshold[h];
  }
  std::int64_t found = 0;
  each_part(0, count, [&](std::int64_t i, auto, auto lanes) VERKV_LAMBDA {
    const VF rho = load(odds + i);
    MF any = hn::FirstN(df, 0);
    const auto add_head = [&](auto h) VERKV_LAMBDA {
      const VF x = lanes.load(w + h * stride + i);
      const VF worth = fetch_worth(x, rho, hn::Set(df, beta[h]));
      const MF wanted = hn::Or(hn::Gt(x, hn::Set(df, least_weight[h])),
                               hn::Gt(worth, hn::Set(df, least_worth[h])));
      planned[h] += count_true(wanted);
      any = hn::Or(any, wanted);
    };
    if constexpr (kHeads > 0) {
      unroll<kHeads>(add_head);
    } else {
      for (int h = 0; h < heads; ++h) add_head(h);
    }
    Compressor(any).store(positions(i), out + found);
    found += count_true(any);
  });
  for (int h = 0; h < heads; ++h) out_planned[h] += planned[h];
  return found;
}

std::int64_t select_tokens(const float* w, std::int64_t stride, const Positive16* odds,
                           std::int64_t count, int heads, const float* beta,
                           const float* worth_threshold, const float* weight_threshold,
                           std::uint32_t* out, std::int64_t* out_planned) {
  const auto run = [&](auto n) HWY_ATTR {
    return select_tokens_of<n>(w, stride, odds, count, heads, beta, worth_threshold,
                               weight_threshold, out, out_planned);
  };
  switch (heads) {
    case 1:
      return run(std::integral_constant<int, 1>{});
    case 2:
      return run(std::integral_constant<int, 2>{});
    case 3:
      return run(std::integral_constant<int, 3>{});
    case 4:
      return run(std::integral_constant<int, 4>{});
    default:
      return run(std::integral_constant<int, 0>{});
  }
}

void plan_start(const float* w, const Positive16* odds, std::int64_t count, float beta,
                PlanArrays& plan) {
  const PlanArrays to = plan;
  std::int64_t kept = 0;
  each_part(0, count, [&](std::int64_t i, auto, auto lanes) VERKV_LAMBDA {
    const VF x = lanes.load(w + i);
    const VF rho = load(odds + i);
    const MF positive = hn::Gt(x, hn::Zero(df));
    const Compressor compress(positive);
    compress.store(x, to.weight + kept);
    compress.store(rho, to.odds + kept);
    compress.store(fetch_worth(x, rho, hn::Set(df, beta)), to.worth + kept);
    compress.store(positions(i), to.position + kept);
    kept += count_true(positive);
  });
  plan.count = kept;
}

void plan_beta_sums(const PlanArrays& plan, float threshold, float beta, double& out_weight,
                    double& out_odds) {
  double total[2] = {};
  for (std::int64_t begin = 0; begin < plan.count; begin += kBlockTokens) {
    VF lane[2][kParts];
    zero(lane);
    each_part(begin, std::min(begin + kBlockTokens, plan.count),
              [&](std::int64_t i, auto part, auto lanes) VERKV_LAMBDA {
                const VF x = lanes.load(plan.weight + i);
                const VF rho = lanes.load(plan.odds + i);
                const MF left = hn::Le(lanes.load(plan.worth + i), hn::Set(df, threshold));
                const MF in = lanes.only(hn::And(left, hn::Gt(x, hn::Mul(hn::Set(df, beta), rho))));
                lane[0][part] = hn::IfThenElse(in, hn::Add(lane[0][part], x), lane[0][part]);
                lane[1][part] = hn::IfThenElse(in, hn::Add(lane[1][part], rho), lane[1][part]);
              });
    add_folds(lane, total);
  }
  out_weight = total[0];
  out_odds = total[1];
}

void plan_tail_sums(const PlanArrays& plan, float threshold, float beta, double& out_variance,
                    float& out_jump) {
  double total[1] = {};
  VF jump[1][kParts];
  zero(jump);
  for (std::int64_t begin = 0; begin < plan.count; begin += kBlockTokens) {
    VF lane[1][kParts];
    zero(lane);
    each_part(begin, std::min(begin + kBlockTokens, plan.count),
              [&](std::int64_t i, auto part, auto lanes) VERKV_LAMBDA {
                const VF x = lanes.load(plan.weight + i);
                const VF rho = lanes.load(plan.odds + i);
                const MF left =
                    lanes.only(hn::Le(lanes.load(plan.worth + i), hn::Set(df, threshold)));
                const Tail tail = tail_of(x, rho, hn::Set(df, beta));
                lane[0][part] =
                    hn::IfThenElse(left, hn::Add(lane[0][part], tail.variance), lane[0][part]);
                raise(jump[0][part], tail.jump, left);
              });
    add_folds(lane, total);
  }
  out_variance = total[0];
  out_jump = largest(jump[0], 0.0f);
}

void plan_compact(PlanArrays& plan, float drop_above, float settle_below, float beta_low,
                  float beta_high, SettledTerms& settled) {
  const PlanArrays to = plan;
  double total[3] = {};
  VF top[2][kParts];
  zero(top);
  const VF one = hn::Set(df, 1.0f);
  std::int64_t kept = 0;
  for (std::int64_t begin = 0; begin < to.count; begin += kBlockTokens) {
    VF lane[3][kParts];
    zero(lane);
    each_part(begin, std::min(begin + kBlockTokens, to.count),
              [&](std::int64_t i, auto part, auto lanes) VERKV_LAMBDA {
                const VF x = lanes.load(to.weight + i);
                const VF rho = lanes.load(to.odds + i);
                const VF worth = lanes.load(to.worth + i);
                const VU32 position = hn::LoadU(du32, to.position + i);
                const MF settles = lanes.only(hn::Le(worth, hn::Set(df, settle_below)));
                const MF above = hn::And(settles, hn::Gt(x, hn::Mul(hn::Set(df, beta_high), rho)));
                const MF low = hn::And(settles, hn::Le(x, hn::Mul(hn::Set(df, beta_low), rho)));
                const MF below = hn::AndNot(above, low);
                const MF dropped =
                    hn::Or(hn::Or(above, below), hn::Gt(worth, hn::Set(df, drop_above)));
                const MF keep = lanes.only(hn::Not(dropped));
                const VF t = hn::Div(x, rho);
                const VF largest_odds = hn::IfThenElse(hn::Gt(rho, one), rho, one);
                lane[0][part] = hn::IfThenElse(above, hn::Add(lane[0][part], x), lane[0][part]);
                lane[1][part] = hn::IfThenElse(above, hn::Add(lane[1][part], rho), lane[1][part]);
                lane[2][part] =
                    hn::IfThenElse(below, hn::Add(lane[2][part], hn::Mul(x, t)), lane[2][part]);
                raise(top[0][part], largest_odds, above);
                raise(top[1][part], hn::Mul(t, largest_odds), below);
                // kept <= i, so whole vectors may be written over what has been read.
                const Compressor compress(keep);
                compress.store(x, to.weight + kept);
                compress.store(rho, to.odds + kept);
                compress.store(worth, to.worth + kept);
                compress.store(position, to.position + kept);
                kept += count_true(keep);
              });
    add_folds(lane, total);
  }
  plan.count = kept;
  settled.above_weight += total[0];
  settled.above_odds += total[1];
  settled.below_variance += total[2];
  settled.above_largest_odds = largest(top[0], settled.above_largest_odds);
  settled.below_jump = largest(top[1], settled.below_jump);
}

}  // namespace

const Kernels* target_kernels() {
  static const Kernels kernels{hwy::TargetName(HWY_TARGET),
                               dot_rows,
                               weighted_rows,
                               sketch_logits,
                               weights,
                               beta_sums,
                               tail_sums,
                               select_tokens,
                               plan_start,
                               plan_beta_sums,
                               plan_tail_sums,
                               plan_compact};
  return &kernels;
}

#undef VERKV_LAMBDA
#undef VERKV_BYTE_DOT

#endif  // HWY_NATIVE_FMA && !HWY_HAVE_SCALABLE

}  // namespace HWY_NAMESPACE
}  // namespace verkv::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace verkv::cpu {

HWY_EXPORT(target_kernels);

const Kernels& vector_kernels() {
  static const Kernels* const best = HWY_DYNAMIC_DISPATCH(target_kernels)();
  return *best;
}

std::vector<const Kernels*> all_vector_kernels() {
  std::vector<const Kernels*> result;
  // Lower bits are better targets.
  for (std::int64_t targets = hwy::SupportedTargets() & HWY_TARGETS; targets != 0;
       targets &= targets - 1) {
    hwy::ChosenTarget chosen;
    chosen.Update(targets & -targets);
    const std::size_t at =
        std::size(HWY_DISPATCH_TABLE(target_kernels)) > 1 ? chosen.GetIndex() : 0;
    const Kernels* kernels = HWY_DISPATCH_TABLE(target_kernels)[at]();
    if (kernels != &scalar_kernels()) result.push_back(kernels);
  }
  return result;
}

}  // namespace verkv::cpu

#endif  // HWY_ONCE
