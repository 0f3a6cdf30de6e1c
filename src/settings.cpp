#include "settings.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include <verkv/clusters.hpp>
#include <verkv/error.hpp>
#include <verkv/sketch.hpp>

#include "invalid.hpp"

namespace verkv {
namespace {

// Of the latent of MLA, the largest that models have. Integer scores stay exact in binary32
// (docs/math/sketch.md), up to 1040; a device has registers for so many coordinates.
constexpr std::int64_t kMaxDim = 576;
// 16 bits of a Philox counter each.
constexpr std::int64_t kMaxLayers = 65536;
constexpr std::int64_t kMaxHeads = 65536;
constexpr int kMaxThreads = 1024;
constexpr std::int64_t kMaxWindow = std::int64_t{1} << 32;

// Scales and caps are used in binary32.
constexpr double kSmallestFactor = 1e-30;
constexpr double kLargestFactor = 1e30;

bool computable(double factor) { return factor >= kSmallestFactor && factor <= kLargestFactor; }

bool in_open_unit(double x) { return x > 0 && x < 1; }

bool finite_above(double x, double limit) { return std::isfinite(x) && x > limit; }

// Whether the value is one of its enumeration's.
template <class Enumeration>
bool known(Enumeration value) {
  return *name(value) != '?';
}

// One sentence for each reason.
class Reasons {
 public:
  template <class... Args>
  void add(fmt::format_string<Args...> text, Args&&... args) {
    list_.push_back(fmt::format(text, std::forward<Args>(args)...));
  }

  template <class Enumeration>
  void add_unless_known(const char* what, Enumeration value) {
    if (!known(value)) add("{} {}; not a value of its enumeration", what, static_cast<int>(value));
  }

  std::size_t count() const { return list_.size(); }
  std::vector<std::string> take() { return std::move(list_); }

