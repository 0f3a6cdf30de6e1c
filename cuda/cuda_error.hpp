// Errors of the CUDA runtime as exceptions.
#ifndef VERKV_CUDA_CUDA_ERROR_HPP
#define VERKV_CUDA_CUDA_ERROR_HPP

#include <cuda_runtime_api.h>

#include <string>

#include <verkv/error.hpp>

namespace verkv::cuda {

// The runtime remembers an error for the next cudaGetLastError of whoever asks. That of a call of
// ours is taken back, so that it is reported once; one that the caller has pending stays.
inline void take_back(cudaError_t status) {
  if (status != cudaSuccess && cudaPeekAtLastError() == status) cudaGetLastError();
}

// Throws DeviceError unless `status`, which a call of ours returned, is success.
inline void check(cudaError_t status, const char* call, const char* file, int line) {
  if (status == cudaSuccess) return;
  take_back(status);
  const std::string path = file;
  throw DeviceError(
      std::string(call) + " failed at " + path.substr(path.rfind('/') + 1) + ":" +
          std::to_string(line) + ": " + cudaGetErrorName(status) + ", " +
          cudaGetErrorString(status),
      static_cast<int>(status),
      status == cudaErrorMemoryAllocation ? ErrorCode::device_memory : ErrorCode::device);
}

}  // namespace verkv::cuda

#define VERKV_CUDA_CHECK(call) ::verkv::cuda::check((call), #call, __FILE__, __LINE__)

#endif  // VERKV_CUDA_CUDA_ERROR_HPP
