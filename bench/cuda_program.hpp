// The GPU benchmark without its main, so that a test can run it.
#ifndef VERKV_BENCH_CUDA_PROGRAM_HPP
#define VERKV_BENCH_CUDA_PROGRAM_HPP

#include <string>
#include <vector>

namespace verkv::bench {

// What the program ends with.
enum ExitCode : int {
  kExitDone = 0,
  kExitFailed = 1,  // a result that is wrong, or an error of the device
  kExitOptions = 2,
  kExitNoDevice = 3
};

// Runs it with the arguments of the command line, without the program's name. Prints progress and
// results to stdout, errors to stderr. Never throws.
int run_cuda_bench(const std::vector<std::string>& arguments) noexcept;

}  // namespace verkv::bench

#endif  // VERKV_BENCH_CUDA_PROGRAM_HPP
