// Host functions of samples.cu, for tests that link it.
#ifndef VERKV_TESTS_CPU_DEVICE_KERNELS_SAMPLES_HPP
#define VERKV_TESTS_CPU_DEVICE_KERNELS_SAMPLES_HPP

#include <driver_types.h>

namespace samples {

cudaError_t launch_axpy(float a, const float* x, float* y, int n, cudaStream_t stream);
cudaError_t launch_block_scan(const int* in, int* out, int* totals, int blocks,
                              cudaStream_t stream);
cudaError_t launch_sketch_scores(const void* sketch, const short* query, int n, int* out,
                                 cudaStream_t stream);
// Through cudaLaunchKernelEx, with a cluster of `cluster` blocks.
cudaError_t launch_axpy_extended(float a, const float* x, float* y, int n, unsigned cluster,
                                 cudaStream_t stream);
cudaError_t set_table(const float (&values)[16]);
cudaError_t launch_table(float* out, cudaStream_t stream);

}  // namespace samples

#endif  // VERKV_TESTS_CPU_DEVICE_KERNELS_SAMPLES_HPP
