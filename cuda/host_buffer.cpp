#include "host_buffer.hpp"

#include <cuda_runtime_api.h>

#include <new>
#include <utility>

#include "cuda_error.hpp"

namespace verkv::cuda {
namespace {

// The largest page that CUDA's hosts have. Pinning and advice go to whole pages and must not reach
// what lies beside the block, so ordinary blocks are made of them.
constexpr std::size_t kPageBytes = 64 << 10;

std::size_t whole_pages(std::int64_t bytes) {
  return (static_cast<std::size_t>(bytes) + kPageBytes - 1) / kPageBytes * kPageBytes;
}

// Errors by which a system says that it does not give this kind of memory. Others are faults.
bool refuses(cudaError_t status) {
  return status == cudaErrorMemoryAllocation || status == cudaErrorNotSupported ||
         status == cudaErrorNotPermitted || status == cudaErrorOperatingSystem ||
         status == cudaErrorInvalidValue || status == cudaErrorInvalidDevice;
}

bool has(cudaDeviceAttr attribute, int device) {
  int value = 0;
  VERKV_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
  return value != 0;
}

// CUDA 13 names a place by a structure, CUDA 12 by a number.
cudaError_t advise(const void* memory, std::size_t bytes, cudaMemoryAdvise advice, bool on_host,
                   int device) {
#if CUDART_VERSION >= 13000
  cudaMemLocation place{};
  place.type = on_host ? cudaMemLocationTypeHost : cudaMemLocationTypeDevice;
  place.id = on_host ? 0 : device;
  return cudaMemAdvise(memory, bytes, advice, place);
#else
  return cudaMemAdvise(memory, bytes, advice, on_host ? cudaCpuDeviceId : device);
#endif
}

// Without it pages would move to the device when a kernel touches them, and the host tier with
// them.
cudaError_t keep_on_host(const void* memory, std::size_t bytes, int device) {
  const cudaError_t kept = advise(memory, bytes, cudaMemAdviseSetPreferredLocation, true, device);
  if (kept != cudaSuccess) return kept;
  return advise(memory, bytes, cudaMemAdviseSetAccessedBy, false, device);
}

}  // namespace

// What the ways that were tried have said.
class HostBuffer::Refusals {
 public:
  // Whether the call succeeded; notes a refusal, and throws any other error.
  bool passed(cudaError_t status, const char* call) {
    if (status == cudaSuccess) return true;
    if (!refuses(status)) check(status, call, __FILE__, __LINE__);
    take_back(status);
    if (first_ == cudaSuccess) first_ = status;
    add(std::string(call) + ": " + cudaGetErrorName(status) + ", " + cudaGetErrorString(status));
    return false;
  }
  void add(const std::string& text) { text_ += (text_.empty() ? "" : "; ") + text; }
  const std::string& text() const { return text_; }
  [[noreturn]] void raise(std::int64_t bytes, const char* what, bool require_pinned) const {
    throw DeviceError(
        "no " + std::to_string(bytes) + " bytes of " +
            (require_pinned ? "pinned memory" : "main memory in reach of the device") + " for " +
            what + ": " + text_,
        static_cast<int>(first_ == cudaSuccess ? cudaErrorMemoryAllocation : first_),
        ErrorCode::system_memory);
  }

