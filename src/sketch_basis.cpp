#include "sketch_basis.hpp"

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <cstddef>

#include "rotation.hpp"

namespace verkv {
namespace {

using Eigen::Index;
using Matrix = Eigen::MatrixXd;
using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// Share of the isotropic part in the queries' second moments: what keeps a direction that the
// prompt's queries did not look at from being thrown away.
constexpr double kIsotropic = 0.8;
// Square error of a normal coordinate of variance 1 at 4, 2 and 0 bits (Max 1960).
constexpr double kFineError = 0.009497;
constexpr double kCoarseError = 0.1175;
// A whole block of the kernels.
constexpr int kFineBlock = 16;

int coarse_dims(int bits, int key_dim, int fine) {
  return std::min(key_dim - fine, (bits * key_dim - 4 * fine) / 2);
}

// Calls f(fine, coarse) for each way to spend the bits.
template <class F>
void each_split(int bits, int key_dim, F&& f) {
  if (bits == 4) return f(key_dim, 0);
  for (int fine = 0; fine <= key_dim && 4 * fine <= bits * key_dim; fine += kFineBlock)
    f(fine, coarse_dims(bits, key_dim, fine));
}

// Square root of a symmetric positive definite matrix and its inverse.
struct Roots {
  Matrix root;
  Matrix inverse;
};

Roots query_roots(std::span<const float> queries, Index dim) {
  const Index count = static_cast<Index>(queries.size()) / dim;
  Matrix moments = Matrix::Zero(dim, dim);
  if (count > 0) {
    const Eigen::Map<const Rows> q(queries.data(), count, dim);
    // Relative to the largest entry, so that neither squares nor their sum leave the range.
    const double largest = static_cast<double>(q.cwiseAbs().maxCoeff());
    if (largest > 0) {
      const Matrix scaled = q.cast<double>() / largest;
      moments.noalias() = scaled.transpose() * scaled / static_cast<double>(count);
    }
  }
  const double even = moments.trace() / static_cast<double>(dim);
  if (!(even > 0)) return {Matrix::Identity(dim, dim), Matrix::Identity(dim, dim)};
  moments = (1 - kIsotropic) / even * moments;
  moments.diagonal().array() += kIsotropic;
  const Eigen::SelfAdjointEigenSolver<Matrix> solved(moments);
  const Eigen::VectorXd root = solved.eigenvalues().cwiseMax(kIsotropic / 2).cwiseSqrt();
  const Matrix& u = solved.eigenvectors();
  return {u * root.asDiagonal() * u.transpose(),
          u * root.cwiseInverse().asDiagonal() * u.transpose()};
}

// Weighted second moments of the centred keys: half alike, half by weight. Relative to
// `size` squared, their largest entry.
Matrix key_moments(const CalibrationTokens& tokens, double size) {
  const Index dim = tokens.key_dim;
  double total = 0;
  for (std::int64_t i = 0; i < tokens.count; ++i) total += tokens.weight(i);
  const double alike = (total > 0 ? 0.5 : 1.0) / static_cast<double>(tokens.count);
  Matrix sum = Matrix::Zero(dim, dim);
  constexpr std::int64_t kBlock = 256;
  Rows block(std::min(kBlock, tokens.count), dim);
  std::vector<float> key(static_cast<std::size_t>(dim));
  for (std::int64_t begin = 0; begin < tokens.count; begin += kBlock) {
    const std::int64_t rows = std::min(kBlock, tokens.count - begin);
    for (std::int64_t i = 0; i < rows; ++i) {
      tokens.centred_key(begin + i, key);
      const double by_weight = total > 0 ? 0.5 * tokens.weight(begin + i) / total : 0.0;
      const double factor = std::sqrt((alike + by_weight) * static_cast<double>(tokens.count));
      for (Index j = 0; j < dim; ++j) {
        block(static_cast<Index>(i), j) = static_cast<float>(
            factor * static_cast<double>(key[static_cast<std::size_t>(j)]) / size);
      }
    }
    const auto used = block.topRows(static_cast<Index>(rows));
    const Eigen::MatrixXf product = used.transpose() * used;
    sum += product.cast<double>();
  }
  return sum / static_cast<double>(tokens.count);
}

double largest_entry(const CalibrationTokens& tokens) {
  std::vector<float> key(static_cast<std::size_t>(tokens.key_dim));
  float largest = 0;
  for (std::int64_t i = 0; i < tokens.count; ++i) {
    tokens.centred_key(i, key);
    for (const float x : key) largest = std::max(largest, std::fabs(x));
  }
  return static_cast<double>(largest);
}

// Rotates the rows [begin, begin + rows) of a matrix among themselves.
void rotate_rows(Matrix& m, Index begin, Index rows, std::uint64_t seed) {
  if (rows == 0) return;
  std::vector<float> signs(static_cast<std::size_t>(2 * rows));
  rotation_signs(seed, static_cast<int>(rows), signs);
  std::vector<float> column(static_cast<std::size_t>(rows));
  // The rotation as a matrix, column by column, applied in double.
  Matrix rotation(rows, rows);
  for (Index j = 0; j < rows; ++j) {
    std::fill(column.begin(), column.end(), 0.0f);
    column[static_cast<std::size_t>(j)] = 1;
    rotate(column, signs);
    for (Index i = 0; i < rows; ++i)
      rotation(i, j) = static_cast<double>(column[static_cast<std::size_t>(i)]);
  }
  m.middleRows(begin, rows) = (rotation * m.middleRows(begin, rows)).eval();
}

}  // namespace

SketchShape largest_sketch_shape(SketchKind kind, int bits, int key_dim) {
  if (kind == SketchKind::exact) return {kind, key_dim, 0};
  SketchShape shape;
  each_split(bits, key_dim, [&](int fine, int coarse) {
    shape.dim = std::max(shape.dim, fine + coarse);
    shape.fine = std::max(shape.fine, fine);
  });
  return shape;
}

SketchBasis calibrate_sketch(int bits, const CalibrationTokens& tokens,
                             std::span<const float> queries, std::uint64_t seed) {
  const int dim = tokens.key_dim;
  const double largest = largest_entry(tokens);
  const double size = largest > 0 ? largest : 1;
  const Roots roots = query_roots(queries, dim);
  Matrix covariance = key_moments(tokens, size);
  covariance = (roots.root * covariance * roots.root).eval();
  const Eigen::SelfAdjointEigenSolver<Matrix> solved(0.5 * (covariance + covariance.transpose()));
  // Strongest first.
  const Eigen::VectorXd variance = solved.eigenvalues().reverse().cwiseMax(0);
  const Matrix directions = solved.eigenvectors().rowwise().reverse();

  // Few tokens know little about the tokens to come: their spectrum is drawn towards an even one.
  const double doubt = static_cast<double>(dim) / static_cast<double>(dim + tokens.count);
  // Keys all alike say nothing: every direction counts the same.
  const double even = variance.mean() > 0 ? variance.mean() : 1;
  SketchBasis basis;
  double least = 0;
  each_split(bits, dim, [&](int fine, int coarse) {
    double error = 0;
    for (int j = 0; j < dim; ++j) {
      const double share = j < fine ? kFineError : j < fine + coarse ? kCoarseError : 1.0;
      error += share * ((1 - doubt) * variance(j) + doubt * even);
    }
    if (basis.shape.dim != 0 && !(error < least)) return;
    least = error;
    basis.shape.dim = fine + coarse;
    basis.shape.fine = fine;
  });
  const Index stored = basis.shape.dim;
  const Index fine = basis.shape.fine;

  Matrix encode = directions.leftCols(stored).transpose() * roots.root;
  Matrix query = directions.leftCols(stored).transpose() * roots.inverse;
  for (Matrix* m : {&encode, &query}) {
    rotate_rows(*m, 0, fine, seed);
    rotate_rows(*m, fine, stored - fine, seed);
  }

  // Each band in units of its root mean square; the units of the levels go to the query's side.
  // A band in which these tokens have next to nothing is given a share of the whole, or tokens to
  // come would be worlds away from its unit. The share goes with the square of the doubt: with many
  // tokens a weak band may be weak.
  const double share = doubt * doubt;
  const auto band = [&](Index begin, Index rows, double unit) {
    if (rows == 0) return 0.0;
    const double square = (1 - share) * variance.segment(begin, rows).mean() + share * even;
    // Neither the matrices nor their products may leave the range of binary32.
    const double rms = std::max(std::sqrt(square) * size, 1e-30);
    encode.middleRows(begin, rows) /= rms;
    query.middleRows(begin, rows) *= rms * unit;
    return rms;
  };
  const double fine_rms = band(0, fine, kFineUnit);
  const double coarse_rms = band(fine, stored - fine, kCoarseUnit);
  const double both = std::max(fine_rms, coarse_rms);
  basis.bands.fine_square = static_cast<float>(std::pow(fine_rms / both, 2));
  basis.bands.coarse_square = static_cast<float>(std::pow(coarse_rms / both, 2));
  // A band that is many times weaker than the other must not vanish from the search for a scale.
  basis.bands.fine_square = std::max(basis.bands.fine_square, 1e-20f);
  basis.bands.coarse_square = std::max(basis.bands.coarse_square, 1e-20f);

  const double top = query.size() > 0 ? query.cwiseAbs().maxCoeff() : 0;
  basis.unit = static_cast<float>(top > 0 ? top : 1);
  basis.encode.reserve(static_cast<std::size_t>(encode.size()));
  basis.query.reserve(static_cast<std::size_t>(query.size()));
  for (Index i = 0; i < stored; ++i) {
    for (Index j = 0; j < dim; ++j) {
      basis.encode.push_back(static_cast<float>(encode(i, j)));
      basis.query.push_back(
          to_half(static_cast<float>(query(i, j) / static_cast<double>(basis.unit))));
    }
  }
  return basis;
}

}  // namespace verkv
