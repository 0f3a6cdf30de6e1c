#include "store.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include <verkv/clusters.hpp>

#include "sizes.hpp"
#include "store_blocks.hpp"
#include "window_score.hpp"

namespace verkv::cuda {

LayerStore::LayerStore(const LayerView& layer, bool require_pinned)
    : layer_(&layer),
      require_pinned_(require_pinned),
      views_(size(layer.kv_heads)),
      resident_capacity_(size(layer.kv_heads), std::int64_t{0}),
      orders_(size(layer.kv_heads)) {}

namespace {

template <class T>
DeviceBuffer<T> copy_of(const DeviceBuffer<T>& from, cudaStream_t stream) {
  DeviceBuffer<T> to(from.size(), "a fork");
  if (from.size() > 0) {
    VERKV_CUDA_CHECK(cudaMemcpyAsync(to.data(), from.data(), size(from.bytes()),
                                     cudaMemcpyDeviceToDevice, stream));
  }
  return to;
}

// The address in a copy of a buffer of what `address` is in the buffer.
template <class P, class T>
void move_address(P*& address, const DeviceBuffer<T>& from, const DeviceBuffer<T>& to) {
  if (from.size() > 0 && address != nullptr) address = to.data() + (address - from.data());
}

}  // namespace

std::unique_ptr<LayerStore> LayerStore::copy(HeadView* table, cudaStream_t stream) const {
  auto result = std::make_unique<LayerStore>(*layer_, require_pinned_);
  LayerStore& to = *result;
  to.views_ = views_;
  to.host_capacity_ = host_capacity_;
  to.resident_capacity_ = resident_capacity_;
  to.window_capacity_ = window_capacity_;
  to.given_rows_ = given_rows_;
  to.room_ = room_;
  to.sketch_capacity_ = sketch_capacity_;
  to.bases_ = bases_;
  to.orders_ = orders_;
  to.resident_keys_ = copy_of(resident_keys_, stream);
  to.resident_values_ = copy_of(resident_values_, stream);
  to.resident_place_ = copy_of(resident_place_, stream);
  to.window_square_ = copy_of(window_square_, stream);
  to.window_steps_ = copy_of(window_steps_, stream);
  to.given_ = copy_of(given_, stream);
  to.has_given_ = copy_of(has_given_, stream);
  to.codes_ = copy_of(codes_, stream);
  to.scales_ = copy_of(scales_, stream);
  to.odds_ = copy_of(odds_, stream);
  to.channel_means_ = copy_of(channel_means_, stream);
  to.centroids_ = copy_of(centroids_, stream);
  to.spreads_ = copy_of(spreads_, stream);
  to.basis_query_ = copy_of(basis_query_, stream);
  to.host_ = HostBuffer(host_.bytes(), "the host tier of a fork", require_pinned_);
  // The host copies, so what kernels have still to write there must have come.
  VERKV_CUDA_CHECK(cudaStreamSynchronize(stream));
  if (host_.bytes() > 0) std::memcpy(to.host_.data(), host_.data(), size(host_.bytes()));
  to.set_views();
  for (HeadView& view : to.views_) {
    move_address(view.resident_keys, resident_keys_, to.resident_keys_);
    move_address(view.resident_values, resident_values_, to.resident_values_);
    move_address(view.resident_place, resident_place_, to.resident_place_);
    move_address(view.window_square, window_square_, to.window_square_);
    move_address(view.window_steps, window_steps_, to.window_steps_);
    move_address(view.given, given_, to.given_);
    move_address(view.has_given, has_given_, to.has_given_);
    move_address(view.basis_query, basis_query_, to.basis_query_);
  }
  to.write_table(table, stream);
  return result;
}

std::int64_t LayerStore::key_bytes() const {
  return layer_->key_dim * static_cast<std::int64_t>(size_bytes(layer_->storage));
}

std::int64_t LayerStore::value_bytes() const {
  return layer_->value_dim * static_cast<std::int64_t>(size_bytes(layer_->storage));
}

std::int64_t LayerStore::most_residents() const {
  std::int64_t most = 0;
  for (const HeadView& view : views_) most = std::max(most, view.residents());
  return most;
}

std::int64_t LayerStore::code_bytes() const {
  std::int64_t most = 0;
  for (const SketchBasis& basis : bases_)
    most = std::max(most, std::int64_t{basis.shape.code_bytes()});
  return most;
}

std::int64_t LayerStore::centroid_bytes(std::int64_t capacity) const {
  return layer_->clusters ? round_up(clusters_of(capacity) * value_bytes(), 16) : 0;
}

std::int64_t LayerStore::spread_capacity(std::int64_t capacity) const {
  return layer_->clusters ? round_up(clusters_of(capacity), 8) : 0;
}

Rows LayerStore::host_keys(std::int64_t head) const {
  return {host_.data() + head * host_capacity_ * layer_->row_bytes(), layer_->storage,
          layer_->key_dim + layer_->value_dim, layer_->key_dim};
}

Rows LayerStore::host_values(std::int64_t head) const {
  return {host_.data() + head * host_capacity_ * layer_->row_bytes() + key_bytes(), layer_->storage,
          layer_->key_dim + layer_->value_dim, layer_->value_dim};
}

std::uint32_t* LayerStore::positions_in(std::byte* block, std::int64_t capacity,
                                        std::int64_t head) const {
  std::byte* const positions = block + heads() * capacity * layer_->row_bytes();
  return reinterpret_cast<std::uint32_t*>(positions) + head * capacity;
}

std::span<const std::uint32_t> LayerStore::positions(std::int64_t head) const {
  if (compressed() == 0) return {};
  return {positions_in(host_.data(), host_capacity_, head), size(compressed())};
}

HeadOrder LayerStore::order(std::int64_t head) const {
  HeadOrder result = orders_[size(head)];
  const std::span<const std::uint32_t> position = positions(head);
  result.position.assign(position.begin(), position.end());
  return result;
}

std::vector<Positive16> LayerStore::odds(std::int64_t head, cudaStream_t stream) const {
  std::vector<Positive16> result(size(compressed()));
  if (result.empty()) return result;
  VERKV_CUDA_CHECK(cudaMemcpyAsync(result.data(), odds_.data() + head * sketch_capacity_,
                                   result.size() * sizeof(Positive16), cudaMemcpyDeviceToHost,
                                   stream));
  VERKV_CUDA_CHECK(cudaStreamSynchronize(stream));
  return result;
}

void LayerStore::set_views() {
  for (std::int64_t h = 0; h < heads(); ++h) {
    HeadView& view = views_[size(h)];
    view.host_rows = host_.device() + h * host_capacity_ * layer_->row_bytes();
    view.place_position = positions_in(host_.device(), host_capacity_, h);
    view.codes = codes_.data() + h * sketch_capacity_ * code_bytes();
    view.scales = scales_.data() + h * sketch_capacity_;
    view.odds = odds_.data() + h * sketch_capacity_;
    view.channel_means = channel_means_.data() + h * round_up(layer_->key_dim, 4);
    view.centroids = centroids_.data() + h * centroid_bytes(sketch_capacity_);
    view.spreads = spreads_.data() + h * spread_capacity(sketch_capacity_);
  }
}

void LayerStore::allocate_residents(Change& change, std::int64_t spare) const {
  std::int64_t all = 0;
  change.resident_capacity.clear();
  change.most_residents = 0;
  for (const HeadView& view : change.views) {
    change.resident_capacity.push_back(round_up(view.residents() + spare, kCapacityUnit));
    change.most_residents = std::max(change.most_residents, view.residents());
    all += change.resident_capacity.back();
  }
  change.resident_keys = DeviceBuffer<std::byte>(all * key_bytes(), "resident keys");
  change.resident_values = DeviceBuffer<std::byte>(all * value_bytes(), "resident values");
  change.resident_place = DeviceBuffer<std::uint32_t>(all, "resident places");
  std::int64_t first = 0;
  for (std::size_t h = 0; h < change.views.size(); ++h) {
    HeadView& view = change.views[h];
    view.resident_keys = change.resident_keys.data() + first * key_bytes();
    view.resident_values = change.resident_values.data() + first * value_bytes();
    view.resident_place = change.resident_place.data() + first;
    first += change.resident_capacity[h];
  }
}

void LayerStore::allocate_window(Change& change, std::int64_t capacity, std::int64_t given_rows,
                                 cudaStream_t stream) const {
  change.window_capacity = round_up(capacity, kCapacityUnit);
  change.given_rows = given_rows;
  change.given =
      DeviceBuffer<float>(heads() * given_rows * change.window_capacity, "scores of queries");
  change.has_given = DeviceBuffer<std::uint32_t>(given_rows > 0 ? heads() * kMostScoredTokens : 0,
                                                 "scores of queries");
  if (given_rows > 0) {
    VERKV_CUDA_CHECK(
        cudaMemsetAsync(change.has_given.data(), 0, size(change.has_given.bytes()), stream));
  }
  change.window_square =
      DeviceBuffer<float>(heads() * change.window_capacity, "scores of the local window");
  change.window_steps =
      DeviceBuffer<std::uint32_t>(heads() * change.window_capacity, "scores of the local window");
  change.moves_window = true;
  for (std::size_t h = 0; h < change.views.size(); ++h) {
    const std::int64_t first = static_cast<std::int64_t>(h) * change.window_capacity;
    change.views[h].window_square = change.window_square.data() + first;
    change.views[h].window_steps = change.window_steps.data() + first;
    if (given_rows == 0) continue;
    change.views[h].given = change.given.data() + first * given_rows;
    change.views[h].has_given =
        change.has_given.data() + static_cast<std::int64_t>(h) * kMostScoredTokens;
    change.views[h].given_stride = change.window_capacity;
  }
}

void LayerStore::grow_host(Change& change, std::int64_t tokens, cudaStream_t stream) const {
  change.host_capacity = grown(tokens, host_capacity_);
  if (change.host_capacity == host_capacity_) return;
  const std::int64_t row = layer_->row_bytes();
  change.host = HostBuffer(heads() * change.host_capacity * (row + kPositionBytes), "the host tier",
                           require_pinned_);
  if (this->tokens() == 0) return;
  // The host copies, so what kernels have still to write there must have come.
  VERKV_CUDA_CHECK(cudaStreamSynchronize(stream));
  for (std::int64_t h = 0; h < heads(); ++h) {
    std::memcpy(change.host.data() + h * change.host_capacity * row,
                host_.data() + h * host_capacity_ * row, size(this->tokens() * row));
    std::copy_n(positions_in(host_.data(), host_capacity_, h), compressed(),
                positions_in(change.host.data(), change.host_capacity, h));
  }
}

LayerStore::Growth LayerStore::growth(std::int64_t count, bool scores) const {
  Growth result;
  result.tokens = tokens() + count;
  const std::int64_t window = result.tokens - compressed();
  result.given_rows =
      std::max(given_rows_, scores ? std::min(count, kMostScoredTokens) : std::int64_t{0});
  bool fits = true;
  std::int64_t spare = count;
  for (std::size_t h = 0; h < views_.size(); ++h) {
    const std::int64_t residents = views_[h].residents();
    spare = std::max(spare, residents / 2);
    fits = fits && residents + count <= resident_capacity_[h];
  }
  if (!fits) result.spare = spare;
  if (window > window_capacity_ || result.given_rows > given_rows_) {
    result.window =
        window > window_capacity_ ? std::max(window, window_capacity_ * 3 / 2) : window_capacity_;
  }
  return result;
}

TierBytes LayerStore::bytes_to_append(std::int64_t count, bool scores) const {
  const Growth next = growth(count, scores);
  TierBytes more;
  more.host = heads() * (grown(next.tokens, host_capacity_) - host_capacity_) *
              (layer_->row_bytes() + kPositionBytes);
  if (next.spare) {
    std::int64_t rows = 0;
    for (const HeadView& view : views_)
      rows += round_up(view.residents() + *next.spare, kCapacityUnit);
    more.fast += rows * (key_bytes() + value_bytes() + 4) - resident_keys_.bytes() -
                 resident_values_.bytes() - resident_place_.bytes();
  }
  if (next.window) {
    const std::int64_t capacity = round_up(*next.window, kCapacityUnit);
    const std::int64_t given =
        next.given_rows > 0 ? next.given_rows * capacity + kMostScoredTokens : 0;
    more.fast += heads() * 4 * (2 * capacity + given) - window_square_.bytes() -
                 window_steps_.bytes() - given_.bytes() - has_given_.bytes();
  }
  return more;
}

void LayerStore::reserve_append(std::int64_t count, bool scores, HeadView* table,
                                cudaStream_t stream) {
  const Growth next = growth(count, scores);
  const std::int64_t wanted = next.tokens;
  if (!next.spare && !next.window && wanted <= host_capacity_) {
    room_ = wanted;
    return;
  }

  // All that can fail comes before the first change that shows.
  Change change;
  change.views = views_;
  if (next.spare) allocate_residents(change, *next.spare);
  if (next.window) allocate_window(change, *next.window, next.given_rows, stream);
  grow_host(change, wanted, stream);
  if (next.spare) {
    for (std::size_t h = 0; h < views_.size(); ++h) {
      const HeadView& from = views_[h];
      const HeadView& to = change.views[h];
      const std::int64_t n = from.residents();
      if (n == 0) continue;
      VERKV_CUDA_CHECK(cudaMemcpyAsync(to.resident_keys, from.resident_keys, size(n * key_bytes()),
                                       cudaMemcpyDeviceToDevice, stream));
      VERKV_CUDA_CHECK(cudaMemcpyAsync(to.resident_values, from.resident_values,
                                       size(n * value_bytes()), cudaMemcpyDeviceToDevice, stream));
      VERKV_CUDA_CHECK(cudaMemcpyAsync(to.resident_place, from.resident_place, size(4 * n),
                                       cudaMemcpyDeviceToDevice, stream));
    }
  }
  if (next.window) {
    const std::int64_t used = tokens() - compressed();
    copy_heads(change.window_square.data(), change.window_capacity, window_square_.data(),
               window_capacity_, used, heads(), stream);
    copy_heads(change.window_steps.data(), change.window_capacity, window_steps_.data(),
               window_capacity_, used, heads(), stream);
  }
  take(std::move(change), table, stream);
  room_ = wanted;
}

void LayerStore::append_rows(AppendArguments step, std::int64_t offset, bool counts,
                             HeadView* table, cudaStream_t stream) {
  step.heads = table;
  step.first = tokens() + offset;
  step.counts = counts;
  VERKV_CUDA_CHECK(launch_append(*layer_, step, stream));
}

void LayerStore::add_tokens(std::int64_t count) {
  for (HeadView& view : views_) {
    view.first_scored = first_scored(view.tokens, view.tokens + count, view.given != nullptr);
    view.tokens += count;
  }
}

void LayerStore::truncate(std::int64_t tokens, HeadView* table, cudaStream_t stream) {
  for (HeadView& view : views_) {
    view.tokens = tokens;
    view.first_scored = std::min(view.first_scored, tokens);
  }
  write_table(table, stream);
}

void LayerStore::write_views(std::span<const HeadView> views, HeadView* table,
                             cudaStream_t stream) {
  VERKV_CUDA_CHECK(cudaMemcpyAsync(table, views.data(), views.size() * sizeof(HeadView),
                                   cudaMemcpyHostToDevice, stream));
  VERKV_CUDA_CHECK(cudaStreamSynchronize(stream));
}

void LayerStore::write_table(HeadView* table, cudaStream_t stream) const {
  write_views(views_, table, stream);
}

void LayerStore::take(Change&& change, HeadView* table, cudaStream_t stream) {
  views_ = std::move(change.views);
  if (!change.orders.empty()) orders_ = std::move(change.orders);
  if (change.host.bytes() > 0) {
    host_.swap(change.host);
    host_capacity_ = change.host_capacity;
  }
  set_views();
  if (!change.resident_capacity.empty()) {
    resident_capacity_ = std::move(change.resident_capacity);
    resident_keys_.swap(change.resident_keys);
    resident_values_.swap(change.resident_values);
    resident_place_.swap(change.resident_place);
  }
  // A cluster that was not full is that of the old state until now.
  if (change.spreads.size() > 0) {
    const std::int64_t added = change.spreads.size() / heads();
    const std::int64_t bytes = added * value_bytes();
    copy_heads(centroids_.data() + change.first_cluster * value_bytes(),
               centroid_bytes(sketch_capacity_), change.centroids.data(), bytes, bytes, heads(),
               stream);
    copy_heads(spreads_.data() + change.first_cluster, spread_capacity(sketch_capacity_),
               change.spreads.data(), added, added, heads(), stream);
  }
  if (change.moves_window) {
    window_capacity_ = change.window_capacity;
    given_rows_ = change.given_rows;
    window_square_.swap(change.window_square);
    window_steps_.swap(change.window_steps);
    given_.swap(change.given);
    has_given_.swap(change.has_given);
  }
  write_table(table, stream);
}

std::vector<float> LayerStore::window_scores(std::int64_t count, cudaStream_t stream) const {
  const std::size_t n = size(heads() * count);
  std::vector<float> score(n);
  std::vector<std::uint32_t> steps(n);
  VERKV_CUDA_CHECK(cudaMemcpy2DAsync(score.data(), size(count) * 4, window_square_.data(),
                                     size(window_capacity_) * 4, size(count) * 4, size(heads()),
                                     cudaMemcpyDeviceToHost, stream));
  VERKV_CUDA_CHECK(cudaMemcpy2DAsync(steps.data(), size(count) * 4, window_steps_.data(),
                                     size(window_capacity_) * 4, size(count) * 4, size(heads()),
                                     cudaMemcpyDeviceToHost, stream));
  VERKV_CUDA_CHECK(cudaStreamSynchronize(stream));
  for (std::size_t i = 0; i < n; ++i) {
    score[i] = window_score(score[i], steps[i]);
  }
  return score;
}

void LayerStore::settle(HeadView* table, cudaStream_t stream) {
  if (given_rows_ == 0 || views_.front().first_scored == tokens()) return;
  VERKV_CUDA_CHECK(launch_settle(*layer_, table, stream));
  for (HeadView& view : views_) view.first_scored = view.tokens;
}

void LayerStore::add_memory(MemoryReport& report) const {
  const std::int64_t end = compressed();
  const std::int64_t padded = round_up(end, kSketchGroup);
  MemoryReport used;
  used.host_bytes = heads() * tokens() * layer_->row_bytes();
  std::int64_t residents = 0;
  for (const HeadView& view : views_) residents += view.residents();
  used.resident_bytes = residents * (key_bytes() + value_bytes());
  if (end > 0 && coded()) {
    std::int64_t codes = 0;
    for (const SketchBasis& basis : bases_) {
      codes += code_storage_bytes(basis.shape, end);
      used.basis_bytes += static_cast<std::int64_t>(basis.encode.size() * sizeof(float));
    }
    used.sketch_bytes = codes + heads() * (2 * padded + 4 * layer_->key_dim) + basis_query_.bytes();
  }
  if (layer_->clusters) {
    const std::int64_t spread = sizeof(Positive16);
    used.sketch_bytes += heads() * clusters_of(end) * (value_bytes() + spread);
  }
  const std::int64_t positions = heads() * end * kPositionBytes;
  used.basis_bytes += positions;
  for (const HeadOrder& order : orders_) used.basis_bytes += order.bytes();
  const std::int64_t window = tokens() - end;
  const std::int64_t queries = tokens() - views_.front().first_scored;
  used.metadata_bytes = 4 * residents + heads() * (2 * padded + 8 * window + 4 * queries * window);
  const std::int64_t on_device =
      resident_keys_.bytes() + resident_values_.bytes() + resident_place_.bytes() +
      window_square_.bytes() + window_steps_.bytes() + given_.bytes() + has_given_.bytes() +
      codes_.bytes() + scales_.bytes() + odds_.bytes() + channel_means_.bytes() +
      basis_query_.bytes() + centroids_.bytes() + spreads_.bytes();
  report.host_bytes += used.host_bytes;
  report.resident_bytes += used.resident_bytes;
  report.sketch_bytes += used.sketch_bytes;
  report.basis_bytes += used.basis_bytes;
  report.metadata_bytes += used.metadata_bytes;
  if (host_.pageable()) report.pageable_bytes += host_.bytes();
  const std::int64_t on_host = host_.bytes() - used.host_bytes - positions;
  report.reserved_bytes += on_host + on_device - used.fast_bytes();
  report.host_reserved_bytes += on_host;
  report.fast_reserved_bytes += on_device - used.fast_bytes();
}

}  // namespace verkv::cuda
