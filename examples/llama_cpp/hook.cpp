#include "hook.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <string_view>

#include <fmt/format.h>
#include <ggml-backend.h>
#include <ggml.h>

namespace verkv::llm {

namespace {

// The nodes that are looked at, by the name that llama.cpp gives them before "-LAYER".
enum class Role { hidden, key, value, product, probabilities, output };
constexpr std::array<std::pair<std::string_view, Role>, 6> kRoles{
    {{"attn_norm", Role::hidden},
     {"Kcur", Role::key},
     {"Vcur", Role::value},
     {"kq", Role::product},
     {"kq_soft_max", Role::probabilities},
     {"kqv_out", Role::output}}};

struct NodeName {
  Role role;
  std::int64_t layer;
};

std::optional<NodeName> parse_name(const char* text) {
  const std::string_view name(text);
  const std::size_t dash = name.rfind('-');
  if (dash == std::string_view::npos) return std::nullopt;
  std::int64_t layer = 0;
  const char* end = name.data() + name.size();
  const auto [rest, error] = std::from_chars(name.data() + dash + 1, end, layer);
  if (error != std::errc() || rest != end) return std::nullopt;
  for (const auto& [prefix, role] : kRoles) {
    if (name.substr(0, dash) == prefix) return NodeName{role, layer};
  }
  return std::nullopt;
}

[[noreturn]] void refuse(std::int64_t layer, const std::string& reason) {
  throw EngineError(
      fmt::format("layer {}: {}; this {} builds its graph in a way that the hook does not know",
                  layer, reason, Engine::version()));
}

std::string shape(const ggml_tensor& node) {
  return fmt::format("{} [{}, {}, {}, {}] of type {}", node.name, node.ne[0], node.ne[1],
                     node.ne[2], node.ne[3], ggml_type_name(node.type));
}

// The numbers of a float node, innermost dimension first, whatever its strides.
void read(const ggml_tensor& node, std::int64_t layer, std::vector<float>& to) {
  if (node.type != GGML_TYPE_F32 || node.nb[0] != sizeof(float)) {
    refuse(layer, shape(node) + " is not made of plain floats");
  }
  to.resize(static_cast<std::size_t>(ggml_nelements(&node)));
  if (ggml_is_contiguous(&node)) {
    ggml_backend_tensor_get(&node, to.data(), 0, ggml_nbytes(&node));
    return;
  }
  float* next = to.data();
  for (std::int64_t j = 0; j < node.ne[2] * node.ne[3]; ++j) {
    for (std::int64_t i = 0; i < node.ne[1]; ++i) {
      const std::size_t offset = static_cast<std::size_t>(i) * node.nb[1] +
                                 static_cast<std::size_t>(j % node.ne[2]) * node.nb[2] +
                                 static_cast<std::size_t>(j / node.ne[2]) * node.nb[3];
      ggml_backend_tensor_get(&node, next, offset,
                              static_cast<std::size_t>(node.ne[0]) * sizeof(float));
      next += node.ne[0];
    }
  }
}

float parameter(const ggml_tensor& node, std::size_t place) {
  float value = 0;
  std::memcpy(&value, reinterpret_cast<const char*>(node.op_params) + place * sizeof(float),
              sizeof(float));
  return value;
}

// Where a chain of views begins.
const ggml_tensor* base_of(const ggml_tensor* node) {
  while (node != nullptr && (node->op == GGML_OP_PERMUTE || node->op == GGML_OP_VIEW ||
                             node->op == GGML_OP_RESHAPE || node->op == GGML_OP_TRANSPOSE)) {
    node = node->src[0];
  }
  return node;
}

// Scale and soft cap as the nodes between the product and the probabilities apply them.
void read_scale(const ggml_tensor& soft_max, std::int64_t index, AttentionLayer& layer) {
  if (soft_max.op != GGML_OP_SOFT_MAX) refuse(index, shape(soft_max) + " is no softmax");
  layer.scale = parameter(soft_max, 0);
  if (parameter(soft_max, 1) != 0) refuse(index, "its logits have an ALiBi bias");
  if (soft_max.src[2] != nullptr) refuse(index, "its softmax has attention sinks of its own");
  const ggml_tensor* logits = soft_max.src[0];
  if (logits->op == GGML_OP_MUL_MAT) return;
  const ggml_tensor* tanh = logits->src[0];
  const ggml_tensor* inner = tanh == nullptr ? nullptr : tanh->src[0];
  const bool capped = logits->op == GGML_OP_SCALE && tanh != nullptr && tanh->op == GGML_OP_UNARY &&
                      ggml_get_unary_op(tanh) == GGML_UNARY_OP_TANH && inner != nullptr &&
                      inner->op == GGML_OP_SCALE && inner->src[0]->op == GGML_OP_MUL_MAT;
  if (!capped) refuse(index, "there is more than a soft cap between the logits and the softmax");
  layer.soft_cap = parameter(*logits, 0);
  if (layer.scale != 1) refuse(index, "it scales its logits after the soft cap");
  layer.scale = static_cast<double>(parameter(*inner, 0)) * layer.soft_cap;
}

// Gathers what belongs to one layer and passes it to the visitor when the layer's output is there.
class Gatherer : public NodeListener {
 public:
  Gatherer(const std::vector<AttentionLayer>& layers, AttentionVisitor& visitor)
      : visitor_(visitor) {
    for (const AttentionLayer& layer : layers) layers_.emplace(layer.index, &layer);
  }

