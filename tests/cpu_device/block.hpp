// The state of the block that runs, shared by the parts of the machine: machine.cpp (threads and
// their instructions), barrier.cpp, warp.cpp (operations of a warp together).
#ifndef VERKV_TESTS_CPU_DEVICE_BLOCK_HPP
#define VERKV_TESTS_CPU_DEVICE_BLOCK_HPP

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "arithmetic.hpp"
#include "decode.hpp"
#include "machine.hpp"

namespace verkv::cpu_device {

class Block {
 public:
  Block(const Kernel& kernel, const LaunchShape& shape, const std::vector<std::uint8_t>& parameters,
        Memory& memory, const History& history, std::uint32_t operation,
        const MachineOptions& options);
  LaunchCounters run_all();

 private:
  enum class State : std::uint8_t { ready, at_barrier, at_warp, exited };

  struct AsyncCopy {
    Address to = 0, from = 0;
    unsigned bytes = 0, from_bytes = 0;
    std::uint64_t group = 0;
    std::uint32_t pc = 0;
  };

  struct Thread {
    std::uint64_t* registers = nullptr;  // kLanes apart: those of a warp's lanes lie side by side
    std::uint32_t pc = 0, index = 0;
    Dim3 id;
    State state = State::ready;
    bool carry = false;
    ThreadClock clock;
    std::vector<AsyncCopy> copies;  // in the order of their groups
    std::uint64_t copy_groups = 0;  // committed
  };

  // Lanes of a warp that stand at the same place, and the lowest place of the others.
  struct Group {
    std::uint32_t lanes = 0, pc = 0, others_pc = ~0U;
  };

  // One of the 16 barriers of a block, between two completions.
  struct Arrival {
    std::uint32_t thread = 0, pc = 0, tick = 0;
    bool waits = false, predicate = false;
    std::shared_ptr<const ThreadClock> clock;  // as it was on arrival, of threads that did not wait
  };
  struct Barrier {
    std::uint64_t count = 0;  // of threads; 0: all
    std::vector<Arrival> arrivals;
  };

  // An access as the checks see it.
  struct Request {
    AccessKind kind;
    Strength strength;
    bool updates;       // reads and writes at once
    bool forget;        // leaves what it writes uninitialised
    bool non_coherent;  // promises that the launch does not write it
    std::uint32_t pc;
  };

  // What a launch has touched of an allocation: a flag for each sector.
  struct Sectors {
    std::vector<bool> read, written;
  };

  // The allocation that an instruction last met.
  struct Hint {
    Allocation* allocation = nullptr;
    Traffic* traffic = nullptr;
    Sectors* sectors = nullptr;
  };

  [[noreturn]] void fail(const Thread& thread, FaultKind kind, const std::string& text) const;
  std::string name(const Thread& thread) const;

  static std::uint64_t& reg(const Thread& thread, std::int32_t number) {
    return thread.registers[static_cast<std::size_t>(number) * kLanes];
  }
  std::uint64_t special(const Thread& thread, Special which) const;
  std::uint64_t value(const Thread& thread, const Operand& operand) const {
    std::uint64_t found = 0;
    switch (operand.kind) {
      case Operand::Kind::reg:
        found = reg(thread, operand.reg);
        break;
      case Operand::Kind::immediate:
        found = operand.value;
        break;
      case Operand::Kind::special:
        found = special(thread, static_cast<Special>(operand.value));
        break;
      default:
        break;
    }
    return operand.negated ? found == 0 : found;
  }
  // Addresses of shared and local memory may be computed in 32 bits.
  Address address(const Thread& thread, const Operand& operand, Space space) const {
    if (operand.kind != Operand::Kind::reg) return operand.value;
    const std::uint64_t base = reg(thread, operand.reg);
    const bool narrow = (space == Space::shared || space == Space::local) && base >> 32 == 0;
    return narrow ? (base + operand.value) & 0xffffffff : base + operand.value;
  }
  void set(Thread& thread, const Operand& operand, Type type, std::uint64_t value) const {
    if (operand.kind == Operand::Kind::reg) reg(thread, operand.reg) = truncate(type, value);
  }
  // An element of a vector operand; a plain operand is its own only element.
  const Operand& element(const Operand& operand, std::size_t i) const {
    return operand.kind == Operand::Kind::vector
               ? kernel_.elements[static_cast<std::size_t>(operand.reg) + i]
               : operand;
  }

  std::uint8_t* access(Thread& thread, Space space, Address address, unsigned bytes,
                       const Request& request);
  std::uint8_t* access_global(Thread& thread, Address address, unsigned bytes,
                              const Request& request);
  void check_initialised(Thread& thread, std::uint8_t* initialised, unsigned bytes,
                         const Request& request, std::string_view window, std::uint64_t offset);
  void check_race(Thread& thread, PagedBytes& bytes, std::uint64_t offset, unsigned size,
                  const Request& request, std::string_view window);
  static void count(Traffic& traffic, unsigned bytes, const Request& request,
                    std::uint64_t times = 1);
  static void touch(std::vector<bool>& sectors, std::uint64_t offset, unsigned bytes,
                    std::uint64_t& total);
  static bool reads(const Request& request) {
    return request.kind == AccessKind::read || request.updates;
  }
  // Whether another operation of the device is before the launch.
  bool before(std::uint32_t operation) {
    std::uint32_t& known = before_[operation % before_.size()];
    if (known == operation) return true;
    if (!history_.ordered(operation, operation_)) return false;
    known = operation;
    return true;
  }
  void before_strong(Thread& thread, const Instruction& in, Address address, bool writes,
                     bool reads);
  Address generic(Space space, Address address) const;

