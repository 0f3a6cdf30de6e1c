// Recorded caches (docs/recorded_cache.md) of a running model.
#ifndef VERKV_BENCH_TEXT_QUALITY_RECORD_HPP
#define VERKV_BENCH_TEXT_QUALITY_RECORD_HPP

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "example.hpp"
#include "importance.hpp"

#include <verkv/types.hpp>

namespace verkv::lab {

struct RecordOptions {
  std::string out;
  // Of the model; empty: all that attend to everything.
  std::vector<std::int64_t> layers;
  std::int64_t steps = 64;
  std::set<Score> scores;
  // Of the prompt, every eighth from the end; 0: none.
  std::int64_t query_positions_count = 64;
  // Of the prompt at a time, for scores by repetition.
  std::int64_t repeat_chunk_tokens = 2000;
  // Metadata: where the prompt is from, and what is added to the model's name.
  std::string source;
  std::string model_note;
};

// Reads `prompt` and takes `steps` steps with the first of the tokens `next`. Writes `out`, which
// carries the tokens as well.
// Throws InvalidArgument for options that fit no such file, EngineError for a layer that the model
// does not have or that has a window, for layers of different scale or soft cap (the file has one),
// and where the context is too short; OutputFileError where `out` cannot be written.
void record(Engine& engine, const AttentionHook& hook, std::span<const Token> prompt,
            std::span<const Token> next, const RecordOptions& options,
            const PromptProgress& progress);

// One layer in the order of the file.
struct RecordingLayer {
  AttentionLayer shape;
  std::vector<Half> key;     // [KV head][token][key_dim]
  std::vector<Half> value;   // [KV head][token][value_dim]
  std::vector<float> query;  // [step][query head][key_dim]
  std::vector<Half> new_key;
  std::vector<Half> new_value;
  std::vector<Half> prompt_query;
  std::map<Score, std::vector<float>> importance;
};

struct Recording {
  std::vector<Token> prompt;
  std::vector<Token> next;
  std::vector<std::int64_t> positions;  // of prompt_query
  std::vector<RecordingLayer> layers;
};

// The two halves of record(): what it reads, and what it writes. options.out is not looked at by
// the first.
Recording make_recording(Engine& engine, const AttentionHook& hook, std::span<const Token> prompt,
                         std::span<const Token> next, const RecordOptions& options,
                         const PromptProgress& progress);
void write_recording(const Recording& recording, const Engine& engine,
                     const RecordOptions& options);

// "1,2,3": a list of numbers as the file's metadata has it.
template <class Number>
std::string comma_list(const std::vector<Number>& numbers) {
  std::string text;
  for (const Number number : numbers) {
    if (!text.empty()) text += ',';
    text += std::to_string(number);
  }
  return text;
}

}  // namespace verkv::lab

#endif  // VERKV_BENCH_TEXT_QUALITY_RECORD_HPP
