#include "view_checks.hpp"

#include <cstdint>
#include <utility>

#include "invalid.hpp"
#include "settings.hpp"

namespace verkv {
namespace {

std::uint64_t magnitude(std::int64_t x) {
  const std::uint64_t bits = static_cast<std::uint64_t>(x);
  return x < 0 ? 0 - bits : bits;
}

// Whether one axis is nested in the other, so that no two rows meet. There is a row.
bool rows_are_disjoint(const TensorView& view) {
  struct Axis {
    std::uint64_t count = 1;
    std::uint64_t stride = 0;
  };
  Axis inner{magnitude(view.tokens), magnitude(view.token_stride)};
  Axis outer{magnitude(view.heads), magnitude(view.head_stride)};
  // The stride of an axis with one element is never used.
  if (outer.count == 1 || (inner.count > 1 && inner.stride > outer.stride)) std::swap(inner, outer);
  const std::uint64_t row = magnitude(view.dim);
  if (inner.count > 1 && inner.stride < row) return false;
  if (outer.count == 1) return true;
  if (outer.stride < row) return false;
  // outer.stride >= (inner.count - 1) * inner.stride + row, without overflow.
  return inner.count == 1 || (outer.stride - row) / inner.stride >= inner.count - 1;
}

// Whether a view has been left out.
bool is_empty(const TensorView& view) { return view.data == nullptr && view.tokens == 0; }

}  // namespace

void check_rows(const char* what, const TensorView& view, std::int64_t heads, std::int64_t dim) {
  if (!is_known(view.type)) {
    invalid("{}: element type {}; f32, f16 and bf16 are supported", what,
            static_cast<int>(view.type));
  }
  if (view.tokens < 0) invalid("{}: {} tokens; the number cannot be negative", what, view.tokens);
  if (view.heads != heads) invalid("{}: {} heads given, the layer has {}", what, view.heads, heads);
  if (view.dim != dim) invalid("{}: head size {} given, the layer has {}", what, view.dim, dim);
  if (view.tokens == 0) return;
  if (!rows_are_disjoint(view)) {
    invalid(
        "{}: strides of {} elements a token and {} a head for {} tokens and {} heads of {} "
        "elements "
        "make rows share memory; the smaller must span a row, the larger all rows of the smaller",
        what, view.token_stride, view.head_stride, view.tokens, view.heads, view.dim);
  }
  if (view.data == nullptr) invalid("{}: null data for {} tokens", what, view.tokens);
  const std::size_t element = size_bytes(view.type);
  const std::size_t off = reinterpret_cast<std::uintptr_t>(view.data) % element;
  if (off != 0) {
    invalid("{}: data {} bytes past a multiple of {}, the size of an {} element", what, off,
            element, name(view.type));
  }
}

void check_importance(std::size_t i, const ImportanceView& view, const LayerConfig& layer,
                      std::int64_t open) {
  const ErrorPlace place{.layer = static_cast<std::int64_t>(i)};
  if (view.heads != layer.kv_heads || view.tokens != open) {
    invalid(
        ErrorCode::shape, place,
        "layer {}: importance of {} heads and {} tokens given; {} heads and {} tokens that are not "
        "yet compressed are expected",
        i, view.heads, view.tokens, layer.kv_heads, open);
  }
  if (open > 0 && view.data == nullptr)
    invalid(ErrorCode::shape, place, "layer {}: null importance for {} tokens", i, open);
  if (view.heads > 1 && view.head_stride < open && view.head_stride > -open) {
    invalid(
        ErrorCode::shape, place,
        "layer {}: importance of {} heads with a stride of {} elements; their {} tokens need at "
        "least "
        "as many, or heads share scores",
        i, view.heads, view.head_stride, open);
  }
}

void check_tokens(const TensorView& keys, const TensorView& values, const LayerConfig& layer) {
  check_rows("keys", keys, layer.kv_heads, layer.key_dim);
  check_rows("values", values, layer.kv_heads, layer.value_dim);
  if (keys.tokens != values.tokens)
    invalid("{} tokens of keys but {} of values", keys.tokens, values.tokens);
}

void check_batch(const AppendBatch& batch, const LayerConfig& layer) {
  const std::int64_t rows = static_cast<std::int64_t>(batch.sequences.size());
  if (rows == 0 && is_empty(batch.keys) && is_empty(batch.values)) return;
  check_tokens(batch.keys, batch.values, layer);
  if (batch.keys.tokens != rows)
    invalid("keys and values of {} rows for {} sequences", batch.keys.tokens, rows);
}

void check_batch(const AttendBatch& batch, const LayerConfig& layer) {
  const std::int64_t rows = static_cast<std::int64_t>(batch.sequences.size());
  if (rows > 0 || !is_empty(batch.queries))
    check_rows("queries", batch.queries, layer.query_heads, layer.key_dim);
  if (batch.queries.tokens != rows)
    invalid("queries of {} rows for {} sequences", batch.queries.tokens, rows);
  const std::size_t query_count = static_cast<std::size_t>(rows * layer.query_heads);
  const std::size_t kv_count = static_cast<std::size_t>(rows * layer.kv_heads);
  if (batch.output.size() != query_count * static_cast<std::size_t>(layer.value_dim)) {
    invalid("output of {} numbers for {} rows of {} heads of {}", batch.output.size(), rows,
            layer.query_heads, layer.value_dim);
  }
  if (!batch.lse.empty() && batch.lse.size() != query_count) {
    invalid("LSE of {} numbers for {} rows of {} heads", batch.lse.size(), rows, layer.query_heads);
  }
  if (!batch.row_status.empty() && batch.row_status.size() != batch.sequences.size()) {
    invalid("{} row statuses for {} rows", batch.row_status.size(), rows);
  }
  if (!batch.query_reports.empty() && batch.query_reports.size() != query_count) {
    invalid("{} query head reports for {} rows of {} heads", batch.query_reports.size(), rows,
            layer.query_heads);
  }
  if (!batch.kv_reports.empty() && batch.kv_reports.size() != kv_count) {
    invalid("{} KV head reports for {} rows of {} heads", batch.kv_reports.size(), rows,
            layer.kv_heads);
  }
}

}  // namespace verkv
