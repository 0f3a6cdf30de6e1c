// Owner of device memory. It grows by being replaced: a step that is under way keeps reading the
// old block until the stream has been waited for.
#ifndef VERKV_CUDA_DEVICE_MEMORY_HPP
#define VERKV_CUDA_DEVICE_MEMORY_HPP

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "cuda_error.hpp"

namespace verkv::cuda {

// Elements of T in device memory, uninitialised. Freeing waits for the device.
template <class T>
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  // `what` appears in the message when memory is short. 0 elements allocate nothing.
  DeviceBuffer(std::int64_t count, const char* what) : count_(count) {
    if (count == 0) return;
    void* memory = nullptr;
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    const cudaError_t status = cudaMalloc(&memory, bytes);
    if (status != cudaSuccess) {
      count_ = 0;
      const std::string call =
          "cudaMalloc of " + std::to_string(bytes) + " bytes for " + std::string(what);
      check(status, call.c_str(), __FILE__, __LINE__);
    }
    data_ = static_cast<T*>(memory);
  }
  ~DeviceBuffer() {
    if (data_ != nullptr) cudaFree(data_);
  }
  DeviceBuffer(DeviceBuffer&& other) noexcept { swap(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    DeviceBuffer taken(std::move(other));
    swap(taken);
    return *this;
  }
  void swap(DeviceBuffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
  }

  T* data() const { return data_; }
  std::int64_t size() const { return count_; }
  std::int64_t bytes() const { return count_ * static_cast<std::int64_t>(sizeof(T)); }

 private:
  T* data_ = nullptr;
  std::int64_t count_ = 0;
};

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_DEVICE_MEMORY_HPP
