// What the parts of src ask about settings.
#ifndef VERKV_SRC_SETTINGS_HPP
#define VERKV_SRC_SETTINGS_HPP

#include <verkv/settings.hpp>

namespace verkv {

// Throws InvalidArgument with all of unsupported_reasons(config), if there are any.
void check_config(const CacheConfig& config);

// Whether tokens of the layer are ever compressed, but for CacheConfig::keep.
inline bool compresses(const LayerConfig& layer) {
  return layer.cached && !layer.dense && !layer.window;
}

// Numbers that are stored of a token and KV head.
inline std::int64_t row_elements(const LayerConfig& layer) {
  return layer.key_dim + (layer.value_is_key_prefix ? 0 : layer.value_dim);
}

// Of a layer with a sliding window the most tokens that are held when others begin to come.
inline std::int64_t window_tokens(const CacheConfig& config, const LayerConfig& layer) {
  return *layer.window + config.window_margin;
}

// Whether the value is one of its enumeration's.
bool is_known(DType type);

}  // namespace verkv

#endif  // VERKV_SRC_SETTINGS_HPP
