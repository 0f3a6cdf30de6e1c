#include "importance.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "gate.hpp"

#include <verkv/importance.hpp>

namespace verkv::lab {

namespace {

constexpr std::array<std::pair<Score, std::string_view>, 7> kNames{
    {{Score::kvzip, "kvzip"},
     {Score::kvzip_mean, "kvzip_mean"},
     {Score::kvzip_rms, "kvzip_rms"},
     {Score::snapkv, "snapkv"},
     {Score::h2o, "h2o"},
     {Score::key_norm, "key_norm"},
     {Score::gate, "gate"}}};

// What KVzip's softmax keeps of a system prompt.
constexpr std::int64_t kSinkTokens = 4;
constexpr std::int64_t kSnapKvWindow = 64;
constexpr std::int64_t kSnapKvNeighbours = 7;
// Of the chunk before, so that the model finds the place.
constexpr std::int64_t kRepeatLeadTokens = 8;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

// Keys, values and whatever can be scored while the prompt is read.
class PrefillReader : public PromptReader {
 public:
  PrefillReader(const AttentionHook& hook, std::span<const Token> tokens,
                const PromptOptions& options, std::map<Score, Importance>& scores)
      : PromptReader(hook, tokens, options.query_count), options_(options), scores_(scores) {
    for (const Score score : options.scores) {
      for (const PromptLayer& layer : prompt().layers) {
        scores_[score].emplace_back(index(layer.shape.kv_heads) * tokens.size());
      }
    }
  }

  bool wants_hidden() const override { return asked(Score::gate) || options_.hidden_sink; }

  void hidden(const AttentionLayer& layer, std::int64_t position, std::int64_t count,
              std::int64_t width, const float* data) override {
    if (!has(layer)) return;
    if (options_.hidden_sink) options_.hidden_sink(layer, position, count, width, data);
    if (!asked(Score::gate)) return;
    std::vector<float>& scores = of(Score::gate, layer);
    for (std::int64_t t = 0; t < count; ++t) {
      const std::span<const float> input(data + t * width, index(width));
      for (std::int64_t head = 0; head < layer.kv_heads; ++head) {
        scores[index(head * tokens() + position + t)] =
            options_.gate->score(layer.index, head, input);
      }
    }
  }

  bool wants_probabilities(const AttentionLayer& layer) const override {
    return has(layer) && (asked(Score::h2o) || asked(Score::snapkv));
  }

  void probabilities(const AttentionLayer& layer, std::int64_t position, std::int64_t count,
                     std::int64_t cells, const float* data) override {
    const std::int64_t group = layer.query_heads / layer.kv_heads;
    for (std::int64_t head = 0; head < layer.query_heads; ++head) {
      for (std::int64_t t = 0; t < count; ++t) {
        const float* row = data + (head * count + t) * cells;
        const std::int64_t seen = position + t + 1;
        if (head == 0 && t == 0) llm::check_cells(layer, row, seen);
        const bool late = tokens() - seen < kSnapKvWindow;
        for (const auto& [score, wanted] :
             {std::pair{Score::h2o, true}, std::pair{Score::snapkv, late}}) {
          if (!wanted || !asked(score)) continue;
          float* sum = of(score, layer).data() + (head / group) * tokens();
          for (std::int64_t i = 0; i < seen; ++i) sum[i] += row[i];
        }
      }
    }
  }

  bool attention(const LayerCall& call, std::span<float> output) override {
    const AttentionLayer& layer = *call.layer;
    if (has(layer) && asked(Score::key_norm)) {
      std::vector<float>& scores = of(Score::key_norm, layer);
      for (std::int64_t t = 0; t < call.tokens; ++t) {
        for (std::int64_t head = 0; head < layer.kv_heads; ++head) {
          const float* key = call.keys + (t * layer.kv_heads + head) * layer.key_dim;
          scores[index(head * tokens() + call.position + t)] = static_cast<float>(
              key_norm_importance(std::span<const float>(key, index(layer.key_dim))));
        }
      }
    }
    return PromptReader::attention(call, output);
  }