  void begin_batch(std::int64_t position, std::int64_t tokens) override {
    if (!first_batch_) check_served();
    first_batch_ = false;
    position_ = position;
    tokens_ = tokens;
    served_.clear();
    hidden_.clear();
  }

  bool wants(const ggml_tensor& node) override {
    const std::optional<NodeName> name = parse_name(node.name);
    if (!name) return false;
    const auto found = layers_.find(name->layer);
    if (found == layers_.end()) return false;
    if (name->role == Role::hidden) return visitor_.wants_hidden();
    if (name->role == Role::probabilities) return visitor_.wants_probabilities(*found->second);
    return true;
  }

  void computed(ggml_tensor& node) override {
    const NodeName name = *parse_name(node.name);
    const AttentionLayer& layer = *layers_.at(name.layer);
    switch (name.role) {
      case Role::hidden:
        read(node, name.layer, buffer_);
        if (static_cast<std::int64_t>(buffer_.size()) != tokens_ * node.ne[0]) {
          refuse(name.layer, shape(node) + " is not one row per token");
        }
        visitor_.hidden(layer, position_, tokens_, node.ne[0], buffer_.data());
        hidden_.insert(name.layer);
        break;
      case Role::key:  // named two or three times; the last one is what goes into the cache
        read(node, name.layer, keys_);
        break;
      case Role::value:
        read(node, name.layer, values_);
        break;
      case Role::product:
        read(*base_of(node.src[1]), name.layer, queries_);
        break;
      case Role::probabilities:
        probabilities(node, layer);
        break;
      case Role::output:
        output(node, layer);
        break;
    }
  }

  // Throws EngineError unless every layer has passed since the batch began.
  void check_served() const {
    if (served_.size() != layers_.size()) {
      throw EngineError(fmt::format("{} of {} attention layers passed by the hook", served_.size(),
                                    layers_.size()));
    }
  }

 private:
  void probabilities(const ggml_tensor& node, const AttentionLayer& layer) {
    if (node.ne[1] != tokens_ || node.ne[2] != layer.query_heads) {
      refuse(layer.index, shape(node) + " is not one row per token and head");
    }
    if (ggml_backend_buffer_is_host(node.buffer) && ggml_is_contiguous(&node)) {
      visitor_.probabilities(layer, position_, tokens_, node.ne[0],
                             static_cast<const float*>(node.data));
      return;
    }
    read(node, layer.index, buffer_);
    visitor_.probabilities(layer, position_, tokens_, node.ne[0], buffer_.data());
  }

