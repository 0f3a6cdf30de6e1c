// Recorded caches (docs/recorded_cache.md) of a running model, and of an earlier recording again.
#ifndef VERKV_EXAMPLES_LLAMA_CPP_RECORD_HPP
#define VERKV_EXAMPLES_LLAMA_CPP_RECORD_HPP

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "engine.hpp"
#include "hook.hpp"
#include "importance.hpp"

namespace verkv::llm {

struct RecordOptions {
  std::string out;
  std::vector<std::int64_t> layers;  // of the model; empty: all that attend to everything
  std::int64_t steps = 64;
  std::set<Score> scores;
  std::int64_t query_positions_count = 64;  // of the prompt, every eighth from the end; 0: none
  std::int64_t repeat_chunk_tokens = 2000;  // of the prompt at a time, for scores by repetition
  std::string source;                       // metadata: where the prompt is from
  std::string model_note;                   // metadata: added to the model's name
};

// Reads `prompt` and takes `steps` steps with the first of the tokens `next`. Writes `out`, which
// carries the tokens as well.
// Throws InvalidArgument for options that fit no such file, EngineError for a layer that the model
// does not have or that has a window, for layers of different scale or soft cap (the file has one),
// and where the context is too short; OutputFileError where `out` cannot be written.
void record(Engine& engine, const AttentionHook& hook, std::span<const Token> prompt,
            std::span<const Token> next, const RecordOptions& options,
            const PromptProgress& progress);

struct TensorDifference {
  std::string name;
  double relative = 0;   // |new - old| / |old| of the whole tensor
  double worst_row = 0;  // the same of the worst row: one token, one head
  // Of importance only, mean over heads; the wording of a repetition may differ.
  bool importance = false;
  double correlation = 0;
  double rank_correlation = 0;
};

struct LikeReport {
  std::int64_t tokens = 0;    // of prompt and steps
  std::int64_t distinct = 0;  // different ones among them
  bool recovered = false;     // from the values of layer 0; the file does not carry the ids
  double worst_distance = 0;  // of a token's value to the recorded one, relative
  double worst_margin = 0;    // that distance over the distance of the second nearest token
  std::int64_t repeat_chunk_tokens = 0;  // 0: no score by repetition
  std::vector<TensorDifference> tensors;
};

// Makes `recording` again with the same tokens, its layers and its scores, compares, and writes it
// to `out` unless that is empty. Where the file does not carry the ids, each token is recovered
// from its value in layer 0, which depends on nothing else. `repeat_chunk_tokens` is halved until
// the context can hold it. Throws FormatError for the file, EngineError where the model is another
// one or a token is not clearly nearest, and what record throws.
LikeReport record_like(Engine& engine, const AttentionHook& hook, const std::string& recording,
                       const std::string& out, const std::string& model_note,
                       const PromptProgress& progress, std::int64_t repeat_chunk_tokens = 2000);

// One line per tensor.
std::string like_table(const LikeReport& report);

}  // namespace verkv::llm

#endif  // VERKV_EXAMPLES_LLAMA_CPP_RECORD_HPP
