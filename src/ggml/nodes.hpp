// Which nodes of a graph are about the engine's KV cache, and what they say.
#ifndef VERKV_SRC_GGML_NODES_HPP
#define VERKV_SRC_GGML_NODES_HPP

#include <ggml.h>

#include <cstdint>
#include <optional>
#include <string>

#include <verkv/view.hpp>

namespace verkv_ggml {

// A tensor of a cache: cache_k_l<layer> or cache_v_l<layer> [heads * dim, cells, streams].
struct CacheTensor {
  const ggml_tensor* tensor = nullptr;
  int layer = 0;
  bool is_key = false;
};

// The cache tensor that `tensor` is a view of, if it is.
std::optional<CacheTensor> cache_tensor_of(const ggml_tensor* tensor);

// Whether the node computes nothing.
bool is_view(const ggml_tensor* node);

// An attention node over a cache.
struct Attention {
  const ggml_tensor* node = nullptr;
  const ggml_tensor* queries = nullptr;  // [key_dim, rows, query heads, streams], f32
  const ggml_tensor* keys = nullptr;     // [key_dim, cells, KV heads, streams]
  const ggml_tensor* values = nullptr;
  const ggml_tensor* mask = nullptr;   // [cells, rows, 1, streams], f16
  const ggml_tensor* sinks = nullptr;  // [query heads], f32; null: none
  CacheTensor cache;                   // of the keys
  float scale = 1;
  float soft_cap = 0;  // 0: none

  std::int64_t rows() const { return queries->ne[1]; }
  std::int64_t cells() const { return keys->ne[1]; }
  std::int64_t streams() const { return queries->ne[3]; }

  // Of one stream: [row][query head], [cell][KV head].
  verkv::TensorView query_view(std::int64_t stream) const;
  verkv::TensorView key_view(std::int64_t stream) const;
  verkv::TensorView value_view(std::int64_t stream) const;
  // Of one row of a stream, one number a cell.
  const std::uint16_t* mask_row(std::int64_t stream, std::int64_t row) const;
  // [query head][value_dim], of one row of a stream.
  float* output(std::int64_t stream, std::int64_t row) const;
};

// An attention node that we may answer, or why we leave it to ggml. Looks at shapes and types only.
struct Understood {
  std::optional<Attention> attention;
  std::string reason;
};
Understood understand(const ggml_tensor* node);

}  // namespace verkv_ggml

#endif  // VERKV_SRC_GGML_NODES_HPP
