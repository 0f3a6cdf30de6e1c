// The estimate by clusters: compressed tokens stand in an order in which neighbours are alike, and
// kClusterTokens neighbours are a cluster. The sketch knows what a cluster weighs. Drawn tokens are
// known and count themselves. What the others add is predicted: drawn tokens say how values are
// mixed, and the centroid, the mean of the cluster's values, stands for what they may have missed.
// docs/math/clusters.md.
//
// Over the tokens of L in a cluster that are not fetched, with sketched weights w_i; over those of
// them that are drawn, with coefficients c_i (shrinkage.hpp) and exact weights v_i:
//
//   U = sum of w_i that are not drawn   x_i = max(0, c_i - 1) w_i   y_i = max(0, c_i - 1) v_i  (1)
//   n = min(1, sum x / U) (sum x)^2 / sum x^2       p = n / (n + 1)                            (2)
//   a drawn token counts v_i + p (U / sum x) y_i, the centroid (1 - p) U                       (3)
//
// (sum x)^2 / sum x^2 is the number of tokens that the sample is worth; n is less where it has
// missed most of what is not drawn, and 0 where nothing was drawn. With K = sum v over all clusters
// and P for all that is predicted, P is multiplied so that K + P is the nearest number, not below K,
// to what the certificate leaves to the plain estimate of D over L, sum c v:
//
//   |D_L - sum c v| <= bound D                                                                 (4)
//
// The error of the output is estimated as if the values of a cluster differed from its centroid in
// independent directions, each by the cluster's spread s, the root mean square of their distances
// from it: with e_i for what is predicted by a drawn token,
//
//   (D error / kErrorScale)^2 =
//       sum over clusters of  s^2 (sum over drawn of e_i^2 + sum over the others of w_i^2)     (5)
//
// Where drawn tokens say that the sketch is useless (sketch_error.hpp), or no cluster weighs
// anything, clusters know nothing, and the plain estimate is used.
//
// Dialect: src/cpu/simd/weights-inl.hpp: beyond_itself
// Dialect: src/cpu/simd/weights-inl.hpp: capped_square
#ifndef VERKV_CLUSTERS_HPP
#define VERKV_CLUSTERS_HPP

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include <verkv/config.hpp>

namespace verkv {

// Fewer tokens are more alike, and their centroids take more: 1 / (2 * 64) of a cache whose keys
// and values have one size.
inline constexpr std::int64_t kClusterTokens = 64;

// Clusters of so many tokens; the last one may not be full.
VERKV_HD constexpr std::int64_t clusters_of(std::int64_t tokens) {
  return (tokens + kClusterTokens - 1) / kClusterTokens;
}

// c_i v_i as it is counted: at most this, so that no sum overflows. Without a cap on exact weights
// (shrinkage.hpp) a token whose sketch was wildly wrong gets there.
inline constexpr float kMostClusterTerm = 1e30f;
VERKV_HD constexpr float cluster_term(float cv) {
  return cv > kMostClusterTerm ? kMostClusterTerm : cv;
}

// max(0, c - 1) w of (1), from c w.
VERKV_HD constexpr float beyond_itself(float cw, float w) { return cw > w ? cw - w : 0.0f; }

// U of (1) from the sketched weights of a cluster and of its drawn tokens. A part of the whole that
// rounding can make counts as nothing.
inline constexpr float kLeastRest = 0x1p-20f;
VERKV_HD constexpr float cluster_rest(float weight, float drawn) {
  const float rest = weight - drawn;
  return rest > kLeastRest * weight ? rest : 0.0f;
}

// The sum of w^2 over those not drawn, from U and from the sums over all and over the drawn. Where
// the difference drowns in rounding, at most as much as one token of weight U gives.
VERKV_HD constexpr float cluster_rest_square(float rest, float square, float drawn_square) {
  const float difference = square - drawn_square;
  const float least = kLeastRest * square;
  const float most = rest * rest;
  const float found = difference > least ? difference : least;
  return found < most ? found : most;
}

// What (3) makes of a cluster.
struct ClusterShare {
  float drawn = 0;     // a drawn token counts so many times its y; at most kClusterTokens
  float centroid = 0;  // what the centroid counts
};

// rest: U. sum, square: of x over drawn tokens. Squares that binary32 does not hold count as
// nothing drawn.
VERKV_HD constexpr ClusterShare cluster_share(float rest, float sum, float square) {
  if (!(square >= std::numeric_limits<float>::min())) return {0, rest};
  const float size = sum / square * sum;
  if (sum < rest) {
    // p U / sum x, without a quotient that could overflow.
    const float n = sum / rest * size;
    return {size / (n + 1), rest / (n + 1)};
  }
  return {size / (size + 1) * (rest / sum), rest / (size + 1)};
}

// By which all that is predicted is multiplied for (4). predicted: P. known: K. plain: sum c v over
// all of L. slack: bound * D; infinite where there is no bound.
VERKV_HD inline double cluster_correction(double predicted, double known, double plain,
                                          double slack) {
  if (!(predicted > 0) || !(slack < std::numeric_limits<double>::infinity())) return 1;
  const double least = plain - slack - known;
  const double most = plain + slack - known;
  // So much that binary32 holds it: where nearly nothing is predicted it cannot make up for much.
  if (predicted < least) return std::min(least / predicted, 1e30);
  return predicted > most ? (most > 0 ? most / predicted : 0) : 1;
}

// Values that are alike in a cluster are not independent: on recordings of a model the error was
// this much larger (docs/math/clusters.md).
inline constexpr double kErrorScale = 1.4;

// The largest spread and weight whose squares (5) sums: no square overflows, and so no product is
// infinity times 0.
inline constexpr float kMostSpread = 1e18f;

// e^2, of a number that is not negative.
VERKV_HD constexpr float capped_square(float e) {
  return e > kMostSpread ? kMostSpread * kMostSpread : e * e;
}

// (5). error_square: the sum.
VERKV_HD inline double output_error(double error_square, double denominator) {
  return kErrorScale * std::sqrt(error_square) / denominator;
}

}  // namespace verkv

#endif  // VERKV_CLUSTERS_HPP
