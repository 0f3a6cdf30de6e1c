// Compression, once for both backends: which positions leave the fast tier, with what odds, in
// which basis, and which of them are drawn. Nothing here changes a cache: a backend says what its
// store holds, gets a HeadCompression for each KV head, reserves, and applies them.
// docs/math/inclusion.md, sample.md, sketch.md.
#ifndef VERKV_SRC_COMPRESSION_HPP
#define VERKV_SRC_COMPRESSION_HPP

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include <verkv/config.hpp>
#include <verkv/sample.hpp>
#include <verkv/settings.hpp>
#include <verkv/types.hpp>
#include <verkv/view.hpp>

#include "rows.hpp"
#include "sketch_basis.hpp"
#include "spread_order.hpp"

namespace verkv {

// Lengths of one layer of a sequence, equal for all its KV heads: positions [0, compressed) have
// been compressed, [compressed, tokens) are the local window.
struct LayerLengths {
  std::int64_t tokens = 0;
  std::int64_t compressed = 0;
};

// Centroids of clusters, [cluster][value_dim], as stored, and their spreads.
struct Clusters {
  std::vector<std::byte> centroids;
  std::vector<Positive16> spread;
};

// One KV head's share of a compression: positions [begin, end()).
struct HeadCompression {
  std::size_t layer = 0;
  std::size_t head = 0;  // KV head of the layer
  std::int64_t begin = 0;
  // Positions that the head holds, the local window included.
  std::int64_t tokens = 0;
  // Of positions begin and later, host memory. Odds are always made with it. null, as `window`
  // leaves it: a basis that is made now counts all positions alike.
  const float* importance = nullptr;
  DrawId draw;
  // By position until complete, then by place.
  std::vector<Positive16> odds;
  // Tokens of each walk: a chunk, or all.
  std::int64_t walk_tokens = 0;
  // A basis, directions and a centre that are made now are made of the first so many. In `window` no more
  // than a first compression takes, so that they do not depend on how many tokens came at once.
  std::int64_t first_tokens = 0;
  // The rest is filled by complete. Where needs_basis says so; otherwise it has no rows.
  SketchBasis basis;
  // Places begin .. end() - 1, and the directions, at a first compression made now.
  HeadOrder order;
  // Places that stay on the fast tier, ascending.
  std::vector<std::uint32_t> drawn;
  // Of Estimator::clusters: the clusters of these places.
  Clusters clusters;

  std::int64_t end() const { return begin + static_cast<std::int64_t>(odds.size()); }
};

// What a store says of a head that is compressed: its rows, by position, from the first that is to be
// compressed, or (unless there are open_values) from 0; the
// directions of its order, null or empty before its first compression; HeadOrder::open_odds, and
// the positions of their places, with or without those of the places before.
struct HeadRows {
  Rows keys;
  Rows values;
  const OrderDirections* directions = nullptr;
  std::span<const std::uint32_t> positions;
  std::span<const Positive16> open_odds;
  // Values of the places of open_odds, row by row, where `values` has only rows of tokens that are to be
  // compressed; else empty.
  std::vector<std::byte> open_values = {};
};

// The rules of a configuration. Const functions keep no state: any thread may call.
class VERKV_API Compressor {
 public:
  explicit Compressor(const CacheConfig& config);

  // Whether tokens of the layer ever leave the fast tier: it is cached, not dense, and has no sliding window.
  bool compresses(std::size_t layer) const { return layers_[layer].compresses; }

  // The name of a KV head's draws, by its place in the whole model. `sequence` is the draw that
  // create_sequence or redraw was given.
  DrawId draw_id(std::uint64_t sequence, std::size_t layer, std::size_t head) const;

  // The least tokens beside sinks of a layer's first compression (LayerConfig::compress_from).
  std::int64_t least_tokens(std::size_t layer) const;

  // A prompt: all positions that are not compressed, but the last local_tokens, of all layers that
  // compress and where a first compression finds least_tokens. lengths and importance: one element
  // per layer; importance [KV head][token] of the positions that are not compressed, host memory
  // that must outlive the result. Empty where keep covers every token. Throws InvalidArgument,
  // naming layer, head and token, on a score that is not finite or negative.
  std::vector<HeadCompression> prompt(std::uint64_t sequence, std::span<const LayerLengths> lengths,
                                      std::span<const ImportanceView> importance) const;

  // By how many tokens, in whole chunks, the local window of a layer will have outgrown
  // local_tokens (with CacheConfig::chunks_in_turn: and the layer's delay) with `added` more. 0: nothing
  // to compress, or too little for a first compression.
  std::int64_t outgrown(std::size_t layer, const LayerLengths& lengths,
                        std::int64_t added = 0) const;

  // Decode: the oldest outgrown tokens of a layer's local window. score: [KV head][token]
  // of these tokens, each a window_score. Each chunk has its own budget; the heads of the layer
  // share it unless pools are of one head (layers are appended one by one, so they cannot share).
  std::vector<HeadCompression> window(std::uint64_t sequence, std::size_t layer,
                                      const LayerLengths& lengths,
                                      std::span<const float> score) const;

