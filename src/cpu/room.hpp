// Room of vectors that grow by tokens.
#ifndef VERKV_SRC_CPU_ROOM_HPP
#define VERKV_SRC_CPU_ROOM_HPP

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace verkv::cpu {

// Grows geometrically, by half: the host tier is large and its slack counts.
template <class Vector>
void reserve_more(Vector& vector, std::size_t more) {
  const std::size_t wanted = vector.size() + more;
  if (wanted > vector.capacity()) {
    vector.reserve(std::max(wanted, vector.capacity() + vector.capacity() / 2));
  }
}

// Bytes that reserve_more would allocate.
template <class Vector>
std::int64_t bytes_for_more(const Vector& vector, std::size_t more) {
  const std::size_t wanted = vector.size() + more;
  if (wanted <= vector.capacity()) return 0;
  return static_cast<std::int64_t>(std::max(wanted, vector.capacity() + vector.capacity() / 2) *
                                   sizeof(vector[0]));
}

// Gives back memory of which less than half is used, if that is possible; room for `spare` more
// elements stays, and counts as used.
template <class Vector>
void shrink(Vector& vector, std::size_t spare) noexcept {
  const std::size_t wanted = vector.size() + spare;
  if (vector.capacity() <= 2 * wanted) return;
  try {
    Vector smaller(vector.get_allocator());
    smaller.reserve(wanted);
    smaller.assign(vector.begin(), vector.end());
    vector.swap(smaller);
  } catch (...) {
    // Keeping the larger block is correct, only larger.
  }
}

}  // namespace verkv::cpu

#endif  // VERKV_SRC_CPU_ROOM_HPP
