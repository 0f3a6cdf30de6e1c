// Codes of a key: encode_key. Its sixteen trial scales are sixteen lanes.
//
// The guard opens once for every instruction set.
#if defined(VERKV_SRC_CPU_SIMD_ENCODE_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef VERKV_SRC_CPU_SIMD_ENCODE_INL_HPP
#undef VERKV_SRC_CPU_SIMD_ENCODE_INL_HPP
#else
#define VERKV_SRC_CPU_SIMD_ENCODE_INL_HPP
#endif

#include <cmath>
#include <cstdint>

#include <verkv/sketch.hpp>
#include <verkv/types.hpp>

#include "cpu/kernels.hpp"
#include "cpu/simd/lanes-inl.hpp"
#include "cpu/simd/sketch-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace verkv::cpu {
namespace HWY_NAMESPACE {
#if VERKV_VECTORS
namespace {

static_assert(kScaleTrials == kLanes);

// Of one band, trial by trial.
struct TrialSums {
  alignas(64) float product[kLanes];
  alignas(64) std::int32_t square[kLanes];
};

// The sum_band of encode_key.
template <int kCodes>
HWY_INLINE void sum_band(const float* x, int begin, int end, const std::uint8_t* byte,
                         const float* threshold, const float* inverse, TrialSums& out) {
  VF product[kParts];
  VI32 square[kParts];
  unroll<kParts>([&](auto part) VERKV_LAMBDA {
    product[part] = hn::Zero(df);
    square[part] = hn::Zero(di32);
  });
  for (int j = begin; j < end; ++j) {
    const VF v = hn::Set(df, x[j]);
    unroll<kParts>([&](auto part) VERKV_LAMBDA {
      const VF y = hn::Mul(v, hn::Load(df, inverse + part * kN));
      VI32 level = hn::Set(di32, byte[0] - kLevelBias);
      unroll<kCodes - 1>([&](auto k) VERKV_LAMBDA {
        const MF above = hn::Gt(y, hn::Set(df, threshold[k]));
        const VI32 rise = hn::Set(di32, byte[k + 1] - byte[k]);
        level = hn::Add(level, hn::IfThenElseZero(hn::RebindMask(di32, above), rise));
      });
      product[part] = hn::Add(product[part], hn::Mul(v, hn::ConvertTo(df, level)));
      square[part] = hn::Add(square[part], hn::Mul(level, level));
    });
  }
  unroll<kParts>([&](auto part) VERKV_LAMBDA {
    hn::Store(product[part], df, out.product + part * kN);
    hn::Store(square[part], di32, out.square + part * kN);
  });
}

// The codes of coordinates [begin, end) at one scale.
template <int kCodes>
HWY_INLINE void write_codes(const float* x, int begin, int end, const float* threshold,
                            float inverse, std::int32_t* out) {
  each_part(begin, end, [&](std::int64_t j, auto, auto lanes) VERKV_LAMBDA {
    const VF y = hn::Mul(lanes.load(x + j), hn::Set(df, inverse));
    VI32 code = hn::Zero(di32);
    unroll<kCodes - 1>([&](auto k) VERKV_LAMBDA {
      const MF above = hn::Gt(y, hn::Set(df, threshold[k]));
      code = hn::Add(code, hn::IfThenElseZero(hn::RebindMask(di32, above), hn::Set(di32, 1)));
    });
    hn::StoreU(code, di32, out + j);
  });
}

// Dialect of verkv/sketch.hpp: encode_key.
Positive16 encode_key(const SketchShape& shape, const SketchBands& bands, const float* x,
                      std::uint8_t* group, std::int64_t token) {
  if (shape.padded_dim() > kMostSketchDim)
    return scalar_kernels().encode_key(shape, bands, x, group, token);
  const int dim = shape.dim;
  const int fine = shape.fine;
  float fine_energy = 0;
  float coarse_energy = 0;
  for (int j = 0; j < fine; ++j) fine_energy += x[j] * x[j];
  for (int j = fine; j < dim; ++j) coarse_energy += x[j] * x[j];
  const float rms = std::sqrt((fine_energy + coarse_energy) / static_cast<float>(dim));
  const double fine_square = static_cast<double>(bands.fine_square);
  const double coarse_square = static_cast<double>(bands.coarse_square);
  const double yy = fine_square * static_cast<double>(fine_energy) +
                    coarse_square * static_cast<double>(coarse_energy);

  alignas(64) float inverse[kLanes];
  for (int t = 0; t < kLanes; ++t) inverse[t] = rms > 0 ? 1 / (rms * scale_trial(t)) : 0.0f;
  TrialSums a, b;
  sum_band<16>(x, 0, fine, kSketchLevels.byte, kSketchLevels.threshold, inverse, a);
  sum_band<4>(x, fine, dim, kSketchLevels.coarse_byte, kSketchLevels.coarse_threshold, inverse, b);
  double best = -1;
  double best_zz = 0;
  int chosen = kLanes / 2;
  for (int t = 0; t < kLanes; ++t) {
    const double yz = fine_square * kFineUnit * static_cast<double>(a.product[t]) +
                      coarse_square * kCoarseUnit * static_cast<double>(b.product[t]);
    const double zz = fine_square * kFineUnit * kFineUnit * static_cast<double>(a.square[t]) +
                      coarse_square * kCoarseUnit * kCoarseUnit * static_cast<double>(b.square[t]);
    const double explained = yz > 0 ? yz * (yz / zz) : 0.0;
    if (explained > best) {
      best = explained;
      best_zz = zz;
      chosen = t;
    }
  }

  std::int32_t code[kMostSketchDim + kLanes];
  write_codes<16>(x, 0, fine, kSketchLevels.threshold, inverse[chosen], code);
  write_codes<4>(x, fine, dim, kSketchLevels.coarse_threshold, inverse[chosen], code);
  for (int j = dim; j < shape.padded_dim(); ++j) code[j] = 0;
  const auto four = [&code](int c, int shift) {
    const std::int32_t* at = code + 4 * c;
    return static_cast<std::uint8_t>(((at[0] >> shift) & 3) | ((at[1] >> shift) & 3) << 2 |
                                     ((at[2] >> shift) & 3) << 4 | ((at[3] >> shift) & 3) << 6);
  };
  for (int c = 0; c < shape.low_bytes(); ++c) group[kSketchGroup * c + token] = four(c, 0);
  std::uint8_t* const high = group + kSketchGroup * shape.low_bytes();
  for (int c = 0; c < shape.high_bytes(); ++c) high[kSketchGroup * c + token] = four(c, 2);
  const double scale = yy > 0 ? std::sqrt(yy / best_zz) : yy;
  return to_positive16(static_cast<float>(scale));
}

}  // namespace
#endif  // VERKV_VECTORS
}  // namespace HWY_NAMESPACE
}  // namespace verkv::cpu
HWY_AFTER_NAMESPACE();

#endif  // VERKV_SRC_CPU_SIMD_ENCODE_INL_HPP
