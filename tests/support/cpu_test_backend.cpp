#include "support/test_backend.hpp"

namespace verkv::test {

const TestBackend& backend() {
  static const TestBackend cpu;
  return cpu;
}

std::unique_ptr<KvCacheManager> make_cache(const CacheConfig& config) {
  return make_cpu_cache(config);
}

std::vector<std::string> reasons_against(const CacheConfig& config) {
  return unsupported_reasons(config);
}

}  // namespace verkv::test
