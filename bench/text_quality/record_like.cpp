#include "record_like.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <Eigen/Core>

#include "../../examples/common/output_file.hpp"
#include "record.hpp"

#include <verkv/recorded_cache.hpp>

namespace verkv::lab {

namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

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
    const RecordingLayer& a = now.layers[i];
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
  if (!out.empty()) write_recording(again, engine, options);
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

}  // namespace verkv::lab
