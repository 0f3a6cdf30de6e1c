// The sketch of the keys from which all logits of a step are estimated (docs/math/sketch.md).
//
// The channel means are subtracted; softmax does not see their share of the logit differences, but
// residents' exact logits contain it, so the step adds scale * q.mean to every sketched logit. The
// rest of the key goes to a basis that is made per head at the first compression
// (src/sketch_basis.hpp): orthogonal directions sorted by their share of the logits' variance. The
// first `fine` coordinates have 4 bits, the next 2, the weakest are not stored. The query goes to
// the dual basis, so products do not change.
//
// Scores are sums of products of small integers, so they have no order of summation: every backend
// computes the same integer. A key coordinate enters as an unsigned byte, a query coordinate as a
// signed one.
//
// Dialect: src/cpu/simd/sketch-inl.hpp: sketch_logits_of
#ifndef VERKV_SKETCH_HPP
#define VERKV_SKETCH_HPP

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include <verkv/config.hpp>
#include <verkv/types.hpp>

namespace verkv {

// Tokens stored side by side. Codes of a group: low plane [dim / 4][16] bytes, each the low 2 bits
// of 4 coordinates of one token (coordinate 4c + j in bits 2j and 2j + 1); then a high plane
// [fine / 4][16] of the other 2 bits of the first `fine` coordinates, laid out alike.
inline constexpr std::int64_t kSketchGroup = 16;

// Subtracted from every level byte: levels are byte - kLevelBias.
inline constexpr int kLevelBias = 127;

struct SketchShape {
  SketchKind kind = SketchKind::calibrated;
  int dim = 0;   // coordinates that are stored; may be fewer than the key has
  int fine = 0;  // so many of them, the first, have 4 bits, the others 2; a multiple of 16, or dim

  // Coordinates with padding; those past dim have query coordinate 0.
  VERKV_HD constexpr int padded_dim() const { return (dim + 3) / 4 * 4; }
  VERKV_HD constexpr int low_bytes() const { return (dim + 3) / 4; }
  VERKV_HD constexpr int high_bytes() const { return (fine + 3) / 4; }
  // Bytes of codes for one token.
  VERKV_HD constexpr int code_bytes() const {
    return has_codes(kind) ? low_bytes() + high_bytes() : 0;
  }
  // Bytes of all that is stored for one token: codes and scale.
  VERKV_HD constexpr int token_bytes() const {
    return has_codes(kind) ? code_bytes() + static_cast<int>(sizeof(Positive16)) : 0;
  }
};

// Bytes of code storage for `tokens` tokens: whole groups.
VERKV_HD constexpr std::int64_t code_storage_bytes(const SketchShape& shape, std::int64_t tokens) {
  return (tokens + kSketchGroup - 1) / kSketchGroup * kSketchGroup * shape.code_bytes();
}

// Lloyd-Max levels of a standard normal variable (positive half, ascending), 2 and 4 bits: Max,
// "Quantizing for minimum distortion" (1960). Computed to ten digits from the fixed-point
// conditions.
inline constexpr double kLloydMax2[2] = {0.4527800346, 1.5104176085};
inline constexpr double kLloydMax4[8] = {0.1283950299, 0.3880482995, 0.6567591185, 0.9423404565,
                                         1.2562311973, 1.6180463860, 2.0690172265, 2.7325895710};

// The levels that are really used are unit * (byte - kLevelBias): the Lloyd-Max levels rounded to
// the 255 steps of a byte (relative to the largest, an error of at most 1/254). One unit is the
// value of a byte step where the coordinate's root mean square is 1.
inline constexpr double kFineUnit = kLloydMax4[7] / 127;
inline constexpr double kCoarseUnit = kLloydMax2[1] / 127;

// Tables of the quantisers with 4 and with 2 bits. byte: code -> level byte, ascending. Code =
// number of thresholds below the coordinate over its root mean square.
struct SketchLevels {
  std::uint8_t byte[16] = {};
  float threshold[15] = {};
  std::uint8_t coarse_byte[4] = {};
  float coarse_threshold[3] = {};

