#include <verkv/sketch.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "catch.hpp"
#include "reference/reference.hpp"
#include "reference/statistics.hpp"
#include "tolerance.hpp"

namespace {

using verkv::kSketchLevels;
using verkv::Positive16;
using verkv::SketchKind;
using verkv::SketchShape;
using verkv::reference::Random;
using Vector = std::vector<double>;
using Floats = std::vector<float>;

constexpr int kDims[] = {1, 4, 7, 64, 80, 96, 100, 112, 128, 256};
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Ways to spend bits on so many coordinates: 2 bits each, 4 each, and mixtures.
std::vector<SketchShape> shapes_of(int dim) {
  std::vector<SketchShape> shapes;
  for (int fine = 0; fine < dim; fine += 16) shapes.push_back({SketchKind::calibrated, dim, fine});
  shapes.push_back({SketchKind::calibrated, dim, dim});
  return shapes;
}

std::vector<std::uint8_t> storage(const SketchShape& shape, std::int64_t tokens) {
  return std::vector<std::uint8_t>(
      static_cast<std::size_t>(verkv::code_storage_bytes(shape, tokens)), 0xa5);
}

Floats normal_vector(Random& random, int dim, double size = 1) {
  Floats x;
  for (int i = 0; i < dim; ++i) x.push_back(static_cast<float>(size * random.normal()));
  return x;
}

// The tables of 4 and of 2 bits by one name.
struct Table {
  int bits;
  const double* positive;
  const std::uint8_t* byte;
  const float* threshold;
  double unit;

