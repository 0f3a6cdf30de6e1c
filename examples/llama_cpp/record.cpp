#include "record.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <Eigen/Core>

#include "../common/output_file.hpp"
#include "../common/safetensors.hpp"

#include <verkv/recorded_cache.hpp>

namespace verkv::llm {

namespace {

using examples::TensorData;
using examples::TensorType;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// One layer in the order of the file.
struct Layer {
  AttentionLayer shape;
  std::vector<Half> key;     // [KV head][token][key_dim]
  std::vector<Half> value;   // [KV head][token][value_dim]
  std::vector<float> query;  // [step][query head][key_dim]
  std::vector<Half> new_key;
  std::vector<Half> new_value;
  std::vector<Half> prompt_query;
  std::map<Score, std::vector<float>> importance;
};

struct Recording {
  std::vector<Token> prompt;
  std::vector<Token> next;
  std::vector<std::int64_t> positions;  // of prompt_query
  std::vector<Layer> layers;
};

template <class Number>
std::string comma_list(const std::vector<Number>& numbers) {
  std::string text;
  for (const Number number : numbers) {
    if (!text.empty()) text += ',';
    text += std::to_string(number);
  }
  return text;
}

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
  explicit StepRecorder(std::vector<Layer>& layers) {
    for (Layer& layer : layers) layers_.emplace(layer.shape.index, &layer);
  }

  bool attention(const LayerCall& call, std::span<float>) override {
    const auto found = layers_.find(call.layer->index);
    if (found == layers_.end()) return false;
    Layer& layer = *found->second;
    const AttentionLayer& shape = layer.shape;
    const std::int64_t queries = call.tokens * shape.query_heads * shape.key_dim;
    layer.query.insert(layer.query.end(), call.queries, call.queries + queries);
    append(layer.new_key, {call.keys, at(call.tokens * shape.kv_heads * shape.key_dim)});
    append(layer.new_value, {call.values, at(call.tokens * shape.kv_heads * shape.value_dim)});
    return false;
  }

 private:
  std::map<std::int64_t, Layer*> layers_;
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
  Prompt read = read_prompt(engine, hook, prompt, prompt_options, progress);
  recording.positions = read.query_positions;
  for (const AttentionLayer& shape : chosen) {
    const auto from =
        std::find_if(read.layers.begin(), read.layers.end(),
                     [&](const PromptLayer& l) { return l.shape.index == shape.index; });
    Layer layer;
    layer.shape = shape;
    layer.key = head_first(from->keys, shape.kv_heads, shape.key_dim);
    layer.value = head_first(from->values, shape.kv_heads, shape.value_dim);
    append(layer.prompt_query, from->queries);
    layer.importance = std::move(from->scores);
    recording.layers.push_back(std::move(layer));
  }

