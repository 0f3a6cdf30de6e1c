// What kernels share: loads of elements, and the fixed order of sums of src/cpu/kernels.hpp.
// Compiled without contraction (-fmad=false): every fused operation is written as one.
#ifndef VERKV_CUDA_DEVICE_MATH_CUH
#define VERKV_CUDA_DEVICE_MATH_CUH

#include <cstdint>

#include <verkv/sketch.hpp>
#include <verkv/types.hpp>

#include "sum_order.hpp"

namespace verkv::cuda {

#define VERKV_DEVICE __device__ __forceinline__

inline constexpr unsigned kWholeWarp = 0xffffffffu;

VERKV_DEVICE float infinity() { return __int_as_float(0x7f800000); }
VERKV_DEVICE float minus_infinity() { return __int_as_float(0xff800000); }
VERKV_DEVICE double infinite_double() { return __longlong_as_double(0x7ff0000000000000ll); }
VERKV_DEVICE double no_double() { return __longlong_as_double(0x7ff8000000000000ll); }
inline constexpr float kLargestFloat = 3.402823466e+38f;

// Exact; one instruction instead of the portable conversion.
VERKV_DEVICE float as_float(Half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
VERKV_DEVICE float as_float(BFloat16 x) { return __uint_as_float(unsigned{x.bits} << 16); }
VERKV_DEVICE float as_float(float x) { return x; }

VERKV_DEVICE bool is_low(Positive16 odds) { return odds.bits < kPositive16Infinity.bits; }

VERKV_DEVICE Half half_of(unsigned bits) { return Half{static_cast<std::uint16_t>(bits)}; }

// Four consecutive elements, aligned to their size.
VERKV_DEVICE float4 load_four(const float* from) { return *reinterpret_cast<const float4*>(from); }
VERKV_DEVICE float4 load_four(const Half* from) {
  const uint2 x = *reinterpret_cast<const uint2*>(from);
  return make_float4(as_float(half_of(x.x)), as_float(half_of(x.x >> 16)), as_float(half_of(x.y)),
                     as_float(half_of(x.y >> 16)));
}
VERKV_DEVICE float4 load_four(const BFloat16* from) {
  const uint2 x = *reinterpret_cast<const uint2*>(from);
  return make_float4(__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xffff0000u),
                     __uint_as_float(x.y << 16), __uint_as_float(x.y & 0xffff0000u));
}

// Elements j .. j + 3 of a row, 0 from `dim` on. `aligned`: dim is a multiple of 4 and the row
// starts at one.
template <class Element>
VERKV_DEVICE float4 load_four(const Element* row, int j, int dim, bool aligned) {
  if (aligned) return j < dim ? load_four(row + j) : make_float4(0, 0, 0, 0);
  float4 x = make_float4(0, 0, 0, 0);
  if (j < dim) x.x = as_float(row[j]);
  if (j + 1 < dim) x.y = as_float(row[j + 1]);
  if (j + 2 < dim) x.z = as_float(row[j + 2]);
  if (j + 3 < dim) x.w = as_float(row[j + 3]);
  return x;
}

// Dialect of sum_order.hpp: fold16 over 16 neighbouring threads; all of them get the sum. The whole
// warp calls.
VERKV_DEVICE float fold16(float x) {
#pragma unroll
  for (int half = kLanes / 2; half > 0; half /= 2) x += __shfl_xor_sync(kWholeWarp, x, half);
  return x;
}

// fold16 where thread t of four neighbours holds lanes 4t .. 4t + 3.
VERKV_DEVICE float fold16(float4 x) {
#pragma unroll
  for (int half = 2; half > 0; half /= 2) {
    x.x += __shfl_xor_sync(kWholeWarp, x.x, half);
    x.y += __shfl_xor_sync(kWholeWarp, x.y, half);
    x.z += __shfl_xor_sync(kWholeWarp, x.z, half);
    x.w += __shfl_xor_sync(kWholeWarp, x.w, half);
  }
  x.x += x.z;
  x.y += x.w;
  return x.x + x.y;
}

VERKV_DEVICE float4 fma_four(float4 a, float4 b, float4 c) {
  return make_float4(fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y), fmaf(a.z, b.z, c.z),
                     fmaf(a.w, b.w, c.w));
}

// Keeps `top` where x is NaN, as std::max(top, x) does.
VERKV_DEVICE float raise(float top, float x) { return top < x ? x : top; }

VERKV_DEVICE float warp_top(float x) {
#pragma unroll
  for (int half = 16; half > 0; half /= 2) x = raise(x, __shfl_xor_sync(kWholeWarp, x, half));
  return x;
}

// Bytes that memory brings at once.
inline constexpr int kLineBytes = 128;

// Asks for a line of memory that will be read, so that the wait for it passes meanwhile.
VERKV_DEVICE void prefetch_line(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from)));
}
VERKV_DEVICE void prefetch(const void* from, int bytes) {
  const auto* at = static_cast<const unsigned char*>(from);
#pragma unroll 1
  for (int i = 0; i < bytes; i += kLineBytes) prefetch_line(at + i);
}

// Room for a T in shared memory, where no constructor runs.
template <class T>
struct Uninitialized {
  alignas(T) unsigned char bytes[sizeof(T)];

  VERKV_DEVICE T& get() { return *reinterpret_cast<T*>(bytes); }
};

// Whether this block is the last of `blocks` that come here with the counter that counter() finds,
// which was 0; it sees what the others have written before. `is_last` lies in shared memory. All
// threads call.
template <class Counter>
VERKV_DEVICE bool comes_last(Counter&& counter, unsigned blocks, bool& is_last) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(&counter(), 1u) + 1 == blocks;
    __threadfence();
  }
  __syncthreads();
  return is_last;
}

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_DEVICE_MATH_CUH
