#include "registers.hpp"

#include <algorithm>
#include <bit>
#include <functional>
#include <queue>
#include <utility>

namespace verkv::cpu_device {
namespace {

using Number = std::int32_t;

// Whether the first operand is what the instruction makes, and not one that it reads.
bool has_result(const Instruction& in) {
  switch (in.opcode) {
    case Opcode::unsupported:
    case Opcode::st:
    case Opcode::red:
    case Opcode::cp_async:
    case Opcode::cp_async_commit:
    case Opcode::cp_async_wait:
    case Opcode::fence:
    case Opcode::no_effect:
    case Opcode::bra:
    case Opcode::exit:
    case Opcode::trap:
    case Opcode::barrier_sync:
    case Opcode::barrier_arrive:
    case Opcode::warp_sync:
      return false;
    default:
      return true;
  }
}

// Calls f(register) for the registers that the operand names.
template <typename Function>
void each_register(Kernel& kernel, Operand& operand, const Function& f) {
  if (operand.kind == Operand::Kind::vector) {
    for (Number i = 0; i < operand.reg2; ++i) {
      Operand& element = kernel.elements[static_cast<std::size_t>(operand.reg + i)];
      if (element.kind == Operand::Kind::reg) f(element.reg);
    }
    return;
  }
  if (operand.kind == Operand::Kind::reg) f(operand.reg);
  if (operand.reg2 >= 0) f(operand.reg2);
}

// Calls result(register) and source(register) for those of the instruction. A result under a guard
// may stay as it was, so it is a source too.
template <typename Result, typename Source>
void each_register(Kernel& kernel, Instruction& in, const Result& result, const Source& source) {
  if (in.guard >= 0) source(in.guard);
  for (unsigned i = 0; i < in.operand_count; ++i) {
    if (i > 0 || !has_result(in)) {
      each_register(kernel, in.operands[i], source);
    } else {
      each_register(kernel, in.operands[i], result);
      if (in.guard >= 0) each_register(kernel, in.operands[i], source);
    }
  }
}

// Of registers.
class Set {
 public:
  explicit Set(Number count = 0) : words_(static_cast<std::size_t>(count + 63) / 64) {}
  void add(Number number) { words_[at(number)] |= bit(number); }
  bool has(Number number) const { return (words_[at(number)] & bit(number)) != 0; }
  // Adds those of `other` that `without` lacks; whether there were any.
  bool add(const Set& other, const Set& without) {
    std::uint64_t added = 0;
    for (std::size_t i = 0; i < words_.size(); ++i) {
      const std::uint64_t more = other.words_[i] & ~without.words_[i] & ~words_[i];
      words_[i] |= more;
      added |= more;
    }
    return added != 0;
  }
  template <typename Function>
  void each(const Function& f) const {
    for (std::size_t i = 0; i < words_.size(); ++i) {
      for (std::uint64_t left = words_[i]; left != 0; left &= left - 1)
        f(static_cast<Number>(64 * i) + std::countr_zero(left));
    }
  }

