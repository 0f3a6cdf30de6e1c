// Exact products of queries with rows of keys or of the sketch's basis, four threads a row, in the
// order of sums of src/cpu/kernels.hpp.
#ifndef VERKV_CUDA_EXACT_PRODUCTS_CUH
#define VERKV_CUDA_EXACT_PRODUCTS_CUH

#include <cstdint>

#include "device_math.cuh"
#include "query.cuh"

namespace verkv::cuda {

// load_four() of what no kernel of the step writes, with one conversion instruction for each half.
VERKV_DEVICE float4 load_aligned(const float* from) {
  return __ldg(reinterpret_cast<const float4*>(from));
}
VERKV_DEVICE float4 load_aligned(const Half* from) {
  const uint2 x = __ldg(reinterpret_cast<const uint2*>(from));
  float4 y;
  asm("{\n.reg .f16 a, b, c, d;\nmov.b32 {a, b}, %4;\nmov.b32 {c, d}, %5;\n"
      "cvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\ncvt.f32.f16 %2, c;\ncvt.f32.f16 %3, d;\n}"
      : "=f"(y.x), "=f"(y.y), "=f"(y.z), "=f"(y.w)
      : "r"(x.x), "r"(x.y));
  return y;
}
VERKV_DEVICE float4 load_aligned(const BFloat16* from) {
  const uint2 x = __ldg(reinterpret_cast<const uint2*>(from));
  return make_float4(__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xffff0000u),
                     __uint_as_float(x.y << 16), __uint_as_float(x.y & 0xffff0000u));
}

// Rows of keys or of the sketch's basis, numbered in 32 bits as positions are.
struct KeyRows {
  DType type = DType::f16;
  const std::byte* data = nullptr;
  int stride = 0;                        // elements
  std::uint32_t end = 0;                 // how many there are
  const std::uint32_t* index = nullptr;  // which rows they are; null: the first ones
};

// Rows of which a thread takes a quarter at a time. Two rows share their loads of the query; with
// eight heads registers suffice for one.
template <int kHeads>
constexpr int kRowsPerThread = kHeads > kSetHeads ? 1 : 2;
// Rows that a warp takes at a time.
template <int kHeads>
constexpr int kChunkRows = 8 * kRowsPerThread<kHeads>;

// The head whose sum a thread keeps in `slot`. It differs between the four threads of a row, so
// that fold_heads() finds without selecting what to send and what to keep.
template <int kHeads>
VERKV_DEVICE int head_in_slot(int slot) {
  const int part = threadIdx.x % 4;
  return slot ^ (part & (kHeads < kSetHeads ? kHeads - 1 : kSetHeads - 1));
}

VERKV_DEVICE float4 add_from(float4 x, float4 y, int distance) {
  x.x += __shfl_xor_sync(kWholeWarp, y.x, distance);
  x.y += __shfl_xor_sync(kWholeWarp, y.y, distance);
  x.z += __shfl_xor_sync(kWholeWarp, y.z, distance);
  x.w += __shfl_xor_sync(kWholeWarp, y.w, distance);
  return x;
}

// Dialect of sum_order.hpp: fold16 of kHeads (1, 2 or 4) sums over the four threads of a row; each
// thread gets that of one head, the one in its first slot.
template <int kHeads>
VERKV_DEVICE float fold_heads(const float4* sum) {
  float4 x = add_from(sum[0], sum[kHeads == 4 ? 2 : 0], 2);
  float4 y = x;
  if constexpr (kHeads == 2) y = add_from(sum[1], sum[1], 2);
  if constexpr (kHeads == 4) y = add_from(sum[1], sum[3], 2);
  x = add_from(x, y, 1);
  x.x += x.z;
  x.y += x.w;
  return x.x + x.y;
}

// This thread's row in a chunk.
VERKV_DEVICE std::uint32_t row_of(std::uint32_t first, int r) {
  return first + 8 * r + threadIdx.x % 32 / 4;
}

