// What a cache does to the text: distance to the dense model's next-token distributions, and
// answers to long-context tasks.
#ifndef VERKV_BENCH_TEXT_QUALITY_EVALUATE_HPP
#define VERKV_BENCH_TEXT_QUALITY_EVALUATE_HPP

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "../../examples/common/backend.hpp"
#include "eval_row.hpp"
#include "example.hpp"
#include "gate.hpp"
#include "methods.hpp"
#include "tasks.hpp"
#include "texts.hpp"

namespace verkv::lab {

struct EvalOptions {
  std::vector<TextKind> texts;
  std::vector<std::string> files;  // texts of the user; their names tell them apart
  std::vector<TaskKind> tasks;
  std::int64_t context_tokens = 4000;
  // With the true tokens, of texts.
  std::int64_t steps = 256;
  // Of each text, of each task and of each random method.
  std::int64_t prompts = 1;
  std::int64_t instances = 16;
  std::int64_t draws = 1;
  // Of texts, tasks and draws.
  std::uint64_t seed = 0;
  int threads = 0;
  BackendKind backend = BackendKind::cpu;

  MethodGrid grid;
  // For Score::gate.
  const Gate* gate = nullptr;
};

// Called now and then: share of the work done, and what is being done.
using EvalProgress = std::function<void(double share, const std::string& text)>;
// Called with all rows so far whenever some have become final.
using EvalSave = std::function<void(const std::vector<EvalRow>& rows)>;

// Throws EngineError where text, steps and scoring do not fit the context, naming both lengths.
std::vector<EvalRow> evaluate(Engine& engine, const AttentionHook& hook, const EvalOptions& options,
                              const EvalProgress& progress, const EvalSave& save);

}  // namespace verkv::lab

#endif  // VERKV_BENCH_TEXT_QUALITY_EVALUATE_HPP
