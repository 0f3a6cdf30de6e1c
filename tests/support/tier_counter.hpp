// A tier of the engine's own that counts what it gives.
#ifndef VERKV_TESTS_SUPPORT_TIER_COUNTER_HPP
#define VERKV_TESTS_SUPPORT_TIER_COUNTER_HPP

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <new>
#include <utility>

#include <verkv/settings.hpp>

namespace verkv::test {

class TierCounter {
 public:
  // Bytes that are given, and the most that ever were since `peak` was last set.
  std::int64_t live = 0;
  std::int64_t peak = 0;
  std::int64_t calls = 0;
  // Of calls that came with a size, an alignment or memory that cannot be.
  std::int64_t wrong = 0;
  // So many more calls succeed; -1: all.
  std::int64_t allowed = -1;

  TierAllocator allocator() {
    return {[](void* user, std::size_t bytes, std::size_t alignment) {
              return static_cast<TierCounter*>(user)->allocate(bytes, alignment);
            },
            [](void* user, void* memory, std::size_t bytes, std::size_t alignment) {
              static_cast<TierCounter*>(user)->release(memory, bytes, alignment);
            },
            this};
  }

 private:
  void* allocate(std::size_t bytes, std::size_t alignment) {
    const std::lock_guard lock(mutex_);
    ++calls;
    if (allowed == 0) return nullptr;
    if (allowed > 0) --allowed;
    wrong += bytes == 0 || alignment == 0 || (alignment & (alignment - 1)) != 0;
    try {
      void* const memory = ::operator new (bytes, std::align_val_t{alignment});
      given_[memory] = {bytes, alignment};
      live += static_cast<std::int64_t>(bytes);
      peak = std::max(peak, live);
      return memory;
    } catch (const std::bad_alloc&) {
      return nullptr;
    }
  }
  void release(void* memory, std::size_t bytes, std::size_t alignment) {
    const std::lock_guard lock(mutex_);
    const auto found = given_.find(memory);
    if (found == given_.end() || found->second != std::pair(bytes, alignment)) {
      ++wrong;
      return;
    }
    given_.erase(found);
    live -= static_cast<std::int64_t>(bytes);
    ::operator delete (memory, std::align_val_t{alignment});
  }

  std::mutex mutex_;
  std::map<void*, std::pair<std::size_t, std::size_t>> given_;
};

}  // namespace verkv::test

#endif  // VERKV_TESTS_SUPPORT_TIER_COUNTER_HPP
