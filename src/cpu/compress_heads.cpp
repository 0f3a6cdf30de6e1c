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

CompressHeads::Prepared CompressHeads::plan(LayerStores& stores, std::vector<HeadCompression> heads,
                                            std::span<const TensorView> prompt_queries,
                                            std::optional<std::int64_t> spare) {
  complete(stores, heads, prompt_queries);
  Prepared result;
  result.stores = &stores;
  result.spare = spare;
  result.heads = std::move(heads);
  return result;
}

SketchShape CompressHeads::codes_of(const HeadCompression& head, const HeadStore& store) const {
  return compressor_.needs_basis(head) ? head.basis.shape : store.sketch(shapes_[head.layer]);
}

StepLengths CompressHeads::lengths_after(const HeadStore& store, const HeadCompression& head,
                                         std::int64_t spare) {
  return {head.end(), store.drawn_residents() + static_cast<std::int64_t>(head.drawn.size()),
          store.tokens() - head.end() + spare};
}

std::int64_t CompressHeads::bytes(const Prepared& prepared, const FetchRules& rules,
                                  WorkspaceSizes& out_sizes) const {
  std::int64_t sum = 0;
  const std::int64_t spare = prepared.spare.value_or(0);
  for (const HeadCompression& head : prepared.heads) {
    const LayerShape& shape = shapes_[head.layer];
    const HeadStore& store = (*prepared.stores)[head.layer][head.head];
    sum += store.bytes_to_compress(shape, codes_of(head, store), head, spare);
    out_sizes.cover(shape, rules, lengths_after(store, head, spare));
  }
  return sum;
}

void CompressHeads::allocate(Prepared& prepared) {
  std::int64_t largest_dim = 0;
  for (const HeadCompression& head : prepared.heads) {
    const LayerShape& shape = shapes_[head.layer];
    HeadStore& store = (*prepared.stores)[head.layer][head.head];
    store.reserve_sketch(shape, codes_of(head, store), head);
    prepared.windows.push_back(store.rest_of_window(shape, head, prepared.spare.value_or(0)));
    largest_dim = std::max(largest_dim, shape.config.key_dim);
  }
  prepared.scratch_size = static_cast<std::size_t>(2 * round_up(largest_dim, kLanes));
  prepared.scratch.resize(static_cast<std::size_t>(pool_.size()) * prepared.scratch_size);
}

void CompressHeads::commit(Prepared& prepared) noexcept {
  pool_.run(static_cast<std::int64_t>(prepared.heads.size()), [&](int worker, std::int64_t i) {
    HeadCompression& head = prepared.heads[static_cast<std::size_t>(i)];
    HeadStore& store = (*prepared.stores)[head.layer][head.head];
    const std::size_t size = prepared.scratch_size;
    if (!prepared.spare) store.give_room_up();
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

void CompressHeads::finish(LayerStores& stores, PendingCompression& pending) {
  const LayerShape& shape = shapes_[pending.layer()];
  std::vector<HeadStore>& layer = stores[pending.layer()];
  std::vector<std::optional<Window>> windows;
  for (const HeadCompression& head : pending.prepared()) {
    HeadStore& store = layer[head.head];
    // Queries of the tokens to come score from now on.
    if (store.spare() > 0) store.reserve_append(store.spare(), config_.chunk_tokens.has_value());
    make_room_(head.layer, lengths_after(store, head, store.spare()));
    windows.push_back(store.rest_of_window(shape, head, store.spare()));
  }
  for (HeadCompression& head : pending.prepared())
    layer[head.head].apply(shape, head, std::move(windows[head.head]));
}

}  // namespace verkv::cpu
