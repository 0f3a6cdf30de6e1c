// Everything the CPU backend keeps for one (sequence, layer, KV head), on both tiers.
#ifndef VERKV_SRC_CPU_HEAD_STORE_HPP
#define VERKV_SRC_CPU_HEAD_STORE_HPP

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <vector>

#include <verkv/reports.hpp>
#include <verkv/settings.hpp>
#include <verkv/sketch.hpp>

#include "compression.hpp"
#include "cpu/host_rows.hpp"
#include "cpu/kernels.hpp"
#include "cpu/layer_shape.hpp"
#include "cpu/paged_rows.hpp"
#include "cpu/tier_memory.hpp"
#include "cpu/window_scores.hpp"
#include "rows.hpp"
#include "saved_bytes.hpp"
#include "settings.hpp"
#include "sketch_basis.hpp"
#include "spread_order.hpp"
#include "tier_bytes.hpp"

namespace verkv::cpu {

constexpr std::int64_t round_up(std::int64_t n, std::int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

// Pages of what is held by place: whole blocks of the order of sums, so that pieces of a sketch are
// summed as one.
inline constexpr int kPlaceShift = 9;
static_assert(std::int64_t{1} << kPlaceShift == kBlockTokens);

// The local window on the fast tier, by position from the first token that is not compressed.
struct Window {
  explicit Window(const LayerShape& shape);
  PagedRows key;
  PagedRows value;  // of no bytes where values are the first numbers of keys

  Window fork();
};

// The drawn residents, in order of place: their rows on the fast tier, and their places.
struct Drawn {
  explicit Drawn(const LayerShape& shape);
  PagedRows key;
  PagedRows value;  // as of Window
  PagedRows place;  // std::uint32_t

  std::int64_t size() const { return place.size(); }
  // Calls f(slot, place) for slots [0, size()).
  template <class F>
  void each_place(F&& f) const;
  std::uint32_t place_of(std::int64_t slot) const {
    return reinterpret_cast<const std::uint32_t*>(
        place.pages()[slot >> kPageShift])[slot & (kPageRows - 1)];
  }
  Drawn fork();
};

// Values of a Window or of Drawn, from row `first` on.
template <class Part>
Rows values_of(const LayerShape& shape, const Part& part, std::int64_t first) {
  const bool in_keys = shape.config.value_is_key_prefix;
  const PagedRows& from = in_keys ? part.key : part.value;
  Rows rows;
  rows.type = shape.storage;
  rows.dim = static_cast<int>(shape.config.value_dim);
  rows.stride = in_keys ? shape.config.key_dim : shape.config.value_dim;
  rows.pages = from.pages();
  rows.first = from.first() + first;
  return rows;
}

// What a head's first compression fixes. Shared by forks.
struct HeadBasis {
  explicit HeadBasis(const TierMemory* fast) : query(fast), channel_means(fast) {}
  // With room for codes of this form.
  HeadBasis(const LayerShape& shape, const SketchShape& codes);

  SketchBasis sketch;  // empty where the sketch is exact; its query is the next
  AlignedVector<Half> query;
  AlignedVector<float> channel_means;
  OrderDirections directions;

  std::int64_t fast_bytes() const;
  std::int64_t main_bytes() const;
};

// Sketch and odds of the compressed tokens, by place, and their residents.
struct Sketched {
  // Without a basis.
  Sketched(const LayerShape& shape, const SketchShape& codes);
  PagedRows codes;                      // whole groups of kSketchGroup places
  PagedRows scale;                      // Positive16, whole groups
  PagedRows odds;                       // Positive16, whole groups
  PagedRows centroid;                   // by cluster, none unless the layer estimates by clusters
  PagedRows spread;                     // Positive16, likewise
  PagedRows position;                   // std::uint32_t; main memory
  std::vector<std::uint32_t> walk_end;  // HeadOrder::walk_end
  Drawn drawn;
  std::shared_ptr<HeadBasis> basis;

  std::unique_ptr<Sketched> fork();
};

// Sizes that a saved head begins with.
struct SavedCounts {
  std::int64_t tokens = 0;
  std::int64_t compressed = 0;
  std::int64_t drawn = 0;
  std::int64_t walks = 0;
  // Of the sketch; 0 where it is exact.
  std::int64_t dim = 0;
  std::int64_t fine = 0;
  // Numbers in OrderDirections.
  std::int64_t key_directions = 0;
  std::int64_t value_directions = 0;
};

// Positions [0, compressed) have sketch and odds, which lie in the order of HeadOrder, by *place*;
// of them only the drawn ones are resident. Positions [compressed, tokens) are the local window:
// all resident, and their places are their positions. Resident slots: the drawn ones, then the
// window.
class HeadStore {
 public:
  // engine: where the engine has the rows of the layer; none where they are copied. head: of the layer.
  explicit HeadStore(const LayerShape& shape, std::shared_ptr<EngineRows> engine = nullptr,
                     std::int64_t head = 0);

  std::int64_t tokens() const { return sliding_ == 0 ? host_.size() : left_ + window_.key.size(); }
  std::int64_t compressed() const { return compressed_; }
  std::int64_t drawn_residents() const { return sketched_ ? sketched_->drawn.size() : 0; }
  std::int64_t residents() const { return drawn_residents() + tokens() - left_ - compressed_; }

  bool in_file() const { return host_.is_file(); }
  HostRows& host() { return host_; }
  const HostRows& host() const { return host_; }
  // Of the local window, by position from compressed() on, and of a sliding one from left() on; from
  // row `begin` on. f(rows, first, count): rows [first, first + count) of it are rows [0, count) of
  // `rows`, which kernels read fastest.
  template <class F>
  void each_window_key(const LayerShape& shape, std::int64_t begin, F&& f) const;
  Rows window_values(const LayerShape& shape, std::int64_t begin) const;
  const Window& window() const { return window_; }
  // Of a token that is held, wherever it lies.
  const std::byte* key(std::int64_t token) const {
    return sliding_ == 0 ? host_.key(token) : window_.key.row(token - left_);
  }
  const std::byte* value(const LayerShape& shape, std::int64_t token) const {
    if (shape.config.value_is_key_prefix) return key(token);
    return sliding_ == 0 ? host_.value(token) : window_.value.row(token - left_);
  }
  const Drawn& drawn() const { return sketched_->drawn; }

  // Of places, which lie in pieces: f(first, count), each from a multiple of kBlockTokens.
  template <class F>
  void each_piece(F&& f) const;
  // From a place on, up to the end of its piece, whole groups of 16.
  const std::uint8_t* codes(std::int64_t place) const {
    return reinterpret_cast<const std::uint8_t*>(sketched_->codes.row(place / kSketchGroup));
  }
  const Positive16* scales(std::int64_t place) const {
    return at<Positive16>(sketched_->scale, place);
  }
  const Positive16* odds(std::int64_t place) const {
    return at<Positive16>(sketched_->odds, place);
  }
  std::uint32_t position(std::int64_t place) const {
    return *at<std::uint32_t>(sketched_->position, place);
  }
  // f(first, count) for the positions of places that lie side by side, which positions(first) has.
  template <class F>
  void each_position(F&& f) const;
  const std::uint32_t* positions(std::int64_t first) const {
    return at<std::uint32_t>(sketched_->position, first);
  }
  // Fast tier, by cluster; none unless the layer estimates by clusters.
  Rows centroids(const LayerShape& shape) const;
  Positive16 spread(std::int64_t cluster) const {
    return *reinterpret_cast<const Positive16*>(sketched_->spread.row(cluster));
  }
  // The form of the codes.
  const SketchShape& sketch(const LayerShape& shape) const {
    return has_codes(shape.sketch.kind) && sketched_ ? basis().sketch.shape : shape.sketch;
  }
  // Only after the first compression.
  const HeadBasis& basis() const { return *sketched_->basis; }
  // Copies. Allocate.
  HeadOrder order() const;
  std::vector<Positive16> all_odds() const;

  // Room for `count` more tokens; afterwards append of them cannot fail, also where a compression or
  // a redraw comes between. scores: whether queries of these tokens are to score the local window.
  void reserve_append(std::int64_t count, bool scores);
  // Of the blocks that it would allocate.
  TierBytes bytes_to_append(std::int64_t count, bool scores) const;
  // Of a layer with a sliding window: tokens that have left it. Those that are held follow.
  std::int64_t left() const { return left_; }
  // Room for the oldest `count` to leave, fewer than are held, with room for as many more as there is
  // now; afterwards leave cannot fail. The result is what is left where it moves. sliding_window.cpp.
  std::optional<Window> reserve_leave(const LayerShape& shape, std::int64_t count) const;
  void leave(std::int64_t count, std::optional<Window>&& rest) noexcept;
  // Of the blocks that reserve_leave would allocate, on the fast tier.
  std::int64_t bytes_to_leave(const LayerShape& shape, std::int64_t count,
                              std::int64_t spare) const;

  // Whether append of so many writes to memory that no fork holds, and needs no more of it.
  bool has_room(std::int64_t count, bool scores) const;
  // What there is room for stays reserved, whatever is appended without; until give_room_up.
  void keep_room() noexcept { kept_room_ = room_; }
  // Only that is kept free from now on; nothing is freed.
  void end_room() noexcept { room_ = kept_room_; }
  // Nothing is.
  void give_room_up() noexcept { room_ = kept_room_ = 0; }
  // Of a file: puts tokens of KV head `head` of the views where append of them makes them count. There is
  // room. Throws FileError.
  void write_ahead(const LayerShape& shape, const Kernels& kernels, const TensorView& keys,
                   const TensorView& values, std::int64_t head);
  // Adds tokens of KV head `head` of the views, already checked to fit the storage type.
  void append(const LayerShape& shape, const Kernels& kernels, const TensorView& keys,
              const TensorView& values, std::int64_t head, bool scores) noexcept;
  // Keeps the first `tokens`, at least compressed(); of a sliding window 0, or no fewer than left().
  void truncate(std::int64_t tokens) noexcept;
  // What is left where only the first `tokens`, fewer than compressed(), stay: all of them
  // compressed, without room for more. shortened_head.cpp. Shares host rows with this store.
  HeadStore shortened(const LayerShape& shape, const Kernels& kernels, std::int64_t tokens);

  // What the compressor is told of the head; valid until the head changes. Of a file throws FileError.
  HeadRows rows(const LayerShape& shape) const;
  // Room for this compression, with codes of this form; afterwards compress of it cannot fail. The
  // result is the window that is left where it moves, with room for `spare` more tokens.
  std::optional<Window> reserve_compress(const LayerShape& shape, const SketchShape& codes,
                                         const HeadCompression& head, std::int64_t spare);
  // Of the blocks that it would allocate on the fast tier.
  std::int64_t bytes_to_compress(const LayerShape& shape, const SketchShape& codes,
                                 const HeadCompression& head, std::int64_t spare) const;
  // Compresses positions [compressed, head.end()); takes basis and order out of `head`. The keys'
  // centre is that of the first head.first_tokens, at a first compression.
  // scratch: twice key_dim rounded up to 16, in floats.
  //
  // Both in two parts each: reserve_sketch and encode write behind what is there, where nothing is looked
  // at, until the sketch is next shared or written; tokens may come in between. rest_of_window and apply
  // do the rest.
  void reserve_sketch(const LayerShape& shape, const SketchShape& codes,
                      const HeadCompression& head);
  void encode(const LayerShape& shape, const Kernels& kernels, HeadCompression& head,
              std::span<float> scratch) noexcept;
  std::optional<Window> rest_of_window(const LayerShape& shape, const HeadCompression& head,
                                       std::int64_t spare) const;
  void apply(const LayerShape& shape, const HeadCompression& head,
             std::optional<Window>&& window) noexcept;
  void compress(const LayerShape& shape, const Kernels& kernels, HeadCompression& head,
                std::optional<Window>&& window, std::span<float> scratch) noexcept;
  // The residents where `drawn`, ascending, are those of the compressed part; take puts them in
  // place of those that are there. Of a file throws FileError.
  Drawn redraw(const LayerShape& shape, std::span<const std::uint32_t> drawn) const;
  void take(Drawn&& drawn) noexcept;

  // A store that holds the same, without room for more. Rows and sketch are shared until one of the
  // two writes to their last pages; scores of the window are copied, since steps write to them.
  HeadStore fork();

  WindowScores& window_scores() { return scores_; }
  const WindowScores& window_scores() const { return scores_; }
  // Tokens that there is room for beyond those that are there.
  std::int64_t spare() const { return std::max<std::int64_t>(0, room_ - tokens()); }

  // All but room; saved_head.cpp. Throws FormatError.
  void save(const LayerShape& shape, SavedWriter& writer) const;
  static HeadStore restore(const LayerShape& shape, SavedReader& reader);

  // exclusive: only what no fork holds too.
  void add_memory(MemoryReport& report, bool exclusive) const;

  // The first compressed position whose resident is not what the host tier has, -1: there is none.
  std::int64_t changed_row() const;

 private:
  HeadStore(HostRows host, Window window) : host_(std::move(host)), window_(std::move(window)) {}
  void append_sliding(const LayerShape& shape, const Kernels& kernels, const TensorView& keys,
                      const TensorView& values, std::int64_t head) noexcept;
  void truncate_sliding(std::int64_t tokens) noexcept;
  void save_sliding(SavedWriter& writer) const;
  void restore_sliding(const LayerShape& shape, SavedReader& reader, std::int64_t tokens);

  // Of what is held by place, from place 0 on.
  template <class T>
  static const T* at(const PagedRows& rows, std::int64_t place) {
    return reinterpret_cast<const T*>(rows.pages()[place >> kPlaceShift]) +
           (place & (kBlockTokens - 1));
  }
  void restore_sketch(const LayerShape& shape, SavedReader& reader, const SavedCounts& counts);
  // Rows of tokens that are not compressed, by position.
  Rows keys_to_compress(const LayerShape& shape) const;
  Rows values_to_compress(const LayerShape& shape) const;
  // A row, of the local window from there: then it throws nothing.
  void copy_row(std::int64_t position, std::byte* key, std::byte* value) const;
  // key: the row `row` of `keys` is that of the place.
  void encode_place(const LayerShape& shape, const Kernels& kernels, std::int64_t place,
                    const Rows& keys, std::int64_t row, std::span<float> scratch) noexcept;
  void take_clusters(const Clusters& clusters, std::int64_t end) noexcept;
  void add_drawn(std::span<const std::uint32_t> places, Drawn& drawn) const;

  std::int64_t compressed_ = 0;
  // LayerConfig::window; 0: none. Of such a layer the window has all that is held, from token left_
  // on, and there are neither rows on the host nor scores.
  std::int64_t sliding_ = 0;
  std::int64_t left_ = 0;
  HostRows host_;
  Window window_;  // empty where the engine's rows are read in place
  WindowScores scores_;
  // There is room for so many tokens.
  std::int64_t room_ = 0;
  std::int64_t kept_room_ = 0;
  std::unique_ptr<Sketched> sketched_;  // null before the first compression
};

// All heads of a layer: layer_heads.cpp. Without tokens; and such that continue as `heads` would.
std::vector<HeadStore> make_heads(const LayerShape& shape);
std::vector<HeadStore> fork_heads(std::vector<HeadStore>& heads);
// Of the engine's rows: throws InvalidArgument where KV heads lie otherwise than those of the tokens
// that are there.
void check_head_strides(const HeadStore& head, const TensorView& keys, const TensorView& values);
// HeadStore::changed_row of all heads.
std::int64_t first_changed_row(std::span<const HeadStore> heads);
// Of one length; saved_head.cpp. Throws FormatError.
std::vector<HeadStore> restore_heads(const LayerShape& shape, std::size_t layer,
                                     SavedReader& reader);
// Tokens [first, first + count), [token][KV head][dim]; either may be null.
void read_tokens(const LayerShape& shape, std::span<const HeadStore> heads, std::int64_t first,
                 std::int64_t count, std::byte* keys, std::byte* values);

// Calls f(first, count) for rows [0, rows.size()) in pieces that lie side by side.
template <class F>
void each_run(const PagedRows& rows, F&& f) {
  for (std::int64_t i = 0; i < rows.size();) {
    const std::int64_t end = rows.run_end(i);
    f(i, end - i);
    i = end;
  }
}

template <class F>
void HeadStore::each_window_key(const LayerShape& shape, std::int64_t begin, F&& f) const {
  const std::int64_t dim = shape.config.key_dim;
  if (host_.is_engine()) {
    Rows rows = host_.keys(shape);
    rows.first = compressed_ + begin;
    f(rows, begin, tokens() - compressed_ - begin);
    return;
  }
  for (std::int64_t first = begin; first < window_.key.size();) {
    const std::int64_t end = window_.key.run_end(first);
    f(Rows{window_.key.row(first), shape.storage, dim, static_cast<int>(dim)}, first, end - first);
    first = end;
  }
}

template <class F>
void Drawn::each_place(F&& f) const {
  each_run(place, [&](std::int64_t first, std::int64_t count) {
    const auto* at = reinterpret_cast<const std::uint32_t*>(place.row(first));
    for (std::int64_t i = 0; i < count; ++i) f(first + i, at[i]);
  });
}

template <class F>
void HeadStore::each_position(F&& f) const {
  if (sketched_) each_run(sketched_->position, f);
}

template <class F>
void HeadStore::each_piece(F&& f) const {
  for (std::int64_t i = 0; i < compressed_;) {
    std::int64_t end = std::min(compressed_, sketched_->odds.run_end(i));
    if (sketched_->scale.size() > 0) {
      end = std::min({end, sketched_->scale.run_end(i),
                      sketched_->codes.run_end(i / kSketchGroup) * kSketchGroup});
    }
    f(i, end - i);
    i = end;
  }
}

}  // namespace verkv::cpu

#endif  // VERKV_SRC_CPU_HEAD_STORE_HPP
