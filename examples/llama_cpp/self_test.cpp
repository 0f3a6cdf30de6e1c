#include "self_test.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "cache_decoder.hpp"
#include "distribution.hpp"
#include "prompt.hpp"

namespace verkv::llm {

namespace {

// Weights of 4 bits are multiplied with activations rounded to 8 bits: a difference in the last
// place may turn into one in the first decimals of a logit. How large that is, the engine shows
// itself when it computes the same steps one by one instead of together. Both are samples of the
// same noise, of few steps, so they may differ by some factor.
constexpr double kRoundingFactor = 10;
// Every eighth number of every output is left out. (A common factor would not do: some models norm
// the output of attention.)
constexpr std::size_t kDisturbance = 8;

// A list of at least so many tokens in which every third entry repeats an earlier one: what the
// model goes on with depends on what it read long before.
std::string list_text(std::int64_t tokens) {
  std::string text;
  // An entry takes more than eight tokens, whatever pieces the model splits words into.
  for (std::int64_t entry = 0; 8 * entry < tokens; ++entry) {
    const std::int64_t box = entry % 3 == 2 ? entry / 5 : entry;
    text += fmt::format("Entry {}: box {} is in room {}.\n", entry, box, 7919 * box % 1009);
  }
  return text;
}

// Of next-token distributions; `same`: steps with the same most likely token.
struct Difference {
  double kl = 0;       // mean over the steps
  double kl_most = 0;  // largest of a step
  std::int64_t same = 0;
};

Difference compare(const std::vector<std::vector<float>>& dense,
                   const std::vector<std::vector<float>>& ours) {
  Difference difference;
  for (std::size_t i = 0; i < dense.size(); ++i) {
    const double kl = kl_divergence(dense[i], ours[i]);
    difference.kl += kl / static_cast<double>(dense.size());
    difference.kl_most = std::max(difference.kl_most, kl);
    difference.same += largest(dense[i]) == largest(ours[i]);
  }
  return difference;
}

bool report(const char* what, const Difference& difference, std::size_t steps, bool passed) {
  fmt::print("{:<47} KL mean {:.2e}, largest {:.2e}, same token {:3}/{}: {}\n", what, difference.kl,
             difference.kl_most, difference.same, steps, passed ? "passed" : "FAILED");
  std::fflush(stdout);
  return passed;
}

}  // namespace

bool self_test(Engine& engine, const AttentionHook& hook, std::int64_t context_tokens,
               std::int64_t steps, int threads, BackendKind backend) {
  std::vector<Token> text = engine.tokenize(list_text(context_tokens + steps), true);
  text.resize(static_cast<std::size_t>(context_tokens + steps));
  const std::span<const Token> all(text);
  const auto prompt_tokens = all.first(static_cast<std::size_t>(context_tokens));
  const auto next = all.subspan(static_cast<std::size_t>(context_tokens));

  ScoredReader reader(hook, prompt_tokens);
  engine.truncate(0);
  read(engine, hook, prompt_tokens, reader, nullptr);
  engine.mark();
  const Prompt& prompt = reader.prompt();
  const bool all_replaced = prompt.layers.size() == static_cast<std::size_t>(engine.layers());

  std::vector<std::vector<float>> dense;
  engine.decode(next, nullptr, [&dense](std::int64_t, std::span<const float> logits) {
    dense.emplace_back(logits.begin(), logits.end());
  });
  engine.truncate(context_tokens);
  std::vector<std::vector<float>> one_by_one;
  for (const Token& token : next) {
    engine.decode({&token, 1}, nullptr, nullptr);
    const std::span<const float> logits = engine.last_logits();
    one_by_one.emplace_back(logits.begin(), logits.end());
  }
  engine.truncate(context_tokens);
  // Nothing dense is left that could answer in our place.
  if (all_replaced) engine.forget();

  CacheConfig config;
  config.keep = 1;
  config.fetch.mode = FetchMode::never;
  if (threads > 0) config.threads = threads;
  const auto ours = [&](std::size_t disturbance, double keep) {
    CacheConfig mine = config;
    mine.keep = keep;
    CacheDecoder decoder(prompt, reader.importance(), backend, mine, 0);
    decoder.disturb(disturbance);
    std::vector<std::vector<float>> logits;
    hook.decode(engine, next, decoder, [&logits](std::int64_t, std::span<const float> row) {
      logits.emplace_back(row.begin(), row.end());
    });
    engine.truncate(context_tokens);
    return logits;
  };

  fmt::print("{}, {}: {} of {} layers replaced, {} tokens of context, {} steps{}\n",
             engine.model_name(), Engine::version(), prompt.layers.size(), engine.layers(),
             context_tokens, steps,
             all_replaced ? ", the engine's own cache emptied before ours answers" : "");
  fmt::print("{:<47} largest relative difference {:.2e}: passed\n",
             "attention found = attention computed", hook.check_error());
  const Difference own = compare(dense, one_by_one);
  bool passed = report("the engine beside itself, one by one", own, dense.size(), true);
  const Difference full = compare(dense, ours(0, 1));
  passed &= report("budget for everything = dense, to that rounding", full, dense.size(),
                   full.kl <= kRoundingFactor * std::max(own.kl, 1e-6));
  const Difference wrong = compare(dense, ours(kDisturbance, 1));
  passed &=
      report("an eighth of our output left out shows", wrong, dense.size(), wrong.kl > 4 * full.kl);
  const Difference little = compare(dense, ours(0, 1.0 / 32));
  passed &= report("1/32 of the tokens and no fetch shows", little, dense.size(),
                   little.kl > 4 * full.kl);
  return passed;
}

}  // namespace verkv::llm
