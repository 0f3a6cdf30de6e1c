#include "machine.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <sstream>

#include "arithmetic.hpp"
#include "block.hpp"

namespace verkv::cpu_device {
namespace {

std::uint64_t mix(std::uint64_t value) {
  value += 0x9E3779B97F4A7C15ULL;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ULL;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBULL;
  return value ^ (value >> 31);
}

// 0, 1, ... n - 1, permuted by a seed other than 0.
std::vector<std::uint32_t> order_of(std::uint64_t count, std::uint64_t seed) {
  std::vector<std::uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0U);
  for (std::uint64_t i = count; seed != 0 && i > 1; --i) {
    std::swap(order[i - 1], order[mix(seed + i) % i]);
  }
  return order;
}

Strength strength_of(const Instruction& in) {
  if (in.order == Order::weak || in.space == Space::param) return Strength::plain;
  return in.wide_scope ? Strength::device : Strength::block;
}

// By size, since a processor waits long for 8 bytes of which it has just written 4.
template <typename Bits>
std::uint64_t bits_at(const std::uint8_t* from) {
  Bits value = 0;
  std::memcpy(&value, from, sizeof value);
  return value;
}
std::uint64_t load_bits(const std::uint8_t* from, unsigned bytes) {
  switch (bytes) {
    case 1:
      return *from;
    case 2:
      return bits_at<std::uint16_t>(from);
    case 4:
      return bits_at<std::uint32_t>(from);
    default:
      return bits_at<std::uint64_t>(from);
  }
}

}  // namespace

Block::Block(const Kernel& kernel, const LaunchShape& shape,
             const std::vector<std::uint8_t>& parameters, Memory& memory, const History& history,
             std::uint32_t operation, const MachineOptions& options)
    : kernel_(kernel),
      shape_(shape),
      parameters_(parameters),
      memory_(memory),
      history_(history),
      operation_(operation),
      options_(options),
      blocks_(std::uint64_t{shape.grid.x} * shape.grid.y * shape.grid.z),
      shared_(kernel.shared_bytes + shape.dynamic_shared),
      decoded_(kernel.code.size()),
      hints_(kernel.code.size()) {
  const std::size_t threads = std::size_t{shape.block.x} * shape.block.y * shape.block.z;
  threads_.resize(threads);
  // A later block finds in its registers what an earlier one left.
  registers_.resize(
      (threads + kLanes - 1) / kLanes * kLanes * static_cast<std::size_t>(kernel.registers),
      0xDEADBEEFDEADBEEFULL);
  at_warp_.resize((threads + kLanes - 1) / kLanes);
  exited_.resize(at_warp_.size());
  local_.resize(threads * kernel.local_bytes);
  counters_.barriers_met.resize(kernel.code.size());
  local_initialised_.resize(local_.size());
}

// ---- faults

void Block::fail(const Thread& thread, FaultKind kind, const std::string& text) const {
  throw Fault(kind, name_of(kind) + " in kernel " + kernel_.readable_name + " at " +
                        kernel_.where(thread.pc) + ": " + kernel_.mnemonics[thread.pc] +
                        " of thread " + name(thread) + ": " + text);
}

std::string Block::name(const Thread& thread) const {
  std::ostringstream text;
  text << "(" << thread.id.x << "," << thread.id.y << "," << thread.id.z << ") of block (" << id_.x
       << "," << id_.y << "," << id_.z << ")";
  return text.str();
}

// ---- operands

