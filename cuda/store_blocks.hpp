// How the blocks of a LayerStore grow.
#ifndef VERKV_CUDA_STORE_BLOCKS_HPP
#define VERKV_CUDA_STORE_BLOCKS_HPP

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "cuda_error.hpp"
#include "sizes.hpp"

namespace verkv::cuda {

// Rows of a head start at multiples of this many tokens' worth of bytes, hence aligned.
inline constexpr std::int64_t kCapacityUnit = 64;
// Of a place, on the host tier.
inline constexpr std::int64_t kPositionBytes = sizeof(std::uint32_t);

// Grows geometrically, by half.
inline std::int64_t grown(std::int64_t wanted, std::int64_t capacity) {
  if (wanted <= capacity) return capacity;
  return round_up(std::max(wanted, capacity + capacity / 2), kCapacityUnit);
}

// [heads][capacity] of T: the first `used` of each head move to blocks of another capacity.
template <class T>
void copy_heads(T* to, std::int64_t to_capacity, const T* from, std::int64_t from_capacity,
                std::int64_t used, std::int64_t heads, cudaStream_t stream) {
  if (used == 0) return;
  VERKV_CUDA_CHECK(cudaMemcpy2DAsync(to, size(to_capacity) * sizeof(T), from,
                                     size(from_capacity) * sizeof(T), size(used) * sizeof(T),
                                     size(heads), cudaMemcpyDeviceToDevice, stream));
}

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_STORE_BLOCKS_HPP
