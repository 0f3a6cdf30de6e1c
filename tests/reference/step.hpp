// A whole decode step of one KV head in double, by brute force: what the manager is compared with.
// It starts from the keys and values as they are stored and from the importance scores, and goes
// through the stages in the paper's order. Equations come from reference.hpp; only what defines the
// stored bits (16-bit odds, draws, codes of the sketch) comes from the headers under test, since
// the step is meant for exactly these bits. Their own tests compare them with the reference.
#ifndef VERKV_TESTS_REFERENCE_STEP_HPP
#define VERKV_TESTS_REFERENCE_STEP_HPP

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

#include <verkv/inclusion.hpp>
#include <verkv/sample.hpp>
#include <verkv/settings.hpp>
#include <verkv/sketch.hpp>

#include "reference/reference.hpp"
#include "sketch_basis.hpp"

namespace verkv::reference {

inline constexpr double kInfinite = std::numeric_limits<double>::infinity();

// A number after a round trip through the storage type.
inline float as_stored(float x, DType type) {
  switch (type) {
    case DType::f32:
      return x;
    case DType::f16:
      return to_float(to_half(x));
    case DType::bf16:
      return to_float(to_bfloat16(x));
  }
  return x;
}

// ---- Which tokens stay ----

// One head's part in a pool: scores of positions [begin, begin + tau.size()), and how many tokens
// of the local window its share of the budget has to pay for.
struct PoolHead {
  Vector tau;
  std::size_t begin = 0;
  std::size_t window = 0;
};

// Odds as stored, per head of the pool; infinite for tokens that always stay.
inline std::vector<Vector> pool_odds(const CacheConfig& config,
                                     const std::vector<PoolHead>& heads) {
  Vector tau;
  double budget = 0;
  std::vector<std::size_t> sinks;
  for (const PoolHead& head : heads) {
    const std::size_t sink_end = static_cast<std::size_t>(config.sink_tokens);
    const std::size_t first =
        sink_end > head.begin ? std::min(sink_end - head.begin, head.tau.size()) : 0;
    sinks.push_back(first);
    budget += config.keep * static_cast<double>(head.tau.size() + head.window) -
              static_cast<double>(first + head.window);
    tau.insert(tau.end(), head.tau.begin() + static_cast<std::ptrdiff_t>(first), head.tau.end());
  }
  budget = std::max(0.0, budget);

  Vector odds;
  if (config.study.select == Selection::topk) {
    const Indices order = descending(tau);
    odds.assign(tau.size(), 0.0);
    const std::size_t kept = std::min(tau.size(), static_cast<std::size_t>(budget + 0.5));
    for (std::size_t i = 0; i < kept; ++i) odds[order[i]] = kInfinite;
  } else {
    const double floor = config.study.inclusion_floor;
    const double above = (budget - floor * static_cast<double>(tau.size())) / (1 - floor);
    for (const double r : inclusion(tau, std::max(0.0, above)).r) {
      odds.push_back(static_cast<double>(to_float(stored_odds(floor + (1 - floor) * r))));
    }
  }

  std::vector<Vector> result;
  std::size_t next = 0;
  for (std::size_t h = 0; h < heads.size(); ++h) {
    Vector own(sinks[h], kInfinite);
    while (own.size() < heads[h].tau.size()) own.push_back(odds[next++]);
    result.push_back(own);
  }
  return result;
}

// The draw for positions from `begin`. walks: positions in the order in which they compete, each
// walk by itself, those with a probability of 0 or 1 standing aside; those in none are drawn
// independently.
inline std::vector<bool> draw(const Vector& odds, const DrawId& key, std::size_t begin,
                              const std::vector<std::vector<std::uint32_t>>& walks = {}) {
  const auto inclusion_of = [](double rho) { return rho == kInfinite ? 1.0 : rho / (1 + rho); };
  std::vector<bool> result;
  for (std::size_t i = 0; i < odds.size(); ++i)
    result.push_back(drawn(key, begin + i, inclusion_of(odds[i])));
  for (const std::vector<std::uint32_t>& all : walks) {
    std::vector<std::uint32_t> walk;
    for (const std::uint32_t position : all) {
      const double r = inclusion_of(odds[position - begin]);
      if (r > 0 && r < 1) walk.push_back(position);
    }
    if (walk.empty()) continue;
    Vector left;  // of each token's probability
    for (const std::uint32_t position : walk) left.push_back(inclusion_of(odds[position - begin]));
    std::size_t hand = 0;
    for (std::size_t k = 1; k < walk.size(); ++k) {
      const double u = draw_uniform(key, walk[k]);
      const double sum = left[hand] + left[k];
      // Who goes out of the duel, and with what.
      const bool over = sum >= 1;
      const bool hand_goes = over ? u < (1 - left[k]) / (2 - sum) : u < left[k] / sum;
      const std::size_t gone = hand_goes ? hand : k;
      const std::size_t stays = hand_goes ? k : hand;
      left[gone] = over ? 1 : 0;
      left[stays] = over ? sum - 1 : sum;
      hand = stays;
    }
    left[hand] = draw_uniform(key, walk[0]) < left[hand] ? 1 : 0;
    for (std::size_t k = 0; k < walk.size(); ++k) result[walk[k] - begin] = left[k] == 1;
  }
  return result;
}

// ---- The step ----

// One KV head as it stands before a step. The first odds.size() tokens are compressed.
struct HeadCase {
  LayerConfig layer;
  FetchConfig fetch;
  StudyConfig study;
  SketchConfig sketch;
  std::vector<std::vector<float>> key;  // of all tokens, as stored
  std::vector<std::vector<float>> value;
  Vector odds;
  std::vector<bool> resident;          // of the compressed tokens
  std::vector<float> mean;             // of the channels
  const SketchBasis* basis = nullptr;  // calibrated
  DType storage = DType::f32;          // of centroids
  std::vector<float> sinks;            // of the queries; empty: none

