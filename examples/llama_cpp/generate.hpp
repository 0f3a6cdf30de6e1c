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
#include "hook.hpp"

#include <verkv/kv_cache_manager.hpp>

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
  // Decoded through the cache after the prompt; may be empty.
  std::string question;
  // In the form that the model's file gives to a user's turn.
  bool chat = false;
  // New tokens at most.
  std::int64_t tokens = 128;
  CacheConfig config;
  std::uint64_t draw = 0;
  BackendKind backend = BackendKind::cpu;
};

// A prompt in two parts: what is compressed, and what is decoded through the cache before the first
// new token. Neither is empty.
struct SplitPrompt {
  std::vector<Token> held;
  std::vector<Token> question;
};

// Throws EngineError for a prompt that is shorter than sinks and local window, and where the
// model's file has no form of a turn that keeps the prompt as it is.
SplitPrompt split_prompt(const Engine& engine, const GenerateOptions& options);

// Streams both answers to the output, and what the second one cost. Throws EngineError for a prompt
// that does not fit the context, and what split_prompt throws.
void generate(Engine& engine, const AttentionHook& hook, const GenerateOptions& options);

}  // namespace verkv::llm

#endif  // VERKV_EXAMPLES_LLAMA_CPP_GENERATE_HPP
