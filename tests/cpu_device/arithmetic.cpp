// This file is compiled with -frounding-math: directed roundings are made by the host's own.
#include "arithmetic.hpp"

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <limits>

namespace verkv::cpu_device {
namespace {

__extension__ using Wide = unsigned __int128;
__extension__ using SignedWide = __int128;

class RoundingScope {
 public:
  explicit RoundingScope(Rounding rounding) : changed_(rounding != Rounding::nearest) {
    if (!changed_) return;
    const int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
    std::fesetround(modes[static_cast<int>(rounding)]);
  }
  ~RoundingScope() {
    if (changed_) std::fesetround(FE_TONEAREST);
  }
  RoundingScope(const RoundingScope&) = delete;
  RoundingScope& operator=(const RoundingScope&) = delete;

 private:
  bool changed_;
};

double round_to_integer(double value, Rounding rounding) {
  switch (rounding) {
    case Rounding::zero:
      return std::trunc(value);
    case Rounding::down:
      return std::floor(value);
    case Rounding::up:
      return std::ceil(value);
    default:
      return std::nearbyint(value);
  }
}

// A 16-bit float with this many bits after the point and this least exponent of a normal number.
std::uint16_t narrow(double value, int fraction_bits, int least_exponent, Rounding rounding) {
  const int exponent_bits = 15 - fraction_bits;
  const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
  if (std::isnan(value)) return 0x7fff;
  const auto infinity = static_cast<std::uint16_t>(((1 << exponent_bits) - 1) << fraction_bits);
  if (std::isinf(value)) return sign | infinity;
  if (value == 0) return sign;
  int exponent = 0;
  std::frexp(value, &exponent);
  exponent = std::max(exponent - 1, least_exponent);
  const double unit = std::ldexp(1.0, exponent - fraction_bits);
  const double units = std::fabs(round_to_integer(value / unit, rounding));
  // Rounding up may carry into the next exponent, which the encoding does by itself.
  const auto count = static_cast<std::int64_t>(units);
  const std::int64_t code =
      count < (std::int64_t{1} << fraction_bits)
          ? count
          : count + (static_cast<std::int64_t>(exponent - least_exponent) << fraction_bits);
  if (code >= infinity) {
    const bool away = rounding == Rounding::nearest || (rounding == Rounding::up && !sign) ||
                      (rounding == Rounding::down && sign);
    return static_cast<std::uint16_t>(sign | (away ? infinity : infinity - 1));
  }
  return static_cast<std::uint16_t>(sign | code);
}

std::uint64_t narrow_to(Type type, double value, Rounding rounding) {
  return type == Type::f16 ? double_to_half(value, rounding) : double_to_bfloat16(value, rounding);
}

// a + b rounded to odd, so that a second rounding to fewer bits is as if there were only one.
double add_to_odd(double a, double b) {
  const double sum = a + b;
  if (!std::isfinite(sum)) return sum;
  const double part = sum - a;
  const double error = (a - (sum - part)) + (b - part);
  if (error == 0 || (std::bit_cast<std::uint64_t>(sum) & 1)) return sum;
  return std::nextafter(sum, error > 0 ? std::numeric_limits<double>::infinity()
                                       : -std::numeric_limits<double>::infinity());
}

float flush(float value) {
  return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0F, value) : value;
}

template <typename Float>
Float float_operation(const Instruction& in, Float a, Float b, Float c) {
  const RoundingScope scope(in.rounding);
  switch (in.opcode) {
    case Opcode::add:
      return a + b;
    case Opcode::sub:
      return a - b;
    case Opcode::mul:
      return a * b;
    case Opcode::fma:
      return std::fma(a, b, c);
    case Opcode::div:
      return a / b;
    case Opcode::min:
      return min_max(a, b, true, in.propagate_nan);
    case Opcode::max:
      return min_max(a, b, false, in.propagate_nan);
    case Opcode::abs:
      return std::fabs(a);
    case Opcode::neg:
      return -a;
    case Opcode::copysign:
      return std::copysign(b, a);
    case Opcode::rcp:
      return 1 / a;
    case Opcode::sqrt:
      return std::sqrt(a);
    default:
      return 0;
  }
}

// The exact result of an operation on 16-bit floats, or one that rounds to the same 16 bits.
double half_operation(const Instruction& in, double a, double b, double c) {
  switch (in.opcode) {
    case Opcode::add:
      return add_to_odd(a, b);
    case Opcode::sub:
      return add_to_odd(a, -b);
    case Opcode::mul:
      return a * b;
    case Opcode::fma:
      return add_to_odd(a * b, c);
    case Opcode::min:
      return min_max(a, b, true, in.propagate_nan);
    case Opcode::max:
      return min_max(a, b, false, in.propagate_nan);
    case Opcode::abs:
      return std::fabs(a);
    case Opcode::neg:
      return -a;
    case Opcode::ex2:
      return std::exp2(a);
    case Opcode::tanh:
      return std::tanh(a);
    default:
      return 0;
  }
}

std::uint64_t half_result(const Instruction& in, Type type, std::uint64_t a, std::uint64_t b,
                          std::uint64_t c) {
  double value = half_operation(in, to_double(type, a), to_double(type, b), to_double(type, c));
  if (in.saturate) value = std::isnan(value) ? 0 : std::clamp(value, 0.0, 1.0);
  if (in.relu && value < 0) value = 0;
  return narrow_to(type, value, in.rounding);
}

// Moves a float by at most `ulps` representable numbers, as a hash of the operand says.
float perturb(float value, std::uint64_t operand, unsigned ulps) {
  if (ulps == 0 || !std::isfinite(value) || value == 0) return value;
  std::uint64_t hash = operand * 0x9E3779B97F4A7C15ULL;
  hash ^= hash >> 29;
  auto steps = static_cast<std::int64_t>(hash % (2 * ulps + 1)) - static_cast<std::int64_t>(ulps);
  for (; steps > 0; --steps) value = std::nextafter(value, std::numeric_limits<float>::infinity());
  for (; steps < 0; ++steps) value = std::nextafter(value, -std::numeric_limits<float>::infinity());
  return value;
}

float approximate(Opcode opcode, double a) {
  switch (opcode) {
    case Opcode::ex2:
      return static_cast<float>(std::exp2(a));
    case Opcode::lg2:
      return static_cast<float>(std::log2(a));
    case Opcode::rcp:
      return static_cast<float>(1 / a);
    case Opcode::sqrt:
      return static_cast<float>(std::sqrt(a));
    case Opcode::rsqrt:
      return static_cast<float>(1 / std::sqrt(a));
    case Opcode::sin:
      return static_cast<float>(std::sin(a));
    case Opcode::cos:
      return static_cast<float>(std::cos(a));
    default:
      return static_cast<float>(std::tanh(a));
  }
}

std::uint64_t single_result(const Instruction& in, std::uint64_t a, std::uint64_t b,
                            std::uint64_t c, unsigned ulps) {
  float x = as_float(a);
  float y = as_float(b);
  float z = as_float(c);
  if (in.flush) x = flush(x), y = flush(y), z = flush(z);
  float result = 0;
  switch (in.opcode) {
    case Opcode::rcp:
    case Opcode::sqrt:
      if (!in.approximate) {
        result = float_operation(in, x, y, z);
        break;
      }
      [[fallthrough]];
    case Opcode::ex2:
    case Opcode::lg2:
    case Opcode::rsqrt:
    case Opcode::sin:
    case Opcode::cos:
    case Opcode::tanh:
      result = perturb(approximate(in.opcode, x), a, ulps);
      break;
    default:
      result = float_operation(in, x, y, z);
      if (in.opcode == Opcode::div && in.approximate) result = perturb(result, a ^ (b << 32), ulps);
  }
  if (in.flush) result = flush(result);
  if (in.saturate) result = std::isnan(result) ? 0.0F : std::clamp(result, 0.0F, 1.0F);
  // These act on the sign bit, of a NaN too; arithmetic makes the one NaN of the GPU.
  const bool keeps_nan =
      in.opcode == Opcode::abs || in.opcode == Opcode::neg || in.opcode == Opcode::copysign;
  if (std::isnan(result) && !keeps_nan) return 0x7fffffff;
  return from_float(result);
}

std::uint64_t convert(const Instruction& in, std::uint64_t value) {
  const Type to = in.type;
  const Type from = in.type2;
  if (!is_float(from)) {
    const std::int64_t extended = is_signed(from)
                                      ? sign_extend(from, value)
                                      : static_cast<std::int64_t>(truncate(from, value));
    const bool huge = !is_signed(from) && extended < 0;
    if (!is_float(to)) {
      if (!in.saturate) return truncate(to, static_cast<std::uint64_t>(extended));
      const unsigned bits = 8 * size_of(to);
      const SignedWide exact = huge ? static_cast<SignedWide>(static_cast<std::uint64_t>(extended))
                                    : static_cast<SignedWide>(extended);
      const SignedWide one = 1;
      const SignedWide low = is_signed(to) ? -(one << (bits - 1)) : 0;
      const SignedWide high = is_signed(to) ? (one << (bits - 1)) - 1 : (one << bits) - 1;
      return truncate(to, static_cast<std::uint64_t>(std::clamp(exact, low, high)));
    }
    const RoundingScope scope(in.rounding);
    if (to == Type::f32) {
      return from_float(huge ? static_cast<float>(static_cast<std::uint64_t>(extended))
                             : static_cast<float>(extended));
    }
    const double wide = huge ? static_cast<double>(static_cast<std::uint64_t>(extended))
                             : static_cast<double>(extended);
    if (to == Type::f64) return from_double(wide);
    // Integers of more than 53 bits are beyond every half or round the same with one bit kept odd.
    const double odd = add_to_odd(static_cast<double>(extended >> 32) * 4294967296.0,
                                  static_cast<double>(extended & 0xffffffffLL));
    return narrow_to(to, huge ? wide : odd, in.rounding);
  }
  double x = to_double(from, value);
  if (in.flush && from == Type::f32) x = static_cast<double>(flush(static_cast<float>(x)));
  if (!is_float(to)) {
    if (std::isnan(x)) return to == Type::u64 || to == Type::s64 ? std::uint64_t{1} << 63 : 0;
    x = round_to_integer(x, in.rounding);
    const int bits = static_cast<int>(8 * size_of(to));
    if (is_signed(to)) {
      const double limit = std::ldexp(1.0, bits - 1);
      if (x >= limit) return truncate(to, (std::uint64_t{1} << (bits - 1)) - 1);
      if (x < -limit) return truncate(to, std::uint64_t{1} << (bits - 1));
      return truncate(to, static_cast<std::uint64_t>(static_cast<std::int64_t>(x)));
    }
    if (x <= 0) return 0;
    if (x >= std::ldexp(1.0, bits)) return truncate(to, ~std::uint64_t{0});
    return static_cast<std::uint64_t>(x);
  }
  if (in.to_integer) x = round_to_integer(x, in.rounding);
  if (in.saturate) x = std::isnan(x) ? 0 : std::clamp(x, 0.0, 1.0);
  if (in.relu && x < 0) x = 0;
  if (to == Type::f64) return from_double(x);
  if (to == Type::f32) {
    if (std::isnan(x)) return 0x7fffffff;
    const RoundingScope scope(in.rounding);
    const volatile double source = x;
    const auto result = static_cast<float>(source);
    return from_float(in.flush ? flush(result) : result);
  }
  return narrow_to(to, x, in.rounding);
}

std::uint64_t convert_packed(const Instruction& in, std::uint64_t high, std::uint64_t low) {
  const Type part = in.type == Type::f16x2 ? Type::f16 : Type::bf16;
  const auto one = [&](std::uint64_t bits) {
    double value = to_double(Type::f32, bits);
    if (in.relu && !(value > 0) && !std::isnan(value)) value = 0;
    return narrow_to(part, value, in.rounding);
  };
  return one(high) << 16 | one(low);
}

std::uint64_t multiply(const Instruction& in, std::uint64_t a, std::uint64_t b) {
  const unsigned bits = 8 * size_of(in.type);
  const Wide product = is_signed(in.type)
                           ? static_cast<Wide>(static_cast<SignedWide>(sign_extend(in.type, a)) *
                                               sign_extend(in.type, b))
                           : static_cast<Wide>(truncate(in.type, a)) * truncate(in.type, b);
  return static_cast<std::uint64_t>(in.high ? product >> bits : product);
}

std::uint64_t multiply24(const Instruction& in, std::uint64_t a, std::uint64_t b) {
  const auto low24 = [&](std::uint64_t v) {
    return is_signed(in.type) ? static_cast<std::int64_t>(v << 40) >> 40
                              : static_cast<std::int64_t>(v & 0xffffff);
  };
  const std::int64_t product = low24(a) * low24(b);
  return static_cast<std::uint64_t>(in.high ? product >> 16 : product);
}

std::uint64_t divide(const Instruction& in, std::uint64_t a, std::uint64_t b) {
  const bool quotient = in.opcode == Opcode::div;
  if (truncate(in.type, b) == 0) return quotient ? ~std::uint64_t{0} : a;
  if (is_signed(in.type)) {
    const std::int64_t x = sign_extend(in.type, a);
    const std::int64_t y = sign_extend(in.type, b);
    if (y == -1) return quotient ? 0 - static_cast<std::uint64_t>(x) : 0;
    return static_cast<std::uint64_t>(quotient ? x / y : x % y);
  }
  const std::uint64_t x = truncate(in.type, a);
  const std::uint64_t y = truncate(in.type, b);
  return quotient ? x / y : x % y;
}

std::uint64_t saturating_add(const Instruction& in, std::uint64_t a, std::uint64_t b) {
  const std::int64_t x = sign_extend(Type::s32, a);
  const std::int64_t y = sign_extend(Type::s32, b);
  const std::int64_t sum = in.opcode == Opcode::add ? x + y : x - y;
  return static_cast<std::uint64_t>(std::clamp<std::int64_t>(sum, INT32_MIN, INT32_MAX));
}

std::uint64_t add_with_carry(const Instruction& in, std::uint64_t a, std::uint64_t b, bool& carry) {
  const unsigned bits = 8 * size_of(in.type);
  const bool subtract = in.opcode == Opcode::sub || in.opcode == Opcode::subc;
  const bool use = in.opcode == Opcode::addc || in.opcode == Opcode::subc;
  const Wide x = truncate(in.type, a);
  const Wide y = truncate(in.type, b);
  const Wide extra = use && carry ? 1 : 0;
  const Wide result = subtract ? x - y - extra : x + y + extra;
  if (in.carry_out) carry = ((result >> bits) & 1) != 0;
  return static_cast<std::uint64_t>(result);
}

std::uint64_t shift_right(Type type, std::uint64_t a, std::uint64_t amount) {
  const unsigned bits = 8 * size_of(type);
  if (is_signed(type)) {
    return static_cast<std::uint64_t>(sign_extend(type, a) >>
                                      std::min<std::uint64_t>(amount, bits - 1));
  }
  return amount >= bits ? 0 : truncate(type, a) >> amount;
}

std::uint64_t funnel_shift(const Instruction& in, std::uint64_t a, std::uint64_t b,
                           std::uint64_t c) {
  const std::uint64_t both = truncate(Type::b32, a) | b << 32;
  const std::uint64_t amount =
      in.wide ? c & 31 : std::min<std::uint64_t>(truncate(Type::u32, c), 32);
  return in.mode == 1 ? (both << amount) >> 32 : both >> amount;
}

std::uint64_t permute(const Instruction& in, std::uint64_t a, std::uint64_t b, std::uint64_t c) {
  const std::uint64_t bytes = truncate(Type::b32, a) | b << 32;
  const auto at = [&](std::uint64_t i) { return (bytes >> (8 * (i & 7))) & 255; };
  std::uint64_t result = 0;
  for (unsigned i = 0; i < 4; ++i) {
    const std::uint64_t s = c & 3;
    std::uint64_t byte = 0;
    switch (in.mode) {
      case 1:
        byte = at(s + i);
        break;  // forward 4 extract
      case 2:
        byte = at(s + 8 - i);
        break;  // backward 4 extract
      case 3:
        byte = at(s);
        break;  // replicate 8
      case 4:
        byte = at(std::max<std::uint64_t>(s, i));
        break;  // edge clamp left
      case 5:
        byte = at(std::min<std::uint64_t>(s, i));
        break;  // edge clamp right
      case 6:
        byte = at((c & 1) * 2 + (i & 1));
        break;  // replicate 16
      default: {
        const std::uint64_t selector = (c >> (4 * i)) & 15;
        byte = at(selector);
        if (selector & 8) byte = byte & 128 ? 255 : 0;
      }
    }
    result |= byte << (8 * i);
  }
  return result;
}

std::uint64_t logic3(std::uint64_t a, std::uint64_t b, std::uint64_t c, std::uint64_t table) {
  std::uint64_t result = 0;
  for (unsigned row = 0; row < 8; ++row) {
    if ((table >> row) & 1) {
      result |= (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c);
    }
  }
  return result;
}

std::uint64_t leading_bit(const Instruction& in, std::uint64_t a) {
  const unsigned bits = 8 * size_of(in.type);
  std::uint64_t value = truncate(in.type, a);
  if (is_signed(in.type) && sign_extend(in.type, a) < 0) value = truncate(in.type, ~a);
  if (value == 0) return 0xffffffff;
  const auto place = 63 - static_cast<unsigned>(std::countl_zero(value));
  return in.mode == 1 ? bits - 1 - place : place;
}

std::uint64_t extract_bits(const Instruction& in, std::uint64_t a, std::uint64_t b,
                           std::uint64_t c) {
  const unsigned bits = 8 * size_of(in.type);
  const unsigned position = b & 255;
  const unsigned length = c & 255;
  const auto bit = [&](unsigned at) { return (a >> at) & 1; };
  const std::uint64_t fill =
      is_signed(in.type) && length > 0 ? bit(std::min(position + length - 1, bits - 1)) : 0;
  std::uint64_t result = 0;
  for (unsigned i = 0; i < bits; ++i) {
    const bool inside = i < length && position + i < bits;
    result |= (inside ? bit(position + i) : fill) << i;
  }
  return result;
}

std::uint64_t insert_bits(const Instruction& in, std::uint64_t a, std::uint64_t b, std::uint64_t c,
                          std::uint64_t d) {
  const unsigned bits = 8 * size_of(in.type);
  const unsigned position = c & 255;
  const unsigned length = d & 255;
  std::uint64_t result = b;
  for (unsigned i = 0; i < length && position + i < bits; ++i) {
    const std::uint64_t mask = std::uint64_t{1} << (position + i);
    result = (result & ~mask) | (((a >> i) & 1) << (position + i));
  }
  return result;
}

std::uint64_t dot_bytes(const Instruction& in, std::uint64_t a, std::uint64_t b, std::uint64_t c) {
  const auto part = [](std::uint64_t word, unsigned i, unsigned size, bool is_signed) {
    const std::uint64_t raw = word >> (8 * size * i);
    const Type type =
        size == 1 ? (is_signed ? Type::s8 : Type::u8) : (is_signed ? Type::s16 : Type::u16);
    return is_signed ? sign_extend(type, raw) : static_cast<std::int64_t>(truncate(type, raw));
  };
  const bool signed_a = is_signed(in.type);
  const bool signed_b = is_signed(in.type2);
  auto sum = static_cast<std::int64_t>(c);
  if (in.opcode == Opcode::dp4a) {
    for (unsigned i = 0; i < 4; ++i) sum += part(a, i, 1, signed_a) * part(b, i, 1, signed_b);
  } else {
    for (unsigned i = 0; i < 2; ++i) {
      sum += part(a, i, 2, signed_a) * part(b, i + (in.high ? 2 : 0), 1, signed_b);
    }
  }
  return static_cast<std::uint64_t>(sum);
}

bool test_property(const Instruction& in, std::uint64_t a) {
  const double value = to_double(in.type, a);
  const int kind = in.type == Type::f32 ? std::fpclassify(as_float(a)) : std::fpclassify(value);
  switch (in.mode) {
    case 0:
      return std::isfinite(value);
    case 1:
      return std::isinf(value);
    case 2:
      return !std::isnan(value);
    case 3:
      return std::isnan(value);
    case 4:
      return kind == FP_NORMAL;
    default:
      return kind == FP_SUBNORMAL;
  }
}

std::uint64_t set_result(const Instruction& in, std::uint64_t a, std::uint64_t b, std::uint64_t c,
                         bool combined) {
  bool result = compare(in.compare, in.type2, a, b);
  if (combined) {
    const bool other = c != 0;
    result = in.mode == 1 ? result && other : in.mode == 2 ? result || other : result != other;
  }
  return in.type == Type::f32 ? from_float(result ? 1.0F : 0.0F) : result ? ~std::uint64_t{0} : 0;
}

std::uint64_t integer_min_max(const Instruction& in, std::uint64_t a, std::uint64_t b) {
  const Compare order = in.opcode == Opcode::min ? Compare::lt : Compare::gt;
  return compare(order, in.type, a, b) ? a : b;
}

std::uint64_t float_result(const Instruction& in, std::uint64_t a, std::uint64_t b, std::uint64_t c,
                           unsigned ulps) {
  switch (in.type) {
    case Type::f32:
      return single_result(in, a, b, c, ulps);
    case Type::f64: {
      if (in.opcode == Opcode::rsqrt) return from_double(1 / std::sqrt(as_double(a)));
      const double result = float_operation(in, as_double(a), as_double(b), as_double(c));
      return from_double(in.saturate ? std::clamp(result, 0.0, 1.0) : result);
    }
    case Type::f16:
    case Type::bf16:
      return half_result(in, in.type, a, b, c);
    default: {
      const Type part = in.type == Type::f16x2 ? Type::f16 : Type::bf16;
      return half_result(in, part, a >> 16, b >> 16, c >> 16) << 16 |
             half_result(in, part, a & 0xffff, b & 0xffff, c & 0xffff);
    }
  }
}

}  // namespace

