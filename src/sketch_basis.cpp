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

// Least share of the model of queries (QueryModel) in their second moments; the rest is what the
// prompt's queries say. Measured on recordings (docs/math/sketch.md): with 0.3 or less keys in
// directions that few of them looked at are off by a third more, with 1 all are.
constexpr double kLeastModel = 0.5;
// The model's least size of queries along a direction of the keys, in units of their root mean
// square. A guess: later queries may look where the prompt's did not. At 0.5 the recordings are the
// same to 3 %.
constexpr double kLeastQuery = 0.2;
// So many queries is the model itself worth beside the prompt's.
constexpr double kModelQueries = 4;
// Without any query, a direction's part in the logits is taken to be at most this many times the
// mean part. Keys may be any number of times larger in one channel than in others, and training
// makes queries small there. A guess.
constexpr double kMostPart = 4;
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
// Eigenvalues below this share of the largest or the mean are noise of the solver.
constexpr double kVanishing = 1e-14;
// Rounds of a fixed point. It settles within a few, but only halves its distance in each where an
// eighth of the directions is far stronger than the rest.
constexpr int kModelRounds = 64;
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

// Eigenvalues of a symmetric matrix, largest first and not below 0, and its eigenvectors.
struct Spectrum {
  explicit Spectrum(const Matrix& m) {
    const Eigen::SelfAdjointEigenSolver<Matrix> solved(0.5 * (m + m.transpose()));
    value = solved.eigenvalues().reverse().cwiseMax(0);
    direction = solved.eigenvectors().rowwise().reverse();
  }
  Eigen::VectorXd value;
  Matrix direction;
};

// Second moments of the queries, in units of their mean square. Empty where there are none.
Matrix query_moments(std::span<const float> queries, Index dim) {
  const Index count = static_cast<Index>(queries.size()) / dim;
  if (count == 0) return {};
  const Eigen::Map<const RowMajor> q(queries.data(), count, dim);
  // Relative to the largest entry, so that neither squares nor their sum leave the range.
  const double largest = static_cast<double>(q.cwiseAbs().maxCoeff());
  if (!(largest > 0)) return {};
  const Matrix scaled = q.cast<double>() / largest;
  const Matrix moments = scaled.transpose() * scaled;
  return moments * (static_cast<double>(dim) / moments.trace());
}

// The size of queries along each direction of the keys, as far as they are known, in units of their
// root mean square. keys: root mean square of the keys there. A direction that is not seen to
// matter is taken to matter as much as the mean one, where kLeastQuery would give it more. Fewer
// keys than two for each direction cannot tell a strong direction from chance.
Eigen::VectorXd modelled_queries(const Matrix& moments, Index count, const Spectrum& keys,
                                 std::int64_t tokens) {
  const Index dim = keys.value.size();
  const double chance =
      std::max(0.0, 1 - static_cast<double>(tokens) / static_cast<double>(2 * dim));
  const Eigen::ArrayXd size =
      ((1 - chance) * keys.value.array() / keys.value.mean() + chance).max(kVanishing).sqrt();
  const auto at_most = [&size](const Eigen::ArrayXd& query, double parts) -> Eigen::ArrayXd {
    return parts * (query * size).mean() / size;
  };
  Eigen::ArrayXd query = Eigen::ArrayXd::Ones(dim);
  if (moments.size() == 0) {
    for (int round = 0; round < kModelRounds; ++round) query = at_most(query, kMostPart).min(1);
    return query;
  }
  const Eigen::ArrayXd seen =
      (keys.direction.transpose() * moments * keys.direction).diagonal().array().max(0);
  const double n = static_cast<double>(count);
  query = seen.sqrt();
  for (int round = 0; round < kModelRounds; ++round) {
    const Eigen::ArrayXd guess = at_most(query, 1).min(1);
    query = ((n * seen + kModelQueries * guess.square()) / (n + kModelQueries)).sqrt();
  }
  return query.max(at_most(query, 1).min(kLeastQuery));
}

// C: second moments of the queries to expect. keys: Spectrum of the keys' moments.
Matrix expected_queries(std::span<const float> queries, const Spectrum& keys, std::int64_t tokens) {
  const Index dim = keys.value.size();
  const Index count = static_cast<Index>(queries.size()) / dim;
  const Matrix moments = query_moments(queries, dim);
  if (!(keys.value.mean() > 0)) return Matrix::Identity(dim, dim);
  const Eigen::VectorXd query = modelled_queries(moments, count, keys, tokens);
  const Matrix model =
      keys.direction * query.array().square().matrix().asDiagonal() * keys.direction.transpose();
  if (moments.size() == 0) return model;
  const double share =
      std::max(kLeastModel, static_cast<double>(dim) / static_cast<double>(dim + count));
  return (1 - share) * moments + share * model;
}

// Where the logits of a head's keys come from, strongest direction first, and how keys and queries
// are turned to them: encode.k and query.q, whose products are q.k.
struct Directions {
  // Expected mean square of a direction's part in a logit.
  Eigen::VectorXd part;
  // The same as these tokens alone have it, but for kVanishing of the strongest.
  Eigen::VectorXd seen;
  Matrix encode;
  Matrix query;
};

