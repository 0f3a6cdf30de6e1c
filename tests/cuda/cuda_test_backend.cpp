// The suite of the manager on the CUDA backend: on the CPU device, which is slow, or on a GPU.
#include <verkv/cuda_cache.hpp>

#include "support/test_backend.hpp"

namespace verkv::test {

const TestBackend& backend() {
  static const TestBackend cuda{false, false, false, false, false, true, VERKV_TEST_THINNING};
  return cuda;
}

std::unique_ptr<KvCacheManager> make_cache(const CacheConfig& config) {
  return make_cuda_cache(config);
}

std::vector<std::string> reasons_against(const CacheConfig& config) {
  return cuda_unsupported_reasons(config);
}

}  // namespace verkv::test
