// What a sequence must hold and answer: its rows as they are stored, and softmax over all of them in
// double.
#ifndef VERKV_TESTS_PROPERTY_DENSE_MODEL_HPP
#define VERKV_TESTS_PROPERTY_DENSE_MODEL_HPP

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <verkv/settings.hpp>
#include <verkv/types.hpp>

#include "support/blocks.hpp"

namespace verkv::test {

struct DenseAnswer {
  std::vector<double> output;
  double lse = -std::numeric_limits<double>::infinity();
  // Of the logits, in size: what they are rounded in proportion to.
  double largest_logit = 0;
};

// The rows of one layer of a sequence.
class DenseLayer {
 public:
  DenseLayer(const LayerConfig& config, DType storage)
      : config_(config),
        storage_(storage),
        keys_{0, config.kv_heads, config.key_dim, {}},
        values_{0, config.kv_heads, config.value_dim, {}} {}

  std::int64_t tokens() const { return keys_.tokens; }
  const Block& keys() const { return keys_; }
  const Block& values() const { return values_; }

  void append(const Block& keys, const Block& values) {
    add(keys_, keys);
    add(values_, values);
  }

  void truncate(std::int64_t tokens) {
    for (Block* block : {&keys_, &values_}) {
      block->tokens = std::min(block->tokens, tokens);
      block->data.resize(size(block->tokens * block->heads * block->dim));
    }
  }

  // Over the first `tokens` tokens.
  DenseAnswer answer(std::int64_t tokens, const float* query, std::int64_t query_head) const {
    const std::int64_t head = query_head / (config_.query_heads / config_.kv_heads);
    const double scale =
        config_.scale.value_or(1 / std::sqrt(static_cast<double>(config_.key_dim)));
    DenseAnswer result;
    result.output.assign(size(config_.value_dim), 0.0);
    std::vector<double> logits;
    double sink = -std::numeric_limits<double>::infinity();
    if (!config_.sink_logits.empty())
      sink = static_cast<double>(config_.sink_logits[size(query_head)]);
    double most = sink;
    const std::int64_t first = std::max<std::int64_t>(0, tokens - config_.window.value_or(tokens));
    for (std::int64_t t = first; t < tokens; ++t) {
      double logit = 0;
      for (std::int64_t j = 0; j < config_.key_dim; ++j)
        logit += static_cast<double>(query[j]) * static_cast<double>(keys_.at(t, head, j));
      logit *= scale;
      result.largest_logit = std::max(result.largest_logit, std::fabs(logit));
      if (config_.soft_cap) logit = *config_.soft_cap * std::tanh(logit / *config_.soft_cap);
      logits.push_back(logit);
      most = std::max(most, logit);
    }
    result.lse = sink;
    if (tokens == 0) return result;
    double sum = std::exp(sink - most);
    for (std::int64_t t = first; t < tokens; ++t) {
      const double weight = std::exp(logits[size(t - first)] - most);
      sum += weight;
      for (std::int64_t j = 0; j < config_.value_dim; ++j)
        result.output[size(j)] += weight * static_cast<double>(values_.at(t, head, j));
    }
    for (double& x : result.output) x /= sum;
    result.lse = most + std::log(sum);
    return result;
  }

 private:
  void add(Block& to, const Block& from) const {
    for (const float x : from.data) {
      to.data.push_back(with_element(
          storage_, [x](auto zero) { return to_float(from_float<decltype(zero)>(x)); }));
    }
    to.tokens += from.tokens;
  }

  LayerConfig config_;
  DType storage_;
  Block keys_;
  Block values_;
};

}  // namespace verkv::test

#endif  // VERKV_TESTS_PROPERTY_DENSE_MODEL_HPP
