// The sketch of the keys from which all logits of a step are estimated.
//
// lloyd_max (docs/math/sketch.md): subtract the channel means, rotate, quantise each coordinate to
// the Lloyd-Max levels of a normal variable times one scale a token that keeps the key's norm.
// Softmax does not see the means' share of the logit differences, but residents' exact logits
// contain it, so the step adds scale * q.mean to every sketched logit. minmax: 2 bits between the
// token's own smallest and largest coordinate; no centring, no rotation.
//
// calibrated: the key goes to a basis that is made per head at the first compression
// (src/sketch_basis.hpp, docs/math/sketch.md): orthogonal directions sorted by their share of the
// logits' variance. The first `fine` coordinates have 4 bits, the next 2, the weakest are not
// stored. The query goes to the dual basis, so products do not change.
//
// Scores are sums of products of small integers, so they have no order of summation: every backend
// computes the same integer. A key coordinate enters as an unsigned byte, a query coordinate as a
// signed one.
#ifndef VERKV_SKETCH_HPP
#define VERKV_SKETCH_HPP

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include <verkv/config.hpp>
#include <verkv/philox.hpp>
#include <verkv/types.hpp>

namespace verkv {

// Tokens stored side by side. Codes of a group: low plane [dim / 4][16] bytes, each the low 2 bits
// of 4 coordinates of one token (coordinate 4c + j in bits 2j and 2j + 1); then, for 3 bits, a high
// plane [dim / 8][16] of the third bit of 8 coordinates; for 4 bits, a high plane [dim / 4][16]
// laid out like the low one; for calibrated, such a high plane [fine / 4][16] of the first `fine`
// coordinates only.
inline constexpr std::int64_t kSketchGroup = 16;

struct SketchShape {
  SketchKind kind = SketchKind::lloyd_max;
  int bits = 2;
  int dim = 0;   // coordinates that are stored; for calibrated that may be fewer than the key has
  int fine = 0;  // calibrated: so many of them, the first, have 4 bits; a multiple of 16, or dim

  // Coordinates with padding; those past dim have query coordinate 0.
  VERKV_HD constexpr int padded_dim() const {
    return kind == SketchKind::lloyd_max && bits == 3 ? (dim + 7) / 8 * 8 : (dim + 3) / 4 * 4;
  }
  // Bits of one coordinate.
  VERKV_HD constexpr int bits_of(int coordinate) const {
    return kind != SketchKind::calibrated ? bits : coordinate < fine ? 4 : 2;
  }
  VERKV_HD constexpr int low_bytes() const { return padded_dim() / 4; }
  VERKV_HD constexpr int high_bytes() const {
    if (kind == SketchKind::calibrated) return (fine + 3) / 4;
    return bits == 3 ? padded_dim() / 8 : bits == 4 ? padded_dim() / 4 : 0;
  }
  // Bytes of codes for one token.
  VERKV_HD constexpr int code_bytes() const {
    return kind == SketchKind::exact ? 0 : low_bytes() + high_bytes();
  }
  // Bytes of all that is stored for one token: codes, scale, and for minmax the offset.
  VERKV_HD constexpr int token_bytes() const {
    return kind == SketchKind::exact ? 0 : code_bytes() + (kind == SketchKind::minmax ? 4 : 2);
  }
  // Subtracted from every level byte: levels are byte - bias.
  VERKV_HD constexpr int bias() const { return kind == SketchKind::minmax ? 0 : 127; }
};

// Bytes of code storage for `tokens` tokens: whole groups.
VERKV_HD constexpr std::int64_t code_storage_bytes(const SketchShape& shape, std::int64_t tokens) {
  return (tokens + kSketchGroup - 1) / kSketchGroup * kSketchGroup * shape.code_bytes();
}

// Lloyd-Max levels of a standard normal variable (positive half, ascending), 2, 3 and 4 bits: Max,
// "Quantizing for minimum distortion" (1960). Computed to ten digits from the fixed-point
// conditions.
inline constexpr double kLloydMax2[2] = {0.4527800346, 1.5104176085};
inline constexpr double kLloydMax3[4] = {0.2450941789, 0.7560052812, 1.3439092785, 2.1519457045};
inline constexpr double kLloydMax4[8] = {0.1283950299, 0.3880482995, 0.6567591185, 0.9423404565,
                                         1.2562311973, 1.6180463860, 2.0690172265, 2.7325895710};

// The i-th positive level of `bits`, 0 <= i < 2^(bits - 1).
constexpr double lloyd_max_level(int bits, int i) {
  return bits == 2 ? kLloydMax2[i] : bits == 3 ? kLloydMax3[i] : kLloydMax4[i];
}

// Tables of one quantiser. The levels that are really used are unit * (byte - bias): the Lloyd-Max
// levels rounded to the 255 steps of a byte (relative to the largest, an error of at most 1/254).
struct SketchLevels {
  std::uint8_t byte[16] = {};  // code -> level byte; codes ascend with the level
  float threshold[15] =
      {};          // code = number of thresholds below the coordinate (in units of the rms)
  int count = 0;   // 2^bits
  float unit = 1;  // value of one byte step, in units of the token's scale
  // calibrated: those of the coordinates with 2 bits; byte and threshold are for 4 bits, and the
  // units are part of the basis.
  std::uint8_t coarse_byte[4] = {};
  float coarse_threshold[3] = {};

