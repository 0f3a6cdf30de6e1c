#include <verkv/sketch.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "catch.hpp"
#include "reference/reference.hpp"
#include "reference/statistics.hpp"

namespace {

using verkv::SketchKind;
using verkv::SketchLevels;
using verkv::SketchScale;
using verkv::SketchShape;
using verkv::reference::Random;
using Vector = std::vector<double>;
using Floats = std::vector<float>;

constexpr int kDims[] = {1, 4, 7, 64, 80, 96, 100, 112, 128, 256};
constexpr int kBits[] = {2, 3, 4};
constexpr double kInfinity = std::numeric_limits<double>::infinity();

SketchShape lloyd_max(int bits, int dim) { return {SketchKind::lloyd_max, bits, dim}; }
SketchShape minmax(int dim) { return {SketchKind::minmax, 2, dim}; }

std::vector<std::uint8_t> storage(const SketchShape& shape, std::int64_t tokens) {
  return std::vector<std::uint8_t>(
      static_cast<std::size_t>(verkv::code_storage_bytes(shape, tokens)), 0xa5);
}

Floats normal_vector(Random& random, int dim, double size = 1) {
  Floats x;
  for (int i = 0; i < dim; ++i) x.push_back(static_cast<float>(size * random.normal()));
  return x;
}

Vector doubles(const Floats& x) { return Vector(x.begin(), x.end()); }

double dot(const Vector& a, const Vector& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

Floats rotated(Floats x, const Floats& signs) {
  verkv::rotate(x, signs);
  return x;
}

Floats signs_of(int dim, std::uint64_t seed = 1) {
  Floats signs(static_cast<std::size_t>(2 * dim));
  verkv::rotation_signs(seed, dim, signs);
  return signs;
}

// The Lloyd-Max levels of `bits`, all of them, ascending.
Vector exact_levels(int bits) {
  const int half = 1 << (bits - 1);
  Vector levels;
  for (int i = half; i-- > 0;) levels.push_back(-verkv::lloyd_max_level(bits, i));
  for (int i = 0; i < half; ++i) levels.push_back(verkv::lloyd_max_level(bits, i));
  return levels;
}

// The level bytes of one stored token, in order of the coordinates.
std::vector<int> level_bytes(const SketchShape& shape, const SketchLevels& levels,
                             const std::vector<std::uint8_t>& codes, std::int64_t token) {
  std::vector<int> result;
  for (int i = 0; i < shape.dim; ++i) {
    result.push_back(levels.byte[verkv::unpack_code(shape, codes.data(), token, i)]);
  }
  return result;
}

// What a stored token stands for.
Vector decoded(const SketchShape& shape, const SketchLevels& levels,
               const std::vector<std::uint8_t>& codes, std::int64_t token, SketchScale scale) {
  Vector y;
  for (const int byte : level_bytes(shape, levels, codes, token)) {
    y.push_back(static_cast<double>(verkv::to_float(scale.scale)) *
                    static_cast<double>(levels.unit) * (byte - shape.bias()) +
                static_cast<double>(verkv::to_float(scale.offset)));
  }
  return y;
}

double relative_square_error(const Vector& y, const Vector& z) {
  Vector e;
  for (std::size_t i = 0; i < y.size(); ++i) e.push_back(y[i] - z[i]);
  return dot(e, e) / dot(y, y);
}

// ---- Levels
// ------------------------------------------------------------------------------------------

TEST_CASE("Lloyd-Max levels are the means of their cells") {
  for (const int bits : kBits) {
    const Vector levels = exact_levels(bits);
    for (std::size_t i = 0; i < levels.size(); ++i) {
      const double low = i == 0 ? -kInfinity : (levels[i - 1] + levels[i]) / 2;
      const double high = i + 1 == levels.size() ? kInfinity : (levels[i] + levels[i + 1]) / 2;
      CHECK_THAT(levels[i], Catch::WithinAbs(verkv::reference::normal_mean_in(low, high), 2e-9));
    }
  }
}

TEST_CASE("tables: bytes ascend symmetrically and are the levels within half a step") {
  for (const int bits : kBits) {
    const SketchLevels levels = verkv::sketch_levels(SketchKind::lloyd_max, bits);
    const Vector exact = exact_levels(bits);
    REQUIRE(levels.count == 1 << bits);
    for (int code = 0; code < levels.count; ++code) {
      const double value = static_cast<double>(levels.unit) * (levels.byte[code] - 127);
      CHECK(std::fabs(value - exact[static_cast<std::size_t>(code)]) <=
            static_cast<double>(levels.unit) / 2 * (1 + 1e-6));
      CHECK(levels.byte[code] + levels.byte[levels.count - 1 - code] == 254);
      if (code > 0) CHECK(levels.byte[code] > levels.byte[code - 1]);
      if (code > 0) {
        CHECK_THAT(levels.threshold[code - 1],
                   Catch::WithinAbs((exact[static_cast<std::size_t>(code) - 1] +
                                     exact[static_cast<std::size_t>(code)]) /
                                        2,
                                    1e-6));
      }
    }
  }
  const SketchLevels plain = verkv::sketch_levels(SketchKind::minmax, 2);
  CHECK(plain.count == 4);
  for (int code = 0; code < 4; ++code) CHECK(plain.byte[code] == code);
  CHECK(plain.unit == 1.0f);
}

TEST_CASE("bytes of a token") {
  CHECK(lloyd_max(2, 128).code_bytes() == 32);
  CHECK(lloyd_max(3, 128).code_bytes() == 48);
  CHECK(lloyd_max(4, 128).code_bytes() == 64);
  CHECK(lloyd_max(2, 128).token_bytes() == 34);
  CHECK(minmax(128).token_bytes() == 36);
  CHECK(SketchShape{SketchKind::exact, 2, 128}.token_bytes() == 0);
  CHECK(lloyd_max(3, 100).padded_dim() == 104);
  CHECK(lloyd_max(2, 7).padded_dim() == 8);
  CHECK(verkv::code_storage_bytes(lloyd_max(2, 128), 0) == 0);
  CHECK(verkv::code_storage_bytes(lloyd_max(2, 128), 1) == 16 * 32);
  CHECK(verkv::code_storage_bytes(lloyd_max(2, 128), 17) == 32 * 32);
}

// ---- Packing
// -----------------------------------------------------------------------------------------

TEST_CASE("codes come back as they were packed, whatever was there before") {
  Random random(71);
  for (const int bits : kBits) {
    for (const int dim : kDims) {
      const SketchShape shape = lloyd_max(bits, dim);
      const std::int64_t tokens = 35;
      auto codes = storage(shape, tokens);
      std::vector<unsigned> expected;
      for (std::int64_t token = 0; token < tokens; ++token) {
        for (int i = 0; i < shape.padded_dim(); ++i) {
          expected.push_back(static_cast<unsigned>(random.below(std::size_t{1} << bits)));
          verkv::pack_code(shape, codes.data(), token, i, expected.back());
        }
      }
      std::size_t at = 0;
      int wrong = 0;
      for (std::int64_t token = 0; token < tokens; ++token) {
        for (int i = 0; i < shape.padded_dim(); ++i) {
          wrong += verkv::unpack_code(shape, codes.data(), token, i) != expected[at++];
        }
      }
      INFO("bits " << bits << ", dim " << dim);
      CHECK(wrong == 0);
    }
  }
}

// Kernels read these bytes directly.
TEST_CASE("the documented places of codes") {
  const SketchShape two = lloyd_max(2, 8);
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(verkv::code_storage_bytes(two, 17)), 0);
  verkv::pack_code(two, codes.data(), 16 + 3, 6, 2);  // second group, lane 3, c = 1, j = 2
  std::vector<std::uint8_t> expected(codes.size(), 0);
  expected[16 * 2 + 16 + 3] = 2 << 4;
  CHECK(codes == expected);

  const SketchShape three = lloyd_max(3, 8);
  codes.assign(static_cast<std::size_t>(verkv::code_storage_bytes(three, 1)), 0);
  verkv::pack_code(three, codes.data(), 5, 6, 5);
  expected.assign(codes.size(), 0);
  expected[16 + 5] = 1 << 4;
  expected[32 + 5] = 1 << 6;
  CHECK(codes == expected);

  const SketchShape four = lloyd_max(4, 8);
  codes.assign(static_cast<std::size_t>(verkv::code_storage_bytes(four, 1)), 0);
  verkv::pack_code(four, codes.data(), 5, 6, 13);
  expected.assign(codes.size(), 0);
  expected[16 + 5] = 1 << 4;
  expected[32 + 16 + 5] = 3 << 4;
  CHECK(codes == expected);
}

// ---- Rotation
// ------------------------------------------------------------------------------------------

TEST_CASE("the rotation is orthogonal and touches every coordinate") {
  for (const int dim : kDims) {
    INFO("dim " << dim);
    const Floats signs = signs_of(dim);
    const auto n = static_cast<std::size_t>(dim);
    std::vector<Vector> column;  // images of the unit vectors
    for (std::size_t i = 0; i < n; ++i) {
      Floats unit(n, 0.0f);
      unit[i] = 1;
      column.push_back(doubles(rotated(unit, signs)));
    }
    // The transpose is the inverse. 8 + 1 rounds of additions in binary32: errors of about 1e-6.
    double worst = 0;
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t j = 0; j <= i; ++j) {
        worst = std::max(worst, std::fabs(dot(column[i], column[j]) - (i == j ? 1 : 0)));
      }
    }
    CHECK(worst < 3e-6);
    // Linear: a vector's image is the combination of the columns; and the transpose takes it back.
    Random random(72);
    const Floats x = normal_vector(random, dim);
    const Floats y = rotated(x, signs);
    for (std::size_t j = 0; j < n; ++j) {
      double expected = 0;
      for (std::size_t i = 0; i < n; ++i) expected += static_cast<double>(x[i]) * column[i][j];
      REQUIRE_THAT(static_cast<double>(y[j]), Catch::WithinAbs(expected, 2e-5));
      REQUIRE_THAT(dot(doubles(y), column[j]), Catch::WithinAbs(static_cast<double>(x[j]), 2e-5));
    }
    // No coordinate is left as it is (dim 1 has nothing to mix with).
    for (std::size_t i = 0; i < n && dim > 1; ++i) CHECK(std::fabs(column[i][i]) < 0.95);
  }
}

