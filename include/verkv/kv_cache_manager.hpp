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
#include <memory>
#include <span>
#include <string>

#include <verkv/config.hpp>
#include <verkv/error.hpp>
#include <verkv/reports.hpp>
#include <verkv/settings.hpp>
#include <verkv/view.hpp>

namespace verkv {

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
  // evenly; to give a second prompt its own importance, leave chunk_tokens without a value and call compress.
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

  // ---- For studies

  // Draws the sample of every compressed token anew, with the same inclusion probabilities.
  void redraw(SequenceId sequence, std::uint64_t draw);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A manager whose two tiers are both in main memory: the specification, and what runs everywhere.
VERKV_API std::unique_ptr<KvCacheManager> make_cpu_cache(CacheConfig config);

}  // namespace verkv

#endif  // VERKV_KV_CACHE_MANAGER_HPP
