// Decoding with the attention of VERKV in place of the engine's. What an engine author looks for
// is here and in hook.cpp; docs/embedding.md walks through both.
#ifndef VERKV_EXAMPLES_LLAMA_CPP_CACHE_DECODER_HPP
#define VERKV_EXAMPLES_LLAMA_CPP_CACHE_DECODER_HPP

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "../common/backend.hpp"
#include "hook.hpp"
#include "importance.hpp"

#include <verkv/kv_cache_manager.hpp>

namespace verkv::llm {

// What decoding cost, over all replaced layers. Shares are of the tokens that the layers held.
struct DecodeCost {
  double resident_fraction = 0;
  double fetching_share = 0;  // of decisions
  double certified_share = 0;
  double moved_fraction = 0;
  double moved_tokens = 0;   // per step and KV head
  double moved_bytes = 0;    // per step, all layers
  double read_fraction = 0;  // residents and moved tokens
  double fast_bytes = 0;
  double cache_bytes = 0;  // of all keys and values
};

class CacheDecoder : public AttentionVisitor {
 public:
  // Gives a new cache of that backend the whole prompt and compresses it by `score`. The layers of
  // `config` are filled in. Throws what the cache throws, and InvalidArgument where the prompt has
  // no such score.
  CacheDecoder(const Prompt& prompt, BackendKind backend, CacheConfig config, Score score,
               std::uint64_t draw);

  // Appends the tokens one by one and attends with each; layers that are not in the prompt stay as
  // the engine computed them.
  bool attention(const LayerCall& call, std::span<float> output) override;

  // Leaves every n-th number of the output out, 0: none; the self-test shows with it that the hook
  // acts.
  void disturb(std::size_t n) { disturbance_ = n; }

  DecodeCost cost() const;
  // The certificate of every decision: the bound on the relative error of D.
  const std::vector<double>& certificates() const { return certificates_; }
  const KvCacheManager& cache() const { return *cache_; }

 private:
  std::map<std::int64_t, std::int64_t> places_;  // layer of the model -> layer of the cache
  std::unique_ptr<KvCacheManager> cache_;
  SequenceId sequence_;
  std::vector<QueryHeadReport> query_reports_;
  std::vector<double> certificates_;
  std::size_t disturbance_ = 0;
};

// `config` with one layer for each layer of the prompt.
CacheConfig with_layers(CacheConfig config, const std::vector<AttentionLayer>& layers);

}  // namespace verkv::llm

#endif  // VERKV_EXAMPLES_LLAMA_CPP_CACHE_DECODER_HPP
