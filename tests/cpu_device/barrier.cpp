#include <algorithm>
#include <map>
#include <sstream>

#include "block.hpp"

namespace verkv::cpu_device {

// bar.sync a {, b}    bar.arrive a, b    bar.red d, a {, b}, p
void Block::arrive(Thread& thread, const Instruction& in) {
  const bool reduces = in.opcode == Opcode::barrier_reduce;
  const std::size_t first = reduces ? 1 : 0;
  const std::size_t count_at = first + 1;
  const bool counted = in.operand_count > count_at + (reduces ? 1U : 0U);
  const std::uint64_t number = value(thread, in.operands[first]);
  if (number >= barriers_.size()) fail(thread, FaultKind::barrier, "no barrier has this number");
  Barrier& barrier = barriers_[number];
  const std::uint64_t count = counted ? value(thread, in.operands[count_at]) : 0;
  if (count % 32 != 0) {
    fail(thread, FaultKind::barrier,
         "the number of threads, " + std::to_string(count) + ", is not a multiple of a warp");
  }
  if (!barrier.arrivals.empty() && barrier.count != count) {
    fail(thread, FaultKind::barrier,
         "barrier " + std::to_string(number) + " counts " + std::to_string(count) +
             " threads here and " + std::to_string(barrier.count) + " at " +
             kernel_.where(barrier.arrivals.front().pc) + " (0: all)");
  }
  barrier.count = count;
  Arrival arrival;
  arrival.thread = thread.index;
  arrival.pc = thread.pc;
  arrival.tick = ++tick_;
  arrival.waits = thread.state == State::at_barrier;
  if (reduces) arrival.predicate = value(thread, in.operands[in.operand_count - 1U]) != 0;
  if (!arrival.waits) {
    arrival.clock = std::make_shared<const ThreadClock>(thread.clock);
    for (const Arrival& other : barrier.arrivals) {
      if (other.thread == thread.index) {
        fail(thread, FaultKind::barrier, "a second arrival before the barrier was complete");
      }
    }
  }
  barrier.arrivals.push_back(std::move(arrival));
  if (complete(barrier)) {
    check_alignment(barrier, number);
    release(barrier, number);
  }
}

bool Block::complete(const Barrier& barrier) const {
  if (barrier.count == 0) return barrier.arrivals.size() == threads_.size();
  // Arrivals count by warps. A warp has arrived when all of its threads have.
  const std::size_t threads = threads_.size();
  std::map<std::uint32_t, std::size_t> by_warp;
  if (barrier.arrivals.size() + 31 < barrier.count && threads % 32 == 0) return false;
  for (const Arrival& arrival : barrier.arrivals) ++by_warp[arrival.thread / 32];
  std::uint64_t arrived = 0;
  for (const auto& [warp, lanes] : by_warp) {
    if (lanes == std::min<std::size_t>(32, threads - std::size_t{warp} * 32)) arrived += 32;
  }
  return arrived == barrier.count;
}

void Block::check_alignment(const Barrier& barrier, std::uint64_t number) {
  const Arrival& first = barrier.arrivals.front();
  std::map<std::uint32_t, const Arrival*> of_warp;
  for (const Arrival& arrival : barrier.arrivals) {
    const Arrival*& warp = of_warp.try_emplace(arrival.thread / 32, &arrival).first->second;
    const Arrival& other = barrier.count == 0 ? first : *warp;
    if (arrival.pc == other.pc) continue;
    Thread& thread = threads_[arrival.thread];
    thread.pc = arrival.pc;
    fail(thread, FaultKind::barrier,
         "divergent: threads of " + std::string(barrier.count == 0 ? "the block" : "one warp") +
             " meet at barrier " + std::to_string(number) + " from different places; thread " +
             name(threads_[other.thread]) + " is at " + kernel_.where(other.pc));
  }
}

void Block::release(Barrier& barrier, std::uint64_t) {
  ++counters_.barriers;
  const bool everyone = barrier.arrivals.size() == threads_.size() &&
                        std::all_of(barrier.arrivals.begin(), barrier.arrivals.end(),
                                    [](const Arrival& arrival) { return arrival.waits; });
  if (everyone)
    order_all(barrier);
  else
    order_some(barrier);
  std::uint64_t yes = 0;
  for (const Arrival& arrival : barrier.arrivals) {
    yes += arrival.predicate;
    counters_.barriers_met[arrival.pc] = true;
  }
  for (const Arrival& arrival : barrier.arrivals) {
    if (!arrival.waits) continue;
    Thread& thread = threads_[arrival.thread];
    const Instruction& in = kernel_.code[arrival.pc];
    if (in.opcode == Opcode::barrier_reduce) {
      const std::uint64_t result = in.mode == 0   ? yes
                                   : in.mode == 1 ? yes == barrier.arrivals.size()
                                                  : yes > 0;
      set(thread, in.operands[0], in.mode == 0 ? Type::u32 : Type::pred, result);
    }
    thread.state = State::ready;
    ++thread.pc;
  }
  barrier.arrivals.clear();
}

void Block::order_all(Barrier& barrier) {
  AcquiredPointer acquired;
  for (const Arrival& arrival : barrier.arrivals) {
    acquired = join(acquired, threads_[arrival.thread].clock.acquired);
  }
  ++tick_;
  for (Thread& thread : threads_) {
    ++thread.clock.barriers;
    thread.clock.latest_seen = 0;
    thread.clock.warp_seen = {};
    thread.clock.seen.clear();
    thread.clock.acquired = acquired;
  }
}

void Block::order_some(Barrier& barrier) {
  const std::size_t threads = threads_.size();
  std::vector<ThreadClock> before;
  before.reserve(barrier.arrivals.size());
  for (const Arrival& arrival : barrier.arrivals) {
    before.push_back(arrival.waits ? threads_[arrival.thread].clock : *arrival.clock);
  }
  // All that wait see the same; it is put together once.
  ThreadClock sum;
  sum.thread = before.front().thread;
  for (std::size_t i = 0; i < before.size(); ++i) {
    sum.merge(before[i], threads);
    sum.see(before[i].thread, barrier.arrivals[i].tick, threads);
  }
  for (const Arrival& arrival : barrier.arrivals) {
    if (arrival.waits) threads_[arrival.thread].clock.merge(sum, threads);
  }
}

void Block::report_deadlock() const {
  std::map<std::string, std::size_t> places;
  std::size_t exited = 0;
  bool at_barrier = false;
  const Thread* first = nullptr;
  for (const Thread& thread : threads_) {
    if (thread.state == State::exited) {
      ++exited;
      continue;
    }
    if (!first || (thread.state == State::at_barrier && !at_barrier)) first = &thread;
    at_barrier = at_barrier || thread.state == State::at_barrier;
    ++places[kernel_.mnemonics[thread.pc] + " at " + kernel_.where(thread.pc)];
  }
  std::ostringstream text;
  text << "divergent, nobody can go on:";
  for (const auto& [place, threads] : places)
    text << ' ' << threads << " threads wait in " << place << ';';
  text << ' ' << exited << " threads have exited";
  fail(*first, at_barrier ? FaultKind::barrier : FaultKind::warp, text.str());
}

}  // namespace verkv::cpu_device
