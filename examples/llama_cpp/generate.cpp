#include "generate.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string_view>

#include <fmt/format.h>

#include "../common/progress.hpp"
#include "../common/statistics.hpp"
#include "cache_decoder.hpp"
#include "distribution.hpp"
#include "prompt.hpp"

namespace verkv::llm {

std::vector<Token> continue_greedily(Engine& engine, const AttentionHook& hook,
                                     AttentionVisitor* visitor, std::span<const Token> first,
                                     std::int64_t most, const TokenListener& listener) {
  std::vector<Token> answer;
  const auto decode = [&](std::span<const Token> tokens) {
    if (visitor != nullptr) {
      hook.decode(engine, tokens, *visitor, nullptr);
    } else {
      engine.decode(tokens, nullptr, nullptr);
    }
  };
  decode(first);
  while (static_cast<std::int64_t>(answer.size()) < most) {
    const auto next = static_cast<Token>(largest(engine.last_logits()));
    if (engine.ends(next)) break;
    answer.push_back(next);
    if (!listener(next) || static_cast<std::int64_t>(answer.size()) == most) break;
    decode({&answer.back(), 1});
  }
  return answer;
}

namespace {

struct Timer {
  std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
};

SplitPrompt split_chat(const Engine& engine, const GenerateOptions& options) {
  const std::string words = options.prompt + options.question;
  const std::string text = engine.chat_prompt(words);
  if (text.empty()) {
    throw EngineError(
        fmt::format("{} brings no form for a user's turn that llama.cpp knows; leave --chat away",
                    engine.model_name()));
  }
  const std::size_t begin = text.find(words);
  if (begin == std::string::npos) {
    throw EngineError(
        fmt::format("the form of {} changes the prompt; leave --chat away", engine.model_name()));
  }
  // The question and what the form puts behind it go through the cache.
  const std::size_t cut = begin + options.prompt.size();
  return {engine.tokenize(std::string_view(text).substr(0, cut), true, true),
          engine.tokenize(std::string_view(text).substr(cut), false, true)};
}

void report(const GenerateOptions& options, CacheDecoder& decoder) {
  const DecodeCost cost = decoder.cost();
  const FetchConfig& fetch = options.config.fetch;
  std::vector<double> certificates = decoder.certificates();
  fmt::print(
      "resident {:.2f} % of the tokens; {:.2f} % of {:.1f} MB on the fast tier with sketch and "
      "metadata\n",
      100 * cost.resident_fraction, 100 * cost.fast_bytes / cost.cache_bytes,
      cost.cache_bytes / 1e6);
  // Without an epsilon nothing was promised that could be kept.
  const bool promised = fetch.mode == FetchMode::verified && fetch.epsilon;
  const std::string kept = promised ? fmt::format(", {:.1f} % certified to eps {:g}",
                                                  100 * cost.certified_share, *fetch.epsilon)
                                    : std::string();
  fmt::print(
      "moved {:.3f} % of the cache per step ({:.1f} kB), read {:.2f} %; {:.1f} % of the decisions "
      "fetched{}; bound reached: median {:.3f}, 95 % {:.3f}\n",
      100 * cost.moved_fraction, cost.moved_bytes / 1e3, 100 * cost.read_fraction,
      100 * cost.fetching_share, kept, examples::quantile(certificates, 0.5),
      examples::quantile(certificates, 0.95));
}

}  // namespace

SplitPrompt split_prompt(const Engine& engine, const GenerateOptions& options) {
  SplitPrompt split = options.chat ? split_chat(engine, options)
                                   : SplitPrompt{engine.tokenize(options.prompt, true),
                                                 engine.tokenize(options.question, false)};
  const CacheConfig& config = options.config;
  const std::int64_t least = config.sink_tokens + config.local_tokens + 2;
  if (static_cast<std::int64_t>(split.held.size()) < least) {
    throw EngineError(fmt::format(
        "the prompt has {} tokens; {} sinks and a local window of {} need a prompt of at least {}",
        split.held.size(), config.sink_tokens, config.local_tokens, least));
  }
  if (split.question.empty()) {
    split.question.push_back(split.held.back());
    split.held.pop_back();
  }
  return split;
}

void generate(Engine& engine, const AttentionHook& hook, const GenerateOptions& options) {
  const SplitPrompt split = split_prompt(engine, options);
  const auto held = static_cast<std::int64_t>(split.held.size());
  const std::int64_t room = static_cast<std::int64_t>(split.question.size()) + options.tokens;
  if (held + room > engine.context_tokens()) {
    throw EngineError(fmt::format(
        "a prompt of {} tokens and {} more for the answer do not fit the context of {} tokens",
        held, room, engine.context_tokens()));
  }

  // Prefill stays the engine's: its keys, values and probabilities are only looked at.
  ScoredReader reader(hook, split.held);
  {
    const Timer timer;
    examples::ProgressLine line(held, "reading the prompt");
    engine.truncate(0);
    read(engine, hook, split.held, reader,
         [&line](std::int64_t done) { line.update(done, "reading the prompt"); });
    engine.mark();
    fmt::print("prompt: {} tokens, read in {:.1f} s\n", held, timer.seconds());
  }
  const Prompt& prompt = reader.prompt();

  const auto show = [&engine](Token token) {
    const std::string text = engine.piece(token);
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
    return true;
  };
  fmt::print("\n--- dense ---\n");
  std::fflush(stdout);
  const Timer dense_timer;
  const std::vector<Token> dense =
      continue_greedily(engine, hook, nullptr, split.question, options.tokens, show);
  const double dense_seconds = dense_timer.seconds();
  engine.truncate(held);
  const bool all_replaced = prompt.layers.size() == static_cast<std::size_t>(engine.layers());
  if (all_replaced) engine.forget();

  fmt::print("\n\n--- VERKV, {} of {} layers{} ---\n", prompt.layers.size(), engine.layers(),
             all_replaced ? ", the engine's own cache emptied" : "");
  std::fflush(stdout);
  CacheDecoder decoder(prompt, reader.importance(), options.backend, options.config, options.draw);
  const Timer timer;
  const std::vector<Token> ours =
      continue_greedily(engine, hook, &decoder, split.question, options.tokens, show);
  const double seconds = timer.seconds();

  const auto same = static_cast<std::size_t>(
      std::mismatch(dense.begin(), dense.end(), ours.begin(), ours.end()).first - dense.begin());
  fmt::print("\n\n{} and {} tokens in {:.1f} and {:.1f} s; {}\n", dense.size(), ours.size(),
             dense_seconds, seconds,
             same == dense.size() && same == ours.size()
                 ? "the texts are the same"
                 : fmt::format("the texts are the same for {} tokens", same));
  report(options, decoder);
}

}  // namespace verkv::llm