  StepRecorder recorder(recording.layers);
  recording.next.assign(next.begin(), next.begin() + options.steps);
  hook.decode(engine, recording.next, recorder, nullptr);
  return recording;
}

void write(const Recording& recording, const Engine& engine, const RecordOptions& options) {
  const auto tokens = static_cast<std::int64_t>(recording.prompt.size());
  const auto steps = static_cast<std::int64_t>(recording.next.size());
  const auto positions = static_cast<std::int64_t>(recording.positions.size());
  std::vector<TensorData> tensors;
  for (const Layer& layer : recording.layers) {
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

// The ids in a metadata entry; refuses what is no token of the model.
std::vector<Token> parse_tokens(const std::string& path, const std::string& text,
                                std::int64_t count, std::int64_t vocabulary) {
  std::vector<Token> tokens;
  const char* next = text.data();
  const char* const end = next + text.size();
  while (next != end) {
    Token token = -1;
    const auto [rest, error] = std::from_chars(next, end, token);
    if (error != std::errc() || token < 0 || token >= vocabulary ||
        (rest != end && (*rest != ',' || rest + 1 == end))) {
      throw FormatError(fmt::format("{}: metadata tokens: number {} is no token of the model", path,
                                    tokens.size()));
    }
    tokens.push_back(token);
    next = rest == end ? end : rest + 1;
  }
  if (static_cast<std::int64_t>(tokens.size()) != count) {
    throw FormatError(fmt::format("{}: metadata has {} tokens for {}", path, tokens.size(), count));
  }
  return tokens;
}

// Values of layer 0; the layers behind it are not computed.
class FirstValues : public AttentionVisitor {
 public:
  struct Enough {};

  explicit FirstValues(std::vector<float>& values) : values_(values) {}

  bool attention(const LayerCall& call, std::span<float>) override {
    const std::int64_t row = call.layer->kv_heads * call.layer->value_dim;
    values_.insert(values_.end(), call.values, call.values + call.tokens * row);
    throw Enough();
  }

 private:
  std::vector<float>& values_;
};

// [token of the vocabulary][KV head][value_dim] of layer 0.
std::vector<float> vocabulary_values(Engine& engine, const AttentionHook& hook, std::int64_t row,
                                     const PromptProgress& progress) {
  constexpr std::int64_t batch_tokens = 512;
  const std::int64_t vocabulary = engine.vocabulary();
  std::vector<float> values;
  values.reserve(at(vocabulary * row));
  FirstValues visitor(values);
  for (std::int64_t first = 0; first < vocabulary;
       first = static_cast<std::int64_t>(values.size()) / row) {
    if (progress) progress(first, vocabulary);
    std::vector<Token> batch(at(std::min(batch_tokens, vocabulary - first)));
    std::iota(batch.begin(), batch.end(), static_cast<Token>(first));
    engine.truncate(0);
    try {
      hook.decode(engine, batch, visitor, nullptr);
    } catch (const FirstValues::Enough&) {
    }
  }
  return values;
}

std::vector<float> row_of(const TensorView& view, std::int64_t token) {
  std::vector<float> row;
  for (std::int64_t head = 0; head < view.heads; ++head) {
    const void* from = view.row(token, head);
    with_element(view.type, [&](auto zero) {
      const auto* elements = static_cast<const decltype(zero)*>(from);
      for (std::int64_t d = 0; d < view.dim; ++d) row.push_back(to_float(elements[d]));
    });
  }
  return row;
}

struct Match {
  Token token = 0;
  double distance = 0;  // relative to the recorded value
  double margin = 0;    // distance over that of the second nearest
};

Match nearest(const std::vector<float>& wanted, const std::vector<float>& values) {
  using Row = Eigen::Map<const Eigen::VectorXf>;
  const auto size = static_cast<std::int64_t>(wanted.size());
  const std::int64_t part = size / 4;  // most candidates are out after so many numbers
  const Row target(wanted.data(), size);
  float best = std::numeric_limits<float>::infinity();
  float second = best;
  Match match;
  const std::int64_t vocabulary = static_cast<std::int64_t>(values.size()) / size;
  for (std::int64_t token = 0; token < vocabulary; ++token) {
    const Row row(values.data() + token * size, size);
    float distance = (row.head(part) - target.head(part)).squaredNorm();
    if (distance >= second) continue;
    distance += (row.tail(size - part) - target.tail(size - part)).squaredNorm();
    if (distance < best) {
      second = std::exchange(best, distance);
      match.token = static_cast<Token>(token);
    } else {
      second = std::min(second, distance);
    }
  }
  match.distance = std::sqrt(best / std::max(target.squaredNorm(), 1e-30f));
  match.margin = std::sqrt(best / std::max(second, 1e-30f));
  return match;
}

constexpr double kDistanceLimit = 0.05;
constexpr double kMarginLimit = 0.5;

// Recovers tokens from values; the same value is looked up once.
class Recovery {
 public:
  Recovery(const std::vector<float>& values, LikeReport& report)
      : values_(values), report_(report) {}

  std::vector<Token> tokens(const TensorView& recorded, std::string_view what) {
    std::vector<Token> result;
    for (std::int64_t t = 0; t < recorded.tokens; ++t) {
      const auto [found, added] = known_.try_emplace(row_of(recorded, t));
      if (added) found->second = nearest(found->first, values_);
      const Match& match = found->second;
      if (!(match.distance <= kDistanceLimit && match.margin <= kMarginLimit)) {
        throw EngineError(fmt::format(
            "{} {}: the nearest token is {} at a relative distance of {:.3g}, {:.3g} times that of "
            "the next (at most {} and {}): the recording is of another model",
            what, t, match.token, match.distance, match.margin, kDistanceLimit, kMarginLimit));
      }
      report_.worst_distance = std::max(report_.worst_distance, match.distance);
      report_.worst_margin = std::max(report_.worst_margin, match.margin);
      result.push_back(match.token);
    }
    return result;
  }

 private:
  const std::vector<float>& values_;
  LikeReport& report_;
  std::map<std::vector<float>, Match> known_;
};

double correlation(std::span<const double> a, std::span<const double> b) {
  using Vector = Eigen::Map<const Eigen::ArrayXd>;
  const Vector x(a.data(), static_cast<Eigen::Index>(a.size()));
  const Vector y(b.data(), static_cast<Eigen::Index>(b.size()));
  const auto dx = x - x.mean();
  const auto dy = y - y.mean();
  return (dx * dy).sum() / std::sqrt(std::max(dx.square().sum() * dy.square().sum(), 1e-300));
}

std::vector<double> ranks(std::span<const double> values) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return values[a] < values[b]; });
  std::vector<double> result(values.size());
  for (std::size_t i = 0; i < order.size(); ++i) result[order[i]] = static_cast<double>(i);
  return result;
}

