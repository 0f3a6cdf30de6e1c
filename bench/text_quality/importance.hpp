// Importance of a prompt's tokens by several scores, some of which cost a second pass.
#ifndef VERKV_BENCH_TEXT_QUALITY_IMPORTANCE_HPP
#define VERKV_BENCH_TEXT_QUALITY_IMPORTANCE_HPP

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string_view>

#include "example.hpp"

namespace verkv::lab {

// kvzip: the largest attention probability a token gets while the model repeats the prompt, over
//   repeat positions and the query heads of its KV head (KVzip, Kim et al. 2025). kvzip_mean,
//   kvzip_rms: mean and root mean square of the same, which sampling wants
//   (docs/math/importance.md).
// snapkv: probability from the last 64 prompt positions, summed, then the largest of 7 neighbours
//   (SnapKV, Li et al. 2024). h2o: summed over all prompt positions (H2O, Zhang et al. 2023).
// key_norm: 1 / |key| (Devoto et al. 2024). gate: a linear gate on the layer's input (gate.hpp).
enum class Score { kvzip, kvzip_mean, kvzip_rms, snapkv, h2o, key_norm, gate };

std::string_view name(Score score);
std::optional<Score> parse_score(std::string_view text);
bool needs_repeat(Score score);

// A prompt and every score that was asked for.
struct ScoredPrompt {
  Prompt prompt;
  std::map<Score, Importance> scores;
};

class Gate;

struct PromptOptions {
  std::set<Score> scores;
  // For Score::gate.
  const Gate* gate = nullptr;
  // Of the prompt at a time, for scores by repetition; less where the engine has less room.
  std::int64_t repeat_chunk_tokens = 2000;
  // Late positions whose queries are kept, every eighth.
  std::int64_t query_count = 64;
  // Gets the inputs of the prompt's layers, as AttentionVisitor::hidden does.
  std::function<void(const AttentionLayer& layer, std::int64_t position, std::int64_t tokens,
                     std::int64_t width, const float* data)>
      hidden_sink;
};

// Called with tokens computed and tokens to compute.
using PromptProgress = std::function<void(std::int64_t done, std::int64_t total)>;

// Tokens that scoring appends beyond the prompt, and that the context must have room for.
std::int64_t scoring_tokens(const Engine& engine, std::int64_t prompt_tokens,
                            const PromptOptions& options);

// Prefills `tokens` from position 0 and scores them; the engine holds exactly them afterwards.
// Throws EngineError where the context cannot hold what scoring appends, and InvalidArgument for
// Score::gate without a gate.
ScoredPrompt read_prompt(Engine& engine, const AttentionHook& hook, std::span<const Token> tokens,
                         const PromptOptions& options, const PromptProgress& progress);

}  // namespace verkv::lab

#endif  // VERKV_BENCH_TEXT_QUALITY_IMPORTANCE_HPP
