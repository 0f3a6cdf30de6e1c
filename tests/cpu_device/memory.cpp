#include "memory.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <sstream>

namespace verkv::cpu_device {

std::string name_of(FaultKind kind) {
  switch (kind) {
    case FaultKind::out_of_bounds:
      return "out of bounds";
    case FaultKind::misaligned:
      return "misaligned access";
    case FaultKind::use_after_free:
      return "use after free";
    case FaultKind::uninitialised:
      return "uninitialised read";
    case FaultKind::race:
      return "race";
    case FaultKind::barrier:
      return "barrier";
    case FaultKind::warp:
      return "warp operation";
    case FaultKind::unsupported:
      return "unsupported instruction";
    case FaultKind::trap:
      return "trap";
    case FaultKind::endless:
      return "no progress";
    case FaultKind::launch:
      return "launch";
    default:
      return "copy";
  }
}

// ---- pages

PagedBytes::PagedBytes(std::uint64_t size, std::uint8_t* host)
    : size_(size),
      count_(size / kPageBytes + 1),
      host_(host),
      pages_(static_cast<Page**>(std::calloc(count_, sizeof(Page*))), &std::free) {
  if (!pages_) throw std::bad_alloc();
}

PagedBytes::~PagedBytes() { reset(); }

void PagedBytes::reset() {
  for (std::uint64_t i = 0; touched_ > 0 && i < count_; ++i) {
    Page*& page = pages_.get()[i];
    if (!page) continue;
    delete page;
    page = nullptr;
    --touched_;
  }
}

Page& PagedBytes::create(Page*& slot, std::uint64_t index) {
  auto page = std::make_unique<Page>();
  if (host_) {
    page->data = host_ + index * kPageBytes;
  } else {
    page->owned = std::make_unique<std::uint8_t[]>(kPageBytes);
    page->initialised = std::make_unique<std::uint8_t[]>(kPageBytes);
    std::memset(page->owned.get(), kPoison, kPageBytes);
    page->data = page->owned.get();
  }
  ++touched_;
  slot = page.release();
  return *slot;
}

Cell* PagedBytes::cells(std::uint64_t offset, unsigned bytes, unsigned& count) {
  Page& found = page(offset);
  const std::size_t at = offset % kPageBytes;
  const bool words = at % 4 == 0 && bytes % 4 == 0;
  if (!found.cells) {
    found.bytewise = !words;
    const std::size_t granules = words ? kPageBytes / 4 : kPageBytes;
    found.cells = std::make_unique<Cell[]>(granules);
    if (found.whole.write.operation != 0 || found.whole.read.operation != 0) {
      std::fill_n(found.cells.get(), granules, found.whole);
      found.whole = {};
    }
  } else if (!words && !found.bytewise) {
    auto finer = std::make_unique<Cell[]>(kPageBytes);
    for (std::size_t i = 0; i < kPageBytes; ++i) finer[i] = found.cells[i / 4];
    found.cells = std::move(finer);
    found.bytewise = true;
  }
  count = found.bytewise ? bytes : bytes / 4;
  return &found.cells[found.bytewise ? at : at / 4];
}

// ---- allocations

Allocation* Memory::allocate(std::uint64_t bytes, AllocationKind kind, const std::string& label,
                             Allocation::State state) {
  if (bytes > capacity_ - used_) return nullptr;
  auto allocation = std::make_unique<Allocation>();
  allocation->id = next_id_++;
  allocation->address = next_;
  allocation->bytes = bytes;
  allocation->kind = kind;
  allocation->state = state;
  allocation->label = label.empty() ? "allocation " + std::to_string(allocation->id) : label;
  allocation->contents = std::make_unique<PagedBytes>(bytes);
  // What lies between two allocations belongs to none.
  next_ += (bytes + 65536 + 511) / 512 * 512;
  used_ += bytes;
  Allocation* result = allocation.get();
  allocations_[result->address] = std::move(allocation);
  return result;
}

Allocation* Memory::attach(void* host, std::uint64_t bytes, AllocationKind kind) {
  auto allocation = std::make_unique<Allocation>();
  allocation->id = next_id_++;
  allocation->address = reinterpret_cast<Address>(host);
  allocation->bytes = bytes;
  allocation->kind = kind;
  allocation->label = "host memory " + std::to_string(allocation->id);
  // Pages are counted from the start of the memory, so that they never end beyond it.
  allocation->contents = std::make_unique<PagedBytes>(bytes, static_cast<std::uint8_t*>(host));
  Allocation* result = allocation.get();
  // The host's allocator may hand out an address again; nobody says when pageable memory goes.
  const auto covers = [&](const Allocation& old) {
    const bool gone = old.state == Allocation::State::freed || old.kind == AllocationKind::pageable;
    return gone && old.address < result->address + bytes &&
           result->address < old.address + old.bytes;
  };
  for (auto it = allocations_.begin(); it != allocations_.end();) {
    it = covers(*it->second) ? allocations_.erase(it) : std::next(it);
  }
  allocations_[result->address] = std::move(allocation);
  return result;
}

void Memory::release(Allocation& allocation) {
  const bool device = allocation.kind == AllocationKind::device ||
                      allocation.kind == AllocationKind::module_variable;
  if (device && allocation.state != Allocation::State::freed) used_ -= allocation.bytes;
  allocation.state = Allocation::State::freed;
  allocation.contents.reset();
}

Allocation* Memory::find(Address address) {
  auto next = allocations_.upper_bound(address);
  if (next == allocations_.begin()) return nullptr;
  Allocation& found = *std::prev(next)->second;
  const bool inside = address - found.address < std::max<std::uint64_t>(found.bytes, 1);
  return inside ? &found : nullptr;
}

std::string describe(const Allocation& allocation, Address address, std::uint64_t bytes) {
  std::ostringstream text;
  text << bytes << " bytes at offset " << static_cast<std::int64_t>(address - allocation.address)
       << " of the " << allocation.bytes << " bytes of " << allocation.label;
  return text.str();
}

Allocation& Memory::at(Address address, std::uint64_t bytes) {
  Allocation* found = find(address);
  if (!found) {
    std::ostringstream text;
    text << bytes << " bytes at address 0x" << std::hex << address << " belong to no allocation";
    const auto next = allocations_.upper_bound(address);
    if (next != allocations_.begin()) {
      text << "; nearest before: " << describe(*std::prev(next)->second, address, bytes);
    } else if (next != allocations_.end() && next->first - address < 65536) {
      text << "; nearest after: " << describe(*next->second, address, bytes);
    }
    throw Fault(FaultKind::out_of_bounds, text.str());
  }
  if (found->state == Allocation::State::freed) {
    throw Fault(FaultKind::use_after_free, describe(*found, address, bytes) + ", which was freed");
  }
  if (found->state == Allocation::State::pending) {
    throw Fault(FaultKind::use_after_free,
                describe(*found, address, bytes) + ", whose allocation in its stream comes later");
  }
  if (address + bytes > found->address + found->bytes) {
    throw Fault(FaultKind::out_of_bounds, describe(*found, address, bytes));
  }
  return *found;
}

void report_race(AccessKind kind, bool other_writes, const std::string& place,
                 const std::string& other) {
  throw Fault(FaultKind::race, std::string(kind == AccessKind::read ? "read" : "write") + " of " +
                                   place + " without order after the " +
                                   (other_writes ? "write" : "read") + " by " + other);
}

// ---- copies

void Memory::check_range(const ThreadClock& who, Allocation& allocation, std::uint64_t offset,
                         std::uint64_t bytes, AccessKind kind, const History& history) {
  if (!check_races) return;
  const auto check = [&](Cell& cell, std::uint64_t at, unsigned step) {
    const Conflict found = check_access(cell, who, 0, 0, kind, Strength::plain, 1, history);
    if (found.other.operation != 0) {
      report_race(kind, found.other_writes, describe(allocation, allocation.address + at, step),
                  history.describe(found.other));
    }
  };
  for (std::uint64_t at = offset; at < offset + bytes;) {
    const std::uint64_t left = offset + bytes - at;
    Page& page = allocation.contents->page(at);
    const bool whole_page = at % kPageBytes == 0 && left >= kPageBytes;
    if (whole_page && !page.cells) {
      check(page.whole, at, kPageBytes);
      at += kPageBytes;
      continue;
    }
    const std::uint64_t end = whole_page ? at + kPageBytes : 0;
    do {
      const unsigned step = at % 4 == 0 && offset + bytes - at >= 4 ? 4 : 1;
      unsigned count = 0;
      Cell* cells = allocation.contents->cells(at, step, count);
      for (unsigned i = 0; i < count; ++i) check(cells[i], at, step);
      at += step;
    } while (at < end);
    if (whole_page && kind == AccessKind::write) {
      page.whole = page.cells[0];
      page.cells = nullptr;
      page.bytewise = false;
    }
  }
}

void Memory::write(const ThreadClock& who, Address to, const void* from, std::uint64_t bytes,
                   const History& history) {
  if (bytes == 0) return;
  Allocation& allocation = at(to, bytes);
  const std::uint64_t offset = to - allocation.address;
  check_range(who, allocation, offset, bytes, AccessKind::write, history);
  const auto* source = static_cast<const std::uint8_t*>(from);
  for (std::uint64_t done = 0; done < bytes;) {
    Page& page = allocation.contents->page(offset + done);
    const std::size_t within = (offset + done) % kPageBytes;
    const std::size_t step = std::min<std::uint64_t>(kPageBytes - within, bytes - done);
    std::memmove(page.data + within, source + done, step);
    if (page.initialised) std::memset(page.initialised.get() + within, 0xff, step);
    done += step;
  }
}

void Memory::read(const ThreadClock& who, void* to, Address from, std::uint64_t bytes,
                  const History& history) {
  if (bytes == 0) return;
  Allocation& allocation = at(from, bytes);
  const std::uint64_t offset = from - allocation.address;
  check_range(who, allocation, offset, bytes, AccessKind::read, history);
  auto* target = static_cast<std::uint8_t*>(to);
  for (std::uint64_t done = 0; done < bytes;) {
    const std::size_t within = (offset + done) % kPageBytes;
    const std::size_t step = std::min<std::uint64_t>(kPageBytes - within, bytes - done);
    std::memmove(target + done, allocation.contents->page(offset + done).data + within, step);
    done += step;
  }
}

void Memory::copy(const ThreadClock& who, Address to, Address from, std::uint64_t bytes,
                  const History& history) {
  if (bytes == 0) return;
  Allocation& source = at(from, bytes);
  Allocation& target = at(to, bytes);
  const std::uint64_t from_offset = from - source.address;
  const std::uint64_t to_offset = to - target.address;
  check_range(who, source, from_offset, bytes, AccessKind::read, history);
  check_range(who, target, to_offset, bytes, AccessKind::write, history);
  // Bytes that nobody wrote stay so in the copy.
  for (std::uint64_t i = 0; i < bytes; ++i) {
    const Page& a = source.contents->page(from_offset + i);
    Page& b = target.contents->page(to_offset + i);
    const std::size_t from_at = (from_offset + i) % kPageBytes;
    const std::size_t to_at = (to_offset + i) % kPageBytes;
    b.data[to_at] = a.data[from_at];
    if (b.initialised) b.initialised[to_at] = a.initialised ? a.initialised[from_at] : 0xff;
  }
}

void Memory::fill(const ThreadClock& who, Address to, std::uint8_t value, std::uint64_t bytes,
                  const History& history) {
  if (bytes == 0) return;
  Allocation& allocation = at(to, bytes);
  const std::uint64_t offset = to - allocation.address;
  check_range(who, allocation, offset, bytes, AccessKind::write, history);
  for (std::uint64_t done = 0; done < bytes;) {
    Page& page = allocation.contents->page(offset + done);
    const std::size_t within = (offset + done) % kPageBytes;
    const std::size_t step = std::min<std::uint64_t>(kPageBytes - within, bytes - done);
    std::memset(page.data + within, value, step);
    if (page.initialised) std::memset(page.initialised.get() + within, 0xff, step);
    done += step;
  }
}

}  // namespace verkv::cpu_device
