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
using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// Share of the isotropic part in the queries' second moments. It keeps directions that the prompt's
// queries did not look at. Measured (docs/math/sketch.md): at 0.1 keys in such directions were off
// by 6 and more; at 1 the error is 1.2 to 1.6 times larger.
constexpr double kIsotropic = 0.8;
// Share of the importance in the keys' second moments; the rest is equal for all tokens. A guess
// between two failures: importance alone forgets light tokens, equal shares forget heavy ones.
constexpr double kByWeight = 0.5;
// Square error of a normal coordinate of variance 1, coded with 4, 2 and 0 bits (Max 1960).
constexpr double kFineError = 0.009497;
constexpr double kCoarseError = 0.1175;
constexpr double kDroppedError = 1;
// Coordinates with 4 bits come in whole blocks of the vector kernels.
constexpr int kFineBlock = 16;
// Rows of a product in binary32, whose sums are then added in double: small enough for its rounding
// not to show, large enough for the product's speed.
constexpr std::int64_t kProductRows = 256;
// Least unit of a band, so that neither the matrices nor their products leave binary32.
constexpr double kLeastUnit = 1e-30;
// Least square of a band relative to the other: the weaker one must not vanish from the search for
// a token's scale, where squares are multiplied in binary32.
constexpr float kLeastSquare = 1e-20f;

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
    const Eigen::Map<const RowMajor> q(queries.data(), count, dim);
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
  // Eigenvalues are kIsotropic and more; below half of it lies nothing but a failure of the solver.
  const Eigen::VectorXd root = solved.eigenvalues().cwiseMax(kIsotropic / 2).cwiseSqrt();
  const Matrix& u = solved.eigenvectors();
  return {u * root.asDiagonal() * u.transpose(),
          u * root.cwiseInverse().asDiagonal() * u.transpose()};
}