TensorDifference compare(std::string name, const TensorView& now, const TensorView& then) {
  TensorDifference result;
  result.name = std::move(name);
  double gaps = 0;
  double norms = 0;
  for (std::int64_t t = 0; t < then.tokens; ++t) {
    const std::vector<float> a = row_of(now, t);
    const std::vector<float> b = row_of(then, t);
    for (std::int64_t head = 0; head < then.heads; ++head) {
      double gap = 0;
      double norm = 0;
      for (std::int64_t d = head * then.dim; d < (head + 1) * then.dim; ++d) {
        const double difference = static_cast<double>(a[at(d)]) - b[at(d)];
        gap += difference * difference;
        norm += static_cast<double>(b[at(d)]) * b[at(d)];
      }
      gaps += gap;
      norms += norm;
      if (norm > 0) result.worst_row = std::max(result.worst_row, std::sqrt(gap / norm));
    }
  }
  result.relative = std::sqrt(gaps / std::max(norms, 1e-300));
  return result;
}

TensorDifference compare(std::string name, const std::vector<float>& now,
                         const ImportanceView& then) {
  const TensorView a = head_major(now.data(), DType::f32, then.tokens, then.heads, 1);
  const TensorView b{then.data, DType::f32, then.tokens, then.heads, 1, 1, then.head_stride};
  TensorDifference result = compare(std::move(name), a, b);
  result.importance = true;
  for (std::int64_t head = 0; head < then.heads; ++head) {
    const float* x = now.data() + head * then.tokens;
    const float* y = then.data + head * then.head_stride;
    const std::vector<double> left(x, x + then.tokens);
    const std::vector<double> right(y, y + then.tokens);
    const auto heads = static_cast<double>(then.heads);
    result.correlation += correlation(left, right) / heads;
    result.rank_correlation += correlation(ranks(left), ranks(right)) / heads;
  }
  return result;
}

