#include <algorithm>
#include <cstring>

#include "arithmetic.hpp"
#include "block.hpp"

namespace verkv::cpu_device {

std::uint32_t Block::mask_of(const Thread& thread, const Instruction& in) const {
  switch (in.opcode) {
    case Opcode::warp_sync:
      return static_cast<std::uint32_t>(value(thread, in.operands[0]));
    case Opcode::shfl:
      return static_cast<std::uint32_t>(value(thread, in.operands[4]));
    case Opcode::mma:
    case Opcode::ldmatrix:
      return ~0U;
    default:
      return static_cast<std::uint32_t>(value(thread, in.operands[in.operand_count - 1U]));
  }
}

// Runs the operation if all lanes that it names wait at it, and tells whether it did.
bool Block::try_warp(Thread& thread) {
  const Instruction& in = kernel_.code[thread.pc];
  const std::uint32_t mask = mask_of(thread, in);
  const std::size_t warp = thread.index / 32;
  const std::size_t first = warp * 32;
  if (!((mask >> (thread.index % 32)) & 1)) {
    fail(thread, FaultKind::warp, "the lane is not in its own mask");
  }
  if (first + static_cast<unsigned>(std::bit_width(mask)) > threads_.size()) {
    fail(thread, FaultKind::warp, "the mask names lanes that do not exist");
  }
  if ((exited_[warp] & mask) != 0) {
    fail(thread, FaultKind::warp,
         "lane " + std::to_string(std::countr_zero(exited_[warp] & mask)) +
             " of the mask has exited");
  }
  if ((at_warp_[warp] & mask) != mask) return false;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!((mask >> lane) & 1)) continue;
    const Thread& other = threads_[first + lane];
    if (other.pc != thread.pc) return false;
    if (mask_of(other, in) != mask) {
      fail(thread, FaultKind::warp,
           "lane " + std::to_string(lane) + " waits here with another mask");
    }
  }
  ++counters_.warp_operations;
  Thread* lanes = &threads_[first];
  switch (in.opcode) {
    case Opcode::warp_sync:
      counters_.barriers_met[thread.pc] = true;
      sync_lanes(lanes, mask);
      break;
    case Opcode::shfl:
      shuffle(lanes, mask, in);
      break;
    case Opcode::vote:
      vote(lanes, mask, in);
      break;
    case Opcode::match:
      match(lanes, mask, in);
      break;
    case Opcode::redux:
      reduce(lanes, mask, in);
      break;
    case Opcode::elect:
      elect(lanes, mask, in);
      break;
    case Opcode::mma:
      multiply_matrices(lanes, in);
      break;
    default:
      load_matrices(lanes, in);
      break;
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!((mask >> lane) & 1)) continue;
    lanes[lane].state = State::ready;
    ++lanes[lane].pc;
  }
  at_warp_[warp] &= ~mask;
  return true;
}

// Only this orders memory; shuffles and votes do not.
void Block::sync_lanes(Thread* lanes, std::uint32_t mask) {
  const std::size_t threads = threads_.size();
  ++tick_;
  ThreadClock sum;
  sum.thread = lanes[0].clock.thread;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!((mask >> lane) & 1)) continue;
    sum.merge(lanes[lane].clock, threads);
    sum.see(lanes[lane].clock.thread, tick_, threads);
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((mask >> lane) & 1) lanes[lane].clock.merge(sum, threads);
  }
}

void Block::shuffle(Thread* lanes, std::uint32_t mask, const Instruction& in) {
  std::array<std::uint64_t, 32> source{}, result{};
  std::array<bool, 32> inside{};
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((mask >> lane) & 1) source[lane] = value(lanes[lane], in.operands[1]);
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!((mask >> lane) & 1)) continue;
    const auto b = static_cast<int>(value(lanes[lane], in.operands[2]) & 31);
    const auto c = static_cast<unsigned>(value(lanes[lane], in.operands[3]));
    const unsigned segment = (c >> 8) & 31;
    const auto limit = static_cast<int>((lane & segment) | (c & 31 & ~segment));
    const auto lowest = static_cast<int>(lane & segment);
    const auto own = static_cast<int>(lane);
    int from = 0;
    switch (in.mode) {
      case 0:
        from = own ^ b;
        break;
      case 1:
        from = lowest | (b & ~static_cast<int>(segment));
        break;
      case 2:
        from = own - b;
        break;
      default:
        from = own + b;
        break;
    }
    inside[lane] = in.mode == 2 ? from >= limit : from <= limit;
    if (!inside[lane]) from = own;
    if (!((mask >> from) & 1)) {
      fail(lanes[lane], FaultKind::warp,
           "reads lane " + std::to_string(from) + ", which is not in the mask");
    }
    result[lane] = source[static_cast<std::size_t>(from)];
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!((mask >> lane) & 1)) continue;
    set(lanes[lane], in.operands[0], Type::b32, result[lane]);
    if (in.operands[0].reg2 >= 0) reg(lanes[lane], in.operands[0].reg2) = inside[lane];
  }
}

void Block::vote(Thread* lanes, std::uint32_t mask, const Instruction& in) {
  std::uint32_t ballot = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (((mask >> lane) & 1) && (value(lanes[lane], in.operands[1]) & 1)) ballot |= 1U << lane;
  }
  const bool all = ballot == mask;
  const std::uint64_t result = in.mode == 0   ? ballot
                               : in.mode == 1 ? all
                               : in.mode == 2 ? ballot != 0
                                              : all || ballot == 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((mask >> lane) & 1)
      set(lanes[lane], in.operands[0], in.mode == 0 ? Type::b32 : Type::pred, result);
  }
}

