#include "store.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "compress.hpp"
#include "sizes.hpp"
#include "window_score.hpp"

namespace verkv::cuda {
namespace {

// Rows of a head start at multiples of this many tokens' worth of bytes, hence aligned.
constexpr std::int64_t kCapacityUnit = 64;

// Grows geometrically, by half.
std::int64_t grown(std::int64_t wanted, std::int64_t capacity) {
  if (wanted <= capacity) return capacity;
  return round_up(std::max(wanted, capacity + capacity / 2), kCapacityUnit);
}

// [heads][capacity] of T: the first `used` of each head move to blocks of another capacity.
template <class T>
void copy_heads(T* to, std::int64_t to_capacity, const T* from, std::int64_t from_capacity,
                std::int64_t used, std::int64_t heads, cudaStream_t stream) {
  if (used == 0) return;
  VERKV_CUDA_CHECK(cudaMemcpy2DAsync(to, size(to_capacity) * sizeof(T), from,
                                     size(from_capacity) * sizeof(T), size(used) * sizeof(T),
                                     size(heads), cudaMemcpyDeviceToDevice, stream));
}

}  // namespace

LayerStore::LayerStore(const LayerView& layer, bool require_pinned)
    : layer_(&layer),
      require_pinned_(require_pinned),
      views_(size(layer.kv_heads)),
      resident_capacity_(size(layer.kv_heads), std::int64_t{0}),
      orders_(size(layer.kv_heads)) {}

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

Rows LayerStore::host_keys(std::int64_t head) const {
  return {host_.data() + head * host_capacity_ * layer_->row_bytes(), layer_->storage,
          layer_->key_dim + layer_->value_dim, layer_->key_dim};
}

Rows LayerStore::host_values(std::int64_t head) const {
  return {host_.data() + head * host_capacity_ * layer_->row_bytes() + key_bytes(), layer_->storage,
          layer_->key_dim + layer_->value_dim, layer_->value_dim};
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
    view.codes = codes_.data() + h * sketch_capacity_ * code_bytes();
    view.scales = scales_.data() + h * sketch_capacity_;
    view.odds = odds_.data() + h * sketch_capacity_;
    view.channel_means = channel_means_.data() + h * round_up(layer_->key_dim, 4);
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
  change.resident_position = DeviceBuffer<std::uint32_t>(all, "resident positions");
  std::int64_t first = 0;
  for (std::size_t h = 0; h < change.views.size(); ++h) {
    HeadView& view = change.views[h];
    view.resident_keys = change.resident_keys.data() + first * key_bytes();
    view.resident_values = change.resident_values.data() + first * value_bytes();
    view.resident_position = change.resident_position.data() + first;
    first += change.resident_capacity[h];
  }
}

void LayerStore::allocate_window(Change& change, std::int64_t capacity) const {
  change.window_capacity = round_up(capacity, kCapacityUnit);
  change.window_square =
      DeviceBuffer<float>(heads() * change.window_capacity, "scores of the local window");
  change.window_steps =
      DeviceBuffer<std::uint32_t>(heads() * change.window_capacity, "scores of the local window");
  change.moves_window = true;
  for (std::size_t h = 0; h < change.views.size(); ++h) {
    const std::int64_t first = static_cast<std::int64_t>(h) * change.window_capacity;
    change.views[h].window_square = change.window_square.data() + first;
    change.views[h].window_steps = change.window_steps.data() + first;
  }
}

void LayerStore::grow_host(Change& change, std::int64_t tokens, cudaStream_t stream) const {
  change.host_capacity = grown(tokens, host_capacity_);
  if (change.host_capacity == host_capacity_) return;
  const std::int64_t row = layer_->row_bytes();
  change.host = HostBuffer(heads() * change.host_capacity * row, "the host tier", require_pinned_);
  if (this->tokens() == 0) return;
  // The host copies, so what kernels have still to write there must have come.
  VERKV_CUDA_CHECK(cudaStreamSynchronize(stream));
  for (std::int64_t h = 0; h < heads(); ++h) {
    std::memcpy(change.host.data() + h * change.host_capacity * row,
                host_.data() + h * host_capacity_ * row, size(this->tokens() * row));
  }
}

void LayerStore::reserve_append(std::int64_t count, HeadView* table, cudaStream_t stream) {
  const std::int64_t wanted = tokens() + count;
  const std::int64_t window = wanted - compressed();
  bool fits = true;
  for (std::size_t h = 0; h < views_.size(); ++h) {
    fits = fits && views_[h].residents() + count <= resident_capacity_[h];
  }
  const bool window_fits = window <= window_capacity_;
  if (fits && window_fits && wanted <= host_capacity_) return;

  // All that can fail comes before the first change that shows.
  Change change;
  change.views = views_;
  if (!fits) {
    std::int64_t spare = count;
    for (const HeadView& view : views_) spare = std::max(spare, view.residents() / 2);
    allocate_residents(change, spare);
  }
  if (!window_fits) allocate_window(change, std::max(window, window_capacity_ * 3 / 2));
  grow_host(change, wanted, stream);
  if (!fits) {
    for (std::size_t h = 0; h < views_.size(); ++h) {
      const HeadView& from = views_[h];
      const HeadView& to = change.views[h];
      const std::int64_t n = from.residents();
      if (n == 0) continue;
      VERKV_CUDA_CHECK(cudaMemcpyAsync(to.resident_keys, from.resident_keys, size(n * key_bytes()),
                                       cudaMemcpyDeviceToDevice, stream));
      VERKV_CUDA_CHECK(cudaMemcpyAsync(to.resident_values, from.resident_values,
                                       size(n * value_bytes()), cudaMemcpyDeviceToDevice, stream));
      VERKV_CUDA_CHECK(cudaMemcpyAsync(to.resident_position, from.resident_position, size(4 * n),
                                       cudaMemcpyDeviceToDevice, stream));
    }
  }
  if (!window_fits) {
    const std::int64_t used = tokens() - compressed();
    copy_heads(change.window_square.data(), change.window_capacity, window_square_.data(),
               window_capacity_, used, heads(), stream);
    copy_heads(change.window_steps.data(), change.window_capacity, window_steps_.data(),
               window_capacity_, used, heads(), stream);
  }
  take(std::move(change), table, stream);
}

void LayerStore::append_rows(AppendArguments step, std::int64_t offset, bool counts,
                             HeadView* table, cudaStream_t stream) {
  step.heads = table;
  step.first = tokens() + offset;
  step.counts = counts;
  VERKV_CUDA_CHECK(launch_append(*layer_, step, stream));
}

void LayerStore::add_tokens(std::int64_t count) {
  for (HeadView& view : views_) view.tokens += count;
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

void LayerStore::reserve_sketch(std::int64_t end, cudaStream_t stream) {
  const std::int64_t capacity = grown(end, sketch_capacity_);
  if (capacity <= sketch_capacity_) return;
  DeviceBuffer<Positive16> odds(heads() * capacity, "odds");
  DeviceBuffer<std::uint8_t> codes(heads() * capacity * code_bytes(), "codes");
  DeviceBuffer<Positive16> scales(coded() ? heads() * capacity : 0, "scales");
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

LayerStore::Draw LayerStore::upload(std::span<const Positions> drawn, cudaStream_t stream) {
  Draw result;
  for (const Positions& head : drawn)
    result.stride = std::max(result.stride, static_cast<std::int64_t>(head.size()));
  if (result.stride == 0) return result;
  std::vector<std::uint32_t> all(drawn.size() * size(result.stride));
  for (std::size_t h = 0; h < drawn.size(); ++h) {
    std::copy(drawn[h].begin(), drawn[h].end(),
              all.begin() + static_cast<std::int64_t>(h) * result.stride);
  }
  result.positions = DeviceBuffer<std::uint32_t>(static_cast<std::int64_t>(all.size()), "a draw");
  VERKV_CUDA_CHECK(cudaMemcpyAsync(result.positions.data(), all.data(),
                                   size(result.positions.bytes()), cudaMemcpyHostToDevice, stream));
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
  arguments.position = draw.positions.data();
  arguments.stride = draw.stride;
  arguments.most_residents = change.most_residents;
  VERKV_CUDA_CHECK(launch_gather_residents(*layer_, arguments, stream));
  return next;
}

LayerStore::Change LayerStore::compress(std::span<HeadCompression> compressions, std::int64_t spare,
                                        bool zero_scores, HeadView* table, cudaStream_t stream) {
  const std::int64_t begin = compressed();
  const std::int64_t end = compressions.front().end();
  if (coded() && begin == 0) take_bases(compressions, stream);
  const DeviceBuffer<float> matrices = open_sketch(end, table, stream);

  // Beyond `compressed` nothing is looked at, so all of this may be written in place.
  for (std::size_t h = 0; h < compressions.size(); ++h) {
    const std::vector<Positive16>& odds = compressions[h].odds;
    VERKV_CUDA_CHECK(cudaMemcpyAsync(
        odds_.data() + static_cast<std::int64_t>(h) * sketch_capacity_ + begin, odds.data(),
        odds.size() * sizeof(Positive16), cudaMemcpyHostToDevice, stream));
  }
  if (coded()) {
    if (begin == 0) VERKV_CUDA_CHECK(launch_channel_means(*layer_, table, end, stream));
    VERKV_CUDA_CHECK(launch_encode(*layer_, table, end, stream));
  }
  Change change;
  change.views = views_;
  change.orders = orders_;
  std::vector<Positions> positions;
  for (std::size_t h = 0; h < change.views.size(); ++h) {
    change.views[h].compressed = end;
    change.views[h].drawn += static_cast<std::int64_t>(compressions[h].drawn.size());
    reserve_walks(change.orders[h], compressions[h].order);
    take_walks(change.orders[h], std::move(compressions[h].order));
    positions.push_back(std::move(compressions[h].drawn));
  }
  const Draw drawn = upload(positions, stream);
  allocate_residents(change, spare);
  allocate_window(change, tokens() - end + spare);
  const DeviceBuffer<HeadView> next = gather(change, drawn, true, table, stream);
  VERKV_CUDA_CHECK(launch_move_window(*layer_, table, next.data(), zero_scores, stream));
  VERKV_CUDA_CHECK(cudaStreamSynchronize(stream));
  return change;
}

LayerStore::Change LayerStore::redraw(std::span<const Positions> drawn, std::int64_t spare,
                                      HeadView* table, cudaStream_t stream) const {
  Change change;
  change.views = views_;
  for (std::size_t h = 0; h < change.views.size(); ++h)
    change.views[h].drawn = static_cast<std::int64_t>(drawn[h].size());
  const Draw copy = upload(drawn, stream);
  allocate_residents(change, spare);
  const DeviceBuffer<HeadView> next = gather(change, copy, false, table, stream);
  VERKV_CUDA_CHECK(cudaStreamSynchronize(stream));
  return change;
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
    resident_position_.swap(change.resident_position);
  }
  if (change.moves_window) {
    window_capacity_ = change.window_capacity;
    window_square_.swap(change.window_square);
    window_steps_.swap(change.window_steps);
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

void LayerStore::clear_window_scores(cudaStream_t stream) {
  if (window_square_.size() == 0) return;
  VERKV_CUDA_CHECK(cudaMemsetAsync(window_square_.data(), 0, size(window_square_.bytes()), stream));
  VERKV_CUDA_CHECK(cudaMemsetAsync(window_steps_.data(), 0, size(window_steps_.bytes()), stream));
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
  for (const HeadOrder& order : orders_) used.basis_bytes += order.bytes();
  used.metadata_bytes = 4 * residents + heads() * (2 * padded + 8 * (tokens() - end));
  const std::int64_t allocated = host_.bytes() + resident_keys_.bytes() + resident_values_.bytes() +
                                 resident_position_.bytes() + window_square_.bytes() +
                                 window_steps_.bytes() + codes_.bytes() + scales_.bytes() +
                                 odds_.bytes() + channel_means_.bytes() + basis_query_.bytes();
  report.host_bytes += used.host_bytes;
  report.resident_bytes += used.resident_bytes;
  report.sketch_bytes += used.sketch_bytes;
  report.basis_bytes += used.basis_bytes;
  report.metadata_bytes += used.metadata_bytes;
  if (host_.pageable()) report.pageable_bytes += host_.bytes();
  report.reserved_bytes += allocated - used.host_bytes - used.fast_bytes();
}

}  // namespace verkv::cuda
