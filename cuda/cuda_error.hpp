// Errors of the CUDA runtime as exceptions.
#ifndef VERKV_CUDA_CUDA_ERROR_HPP
#define VERKV_CUDA_CUDA_ERROR_HPP

#include <cuda_runtime_api.h>

#include <string>

#include <verkv/error.hpp>

namespace verkv::cuda {

// Throws DeviceError unless `status` is success. The runtime remembers an error for the next
// cudaGetLastError of whoever asks; it is taken back, so that it is reported once.
inline void check(cudaError_t status, const char* call, const char* file, int line) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  const std::string path = file;
  throw DeviceError(std::string(call) + " failed at " + path.substr(path.rfind('/') + 1) + ":" +
                        std::to_string(line) + ": " + cudaGetErrorName(status) + ", " +
                        cudaGetErrorString(status),
                    static_cast<int>(status), status == cudaErrorMemoryAllocation);
}

}  // namespace verkv::cuda

#define VERKV_CUDA_CHECK(call) ::verkv::cuda::check((call), #call, __FILE__, __LINE__)

#endif  // VERKV_CUDA_CUDA_ERROR_HPP
