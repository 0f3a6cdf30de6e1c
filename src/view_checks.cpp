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
  // Of listed rows only the heads are looked at.
  Axis inner{view.rows != nullptr ? 1 : magnitude(view.tokens), magnitude(view.token_stride)};
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
bool is_empty(const TensorView& view) {
  return view.data == nullptr && view.rows == nullptr && view.tokens == 0;
}

// row: of a list; -1: of all rows.
void check_address(const char* what, const TensorView& view, const void* data, std::int64_t row) {
  const ErrorPlace place{.token = row};
  if (data == nullptr)
    invalid(ErrorCode::shape, place, "{}: null data for {} tokens", what, view.tokens);
  const std::size_t off = reinterpret_cast<std::uintptr_t>(data) % size_bytes(view.type);
  if (off == 0) return;
  invalid(ErrorCode::shape, place,
          "{}: data {} bytes past a multiple of {}, the size of an {} element", what, off,
          size_bytes(view.type), name(view.type));
}

void check_any_rows(const char* what, const TensorView& view, std::int64_t heads,
                    std::int64_t dim) {
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
  if (view.rows == nullptr) check_address(what, view, view.data, -1);
}

// Rows of no sequence may have any address.
void check_list(const char* what, const TensorView& view, std::span<const SequenceId> sequences) {
  if (view.rows == nullptr) return;
  for (std::int64_t t = 0; t < view.tokens; ++t) {
    if (!sequences.empty() && sequences[static_cast<std::size_t>(t)] == kNoSequence) continue;
    check_address(what, view, view.rows[t], t);
  }
}

void check_counts(const TensorView& keys, const TensorView& values) {
  if (keys.tokens != values.tokens)
    invalid("{} tokens of keys but {} of values", keys.tokens, values.tokens);
}

void check_shapes(const TensorView& keys, const TensorView& values, const TokenRules& rules) {
  const auto check = [&](const char* what, const TensorView& view, std::int64_t dim) {
    check_any_rows(what, view, rules.layer.kv_heads, dim);
    if (view.rows != nullptr && !rules.lists)
      invalid(ErrorCode::wrong_backend, {}, "{}: listed rows; a device takes none", what);
    if (rules.config.host == HostTier::engine && view.type != rules.config.storage) {
      invalid(
          "{}: {}; rows of the engine are read where they are, so they must be {}, the storage "
          "type",
          what, name(view.type), name(rules.config.storage));
    }
  };
  check("keys", keys, rules.layer.key_dim);
  if (rules.layer.value_is_key_prefix) {
    if (values.tokens == 0) return;
    invalid("values of {} tokens given to a layer whose values are the first numbers of its keys",
            values.tokens);
  }
  check("values", values, rules.layer.value_dim);
  check_counts(keys, values);
}

}  // namespace

void check_rows(const char* what, const TensorView& view, std::int64_t heads, std::int64_t dim) {
  if (view.rows != nullptr)
    invalid("{}: listed rows; only keys and values that a cache is given may have them", what);
  check_any_rows(what, view, heads, dim);
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
  check_counts(keys, values);
}

void check_tokens(const TensorView& keys, const TensorView& values, const TokenRules& rules) {
  check_shapes(keys, values, rules);
  check_list("keys", keys, {});
  check_list("values", values, {});
}

void check_batch(const AppendBatch& batch, const TokenRules& rules) {
  const std::int64_t rows = static_cast<std::int64_t>(batch.sequences.size());
  if (rows == 0 && is_empty(batch.keys) && is_empty(batch.values)) return;
  check_shapes(batch.keys, batch.values, rules);
  if (batch.keys.tokens != rows)
    invalid("keys and values of {} rows for {} sequences", batch.keys.tokens, rows);
  check_list("keys", batch.keys, batch.sequences);
  check_list("values", batch.values, batch.sequences);
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
