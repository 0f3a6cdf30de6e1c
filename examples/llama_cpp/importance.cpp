#include "importance.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "gate.hpp"

#include <verkv/importance.hpp>

namespace verkv::llm {

namespace {

constexpr std::array<std::pair<Score, std::string_view>, 7> kNames{
    {{Score::kvzip, "kvzip"},
     {Score::kvzip_mean, "kvzip_mean"},
     {Score::kvzip_rms, "kvzip_rms"},
     {Score::snapkv, "snapkv"},
     {Score::h2o, "h2o"},
     {Score::key_norm, "key_norm"},
     {Score::gate, "gate"}}};

constexpr std::int64_t kSinkTokens = 4;  // what KVzip's softmax keeps of a system prompt
constexpr std::int64_t kSnapKvWindow = 64;
constexpr std::int64_t kSnapKvNeighbours = 7;
constexpr std::int64_t kRepeatLeadTokens =
    8;  // of the chunk before, so that the model finds the place

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

// Cells stand in the order of positions as long as only the end is ever removed: then the
// probabilities of a row are all in its first `seen` cells.
void check_cells(const AttentionLayer& shape, const float* row, std::int64_t seen) {
  double all = 0;
  for (std::int64_t i = 0; i < seen; ++i) all += static_cast<double>(row[i]);
  if (!(std::abs(all - 1) < 1e-2)) {
    throw EngineError(
        fmt::format("layer {}: the probabilities of {} tokens add up to {:.3g} instead of 1; the "
                    "engine does not keep its cells in the order of positions",
                    shape.index, seen, all));
  }
}

// Keys, values and whatever can be scored while the prompt is read.
class PrefillVisitor : public AttentionVisitor {
 public:
  PrefillVisitor(Prompt& prompt, const PromptOptions& options)
      : prompt_(prompt),
        options_(options),
        tokens_(static_cast<std::int64_t>(prompt.tokens.size())) {
    for (PromptLayer& layer : prompt_.layers) {
      layers_.emplace(layer.shape.index, &layer);
      for (const Score score : options.scores) {
        if (!needs_repeat(score)) {
          layer.scores[score].assign(index(layer.shape.kv_heads * tokens_), 0.0f);
        }
      }
    }
  }

  bool wants_hidden() const override {
    return options_.scores.count(Score::gate) > 0 || options_.hidden_sink;
  }

  void hidden(const AttentionLayer& shape, std::int64_t position, std::int64_t tokens,
              std::int64_t width, const float* data) override {
    const auto found = layers_.find(shape.index);
    if (found == layers_.end()) return;
    if (options_.hidden_sink) options_.hidden_sink(shape, position, tokens, width, data);
    if (options_.scores.count(Score::gate) == 0) return;
    std::vector<float>& scores = found->second->scores.at(Score::gate);
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t head = 0; head < shape.kv_heads; ++head) {
        scores[index(head * tokens_ + position + t)] = options_.gate->score(
            shape.index, head, {data + t * width, static_cast<std::size_t>(width)});
      }
    }
  }

  bool wants_probabilities(const AttentionLayer& layer) const override {
    return layers_.count(layer.index) > 0 &&
           (options_.scores.count(Score::h2o) > 0 || options_.scores.count(Score::snapkv) > 0);
  }

  void probabilities(const AttentionLayer& shape, std::int64_t position, std::int64_t tokens,
                     std::int64_t cells, const float* data) override {
    PromptLayer& layer = *layers_.at(shape.index);
    const std::int64_t group = shape.query_heads / shape.kv_heads;
    for (std::int64_t head = 0; head < shape.query_heads; ++head) {
      for (std::int64_t t = 0; t < tokens; ++t) {
        const float* row = data + (head * tokens + t) * cells;
        const std::int64_t seen = position + t + 1;
        const bool late = tokens_ - seen < kSnapKvWindow;
        if (head == 0 && t == 0) check_cells(shape, row, seen);
        for (const auto& [score, wanted] :
             {std::pair{Score::h2o, true}, std::pair{Score::snapkv, late}}) {
          const auto found = layer.scores.find(score);
          if (!wanted || found == layer.scores.end()) continue;
          float* sum = found->second.data() + (head / group) * tokens_;
          for (std::int64_t i = 0; i < seen; ++i) sum[i] += row[i];
        }
      }
    }
  }

