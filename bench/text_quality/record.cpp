#include "record.hpp"

#include <algorithm>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "../../examples/common/output_file.hpp"
#include "../../examples/common/safetensors.hpp"

namespace verkv::lab {

namespace {

using examples::TensorData;
using examples::TensorType;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

void append(std::vector<Half>& to, std::span<const float> from) {
  for (const float x : from) to.push_back(to_half(x));
}

std::vector<Half> head_first(const std::vector<Half>& from, std::int64_t heads, std::int64_t dim) {
  const std::int64_t tokens = static_cast<std::int64_t>(from.size()) / (heads * dim);
  std::vector<Half> to;
  to.reserve(from.size());
  for (std::int64_t head = 0; head < heads; ++head) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      const auto row = from.begin() + (t * heads + head) * dim;
      to.insert(to.end(), row, row + dim);
    }
  }
  return to;
}

class StepRecorder : public AttentionVisitor {
 public:
  explicit StepRecorder(std::vector<RecordingLayer>& layers) {
    for (RecordingLayer& layer : layers) layers_.emplace(layer.shape.index, &layer);
  }

  bool attention(const LayerCall& call, std::span<float>) override {
    const auto found = layers_.find(call.layer->index);
    if (found == layers_.end()) return false;
    RecordingLayer& layer = *found->second;
    const AttentionLayer& shape = layer.shape;
    const std::int64_t queries = call.tokens * shape.query_heads * shape.key_dim;
    layer.query.insert(layer.query.end(), call.queries, call.queries + queries);
    append(layer.new_key, {call.keys, at(call.tokens * shape.kv_heads * shape.key_dim)});
    append(layer.new_value, {call.values, at(call.tokens * shape.kv_heads * shape.value_dim)});
    return false;
  }

 private:
  std::map<std::int64_t, RecordingLayer*> layers_;
};

// The layers to record, ascending; refuses what one file cannot hold.
std::vector<AttentionLayer> choose_layers(const AttentionHook& hook,
                                          const std::vector<std::int64_t>& wanted) {
  std::vector<AttentionLayer> chosen;
  for (const AttentionLayer& layer : hook.layers()) {
    const bool named = std::find(wanted.begin(), wanted.end(), layer.index) != wanted.end();
    if (named && layer.window_tokens > 0) {
      throw EngineError(
          fmt::format("layer {}: attends to the last {} tokens only; layers that "
                      "attend to everything can be recorded",
                      layer.index, layer.window_tokens));
    }
    if (named || (wanted.empty() && layer.window_tokens == 0)) chosen.push_back(layer);
  }
  for (const std::int64_t index : wanted) {
    if (std::none_of(chosen.begin(), chosen.end(),
                     [&](const AttentionLayer& layer) { return layer.index == index; })) {
      throw EngineError(fmt::format("layer {}: the model has no attention there", index));
    }
  }
  if (chosen.empty()) throw EngineError("the model has no layer that attends to everything");
  for (const AttentionLayer& layer : chosen) {
    if (layer.scale != chosen[0].scale || layer.soft_cap != chosen[0].soft_cap) {
      throw EngineError(fmt::format(
          "layers {} and {}: scale {} and {}, soft cap {} and {}; a recording has one of each, so "
          "record them apart",
          chosen[0].index, layer.index, chosen[0].scale, layer.scale, chosen[0].soft_cap,
          layer.soft_cap));
    }
  }
  return chosen;
}

}  // namespace

