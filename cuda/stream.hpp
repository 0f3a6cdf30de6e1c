// The device and the stream on which a cache enqueues its work.
#ifndef VERKV_CUDA_STREAM_HPP
#define VERKV_CUDA_STREAM_HPP

#include <cuda_runtime_api.h>

#include <cstddef>

#include "cuda_error.hpp"
#include "device_memory.hpp"

namespace verkv::cuda {

// Makes a device current for the calling thread, and gives the thread its own back.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    VERKV_CUDA_CHECK(cudaGetDevice(&before_));
    if (device == before_) return;
    VERKV_CUDA_CHECK(cudaSetDevice(device));
    changed_ = true;
  }
  ~CurrentDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// The caller's stream, or one that is made for the current device and kept as long as this object.
class Stream {
 public:
  // given: a cudaStream_t; null: none.
  explicit Stream(void* given) : stream_(static_cast<cudaStream_t>(given)) {
    if (given != nullptr) return;
    VERKV_CUDA_CHECK(cudaStreamCreate(&stream_));
    owned_ = true;
  }
  ~Stream() {
    if (owned_) cudaStreamDestroy(stream_);
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }

  // Waits for all that has been enqueued.
  void synchronize() const { VERKV_CUDA_CHECK(cudaStreamSynchronize(stream_)); }

  // Enqueue copies of `count` elements. Of pageable host memory the first is done with `from` when
  // it returns, the second not with `to` before the stream has been waited for.
  template <class T>
  void copy_in(T* to, const T* from, std::size_t count) const {
    VERKV_CUDA_CHECK(cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyHostToDevice, stream_));
  }
  template <class T>
  void copy_out(T* to, const T* from, std::size_t count) const {
    VERKV_CUDA_CHECK(cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyDeviceToHost, stream_));
  }
  // Enqueues zero bytes all over the buffer.
  template <class T>
  void clear(const DeviceBuffer<T>& buffer) const {
    if (buffer.size() == 0) return;
    VERKV_CUDA_CHECK(
        cudaMemsetAsync(buffer.data(), 0, static_cast<std::size_t>(buffer.bytes()), stream_));
  }

  // The number of the capture that the stream is in; 0: none.
  unsigned long long capture() const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    VERKV_CUDA_CHECK(cudaStreamGetCaptureInfo(stream_, &status, &id));
    return status == cudaStreamCaptureStatusActive ? id : 0;
  }

 private:
  cudaStream_t stream_ = nullptr;
  bool owned_ = false;
};

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_STREAM_HPP
