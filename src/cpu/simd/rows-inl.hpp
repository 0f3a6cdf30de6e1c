// Products with rows of keys and sums of weighted rows of values: dot_rows and weighted_rows.
//
// The guard opens once for every instruction set.
#if defined(VERKV_SRC_CPU_SIMD_ROWS_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef VERKV_SRC_CPU_SIMD_ROWS_INL_HPP
#undef VERKV_SRC_CPU_SIMD_ROWS_INL_HPP
#else
#define VERKV_SRC_CPU_SIMD_ROWS_INL_HPP
#endif

#include <hwy/cache_control.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <verkv/types.hpp>

#include "cpu/kernels.hpp"
#include "cpu/simd/lanes-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace verkv::cpu {
namespace HWY_NAMESPACE {
#if VERKV_VECTORS
namespace {

HWY_INLINE VF load(const float* p) { return hn::LoadU(df, p); }
HWY_INLINE VF load(const BFloat16* p) { return load_upper<16>(p); }
HWY_INLINE VF load(const Half* p) {
  const hn::Rebind<hwy::float16_t, DF> df16;
  return hn::PromoteTo(df, hn::LoadU(df16, reinterpret_cast<const hwy::float16_t*>(p)));
}

// The first `rest` of 16 elements, 0 after them. Reads no others.
template <class T>
HWY_INLINE void load_first(const T* p, int rest, VF (&out)[kParts]) {
#if HWY_MAX_BYTES == 64
  if constexpr (sizeof(T) == 2) {
    const auto mask = hn::FirstN(du16, static_cast<std::size_t>(rest));
    const auto bits = hn::MaskedLoad(mask, du16, reinterpret_cast<const std::uint16_t*>(p));
    if constexpr (std::is_same_v<T, Half>) {
      out[0] = hn::PromoteTo(df, hn::BitCast(hn::Rebind<hwy::float16_t, DF>(), bits));
    } else {
      out[0] = hn::BitCast(df, hn::ShiftLeft<16>(hn::PromoteTo(du32, bits)));
    }
  } else {
    out[0] = hn::MaskedLoad(first_lanes(rest, 0), df, p);
  }
#else
  T copy[kLanes] = {};
  std::memcpy(copy, p, static_cast<std::size_t>(rest) * sizeof(T));
  unroll<kParts>([&](auto part) VERKV_LAMBDA { out[part] = load(copy + part * kN); });
#endif
}

// Rows of a list lie anywhere, so the machine does not load them ahead by itself.
template <class T>
HWY_INLINE void prefetch(const T* p, int elements) {
  constexpr int kLine = 64 / static_cast<int>(sizeof(T));
  for (int j = 0; j < elements; j += kLine) hwy::Prefetch(p + j);
}

// row_at: ContiguousRows, PagedRowsOf or ListedRows.
template <int kHeads, class RowAt>
void dot_rows_of(const RowAt row_at, int dim, const std::uint32_t* index, std::int64_t count,
                 const float* q, std::int64_t q_stride, float* out, std::int64_t out_stride) {
  using T = std::remove_cvref_t<decltype(*row_at(0))>;
  // As many rows at a time as there are registers for their sums.
  constexpr int kHeadsUp = power_of_two_from(kHeads);
  constexpr int kRowsAtOnce = (kN == kLanes ? 16 : 4) / kHeadsUp;
  const int whole = dim / kLanes * kLanes;
  const int rest = dim - whole;
  for (std::int64_t i = 0; i < count; i += kRowsAtOnce) {
    const T* row[kRowsAtOnce];
    unroll<kRowsAtOnce>([&](auto r) VERKV_LAMBDA {
      const std::int64_t at = i + r < count ? i + r : count - 1;
      row[r] = row_at(index != nullptr ? std::int64_t{index[at]} : at);
    });
    // Two batches ahead. A guess: nearer lines come too late, farther ones may be evicted again.
    if ((RowAt::kAnywhere || index != nullptr) && i + 3 * kRowsAtOnce <= count) {
      for (std::int64_t r = i + 2 * kRowsAtOnce; r < i + 3 * kRowsAtOnce; ++r) {
        prefetch(row_at(index != nullptr ? std::int64_t{index[r]} : r), dim);
      }
    }
    VF acc[kHeads * kRowsAtOnce][kParts];
    zero(acc);
    for (int j = 0; j < whole; j += kLanes) {
      unroll<kParts>([&](auto part) VERKV_LAMBDA {
        VF x[kRowsAtOnce];
        unroll<kRowsAtOnce>([&](auto r) VERKV_LAMBDA { x[r] = load(row[r] + j + part * kN); });
        unroll<kHeads>([&](auto h) VERKV_LAMBDA {
          const VF y = hn::LoadU(df, q + h * q_stride + j + part * kN);
          unroll<kRowsAtOnce>([&](auto r) VERKV_LAMBDA {
            acc[h * kRowsAtOnce + r][part] = hn::MulAdd(x[r], y, acc[h * kRowsAtOnce + r][part]);
          });
        });
      });
    }
    if (rest != 0) {
      unroll<kRowsAtOnce>([&](auto r) VERKV_LAMBDA {
        VF x[kParts];
        load_first(row[r] + whole, rest, x);
        unroll<kParts>([&](auto part) VERKV_LAMBDA {
          const MF mask = first_lanes(rest, part);
          unroll<kHeads>([&](auto h) VERKV_LAMBDA {
            const VF y = hn::LoadU(df, q + h * q_stride + whole + part * kN);
            VF& sum = acc[h * kRowsAtOnce + r][part];
            sum = hn::IfThenElse(mask, hn::MulAdd(x[part], y, sum), sum);
          });
        });
      });
    }
    float sums[kHeadsUp * kRowsAtOnce];
    fold(acc, sums);
    if (i + kRowsAtOnce <= count) {
      unroll<kHeads>([&](auto h) VERKV_LAMBDA {
        std::memcpy(out + h * out_stride + i, sums + h * kRowsAtOnce, kRowsAtOnce * sizeof(float));
      });
    } else {
      for (int h = 0; h < kHeads; ++h) {
        for (std::int64_t r = 0; i + r < count; ++r)
          out[h * out_stride + i + r] = sums[h * kRowsAtOnce + r];
      }
    }
  }
}

// Calls f(row_at) with the addresses of the rows.
template <class F>
void with_rows(const Rows& rows, F&& f) {
  with_element(rows.type, [&](auto zero) HWY_ATTR {
    using T = decltype(zero);
    if (rows.pages != nullptr) {
      f(paged<T>(rows));
    } else if (rows.list != nullptr) {
      f(listed<T>(rows));
    } else {
      f(contiguous<T>(rows));
    }
  });
}

void dot_rows(const Rows& rows, const std::uint32_t* index, std::int64_t count, const float* q,
              int heads, std::int64_t q_stride, float* out, std::int64_t out_stride) {
  with_rows(rows, [&](const auto row_at) HWY_ATTR {
    each_heads(heads, [&](int h, auto n) HWY_ATTR {
      dot_rows_of<n>(row_at, rows.dim, index, count, q + h * q_stride, q_stride,
                     out + h * out_stride, out_stride);
    });
  });
}

// One block of rows, the coordinates from j on that fit into kVectors vectors.
template <int kHeads, int kVectors, class RowAt>
void add_weighted(const RowAt row_at, const std::uint32_t* index, std::int64_t begin,
                  std::int64_t end, const float* c, std::int64_t c_stride, int j, float* out,
                  std::int64_t out_stride) {
  constexpr std::int64_t kAhead = 8;  // rows; a guess as in dot_rows_of
  using T = std::remove_cvref_t<decltype(*row_at(0))>;
  VF acc[kHeads][kVectors];
  unroll<kHeads>([&](auto h) VERKV_LAMBDA {
    unroll<kVectors>([&](auto k) VERKV_LAMBDA { acc[h][k] = hn::Zero(df); });
  });
  const auto add = [&](const T* row, std::int64_t i) VERKV_LAMBDA {
    VF factor[kHeads];
    unroll<kHeads>([&](auto h) VERKV_LAMBDA { factor[h] = hn::Set(df, c[h * c_stride + i]); });
    unroll<kVectors>([&](auto k) VERKV_LAMBDA {
      const VF x = load(row + k * kN);
      unroll<kHeads>([&](auto h) VERKV_LAMBDA { acc[h][k] = hn::MulAdd(factor[h], x, acc[h][k]); });
    });
  };
  if (index != nullptr) {
    for (std::int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end) prefetch(row_at(std::int64_t{index[i + kAhead]}) + j, kVectors * kN);
      add(row_at(std::int64_t{index[i]}) + j, i);
    }
  } else if constexpr (RowAt::kAnywhere) {
    for (std::int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end) prefetch(row_at(i + kAhead) + j, kVectors * kN);
      add(row_at(i) + j, i);
    }
  } else {
    for (std::int64_t i = begin; i < end;) {
      const T* row = row_at(i) + j;
      const std::int64_t together = std::min(end - i, row_at.together(i));
      for (const std::int64_t last = i + together; i < last; ++i, row += row_at.stride) add(row, i);
    }
  }
  unroll<kHeads>([&](auto h) VERKV_LAMBDA {
    unroll<kVectors>([&](auto k) VERKV_LAMBDA {
      float* at = out + h * out_stride + j + k * kN;
      hn::StoreU(hn::Add(hn::LoadU(df, at), acc[h][k]), df, at);
    });
  });
}

