// Which sketch of the keys is worth its bits: every candidate reconstructs the keys of a recorded
// cache; logits, plans and estimates then follow the library's formulas in double
// (docs/lab.md#candidates-on-recorded-caches).
//
//   sketch_study FILE [STEPS] [QUERIES]     QUERIES: another recording of the model, whose prompt's
//                                           queries are used instead of the file's own
#include <fmt/format.h>

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
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

#include "rows.hpp"
#include "sketch_candidates.hpp"

namespace {

using namespace verkv;
using namespace verkv::lab;

constexpr double kKeep = 1.0 / 16;
constexpr std::int64_t kSinks = 4;
constexpr std::int64_t kLocal = 32;
constexpr double kDelta = 0.1;
constexpr double kRisk = 1e-4;
constexpr double kEpsilon = 0.05;
constexpr double kCap = 2;
constexpr int kDraws = 4;

Matrix rows_of(const TensorView& view, std::int64_t head) {
  Matrix m(static_cast<Index>(view.tokens), static_cast<Index>(view.dim));
  for (std::int64_t t = 0; t < view.tokens; ++t) {
    const Rows row{view.row(t, head), view.type, 0, static_cast<int>(view.dim)};
    for (std::int64_t j = 0; j < view.dim; ++j)
      m(static_cast<Index>(t), static_cast<Index>(j)) = load_element(row, 0, j);
  }
  return m;
}

std::vector<float> odds_of(const std::vector<float>& importance) {
  const std::size_t n = importance.size();
  std::vector<float> odds(n, to_float(kPositive16Infinity));
  const std::size_t begin = std::min<std::size_t>(n, kSinks);
  const std::size_t end = std::max(begin, n - std::min<std::size_t>(n, kLocal));
  const std::span<const float> tau = std::span(importance).subspan(begin, end - begin);
  std::vector<float> scratch(tau.size());
  const double budget = std::max(0.0, kKeep * static_cast<double>(n) - kSinks - kLocal);
  const Inclusion inclusion = solve_inclusion(tau, budget, std::span(scratch));
  for (std::size_t i = begin; i < end; ++i) {
    odds[i] = to_float(stored_odds(inclusion.probability(static_cast<double>(importance[i]))));
  }
  return odds;
}

// ---- What a candidate does to a step ----

// What is counted for each rule. Rule 0: risk, judged by the certificate that it reports. Rule 1:
// epsilon.
constexpr std::size_t kRules = 2;

struct Tally {
  double weight = 0;  // attention probability of tokens that may be missing
  double bias = 0;
  double square = 0;
  double worst = 0;  // most underestimated token with more than 1 % of the probability
  double plain_square = 0;
  double plain_count = 0;
  double moved[kRules] = {};
  double steps = 0;
  double missed[kRules] = {};
  double decisions[kRules] = {};
  Vector error[kRules];
};

using Tokens = std::vector<std::uint32_t>;
using Marks = std::vector<bool>;  // one for each token

// Weights of one query head: from the sketch, and exact, relative to the sketch's largest logit.
struct Weights {
  Vector sketched;
  Vector exact;
  double denominator = 0;  // of the sketched ones
};

// Of the tokens in `at`.
Vector chosen(const Vector& values, const Tokens& at) {
  Vector result;
  for (const std::uint32_t i : at) result.push_back(values[i]);
  return result;
}

Weights weigh(const Head& head, const Matrix& exact, const Matrix& sketched, Index row,
              const Tokens& low, Tally& tally) {
  const std::size_t n = head.odds.size();
  Vector logit(n);
  Vector estimate(n);
  double top = -1e300;
  double exact_top = -1e300;
  for (std::size_t i = 0; i < n; ++i) {
    logit[i] = head.scale * static_cast<double>(exact(row, static_cast<Index>(i)));
    estimate[i] = std::isinf(head.odds[i])
                      ? logit[i]
                      : head.scale * static_cast<double>(sketched(row, static_cast<Index>(i)));
    top = std::max(top, estimate[i]);
    exact_top = std::max(exact_top, logit[i]);
  }
  Weights weights{Vector(n), Vector(n), 0};
  double exact_denominator = 0;
  for (std::size_t i = 0; i < n; ++i) {
    weights.sketched[i] = std::exp(estimate[i] - top);
    weights.exact[i] = std::exp(logit[i] - top);
    weights.denominator += weights.sketched[i];
    exact_denominator += std::exp(logit[i] - exact_top);
  }
  for (const std::uint32_t i : low) {
    const double p = std::exp(logit[i] - exact_top) / exact_denominator;
    const double off = estimate[i] - logit[i];
    tally.weight += p;
    tally.bias += p * off;
    tally.square += p * off * off;
    if (p > 0.01) tally.worst = std::min(tally.worst, off);
    tally.plain_square += off * off;
    tally.plain_count += 1;
  }
  return weights;
}

// Adds what each rule fetches for one query head.
void plan(const Weights& weights, const Vector& rho, const Tokens& low,
          std::vector<Marks>& fetched) {
  const Vector w = chosen(weights.sketched, low);
  const Vector r = chosen(rho, low);
  const double d = weights.denominator;
  const double beta = shrinkage_beta(std::span<const double>(w), std::span<const double>(r));
  Vector worth;
  for (std::size_t p = 0; p < low.size(); ++p) worth.push_back(fetch_worth(w[p], r[p], beta));
  for (std::size_t p = 0; p < low.size(); ++p) {
    if (worth[p] > kRisk * d * d) fetched[0][low[p]] = true;
  }
  Tokens order(low.size());
  order_by_descending(std::span<const double>(worth), order);
  Vector a(low.size());
  Vector b(low.size());
  const std::size_t count =
      certified_prefix<double>(w, r, order, d, log_two_over(kDelta), kEpsilon, a, b);
  for (std::size_t p = 0; p < count; ++p) fetched[1][low[order[p]]] = true;
}

std::vector<Marks> draw_samples(const Head& head, const Vector& rho, const Tokens& low) {
  std::vector<Marks> drawn_tokens(kDraws, Marks(rho.size(), false));
  for (std::size_t draw = 0; draw < drawn_tokens.size(); ++draw) {
    DrawId name = head.draw;
    name.sequence = draw;
    for (const std::uint32_t i : low) {
      drawn_tokens[draw][i] = drawn(name, i, probability_from_odds(rho[i]));
    }
  }
  return drawn_tokens;
}

// Estimates denominator and output of one query head from every draw, and counts misses.
void judge(const Head& head, const Weights& weights, const Vector& rho, const Tokens& low,
           const Marks& fetched, const std::vector<Marks>& samples, std::size_t rule,
           Tally& tally) {
  const Vector& x = weights.exact;
  Tokens rest;
  for (const std::uint32_t i : low) {
    if (!fetched[i]) rest.push_back(i);
  }
  const Vector w = chosen(weights.sketched, rest);
  const Vector r = chosen(rho, rest);
  const double beta = shrinkage_beta(std::span<const double>(w), std::span<const double>(r));
  const double bound =
      certificate(tail_terms(std::span<const double>(w), std::span<const double>(r), beta),
                  weights.denominator, log_two_over(kDelta));
  const auto value_of = [&head](std::size_t i) {
    return head.values.row(static_cast<Index>(i)).cast<double>();
  };
  // Of all tokens, and of those that are resident or fetched for certain.
  double all = 0;
  double sure = 0;
  Eigen::RowVectorXd all_value = Eigen::RowVectorXd::Zero(head.values.cols());
  Eigen::RowVectorXd sure_value = all_value;
  Marks open(x.size(), false);
  for (const std::uint32_t i : rest) open[i] = true;
  for (std::size_t i = 0; i < x.size(); ++i) {
    all += x[i];
    if (x[i] > 1e-9 * all) all_value += x[i] * value_of(i);
    if (open[i]) continue;
    sure += x[i];
    if (x[i] > 1e-9 * all) sure_value += x[i] * value_of(i);
  }
  const Eigen::RowVectorXd truth = all_value / all;
  for (const Marks& sample : samples) {
    double estimate = sure;
    Eigen::RowVectorXd value = sure_value;
    for (std::size_t p = 0; p < rest.size(); ++p) {
      const std::uint32_t i = rest[p];
      if (!sample[i]) continue;
      const double part = x[i] * drawn_coefficient(w[p], x[i], r[p], beta, kCap);
      estimate += part;
      value += part * value_of(i);
    }
    const double promised = rule == 0 ? bound : kEpsilon;
    tally.missed[rule] += std::fabs(estimate / all - 1) > promised ? 1 : 0;
    tally.decisions[rule] += 1;
    tally.error[rule].push_back((value / estimate - truth).norm() / truth.norm());
  }
}

void add_step(const Head& head, const Matrix& exact, const Matrix& sketched, Index step,
              Tally& tally) {
  const std::size_t n = head.odds.size();
  const Vector rho(head.odds.begin(), head.odds.end());
  Tokens low;
  for (std::size_t i = 0; i < n; ++i) {
    if (!std::isinf(rho[i])) low.push_back(static_cast<std::uint32_t>(i));
  }
  std::vector<Weights> weights;
  std::vector<Marks> fetched(kRules, Marks(n, false));
  for (int g = 0; g < head.group; ++g) {
    weights.push_back(weigh(head, exact, sketched, step * head.group + g, low, tally));
    plan(weights.back(), rho, low, fetched);
  }
  tally.steps += 1;
  const std::vector<Marks> samples = draw_samples(head, rho, low);
  for (std::size_t rule = 0; rule < kRules; ++rule) {
    for (const std::uint32_t i : low) {
      for (const Marks& sample : samples) {
        tally.moved[rule] += fetched[rule][i] && !sample[i] ? 1.0 / kDraws : 0;
      }
    }
    for (const Weights& one : weights) {
      judge(head, one, rho, low, fetched[rule], samples, rule, tally);
    }
  }
}

// ---- The recording ----

// The layer of `lender` whose prompt's queries stand in for those of `layer`.
const RecordedLayer& lent_by(const RecordedCache& lender, const RecordedLayer& layer) {
  for (const RecordedLayer& candidate : lender.layers()) {
    if (candidate.index == layer.index && candidate.query_heads == layer.query_heads &&
        candidate.key_dim == layer.key_dim) {
      return candidate;
    }
  }
  throw InvalidArgument(fmt::format("there are no other queries for layer {}", layer.index));
}

Head read_head(const RecordedLayer& layer, const RecordedLayer& queries, std::int64_t kv_head,
               std::int64_t steps, double scale) {
  const auto scores = layer.importance.find("kvzip_mean");
  if (scores == layer.importance.end()) {
    throw InvalidArgument(fmt::format("layer {} has no importance kvzip_mean", layer.index));
  }
  const int group = static_cast<int>(layer.query_heads / layer.kv_heads);
  Head head;
  head.keys = rows_of(layer.key, kv_head);
  head.values = rows_of(layer.value, kv_head);
  head.group = group;
  head.scale = scale;
  head.draw = {0, 0, static_cast<std::uint32_t>(layer.index), static_cast<std::uint32_t>(kv_head)};
  const std::int64_t used = std::min(steps, layer.query.tokens);
  head.queries.resize(static_cast<Index>(used * group), head.keys.cols());
  const std::int64_t positions =
      queries.prompt_query.data == nullptr ? 0 : queries.prompt_query.tokens;
  head.prompt_queries.resize(static_cast<Index>(positions * group), head.keys.cols());
  for (int g = 0; g < group; ++g) {
    const Matrix q = rows_of(layer.query, kv_head * group + g);
    for (std::int64_t s = 0; s < used; ++s) {
      head.queries.row(static_cast<Index>(s * group + g)) = q.row(static_cast<Index>(s));
    }
    if (positions > 0) {
      head.prompt_queries.middleRows(static_cast<Index>(g * positions),
                                     static_cast<Index>(positions)) =
          rows_of(queries.prompt_query, kv_head * group + g);
    }
  }
  const float* tau = scores->second.data + kv_head * scores->second.head_stride;
  head.importance.assign(tau, tau + scores->second.tokens);
  head.odds = odds_of(head.importance);
  return head;
}

std::vector<Head> read_heads(const std::string& path, std::int64_t steps,
                             const std::optional<std::string>& other) {
  const RecordedCache cache = RecordedCache::load(path);
  std::optional<RecordedCache> lender;
  if (other) lender.emplace(RecordedCache::load(*other));
  std::vector<Head> heads;
  for (const RecordedLayer& layer : cache.layers()) {
    const RecordedLayer& queries = lender ? lent_by(*lender, layer) : layer;
    for (std::int64_t h = 0; h < layer.kv_heads; ++h) {
      heads.push_back(read_head(layer, queries, h, steps, cache.scale()));
    }
  }
  if (heads.empty() || heads.front().prompt_queries.rows() == 0) {
    throw InvalidArgument(fmt::format("{}: no prompt queries", path));
  }
  return heads;
}

double mean_square_root(const Vector& x) {
  double sum = 0;
  for (const double v : x) sum += v * v;
  return std::sqrt(sum / static_cast<double>(x.size()));
}

Tally study(const Candidate& candidate, const std::vector<Head>& heads) {
  Tally tally;
  for (const Head& head : heads) {
    const Matrix keys = candidate.sketch(head);
    const Matrix exact = head.queries * head.keys.transpose();
    const Matrix sketched = head.queries * keys.transpose();
    for (Index s = 0; s < head.queries.rows() / head.group; ++s) {
      add_step(head, exact, sketched, s, tally);
    }
  }
  return tally;
}

void run(const std::string& path, std::int64_t steps, const std::optional<std::string>& other) {
  const std::vector<Head> heads = read_heads(path, steps, other);
  const auto tokens = static_cast<double>(heads.back().keys.rows());
  fmt::print("{}: {} KV heads, {} tokens, {} steps, {} draws, 16x\n\n", path, heads.size(),
             heads.front().keys.rows(), heads.front().queries.rows() / heads.front().group, kDraws);
  fmt::print(
      "| sketch | bits | logit error: bias, deviation, worst (by attention) | deviation, all "
      "tokens | risk 1e-4: moved %, missed %, output error % | eps 0.05: moved %, missed %, "
      "error % |\n|---|---|---|---|---|---|\n");
  for (const Candidate& candidate : candidates()) {
    const Tally tally = study(candidate, heads);
    fmt::print("| {} | {:.2f} | {:.2f}, {:.2f}, {:.1f} | {:.2f} |", candidate.name,
               candidate.bits(static_cast<int>(heads.front().keys.cols())),
               tally.bias / tally.weight, std::sqrt(tally.square / tally.weight), tally.worst,
               std::sqrt(tally.plain_square / tally.plain_count));
    for (std::size_t rule = 0; rule < kRules; ++rule) {
      fmt::print(" {:.{}f}, {:.2f}, {:.1f} |", 100 * tally.moved[rule] / tally.steps / tokens,
                 rule == 0 ? 3 : 2, 100 * tally.missed[rule] / tally.decisions[rule],
                 100 * mean_square_root(tally.error[rule]));
    }
    fmt::print("\n");
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc < 2 || argc > 4) throw InvalidArgument("sketch_study FILE [STEPS] [QUERIES]");
    const long steps = argc > 2 ? std::strtol(argv[2], nullptr, 10) : 16;
    if (steps < 1) throw InvalidArgument(fmt::format("{} steps; 1 or more are needed", steps));
    run(argv[1], steps, argc > 3 ? std::optional<std::string>(argv[3]) : std::nullopt);
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "sketch_study: {}\n", error.what());
    return 1;
  }
}