std::uint64_t Block::special(const Thread& thread, Special which) const {
  const unsigned lane = thread.index % 32;
  const std::uint64_t below = (std::uint64_t{1} << lane) - 1;
  const std::uint64_t up_to = (std::uint64_t{2} << lane) - 1;
  switch (which) {
    case Special::tid_x:
      return thread.id.x;
    case Special::tid_y:
      return thread.id.y;
    case Special::tid_z:
      return thread.id.z;
    case Special::ntid_x:
      return shape_.block.x;
    case Special::ntid_y:
      return shape_.block.y;
    case Special::ntid_z:
      return shape_.block.z;
    case Special::ctaid_x:
      return id_.x;
    case Special::ctaid_y:
      return id_.y;
    case Special::ctaid_z:
      return id_.z;
    case Special::nctaid_x:
      return shape_.grid.x;
    case Special::nctaid_y:
      return shape_.grid.y;
    case Special::nctaid_z:
      return shape_.grid.z;
    case Special::laneid:
      return lane;
    case Special::warpid:
      return thread.index / 32;
    case Special::nwarpid:
      return (threads_.size() + 31) / 32;
    case Special::lanemask_lt:
      return below;
    case Special::lanemask_le:
      return up_to;
    case Special::lanemask_gt:
      return ~up_to & 0xffffffff;
    case Special::lanemask_ge:
      return ~below & 0xffffffff;
    case Special::lanemask_eq:
      return up_to ^ below;
    case Special::clock:
      return counters_.instructions;
    case Special::smid:
      return 0;
    case Special::nsmid:
      return 1;
    case Special::dynamic_smem_size:
      return shape_.dynamic_shared;
    default:
      return shared_.size();
  }
}

// ---- memory

void Block::check_race(Thread& thread, PagedBytes& bytes, std::uint64_t offset, unsigned size,
                       const Request& request, std::string_view window) {
  unsigned count = 0;
  Cell* cells = bytes.cells(offset, size, count);
  for (unsigned i = 0; i < count; ++i) {
    const bool constant = !request.non_coherent || cells[i].write.operation != operation_;
    if (request.strength == Strength::plain && constant &&
        check_quickly(cells[i], thread.clock, tick_, request.pc, request.kind,
                      [this](std::uint32_t operation) { return before(operation); })) {
      continue;
    }
    const Conflict found = check_access(cells[i], thread.clock, tick_, request.pc, request.kind,
                                        request.strength, blocks_, history_);
    if (found.other.operation != 0) {
      try {
        report_race(request.kind, found.other_writes,
                    std::string(window) + "+" + std::to_string(offset) + " (" +
                        std::to_string(size) + " bytes)",
                    history_.describe(found.other));
      } catch (const Fault& fault) {
        thread.pc = request.pc;
        fail(thread, fault.kind, fault.what());
      }
    }
    if (request.non_coherent && cells[i].write.operation == operation_) {
      fail(thread, FaultKind::race,
           "a load that assumes constant memory reads " + std::string(window) + "+" +
               std::to_string(offset) +
               ", which this launch wrote: " + history_.describe(cells[i].write));
    }
  }
}

std::uint8_t* Block::access_global(Thread& thread, Address address, unsigned bytes,
                                   const Request& request) {
  Hint& hint = hints_[request.pc];
  if (!hint.allocation || address < hint.allocation->address ||
      address + bytes > hint.allocation->address + hint.allocation->bytes) {
    try {
      hint.allocation = &memory_.at(address, bytes);
    } catch (const Fault& fault) {
      fail(thread, fault.kind, fault.what());
    }
    hint.traffic = &counters_.allocations[hint.allocation->id];
    if (options_.count_sectors) {
      hint.sectors = &sectors_[hint.allocation->id];
      const std::size_t count = hint.allocation->bytes / kSectorBytes + 1;
      hint.sectors->read.resize(count);
      hint.sectors->written.resize(count);
    }
  }
  const std::uint64_t offset = address - hint.allocation->address;
  Page& page = hint.allocation->contents->page(offset);
  const std::size_t at = offset % kPageBytes;
  if (options_.check_races) {
    check_race(thread, *hint.allocation->contents, offset, bytes, request, hint.allocation->label);
  }
  check_initialised(thread, page.initialised ? page.initialised.get() + at : nullptr, bytes,
                    request, hint.allocation->label, offset);
  count(*hint.traffic, bytes, request);
  count(counters_.global, bytes, request);
  if (hint.sectors) {
    if (reads(request)) {
      touch(hint.sectors->read, offset, bytes, hint.traffic->read_sectors);
    }
    if (request.kind == AccessKind::write) {
      touch(hint.sectors->written, offset, bytes, hint.traffic->written_sectors);
    }
  }
  return page.data + at;
}

