// The device behind the entry points of the CUDA runtime that a program linked with cudart.cpp
// calls.
#ifndef VERKV_TESTS_CPU_DEVICE_CUDART_HPP
#define VERKV_TESTS_CPU_DEVICE_CUDART_HPP

#include "device.hpp"

namespace verkv::cpu_device {

// Made with the default options on first use.
Device& current_device();

// A new device: nothing of the old one is left, no allocation, stream or error.
Device& reset_device(const DeviceOptions& options = {});

}  // namespace verkv::cpu_device

#endif  // VERKV_TESTS_CPU_DEVICE_CUDART_HPP
