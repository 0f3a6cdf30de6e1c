#include "dense.hpp"

#include <cstddef>
#include <functional>
#include <span>
#include <utility>

namespace verkv_ggml {

verkv::LayerConfig layer_of(const Attention& attention) {
  verkv::LayerConfig layer{.kv_heads = attention.keys->ne[2],
                           .query_heads = attention.queries->ne[2],
                           .key_dim = attention.keys->ne[0],
                           .value_dim = attention.values->ne[0],
                           .scale = static_cast<double>(attention.scale)};
  if (attention.soft_cap != 0) layer.soft_cap = static_cast<double>(attention.soft_cap);
  if (attention.sinks != nullptr) {
    const float* sinks = static_cast<const float*>(attention.sinks->data);
    layer.sink_logits.assign(sinks, sinks + layer.query_heads);
  }
  return layer;
}

bool same_attention(const verkv::LayerConfig& a, const verkv::LayerConfig& b) {
  return a.kv_heads == b.kv_heads && a.query_heads == b.query_heads && a.key_dim == b.key_dim &&
         a.value_dim == b.value_dim && a.scale == b.scale && a.soft_cap == b.soft_cap &&
         a.sink_logits == b.sink_logits;
}

// Where the layer's shape stands among those that the attention was made for.
std::int64_t Dense::place_of(const verkv::LayerConfig& layer) {
  std::size_t place = 0;
  while (place < layers_.size() && !same_attention(layers_[place], layer)) ++place;
  if (place < layers_.size() && threads_ == stock_.threads())
    return static_cast<std::int64_t>(place);
  verkv::CacheConfig config;
  config.layers = layers_;
  if (place == layers_.size()) config.layers.push_back(layer);
  config.threads = stock_.threads();
  config.executor = [this](int parts, const std::function<void(int)>& part) {
    stock_.run(parts, part);
  };
  rows_ = std::make_unique<verkv::RowAttention>(config);
  layers_ = std::move(config.layers);
  threads_ = stock_.threads();
  return static_cast<std::int64_t>(place);
}

void Dense::answer(const Attention& attention, const Visible& visible,
                   const std::vector<bool>& is_answered) {
  const std::int64_t layer = place_of(layer_of(attention));
  const std::int64_t numbers = attention.queries->ne[2] * attention.values->ne[0];
  const auto is_open = [&](std::int64_t stream, std::int64_t row) {
    return !is_answered[static_cast<std::size_t>(stream * attention.rows() + row)];
  };
  for (std::int64_t s = 0; s < attention.streams(); ++s) {
    for (std::int64_t begin = 0; begin < attention.rows();) {
      std::int64_t end = begin;
      while (end < attention.rows() && is_open(s, end)) ++end;
      if (end > begin) {
        verkv::TensorView queries = attention.query_view(s);
        queries.data = queries.row(begin, 0);
        queries.tokens = end - begin;
        rows_->attend(
            layer, {.keys = attention.key_view(s),
                    .values = attention.value_view(s),
                    .queries = queries,
                    .visible = visible.of_stream(s).subspan(static_cast<std::size_t>(begin),
                                                            static_cast<std::size_t>(end - begin)),
                    .output = {attention.output(s, begin),
                               static_cast<std::size_t>((end - begin) * numbers)}});
      }
      begin = end + 1;
    }
  }
}

void Dense::importance(const verkv::LayerConfig& layer, const verkv::RowAttentionBatch& batch,
                       std::span<float> out) {
  const std::int64_t place = place_of(layer);
  rows_->importance(place, batch, out);
}

}  // namespace verkv_ggml