  // Makes the plan look at the draw, which it must not: tokens that are not resident come first in
  // the order. For the test of the test.
  bool peeks = false;
};

struct QueryAnswer {
  std::size_t planned = 0;
  double epsilon = 0;
  double sketch_error = 0;
  double lse = -kInfinite;
  Vector output;
  double output_error = 0;
  Vector window_probability;  // of the local window's tokens, by the plan's D
};

struct StepAnswer {
  std::vector<QueryAnswer> query;
  Indices fetched;  // ascending
  Indices moved;
  bool limited = false;
  std::size_t residents = 0;
};

inline double attention_scale(const LayerConfig& layer) {
  return layer.scale.value_or(1 / std::sqrt(static_cast<double>(layer.key_dim)));
}

inline double capped_logit(double logit, const std::optional<double>& soft_cap) {
  return soft_cap ? *soft_cap * std::tanh(logit / *soft_cap) : logit;
}

inline double exact_logit(const HeadCase& head, const std::vector<float>& query, std::size_t i) {
  double dot = 0;
  for (std::size_t j = 0; j < query.size(); ++j) {
    dot += static_cast<double>(query[j]) * static_cast<double>(head.key[i][j]);
  }
  return capped_logit(attention_scale(head.layer) * dot, head.layer.soft_cap);
}

// Rows of a matrix times a vector in binary32, in the order that defines the stored bits: sixteen
// sums, coordinate j goes to sum j % 16, folded in halves.
template <class Element>
std::vector<float> times(const std::vector<Element>& matrix, const std::vector<float>& x) {
  std::vector<float> result;
  for (std::size_t row = 0; row * x.size() < matrix.size(); ++row) {
    float lane[16] = {};
    for (std::size_t j = 0; j < x.size(); ++j)
      lane[j % 16] = std::fma(to_float(matrix[row * x.size() + j]), x[j], lane[j % 16]);
    for (std::size_t half = 8; half > 0; half /= 2) {
      for (std::size_t j = 0; j < half; ++j) lane[j] += lane[j + half];
    }
    result.push_back(lane[0]);
  }
  return result;
}

// What a basis is made from: keys as stored, importance of those that may be missing.
class BasisTokens final : public CalibrationTokens {
 public:
  BasisTokens(const std::vector<std::vector<float>>& keys, const std::vector<float>& means,
              const Vector& odds, const Vector& importance)
      : keys_(keys), means_(means), odds_(odds), importance_(importance) {
    key_dim = static_cast<int>(means.size());
    count = static_cast<std::int64_t>(odds.size());
  }
  void centred_key(std::int64_t token, std::span<float> out_key) const override {
    for (std::size_t j = 0; j < out_key.size(); ++j)
      out_key[j] = keys_[static_cast<std::size_t>(token)][j] - means_[j];
  }
  double weight(std::int64_t token) const override {
    const std::size_t i = static_cast<std::size_t>(token);
    return odds_[i] == kInfinite ? 0.0 : importance_[i];
  }