  void load(Thread& thread, const Instruction& in);
  void store(Thread& thread, const Instruction& in);
  void atomic(Thread& thread, const Instruction& in);
  void start_copy(Thread& thread, const Instruction& in);
  void finish_copies(Thread& thread, const Instruction& in);
  void move(Thread& thread, const Instruction& in);
  void set_predicates(Thread& thread, const Instruction& in);
  void compute(Thread& thread, const Instruction& in);
  void convert_address(Thread& thread, const Instruction& in);
  void fence(Thread& thread, const Instruction& in);
  void run_general(Thread& thread);
  bool meet(Thread* threads, std::uint32_t active);
  Group next_group(std::uint32_t warp, std::uint32_t lanes) const;
  void run_lanes(std::uint32_t warp, std::uint32_t lanes);
  void run(std::uint32_t index);

  // lanes.cpp Where the lanes of a warp access memory, if all may: within the parameters, the
  // shared memory or one allocation.
  struct Window {
    PagedBytes* contents = nullptr;  // none: the parameters
    Hint* hint = nullptr;            // of global memory
    std::array<std::uint64_t, kLanes> offset;
    bool same = false;  // for all lanes
  };
  bool find_window(const Instruction& in, const Operand& operand, std::uint32_t pc,
                   const std::uint64_t* registers, std::uint32_t active, Window& window);
  template <AccessKind kKind>
  std::uint8_t* access(Thread& thread, const Window& window, unsigned bytes,
                       const Request& request);
  bool read_same(const Thread* threads, const Window& window, unsigned bytes,
                 const Request& request, std::uint32_t active);
  void count(const Window& window, std::uint32_t active, unsigned bytes, const Request& request);
  template <typename Bits>
  void load_lanes(Thread* threads, const Instruction& in, const Window& window, std::uint32_t pc,
                  std::uint64_t* registers, std::uint32_t active);
  template <typename Bits>
  void store_lanes(Thread* threads, const Instruction& in, const Window& window, std::uint32_t pc,
                   const std::uint64_t* registers, std::uint32_t active);
  bool access_lanes(Thread* threads, std::uint32_t pc, std::uint64_t* registers,
                    std::uint32_t active);

  // barrier.cpp
  void arrive(Thread& thread, const Instruction& in);
  bool complete(const Barrier& barrier) const;
  void check_alignment(const Barrier& barrier, std::uint64_t number);
  void release(Barrier& barrier, std::uint64_t number);
  void order_all(Barrier& barrier);
  void order_some(Barrier& barrier);
  [[noreturn]] void report_deadlock() const;

  // warp.cpp
  bool try_warp(Thread& thread);
  std::uint32_t mask_of(const Thread& thread, const Instruction& in) const;
  void sync_lanes(Thread* lanes, std::uint32_t mask);
  void shuffle(Thread* lanes, std::uint32_t mask, const Instruction& in);
  void vote(Thread* lanes, std::uint32_t mask, const Instruction& in);
  void match(Thread* lanes, std::uint32_t mask, const Instruction& in);
  void reduce(Thread* lanes, std::uint32_t mask, const Instruction& in);
  void elect(Thread* lanes, std::uint32_t mask, const Instruction& in);
  void multiply_matrices(Thread* lanes, const Instruction& in);
  void load_matrices(Thread* lanes, const Instruction& in);

  const Kernel& kernel_;
  const LaunchShape& shape_;
  const std::vector<std::uint8_t>& parameters_;
  Memory& memory_;
  const History& history_;
  const std::uint32_t operation_;
  const MachineOptions& options_;
  const std::uint64_t blocks_;
  LaunchCounters counters_;

  std::array<std::uint32_t, 256> before_{};  // operations that were found to be

  std::uint32_t index_ = 0;
  Dim3 id_;
  std::uint32_t tick_ = 1;  // advanced by synchronisation other than whole-block barriers
  PagedBytes shared_;
  std::vector<Decoded> decoded_;              // by instruction
  std::vector<std::uint64_t> constants_;      // of the decoded instructions
  std::vector<Hint> hints_;                   // by instruction
  std::map<std::uint32_t, Sectors> sectors_;  // by the allocation's number
  std::vector<Thread> threads_;
  std::vector<std::uint64_t> registers_;
  std::vector<std::uint8_t> local_, local_initialised_;
  std::vector<std::uint32_t> at_warp_, exited_;  // lanes of each warp in these states
  std::array<Barrier, 16> barriers_;
  // What strong writes to an address have published, to all blocks and to this one.
  std::unordered_map<Address, AcquiredPointer> published_, published_to_block_;
};

}  // namespace verkv::cpu_device

#endif  // VERKV_TESTS_CPU_DEVICE_BLOCK_HPP