  // After the last token.
  void finish() {
    if (!asked(Score::snapkv)) return;
    for (const PromptLayer& layer : prompt().layers) {
      std::vector<float>& scores = of(Score::snapkv, layer.shape);
      const std::vector<float> sums = scores;
      for (std::int64_t head = 0; head < layer.shape.kv_heads; ++head) {
        const auto first = index(head * tokens());
        snapkv_importance(std::span<const float>(sums).subspan(first, index(tokens())),
                          kSnapKvNeighbours,
                          std::span<float>(scores).subspan(first, index(tokens())));
      }
    }
  }

 private:
  bool asked(Score score) const { return options_.scores.count(score) > 0; }
  std::vector<float>& of(Score score, const AttentionLayer& layer) {
    return scores_.at(score)[place(layer)];
  }

  const PromptOptions& options_;
  std::map<Score, Importance>& scores_;
};

// One chunk [first, last) of the prompt while the model repeats it: probabilities renormalised over
// the sink, the chunk and the repeated text.
class RepeatVisitor : public AttentionVisitor {
 public:
  RepeatVisitor(const Prompt& prompt, std::int64_t first, std::int64_t last)
      : tokens_(static_cast<std::int64_t>(prompt.tokens.size())),
        first_(first),
        last_(last),
        probability_(index(last - first)) {
    for (const PromptLayer& layer : prompt.layers) {
      std::vector<Sums>& heads = sums_[layer.shape.index];
      heads.resize(index(layer.shape.kv_heads));
      for (Sums& sums : heads) {
        sums.largest.assign(index(last - first), 0.0f);
        sums.sum.assign(index(last - first), 0.0);
        sums.sum_of_squares.assign(index(last - first), 0.0);
        sums.moments = {sums.largest, sums.sum, sums.sum_of_squares};
      }
    }
  }

  bool wants_probabilities(const AttentionLayer& layer) const override {
    return sums_.count(layer.index) > 0;
  }

  void probabilities(const AttentionLayer& layer, std::int64_t position, std::int64_t tokens,
                     std::int64_t cells, const float* data) override {
    const std::int64_t group = layer.query_heads / layer.kv_heads;
    const std::int64_t sinks = std::min(kSinkTokens, first_);
    for (std::int64_t head = 0; head < layer.query_heads; ++head) {
      Sums& sums = sums_.at(layer.index)[index(head / group)];
      for (std::int64_t t = 0; t < tokens; ++t) {
        const float* row = data + (head * tokens + t) * cells;
        const std::int64_t seen = position + t + 1;
        float total = 0;
        for (std::int64_t i = 0; i < sinks; ++i) total += row[i];
        for (std::int64_t i = first_; i < last_; ++i) total += row[i];
        for (std::int64_t i = tokens_; i < seen; ++i) total += row[i];
        if (head == 0 && t == 0) llm::check_cells(layer, row, seen);
        const float scale = total > 0 ? 1 / total : 0.0f;
        for (std::int64_t i = first_; i < last_; ++i) {
          probability_[index(i - first_)] = row[i] * scale;
        }
        sums.moments.add(probability_);
      }
    }
  }

  bool attention(const LayerCall&, std::span<float>) override { return false; }

  // Writes the chunk's part of the scores that are there.
  void finish(ScoredPrompt& scored) const {
    for (auto& [score, layers] : scored.scores) {
      if (!needs_repeat(score)) continue;
      for (std::size_t l = 0; l < layers.size(); ++l) {
        const std::vector<Sums>& heads = sums_.at(scored.prompt.layers[l].shape.index);
        for (std::size_t head = 0; head < heads.size(); ++head) {
          float* to = layers[l].data() + static_cast<std::int64_t>(head) * tokens_;
          for (std::int64_t i = first_; i < last_; ++i) {
            to[i] = value(heads[head].moments, score, index(i - first_));
          }
        }
      }
    }
  }

 private:
  struct Sums {
    std::vector<float> largest;
    std::vector<double> sum;
    std::vector<double> sum_of_squares;
    ProbabilityMoments moments;  // of the vectors above
  };

  static float value(const ProbabilityMoments& moments, Score score, std::size_t place) {
    if (score == Score::kvzip) return moments.largest[place];
    return static_cast<float>(score == Score::kvzip_mean ? moments.mean(place)
                                                         : moments.root_mean_square(place));
  }

