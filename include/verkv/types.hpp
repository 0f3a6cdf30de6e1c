// Element types of keys and values, and the 16-bit formats of the per-token metadata.
#ifndef VERKV_TYPES_HPP
#define VERKV_TYPES_HPP

#include <bit>
#include <cstddef>
#include <cstdint>

#include <verkv/config.hpp>

namespace verkv {

namespace detail {
// Follows a switch all of whose cases return. The enumeration's own values never come here; other
// values are refused where views and settings enter. Such a switch has no `default`, so that a new
// value is a compiler warning wherever it must be known.
[[noreturn]] VERKV_HD inline void unreachable() {
#if defined(_MSC_VER) && !defined(__clang__)
  __assume(false);
#else
  __builtin_unreachable();
#endif
}
}  // namespace detail

// Type of a key, value or query element. A new type needs an element struct with to_float and
// from_float, and a case in each switch on DType in this header; all other code asks with_element.
enum class DType : std::uint8_t { f32, f16, bf16 };

// Bytes of one element.
VERKV_HD constexpr std::size_t size_bytes(DType type) {
  switch (type) {
    case DType::f32:
      return 4;
    case DType::f16:
    case DType::bf16:
      return 2;
  }
  detail::unreachable();
}

// "?" where it is none of the values, as the names of other enumerations.
constexpr const char* name(DType type) {
  switch (type) {
    case DType::f32:
      return "f32";
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
  }
  return "?";
}

// IEEE binary16 as bits; conversions round to nearest even and keep NaN, infinities and subnormals.
struct Half {
  std::uint16_t bits = 0;
};

// The upper half of a binary32; rounds to nearest even.
struct BFloat16 {
  std::uint16_t bits = 0;
};

VERKV_HD constexpr float to_float(float x) { return x; }

VERKV_HD constexpr float to_float(BFloat16 x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

VERKV_HD constexpr float to_float(Half x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (x.bits >> 10) & 0x1fu;
  std::uint32_t mantissa = x.bits & 0x3ffu;
  if (exponent == 0x1fu) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) {
    return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  }
  // Subnormal: mantissa * 2^-24, exact in binary32.
  const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
}

// Dialect: src/cpu/simd/convert-inl.hpp: store_as
VERKV_HD constexpr BFloat16 to_bfloat16(float x) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) {  // NaN stays NaN when its payload is cut
    return {static_cast<std::uint16_t>((u >> 16) | 0x40u)};
  }
  return {static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

// Dialect: src/cpu/simd/convert-inl.hpp: store_as
VERKV_HD constexpr Half to_half(float x) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(x);
  const std::uint16_t sign = static_cast<std::uint16_t>((u >> 16) & 0x8000u);
  const std::uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    return {static_cast<std::uint16_t>(sign | 0x7c00u)};
  }
  if (magnitude >= 0x38800000u) {  // normal
    const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return {static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
  }
  if (magnitude < 0x33000000u) return {sign};  // below half the smallest subnormal
  const std::uint32_t exponent = magnitude >> 23;
  const std::uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  const std::uint32_t shift = 126u - exponent;  // to units of 2^-24
  const std::uint32_t half = 1u << (shift - 1u);
  std::uint32_t value = mantissa >> shift;
  const std::uint32_t rest = mantissa & ((1u << shift) - 1u);
  if (rest > half || (rest == half && (value & 1u) != 0)) ++value;
  return {static_cast<std::uint16_t>(sign | value)};
}

// A binary32 number as an Element (float, Half or BFloat16), rounded to nearest even.
template <class Element>
VERKV_HD constexpr Element from_float(float x) = delete;
template <>
VERKV_HD constexpr float from_float<float>(float x) {
  return x;
}
template <>
VERKV_HD constexpr Half from_float<Half>(float x) {
  return to_half(x);
}
template <>
VERKV_HD constexpr BFloat16 from_float<BFloat16>(float x) {
  return to_bfloat16(x);
}

// Calls f(Element{}) for the element of `type` and returns the result, whose type must not depend
// on Element. The only way from a DType to a C++ type:
//   with_element(type, [&](auto zero) { using Element = decltype(zero); ... });
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class F>
VERKV_HD constexpr decltype(auto) with_element(DType type, F&& f) {
  switch (type) {
    case DType::f32:
      return f(float{});
    case DType::f16:
      return f(Half{});
    case DType::bf16:
      return f(BFloat16{});
  }
  detail::unreachable();
}

// The largest number of a type. Larger ones in binary32 may round to infinity.
VERKV_HD constexpr float largest_number(DType type) {
  switch (type) {
    case DType::f32:
      return std::bit_cast<float>(0x7f7fffffu);
    case DType::f16:
      return 65504.0f;
    case DType::bf16:
      return std::bit_cast<float>(0x7f7f0000u);
  }
  detail::unreachable();
}

// Per-token metadata that is never negative (scales, odds): binary32 without its sign bit, cut to 8
// bits of exponent and 8 of mantissa. Relative error at most 2^-9; infinity and 0 are exact, so
// "always resident" (odds infinite) and "never drawn" (odds 0) survive. Rounds to nearest even.
struct Positive16 {
  std::uint16_t bits = 0;
};

VERKV_HD constexpr float to_float(Positive16 x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 15);
}

VERKV_HD constexpr Positive16 to_positive16(float x) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(x) & 0x7fffffffu;
  if (u > 0x7f800000u) return {static_cast<std::uint16_t>(0xff01u)};  // NaN
  return {static_cast<std::uint16_t>((u + 0x3fffu + ((u >> 15) & 1u)) >> 15)};
}

inline constexpr Positive16 kPositive16Infinity{0xff00u};

// How logits of all tokens are estimated.
enum class SketchKind : std::uint8_t {
  exact,      // from the full keys of the host tier: the oracle of experiments
  calibrated  // centred, in a basis made for the prompt's queries, keys and importance, in which
              // the directions that matter have 4 bits, others 2, the weakest none
};

// "?" where it is none of the values.
constexpr const char* name(SketchKind value) {
  switch (value) {
    case SketchKind::exact:
      return "exact";
    case SketchKind::calibrated:
      return "calibrated";
  }
  return "?";
}

// Whether tokens have codes and a scale, and heads a basis that says what these mean.
VERKV_HD constexpr bool has_codes(SketchKind kind) {
  switch (kind) {
    case SketchKind::exact:
      return false;
    case SketchKind::calibrated:
      return true;
  }
  detail::unreachable();
}

}  // namespace verkv

#endif  // VERKV_TYPES_HPP
