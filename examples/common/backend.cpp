#include "backend.hpp"

#include <utility>
#include <vector>

#include <verkv/error.hpp>
#if VERKV_EXAMPLE_CUDA
#include <verkv/cuda_cache.hpp>
#endif

namespace verkv {

#if VERKV_EXAMPLE_CUDA

std::string backend_refusal(BackendKind kind, CacheConfig config) {
  if (kind == BackendKind::cpu) return {};
  if (cuda_device_count() == 0) return "there is no CUDA device";
  config.layers.assign(1, LayerConfig{});
  config.layers[0].key_dim = config.layers[0].value_dim = 1;
  const std::vector<std::string> reasons = cuda_unsupported_reasons(config);
  return reasons.empty() ? std::string() : reasons.front();
}

std::unique_ptr<KvCacheManager> make_cache(BackendKind kind, CacheConfig config) {
  return kind == BackendKind::cuda ? make_cuda_cache(std::move(config))
                                   : make_cpu_cache(std::move(config));
}

#else

std::string backend_refusal(BackendKind kind, CacheConfig) {
  return kind == BackendKind::cpu ? "" : "this program was built without it (VERKV_WITH_CUDA)";
}

std::unique_ptr<KvCacheManager> make_cache(BackendKind kind, CacheConfig config) {
  const std::string refusal = backend_refusal(kind, config);
  if (!refusal.empty()) throw DeviceError("the CUDA backend: " + refusal, 0, ErrorCode::device);
  return make_cpu_cache(std::move(config));
}

#endif

}  // namespace verkv