TEST_CASE("norms and products survive the rotation") {
  Random random(73);
  for (const int dim : kDims) {
    const Floats signs = signs_of(dim, 99);
    for (const double size : {1e-6, 1.0, 1e4}) {
      const Floats a = normal_vector(random, dim, size);
      const Floats b = normal_vector(random, dim, size);
      const Vector ra = doubles(rotated(a, signs));
      const Vector rb = doubles(rotated(b, signs));
      const double scale = std::sqrt(dot(doubles(a), doubles(a)) * dot(doubles(b), doubles(b)));
      CHECK_THAT(dot(ra, rb), Catch::WithinAbs(dot(doubles(a), doubles(b)), 3e-6 * scale));
      CHECK_THAT(dot(ra, ra), Catch::WithinRel(dot(doubles(a), doubles(a)), 3e-6));
    }
  }
}

TEST_CASE("signs are fair, follow from the seed, and differ between seeds") {
  const Floats a = signs_of(256, 5);
  CHECK(a == signs_of(256, 5));
  const Floats b = signs_of(256, 6);
  const Floats c = signs_of(256, 5 + (std::uint64_t{1} << 32));
  double sum = 0;
  double with_b = 0;
  double with_c = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    REQUIRE(std::fabs(a[i]) == 1.0f);
    sum += static_cast<double>(a[i]);
    with_b += static_cast<double>(a[i] * b[i]);
    with_c += static_cast<double>(a[i] * c[i]);
  }
  const double bound = verkv::reference::bernstein_bound(512, 1, 3);
  CHECK(std::fabs(sum) <= bound);
  CHECK(std::fabs(with_b) <= bound);
  CHECK(std::fabs(with_c) <= bound);
}

