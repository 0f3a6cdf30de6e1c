// A compression that goes on in slices (KvCacheManager::begin_compress): what it was given, which heads
// are left, and what is made already of the next layer's. Nothing of it shows before a layer is whole.
#ifndef VERKV_SRC_PENDING_COMPRESSION_HPP
#define VERKV_SRC_PENDING_COMPRESSION_HPP

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <verkv/view.hpp>

#include "compression.hpp"

namespace verkv {

class VERKV_API PendingCompression {
 public:
  // heads: from Compressor::prompt, those of whole layers, in order; at least one. Copies their
  // importance and the queries that they will use, which the host can read. Throws InvalidArgument, as
  // Compressor::complete does, on a query that is used and not finite.
  PendingCompression(const Compressor& compressor, std::vector<HeadCompression> heads,
                     std::span<const TensorView> prompt_queries);
  PendingCompression(PendingCompression&&) = default;
  PendingCompression& operator=(PendingCompression&&) = default;

  // What a fork of the sequence has still to do: all heads of the layers that are left.
  PendingCompression fork() const;

  std::size_t layer() const { return heads_.front().layer; }
  // Heads that are not prepared, of all layers (at least 1: the last layer may wait for room) and of the
  // next one.
  std::int64_t left() const;
  std::int64_t left_of_layer() const;
  // Whether a layer is still to be compressed.
  bool covers(std::size_t layer) const;
  // Whether more than the first `tokens` are.
  bool needs_more_than(std::int64_t tokens) const;

  // Copies of the next `count` heads of the layer, as many as there are at most.
  std::vector<HeadCompression> next(std::int64_t count) const;
  std::span<const TensorView> queries() const { return inputs_->queries; }
  // Puts them, complete, behind those that are prepared. Allocates nothing.
  void take(std::vector<HeadCompression>&& heads) noexcept;
  std::span<HeadCompression> prepared() { return prepared_; }
  // They are made anew. Their memory goes with the next `take`, in a call that totals of memory know of.
  void forget_prepared() noexcept { forgotten_ = true; }
  // The layer is compressed. Returns whether that was the last one.
  bool finish_layer() noexcept;

  // Main memory, of one layer. exclusive: without what forks share.
  std::int64_t bytes(std::size_t layer, bool exclusive) const noexcept;

 private:
  struct Inputs {
    std::vector<std::vector<float>> importance;      // [layer]; [KV head][position]
    std::vector<std::vector<std::byte>> query_rows;  // [layer]
    std::vector<TensorView> queries;                 // [layer], or none
  };

  PendingCompression() = default;
  void reserve_prepared();
  std::int64_t prepared_count() const {
    return forgotten_ ? 0 : static_cast<std::int64_t>(prepared_.size());
  }

  std::shared_ptr<const Inputs> inputs_;
  std::vector<HeadCompression> heads_;
  // Of the first layer of heads_.
  std::vector<HeadCompression> prepared_;
  bool forgotten_ = false;
};

}  // namespace verkv

#endif  // VERKV_SRC_PENDING_COMPRESSION_HPP
