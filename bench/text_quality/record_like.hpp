// An earlier recording made again: what differs says whether engine and hook still do the same.
#ifndef VERKV_BENCH_TEXT_QUALITY_RECORD_LIKE_HPP
#define VERKV_BENCH_TEXT_QUALITY_RECORD_LIKE_HPP

#include <cstdint>
#include <string>
#include <vector>

#include "example.hpp"
#include "importance.hpp"

namespace verkv::lab {

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

}  // namespace verkv::lab

#endif  // VERKV_BENCH_TEXT_QUALITY_RECORD_LIKE_HPP
