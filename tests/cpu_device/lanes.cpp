// Loads and stores of the lanes of a warp at once. What does not depend on the lane is checked
// once; where a check fails, each lane goes alone, so that the fault is that of the first.
#include <bit>
#include <cstring>

#include "block.hpp"

namespace verkv::cpu_device {
namespace {

template <typename Function>
void each_lane(std::uint32_t active, const Function& f) {
  for (; active != 0; active &= active - 1) f(static_cast<unsigned>(std::countr_zero(active)));
}

bool written(const std::uint8_t* initialised, unsigned bytes) {
  const auto all = [&](auto word) {
    std::memcpy(&word, initialised, sizeof word);
    return word == static_cast<decltype(word)>(~decltype(word){0});
  };
  switch (bytes) {
    case 1:
      return *initialised == 0xff;
    case 2:
      return all(std::uint16_t{});
    case 4:
      return all(std::uint32_t{});
    case 8:
      return all(std::uint64_t{});
    default:
      initialised += 8;
      return all(std::uint64_t{}) && (initialised -= 8, all(std::uint64_t{}));
  }
}

}  // namespace

bool Block::find_window(const Instruction& in, const Operand& operand, std::uint32_t pc,
                        const std::uint64_t* registers, std::uint32_t active, Window& window) {
  if (options_.count_sectors) return false;
  constexpr Address kWindows = kSharedBase | kLocalBase | kParamBase;
  const unsigned bytes = size_of(in.type) * in.vector;
  auto& at = window.offset;
  if (operand.kind != Operand::Kind::reg) {
    at.fill(operand.value);
  } else {
    const std::uint64_t* const base = registers + static_cast<std::size_t>(operand.reg) * kLanes;
    for (unsigned lane = 0; lane < kLanes; ++lane) at[lane] = base[lane] + operand.value;
  }
  Address any = 0, all = ~Address{0}, lowest = ~Address{0}, highest = 0;
  const auto take = [&](unsigned lane) {
    any |= at[lane];
    all &= at[lane];
    lowest = std::min(lowest, at[lane]);
    highest = std::max(highest, at[lane]);
  };
  if (active == ~0U) {
    for (unsigned lane = 0; lane < kLanes; ++lane) take(lane);
  } else {
    each_lane(active, take);
  }
  Address origin = 0;
  if (in.space == Space::shared || (in.space == Space::generic && (all & kSharedBase) != 0)) {
    origin = in.space == Space::shared ? 0 : kSharedBase;
    // Addresses that were computed in 32 bits may have wrapped around: not here.
    if ((any & kWindows) != origin || highest - origin >= shared_.size() ||
        bytes > shared_.size() - (highest - origin)) {
      return false;
    }
    window.contents = &shared_;
  } else if (in.space == Space::param) {
    if (in.opcode != Opcode::ld || highest >= parameters_.size() ||
        bytes > parameters_.size() - highest) {
      return false;
    }
  } else {
    if ((in.space != Space::global && in.space != Space::generic) || (any & kWindows) != 0)
      return false;
    Hint& hint = hints_[pc];
    const auto holds = [&](const Allocation& allocation) {
      return lowest >= allocation.address && highest < allocation.address + allocation.bytes &&
             bytes <= allocation.address + allocation.bytes - highest;
    };
    if (!hint.allocation || !holds(*hint.allocation)) {
      Allocation* const found = memory_.find(lowest);
      if (!found || found->state != Allocation::State::live || !holds(*found)) return false;
      hint = {found, &counters_.allocations[found->id], nullptr};
    }
    window.contents = hint.allocation->contents.get();
    window.hint = &hint;
    origin = hint.allocation->address;
  }
  // Memory of the host may begin anywhere; of pages no access takes two.
  if (((any | origin) & (bytes - 1)) != 0) return false;
  for (unsigned lane = 0; lane < kLanes; ++lane) at[lane] -= origin;
  window.same = lowest == highest;
  return true;
}

template <AccessKind kKind>
std::uint8_t* Block::access(Thread& thread, const Window& window, unsigned bytes,
                            const Request& request) {
  const std::uint64_t offset = window.offset[thread.index % kLanes];
  // Only loads come here, which is checked.
  if (!window.contents) return const_cast<std::uint8_t*>(parameters_.data()) + offset;
  const auto label = [&]() -> std::string_view {
    return window.hint ? window.hint->allocation->label : std::string_view("shared memory");
  };
  Page& page = window.contents->page(offset);
  const std::size_t at = offset % kPageBytes;
  if (options_.check_races) {
    unsigned count = bytes / 4;
    Cell* cells = page.cells.get() + at / 4;
    if (!page.cells || page.bytewise || count == 0)
      cells = window.contents->cells(offset, bytes, count);
    for (unsigned i = 0; i < count; ++i) {
      const bool constant = !request.non_coherent || cells[i].write.operation != operation_;
      if (constant && check_quickly(cells[i], thread.clock, tick_, request.pc, kKind,
                                    [this](std::uint32_t operation) { return before(operation); }))
        continue;
      check_race(thread, *window.contents, offset, bytes, request, label());
      break;
    }
  }
  if (page.initialised) {
    std::uint8_t* const initialised = page.initialised.get() + at;
    if (kKind == AccessKind::write) {
      std::memset(initialised, 0xff, bytes);
    } else if (options_.check_uninitialised && !written(initialised, bytes)) {
      thread.pc = request.pc;
      check_initialised(thread, initialised, bytes, request, label(), offset);
    }
  }
  return page.data + at;
}

// All active lanes read the same place, and the first of them has: lets the others read it too, if
// nothing speaks for asking each.
bool Block::read_same(const Thread* threads, const Window& window, unsigned bytes,
                      const Request& request, std::uint32_t active) {
  if (!options_.check_races) return true;
  const ThreadClock& first = threads[std::countr_zero(active)].clock;
  const std::uint16_t last = threads[31 - std::countl_zero(active)].clock.thread;
  bool alike = true;
  each_lane(active, [&](unsigned lane) {
    const ThreadClock& clock = threads[lane].clock;
    alike = alike && clock.barriers == first.barriers && !clock.acquired;
  });
  unsigned count = 0;
  Cell* const cells = window.contents->cells(window.offset[first.thread % kLanes], bytes, count);
  for (unsigned i = 0; i < count && alike; ++i) alike = read_alike(cells[i], first, tick_);
  if (!alike) return false;
  const Access read{first.operation, first.block, first.barriers, tick_, request.pc, last};
  for (unsigned i = 0; i < count; ++i) add_alike(cells[i], active, read);
  return true;
}

void Block::count(const Window& window, std::uint32_t active, unsigned bytes,
                  const Request& request) {
  if (!window.contents) return;
  const auto times = static_cast<std::uint64_t>(std::popcount(active));
  if (window.hint) count(*window.hint->traffic, bytes, request, times);
  count(window.hint ? counters_.global : counters_.shared, bytes, request, times);
}

template <typename Bits>
void Block::load_lanes(Thread* threads, const Instruction& in, const Window& window,
                       std::uint32_t pc, std::uint64_t* registers, std::uint32_t active) {
  const auto bytes = static_cast<unsigned>(sizeof(Bits)) * in.vector;
  const Request request{AccessKind::read, Strength::plain, false, false, in.non_coherent, pc};
  std::array<std::uint64_t*, 16> to{};
  for (unsigned i = 0; i < in.vector; ++i) {
    const Operand& one = element(in.operands[0], i);
    if (one.kind == Operand::Kind::reg)
      to[i] = registers + static_cast<std::size_t>(one.reg) * kLanes;
  }
  const bool with_sign = is_signed(in.type);
  const auto take = [&](unsigned lane, const std::uint8_t* from) {
    for (unsigned i = 0; i < in.vector; ++i) {
      if (!to[i]) continue;
      Bits found = 0;
      std::memcpy(&found, from + i * sizeof(Bits), sizeof found);
      to[i][lane] = with_sign ? static_cast<std::uint64_t>(sign_extend(in.type, found))
                              : std::uint64_t{found};
    }
  };
  std::uint32_t left = active;
  if (window.same) {
    const auto first = static_cast<unsigned>(std::countr_zero(active));
    const std::uint8_t* const from =
        access<AccessKind::read>(threads[first], window, bytes, request);
    if (!window.contents || read_same(threads, window, bytes, request, active)) {
      each_lane(active, [&](unsigned lane) { take(lane, from); });
      left = 0;
    } else {
      take(first, from);
      left &= left - 1;
    }
  }
  each_lane(left, [&](unsigned lane) {
    take(lane, access<AccessKind::read>(threads[lane], window, bytes, request));
  });
  count(window, active, bytes, request);
}

template <typename Bits>
void Block::store_lanes(Thread* threads, const Instruction& in, const Window& window,
                        std::uint32_t pc, const std::uint64_t* registers, std::uint32_t active) {
  const auto bytes = static_cast<unsigned>(sizeof(Bits)) * in.vector;
  const Request request{AccessKind::write, Strength::plain, false, false, false, pc};
  std::array<const std::uint64_t*, 16> from{};
  for (unsigned i = 0; i < in.vector; ++i) {
    const Operand& one = element(in.operands[1], i);
    if (one.kind == Operand::Kind::reg && !one.negated)
      from[i] = registers + static_cast<std::size_t>(one.reg) * kLanes;
  }
  each_lane(active, [&](unsigned lane) {
    std::uint8_t* const to = access<AccessKind::write>(threads[lane], window, bytes, request);
    for (unsigned i = 0; i < in.vector; ++i) {
      const auto found = static_cast<Bits>(
          from[i] ? from[i][lane] : value(threads[lane], element(in.operands[1], i)));
      std::memcpy(to + i * sizeof(Bits), &found, sizeof found);
    }
  });
  count(window, active, bytes, request);
}

// Whether the lanes could go together.
bool Block::access_lanes(Thread* threads, std::uint32_t pc, std::uint64_t* registers,
                         std::uint32_t active) {
  const Instruction& in = kernel_.code[pc];
  const bool loads = in.opcode == Opcode::ld;
  Window window;
  if (!find_window(in, in.operands[loads ? 1 : 0], pc, registers, active, window)) return false;
  const auto go = [&](auto bits) {
    if (loads)
      load_lanes<decltype(bits)>(threads, in, window, pc, registers, active);
    else
      store_lanes<decltype(bits)>(threads, in, window, pc, registers, active);
  };
  switch (size_of(in.type)) {
    case 1:
      go(std::uint8_t{});
      break;
    case 2:
      go(std::uint16_t{});
      break;
    case 4:
      go(std::uint32_t{});
      break;
    default:
      go(std::uint64_t{});
      break;
  }
  return true;
}

}  // namespace verkv::cpu_device
