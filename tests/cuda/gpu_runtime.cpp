// For tests of the CUDA backend on a GPU: the runtime is the real one, and the CPU device that the
// tests prepare and question stands idle. Cases that need it have the tag [cpu-device].
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>

#include "cudart.hpp"

namespace verkv::cpu_device {

Device& current_device() {
  static Device idle;
  return idle;
}

Device& reset_device(const DeviceOptions&) { return current_device(); }

}  // namespace verkv::cpu_device

namespace {

constexpr int kSkipped = 77;  // what ctest takes for "skipped"

// Before main, which is the test framework's.
[[maybe_unused]] const bool has_device = [] {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("skipped: there is no CUDA device");
    std::fflush(stdout);
    std::_Exit(kSkipped);
  }
  return true;
}();

}  // namespace
