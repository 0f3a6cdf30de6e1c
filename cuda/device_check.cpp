#include "device_check.hpp"

#include <cuda_runtime_api.h>

#include <verkv/error.hpp>

#include "cuda_error.hpp"
#include "sizes.hpp"
#include "step.hpp"

namespace verkv::cuda {

std::string check_device(int device, const std::vector<Layer>& layers) {
  cudaDeviceProp properties{};
  VERKV_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  std::string name = std::string("cuda (") + properties.name + ", compute capability " +
                     std::to_string(properties.major) + "." + std::to_string(properties.minor) +
                     ")";
  if (properties.major < 8 || properties.canMapHostMemory == 0) {
    throw InvalidArgument(name + ": compute capability 8.0 and mapped host memory are needed",
                          ErrorCode::setting);
  }
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (!layers[i].config.cached) continue;
    const std::size_t shared = size(step_shared_bytes(layers[i].view));
    if (shared <= properties.sharedMemPerBlockOptin) continue;
    throw InvalidArgument("layer " + std::to_string(i) + ": " + std::to_string(shared) +
                              " bytes of shared memory are needed for its head sizes and group; " +
                              name + " has " + std::to_string(properties.sharedMemPerBlockOptin),
                          ErrorCode::setting, {.layer = static_cast<std::int64_t>(i)});
  }
  return name;
}

}  // namespace verkv::cuda
