// The only header an engine includes: configuration, sequences, append, compress, attend, reports.
//
//   auto cache = verkv::make_cpu_cache(config);
//   auto sequence = cache->create_sequence();
//   cache->append(sequence, layer, keys, values);      // prefill, chunked prefill and decode alike
//   cache->compress(sequence, importance_of_all_layers);
//   cache->attend(layer, batch);                       // verify, fetch what is needed, attend
//
// Everything that throws leaves the cache as it was. Keys are given as the model attends to them
// (after RoPE). Threads: any thread may call; calls to one manager take turns and block until done.
// With views in a device's memory some calls only enqueue, and find bad numbers later:
// docs/cuda.md.
#ifndef VERKV_KV_CACHE_MANAGER_HPP
#define VERKV_KV_CACHE_MANAGER_HPP

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <verkv/config.hpp>
#include <verkv/error.hpp>
#include <verkv/types.hpp>
#include <verkv/view.hpp>

namespace verkv {

inline constexpr double kOff = std::numeric_limits<double>::infinity();

// Shape of one layer. Layers may differ.
struct LayerConfig {
  std::int64_t kv_heads = 1;
  std::int64_t query_heads =
      1;  // a multiple of kv_heads; head h belongs to KV head h / (query_heads / kv_heads)
  std::int64_t key_dim = 0;
  std::int64_t value_dim = 0;
  double scale = 0;         // logit = scale * q.k; 0 means 1 / sqrt(key_dim)
  double soft_cap = 0;      // logit <- soft_cap * tanh(logit / soft_cap); 0 means none
  std::int64_t window = 0;  // sliding window of the model; not supported, refused unless 0
  bool cached = true;  // false: this layer keeps no cache here (hybrid and sliding-window layers)
  bool dense = false;  // true: stays uncompressed and exact
  // Place in the whole model, for draws that do not depend on how heads are split over ranks.
  std::int64_t global_layer = -1;  // -1: the index in CacheConfig::layers
  std::int64_t first_global_kv_head = 0;
};

struct SketchConfig {
  SketchKind kind = SketchKind::calibrated;
  int bits = 2;  // 2, 3 or 4 a coordinate on average; ignored for exact
};

// When a step fetches, and what it promises. The set fetched is the larger of what the rules that
// are on ask for.
struct FetchConfig {
  FetchMode mode = FetchMode::verified;
  double epsilon = 0.3;  // certificate rule: fetch until the relative error of D is certified <=
                         // epsilon, in (0, 1); kOff
  double delta = 0.1;    // ... with probability at least 1 - delta, in (0, 1)
  double risk = 1e-4;  // risk rule: fetch every token whose key / D^2 exceeds this price, > 0; kOff
  double probability = kOff;  // baseline of top-k: fetch every token whose sketched attention
                              // probability exceeds this; kOff
  FetchOrder order = FetchOrder::key;
  std::int64_t shortlist =
      0;  // with FetchOrder::key: how many leading tokens are re-ordered by exact Eq. 9 gains; slow
  double cap = 2;  // bound on lambda of drawn tokens by their exact weight, >= 1; kOff
  std::int64_t limit_tokens = 0;  // most tokens fetched per KV head and step; 0: no limit
};

struct CacheConfig {
  std::vector<LayerConfig> layers;
  DType storage = DType::f16;  // of keys and values in both tiers
  double keep = 0.0625;  // share of tokens that stays resident, in (0, 1]; sinks and local window
                         // are paid from it
  Selection select = Selection::poisson;
  Pool pool = Pool::head;
  double inclusion_floor = 0;  // smallest r of any token, in [0, keep]; 0: Eq. 3 itself
  std::int64_t sink_tokens = 4;
  std::int64_t local_tokens = 32;  // most recent tokens, always resident
  std::int64_t chunk_tokens =
      128;  // tokens compressed at a time during decode; 0: only when compress is called
  SketchConfig sketch;
  FetchConfig fetch;
  std::uint64_t seed = 0;   // of the draws and of the sketch's rotation
  int threads = 0;          // 0: one per hardware thread. Results do not depend on it.
  bool vector_code = true;  // false: the scalar reference kernels
  std::int64_t fast_bytes_limit =
      0;  // of residents, sketch and metadata, checked by append; 0: none
  std::int64_t host_bytes_limit = 0;  // of the host tier; 0: none
};

// Why this configuration cannot be served, one sentence each with value and limit; empty if it can.
// Allocates nothing on any tier.
VERKV_API std::vector<std::string> unsupported_reasons(const CacheConfig& config);

// The `keep` at which residents, sketch and metadata of `layer` together take `fast_share` of the
// bytes of its full keys and values; the basis of a calibrated sketch, which is of a sequence and
// not of a token, comes on top. Throws InvalidArgument, with the least possible share, where
// the sketch alone takes more.
VERKV_API double keep_for_fast_share(double fast_share, const LayerConfig& layer, DType storage,
                                     const SketchConfig& sketch);

struct SequenceId {
  std::int64_t value = -1;
  friend bool operator==(SequenceId, SequenceId) = default;
};

// A padding row of a batch: output 0, LSE -infinity.
inline constexpr SequenceId kNoSequence{};

// What a step did for one query head.
struct QueryHeadReport {
  // The bound of Eq. 7 on |D_hat - D| / D over what was not fetched, from sketched weights; 0 where
  // the answer is exact, infinite where it cannot be computed (a NaN logit).
  double epsilon = 0;
  // epsilon is finite and not above FetchConfig::epsilon. A value, not an error: a fetch limit may
  // prevent it.
  bool certified = false;
  std::int64_t planned_tokens = 0;  // what this head alone asked for (residents included)
};

// What a step did for one KV head: the union over its group of query heads.
struct KvHeadReport {
  std::int64_t fetched_tokens = 0;  // exact in this step though not always resident
  std::int64_t moved_tokens = 0;    // of those, copied from the host (not resident already)
  std::int64_t moved_bytes = 0;
  std::int64_t resident_tokens = 0;  // read on the fast tier
  bool limited = false;              // FetchConfig::limit_tokens cut the plan
};

// One decode step of a ragged batch. Row i attends with sequences[i]; a sequence may appear once.
struct AttendBatch {
  std::span<const SequenceId> sequences;
  TensorView queries;                        // [row][query head][key_dim], f32, f16 or bf16
  float* output = nullptr;                   // [row][query head][value_dim], dense
  float* lse = nullptr;                      // [row][query head], natural logarithm; may be null
  std::span<QueryHeadReport> query_reports;  // [row][query head], or empty
  std::span<KvHeadReport> kv_reports;        // [row][KV head], or empty
};

// Bytes in use, by tier and purpose.
struct MemoryReport {
  std::int64_t resident_bytes = 0;   // keys and values on the fast tier, local window included
  std::int64_t sketch_bytes = 0;     // codes, scales, channel means, the queries' side of a basis
  std::int64_t metadata_bytes = 0;   // odds, positions, scores of the local window
  std::int64_t host_bytes = 0;       // keys and values on the host tier
  std::int64_t basis_bytes = 0;      // main memory: a calibrated sketch's basis, for tokens to come
  std::int64_t workspace_bytes = 0;  // per thread buffers of a step; shared by all sequences
  std::int64_t reserved_bytes = 0;   // allocated beyond all of the above, for growth
  // Main memory: blocks of the host tier, with their room for growth, that the device reads though
  // they could not be pinned. Counted in host_bytes and reserved_bytes already.
  std::int64_t pageable_bytes = 0;