  VERKV_HD constexpr std::uint8_t byte_of(const SketchShape& shape, int coordinate,
                                          unsigned code) const {
    return coordinate < shape.fine ? byte[code] : coarse_byte[code];
  }
};

constexpr SketchLevels sketch_levels() {
  SketchLevels levels;
  const auto fill = [](const double* positive, int half, std::uint8_t* byte, float* threshold) {
    double level[16] = {};
    for (int i = 0; i < half; ++i) {
      level[half + i] = positive[i];
      level[half - 1 - i] = -positive[i];
    }
    for (int code = 0; code < 2 * half; ++code) {
      byte[code] =
          static_cast<std::uint8_t>((level[code] / positive[half - 1] + 1) * kLevelBias + 0.5);
    }
    for (int code = 0; code + 1 < 2 * half; ++code)
      threshold[code] = static_cast<float>((level[code] + level[code + 1]) / 2);
  };
  fill(kLloydMax4, 8, levels.byte, levels.threshold);
  fill(kLloydMax2, 2, levels.coarse_byte, levels.coarse_threshold);
  return levels;
}

inline constexpr SketchLevels kSketchLevels = sketch_levels();

// ---- Packing -----------------------------------------------------------------------------------

// Writes the code of (token, coordinate) into the grouped planes at `codes`.
VERKV_HD inline void pack_code(const SketchShape& shape, std::uint8_t* codes, std::int64_t token,
                               int coordinate, unsigned code) {
  std::uint8_t* group = codes + token / kSketchGroup * (kSketchGroup * shape.code_bytes());
  const std::int64_t at = coordinate / 4 * kSketchGroup + token % kSketchGroup;
  const int shift = 2 * (coordinate % 4);
  const auto put = [shift](std::uint8_t& byte, unsigned value) {
    byte = static_cast<std::uint8_t>((byte & ~(3u << shift)) | (value << shift));
  };
  put(group[at], code & 3u);
  if (coordinate < shape.fine) put(group[kSketchGroup * shape.low_bytes() + at], code >> 2);
}

// The code that pack_code wrote.
VERKV_HD inline unsigned unpack_code(const SketchShape& shape, const std::uint8_t* codes,
                                     std::int64_t token, int coordinate) {
  const std::uint8_t* group = codes + token / kSketchGroup * (kSketchGroup * shape.code_bytes());
  const std::int64_t at = coordinate / 4 * kSketchGroup + token % kSketchGroup;
  const int shift = 2 * (coordinate % 4);
  const unsigned low = (static_cast<unsigned>(group[at]) >> shift) & 3u;
  if (coordinate >= shape.fine) return low;
  const unsigned high =
      (static_cast<unsigned>(group[kSketchGroup * shape.low_bytes() + at]) >> shift) & 3u;
  return low | (high << 2);
}

// ---- Encoding of a key --------------------------------------------------------------------------

// Squares of the root mean square of the coordinates with 4 and with 2 bits, over the tokens that
// the basis was made from; only their ratio matters.
struct SketchBands {
  float fine_square = 1;
  float coarse_square = 1;
};

// Scales at which the levels are tried, in units of the token's own root mean square. A token's
// energy may lie in other directions than the average token's, so the best scale is searched for.
inline constexpr int kScaleTrials = 16;
VERKV_HD constexpr float scale_trial(int t) {
  const float trial[kScaleTrials] = {0.45F,  0.503F, 0.563F, 0.629F, 0.703F, 0.786F, 0.879F, 0.983F,
                                     1.099F, 1.228F, 1.373F, 1.535F, 1.716F, 1.919F, 2.146F, 2.4F};
  return trial[t];
}

// Quantises x, the key's stored coordinates over the root mean square of their band, and packs them as
// `token`. Of the trial scales the one whose levels z leave the smallest error after a least-squares fit
// is taken; what is returned is |y| / |z|, so that the sketched key is as long as the key: the fit itself
// is shorter and underestimates just the large logits, where certificates fail (docs/math/sketch.md).
// Sums of one trial run in order of the coordinates in binary32 (of squared levels: in integers), so
// trials may run side by side. A zero key gets scale 0, one that is not a number NaN.
// Dialect: src/cpu/simd/encode-inl.hpp: encode_key
VERKV_HD inline Positive16 encode_key(const SketchShape& shape, const SketchLevels& levels,
                                      const SketchBands& bands, std::span<const float> x,
                                      std::uint8_t* codes, std::int64_t token) {
  const int dim = shape.dim;
  const int fine = shape.fine;
  float fine_energy = 0;
  float coarse_energy = 0;
  for (int j = 0; j < fine; ++j)
    fine_energy += x[static_cast<std::size_t>(j)] * x[static_cast<std::size_t>(j)];
  for (int j = fine; j < dim; ++j)
    coarse_energy += x[static_cast<std::size_t>(j)] * x[static_cast<std::size_t>(j)];
  const float rms = std::sqrt((fine_energy + coarse_energy) / static_cast<float>(dim));
  const double yy = static_cast<double>(bands.fine_square) * static_cast<double>(fine_energy) +
                    static_cast<double>(bands.coarse_square) * static_cast<double>(coarse_energy);

  float inverse[kScaleTrials];
  for (int t = 0; t < kScaleTrials; ++t) inverse[t] = rms > 0 ? 1 / (rms * scale_trial(t)) : 0.0f;
  // Level byte less its bias as a sum over the thresholds below the coordinate: no table look-up.
  struct Sums {
    float product[kScaleTrials] = {};
    std::int32_t square[kScaleTrials] = {};
  };
  const auto sum_band = [&](int begin, int end, const std::uint8_t* byte, const float* threshold,
                            int count) {
    Sums sums;
    for (int j = begin; j < end; ++j) {
      const float v = x[static_cast<std::size_t>(j)];
      std::int32_t level[kScaleTrials];
      for (int t = 0; t < kScaleTrials; ++t) level[t] = byte[0] - kLevelBias;
      for (int k = 0; k + 1 < count; ++k) {
        const std::int32_t rise = byte[k + 1] - byte[k];
        for (int t = 0; t < kScaleTrials; ++t) level[t] += v * inverse[t] > threshold[k] ? rise : 0;
      }
      for (int t = 0; t < kScaleTrials; ++t) {
        sums.product[t] += v * static_cast<float>(level[t]);
        sums.square[t] += level[t] * level[t];
      }
    }
    return sums;
  };
  const Sums a = sum_band(0, fine, levels.byte, levels.threshold, 16);
  const Sums b = sum_band(fine, dim, levels.coarse_byte, levels.coarse_threshold, 4);
  double best = -1;
  double best_zz = 0;
  int chosen = kScaleTrials / 2;
  for (int t = 0; t < kScaleTrials; ++t) {
    const double yz =
        static_cast<double>(bands.fine_square) * kFineUnit * static_cast<double>(a.product[t]) +
        static_cast<double>(bands.coarse_square) * kCoarseUnit * static_cast<double>(b.product[t]);
    const double zz = static_cast<double>(bands.fine_square) * kFineUnit * kFineUnit *
                          static_cast<double>(a.square[t]) +
                      static_cast<double>(bands.coarse_square) * kCoarseUnit * kCoarseUnit *
                          static_cast<double>(b.square[t]);
    const double explained = yz > 0 ? yz * (yz / zz) : 0.0;
    if (explained > best) {
      best = explained;
      best_zz = zz;
      chosen = t;
    }
  }
  for (int j = 0; j < shape.padded_dim(); ++j) {
    unsigned code = 0;
    if (j < dim) {
      const float v = x[static_cast<std::size_t>(j)] * inverse[chosen];
      const float* threshold = j < fine ? levels.threshold : levels.coarse_threshold;
      for (int k = 0; k < (j < fine ? 15 : 3); ++k) code += v > threshold[k];
    }
    pack_code(shape, codes, token, j, code);
  }
  const double scale = yy > 0 ? std::sqrt(yy / best_zz) : yy;
  return to_positive16(static_cast<float>(scale));
}

// ---- The query side -----------------------------------------------------------------------------

// Constants of one query head for a step.
struct SketchQuery {
  float scale = 0;       // value of one step of the 8-bit query
  std::int32_t sum = 0;  // sum of its coordinates
};

// Rounds q, in the dual basis, to 8 bits: q_i ~ scale * out_q[i]. out_q has shape.padded_dim()
// elements; those past q are 0. A zero query gives scale 0.
//
// Dialect: cuda/query.cuh: encode_by_warp
inline SketchQuery encode_query(std::span<const float> q, std::span<std::int8_t> out_q) {
  float largest = 0;
  for (const float v : q) largest = std::max(largest, std::fabs(v));
  SketchQuery result;
  result.scale = largest / 127;
  std::fill(out_q.begin(), out_q.end(), std::int8_t{0});
  if (!(result.scale > 0)) return result;
  for (std::size_t i = 0; i < q.size(); ++i) {
    const int level = std::clamp(static_cast<int>(std::lrint(q[i] / result.scale)), -127, 127);
    out_q[i] = static_cast<std::int8_t>(level);
    result.sum += level;
  }
  return result;
}

// The integer score of one token: sum of query byte * level byte. Without the bias of the levels it
// is below 2^24 for dim <= 1040, so exact in binary32.
//
// Dialect: cuda/sketch_products.cuh: sketch_dots
inline std::int32_t sketch_dot(const SketchShape& shape, const std::uint8_t* codes,
                               std::int64_t token, std::span<const std::int8_t> q) {
  std::int32_t dot = 0;
  for (int i = 0; i < shape.padded_dim(); ++i) {
    dot += static_cast<std::int32_t>(q[static_cast<std::size_t>(i)]) *
           static_cast<std::int32_t>(
               kSketchLevels.byte_of(shape, i, unpack_code(shape, codes, token, i)));
  }
  return dot;
}

// The logit from an integer score. factor = attention scale * SketchQuery.scale * unit of the
// basis; shift is the share of the channel means, attention scale * q.mean. The order of operations
// is part of the contract (equal decisions on every backend).
//
// Dialect: cuda/scores.cu: sketched_logits
VERKV_HD inline float sketch_logit(std::int32_t dot, std::int32_t query_sum, Positive16 scale,
                                   float factor, float shift) {
  const float x = static_cast<float>(dot - kLevelBias * query_sum);
  return std::fma(factor * to_float(scale), x, shift);
}

}  // namespace verkv

#endif  // VERKV_SKETCH_HPP
