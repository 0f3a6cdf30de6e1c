// Where the memory of a tier comes from: of the engine's functions, where it has given some.
#ifndef VERKV_SRC_CPU_TIER_MEMORY_HPP
#define VERKV_SRC_CPU_TIER_MEMORY_HPP

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <type_traits>
#include <vector>

#include <verkv/settings.hpp>

namespace verkv::cpu {

// Every block of a tier: cache-line aligned, so that rows and codes do not straddle lines needlessly.
inline constexpr std::size_t kTierAlignment = 64;

// Outlives what it gives, and keeps to the tier's limit. Any thread may call. null stands for operator
// new.
class TierMemory {
 public:
  TierMemory(const TierAllocator& allocator, bool is_fast, std::optional<std::int64_t> limit)
      : allocator_(allocator), limit_(limit), is_fast_(is_fast) {}

  // Throws CapacityError beyond the limit, and std::bad_alloc.
  static void* allocate(const TierMemory* from, std::size_t bytes) {
    return from != nullptr ? from->get(bytes)
                           : ::operator new (bytes, std::align_val_t{kTierAlignment});
  }
  static void release(const TierMemory* to, void* memory, std::size_t bytes) noexcept {
    if (to != nullptr) {
      to->put(memory, bytes);
    } else {
      ::operator delete (memory, std::align_val_t{kTierAlignment});
    }
  }

 private:
  void* get(std::size_t bytes) const;
  void put(void* memory, std::size_t bytes) const noexcept;

  TierAllocator allocator_;
  std::optional<std::int64_t> limit_;
  bool is_fast_;
  mutable std::atomic<std::int64_t> held_{0};
};

// Of the standard containers. A copy of a container is in the same tier.
template <class T>
struct TierAllocatorOf {
  using value_type = T;
  using propagate_on_container_copy_assignment = std::true_type;
  using propagate_on_container_move_assignment = std::true_type;
  using propagate_on_container_swap = std::true_type;

  // NOLINTNEXTLINE(google-explicit-constructor): a vector is made with the tier alone.
  TierAllocatorOf(const TierMemory* tier = nullptr) : memory(tier) {}
  template <class U>
  explicit TierAllocatorOf(const TierAllocatorOf<U>& other) : memory(other.memory) {}
  T* allocate(std::size_t n) {
    return static_cast<T*>(TierMemory::allocate(memory, n * sizeof(T)));
  }
  void deallocate(T* p, std::size_t n) noexcept { TierMemory::release(memory, p, n * sizeof(T)); }
  friend bool operator==(TierAllocatorOf a, TierAllocatorOf b) { return a.memory == b.memory; }

  const TierMemory* memory;
};

template <class T>
using AlignedVector = std::vector<T, TierAllocatorOf<T>>;

}  // namespace verkv::cpu

#endif  // VERKV_SRC_CPU_TIER_MEMORY_HPP
