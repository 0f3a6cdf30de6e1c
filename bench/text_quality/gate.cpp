#include "gate.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>
#include <Eigen/Dense>

#include "../../examples/common/output_file.hpp"
#include "../../examples/common/safetensors.hpp"

namespace verkv::lab {

namespace {

using examples::FloatTensor;
using examples::SafetensorsFile;
using examples::TensorType;

constexpr double kSmallestScore = 1e-6;  // the logarithm of less says nothing
constexpr double kRidge = 0.01;          // of inputs of unit variance
constexpr float kExponentLimit = 40;     // the score stays finite whatever the input
constexpr std::size_t kHeldOutEvery = 5;

std::string weight_name(std::int64_t layer) { return fmt::format("layers.{}.weight", layer); }
std::string bias_name(std::int64_t layer) { return fmt::format("layers.{}.bias", layer); }

std::string shown(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t extent : shape) {
    text += (text.empty() ? "" : ", ") + std::to_string(extent);
  }
  return "[" + text + "]";
}

// Second moments of (1, input, log scores) over all tokens seen: all that regression and
// correlation need, however many texts there are.
class Moments {
 public:
  Moments() = default;
  Moments(std::int64_t width, std::int64_t kv_heads)
      : width_(width),
        kv_heads_(kv_heads),
        sums_(Eigen::MatrixXd::Zero(1 + width + kv_heads, 1 + width + kv_heads)) {}

  // Inputs [token][width], scores [KV head][token].
  void add(const std::vector<float>& inputs, const std::vector<float>& scores) {
    const auto tokens = static_cast<std::int64_t>(inputs.size()) / width_;
    Eigen::MatrixXd rows(1 + width_ + kv_heads_, tokens);
    rows.row(0).setOnes();
    rows.middleRows(1, width_) =
        Eigen::Map<const Eigen::MatrixXf>(inputs.data(), width_, tokens).cast<double>();
    for (std::int64_t head = 0; head < kv_heads_; ++head) {
      rows.row(1 + width_ + head) =
          Eigen::Map<const Eigen::RowVectorXf>(scores.data() + head * tokens, tokens)
              .cast<double>()
              .array()
              .max(kSmallestScore)
              .log();
    }
    sums_.selfadjointView<Eigen::Lower>().rankUpdate(rows);
  }

  struct Fit {
    Eigen::MatrixXd weight;  // [width, KV head]
    Eigen::VectorXd bias;    // [KV head]
  };

  Fit fit() const {
    const Centred data = centred();
    // An input that never changes carries nothing, and gets nothing.
    const Eigen::VectorXd variance = data.inputs.diagonal();
    const Eigen::VectorXd scale =
        (variance.array() > 1e-12 * variance.maxCoeff())
            .select(variance.array().max(1e-300).rsqrt(), Eigen::ArrayXd::Zero(width_));
    Eigen::MatrixXd system = scale.asDiagonal() * data.inputs * scale.asDiagonal();
    system.diagonal().array() += kRidge;
    Fit fit;
    fit.weight = scale.asDiagonal() * system.llt().solve(scale.asDiagonal() * data.cross);
    fit.bias = data.score_means - fit.weight.transpose() * data.input_means;
    return fit;
  }

  // Of the fitted and the true log scores, one per KV head.
  Eigen::VectorXd correlations(const Fit& fit) const {
    const Centred data = centred();
    Eigen::VectorXd result(kv_heads_);
    for (std::int64_t head = 0; head < kv_heads_; ++head) {
      const auto weight = fit.weight.col(head);
      const double together = weight.dot(data.cross.col(head));
      const double fitted = weight.dot(data.inputs * weight);
      result(head) = together / std::sqrt(std::max(fitted * data.score_variance(head), 1e-300));
    }
    return result;
  }

 private:
  // Covariances.
  struct Centred {
    Eigen::MatrixXd inputs;
    Eigen::MatrixXd cross;  // [width, KV head]
    Eigen::VectorXd score_variance;
    Eigen::VectorXd input_means;
    Eigen::VectorXd score_means;
  };

  Centred centred() const {
    const Eigen::MatrixXd all =
        Eigen::MatrixXd(sums_.selfadjointView<Eigen::Lower>()) / sums_(0, 0);
    const Eigen::VectorXd means = all.col(0).tail(width_ + kv_heads_);
    const Eigen::MatrixXd covariance =
        all.bottomRightCorner(width_ + kv_heads_, width_ + kv_heads_) - means * means.transpose();
    return {covariance.topLeftCorner(width_, width_), covariance.topRightCorner(width_, kv_heads_),
            covariance.diagonal().tail(kv_heads_), means.head(width_), means.tail(kv_heads_)};
  }