// Of this thread's rows with the heads head_of(set).
template <int kHeads>
struct Products {
  float of[kRowsPerThread<kHeads>][sets_of(kHeads)];
};

// The products of dot_rows in src/cpu/kernels.hpp for a warp's rows from `first` on.
template <int kHeads, bool kAligned, class Element>
VERKV_DEVICE Products<kHeads> dot_chunk(const KeyRows& rows, int dim, std::uint32_t first,
                                        const float* query, int query_stride) {
  constexpr int kMine = kRowsPerThread<kHeads>;
  const int part = threadIdx.x % 4;
  const Element* at[kMine];
#pragma unroll
  for (int r = 0; r < kMine; ++r) {
    // The whole warp sums: a row that is not there is read as the last one.
    std::int64_t row = min(row_of(first, r), rows.end - 1);
    if (rows.index != nullptr) row = rows.index[row];
    at[r] = reinterpret_cast<const Element*>(rows.data) + row * rows.stride + 4 * part;
  }
  const float* of_slot[kHeads];
#pragma unroll
  for (int s = 0; s < kHeads; ++s)
    of_slot[s] = query + head_in_slot<kHeads>(s) * query_stride + 4 * part;
  float4 sum[kMine][kHeads];
#pragma unroll
  for (int r = 0; r < kMine; ++r) {
#pragma unroll
    for (int s = 0; s < kHeads; ++s) sum[r][s] = make_float4(0, 0, 0, 0);
  }
  const auto add = [&](int j, const float4(&x)[kMine]) {
#pragma unroll
    for (int s = 0; s < kHeads; ++s) {
      const float4 q = *reinterpret_cast<const float4*>(of_slot[s] + j);
#pragma unroll
      for (int r = 0; r < kMine; ++r) sum[r][s] = fma_four(x[r], q, sum[r][s]);
    }
  };
  // So many loads are on their way as registers allow.
  constexpr int kUnroll = (sizeof(Element) == 4 ? 2 : 4) / (kHeads > kSetHeads ? 2 : 1);
  int j = 0;
  if constexpr (kAligned) {
#pragma unroll(kUnroll)
    for (; j + kLanes <= dim; j += kLanes) {
      float4 x[kMine];
#pragma unroll
      for (int r = 0; r < kMine; ++r) x[r] = load_aligned(at[r] + j);
      add(j, x);
    }
  }
#pragma unroll 1
  for (; j < query_stride; j += kLanes) {
    float4 x[kMine];
#pragma unroll
    for (int r = 0; r < kMine; ++r) x[r] = load_four(at[r], j, dim - 4 * part, kAligned);
    add(j, x);
  }
  Products<kHeads> products;
#pragma unroll
  for (int r = 0; r < kMine; ++r) {
#pragma unroll
    for (int set = 0; set < sets_of(kHeads); ++set)
      products.of[r][set] =
          fold_heads<(kHeads < kSetHeads ? kHeads : kSetHeads)>(sum[r] + kSetHeads * set);
  }
  return products;
}

template <int kHeads, class Element>
VERKV_DEVICE Products<kHeads> dot_chunk(const KeyRows& rows, int dim, std::uint32_t first,
                                        const float* query, int query_stride) {
  if (dim % 4 == 0 && rows.stride % 4 == 0)
    return dot_chunk<kHeads, true, Element>(rows, dim, first, query, query_stride);
  return dot_chunk<kHeads, false, Element>(rows, dim, first, query, query_stride);
}

template <int kHeads>
VERKV_DEVICE Products<kHeads> dot_chunk(const KeyRows& rows, int dim, std::uint32_t first,
                                        const float* query, int query_stride) {
  return with_element(rows.type, [&](auto zero) {
    return dot_chunk<kHeads, decltype(zero)>(rows, dim, first, query, query_stride);
  });
}

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_EXACT_PRODUCTS_CUH