TEST_CASE("one outlier channel is spread") {
  for (const int dim : {64, 80, 96, 100, 112, 128, 256}) {
    for (int channel = 0; channel < dim; ++channel) {
      Floats x(static_cast<std::size_t>(dim), 0.0f);
      x[static_cast<std::size_t>(channel)] = 1;
      float largest = 0;
      for (const float v : rotated(x, signs_of(dim))) largest = std::max(largest, std::fabs(v));
      // Two rounds of a transform of P > dim / 2 coordinates: an entry of one round is 1 / sqrt(P);
      // of two it is a sum of up to 2P - dim products +-1 / P, or a first-round entry that round 2
      // leaves.
      const int size = verkv::hadamard_size(dim);
      const double l = verkv::reference::log_of_false_alarm(1e5);
      const double two = std::sqrt(2 * l * (2 * size - dim)) / size;
      const double one = 1 / std::sqrt(static_cast<double>(size));
      REQUIRE(static_cast<double>(largest) <= std::max(one, size == dim ? 0.0 : two) * (1 + 1e-5));
    }
  }
}

// ---- Keys
// --------------------------------------------------------------------------------------------

TEST_CASE("lloyd_max: nearest level, length of the key, for keys of any kind") {
  Random random(74);
  for (const int bits : kBits) {
    const SketchLevels levels = verkv::sketch_levels(SketchKind::lloyd_max, bits);
    const Vector exact = exact_levels(bits);
    for (const int dim : kDims) {
      const SketchShape shape = lloyd_max(bits, dim);
      auto codes = storage(shape, 40);
      for (std::int64_t token = 0; token < 40; ++token) {
        const double size = token % 4 == 0 ? 1e4 : token % 4 == 1 ? 1e-6 : 1.0;
        Floats key = normal_vector(random, dim, size);
        if (token % 5 == 0) std::fill(key.begin(), key.end(), static_cast<float>(size));
        if (token % 5 == 1) key[0] *= 1000;
        const SketchScale stored = verkv::encode_lloyd_max(shape, levels, key, codes.data(), token);
        INFO("bits " << bits << ", dim " << dim << ", token " << token);
        CHECK(stored.offset.bits == 0);

        const Vector y = doubles(key);
        const double rms = std::sqrt(dot(y, y) / dim);
        Vector z;
        for (int i = 0; i < dim; ++i) {
          const unsigned code = verkv::unpack_code(shape, codes.data(), token, i);
          z.push_back(static_cast<double>(levels.unit) * (levels.byte[code] - 127));
          const double x = y[static_cast<std::size_t>(i)] / rms;
          const std::size_t nearest = verkv::reference::nearest_level(exact, x);
          // On the border between two cells the rounding of the threshold decides.
          const double difference =
              std::fabs(std::fabs(x - exact[code]) - std::fabs(x - exact[nearest]));
          REQUIRE((code == nearest || difference < 1e-6));
        }
        // The sketched key is as long as the key: s = |y| / |z|, stored within 2^-9.
        const double scale = static_cast<double>(verkv::to_float(stored.scale));
        REQUIRE_THAT(scale, Catch::WithinRel(std::sqrt(dot(y, y) / dot(z, z)), 0x1p-9 + 1e-6));
        const Vector sketched = decoded(shape, levels, codes, token, stored);
        REQUIRE_THAT(std::sqrt(dot(sketched, sketched)),
                     Catch::WithinRel(std::sqrt(dot(y, y)), 0x1p-9 + 1e-6));
        // Between two vectors of one length the relative square error is 2 (1 - cos); with the
        // scale off by a factor 1 + h it is 2 (1 - cos) (1 + h) + h^2, and |h| is at most 2^-9.
        const double cosine = dot(y, z) / std::sqrt(dot(y, y) * dot(z, z));
        REQUIRE(relative_square_error(y, sketched) <=
                2 * (1 - cosine) + 2 * 0x1.1p-9 * (1 - cosine) + 0x1.1p-18);
      }
    }
  }
}

