// Strided rows of keys or values: what kernels, stores and calibration read.
#ifndef VERKV_SRC_ROWS_HPP
#define VERKV_SRC_ROWS_HPP

#include <cstddef>
#include <cstdint>
#include <span>

#include <verkv/types.hpp>

namespace verkv {

// Row i starts at element i * stride of `data` and has `dim` elements.
struct Rows {
  const void* data = nullptr;
  DType type = DType::f16;
  std::int64_t stride = 0;
  int dim = 0;
};

// Coordinate j of a row.
inline float load_element(const Rows& rows, std::int64_t row, std::int64_t j) {
  const std::int64_t at = row * rows.stride + j;
  return with_element(rows.type, [&](auto zero) {
    using Element = decltype(zero);
    return to_float(static_cast<const Element*>(rows.data)[at]);
  });
}

// The mean of each coordinate over the first `count` rows: sums in double, in order.
inline void column_means(const Rows& rows, std::int64_t count, std::span<float> out_mean) {
  for (std::size_t j = 0; j < out_mean.size(); ++j) {
    double sum = 0;
    for (std::int64_t i = 0; i < count; ++i)
      sum += static_cast<double>(load_element(rows, i, static_cast<std::int64_t>(j)));
    out_mean[j] = static_cast<float>(sum / static_cast<double>(count));
  }
}

}  // namespace verkv

#endif  // VERKV_SRC_ROWS_HPP
