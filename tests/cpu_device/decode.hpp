// Instructions in the form that the machine's loop runs. For what nvcc makes most of, all that does
// not change is laid out beforehand: which operands are registers, how many bits count. The rest
// goes the general way, from the Instruction.
#ifndef VERKV_TESTS_CPU_DEVICE_DECODE_HPP
#define VERKV_TESTS_CPU_DEVICE_DECODE_HPP

#include <cstdint>
#include <vector>

#include "ptx.hpp"

namespace verkv::cpu_device {

// What the loop does. Integers of all sizes share a step: `mask` keeps the bits of the type, and
// `shift` brings the sign of a signed one to bit 63.
enum class Step : std::uint8_t {
  unseen,  // not decoded yet
  general,
  access,  // a load or store without order
  meet,    // threads wait for others, or exit
  branch,
  special,  // to = special register `to2`
  copy,
  pack,    // to = a | b << shift
  unpack,  // to = a, to2 = a >> shift
  select,  // to = c ? a : b
  // Integers and bits.
  add,
  subtract,
  multiply,
  multiply_add,
  multiply_signed,    // wide
  multiply_unsigned,  // wide
  min_signed,
  max_signed,
  min_unsigned,
  max_unsigned,
  and_,
  or_,
  xor_,
  not_,
  shift_left,
  shift_right,
  shift_right_signed,
  extend,
  extend_signed,
  // Floats.
  add_f32,
  subtract_f32,
  multiply_f32,
  fma_f32,
  divide_f32,
  min_f32,
  max_f32,
  negate_f32,
  absolute_f32,
  add_f64,
  subtract_f64,
  multiply_f64,
  fma_f64,
  divide_f64,
  f32_of_signed,
  f32_of_unsigned,
  f64_of_f32,
  f32_of_f64,
  // Comparisons: to = a ? b, or its opposite, which holds of NaN too.
  equal,
  less_signed,
  greater_signed,
  less,
  greater,
  equal_f32,
  less_f32,
  less_equal_f32,
  greater_f32,
  greater_equal_f32,
  apart_f32,  // less or greater
  nan_f32
};

inline constexpr unsigned kLanes = 32;  // of a warp

// A register or a constant of the launch. Either is a row of one value a lane.
struct Source {
  bool constant = false;
  std::uint32_t row = 0;
};

struct Decoded {
  Step step = Step::unseen;
  bool guard_negated = false;
  bool opposite = false;  // of a comparison
  std::uint8_t shift = 0;
  std::int32_t guard = -1;
  std::uint32_t to = 0, to2 = 0;  // registers; of a branch `to` is its target
  Source a, b, c;
  std::uint64_t mask = 0;
  std::uint64_t runs = 0;  // how often threads came here
};

// Adds rows to the constants; the value of a parameter is one.
Decoded decode(const Instruction& in, const std::vector<Operand>& elements,
               const std::vector<std::uint8_t>& parameters, std::vector<std::uint64_t>& constants);

// Runs a step that is plain arithmetic for the lanes of a warp that are active (a bit each), over
// its rows of registers.
void run_step(const Decoded& in, std::uint64_t* registers, const std::uint64_t* constants,
              std::uint32_t active);

}  // namespace verkv::cpu_device

#endif  // VERKV_TESTS_CPU_DEVICE_DECODE_HPP
