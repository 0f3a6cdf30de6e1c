// Which accesses happen before which, and the check that two conflicting ones are ordered.
//
// Within a block an access is stamped with the number of whole-block barriers its thread had passed
// and with a tick that every other synchronisation of the block advances; a thread knows, for each
// other thread, the tick up to which it has seen it. Blocks order each other only by fences and
// atomics, launches and copies only by streams and events.
#ifndef VERKV_TESTS_CPU_DEVICE_RACE_HPP
#define VERKV_TESTS_CPU_DEVICE_RACE_HPP

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace verkv::cpu_device {

// One access of one thread. Operation 0 is none.
struct Access {
  std::uint32_t operation = 0, block = 0, barriers = 0, tick = 0, pc = 0;
  std::uint16_t thread = 0;
};

enum class AccessKind : std::uint8_t { read, write };

// Strong accesses (atomic, volatile, relaxed and so on) do not race with each other within their
// scopes: the block, or the device and beyond.
enum class Strength : std::uint8_t { plain, block, device };

// The accesses to one granule of memory that a later one may conflict with: the last write and
// the reads since. Of several reads only the last is kept in full, and who the others were.
struct Cell {
  Access write, read;
  Strength write_strength = Strength::plain, reads_strength = Strength::plain;
  bool many_blocks = false, many_warps = false;
  std::uint32_t readers = 0;  // lanes of one warp, or warps
};

// What another block has made visible: all that was before its barrier `barriers`, and of each
// thread what was before a tick.
struct Published {
  std::uint32_t barriers = 0;
  std::map<std::uint16_t, std::uint32_t> ticks;
};
using Acquired = std::map<std::uint32_t, Published>;  // by block
using AcquiredPointer = std::shared_ptr<const Acquired>;

AcquiredPointer join(const AcquiredPointer& a, const AcquiredPointer& b);

// Order between operations of the device: launches, copies, fills.
class History {
 public:
  virtual ~History() = default;
  virtual bool ordered(std::uint32_t earlier, std::uint32_t later) const = 0;
  // The place of an access: its kernel, file and line, or the copy.
  virtual std::string describe(const Access& access) const = 0;
};

struct ThreadClock {
  std::uint32_t operation = 0, block = 0, barriers = 0;
  std::uint16_t thread = 0;
  std::uint32_t latest_seen = 0;              // the greatest tick of those below
  AcquiredPointer acquired;                   // what it is ordered after
  std::array<std::uint32_t, 32> warp_seen{};  // ticks of the lanes of its own warp
  std::vector<std::uint32_t> seen;            // of all threads; empty until something needs it
  AcquiredPointer pending;                    // what it has read without a fence since
  AcquiredPointer released;        // what its last fence made ready for publication to the device
  AcquiredPointer released_block;  // and to the block

  std::uint32_t seen_of(std::uint16_t other) const {
    const std::uint32_t dense = other < seen.size() ? seen[other] : 0;
    const std::uint32_t lane = other / 32 == thread / 32 ? warp_seen[other % 32] : 0;
    return dense > lane ? dense : lane;
  }
  void see(std::uint16_t other, std::uint32_t tick, std::size_t threads);
  // Takes over all that another thread of the same block is ordered after.
  void merge(const ThreadClock& other, std::size_t threads);
  // A fence, or the acquire or release of an access; with the scope of the device or the block.
  void release(std::uint32_t tick, bool device);
  void acquire(std::size_t threads, bool device);
};

// Checks one access and remembers it. Returns the access that it races with; operation 0 if none.
// `blocks` is the number of blocks of the launch.
struct Conflict {
  Access other;
  bool other_writes = false;
};
Conflict check_access(Cell& cell, const ThreadClock& me, std::uint32_t tick, std::uint32_t pc,
                      AccessKind kind, Strength strength, std::uint64_t blocks,
                      const History& history);

// Adds a read that the earlier ones are not known to be before to what the cell knows of them.
inline void add_read(Cell& cell, const Access& now, Strength strength) {
  cell.reads_strength = strength < cell.reads_strength ? strength : cell.reads_strength;
  const unsigned warp = now.thread / 32U;
  const unsigned last_warp = cell.read.thread / 32U;
  if (cell.many_blocks) {
    // Who they were is not known any more.
  } else if (cell.read.block != now.block) {
    cell.many_blocks = true;
  } else if (cell.many_warps) {
    cell.readers |= 1U << warp % 32;
  } else if (warp == last_warp) {
    cell.readers |= 1U << now.thread % 32;
  } else {
    cell.many_warps = true;
    cell.readers = 1U << warp % 32 | 1U << last_warp % 32;
  }
  cell.read = now;
}

// Makes a read the only one that the cell knows.
inline void set_read(Cell& cell, const Access& now, Strength strength) {
  cell.many_blocks = cell.many_warps = false;
  cell.readers = 1U << now.thread % 32;
  cell.reads_strength = strength;
  cell.read = now;
}

// Does what check_access does for a plain access in the cases that are most, and returns true;
// false: it has done nothing. `before(operation)` tells whether another operation is before the own
// one.
template <typename Before>
bool check_quickly(Cell& cell, const ThreadClock& me, std::uint32_t tick, std::uint32_t pc,
                   AccessKind kind, const Before& before) {
  const Access& write = cell.write;
  if (write.operation == me.operation) {
    if (write.block != me.block || (write.barriers >= me.barriers && write.thread != me.thread &&
                                    write.tick >= me.seen_of(write.thread))) {
      return false;
    }
  } else if (write.operation != 0 && !before(write.operation)) {
    return false;
  }
  const Access& read = cell.read;
  const Access now{me.operation, me.block, me.barriers, tick, pc, me.thread};
  const bool own = read.operation == me.operation;
  const bool same_moment = own && read.block == me.block && read.barriers == me.barriers;
  const bool alone = read.thread == me.thread && !cell.many_blocks && !cell.many_warps &&
                     cell.readers == 1U << me.thread % 32;
  if (kind == AccessKind::read) {
    if (!own) {
      set_read(cell, now, Strength::plain);
    } else if (same_moment && read.thread == me.thread && read.tick == tick) {
      cell.reads_strength = Strength::plain;
    } else if (cell.many_blocks || read.block != me.block) {
      if (me.acquired) return false;
      add_read(cell, now, Strength::plain);
    } else if (read.barriers < me.barriers || (same_moment && alone)) {
      set_read(cell, now, Strength::plain);
    } else if (same_moment && read.tick >= me.latest_seen) {
      // Nothing has ordered this thread after another one since.
      add_read(cell, now, Strength::plain);
    } else {
      return false;
    }
    return true;
  }
  if (own) {
    if (cell.many_blocks || read.block != me.block) return false;
    if (read.barriers >= me.barriers && !(same_moment && alone)) return false;
  } else if (read.operation != 0 && !before(read.operation)) {
    return false;
  }
  cell.write_strength = Strength::plain;
  cell.write = now;
  cell.read = {};
  return true;
}

// Right after `first` has read the cell: whether other lanes of its warp that have passed as many
// barriers and acquired nothing may read it too at the same moment, whatever else they have seen.
inline bool read_alike(const Cell& cell, const ThreadClock& first, std::uint32_t tick) {
  const Access& write = cell.write;
  const Access& read = cell.read;
  return (write.operation != first.operation ||
          (write.block == first.block && write.barriers < first.barriers)) &&
         read.operation == first.operation && read.block == first.block &&
         read.barriers == first.barriers && read.thread == first.thread && read.tick == tick;
}

// Does for those lanes what check_access would do one after the other; `last` is what the last of
// them does.
inline void add_alike(Cell& cell, std::uint32_t lanes, const Access& last) {
  if (!cell.many_blocks && !cell.many_warps) cell.readers |= lanes;
  cell.read = last;
}

}  // namespace verkv::cpu_device

#endif  // VERKV_TESTS_CPU_DEVICE_RACE_HPP
