// What the laboratory takes from the example (examples/llama_cpp): the engine, the hook into its
// attention, prompts and the decoder with the cache.
#ifndef VERKV_BENCH_TEXT_QUALITY_EXAMPLE_HPP
#define VERKV_BENCH_TEXT_QUALITY_EXAMPLE_HPP

#include "../../examples/llama_cpp/cache_decoder.hpp"
#include "../../examples/llama_cpp/engine.hpp"
#include "../../examples/llama_cpp/hook.hpp"
#include "../../examples/llama_cpp/prompt.hpp"

namespace verkv::lab {

using llm::AttentionHook;
using llm::AttentionLayer;
using llm::AttentionVisitor;
using llm::CacheDecoder;
using llm::DecodeCost;
using llm::Engine;
using llm::EngineError;
using llm::Importance;
using llm::LayerCall;
using llm::LogitsReader;
using llm::Prompt;
using llm::PromptLayer;
using llm::PromptReader;
using llm::Token;

}  // namespace verkv::lab

#endif  // VERKV_BENCH_TEXT_QUALITY_EXAMPLE_HPP