// The last dim % kN coordinates of one block of rows.
template <int kHeads, class RowAt>
void add_weighted_rest(const RowAt row_at, int dim, const std::uint32_t* index, std::int64_t begin,
                       std::int64_t end, const float* c, std::int64_t c_stride, int j, float* out,
                       std::int64_t out_stride) {
  const int rest = dim - j;
  VF acc[kHeads];
  unroll<kHeads>([&](auto h) VERKV_LAMBDA { acc[h] = hn::Zero(df); });
  for (std::int64_t i = begin; i < end; ++i) {
    VF x[kParts];
    load_first(row_at(index != nullptr ? std::int64_t{index[i]} : i) + j, rest, x);
    unroll<kHeads>([&](auto h) VERKV_LAMBDA {
      acc[h] = hn::MulAdd(hn::Set(df, c[h * c_stride + i]), x[0], acc[h]);
    });
  }
  unroll<kHeads>([&](auto h) VERKV_LAMBDA {
    alignas(64) float sums[kN];
    hn::Store(acc[h], df, sums);
    for (int k = 0; k < rest; ++k) out[h * out_stride + j + k] += sums[k];
  });
}

template <int kHeads, class RowAt>
void weighted_rows_of(const RowAt row_at, int dim, const std::uint32_t* index, std::int64_t count,
                      const float* c, std::int64_t c_stride, float* out, std::int64_t out_stride) {
  // As many coordinates at a time as there are registers for their sums.
  constexpr int kVectors = (kN == kLanes ? 16 : 8) / power_of_two_from(kHeads);
  constexpr int kMost = kVectors < 8 ? kVectors : 8;
  for (std::int64_t begin = 0; begin < count; begin += kBlockRows) {
    const std::int64_t end = std::min(begin + kBlockRows, count);
    int j = 0;
    for (; j + kMost * kN <= dim; j += kMost * kN) {
      add_weighted<kHeads, kMost>(row_at, index, begin, end, c, c_stride, j, out, out_stride);
    }
    if constexpr (kMost > 4) {
      for (; j + 4 * kN <= dim; j += 4 * kN) {
        add_weighted<kHeads, 4>(row_at, index, begin, end, c, c_stride, j, out, out_stride);
      }
    }
    if constexpr (kMost > 2) {
      for (; j + 2 * kN <= dim; j += 2 * kN) {
        add_weighted<kHeads, 2>(row_at, index, begin, end, c, c_stride, j, out, out_stride);
      }
    }
    for (; j + kN <= dim; j += kN) {
      add_weighted<kHeads, 1>(row_at, index, begin, end, c, c_stride, j, out, out_stride);
    }
    if (j < dim) {
      add_weighted_rest<kHeads>(row_at, dim, index, begin, end, c, c_stride, j, out, out_stride);
    }
  }
}

void weighted_rows(const Rows& rows, const std::uint32_t* index, std::int64_t count, const float* c,
                   int heads, std::int64_t c_stride, float* out, std::int64_t out_stride) {
  with_rows(rows, [&](const auto row_at) HWY_ATTR {
    each_heads(heads, [&](int h, auto n) HWY_ATTR {
      weighted_rows_of<n>(row_at, rows.dim, index, count, c + h * c_stride, c_stride,
                          out + h * out_stride, out_stride);
    });
  });
}

}  // namespace
#endif  // VERKV_VECTORS
}  // namespace HWY_NAMESPACE
}  // namespace verkv::cpu
HWY_AFTER_NAMESPACE();

#endif  // VERKV_SRC_CPU_SIMD_ROWS_INL_HPP
