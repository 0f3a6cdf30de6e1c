// Elements of rows by their type, and grids over items, for the kernels around a step.
#ifndef VERKV_CUDA_ELEMENTS_CUH
#define VERKV_CUDA_ELEMENTS_CUH

#include <algorithm>
#include <cstdint>

#include <verkv/types.hpp>

#include "device_math.cuh"
#include "tuning.hpp"

namespace verkv::cuda {

// Coordinate j of a row.
VERKV_DEVICE float load(const void* row, DType type, int j) {
  return with_element(
      type, [=](auto zero) { return to_float(static_cast<const decltype(zero)*>(row)[j]); });
}

// Coordinate j of a row becomes x, rounded to nearest even.
VERKV_DEVICE void store(void* row, DType type, int j, float x) {
  with_element(type, [=](auto zero) {
    static_cast<decltype(zero)*>(row)[j] = from_float<decltype(zero)>(x);
  });
}

// Blocks for so many items, of which a block takes one after the other.
inline unsigned blocks_for(std::int64_t items) {
  return static_cast<unsigned>(std::clamp<std::int64_t>(items, 1, kMostBlocks));
}

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_ELEMENTS_CUH