TEST_CASE("lloyd_max: zero keys and keys that are not numbers") {
  const SketchShape shape = lloyd_max(2, 8);
  const SketchLevels levels = verkv::sketch_levels(SketchKind::lloyd_max, 2);
  auto codes = storage(shape, 1);
  CHECK(verkv::to_float(
            verkv::encode_lloyd_max(shape, levels, Floats(8, 0.0f), codes.data(), 0).scale) ==
        0.0f);
  Floats key(8, 1.0f);
  key[3] = std::numeric_limits<float>::quiet_NaN();
  const SketchScale bad = verkv::encode_lloyd_max(shape, levels, key, codes.data(), 0);
  CHECK(std::isnan(verkv::to_float(bad.scale)));
  CHECK(std::isnan(verkv::sketch_logit(shape, 5, 1, bad.scale, bad.offset, 1.0f, 0.0f)));
}

// What theory says about a normal key y of dim d and its levels z. The angle between them has
// sin^2 = D + c / d to first order in 1 / d: D = E e^2 is the quantiser's error on a normal
// variable x, with e = x - z; dividing by the key's own rms takes the fourth moment of a coordinate
// from 3 to 3 - 6 / d, which changes the density by -He4 / (4 d); and the part of e along z does
// not turn z:
//   c = -E[e^2 He4(x)] / 4 - E[e^2 z^2] / E[z^2],   He4(x) = x^4 - 6 x^2 + 3.
// The sketched key has the length of the key, so its relative square error is 2 (1 - cos).
struct QuantiserError {
  double infinite = 0;  // D
  double slope = 0;     // c
};

