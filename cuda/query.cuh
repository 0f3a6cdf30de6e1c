// A step's queries: coordinates as numbers, bytes in the sketch's basis, and which query heads a
// thread of the scores has.
#ifndef VERKV_CUDA_QUERY_CUH
#define VERKV_CUDA_QUERY_CUH

#include <cstdint>

#include "device_math.cuh"
#include "views.hpp"

namespace verkv::cuda {

// Query heads of one matrix product of the scores: each has two of its eight columns.
inline constexpr int kSetHeads = 4;
constexpr int sets_of(int heads) { return (heads + kSetHeads - 1) / kSetHeads; }

// Thread t of four neighbours ends with the heads 4i + t that there are.
VERKV_DEVICE int head_of(int set) { return kSetHeads * set + static_cast<int>(threadIdx.x % 4); }

// Coordinate j of a row's query head, exact.
VERKV_DEVICE float query_number(const StepView& step, std::int64_t row, std::int64_t head, int j) {
  const std::int64_t at = row * step.query_row_stride + head * step.query_head_stride + j;
  return with_element(step.query_type, [&](auto zero) {
    return as_float(static_cast<const decltype(zero)*>(step.queries)[at]);
  });
}

// The query's bytes by one warp. Returns the factor of the logits. A head that is not there gets
// zeros. Column 2h of the products takes the first tokens of pairs and column 2h + 1 the second
// ones: for each quad of coordinates (0, 2) and (1, 3) lie in two words, in their lower half for
// the first tokens and in the upper for the second, and the other halves are zero. Quads are zero
// up to a multiple of four.
// Dialect of verkv/sketch.hpp: encode_query.
VERKV_DEVICE float encode_by_warp(const float* x, int dim, bool there, float unit, uint2* columns,
                                  int stride) {
  const int lane = threadIdx.x % 32;
  float largest = 0;
  if (there) {
    for (int i = lane; i < dim; i += 32) largest = raise(largest, fabsf(x[i]));
  }
  const float scale = warp_top(largest) / 127;
  const int quads = (dim + 15) / 16 * 4;
  for (int quad = lane; quad < quads; quad += 32) {
    unsigned byte[4] = {0, 0, 0, 0};
    if (scale > 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (4 * quad + i >= dim) continue;
        const int level = max(-127, min(127, __float2int_rn(x[4 * quad + i] / scale)));
        byte[i] = static_cast<unsigned>(level) & 0xffu;
      }
    }
    const unsigned even = byte[0] | (byte[2] << 8);
    const unsigned odd = byte[1] | (byte[3] << 8);
    columns[quad] = make_uint2(even, odd);
    columns[stride + quad] = make_uint2(even << 16, odd << 16);
  }
  return scale * unit;
}

// The share of the channel means in every sketched logit: a sum in order, so one thread's, and a
// long chain of additions.
VERKV_DEVICE float mean_share(const float* query, const float* mean, int dim) {
  double share = 0;
#pragma unroll 8
  for (int j = 0; j < dim; ++j)
    share += static_cast<double>(query[j]) * static_cast<double>(mean[j]);
  return static_cast<float>(share);
}

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_QUERY_CUH
