// Runs a kernel: blocks one after the other, the warps of a block in turn, each up to the next
// place where it must wait for others. Within a warp the threads at the lowest place go first,
// together.
#ifndef VERKV_TESTS_CPU_DEVICE_MACHINE_HPP
#define VERKV_TESTS_CPU_DEVICE_MACHINE_HPP

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "memory.hpp"
#include "ptx.hpp"
#include "race.hpp"

namespace verkv::cpu_device {

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};

struct LaunchShape {
  Dim3 grid, block;
  std::size_t dynamic_shared = 0;
};

struct MachineOptions {
  bool check_races = true;
  bool check_uninitialised = true;
  // Approximate instructions (ex2, lg2, rcp.approx, ...) are off by up to this many units in the
  // last place. 0 gives the correctly rounded result.
  unsigned approximate_ulps = 0;
  // Seeds of the orders in which threads of a block take turns, each on its own, and blocks run; 0:
  // ascending, and threads by warps.
  std::uint64_t thread_order = 0;
  std::uint64_t block_order = 0;
  // Counts the sectors of each allocation that a launch touches: what memory must move at least.
  bool count_sectors = false;
  // Instructions that a thread may run without meeting another before it counts as stuck.
  std::uint64_t instruction_limit = std::uint64_t{1} << 28;
};

// Accesses of threads, and the bytes that they asked for. Of an allocation also the distinct
// sectors of 32 bytes, counted from its start, if MachineOptions::count_sectors says so.
struct Traffic {
  std::uint64_t reads = 0, writes = 0, read_bytes = 0, written_bytes = 0;
  std::uint64_t read_sectors = 0, written_sectors = 0;
};
inline constexpr std::uint64_t kSectorBytes = 32;

// Totals over all threads of a launch. An instruction whose guard is false counts too.
struct LaunchCounters {
  std::uint64_t instructions = 0;
  std::array<std::uint64_t, kInstructionClasses> by_class{};
  std::uint64_t barriers = 0;         // completed, of blocks
  std::uint64_t warp_operations = 0;  // completed
  Traffic global, shared, local;
  std::map<std::uint32_t, Traffic> allocations;  // global, by the allocation's number
  // By instruction: whether a barrier of a block or of a warp was completed there.
  std::vector<bool> barriers_met;

  std::uint64_t of(InstructionClass kind) const { return by_class[static_cast<std::size_t>(kind)]; }
};

// Throws Fault with kernel, file and line, block and thread. `operation` stamps the accesses.
LaunchCounters run_kernel(const Kernel& kernel, const LaunchShape& shape,
                          const std::vector<std::uint8_t>& parameters, Memory& memory,
                          const History& history, std::uint32_t operation,
                          const MachineOptions& options);

}  // namespace verkv::cpu_device

#endif  // VERKV_TESTS_CPU_DEVICE_MACHINE_HPP