QuantiserError quantiser_error(const Vector& levels) {
  double error = 0;
  double with_he4 = 0;
  double with_z = 0;
  double square_z = 0;
  const double step = 1e-4;
  for (double x = -8 + step / 2; x < 8; x += step) {
    const double z = levels[verkv::reference::nearest_level(levels, x)];
    const double e2 = (x - z) * (x - z) * step * verkv::reference::normal_density(x);
    error += e2;
    with_he4 += e2 * (x * x * x * x - 6 * x * x + 3);
    with_z += e2 * z * z;
    square_z += z * z * step * verkv::reference::normal_density(x);
  }
  return {error, -with_he4 / 4 - with_z / square_z};
}

TEST_CASE("lloyd_max: the error of the quantiser is the published one") {
  CHECK_THAT(quantiser_error(exact_levels(2)).infinite, Catch::WithinRel(0.1175, 5e-4));
  CHECK_THAT(quantiser_error(exact_levels(3)).infinite, Catch::WithinRel(0.03454, 5e-4));
  CHECK_THAT(quantiser_error(exact_levels(4)).infinite, Catch::WithinRel(0.009497, 5e-4));
}

TEST_CASE("lloyd_max: the error on normal keys is that of theory") {
  Random random(75);
  for (const int dim : {64, 128, 1024}) {
    for (const int bits : kBits) {
      const QuantiserError theory = quantiser_error(exact_levels(bits));
      const double expected = 2 - 2 * std::sqrt(1 - (theory.infinite + theory.slope / dim));
      const SketchLevels levels = verkv::sketch_levels(SketchKind::lloyd_max, bits);
      const SketchShape shape = lloyd_max(bits, dim);
      auto codes = storage(shape, 1);
      double error = 0;
      double logit_error = 0;
      const int keys = 512 * 1024 / dim;
      for (int trial = 0; trial < keys; ++trial) {
        const Floats key = normal_vector(random, dim);
        const SketchScale stored = verkv::encode_lloyd_max(shape, levels, key, codes.data(), 0);
        const Vector y = doubles(key);
        const Vector z = decoded(shape, levels, codes, 0, stored);
        error += relative_square_error(y, z);
        // The error of a logit, over |q|^2 |k|^2 / dim, for a query in any direction: the same
        // mean.
        const Vector q = doubles(normal_vector(random, dim));
        const double off = dot(q, y) - dot(q, z);
        logit_error += off * off * dim / (dot(q, q) * dot(y, y));
      }
      INFO("dim " << dim << ", bits " << bits << ": expected " << expected << ", key "
                  << error / keys << ", logit " << logit_error / keys);
      // Levels of a byte cost 0.4 % at 4 bits and less below; the second order in 1 / d is about
      // half the square of the first, up to 0.4 % at d = 64; e^2 of one coordinate has a relative
      // deviation below 2, and five deviations of the mean over 2^19 coordinates are 1.4 %. A
      // square of a normal variable has sqrt(2).
      CHECK_THAT(error / keys, Catch::WithinRel(expected, 0.022));
      CHECK_THAT(logit_error / keys, Catch::WithinRel(expected, 0.022 + 5 * std::sqrt(2.0 / keys)));
    }
  }
}

