// The results of instructions on values: no memory, no threads. A register is 64 bits; an operand
// is the low bits of it that its type needs.
#ifndef VERKV_TESTS_CPU_DEVICE_ARITHMETIC_HPP
#define VERKV_TESTS_CPU_DEVICE_ARITHMETIC_HPP

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "ptx.hpp"

namespace verkv::cpu_device {

inline float as_float(std::uint64_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits));
}
inline std::uint64_t from_float(float value) { return std::bit_cast<std::uint32_t>(value); }
inline double as_double(std::uint64_t bits) { return std::bit_cast<double>(bits); }
inline std::uint64_t from_double(double value) { return std::bit_cast<std::uint64_t>(value); }

// The low bits that the type holds; with the sign of the type spread over all 64 for the second.
inline std::uint64_t truncate(Type type, std::uint64_t value) {
  if (type == Type::pred) return value & 1;  // "true" is written -1
  const unsigned bits = 8 * size_of(type);
  return bits == 64 ? value : value & ((std::uint64_t{1} << bits) - 1);
}
inline std::int64_t sign_extend(Type type, std::uint64_t value) {
  const unsigned shift = 64 - 8 * size_of(type);
  return static_cast<std::int64_t>(value << shift) >> shift;
}

// The 16-bit formats. The narrowing rounds once.
double half_to_double(std::uint16_t bits);
double bfloat16_to_double(std::uint16_t bits);
std::uint16_t double_to_half(double value, Rounding rounding = Rounding::nearest);
std::uint16_t double_to_bfloat16(double value, Rounding rounding = Rounding::nearest);

// Any float type, without rounding.
double to_double(Type type, std::uint64_t bits);

// The lesser or the greater; of one NaN the other operand, unless it propagates.
template <typename Float>
Float min_max(Float a, Float b, bool minimum, bool propagate_nan) {
  if (propagate_nan && (std::isnan(a) || std::isnan(b))) {
    return std::numeric_limits<Float>::quiet_NaN();
  }
  if (std::isnan(a)) return b;
  if (std::isnan(b)) return a;
  // -0 is less than +0.
  if (a == b) return std::signbit(a) == minimum ? a : b;
  return (a < b) == minimum ? a : b;
}

bool compare(Compare how, Type type, std::uint64_t a, std::uint64_t b);

// The new value of a location that held `old`.
std::uint64_t atomic_result(AtomicOp op, Type type, std::uint64_t old, std::uint64_t operand,
                            std::uint64_t second);

// The result of an arithmetic, logical, conversion or approximate instruction. carry is the flag
// that add.cc and its kin read and write. Approximate results are the correctly rounded ones, moved
// by up to `approximate_ulps` units in the last place that a hash of the operand chooses.
std::uint64_t evaluate(const Instruction& in, std::uint64_t a, std::uint64_t b, std::uint64_t c,
                       std::uint64_t d, bool& carry, unsigned approximate_ulps);

}  // namespace verkv::cpu_device

#endif  // VERKV_TESTS_CPU_DEVICE_ARITHMETIC_HPP