Recording make_recording(Engine& engine, const AttentionHook& hook, std::span<const Token> prompt,
                         std::span<const Token> next, const RecordOptions& options,
                         const PromptProgress& progress) {
  const auto tokens = static_cast<std::int64_t>(prompt.size());
  if (tokens < 1 || options.steps < 1) {
    throw InvalidArgument(
        fmt::format("a recording of {} prompt tokens and {} steps, 1 of each is "
                    "the least",
                    tokens, options.steps));
  }
  if (static_cast<std::int64_t>(next.size()) < options.steps) {
    throw InvalidArgument(
        fmt::format("{} tokens for {} steps to go on with", next.size(), options.steps));
  }
  if (options.scores.count(Score::gate) > 0) {
    throw InvalidArgument("gate scores are not recorded");
  }
  if (tokens + options.steps > engine.context_tokens()) {
    throw EngineError(fmt::format("{} tokens and {} steps do not fit the context of {} tokens",
                                  tokens, options.steps, engine.context_tokens()));
  }
  const std::vector<AttentionLayer> chosen = choose_layers(hook, options.layers);

  Recording recording;
  recording.prompt.assign(prompt.begin(), prompt.end());
  PromptOptions prompt_options;
  prompt_options.scores = options.scores;
  prompt_options.repeat_chunk_tokens = options.repeat_chunk_tokens;
  prompt_options.query_count = options.query_positions_count;
  ScoredPrompt read = read_prompt(engine, hook, prompt, prompt_options, progress);
  recording.positions = read.prompt.query_positions;
  for (const AttentionLayer& shape : chosen) {
    const std::vector<PromptLayer>& layers = read.prompt.layers;
    const auto from = std::find_if(layers.begin(), layers.end(), [&](const PromptLayer& layer) {
      return layer.shape.index == shape.index;
    });
    RecordingLayer layer;
    layer.shape = shape;
    layer.key = head_first(from->keys, shape.kv_heads, shape.key_dim);
    layer.value = head_first(from->values, shape.kv_heads, shape.value_dim);
    append(layer.prompt_query, from->queries);
    for (auto& [score, values] : read.scores) {
      layer.importance[score] = std::move(values[at(from - layers.begin())]);
    }
    recording.layers.push_back(std::move(layer));
  }

  StepRecorder recorder(recording.layers);
  recording.next.assign(next.begin(), next.begin() + options.steps);
  hook.decode(engine, recording.next, recorder, nullptr);
  return recording;
}

void write_recording(const Recording& recording, const Engine& engine,
                     const RecordOptions& options) {
  const auto tokens = static_cast<std::int64_t>(recording.prompt.size());
  const auto steps = static_cast<std::int64_t>(recording.next.size());
  const auto positions = static_cast<std::int64_t>(recording.positions.size());
  std::vector<TensorData> tensors;
  for (const RecordingLayer& layer : recording.layers) {
    const AttentionLayer& shape = layer.shape;
    const auto put = [&](std::string_view part, TensorType type, std::vector<std::int64_t> extents,
                         const void* data) {
      tensors.push_back(
          {fmt::format("layers.{}.{}", shape.index, part), type, std::move(extents), data});
    };
    const std::int64_t heads = shape.kv_heads;
    put("key", TensorType::f16, {heads, tokens, shape.key_dim}, layer.key.data());
    put("value", TensorType::f16, {heads, tokens, shape.value_dim}, layer.value.data());
    put("query", TensorType::f32, {steps, shape.query_heads, shape.key_dim}, layer.query.data());
    put("new_key", TensorType::f16, {steps, heads, shape.key_dim}, layer.new_key.data());
    put("new_value", TensorType::f16, {steps, heads, shape.value_dim}, layer.new_value.data());
    if (positions > 0) {
      put("prompt_query", TensorType::f16, {positions, shape.query_heads, shape.key_dim},
          layer.prompt_query.data());
    }
    for (const auto& [score, values] : layer.importance) {
      put(fmt::format("importance.{}", name(score)), TensorType::f32, {heads, tokens},
          values.data());
    }
  }
  const AttentionLayer& shape = recording.layers.front().shape;
  std::map<std::string, std::string> metadata{
      {"engine", Engine::version()},
      {"model", options.model_note.empty()
                    ? engine.model_name()
                    : fmt::format("{} ({})", engine.model_name(), options.model_note)},
      {"source", options.source},
      {"scale", fmt::format("{}", shape.scale)},
      {"soft_cap", fmt::format("{}", shape.soft_cap)},
      {"window", "0"},
      {"rope", "applied"},
      {"prompt_tokens", std::to_string(tokens)},
      {"tokens", comma_list(recording.prompt)},
      {"next_tokens", comma_list(recording.next)}};
  if (std::any_of(options.scores.begin(), options.scores.end(), needs_repeat)) {
    metadata["repeat_chunk_tokens"] = std::to_string(options.repeat_chunk_tokens);
  }
  if (positions > 0) {
    metadata["prompt_query_positions"] = comma_list(recording.positions);
  }
  examples::write_safetensors(options.out, tensors, metadata);
}

void record(Engine& engine, const AttentionHook& hook, std::span<const Token> prompt,
            std::span<const Token> next, const RecordOptions& options,
            const PromptProgress& progress) {
  examples::check_writable(options.out);
  write_recording(make_recording(engine, hook, prompt, next, options, progress), engine, options);
}

}  // namespace verkv::lab