  bool attention(const LayerCall& call, std::span<float>) override {
    const auto found = layers_.find(call.layer->index);
    if (found == layers_.end()) return false;
    PromptLayer& layer = *found->second;
    const AttentionLayer& shape = layer.shape;
    append(layer.keys, call.keys, call.tokens * shape.kv_heads * shape.key_dim);
    append(layer.values, call.values, call.tokens * shape.kv_heads * shape.value_dim);
    const auto key_norm = layer.scores.find(Score::key_norm);
    const std::int64_t row = shape.query_heads * shape.key_dim;
    for (std::int64_t t = 0; t < call.tokens; ++t) {
      if (key_norm != layer.scores.end()) {
        for (std::int64_t head = 0; head < shape.kv_heads; ++head) {
          const float* key = call.keys + (t * shape.kv_heads + head) * shape.key_dim;
          key_norm->second[index(head * tokens_ + call.position + t)] = static_cast<float>(
              1 / std::max(key_norm_importance(std::span<const float>(key, index(shape.key_dim))),
                           1e-6));
        }
      }
      if (std::binary_search(prompt_.query_positions.begin(), prompt_.query_positions.end(),
                             call.position + t)) {
        layer.queries.insert(layer.queries.end(), call.queries + t * row,
                             call.queries + (t + 1) * row);
      }
    }
    return false;
  }

  void finish() {
    for (PromptLayer& layer : prompt_.layers) {
      const auto snapkv = layer.scores.find(Score::snapkv);
      if (snapkv == layer.scores.end()) continue;
      const std::vector<float> sums = snapkv->second;
      for (std::int64_t head = 0; head < layer.shape.kv_heads; ++head) {
        const auto first = index(head * tokens_);
        snapkv_importance(std::span<const float>(sums).subspan(first, index(tokens_)),
                          kSnapKvNeighbours,
                          std::span<float>(snapkv->second).subspan(first, index(tokens_)));
      }
    }
  }

 private:
  static void append(std::vector<Half>& to, const float* from, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) to.push_back(to_half(from[i]));
  }

  Prompt& prompt_;
  const PromptOptions& options_;
  std::int64_t tokens_;
  std::map<std::int64_t, PromptLayer*> layers_;
};

// One chunk [first, last) of the prompt while the model repeats it: probabilities renormalised over
// the sink, the chunk and the repeated text.
class RepeatVisitor : public AttentionVisitor {
 public:
  RepeatVisitor(Prompt& prompt, std::int64_t first, std::int64_t last)
      : tokens_(static_cast<std::int64_t>(prompt.tokens.size())), first_(first), last_(last) {
    for (PromptLayer& layer : prompt.layers) {
      layers_.emplace(layer.shape.index, &layer);
      sums_[layer.shape.index].resize(index(layer.shape.kv_heads));
      for (Sums& sums : sums_[layer.shape.index]) {
        sums.largest.assign(index(last - first), 0.0f);
        sums.sum.assign(index(last - first), 0.0);
        sums.sum_of_squares.assign(index(last - first), 0.0);
        sums.moments = {sums.largest, sums.sum, sums.sum_of_squares};
      }
    }
    probability_.resize(index(last - first));
  }

  bool wants_probabilities(const AttentionLayer& layer) const override {
    return layers_.count(layer.index) > 0;
  }

  void probabilities(const AttentionLayer& shape, std::int64_t position, std::int64_t tokens,
                     std::int64_t cells, const float* data) override {
    const std::int64_t group = shape.query_heads / shape.kv_heads;
    const std::int64_t sinks = std::min(kSinkTokens, first_);
    for (std::int64_t head = 0; head < shape.query_heads; ++head) {
      Sums& sums = sums_.at(shape.index)[index(head / group)];
      for (std::int64_t t = 0; t < tokens; ++t) {
        const float* row = data + (head * tokens + t) * cells;
        const std::int64_t seen = position + t + 1;
        float total = 0;
        for (std::int64_t i = 0; i < sinks; ++i) total += row[i];
        for (std::int64_t i = first_; i < last_; ++i) total += row[i];
        for (std::int64_t i = tokens_; i < seen; ++i) total += row[i];
        if (head == 0 && t == 0) check_cells(shape, row, seen);
        const float scale = total > 0 ? 1 / total : 0.0f;
        for (std::int64_t i = first_; i < last_; ++i) {
          probability_[index(i - first_)] = row[i] * scale;
        }
        sums.moments.add(probability_);
      }
    }
  }

  bool attention(const LayerCall&, std::span<float>) override { return false; }

