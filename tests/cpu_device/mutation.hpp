// Kernels with a barrier taken out: a test that nothing notices is a test too few.
#ifndef VERKV_TESTS_CPU_DEVICE_MUTATION_HPP
#define VERKV_TESTS_CPU_DEVICE_MUTATION_HPP

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ptx.hpp"

namespace verkv::cpu_device {

struct Mutant {
  std::string ptx;
  std::string what;  // the instruction that is missing, with its line
};

// A mutant for each barrier of the block (bar.sync, barrier.sync) in the entry whose name contains
// `kernel`, and for each of the warp (bar.warp.sync) if `warp` says so.
std::vector<Mutant> without_one_barrier(const std::string& ptx, const std::string& kernel,
                                        bool warp = false);

// The instructions of a kernel that are barriers of the block or of the warp (bar.sync,
// bar.warp.sync), ascending.
std::vector<std::uint32_t> barriers_of(const Kernel& kernel);

// The kernel with an instruction that does nothing in place of this one; for
// Device::change_kernels.
std::shared_ptr<const Kernel> without_instruction(const Kernel& kernel, std::uint32_t instruction);

}  // namespace verkv::cpu_device

#endif  // VERKV_TESTS_CPU_DEVICE_MUTATION_HPP
