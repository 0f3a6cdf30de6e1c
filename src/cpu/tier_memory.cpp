#include "cpu/tier_memory.hpp"

#include <new>

#include "tier_bytes.hpp"

namespace verkv::cpu {

void* TierMemory::get(std::size_t bytes) const {
  const std::int64_t count = static_cast<std::int64_t>(bytes);
  const std::int64_t before = held_.fetch_add(count);
  try {
    if (limit_ && before + count > *limit_) raise_limit(is_fast_, before, count, *limit_);
    if (allocator_.allocate == nullptr)
      return ::operator new (bytes, std::align_val_t{kTierAlignment});
    void* const memory = allocator_.allocate(allocator_.user, bytes, kTierAlignment);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
  } catch (...) {
    held_ -= count;
    throw;
  }
}

void TierMemory::put(void* memory, std::size_t bytes) const noexcept {
  held_ -= static_cast<std::int64_t>(bytes);
  if (allocator_.release == nullptr) {
    ::operator delete (memory, std::align_val_t{kTierAlignment});
  } else {
    allocator_.release(allocator_.user, memory, bytes, kTierAlignment);
  }
}

}  // namespace verkv::cpu