 private:
  const std::vector<std::vector<float>>& keys_;
  const std::vector<float>& means_;
  const Vector& odds_;
  const Vector& importance_;
};

inline std::vector<float> channel_means(const std::vector<std::vector<float>>& keys,
                                        std::size_t count, std::size_t dim) {
  std::vector<float> mean(dim, 0.0f);
  for (std::size_t j = 0; j < dim; ++j) {
    double total = 0;
    for (std::size_t i = 0; i < count; ++i) total += static_cast<double>(keys[i][j]);
    mean[j] = static_cast<float>(total / static_cast<double>(count));
  }
  return mean;
}

// The compressed keys as the sketch keeps them, decoded to double, one after the other.
inline Vector sketched_keys(const HeadCase& head) {
  Vector result;
  if (head.sketch.kind == SketchKind::exact || head.odds.empty()) return result;
  const std::size_t d = static_cast<std::size_t>(head.layer.key_dim);
  const SketchShape shape = head.basis->shape;
  const double unit = static_cast<double>(head.basis->unit);
  std::vector<std::uint8_t> packed(
      static_cast<std::size_t>(code_storage_bytes(shape, kSketchGroup)));
  for (std::size_t i = 0; i < head.odds.size(); ++i) {
    std::vector<float> k = head.key[i];
    for (std::size_t j = 0; j < d; ++j) k[j] -= head.mean[j];
    k = times(head.basis->encode, k);
    const Positive16 stored =
        encode_key(shape, kSketchLevels, head.basis->bands, k, packed.data(), 0);
    for (int j = 0; j < shape.dim; ++j) {
      const int byte = kSketchLevels.byte_of(shape, j, unpack_code(shape, packed.data(), 0, j));
      result.push_back(static_cast<double>(to_float(stored)) * unit * (byte - kLevelBias));
    }
  }
  return result;
}

// Logits of the compressed tokens as the sketch sees them: its keys multiplied with the decoded
// 8-bit query.
inline Vector sketched_logits(const HeadCase& head, const Vector& keys,
                              const std::vector<float>& query) {
  const std::size_t n = head.odds.size();
  Vector result;
  if (head.sketch.kind == SketchKind::exact) {
    for (std::size_t i = 0; i < n; ++i) result.push_back(exact_logit(head, query, i));
    return result;
  }
  const std::size_t d = static_cast<std::size_t>(head.layer.key_dim);
  if (n == 0) return result;
  const SketchShape shape = head.basis->shape;

  // The query is scaled in binary32 first: its 8-bit code is part of the definition.
  std::vector<float> q(d);
  const float scale = static_cast<float>(attention_scale(head.layer));
  double mean_share = 0;
  for (std::size_t j = 0; j < d; ++j) {
    q[j] = scale * query[j];
    mean_share += static_cast<double>(q[j]) * static_cast<double>(head.mean[j]);
  }
  q = times(head.basis->query, q);
  std::vector<std::int8_t> code(static_cast<std::size_t>(shape.padded_dim()));
  const double step = static_cast<double>(encode_query(q, code).scale);

  const std::size_t stored = static_cast<std::size_t>(shape.dim);
  for (std::size_t i = 0; i < n; ++i) {
    double dot = 0;
    for (std::size_t j = 0; j < stored; ++j) dot += step * code[j] * keys[i * stored + j];
    result.push_back(capped_logit(dot + mean_share, head.layer.soft_cap));
  }
  return result;
}

// The mean square error that token i adds at the plan's beta; (5) of the method where lambda = 1.
inline double one_key(double w, double rho, double beta) {
  if (w <= beta * rho) return w > 0 ? w * w / rho : 0.0;
  return 2 * beta * w - beta * beta * rho;
}

// Eq. 10 by trying k = 0, 1, 2, ... Where that would take minutes (more than `scanned` tokens), by
// halving, which Eq. 7's monotonicity allows.
inline std::size_t first_certified(const Vector& w, const Vector& r, const Indices& order,
                                   double denominator, double delta, double epsilon) {
  constexpr std::size_t scanned = 130;
  const auto bound = [&](std::size_t k) {
    return certificate_after(w, r, order, k, denominator, delta);
  };
  std::size_t bad = 0;
  std::size_t good = order.size();
  if (order.size() <= scanned) {
    while (bad < good && bound(bad) > epsilon) ++bad;
    return bad;
  }
  if (bound(0) <= epsilon) return 0;
  while (good - bad > 1) {
    const std::size_t middle = bad + (good - bad) / 2;
    (bound(middle) <= epsilon ? good : bad) = middle;
  }
  return good;
}

// The sum of exponentials of `log_term`, as a logarithm.
inline double log_sum_exp(const Vector& log_term) {
  double top = -kInfinite;
  for (const double x : log_term) top = std::max(top, x);
  if (top == -kInfinite) return top;
  double total = 0;
  for (const double x : log_term) total += std::exp(x - top);
  return top + std::log(total);
}

// How far off the sketch is on drawn tokens, of 512 at most: their errors weighed by sqrt(weight) /
// r, as in sketch_error.hpp. sketched: weights by place, relative to shift.
inline double sketch_error(const HeadCase& head, const Vector& exact_logit, const Vector& sketched,
                           double shift) {
  Indices slots;
  for (std::size_t i = 0; i < head.odds.size(); ++i) {
    if (head.resident[i]) slots.push_back(i);
  }
  const std::size_t stride = (slots.size() + 511) / 512;
  double weight = 0;
  double squares = 0;
  double errors = 0;
  for (std::size_t slot = 0; slot < slots.size(); slot += stride) {
    const std::size_t i = slots[slot];
    if (head.odds[i] == kInfinite) continue;
    // Weights below exp(-87) are 0 (attention.hpp), and known to be at most the smallest number.
    const bool vanishes = sketched[i] < std::exp(-87.0);
    const double w =
        vanishes ? static_cast<double>(std::numeric_limits<float>::min()) : sketched[i];
    const double g = std::sqrt(w) * (1 + head.odds[i]) / head.odds[i];
    const double above = exact_logit[i] - shift - std::log(w);
    const double e = vanishes ? std::max(above, 0.0) : above;
    weight += g;
    squares += g * g;
    errors += g * e * e;
  }
  if (weight == 0) return kInfinite;
  return std::sqrt(errors / weight * (1 + 4 * squares / (weight * weight)));
}

// What stands for tokens of L beside the drawn ones: 64 neighbours are a cluster.
struct Cluster {
  Vector centroid;
  double spread_square = 0;  // mean squared distance from it
  double weight = 0;         // of what is not fetched, sketched
  double weight_square = 0;
  // Over drawn tokens: sketched weight and its square; what the coefficient makes of it beyond the
  // weight itself, and the square.
  double drawn = 0;
  double drawn_square = 0;
  double sketched = 0;
  double square = 0;