TEST_CASE("lloyd_max: after the rotation an outlier channel costs little more than a normal key") {
  Random random(76);
  const SketchLevels levels = verkv::sketch_levels(SketchKind::lloyd_max, 2);
  for (const int dim : {64, 80, 96, 100, 112, 128, 256}) {
    const SketchShape shape = lloyd_max(2, dim);
    const Floats signs = signs_of(dim);
    auto codes = storage(shape, 1);
    double raw = 0;
    double turned = 0;
    for (int trial = 0; trial < 200; ++trial) {
      Floats key = normal_vector(random, dim);
      key[5] = 40;
      SketchScale stored = verkv::encode_lloyd_max(shape, levels, key, codes.data(), 0);
      raw += relative_square_error(doubles(key), decoded(shape, levels, codes, 0, stored));
      key = rotated(key, signs);
      stored = verkv::encode_lloyd_max(shape, levels, key, codes.data(), 0);
      turned += relative_square_error(doubles(key), decoded(shape, levels, codes, 0, stored));
    }
    INFO("dim " << dim << ": " << raw / 200 << " raw, " << turned / 200 << " rotated");
    // The outlier's share of a rotated coordinate is +-40 / sqrt(P) or a sum of such, far from
    // normal, so theory gives no figure: less than twice the 0.1175 of a normal key, where the raw
    // key, whose one large coordinate is cut off at the largest level, loses most of its square.
    CHECK(turned / 200 < 2 * 0.1175);
    CHECK(raw / 200 > 0.5);
  }
}

TEST_CASE("minmax: every coordinate within half a step") {
  Random random(77);
  for (const int dim : kDims) {
    const SketchShape shape = minmax(dim);
    const SketchLevels levels = verkv::sketch_levels(SketchKind::minmax, 2);
    auto codes = storage(shape, 20);
    for (std::int64_t token = 0; token < 20; ++token) {
      const double size = token % 4 == 0 ? 1e4 : token % 4 == 1 ? 1e-6 : 1.0;
      Floats key = normal_vector(random, dim, size);
      if (token % 5 == 0)
        std::fill(key.begin(), key.end(), static_cast<float>(1.0009765625 * size));
      if (token % 5 == 1) key[0] *= 1000;
      if (token % 5 == 2) std::fill(key.begin(), key.end(), 0.0f);
      const SketchScale stored = verkv::encode_minmax(shape, key, codes.data(), token);
      const Vector z = decoded(shape, levels, codes, token, stored);
      const auto [low, high] = std::minmax_element(key.begin(), key.end());
      const double range = static_cast<double>(*high) - static_cast<double>(*low);
      // Half a step; the step's own rounding, 2^-9, counted three times at the far end; the
      // offset's rounding, 2^-9 of its size, on either end.
      const double bound = range / 6 * (1 + 0x1p-8) + range * 0x1p-9 +
                           2 * std::fabs(static_cast<double>(*low)) * 0x1p-9;
      INFO("dim " << dim << ", token " << token);
      for (std::size_t i = 0; i < key.size(); ++i) {
        REQUIRE(std::fabs(static_cast<double>(key[i]) - z[i]) <= bound * (1 + 1e-6));
      }
    }
  }
}

