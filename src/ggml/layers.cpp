#include "layers.hpp"

namespace verkv_ggml {
namespace {

const char* bytes_of(const ggml_tensor* tensor) { return static_cast<const char*>(tensor->data); }

}  // namespace

verkv::DType Layer::type() const {
  if (keys->type == GGML_TYPE_F32) return verkv::DType::f32;
  return keys->type == GGML_TYPE_BF16 ? verkv::DType::bf16 : verkv::DType::f16;
}

verkv::TensorView Layer::key_view(std::int64_t stream) const {
  return {.data = bytes_of(keys) + static_cast<std::size_t>(stream) * keys->nb[2],
          .type = type(),
          .tokens = keys->ne[1],
          .heads = config.kv_heads,
          .dim = config.key_dim,
          .token_stride = static_cast<std::int64_t>(keys->nb[1] / ggml_type_size(keys->type)),
          .head_stride = config.key_dim};
}

void Layer::list(std::int64_t stream, std::span<const std::uint32_t> cells,
                 std::vector<const void*>& out_keys, std::vector<const void*>& out_values) const {
  out_keys.clear();
  out_values.clear();
  const std::size_t s = static_cast<std::size_t>(stream);
  for (const std::uint32_t cell : cells) {
    out_keys.push_back(bytes_of(keys) + s * keys->nb[2] + cell * keys->nb[1]);
    out_values.push_back(bytes_of(values) + s * values->nb[2] + cell * values->nb[1]);
  }
}

RowRange rows_of(const ggml_tensor* root, const ggml_tensor* view, std::size_t offset,
                 std::size_t size) {
  const std::size_t first = static_cast<std::size_t>(bytes_of(view) - bytes_of(root)) + offset;
  return {static_cast<Row>(first / root->nb[1]),
          static_cast<Row>((first + size + root->nb[1] - 1) / root->nb[1])};
}

std::optional<std::vector<Row>> rows_set(const ggml_tensor* node, const ggml_tensor* root) {
  const ggml_tensor* indices = node->src[1];
  if (node->op != GGML_OP_SET_ROWS || node->ne[0] != root->ne[0] || node->nb[1] != root->nb[1] ||
      node->ne[2] != 1 || node->ne[3] != 1 || !ggml_is_contiguous(indices) ||
      (indices->type != GGML_TYPE_I64 && indices->type != GGML_TYPE_I32))
    return std::nullopt;
  const Row first = rows_of(root, node, 0, 0).first;
  std::vector<Row> rows;
  for (std::int64_t i = 0; i < ggml_nelements(indices); ++i) {
    rows.push_back(first + (indices->type == GGML_TYPE_I64
                                ? static_cast<const std::int64_t*>(indices->data)[i]
                                : static_cast<const std::int32_t*>(indices->data)[i]));
  }
  return rows;
}

}  // namespace verkv_ggml
