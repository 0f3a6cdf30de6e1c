#include "layer.hpp"

#include "fetch_rules.hpp"
#include "sketch_basis.hpp"

namespace verkv::cuda {
namespace {

LayerView view_of(const LayerConfig& layer, const CacheConfig& config) {
  LayerView view;
  view.kv_heads = static_cast<int>(layer.kv_heads);
  view.group = static_cast<int>(layer.query_heads / layer.kv_heads);
  view.key_dim = static_cast<int>(layer.key_dim);
  view.value_dim = static_cast<int>(layer.value_dim);
  view.scale = logit_scale(layer);
  view.soft_cap = static_cast<float>(layer.soft_cap.value_or(0));
  view.storage = config.storage;
  view.clusters = config.study.estimator == Estimator::clusters;
  view.sketch = largest_sketch_shape(config.sketch.kind, config.sketch.bits, view.key_dim);
  const FetchRules fetch = fetch_rules(config);
  view.fetch = flags_of(fetch.mode);
  view.rules = fetch;
  view.cap = fetch.cap;
  view.limit_tokens = fetch.limit_tokens;
  return view;
}

}  // namespace

std::vector<Layer> describe_layers(const CacheConfig& config) {
  std::vector<Layer> layers;
  for (const LayerConfig& layer : config.layers) {
    layers.push_back({layer, {}});
    if (layer.cached) layers.back().view = view_of(layer, config);
  }
  return layers;
}

}  // namespace verkv::cuda