// Weighted second moments of the centred keys, in units of `size` squared.
Matrix key_moments(const CalibrationTokens& tokens, double size) {
  const Index dim = tokens.key_dim;
  double total = 0;
  for (std::int64_t i = 0; i < tokens.count; ++i) total += tokens.weight(i);
  const double alike = (total > 0 ? 1 - kByWeight : 1.0) / static_cast<double>(tokens.count);
  Matrix sum = Matrix::Zero(dim, dim);
  RowMajor block(std::min(kProductRows, tokens.count), dim);
  std::vector<float> key(static_cast<std::size_t>(dim));
  for (std::int64_t begin = 0; begin < tokens.count; begin += kProductRows) {
    const std::int64_t rows = std::min(kProductRows, tokens.count - begin);
    for (std::int64_t i = 0; i < rows; ++i) {
      tokens.centred_key(begin + i, key);
      const double by_weight = total > 0 ? kByWeight * tokens.weight(begin + i) / total : 0.0;
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

// Where the logits of a head's keys come from: the eigenvectors of C^(1/2) times the keys' moments
// times C^(1/2), strongest first, and their eigenvalues.
struct Spectrum {
  Eigen::VectorXd variance;
  Matrix directions;
  // How little these tokens tell of tokens to come: d / (d + n).
  double doubt = 0;
  // The mean of the variances, towards which doubt draws them.
  double even = 1;

  // What to expect of tokens to come.
  double expected(int j) const { return (1 - doubt) * variance(j) + doubt * even; }
  // The mean square of a band's coordinates, towards `even` by the square of the doubt: a band in
  // which these tokens have next to nothing would put tokens to come worlds away from its unit, but
  // with many tokens a weak band may be weak.
  double band_square(Index begin, Index rows) const {
    const double share = doubt * doubt;
    return (1 - share) * variance.segment(begin, rows).mean() + share * even;
  }
};

Spectrum key_spectrum(const CalibrationTokens& tokens, double size, const Roots& roots) {
  Matrix covariance = key_moments(tokens, size);
  covariance = (roots.root * covariance * roots.root).eval();
  const Eigen::SelfAdjointEigenSolver<Matrix> solved(0.5 * (covariance + covariance.transpose()));
  Spectrum result;
  result.variance = solved.eigenvalues().reverse().cwiseMax(0);
  result.directions = solved.eigenvectors().rowwise().reverse();
  const double dim = static_cast<double>(tokens.key_dim);
  result.doubt = dim / static_cast<double>(tokens.key_dim + tokens.count);
  // Keys all alike say nothing: every direction counts the same.
  result.even = result.variance.mean() > 0 ? result.variance.mean() : 1;
  return result;
}

// As many coordinates with 4 bits as make the expected square error of a logit least.
SketchShape best_split(int bits, int dim, const Spectrum& spectrum) {
  SketchShape best;
  double least = 0;
  each_split(bits, dim, [&](int fine, int coarse) {
    double error = 0;
    for (int j = 0; j < dim; ++j) {
      const double share = j < fine ? kFineError : j < fine + coarse ? kCoarseError : kDroppedError;
      error += share * spectrum.expected(j);
    }
    if (best.dim != 0 && !(error < least)) return;
    least = error;
    best.dim = fine + coarse;
    best.fine = fine;
  });
  return best;
}

// Both matrices as they are kept; the query's side relative to its largest entry, for binary16.
void store_matrices(const Matrix& encode, const Matrix& query, SketchBasis& out_basis) {
  const double top = query.size() > 0 ? query.cwiseAbs().maxCoeff() : 0;
  out_basis.unit = static_cast<float>(top > 0 ? top : 1);
  out_basis.encode.reserve(static_cast<std::size_t>(encode.size()));
  out_basis.query.reserve(static_cast<std::size_t>(query.size()));
  for (Index i = 0; i < encode.rows(); ++i) {
    for (Index j = 0; j < encode.cols(); ++j) {
      out_basis.encode.push_back(static_cast<float>(encode(i, j)));
      out_basis.query.push_back(
          to_half(static_cast<float>(query(i, j) / static_cast<double>(out_basis.unit))));
    }
  }
}

}  // namespace

SketchShape largest_sketch_shape(SketchKind kind, int bits, int key_dim) {
  if (!has_codes(kind)) return {kind, key_dim, 0};
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
  const Spectrum spectrum = key_spectrum(tokens, size, roots);
  SketchBasis basis;
  basis.shape = best_split(bits, dim, spectrum);

  const Index stored = basis.shape.dim;
  const Index fine = basis.shape.fine;
  Matrix encode = spectrum.directions.leftCols(stored).transpose() * roots.root;
  Matrix query = spectrum.directions.leftCols(stored).transpose() * roots.inverse;
  for (Matrix* m : {&encode, &query}) {
    rotate_rows(*m, 0, fine, seed);
    rotate_rows(*m, fine, stored - fine, seed);
  }

  // Each band in units of its root mean square; the units of the levels go to the query's side.
  const auto scale_band = [&](Index begin, Index rows, double level_unit) {
    if (rows == 0) return 0.0;
    const double rms = std::max(std::sqrt(spectrum.band_square(begin, rows)) * size, kLeastUnit);
    encode.middleRows(begin, rows) /= rms;
    query.middleRows(begin, rows) *= rms * level_unit;
    return rms;
  };
  const double fine_rms = scale_band(0, fine, kFineUnit);
  const double coarse_rms = scale_band(fine, stored - fine, kCoarseUnit);
  const double both = std::max(fine_rms, coarse_rms);
  const auto relative_square = [both](double rms) {
    return std::max(static_cast<float>(std::pow(rms / both, 2)), kLeastSquare);
  };
  basis.bands.fine_square = relative_square(fine_rms);
  basis.bands.coarse_square = relative_square(coarse_rms);
  store_matrices(encode, query, basis);
  return basis;
}

}  // namespace verkv
