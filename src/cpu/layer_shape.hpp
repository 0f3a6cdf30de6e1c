// What is fixed for a layer.
#ifndef VERKV_SRC_CPU_LAYER_SHAPE_HPP
#define VERKV_SRC_CPU_LAYER_SHAPE_HPP

#include <cstddef>
#include <cstdint>
#include <memory>

#include <verkv/settings.hpp>
#include <verkv/sketch.hpp>
#include <verkv/types.hpp>

#include "cpu/tier_memory.hpp"
#include "host_file.hpp"
#include "settings.hpp"

namespace verkv::cpu {

struct LayerShape {
  LayerConfig config;
  int group = 1;  // query heads per KV head
  float scale = 1;
  float soft_cap = 0;  // 0: none
  DType storage = DType::f16;
  SketchShape sketch;     // the largest; each head has its own
  bool clusters = false;  // estimates by clusters
  HostTier host = HostTier::own;
  // Of the tiers.
  const TierMemory* fast = nullptr;
  const TierMemory* host_memory = nullptr;
  std::shared_ptr<HostFile> file;  // of HostTier::file

  std::int64_t row_elements() const { return verkv::row_elements(config); }
  std::int64_t row_bytes() const {
    return row_elements() * static_cast<std::int64_t>(size_bytes(storage));
  }
  std::int64_t key_bytes() const {
    return config.key_dim * static_cast<std::int64_t>(size_bytes(storage));
  }
  std::int64_t value_bytes() const {
    return config.value_dim * static_cast<std::int64_t>(size_bytes(storage));
  }
  // Of a value that is stored beside its key.
  std::int64_t own_value_bytes() const { return config.value_is_key_prefix ? 0 : value_bytes(); }
};

// Without memory of the tiers. layer_heads.cpp.
LayerShape layer_shape(const CacheConfig& config, std::size_t layer);

}  // namespace verkv::cpu

#endif  // VERKV_SRC_CPU_LAYER_SHAPE_HPP
