// Everything the CUDA backend keeps for one (sequence, layer), all KV heads of it, on both tiers:
// the device's HeadStore. The host side knows every length, so that a step needs no answer from the
// device.
#ifndef VERKV_CUDA_STORE_HPP
#define VERKV_CUDA_STORE_HPP

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <verkv/reports.hpp>

#include "append.hpp"
#include "compression.hpp"
#include "device_memory.hpp"
#include "host_buffer.hpp"
#include "rows.hpp"
#include "sketch_basis.hpp"
#include "spread_order.hpp"
#include "tier_bytes.hpp"
#include "views.hpp"
#include "window_score.hpp"

namespace verkv::cuda {

// Places and lengths are as HeadView says; tokens and compressed are equal for all KV heads.
// Growth, compression and redraw wait for the stream; append into room that is there does not.
class LayerStore {
 public:
  // Makes an empty store of `layer`, which must outlive it, without allocating. require_pinned: the
  // host tier may not be pageable.
  explicit LayerStore(const LayerView& layer, bool require_pinned = false);

  // A store that holds the same in memory of its own. `table`: the device's entries for it, which
  // are written. Throws DeviceError if memory is short. Waits for the stream.
  std::unique_ptr<LayerStore> copy(HeadView* table, cudaStream_t stream) const;

  std::int64_t tokens() const { return views_.front().tokens; }
  std::int64_t compressed() const { return views_.front().compressed; }
  std::int64_t most_residents() const;
  // What the device's table should say of this layer's KV heads.
  std::span<const HeadView> views() const { return views_; }

  // Room for `count` more tokens; afterwards append of them allocates nothing, also where a
  // compression or a redraw comes between. scores: whether queries of these tokens are to score the
  // local window; what earlier ones have given must have been taken in. If blocks had to be
  // replaced, `table`, the device's entries for this store, is written anew. Throws DeviceError and
  // changes nothing if memory is short.
  void reserve_append(std::int64_t count, bool scores, HeadView* table, cudaStream_t stream);
  // Tokens that there is room for beyond those that are there.
  std::int64_t spare() const { return std::max<std::int64_t>(0, room_ - tokens()); }
  // Whether there is room for what the queries of `count` tokens that come at once give, too.
  bool has_room(std::int64_t count, bool scores) const {
    return count <= spare() && (!scores || std::min(count, kMostScoredTokens) <= given_rows_);
  }
  // Enqueues the rows of `step`, whose first token is number `offset` of those being added; its
  // heads, first and counts are filled in here. counts: whether these are the last of the tokens
  // and the table should count them in.
  void append_rows(AppendArguments step, std::int64_t offset, bool counts, HeadView* table,
                   cudaStream_t stream);
  // The host side counts the tokens in.
  void add_tokens(std::int64_t count);
  // Keeps the first `tokens`, at least compressed(). Waits for the stream.
  void truncate(std::int64_t tokens, HeadView* table, cudaStream_t stream);
  // Writes the whole table anew. Waits for the stream.
  void write_table(HeadView* table, cudaStream_t stream) const;

  // A compression or a redraw that has been computed and waits to take effect. Nothing of the store
  // has changed yet.
  struct Change {
    std::vector<HeadView> views;
    std::vector<std::int64_t> resident_capacity;
    DeviceBuffer<std::byte> resident_keys;
    DeviceBuffer<std::byte> resident_values;
    DeviceBuffer<std::uint32_t> resident_place;
    DeviceBuffer<float> window_square;
    DeviceBuffer<std::uint32_t> window_steps;
    DeviceBuffer<float> given;
    DeviceBuffer<std::uint32_t> has_given;
    std::int64_t window_capacity = 0;
    std::int64_t given_rows = 0;
    bool moves_window = false;
    std::int64_t most_residents = 0;
    HostBuffer host;  // where the host tier grows
    std::int64_t host_capacity = 0;
    std::vector<HeadOrder> orders;  // of a compression: as LayerStore's, [KV head]
    // Of a compression: the clusters from `first_cluster` on, [KV head][cluster][value_dim] and
    // [KV head][cluster]. The first of them may have begun before, and is in the store as it was
    // until then.
    DeviceBuffer<std::byte> centroids;
    DeviceBuffer<Positive16> spreads;
    std::int64_t first_cluster = 0;
  };

  // Computes a compression: one element of `heads` per KV head, in order, all of the same positions
  // from compressed() on; their bases and orders are taken. spare: residents that each head should
  // have room for beyond its own, at least. What queries have given must have been taken in. Room
  // for the sketch and the bases stay if this throws. Waits for the stream.
  Change compress(std::span<HeadCompression> heads, std::int64_t spare, HeadView* table,
                  cudaStream_t stream);
  // Rows of one KV head on the host tier. What the stream has still to write is not there yet.
  Rows host_keys(std::int64_t head) const;
  Rows host_values(std::int64_t head) const;
  // Of one KV head; empty before the first compression.
  const OrderDirections& directions(std::int64_t head) const {
    return orders_[static_cast<std::size_t>(head)].directions;
  }
  // Of the compressed tokens of one KV head, by place; what the stream has still to write is not
  // there yet.
  std::span<const std::uint32_t> positions(std::int64_t head) const;
  // HeadOrder::open_odds of one KV head.
  std::span<const Positive16> open_odds(std::int64_t head) const {
    return orders_[static_cast<std::size_t>(head)].open_odds;
  }
  // The form of the codes of one KV head, after the first compression.
  SketchShape codes(std::size_t head) const {
    return bases_.empty() ? layer_->sketch : bases_[head].shape;
  }
  // A copy of the order of one KV head. Allocates.
  HeadOrder order(std::int64_t head) const;
  // Of the compressed tokens of one KV head, by place. Waits for the stream.
  std::vector<Positive16> odds(std::int64_t head, cudaStream_t stream) const;
  // The residents where `drawn`, ascending, of each KV head, are those of the compressed part.
  // Waits for the stream.
  using Places = std::vector<std::uint32_t>;
  Change redraw(std::span<const Places> drawn, std::int64_t spare, HeadView* table,
                cudaStream_t stream) const;
  // Puts it in force. Waits for the stream.
  void take(Change&& change, HeadView* table, cudaStream_t stream);

