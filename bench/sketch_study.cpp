// Which sketch of the keys is worth its bits: every candidate reconstructs the keys of a recorded
// cache; logits, plans and estimates then follow the library's formulas in double. The table of
// docs/math/sketch.md.
//
//   sketch_study FILE [STEPS] [QUERIES]     QUERIES: another recording of the model, whose prompt's
//                                           queries are used instead of the file's own
#include <fmt/format.h>

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <functional>
#include <iterator>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <verkv/attention.hpp>
#include <verkv/certificate.hpp>
#include <verkv/fetch_plan.hpp>
#include <verkv/inclusion.hpp>
#include <verkv/recorded_cache.hpp>
#include <verkv/sample.hpp>
#include <verkv/shrinkage.hpp>
#include <verkv/sketch.hpp>

#include "cpu/kernels.hpp"
#include "rotation.hpp"
#include "sketch_basis.hpp"

namespace {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Vector = std::vector<double>;
using Index = Eigen::Index;

constexpr double kKeep = 1.0 / 16;
constexpr std::int64_t kSinks = 4;
constexpr std::int64_t kLocal = 32;
constexpr double kDelta = 0.1;
constexpr int kDraws = 4;

Matrix rows_of(const verkv::TensorView& view, std::int64_t head) {
  Matrix m(static_cast<Index>(view.tokens), static_cast<Index>(view.dim));
  for (std::int64_t t = 0; t < view.tokens; ++t) {
    const verkv::Rows row{view.row(t, head), view.type, 0, static_cast<int>(view.dim)};
    for (std::int64_t j = 0; j < view.dim; ++j)
      m(static_cast<Index>(t), static_cast<Index>(j)) = verkv::load_element(row, 0, j);
  }
  return m;
}

// One KV head of a recording.
struct Head {
  Matrix keys;
  Matrix values;
  Matrix queries;  // [step * group + query head of the group][dim]
  Matrix prompt_queries;
  std::vector<float> importance;
  std::vector<float> odds;
  double scale = 1;
  int group = 1;
  verkv::DrawId draw;
};

std::vector<float> odds_of(const std::vector<float>& importance) {
  const std::size_t n = importance.size();
  std::vector<float> odds(n, verkv::to_float(verkv::kPositive16Infinity));
  const std::size_t begin = std::min<std::size_t>(n, kSinks);
  const std::size_t end = std::max(begin, n - std::min<std::size_t>(n, kLocal));
  const std::span<const float> tau = std::span(importance).subspan(begin, end - begin);
  std::vector<float> scratch(tau.size());
  const double budget = std::max(0.0, kKeep * static_cast<double>(n) - kSinks - kLocal);
  const verkv::Inclusion inclusion = verkv::solve_inclusion(tau, budget, std::span(scratch));
  for (std::size_t i = begin; i < end; ++i) {
    odds[i] = verkv::to_float(
        verkv::stored_odds(inclusion.probability(static_cast<double>(importance[i]))));
  }
  return odds;
}

// ---- Candidates: what the keys look like after the sketch ----

using Sketch = std::function<Matrix(const Head&)>;

struct Candidate {
  std::string name;
  std::function<double(int dim)> bits;  // a coordinate, scales and offsets included
  Sketch sketch;
};

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
  if (bits == 2) positive.assign(std::begin(verkv::kLloydMax2), std::end(verkv::kLloydMax2));
  if (bits == 3) positive = {0.2450941789, 0.7560052812, 1.3439092785, 2.1519457045};
  if (bits == 4) positive.assign(std::begin(verkv::kLloydMax4), std::end(verkv::kLloydMax4));
  Vector levels;
  for (std::size_t i = positive.size(); i-- > 0;) levels.push_back(-positive[i]);
  levels.insert(levels.end(), positive.begin(), positive.end());
  return levels;
}

