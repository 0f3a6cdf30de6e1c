// Compressions of heads on the CPU: what a Compressor says is made ready beside what is there, which may
// fail and does not show, and then put in force.
#ifndef VERKV_SRC_CPU_COMPRESS_HEADS_HPP
#define VERKV_SRC_CPU_COMPRESS_HEADS_HPP

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <verkv/settings.hpp>
#include <verkv/view.hpp>

#include "compression.hpp"
#include "cpu/head_store.hpp"
#include "cpu/kernels.hpp"
#include "cpu/workspace.hpp"
#include "pending_compression.hpp"
#include "thread_pool.hpp"

namespace verkv::cpu {

using LayerStores = std::vector<std::vector<HeadStore>>;  // [layer][KV head]

class CompressHeads {
 public:
  // Makes room for steps on a layer of such lengths.
  using MakeRoom = std::function<void(std::size_t layer, const StepLengths& lengths)>;

  // Refers to all of it.
  CompressHeads(const CacheConfig& config, const Compressor& compressor, const Kernels& kernels,
                const std::vector<LayerShape>& shapes, ThreadPool& pool, MakeRoom make_room)
      : config_(config),
        compressor_(compressor),
        kernels_(kernels),
        shapes_(shapes),
        pool_(pool),
        make_room_(std::move(make_room)) {}

  // A compression that only has to be put in force.
  struct Prepared {
    LayerStores* stores = nullptr;
    // Tokens to come, whose room stays; none: so does no reserved room.
    std::optional<std::int64_t> spare;
    std::vector<HeadCompression> heads;
    std::vector<std::optional<Window>> windows;
    // Of each thread.
    std::vector<float> scratch;
    std::size_t scratch_size = 0;
  };

  // Changes nothing. heads: those of whole layers, or none.
  Prepared plan(LayerStores& stores, std::vector<HeadCompression> heads,
                std::span<const TensorView> prompt_queries, std::optional<std::int64_t> spare);
  // Of the blocks that allocate asks for, on the fast tier. out_sizes: also of workspaces that suffice
  // then.
  std::int64_t bytes(const Prepared& prepared, const FetchRules& rules,
                     WorkspaceSizes& out_sizes) const;
  // Changes nothing that shows.
  void allocate(Prepared& prepared);
  void commit(Prepared& prepared) noexcept;

  // The same in slices. prepare_some makes up to `count` heads of the next layer ready, its codes too;
  // changes nothing that shows. finish then compresses the layer; it throws before it changes anything.
  // Room for tokens to come stays.
  void prepare_some(LayerStores& stores, PendingCompression& pending, std::int64_t count);
  void finish(LayerStores& stores, PendingCompression& pending);

 private:
  SketchShape codes_of(const HeadCompression& head, const HeadStore& store) const;
  static StepLengths lengths_after(const HeadStore& store, const HeadCompression& head,
                                   std::int64_t spare);
  void complete(const LayerStores& stores, std::span<HeadCompression> heads,
                std::span<const TensorView> prompt_queries);

  const CacheConfig& config_;
  const Compressor& compressor_;
  const Kernels& kernels_;
  const std::vector<LayerShape>& shapes_;
  ThreadPool& pool_;
  MakeRoom make_room_;
};

}  // namespace verkv::cpu

#endif  // VERKV_SRC_CPU_COMPRESS_HEADS_HPP
