// A gate in the manner of Fast KVzip: a linear function of a layer's input that imitates KVzip's
// score, so that no second pass over the prompt is needed.
#ifndef VERKV_BENCH_TEXT_QUALITY_GATE_HPP
#define VERKV_BENCH_TEXT_QUALITY_GATE_HPP

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "example.hpp"
#include "importance.hpp"

namespace verkv::lab {

class Gate {
 public:
  // From a safetensors file: layers.{l}.weight [KV head, width] and layers.{l}.bias [KV head], F32.
  // Throws FormatError naming file and tensor, EngineError where a layer of `hook` has none or has
  // another shape.
  static Gate load(const std::string& path, const AttentionHook& hook);

  // exp(weight . hidden + bias), its logarithm kept within 40 of 0: the score that is imitated in
  // its logarithm. Throws EngineError where the layer or the width of `hidden` is not the gate's.
  float score(std::int64_t layer, std::int64_t kv_head, std::span<const float> hidden) const;

 private:
  struct Layer {
    std::int64_t kv_heads = 0;
    std::int64_t width = 0;
    std::vector<float> weight;
    std::vector<float> bias;
  };
  std::map<std::int64_t, Layer> layers_;
};

struct GateTraining {
  std::int64_t tokens = 0;
  double correlation_training = 0;  // mean over layers and heads, of log scores
  double correlation_held_out = 0;  // on texts that were not trained on
};

// Ridge regression of log(score) on the layer's input over `texts`, every fifth from the second on
// held out, and the gate written to `path`. Memory: two matrices of width^2 doubles per layer, and
// the inputs of one text. Throws InvalidArgument with fewer than two texts or for Score::gate.
GateTraining train_gate(Engine& engine, const AttentionHook& hook,
                        const std::vector<std::vector<Token>>& texts, Score score,
                        const std::string& path,
                        const std::function<void(std::int64_t, std::int64_t)>& progress);

}  // namespace verkv::lab

#endif  // VERKV_BENCH_TEXT_QUALITY_GATE_HPP
