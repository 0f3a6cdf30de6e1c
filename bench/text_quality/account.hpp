// What a method did on a text or task, and the row of a report that comes of it.
#ifndef VERKV_BENCH_TEXT_QUALITY_ACCOUNT_HPP
#define VERKV_BENCH_TEXT_QUALITY_ACCOUNT_HPP

#include <cstdint>
#include <string>
#include <vector>

#include "../../examples/common/statistics.hpp"
#include "eval_row.hpp"
#include "evaluate.hpp"
#include "example.hpp"
#include "methods.hpp"
#include "tasks.hpp"

namespace verkv::lab {

// Everything that a method did on one text or task.
struct Account {
  std::vector<double> divergences;  // of all draws
  std::vector<double> step_means;   // [prompt][step], over the draws
  std::vector<double> scores;
  std::vector<double> certificates;
  std::vector<DecodeCost> costs;
  examples::Rate agreements;  // "failures" are the agreements counted
  double log_loss = 0;
  double seconds = 0;

  // What decoding with the cache cost; `decoder` has decoded everything.
  void add_cost(const CacheDecoder& decoder);
};

// What all methods on one text or task share.
struct Reference {
  double log_loss = 0;
  std::int64_t steps = 0;
  std::vector<double> scores;
};

EvalRow text_row(const Method& method, Account& account, const Reference& reference,
                 const EvalOptions& options, const Engine& engine, const std::string& text);
EvalRow task_row(const Method& method, Account& account, const Reference& reference,
                 const EvalOptions& options, const Engine& engine, TaskKind task);

}  // namespace verkv::lab

#endif  // VERKV_BENCH_TEXT_QUALITY_ACCOUNT_HPP