std::vector<TensorDifference> compare(const Recording& now, const RecordedCache& then,
                                      bool same_positions) {
  const auto steps = static_cast<std::int64_t>(now.next.size());
  const std::int64_t tokens = then.prompt_tokens();
  std::vector<TensorDifference> result;
  for (std::size_t i = 0; i < now.layers.size(); ++i) {
    const Layer& a = now.layers[i];
    const RecordedLayer& b = then.layers()[i];
    const auto full = [&](std::string_view part) {
      return fmt::format("layers.{}.{}", b.index, part);
    };
    result.push_back(compare(
        full("key"), head_major(a.key.data(), DType::f16, tokens, b.kv_heads, b.key_dim), b.key));
    result.push_back(
        compare(full("value"),
                head_major(a.value.data(), DType::f16, tokens, b.kv_heads, b.value_dim), b.value));
    result.push_back(
        compare(full("query"),
                token_major(a.query.data(), DType::f32, steps, b.query_heads, b.key_dim), b.query));
    result.push_back(compare(
        full("new_key"), token_major(a.new_key.data(), DType::f16, steps, b.kv_heads, b.key_dim),
        b.new_key));
    result.push_back(compare(
        full("new_value"),
        token_major(a.new_value.data(), DType::f16, steps, b.kv_heads, b.value_dim), b.new_value));
    if (same_positions) {
      result.push_back(compare(full("prompt_query"),
                               token_major(a.prompt_query.data(), DType::f16, b.prompt_query.tokens,
                                           b.query_heads, b.key_dim),
                               b.prompt_query));
    }
    for (const auto& [score, values] : a.importance) {
      const auto found = b.importance.find(std::string(name(score)));
      if (found == b.importance.end()) continue;
      result.push_back(
          compare(full(fmt::format("importance.{}", name(score))), values, found->second));
    }
  }
  return result;
}

void check_model(const std::string& path, const AttentionHook& hook, const RecordedCache& cache) {
  for (const RecordedLayer& layer : cache.layers()) {
    const auto found =
        std::find_if(hook.layers().begin(), hook.layers().end(),
                     [&](const AttentionLayer& l) { return l.index == layer.index; });
    const double soft_cap = cache.soft_cap().value_or(0);
    if (found == hook.layers().end() || found->kv_heads != layer.kv_heads ||
        found->query_heads != layer.query_heads || found->key_dim != layer.key_dim ||
        found->value_dim != layer.value_dim ||
        std::abs(found->scale - cache.scale()) > 1e-6 * cache.scale() ||
        std::abs(found->soft_cap - soft_cap) > 1e-6 * soft_cap) {
      throw EngineError(fmt::format(
          "{}: layer {} has {} query heads, {} KV heads of {} and {} numbers and scale {}, which "
          "the model has not",
          path, layer.index, layer.query_heads, layer.kv_heads, layer.key_dim, layer.value_dim,
          cache.scale()));
    }
  }
}

// A model can have been recorded up to the end of its context.
std::int64_t fitting_chunk(const Engine& engine, std::int64_t tokens, const std::set<Score>& scores,
                           std::int64_t wanted) {
  PromptOptions options;
  options.scores = scores;
  options.repeat_chunk_tokens = wanted;
  const auto fits = [&] {
    return tokens + scoring_tokens(engine, tokens, options) <= engine.context_tokens();
  };
  while (options.repeat_chunk_tokens > 1 && !fits()) options.repeat_chunk_tokens /= 2;
  return options.repeat_chunk_tokens;
}

std::string entry(const RecordedCache& cache, const std::string& key) {
  const auto found = cache.metadata().find(key);
  return found == cache.metadata().end() ? std::string() : found->second;
}

}  // namespace

void record(Engine& engine, const AttentionHook& hook, std::span<const Token> prompt,
            std::span<const Token> next, const RecordOptions& options,
            const PromptProgress& progress) {
  examples::check_writable(options.out);
  write(make_recording(engine, hook, prompt, next, options, progress), engine, options);
}