  int count() const { return 1 << bits; }
  // All levels, ascending.
  Vector levels() const {
    Vector result;
    for (int i = count() / 2; i-- > 0;) result.push_back(-positive[i]);
    for (int i = 0; i < count() / 2; ++i) result.push_back(positive[i]);
    return result;
  }
};

const Table kTables[] = {
    {4, verkv::kLloydMax4, kSketchLevels.byte, kSketchLevels.threshold, verkv::kFineUnit},
    {2, verkv::kLloydMax2, kSketchLevels.coarse_byte, kSketchLevels.coarse_threshold,
     verkv::kCoarseUnit}};

// ---- Levels -------------------------------------------------------------------------------------

TEST_CASE("Lloyd-Max levels are the means of their cells") {
  for (const Table& table : kTables) {
    const Vector levels = table.levels();
    for (std::size_t i = 0; i < levels.size(); ++i) {
      const double low = i == 0 ? -kInfinity : (levels[i - 1] + levels[i]) / 2;
      const double high = i + 1 == levels.size() ? kInfinity : (levels[i] + levels[i + 1]) / 2;
      CHECK_THAT(levels[i], Catch::WithinAbs(verkv::reference::normal_mean_in(low, high),
                                             verkv::tolerance::kLevels));
    }
  }
}

TEST_CASE("the error of the quantisers is the published one") {
  for (const Table& table : kTables) {
    const Vector levels = table.levels();
    double error = 0;
    const double step = 1e-4;
    for (double x = -8 + step / 2; x < 8; x += step) {
      const double off = x - levels[verkv::reference::nearest_level(levels, x)];
      error += off * off * step * verkv::reference::normal_density(x);
    }
    CHECK_THAT(error, Catch::WithinRel(table.bits == 2 ? 0.1175 : 0.009497,
                                       verkv::tolerance::kPublishedError));
  }
}

TEST_CASE("tables: bytes ascend symmetrically and are the levels within half a step") {
  for (const Table& table : kTables) {
    const Vector exact = table.levels();
    for (int code = 0; code < table.count(); ++code) {
      const std::size_t at = static_cast<std::size_t>(code);
      CHECK(std::fabs(table.unit * (table.byte[code] - verkv::kLevelBias) - exact[at]) <=
            table.unit / 2 * (1 + verkv::tolerance::kThroughBinary32));
      CHECK(table.byte[code] + table.byte[table.count() - 1 - code] == 254);
      if (code == 0) continue;
      CHECK(table.byte[code] > table.byte[code - 1]);
      CHECK_THAT(table.threshold[code - 1], Catch::WithinAbs((exact[at - 1] + exact[at]) / 2,
                                                             verkv::tolerance::kThroughBinary32));
    }
  }
}

TEST_CASE("bytes of a token") {
  const auto shape = [](int dim, int fine) {
    return SketchShape{SketchKind::calibrated, dim, fine};
  };
  CHECK(shape(128, 0).code_bytes() == 32);
  CHECK(shape(96, 32).code_bytes() == 32);
  CHECK(shape(128, 128).code_bytes() == 64);
  CHECK(shape(128, 0).token_bytes() == 34);
  CHECK(SketchShape{SketchKind::exact, 128, 0}.token_bytes() == 0);
  CHECK(shape(7, 0).padded_dim() == 8);
  CHECK(shape(7, 7).code_bytes() == 4);
  CHECK(verkv::code_storage_bytes(shape(128, 0), 0) == 0);
  CHECK(verkv::code_storage_bytes(shape(128, 0), 1) == 16 * 32);
  CHECK(verkv::code_storage_bytes(shape(128, 0), 17) == 32 * 32);
}

// ---- Packing ------------------------------------------------------------------------------------

TEST_CASE("codes come back as they were packed, whatever was there before") {
  Random random(71);
  for (const int dim : kDims) {
    for (const SketchShape& shape : shapes_of(dim)) {
      const std::int64_t tokens = 35;
      auto codes = storage(shape, tokens);
      std::vector<unsigned> expected;
      for (std::int64_t token = 0; token < tokens; ++token) {
        for (int i = 0; i < shape.padded_dim(); ++i) {
          expected.push_back(static_cast<unsigned>(random.below(i < shape.fine ? 16 : 4)));
          verkv::pack_code(shape, codes.data(), token, i, expected.back());
        }
      }
      std::size_t at = 0;
      int wrong = 0;
      for (std::int64_t token = 0; token < tokens; ++token) {
        for (int i = 0; i < shape.padded_dim(); ++i)
          wrong += verkv::unpack_code(shape, codes.data(), token, i) != expected[at++];
      }
      INFO("dim " << dim << ", fine " << shape.fine);
      CHECK(wrong == 0);
    }
  }
}

// Kernels read these bytes directly.
TEST_CASE("the documented places of codes") {
  const SketchShape coarse{SketchKind::calibrated, 8, 0};
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(verkv::code_storage_bytes(coarse, 17)),
                                  0);
  verkv::pack_code(coarse, codes.data(), 16 + 3, 6, 2);  // second group, lane 3, c = 1, j = 2
  std::vector<std::uint8_t> expected(codes.size(), 0);
  expected[16 * 2 + 16 + 3] = 2 << 4;
  CHECK(codes == expected);

  const SketchShape mixed{SketchKind::calibrated, 24, 16};
  codes.assign(static_cast<std::size_t>(verkv::code_storage_bytes(mixed, 1)), 0);
  verkv::pack_code(mixed, codes.data(), 5, 6, 13);
  verkv::pack_code(mixed, codes.data(), 5, 17, 2);
  expected.assign(codes.size(), 0);
  expected[16 + 5] = 1 << 4;
  expected[6 * 16 + 16 + 5] = 3 << 4;
  expected[4 * 16 + 5] = 2 << 2;
  CHECK(codes == expected);
}