// `tokens` keys with these moments. What they tell of keys to come is doubted by d / (d + tokens):
// parts are drawn towards their mean when bits are given, and by its square when directions get
// their units: a direction in which these tokens have next to nothing would put tokens to come
// worlds away from its unit, but with many tokens a weak one may be weak.
Directions key_directions(const Matrix& keys, const Matrix& queries, std::int64_t tokens) {
  const Spectrum of_queries(queries);
  const Eigen::VectorXd root =
      of_queries.value.cwiseMax(kVanishing * of_queries.value(0)).cwiseSqrt();
  const Matrix& u = of_queries.direction;
  const Matrix up = u * root.asDiagonal() * u.transpose();
  const Matrix down = u * root.cwiseInverse().asDiagonal() * u.transpose();
  const Spectrum both(up * keys * up);
  Directions result;
  const double dim = static_cast<double>(keys.rows());
  const double doubt = dim / (dim + static_cast<double>(tokens));
  // Keys all alike say nothing: every direction counts the same.
  const double even = both.value.mean() > 0 ? both.value.mean() : 1;
  const auto doubted = [&](double share) -> Eigen::VectorXd {
    return ((1 - share) * both.value.array() + share * even).max(kVanishing * even);
  };
  result.part = doubted(doubt);
  result.seen = doubted(doubt * doubt);
  result.encode = both.direction.transpose() * up;
  result.query = both.direction.transpose() * down;
  return result;
}

// Expected square error of a logit from directions [begin, end) under one rotation, for a square
// error of 1 in a normal coordinate of variance 1: (sum of roots)^2 / number, where each direction
// is in the unit that makes keys and queries equally large (docs/math/sketch.md).
double band_error(const Eigen::VectorXd& part, int begin, int end) {
  if (begin == end) return 0;
  const double sum = part.segment(begin, end - begin).cwiseSqrt().sum();
  return sum * sum / (end - begin);
}

// As many coordinates with 4 bits as make the expected square error of a logit least.
SketchShape best_split(int bits, int dim, const Eigen::VectorXd& part) {
  SketchShape best;
  double least = 0;
  each_split(bits, dim, [&](int fine, int coarse) {
    const int stored = fine + coarse;
    const double error = kFineError * band_error(part, 0, fine) +
                         kCoarseError * band_error(part, fine, stored) +
                         kDroppedError * part.tail(dim - stored).sum();
    if (best.dim != 0 && !(error < least)) return;
    least = error;
    best.dim = stored;
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

// The rows of `directions`, column after column, in the unit in which coordinates along them have a
// root mean square of `size` together. square: the mean square now, in units of `unit` squared.
std::vector<float> in_unit(const Matrix& directions, double square, double unit, double size) {
  const double rms = std::max(std::sqrt(square) * unit, kLeastUnit);
  const double scale = square > 0 ? size / rms : 0.0;
  std::vector<float> result;
  result.reserve(static_cast<std::size_t>(directions.size()));
  for (Index j = 0; j < directions.cols(); ++j) {
    for (Index i = 0; i < directions.rows(); ++i)
      result.push_back(static_cast<float>(scale * directions(i, j)));
  }
  return result;
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

std::vector<float> leading_directions(const CalibrationTokens& tokens, int count, double size) {
  const double entry = largest_entry(tokens);
  const double unit = entry > 0 ? entry : 1;
  const Spectrum spectrum(key_moments(tokens, unit));
  const Index kept = std::min<Index>(count, tokens.key_dim);
  return in_unit(spectrum.direction.leftCols(kept).transpose(), spectrum.value.head(kept).mean(),
                 unit, size);
}

SketchBasis calibrate_sketch(int bits, const CalibrationTokens& tokens,
                             std::span<const float> queries, std::uint64_t seed, int leading,
                             std::vector<float>* out_leading) {
  const int dim = tokens.key_dim;
  const double largest = largest_entry(tokens);
  const double size = largest > 0 ? largest : 1;
  const Matrix moments = key_moments(tokens, size);
  const Matrix expected = expected_queries(queries, Spectrum(moments), tokens.count);
  const Directions to = key_directions(moments, expected, tokens.count);
  if (out_leading != nullptr) {
    const Index kept = std::min(leading, dim);
    *out_leading = in_unit(to.encode.topRows(kept), to.seen.head(kept).mean(), size, 1);
  }
  SketchBasis basis;
  basis.shape = best_split(bits, dim, to.part);

  const Index stored = basis.shape.dim;
  const Index fine = basis.shape.fine;
  Matrix encode = to.encode.topRows(stored);
  Matrix query = to.query.topRows(stored);
  // A band's directions in the units that make keys and queries equally large, the band as a whole
  // in units of its root mean square; the units of the levels go to the query's side. Returns the
  // mean square of the band's coordinates as a query sees them.
  const auto make_band = [&](Index begin, Index rows, double level_unit) {
    if (rows == 0) return 0.0;
    const Eigen::VectorXd part = to.seen.segment(begin, rows).cwiseSqrt();
    const double rms = std::max(std::sqrt(part.mean()) * std::sqrt(size), kLeastUnit);
    const Eigen::VectorXd unit = part.cwiseSqrt() * (rms * std::sqrt(size));
    encode.middleRows(begin, rows) =
        unit.cwiseInverse().asDiagonal() * encode.middleRows(begin, rows);
    query.middleRows(begin, rows) =
        (unit * level_unit).asDiagonal() * query.middleRows(begin, rows);
    rotate_rows(encode, begin, rows, seed);
    rotate_rows(query, begin, rows, seed);
    return part.mean() * part.mean();
  };
  const double fine_square = make_band(0, fine, kFineUnit);
  const double coarse_square = make_band(fine, stored - fine, kCoarseUnit);
  const double both = std::max(fine_square, coarse_square);
  const auto relative = [both](double square) {
    return std::max(static_cast<float>(square / both), kLeastSquare);
  };
  basis.bands.fine_square = relative(fine_square);
  basis.bands.coarse_square = relative(coarse_square);
  store_matrices(encode, query, basis);
  return basis;
}

}  // namespace verkv