LikeReport record_like(Engine& engine, const AttentionHook& hook, const std::string& recording,
                       const std::string& out, const std::string& model_note,
                       const PromptProgress& progress, std::int64_t repeat_chunk_tokens) {
  if (!out.empty()) examples::check_writable(out, recording, "recording");
  const RecordedCache cache = RecordedCache::load(recording);
  check_model(recording, hook, cache);
  LikeReport report;
  std::vector<Token> prompt;
  std::vector<Token> next;
  if (!entry(cache, "tokens").empty() && !entry(cache, "next_tokens").empty()) {
    prompt =
        parse_tokens(recording, entry(cache, "tokens"), cache.prompt_tokens(), engine.vocabulary());
    next = parse_tokens(recording, entry(cache, "next_tokens"), cache.steps(), engine.vocabulary());
  } else {
    const RecordedLayer& first = cache.layers().front();
    if (first.index != 0) {
      throw EngineError(fmt::format("{}: carries neither its tokens nor layer 0", recording));
    }
    const std::vector<float> values =
        vocabulary_values(engine, hook, first.kv_heads * first.value_dim, progress);
    Recovery recovery(values, report);
    prompt = recovery.tokens(first.value, "prompt token");
    next = recovery.tokens(first.new_value, "step");
    report.recovered = true;
  }
  std::set<Token> distinct(prompt.begin(), prompt.end());
  distinct.insert(next.begin(), next.end());
  report.tokens = static_cast<std::int64_t>(prompt.size() + next.size());
  report.distinct = static_cast<std::int64_t>(distinct.size());

  RecordOptions options;
  options.out = out;
  options.steps = cache.steps();
  options.source = entry(cache, "source");
  options.model_note = model_note;
  options.query_positions_count = 0;
  for (const RecordedLayer& layer : cache.layers()) {
    options.layers.push_back(layer.index);
    if (layer.prompt_query.data != nullptr) {
      options.query_positions_count =
          std::max(options.query_positions_count, layer.prompt_query.tokens);
    }
    for (const auto& [word, view] : layer.importance) {
      const std::optional<Score> score = parse_score(word);
      if (score && *score != Score::gate) options.scores.insert(*score);
    }
  }
  if (std::any_of(options.scores.begin(), options.scores.end(), needs_repeat)) {
    options.repeat_chunk_tokens =
        fitting_chunk(engine, cache.prompt_tokens(), options.scores, repeat_chunk_tokens);
    report.repeat_chunk_tokens = options.repeat_chunk_tokens;
  }
  const Recording again = make_recording(engine, hook, prompt, next, options, progress);
  const bool same_positions =
      !again.positions.empty() &&
      entry(cache, "prompt_query_positions") == comma_list(again.positions) &&
      std::all_of(cache.layers().begin(), cache.layers().end(), [&](const RecordedLayer& layer) {
        return layer.prompt_query.data != nullptr &&
               layer.prompt_query.tokens == static_cast<std::int64_t>(again.positions.size());
      });
  report.tensors = compare(again, cache, same_positions);
  if (!out.empty()) write(again, engine, options);
  return report;
}

std::string like_table(const LikeReport& report) {
  std::string text = fmt::format("{} tokens, {} of them different", report.tokens, report.distinct);
  if (report.recovered) {
    text += fmt::format(
        ", recovered from the values of layer 0\n"
        "worst relative distance {:.2g}, {:.2g} times that of the second nearest token\n",
        report.worst_distance, report.worst_margin);
  } else {
    text += ", as the recording says\n";
  }
  if (report.repeat_chunk_tokens > 0) {
    text += fmt::format("the prompt was repeated in parts of at most {} tokens\n",
                        report.repeat_chunk_tokens);
  }
  text += fmt::format("\n{:32} {:>10} {:>10} {:>12} {:>8}\n", "tensor", "difference", "worst row",
                      "correlation", "of ranks");
  for (const TensorDifference& tensor : report.tensors) {
    text += fmt::format("{:32} {:>10.2g} ", tensor.name, tensor.relative);
    text += tensor.importance ? fmt::format("{:>10} {:>12.4f} {:>8.4f}\n", "", tensor.correlation,
                                            tensor.rank_correlation)
                              : fmt::format("{:>10.2g}\n", tensor.worst_row);
  }
  return text;
}

}  // namespace verkv::llm