  std::int64_t fast_bytes() const { return resident_bytes + sketch_bytes + metadata_bytes; }
};

// Counters since the start (or reset), per layer. A decision is one (row, query head).
struct LayerStatistics {
  std::int64_t steps = 0;  // rows that attended
  std::int64_t decisions = 0;
  std::int64_t certified = 0;       // decisions certified at the end
  std::int64_t fetching = 0;        // decisions that asked for at least one token
  std::int64_t planned_tokens = 0;  // over all decisions
  std::int64_t fetched_tokens = 0;  // over all KV heads, unions
  std::int64_t moved_tokens = 0;
  std::int64_t moved_bytes = 0;
  std::int64_t cached_tokens =
      0;  // tokens the KV heads held, summed over steps: the denominator of shares
  std::int64_t resident_tokens = 0;  // of those, resident
};

class Backend;

class VERKV_API KvCacheManager {
 public:
  // Takes a configuration that unsupported_reasons() accepts; throws InvalidArgument with the
  // reasons otherwise.
  KvCacheManager(CacheConfig config, std::unique_ptr<Backend> backend);
  ~KvCacheManager();
  KvCacheManager(const KvCacheManager&) = delete;
  KvCacheManager& operator=(const KvCacheManager&) = delete;

  const CacheConfig& config() const;
  // Backend and instruction set, e.g. "cpu (AVX3_DL, 2 threads)"; on a device also how the host
  // tier is held now.
  std::string description() const;

