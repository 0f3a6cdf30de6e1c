// Rows of keys or values, contiguous, in pages or anywhere: what kernels, stores and calibration read.
#ifndef VERKV_SRC_ROWS_HPP
#define VERKV_SRC_ROWS_HPP

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include <verkv/types.hpp>

namespace verkv {

// Rows of a page.
inline constexpr int kPageShift = 6;
inline constexpr std::int64_t kPageRows = std::int64_t{1} << kPageShift;

// Row i starts at element i * stride of `data` and has `dim` elements.
// In pages: row i is row (first + i) % kPageRows of page (first + i) / kPageRows, and starts
// `offset` elements after the start of that row; `data` is not used.
// Listed: row i starts `offset` elements after list[first + i]; `data` and `stride` are not used.
struct Rows {
  const void* data = nullptr;
  DType type = DType::f16;
  std::int64_t stride = 0;
  int dim = 0;
  const std::byte* const* pages = nullptr;  // null: contiguous
  std::int64_t first = 0;
  std::int64_t offset = 0;
  const std::byte* const* list = nullptr;  // null: not listed
};

// Addresses of rows of T: one type for each way in which rows lie, so that a loop over rows has no
// branch for it. kAnywhere: the machine does not load the next row ahead by itself.
template <class T>
struct ContiguousRows {
  static constexpr bool kAnywhere = false;
  const T* data;
  std::int64_t stride;
  const T* operator()(std::int64_t i) const { return data + i * stride; }
  // Rows from i on that lie a stride apart.
  std::int64_t together(std::int64_t) const { return std::numeric_limits<std::int64_t>::max(); }
};
template <class T>
struct PagedRowsOf {
  static constexpr bool kAnywhere = false;
  const std::byte* const* pages;
  std::int64_t stride;
  std::int64_t first;
  std::int64_t offset;
  const T* operator()(std::int64_t i) const {
    const std::int64_t at = first + i;
    return reinterpret_cast<const T*>(pages[at >> kPageShift]) + (at & (kPageRows - 1)) * stride +
           offset;
  }
  std::int64_t together(std::int64_t i) const {
    return kPageRows - ((first + i) & (kPageRows - 1));
  }
};
template <class T>
struct ListedRows {
  static constexpr bool kAnywhere = true;
  const std::byte* const* list;
  std::int64_t offset;
  const T* operator()(std::int64_t i) const { return reinterpret_cast<const T*>(list[i]) + offset; }
};

template <class T>
ContiguousRows<T> contiguous(const Rows& rows) {
  return {static_cast<const T*>(rows.data), rows.stride};
}
template <class T>
PagedRowsOf<T> paged(const Rows& rows) {
  return {rows.pages, rows.stride, rows.first, rows.offset};
}
template <class T>
ListedRows<T> listed(const Rows& rows) {
  return {rows.list + rows.first, rows.offset};
}

// Address of a row, for what reads few of them.
template <class T>
const T* row_of(const Rows& rows, std::int64_t row) {
  if (rows.pages != nullptr) return paged<T>(rows)(row);
  return rows.list != nullptr ? listed<T>(rows)(row) : contiguous<T>(rows)(row);
}

// Coordinate j of a row.
inline float load_element(const Rows& rows, std::int64_t row, std::int64_t j) {
  return with_element(rows.type, [&](auto zero) {
    using Element = decltype(zero);
    return to_float(row_of<Element>(rows, row)[j]);
  });
}

// The mean of each coordinate over the first `count` rows: sums in double, in order.
inline void column_means(const Rows& rows, std::int64_t count, std::span<float> out_mean) {
  constexpr std::size_t kTogether = 32;
  with_element(rows.type, [&](auto zero) {
    using Element = decltype(zero);
    for (std::size_t first = 0; first < out_mean.size(); first += kTogether) {
      const std::size_t coordinates = std::min(kTogether, out_mean.size() - first);
      double sum[kTogether] = {};
      for (std::int64_t i = 0; i < count; ++i) {
        const Element* row = row_of<Element>(rows, i) + first;
        for (std::size_t j = 0; j < coordinates; ++j)
          sum[j] += static_cast<double>(to_float(row[j]));
      }
      for (std::size_t j = 0; j < coordinates; ++j)
        out_mean[first + j] = static_cast<float>(sum[j] / static_cast<double>(count));
    }
  });
}

}  // namespace verkv

#endif  // VERKV_SRC_ROWS_HPP
