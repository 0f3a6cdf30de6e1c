// The estimate by clusters: compressed tokens stand in an order in which neighbours are alike, and
// kClusterTokens neighbours are a cluster. The sketch knows what a cluster weighs. Its drawn tokens
// say how its values are mixed, and its centroid, the mean of its values, stands for what they may
// have missed. docs/math/clusters.md.
//
// Over the tokens of L in a cluster that are not fetched, with sketched weights w_i; over those of
// them that are drawn, with coefficients c_i (shrinkage.hpp) and exact weights v_i:
//
//   T = sum w_i       x_i = c_i w_i       y_i = c_i v_i                                        (1)
//   n = min(1, sum x / T) (sum x)^2 / sum x^2       p = n / (n + 1)                            (2)
//   a drawn token counts p (T / sum x) y_i, the centroid (1 - p) T                             (3)
//
// (sum x)^2 / sum x^2 is the number of tokens that the sample is worth; n is less where it has
// missed most of the cluster, and 0 where nothing was drawn. What (3) counts, M over all clusters,
// is moved to the nearest point of what the certificate leaves to the plain estimate of D over L,
// sum y:
//
//   |D_L - sum y| <= bound D                                                                   (4)
//
// The error of the output is estimated as if the values of a cluster differed from its centroid in
// independent directions, each by the cluster's spread s, the root mean square of their distances
// from it: with a_i for what a drawn token counts by (3),
//
//   (D error / kErrorScale)^2 =
//       sum over clusters of  s^2 (sum over drawn of (a_i - v_i)^2 + sum over all of w_i^2)    (5)
//
// Where drawn tokens say that the sketch is useless (sketch_error.hpp), or T is 0 in all clusters,
// clusters know nothing, and the plain estimate is used.
//
// Dialect: src/cpu/simd/weights-inl.hpp: distance_square
#ifndef VERKV_CLUSTERS_HPP
#define VERKV_CLUSTERS_HPP

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

// y_i as it is counted: at most this, so that no sum overflows. Without a cap on exact weights
// (shrinkage.hpp) a token whose sketch was wildly wrong gets there.
inline constexpr float kMostClusterTerm = 1e30f;
VERKV_HD constexpr float cluster_term(float y) {
  return y > kMostClusterTerm ? kMostClusterTerm : y;
}

// What (3) makes of a cluster.
struct ClusterShare {
  float drawn = 0;     // a drawn token counts so many times its y; at most kClusterTokens
  float centroid = 0;  // what the centroid counts
};

// weight: T. sum, square: of x over drawn tokens. Squares that binary32 does not hold count as
// nothing drawn.
VERKV_HD constexpr ClusterShare cluster_share(float weight, float sum, float square) {
  if (!(square >= std::numeric_limits<float>::min())) return {0, weight};
  const float size = sum / square * sum;
  if (sum < weight) {
    // p T / sum x, without a quotient that could overflow.
    const float n = sum / weight * size;
    return {size / (n + 1), weight / (n + 1)};
  }
  return {size / (size + 1) * (weight / sum), weight / (size + 1)};
}

// By which all that clusters count is multiplied for (4). mass: M. plain: sum y over all of L.
// slack: bound * D; infinite where there is no bound.
VERKV_HD inline double cluster_correction(double mass, double plain, double slack) {
  if (!(mass > 0) || !(slack < std::numeric_limits<double>::infinity())) return 1;
  const double least = plain - slack;
  const double most = plain + slack;
  return mass < least ? least / mass : mass > most ? most / mass : 1;
}

// Values that are alike in a cluster are not independent: on recordings of a model the error was
// this much larger (docs/math/clusters.md).
inline constexpr double kErrorScale = 1.25;

// The largest spread and distance of weights whose squares (5) sums: no square overflows, and so no
// product is infinity times 0.
inline constexpr float kMostSpread = 1e18f;

// (a - v)^2.
VERKV_HD constexpr float distance_square(float a, float v) {
  const float off = a > v ? a - v : v - a;
  return off > kMostSpread ? kMostSpread * kMostSpread : off * off;
}

// (5). error_square: the sum.
VERKV_HD inline double output_error(double error_square, double denominator) {
  return kErrorScale * std::sqrt(error_square) / denominator;
}

}  // namespace verkv

#endif  // VERKV_CLUSTERS_HPP
