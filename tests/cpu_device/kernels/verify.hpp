// Host functions of verify.cu.
#ifndef VERKV_TESTS_CPU_DEVICE_KERNELS_VERIFY_HPP
#define VERKV_TESTS_CPU_DEVICE_KERNELS_VERIFY_HPP

#include <driver_types.h>

namespace samples {

inline constexpr int kVerifyKeys = 2048;  // at most, of a head
inline constexpr int kVerifyTop = 4;

struct VerifyOutput {
  int* index;          // [heads][keys]
  float* probability;  // [heads][keys]
  int* count;          // [heads]
  float* top;          // [heads][kVerifyTop]
  int* total;          // 1, added to
};

// sketch: [heads][keys][8] words; scale: [heads][keys]; query: [heads][128].
cudaError_t launch_verify(const unsigned* sketch, const float* scale, const float* query, int heads,
                          int keys, float budget, unsigned seed, const VerifyOutput& out,
                          cudaStream_t stream);

// The numbers whose flag is set, in order, by cub::DeviceSelect; out_count is on the device.
cudaError_t launch_select(const int* in, const char* flags, int n, int* out, int* out_count,
                          cudaStream_t stream);

}  // namespace samples

#endif  // VERKV_TESTS_CPU_DEVICE_KERNELS_VERIFY_HPP
