// A random rotation: two rounds of random signs and a Hadamard transform. It spreads what is uneven
// within a band of the sketch over the band's coordinates (sketch_basis.cpp).
//
// A Hadamard matrix needs a power of two. With P the largest one not above dim, round 1 transforms
// coordinates [0, P), round 2 the last P: P > dim / 2, so every coordinate takes part and the
// composition is orthogonal. Where dim is a power of two, one round is enough and the second is
// left out.
#ifndef VERKV_SRC_ROTATION_HPP
#define VERKV_SRC_ROTATION_HPP

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include <verkv/philox.hpp>

namespace verkv {

// Largest power of two not above dim (dim >= 1).
constexpr int hadamard_size(int dim) {
  int size = 1;
  while (2 * size <= dim) size *= 2;
  return size;
}

// Fills 2 * dim signs, +1 or -1, from the seed.
inline void rotation_signs(std::uint64_t seed, int dim, std::span<float> out_signs) {
  for (int i = 0; i < 2 * dim; ++i) {
    const PhiloxCounter bits = philox4x32_10(
        PhiloxCounter{{static_cast<std::uint32_t>(i / 128), 0x726f7461u, 0, 0}},
        PhiloxKey{{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)}});
    const int bit = i % 128;
    out_signs[static_cast<std::size_t>(i)] =
        (bits.word[bit / 32] >> (bit % 32)) & 1u ? -1.0f : 1.0f;
  }
}

namespace detail {
// In-place normalised Hadamard transform; size a power of two. Only additions of pairs and one
// product a coordinate, so every implementation gives the same bits.
inline void hadamard(float* x, int size) {
  for (int half = 1; half < size; half *= 2) {
    for (int start = 0; start < size; start += 2 * half) {
      for (int i = start; i < start + half; ++i) {
        const float a = x[i];
        const float b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
    }
  }
  const float norm = static_cast<float>(1.0 / std::sqrt(static_cast<double>(size)));
  for (int i = 0; i < size; ++i) x[i] *= norm;
}
}  // namespace detail

// Rotates x in place; signs from rotation_signs with the same dim = x.size().
inline void rotate(std::span<float> x, std::span<const float> signs) {
  const int dim = static_cast<int>(x.size());
  if (dim == 0) return;
  const int size = hadamard_size(dim);
  for (int i = 0; i < size; ++i)
    x[static_cast<std::size_t>(i)] *= signs[static_cast<std::size_t>(i)];
  detail::hadamard(x.data(), size);
  if (size == dim) return;
  const int begin = dim - size;
  for (int i = begin; i < dim; ++i) {
    x[static_cast<std::size_t>(i)] *= signs[static_cast<std::size_t>(dim + i)];
  }
  detail::hadamard(x.data() + begin, size);
}

}  // namespace verkv

#endif  // VERKV_SRC_ROTATION_HPP