void Block::touch(std::vector<bool>& sectors, std::uint64_t offset, unsigned bytes,
                  std::uint64_t& total) {
  for (std::uint64_t i = offset / kSectorBytes; i <= (offset + bytes - 1) / kSectorBytes; ++i) {
    total += !sectors[i];
    sectors[i] = true;
  }
}

void Block::count(Traffic& traffic, unsigned bytes, const Request& request, std::uint64_t times) {
  if (reads(request)) {
    traffic.reads += times;
    traffic.read_bytes += times * bytes;
  }
  if (request.kind == AccessKind::write) {
    traffic.writes += times;
    traffic.written_bytes += times * bytes;
  }
}

void Block::check_initialised(Thread& thread, std::uint8_t* initialised, unsigned bytes,
                              const Request& request, std::string_view window,
                              std::uint64_t offset) {
  if (!initialised) return;
  if (reads(request)) {
    if (!options_.check_uninitialised) return;
    for (unsigned i = 0; i < bytes; ++i) {
      if (!initialised[i]) {
        fail(thread, FaultKind::uninitialised,
             "nobody wrote the byte at " + std::string(window) + "+" + std::to_string(offset + i));
      }
    }
  } else {
    std::memset(initialised, request.forget ? 0 : 0xff, bytes);
  }
}

std::uint8_t* Block::access(Thread& thread, Space space, Address address, unsigned bytes,
                            const Request& request) {
  if ((address & (std::min(bytes, 16U) - 1)) != 0) {
    std::ostringstream text;
    text << bytes << " bytes at address 0x" << std::hex << address;
    fail(thread, FaultKind::misaligned, text.str());
  }
  if (space == Space::generic) {
    if (address & kSharedBase)
      space = Space::shared;
    else if (address & kLocalBase)
      space = Space::local;
    else if (address & kParamBase)
      space = Space::param;
    else
      space = Space::global;
    if (space != Space::global) address &= ~(kSharedBase | kLocalBase | kParamBase);
  }
  const auto inside = [&](std::uint64_t size, const char* what) {
    if (address < size && bytes <= size - address) return;
    fail(thread, FaultKind::out_of_bounds,
         std::to_string(bytes) + " bytes at offset " + std::to_string(address) + " of the " +
             std::to_string(size) + " bytes of " + what);
  };
  switch (space) {
    case Space::global:
      return access_global(thread, address, bytes, request);
    case Space::shared: {
      inside(shared_.size(), "shared memory");
      Page& page = shared_.page(address);
      const std::size_t at = address % kPageBytes;
      if (options_.check_races) {
        check_race(thread, shared_, address, bytes, request, "shared memory");
      }
      check_initialised(thread, page.initialised.get() + at, bytes, request, "shared memory",
                        address);
      count(counters_.shared, bytes, request);
      return page.data + at;
    }
    case Space::local: {
      inside(kernel_.local_bytes, "local memory");
      const std::size_t at = thread.index * kernel_.local_bytes + address;
      check_initialised(thread, &local_initialised_[at], bytes, request, "local memory", address);
      count(counters_.local, bytes, request);
      return &local_[at];
    }
    default:
      inside(parameters_.size(), "the parameters");
      if (request.kind == AccessKind::write) {
        fail(thread, FaultKind::out_of_bounds, "parameters are not writable");
      }
      return const_cast<std::uint8_t*>(parameters_.data()) + address;
  }
}

// ---- order that fences and strong accesses make

