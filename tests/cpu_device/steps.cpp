// The steps that are plain arithmetic, for the lanes of a warp at once.
#include <algorithm>
#include <bit>
#include <cmath>

#include "arithmetic.hpp"
#include "decode.hpp"

namespace verkv::cpu_device {
namespace {

// Rows of an operation: of its result and of its operands.
struct Rows {
  std::uint64_t* to;
  const std::uint64_t *a, *b, *c;
  std::uint32_t active;

  // to = f(a, b, c) in the active lanes.
  template <typename Function>
  void operator()(Function&& f) const {
    if (active == ~0U) {
#pragma GCC ivdep
      for (unsigned lane = 0; lane < kLanes; ++lane) to[lane] = f(a[lane], b[lane], c[lane]);
      return;
    }
    for (std::uint32_t left = active; left != 0; left &= left - 1) {
      const auto lane = static_cast<unsigned>(std::countr_zero(left));
      to[lane] = f(a[lane], b[lane], c[lane]);
    }
  }
};

using Bits = std::uint64_t;

// Arithmetic makes the one NaN of the GPU.
Bits bits_of(float result) { return std::isnan(result) ? 0x7fffffff : from_float(result); }

void run_integer(const Decoded& in, const Rows& rows) {
  const Bits mask = in.mask;
  const unsigned shift = in.shift;
  const auto with_sign = [shift](Bits value) {
    return static_cast<std::int64_t>(value << shift) >> shift;
  };
  switch (in.step) {
    case Step::add:
      return rows([=](Bits a, Bits b, Bits) { return (a + b) & mask; });
    case Step::subtract:
      return rows([=](Bits a, Bits b, Bits) { return (a - b) & mask; });
    case Step::multiply:
      return rows([=](Bits a, Bits b, Bits) { return (a * b) & mask; });
    case Step::multiply_add:
      return rows([=](Bits a, Bits b, Bits c) { return (a * b + c) & mask; });
    case Step::multiply_signed:
      return rows([=](Bits a, Bits b, Bits) {
        return static_cast<Bits>(with_sign(a) * with_sign(b)) & mask;
      });
    case Step::multiply_unsigned:
      return rows([=](Bits a, Bits b, Bits) {
        return (a << shift >> shift) * (b << shift >> shift) & mask;
      });
    case Step::min_signed:
      return rows(
          [=](Bits a, Bits b, Bits) { return (with_sign(a) < with_sign(b) ? a : b) & mask; });
    case Step::max_signed:
      return rows(
          [=](Bits a, Bits b, Bits) { return (with_sign(a) > with_sign(b) ? a : b) & mask; });
    case Step::min_unsigned:
      return rows([=](Bits a, Bits b, Bits) { return std::min(a & mask, b & mask); });
    case Step::max_unsigned:
      return rows([=](Bits a, Bits b, Bits) { return std::max(a & mask, b & mask); });
    case Step::and_:
      return rows([=](Bits a, Bits b, Bits) { return a & b & mask; });
    case Step::or_:
      return rows([=](Bits a, Bits b, Bits) { return (a | b) & mask; });
    case Step::xor_:
      return rows([=](Bits a, Bits b, Bits) { return (a ^ b) & mask; });
    case Step::not_:
      return rows([=](Bits a, Bits, Bits) { return ~a & mask; });
    case Step::shift_left:
      return rows([=](Bits a, Bits b, Bits) {
        const Bits amount = b & 0xffffffff;
        return amount >= 64 - shift ? 0 : (a << amount) & mask;
      });
    case Step::shift_right:
      return rows([=](Bits a, Bits b, Bits) {
        const Bits amount = b & 0xffffffff;
        return amount >= 64 - shift ? 0 : (a & mask) >> amount;
      });
    case Step::shift_right_signed:
      return rows([=](Bits a, Bits b, Bits) {
        const Bits amount = std::min<Bits>(b & 0xffffffff, 63 - shift);
        return static_cast<Bits>(with_sign(a) >> amount) & mask;
      });
    default:  // extend_signed
      return rows([=](Bits a, Bits, Bits) { return static_cast<Bits>(with_sign(a)) & mask; });
  }
}

void run_float(const Decoded& in, const Rows& rows) {
  switch (in.step) {
    case Step::add_f32:
      return rows([](Bits a, Bits b, Bits) { return bits_of(as_float(a) + as_float(b)); });
    case Step::subtract_f32:
      return rows([](Bits a, Bits b, Bits) { return bits_of(as_float(a) - as_float(b)); });
    case Step::multiply_f32:
      return rows([](Bits a, Bits b, Bits) { return bits_of(as_float(a) * as_float(b)); });
    case Step::fma_f32:
      return rows([](Bits a, Bits b, Bits c) {
        return bits_of(std::fma(as_float(a), as_float(b), as_float(c)));
      });
    case Step::divide_f32:
      return rows([](Bits a, Bits b, Bits) { return bits_of(as_float(a) / as_float(b)); });
    case Step::min_f32:
      return rows([](Bits a, Bits b, Bits) {
        return bits_of(min_max(as_float(a), as_float(b), true, false));
      });
    case Step::max_f32:
      return rows([](Bits a, Bits b, Bits) {
        return bits_of(min_max(as_float(a), as_float(b), false, false));
      });
    case Step::negate_f32:
      return rows([](Bits a, Bits, Bits) { return (a ^ 0x80000000) & 0xffffffff; });
    case Step::absolute_f32:
      return rows([](Bits a, Bits, Bits) { return a & 0x7fffffff; });
    case Step::add_f64:
      return rows([](Bits a, Bits b, Bits) { return from_double(as_double(a) + as_double(b)); });
    case Step::subtract_f64:
      return rows([](Bits a, Bits b, Bits) { return from_double(as_double(a) - as_double(b)); });
    case Step::multiply_f64:
      return rows([](Bits a, Bits b, Bits) { return from_double(as_double(a) * as_double(b)); });
    case Step::fma_f64:
      return rows([](Bits a, Bits b, Bits c) {
        return from_double(std::fma(as_double(a), as_double(b), as_double(c)));
      });
    case Step::divide_f64:
      return rows([](Bits a, Bits b, Bits) { return from_double(as_double(a) / as_double(b)); });
    case Step::f32_of_signed:
      return rows([shift = in.shift](Bits a, Bits, Bits) {
        return from_float(static_cast<float>(static_cast<std::int64_t>(a << shift) >> shift));
      });
    case Step::f32_of_unsigned:
      return rows([mask = in.mask](Bits a, Bits, Bits) {
        return from_float(static_cast<float>(a & mask));
      });
    case Step::f64_of_f32:
      return rows([](Bits a, Bits, Bits) { return from_double(static_cast<double>(as_float(a))); });
    default:  // f32_of_f64
      return rows([](Bits a, Bits, Bits) { return bits_of(static_cast<float>(as_double(a))); });
  }
}

void run_comparison(const Decoded& in, const Rows& rows) {
  const Bits mask = in.mask;
  const Bits opposite = in.opposite;
  const unsigned shift = in.shift;
  // Keeps the order of signed numbers.
  const auto with_sign = [shift](Bits value) { return static_cast<std::int64_t>(value << shift); };
  switch (in.step) {
    case Step::equal:
      return rows([=](Bits a, Bits b, Bits) { return Bits{((a ^ b) & mask) == 0} ^ opposite; });
    case Step::less_signed:
      return rows(
          [=](Bits a, Bits b, Bits) { return Bits{with_sign(a) < with_sign(b)} ^ opposite; });
    case Step::greater_signed:
      return rows(
          [=](Bits a, Bits b, Bits) { return Bits{with_sign(a) > with_sign(b)} ^ opposite; });
    case Step::less:
      return rows([=](Bits a, Bits b, Bits) { return Bits{(a & mask) < (b & mask)} ^ opposite; });
    case Step::greater:
      return rows([=](Bits a, Bits b, Bits) { return Bits{(a & mask) > (b & mask)} ^ opposite; });
    case Step::equal_f32:
      return rows(
          [=](Bits a, Bits b, Bits) { return Bits{as_float(a) == as_float(b)} ^ opposite; });
    case Step::less_f32:
      return rows([=](Bits a, Bits b, Bits) { return Bits{as_float(a) < as_float(b)} ^ opposite; });
    case Step::less_equal_f32:
      return rows(
          [=](Bits a, Bits b, Bits) { return Bits{as_float(a) <= as_float(b)} ^ opposite; });
    case Step::greater_f32:
      return rows([=](Bits a, Bits b, Bits) { return Bits{as_float(a) > as_float(b)} ^ opposite; });
    case Step::greater_equal_f32:
      return rows(
          [=](Bits a, Bits b, Bits) { return Bits{as_float(a) >= as_float(b)} ^ opposite; });
    case Step::apart_f32:
      return rows([=](Bits a, Bits b, Bits) {
        return Bits{as_float(a) < as_float(b) || as_float(a) > as_float(b)} ^ opposite;
      });
    default:  // nan_f32
      return rows([=](Bits a, Bits b, Bits) {
        return Bits{std::isnan(as_float(a)) || std::isnan(as_float(b))} ^ opposite;
      });
  }
}

}  // namespace

void run_step(const Decoded& in, std::uint64_t* registers, const std::uint64_t* constants,
              std::uint32_t active) {
  const auto row = [&](const Source& source) {
    return (source.constant ? constants : registers) + std::size_t{source.row} * kLanes;
  };
  const Rows rows{registers + std::size_t{in.to} * kLanes, row(in.a), row(in.b), row(in.c), active};
  const Bits mask = in.mask;
  const unsigned shift = in.shift;
  switch (in.step) {
    case Step::copy:
    case Step::extend:
      return rows([=](Bits a, Bits, Bits) { return a & mask; });
    case Step::select:
      return rows([=](Bits a, Bits b, Bits c) { return (c != 0 ? a : b) & mask; });
    case Step::pack:
      return rows([=](Bits a, Bits b, Bits) { return (a & mask) | (b & mask) << shift; });
    case Step::unpack: {
      // The source may be one of the results.
      std::uint64_t* const to2 = registers + std::size_t{in.to2} * kLanes;
      for (std::uint32_t left = active; left != 0; left &= left - 1) {
        const auto lane = static_cast<unsigned>(std::countr_zero(left));
        const Bits found = rows.a[lane];
        rows.to[lane] = found & mask;
        to2[lane] = (found >> shift) & mask;
      }
      return;
    }
    default:
      break;
  }
  if (in.step >= Step::equal) return run_comparison(in, rows);
  if (in.step >= Step::add_f32) return run_float(in, rows);
  run_integer(in, rows);
}

}  // namespace verkv::cpu_device
