// Element types of keys and values, and the 16-bit formats of the per-token metadata.
#ifndef VERKV_TYPES_HPP
#define VERKV_TYPES_HPP

#include <bit>
#include <cstddef>
#include <cstdint>

#include <verkv/config.hpp>

namespace verkv {

// Storage type of a key, value or query element.
enum class DType : std::uint8_t { f32, f16, bf16 };

VERKV_HD constexpr std::size_t size_bytes(DType type) { return type == DType::f32 ? 4 : 2; }

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

VERKV_HD constexpr BFloat16 to_bfloat16(float x) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) {  // NaN stays NaN when its payload is cut
    return {static_cast<std::uint16_t>((u >> 16) | 0x40u)};
  }
  return {static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

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

}  // namespace verkv

#endif  // VERKV_TYPES_HPP