void Block::before_strong(Thread& thread, const Instruction& in, Address address, bool writes,
                          bool reads) {
  ThreadClock& clock = thread.clock;
  const bool both = in.order == Order::acquire_release;
  // Nobody but the block sees its shared memory.
  const bool device = in.wide_scope && !(address & kSharedBase);
  if (writes && (in.order == Order::release || both)) clock.release(++tick_, in.wide_scope);
  AcquiredPointer& to_block = published_to_block_[address];
  AcquiredPointer* const to_all = device ? &published_[address] : nullptr;
  if (reads) {
    clock.pending = join(clock.pending, to_block);
    if (to_all) clock.pending = join(clock.pending, *to_all);
    if (in.order == Order::acquire || both) clock.acquire(threads_.size(), in.wide_scope);
  }
  if (!writes) return;
  // A plain strong write starts anew what its location publishes; an atomic update adds to it.
  to_block = reads ? join(to_block, clock.released_block) : clock.released_block;
  if (to_all) *to_all = reads ? join(*to_all, clock.released) : clock.released;
}

Address Block::generic(Space space, Address address) const {
  return space == Space::shared ? address | kSharedBase : address;
}

// ---- instructions on memory

void Block::load(Thread& thread, const Instruction& in) {
  const unsigned size = size_of(in.type);
  const Address from = address(thread, in.operands[1], in.space);
  const bool strong = strength_of(in) != Strength::plain;
  const Request request{AccessKind::read, strength_of(in), false, false,
                        in.non_coherent,  thread.pc};
  const std::uint8_t* bytes = access(thread, in.space, from, size * in.vector, request);
  if (strong) before_strong(thread, in, generic(in.space, from), false, true);
  for (unsigned i = 0; i < in.vector; ++i) {
    std::uint64_t found = load_bits(bytes + i * size, size);
    if (is_signed(in.type)) found = static_cast<std::uint64_t>(sign_extend(in.type, found));
    const Operand& to = element(in.operands[0], i);
    if (to.kind == Operand::Kind::reg) reg(thread, to.reg) = found;
  }
}

void Block::store(Thread& thread, const Instruction& in) {
  const unsigned size = size_of(in.type);
  const Address to = address(thread, in.operands[0], in.space);
  const bool strong = strength_of(in) != Strength::plain;
  if (strong) before_strong(thread, in, generic(in.space, to), true, false);
  const Request request{AccessKind::write, strength_of(in), false, false, false, thread.pc};
  std::uint8_t* bytes = access(thread, in.space, to, size * in.vector, request);
  for (unsigned i = 0; i < in.vector; ++i) {
    const std::uint64_t found = value(thread, element(in.operands[1], i));
    std::memcpy(bytes + i * size, &found, size);
  }
}

void Block::atomic(Thread& thread, const Instruction& in) {
  const bool returns = in.opcode == Opcode::atom;
  const std::size_t first = returns ? 1 : 0;
  const Address at = address(thread, in.operands[first], in.space);
  const unsigned size = size_of(in.type);
  const Request request{AccessKind::write, strength_of(in), true, false, false, thread.pc};
  std::uint8_t* bytes = access(thread, in.space, at, size, request);
  before_strong(thread, in, generic(in.space, at), true, true);
  const std::uint64_t old = load_bits(bytes, size);
  const std::uint64_t operand = value(thread, in.operands[first + 1]);
  const std::uint64_t second =
      in.atomic == AtomicOp::cas ? value(thread, in.operands[first + 2]) : 0;
  std::uint64_t result = 0;
  if (is_packed(in.type) || size == 8 || size == 4 || size == 2) {
    result = atomic_result(in.atomic, in.type, old, operand, second);
  }
  std::memcpy(bytes, &result, size);
  if (returns) set(thread, in.operands[0], in.type, old);
}

