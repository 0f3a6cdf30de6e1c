// Settings of a cache. Engines set the first few fields of CacheConfig; every other field has a
// default that suits them.
//
//   verkv::CacheConfig config;
//   config.layers = {{.kv_heads = 8, .query_heads = 32, .key_dim = 128, .value_dim = 128}};
//   config.keep = 1.0 / 16;
//
// std::optional without a value means "off" or "none". A setting outside its range, or outside its
// enumeration, is named by unsupported_reasons().
#ifndef VERKV_SETTINGS_HPP
#define VERKV_SETTINGS_HPP

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <verkv/config.hpp>
#include <verkv/types.hpp>

namespace verkv {

// Whether a step may fetch from the host.
enum class FetchMode : std::uint8_t {
  verified,  // what the stop rules ask for
  never,     // residents only; the certificate is still reported
  always     // every token that is not resident
};

// Which tokens share one constant c of Eq. 3 (or one top-k).
enum class Pool : std::uint8_t {
  head,     // each (layer, KV head) by itself
  layer,    // all KV heads of a layer
  sequence  // all layers and KV heads of a sequence
};

// Which tokens stay on the fast tier.
enum class Selection : std::uint8_t {
  poisson,  // PoissonComp: independent draws with inclusion probability r (Eq. 3)
  topk,     // the most important ones, for the baselines
  spread    // PoissonComp with the same r, but similar tokens compete (docs/math/sample.md)
};

// How a step estimates what it has not fetched.
enum class Estimator : std::uint8_t {
  plain,    // the paper's: drawn tokens with the coefficients of Definition 2
  clusters  // drawn tokens and centroids of clusters of similar tokens, for 1/128 of the cache's
            // bytes (docs/math/clusters.md)
};

// Who holds the host tier, which has the rows of all tokens.
enum class HostTier : std::uint8_t {
  own,  // the cache, which copies rows when they are appended
  // The engine: rows are read where they are, also those of the local window and of prompts that are
  // not compressed. What `append` is given must stay there, unchanged, until the tokens are dropped
  // (truncate, erase) or said to have moved (KvCacheManager::move), by a fork too; CPU only.
  engine,
  // The cache, in a file without a name in CacheConfig::host_directory, which is gone with the cache: for
  // contexts beyond main memory. A step reads from it what it fetches; tokens that are not compressed are
  // in memory too. CPU only.
  file
};

// How the tokens to fetch are ordered.
enum class FetchOrder : std::uint8_t {
  worth,  // by fetch_worth (fetch_plan.hpp)
  exact   // by Eq. 9, each gain computed exactly; slow
};

// Names of values, as above; "?" where the value is none of its enumeration's. That of a SketchKind is
// in types.hpp.
constexpr const char* name(FetchMode value) {
  switch (value) {
    case FetchMode::verified:
      return "verified";
    case FetchMode::never:
      return "never";
    case FetchMode::always:
      return "always";
  }
  return "?";
}

constexpr const char* name(Pool value) {
  switch (value) {
    case Pool::head:
      return "head";
    case Pool::layer:
      return "layer";
    case Pool::sequence:
      return "sequence";
  }
  return "?";
}

constexpr const char* name(Selection value) {
  switch (value) {
    case Selection::poisson:
      return "poisson";
    case Selection::topk:
      return "topk";
    case Selection::spread:
      return "spread";
  }
  return "?";
}

constexpr const char* name(Estimator value) {
  switch (value) {
    case Estimator::plain:
      return "plain";
    case Estimator::clusters:
      return "clusters";
  }
  return "?";
}

constexpr const char* name(HostTier value) {
  switch (value) {
    case HostTier::own:
      return "own";
    case HostTier::engine:
      return "engine";
    case HostTier::file:
      return "file";
  }
  return "?";
}

constexpr const char* name(FetchOrder value) {
  switch (value) {
    case FetchOrder::worth:
      return "worth";
    case FetchOrder::exact:
      return "exact";
  }
  return "?";
}

// Shape of one layer. Layers may differ.
struct LayerConfig {
  std::int64_t kv_heads = 1;
  // A multiple of kv_heads; query head h belongs to KV head h / (query_heads / kv_heads).
  std::int64_t query_heads = 1;
  std::int64_t key_dim = 0;
  std::int64_t value_dim = 0;
  // logit = scale * q.k; none: 1 / sqrt(key_dim).
  std::optional<double> scale = std::nullopt;
  // logit <- soft_cap * tanh(logit / soft_cap).
  std::optional<double> soft_cap = std::nullopt;
  // false: the layer keeps no cache here (layers without attention).
  bool cached = true;
  // true: the layer stays uncompressed and exact.
  bool dense = false;
  // Sliding window of the model, tokens, at least 1: token i attends to the tokens j with
  // i - window < j <= i, itself included. Such a layer is dense, keeps its last tokens on the fast
  // tier and nothing on the host: CacheConfig::window_margin. With HostTier::own, on the CPU.
  std::optional<std::int64_t> window = std::nullopt;
  // Place in the whole model, so that draws do not depend on how layers and heads are split over
  // ranks. global_layer: none is the index in CacheConfig::layers.
  std::optional<std::int64_t> global_layer = std::nullopt;
  std::int64_t first_global_kv_head = 0;
  // Learned sinks of the softmax: a logit for each query head, as it stands in the softmax (not
  // scaled, not capped), which has a weight in D but no value. Empty: none. Where a context is split
  // into parts, one of them has the sink.
  std::vector<float> sink_logits = {};
  // true: the value of a token is the first value_dim coordinates of its key, as of the latent of
  // MLA (576 and 512). It is stored once on either tier, and append is given keys alone. With
  // HostTier::own, on the CPU.
  bool value_is_key_prefix = false;
  // Heads of the whole model's layer, over all ranks; none: kv_heads and query_heads. With them
  // unsupported_reasons refuses what would not answer as one cache with all heads: pools of a layer
  // or of a sequence over several ranks, and a compressed layer that has only some of the query
  // heads of its KV heads.
  std::optional<std::int64_t> global_kv_heads = std::nullopt;
  std::optional<std::int64_t> global_query_heads = std::nullopt;
  // CacheConfig::compress_from of this layer; none: that.
  std::optional<std::int64_t> compress_from = std::nullopt;
};

// When a step fetches, and what it promises. Each rule that is on asks for a set of tokens; a
// query head fetches their union. D is its softmax denominator, w a weight, rho the odds of a
// token, beta the shrinkage (docs/math/fetch_plan.md).
struct FetchConfig {
  FetchMode mode = FetchMode::verified;
  // Risk rule: fetch every token with fetch_worth(w, rho, beta) / D^2 above this price, > 0.
  std::optional<double> risk = 1e-4;
  // Certificate rule: fetch until |D_hat - D| / D of the plain estimate is certified not to exceed
  // epsilon, in (0, 1), with probability at least 1 - delta. D of Estimator::clusters is then
  // within twice of it (docs/math/clusters.md).
  std::optional<double> epsilon = 0.3;
  // In (0, 1).
  double delta = 0.1;
  // Most tokens fetched per KV head and step, at least 1.
  std::optional<std::int64_t> limit_tokens = std::nullopt;
};

// How logits of tokens that are not resident are estimated.
struct SketchConfig {
  SketchKind kind = SketchKind::calibrated;
  // 2, 3 or 4 bits a coordinate on average; SketchKind::exact ignores them.
  int bits = 2;
};

// What studies vary and no engine needs.
struct StudyConfig {
  Selection select = Selection::spread;
  Estimator estimator = Estimator::clusters;
  // Smallest inclusion probability of any token, in [0, keep]; 0: Eq. 3 itself.
  double inclusion_floor = 0;
  FetchOrder order = FetchOrder::worth;
  // Baseline of top-k: fetch every token whose sketched attention probability exceeds this, > 0.
  std::optional<double> probability = std::nullopt;
  // Bound on lambda of drawn tokens by their exact weight, >= 1.
  std::optional<double> cap = 2;
  // false: the scalar reference kernels.
  bool vector_code = true;
};

// Calls part(0) .. part(parts - 1), each once, on whichever threads, side by side or one after the
// other, and returns when all have returned; part does not throw, and may find nothing left to do.
// It is called from within a call of the cache, on the thread of that call: it must not call the
// cache, which would wait for itself. Should it throw, leave parts out or return early, the thread of
// the call does what is left, and what it throws is lost. A part may come late, but not after the
// cache is gone.
using Executor = std::function<void(int parts, const std::function<void(int)>& part)>;

// Where the memory of a tier comes from, of the engine's: both functions, or none for operator new. Any
// thread that works for the cache calls them, several at a time; they must not call the cache. `user` is
// their first argument and must outlive the cache.
struct TierAllocator {
  // `bytes`, above 0, at a multiple of `alignment`, a power of two. Null: there is no memory, and the
  // call of the cache throws std::bad_alloc. Must not throw.
  void* (*allocate)(void* user, std::size_t bytes, std::size_t alignment) = nullptr;
  // What allocate gave, and was asked for. Must not throw.
  void (*release)(void* user, void* memory, std::size_t bytes, std::size_t alignment) = nullptr;
  void* user = nullptr;
};

// Designated initialisers may leave out what they like: every member has an initialiser.
struct CacheConfig {
  std::vector<LayerConfig> layers;
  // Of keys and values in both tiers.
  DType storage = DType::f16;
  HostTier host = HostTier::own;
  // Of HostTier::file: where its file is made. Empty with the other tiers.
  std::string host_directory = {};
  // Share of tokens that stays resident, in (0, 1]; sinks and local window are paid from it.
  double keep = 0.0625;
  FetchConfig fetch = {};
  // Most bytes on either tier, in use or not: MemoryReport::fast_held_bytes and host_held_bytes, which
  // have the buffers of a step. What needs more throws CapacityError before anything changes; append,
  // reserve and compress ask for all blocks that they will allocate, and what these replace may go only
  // afterwards. On the CPU the limits hold at every moment. On a device append and reserve ask for what
  // blocks grow by, compress for what it adds in use; the rest, blocks that are replaced and growing
  // buffers of a step too, is counted once it is there.
  std::optional<std::int64_t> fast_bytes_limit = std::nullopt;
  std::optional<std::int64_t> host_bytes_limit = std::nullopt;
  // Most recent tokens and first tokens: always resident.
  std::int64_t local_tokens = 32;
  std::int64_t sink_tokens = 4;
  // Tokens that layers with a sliding window keep beyond it: so many can always be taken back
  // (KvCacheManager::truncate). The oldest leave when append or reserve begins.
  std::int64_t window_margin = 64;
  // Tokens compressed at a time during decode, at least 1; none: only when compress is called.
  std::optional<std::int64_t> chunk_tokens = 128;
  // true: layers compress their chunks at different tokens, so that no single step pays for all of them.
  // A layer waits for a part of chunk_tokens more, which its number in the model gives
  // (LayerConfig::global_layer; layer 0 waits for none): on average half a chunk more is resident.
  bool chunks_in_turn = false;
  // Tokens beside sinks that the first compression of a layer must take; until it can, all stay
  // resident and exact. 0: none. No value: the larger of chunk_tokens and 2 key_dim where the
  // sketch has a basis.
  // From fewer no basis comes that serves later tokens, and it takes more memory than it saves.
  // During decode the basis is made of the first whole chunks that suffice, however many tokens come
  // at once.
  std::optional<std::int64_t> compress_from = std::nullopt;
  Pool pool = Pool::head;
  SketchConfig sketch = {};
  // Of the draws and of the sketch's rotation.
  std::uint64_t seed = 0;
  // At least 1; none: one per hardware thread. Results do not depend on it.
  std::optional<int> threads = std::nullopt;
  // Threads of the engine's own; then `threads` is how many of them work at a time, and the cache
  // starts none.
  Executor executor = nullptr;
  // Of residents, sketch, metadata and the buffers of a step; and of the host tier where it is
  // HostTier::own. Tables, and what MemoryReport calls main memory, come from operator new. Not on a
  // device.
  TierAllocator fast_allocator = {};
  TierAllocator host_allocator = {};
  StudyConfig study = {};
};

// Why this configuration cannot be served: one sentence for each reason, with value and limit;
// empty if it can. Allocates nothing on any tier.
VERKV_API std::vector<std::string> unsupported_reasons(const CacheConfig& config);

// ---- For studies --------------------------------------------------------------------------------

// The `keep` at which residents, sketch (with an estimator's centroids) and metadata of `layer`
// together take `fast_share` of the bytes of its full keys and values. A calibrated sketch's basis
// belongs to a sequence, not to a token, and is not counted. Throws InvalidArgument on a setting
// out of its range and, with the least possible share, where the sketch alone takes more.
VERKV_API double keep_for_fast_share(double fast_share, const LayerConfig& layer, DType storage,
                                     const SketchConfig& sketch,
                                     Estimator estimator = StudyConfig{}.estimator);

}  // namespace verkv

#endif  // VERKV_SETTINGS_HPP