  // What is not drawn; below a millionth of the whole nothing, as binary32 cannot tell.
  double rest() const {
    const double left = weight - drawn;
    return left > std::ldexp(weight, -20) ? left : 0.0;
  }

  // Sum of squares of what is not drawn, as far as binary32 can tell.
  double rest_square() const {
    return std::min(rest() * rest(),
                    std::max(weight_square - drawn_square, std::ldexp(weight_square, -20)));
  }

  // Share of the drawn tokens. Squares below the smallest number of binary32 are none.
  double own() const {
    if (square < static_cast<double>(std::numeric_limits<float>::min())) return 0;
    const double size = sketched * sketched / square * std::min(1.0, sketched / rest());
    return size / (size + 1);
  }
  // What a drawn token counts of what its coefficient makes of its exact weight beyond the weight.
  double factor() const { return own() > 0 ? own() * rest() / sketched : 0; }
};

inline std::vector<Cluster> clusters(const HeadCase& head) {
  std::vector<Cluster> result((head.odds.size() + 63) / 64);
  const std::size_t dim = static_cast<std::size_t>(head.layer.value_dim);
  for (std::size_t c = 0; c < result.size(); ++c) {
    Vector& centroid = result[c].centroid;
    centroid.assign(dim, 0.0);
    double total = 0;
    const std::size_t end = std::min(head.odds.size(), 64 * c + 64);
    for (std::size_t i = 64 * c; i < end; ++i) {
      if (head.odds[i] == kInfinite) continue;
      total += 1;
      for (std::size_t j = 0; j < dim; ++j) centroid[j] += static_cast<double>(head.value[i][j]);
    }
    for (double& x : centroid) {
      x = static_cast<double>(
          as_stored(static_cast<float>(x / std::max(total, 1.0)), head.storage));
    }
    for (std::size_t i = 64 * c; i < end; ++i) {
      if (head.odds[i] == kInfinite) continue;
      for (std::size_t j = 0; j < dim; ++j) {
        const double off = static_cast<double>(head.value[i][j]) - centroid[j];
        result[c].spread_square += off * off / total;
      }
    }
  }
  return result;
}

inline StepAnswer step(const HeadCase& head, const std::vector<std::vector<float>>& queries) {
  const std::size_t n = head.key.size();
  const std::size_t compressed = head.odds.size();
  const std::size_t group = queries.size();
  const FetchConfig& fetch = head.fetch;
  StepAnswer answer;
  answer.query.resize(group);

  // L, in the paper's terms.
  Indices low;
  Vector r;
  for (std::size_t i = 0; i < compressed; ++i) {
    if (head.odds[i] == kInfinite) continue;
    low.push_back(i);
    r.push_back(head.odds[i] / (1 + head.odds[i]));
  }
  const auto in_high = [&](std::size_t i) { return i >= compressed || head.odds[i] == kInfinite; };

  std::vector<Vector> logit(group);   // exact, of all tokens
  std::vector<Vector> weight(group);  // sketched, of L
  Vector shift(group, -kInfinite);
  Vector denominator(group, 0.0);
  Vector beta(group, 0.0);
  std::vector<Vector> key(group);
  std::vector<bool> wanted(compressed, false);
  const Vector keys = sketched_keys(head);
  for (std::size_t h = 0; h < group; ++h) {
    for (std::size_t i = 0; i < n; ++i) logit[h].push_back(exact_logit(head, queries[h], i));
    const Vector sketched = sketched_logits(head, keys, queries[h]);
    for (std::size_t i = 0; i < n; ++i) {
      shift[h] = std::max(shift[h], in_high(i) ? logit[h][i] : sketched[i]);
    }
    const double sink = head.sinks.empty() ? -kInfinite : static_cast<double>(head.sinks[h]);
    shift[h] = std::max(shift[h], sink);
    for (const std::size_t i : low) weight[h].push_back(std::exp(sketched[i] - shift[h]));
    denominator[h] = sum(weight[h]);
    for (std::size_t i = 0; i < n; ++i) {
      if (in_high(i)) denominator[h] += std::exp(logit[h][i] - shift[h]);
    }
    if (sink > -kInfinite) denominator[h] += std::exp(sink - shift[h]);
    for (std::size_t i = compressed; i < n; ++i) {
      answer.query[h].window_probability.push_back(std::exp(logit[h][i] - shift[h]) /
                                                   denominator[h]);
    }
    if (low.empty()) continue;
    beta[h] = shrinkage(weight[h], r).beta;
    for (std::size_t p = 0; p < low.size(); ++p) {
      key[h].push_back(one_key(weight[h][p], head.odds[low[p]], beta[h]));
    }

    std::vector<bool> own(low.size(), false);
    if (fetch.mode == FetchMode::always) own.assign(low.size(), true);
    if (fetch.mode == FetchMode::verified) {
      if (fetch.epsilon) {
        Vector rank = key[h];
        if (head.study.order == FetchOrder::exact) {
          rank = gains(weight[h], r, denominator[h], fetch.delta);
        }
        Indices order = descending(rank);
        if (head.peeks) {
          std::stable_partition(order.begin(), order.end(),
                                [&](std::size_t p) { return !head.resident[low[p]]; });
        }
        const std::size_t k =
            first_certified(weight[h], r, order, denominator[h], fetch.delta, *fetch.epsilon);
        for (std::size_t p = 0; p < k; ++p) own[order[p]] = true;
      }
      for (std::size_t p = 0; p < low.size(); ++p) {
        if (fetch.risk && key[h][p] > *fetch.risk * denominator[h] * denominator[h]) own[p] = true;
        if (head.study.probability && weight[h][p] > *head.study.probability * denominator[h])
          own[p] = true;
      }
    }
    for (std::size_t p = 0; p < low.size(); ++p) {
      if (!own[p]) continue;
      ++answer.query[h].planned;
      wanted[low[p]] = true;
    }
  }

  for (std::size_t i = 0; i < compressed; ++i) {
    if (wanted[i]) answer.fetched.push_back(i);
  }
  const std::size_t limit =
      fetch.limit_tokens ? static_cast<std::size_t>(*fetch.limit_tokens) : answer.fetched.size();
  if (answer.fetched.size() > limit) {
    answer.limited = true;
    Vector share(compressed, 0.0);
    for (std::size_t p = 0; p < low.size(); ++p) {
      for (std::size_t h = 0; h < group; ++h) {
        share[low[p]] = std::max(share[low[p]], key[h][p] / denominator[h] / denominator[h]);
      }
    }
    std::stable_sort(answer.fetched.begin(), answer.fetched.end(),
                     [&](std::size_t a, std::size_t b) { return share[a] > share[b]; });
    answer.fetched.resize(limit);
    std::sort(answer.fetched.begin(), answer.fetched.end());
  }
  std::vector<bool> exact(n, false);
  for (const std::size_t i : answer.fetched) exact[i] = true;
  for (std::size_t i = 0; i < n; ++i) {
    const bool resident = i >= compressed || head.resident[i];
    answer.residents += resident;
    if (exact[i] && !resident) answer.moved.push_back(i);
  }

  for (std::size_t h = 0; h < group; ++h) {
    QueryAnswer& result = answer.query[h];
    Vector rest_w;
    Vector rest_r;
    for (std::size_t p = 0; p < low.size(); ++p) {
      if (exact[low[p]]) continue;
      rest_w.push_back(weight[h][p]);
      rest_r.push_back(r[p]);
    }
    const Terms rest = terms(rest_w, rest_r);
    result.epsilon = rest_w.empty() ? 0.0 : certificate(rest, denominator[h], fetch.delta);
    if (head.sketch.kind != SketchKind::exact && compressed > 0) {
      Vector sketched(compressed, 0.0);
      for (std::size_t p = 0; p < low.size(); ++p) sketched[low[p]] = weight[h][p];
      result.sketch_error = sketch_error(head, logit[h], sketched, shift[h]);
      const double beyond = result.sketch_error * result.sketch_error - 1;
      const bool measured = result.sketch_error < kInfinite;
      if (rest_w.empty()) {
        result.epsilon = 0;
      } else if (measured ? result.sketch_error >= 7.5 : result.epsilon > 0) {
        result.epsilon = kInfinite;
      } else if (measured && beyond > 0) {
        result.epsilon *= std::exp(beyond);
      }
    }

    // Logarithms of what each token adds to D_hat: no weight is too large or too small for them.
    Vector term(n, -kInfinite);
    std::vector<Cluster> cluster;
    // A sketch that is useless says nothing of clusters.
    bool useless = result.sketch_error >= 7.5 && result.sketch_error < kInfinite;
    useless = useless || std::all_of(rest_w.begin(), rest_w.end(),
                                     [](double w) { return w < std::exp(-87.0); });
    if (head.study.estimator == Estimator::clusters && !useless) cluster = clusters(head);
    double plain = 0;
    double known = 0;
    Vector predicted(n, 0.0);  // by drawn tokens, before it is shared out
    double error = cluster.empty() && result.epsilon > 0 ? kInfinite : 0.0;
    std::size_t p = 0;
    for (std::size_t i = 0; i < n; ++i) {
      if (in_high(i)) {
        term[i] = logit[h][i];
        continue;
      }
      const double w = weight[h][p];
      const double own_r = r[p];
      ++p;
      if (exact[i]) term[i] = logit[h][i];
      if (!exact[i] && !cluster.empty()) {
        cluster[i / 64].weight += w;
        cluster[i / 64].weight_square += w * w;
      }
      if (exact[i] || !head.resident[i]) continue;
      const double lambda = lambda_at(w, own_r, rest.beta);
      const double cap = head.study.cap.value_or(kInfinite) * rest.beta * own_r / (1 - own_r);
      const double most = std::log(cap) + shift[h];
      const double beyond = shift[h] + 60;  // weights of drawn tokens end there (attention.hpp)
      const double own = cluster.empty() ? logit[h][i] : std::min(logit[h][i], beyond);
      term[i] = std::min(std::log(lambda) + own, most) - std::log(own_r);
      if (cluster.empty()) continue;
      // Weights below exp(-87) are 0.
      const double own_w = w < std::exp(-87.0) ? 0.0 : w;
      const double x = std::max(0.0, std::min(lambda * own_w, cap) / own_r - own_w);
      Cluster& c = cluster[i / 64];
      c.drawn += own_w;
      c.drawn_square += own_w * own_w;
      c.sketched += x;
      c.square += x * x;
      const double cv = std::min(std::exp(term[i] - shift[h]), 1e30);
      const double v = std::exp(own - shift[h]);
      plain += cv;
      known += v;
      predicted[i] = std::max(0.0, cv - v);
      term[i] = logit[h][i];
    }
    double mass = 0;
    for (const Cluster& c : cluster) {
      mass += (1 - c.own()) * c.rest();
      error += c.rest_square() * c.spread_square;
    }
    for (std::size_t i = 0; i < compressed && !cluster.empty(); ++i) {
      if (in_high(i) || exact[i] || !head.resident[i]) continue;
      const Cluster& c = cluster[i / 64];
      predicted[i] *= c.factor();
      error += predicted[i] * predicted[i] * c.spread_square;
      mass += predicted[i];
    }
    // What is predicted, moved into what the certificate leaves; in the plan's units.
    double correction = 1;
    if (mass > 0 && result.epsilon < kInfinite) {
      const double slack = result.epsilon * denominator[h];
      const double all = std::clamp(known + mass, plain - slack, plain + slack);
      correction = std::max(0.0, all - known) / mass;
    }
    for (std::size_t i = 0; i < n; ++i) {
      const double more = correction * predicted[i];
      if (more > 0) term[i] = log_sum_exp({term[i], std::log(more) + shift[h]});
    }
    result.output_error = error == 0 ? 0.0 : 1.4 * std::sqrt(error) / denominator[h];
    Vector all = term;
    for (const Cluster& c : cluster)
      all.push_back(std::log(correction * (1 - c.own()) * c.rest()) + shift[h]);
    if (!head.sinks.empty()) all.push_back(static_cast<double>(head.sinks[h]));
    result.lse = log_sum_exp(all);
    result.output.assign(static_cast<std::size_t>(head.layer.value_dim), 0.0);
    for (std::size_t c = 0; c < cluster.size(); ++c) {
      const double share = std::exp(all[n + c] - result.lse);
      for (std::size_t j = 0; share > 0 && j < result.output.size(); ++j)
        result.output[j] += share * cluster[c].centroid[j];
    }
    for (std::size_t i = 0; i < n; ++i) {
      if (term[i] == -kInfinite) continue;
      const double share = std::exp(term[i] - result.lse);
      for (std::size_t j = 0; j < result.output.size(); ++j) {
        result.output[j] += share * static_cast<double>(head.value[i][j]);
      }
    }
  }
  return answer;
}

}  // namespace verkv::reference

#endif  // VERKV_TESTS_REFERENCE_STEP_HPP