// ---- Queries and logits
// -----------------------------------------------------------------------------------

TEST_CASE("query: each coordinate within half a step, padding 0, sum right") {
  Random random(78);
  for (const int dim : kDims) {
    for (const double size : {1e-6, 1.0, 1e4, 1e30}) {
      const Floats q = normal_vector(random, dim, size);
      std::vector<std::int8_t> coded(static_cast<std::size_t>((dim + 7) / 8 * 8), 99);
      const verkv::SketchQuery query = verkv::encode_query(q, coded);
      int sum = 0;
      for (std::size_t i = 0; i < coded.size(); ++i) {
        sum += coded[i];
        REQUIRE(coded[i] >= -127);
        if (i >= q.size()) {
          REQUIRE(coded[i] == 0);
        } else {
          const double value = static_cast<double>(query.scale) * coded[i];
          REQUIRE(std::fabs(value - static_cast<double>(q[i])) <=
                  static_cast<double>(query.scale) * 0.50001);
        }
      }
      CHECK(query.sum == sum);
    }
  }
}

TEST_CASE("query edges: zero, one coordinate, largest and smallest numbers") {
  std::vector<std::int8_t> coded(8, 99);
  CHECK(verkv::encode_query(Floats(8, 0.0f), coded).scale == 0.0f);
  CHECK(coded == std::vector<std::int8_t>(8, 0));
  CHECK(verkv::encode_query(Floats{}, coded).scale == 0.0f);
  const float huge = std::numeric_limits<float>::max();
  CHECK(verkv::encode_query(Floats{huge, -huge}, coded).sum == 0);
  CHECK(coded[0] == 127);
  CHECK(coded[1] == -127);
  // Below the reach of a scale: taken for zero.
  const float tiny = std::numeric_limits<float>::denorm_min();
  CHECK(verkv::encode_query(Floats{tiny, tiny}, coded).scale == 0.0f);
  CHECK(coded == std::vector<std::int8_t>(8, 0));
}

