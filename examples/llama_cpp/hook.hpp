// The hook: finds the attention of every layer in the engine's graph, checks that it is what it is
// taken for, hands queries, keys and values to a visitor, and lets it replace the output.
#ifndef VERKV_EXAMPLES_LLAMA_CPP_HOOK_HPP
#define VERKV_EXAMPLES_LLAMA_CPP_HOOK_HPP

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine.hpp"

namespace verkv::llm {

// One attention layer of the model.
struct AttentionLayer {
  // In the model.
  std::int64_t index = 0;
  std::int64_t query_heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t key_dim = 0;
  std::int64_t value_dim = 0;
  // logit = scale * q.k, then soft_cap * tanh(logit / soft_cap); soft_cap 0: none.
  double scale = 0;
  double soft_cap = 0;
  // 0: attends to everything.
  std::int64_t window_tokens = 0;
};

// What one layer computes for one batch. Dense arrays, valid during the call only.
struct LayerCall {
  const AttentionLayer* layer = nullptr;
  // Of the first token.
  std::int64_t position = 0;
  std::int64_t tokens = 0;
  const float* queries =
      nullptr;                  // [token][query head][key_dim], after RoPE, as they are multiplied
  const float* keys = nullptr;  // [token][KV head][key_dim], after RoPE
  const float* values = nullptr;  // [token][KV head][value_dim]
};

class AttentionVisitor {
 public:
  virtual ~AttentionVisitor() = default;
  // The layer's input after its norm, [token][width]; for scorers that look at it.
  virtual bool wants_hidden() const { return false; }
  virtual void hidden(const AttentionLayer& /*layer*/, std::int64_t /*position*/,
                      std::int64_t /*tokens*/, std::int64_t /*width*/, const float* /*data*/) {}
  // The probabilities [query head][token][cell]: cell = position where nothing was ever removed
  // from the middle. `cells` is the stride of a token and may exceed the tokens held.
  virtual bool wants_probabilities(const AttentionLayer& /*layer*/) const { return false; }
  virtual void probabilities(const AttentionLayer& /*layer*/, std::int64_t /*position*/,
                             std::int64_t /*tokens*/, std::int64_t /*cells*/,
                             const float* /*data*/) {}
  // The layer's attention is done. `output` is [token][query head][value_dim]; true: it has been
  // rewritten and the engine must go on with it.
  virtual bool attention(const LayerCall& call, std::span<float> output) = 0;
};

class AttentionHook {
 public:
  // Decodes a short text of its own and compares each layer's attention, computed in double from
  // what the hook found, with what the engine computed; then writes zeros for each layer in turn
  // and looks whether the logits move. Leaves the engine empty. Throws EngineError naming layer,
  // node and reason where something is missing, has another shape or type, where the numbers
  // differ, or where writing has no effect: a dense result is never passed off as ours.
  explicit AttentionHook(Engine& engine);

  // Layers with an attention of their own, in order; those with a sliding window included.
  const std::vector<AttentionLayer>& layers() const { return layers_; }
  // The worst relative difference of the check, over all layers.
  double check_error() const { return check_error_; }

  // Engine::decode under the eyes of `visitor`.
  void decode(Engine& engine, std::span<const Token> tokens, AttentionVisitor& visitor,
              const LogitsReader& reader) const;

 private:
  // Compares each layer with attention computed in double, and finds out which have a window.
  void check_numbers(Engine& engine, std::span<const Token> text);
  // Looks whether the logits move with each layer's output.
  void check_writes(Engine& engine, std::span<const Token> text) const;

  std::vector<AttentionLayer> layers_;
  double check_error_ = 0;
};

}  // namespace verkv::llm

#endif  // VERKV_EXAMPLES_LLAMA_CPP_HOOK_HPP
