// A cache whose fast tier is the memory of an NVIDIA GPU and whose host tier is main memory, pinned
// if possible (target verkv::cuda). No CUDA header is needed to include this. Memory, asynchrony,
// errors: docs/cuda.md.
//
//   verkv::CudaOptions options;
//   options.stream = stream;                        // the engine's cudaStream_t
//   options.views = verkv::MemorySpace::device;     // keys, queries and outputs lie on the device
//   auto cache = verkv::make_cuda_cache(config, options);
#ifndef VERKV_CUDA_CACHE_HPP
#define VERKV_CUDA_CACHE_HPP

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

namespace verkv {

// Where the memory lies that the caller's views, outputs and importance scores point to.
enum class MemorySpace : std::uint8_t {
  host,   // copied to and fro; every call blocks until done
  device  // read and written in place, in the order of the stream
};

struct CudaOptions {
  int device = 0;  // ordinal
  // A cudaStream_t on which everything is enqueued; it must outlive the cache. Null: the cache
  // makes one that keeps order with the legacy default stream.
  void* stream = nullptr;
  MemorySpace views = MemorySpace::host;
  // Most rows of a batch, padding included, at most 2^20: create_sequence makes room for them.
  // None: as many as there are sequences. A larger batch makes room by itself, which waits for the
  // device; inside a capture it is refused with CapacityError.
  std::optional<std::int64_t> rows = std::nullopt;
  // true: where the system refuses to pin memory for the host tier, the call that needs it throws
  // DeviceError. false: pageable memory that the device can read in place stands in, slower;
  // KvCacheManager::description says so, and MemoryReport::pageable_bytes how much.
  bool require_pinned = false;
};

// Number of CUDA devices; 0 where there is no driver. Never throws.
VERKV_API int cuda_device_count() noexcept;

// Why make_cuda_cache would refuse this configuration: what unsupported_reasons says and what the
// device does not do (FetchOrder::exact). Needs no device.
VERKV_API std::vector<std::string> cuda_unsupported_reasons(const CacheConfig& config);

// Every decision (samples, certificates, fetch lists) is that of make_cpu_cache with the same
// configuration, bit for bit; outputs agree to rounding. CacheConfig::threads and
// StudyConfig::vector_code have no meaning here. Throws InvalidArgument with the reasons above, on
// a memory space outside its enumeration, on a number of rows out of its range, on a device that
// does not exist, has a compute capability below 8.0 or no mapped host memory, and on head sizes
// and groups that need more shared memory than the device has; DeviceError if the device refuses.
VERKV_API std::unique_ptr<KvCacheManager> make_cuda_cache(CacheConfig config,
                                                          const CudaOptions& options = {});

// Another number than before means that graphs in which steps of this manager were captured hold on
// to memory or sizes that are no longer right: capture anew (docs/cuda.md). Throws InvalidArgument
// for a manager that make_cuda_cache has not made.
VERKV_API std::uint64_t cuda_graph_generation(const KvCacheManager& manager);

}  // namespace verkv

#endif  // VERKV_CUDA_CACHE_HPP