  std::int64_t tokens_;
  std::int64_t first_;
  std::int64_t last_;
  std::map<std::int64_t, std::vector<Sums>> sums_;  // by the layer's number in the model
  std::vector<float> probability_;                  // one row over the chunk
};

constexpr std::int64_t kRequestTokens = 64;      // more than any wording below takes
constexpr std::int64_t kLeastChunkTokens = 256;  // below, asking takes more than repeating

// The text that asks for a repetition, and the chunk itself.
std::vector<Token> repeat_text(const Engine& engine, std::span<const Token> prompt,
                               std::int64_t first, std::int64_t last) {
  std::vector<Token> text;
  if (first == 0) {
    text = engine.tokenize("\n\nNow repeat all of the text above, word for word:\n", false);
  } else {
    text =
        engine.tokenize("\n\nNow repeat the text above, word for word, going on after \"", false);
    const std::int64_t lead = std::max<std::int64_t>(0, first - kRepeatLeadTokens);
    text.insert(text.end(), prompt.begin() + lead, prompt.begin() + first);
    const std::vector<Token> end = engine.tokenize("\":\n", false);
    text.insert(text.end(), end.begin(), end.end());
  }
  text.insert(text.end(), prompt.begin() + first, prompt.begin() + last);
  return text;
}

struct Chunks {
  std::int64_t tokens = 0;

  // Of equal size, so that means over their repetitions compare, and smaller than asked for where
  // the engine's context leaves less room behind the prompt.
  Chunks(const Engine& engine, std::int64_t prompt_tokens, const PromptOptions& options) {
    const std::int64_t room = engine.context_tokens() - prompt_tokens - kRequestTokens;
    const std::int64_t most =
        std::max(kLeastChunkTokens, std::min(options.repeat_chunk_tokens, room));
    const std::int64_t count = std::max<std::int64_t>(1, (prompt_tokens + most - 1) / most);
    tokens = (prompt_tokens + count - 1) / count;
  }
};

bool any_repeat(const PromptOptions& options) {
  return std::any_of(options.scores.begin(), options.scores.end(), needs_repeat);
}

}  // namespace

std::string_view name(Score score) {
  for (const auto& [value, text] : kNames) {
    if (value == score) return text;
  }
  return "?";
}

std::optional<Score> parse_score(std::string_view text) {
  for (const auto& [value, word] : kNames) {
    if (word == text) return value;
  }
  return std::nullopt;
}

bool needs_repeat(Score score) {
  return score == Score::kvzip || score == Score::kvzip_mean || score == Score::kvzip_rms;
}

std::int64_t scoring_tokens(const Engine& engine, std::int64_t prompt_tokens,
                            const PromptOptions& options) {
  if (!any_repeat(options)) return 0;
  return Chunks(engine, prompt_tokens, options).tokens + kRequestTokens;
}

ScoredPrompt read_prompt(Engine& engine, const AttentionHook& hook, std::span<const Token> tokens,
                         const PromptOptions& options, const PromptProgress& progress) {
  const auto count = static_cast<std::int64_t>(tokens.size());
  const std::int64_t scoring = scoring_tokens(engine, count, options);
  if (count + scoring > engine.context_tokens()) {
    throw EngineError(fmt::format(
        "a prompt of {} tokens and {} for scoring it do not fit the context of {} tokens", count,
        scoring, engine.context_tokens()));
  }
  if (options.scores.count(Score::gate) > 0 && options.gate == nullptr) {
    throw InvalidArgument("the score gate needs a gate");
  }
  const bool repeat = any_repeat(options);
  const std::int64_t total = repeat ? 2 * count : count;
  const auto run = [&](std::span<const Token> text, AttentionVisitor& visitor,
                       std::int64_t before) {
    llm::read(engine, hook, text, visitor, [&](std::int64_t done) {
      if (progress) progress(std::min(total, before + done), total);
    });
  };

  ScoredPrompt scored;
  engine.truncate(0);
  PrefillReader prefill(hook, tokens, options, scored.scores);
  run(tokens, prefill, 0);
  prefill.finish();
  engine.mark();
  scored.prompt = prefill.take();
  if (!repeat) return scored;

  const Chunks chunks(engine, count, options);
  for (std::int64_t first = 0; first < count; first += chunks.tokens) {
    const std::int64_t last = std::min(count, first + chunks.tokens);
    RepeatVisitor visitor(scored.prompt, first, last);
    run(repeat_text(engine, tokens, first, last), visitor, count + first);
    visitor.finish(scored);
    engine.truncate(count);
  }
  return scored;
}

}  // namespace verkv::lab
