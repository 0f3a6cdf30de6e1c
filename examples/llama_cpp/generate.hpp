// Greedy decoding, and the `generate` command: the same prompt answered by the engine alone and
// with the cache.
#ifndef VERKV_EXAMPLES_LLAMA_CPP_GENERATE_HPP
#define VERKV_EXAMPLES_LLAMA_CPP_GENERATE_HPP

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "../common/backend.hpp"
#include "engine.hpp"
#include "evaluate.hpp"
#include "hook.hpp"

namespace verkv::llm {

// Called with each new token; false: stop here.
using TokenListener = std::function<bool(Token token)>;

// Decodes `first`, then appends the most likely token until the model ends, `most` tokens are there
// or the listener stops. Without a visitor the engine answers.
std::vector<Token> continue_greedily(Engine& engine, const AttentionHook& hook,
                                     AttentionVisitor* visitor, std::span<const Token> first,
                                     std::int64_t most, const TokenListener& listener);

struct GenerateOptions {
  std::string prompt;
  std::string question;  // decoded through the cache after the prompt; may be empty
  bool chat = false;     // in the form that the model's file gives to a user's turn
  std::int64_t tokens = 128;
  Method method;
  const Gate* gate = nullptr;  // for Score::gate
  std::uint64_t draw = 0;
  BackendKind backend = BackendKind::cpu;
};

// Streams both answers to the output, and what the second one cost. Throws EngineError for a prompt
// that is shorter than sinks and local window, or that does not fit the context.
void generate(Engine& engine, const AttentionHook& hook, const GenerateOptions& options);

}  // namespace verkv::llm

#endif  // VERKV_EXAMPLES_LLAMA_CPP_GENERATE_HPP
