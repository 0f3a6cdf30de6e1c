#include "decode.hpp"

#include <cstring>

#include "arithmetic.hpp"
#include "memory.hpp"

namespace verkv::cpu_device {
namespace {

std::uint64_t mask_of(Type type) { return truncate(type, ~std::uint64_t{0}); }
std::uint8_t shift_of(Type type) { return static_cast<std::uint8_t>(64 - 8 * size_of(type)); }

class Decoder {
 public:
  Decoder(const Instruction& in, const std::vector<Operand>& elements,
          std::vector<std::uint64_t>& constants)
      : in_(in), elements_(elements), constants_(constants) {}

  Decoded decode(const std::vector<std::uint8_t>& parameters) {
    out_.guard = in_.guard;
    out_.guard_negated = in_.guard_negated;
    out_.step = step(parameters);
    return out_;
  }

 private:
  Step step(const std::vector<std::uint8_t>& parameters) {
    switch (in_.opcode) {
      case Opcode::bra:
        return branch();
      case Opcode::mov:
        return move();
      case Opcode::ld:
        return parameter(parameters) ? Step::copy : access();
      case Opcode::st:
        return access();
      case Opcode::setp:
        return comparison();
      case Opcode::cvta:
        return address();
      case Opcode::exit:
      case Opcode::barrier_sync:
      case Opcode::barrier_reduce:
      case Opcode::warp_sync:
      case Opcode::shfl:
      case Opcode::vote:
      case Opcode::match:
      case Opcode::redux:
      case Opcode::elect:
      case Opcode::mma:
      case Opcode::ldmatrix:
        return Step::meet;
      default:
        return computation();
    }
  }
  // Whether the operand is a register or a constant, and which.
  bool source(const Operand& operand, Source& found) {
    if (operand.negated) return false;
    if (operand.kind == Operand::Kind::reg) {
      found = {false, static_cast<std::uint32_t>(operand.reg)};
      return true;
    }
    if (operand.kind != Operand::Kind::immediate) return false;
    found = constant(operand.value);
    return true;
  }
  Source constant(std::uint64_t value) {
    const auto row = static_cast<std::uint32_t>(constants_.size() / kLanes);
    constants_.insert(constants_.end(), kLanes, value);
    return {true, row};
  }
  bool target(const Operand& operand, std::uint32_t& found) const {
    found = static_cast<std::uint32_t>(operand.reg);
    return operand.kind == Operand::Kind::reg;
  }
  // The operands of an instruction with one result and `count` values.
  bool operands(unsigned count) {
    Source* const places[] = {&out_.a, &out_.b, &out_.c};
    if (in_.operand_count != count + 1 || !target(in_.operands[0], out_.to)) return false;
    for (unsigned i = 0; i < count; ++i) {
      if (!source(in_.operands[i + 1], *places[i])) return false;
    }
    out_.mask = mask_of(in_.result);
    return true;
  }

  Step branch() {
    out_.to = static_cast<std::uint32_t>(in_.target);
    return Step::branch;
  }

  Step move() {
    const Operand& to = in_.operands[0];
    const Operand& from = in_.operands[1];
    const unsigned bits = 8 * size_of(in_.type);
    const auto part = static_cast<std::uint8_t>(bits / 2);
    if (to.kind == Operand::Kind::vector) {
      if (to.reg2 != 2 || !source(from, out_.a)) return Step::general;
      const Operand* both = &elements_[static_cast<std::size_t>(to.reg)];
      out_.shift = part;
      out_.mask = (std::uint64_t{1} << part) - 1;
      const bool plain = target(both[0], out_.to) && target(both[1], out_.to2);
      return plain ? Step::unpack : Step::general;
    }
    if (from.kind == Operand::Kind::vector) {
      if (from.reg2 != 2 || !target(to, out_.to)) return Step::general;
      const Operand* both = &elements_[static_cast<std::size_t>(from.reg)];
      out_.shift = part;
      out_.mask = (std::uint64_t{1} << part) - 1;
      return source(both[0], out_.a) && source(both[1], out_.b) ? Step::pack : Step::general;
    }
    out_.mask = mask_of(in_.type);
    if (!target(to, out_.to)) return Step::general;
    if (from.kind == Operand::Kind::special && !from.negated) return special();
    return source(from, out_.a) ? Step::copy : Step::general;
  }

  Step access() const {
    const unsigned bytes = size_of(in_.type) * in_.vector;
    return in_.order == Order::weak && bytes <= 16 ? Step::access : Step::general;
  }

