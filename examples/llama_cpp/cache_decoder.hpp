// Decoding with the attention of VERKV in place of the engine's. What an engine author looks for
// is here and in hook.cpp; docs/embedding.md walks through both.
#ifndef VERKV_EXAMPLES_LLAMA_CPP_CACHE_DECODER_HPP
#define VERKV_EXAMPLES_LLAMA_CPP_CACHE_DECODER_HPP

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "../common/backend.hpp"
#include "hook.hpp"
#include "prompt.hpp"

#include <verkv/kv_cache_manager.hpp>

namespace verkv::llm {

// What decoding cost, over all replaced layers. Shares are of the tokens that the layers held.
struct DecodeCost {
  double resident_fraction = 0;
  // Of the decisions, one for each query head and step.
  double fetching_share = 0;
  double certified_share = 0;
  double moved_fraction = 0;
  // Per step and KV head.
  double moved_tokens = 0;
  // Per step, all layers.
  double moved_bytes = 0;
  // Residents and moved tokens.
  double read_fraction = 0;
  double fast_bytes = 0;
  // Of all keys and values.
  double cache_bytes = 0;
};

class CacheDecoder : public AttentionVisitor {
 public:
  // Gives a new cache of that backend the whole prompt and compresses it by `importance`. The
  // layers of `config` are filled in. Throws what the cache throws.
  CacheDecoder(const Prompt& prompt, const Importance& importance, BackendKind backend,
               CacheConfig config, std::uint64_t draw);

  // Appends the tokens one by one and attends with each. Layers that are not in the prompt stay as
  // the engine computed them.
  bool attention(const LayerCall& call, std::span<float> output) override;

  // Leaves every n-th number of the output out, 0: none. The self-test shows with it that the hook
  // acts.
  void disturb(std::size_t n) { disturbance_ = n; }

  DecodeCost cost() const;
  // The certificate of every decision: the bound on the relative error of D.
  const std::vector<double>& certificates() const { return certificates_; }

 private:
  std::map<std::int64_t, std::int64_t> places_;  // layer of the model -> layer of the cache
  std::unique_ptr<KvCacheManager> cache_;
  SequenceId sequence_;
  std::vector<QueryHeadReport> query_reports_;
  std::vector<double> certificates_;
  std::size_t disturbance_ = 0;
};

}  // namespace verkv::llm

#endif  // VERKV_EXAMPLES_LLAMA_CPP_CACHE_DECODER_HPP