 private:
  std::vector<std::string> list_;
};

void check_sink_logits(std::size_t i, const LayerConfig& layer, Reasons& reasons) {
  const std::vector<float>& sinks = layer.sink_logits;
  if (sinks.empty()) return;
  if (std::ssize(sinks) != layer.query_heads) {
    reasons.add("layer {}: {} sink logits for {} query heads; one for each is needed, or none", i,
                sinks.size(), layer.query_heads);
  }
  const auto bad =
      std::find_if(sinks.begin(), sinks.end(), [](float x) { return !std::isfinite(x); });
  if (bad != sinks.end()) {
    reasons.add("layer {}: a sink logit of {} for query head {}; it must be finite", i, *bad,
                bad - sinks.begin());
  }
}

// Of what a layer cannot have where rows are not in the cache's memory.
void check_host(std::size_t i, const CacheConfig& config, Reasons& reasons) {
  if (config.host == HostTier::file && config.layers[i].value_is_key_prefix)
    reasons.add("layer {}: values that are the first numbers of keys, and a host tier in a file",
                i);
  if (config.host != HostTier::engine) return;
  if (config.layers[i].window) {
    reasons.add(
        "layer {}: a sliding window, whose tokens are copied, where the host tier is the engine's; "
        "set cached to false to leave the layer to the engine",
        i);
  }
  if (config.layers[i].value_is_key_prefix) {
    reasons.add(
        "layer {}: values that are the first numbers of keys, where the host tier is the engine's; "
        "nothing is copied there, so give the rows of keys as values too",
        i);
  }
}

// That ranks answer as one cache with all heads would. The layer's own numbers are right.
void check_ranks(std::size_t i, const CacheConfig& config, Reasons& reasons) {
  const LayerConfig& layer = config.layers[i];
  for (const auto& heads : {layer.global_kv_heads, layer.global_query_heads}) {
    if (!heads || (*heads >= 1 && *heads <= kMaxHeads)) continue;
    reasons.add("layer {}: {} heads in the model; 1 to {} are supported", i, *heads, kMaxHeads);
    return;
  }
  const std::int64_t kv_heads = layer.global_kv_heads.value_or(layer.kv_heads);
  if (layer.global_kv_heads && kv_heads - layer.first_global_kv_head < layer.kv_heads) {
    reasons.add("layer {}: {} KV heads from global head {}, of {} that the model has", i,
                layer.kv_heads, layer.first_global_kv_head, kv_heads);
    return;
  }
  const std::int64_t group = layer.query_heads / layer.kv_heads;
  const std::int64_t query_heads = layer.global_query_heads.value_or(kv_heads * group);
  if (query_heads < layer.query_heads || query_heads % kv_heads != 0 ||
      query_heads / kv_heads < group) {
    reasons.add(
        "layer {}: {} query heads in the model, with {} KV heads there and {} query heads here", i,
        query_heads, kv_heads, layer.query_heads);
    return;
  }
  if (!compresses(layer) || !(config.keep < 1)) return;
  if (config.pool != Pool::head && kv_heads > layer.kv_heads) {
    reasons.add(
        "layer {}: a pool of all heads of a {}, with {} of the {} KV heads here; ranks would draw "
        "other samples than one cache (Pool::head is the same on any number)",
        i, config.pool == Pool::layer ? "layer" : "sequence", layer.kv_heads, kv_heads);
  }
  if (query_heads / kv_heads != group) {
    reasons.add(
        "layer {}: {} of the {} query heads of each KV head; what is fetched and the scores of the "
        "local window come from all of them (a dense layer may be split so)",
        i, group, query_heads / kv_heads);
  }
}

void check_layer(std::size_t i, const LayerConfig& layer, Reasons& reasons) {
  if (layer.kv_heads < 1 || layer.kv_heads > kMaxHeads || layer.first_global_kv_head < 0 ||
      layer.first_global_kv_head > kMaxHeads - layer.kv_heads) {
    reasons.add("layer {}: {} KV heads from global head {}; 1 to {} in all are supported", i,
                layer.kv_heads, layer.first_global_kv_head, kMaxHeads);
  } else if (layer.query_heads < 1 || layer.query_heads % layer.kv_heads != 0) {
    reasons.add("layer {}: {} query heads are not a positive multiple of {} KV heads", i,
                layer.query_heads, layer.kv_heads);
  } else if (layer.query_heads > kMaxHeads) {
    reasons.add("layer {}: {} query heads; at most {} are supported", i, layer.query_heads,
                kMaxHeads);
  }
  if (layer.key_dim < 1 || layer.key_dim > kMaxDim) {
    reasons.add("layer {}: key head size {}; 1 to {} are supported", i, layer.key_dim, kMaxDim);
  }
  if (layer.value_dim < 1 || layer.value_dim > kMaxDim) {
    reasons.add("layer {}: value head size {}; 1 to {} are supported", i, layer.value_dim, kMaxDim);
  }
  if (layer.value_is_key_prefix && layer.value_dim > layer.key_dim) {
    reasons.add("layer {}: values of {} numbers, the first of keys of {}; they cannot be more", i,
                layer.value_dim, layer.key_dim);
  }
  if (layer.scale && !computable(*layer.scale)) {
    reasons.add("layer {}: scale {}; {} to {} are supported, or none for 1/sqrt(head size)", i,
                *layer.scale, kSmallestFactor, kLargestFactor);
  }
  if (layer.soft_cap && !computable(*layer.soft_cap)) {
    reasons.add("layer {}: soft cap {}; {} to {} are supported, or none", i, *layer.soft_cap,
                kSmallestFactor, kLargestFactor);
  }
  check_sink_logits(i, layer, reasons);
  if (layer.window && (*layer.window < 1 || *layer.window > kMaxWindow)) {
    reasons.add("layer {}: sliding window of {} tokens; 1 to {} are supported, or none", i,
                *layer.window, kMaxWindow);
  }
  if (layer.compress_from && *layer.compress_from < 0)
    reasons.add("layer {}: compression from {} tokens; cannot be negative", i,
                *layer.compress_from);
  if (layer.global_layer && (*layer.global_layer < 0 || *layer.global_layer >= kMaxLayers)) {
    reasons.add("layer {}: global layer {}; 0 to {} are supported, or none for its index", i,
                *layer.global_layer, kMaxLayers - 1);
  }
}

void check_storage(DType storage, Reasons& reasons) {
  if (is_known(storage)) return;
  reasons.add("storage type {}; f32, f16 and bf16 are supported", static_cast<int>(storage));
}

void check_sketch(const SketchConfig& sketch, Reasons& reasons) {
  reasons.add_unless_known("sketch kind", sketch.kind);
  if (known(sketch.kind) && has_codes(sketch.kind) && (sketch.bits < 2 || sketch.bits > 4))
    reasons.add("a sketch of {} bits; 2, 3 and 4 are supported", sketch.bits);
}

void check_fetch(const FetchConfig& fetch, Reasons& reasons) {
  reasons.add_unless_known("fetch mode", fetch.mode);
  if (fetch.risk && !finite_above(*fetch.risk, 0))
    reasons.add("risk {}; must be finite and above 0, or off", *fetch.risk);
  if (fetch.epsilon && !in_open_unit(*fetch.epsilon))
    reasons.add("epsilon {}; must lie in (0, 1), or be off", *fetch.epsilon);
  if (!in_open_unit(fetch.delta)) reasons.add("delta {}; must lie in (0, 1)", fetch.delta);
  if (fetch.limit_tokens && *fetch.limit_tokens < 1)
    reasons.add("fetch limit of {} tokens; must be at least 1, or none", *fetch.limit_tokens);
}

void check_study(const StudyConfig& study, double keep, Reasons& reasons) {
  reasons.add_unless_known("selection", study.select);
  reasons.add_unless_known("estimator", study.estimator);
  reasons.add_unless_known("fetch order", study.order);
  if (!(study.inclusion_floor >= 0 && study.inclusion_floor <= keep && study.inclusion_floor < 1)) {
    reasons.add("inclusion floor {}; must lie in [0, keep = {}] and below 1", study.inclusion_floor,
                keep);
  }
  if (study.probability && !finite_above(*study.probability, 0))
    reasons.add("probability {}; must be finite and above 0, or off", *study.probability);
  if (study.cap && !(std::isfinite(*study.cap) && *study.cap >= 1))
    reasons.add("cap {}; must be finite and at least 1, or off", *study.cap);
}

}  // namespace

bool is_known(DType type) { return known(type); }

std::vector<std::string> unsupported_reasons(const CacheConfig& config) {
  Reasons reasons;
  if (config.layers.empty()) reasons.add("no layers; at least one is needed");
  if (static_cast<std::int64_t>(config.layers.size()) > kMaxLayers)
    reasons.add("{} layers; at most {} are supported", config.layers.size(), kMaxLayers);
  for (std::size_t i = 0; i < config.layers.size(); ++i) {
    if (!config.layers[i].cached) continue;
    const std::size_t before = reasons.count();
    check_layer(i, config.layers[i], reasons);
    check_host(i, config, reasons);
    if (reasons.count() == before) check_ranks(i, config, reasons);
  }
  check_storage(config.storage, reasons);
  reasons.add_unless_known("host tier", config.host);
  if (config.host == HostTier::file && config.host_directory.empty())
    reasons.add("a host tier in a file, and no host directory");
  if (config.host != HostTier::file && !config.host_directory.empty()) {
    reasons.add("host directory \"{}\", and a host tier that is in no file", config.host_directory);
  }
  if (!(config.keep > 0 && config.keep <= 1))
    reasons.add("keep {}; must lie in (0, 1]", config.keep);
  check_fetch(config.fetch, reasons);
  if (config.fast_bytes_limit && *config.fast_bytes_limit < 0)
    reasons.add("fast tier limit of {} bytes; cannot be negative", *config.fast_bytes_limit);
  if (config.host_bytes_limit && *config.host_bytes_limit < 0)
    reasons.add("host tier limit of {} bytes; cannot be negative", *config.host_bytes_limit);
  if (config.local_tokens < 0)
    reasons.add("{} local tokens; cannot be negative", config.local_tokens);
  if (config.window_margin < 0 || config.window_margin > kMaxWindow) {
    reasons.add("{} tokens beyond sliding windows; 0 to {} are supported", config.window_margin,
                kMaxWindow);
  }
  if (config.sink_tokens < 0) reasons.add("{} sink tokens; cannot be negative", config.sink_tokens);
  if (config.chunk_tokens && *config.chunk_tokens < 1)
    reasons.add("{} chunk tokens; must be at least 1, or none", *config.chunk_tokens);
  if (config.compress_from && *config.compress_from < 0)
    reasons.add("compression from {} tokens; cannot be negative", *config.compress_from);
  reasons.add_unless_known("pool", config.pool);
  for (const TierAllocator* allocator : {&config.fast_allocator, &config.host_allocator}) {
    if ((allocator->allocate == nullptr) != (allocator->release == nullptr)) {
      reasons.add("an allocator of the {} tier that cannot {}; both functions are needed",
                  allocator == &config.fast_allocator ? "fast" : "host",
                  allocator->allocate == nullptr ? "allocate" : "release");
    }
  }
  check_sketch(config.sketch, reasons);
  if (config.threads && (*config.threads < 1 || *config.threads > kMaxThreads)) {
    reasons.add("{} threads; 1 to {} are supported, or none for one per hardware thread",
                *config.threads, kMaxThreads);
  }
  check_study(config.study, config.keep, reasons);
  return reasons.take();
}

void check_config(const CacheConfig& config) {
  const std::vector<std::string> reasons = unsupported_reasons(config);
  if (!reasons.empty()) invalid(ErrorCode::setting, "{}", fmt::join(reasons, "; "));
}

double keep_for_fast_share(double fast_share, const LayerConfig& layer, DType storage,
                           const SketchConfig& sketch, Estimator estimator) {
  if (!(fast_share > 0 && fast_share <= 1))
    invalid(ErrorCode::setting, "fast share {}; must lie in (0, 1]", fast_share);
  if (layer.key_dim < 1 || layer.key_dim > kMaxDim || layer.value_dim < 1 ||
      layer.value_dim > kMaxDim) {
    invalid(ErrorCode::setting, "head sizes {} and {}; 1 to {} are supported", layer.key_dim,
            layer.value_dim, kMaxDim);
  }
  Reasons reasons;
  check_storage(storage, reasons);
  check_sketch(sketch, reasons);
  reasons.add_unless_known("estimator", estimator);
  if (const auto list = reasons.take(); !list.empty())
    invalid(ErrorCode::setting, "{}", fmt::join(list, "; "));
  const double full =
      static_cast<double>(row_elements(layer)) * static_cast<double>(size_bytes(storage));
  // Per token: sketch and odds; per resident: its row and its position. The matrices of the sketch
  // belong to a sequence, not to a token: not counted. Any split of the bits takes about the bytes
  // of this one, which stores all coordinates.
  const int dim = static_cast<int>(layer.key_dim);
  const SketchShape shape{sketch.kind, dim,
                          has_codes(sketch.kind) ? dim * (sketch.bits - 2) / 2 : 0};
  double fixed = static_cast<double>(shape.token_bytes()) + sizeof(Positive16);
  switch (estimator) {
    case Estimator::plain:
      break;
    case Estimator::clusters:
      fixed += (static_cast<double>(layer.value_dim) * static_cast<double>(size_bytes(storage)) +
                sizeof(Positive16)) /
               static_cast<double>(kClusterTokens);
      break;
  }
  const double keep = (fast_share * full - fixed) / (full + sizeof(std::uint32_t));
  if (!(keep > 0)) {
    invalid(ErrorCode::setting,
            "a fast share of {} cannot hold the sketch; it needs more than {:.4f}", fast_share,
            fixed / full);
  }
  return std::min(1.0, keep);
}

}  // namespace verkv
