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
  return layer;
}

// Where the layer's shape stands among those that the attention was made for.
std::int64_t Dense::place_of(const Attention& attention) {
  const verkv::LayerConfig layer = layer_of(attention);
  std::size_t place = 0;
  while (place < layers_.size() &&
         !(layers_[place].kv_heads == layer.kv_heads &&
           layers_[place].query_heads == layer.query_heads &&
           layers_[place].key_dim == layer.key_dim && layers_[place].value_dim == layer.value_dim &&
           layers_[place].scale == layer.scale && layers_[place].soft_cap == layer.soft_cap)) {
    ++place;
  }
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

void Dense::answer(const Attention& attention, const Visible& visible) {
  const std::int64_t layer = place_of(attention);
  const std::size_t numbers = static_cast<std::size_t>(attention.rows() * attention.queries->ne[2] *
                                                       attention.values->ne[0]);
  for (std::int64_t s = 0; s < attention.streams(); ++s) {
    rows_->attend(layer, {.keys = attention.key_view(s),
                          .values = attention.value_view(s),
                          .queries = attention.query_view(s),
                          .visible = visible.of_stream(s),
                          .output = {attention.output(s, 0), numbers}});
  }
}

}  // namespace verkv_ggml