  VERKV_HD constexpr std::uint8_t byte_of(const SketchShape& shape, int coordinate,
                                          unsigned code) const {
    return shape.kind == SketchKind::calibrated && coordinate >= shape.fine ? coarse_byte[code]
                                                                            : byte[code];
  }
};

constexpr SketchLevels sketch_levels(SketchKind kind, int bits) {
  if (kind == SketchKind::calibrated) {
    SketchLevels levels = sketch_levels(SketchKind::lloyd_max, 4);
    const SketchLevels coarse = sketch_levels(SketchKind::lloyd_max, 2);
    for (int code = 0; code < 4; ++code) levels.coarse_byte[code] = coarse.byte[code];
    for (int code = 0; code < 3; ++code) levels.coarse_threshold[code] = coarse.threshold[code];
    levels.unit = 1;
    return levels;
  }
  SketchLevels levels;
  levels.count = bits <= 2 ? 4 : bits == 3 ? 8 : 16;
  if (kind == SketchKind::minmax) {
    for (int code = 0; code < levels.count; ++code)
      levels.byte[code] = static_cast<std::uint8_t>(code);
    return levels;
  }
  const int half = levels.count / 2;
  const double largest = lloyd_max_level(bits, half - 1);
  double level[16] = {};
  for (int i = 0; i < half; ++i) {
    level[half + i] = lloyd_max_level(bits, i);
    level[half - 1 - i] = -lloyd_max_level(bits, i);
  }
  for (int code = 0; code < levels.count; ++code) {
    levels.byte[code] = static_cast<std::uint8_t>((level[code] / largest + 1) * 127 + 0.5);
  }
  for (int code = 0; code + 1 < levels.count; ++code) {
    levels.threshold[code] = static_cast<float>((level[code] + level[code + 1]) / 2);
  }
  levels.unit = static_cast<float>(largest / 127);
  return levels;
}

// ---- Rotation: two rounds of random signs and a Hadamard transform
// ----------------------------------- A Hadamard matrix needs a power of two. With P the largest
// one not above dim, round 1 transforms coordinates [0, P), round 2 the last P: P > dim / 2, so
// every coordinate takes part and the composition is orthogonal. Where dim is a power of two, one
// round is enough and the second is left out.

// Largest power of two not above dim (dim >= 1).
VERKV_HD constexpr int hadamard_size(int dim) {
  int size = 1;
  while (2 * size <= dim) size *= 2;
  return size;
}

// Fills 2 * dim signs, +1 or -1, from the seed.
inline void rotation_signs(std::uint64_t seed, int dim, std::span<float> out_signs) {
  for (int i = 0; i < 2 * dim; ++i) {
    const PhiloxCounter bits = philox4x32_10(
        PhiloxCounter{{static_cast<std::uint32_t>(i / 128), 0x726f7461u, 0, 0}},
        PhiloxKey{{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)}});
    const int bit = i % 128;
    out_signs[static_cast<std::size_t>(i)] =
        (bits.word[bit / 32] >> (bit % 32)) & 1u ? -1.0f : 1.0f;
  }
}

