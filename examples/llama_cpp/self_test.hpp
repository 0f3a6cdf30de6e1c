// Shows that the hook acts: nothing is replaced without effect, and nothing else than the output of
// attention is.
#ifndef VERKV_EXAMPLES_LLAMA_CPP_SELF_TEST_HPP
#define VERKV_EXAMPLES_LLAMA_CPP_SELF_TEST_HPP

#include <cstdint>

#include "../common/backend.hpp"
#include "engine.hpp"
#include "hook.hpp"

namespace verkv::llm {

// The checks of `verkv_llama self-test`, printed. True if all passed.
bool self_test(Engine& engine, const AttentionHook& hook, std::int64_t context_tokens,
               std::int64_t steps, int threads, BackendKind backend);

}  // namespace verkv::llm

#endif  // VERKV_EXAMPLES_LLAMA_CPP_SELF_TEST_HPP
