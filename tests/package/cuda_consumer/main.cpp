#include <cstdio>

#include <verkv/cuda_cache.hpp>

// With or without a device: a cache is made, or the reason is an exception of the library.
int main() {
  verkv::CacheConfig config;
  config.layers.resize(1);
  config.layers[0].query_heads = 2;
  config.layers[0].key_dim = 64;
  config.layers[0].value_dim = 64;
  const int devices = verkv::cuda_device_count();
  std::printf("%d devices\n", devices);
  try {
    const auto cache = verkv::make_cuda_cache(config);
    std::printf("%s\n", cache->description().c_str());
    return devices > 0 && cache->create_sequence() == verkv::SequenceId{0} ? 0 : 1;
  } catch (const verkv::InvalidArgument& error) {
    std::printf("%s\n", error.what());
    return devices == 0 ? 0 : 1;
  }
}
