#include "cuda_machine.hpp"

#include <cstddef>

#include "cuda_kernels.hpp"
#include "cuda_timing.hpp"
#include "device_memory.hpp"
#include "host_buffer.hpp"

namespace verkv::bench {
namespace {

constexpr int kWarmUp = 2;
// An odd factor near the golden ratio of 2^32: neighbours come to lie far apart.
constexpr std::int64_t kScatter = 2654435769;

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  VERKV_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

double rate(std::int64_t bytes, const Timing& timing) {
  return timing.median > 0 ? static_cast<double>(bytes) / timing.median : 0;
}

class Probes {
 public:
  Probes(const Machine& machine, const ProbeSizes& sizes, cudaStream_t stream)
      : sizes_(sizes),
        stream_(stream),
        blocks_(8 * machine.multiprocessors),
        out_(blocks_ * kReadThreads, "probes"),
        from_(sizes.device_bytes, "probes"),
        to_(sizes.device_bytes, "probes"),
        host_(sizes.host_bytes, "probes", true) {
    VERKV_CUDA_CHECK(
        cudaMemsetAsync(from_.data(), 1, static_cast<std::size_t>(from_.bytes()), stream));
    for (std::int64_t i = 0; i < host_.bytes(); ++i)
      host_.data()[i] = static_cast<std::byte>(i * 7 % 251);
  }

  double copy() {
    return 2 * rate(sizes_.device_bytes, run([this] { copy_all(); }));
  }

  double read() {
    return rate(from_.bytes(), run([&] { read_rows(from_.data(), from_.bytes(), 1); }));
  }

  double engine(std::int64_t piece) {
    return rate(host_.bytes(), run([&] {
                  for (std::int64_t at = 0; at < host_.bytes(); at += piece) {
                    VERKV_CUDA_CHECK(cudaMemcpyAsync(to_.data() + at, host_.data() + at,
                                                     static_cast<std::size_t>(piece),
                                                     cudaMemcpyHostToDevice, stream_));
                  }
                }));
  }

  double mapped(std::int64_t factor) {
    return rate(host_.bytes(), run([&] { read_rows(host_.device(), host_.bytes(), factor); }));
  }

  double node_gap() {
    const auto chain = [&](int nodes) {
      const Graph graph(stream_, [&] {
        for (int i = 0; i < nodes; ++i) VERKV_CUDA_CHECK(launch_empty(stream_));
      });
      return measure(
                 stream_, kWarmUp, sizes_.repetitions, [&] { copy_all(); },
                 [&] { graph.launch(stream_); })
          .median;
    };
    // What the start of a graph costs is in both.
    return (chain(sizes_.nodes) - chain(1)) / (sizes_.nodes - 1);
  }

 private:
  template <class Work>
  Timing run(Work&& work) {
    return measure(
        stream_, kWarmUp, sizes_.repetitions, [] {}, work);
  }
  void copy_all() {
    VERKV_CUDA_CHECK(cudaMemcpyAsync(to_.data(), from_.data(),
                                     static_cast<std::size_t>(from_.bytes()),
                                     cudaMemcpyDeviceToDevice, stream_));
  }
  void read_rows(const std::byte* rows, std::int64_t bytes, std::int64_t factor) {
    VERKV_CUDA_CHECK(
        launch_read_rows(rows, bytes / kRowBytes, factor, out_.data(), blocks_, stream_));
  }

  const ProbeSizes& sizes_;
  cudaStream_t stream_;
  int blocks_;
  cuda::DeviceBuffer<std::uint32_t> out_;
  cuda::DeviceBuffer<std::byte> from_;
  cuda::DeviceBuffer<std::byte> to_;
  cuda::HostBuffer host_;
};

}  // namespace

Machine describe_machine() {
  int device = 0;
  VERKV_CUDA_CHECK(cudaGetDevice(&device));
  cudaDeviceProp properties{};
  VERKV_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  Machine machine;
  machine.name = properties.name;
  machine.major = properties.major;
  machine.minor = properties.minor;
  machine.multiprocessors = properties.multiProcessorCount;
  machine.clock_hz = 1e3 * attribute(cudaDevAttrClockRate, device);
  machine.cache_bytes = attribute(cudaDevAttrL2CacheSize, device);
  machine.memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem);
  VERKV_CUDA_CHECK(cudaDriverGetVersion(&machine.driver));
  VERKV_CUDA_CHECK(cudaRuntimeGetVersion(&machine.runtime));
  machine.timings = machine.name != "CPU device";
  return machine;
}

void probe_machine(Machine& machine, const ProbeSizes& sizes, cudaStream_t stream) {
  Probes probes(machine, sizes, stream);
  machine.copy_rate = probes.copy();
  machine.read_rate = probes.read();
  machine.engine_small_rate = probes.engine(sizes.small_piece);
  machine.engine_large_rate = probes.engine(sizes.large_piece);
  machine.mapped_rate = probes.mapped(1);
  machine.mapped_scattered_rate = probes.mapped(kScatter);
  machine.node_gap_seconds = probes.node_gap();
}

}  // namespace verkv::bench
