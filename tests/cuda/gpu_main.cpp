// Runs tests of the CUDA backend on a GPU: the runtime is the real one, and the CPU device that the
// tests prepare and question stands idle. Cases that need it have the tag [cpu-device].
#define CATCH_CONFIG_RUNNER
#include <cuda_runtime_api.h>

#include <cstdio>
#include <memory>

#include "catch.hpp"
#include "cudart.hpp"

namespace verkv::cpu_device {

Device& current_device() {
  static Device idle;
  return idle;
}

Device& reset_device(const DeviceOptions&) { return current_device(); }

}  // namespace verkv::cpu_device

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("skipped: there is no CUDA device");
    return 77;
  }
  return Catch::Session().run(argc, argv);
}