double half_to_double(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == 31) {
    return fraction ? std::numeric_limits<double>::quiet_NaN()
                    : sign * std::numeric_limits<double>::infinity();
  }
  return exponent == 0 ? sign * std::ldexp(fraction, -24)
                       : sign * std::ldexp(fraction + 1024, exponent - 25);
}

double bfloat16_to_double(std::uint16_t bits) {
  return static_cast<double>(as_float(std::uint64_t{bits} << 16));
}

std::uint16_t double_to_half(double value, Rounding rounding) {
  return narrow(value, 10, -14, rounding);
}

std::uint16_t double_to_bfloat16(double value, Rounding rounding) {
  return narrow(value, 7, -126, rounding);
}

double to_double(Type type, std::uint64_t bits) {
  switch (type) {
    case Type::f64:
      return as_double(bits);
    case Type::f32:
      return static_cast<double>(as_float(bits));
    case Type::f16:
      return half_to_double(static_cast<std::uint16_t>(bits));
    default:
      return bfloat16_to_double(static_cast<std::uint16_t>(bits));
  }
}

bool compare(Compare how, Type type, std::uint64_t a, std::uint64_t b) {
  if (is_float(type)) {
    const double x = to_double(type, a);
    const double y = to_double(type, b);
    const bool unordered = std::isnan(x) || std::isnan(y);
    switch (how) {
      case Compare::eq:
        return x == y;
      case Compare::ne:
        return !unordered && x != y;
      case Compare::lt:
        return x < y;
      case Compare::le:
        return x <= y;
      case Compare::gt:
        return x > y;
      case Compare::ge:
        return x >= y;
      case Compare::equ:
        return unordered || x == y;
      case Compare::neu:
        return unordered || x != y;
      case Compare::ltu:
        return unordered || x < y;
      case Compare::leu:
        return unordered || x <= y;
      case Compare::gtu:
        return unordered || x > y;
      case Compare::geu:
        return unordered || x >= y;
      case Compare::num:
        return !unordered;
      default:
        return unordered;
    }
  }
  const std::uint64_t x = truncate(type, a);
  const std::uint64_t y = truncate(type, b);
  const std::int64_t sx = sign_extend(type, a);
  const std::int64_t sy = sign_extend(type, b);
  const bool with_sign = is_signed(type);
  switch (how) {
    case Compare::eq:
      return x == y;
    case Compare::ne:
      return x != y;
    case Compare::lt:
      return with_sign ? sx < sy : x < y;
    case Compare::le:
      return with_sign ? sx <= sy : x <= y;
    case Compare::gt:
      return with_sign ? sx > sy : x > y;
    case Compare::ge:
      return with_sign ? sx >= sy : x >= y;
    case Compare::lo:
      return x < y;
    case Compare::ls:
      return x <= y;
    case Compare::hi:
      return x > y;
    default:
      return x >= y;
  }
}