// Quantises the columns [begin, begin + count) of y in units of each row's own root mean square.
void quantise_band(Eigen::MatrixXd& y, Index begin, Index count, int bits, Scale scale) {
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

Eigen::MatrixXd rotation(Index dim) {
  std::vector<float> signs(static_cast<std::size_t>(2 * dim));
  verkv::rotation_signs(7, static_cast<int>(dim), signs);
  Eigen::MatrixXd r(dim, dim);
  std::vector<float> column(static_cast<std::size_t>(dim));
  for (Index j = 0; j < dim; ++j) {
    std::fill(column.begin(), column.end(), 0.0f);
    column[static_cast<std::size_t>(j)] = 1;
    verkv::rotate(column, signs);
    for (Index i = 0; i < dim; ++i)
      r(i, j) = static_cast<double>(column[static_cast<std::size_t>(i)]);
  }
  return r;
}

Matrix rotated(const Head& head, int bits, Scale scale) {
  Eigen::RowVectorXf mean;
  const Matrix x = centred(head.keys, mean);
  const Eigen::MatrixXd r = rotation(x.cols());
  Eigen::MatrixXd y = x.cast<double>() * r.transpose();
  quantise_band(y, 0, y.cols(), bits, scale);
  Matrix result = (y * r).cast<float>();
  result.rowwise() += mean;
  return result;
}

// The strongest half of the directions, in the basis where the prompt's queries are white, at 4
// bits; the other half is dropped.
Matrix strongest_half(const Head& head) {
  Eigen::RowVectorXf mean;
  const Matrix x = centred(head.keys, mean);
  const Index d = x.cols();
  const Eigen::MatrixXd q = head.prompt_queries.cast<double>();
  Eigen::MatrixXd c = q.transpose() * q;
  c = 0.9 / c.trace() * static_cast<double>(d) * c + 0.1 * Eigen::MatrixXd::Identity(d, d);
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> of_c(c);
  const Eigen::MatrixXd root = of_c.operatorSqrt();
  const Eigen::MatrixXd inverse = of_c.operatorInverseSqrt();
  Eigen::MatrixXd y = x.cast<double>() * root;
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> of_y(y.transpose() * y);
  const Index half = d / 2;
  const Eigen::MatrixXd v = of_y.eigenvectors().rightCols(half) * rotation(half).transpose();
  Eigen::MatrixXd z = y * v;
  quantise_band(z, 0, half, 4, Scale::length);
  Matrix result = (z * v.transpose() * inverse).cast<float>();
  result.rowwise() += mean;
  return result;
}

class Tokens final : public verkv::CalibrationTokens {
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
  const verkv::SketchBasis basis = verkv::calibrate_sketch(bits, Tokens(head, x), queries, 7);
  const Index stored = basis.shape.dim;
  const Index d = x.cols();
  const Eigen::Map<const Matrix> encode(basis.encode.data(), stored, d);
  Matrix dual(stored, d);
  for (Index i = 0; i < stored * d; ++i)
    dual.data()[i] = basis.unit * verkv::to_float(basis.query[static_cast<std::size_t>(i)]);
  const Matrix y = x * encode.transpose();
  Matrix z(y.rows(), stored);
  std::vector<std::uint8_t> codes(
      static_cast<std::size_t>(verkv::code_storage_bytes(basis.shape, 16)));
  for (Index i = 0; i < y.rows(); ++i) {
    const std::span<const float> row(y.data() + i * stored, static_cast<std::size_t>(stored));
    const float scale = verkv::to_float(
        verkv::encode_key(basis.shape, verkv::kSketchLevels, basis.bands, row, codes.data(), 0));
    for (int j = 0; j < basis.shape.dim; ++j) {
      const int byte = verkv::kSketchLevels.byte_of(
          basis.shape, j, verkv::unpack_code(basis.shape, codes.data(), 0, j));
      z(i, j) = scale * static_cast<float>(byte - verkv::kLevelBias);
    }
  }
  Matrix result = z * dual;
  result.rowwise() += mean;
  return result;
}

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

// ---- What they do to a step ----

struct Tally {
  double weight = 0;  // attention probability of tokens that may be missing
  double bias = 0;
  double square = 0;
  double worst = 0;  // most underestimated token with more than 1 % of the probability
  double plain_square = 0;
  double plain_count = 0;
  double moved[2] = {};
  double steps = 0;
  double missed[2] = {};
  double decisions[2] = {};
  Vector error[2];
};

// Rule 0: risk 1e-4, judged by the certificate it reports. Rule 1: epsilon 0.05.
void add_step(const Head& head, const Matrix& exact, const Matrix& sketched, Index step,
              Tally& tally) {
  const std::size_t n = head.odds.size();
  const double log_term = verkv::log_two_over(kDelta);
  Vector rho(head.odds.begin(), head.odds.end());
  std::vector<std::vector<bool>> fetched(2, std::vector<bool>(n, false));
  std::vector<Vector> weights;
  std::vector<Vector> exact_weights;
  Vector denominators;
  std::vector<std::uint32_t> low;
  for (std::size_t i = 0; i < n; ++i) {
    if (!std::isinf(rho[i])) low.push_back(static_cast<std::uint32_t>(i));
  }
  for (int g = 0; g < head.group; ++g) {
    const Index row = step * head.group + g;
    Vector logit(n);
    Vector estimate(n);
    double top = -1e300;
    double exact_top = -1e300;
    for (std::size_t i = 0; i < n; ++i) {
      logit[i] = head.scale * static_cast<double>(exact(row, static_cast<Index>(i)));
      estimate[i] = std::isinf(rho[i])
                        ? logit[i]
                        : head.scale * static_cast<double>(sketched(row, static_cast<Index>(i)));
      top = std::max(top, estimate[i]);
      exact_top = std::max(exact_top, logit[i]);
    }
    Vector w(n);
    Vector x(n);
    double d = 0;
    double exact_d = 0;
    for (std::size_t i = 0; i < n; ++i) {
      w[i] = std::exp(estimate[i] - top);
      x[i] = std::exp(logit[i] - top);
      d += w[i];
      exact_d += std::exp(logit[i] - exact_top);
    }
    for (const std::uint32_t i : low) {
      const double p = std::exp(logit[i] - exact_top) / exact_d;
      const double off = estimate[i] - logit[i];
      tally.weight += p;
      tally.bias += p * off;
      tally.square += p * off * off;
      if (p > 0.01) tally.worst = std::min(tally.worst, off);
      tally.plain_square += off * off;
      tally.plain_count += 1;
    }
    Vector lw;
    Vector lr;
    for (const std::uint32_t i : low) {
      lw.push_back(w[i]);
      lr.push_back(rho[i]);
    }
    const double beta =
        verkv::shrinkage_beta(std::span<const double>(lw), std::span<const double>(lr));
    Vector key;
    for (std::size_t p = 0; p < low.size(); ++p)
      key.push_back(verkv::fetch_worth(lw[p], lr[p], beta));
    for (std::size_t p = 0; p < low.size(); ++p)
      if (key[p] > 1e-4 * d * d) fetched[0][low[p]] = true;
    std::vector<std::uint32_t> order(low.size());
    verkv::order_by_descending(std::span<const double>(key), order);
    Vector a(low.size());
    Vector b(low.size());
    const std::size_t k = verkv::certified_prefix<double>(lw, lr, order, d, log_term, 0.05, a, b);
    for (std::size_t p = 0; p < k; ++p) fetched[1][low[order[p]]] = true;
    weights.push_back(std::move(w));
    exact_weights.push_back(std::move(x));
    denominators.push_back(d);
  }
  tally.steps += 1;
  for (int rule = 0; rule < 2; ++rule) {
    std::vector<std::vector<bool>> drawn(kDraws, std::vector<bool>(n, false));
    for (int draw = 0; draw < kDraws; ++draw) {
      verkv::DrawId name = head.draw;
      name.sequence = static_cast<std::uint64_t>(draw);
      for (const std::uint32_t i : low)
        drawn[static_cast<std::size_t>(draw)][i] =
            verkv::drawn(name, i, verkv::probability_from_odds(rho[i]));
    }
    for (const std::uint32_t i : low) {
      for (const auto& z : drawn)
        tally.moved[rule] += fetched[static_cast<std::size_t>(rule)][i] && !z[i] ? 1.0 / kDraws : 0;
    }
    for (int g = 0; g < head.group; ++g) {
      const std::size_t at = static_cast<std::size_t>(g);
      const Vector& w = weights[at];
      const Vector& x = exact_weights[at];
      Vector lw;
      Vector lr;
      std::vector<std::uint32_t> rest;
      for (const std::uint32_t i : low) {
        if (fetched[static_cast<std::size_t>(rule)][i]) continue;
        lw.push_back(w[i]);
        lr.push_back(rho[i]);
        rest.push_back(i);
      }
      const double beta =
          verkv::shrinkage_beta(std::span<const double>(lw), std::span<const double>(lr));
      const double bound = verkv::certificate(
          verkv::tail_terms(std::span<const double>(lw), std::span<const double>(lr), beta),
          denominators[at], log_term);
      double sure = 0;
      double all = 0;
      Eigen::RowVectorXd sure_value = Eigen::RowVectorXd::Zero(head.values.cols());
      Eigen::RowVectorXd all_value = sure_value;
      std::vector<bool> open(n, false);
      for (const std::uint32_t i : rest) open[i] = true;
      for (std::size_t i = 0; i < n; ++i) {
        const auto value = head.values.row(static_cast<Index>(i)).cast<double>();
        all += x[i];
        if (x[i] > 1e-9 * all) all_value += x[i] * value;
        if (open[i]) continue;
        sure += x[i];
        if (x[i] > 1e-9 * all) sure_value += x[i] * value;
      }
      for (const auto& z : drawn) {
        double estimate = sure;
        Eigen::RowVectorXd value = sure_value;
        for (std::size_t p = 0; p < rest.size(); ++p) {
          const std::uint32_t i = rest[p];
          if (!z[i]) continue;
          const double part = x[i] * verkv::drawn_coefficient(lw[p], x[i], lr[p], beta, 2.0);
          estimate += part;
          value += part * head.values.row(static_cast<Index>(i)).cast<double>();
        }
        const double promised = rule == 0 ? bound : 0.05;
        tally.missed[rule] += std::fabs(estimate / all - 1) > promised ? 1 : 0;
        tally.decisions[rule] += 1;
        const Eigen::RowVectorXd truth = all_value / all;
        tally.error[rule].push_back((value / estimate - truth).norm() / truth.norm());
      }
    }
  }
}

double mean_square_root(const Vector& x) {
  double sum = 0;
  for (const double v : x) sum += v * v;
  return std::sqrt(sum / static_cast<double>(x.size()));
}

void run(const std::string& path, std::int64_t steps, const std::optional<std::string>& other) {
  const verkv::RecordedCache cache = verkv::RecordedCache::load(path);
  std::optional<verkv::RecordedCache> lender;
  if (other) lender.emplace(verkv::RecordedCache::load(*other));
  std::vector<Head> heads;
  for (std::size_t l = 0; l < cache.layers().size(); ++l) {
    const verkv::RecordedLayer& layer = cache.layers()[l];
    const auto scores = layer.importance.find("kvzip_mean");
    if (scores == layer.importance.end())
      throw verkv::InvalidArgument(
          fmt::format("{}: layer {} has no importance kvzip_mean", path, layer.index));
    const verkv::RecordedLayer* queries = &layer;
    if (lender) {
      const auto found =
          std::find_if(lender->layers().begin(), lender->layers().end(),
                       [&](const auto& candidate) { return candidate.index == layer.index; });
      if (found == lender->layers().end() || found->query_heads != layer.query_heads ||
          found->key_dim != layer.key_dim)
        throw verkv::InvalidArgument(
            fmt::format("{}: no queries for layer {} of {}", *other, layer.index, path));
      queries = &*found;
    }
    const int group = static_cast<int>(layer.query_heads / layer.kv_heads);
    for (std::int64_t h = 0; h < layer.kv_heads; ++h) {
      Head head;
      head.keys = rows_of(layer.key, h);
      head.values = rows_of(layer.value, h);
      head.group = group;
      head.scale = cache.scale();
      head.draw = {0, 0, static_cast<std::uint32_t>(layer.index), static_cast<std::uint32_t>(h)};
      const std::int64_t used = std::min(steps, layer.query.tokens);
      head.queries.resize(static_cast<Index>(used * group), head.keys.cols());
      for (int g = 0; g < group; ++g) {
        const Matrix q = rows_of(layer.query, h * group + g);
        for (std::int64_t s = 0; s < used; ++s)
          head.queries.row(static_cast<Index>(s * group + g)) = q.row(static_cast<Index>(s));
      }
      const std::int64_t positions =
          queries->prompt_query.data == nullptr ? 0 : queries->prompt_query.tokens;
      head.prompt_queries.resize(static_cast<Index>(positions * group), head.keys.cols());
      for (int g = 0; g < group && positions > 0; ++g) {
        head.prompt_queries.middleRows(static_cast<Index>(g * positions),
                                       static_cast<Index>(positions)) =
            rows_of(queries->prompt_query, h * group + g);
      }
      const float* tau = scores->second.data + h * scores->second.head_stride;
      head.importance.assign(tau, tau + scores->second.tokens);
      head.odds = odds_of(head.importance);
      heads.push_back(std::move(head));
    }
  }
  if (heads.empty() || heads.front().prompt_queries.rows() == 0)
    throw verkv::InvalidArgument(fmt::format("{}: no prompt queries", path));
  fmt::print("{}: {} KV heads, {} tokens, {} steps, {} draws, 16x\n\n", path, heads.size(),
             heads.front().keys.rows(), heads.front().queries.rows() / heads.front().group, kDraws);
  fmt::print(
      "| sketch | bits | logit error: bias, deviation, worst (by attention) | deviation, all "
      "tokens | risk 1e-4: moved %, missed %, output error % | eps 0.05: moved %, missed %, "
      "error % |\n|---|---|---|---|---|---|\n");
  for (const Candidate& candidate : candidates()) {
    Tally tally;
    double tokens = 0;
    for (const Head& head : heads) {
      const Matrix keys = candidate.sketch(head);
      const Matrix exact = head.queries * head.keys.transpose();
      const Matrix sketched = head.queries * keys.transpose();
      for (Index s = 0; s < head.queries.rows() / head.group; ++s)
        add_step(head, exact, sketched, s, tally);
      tokens = static_cast<double>(head.keys.rows());
    }
    fmt::print(
        "| {} | {:.2f} | {:.2f}, {:.2f}, {:.1f} | {:.2f} | {:.3f}, {:.2f}, {:.1f} | {:.2f}, "
        "{:.2f}, {:.1f} |\n",
        candidate.name, candidate.bits(static_cast<int>(heads.front().keys.cols())),
        tally.bias / tally.weight, std::sqrt(tally.square / tally.weight), tally.worst,
        std::sqrt(tally.plain_square / tally.plain_count),
        100 * tally.moved[0] / tally.steps / tokens, 100 * tally.missed[0] / tally.decisions[0],
        100 * mean_square_root(tally.error[0]), 100 * tally.moved[1] / tally.steps / tokens,
        100 * tally.missed[1] / tally.decisions[1], 100 * mean_square_root(tally.error[1]));
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc < 2 || argc > 4) throw verkv::InvalidArgument("sketch_study FILE [STEPS] [QUERIES]");
    const long steps = argc > 2 ? std::strtol(argv[2], nullptr, 10) : 16;
    if (steps < 1)
      throw verkv::InvalidArgument(fmt::format("{} steps; 1 or more are needed", steps));
    run(argv[1], steps, argc > 3 ? std::optional<std::string>(argv[3]) : std::nullopt);
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "sketch_study: {}\n", error.what());
    return 1;
  }
}