  // An empty sequence. `draw` names its random draws together with the seed: equal (seed, draw)
  // means equal samples. The default gives each sequence its own.
  SequenceId create_sequence();
  SequenceId create_sequence(std::uint64_t draw);
  // Frees everything of the sequence. Throws InvalidArgument if unknown.
  void erase(SequenceId sequence);
  // Tokens appended to `layer`; of them, how many have been compressed (the rest are the local
  // window).
  std::int64_t tokens(SequenceId sequence, std::int64_t layer) const;
  std::int64_t compressed_tokens(SequenceId sequence, std::int64_t layer) const;

  // Adds tokens to one layer: keys [token][KV head][key_dim], values [token][KV head][value_dim],
  // any strides and types, converted to the storage type. Zero tokens are fine. Throws
  // InvalidArgument on a wrong shape or on a number that is not finite or does not fit the storage
  // type, CapacityError on a byte limit. During decode, when the local window has outgrown
  // local_tokens + chunk_tokens, its oldest chunk_tokens are compressed with the root mean square
  // of the attention probability they received as importance (only in sequences that have been
  // compressed before). Tokens that no step has attended to yet have no score and share the budget
  // evenly; to give a second prompt its own importance, set chunk_tokens to 0 and call compress.
  void append(SequenceId sequence, std::int64_t layer, const TensorView& keys,
              const TensorView& values);

  // Compresses every layer: all tokens but the last local_tokens leave the fast tier, except those
  // drawn. importance: one view per layer of the configuration, scores [KV head][token] of the
  // tokens not yet compressed (all of them the first time), local window included. Layers that are
  // not cached or dense are ignored and may be empty. Scores need no normalisation; only ratios
  // within a pool matter. Throws InvalidArgument on a NaN, negative or infinite score, naming
  // layer, head and token, and on a wrong shape.
  // prompt_queries: what a calibrated sketch is made for at the first compression, one view per
  // layer, [position][query head][key_dim], after RoPE as in attend; some 64 late positions of the
  // prompt do. A layer's view may be empty (0 positions), and so may all of them: then only keys
  // and importance shape the sketch, which costs accuracy. Later compressions and other sketches
  // use none; so does a first one that leaves all tokens in the local window, whose successor
  // during decode knows no queries. Throws InvalidArgument on a wrong shape, and where they are
  // used, on a number that is not finite.
  void compress(SequenceId sequence, std::span<const ImportanceView> importance,
                std::span<const TensorView> prompt_queries = {});

  // Draws the sample of every compressed token anew, with the same inclusion probabilities; for
  // experiments.
  void redraw(SequenceId sequence, std::uint64_t draw);

  // Attention of one query token per row. Allocates nothing (on a device: unless the batch has more
  // rows than room was made for, CudaOptions::rows). Throws InvalidArgument on a wrong
  // shape, an unknown or repeated sequence, or a query that is not finite (queries in a device's
  // memory: a later call does, see docs/cuda.md).
  void attend(std::int64_t layer, const AttendBatch& batch);
  // Another number than before means that graphs in which steps were captured hold on to memory or
  // sizes that are no longer right: capture anew (docs/cuda.md). Always 0 on the CPU.
  std::uint64_t graph_generation() const;

  MemoryReport memory() const;
  MemoryReport memory(SequenceId sequence) const;
  LayerStatistics statistics(std::int64_t layer) const;
  void reset_statistics();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A manager whose two tiers are both in main memory: the specification, and what runs everywhere.
VERKV_API std::unique_ptr<KvCacheManager> make_cpu_cache(CacheConfig config);

}  // namespace verkv

#endif  // VERKV_KV_CACHE_MANAGER_HPP