  // A load of a parameter whose address is known is a copy of a constant.
  bool parameter(const std::vector<std::uint8_t>& parameters) {
    const Operand& from = in_.operands[1];
    const unsigned size = size_of(in_.type);
    const bool inside = from.value % size == 0 && from.value + size <= parameters.size();
    if (in_.space != Space::param || in_.vector != 1 || !inside ||
        from.kind != Operand::Kind::immediate || !target(in_.operands[0], out_.to)) {
      return false;
    }
    std::uint64_t value = 0;
    std::memcpy(&value, parameters.data() + from.value, size);
    if (is_signed(in_.type)) value = static_cast<std::uint64_t>(sign_extend(in_.type, value));
    out_.a = constant(value);
    out_.mask = ~std::uint64_t{0};
    return true;
  }

  Step special() {
    out_.to2 = static_cast<std::uint32_t>(in_.operands[1].value);
    return Step::special;
  }

  // Between the addresses of a space and generic ones, as Block::convert_address does it.
  Step address() {
    if (!operands(1) || in_.space == Space::local || in_.space == Space::param)
      return Step::general;
    if (in_.space != Space::shared) return Step::copy;
    out_.b = constant(in_.to_space ? ~kSharedBase : kSharedBase);
    return in_.to_space ? Step::and_ : Step::or_;
  }

  Step comparison() {
    if (!operands(2) || in_.operands[0].reg2 >= 0) return Step::general;
    if (in_.type == Type::f32) return float_comparison();
    if (is_float(in_.type) || is_packed(in_.type)) return Step::general;
    const bool with_sign = is_signed(in_.type);
    out_.mask = mask_of(in_.type);
    out_.shift = shift_of(in_.type);
    const auto step = [&](Step signed_step, Step unsigned_step, bool opposite) {
      out_.opposite = opposite;
      return with_sign ? signed_step : unsigned_step;
    };
    switch (in_.compare) {
      case Compare::eq:
        return step(Step::equal, Step::equal, false);
      case Compare::ne:
        return step(Step::equal, Step::equal, true);
      case Compare::lt:
        return step(Step::less_signed, Step::less, false);
      case Compare::ge:
        return step(Step::less_signed, Step::less, true);
      case Compare::gt:
        return step(Step::greater_signed, Step::greater, false);
      case Compare::le:
        return step(Step::greater_signed, Step::greater, true);
      case Compare::lo:
        return step(Step::less, Step::less, false);
      case Compare::hs:
        return step(Step::less, Step::less, true);
      case Compare::hi:
        return step(Step::greater, Step::greater, false);
      case Compare::ls:
        return step(Step::greater, Step::greater, true);
      default:
        return Step::general;
    }
  }

  Step float_comparison() {
    if (in_.flush) return Step::general;
    const auto step = [&](Step found, bool opposite) {
      out_.opposite = opposite;
      return found;
    };
    switch (in_.compare) {
      case Compare::eq:
        return step(Step::equal_f32, false);
      case Compare::neu:
        return step(Step::equal_f32, true);
      case Compare::lt:
        return step(Step::less_f32, false);
      case Compare::geu:
        return step(Step::less_f32, true);
      case Compare::le:
        return step(Step::less_equal_f32, false);
      case Compare::gtu:
        return step(Step::less_equal_f32, true);
      case Compare::gt:
        return step(Step::greater_f32, false);
      case Compare::leu:
        return step(Step::greater_f32, true);
      case Compare::ge:
        return step(Step::greater_equal_f32, false);
      case Compare::ltu:
        return step(Step::greater_equal_f32, true);
      case Compare::ne:
        return step(Step::apart_f32, false);
      case Compare::equ:
        return step(Step::apart_f32, true);
      case Compare::nan:
        return step(Step::nan_f32, false);
      case Compare::num:
        return step(Step::nan_f32, true);
      default:
        return Step::general;
    }
  }

  Step computation() {
    if (in_.saturate || in_.flush || in_.relu || in_.to_integer || in_.approximate ||
        in_.propagate_nan || in_.carry_out || in_.high || in_.rounding != Rounding::nearest) {
      return in_.opcode == Opcode::cvt ? conversion() : Step::general;
    }
    switch (in_.opcode) {
      case Opcode::cvt:
        return conversion();
      case Opcode::selp:
        return operands(3) ? Step::select : Step::general;
      case Opcode::and_:
        return operands(2) ? Step::and_ : Step::general;
      case Opcode::or_:
        return operands(2) ? Step::or_ : Step::general;
      case Opcode::xor_:
        return operands(2) ? Step::xor_ : Step::general;
      case Opcode::not_:
        return operands(1) ? Step::not_ : Step::general;
      case Opcode::shl:
      case Opcode::shr:
        return shift();
      default:
        break;
    }
    if (in_.type == Type::f32) return f32();
    if (in_.type == Type::f64) return f64();
    return is_float(in_.type) || is_packed(in_.type) ? Step::general : integer();
  }

