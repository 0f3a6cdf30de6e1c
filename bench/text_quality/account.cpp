#include "account.hpp"

#include "../../examples/common/cache_options.hpp"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

namespace verkv::lab {

namespace {

using examples::Interval;

double finite_or_none(double value) { return std::isfinite(value) ? value : kNone; }

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return values.empty() ? kNone : sum / static_cast<double>(values.size());
}

// Steps of one text are alike; blocks of this many are nearly independent.
constexpr std::size_t kBlockSteps = 16;

double mean_of(const std::vector<DecodeCost>& costs, double DecodeCost::*member) {
  double sum = 0;
  for (const DecodeCost& cost : costs) sum += cost.*member;
  return costs.empty() ? kNone : sum / static_cast<double>(costs.size());
}

EvalRow describe(const Method& method, const EvalOptions& options, const Engine& engine) {
  EvalRow row;
  row.model = engine.model_name();
  row.context_tokens = options.context_tokens;
  row.method = method.name;
  if (!method.cached) return row;
  row.importance = name(method.score);
  row.sketch = sketch_label(method.config);
  if (!row.sketch.empty()) row.estimator = name(method.config.study.estimator);
  row.keep = method.config.keep;
  if (method.random) {
    row.exponent = method.exponent;
    row.inclusion_floor = method.config.study.inclusion_floor;
    row.cap = method.config.study.cap.value_or(0);
  }
  if (method.bits > 0) row.sketch = fmt::format("all in {} bits", method.bits);
  if (method.config.fetch.mode == FetchMode::verified) {
    row.epsilon = method.config.fetch.epsilon.value_or(kNone);
    row.risk = method.config.fetch.risk.value_or(kNone);
    row.probability = method.config.study.probability.value_or(kNone);
    if (std::isfinite(row.epsilon)) row.delta = method.config.fetch.delta;
  }
  return row;
}

void add_costs(const Method& method, Account& account, EvalRow& row) {
  if (method.name == "dense_offload") {
    // Dense attention over a cache in host memory: everything moves at every step.
    row.resident_fraction = 0;
    row.fetching_share = 1;
    row.moved_fraction = 1;
    row.read_fraction = 1;
  }
  if (account.costs.empty()) return;
  row.resident_fraction = mean_of(account.costs, &DecodeCost::resident_fraction);
  row.fetching_share = mean_of(account.costs, &DecodeCost::fetching_share);
  row.moved_fraction = mean_of(account.costs, &DecodeCost::moved_fraction);
  row.moved_tokens = mean_of(account.costs, &DecodeCost::moved_tokens);
  row.moved_bytes = mean_of(account.costs, &DecodeCost::moved_bytes);
  row.read_fraction = mean_of(account.costs, &DecodeCost::read_fraction);
  row.fast_bytes = mean_of(account.costs, &DecodeCost::fast_bytes);
  row.cache_bytes = mean_of(account.costs, &DecodeCost::cache_bytes);
  // Without an epsilon nothing was promised that could be kept.
  if (std::isfinite(row.epsilon)) {
    row.certified_share = mean_of(account.costs, &DecodeCost::certified_share);
  }
  row.certificate_median = finite_or_none(examples::quantile(account.certificates, 0.5));
  row.certificate_p95 = finite_or_none(examples::quantile(account.certificates, 0.95));
}

}  // namespace

void Account::add_cost(const CacheDecoder& decoder) {
  costs.push_back(decoder.cost());
  const std::vector<double>& reached = decoder.certificates();
  certificates.insert(certificates.end(), reached.begin(), reached.end());
}

EvalRow text_row(const Method& method, Account& account, const Reference& reference,
                 const EvalOptions& options, const Engine& engine, const std::string& text) {
  EvalRow row = describe(method, options, engine);
  row.text = text;
  add_costs(method, account, row);
  row.kl_mean = mean(account.divergences);
  // Draws of one prompt are no more prompts, and blocks do not run from one prompt into the next.
  std::vector<double> whole_blocks;
  const auto of_prompt = static_cast<std::size_t>(options.steps);
  for (std::size_t first = 0; first < account.step_means.size(); first += of_prompt) {
    const auto begin = account.step_means.begin() + static_cast<std::ptrdiff_t>(first);
    whole_blocks.insert(whole_blocks.end(), begin,
                        begin + static_cast<std::ptrdiff_t>(of_prompt / kBlockSteps * kBlockSteps));
  }
  const Interval interval = examples::mean_interval(whole_blocks, kBlockSteps);
  row.kl_low = std::isnan(interval.low) ? kNone : std::max(0.0, interval.low);
  row.kl_high = interval.high;
  row.kl_median = examples::quantile(account.divergences, 0.5);
  row.kl_p95 = examples::quantile(account.divergences, 0.95);
  row.kl_p999 = examples::quantile(account.divergences, 0.999);
  row.kl_worst = examples::quantile(account.divergences, 1);
  row.agreement = account.agreements.value();
  const Interval agreement =
      examples::wilson_interval(row.agreement, static_cast<double>(account.step_means.size()));
  row.agreement_low = agreement.low;
  row.agreement_high = agreement.high;
  const double steps = static_cast<double>(account.divergences.size());
  row.perplexity = std::exp(account.log_loss / steps);
  row.perplexity_dense = std::exp(reference.log_loss / static_cast<double>(reference.steps));
  row.samples = static_cast<std::int64_t>(account.divergences.size());
  row.prompts = options.prompts;
  row.draws = method.random ? options.draws : 1;
  row.seconds = account.seconds;
  return row;
}

EvalRow task_row(const Method& method, Account& account, const Reference& reference,
                 const EvalOptions& options, const Engine& engine, TaskKind task) {
  EvalRow row = describe(method, options, engine);
  row.task = name(task);
  add_costs(method, account, row);
  row.score = mean(account.scores);
  const double instances = static_cast<double>(account.scores.size());
  const Interval score = examples::wilson_interval(row.score, instances);
  row.score_low = score.low;
  row.score_high = score.high;
  row.score_dense = mean(reference.scores);
  const Interval dense = examples::wilson_interval(row.score_dense, instances);
  row.score_dense_low = dense.low;
  row.score_dense_high = dense.high;
  row.samples = static_cast<std::int64_t>(account.scores.size());
  row.prompts = options.instances;
  row.draws = method.random ? options.draws : 1;
  row.seconds = account.seconds;
  return row;
}

}  // namespace verkv::lab
