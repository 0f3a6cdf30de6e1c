// Compression and redraw of a LayerStore: what changes is made beside what is there.
#include <algorithm>
#include <utility>

#include <verkv/clusters.hpp>

#include "compress.hpp"
#include "sizes.hpp"
#include "store.hpp"
#include "store_blocks.hpp"

namespace verkv::cuda {

void LayerStore::reserve_sketch(std::int64_t end, cudaStream_t stream) {
  const std::int64_t capacity = grown(end, sketch_capacity_);
  if (capacity <= sketch_capacity_) return;
  DeviceBuffer<Positive16> odds(heads() * capacity, "odds");
  DeviceBuffer<std::uint8_t> codes(heads() * capacity * code_bytes(), "codes");
  DeviceBuffer<Positive16> scales(coded() ? heads() * capacity : 0, "scales");
  DeviceBuffer<std::byte> centroids(heads() * centroid_bytes(capacity), "centroids");
  DeviceBuffer<Positive16> spreads(heads() * spread_capacity(capacity), "spreads");
  DeviceBuffer<float> means;
  if (coded() && channel_means_.size() == 0) {
    means = DeviceBuffer<float>(heads() * round_up(layer_->key_dim, 4), "channel means");
  }
  // A step reads whole groups, so what pads the last one is written too.
  const auto clear = [stream](auto& buffer) {
    if (buffer.size() == 0) return;
    VERKV_CUDA_CHECK(cudaMemsetAsync(buffer.data(), 0, size(buffer.bytes()), stream));
  };
  clear(odds);
  clear(codes);
  clear(scales);
  const std::int64_t used = compressed();
  copy_heads(odds.data(), capacity, odds_.data(), sketch_capacity_, used, heads(), stream);
  if (layer_->clusters) {
    copy_heads(centroids.data(), centroid_bytes(capacity), centroids_.data(),
               centroid_bytes(sketch_capacity_), clusters_of(used) * value_bytes(), heads(),
               stream);
    copy_heads(spreads.data(), spread_capacity(capacity), spreads_.data(),
               spread_capacity(sketch_capacity_), clusters_of(used), heads(), stream);
  }
  if (coded()) {
    const std::int64_t code = code_bytes();
    copy_heads(codes.data(), capacity * code, codes_.data(), sketch_capacity_ * code,
               round_up(used, kSketchGroup) * code, heads(), stream);
    copy_heads(scales.data(), capacity, scales_.data(), sketch_capacity_, used, heads(), stream);
  }
  VERKV_CUDA_CHECK(cudaStreamSynchronize(stream));
  // The old blocks go at the end of this scope. The table names them until it is rewritten, which
  // the caller does before it enqueues anything more.
  odds_.swap(odds);
  codes_.swap(codes);
  scales_.swap(scales);
  centroids_.swap(centroids);
  spreads_.swap(spreads);
  if (means.size() > 0) channel_means_.swap(means);
  sketch_capacity_ = capacity;
  set_views();
}

void LayerStore::take_bases(std::span<HeadCompression> compressions, cudaStream_t stream) {
  // Codes of other bases, of a compression that failed, have no place here.
  bases_.clear();
  for (HeadCompression& head : compressions) bases_.push_back(std::move(head.basis));
  sketch_capacity_ = 0;
  std::vector<Half> query;
  std::vector<std::int64_t> begin;
  for (const SketchBasis& basis : bases_) {
    begin.push_back(static_cast<std::int64_t>(query.size()));
    query.insert(query.end(), basis.query.begin(), basis.query.end());
  }
  DeviceBuffer<Half> buffer(static_cast<std::int64_t>(query.size()), "the bases of the sketch");
  VERKV_CUDA_CHECK(cudaMemcpyAsync(buffer.data(), query.data(), size(buffer.bytes()),
                                   cudaMemcpyHostToDevice, stream));
  VERKV_CUDA_CHECK(cudaStreamSynchronize(stream));
  basis_query_.swap(buffer);
  for (std::size_t h = 0; h < bases_.size(); ++h) {
    HeadView& view = views_[h];
    view.sketch_dim = bases_[h].shape.dim;
    view.sketch_fine = bases_[h].shape.fine;
    view.sketch_bands = bases_[h].bands;
    view.basis_unit = bases_[h].unit;
    view.basis_query = basis_query_.data() + begin[h];
  }
}

DeviceBuffer<float> LayerStore::open_sketch(std::int64_t end, HeadView* table,
                                            cudaStream_t stream) {
  DeviceBuffer<float> encode;
  std::vector<std::int64_t> at;
  if (coded()) {
    std::vector<float> matrices;
    for (const SketchBasis& basis : bases_) {
      at.push_back(static_cast<std::int64_t>(matrices.size()));
      matrices.insert(matrices.end(), basis.encode.begin(), basis.encode.end());
    }
    encode = DeviceBuffer<float>(static_cast<std::int64_t>(matrices.size()), "a compression");
    VERKV_CUDA_CHECK(cudaMemcpyAsync(encode.data(), matrices.data(), size(encode.bytes()),
                                     cudaMemcpyHostToDevice, stream));
    VERKV_CUDA_CHECK(cudaStreamSynchronize(stream));
  }
  reserve_sketch(end, stream);
  // Only the table that is written now names the matrices, which go after this compression.
  std::vector<HeadView> views = views_;
  for (std::size_t h = 0; h < at.size(); ++h) views[h].basis_encode = encode.data() + at[h];
  write_views(views, table, stream);
  return encode;
}

LayerStore::Draw LayerStore::upload(std::span<const Places> drawn, cudaStream_t stream) {
  Draw result;
  for (const Places& head : drawn)
    result.stride = std::max(result.stride, static_cast<std::int64_t>(head.size()));
  if (result.stride == 0) return result;
  std::vector<std::uint32_t> all(drawn.size() * size(result.stride));
  for (std::size_t h = 0; h < drawn.size(); ++h) {
    std::copy(drawn[h].begin(), drawn[h].end(),
              all.begin() + static_cast<std::int64_t>(h) * result.stride);
  }
  result.places = DeviceBuffer<std::uint32_t>(static_cast<std::int64_t>(all.size()), "a draw");
  VERKV_CUDA_CHECK(cudaMemcpyAsync(result.places.data(), all.data(), size(result.places.bytes()),
                                   cudaMemcpyHostToDevice, stream));
  VERKV_CUDA_CHECK(cudaStreamSynchronize(stream));
  return result;
}

DeviceBuffer<HeadView> LayerStore::gather(const Change& change, const Draw& draw, bool keeps_drawn,
                                          const HeadView* table, cudaStream_t stream) const {
  DeviceBuffer<HeadView> next(heads(), "a draw");
  VERKV_CUDA_CHECK(cudaMemcpyAsync(next.data(), change.views.data(), size(next.bytes()),
                                   cudaMemcpyHostToDevice, stream));
  GatherArguments arguments;
  arguments.from = table;
  arguments.to = next.data();
  arguments.keeps_drawn = keeps_drawn;
  arguments.place = draw.places.data();
  arguments.stride = draw.stride;
  arguments.most_residents = change.most_residents;
  VERKV_CUDA_CHECK(launch_gather_residents(*layer_, arguments, stream));
  return next;
}

void LayerStore::add_places(std::span<HeadCompression> compressions,
                            std::vector<HeadOrder>& orders) const {
  const std::int64_t begin = compressed();
  for (std::size_t h = 0; h < compressions.size(); ++h) {
    HeadOrder& more = compressions[h].order;
    std::copy(more.position.begin(), more.position.end(),
              positions_in(host_.data(), host_capacity_, static_cast<std::int64_t>(h)) + begin);
    HeadOrder& order = orders[h];
    if (begin == 0) order.directions = std::move(more.directions);
    for (const std::uint32_t end : more.walk_end)
      order.walk_end.push_back(static_cast<std::uint32_t>(begin) + end);
    order.open_odds = std::move(more.open_odds);
  }
}

void LayerStore::upload_clusters(std::span<const HeadCompression> compressions, Change& change,
                                 cudaStream_t stream) const {
  change.first_cluster = compressed() / kClusterTokens;
  Clusters all;
  for (const HeadCompression& head : compressions) {
    const Clusters& own = head.clusters;
    all.centroids.insert(all.centroids.end(), own.centroids.begin(), own.centroids.end());
    all.spread.insert(all.spread.end(), own.spread.begin(), own.spread.end());
  }
  const auto upload = [stream](auto& buffer, const auto& from, const char* what) {
    buffer = {static_cast<std::int64_t>(from.size()), what};
    VERKV_CUDA_CHECK(cudaMemcpyAsync(buffer.data(), from.data(), size(buffer.bytes()),
                                     cudaMemcpyHostToDevice, stream));
  };
  upload(change.centroids, all.centroids, "centroids");
  upload(change.spreads, all.spread, "spreads");
  VERKV_CUDA_CHECK(cudaStreamSynchronize(stream));
}

LayerStore::Change LayerStore::compress(std::span<HeadCompression> compressions, std::int64_t spare,
                                        HeadView* table, cudaStream_t stream) {
  spare = std::max(spare, this->spare());
  const std::int64_t begin = compressed();
  const std::int64_t end = compressions.front().end();
  if (coded() && begin == 0) take_bases(compressions, stream);
  const DeviceBuffer<float> matrices = open_sketch(end, table, stream);

  Change change;
  change.views = views_;
  change.orders = orders_;
  // Beyond `compressed` nothing is looked at, so all of this may be written in place.
  add_places(compressions, change.orders);
  for (std::size_t h = 0; h < compressions.size(); ++h) {
    const std::vector<Positive16>& odds = compressions[h].odds;
    VERKV_CUDA_CHECK(cudaMemcpyAsync(
        odds_.data() + static_cast<std::int64_t>(h) * sketch_capacity_ + begin, odds.data(),
        odds.size() * sizeof(Positive16), cudaMemcpyHostToDevice, stream));
  }
  if (layer_->clusters) upload_clusters(compressions, change, stream);
  if (coded()) {
    if (begin == 0) {
      VERKV_CUDA_CHECK(
          launch_channel_means(*layer_, table, compressions.front().first_tokens, stream));
    }
    VERKV_CUDA_CHECK(launch_encode(*layer_, table, end, stream));
  }
  std::vector<Places> places;
  for (std::size_t h = 0; h < change.views.size(); ++h) {
    change.views[h].compressed = end;
    change.views[h].drawn += static_cast<std::int64_t>(compressions[h].drawn.size());
    places.push_back(std::move(compressions[h].drawn));
  }
  const Draw drawn = upload(places, stream);
  allocate_residents(change, spare);
  allocate_window(change, tokens() - end + spare, given_rows_, stream);
  const DeviceBuffer<HeadView> next = gather(change, drawn, true, table, stream);
  VERKV_CUDA_CHECK(launch_move_window(*layer_, table, next.data(), stream));
  VERKV_CUDA_CHECK(cudaStreamSynchronize(stream));
  return change;
}

LayerStore::Change LayerStore::redraw(std::span<const Places> drawn, std::int64_t spare,
                                      HeadView* table, cudaStream_t stream) const {
  Change change;
  change.views = views_;
  for (std::size_t h = 0; h < change.views.size(); ++h)
    change.views[h].drawn = static_cast<std::int64_t>(drawn[h].size());
  const Draw copy = upload(drawn, stream);
  allocate_residents(change, std::max(spare, this->spare()));
  const DeviceBuffer<HeadView> next = gather(change, copy, false, table, stream);
  VERKV_CUDA_CHECK(cudaStreamSynchronize(stream));
  return change;
}

}  // namespace verkv::cuda
