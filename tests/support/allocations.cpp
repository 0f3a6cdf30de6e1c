#include "support/allocations.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace verkv::test {

std::atomic<std::int64_t> allocations{0};
std::atomic<std::int64_t> allowed{-1};

}  // namespace verkv::test

namespace {

using verkv::test::allocations;
using verkv::test::allowed;

void* allocate(std::size_t size, std::size_t alignment) {
  ++allocations;
  if (allowed >= 0 && --allowed < 0) {
    allowed = 0;  // stays so until the caller lifts it
    throw std::bad_alloc();
  }
  const std::size_t rounded =
      (std::max<std::size_t>(size, 1) + alignment - 1) / alignment * alignment;
  void* const result = std::aligned_alloc(alignment, rounded);
  if (result == nullptr) throw std::bad_alloc();
  return result;
}

}  // namespace

// Inlined, a deletion looks to the compiler like memory freed by the wrong function.
#if defined(__GNUC__)
#define VERKV_NO_INLINE [[gnu::noinline]]
#else
#define VERKV_NO_INLINE
#endif

void* operator new(std::size_t size) { return allocate(size, alignof(std::max_align_t)); }
void* operator new[](std::size_t size) { return allocate(size, alignof(std::max_align_t)); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return allocate(size, std::max(alignof(std::max_align_t), static_cast<std::size_t>(alignment)));
}
void* operator new[](std::size_t size, std::align_val_t alignment) {
  return allocate(size, std::max(alignof(std::max_align_t), static_cast<std::size_t>(alignment)));
}
// The sorting of the standard library asks this way; a sanitizer would otherwise answer with its
// own.
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  try {
    return operator new(size);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void* operator new[](std::size_t size, const std::nothrow_t& tag) noexcept {
  return operator new(size, tag);
}
VERKV_NO_INLINE void operator delete(void* p) noexcept { std::free(p); }
VERKV_NO_INLINE void operator delete[](void* p) noexcept { std::free(p); }
VERKV_NO_INLINE void operator delete(void* p, std::size_t) noexcept { std::free(p); }
VERKV_NO_INLINE void operator delete[](void* p, std::size_t) noexcept { std::free(p); }
VERKV_NO_INLINE void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
VERKV_NO_INLINE void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
VERKV_NO_INLINE void operator delete(void* p, std::size_t, std::align_val_t) noexcept {
  std::free(p);
}
VERKV_NO_INLINE void operator delete[](void* p, std::size_t, std::align_val_t) noexcept {
  std::free(p);
}
