#include <cstdio>
#include <string>

#include <verkv/config.hpp>
#include <verkv/kv_cache_manager.hpp>

// The version in the headers is that of the package, and a cache can be made and asked.
int main() {
  const std::string version = std::to_string(VERKV_VERSION_MAJOR) + "." +
                              std::to_string(VERKV_VERSION_MINOR) + "." +
                              std::to_string(VERKV_VERSION_PATCH);
  if (version != PACKAGE_VERSION) {
    std::printf("headers %s, package %s\n", version.c_str(), PACKAGE_VERSION);
    return 1;
  }

  verkv::CacheConfig config;
  config.layers.resize(1);
  config.layers[0].query_heads = 2;
  config.layers[0].key_dim = 64;
  config.layers[0].value_dim = 64;
  const auto cache = verkv::make_cpu_cache(config);
  const verkv::SequenceId sequence = cache->create_sequence();
  std::printf("verkv %s: %s\n", version.c_str(), cache->description().c_str());
  if (cache->tokens(sequence, 0) != 0) return 1;

  // An exception of the library is known by its type on this side of the library's border.
  try {
    cache->erase(verkv::SequenceId{12345});
    return 1;
  } catch (const verkv::InvalidArgument&) {
    return 0;
  }
}
