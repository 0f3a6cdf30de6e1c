// The device behind the entry points of the CUDA runtime that a program linked with cudart.cpp
// calls.
#ifndef VERKV_TESTS_CPU_DEVICE_CUDART_HPP
#define VERKV_TESTS_CPU_DEVICE_CUDART_HPP

#include <string>

#include "device.hpp"

namespace verkv::cpu_device {

// Made with the default options on first use.
Device& current_device();

// A new device: nothing of the old one is left, no allocation, stream or error.
Device& reset_device(const DeviceOptions& options = {});

// The PTX that the kernels of a source are run from: of the file "plan.cu", for instance, compiled with
// -lineinfo. Empty if the program has none.
std::string ptx_of(const std::string& source);

}  // namespace verkv::cpu_device

#endif  // VERKV_TESTS_CPU_DEVICE_CUDART_HPP
