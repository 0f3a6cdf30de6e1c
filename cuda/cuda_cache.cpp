#include <verkv/cuda_cache.hpp>

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <utility>

#include "cuda_backend.hpp"
#include "cuda_error.hpp"
#include "manager_access.hpp"
#include "stream.hpp"

namespace verkv {
namespace {

// A launch has a block for each query head of each row, and fewer than 2^31 of them: room for 2047
// heads.
constexpr std::int64_t kMostRows = std::int64_t{1} << 20;

bool is_known(MemorySpace space) {
  switch (space) {
    case MemorySpace::host:
    case MemorySpace::device:
      return true;
  }
  return false;
}

}  // namespace

int cuda_device_count() noexcept {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  cuda::take_back(status);
  return status == cudaSuccess ? count : 0;
}

std::vector<std::string> cuda_unsupported_reasons(const CacheConfig& config) {
  std::vector<std::string> reasons = unsupported_reasons(config);
  if (config.host != HostTier::own) {
    reasons.emplace_back(
        "a host tier of the engine or in a file; a device reads one in memory of the cache");
  }
  if (config.study.order == FetchOrder::exact) {
    reasons.emplace_back("the exact order of fetches; a device orders by worth");
  }
  if (config.fast_allocator.allocate != nullptr || config.host_allocator.allocate != nullptr) {
    reasons.emplace_back(
        "allocators of the engine; a device allocates through CUDA, which pins and maps the host "
        "tier");
  }
  for (std::size_t i = 0; i < config.layers.size(); ++i) {
    const LayerConfig& layer = config.layers[i];
    if (!layer.cached) continue;
    if (layer.value_is_key_prefix) {
      reasons.push_back("layer " + std::to_string(i) +
                        ": values that are the first numbers of keys; a device stores them apart");
    }
    if (!layer.window) continue;
    reasons.push_back("layer " + std::to_string(i) + ": sliding window of " +
                      std::to_string(*layer.window) +
                      " tokens; a device serves layers without one (set cached to false to leave "
                      "the layer to the engine)");
  }
  return reasons;
}

std::unique_ptr<KvCacheManager> make_cuda_cache(CacheConfig config, const CudaOptions& options) {
  std::string text;
  for (const std::string& reason : cuda_unsupported_reasons(config)) {
    text += (text.empty() ? "" : "; ") + reason;
  }
  if (!text.empty()) throw InvalidArgument(text, ErrorCode::setting);
  const int devices = cuda_device_count();
  if (options.device < 0 || options.device >= devices) {
    throw InvalidArgument(
        "CUDA device " + std::to_string(options.device) + "; there are " + std::to_string(devices),
        ErrorCode::setting);
  }
  if (options.rows && (*options.rows < 0 || *options.rows > kMostRows)) {
    throw InvalidArgument("CudaOptions::rows is " + std::to_string(*options.rows) + "; 0 to " +
                              std::to_string(kMostRows) + " are supported, or none",
                          ErrorCode::setting);
  }
  if (!is_known(options.views)) {
    throw InvalidArgument("CudaOptions::views is " +
                              std::to_string(static_cast<int>(options.views)) +
                              "; not a value of its enumeration",
                          ErrorCode::setting);
  }
  const cuda::CurrentDevice current(options.device);
  auto backend = cuda::make_backend(config, options);
  return ManagerAccess::make(std::move(config), std::move(backend));
}

std::uint64_t cuda_graph_generation(const KvCacheManager& manager) {
  return ManagerAccess::ask(manager, cuda::graph_generation);
}

}  // namespace verkv
