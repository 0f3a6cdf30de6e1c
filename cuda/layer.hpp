// What is fixed for each layer of a configuration.
#ifndef VERKV_CUDA_LAYER_HPP
#define VERKV_CUDA_LAYER_HPP

#include <vector>

#include <verkv/settings.hpp>

#include "views.hpp"

namespace verkv::cuda {

struct Layer {
  LayerConfig config;
  // Only where the layer is cached.
  LayerView view;
};

std::vector<Layer> describe_layers(const CacheConfig& config);

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_LAYER_HPP