std::uint64_t atomic_result(AtomicOp op, Type type, std::uint64_t old, std::uint64_t operand,
                            std::uint64_t second) {
  Instruction in;
  in.type = type;
  bool carry = false;
  switch (op) {
    case AtomicOp::add:
    case AtomicOp::min:
    case AtomicOp::max:
      in.opcode = op == AtomicOp::add   ? Opcode::add
                  : op == AtomicOp::min ? Opcode::min
                                        : Opcode::max;
      return truncate(type, evaluate(in, old, operand, 0, 0, carry, 0));
    case AtomicOp::and_:
      return old & operand;
    case AtomicOp::or_:
      return old | operand;
    case AtomicOp::xor_:
      return old ^ operand;
    case AtomicOp::exch:
      return operand;
    case AtomicOp::cas:
      return truncate(type, old) == truncate(type, operand) ? second : old;
    case AtomicOp::inc:
      return truncate(type, old) >= truncate(type, operand) ? 0 : old + 1;
    case AtomicOp::dec:
      return truncate(type, old) == 0 || truncate(type, old) > truncate(type, operand) ? operand
                                                                                       : old - 1;
    default:
      return old;
  }
}

std::uint64_t evaluate(const Instruction& in, std::uint64_t a, std::uint64_t b, std::uint64_t c,
                       std::uint64_t d, bool& carry, unsigned approximate_ulps) {
  const Type type = in.type;
  switch (in.opcode) {
    case Opcode::cvt:
      return is_packed(type) ? convert_packed(in, a, b) : convert(in, a);
    case Opcode::selp:
      return c != 0 ? a : b;
    case Opcode::slct:
      return (in.type2 == Type::f32 ? as_float(c) >= 0 : sign_extend(Type::s32, c) >= 0) ? a : b;
    case Opcode::and_:
      return a & b;
    case Opcode::or_:
      return a | b;
    case Opcode::xor_:
      return a ^ b;
    case Opcode::not_:
      return type == Type::pred ? a == 0 : ~a;
    case Opcode::cnot:
      return truncate(type, a) == 0;
    case Opcode::shl: {
      const std::uint64_t amount = truncate(Type::u32, b);
      return amount >= 8 * size_of(type) ? 0 : a << amount;
    }
    case Opcode::shr:
      return shift_right(type, a, truncate(Type::u32, b));
    case Opcode::shf:
      return funnel_shift(in, a, b, c);
    case Opcode::lop3:
      return logic3(a, b, c, d);
    case Opcode::prmt:
      return permute(in, a, b, c);
    case Opcode::popc:
      return static_cast<std::uint64_t>(std::popcount(truncate(type, a)));
    case Opcode::clz:
      return static_cast<std::uint64_t>(std::countl_zero(truncate(type, a))) + 8 * size_of(type) -
             64;
    case Opcode::bfind:
      return leading_bit(in, a);
    case Opcode::brev: {
      std::uint64_t result = 0;
      const unsigned bits = 8 * size_of(type);
      for (unsigned i = 0; i < bits; ++i) result |= ((a >> i) & 1) << (bits - 1 - i);
      return result;
    }
    case Opcode::bfe:
      return extract_bits(in, a, b, c);
    case Opcode::bfi:
      return insert_bits(in, a, b, c, d);
    case Opcode::bmsk: {
      // bmsk.clamp: `b` ones from bit `a`; the parser refuses the wrapping form.
      const std::uint64_t start = truncate(Type::u32, a);
      const std::uint64_t length = std::min<std::uint64_t>(truncate(Type::u32, b), 32);
      return start >= 32 ? 0 : ((std::uint64_t{1} << length) - 1) << start;
    }
    case Opcode::dp4a:
    case Opcode::dp2a:
      return dot_bytes(in, a, b, c);
    case Opcode::testp:
      return test_property(in, a);
    case Opcode::set:
      return set_result(in, a, b, c, in.operand_count > 3);
    case Opcode::sad: {
      const bool less = compare(Compare::lt, type, a, b);
      return c + (less ? b - a : a - b);
    }
    default:
      break;
  }
  if (is_float(type) || is_packed(type)) return float_result(in, a, b, c, approximate_ulps);
  switch (in.opcode) {
    case Opcode::add:
    case Opcode::sub:
      if (in.saturate) return saturating_add(in, a, b);
      if (in.carry_out) return add_with_carry(in, a, b, carry);
      return in.opcode == Opcode::add ? a + b : a - b;
    case Opcode::addc:
    case Opcode::subc:
      return add_with_carry(in, a, b, carry);
    case Opcode::mul:
      return multiply(in, a, b);
    case Opcode::mad:
      return multiply(in, a, b) + c;
    case Opcode::mul24:
      return multiply24(in, a, b);
    case Opcode::mad24:
      return multiply24(in, a, b) + c;
    case Opcode::div:
    case Opcode::rem:
      return divide(in, a, b);
    case Opcode::min:
    case Opcode::max:
      return integer_min_max(in, a, b);
    case Opcode::abs: {
      const std::int64_t value = sign_extend(type, a);
      return value < 0 ? 0 - static_cast<std::uint64_t>(value) : static_cast<std::uint64_t>(value);
    }
    case Opcode::neg:
      return 0 - a;
    default:
      return 0;
  }
}

}  // namespace verkv::cpu_device