// ---- Queries and logits -------------------------------------------------------------------------

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
  for (const int dim : kDims) {
    for (const SketchShape& shape : shapes_of(dim)) {
      const std::int64_t tokens = 33;
      auto codes = storage(shape, tokens);
      const Floats q = normal_vector(random, dim, std::exp(3 * random.normal()));
      std::vector<std::int8_t> coded(static_cast<std::size_t>(shape.padded_dim()));
      const verkv::SketchQuery query = verkv::encode_query(q, coded);
      const double unit = std::exp(random.normal());
      const double mean_share = random.normal();
      const float factor = static_cast<float>(unit) * query.scale;
      for (std::int64_t token = 0; token < tokens; ++token) {
        for (int i = 0; i < shape.padded_dim(); ++i) {
          verkv::pack_code(shape, codes.data(), token, i,
                           static_cast<unsigned>(random.below(i < shape.fine ? 16 : 4)));
        }
        const double size = token % 4 == 0 ? 1e4 : token % 4 == 1 ? 1e-6 : 1.0;
        const Positive16 scale = verkv::to_positive16(static_cast<float>(size));
        std::int64_t integer = 0;
        double sum = 0;
        double unrounded = 0;
        double parts = 0;
        double half_step = 0;
        for (int i = 0; i < dim; ++i) {
          const std::size_t at = static_cast<std::size_t>(i);
          const unsigned code = verkv::unpack_code(shape, codes.data(), token, i);
          const int byte = kTables[i < shape.fine ? 0 : 1].byte[code];
          const double level =
              unit * static_cast<double>(verkv::to_float(scale)) * (byte - verkv::kLevelBias);
          integer += std::int64_t{coded[at]} * byte;
          sum += static_cast<double>(query.scale) * coded[at] * level;
          unrounded += static_cast<double>(q[at]) * level;
          parts += std::fabs(static_cast<double>(query.scale) * coded[at] * level);
          half_step += static_cast<double>(query.scale) * 0.50001 * std::fabs(level);
        }
        INFO("dim " << dim << ", fine " << shape.fine << ", token " << token);
        const std::int32_t score = verkv::sketch_dot(shape, codes.data(), token, coded);
        REQUIRE(score == integer);
        const double logit = static_cast<double>(
            verkv::sketch_logit(score, query.sum, scale, factor, static_cast<float>(mean_share)));
        // The integers are exact; what is left is a handful of roundings of 2^-24 in factor, shift
        // and the fused sum, relative to the size of the parts.
        const double rounding = 8 * 0x1p-24 * (std::fabs(mean_share) + parts);
        REQUIRE(std::fabs(logit - (sum + mean_share)) <= rounding);
        // With the query as it was the logit moves by at most half a step of each coordinate.
        REQUIRE(std::fabs(logit - (unrounded + mean_share)) <= half_step + rounding);
      }
    }
  }
}

TEST_CASE("integer scores stay exact in binary32 up to dim 576") {
  const SketchShape shape{SketchKind::calibrated, 576, 576};
  auto codes = storage(shape, 1);
  for (int i = 0; i < 576; ++i) verkv::pack_code(shape, codes.data(), 0, i, 15);
  const std::vector<std::int8_t> q(576, 127);
  const std::int32_t score = verkv::sketch_dot(shape, codes.data(), 0, q);
  CHECK(score == 576 * 127 * 254);
  CHECK(score - 576 * 127 * 127 < 1 << 24);
  CHECK(verkv::sketch_logit(score, 576 * 127, verkv::to_positive16(1.0f), 1.0f, 0.0f) ==
        576.0f * 127.0f * 127.0f);
}

TEST_CASE("zero query, zero key, and a scale that is no number") {
  CHECK(verkv::sketch_logit(0, 0, verkv::to_positive16(3.0f), 0.0f, 1.25f) == 1.25f);
  CHECK(verkv::sketch_logit(1234, 17, verkv::to_positive16(0.0f), 2.0f, 1.25f) == 1.25f);
  const Positive16 bad = verkv::to_positive16(std::numeric_limits<float>::quiet_NaN());
  CHECK(std::isnan(verkv::sketch_logit(5, 1, bad, 1.0f, 0.0f)));
}

}  // namespace
