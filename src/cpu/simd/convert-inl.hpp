// Rows from one element type to another, and the search for numbers that do not fit: convert and
// all_within.
//
// The guard opens once for every instruction set.
#if defined(VERKV_SRC_CPU_SIMD_CONVERT_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef VERKV_SRC_CPU_SIMD_CONVERT_INL_HPP
#undef VERKV_SRC_CPU_SIMD_CONVERT_INL_HPP
#else
#define VERKV_SRC_CPU_SIMD_CONVERT_INL_HPP
#endif

#include <cstdint>
#include <cstring>
#include <type_traits>

#include <verkv/types.hpp>

#include "cpu/kernels.hpp"
#include "cpu/simd/lanes-inl.hpp"
#include "cpu/simd/rows-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace verkv::cpu {
namespace HWY_NAMESPACE {
#if VERKV_VECTORS
namespace {

// As load, but that a NaN keeps its payload: instructions that convert binary16 make it quiet.
template <class T>
HWY_INLINE VF load_exactly(const T* p) {
  VF x = load(p);
  if constexpr (std::is_same_v<T, Half>) {
    const VU32 bits =
        hn::PromoteTo(du32, hn::LoadU(du16, reinterpret_cast<const std::uint16_t*>(p)));
    const VU32 sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(du32, 0x8000)));
    const VU32 payload = hn::ShiftLeft<13>(hn::And(bits, hn::Set(du32, 0x3ff)));
    const VU32 nan = hn::Or(hn::Or(sign, payload), hn::Set(du32, 0x7f800000));
    x = hn::IfThenElse(hn::IsNaN(x), hn::BitCast(df, nan), x);
  }
  return x;
}

// Dialect of verkv/types.hpp: to_half.
HWY_INLINE void store_as(VF x, Half* to) {
  const hn::Rebind<hwy::float16_t, DF> df16;
  const VF nan = hn::CopySignToAbs(hn::BitCast(df, hn::Set(du32, 0x7fc00000)), x);
  const auto rounded = hn::DemoteTo(df16, hn::IfThenElse(hn::IsNaN(x), nan, x));
  hn::StoreU(hn::BitCast(du16, rounded), du16, reinterpret_cast<std::uint16_t*>(to));
}

// Dialect of verkv/types.hpp: to_bfloat16.
HWY_INLINE void store_as(VF x, BFloat16* to) {
  const VU32 u = hn::BitCast(du32, x);
  const VU32 upper = hn::ShiftRight<16>(u);
  const VU32 even = hn::Add(hn::And(upper, hn::Set(du32, 1)), hn::Set(du32, 0x7fff));
  const VU32 rounded = hn::ShiftRight<16>(hn::Add(u, even));
  const VU32 nan = hn::Or(upper, hn::Set(du32, 0x40));
  const VU32 bits = hn::IfThenElse(hn::RebindMask(du32, hn::IsNaN(x)), nan, rounded);
  hn::StoreU(hn::DemoteTo(du16, hn::BitCast(di32, bits)), du16,
             reinterpret_cast<std::uint16_t*>(to));
}

HWY_INLINE void store_as(VF x, float* to) { hn::StoreU(x, df, to); }

template <class From, class To>
void convert_of(const From* from, To* to, std::int64_t count) {
  const auto group = [](const From* in, To* out) VERKV_LAMBDA {
    unroll<kParts>([&](auto part)
                       VERKV_LAMBDA { store_as(load_exactly(in + part * kN), out + part * kN); });
  };
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) group(from + i, to + i);
  if (i == count) return;
  From last[kLanes] = {};
  To stored[kLanes];
  const std::size_t rest = static_cast<std::size_t>(count - i);
  std::memcpy(last, from + i, rest * sizeof(From));
  group(last, stored);
  std::memcpy(to + i, stored, rest * sizeof(To));
}

void convert(const void* from, DType from_type, void* to, DType to_type, std::int64_t count) {
  if (from_type == to_type) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * size_bytes(to_type));
    return;
  }
  with_element(from_type, [&](auto given) HWY_ATTR {
    with_element(to_type, [&](auto stored) HWY_ATTR {
      convert_of(static_cast<const decltype(given)*>(from), static_cast<decltype(stored)*>(to),
                 count);
    });
  });
}

template <class T>
bool all_within_of(const T* x, std::int64_t count, float limit) {
  const VF most = hn::Set(df, limit);
  MF all = hn::Eq(most, most);
  const auto group = [&](const T* in) VERKV_LAMBDA {
    unroll<kParts>([&](auto part) VERKV_LAMBDA {
      all = hn::And(all, hn::Le(hn::Abs(load(in + part * kN)), most));
    });
  };
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) group(x + i);
  if (i < count) {
    T last[kLanes] = {};
    std::memcpy(last, x + i, static_cast<std::size_t>(count - i) * sizeof(T));
    group(last);
  }
  return hn::AllTrue(df, all);
}

bool all_within(const void* x, DType type, std::int64_t count, float limit) {
  bool result = false;
  with_element(type, [&](auto zero) HWY_ATTR {
    result = all_within_of(static_cast<const decltype(zero)*>(x), count, limit);
  });
  return result;
}

}  // namespace
#endif  // VERKV_VECTORS
}  // namespace HWY_NAMESPACE
}  // namespace verkv::cpu
HWY_AFTER_NAMESPACE();

#endif  // VERKV_SRC_CPU_SIMD_CONVERT_INL_HPP
