// Main memory that kernels read and write in place: the host tier. Pinned where the system allows,
// otherwise pageable memory in a form that the device can still reach.
#ifndef VERKV_CUDA_HOST_BUFFER_HPP
#define VERKV_CUDA_HOST_BUFFER_HPP

#include <cstddef>
#include <cstdint>
#include <string>

namespace verkv::cuda {

// How a block is held, in the order in which the ways are tried.
enum class HostMemory : std::uint8_t {
  none,
  pinned,      // of cudaHostAlloc
  registered,  // ordinary memory, pinned by cudaHostRegister
  ordinary,    // pageable; the device follows the system's page tables
  managed      // pageable; of cudaMallocManaged, kept in main memory by advice
};

// A block grows by being replaced, as DeviceBuffer does.
class HostBuffer {
 public:
  HostBuffer() = default;
  // A block for the current device. `what` appears in the message of the DeviceError where every
  // way is refused, or pinning is and `require_pinned` is set. 0 bytes allocate nothing.
  HostBuffer(std::int64_t bytes, const char* what, bool require_pinned);
  ~HostBuffer();
  HostBuffer(HostBuffer&& other) noexcept { swap(other); }
  HostBuffer& operator=(HostBuffer&& other) noexcept;
  void swap(HostBuffer& other) noexcept;

  std::byte* data() const { return data_; }
  std::byte* device() const { return device_; }
  std::int64_t bytes() const { return bytes_; }
  HostMemory kind() const { return kind_; }
  bool pageable() const { return kind_ > HostMemory::registered; }
  // Which calls refused to pin a pageable block, and with what error.
  const std::string& refusal() const { return refusal_; }

 private:
  class Refusals;
  bool pin(Refusals& refusals);
  bool register_ordinary(int device, Refusals& refusals);
  bool use_ordinary(int device, Refusals& refusals);
  bool use_managed(int device, Refusals& refusals);
  bool map(Refusals& refusals);
  bool allocate_ordinary(HostMemory kind, Refusals& refusals);
  void release() noexcept;

  std::byte* data_ = nullptr;
  std::byte* device_ = nullptr;
  std::int64_t bytes_ = 0;
  HostMemory kind_ = HostMemory::none;
  std::string refusal_;
};

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_HOST_BUFFER_HPP
