// Memory of the device: windows with bounds, alignment, lifetime, initialisation and race checks.
//
// Addresses of device memory are numbers that no host pointer can be: a host program that follows
// one stops at once. Contents come into being, page by page, when they are touched, so that an
// allocation may be far larger than the machine's memory. Addresses are never used twice.
#ifndef VERKV_TESTS_CPU_DEVICE_MEMORY_HPP
#define VERKV_TESTS_CPU_DEVICE_MEMORY_HPP

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>

#include "race.hpp"

namespace verkv::cpu_device {

using Address = std::uint64_t;

inline constexpr Address kDeviceBase = Address{1} << 56;
inline constexpr Address kSharedBase = Address{1} << 60;  // generic addresses of shared memory
inline constexpr Address kLocalBase = Address{1} << 61;   // of local memory
inline constexpr Address kParamBase = Address{1} << 59;   // and of the parameters
inline constexpr std::size_t kPageBytes = 4096;
inline constexpr std::uint8_t kPoison = 0xCD;  // of bytes that nobody wrote

enum class FaultKind : std::uint8_t {
  out_of_bounds,
  misaligned,
  use_after_free,
  uninitialised,
  race,
  barrier,
  warp,
  unsupported,
  trap,
  endless,
  launch,
  copy
};
std::string name_of(FaultKind kind);

// What a check found. `what()` says it in full; the machine has added kernel, place and thread.
struct Fault : std::runtime_error {
  Fault(FaultKind found, const std::string& text) : std::runtime_error(text), kind(found) {}
  FaultKind kind;
};

struct Page {
  std::uint8_t* data = nullptr;                 // kPageBytes of them
  std::unique_ptr<std::uint8_t[]> owned;        // unless they are the host's
  std::unique_ptr<std::uint8_t[]> initialised;  // 0xff where written; none: all of it
  std::unique_ptr<Cell[]> cells;                // a granule is 4 bytes
  bool bytewise = false;                        // or 1, once a smaller access was seen
  Cell whole;  // without cells: of every granule, as copies of whole pages leave it
};

// Bytes with their checks, in pages. With `host` they are memory of the host's.
class PagedBytes {
 public:
  explicit PagedBytes(std::uint64_t size, std::uint8_t* host = nullptr);
  std::uint64_t size() const { return size_; }
  Page& page(std::uint64_t offset) {
    Page*& found = pages_.get()[offset / kPageBytes];
    return found ? *found : create(found, offset / kPageBytes);
  }
  bool touched(std::uint64_t offset) const { return pages_.get()[offset / kPageBytes] != nullptr; }
  std::uint64_t touched_bytes() const { return touched_ * kPageBytes; }
  // The granules' state for an access of `bytes` at `offset`: a first one and their number.
  Cell* cells(std::uint64_t offset, unsigned bytes, unsigned& count);
  // Forgets contents, initialisation and accesses.
  void reset();
  ~PagedBytes();
  PagedBytes(const PagedBytes&) = delete;
  PagedBytes& operator=(const PagedBytes&) = delete;

 private:
  Page& create(Page*& slot, std::uint64_t index);
  std::uint64_t size_, count_;
  std::uint8_t* host_;
  // calloc: the table of a huge allocation costs nothing either until it is touched.
  std::unique_ptr<Page*, decltype(&std::free)> pages_;
  std::uint64_t touched_ = 0;
};

// managed: of the runtime, for host and device; pageable: of the program, named by advice.
enum class AllocationKind : std::uint8_t {
  device,
  module_variable,
  pinned,
  registered,
  managed,
  pageable
};

struct Allocation {
  enum class State : std::uint8_t { pending, live, freed };
  std::uint32_t id = 0;
  Address address = 0;
  std::uint64_t bytes = 0;
  AllocationKind kind = AllocationKind::device;
  State state = State::live;
  std::string label;
  std::unique_ptr<PagedBytes> contents;  // gone once freed
};

class Memory {
 public:
  // Memory with these many bytes for device allocations.
  explicit Memory(std::uint64_t capacity) : capacity_(capacity) {}

  // Null if there is not enough left.
  Allocation* allocate(std::uint64_t bytes, AllocationKind kind, const std::string& label,
                       Allocation::State state = Allocation::State::live);
  // Makes memory of the host accessible to kernels, at its own address.
  Allocation* attach(void* host, std::uint64_t bytes, AllocationKind kind);
  // The freed allocation stays known, so that later accesses are explained.
  void release(Allocation& allocation);

  // The allocation that the address lies in, also a freed one; null if there is none.
  Allocation* find(Address address);
  // The same for an access, which must lie inside a live one. Throws Fault.
  Allocation& at(Address address, std::uint64_t bytes);
  std::uint64_t used() const { return used_; }
  std::uint64_t capacity() const { return capacity_; }

  // What copies do to memory of the device: `who` orders them. Throw Fault.
  void write(const ThreadClock& who, Address to, const void* from, std::uint64_t bytes,
             const History& history);
  void read(const ThreadClock& who, void* to, Address from, std::uint64_t bytes,
            const History& history);
  void copy(const ThreadClock& who, Address to, Address from, std::uint64_t bytes,
            const History& history);
  void fill(const ThreadClock& who, Address to, std::uint8_t value, std::uint64_t bytes,
            const History& history);

  bool check_races = true;

 private:
  void check_range(const ThreadClock& who, Allocation& allocation, std::uint64_t offset,
                   std::uint64_t bytes, AccessKind kind, const History& history);
  std::uint64_t capacity_, used_ = 0;
  Address next_ = kDeviceBase;
  std::uint32_t next_id_ = 1;
  std::map<Address, std::unique_ptr<Allocation>> allocations_;
};

// "12 bytes at offset 8 of the 16 bytes of 'name'".
std::string describe(const Allocation& allocation, Address address, std::uint64_t bytes);

// Throws the fault of a race.
[[noreturn]] void report_race(AccessKind kind, bool other_writes, const std::string& place,
                              const std::string& other);

}  // namespace verkv::cpu_device

#endif  // VERKV_TESTS_CPU_DEVICE_MEMORY_HPP
