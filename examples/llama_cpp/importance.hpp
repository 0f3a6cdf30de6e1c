// Importance of a prompt's tokens, from what the engine computes anyway.
#ifndef VERKV_EXAMPLES_LLAMA_CPP_IMPORTANCE_HPP
#define VERKV_EXAMPLES_LLAMA_CPP_IMPORTANCE_HPP

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine.hpp"
#include "hook.hpp"

#include <verkv/types.hpp>

namespace verkv::llm {

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

// A prompt as one layer holds it.
struct PromptLayer {
  AttentionLayer shape;
  std::vector<Half> keys;                      // [token][KV head][key_dim]
  std::vector<Half> values;                    // [token][KV head][value_dim]
  std::map<Score, std::vector<float>> scores;  // [KV head][token]
  std::vector<float> queries;                  // [position][query head][key_dim]
};

// A prompt as a cache will get it: the layers that attend to everything.
struct Prompt {
  std::vector<Token> tokens;
  std::vector<PromptLayer> layers;
  std::vector<std::int64_t> query_positions;  // of PromptLayer::queries, ascending
  double seconds_prefill = 0;
  double seconds_scores = 0;
};

class Gate;

struct PromptOptions {
  std::set<Score> scores;
  const Gate* gate = nullptr;               // for Score::gate
  std::int64_t repeat_chunk_tokens = 2000;  // less where the engine has less room
  std::int64_t query_count = 64;            // late positions whose queries are kept, every eighth
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
// Throws EngineError where the context cannot hold what scoring appends.
Prompt read_prompt(Engine& engine, const AttentionHook& hook, std::span<const Token> tokens,
                   const PromptOptions& options, const PromptProgress& progress);

}  // namespace verkv::llm

#endif  // VERKV_EXAMPLES_LLAMA_CPP_IMPORTANCE_HPP