// The integer score and the logit made from it, against decoding and multiplying in double.
TEST_CASE("logits against products of decoded keys") {
  Random random(79);
  for (const SketchKind kind : {SketchKind::lloyd_max, SketchKind::minmax}) {
    for (const int bits : kBits) {
      if (kind == SketchKind::minmax && bits != 2) continue;
      for (const int dim : kDims) {
        const SketchShape shape{kind, bits, dim};
        const SketchLevels levels = verkv::sketch_levels(kind, bits);
        const std::int64_t tokens = 33;
        auto codes = storage(shape, tokens);
        const Floats q = normal_vector(random, dim, std::exp(3 * random.normal()));
        std::vector<std::int8_t> coded(static_cast<std::size_t>(shape.padded_dim()));
        const verkv::SketchQuery query = verkv::encode_query(q, coded);
        const double attention_scale = 1 / std::sqrt(static_cast<double>(dim));
        const double mean_share = random.normal();
        const float factor = static_cast<float>(attention_scale) * query.scale * levels.unit;
        Vector rounded_query;
        for (int i = 0; i < dim; ++i) {
          rounded_query.push_back(static_cast<double>(query.scale) *
                                  coded[static_cast<std::size_t>(i)]);
        }
        for (std::int64_t token = 0; token < tokens; ++token) {
          const double size = token % 4 == 0 ? 1e4 : token % 4 == 1 ? 1e-6 : 1.0;
          Floats key = normal_vector(random, dim, size);
          if (token % 5 == 0) std::fill(key.begin(), key.end(), static_cast<float>(size));
          if (token % 5 == 1) std::fill(key.begin(), key.end(), 0.0f);
          if (token % 5 == 2) key[0] *= 1000;
          const SketchScale stored =
              kind == SketchKind::minmax
                  ? verkv::encode_minmax(shape, key, codes.data(), token)
                  : verkv::encode_lloyd_max(shape, levels, key, codes.data(), token);
          const std::vector<int> bytes = level_bytes(shape, levels, codes, token);

          std::int64_t integer = 0;
          for (int i = 0; i < dim; ++i) {
            integer += std::int64_t{coded[static_cast<std::size_t>(i)]} *
                       bytes[static_cast<std::size_t>(i)];
          }
          const std::int32_t score = verkv::sketch_dot(shape, levels, codes.data(), token, coded);
          REQUIRE(score == integer);

          const double logit = static_cast<double>(
              verkv::sketch_logit(shape, score, query.sum, stored.scale, stored.offset, factor,
                                  static_cast<float>(mean_share)));
          const double scale = static_cast<double>(verkv::to_float(stored.scale));
          const double offset = static_cast<double>(verkv::to_float(stored.offset));
          const double unit = static_cast<double>(levels.unit);
          const double expected = verkv::reference::sketched_logit(
              rounded_query, bytes, shape.bias(), unit, scale, offset, attention_scale, mean_share);
          // The integers are exact; what is left is a handful of roundings of 2^-24 in factor,
          // shift and the fused sums, relative to the size of the parts.
          double parts = std::fabs(mean_share);
          double half_step = 0;
          for (int i = 0; i < dim; ++i) {
            const auto at = static_cast<std::size_t>(i);
            const double level = std::fabs(scale * unit * (bytes[at] - shape.bias()));
            parts += attention_scale * std::fabs(rounded_query[at]) * (level + std::fabs(offset));
            half_step += attention_scale * static_cast<double>(query.scale) * 0.50001 *
                         std::fabs(scale * unit * (bytes[at] - shape.bias()) + offset);
          }
          INFO("bits " << bits << ", dim " << dim << ", token " << token);
          REQUIRE(std::fabs(logit - expected) <= 8 * 0x1p-24 * parts);
          // With the query as it was the logit moves by at most half a step of each coordinate.
          const double unrounded = verkv::reference::sketched_logit(
              doubles(q), bytes, shape.bias(), unit, scale, offset, attention_scale, mean_share);
          REQUIRE(std::fabs(logit - unrounded) <= half_step + 8 * 0x1p-24 * parts);
        }
      }
    }
  }
}

TEST_CASE("integer scores stay exact in binary32 up to dim 512") {
  const SketchShape shape = lloyd_max(4, 512);
  const SketchLevels levels = verkv::sketch_levels(SketchKind::lloyd_max, 4);
  auto codes = storage(shape, 1);
  for (int i = 0; i < 512; ++i) verkv::pack_code(shape, codes.data(), 0, i, 15);
  const std::vector<std::int8_t> q(512, 127);
  const std::int32_t score = verkv::sketch_dot(shape, levels, codes.data(), 0, q);
  CHECK(score == 512 * 127 * 254);
  CHECK(score < 1 << 24);
  const float logit =
      verkv::sketch_logit(shape, score, 512 * 127, verkv::to_positive16(1.0f), {}, 1.0f, 0.0f);
  CHECK(logit == 512.0f * 127.0f * 127.0f);
}

TEST_CASE("zero query and zero key leave the share of the means") {
  for (const SketchShape& shape : {lloyd_max(2, 64), minmax(64)}) {
    const float zero_query =
        verkv::sketch_logit(shape, 0, 0, verkv::to_positive16(3.0f), {}, 0.0f, 1.25f);
    CHECK(zero_query == 1.25f);
    const float zero_key =
        verkv::sketch_logit(shape, 1234, 17, verkv::to_positive16(0.0f), {}, 2.0f, 1.25f);
    CHECK(zero_key == 1.25f);
  }
}

}  // namespace
