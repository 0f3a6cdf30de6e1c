#include "self_test.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include <fmt/format.h>

#include "cache_decoder.hpp"
#include "distribution.hpp"
#include "importance.hpp"
#include "texts.hpp"

namespace verkv::llm {

namespace {

// Weights of 4 bits are multiplied with activations rounded to 8 bits: a difference in the last
// place may turn into one in the first decimals of a logit. How large that is, the engine shows
// itself when it computes the same steps one by one instead of together.
constexpr double kRoundingFactor = 4;
// Every eighth number of every output is left out. (A common factor would not do: some models norm
// the output of attention.)
constexpr std::size_t kDisturbance = 8;

struct Difference {
  double kl = 0;          // mean over the steps
  double kl_most = 0;     // largest of a step
  std::int64_t same = 0;  // steps with the same most likely token
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
  std::vector<Token> text = engine.tokenize(
      generate_text(TextKind::prose, 1, static_cast<std::size_t>(8 * (context_tokens + steps))),
      true);
  text.resize(static_cast<std::size_t>(context_tokens + steps));
  const std::span<const Token> all(text);
  const auto prompt_tokens = all.first(static_cast<std::size_t>(context_tokens));
  const auto next = all.subspan(static_cast<std::size_t>(context_tokens));

  PromptOptions options;
  options.scores = {Score::key_norm};
  const Prompt prompt = read_prompt(engine, hook, prompt_tokens, options, nullptr);
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
    CacheDecoder decoder(prompt, backend, mine, Score::key_norm, 0);
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
