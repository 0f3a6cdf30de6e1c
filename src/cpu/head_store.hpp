// Everything the CPU backend keeps for one (sequence, layer, KV head), on both tiers.
#ifndef VERKV_SRC_CPU_HEAD_STORE_HPP
#define VERKV_SRC_CPU_HEAD_STORE_HPP

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <vector>

#include <verkv/reports.hpp>
#include <verkv/settings.hpp>
#include <verkv/sketch.hpp>

#include "compression.hpp"
#include "cpu/kernels.hpp"
#include "cpu/window_scores.hpp"
#include "rows.hpp"
#include "sketch_basis.hpp"
#include "spread_order.hpp"

namespace verkv::cpu {

// Cache-line aligned vectors, so that rows and codes do not straddle lines needlessly.
template <class T>
struct AlignedAllocator {
  using value_type = T;
  AlignedAllocator() = default;
  template <class U>
  explicit AlignedAllocator(const AlignedAllocator<U>&) {}
  T* allocate(std::size_t n) {
    return static_cast<T*>(::operator new (n * sizeof(T), std::align_val_t{64}));
  }
  void deallocate(T* p, std::size_t) noexcept { ::operator delete (p, std::align_val_t{64}); }
  friend bool operator==(AlignedAllocator, AlignedAllocator) { return true; }
};

template <class T>
using AlignedVector = std::vector<T, AlignedAllocator<T>>;

constexpr std::int64_t round_up(std::int64_t n, std::int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

// What is fixed for a layer.
struct LayerShape {
  LayerConfig config;
  int group = 1;  // query heads per KV head
  float scale = 1;
  float soft_cap = 0;  // 0: none
  DType storage = DType::f16;
  SketchShape sketch;     // the largest; each head has its own
  bool clusters = false;  // estimates by clusters

  std::int64_t row_elements() const { return config.key_dim + config.value_dim; }
  std::int64_t row_bytes() const {
    return row_elements() * static_cast<std::int64_t>(size_bytes(storage));
  }
};

// Positions [0, compressed) have sketch and odds, which lie in the order of HeadOrder, by *place*;
// of them only the drawn ones are resident. Positions [compressed, tokens) are the local window:
// all resident, and their places are their positions.
class HeadStore {
 public:
  std::int64_t tokens() const { return tokens_; }
  std::int64_t compressed() const { return compressed_; }
  std::int64_t residents() const { return static_cast<std::int64_t>(resident_place_.size()); }
  // Residents that belong to the compressed part; they come first, in order of place.
  std::int64_t drawn_residents() const { return drawn_residents_; }

  // Host tier: key and value of a token side by side, indexed by position.
  Rows host_keys(const LayerShape& shape) const;
  Rows host_values(const LayerShape& shape) const;
  // Fast tier, indexed by resident slot; place of each slot.
  Rows resident_keys(const LayerShape& shape) const;
  Rows resident_values(const LayerShape& shape) const;
  std::span<const std::uint32_t> resident_places() const { return resident_place_; }

  // Sketch and odds of places [0, compressed), readable up to the next multiple of 16.
  const std::uint8_t* codes() const { return codes_.data(); }
  const Positive16* scales() const { return scales_.data(); }
  const Positive16* odds() const { return odds_.data(); }
  std::span<const float> channel_means() const { return channel_means_; }
  // Fast tier, by cluster; none unless the layer estimates by clusters.
  Rows centroids(const LayerShape& shape) const;
  std::span<const Positive16> spreads() const { return spreads_; }
  // The form of the codes.
  const SketchShape& sketch(const LayerShape& shape) const {
    return has_codes(shape.sketch.kind) ? basis_.shape : shape.sketch;
  }
  // Empty until the first compression, and where the sketch is exact.
  const SketchBasis& basis() const { return basis_; }

  // Room for `count` more tokens; afterwards append of them cannot fail, also where a compression or
  // a redraw comes between. scores: whether queries of these tokens are to score the local window.
  void reserve_append(const LayerShape& shape, std::int64_t count, bool scores);
  // Adds tokens of KV head `head` of the views, already checked to fit the storage type.
  void append(const LayerShape& shape, const TensorView& keys, const TensorView& values,
              std::int64_t head, bool scores) noexcept;
  // Keeps the first `tokens`, at least compressed().
  void truncate(const LayerShape& shape, std::int64_t tokens) noexcept;

  // Before the first compression, unless the sketch is exact.
  void take(SketchBasis&& basis) noexcept { basis_ = std::move(basis); }

  const HeadOrder& order() const { return order_; }
  // Places of the tokens that are compressed next; after reserve of them take cannot fail.
  void reserve(const HeadOrder& more) { reserve_places(order_, more); }
  void take(HeadOrder&& more) noexcept { take_places(order_, std::move(more)); }

  // Room to compress up to position `end` with codes of this form; afterwards compress of them
  // cannot fail.
  void reserve_compress(const LayerShape& shape, const SketchShape& codes, std::int64_t end);
  // Compresses positions [compressed, compressed + odds.size()) with these odds, by place; the
  // places in `drawn`, ascending, stay resident. After take of their order, the first time also of
  // a basis; the keys' centre is then that of the first first_tokens. scratch: twice key_dim rounded
  // up to 16, in floats.
  void compress(const LayerShape& shape, const Kernels& kernels, std::span<const Positive16> odds,
                std::int64_t first_tokens, std::span<const std::uint32_t> drawn,
                const Clusters& clusters, std::span<float> scratch) noexcept;
  // The residents where `drawn`, ascending, are those of the compressed part; take puts them in
  // place of those that are there.
  struct Residents {
    AlignedVector<std::byte> key;
    AlignedVector<std::byte> value;
    std::vector<std::uint32_t> place;
    std::int64_t drawn = 0;
  };
  Residents redraw(const LayerShape& shape, std::span<const std::uint32_t> drawn) const;
  void take(Residents&& residents) noexcept;

  WindowScores& window_scores() { return scores_; }
  const WindowScores& window_scores() const { return scores_; }

  void add_memory(const LayerShape& shape, MemoryReport& report) const;

 private:
  // Tokens that there is room for beyond those that are there.
  std::int64_t spare() const { return std::max<std::int64_t>(0, room_ - tokens_); }
  void encode(const LayerShape& shape, const Kernels& kernels, std::int64_t place,
              std::span<float> scratch) noexcept;
  void keep_drawn(const LayerShape& shape, std::span<const std::uint32_t> drawn,
                  std::int64_t end) noexcept;
  // Copies the row of a compressed token from the host tier to a resident slot.
  void copy_row(const LayerShape& shape, std::uint32_t position, std::byte* key,
                std::byte* value) const noexcept;

  std::int64_t tokens_ = 0;
  std::int64_t compressed_ = 0;
  std::int64_t drawn_residents_ = 0;
  AlignedVector<std::byte> host_;
  AlignedVector<std::byte> resident_key_;
  AlignedVector<std::byte> resident_value_;
  std::vector<std::uint32_t> resident_place_;
  AlignedVector<std::uint8_t> codes_;
  std::vector<Positive16> scales_;
  std::vector<Positive16> odds_;
  std::vector<float> channel_means_;
  AlignedVector<std::byte> centroids_;
  std::vector<Positive16> spreads_;
  SketchBasis basis_;
  HeadOrder order_;
  WindowScores scores_;
  // There is room for so many tokens.
  std::int64_t room_ = 0;
};

}  // namespace verkv::cpu

#endif  // VERKV_SRC_CPU_HEAD_STORE_HPP
