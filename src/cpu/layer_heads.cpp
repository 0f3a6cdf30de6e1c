// The heads of a layer of a sequence, which share where the engine has its rows.
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "cpu/head_store.hpp"
#include "fetch_rules.hpp"
#include "invalid.hpp"
#include "sketch_basis.hpp"

namespace verkv::cpu {

LayerShape layer_shape(const CacheConfig& config, std::size_t layer) {
  LayerShape shape;
  shape.config = config.layers[layer];
  shape.storage = config.storage;
  shape.host = config.host;
  if (!shape.config.cached) return shape;
  shape.group = static_cast<int>(shape.config.query_heads / shape.config.kv_heads);
  shape.scale = logit_scale(shape.config);
  shape.soft_cap = static_cast<float>(shape.config.soft_cap.value_or(0));
  shape.clusters = config.study.estimator == Estimator::clusters;
  shape.sketch = largest_sketch_shape(config.sketch.kind, config.sketch.bits,
                                      static_cast<int>(shape.config.key_dim));
  return shape;
}

std::vector<HeadStore> make_heads(const LayerShape& shape) {
  std::shared_ptr<EngineRows> engine;
  if (shape.host == HostTier::engine) engine = std::make_shared<EngineRows>();
  std::vector<HeadStore> heads;
  heads.reserve(static_cast<std::size_t>(shape.config.kv_heads));
  for (std::int64_t h = 0; h < shape.config.kv_heads; ++h) heads.emplace_back(shape, engine, h);
  return heads;
}

std::vector<HeadStore> fork_heads(std::vector<HeadStore>& heads) {
  std::vector<HeadStore> result;
  result.reserve(heads.size());
  for (HeadStore& head : heads) result.push_back(head.fork());
  if (result.empty() || !result.front().host().is_engine()) return result;
  const auto engine = std::make_shared<EngineRows>(result.front().host().engine());
  for (HeadStore& head : result) head.host().use(engine);
  return result;
}

void check_head_strides(const HeadStore& head, const TensorView& keys, const TensorView& values) {
  const auto check = [](const char* what, const TensorView& view, std::int64_t stride) {
    if (view.heads == 1 || view.tokens == 0 || view.head_stride == stride) return;
    invalid(
        "{}: KV heads {} elements apart; those of the tokens that are there lie {} apart, and all "
        "of a layer of a sequence must",
        what, view.head_stride, stride);
  };
  check("keys", keys, head.host().engine().key_head_stride);
  check("values", values, head.host().engine().value_head_stride);
}

std::int64_t first_changed_row(std::span<const HeadStore> heads) {
  std::int64_t first = -1;
  for (const HeadStore& head : heads) {
    const std::int64_t row = head.changed_row();
    if (row >= 0 && (first < 0 || row < first)) first = row;
  }
  return first;
}

}  // namespace verkv::cpu
