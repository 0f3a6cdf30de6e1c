// The sketch of the keys from which all logits of a step are estimated.
//
// lloyd_max (docs/math/sketch.md): subtract the channel means, rotate, quantise each coordinate to
// the Lloyd-Max levels of a normal variable times one scale a token that keeps the key's norm.
// Softmax does not see the means' share of the logit differences, but residents' exact logits
// contain it, so the step adds scale * q.mean to every sketched logit. minmax: 2 bits between the
// token's own smallest and largest coordinate; no centring, no rotation.
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
// laid out like the low one.
inline constexpr std::int64_t kSketchGroup = 16;

struct SketchShape {
  SketchKind kind = SketchKind::lloyd_max;
  int bits = 2;
  int dim = 0;

  // Coordinates stored; those past dim have query coordinate 0.
  VERKV_HD constexpr int padded_dim() const {
    return bits == 3 ? (dim + 7) / 8 * 8 : (dim + 3) / 4 * 4;
  }
  VERKV_HD constexpr int low_bytes() const { return padded_dim() / 4; }
  VERKV_HD constexpr int high_bytes() const {
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
  VERKV_HD constexpr int bias() const { return kind == SketchKind::lloyd_max ? 127 : 0; }
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
};

constexpr SketchLevels sketch_levels(SketchKind kind, int bits) {
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
  if (shape.bits == 3)
    put(high[coordinate / 8 * kSketchGroup + lane], coordinate % 8, 1u, code >> 2);
  if (shape.bits == 4)
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
  if (shape.bits == 3) {
    code |=
        ((static_cast<unsigned>(high[coordinate / 8 * kSketchGroup + lane]) >> (coordinate % 8)) &
         1u)
        << 2;
  }
  if (shape.bits == 4) {
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
           static_cast<std::int32_t>(levels.byte[unpack_code(shape, codes, token, i)]);
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