void Block::start_copy(Thread& thread, const Instruction& in) {
  AsyncCopy copy;
  copy.to = address(thread, in.operands[0], Space::shared);
  copy.from = address(thread, in.operands[1], Space::global);
  copy.bytes = static_cast<unsigned>(value(thread, in.operands[2]));
  copy.from_bytes = in.operand_count > 3
                        ? static_cast<unsigned>(truncate(Type::u32, value(thread, in.operands[3])))
                        : copy.bytes;
  copy.group = thread.copy_groups;
  copy.pc = thread.pc;
  if ((copy.bytes != 4 && copy.bytes != 8 && copy.bytes != 16) || copy.from_bytes > copy.bytes) {
    fail(thread, FaultKind::unsupported, "a copy of " + std::to_string(copy.bytes) + " bytes");
  }
  // From now on the target may change at any moment, and holds nothing until the copy is awaited.
  const Request request{AccessKind::write, Strength::plain, false, true, false, thread.pc};
  std::memset(access(thread, Space::shared, copy.to, copy.bytes, request), kPoison, copy.bytes);
  thread.copies.push_back(copy);
}

void Block::finish_copies(Thread& thread, const Instruction& in) {
  if (in.mode == 1) ++thread.copy_groups;  // wait_all commits what is not yet committed
  const std::uint64_t keep = in.mode == 1 ? 0 : value(thread, in.operands[0]);
  const std::uint32_t waiting_pc = thread.pc;
  std::size_t done = 0;
  for (; done < thread.copies.size(); ++done) {
    const AsyncCopy& copy = thread.copies[done];
    if (copy.group + keep >= thread.copy_groups) break;
    thread.pc = copy.pc;
    const Request reads{AccessKind::read, Strength::plain, false, false, false, copy.pc};
    const Request writes{AccessKind::write, Strength::plain, false, false, false, copy.pc};
    std::uint8_t bytes[16] = {};
    if (copy.from_bytes > 0) {
      if (copy.from % copy.bytes != 0) fail(thread, FaultKind::misaligned, "source of the copy");
      unsigned part = copy.from_bytes;
      for (unsigned at = 0; at < copy.from_bytes; at += part) {
        part = copy.from_bytes == copy.bytes ? copy.bytes : 1;
        std::memcpy(bytes + at, access(thread, Space::global, copy.from + at, part, reads), part);
      }
    }
    std::memcpy(access(thread, Space::shared, copy.to, copy.bytes, writes), bytes, copy.bytes);
  }
  thread.pc = waiting_pc;
  thread.copies.erase(thread.copies.begin(),
                      thread.copies.begin() + static_cast<std::ptrdiff_t>(done));
}

// ---- the other instructions

void Block::move(Thread& thread, const Instruction& in) {
  const Operand& to = in.operands[0];
  const Operand& from = in.operands[1];
  const unsigned bits = 8 * size_of(in.type);
  if (to.kind == Operand::Kind::vector) {
    const unsigned part = bits / static_cast<unsigned>(to.reg2);
    const std::uint64_t found = value(thread, from);
    for (unsigned i = 0; i < static_cast<unsigned>(to.reg2); ++i) {
      const Operand& one = element(to, i);
      if (one.kind != Operand::Kind::reg) continue;
      reg(thread, one.reg) = (found >> (part * i)) & ((std::uint64_t{1} << part) - 1);
    }
    return;
  }
  std::uint64_t result = 0;
  if (from.kind == Operand::Kind::vector) {
    const unsigned part = bits / static_cast<unsigned>(from.reg2);
    for (unsigned i = 0; i < static_cast<unsigned>(from.reg2); ++i) {
      const std::uint64_t found = value(thread, element(from, i));
      result |= (found & ((std::uint64_t{1} << part) - 1)) << (part * i);
    }
  } else {
    result = value(thread, from);
  }
  set(thread, to, in.type, result);
}