 private:
  std::string text_;
  cudaError_t first_ = cudaSuccess;
};

// Delegates, so that the destructor clears up after an exception.
HostBuffer::HostBuffer(std::int64_t bytes, const char* what, bool require_pinned) : HostBuffer() {
  if (bytes == 0) return;
  bytes_ = bytes;
  int device = 0;
  VERKV_CUDA_CHECK(cudaGetDevice(&device));
  Refusals refusals;
  if (pin(refusals) || register_ordinary(device, refusals)) return;
  if (!require_pinned) {
    std::string refusal = refusals.text();
    if (use_ordinary(device, refusals) || use_managed(device, refusals)) {
      refusal_ = std::move(refusal);
      return;
    }
  }
  refusals.raise(bytes, what, require_pinned);
}

HostBuffer::~HostBuffer() { release(); }

HostBuffer& HostBuffer::operator=(HostBuffer&& other) noexcept {
  HostBuffer taken(std::move(other));
  swap(taken);
  return *this;
}

void HostBuffer::swap(HostBuffer& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(device_, other.device_);
  std::swap(bytes_, other.bytes_);
  std::swap(kind_, other.kind_);
  refusal_.swap(other.refusal_);
}

void HostBuffer::release() noexcept {
  switch (kind_) {
    case HostMemory::none:
      break;
    case HostMemory::pinned:
      cudaFreeHost(data_);
      break;
    case HostMemory::managed:
      cudaFree(data_);
      break;
    case HostMemory::registered:
      cudaHostUnregister(data_);
      [[fallthrough]];
    case HostMemory::ordinary:
      ::operator delete (data_, std::align_val_t{kPageBytes});
      break;
  }
  kind_ = HostMemory::none;
  data_ = nullptr;
  device_ = nullptr;
}

bool HostBuffer::map(Refusals& refusals) {
  void* address = nullptr;
  if (!refusals.passed(cudaHostGetDevicePointer(&address, data_, 0), "cudaHostGetDevicePointer")) {
    release();
    return false;
  }
  device_ = static_cast<std::byte*>(address);
  return true;
}

bool HostBuffer::pin(Refusals& refusals) {
  void* memory = nullptr;
  const cudaError_t status =
      cudaHostAlloc(&memory, static_cast<std::size_t>(bytes_), cudaHostAllocMapped);
  if (!refusals.passed(status, "cudaHostAlloc")) return false;
  data_ = static_cast<std::byte*>(memory);
  kind_ = HostMemory::pinned;
  return map(refusals);
}

bool HostBuffer::allocate_ordinary(HostMemory kind, Refusals& refusals) {
  void* memory = ::operator new (whole_pages(bytes_), std::align_val_t{kPageBytes}, std::nothrow);
  if (memory == nullptr) {
    refusals.add("ordinary memory: not enough");
    return false;
  }
  data_ = static_cast<std::byte*>(memory);
  device_ = data_;
  kind_ = kind;
  return true;
}

// The driver takes the pages of cudaHostAlloc and those of a process from different places, with
// different limits.
bool HostBuffer::register_ordinary(int device, Refusals& refusals) {
  if (!has(cudaDevAttrHostRegisterSupported, device)) {
    refusals.add("cudaHostRegister: not supported by the device");
    return false;
  }
  if (!allocate_ordinary(HostMemory::ordinary, refusals)) return false;
  const cudaError_t status = cudaHostRegister(data_, whole_pages(bytes_), cudaHostRegisterMapped);
  if (!refusals.passed(status, "cudaHostRegister")) {
    release();
    return false;
  }
  kind_ = HostMemory::registered;
  return map(refusals);
}

bool HostBuffer::use_ordinary(int device, Refusals& refusals) {
  if (!has(cudaDevAttrPageableMemoryAccess, device)) {
    refusals.add("ordinary memory: the device cannot read it");
    return false;
  }
  if (!allocate_ordinary(HostMemory::ordinary, refusals)) return false;
  const cudaError_t status = keep_on_host(data_, whole_pages(bytes_), device);
  if (refusals.passed(status, "cudaMemAdvise of ordinary memory")) return true;
  release();
  return false;
}

// The host reads its rows while kernels of other streams run, which not every system allows.
bool HostBuffer::use_managed(int device, Refusals& refusals) {
  if (!has(cudaDevAttrConcurrentManagedAccess, device)) {
    refusals.add("cudaMallocManaged: host and device cannot use it at the same time");
    return false;
  }
  void* memory = nullptr;
  const cudaError_t made =
      cudaMallocManaged(&memory, static_cast<std::size_t>(bytes_), cudaMemAttachGlobal);
  if (!refusals.passed(made, "cudaMallocManaged")) return false;
  data_ = static_cast<std::byte*>(memory);
  device_ = data_;
  kind_ = HostMemory::managed;
  const cudaError_t advised = keep_on_host(data_, static_cast<std::size_t>(bytes_), device);
  if (refusals.passed(advised, "cudaMemAdvise of managed memory")) return true;
  release();
  return false;
}

}  // namespace verkv::cuda
