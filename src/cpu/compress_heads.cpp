#include "cpu/compress_heads.hpp"

#include <algorithm>
#include <utility>

namespace verkv::cpu {

void CompressHeads::complete(const LayerStores& stores, std::span<HeadCompression> heads,
                             std::span<const TensorView> prompt_queries) {
  compressor_.complete(
      heads,
      [&](const HeadCompression& head) {
        return stores[head.layer][head.head].rows(shapes_[head.layer]);
      },
      prompt_queries,
      [this](std::int64_t count, const Compressor::Task& task) {
        pool_.run(count, [&task](int, std::int64_t i) { task(i); });
      });
}

// With room for steps on what there will be.
std::optional<Window> CompressHeads::rest_of_window(const HeadStore& store,
                                                    const HeadCompression& head,
                                                    std::int64_t spare) {
  make_room_(head.layer,
             {head.end(), store.drawn_residents() + static_cast<std::int64_t>(head.drawn.size()),
              store.tokens() - head.end() + spare});
  return store.rest_of_window(shapes_[head.layer], head, spare);
}

CompressHeads::Prepared CompressHeads::prepare(LayerStores& stores,
                                               std::vector<HeadCompression> heads,
                                               std::span<const TensorView> prompt_queries,
                                               bool keeps_room) {
  complete(stores, heads, prompt_queries);
  std::int64_t largest_dim = 0;
  Prepared result;
  for (const HeadCompression& head : heads) {
    const LayerShape& shape = shapes_[head.layer];
    HeadStore& store = stores[head.layer][head.head];
    const SketchShape codes =
        compressor_.needs_basis(head) ? head.basis.shape : store.sketch(shape);
    store.reserve_sketch(shape, codes, head);
    result.windows.push_back(rest_of_window(store, head, keeps_room ? store.spare() : 0));
    result.added_fast_bytes += verkv::added_fast_bytes(config_, head, codes);
    largest_dim = std::max(largest_dim, shape.config.key_dim);
  }
  result.stores = &stores;
  result.keeps_room = keeps_room;
  result.scratch_size = static_cast<std::size_t>(2 * round_up(largest_dim, kLanes));
  result.scratch.resize(static_cast<std::size_t>(pool_.size()) * result.scratch_size);
  result.heads = std::move(heads);
  return result;
}

void CompressHeads::commit(Prepared& prepared) noexcept {
  pool_.run(static_cast<std::int64_t>(prepared.heads.size()), [&](int worker, std::int64_t i) {
    HeadCompression& head = prepared.heads[static_cast<std::size_t>(i)];
    HeadStore& store = (*prepared.stores)[head.layer][head.head];
    const std::size_t size = prepared.scratch_size;
    if (!prepared.keeps_room) store.give_room_up();
    store.compress(
        shapes_[head.layer], kernels_, head,
        std::move(prepared.windows[static_cast<std::size_t>(i)]),
        std::span(prepared.scratch).subspan(static_cast<std::size_t>(worker) * size, size));
  });
}

void CompressHeads::prepare_some(LayerStores& stores, PendingCompression& pending,
                                 std::int64_t count) {
  std::vector<HeadCompression> heads = pending.next(count);
  if (heads.empty()) return;
  const LayerShape& shape = shapes_[pending.layer()];
  std::vector<HeadStore>& layer = stores[pending.layer()];
  complete(stores, heads, pending.queries());
  const std::size_t size = static_cast<std::size_t>(2 * round_up(shape.config.key_dim, kLanes));
  std::vector<float> scratch(static_cast<std::size_t>(pool_.size()) * size);
  for (const HeadCompression& head : heads) {
    HeadStore& store = layer[head.head];
    store.reserve_sketch(
        shape, compressor_.needs_basis(head) ? head.basis.shape : store.sketch(shape), head);
  }
  pool_.run(static_cast<std::int64_t>(heads.size()), [&](int worker, std::int64_t i) {
    HeadCompression& head = heads[static_cast<std::size_t>(i)];
    layer[head.head].encode(
        shape, kernels_, head,
        std::span(scratch).subspan(static_cast<std::size_t>(worker) * size, size));
  });
  pending.take(std::move(heads));
}

std::int64_t CompressHeads::added_fast_bytes(const LayerStores& stores,
                                             PendingCompression& pending) const {
  std::int64_t added = 0;
  for (const HeadCompression& head : pending.prepared()) {
    const HeadStore& store = stores[head.layer][head.head];
    added += verkv::added_fast_bytes(config_, head, store.sketch(shapes_[head.layer]));
  }
  return added;
}

void CompressHeads::finish(LayerStores& stores, PendingCompression& pending) {
  const LayerShape& shape = shapes_[pending.layer()];
  std::vector<HeadStore>& layer = stores[pending.layer()];
  std::vector<std::optional<Window>> windows;
  for (const HeadCompression& head : pending.prepared()) {
    HeadStore& store = layer[head.head];
    // Queries of the tokens to come score from now on.
    if (store.spare() > 0) store.reserve_append(store.spare(), config_.chunk_tokens.has_value());
    windows.push_back(rest_of_window(store, head, store.spare()));
  }
  for (HeadCompression& head : pending.prepared())
    layer[head.head].apply(shape, head, std::move(windows[head.head]));
}

}  // namespace verkv::cpu
