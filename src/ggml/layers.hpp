// What the plug-in knows of the layers of one KV cache of the engine.
#ifndef VERKV_SRC_GGML_LAYERS_HPP
#define VERKV_SRC_GGML_LAYERS_HPP

#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <verkv/settings.hpp>
#include <verkv/view.hpp>

#include "late_queries.hpp"
#include "nodes.hpp"

namespace verkv_ggml {

// A cell of a stream, in the numbering of SET_ROWS: stream * cells + cell.
using Row = std::int64_t;

struct Layer {
  const ggml_tensor* keys = nullptr;  // [KV heads * key_dim, cells, streams]
  const ggml_tensor* values = nullptr;
  verkv::LayerConfig config;
  LateQueries queries;
  // Attention had been asked for before the last write to the keys: then all layers have been seen.
  bool was_asked = false;
  bool is_asked = false;

  verkv::DType type() const;
  // All cells of a stream.
  verkv::TensorView key_view(std::int64_t stream) const;
  // Addresses of some cells' rows.
  void list(std::int64_t stream, std::span<const std::uint32_t> cells,
            std::vector<const void*>& out_keys, std::vector<const void*>& out_values) const;
};

// Rows of a tensor of the cache that a write of bytes [offset, offset + size) of a view changes.
struct RowRange {
  Row first = 0;
  Row end = 0;
};
RowRange rows_of(const ggml_tensor* root, const ggml_tensor* view, std::size_t offset,
                 std::size_t size);

// The rows that a SET_ROWS node writes; none where it is not one of whole rows.
std::optional<std::vector<Row>> rows_set(const ggml_tensor* node, const ggml_tensor* root);

}  // namespace verkv_ggml

#endif  // VERKV_SRC_GGML_LAYERS_HPP
