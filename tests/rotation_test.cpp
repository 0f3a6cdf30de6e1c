#include "rotation.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "catch.hpp"
#include "reference/reference.hpp"
#include "reference/statistics.hpp"
#include "tolerance.hpp"

namespace {

using verkv::reference::Random;
using Vector = std::vector<double>;
using Floats = std::vector<float>;

constexpr int kDims[] = {1, 4, 7, 64, 80, 96, 100, 112, 128, 256};

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
    CHECK(worst < verkv::tolerance::kRotationColumns);
    // Linear: a vector's image is the combination of the columns; and the transpose takes it back.
    Random random(72);
    const Floats x = normal_vector(random, dim);
    const Floats y = rotated(x, signs);
    for (std::size_t j = 0; j < n; ++j) {
      double expected = 0;
      for (std::size_t i = 0; i < n; ++i) expected += static_cast<double>(x[i]) * column[i][j];
      REQUIRE_THAT(static_cast<double>(y[j]),
                   Catch::WithinAbs(expected, verkv::tolerance::kRotation));
      REQUIRE_THAT(dot(doubles(y), column[j]),
                   Catch::WithinAbs(static_cast<double>(x[j]), verkv::tolerance::kRotation));
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
      CHECK_THAT(dot(ra, rb), Catch::WithinAbs(dot(doubles(a), doubles(b)),
                                               verkv::tolerance::kRotationColumns * scale));
      CHECK_THAT(dot(ra, ra),
                 Catch::WithinRel(dot(doubles(a), doubles(a)), verkv::tolerance::kRotationColumns));
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
      REQUIRE(static_cast<double>(largest) <=
              std::max(one, size == dim ? 0.0 : two) * (1 + verkv::tolerance::kRotation));
    }
  }
}

}  // namespace
