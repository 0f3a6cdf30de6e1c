// What one method did on one text or task: a row of every report.
#ifndef VERKV_BENCH_TEXT_QUALITY_EVAL_ROW_HPP
#define VERKV_BENCH_TEXT_QUALITY_EVAL_ROW_HPP

#include <cstdint>
#include <string>

#include "../../examples/common/statistics.hpp"

namespace verkv::lab {

using examples::kNone;

// kNone where a number does not apply. _low and _high are the ends of 95 % intervals.
struct EvalRow {
  std::string model;
  std::string text;  // exactly one of text and task is set
  std::string task;
  std::int64_t context_tokens = 0;
  // dense, dense_offload, few_bits, full_budget, top_k, top_k_gate, top_k_fetch, top_k_clusters,
  // poisson, paper, risk or risk_and_epsilon
  std::string method;
  std::string importance;
  std::string sketch;     // "2 bits", "3 bits", "exact", "all in 3 bits"; empty: none
  std::string estimator;  // "plain", "clusters"; empty: nothing is estimated

  // Configuration, kNone where off.
  double keep = kNone;
  double epsilon = kNone;
  double delta = kNone;
  double risk = kNone;
  double probability = kNone;
  // How tokens were drawn: power of the importance, least inclusion probability, bound on the
  // coefficient of a drawn token by its exact weight (0: none).
  double exponent = kNone;
  double inclusion_floor = kNone;
  double cap = kNone;

  // Cost: shares of the cache; moved_tokens per step and KV head, moved_bytes per step.
  double resident_fraction = kNone;
  double fetching_share = kNone;  // of decisions
  double moved_fraction = kNone;
  double moved_tokens = kNone;
  double moved_bytes = kNone;
  double read_fraction = kNone;
  double fast_bytes = kNone;
  double cache_bytes = kNone;

  // Quality on a text: KL divergence of the next-token distribution from the dense one, in nats.
  double kl_mean = kNone;
  double kl_low = kNone;
  double kl_high = kNone;
  double kl_median = kNone;
  double kl_p95 = kNone;
  double kl_p999 = kNone;
  double kl_worst = kNone;
  double agreement = kNone;  // share of steps with the dense model's most likely token
  double agreement_low = kNone;
  double agreement_high = kNone;
  double perplexity = kNone;
  double perplexity_dense = kNone;

  // Quality on a task: the share that was solved.
  double score = kNone;
  double score_low = kNone;
  double score_high = kNone;
  double score_dense = kNone;
  double score_dense_low = kNone;
  double score_dense_high = kNone;

  double certificate_median = kNone;
  double certificate_p95 = kNone;
  double certified_share = kNone;

  std::int64_t samples = 0;  // decode steps or task instances
  std::int64_t prompts = 0;
  std::int64_t draws = 0;
  double seconds = kNone;
};

// Calls f(name, member) for every field, in the order of the reports.
template <class Row, class F>
void for_each_field(Row& row, F&& f) {
  f("model", row.model);
  f("text", row.text);
  f("task", row.task);
  f("context_tokens", row.context_tokens);
  f("method", row.method);
  f("importance", row.importance);
  f("sketch", row.sketch);
  f("estimator", row.estimator);
  f("keep", row.keep);
  f("epsilon", row.epsilon);
  f("delta", row.delta);
  f("risk", row.risk);
  f("probability", row.probability);
  f("exponent", row.exponent);
  f("inclusion_floor", row.inclusion_floor);
  f("cap", row.cap);
  f("resident_fraction", row.resident_fraction);
  f("fetching_share", row.fetching_share);
  f("moved_fraction", row.moved_fraction);
  f("moved_tokens", row.moved_tokens);
  f("moved_bytes", row.moved_bytes);
  f("read_fraction", row.read_fraction);
  f("fast_bytes", row.fast_bytes);
  f("cache_bytes", row.cache_bytes);
  f("kl_mean", row.kl_mean);
  f("kl_low", row.kl_low);
  f("kl_high", row.kl_high);
  f("kl_median", row.kl_median);
  f("kl_p95", row.kl_p95);
  f("kl_p999", row.kl_p999);
  f("kl_worst", row.kl_worst);
  f("agreement", row.agreement);
  f("agreement_low", row.agreement_low);
  f("agreement_high", row.agreement_high);
  f("perplexity", row.perplexity);
  f("perplexity_dense", row.perplexity_dense);
  f("score", row.score);
  f("score_low", row.score_low);
  f("score_high", row.score_high);
  f("score_dense", row.score_dense);
  f("score_dense_low", row.score_dense_low);
  f("score_dense_high", row.score_dense_high);
  f("certificate_median", row.certificate_median);
  f("certificate_p95", row.certificate_p95);
  f("certified_share", row.certified_share);
  f("samples", row.samples);
  f("prompts", row.prompts);
  f("draws", row.draws);
  f("seconds", row.seconds);
}

}  // namespace verkv::lab

#endif  // VERKV_BENCH_TEXT_QUALITY_EVAL_ROW_HPP
