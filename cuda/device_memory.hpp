// Owners of device memory and of pinned host memory. They grow by being replaced: a step that is
// under way keeps reading the old block until the stream has been waited for.
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

// Pinned host memory, mapped into the device's addresses. A system that refuses to pin (a limit on
// locked memory, too little RAM) refuses the cache: kernels read this memory, and pageable memory
// cannot stand in for it.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  PinnedBuffer(std::int64_t bytes, const char* what) : bytes_(bytes) {
    if (bytes == 0) return;
    void* memory = nullptr;
    const cudaError_t status =
        cudaHostAlloc(&memory, static_cast<std::size_t>(bytes), cudaHostAllocMapped);
    if (status != cudaSuccess) {
      bytes_ = 0;
      const std::string call = "cudaHostAlloc of " + std::to_string(bytes) +
                               " bytes of pinned memory for " + std::string(what);
      check(status, call.c_str(), __FILE__, __LINE__);
    }
    data_ = static_cast<std::byte*>(memory);
    void* address = nullptr;
    const cudaError_t mapped = cudaHostGetDevicePointer(&address, memory, 0);
    if (mapped != cudaSuccess) {
      cudaFreeHost(memory);
      data_ = nullptr;
      bytes_ = 0;
      check(mapped, "cudaHostGetDevicePointer", __FILE__, __LINE__);
    }
    device_ = static_cast<std::byte*>(address);
  }
  ~PinnedBuffer() {
    if (data_ != nullptr) cudaFreeHost(data_);
  }
  PinnedBuffer(PinnedBuffer&& other) noexcept { swap(other); }
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept {
    PinnedBuffer taken(std::move(other));
    swap(taken);
    return *this;
  }
  void swap(PinnedBuffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(device_, other.device_);
    std::swap(bytes_, other.bytes_);
  }

  std::byte* data() const { return data_; }
  std::byte* device() const { return device_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::byte* device_ = nullptr;
  std::int64_t bytes_ = 0;
};

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_DEVICE_MEMORY_HPP
