// A step of the CUDA backend on a GPU, kernel by kernel and whole, against dense attention on the
// same card: docs/performance.md.
#include "cuda_program.hpp"

int main(int argc, char** argv) { return verkv::bench::run_cuda_bench({argv + 1, argv + argc}); }
