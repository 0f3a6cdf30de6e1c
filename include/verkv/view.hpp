// Non-owning views with 64-bit strides. Trivially copyable, so they may go to a kernel by value.
//
// A call reads its views and keeps none of them. Views of one call may overlap each other; rows of
// one view may not overlap: the smaller stride spans a row, the larger all rows of the smaller (an
// axis with one element may have any stride). Outputs (AttendBatch) may overlap nothing that the
// call is given.
#ifndef VERKV_VIEW_HPP
#define VERKV_VIEW_HPP

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include <verkv/types.hpp>

namespace verkv {

// A 3-d block [token][head][dim] of caller memory in any layout whose innermost dimension is dense.
// Strides are in elements, and may be negative. [head][token][dim] is the same view with the two
// strides exchanged.
struct TensorView {
  // Of element (0, 0, 0), at a multiple of size_bytes(type); may be null where there are no tokens.
  const void* data = nullptr;
  DType type = DType::f32;
  std::int64_t tokens = 0;
  std::int64_t heads = 0;
  std::int64_t dim = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
  // [token]: address of row (token, 0), at a multiple of size_bytes(type). Then data and token_stride
  // are not used, and nobody checks that rows do not overlap. Only of keys and values that a cache on
  // the CPU is given: pages of an engine, of whatever size. null: none.
  const void* const* rows = nullptr;

  // Address of row (token, head).
  const void* row(std::int64_t token, std::int64_t head) const {
    const char* const first = static_cast<const char*>(rows != nullptr ? rows[token] : data);
    return first + ((rows != nullptr ? 0 : token * token_stride) + head * head_stride) *
                       static_cast<std::int64_t>(size_bytes(type));
  }
};

// Dense [token][head][dim].
inline TensorView token_major(const void* data, DType type, std::int64_t tokens, std::int64_t heads,
                              std::int64_t dim) {
  return {data, type, tokens, heads, dim, heads * dim, dim};
}

// Dense [head][token][dim].
inline TensorView head_major(const void* data, DType type, std::int64_t tokens, std::int64_t heads,
                             std::int64_t dim) {
  return {data, type, tokens, heads, dim, dim, tokens * dim};
}

// Rows anywhere: rows[token] is where KV head 0 of a token begins, head_stride elements before the next.
inline TensorView listed_rows(const void* const* rows, DType type, std::int64_t tokens,
                              std::int64_t heads, std::int64_t dim, std::int64_t head_stride) {
  return {nullptr, type, tokens, heads, dim, 0, head_stride, rows};
}

// Importance scores [head][token] of one layer; tokens dense. head_stride: in elements, at least
// `tokens` where there is more than one head; may be negative.
struct ImportanceView {
  const float* data = nullptr;
  std::int64_t heads = 0;
  std::int64_t tokens = 0;
  std::int64_t head_stride = 0;
};

// Takes the next bytes of what is saved, all of them; may throw.
using WriteBytes = std::function<void(std::span<const std::byte>)>;
// Fills the front of a span that is not empty with the next bytes and says with how many, at least
// 1; 0: there are no more. May throw.
using ReadBytes = std::function<std::size_t(std::span<std::byte>)>;

}  // namespace verkv

#endif  // VERKV_VIEW_HPP
