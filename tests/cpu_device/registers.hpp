// nvcc gives every value a register of its own, thousands a kernel; a warp's would not fit into a
// cache.
#ifndef VERKV_TESTS_CPU_DEVICE_REGISTERS_HPP
#define VERKV_TESTS_CPU_DEVICE_REGISTERS_HPP

#include "ptx.hpp"

namespace verkv::cpu_device {

// Renumbers the registers of a kernel so that those never needed at once share one. What a thread
// computes stays the same, except from a register that nobody wrote, which holds what came before.
void share_registers(Kernel& kernel);

}  // namespace verkv::cpu_device

#endif  // VERKV_TESTS_CPU_DEVICE_REGISTERS_HPP