void Block::set_predicates(Thread& thread, const Instruction& in) {
  bool yes =
      compare(in.compare, in.type, value(thread, in.operands[1]), value(thread, in.operands[2]));
  bool no = !yes;
  if (in.operand_count > 3) {
    const bool other = value(thread, in.operands[3]) != 0;
    const auto combine = [&](bool one) {
      return in.mode == 1 ? one && other : in.mode == 2 ? one || other : one != other;
    };
    yes = combine(yes);
    no = combine(no);
  }
  const Operand& to = in.operands[0];
  if (to.kind == Operand::Kind::reg) reg(thread, to.reg) = yes;
  if (to.reg2 >= 0) reg(thread, to.reg2) = no;
}

void Block::compute(Thread& thread, const Instruction& in) {
  const auto& operands = in.operands;
  const std::uint64_t result = evaluate(in, value(thread, operands[1]), value(thread, operands[2]),
                                        value(thread, operands[3]), value(thread, operands[4]),
                                        thread.carry, options_.approximate_ulps);
  set(thread, operands[0], in.result, result);
}

void Block::convert_address(Thread& thread, const Instruction& in) {
  const std::uint64_t found = value(thread, in.operands[1]);
  const Address base = in.space == Space::shared  ? kSharedBase
                       : in.space == Space::local ? kLocalBase
                       : in.space == Space::param ? kParamBase
                                                  : 0;
  if (in.opcode == Opcode::isspacep) {
    const Address any = kSharedBase | kLocalBase | kParamBase;
    set(thread, in.operands[0], Type::pred, base ? (found & base) != 0 : (found & any) == 0);
    return;
  }
  set(thread, in.operands[0], in.type, in.to_space ? found & ~base : found | base);
}

void Block::fence(Thread& thread, const Instruction& in) {
  thread.clock.release(++tick_, in.wide_scope);
  thread.clock.acquire(threads_.size(), in.wide_scope);
}

// ---- the threads of a warp

// Runs an instruction for which there is no step, for one thread.
void Block::run_general(Thread& thread) {
  const Instruction& in = kernel_.code[thread.pc];
  switch (in.opcode) {
    case Opcode::mov:
      move(thread, in);
      break;
    case Opcode::ld:
      load(thread, in);
      break;
    case Opcode::st:
      store(thread, in);
      break;
    case Opcode::atom:
    case Opcode::red:
      atomic(thread, in);
      break;
    case Opcode::setp:
      set_predicates(thread, in);
      break;
    case Opcode::cvta:
    case Opcode::isspacep:
      convert_address(thread, in);
      break;
    case Opcode::trap:
      fail(thread, FaultKind::trap, "the kernel stopped itself");
    case Opcode::unsupported:
      fail(thread, FaultKind::unsupported,
           "'" + kernel_.mnemonics[thread.pc] + "' is not supported (PTX line " +
               std::to_string(kernel_.locations[thread.pc].ptx_line) + ")");
    case Opcode::no_effect:
      break;
    case Opcode::fence:
      fence(thread, in);
      break;
    case Opcode::cp_async:
      start_copy(thread, in);
      break;
    case Opcode::cp_async_commit:
      ++thread.copy_groups;
      break;
    case Opcode::cp_async_wait:
      finish_copies(thread, in);
      break;
    case Opcode::activemask:
      // The weakest answer that the instruction allows.
      set(thread, in.operands[0], Type::b32, std::uint64_t{1} << (thread.index % 32));
      break;
    case Opcode::barrier_arrive:
      arrive(thread, in);
      break;
    default:
      compute(thread, in);
      break;
  }
}

// The lanes that stand at the lowest place go first, so that those that went different ways meet.
Block::Group Block::next_group(std::uint32_t warp, std::uint32_t lanes) const {
  Group group;
  const Thread* const threads = &threads_[std::size_t{warp} * kLanes];
  for (; lanes != 0; lanes &= lanes - 1) {
    const auto lane = static_cast<unsigned>(std::countr_zero(lanes));
    if (threads[lane].state != State::ready) continue;
    const std::uint32_t pc = threads[lane].pc;
    if (group.lanes == 0 || pc < group.pc) {
      if (group.lanes != 0) group.others_pc = group.pc;
      group.pc = pc;
      group.lanes = 0;
    }
    if (pc == group.pc)
      group.lanes |= 1U << lane;
    else
      group.others_pc = std::min(group.others_pc, pc);
  }
  return group;
}