  void output(ggml_tensor& node, const AttentionLayer& layer) {
    if (!served_.insert(layer.index).second) refuse(layer.index, shape(node) + " came twice");
    if (visitor_.wants_hidden() && hidden_.count(layer.index) == 0) {
      refuse(layer.index, "no node attn_norm, which this score needs");
    }
    check(layer, "queries", queries_, layer.query_heads * layer.key_dim);
    check(layer, "keys", keys_, layer.kv_heads * layer.key_dim);
    check(layer, "values", values_, layer.kv_heads * layer.value_dim);
    read(node, layer.index, buffer_);
    check(layer, "outputs", buffer_, layer.query_heads * layer.value_dim);
    const LayerCall call{&layer, position_, tokens_, queries_.data(), keys_.data(), values_.data()};
    if (visitor_.attention(call, buffer_)) {
      ggml_backend_tensor_set(&node, buffer_.data(), 0, ggml_nbytes(&node));
    }
    // The next layer must bring its own.
    queries_.clear();
    keys_.clear();
    values_.clear();
  }

  void check(const AttentionLayer& layer, const char* what, const std::vector<float>& data,
             std::int64_t row) const {
    if (static_cast<std::int64_t>(data.size()) != tokens_ * row) {
      refuse(layer.index,
             fmt::format("{} numbers of {} for {} tokens of {}", data.size(), what, tokens_, row));
    }
  }

  AttentionVisitor& visitor_;
  std::map<std::int64_t, const AttentionLayer*> layers_;
  std::vector<float> queries_;
  std::vector<float> keys_;
  std::vector<float> values_;
  std::vector<float> buffer_;
  std::int64_t position_ = 0;
  std::int64_t tokens_ = 0;
  bool first_batch_ = true;
  std::set<std::int64_t> served_;
  std::set<std::int64_t> hidden_;
};

// Reads the shape of every layer off the graph, without knowing anything beforehand.
class Explorer : public NodeListener {
 public:
  struct Found {
    AttentionLayer shape;
    bool key = false;
    bool value = false;
    bool probabilities = false;
    bool output = false;
  };

  void begin_batch(std::int64_t, std::int64_t tokens) override { tokens_ = tokens; }

  // All is seen when it is asked for; nothing has to be computed one by one.
  bool wants(const ggml_tensor& node) override {
    const std::optional<NodeName> name = parse_name(node.name);
    if (!name || name->role == Role::hidden) return false;
    Found& found = found_[name->layer];
    found.shape.index = name->layer;
    switch (name->role) {
      case Role::key:
        found.key = true;
        if (node.ne[2] == tokens_) found.shape.kv_heads = node.ne[1];
        break;
      case Role::value:
        found.value = true;
        break;
      case Role::product: {
        if (node.op != GGML_OP_MUL_MAT) refuse(name->layer, shape(node) + " is no product");
        const ggml_tensor* query = base_of(node.src[1]);
        if (query == nullptr || query->ne[0] != node.src[1]->ne[0] || query->ne[2] != tokens_ ||
            query->ne[1] != node.ne[2] || !ggml_is_contiguous(query)) {
          refuse(name->layer, query == nullptr ? "no query" : shape(*query) + " is no query");
        }
        found.shape.query_heads = node.ne[2];
        found.shape.key_dim = query->ne[0];
        break;
      }
      case Role::probabilities:
        found.probabilities = true;
        read_scale(node, name->layer, found.shape);
        break;
      case Role::output:
        found.output = true;
        if (node.ne[1] != tokens_ || !ggml_is_contiguous(&node)) {
          refuse(name->layer, shape(node) + " is not one row per token");
        }
        if (found.shape.query_heads > 0) {
          found.shape.value_dim = node.ne[0] / found.shape.query_heads;
        }
        break;
      case Role::hidden:
        break;
    }
    return false;
  }

  void computed(ggml_tensor&) override {}

  const std::map<std::int64_t, Found>& found() const { return found_; }

 private:
  std::map<std::int64_t, Found> found_;
  std::int64_t tokens_ = 0;
};

// Attention of the last token in double, from what the hook hands out, beside the engine's own.
class Checker : public AttentionVisitor {
 public:
  Checker(std::int64_t tokens, std::int64_t window) : tokens_(tokens), window_(window) {}

  struct Errors {
    double full = 0;
    double windowed = 0;
  };

