// Coordinates of a step's queries as numbers.
#ifndef VERKV_CUDA_QUERY_CUH
#define VERKV_CUDA_QUERY_CUH

#include <cstdint>

#include "device_math.cuh"
#include "views.hpp"

namespace verkv::cuda {

// Coordinate j of a row's query head, exact.
VERKV_DEVICE float query_number(const StepView& step, std::int64_t row, std::int64_t head, int j) {
  const std::int64_t at = row * step.query_row_stride + head * step.query_head_stride + j;
  switch (step.query_type) {
    case DType::f32:
      return static_cast<const float*>(step.queries)[at];
    case DType::f16:
      return as_float(static_cast<const Half*>(step.queries)[at]);
    default:
      return as_float(static_cast<const BFloat16*>(step.queries)[at]);
  }
}

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_QUERY_CUH
