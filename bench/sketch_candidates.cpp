#include "sketch_candidates.hpp"

#include <fmt/format.h>

#include <Eigen/Eigenvalues>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <span>

#include <verkv/sketch.hpp>

#include "rotation.hpp"
#include "sketch_basis.hpp"

namespace verkv::lab {

namespace {

// One product of two plain matrices, and not one for each pair of expressions: the compiler would take
// seconds for every further one.
template <class M>
M product(const M& a, const M& b) {
  return a * b;
}
using Square = Eigen::MatrixXd;

Matrix centred(const Matrix& keys, Eigen::RowVectorXf& mean) {
  mean = keys.cast<double>().colwise().mean().cast<float>();
  return keys.rowwise() - mean;
}

Matrix minmax(const Matrix& keys, int levels, bool channel) {
  Matrix result = keys;
  const auto quantise = [levels](auto&& block) {
    const float low = block.minCoeff();
    const float step = (block.maxCoeff() - low) / static_cast<float>(levels - 1);
    if (!(step > 0)) return;
    block = ((block.array() - low) / step).round() * step + low;
  };
  if (!channel) {
    for (Index i = 0; i < keys.rows(); ++i) quantise(result.row(i));
    return result;
  }
  constexpr Index group = 128;
  for (Index begin = 0; begin < keys.rows(); begin += group) {
    const Index rows = std::min(group, keys.rows() - begin);
    for (Index j = 0; j < keys.cols(); ++j) quantise(result.block(begin, j, rows, 1));
  }
  return result;
}

enum class Scale { least_squares, length, unbiased };

Vector lloyd_max_levels(int bits) {
  Vector positive;
  if (bits == 1) positive = {0.7978845608};
  if (bits == 2) positive.assign(std::begin(kLloydMax2), std::end(kLloydMax2));
  if (bits == 3) positive = {0.2450941789, 0.7560052812, 1.3439092785, 2.1519457045};
  if (bits == 4) positive.assign(std::begin(kLloydMax4), std::end(kLloydMax4));
  Vector levels;
  for (std::size_t i = positive.size(); i-- > 0;) levels.push_back(-positive[i]);
  levels.insert(levels.end(), positive.begin(), positive.end());
  return levels;
}

// Quantises the columns [begin, begin + count) of y in units of each row's own root mean square.
void quantise_band(Square& y, Index begin, Index count, int bits, Scale scale) {
  if (count == 0) return;
  auto band = y.middleCols(begin, count);
  if (bits == 0) {
    band.setZero();
    return;
  }
  const Vector levels = lloyd_max_levels(bits);
  for (Index i = 0; i < y.rows(); ++i) {
    const double yy = band.row(i).squaredNorm();
    if (!(yy > 0)) continue;
    const double rms = std::sqrt(yy / static_cast<double>(count));
    double zz = 0;
    double yz = 0;
    Eigen::RowVectorXd z(count);
    for (Index j = 0; j < count; ++j) {
      const double x = band(i, j) / rms;
      std::size_t code = 0;
      while (code + 1 < levels.size() && x > (levels[code] + levels[code + 1]) / 2) ++code;
      z(j) = levels[code];
      zz += z(j) * z(j);
      yz += z(j) * band(i, j);
    }
    const double s = scale == Scale::least_squares ? yz / zz
                     : scale == Scale::length      ? std::sqrt(yy / zz)
                                                   : yy / yz;
    band.row(i) = s * z;
  }
}

Square rotation(Index dim) {
  std::vector<float> signs(static_cast<std::size_t>(2 * dim));
  rotation_signs(7, static_cast<int>(dim), signs);
  Square r(dim, dim);
  std::vector<float> column(static_cast<std::size_t>(dim));
  for (Index j = 0; j < dim; ++j) {
    std::fill(column.begin(), column.end(), 0.0f);
    column[static_cast<std::size_t>(j)] = 1;
    rotate(column, signs);
    for (Index i = 0; i < dim; ++i)
      r(i, j) = static_cast<double>(column[static_cast<std::size_t>(i)]);
  }
  return r;
}

Matrix rotated(const Head& head, int bits, Scale scale) {
  Eigen::RowVectorXf mean;
  const Matrix x = centred(head.keys, mean);
  const Square r = rotation(x.cols());
  Square y = product<Square>(x.cast<double>(), r.transpose());
  quantise_band(y, 0, y.cols(), bits, scale);
  Matrix result = product(y, r).cast<float>();
  result.rowwise() += mean;
  return result;
}

// The strongest half of the directions, in the basis where the prompt's queries are white, at 4
// bits; the other half is dropped.
Matrix strongest_half(const Head& head) {
  Eigen::RowVectorXf mean;
  const Matrix x = centred(head.keys, mean);
  const Index d = x.cols();
  const Square q = head.prompt_queries.cast<double>();
  Square c = product<Square>(q.transpose(), q);
  c = 0.9 / c.trace() * static_cast<double>(d) * c + 0.1 * Square::Identity(d, d);
  const Eigen::SelfAdjointEigenSolver<Square> of_c(c);
  const Square root = of_c.operatorSqrt();
  const Square inverse = of_c.operatorInverseSqrt();
  Square y = product<Square>(x.cast<double>(), root);
  const Eigen::SelfAdjointEigenSolver<Square> of_y(product<Square>(y.transpose(), y));
  const Index half = d / 2;
  const Square v = product<Square>(of_y.eigenvectors().rightCols(half), rotation(half).transpose());
  Square z = product(y, v);
  quantise_band(z, 0, half, 4, Scale::length);
  Matrix result = product(product<Square>(z, v.transpose()), inverse).cast<float>();
  result.rowwise() += mean;
  return result;
}

class Tokens final : public CalibrationTokens {
 public:
  Tokens(const Head& head, const Matrix& centred_keys) : head_(head), keys_(centred_keys) {
    key_dim = static_cast<int>(keys_.cols());
    count = static_cast<std::int64_t>(keys_.rows());
  }
  void centred_key(std::int64_t token, std::span<float> out_key) const override {
    for (std::size_t j = 0; j < out_key.size(); ++j)
      out_key[j] = keys_(static_cast<Index>(token), static_cast<Index>(j));
  }
  double weight(std::int64_t token) const override {
    const std::size_t i = static_cast<std::size_t>(token);
    return std::isinf(head_.odds[i]) ? 0.0 : static_cast<double>(head_.importance[i]);
  }

