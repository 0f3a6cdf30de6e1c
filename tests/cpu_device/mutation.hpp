// PTX with a barrier taken out: a test that nothing notices is a test too few.
#ifndef VERKV_TESTS_CPU_DEVICE_MUTATION_HPP
#define VERKV_TESTS_CPU_DEVICE_MUTATION_HPP

#include <string>
#include <vector>

namespace verkv::cpu_device {

struct Mutant {
  std::string ptx;
  std::string what;  // the instruction that is missing, with its line
};

// A mutant for each barrier of the block (bar.sync, barrier.sync) in the entry whose name contains
// `kernel`, and for each of the warp (bar.warp.sync) if `warp` says so.
std::vector<Mutant> without_one_barrier(const std::string& ptx, const std::string& kernel,
                                        bool warp = false);

}  // namespace verkv::cpu_device

#endif  // VERKV_TESTS_CPU_DEVICE_MUTATION_HPP