  bool attention(const LayerCall& call, std::span<float> output) override {
    const AttentionLayer& layer = *call.layer;
    History& history = history_[layer.index];
    append(history.keys, call.keys, call.tokens * layer.kv_heads * layer.key_dim);
    append(history.values, call.values, call.tokens * layer.kv_heads * layer.value_dim);
    if (call.position + call.tokens < tokens_) return false;
    const float* query = call.queries + (call.tokens - 1) * layer.query_heads * layer.key_dim;
    const float* engine = output.data() + (call.tokens - 1) * layer.query_heads * layer.value_dim;
    Errors errors;
    for (std::int64_t head = 0; head < layer.query_heads; ++head) {
      const float* mine = engine + head * layer.value_dim;
      errors.full = std::max(errors.full, error(layer, history, query, head, mine, tokens_));
      errors.windowed =
          std::max(errors.windowed, error(layer, history, query, head, mine, window_));
    }
    errors_[layer.index] = errors;
    return false;
  }

  const std::map<std::int64_t, Errors>& errors() const { return errors_; }

 private:
  struct History {
    std::vector<float> keys;
    std::vector<float> values;
  };

  static void append(std::vector<float>& to, const float* from, std::int64_t count) {
    to.insert(to.end(), from, from + count);
  }

  // |engine - ours| relative to the size of the values in sight, over the last `visible` tokens.
  double error(const AttentionLayer& layer, const History& history, const float* queries,
               std::int64_t head, const float* engine, std::int64_t visible) const {
    if (visible <= 0) return 0;
    const std::int64_t kv_head = head / (layer.query_heads / layer.kv_heads);
    const std::int64_t first = std::max<std::int64_t>(0, tokens_ - visible);
    std::vector<double> logits;
    for (std::int64_t i = first; i < tokens_; ++i) {
      const float* key = history.keys.data() + (i * layer.kv_heads + kv_head) * layer.key_dim;
      double sum = 0;
      for (std::int64_t d = 0; d < layer.key_dim; ++d) {
        sum += static_cast<double>(queries[head * layer.key_dim + d]) * key[d];
      }
      sum *= layer.scale;
      if (layer.soft_cap > 0) sum = layer.soft_cap * std::tanh(sum / layer.soft_cap);
      logits.push_back(sum);
    }
    const double top = *std::max_element(logits.begin(), logits.end());
    double total = 0;
    double size = 0;
    std::vector<double> output(static_cast<std::size_t>(layer.value_dim));
    for (std::int64_t i = first; i < tokens_; ++i) {
      const double weight = std::exp(logits[static_cast<std::size_t>(i - first)] - top);
      const float* value = history.values.data() + (i * layer.kv_heads + kv_head) * layer.value_dim;
      total += weight;
      double norm = 0;
      for (std::int64_t d = 0; d < layer.value_dim; ++d) {
        output[static_cast<std::size_t>(d)] += weight * value[d];
        norm += static_cast<double>(value[d]) * value[d];
      }
      size += weight * std::sqrt(norm);
    }
    double difference = 0;
    for (std::int64_t d = 0; d < layer.value_dim; ++d) {
      const double gap = output[static_cast<std::size_t>(d)] / total - engine[d];
      difference += gap * gap;
    }
    return std::sqrt(difference) / (size / total);
  }

  std::int64_t tokens_;
  std::int64_t window_;
  std::map<std::int64_t, History> history_;
  std::map<std::int64_t, Errors> errors_;
};

// Writes zeros in place of one layer's output.
class Eraser : public AttentionVisitor {
 public:
  explicit Eraser(std::int64_t layer) : layer_(layer) {}
  bool attention(const LayerCall& call, std::span<float> output) override {
    if (call.layer->index != layer_) return false;
    std::fill(output.begin(), output.end(), 0.0f);
    return true;
  }