 private:
  static std::size_t at(Number number) { return static_cast<std::size_t>(number) / 64; }
  static std::uint64_t bit(Number number) { return std::uint64_t{1} << (number % 64); }
  std::vector<std::uint64_t> words_;
};

// Instructions that run one after the other, with the registers that are needed before and after.
struct Stretch {
  std::size_t begin = 0, end = 0;
  std::vector<std::size_t> next;  // stretches
  Set read, written;              // read before it is written
  Set before, after;
};

std::vector<Stretch> stretches_of(const Kernel& kernel) {
  const std::size_t count = kernel.code.size();
  std::vector<bool> begins(count + 1);
  begins[0] = begins[count] = true;
  for (std::size_t pc = 0; pc < count; ++pc) {
    if (kernel.code[pc].opcode != Opcode::bra) continue;
    begins[pc + 1] = true;
    begins[static_cast<std::size_t>(kernel.code[pc].target)] = true;
  }
  std::vector<Stretch> stretches;
  std::vector<std::size_t> at(count + 1);
  for (std::size_t pc = 0; pc < count; ++pc) {
    if (begins[pc]) stretches.emplace_back().begin = pc;
    stretches.back().end = pc + 1;
    at[pc] = stretches.size() - 1;
  }
  for (std::size_t i = 0; i < stretches.size(); ++i) {
    const Instruction& last = kernel.code[stretches[i].end - 1];
    if (last.opcode == Opcode::bra)
      stretches[i].next.push_back(at[static_cast<std::size_t>(last.target)]);
    if ((last.opcode != Opcode::bra || last.guard >= 0) && i + 1 < stretches.size())
      stretches[i].next.push_back(i + 1);
  }
  return stretches;
}

void find_needed(Kernel& kernel, std::vector<Stretch>& stretches) {
  const Set none(kernel.registers);
  for (Stretch& stretch : stretches) {
    stretch.read = stretch.written = stretch.after = none;
    for (std::size_t pc = stretch.begin; pc < stretch.end; ++pc) {
      Instruction& in = kernel.code[pc];
      const auto skip = [](Number) {};
      each_register(kernel, in, skip, [&](Number number) {
        if (!stretch.written.has(number)) stretch.read.add(number);
      });
      each_register(
          kernel, in, [&](Number number) { stretch.written.add(number); }, skip);
    }
    stretch.before = stretch.read;
  }
  for (bool changed = true; changed;) {
    changed = false;
    for (auto stretch = stretches.rbegin(); stretch != stretches.rend(); ++stretch) {
      for (const std::size_t next : stretch->next) stretch->after.add(stretches[next].before, none);
      changed = stretch->before.add(stretch->after, stretch->written) || changed;
    }
  }
}

// From the first place where a register is needed to the last.
struct Span {
  std::size_t begin = ~std::size_t{0}, end = 0;
  void cover(std::size_t pc) {
    begin = std::min(begin, pc);
    end = std::max(end, pc);
  }
};

}  // namespace

void share_registers(Kernel& kernel) {
  std::vector<Stretch> stretches = stretches_of(kernel);
  find_needed(kernel, stretches);
  const auto count = static_cast<std::size_t>(kernel.registers);
  std::vector<Span> spans(count);
  for (const Stretch& stretch : stretches) {
    std::size_t pc = stretch.begin;
    const auto cover = [&](Number number) { spans[static_cast<std::size_t>(number)].cover(pc); };
    stretch.before.each(cover);
    pc = stretch.end - 1;
    stretch.after.each(cover);
    for (pc = stretch.begin; pc < stretch.end; ++pc) {
      each_register(kernel, kernel.code[pc], cover, cover);
    }
  }
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < count; ++i) {
    if (spans[i].begin <= spans[i].end) order.push_back(i);
  }
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return spans[a].begin < spans[b].begin; });
  // A place is free again after the last instruction that needs it, not for a result of that one.
  using Taken = std::pair<std::size_t, Number>;  // until when, and which
  std::priority_queue<Taken, std::vector<Taken>, std::greater<>> taken;
  std::vector<Number> free_places, place(count);
  Number places = 0;
  for (const std::size_t i : order) {
    for (; !taken.empty() && taken.top().first < spans[i].begin; taken.pop())
      free_places.push_back(taken.top().second);
    if (free_places.empty()) free_places.push_back(places++);
    place[i] = free_places.back();
    free_places.pop_back();
    taken.emplace(spans[i].end, place[i]);
  }
  const auto rename = [&](Number& number) { number = place[static_cast<std::size_t>(number)]; };
  for (Instruction& in : kernel.code) {
    if (in.guard >= 0) rename(in.guard);
    for (unsigned i = 0; i < in.operand_count; ++i) each_register(kernel, in.operands[i], rename);
  }
  kernel.registers = places;
}

}  // namespace verkv::cpu_device
