#include "nodes.hpp"

#include <charconv>
#include <cstring>
#include <string_view>
#include <system_error>

namespace verkv_ggml {
namespace {

const ggml_tensor* root_of(const ggml_tensor* tensor) {
  while (tensor->view_src != nullptr) tensor = tensor->view_src;
  return tensor;
}

std::optional<verkv::DType> type_of(const ggml_tensor* tensor) {
  switch (tensor->type) {
    case GGML_TYPE_F32:
      return verkv::DType::f32;
    case GGML_TYPE_F16:
      return verkv::DType::f16;
    case GGML_TYPE_BF16:
      return verkv::DType::bf16;
    default:
      return std::nullopt;
  }
}

// Rows of heads as a view: dimension 1 of the tensor is the token, dimension 2 the head.
verkv::TensorView view_of(const ggml_tensor* tensor, std::int64_t stream) {
  const std::size_t element = ggml_type_size(tensor->type);
  return {.data = static_cast<const char*>(tensor->data) +
                  static_cast<std::size_t>(stream) * tensor->nb[3],
          .type = *type_of(tensor),
          .tokens = tensor->ne[1],
          .heads = tensor->ne[2],
          .dim = tensor->ne[0],
          .token_stride = static_cast<std::int64_t>(tensor->nb[1] / element),
          .head_stride = static_cast<std::int64_t>(tensor->nb[2] / element)};
}

// Why a tensor of rows cannot be viewed; empty if it can.
std::string unviewable(const char* what, const ggml_tensor* tensor) {
  if (!type_of(tensor)) {
    return std::string("the ") + what + " are " + ggml_type_name(tensor->type) +
           ", which is neither f16, bf16 nor f32";
  }
  const std::size_t element = ggml_type_size(tensor->type);
  if (tensor->nb[0] != element) return std::string("the ") + what + " are transposed";
  if (tensor->nb[1] % element != 0 || tensor->nb[2] % element != 0 || tensor->nb[3] % element != 0)
    return std::string("the ") + what + " do not lie at whole elements";
  return "";
}

std::string misfit(const ggml_tensor* node) {
  const ggml_tensor* q = node->src[0];
  const ggml_tensor* k = node->src[1];
  const ggml_tensor* v = node->src[2];
  const ggml_tensor* mask = node->src[3];
  if (!cache_tensor_of(k) || !cache_tensor_of(v))
    return "keys and values do not lie in a cache of llama.cpp's";
  if (std::string why = unviewable("keys of the cache", k); !why.empty()) return why;
  if (std::string why = unviewable("values of the cache", v); !why.empty()) return why;
  if (std::string why = unviewable("queries", q); !why.empty()) return why;
  if (q->type != GGML_TYPE_F32 || node->type != GGML_TYPE_F32)
    return "queries and answers are not f32";
  if (mask == nullptr) return "there is no mask";
  if (mask->type != GGML_TYPE_F16 || mask->nb[0] != sizeof(std::uint16_t))
    return "the mask is not f16";
  if (const ggml_tensor* sinks = node->src[4];
      sinks != nullptr && (sinks->type != GGML_TYPE_F32 || !ggml_is_contiguous(sinks) ||
                           ggml_nelements(sinks) != q->ne[2]))
    return "the softmax has sinks that are not one f32 for each query head";
  float largest_bias = 0;
  std::memcpy(&largest_bias, reinterpret_cast<const float*>(node->op_params) + 1,
              sizeof largest_bias);
  if (largest_bias != 0) return "positions are biases (ALiBi)";
  if (k->ne[0] != q->ne[0] || k->ne[1] != v->ne[1] || k->ne[2] != v->ne[2] ||
      k->ne[3] != q->ne[3] || v->ne[3] != q->ne[3] || q->ne[2] % k->ne[2] != 0)
    return "keys, values and queries have shapes that do not fit";
  if (mask->ne[0] < k->ne[1] || mask->ne[1] < q->ne[1] || mask->ne[2] != 1 ||
      mask->ne[3] != q->ne[3])
    return "the mask is not one of rows by cells";
  if (!ggml_is_contiguous(node)) return "answers do not lie side by side";
  return "";
}

}  // namespace

std::optional<CacheTensor> cache_tensor_of(const ggml_tensor* tensor) {
  const ggml_tensor* root = root_of(tensor);
  const std::string_view name = root->name;
  const bool is_key = name.starts_with("cache_k_l");
  if (!is_key && !name.starts_with("cache_v_l")) return std::nullopt;
  const std::string_view digits = name.substr(std::strlen("cache_k_l"));
  CacheTensor found{.tensor = root, .is_key = is_key};
  const char* end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, found.layer);
  if (error != std::errc() || stop != end) return std::nullopt;
  return found;
}

bool is_view(const ggml_tensor* node) {
  switch (node->op) {
    case GGML_OP_NONE:
    case GGML_OP_RESHAPE:
    case GGML_OP_VIEW:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE:
      return true;
    default:
      return false;
  }
}

verkv::TensorView Attention::query_view(std::int64_t stream) const {
  return view_of(queries, stream);
}
verkv::TensorView Attention::key_view(std::int64_t stream) const { return view_of(keys, stream); }
verkv::TensorView Attention::value_view(std::int64_t stream) const {
  return view_of(values, stream);
}

const std::uint16_t* Attention::mask_row(std::int64_t stream, std::int64_t row) const {
  return reinterpret_cast<const std::uint16_t*>(static_cast<const char*>(mask->data) +
                                                static_cast<std::size_t>(stream) * mask->nb[3] +
                                                static_cast<std::size_t>(row) * mask->nb[1]);
}

// The node is [value_dim, query heads, rows, streams].
float* Attention::output(std::int64_t stream, std::int64_t row) const {
  return reinterpret_cast<float*>(static_cast<char*>(node->data) +
                                  static_cast<std::size_t>(stream) * node->nb[3] +
                                  static_cast<std::size_t>(row) * node->nb[2]);
}

Understood understand(const ggml_tensor* node) {
  if (std::string reason = misfit(node); !reason.empty()) return {std::nullopt, std::move(reason)};
  const float* parameters = reinterpret_cast<const float*>(node->op_params);
  return {Attention{.node = node,
                    .queries = node->src[0],
                    .keys = node->src[1],
                    .values = node->src[2],
                    .mask = node->src[3],
                    .sinks = node->src[4],
                    .cache = *cache_tensor_of(node->src[1]),
                    .scale = parameters[0],
                    .soft_cap = parameters[2]},
          ""};
}

}  // namespace verkv_ggml