 private:
  std::int64_t layer_;
};

constexpr std::size_t kWriteCheckTokens = 12;

// The engine rounds queries, keys, values and probabilities to 16-bit floats.
constexpr double kCheckTolerance = 0.02;

// Long enough to tell a sliding window from none.
std::vector<Token> probe_text(const Engine& engine) {
  std::vector<Token> text = engine.tokenize("The quick brown fox counts: one, two, three.", true);
  const std::int64_t wanted = std::max<std::int64_t>(96, engine.window_tokens() + 64);
  if (engine.context_tokens() < wanted) {
    throw EngineError(
        fmt::format("the engine's context of {} tokens is too short for the check of "
                    "the hook, which takes {}",
                    engine.context_tokens(), wanted));
  }
  for (auto i = static_cast<std::int64_t>(text.size()); i < wanted; ++i) {
    text.push_back(static_cast<Token>((i * 7919 + 1000) % engine.vocabulary()));
  }
  return text;
}

// The layers with an attention and keys and values of their own.
std::vector<AttentionLayer> find_layers(Engine& engine, std::span<const Token> text) {
  Explorer explorer;
  engine.decode(text, &explorer, nullptr);
  engine.truncate(0);
  std::vector<AttentionLayer> layers;
  for (const auto& [index, found] : explorer.found()) {
    // A layer whose only trace is a norm or a projection (recurrent layers) has no cache.
    if (!found.probabilities && !found.output) continue;
    if (!found.probabilities || found.shape.query_heads == 0) {
      refuse(index, "no node kq or kq_soft_max");
    }
    if (!found.output) refuse(index, "no node kqv_out");
    // Such a layer attends to the keys of another one.
    if (!found.key && !found.value) continue;
    if (!found.key || !found.value) refuse(index, "keys without values");
    const AttentionLayer& layer = found.shape;
    if (layer.kv_heads == 0 || layer.query_heads % layer.kv_heads != 0) {
      refuse(index,
             fmt::format("{} query heads for {} KV heads", layer.query_heads, layer.kv_heads));
    }
    layers.push_back(layer);
  }
  if (layers.empty()) {
    throw EngineError(fmt::format("{}: no attention layer was found in its {} layers",
                                  engine.model_name(), engine.layers()));
  }
  return layers;
}

}  // namespace

AttentionHook::AttentionHook(Engine& engine) {
  const std::vector<Token> text = probe_text(engine);
  engine.truncate(0);
  layers_ = find_layers(engine, text);
  check_numbers(engine, text);
  check_writes(engine, std::span<const Token>(text).first(kWriteCheckTokens));
}

void AttentionHook::check_numbers(Engine& engine, std::span<const Token> text) {
  const std::int64_t window = engine.window_tokens();
  Checker checker(static_cast<std::int64_t>(text.size()), window);
  decode(engine, text, checker, nullptr);
  engine.truncate(0);
  for (AttentionLayer& layer : layers_) {
    const auto errors = checker.errors().find(layer.index);
    if (errors == checker.errors().end()) refuse(layer.index, "its attention was not reached");
    const bool windowed = window > 0 && errors->second.windowed < errors->second.full;
    const double error = windowed ? errors->second.windowed : errors->second.full;
    if (!(error <= kCheckTolerance)) {
      refuse(layer.index, fmt::format("attention over the queries, keys and values found differs "
                                      "from the engine's by {:.3g}, at most {} is rounding",
                                      error, kCheckTolerance));
    }
    if (windowed) layer.window_tokens = window;
    check_error_ = std::max(check_error_, error);
  }
}

void AttentionHook::check_writes(Engine& engine, std::span<const Token> text) const {
  const auto logits_without = [&](std::int64_t layer) {
    Eraser eraser(layer);
    decode(engine, text, eraser, nullptr);
    const std::span<const float> logits = engine.last_logits();
    std::vector<float> copy(logits.begin(), logits.end());
    engine.truncate(0);
    return copy;
  };
  const std::vector<float> untouched = logits_without(-1);
  for (const AttentionLayer& layer : layers_) {
    if (logits_without(layer.index) == untouched) {
      refuse(layer.index, "what is written to its output has no effect");
    }
  }
}

void AttentionHook::decode(Engine& engine, std::span<const Token> tokens, AttentionVisitor& visitor,
                           const LogitsReader& reader) const {
  Gatherer gatherer(layers_, visitor);
  engine.decode(tokens, &gatherer, reader);
  if (!tokens.empty()) gatherer.check_served();
}

}  // namespace verkv::llm