// Lets the lanes of a warp run together until each waits or has exited.
void Block::run_lanes(std::uint32_t warp, std::uint32_t lanes) {
  const std::size_t rows = static_cast<std::size_t>(kernel_.registers);
  std::uint64_t* const registers = registers_.data() + warp * rows * kLanes;
  Thread* const threads = &threads_[std::size_t{warp} * kLanes];
  const auto stand = [&](std::uint32_t which, std::uint32_t pc) {
    for (; which != 0; which &= which - 1) threads[std::countr_zero(which)].pc = pc;
  };
  std::uint64_t steps = 0;
  Group group = next_group(warp, lanes);
  while (group.lanes != 0) {
    if (group.pc >= group.others_pc) {
      stand(group.lanes, group.pc);
      group = next_group(warp, lanes);
    }
    Decoded& in = decoded_[group.pc];
    const auto count =
        group.lanes == ~0U ? kLanes : static_cast<unsigned>(std::popcount(group.lanes));
    in.runs += count;
    counters_.instructions += count;
    if (++steps > options_.instruction_limit) {
      Thread& thread = threads[std::countr_zero(group.lanes)];
      thread.pc = group.pc;
      fail(thread, FaultKind::endless,
           std::to_string(steps - 1) +
               " instructions without meeting another thread; waiting in a "
               "loop for another thread or block is not supported");
    }
    if (in.step == Step::unseen) {
      const std::uint64_t runs = in.runs;
      in = decode(kernel_.code[group.pc], kernel_.elements, parameters_, constants_);
      in.runs = runs;
    }
    std::uint32_t active = group.lanes;
    if (in.guard >= 0) {
      const std::uint64_t* const guard = registers + static_cast<std::size_t>(in.guard) * kLanes;
      std::uint32_t yes = 0;
      for (unsigned lane = 0; lane < kLanes; ++lane) yes |= std::uint32_t{guard[lane] != 0} << lane;
      active &= in.guard_negated ? ~yes : yes;
      if (active == 0) {
        ++group.pc;
        continue;
      }
    }
    switch (in.step) {
      case Step::branch:
        if (active == group.lanes) {
          group.pc = in.to;
        } else {
          stand(active, in.to);
          stand(group.lanes & ~active, group.pc + 1);
          group = next_group(warp, lanes);
        }
        break;
      case Step::special:
        for (std::uint32_t left = active; left != 0; left &= left - 1) {
          const auto lane = static_cast<unsigned>(std::countr_zero(left));
          registers[std::size_t{in.to} * kLanes + lane] =
              special(threads[lane], static_cast<Special>(in.to2)) & in.mask;
        }
        ++group.pc;
        break;
      case Step::general:
        for (std::uint32_t left = active; left != 0; left &= left - 1) {
          Thread& thread = threads[std::countr_zero(left)];
          thread.pc = group.pc;
          run_general(thread);
        }
        ++group.pc;
        break;
      case Step::access:
        if (!access_lanes(threads, group.pc, registers, active)) {
          for (std::uint32_t left = active; left != 0; left &= left - 1) {
            Thread& thread = threads[std::countr_zero(left)];
            thread.pc = group.pc;
            run_general(thread);
          }
        }
        ++group.pc;
        break;
      case Step::meet:
        stand(group.lanes & ~active, group.pc + 1);
        stand(active, group.pc);
        if (meet(threads, active)) steps = 0;
        group = next_group(warp, lanes);
        break;
      default:
        run_step(in, registers, constants_.data(), active);
        ++group.pc;
        break;
    }
  }
}