void Block::match(Thread* lanes, std::uint32_t mask, const Instruction& in) {
  std::array<std::uint64_t, 32> source{};
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((mask >> lane) & 1) source[lane] = truncate(in.type, value(lanes[lane], in.operands[1]));
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!((mask >> lane) & 1)) continue;
    std::uint32_t equal = 0;
    for (unsigned other = 0; other < 32; ++other) {
      if (((mask >> other) & 1) && source[other] == source[lane]) equal |= 1U << other;
    }
    if (in.mode == 1) equal = equal == mask ? mask : 0;
    set(lanes[lane], in.operands[0], Type::b32, equal);
    if (in.operands[0].reg2 >= 0) reg(lanes[lane], in.operands[0].reg2) = equal != 0;
  }
}

void Block::reduce(Thread* lanes, std::uint32_t mask, const Instruction& in) {
  bool first = true;
  std::uint64_t sum = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!((mask >> lane) & 1)) continue;
    const std::uint64_t next = value(lanes[lane], in.operands[1]);
    sum = first ? next : atomic_result(in.atomic, in.type, sum, next, 0);
    first = false;
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((mask >> lane) & 1) set(lanes[lane], in.operands[0], in.type, sum);
  }
}

void Block::elect(Thread* lanes, std::uint32_t mask, const Instruction& in) {
  const auto leader = static_cast<unsigned>(std::countr_zero(mask));
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!((mask >> lane) & 1)) continue;
    set(lanes[lane], in.operands[0], Type::b32, leader);
    if (in.operands[0].reg2 >= 0) reg(lanes[lane], in.operands[0].reg2) = lane == leader;
  }
}

// m16n8k*: a register holds four bytes or two halves; where each element lies is the PTX ISA's.
// Integers are exact. Products of halves are summed in double and rounded once to float, which a
// GPU need not do: results may differ from its in the last bits.
void Block::multiply_matrices(Thread* lanes, const Instruction& in) {
  const bool bytes = in.types[1] == Type::s8 || in.types[1] == Type::u8;
  const unsigned per_register = bytes ? 4 : 2;
  const unsigned depth = static_cast<unsigned>(in.shape[2]);
  const unsigned steps = depth / (4 * per_register);
  const auto part = [&](std::uint64_t word, unsigned i, Type type) -> double {
    const std::uint64_t raw = word >> (bytes ? 8 * i : 16 * i);
    if (type == Type::s8) return static_cast<double>(sign_extend(type, raw));
    if (type == Type::u8) return static_cast<double>(truncate(type, raw));
    return to_double(type, raw & 0xffff);
  };
  double a[16][32] = {};
  double b[32][8] = {};
  for (unsigned lane = 0; lane < 32; ++lane) {
    const unsigned group = lane / 4;
    const unsigned in_group = lane % 4;
    for (unsigned r = 0; r < 2 * steps; ++r) {
      const std::uint64_t word = value(lanes[lane], element(in.operands[1], r));
      for (unsigned i = 0; i < per_register; ++i) {
        a[group + 8 * (r & 1)][in_group * per_register + i + 4 * per_register * (r >> 1)] =
            part(word, i, in.types[1]);
      }
    }
    for (unsigned r = 0; r < steps; ++r) {
      const std::uint64_t word = value(lanes[lane], element(in.operands[2], r));
      for (unsigned i = 0; i < per_register; ++i) {
        b[in_group * per_register + i + 4 * per_register * r][group] = part(word, i, in.types[2]);
      }
    }
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    std::array<std::uint64_t, 4> result{};
    for (unsigned r = 0; r < 4; ++r) {
      const unsigned row = lane / 4 + 8 * (r >> 1);
      const unsigned column = lane % 4 * 2 + (r & 1);
      const std::uint64_t before = value(lanes[lane], element(in.operands[3], r));
      double sum = bytes ? static_cast<double>(sign_extend(Type::s32, before))
                         : static_cast<double>(as_float(before));
      for (unsigned k = 0; k < depth; ++k) sum += a[row][k] * b[k][column];
      if (bytes && in.saturate) sum = std::clamp(sum, -2147483648.0, 2147483647.0);
      result[r] = bytes ? static_cast<std::uint64_t>(static_cast<std::int64_t>(sum))
                        : from_float(static_cast<float>(sum));
    }
    for (unsigned r = 0; r < 4; ++r)
      set(lanes[lane], element(in.operands[0], r), Type::b32, result[r]);
  }
}

// Lane 8 j + i gives the address of row i of matrix j: eight 16-bit elements.
void Block::load_matrices(Thread* lanes, const Instruction& in) {
  std::uint16_t rows[32][8] = {};
  for (unsigned lane = 0; lane < 8U * in.vector; ++lane) {
    const Request request{AccessKind::read, Strength::plain, false, false, false, lanes[lane].pc};
    std::memcpy(
        rows[lane],
        access(lanes[lane], in.space, address(lanes[lane], in.operands[1], in.space), 16, request),
        16);
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    for (unsigned j = 0; j < in.vector; ++j) {
      std::uint32_t word = 0;
      for (unsigned i = 0; i < 2; ++i) {
        const unsigned across = lane % 4 * 2 + i;
        const std::uint16_t found =
            in.transposed ? rows[8 * j + across][lane / 4] : rows[8 * j + lane / 4][across];
        word |= static_cast<std::uint32_t>(found) << (16 * i);
      }
      set(lanes[lane], element(in.operands[0], j), Type::b32, word);
    }
  }
}

}  // namespace verkv::cpu_device