namespace detail {
// In-place normalised Hadamard transform; size a power of two. Only additions of pairs and one
// product a coordinate, so every implementation gives the same bits.
inline void hadamard(float* x, int size) {
  for (int half = 1; half < size; half *= 2) {
    for (int start = 0; start < size; start += 2 * half) {
      for (int i = start; i < start + half; ++i) {
        const float a = x[i];
        const float b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
    }
  }
  const float norm = static_cast<float>(1.0 / std::sqrt(static_cast<double>(size)));
  for (int i = 0; i < size; ++i) x[i] *= norm;
}
}  // namespace detail

// Rotates x in place; signs from rotation_signs with the same dim = x.size().
inline void rotate(std::span<float> x, std::span<const float> signs) {
  const int dim = static_cast<int>(x.size());
  if (dim == 0) return;
  const int size = hadamard_size(dim);
  for (int i = 0; i < size; ++i)
    x[static_cast<std::size_t>(i)] *= signs[static_cast<std::size_t>(i)];
  detail::hadamard(x.data(), size);
  if (size == dim) return;
  const int begin = dim - size;
  for (int i = begin; i < dim; ++i) {
    x[static_cast<std::size_t>(i)] *= signs[static_cast<std::size_t>(dim + i)];
  }
  detail::hadamard(x.data() + begin, size);
}

// ---- Packing -----------------------------------------------------------------------------------

// Writes the code of (token, coordinate) into the grouped planes at `codes`.
VERKV_HD inline void pack_code(const SketchShape& shape, std::uint8_t* codes, std::int64_t token,
                               int coordinate, unsigned code) {
  std::uint8_t* group = codes + token / kSketchGroup * (kSketchGroup * shape.code_bytes());
  const std::int64_t lane = token % kSketchGroup;
  const auto put = [](std::uint8_t& byte, int shift, unsigned mask, unsigned value) {
    byte = static_cast<std::uint8_t>((byte & ~(mask << shift)) | (value << shift));
  };
  put(group[coordinate / 4 * kSketchGroup + lane], 2 * (coordinate % 4), 3u, code & 3u);
  std::uint8_t* high = group + kSketchGroup * shape.low_bytes();
  const int bits = shape.bits_of(coordinate);
  if (bits == 3) put(high[coordinate / 8 * kSketchGroup + lane], coordinate % 8, 1u, code >> 2);
  if (bits == 4)
    put(high[coordinate / 4 * kSketchGroup + lane], 2 * (coordinate % 4), 3u, code >> 2);
}

// Reads it back.
VERKV_HD inline unsigned unpack_code(const SketchShape& shape, const std::uint8_t* codes,
                                     std::int64_t token, int coordinate) {
  const std::uint8_t* group = codes + token / kSketchGroup * (kSketchGroup * shape.code_bytes());
  const std::int64_t lane = token % kSketchGroup;
  unsigned code = (static_cast<unsigned>(group[coordinate / 4 * kSketchGroup + lane]) >>
                   (2 * (coordinate % 4))) &
                  3u;
  const std::uint8_t* high = group + kSketchGroup * shape.low_bytes();
  const int bits = shape.bits_of(coordinate);
  if (bits == 3) {
    code |=
        ((static_cast<unsigned>(high[coordinate / 8 * kSketchGroup + lane]) >> (coordinate % 8)) &
         1u)
        << 2;
  }
  if (bits == 4) {
    code |= ((static_cast<unsigned>(high[coordinate / 4 * kSketchGroup + lane]) >>
              (2 * (coordinate % 4))) &
             3u)
            << 2;
  }
  return code;
}

// ---- Encoding of a key --------------------------------------------------------------------------

struct SketchScale {
  Positive16 scale{};  // multiplies unit * (byte - bias)
  BFloat16 offset{};   // minmax: value of level 0
};

// Quantises the centred and rotated key y (lloyd_max) and packs it as `token`. The levels z are
// chosen in units of the root mean square; the stored scale is |y| / |z|, so that the sketched key
// is as long as the key. The least-squares fit <y, z> / <z, z> is shorter (at 2 bits it makes the
// logit of a query along the key 12 % too small, this one 6 %) and underestimates just the large
// logits, which is where certificates fail (docs/math/sketch.md). A zero key gets scale 0. Sums in
// double, in order of the coordinates.
VERKV_HD inline SketchScale encode_lloyd_max(const SketchShape& shape, const SketchLevels& levels,
                                             std::span<const float> y, std::uint8_t* codes,
                                             std::int64_t token) {
  double square = 0;
  for (const float v : y) square += static_cast<double>(v) * static_cast<double>(v);
  const double rms = std::sqrt(square / static_cast<double>(y.size()));
  double zz = 0;
  for (int i = 0; i < static_cast<int>(y.size()); ++i) {
    const double v = static_cast<double>(y[static_cast<std::size_t>(i)]);
    unsigned code = 0;
    for (int k = 0; k + 1 < levels.count; ++k)
      code += v > static_cast<double>(levels.threshold[k]) * rms;
    const double z =
        static_cast<double>(levels.unit) * (static_cast<int>(levels.byte[code]) - shape.bias());
    zz += z * z;
    pack_code(shape, codes, token, i, code);
  }
  for (int i = static_cast<int>(y.size()); i < shape.padded_dim(); ++i)
    pack_code(shape, codes, token, i, 0);
  return {to_positive16(static_cast<float>(zz > 0 ? std::sqrt(square / zz) : 0.0)), BFloat16{}};
}

// Quantises the raw key x between its extremes (minmax) and packs it as `token`. The offset is
// rounded first and the step is measured from the rounded one, so that rounding adds no error of
// its own.
VERKV_HD inline SketchScale encode_minmax(const SketchShape& shape, std::span<const float> x,
                                          std::uint8_t* codes, std::int64_t token) {
  const auto [smallest, largest] = std::minmax_element(x.begin(), x.end());
  SketchScale result;
  result.offset = to_bfloat16(*smallest);
  const int top = (1 << shape.bits) - 1;
  const float offset = to_float(result.offset);
  result.scale = to_positive16(std::max(0.0f, (*largest - offset) / static_cast<float>(top)));
  const float step = to_float(result.scale);
  for (int i = 0; i < static_cast<int>(x.size()); ++i) {
    const float level = step > 0 ? (x[static_cast<std::size_t>(i)] - offset) / step : 0.0f;
    const int code = std::clamp(static_cast<int>(std::lrint(level)), 0, top);
    pack_code(shape, codes, token, i, static_cast<unsigned>(code));
  }
  for (int i = static_cast<int>(x.size()); i < shape.padded_dim(); ++i)
    pack_code(shape, codes, token, i, 0);
  return result;
}

// ---- Encoding in a calibrated basis -------------------------------------------------------------

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

// Quantises x, the key's stored coordinates over the root mean square of their band, and packs them
// as `token`. Of the trial scales the one whose levels z leave the smallest error after a
// least-squares fit is taken; the stored scale is |y| / |z|, as for lloyd_max. Sums of one trial
// run in order of the coordinates in binary32 (those of squared levels are integers), so trials may
// run side by side. A zero key gets scale 0, one that is not a number NaN.
VERKV_HD inline SketchScale encode_calibrated(const SketchShape& shape, const SketchLevels& levels,
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
      for (int t = 0; t < kScaleTrials; ++t) level[t] = byte[0] - 127;
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
  constexpr double fine_unit = kLloydMax4[7] / 127;
  constexpr double coarse_unit = kLloydMax2[1] / 127;
  double best = -1;
  double best_zz = 0;
  int chosen = kScaleTrials / 2;
  for (int t = 0; t < kScaleTrials; ++t) {
    const double yz =
        static_cast<double>(bands.fine_square) * fine_unit * static_cast<double>(a.product[t]) +
        static_cast<double>(bands.coarse_square) * coarse_unit * static_cast<double>(b.product[t]);
    const double zz = static_cast<double>(bands.fine_square) * fine_unit * fine_unit *
                          static_cast<double>(a.square[t]) +
                      static_cast<double>(bands.coarse_square) * coarse_unit * coarse_unit *
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
  return {to_positive16(static_cast<float>(scale)), BFloat16{}};
}

// ---- The query side
// ------------------------------------------------------------------------------

// Constants of one query head for a step.
struct SketchQuery {
  float scale = 0;       // value of one step of the 8-bit query
  std::int32_t sum = 0;  // sum of its coordinates
};

// Rounds q (rotated for lloyd_max, raw for minmax) to 8 bits: q_i ~ scale * out_q[i]. out_q has
// shape.padded_dim() elements; those past q are 0. A zero query gives scale 0.
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

// The integer score of one token: sum of query byte * level byte. Below 2^24 for dim <= 512, so
// exact in binary32.
inline std::int32_t sketch_dot(const SketchShape& shape, const SketchLevels& levels,
                               const std::uint8_t* codes, std::int64_t token,
                               std::span<const std::int8_t> q) {
  std::int32_t dot = 0;
  for (int i = 0; i < shape.padded_dim(); ++i) {
    dot += static_cast<std::int32_t>(q[static_cast<std::size_t>(i)]) *
           static_cast<std::int32_t>(levels.byte_of(shape, i, unpack_code(shape, codes, token, i)));
  }
  return dot;
}

// The logit from an integer score. factor = attention scale * SketchQuery.scale *
// SketchLevels.unit; shift is the share of the channel means, attention scale * q.mean. The order
// of operations is part of the contract (equal decisions on every backend).
VERKV_HD inline float sketch_logit(const SketchShape& shape, std::int32_t dot,
                                   std::int32_t query_sum, Positive16 scale, BFloat16 offset,
                                   float factor, float shift) {
  const float x = static_cast<float>(dot - shape.bias() * query_sum);
  if (shape.kind == SketchKind::minmax) {
    const float value =
        std::fma(to_float(offset), static_cast<float>(query_sum), to_float(scale) * x);
    return std::fma(factor, value, shift);
  }
  return std::fma(factor * to_float(scale), x, shift);
}

}  // namespace verkv

#endif  // VERKV_SKETCH_HPP