  // window_score (src/window_score.hpp) of the first `count` tokens of the local window,
  // [KV head][token]. Waits for the stream.
  std::vector<float> window_scores(std::int64_t count, cudaStream_t stream) const;
  // Enqueues that what queries have given is taken in.
  void settle(HeadView* table, cudaStream_t stream);

  void add_memory(MemoryReport& report) const;
  // What reserve_append adds to what is allocated. Blocks that it replaces are there meanwhile.
  TierBytes bytes_to_append(std::int64_t count, bool scores) const;
  const HostBuffer& host_tier() const { return host_; }

 private:
  std::int64_t heads() const { return static_cast<std::int64_t>(views_.size()); }
  std::int64_t key_bytes() const;
  std::int64_t value_bytes() const;
  // Positions of the places of one KV head in a block of the host tier for `capacity` tokens.
  std::uint32_t* positions_in(std::byte* block, std::int64_t capacity, std::int64_t head) const;
  // What reserve_append does.
  struct Growth {
    std::int64_t tokens = 0;
    std::optional<std::int64_t> spare;   // residents of larger blocks beyond those that are there
    std::optional<std::int64_t> window;  // capacity of larger blocks
    std::int64_t given_rows = 0;
  };
  Growth growth(std::int64_t count, bool scores) const;
  void grow_host(Change& change, std::int64_t tokens, cudaStream_t stream) const;
  void reserve_sketch(std::int64_t end, cudaStream_t stream);
  // Buffers for these numbers of residents and window tokens; views point into them.
  void allocate_residents(Change& change, std::int64_t spare) const;
  // given_rows: queries whose gifts there is room for. Enqueues on the stream.
  void allocate_window(Change& change, std::int64_t capacity, std::int64_t given_rows,
                       cudaStream_t stream) const;
  void set_views();
  static void write_views(std::span<const HeadView> views, HeadView* table, cudaStream_t stream);

  // Whether the sketch has codes, and so a basis.
  bool coded() const { return has_codes(layer_->sketch.kind); }
  // Bytes of codes of a token that each head has room for.
  std::int64_t code_bytes() const;
  // Bytes of the centroids and number of spreads of a head with room for so many compressed tokens.
  std::int64_t centroid_bytes(std::int64_t capacity) const;
  std::int64_t spread_capacity(std::int64_t capacity) const;
  // The bases of a first compression; the queries' side goes to the device.
  void take_bases(std::span<HeadCompression> compressions, cudaStream_t stream);
  // Writes the positions of the places of a compression, and adds its walks to `orders`.
  void add_places(std::span<HeadCompression> compressions, std::vector<HeadOrder>& orders) const;
  // Uploads the clusters of a compression. Waits for the stream.
  void upload_clusters(std::span<const HeadCompression> compressions, Change& change,
                       cudaStream_t stream) const;
  // Room for the sketch of places [0, end), and the table with the keys' side of the bases,
  // which the result holds: the table names it until it is written anew.
  DeviceBuffer<float> open_sketch(std::int64_t end, HeadView* table, cudaStream_t stream);

  // Places drawn, ascending: [KV head][stride].
  struct Draw {
    DeviceBuffer<std::uint32_t> places;
    std::int64_t stride = 0;
  };
  // Waits for the stream.
  static Draw upload(std::span<const Places> drawn, cudaStream_t stream);
  // Enqueues the rows of the residents of `change`. The result, its views on the device, must be
  // kept until the stream has been waited for.
  DeviceBuffer<HeadView> gather(const Change& change, const Draw& draw, bool keeps_drawn,
                                const HeadView* table, cudaStream_t stream) const;

  const LayerView* layer_;
  bool require_pinned_;
  std::vector<HeadView> views_;
  std::int64_t host_capacity_ = 0;  // tokens of each head
  // Rows [KV head][token], then the positions of places [KV head][place]: one block, since both
  // are read by the device in place.
  HostBuffer host_;
  std::vector<std::int64_t> resident_capacity_;  // of each head
  DeviceBuffer<std::byte> resident_keys_;
  DeviceBuffer<std::byte> resident_values_;
  DeviceBuffer<std::uint32_t> resident_place_;
  std::int64_t window_capacity_ = 0;
  std::int64_t given_rows_ = 0;
  DeviceBuffer<float> window_square_;
  DeviceBuffer<std::uint32_t> window_steps_;
  DeviceBuffer<float> given_;  // [KV head][given_rows_][window_capacity_]
  DeviceBuffer<std::uint32_t> has_given_;
  std::int64_t room_ = 0;             // tokens
  std::int64_t sketch_capacity_ = 0;  // tokens of each head, whole groups
  DeviceBuffer<std::uint8_t> codes_;
  DeviceBuffer<Positive16> scales_;
  DeviceBuffer<Positive16> odds_;
  DeviceBuffer<float> channel_means_;
  DeviceBuffer<std::byte> centroids_;  // [KV head][centroid_bytes(sketch_capacity_)]
  DeviceBuffer<Positive16> spreads_;   // [KV head][spread_capacity(sketch_capacity_)]
  std::vector<SketchBasis> bases_;     // [KV head], calibrated
  std::vector<HeadOrder> orders_;      // [KV head]; their positions are in host_
  DeviceBuffer<Half> basis_query_;
};

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_STORE_HPP
