// What a cache does to the text: distance to the dense model's next-token distributions, and
// answers to long-context tasks.
#ifndef VERKV_EXAMPLES_LLAMA_CPP_EVALUATE_HPP
#define VERKV_EXAMPLES_LLAMA_CPP_EVALUATE_HPP

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "../common/backend.hpp"
#include "engine.hpp"
#include "eval_row.hpp"
#include "gate.hpp"
#include "hook.hpp"
#include "importance.hpp"
#include "tasks.hpp"
#include "texts.hpp"

#include <verkv/kv_cache_manager.hpp>

namespace verkv::llm {

// One way of holding and fetching the prompt.
struct Method {
  std::string name;  // as EvalRow::method
  CacheConfig config;
  Score score = Score::kvzip_mean;
  bool cached = true;   // false: the engine itself answers
  bool random = false;  // draws differ
};

struct EvalOptions {
  std::vector<TextKind> texts;
  std::vector<std::string> files;  // texts of the user; their names tell them apart
  std::vector<TaskKind> tasks;
  std::int64_t context_tokens = 4000;
  std::int64_t steps = 256;     // teacher-forced, of texts
  std::int64_t prompts = 1;     // of each text
  std::int64_t instances = 16;  // of each task
  std::int64_t draws = 1;       // of each random method
  std::uint64_t seed = 0;       // of texts, tasks and draws
  int threads = 0;
  BackendKind backend = BackendKind::cpu;

  std::set<std::string> methods;  // names; empty: all
  std::vector<double> keeps{1.0 / 8, 1.0 / 16, 1.0 / 32};
  std::vector<double> epsilons{0.01, 0.05, 0.1, 0.3, 0.5};
  std::vector<double> risks{1e-2, 1e-3, 1e-4, 1e-5, 1e-6};
  std::vector<double> probabilities{1e-2, 1e-3, 1e-4};
  std::vector<SketchConfig> sketches{SketchConfig{}};
  std::vector<Score> sampling_scores{Score::kvzip_mean};  // of the methods that draw
  std::vector<Score> largest_scores{Score::kvzip};        // of top-k
  const Gate* gate = nullptr;
};

// Every combination that the options ask for. Throws InvalidArgument, with the names there are,
// where a name in options.methods is none, and where they ask for no method at all.
std::vector<Method> select_methods(const EvalOptions& options);

// Called now and then: share of the work done, and what is being done.
using EvalProgress = std::function<void(double share, const std::string& text)>;
// Called with all rows so far whenever some have become final.
using EvalSave = std::function<void(const std::vector<EvalRow>& rows)>;

// Throws EngineError where text, steps and scoring do not fit the context, naming both lengths.
std::vector<EvalRow> evaluate(Engine& engine, const AttentionHook& hook, const EvalOptions& options,
                              const EvalProgress& progress, const EvalSave& save);

// "2 bits", "exact"; empty for a method without one.
std::string sketch_label(const CacheConfig& config);

}  // namespace verkv::llm

#endif  // VERKV_EXAMPLES_LLAMA_CPP_EVALUATE_HPP