// The lanes come to an instruction where threads wait for others. Returns whether they met.
bool Block::meet(Thread* threads, std::uint32_t active) {
  const Instruction& in = kernel_.code[threads[std::countr_zero(active)].pc];
  if (in.kind != InstructionClass::warp && in.kind != InstructionClass::tensor &&
      in.opcode != Opcode::ldmatrix) {
    for (; active != 0; active &= active - 1) {
      Thread& thread = threads[std::countr_zero(active)];
      if (in.opcode == Opcode::exit) {
        thread.state = State::exited;
        exited_[thread.index / kLanes] |= 1U << (thread.index % kLanes);
        continue;
      }
      thread.state = State::at_barrier;
      arrive(thread, in);
    }
    return false;
  }
  at_warp_[threads->index / kLanes] |= active;
  for (std::uint32_t left = active; left != 0; left &= left - 1)
    threads[std::countr_zero(left)].state = State::at_warp;
  bool met = false;
  for (; active != 0; active &= active - 1) {
    Thread& thread = threads[std::countr_zero(active)];
    if (thread.state == State::at_warp) met = try_warp(thread) || met;
  }
  return met;
}

// ---- the block

void Block::run(std::uint32_t index) {
  index_ = index;
  id_ = {index % shape_.grid.x, index / shape_.grid.x % shape_.grid.y,
         index / shape_.grid.x / shape_.grid.y};
  tick_ = 1;
  shared_.reset();
  published_to_block_.clear();
  barriers_ = {};
  std::fill(at_warp_.begin(), at_warp_.end(), 0U);
  std::fill(exited_.begin(), exited_.end(), 0U);
  std::fill(local_.begin(), local_.end(), kPoison);
  std::fill(local_initialised_.begin(), local_initialised_.end(), std::uint8_t{0});
  for (std::uint32_t i = 0; i < threads_.size(); ++i) {
    Thread& thread = threads_[i];
    thread = {};
    thread.index = i;
    thread.id = {i % shape_.block.x, i / shape_.block.x % shape_.block.y,
                 i / shape_.block.x / shape_.block.y};
    thread.registers = registers_.data() +
                       i / kLanes * kLanes * static_cast<std::size_t>(kernel_.registers) +
                       i % kLanes;
    thread.clock.operation = operation_;
    thread.clock.block = index;
    thread.clock.thread = static_cast<std::uint16_t>(i);
  }
  const std::uint64_t seed =
      options_.thread_order == 0 ? 0 : mix(options_.thread_order + index) | 1;
  // In ascending order the lanes of a warp run together, otherwise each thread on its own.
  const std::vector<std::uint32_t> order =
      order_of(seed == 0 ? at_warp_.size() : threads_.size(), seed);
  while (true) {
    const std::uint64_t before = counters_.instructions;
    for (const std::uint32_t i : order) {
      if (seed == 0)
        run_lanes(i, ~0U >> (kLanes - std::min<std::size_t>(kLanes, threads_.size() - i * kLanes)));
      else
        run_lanes(i / kLanes, 1U << (i % kLanes));
    }
    std::size_t exited = 0;
    for (const std::uint32_t lanes : exited_)
      exited += static_cast<std::size_t>(std::popcount(lanes));
    if (exited == threads_.size()) return;
    if (counters_.instructions == before) report_deadlock();
  }
}

LaunchCounters Block::run_all() {
  for (const std::uint32_t index : order_of(blocks_, options_.block_order)) run(index);
  for (std::size_t pc = 0; pc < decoded_.size(); ++pc) {
    counters_.by_class[static_cast<std::size_t>(kernel_.code[pc].kind)] += decoded_[pc].runs;
  }
  return std::move(counters_);
}

LaunchCounters run_kernel(const Kernel& kernel, const LaunchShape& shape,
                          const std::vector<std::uint8_t>& parameters, Memory& memory,
                          const History& history, std::uint32_t operation,
                          const MachineOptions& options) {
  return Block(kernel, shape, parameters, memory, history, operation, options).run_all();
}

}  // namespace verkv::cpu_device
