#include "race.hpp"

#include <algorithm>

namespace verkv::cpu_device {

AcquiredPointer join(const AcquiredPointer& a, const AcquiredPointer& b) {
  if (!a || a == b) return b;
  if (!b) return a;
  auto both = std::make_shared<Acquired>(*a);
  for (const auto& [block, published] : *b) {
    Published& mine = (*both)[block];
    mine.barriers = std::max(mine.barriers, published.barriers);
    for (const auto& [thread, tick] : published.ticks) {
      std::uint32_t& seen = mine.ticks[thread];
      seen = std::max(seen, tick);
    }
  }
  return both;
}

void ThreadClock::see(std::uint16_t other, std::uint32_t tick, std::size_t threads) {
  latest_seen = std::max(latest_seen, tick);
  if (other / 32 == thread / 32) {
    warp_seen[other % 32] = std::max(warp_seen[other % 32], tick);
    return;
  }
  if (seen.empty()) seen.resize(threads);
  seen[other] = std::max(seen[other], tick);
}

void ThreadClock::merge(const ThreadClock& other, std::size_t threads) {
  const bool same_warp = other.thread / 32 == thread / 32;
  for (std::uint16_t lane = 0; lane < 32; ++lane) {
    const std::uint32_t tick = other.warp_seen[lane];
    if (tick == 0) continue;
    if (same_warp) {
      latest_seen = std::max(latest_seen, tick);
      warp_seen[lane] = std::max(warp_seen[lane], tick);
    } else {
      see(static_cast<std::uint16_t>(other.thread / 32 * 32 + lane), tick, threads);
    }
  }
  for (std::size_t i = 0; i < other.seen.size(); ++i) {
    if (other.seen[i] > 0) see(static_cast<std::uint16_t>(i), other.seen[i], threads);
  }
  acquired = join(acquired, other.acquired);
}

void ThreadClock::release(std::uint32_t tick, bool device) {
  Published own{barriers, {}};
  for (std::uint16_t lane = 0; lane < 32; ++lane) {
    if (warp_seen[lane] > 0)
      own.ticks[static_cast<std::uint16_t>(thread / 32 * 32 + lane)] = warp_seen[lane];
  }
  for (std::size_t i = 0; i < seen.size(); ++i) {
    if (seen[i] > 0) own.ticks[static_cast<std::uint16_t>(i)] = seen[i];
  }
  own.ticks[thread] = tick;
  auto snapshot = std::make_shared<Acquired>();
  (*snapshot)[block] = std::move(own);
  released_block = join(acquired, snapshot);
  if (device) released = released_block;
}

void ThreadClock::acquire(std::size_t threads, bool device) {
  if (!pending) return;
  if (device) acquired = join(acquired, pending);
  if (const auto own = pending->find(block); own != pending->end()) {
    for (const auto& [other, tick] : own->second.ticks) see(other, tick, threads);
  }
  if (device) pending = nullptr;
}

namespace {

bool ordered(const Access& earlier, const ThreadClock& me, const History& history) {
  if (earlier.operation != me.operation) return history.ordered(earlier.operation, me.operation);
  if (earlier.block != me.block) {
    if (!me.acquired) return false;
    const auto found = me.acquired->find(earlier.block);
    if (found == me.acquired->end()) return false;
    if (earlier.barriers < found->second.barriers) return true;
    const auto tick = found->second.ticks.find(earlier.thread);
    return tick != found->second.ticks.end() && earlier.tick < tick->second;
  }
  return earlier.barriers < me.barriers || earlier.thread == me.thread ||
         earlier.tick < me.seen_of(earlier.thread);
}

// Whether all reads of the cell are before what `me` does.
bool reads_ordered(const Cell& cell, const ThreadClock& me, std::uint64_t blocks,
                   const History& history) {
  const Access& last = cell.read;
  if (last.operation == 0) return true;
  if (last.operation != me.operation) return ordered(last, me, history);
  if (cell.many_blocks) {
    // Who read is not known, so only one that is ordered after every other block may write.
    return me.acquired && me.acquired->size() + (me.acquired->count(me.block) ? 0 : 1) == blocks;
  }
  if (last.block != me.block || last.barriers < me.barriers) return ordered(last, me, history);
  const auto passed = [&](std::uint32_t thread) {
    return thread == me.thread || last.tick < me.seen_of(static_cast<std::uint16_t>(thread));
  };
  for (std::uint32_t i = 0; i < 32; ++i) {
    if (!((cell.readers >> i) & 1)) continue;
    if (!cell.many_warps) {
      if (!passed(last.thread / 32U * 32U + i)) return false;
    } else {
      // One lane of a warp stands for all, since what orders warps orders them whole.
      if (i == me.thread / 32U ? cell.readers != (1U << i) && !passed(last.thread)
                               : !passed(i * 32))
        return false;
    }
  }
  return true;
}

}  // namespace

Conflict check_access(Cell& cell, const ThreadClock& me, std::uint32_t tick, std::uint32_t pc,
                      AccessKind kind, Strength strength, std::uint64_t blocks,
                      const History& history) {
  const Access now{me.operation, me.block, me.barriers, tick, pc, me.thread};
  const auto both_strong = [&](const Access& other, Strength others) {
    const bool same_block = other.operation == now.operation && other.block == now.block;
    return std::min(strength, others) >= (same_block ? Strength::block : Strength::device);
  };
  if (cell.write.operation != 0 && !both_strong(cell.write, cell.write_strength) &&
      !ordered(cell.write, me, history)) {
    return {cell.write, true};
  }
  if (kind == AccessKind::read) {
    const bool repeated = cell.read.operation == now.operation && cell.read.block == now.block &&
                          cell.read.thread == now.thread && cell.read.barriers == now.barriers &&
                          cell.read.tick == tick;
    if (!repeated) {
      const bool first =
          cell.read.operation != now.operation || reads_ordered(cell, me, blocks, history);
      first ? set_read(cell, now, strength) : add_read(cell, now, strength);
    } else {
      cell.reads_strength = std::min(cell.reads_strength, strength);
    }
    return {};
  }
  const bool strong = !cell.many_blocks
                          ? both_strong(cell.read, cell.reads_strength)
                          : std::min(strength, cell.reads_strength) == Strength::device;
  if (!strong && !reads_ordered(cell, me, blocks, history)) return {cell.read, false};
  // A strong write does not hide a plain one of the same thread that nothing has made visible
  // since.
  const Access& last = cell.write;
  const bool same_moment = last.operation == now.operation && last.block == now.block &&
                           last.thread == now.thread && last.barriers == now.barriers &&
                           last.tick == now.tick;
  cell.write_strength = same_moment ? std::min(cell.write_strength, strength) : strength;
  cell.write = now;
  cell.read = {};
  return {};
}

}  // namespace verkv::cpu_device