  // Whether the head's basis is made now: at its first compression, if the sketch has one.
  bool needs_basis(const HeadCompression& head) const;

  // Makes the bases that are needed and the orders, puts the odds into order, and draws.
  // prompt_queries: one view per layer, host memory, [position][query head][key_dim]; or empty.
  // run(count, task) calls task(0) .. task(count - 1), in any order, on any threads; the tasks do
  // not throw. Throws InvalidArgument, naming layer, position, head and coordinate, on a query that
  // is used and not finite.
  using Task = std::function<void(std::int64_t)>;
  void complete(std::span<HeadCompression> heads,
                const std::function<HeadRows(const HeadCompression&)>& rows,
                std::span<const TensorView> prompt_queries,
                const std::function<void(std::int64_t, const Task&)>& run) const;

 private:
  struct Layer {
    bool compresses = false;
    std::size_t kv_heads = 0;
    std::int64_t group = 1;  // query heads per KV head
    std::int64_t key_dim = 0;
    std::optional<std::int64_t> compress_from;
    std::uint32_t global_layer = 0;
    std::uint32_t first_global_kv_head = 0;
    // Tokens that its window may outgrow local_tokens by before chunks fall due.
    std::int64_t chunk_delay = 0;
  };

  // Whether `count` more tokens of a layer may be compressed.
  bool suffices(std::size_t layer, std::int64_t compressed, std::int64_t count) const;
  void complete_head(HeadCompression& head, const HeadRows& rows,
                     std::span<const TensorView> prompt_queries) const;
  void solve_pools(std::span<HeadCompression> heads, Pool pool, bool pays_window) const;
  void solve_pool(std::span<HeadCompression> heads, bool pays_window) const;

  CacheConfig config_;
  std::vector<Layer> layers_;
};

// Bytes in use on the fast tier that a compression which is complete adds to its head; below 0 where
// it frees more. codes: the form of the head's codes.
VERKV_API std::int64_t added_fast_bytes(const CacheConfig& config, const HeadCompression& head,
                                        const SketchShape& codes);

// The basis of one head from positions [0, odds.size()) of its keys. importance: of the same
// positions, or null. queries: [count][key_dim]. out_leading: if not null, the keys' side of the
// directions of its order. Allocates.
VERKV_API SketchBasis make_basis(int bits, const Rows& keys, std::span<const Positive16> odds,
                                 const float* importance, std::span<const float> queries,
                                 std::uint64_t seed, std::vector<float>* out_leading = nullptr);

// Leading directions of rows [0, odds.size()), as leading_directions has them, from at most
// kOrderTokens of them, evenly spaced. importance as for make_basis. Allocates.
inline constexpr std::int64_t kOrderTokens = 1024;
VERKV_API std::vector<float> order_directions(const Rows& rows, std::span<const Positive16> odds,
                                              const float* importance, int count, double size);

// Adds the places of positions [begin, begin + count), a walk for each walk_tokens of them, to an
// order that has its directions. Allocates.
VERKV_API void add_places(HeadOrder& order, const Rows& keys, const Rows& values,
                          std::int64_t begin, std::int64_t count, std::int64_t walk_tokens);

// Odds of positions begin and later, as the places of `order` have them. Allocates.
VERKV_API std::vector<Positive16> odds_by_place(std::span<const Positive16> odds,
                                                std::int64_t begin, const HeadOrder& order);

// Which of the places begin, begin + 1, ... are drawn, ascending. `odds` and `order` have these
// places. By pivotal_draw along each walk for Selection::spread, otherwise independently.
// Allocates.
VERKV_API std::vector<std::uint32_t> draw_places(const DrawId& id, Selection select,
                                                 std::span<const Positive16> odds,
                                                 std::int64_t begin, const HeadOrder& order);

// Tokens that follow each other in the order, kClusterTokens of them a cluster. Centroid: the mean
// of the values of those in L, in the rows' type; 0 where no token is in L. Spread: the root mean
// square of their distances from it. position, odds: of the tokens. Allocates.
VERKV_API Clusters make_clusters(const Rows& values, std::span<const std::uint32_t> position,
                                 std::span<const Positive16> odds);
// The same where the rows of the places that come first are HeadRows::open_values. position: changed.
Clusters make_clusters_of_both(const HeadRows& rows, std::span<std::uint32_t> position,
                               std::span<const Positive16> odds);

// Query heads [first_head, first_head + group) of a view in host memory, [position and head][dim].
// Throws as Compressor::complete does.
VERKV_API std::vector<float> gather_queries(const TensorView& view, std::size_t layer,
                                            std::int64_t first_head, std::int64_t group);

}  // namespace verkv

#endif  // VERKV_SRC_COMPRESSION_HPP
