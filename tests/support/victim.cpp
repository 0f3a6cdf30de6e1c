#include "support/victim.hpp"

namespace verkv::test {

void check_names(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    INFO("\"" << text << "\" should name " << part);
    CHECK(text.find(part) != std::string::npos);
  }
}

CacheConfig victim_config() {
  CacheConfig config = small_config();
  LayerConfig layer = layer_of(2, 3, 64, 48);
  LayerConfig skipped = layer;
  skipped.cached = false;
  config.layers = {layer, skipped, layer};
  return config;
}

}  // namespace verkv::test