  void finish() {
    for (auto& [layer_index, layer] : layers_) {
      for (std::int64_t head = 0; head < layer->shape.kv_heads; ++head) {
        const ProbabilityMoments& moments = sums_.at(layer_index)[index(head)].moments;
        for (std::int64_t i = first_; i < last_; ++i) {
          const std::size_t place = index(i - first_);
          const std::size_t to = index(head * tokens_ + i);
          put(*layer, Score::kvzip, to, moments.largest[place]);
          put(*layer, Score::kvzip_mean, to, static_cast<float>(moments.mean(place)));
          put(*layer, Score::kvzip_rms, to, static_cast<float>(moments.root_mean_square(place)));
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

  static void put(PromptLayer& layer, Score score, std::size_t place, float value) {
    const auto found = layer.scores.find(score);
    if (found != layer.scores.end()) found->second[place] = value;
  }

  std::int64_t tokens_;
  std::int64_t first_;
  std::int64_t last_;
  std::map<std::int64_t, PromptLayer*> layers_;
  std::map<std::int64_t, std::vector<Sums>> sums_;
  std::vector<float> probability_;  // one row over the chunk
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

namespace {

std::vector<std::int64_t> late_positions(std::int64_t tokens, std::int64_t count) {
  constexpr std::int64_t stride = 8;
  std::vector<std::int64_t> positions;
  for (std::int64_t p = (tokens - 1) / stride * stride;
       p >= 0 && static_cast<std::int64_t>(positions.size()) < count; p -= stride) {
    positions.push_back(p);
  }
  std::reverse(positions.begin(), positions.end());
  return positions;
}

}  // namespace

Prompt read_prompt(Engine& engine, const AttentionHook& hook, std::span<const Token> tokens,
                   const PromptOptions& options, const PromptProgress& progress) {
  const auto count = static_cast<std::int64_t>(tokens.size());
  const std::int64_t scoring = scoring_tokens(engine, count, options);
  if (count + scoring > engine.context_tokens()) {
    throw EngineError(fmt::format(
        "a prompt of {} tokens and {} for scoring it do not fit the context of {} tokens", count,
        scoring, engine.context_tokens()));
  }
  Prompt prompt;
  prompt.tokens.assign(tokens.begin(), tokens.end());
  prompt.query_positions = late_positions(count, options.query_count);
  for (const AttentionLayer& shape : hook.layers()) {
    if (shape.window_tokens > 0) continue;
    PromptLayer layer;
    layer.shape = shape;
    layer.keys.reserve(index(count * shape.kv_heads * shape.key_dim));
    layer.values.reserve(index(count * shape.kv_heads * shape.value_dim));
    for (const Score score : options.scores) {
      layer.scores[score].assign(index(shape.kv_heads * count), 0.0f);
    }
    prompt.layers.push_back(std::move(layer));
  }

  if (options.scores.count(Score::gate) > 0 && options.gate == nullptr) {
    throw InvalidArgument("the score gate needs a gate");
  }
  const bool repeat = any_repeat(options);
  const std::int64_t total = repeat ? 2 * count : count;
  constexpr std::int64_t slice_tokens = 512;  // between two reports of progress
  const auto run = [&](std::span<const Token> text, AttentionVisitor& visitor, std::int64_t done) {
    for (std::size_t first = 0; first < text.size(); first += slice_tokens) {
      const std::size_t size = std::min<std::size_t>(slice_tokens, text.size() - first);
      hook.decode(engine, text.subspan(first, size), visitor, nullptr);
      if (progress) {
        progress(std::min(total, done + static_cast<std::int64_t>(first + size)), total);
      }
    }
  };

  auto begin = std::chrono::steady_clock::now();
  engine.truncate(0);
  PrefillVisitor prefill(prompt, options);
  run(tokens, prefill, 0);
  prefill.finish();
  engine.mark();
  prompt.seconds_prefill = seconds_since(begin);

  begin = std::chrono::steady_clock::now();
  if (repeat) {
    const Chunks chunks(engine, count, options);
    for (std::int64_t first = 0; first < count; first += chunks.tokens) {
      const std::int64_t last = std::min(count, first + chunks.tokens);
      RepeatVisitor visitor(prompt, first, last);
      run(repeat_text(engine, tokens, first, last), visitor, count + first);
      visitor.finish();
      engine.truncate(count);
    }
  }
  prompt.seconds_scores = seconds_since(begin);
  return prompt;
}

}  // namespace verkv::llm
