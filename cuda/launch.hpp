// Launches of kernels whose error is their own.
#ifndef VERKV_CUDA_LAUNCH_HPP
#define VERKV_CUDA_LAUNCH_HPP

#include <cuda_runtime_api.h>

#include <cstddef>
#include <type_traits>

namespace verkv::cuda {

// Enqueues the kernel and returns the error of this launch; it does not synchronise. With <<<>>>
// the error would have to be asked of cudaGetLastError, where an older one of the caller's code may
// lie.
template <class... Parameters>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, int threads, std::size_t shared_bytes,
                   cudaStream_t stream, std::type_identity_t<Parameters>... arguments) {
  void* addresses[] = {static_cast<void*>(&arguments)...};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid,
                          dim3(static_cast<unsigned>(threads)), addresses, shared_bytes, stream);
}

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_LAUNCH_HPP