  std::int64_t width_ = 0;
  std::int64_t kv_heads_ = 0;
  Eigen::MatrixXd sums_;  // lower triangle
};

// What is learnt about one layer.
struct LayerTraining {
  std::int64_t kv_heads = 0;
  std::int64_t width = 0;
  std::vector<float> inputs;  // of the text at hand
  Moments training;
  Moments held_out;
};

// Fits every layer, adds the correlations to `result` and writes the gate with `metadata`.
void write_gate(const std::string& path, const std::map<std::int64_t, LayerTraining>& layers,
                std::map<std::string, std::string> metadata, GateTraining& result) {
  std::vector<std::vector<float>> numbers;  // weight and bias of each layer
  std::vector<examples::TensorData> tensors;
  const auto layer_share = 1 / static_cast<double>(layers.size());
  for (const auto& [index, layer] : layers) {
    const Moments::Fit fit = layer.training.fit();
    result.correlation_training += layer_share * layer.training.correlations(fit).mean();
    result.correlation_held_out += layer_share * layer.held_out.correlations(fit).mean();
    const Eigen::MatrixXf weight = fit.weight.cast<float>();
    const Eigen::VectorXf bias = fit.bias.cast<float>();
    numbers.emplace_back(weight.data(), weight.data() + weight.size());
    tensors.push_back({weight_name(index),
                       TensorType::f32,
                       {layer.kv_heads, layer.width},
                       numbers.back().data()});
    numbers.emplace_back(bias.data(), bias.data() + bias.size());
    tensors.push_back({bias_name(index), TensorType::f32, {layer.kv_heads}, numbers.back().data()});
  }
  metadata["tokens"] = std::to_string(result.tokens);
  metadata["correlation_training"] = fmt::format("{:.4f}", result.correlation_training);
  metadata["correlation_held_out"] = fmt::format("{:.4f}", result.correlation_held_out);
  examples::write_safetensors(path, tensors, metadata);
}

}  // namespace

Gate Gate::load(const std::string& path, const AttentionHook& hook) {
  const SafetensorsFile file = SafetensorsFile::load(path);
  Gate gate;
  for (const AttentionLayer& shape : hook.layers()) {
    if (shape.window_tokens > 0) continue;
    if (!file.has(weight_name(shape.index))) {
      throw EngineError(fmt::format("{}: has no gate for layer {}", path, shape.index));
    }
    FloatTensor weight = file.floats(weight_name(shape.index));
    FloatTensor bias = file.floats(bias_name(shape.index));
    if (weight.shape.size() != 2 || weight.shape[0] != shape.kv_heads || weight.shape[1] < 1 ||
        bias.shape != std::vector<std::int64_t>{shape.kv_heads}) {
      throw EngineError(
          fmt::format("{}: tensors {} {} and bias {}, but [{}, width] and [{}] are needed", path,
                      weight_name(shape.index), shown(weight.shape), shown(bias.shape),
                      shape.kv_heads, shape.kv_heads));
    }
    gate.layers_[shape.index] = {shape.kv_heads, weight.shape[1], std::move(weight.values),
                                 std::move(bias.values)};
  }
  return gate;
}

float Gate::score(std::int64_t layer, std::int64_t kv_head, std::span<const float> hidden) const {
  const auto found = layers_.find(layer);
  if (found == layers_.end() || found->second.width != static_cast<std::int64_t>(hidden.size())) {
    throw EngineError(
        fmt::format("layer {}: the gate was made for a model whose layers have another "
                    "width than {}",
                    layer, hidden.size()));
  }
  const Layer& gate = found->second;
  using Vector = Eigen::Map<const Eigen::VectorXf>;
  const float exponent = Vector(gate.weight.data() + kv_head * gate.width, gate.width)
                             .dot(Vector(hidden.data(), gate.width)) +
                         gate.bias[static_cast<std::size_t>(kv_head)];
  return std::exp(std::clamp(exponent, -kExponentLimit, kExponentLimit));
}

GateTraining train_gate(Engine& engine, const AttentionHook& hook,
                        const std::vector<std::vector<Token>>& texts, Score score,
                        const std::string& path,
                        const std::function<void(std::int64_t, std::int64_t)>& progress) {
  if (texts.size() < 2) {
    throw InvalidArgument(fmt::format("{} texts for a gate, 2 are the least", texts.size()));
  }
  if (score == Score::gate) throw InvalidArgument("a gate cannot imitate a gate");
  examples::check_writable(path);

  std::map<std::int64_t, LayerTraining> layers;
  PromptOptions options;
  options.scores = {score};
  options.hidden_sink = [&](const AttentionLayer& shape, std::int64_t, std::int64_t tokens,
                            std::int64_t width, const float* data) {
    LayerTraining& layer = layers[shape.index];
    layer.width = width;
    layer.inputs.insert(layer.inputs.end(), data, data + tokens * width);
  };

  std::int64_t total = 0;
  for (const std::vector<Token>& text : texts) total += static_cast<std::int64_t>(text.size());
  GateTraining result;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const auto tokens = static_cast<std::int64_t>(texts[i].size());
    const ScoredPrompt scored =
        read_prompt(engine, hook, texts[i], options, [&](std::int64_t done, std::int64_t all) {
          if (progress) progress(result.tokens + tokens * done / all, total);
        });
    // Not the last ones: two texts must leave one to train on and one to judge by.
    const bool held_out = i % kHeldOutEvery == 1;
    const std::vector<PromptLayer>& read = scored.prompt.layers;
    for (std::size_t l = 0; l < read.size(); ++l) {
      const AttentionLayer& shape = read[l].shape;
      LayerTraining& layer = layers[shape.index];
      if (i == 0) {
        layer.kv_heads = shape.kv_heads;
        layer.training = Moments(layer.width, shape.kv_heads);
        layer.held_out = layer.training;
      }
      (held_out ? layer.held_out : layer.training).add(layer.inputs, scored.scores.at(score)[l]);
      layer.inputs.clear();
    }
    result.tokens += tokens;
  }

  write_gate(path, layers,
             {{"model", engine.model_name()},
              {"engine", Engine::version()},
              {"score", std::string(name(score))},
              {"texts", std::to_string(texts.size())}},
             result);
  return result;
}

}  // namespace verkv::lab