  Step shift() {
    if (!operands(2)) return Step::general;
    out_.shift = shift_of(in_.type);
    if (in_.opcode == Opcode::shl) return Step::shift_left;
    return is_signed(in_.type) ? Step::shift_right_signed : Step::shift_right;
  }

  Step conversion() {
    const Type to = in_.type;
    const Type from = in_.type2;
    const bool plain = !in_.saturate && !in_.flush && !in_.relu && !in_.to_integer &&
                       in_.rounding == Rounding::nearest;
    if (is_packed(to) || is_packed(from) || !operands(1)) return Step::general;
    if (!is_float(from) && !is_float(to)) {
      if (in_.saturate) return Step::general;
      out_.shift = shift_of(from);
      if (is_signed(from)) return Step::extend_signed;
      out_.mask &= mask_of(from);
      return Step::extend;
    }
    if (!plain) return Step::general;
    if (to == Type::f32 && !is_float(from)) {
      out_.shift = shift_of(from);
      out_.mask = mask_of(from);
      return is_signed(from) ? Step::f32_of_signed : Step::f32_of_unsigned;
    }
    if (to == Type::f64 && from == Type::f32) return Step::f64_of_f32;
    return to == Type::f32 && from == Type::f64 ? Step::f32_of_f64 : Step::general;
  }

  Step integer() {
    const bool with_sign = is_signed(in_.type);
    const bool three = in_.opcode == Opcode::mad;
    if (!operands(three ? 3 : 2)) return Step::general;
    out_.shift = shift_of(in_.type);
    switch (in_.opcode) {
      case Opcode::add:
        return Step::add;
      case Opcode::sub:
        return Step::subtract;
      case Opcode::mul:
        if (!in_.wide) return Step::multiply;
        return with_sign ? Step::multiply_signed : Step::multiply_unsigned;
      case Opcode::mad:
        return in_.wide ? Step::general : Step::multiply_add;
      case Opcode::min:
        return with_sign ? Step::min_signed : Step::min_unsigned;
      case Opcode::max:
        return with_sign ? Step::max_signed : Step::max_unsigned;
      default:
        return Step::general;
    }
  }

  Step f32() {
    switch (in_.opcode) {
      case Opcode::add:
        return operands(2) ? Step::add_f32 : Step::general;
      case Opcode::sub:
        return operands(2) ? Step::subtract_f32 : Step::general;
      case Opcode::mul:
        return operands(2) ? Step::multiply_f32 : Step::general;
      case Opcode::div:
        return operands(2) ? Step::divide_f32 : Step::general;
      case Opcode::fma:
        return operands(3) ? Step::fma_f32 : Step::general;
      case Opcode::min:
        return operands(2) ? Step::min_f32 : Step::general;
      case Opcode::max:
        return operands(2) ? Step::max_f32 : Step::general;
      case Opcode::neg:
        return operands(1) ? Step::negate_f32 : Step::general;
      case Opcode::abs:
        return operands(1) ? Step::absolute_f32 : Step::general;
      default:
        return Step::general;
    }
  }

  Step f64() {
    switch (in_.opcode) {
      case Opcode::add:
        return operands(2) ? Step::add_f64 : Step::general;
      case Opcode::sub:
        return operands(2) ? Step::subtract_f64 : Step::general;
      case Opcode::mul:
        return operands(2) ? Step::multiply_f64 : Step::general;
      case Opcode::div:
        return operands(2) ? Step::divide_f64 : Step::general;
      case Opcode::fma:
        return operands(3) ? Step::fma_f64 : Step::general;
      default:
        return Step::general;
    }
  }

  const Instruction& in_;
  const std::vector<Operand>& elements_;
  std::vector<std::uint64_t>& constants_;
  Decoded out_;
};

}  // namespace

Decoded decode(const Instruction& in, const std::vector<Operand>& elements,
               const std::vector<std::uint8_t>& parameters, std::vector<std::uint64_t>& constants) {
  return Decoder(in, elements, constants).decode(parameters);
}

}  // namespace verkv::cpu_device