 private:
  const Head& head_;
  const Matrix& keys_;
};

Matrix calibrated(const Head& head, int bits, bool with_queries) {
  Eigen::RowVectorXf mean;
  const Matrix x = centred(head.keys, mean);
  const std::span<const float> queries(
      head.prompt_queries.data(),
      with_queries ? static_cast<std::size_t>(head.prompt_queries.size()) : 0);
  const SketchBasis basis = calibrate_sketch(bits, Tokens(head, x), queries, 7);
  const Index stored = basis.shape.dim;
  const Index d = x.cols();
  const Eigen::Map<const Matrix> encode(basis.encode.data(), stored, d);
  Matrix dual(stored, d);
  for (Index i = 0; i < stored * d; ++i)
    dual.data()[i] = basis.unit * to_float(basis.query[static_cast<std::size_t>(i)]);
  const Matrix y = product<Matrix>(x, encode.transpose());
  Matrix z(y.rows(), stored);
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(code_storage_bytes(basis.shape, 16)));
  for (Index i = 0; i < y.rows(); ++i) {
    const std::span<const float> row(y.data() + i * stored, static_cast<std::size_t>(stored));
    const float scale =
        to_float(encode_key(basis.shape, kSketchLevels, basis.bands, row, codes.data(), 0));
    for (int j = 0; j < basis.shape.dim; ++j) {
      const int byte =
          kSketchLevels.byte_of(basis.shape, j, unpack_code(basis.shape, codes.data(), 0, j));
      z(i, j) = scale * static_cast<float>(byte - kLevelBias);
    }
  }
  Matrix result = product(z, dual);
  result.rowwise() += mean;
  return result;
}

}  // namespace

std::vector<Candidate> candidates() {
  const auto with_scale = [](double bits) { return [bits](int dim) { return bits + 16.0 / dim; }; };
  std::vector<Candidate> all;
  all.push_back({"min-max per token, 2 bits", [](int dim) { return 2 + 32.0 / dim; },
                 [](const Head& h) { return minmax(h.keys, 4, false); }});
  all.push_back({"min-max per channel, 2 bits", [](int) { return 2 + 32.0 / 128; },
                 [](const Head& h) { return minmax(h.keys, 4, true); }});
  for (const int bits : {1, 2, 3, 4}) {
    all.push_back({fmt::format("rotated, {} bit{}", bits, bits == 1 ? "" : "s"), with_scale(bits),
                   [bits](const Head& h) { return rotated(h, bits, Scale::length); }});
    if (bits != 2) continue;
    all.push_back({"rotated, 2 bits, least squares", with_scale(bits),
                   [bits](const Head& h) { return rotated(h, bits, Scale::least_squares); }});
    all.push_back({"rotated, 2 bits, unbiased", with_scale(bits),
                   [bits](const Head& h) { return rotated(h, bits, Scale::unbiased); }});
  }
  all.push_back({"queries' strongest half, 4 bits", with_scale(2), strongest_half});
  all.push_back({"calibrated, 2 bits, no queries", with_scale(2),
                 [](const Head& h) { return calibrated(h, 2, false); }});
  for (const int bits : {2, 3, 4}) {
    all.push_back({fmt::format("calibrated, {} bits", bits), with_scale(bits),
                   [bits](const Head& h) { return calibrated(h, bits, true); }});
  }
  all.push_back({"exact", [](int) { return 0.0; }, [](const Head& h) { return h.keys; }});
  return all;
}

}  // namespace verkv::lab
