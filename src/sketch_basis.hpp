// The basis of a calibrated sketch: which directions of a head's keys carry the logits, and how
// many bits each gets. docs/math/sketch.md has the derivation and what was measured.
#ifndef VERKV_SRC_SKETCH_BASIS_HPP
#define VERKV_SRC_SKETCH_BASIS_HPP

#include <cstdint>
#include <span>
#include <vector>

#include <verkv/config.hpp>
#include <verkv/sketch.hpp>
#include <verkv/types.hpp>

namespace verkv {

// With y = encode (k - mean), in units of its bands' root mean squares, and p = query q:
// q.(k - mean) is about unit * p.z, z the levels (byte - 127) of y times the token's scale.
struct SketchBasis {
  SketchShape shape;  // dim: rows of both matrices
  SketchBands bands;
  float unit = 1;
  std::vector<float> encode;  // [shape.dim][key dim]; only compression reads it: main memory
  std::vector<Half> query;    // [shape.dim][key dim], largest entry about 1; every step: fast tier
};

// The most coordinates and code bytes a basis of that many bits can have; exact: no codes.
VERKV_API SketchShape largest_sketch_shape(SketchKind kind, int bits, int key_dim);

// What calibrate_sketch is given of one head.
struct CalibrationTokens {
  int key_dim = 0;
  std::int64_t count = 0;
  // Fills one row, the token's key less the channel means.
  virtual void centred_key(std::int64_t token, std::span<float> out_key) const = 0;
  // Share of the token in the covariance beside its equal share: its importance where it may be
  // missing from the fast tier, 0 where it is always resident. Not normalised.
  virtual double weight(std::int64_t token) const = 0;

 protected:
  ~CalibrationTokens() = default;
};

// Makes the basis.
//   C = (1 - a) E[q q^T] + a model over the queries, a >= 1/2; the model is diagonal in the
//   principal directions of the keys
//   covariance of C^(1/2) k, half over all tokens alike, half by weight; its eigenvectors,
//   strongest first; as many coordinates at 4 bits as make the expected square error of a logit
//   least at `bits` a coordinate in all; units in which keys and queries are equally large; a
//   random rotation inside each band.
// queries: [count][key_dim], row after row, of the group's heads together. out_leading: if not
// null, the `leading` strongest of these directions, before the rotation, as leading_directions
// gives them. In double; deterministic. Allocates.
VERKV_API SketchBasis calibrate_sketch(int bits, const CalibrationTokens& tokens,
                                       std::span<const float> queries, std::uint64_t seed,
                                       int leading = 0, std::vector<float>* out_leading = nullptr);

// The leading principal directions of the tokens, [key_dim][min(count, key_dim)], in the unit in
// which the coordinates along them have a root mean square of `size` together; 0 where all tokens
// are alike. Allocates.
VERKV_API std::vector<float> leading_directions(const CalibrationTokens& tokens, int count,
                                                double size);

}  // namespace verkv

#endif  // VERKV_SRC_SKETCH_BASIS_HPP
