// What a GPU and its bus can do: the rates that floors are made of.
#ifndef VERKV_BENCH_CUDA_MACHINE_HPP
#define VERKV_BENCH_CUDA_MACHINE_HPP

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

namespace verkv::bench {

// Sizes of the probes.
struct ProbeSizes {
  std::int64_t device_bytes = std::int64_t{1} << 30;  // powers of two
  std::int64_t host_bytes = std::int64_t{256} << 20;
  std::int64_t small_piece = std::int64_t{64} << 10;
  std::int64_t large_piece = std::int64_t{64} << 20;
  int nodes = 40;
  int repetitions = 20;
};

// Rates in bytes per second.
struct Machine {
  std::string name;
  int major = 0;
  int minor = 0;
  int multiprocessors = 0;
  double clock_hz = 0;
  std::int64_t cache_bytes = 0;  // second level
  std::int64_t memory_bytes = 0;
  int driver = 0;
  int runtime = 0;
  // Whether times mean anything: not on the stand-in of the tests.
  bool timings = true;

  double copy_rate = 0;  // device to device, bytes read and bytes written
  double read_rate = 0;  // by a kernel that only reads
  // From pinned host memory.
  double engine_small_rate = 0;  // by the copy engine, in pieces
  double engine_large_rate = 0;
  double mapped_rate = 0;            // rows by a kernel, in order
  double mapped_scattered_rate = 0;  // rows by a kernel, in an order that jumps
  double node_gap_seconds = 0;       // from one node of a graph to the next
};

// Waits for the device. The current device must exist.
Machine describe_machine();
void probe_machine(Machine& machine, const ProbeSizes& sizes, cudaStream_t stream);

}  // namespace verkv::bench

#endif  // VERKV_BENCH_CUDA_MACHINE_HPP
