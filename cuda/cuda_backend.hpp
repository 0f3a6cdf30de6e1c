// The device backend, behind the seam of src/backend.hpp.
#ifndef VERKV_CUDA_CUDA_BACKEND_HPP
#define VERKV_CUDA_CUDA_BACKEND_HPP

#include <memory>

#include <verkv/cuda_cache.hpp>

#include "backend.hpp"

namespace verkv::cuda {

// For a configuration that cuda_unsupported_reasons accepts and a device that exists, which must be
// current. Throws InvalidArgument if the device cannot serve it, DeviceError if it refuses.
std::unique_ptr<Backend> make_backend(const CacheConfig& config, const CudaOptions& options);

// How often what a captured step holds on to has been replaced. Throws InvalidArgument for another
// backend.
std::uint64_t graph_generation(const Backend& backend);

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_CUDA_BACKEND_HPP
