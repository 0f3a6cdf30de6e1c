#include "sketch_basis.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "catch.hpp"
#include "reference/reference.hpp"
#include "reference/statistics.hpp"
#include "rotation.hpp"

namespace {

using verkv::kCoarseUnit;
using verkv::kFineUnit;
using verkv::kSketchLevels;
using verkv::Positive16;
using verkv::SketchBasis;
using verkv::SketchKind;
using verkv::SketchShape;
using verkv::reference::Random;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

constexpr int kDims[] = {1, 4, 7, 33, 64, 80, 96, 100, 112, 128, 256};

// Keys whose mean is 0 by construction of the caller.
class Keys final : public verkv::CalibrationTokens {
 public:
  std::vector<Floats> key;
  Doubles importance;

  explicit Keys(int dim) { key_dim = dim; }
  void add(Floats k, double tau = 0) {
    key.push_back(std::move(k));
    importance.push_back(tau);
    count = static_cast<std::int64_t>(key.size());
  }
  void centred_key(std::int64_t token, std::span<float> out_key) const override {
    std::copy(key[static_cast<std::size_t>(token)].begin(),
              key[static_cast<std::size_t>(token)].end(), out_key.begin());
  }
  double weight(std::int64_t token) const override {
    return importance[static_cast<std::size_t>(token)];
  }
};

Floats normal(Random& random, int dim, double size = 1) {
  Floats x;
  for (int i = 0; i < dim; ++i) x.push_back(static_cast<float>(size * random.normal()));
  return x;
}

// Coordinate i has the deviation `falloff`^i.
Floats uneven(Random& random, int dim, double falloff) {
  Floats x = normal(random, dim);
  double size = 1;
  for (float& v : x) {
    v = static_cast<float>(static_cast<double>(v) * size);
    size *= falloff;
  }
  return x;
}

Keys some_keys(Random& random, int dim, int count, double falloff) {
  Keys keys(dim);
  for (int i = 0; i < count; ++i)
    keys.add(uneven(random, dim, falloff), random.below(3) == 0 ? 0 : std::exp(random.normal()));
  return keys;
}

Floats coordinates(const SketchBasis& basis, const Floats& key) {
  Floats x;
  for (int i = 0; i < basis.shape.dim; ++i) {
    double sum = 0;
    for (std::size_t j = 0; j < key.size(); ++j)
      sum += static_cast<double>(basis.encode[static_cast<std::size_t>(i) * key.size() + j]) *
             static_cast<double>(key[j]);
    x.push_back(static_cast<float>(sum));
  }
  return x;
}

Doubles query_coordinates(const SketchBasis& basis, const Floats& q) {
  Doubles p;
  for (int i = 0; i < basis.shape.dim; ++i) {
    double sum = 0;
    for (std::size_t j = 0; j < q.size(); ++j)
      sum += static_cast<double>(
                 verkv::to_float(basis.query[static_cast<std::size_t>(i) * q.size() + j])) *
             static_cast<double>(q[j]);
    p.push_back(sum * static_cast<double>(basis.unit));
  }
  return p;
}

double unit_of(const SketchShape& shape, int coordinate) {
  return coordinate < shape.fine ? kFineUnit : kCoarseUnit;
}

double dot(const Floats& a, const Floats& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

std::vector<std::uint8_t> room_for_one(const SketchShape& shape) {
  return std::vector<std::uint8_t>(static_cast<std::size_t>(verkv::code_storage_bytes(shape, 1)),
                                   0xa5);
}

// q.k as the sketch has it, without rounding the query.
double sketched(const SketchBasis& basis, const Floats& key, const Floats& q) {
  auto codes = room_for_one(basis.shape);
  const Floats x = coordinates(basis, key);
  const Positive16 scale =
      verkv::encode_key(basis.shape, kSketchLevels, basis.bands, x, codes.data(), 0);
  const Doubles p = query_coordinates(basis, q);
  double sum = 0;
  for (int i = 0; i < basis.shape.dim; ++i) {
    sum += p[static_cast<std::size_t>(i)] *
           (kSketchLevels.byte_of(basis.shape, i,
                                  verkv::unpack_code(basis.shape, codes.data(), 0, i)) -
            127);
  }
  return sum * static_cast<double>(verkv::to_float(scale));
}

// ---- The basis ----

TEST_CASE("a basis spends no more bits than asked for, in whole blocks") {
  Random random(1);
  for (const int dim : kDims) {
    for (const int bits : {2, 3, 4}) {
      for (const double falloff : {1.0, 0.9, 0.5}) {
        const SketchBasis basis =
            verkv::calibrate_sketch(bits, some_keys(random, dim, 200, falloff), {}, 3);
        const SketchShape& s = basis.shape;
        INFO("dim " << dim << ", bits " << bits << ", falloff " << falloff << ": " << s.fine
                    << " of " << s.dim);
        CHECK(4 * s.fine + 2 * (s.dim - s.fine) <= bits * dim);
        CHECK((s.fine % 16 == 0 || s.fine == dim));
        CHECK(s.dim >= 1);
        CHECK(s.dim <= dim);
        CHECK(s.fine <= s.dim);
        CHECK(basis.encode.size() == static_cast<std::size_t>(s.dim * dim));
        CHECK(basis.query.size() == basis.encode.size());
        const SketchShape most = verkv::largest_sketch_shape(SketchKind::calibrated, bits, dim);
        CHECK(s.dim <= most.dim);
        CHECK(s.fine <= most.fine);
      }
    }
  }
}

TEST_CASE("where nothing is dropped, products are those of keys and queries") {
  Random random(2);
  for (const int dim : kDims) {
    const Keys keys = some_keys(random, dim, 300, 0.95);
    Floats queries;
    for (int i = 0; i < 40; ++i) {
      const Floats q = uneven(random, dim, 0.97);
      queries.insert(queries.end(), q.begin(), q.end());
    }
    const SketchBasis basis = verkv::calibrate_sketch(4, keys, queries, 3);
    REQUIRE(basis.shape.dim == dim);
    for (int trial = 0; trial < 20; ++trial) {
      const Floats& k = keys.key[static_cast<std::size_t>(trial)];
      const Floats q = normal(random, dim);
      const Floats x = coordinates(basis, k);
      const Doubles p = query_coordinates(basis, q);
      double product = 0;
      double parts = 0;
      for (int i = 0; i < dim; ++i) {
        const double part = p[static_cast<std::size_t>(i)] *
                            static_cast<double>(x[static_cast<std::size_t>(i)]) /
                            unit_of(basis.shape, i);
        product += part;
        double entries = 0;
        for (int j = 0; j < dim; ++j)
          entries += std::fabs(static_cast<double>(verkv::to_float(
                                   basis.query[static_cast<std::size_t>(i * dim + j)])) *
                               static_cast<double>(q[static_cast<std::size_t>(j)]));
        parts += static_cast<double>(basis.unit) * entries *
                 std::fabs(static_cast<double>(x[static_cast<std::size_t>(i)])) /
                 unit_of(basis.shape, i);
      }
      INFO("dim " << dim << ", trial " << trial);
      // The query's matrix has 11 bits, everything else is better.
      CHECK(std::fabs(product - dot(q, k)) <= 1.1 * 0x1p-12 * 2 * parts + 1e-30);
    }
  }
}

TEST_CASE("equal input gives an equal basis, another seed another rotation") {
  Random random(3);
  const Keys keys = some_keys(random, 64, 100, 0.9);
  const SketchBasis a = verkv::calibrate_sketch(2, keys, {}, 1);
  const SketchBasis b = verkv::calibrate_sketch(2, keys, {}, 1);
  const SketchBasis c = verkv::calibrate_sketch(2, keys, {}, 2);
  CHECK(a.encode == b.encode);
  CHECK(a.encode != c.encode);
  CHECK(std::equal(a.query.begin(), a.query.end(), b.query.begin(), b.query.end(),
                   [](verkv::Half x, verkv::Half y) { return x.bits == y.bits; }));
}

TEST_CASE("even keys get the same bits everywhere, uneven ones do not") {
  Random random(4);
  CHECK(verkv::calibrate_sketch(2, some_keys(random, 128, 20000, 1.0), {}, 1).shape.fine == 0);
  CHECK(verkv::calibrate_sketch(2, some_keys(random, 128, 20000, 0.9), {}, 1).shape.fine >= 16);
  // A few tokens are no reason to drop anything of those to come.
  CHECK(verkv::calibrate_sketch(2, some_keys(random, 128, 8, 0.9), {}, 1).shape.fine == 0);
}

// Mean square error of q.k over normal keys and queries against what the levels promise: the
// variance of each direction times the error of its quantiser, 1 where it is dropped.
TEST_CASE("the error on uneven keys is that of theory, and far below that of a random rotation") {
  Random random(5);
  for (const int dim : {64, 128, 256}) {
    const double falloff = std::pow(0.02, 1.0 / dim);
    const Keys keys = some_keys(random, dim, 4000, falloff);
    for (const int bits : {2, 3}) {
      const SketchBasis basis = verkv::calibrate_sketch(bits, keys, {}, 1);
      double theory = 0;
      double total = 0;
      for (int i = 0; i < dim; ++i) {
        const double variance = std::pow(falloff, 2 * i);
        const int fine = basis.shape.fine;
        theory += variance * (i < fine ? 0.009497 : i < basis.shape.dim ? 0.1175 : 1.0);
        total += variance;
      }
      double error = 0;
      constexpr int trials = 4000;
      for (int t = 0; t < trials; ++t) {
        const Floats k = uneven(random, dim, falloff);
        const Floats q = normal(random, dim);
        const double off = sketched(basis, k, q) - dot(q, k);
        error += off * off / trials;
      }
      INFO("dim " << dim << ", bits " << bits << ", fine " << basis.shape.fine << ": " << error
                  << " against " << theory << " of theory");
      // No code of a normal variable has less error than 2^(-2 rate), the 16 bits of the scale
      // included. Above: the mean of 4000 squares of normal variables has a deviation of
      // sqrt(2 / 4000) = 2.2 %, the length instead of the least-squares fit costs a few percent,
      // and one scale for two bands less than the search for it gains. A random rotation at 2 bits
      // has 0.1175 of the total.
      const double least = std::pow(2.0, -32.0 / basis.shape.dim);
      double bound = 0;
      for (int i = 0; i < dim; ++i) {
        const double rate = i < basis.shape.fine ? 4 : i < basis.shape.dim ? 2 : 0;
        bound += std::pow(falloff, 2 * i) * std::pow(2.0, -2 * rate) * (rate > 0 ? least : 1.0);
      }
      CHECK(error > bound);
      CHECK(error < 1.15 * theory);
      if (bits == 2) CHECK(error < 0.5 * 0.1175 * total);
    }
  }
}

TEST_CASE("what the prompt's queries look at is kept, what keys alone suggest may be dropped") {
  // Strong directions 0 to 31, weak ones after; the queries see four of the weak ones.
  Random random(6);
  const int dim = 64;
  Keys keys(dim);
  for (int i = 0; i < 2000; ++i) {
    Floats k = normal(random, dim);
    for (int j = 32; j < dim; ++j) k[static_cast<std::size_t>(j)] *= 0.3f;
    keys.add(std::move(k));
  }
  Floats queries;
  for (int i = 0; i < 64; ++i) {
    Floats q = normal(random, dim, 30);
    for (int j = 0; j < 60; ++j) q[static_cast<std::size_t>(j)] = 0;
    queries.insert(queries.end(), q.begin(), q.end());
  }
  const SketchBasis blind = verkv::calibrate_sketch(2, keys, {}, 1);
  const SketchBasis seeing = verkv::calibrate_sketch(2, keys, queries, 1);
  double blind_error = 0;
  double seeing_error = 0;
  for (int i = 0; i < 200; ++i) {
    const Floats q(queries.begin() + i % 64 * dim, queries.begin() + (i % 64 + 1) * dim);
    const Floats& k = keys.key[static_cast<std::size_t>(i)];
    blind_error += std::pow(sketched(blind, k, q) - dot(q, k), 2);
    seeing_error += std::pow(sketched(seeing, k, q) - dot(q, k), 2);
  }
  INFO(blind_error << " without queries, " << seeing_error << " with them");
  CHECK(seeing_error < 0.5 * blind_error);
}

TEST_CASE("a key in directions that are dropped leaves no trace: the sketch's worst case") {
  Random random(7);
  const int dim = 64;
  const Keys keys = some_keys(random, dim, 4000, 0.8);
  const SketchBasis basis = verkv::calibrate_sketch(2, keys, {}, 1);
  REQUIRE(basis.shape.fine >= 16);
  REQUIRE(basis.shape.dim < dim);
  // The part of the last unit vector that no stored coordinate sees.
  Floats needle(dim, 0.0f);
  needle[dim - 1] = 1;
  const Floats x = coordinates(basis, needle);
  double seen = 0;
  for (int i = 0; i < basis.shape.dim; ++i) {
    seen = std::max(seen,
                    std::fabs(static_cast<double>(x[static_cast<std::size_t>(i)])) *
                        std::fabs(query_coordinates(basis, needle)[static_cast<std::size_t>(i)]) /
                        unit_of(basis.shape, i));
  }
  CHECK(seen < 0.05);
  for (float& v : needle) v *= 100;
  const double product = dot(needle, needle);
  CHECK(std::fabs(sketched(basis, needle, needle)) < 0.7 * product);
}

// ---- Keys as other models have them ----

// Keys and queries of one head: normal, in `strong` directions `times` larger and smaller. The
// directions are channels, or turned at random with all others.
struct Outliers {
  int dim;
  int strong;
  double times;
  bool turned;

  Floats key(Random& random) const { return make(random, times); }
  Floats query(Random& random) const { return make(random, 1 / times); }

 private:
  Floats make(Random& random, double factor) const {
    Floats x = normal(random, dim);
    for (int i = 0; i < strong; ++i) {
      float& channel = x[static_cast<std::size_t>((7 + 13 * i) % dim)];
      channel = static_cast<float>(static_cast<double>(channel) * factor);
    }
    if (turned) {
      std::vector<float> signs(static_cast<std::size_t>(2 * dim));
      verkv::rotation_signs(99, dim, signs);
      verkv::rotate(x, signs);
    }
    return x;
  }
};

// Root mean square error of q.k over keys and queries that the basis has not seen.
double error_of(int bits, const Outliers& scene, Random& random) {
  Keys keys(scene.dim);
  for (int i = 0; i < 1000; ++i) keys.add(scene.key(random));
  Floats queries;
  for (int i = 0; i < 64; ++i) {
    const Floats q = scene.query(random);
    queries.insert(queries.end(), q.begin(), q.end());
  }
  const SketchBasis basis = verkv::calibrate_sketch(bits, keys, queries, 1);
  constexpr int trials = 500;
  double square = 0;
  for (int t = 0; t < trials; ++t) {
    const Floats k = scene.key(random);
    const Floats q = scene.query(random);
    square += std::pow(sketched(basis, k, q) - dot(q, k), 2) / trials;
  }
  return std::sqrt(square);
}

// What the best quantiser of each channel by itself leaves of q.k, whose terms have variance 1, were
// the strong directions its channels: the square error of a normal variable (Max 1960) a channel. At
// 3 bits half of the directions have 4 and half 2.
double lloyd_max(int bits, int dim) {
  const double each = bits == 2 ? 0.1175 : bits == 3 ? (0.1175 + 0.009497) / 2 : 0.009497;
  return std::sqrt(each * dim);
}

TEST_CASE("a strong channel of the keys does not spoil the others, and more bits are better") {
  Random random(14);
  for (const int dim : {64, 80, 128, 256}) {
    for (const int strong : {1, 4}) {
      for (const double times : {30.0, 1000.0}) {
        double last = 1e300;
        for (const int bits : {2, 3, 4}) {
          const double error = error_of(bits, {dim, strong, times, false}, random);
          INFO("dim " << dim << ", " << strong << " channels " << times << " times, " << bits
                      << " bits: " << error << " against " << lloyd_max(bits, dim));
          // 500 squares of an error that is close to normal have a deviation of 6.3 %, their root of
          // 3.2 %.
          CHECK(error < 1.2 * lloyd_max(bits, dim));
          CHECK(error < last);
          last = error;
        }
      }
    }
  }
}

TEST_CASE("a strong direction that is no channel is found as well") {
  Random random(15);
  for (const int dim : {64, 96, 256}) {
    for (const double times : {30.0, 300.0}) {
      for (const int bits : {2, 4}) {
        const double error = error_of(bits, {dim, 2, times, true}, random);
        INFO("dim " << dim << ", " << times << " times, " << bits << " bits: " << error);
        CHECK(error < 1.2 * lloyd_max(bits, dim));
      }
    }
  }
}

TEST_CASE("without queries a strong channel is not believed to make the logits") {
  // Queries as training leaves them, small where keys are large, but none is known: a direction's
  // part is taken to be at most four times the mean.
  Random random(16);
  for (const double times : {10.0, 1000.0}) {
    for (const int bits : {2, 4}) {
      const Outliers scene{64, 1, times, false};
      Keys keys(64);
      for (int i = 0; i < 2000; ++i) keys.add(scene.key(random));
      const SketchBasis basis = verkv::calibrate_sketch(bits, keys, {}, 1);
      double square = 0;
      for (int t = 0; t < 1000; ++t) {
        const Floats k = scene.key(random);
        const Floats q = scene.query(random);
        square += std::pow(sketched(basis, k, q) - dot(q, k), 2) / 1000;
      }
      INFO(times << " times, " << bits << " bits: " << std::sqrt(square));
      CHECK(std::sqrt(square) < 1.4 * lloyd_max(bits, 64));
    }
  }
}

TEST_CASE("keys along one direction, keys whose mean drifts") {
  Random random(17);
  const int dim = 64;
  for (const int bits : {2, 3, 4}) {
    for (const bool drifts : {false, true}) {
      const Floats along = normal(random, dim);
      const auto key = [&](int i) {
        // One direction and a little of the others; or a mean that goes ten deviations far.
        Floats k = normal(random, dim, drifts ? 1 : 0.05);
        const double far = drifts ? std::sin(0.002 * i) * 10 : random.normal() * 3;
        for (int j = 0; j < dim; ++j)
          k[static_cast<std::size_t>(j)] +=
              static_cast<float>(far) * along[static_cast<std::size_t>(j)];
        return k;
      };
      Keys keys(dim);
      for (int i = 0; i < 2000; ++i) keys.add(key(i));
      Floats queries;
      for (int i = 0; i < 64; ++i) {
        const Floats q = normal(random, dim);
        queries.insert(queries.end(), q.begin(), q.end());
      }
      const SketchBasis basis = verkv::calibrate_sketch(bits, keys, queries, 1);
      double square = 0;
      double size = 0;
      for (int t = 0; t < 500; ++t) {
        const Floats k = key(4 * t);
        const Floats q = normal(random, dim);
        square += std::pow(sketched(basis, k, q) - dot(q, k), 2) / 500;
        size += dot(q, k) * dot(q, k) / 500;
      }
      INFO(bits << " bits, " << (drifts ? "drifting" : "one direction") << ": " << square << " of "
                << size);
      // Nearly all of the logits' variance is one direction's, which has 4 bits at least and shares
      // their error with 15 others. An even sketch leaves 0.1175 of it at 2 bits.
      CHECK(square < 0.02 * size);
    }
  }
}

// ---- Encoding ----

TEST_CASE("codes are the nearest levels at the best of the trial scales, for keys of any kind") {
  Random random(8);
  for (const int dim : {64, 80, 96, 100, 112, 128, 256}) {
    for (const int bits : {2, 3, 4}) {
      const SketchBasis basis =
          verkv::calibrate_sketch(bits, some_keys(random, dim, 500, 0.95), {}, 1);
      const SketchShape& shape = basis.shape;
      auto codes = room_for_one(shape);
      for (int trial = 0; trial < 40; ++trial) {
        const double size = trial % 4 == 0 ? 1e4 : trial % 4 == 1 ? 1e-6 : 1.0;
        Floats key = uneven(random, dim, 0.95);
        for (float& v : key) v *= static_cast<float>(size);
        if (trial % 5 == 0) std::fill(key.begin(), key.end(), static_cast<float>(size));
        if (trial % 5 == 1) key[3] *= 1000;
        const Floats x = coordinates(basis, key);
        const Positive16 stored =
            verkv::encode_key(shape, kSketchLevels, basis.bands, x, codes.data(), 0);

        // Brute force in double: levels by distance, explained square by trial scale.
        const auto band = [&](int i) {
          return static_cast<double>(i < shape.fine ? basis.bands.fine_square
                                                    : basis.bands.coarse_square);
        };
        double square = 0;
        double yy = 0;
        for (int i = 0; i < shape.dim; ++i) {
          const double v = static_cast<double>(x[static_cast<std::size_t>(i)]);
          square += v * v;
          yy += band(i) * v * v;
        }
        const double rms = std::sqrt(square / shape.dim);
        const auto byte_at = [&](int i, double scale) {
          const int count = i < shape.fine ? 16 : 4;
          int best = 0;
          const double v = static_cast<double>(x[static_cast<std::size_t>(i)]) / scale;
          const double* positive = i < shape.fine ? verkv::kLloydMax4 : verkv::kLloydMax2;
          double nearest = 1e300;
          for (int code = 0; code < count; ++code) {
            const int half = count / 2;
            const double exact = code < half ? -positive[half - 1 - code] : positive[code - half];
            if (std::fabs(v - exact) < nearest) {
              nearest = std::fabs(v - exact);
              best = i < shape.fine ? kSketchLevels.byte[code] : kSketchLevels.coarse_byte[code];
            }
          }
          return best - 127;
        };
        double best = 0;
        for (int trial_scale = 0; trial_scale < verkv::kScaleTrials; ++trial_scale) {
          const float t = verkv::scale_trial(trial_scale);
          double yz = 0;
          double zz = 0;
          for (int i = 0; i < shape.dim; ++i) {
            const double z = unit_of(shape, i) * byte_at(i, rms * static_cast<double>(t));
            yz += band(i) * z * static_cast<double>(x[static_cast<std::size_t>(i)]);
            zz += band(i) * z * z;
          }
          if (yz > 0) best = std::max(best, yz * yz / zz);
        }
        double yz = 0;
        double zz = 0;
        for (int i = 0; i < shape.dim; ++i) {
          const double z =
              unit_of(shape, i) *
              (kSketchLevels.byte_of(shape, i, verkv::unpack_code(shape, codes.data(), 0, i)) -
               127);
          yz += band(i) * z * static_cast<double>(x[static_cast<std::size_t>(i)]);
          zz += band(i) * z * z;
        }
        INFO("dim " << dim << ", bits " << bits << ", trial " << trial);
        // Sums in binary32 may choose another trial that is as good to within their rounding, and a
        // coordinate on a border may go to either side.
        REQUIRE(yz * yz / zz >= best * (1 - 1e-4));
        REQUIRE_THAT(static_cast<double>(verkv::to_float(stored)),
                     Catch::WithinRel(std::sqrt(yy / zz), 0x1p-9 + 1e-5));
      }
    }
  }
}

TEST_CASE("keys all alike, all zero, one, and what is not a number") {
  for (const int dim : {1, 64, 100}) {
    for (const int count : {1, 50}) {
      Keys keys(dim);
      for (int i = 0; i < count; ++i) keys.add(Floats(static_cast<std::size_t>(dim), 0.0f));
      const SketchBasis basis = verkv::calibrate_sketch(2, keys, {}, 1);
      CHECK(sketched(basis, keys.key[0], Floats(static_cast<std::size_t>(dim), 1.0f)) == 0);
      for (const float v : basis.encode) REQUIRE(std::isfinite(v));
      for (const verkv::Half v : basis.query) REQUIRE(std::isfinite(verkv::to_float(v)));
      // A key unlike all that were seen is still estimated from its stored coordinates.
      Random random(9);
      const Floats other = normal(random, dim);
      CHECK(std::isfinite(sketched(basis, other, other)));
      if (basis.shape.dim == dim) CHECK(sketched(basis, other, other) > 0);
    }
  }
  Random random(10);
  Keys keys = some_keys(random, 64, 50, 0.9);
  const SketchBasis good = verkv::calibrate_sketch(2, keys, {}, 1);
  Floats bad = keys.key[0];
  bad[7] = std::numeric_limits<float>::quiet_NaN();
  CHECK(std::isnan(sketched(good, bad, keys.key[0])));
  // Differences beyond binary32 end as keys that are not numbers: never certified.
  keys.key[3][5] = std::numeric_limits<float>::infinity();
  const SketchBasis broken = verkv::calibrate_sketch(2, keys, {}, 1);
  CHECK(std::isnan(sketched(broken, keys.key[0], keys.key[0])));
}

// Mean square error of q.k over |q|^2 |k|^2 / dim, for keys of the generator that come later.
template <class Generate>
double later_error(const SketchBasis& basis, Random& random, Generate&& generate) {
  double error = 0;
  double size = 0;
  for (int i = 0; i < 400; ++i) {
    const Floats k = generate();
    const Floats q = normal(random, static_cast<int>(k.size()));
    error += std::pow(sketched(basis, k, q) - dot(q, k), 2);
    size += dot(k, k);
  }
  return error / size;
}

TEST_CASE("a basis made of few tokens serves those to come") {
  Random random(12);
  for (const int dim : {64, 128, 256}) {
    for (const int bits : {2, 3}) {
      for (const int count : {1, 2, 10, dim / 2, dim}) {
        Keys keys(dim);
        for (int i = 0; i < count; ++i) keys.add(normal(random, dim));
        const double error = later_error(verkv::calibrate_sketch(bits, keys, {}, 1), random,
                                         [&] { return normal(random, dim); });
        INFO("dim " << dim << ", bits " << bits << ", made of " << count << ": " << error);
        // Even keys: 0.1175 at 2 bits everywhere, half of it and half of 0.0095 at 3; the scale
        // that keeps the length and units off by a factor below 2 cost no more than half again.
        CHECK(error < 1.5 * (bits == 2 ? 0.1175 : 0.0635));
      }
    }
  }
}

TEST_CASE("channels without life cost nothing, whatever the unit of the keys") {
  Random random(13);
  for (const int dim : {64, 128, 256}) {
    for (const float size : {1e-21f, 1e-6f, 0.01f, 1.0f, 100.0f}) {
      const auto generate = [&] {
        Floats k = normal(random, dim);
        for (int j = 0; j < dim; ++j) k[static_cast<std::size_t>(j)] *= j < dim / 8 ? size : 0.0f;
        return k;
      };
      Keys keys(dim);
      for (int i = 0; i < 2000; ++i) keys.add(generate());
      const double error = later_error(verkv::calibrate_sketch(2, keys, {}, 1), random, generate);
      INFO("dim " << dim << ", size " << size << ": " << error);
      // All of the energy is in coordinates of 4 bits, 0.0095; a random rotation has 0.1175.
      CHECK(error < 0.03);
    }
  }
}

TEST_CASE("queries of any size, zeros included, make a basis") {
  Random random(11);
  const Keys keys = some_keys(random, 64, 200, 0.9);
  const SketchBasis none = verkv::calibrate_sketch(2, keys, {}, 1);
  CHECK(verkv::calibrate_sketch(2, keys, Floats(64 * 8, 0.0f), 1).encode == none.encode);
  Floats queries = normal(random, 64 * 8);
  const SketchBasis one = verkv::calibrate_sketch(2, keys, queries, 1);
  for (const float size : {1e-30f, 1e30f}) {
    Floats sized = queries;
    for (float& v : sized) v *= size;
    const SketchBasis other = verkv::calibrate_sketch(2, keys, sized, 1);
    CHECK(other.shape.fine == one.shape.fine);
    for (const float v : other.encode) REQUIRE(std::isfinite(v));
    const double a = sketched(one, keys.key[0], keys.key[1]);
    CHECK_THAT(sketched(other, keys.key[0], keys.key[1]),
               Catch::WithinAbs(a, 0.2 * std::sqrt(dot(keys.key[0], keys.key[0]) *
                                                   dot(keys.key[1], keys.key[1]))));
  }
}

}  // namespace
