// A prompt as a cache gets it: keys, values, late queries and an importance of every token, taken
// from what the engine computes anyway while it reads.
#ifndef VERKV_EXAMPLES_LLAMA_CPP_PROMPT_HPP
#define VERKV_EXAMPLES_LLAMA_CPP_PROMPT_HPP

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <vector>

#include "engine.hpp"
#include "hook.hpp"

#include <verkv/types.hpp>

namespace verkv::llm {

// Scores of the prompt's tokens: [KV head][token] for each layer of the prompt.
using Importance = std::vector<std::vector<float>>;

struct PromptLayer {
  AttentionLayer shape;
  std::vector<Half> keys;      // [token][KV head][key_dim]
  std::vector<Half> values;    // [token][KV head][value_dim]
  std::vector<float> queries;  // [position][query head][key_dim]
};

struct Prompt {
  std::vector<Token> tokens;
  // The layers that attend to everything: those that a cache replaces.
  std::vector<PromptLayer> layers;
  // Positions of PromptLayer::queries, ascending: late ones, every eighth.
  std::vector<std::int64_t> query_positions;
};

// Gathers keys, values and late queries while the engine reads. Replaces no output.
class PromptReader : public AttentionVisitor {
 public:
  // query_count: how many late positions keep their queries, for the calibration of the sketch.
  PromptReader(const AttentionHook& hook, std::span<const Token> tokens,
               std::int64_t query_count = 64);

  bool attention(const LayerCall& call, std::span<float> output) override;

  const Prompt& prompt() const { return prompt_; }
  Prompt take() { return std::move(prompt_); }

 protected:
  std::int64_t tokens() const { return static_cast<std::int64_t>(prompt_.tokens.size()); }
  bool has(const AttentionLayer& layer) const { return places_.count(layer.index) > 0; }
  // The place of one of its layers in Prompt::layers.
  std::size_t place(const AttentionLayer& layer) const { return places_.at(layer.index); }

 private:
  Prompt prompt_;
  std::map<std::int64_t, std::size_t> places_;  // by the layer's number in the model
};

// Scores each token by the attention that it receives, summed over all positions of the prompt and
// the query heads of its KV head (H2O, Zhang et al. 2023). The score needs no second pass;
// bench/text_quality has others, which cost one and move less.
class ScoredReader : public PromptReader {
 public:
  ScoredReader(const AttentionHook& hook, std::span<const Token> tokens);

  bool wants_probabilities(const AttentionLayer& layer) const override { return has(layer); }
  void probabilities(const AttentionLayer& layer, std::int64_t position, std::int64_t tokens,
                     std::int64_t cells, const float* data) override;

  const Importance& importance() const { return importance_; }

 private:
  Importance importance_;
};

// Throws EngineError unless the probabilities of a token add up to 1 over the `seen` first cells of
// its row: then cells stand in the order of positions.
void check_cells(const AttentionLayer& layer, const float* row, std::int64_t seen);

// Called with the tokens computed so far.
using ReadProgress = std::function<void(std::int64_t tokens)>;

// Decodes `text` under the eyes of `visitor`, in slices, so that progress can be shown.
void read(Engine& engine, const AttentionHook& hook, std::span<const Token> text,
          AttentionVisitor& visitor, const ReadProgress& progress);

}  // namespace verkv::llm

#endif  // VERKV_EXAMPLES_LLAMA_CPP_PROMPT_HPP
