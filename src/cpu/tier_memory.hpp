// Where the memory of a tier comes from: of the engine's functions, where it has given some.
#ifndef VERKV_SRC_CPU_TIER_MEMORY_HPP
#define VERKV_SRC_CPU_TIER_MEMORY_HPP

#include <cstddef>
#include <new>
#include <type_traits>
#include <vector>

#include <verkv/settings.hpp>

namespace verkv::cpu {

// Every block of a tier: cache-line aligned, so that rows and codes do not straddle lines needlessly.
inline constexpr std::size_t kTierAlignment = 64;

// Outlives what it gives. Any thread may call. null stands for operator new.
class TierMemory {
 public:
  explicit TierMemory(const TierAllocator& allocator) : allocator_(allocator) {}

  // Throws std::bad_alloc.
  static void* allocate(const TierMemory* from, std::size_t bytes) {
    if (from == nullptr || from->allocator_.allocate == nullptr)
      return ::operator new (bytes, std::align_val_t{kTierAlignment});
    const TierAllocator& engine = from->allocator_;
    void* const memory = engine.allocate(engine.user, bytes, kTierAlignment);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
  }
  static void release(const TierMemory* to, void* memory, std::size_t bytes) noexcept {
    if (to == nullptr || to->allocator_.release == nullptr) {
      ::operator delete (memory, std::align_val_t{kTierAlignment});
    } else {
      to->allocator_.release(to->allocator_.user, memory, bytes, kTierAlignment);
    }
  }

 private:
  TierAllocator allocator_;
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
