#include "cpu/head_store.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include <verkv/clusters.hpp>

#include "cpu/room.hpp"

namespace verkv::cpu {
namespace {

// Row (token, head) of a view, as elements of `type`.
void store_row(const TensorView& view, std::int64_t token, std::int64_t head, DType type,
               std::byte* to) {
  const void* row = view.row(token, head);
  if (view.type == type) {
    std::memcpy(to, row, static_cast<std::size_t>(view.dim) * size_bytes(type));
    return;
  }
  with_element(view.type, [&](auto from) {
    with_element(type, [&](auto stored) {
      using From = decltype(from);
      using Stored = decltype(stored);
      for (std::int64_t j = 0; j < view.dim; ++j) {
        const Stored x = from_float<Stored>(to_float(static_cast<const From*>(row)[j]));
        std::memcpy(to + static_cast<std::size_t>(j) * sizeof x, &x, sizeof x);
      }
    });
  });
}

std::size_t bytes(std::int64_t n) { return static_cast<std::size_t>(n); }

}  // namespace

Rows HeadStore::host_keys(const LayerShape& shape) const {
  return {host_.data(), shape.storage, shape.row_elements(),
          static_cast<int>(shape.config.key_dim)};
}

Rows HeadStore::host_values(const LayerShape& shape) const {
  return {host_.data() + bytes(shape.config.key_dim) * size_bytes(shape.storage), shape.storage,
          shape.row_elements(), static_cast<int>(shape.config.value_dim)};
}

Rows HeadStore::resident_keys(const LayerShape& shape) const {
  return {resident_key_.data(), shape.storage, shape.config.key_dim,
          static_cast<int>(shape.config.key_dim)};
}

Rows HeadStore::resident_values(const LayerShape& shape) const {
  return {resident_value_.data(), shape.storage, shape.config.value_dim,
          static_cast<int>(shape.config.value_dim)};
}

Rows HeadStore::centroids(const LayerShape& shape) const {
  return {centroids_.data(), shape.storage, shape.config.value_dim,
          static_cast<int>(shape.config.value_dim)};
}

void HeadStore::reserve_append(const LayerShape& shape, std::int64_t count, bool scores) {
  const std::size_t element = size_bytes(shape.storage);
  const std::size_t n = static_cast<std::size_t>(count);
  reserve_more(host_, n * bytes(shape.row_bytes()));
  reserve_more(resident_key_, n * bytes(shape.config.key_dim) * element);
  reserve_more(resident_value_, n * bytes(shape.config.value_dim) * element);
  reserve_more(resident_place_, n);
  scores_.reserve(count, scores);
  room_ = tokens_ + count;
}

void HeadStore::append(const LayerShape& shape, const TensorView& keys, const TensorView& values,
                       std::int64_t head, bool scores) noexcept {
  const std::size_t element = size_bytes(shape.storage);
  const std::size_t key_bytes = bytes(shape.config.key_dim) * element;
  const std::size_t value_bytes = bytes(shape.config.value_dim) * element;
  const std::size_t count = static_cast<std::size_t>(keys.tokens);
  std::size_t host_at = host_.size();
  std::size_t key_at = resident_key_.size();
  std::size_t value_at = resident_value_.size();
  host_.resize(host_at + count * (key_bytes + value_bytes));
  resident_key_.resize(key_at + count * key_bytes);
  resident_value_.resize(value_at + count * value_bytes);
  for (std::int64_t t = 0; t < keys.tokens; ++t) {
    store_row(keys, t, head, shape.storage, host_.data() + host_at);
    store_row(values, t, head, shape.storage, host_.data() + host_at + key_bytes);
    std::memcpy(resident_key_.data() + key_at, host_.data() + host_at, key_bytes);
    std::memcpy(resident_value_.data() + value_at, host_.data() + host_at + key_bytes, value_bytes);
    host_at += key_bytes + value_bytes;
    key_at += key_bytes;
    value_at += value_bytes;
    resident_place_.push_back(static_cast<std::uint32_t>(tokens_ + t));
  }
  scores_.append(keys.tokens, scores);
  tokens_ += keys.tokens;
}

void HeadStore::truncate(const LayerShape& shape, std::int64_t tokens) noexcept {
  const std::size_t residents = bytes(drawn_residents_ + tokens - compressed_);
  const std::size_t element = size_bytes(shape.storage);
  host_.resize(bytes(tokens * shape.row_bytes()));
  resident_key_.resize(residents * bytes(shape.config.key_dim) * element);
  resident_value_.resize(residents * bytes(shape.config.value_dim) * element);
  resident_place_.resize(residents);
  scores_.truncate(tokens - compressed_);
  tokens_ = tokens;
}

void HeadStore::reserve_compress(const LayerShape& shape, const SketchShape& codes,
                                 std::int64_t end) {
  const std::int64_t padded = round_up(end, kSketchGroup);
  const auto to = [](auto& vector, std::int64_t size) {
    const std::size_t wanted = static_cast<std::size_t>(size);
    if (wanted > vector.size()) reserve_more(vector, wanted - vector.size());
  };
  to(odds_, padded);
  if (shape.clusters) {
    to(centroids_, clusters_of(end) * shape.config.value_dim *
                       static_cast<std::int64_t>(size_bytes(shape.storage)));
    to(spreads_, clusters_of(end));
  }
  if (!has_codes(shape.sketch.kind)) return;
  to(codes_, code_storage_bytes(codes, end));
  to(scales_, padded);
  to(channel_means_, shape.config.key_dim);
}

void HeadStore::encode(const LayerShape& shape, const Kernels& kernels, std::int64_t place,
                       std::span<float> scratch) noexcept {
  const Rows keys = host_keys(shape);
  const std::size_t at = static_cast<std::size_t>(place);
  const std::int64_t position = static_cast<std::int64_t>(order_.position[at]);
  const std::size_t dim = static_cast<std::size_t>(shape.config.key_dim);
  const std::size_t padded_dim = static_cast<std::size_t>(round_up(shape.config.key_dim, kLanes));
  const std::span<float> key = scratch.first(dim);
  for (std::size_t j = 0; j < dim; ++j)
    key[j] = load_element(keys, position, static_cast<std::int64_t>(j));
  for (std::size_t j = 0; j < dim; ++j) key[j] -= channel_means_[j];
  std::fill(scratch.begin() + static_cast<std::ptrdiff_t>(dim),
            scratch.begin() + static_cast<std::ptrdiff_t>(padded_dim), 0.0f);
  const std::span<float> stored =
      scratch.subspan(padded_dim, static_cast<std::size_t>(basis_.shape.dim));
  kernels.dot_rows({basis_.encode.data(), DType::f32, shape.config.key_dim,
                    static_cast<int>(shape.config.key_dim)},
                   nullptr, basis_.shape.dim, key.data(), 1, static_cast<std::int64_t>(padded_dim),
                   stored.data(), static_cast<std::int64_t>(padded_dim));
  scales_[at] = encode_key(basis_.shape, kSketchLevels, basis_.bands, stored, codes_.data(), place);
}

void HeadStore::compress(const LayerShape& shape, const Kernels& kernels,
                         std::span<const Positive16> odds, std::int64_t first_tokens,
                         std::span<const std::uint32_t> drawn, const Clusters& clusters,
                         std::span<float> scratch) noexcept {
  const std::int64_t begin = compressed_;
  const std::int64_t end = begin + static_cast<std::int64_t>(odds.size());
  const std::size_t padded = static_cast<std::size_t>(round_up(end, kSketchGroup));
  odds_.resize(padded);
  std::copy(odds.begin(), odds.end(), odds_.begin() + begin);

  if (has_codes(shape.sketch.kind)) {
    codes_.resize(bytes(code_storage_bytes(sketch(shape), end)));
    scales_.resize(padded);
    if (begin == 0) {
      // Any centre is allowed (softmax does not see it), so it is fixed at the first compression.
      channel_means_.assign(static_cast<std::size_t>(shape.config.key_dim), 0.0f);
      column_means(host_keys(shape), first_tokens, channel_means_);
    }
    for (std::int64_t i = begin; i < end; ++i) encode(shape, kernels, i, scratch);
  }

  if (shape.clusters) {
    const std::size_t row = bytes(shape.config.value_dim) * size_bytes(shape.storage);
    const std::size_t count = bytes(clusters_of(end));
    centroids_.resize(count * row);
    std::copy(clusters.centroids.begin(), clusters.centroids.end(),
              centroids_.end() - static_cast<std::ptrdiff_t>(clusters.centroids.size()));
    spreads_.resize(count);
    std::copy(clusters.spread.begin(), clusters.spread.end(),
              spreads_.end() - static_cast<std::ptrdiff_t>(clusters.spread.size()));
  }

  keep_drawn(shape, drawn, end);
  // A fast tier that holds on to the memory of the prefill has saved nothing.
  const std::size_t room = bytes(spare());
  const std::size_t element = size_bytes(shape.storage);
  shrink(resident_key_, room * bytes(shape.config.key_dim) * element);
  shrink(resident_value_, room * bytes(shape.config.value_dim) * element);
  shrink(resident_place_, room);
  scores_.drop_front(end - begin, spare());
  compressed_ = end;
}

void HeadStore::copy_row(const LayerShape& shape, std::uint32_t position, std::byte* key,
                         std::byte* value) const noexcept {
  const std::size_t key_bytes = bytes(shape.config.key_dim) * size_bytes(shape.storage);
  const std::size_t value_bytes = bytes(shape.config.value_dim) * size_bytes(shape.storage);
  const std::byte* row = host_.data() + position * (key_bytes + value_bytes);
  std::memcpy(key, row, key_bytes);
  std::memcpy(value, row + key_bytes, value_bytes);
}

// The window's rows follow the drawn ones. Its first (end - compressed_) leave; the rest moves up
// to make place for those that are drawn of them, which come back by place.
void HeadStore::keep_drawn(const LayerShape& shape, std::span<const std::uint32_t> drawn,
                           std::int64_t end) noexcept {
  const std::size_t key_bytes = bytes(shape.config.key_dim) * size_bytes(shape.storage);
  const std::size_t value_bytes = bytes(shape.config.value_dim) * size_bytes(shape.storage);
  const std::size_t kept = static_cast<std::size_t>(drawn_residents_);
  const std::size_t from = kept + static_cast<std::size_t>(end - compressed_);
  const std::size_t window = resident_place_.size() - from;
  const std::size_t to = kept + drawn.size();
  std::memmove(resident_key_.data() + to * key_bytes, resident_key_.data() + from * key_bytes,
               window * key_bytes);
  std::memmove(resident_value_.data() + to * value_bytes,
               resident_value_.data() + from * value_bytes, window * value_bytes);
  std::copy_n(resident_place_.begin() + static_cast<std::ptrdiff_t>(from), window,
              resident_place_.begin() + static_cast<std::ptrdiff_t>(to));
  for (std::size_t k = 0; k < drawn.size(); ++k) {
    const std::size_t slot = kept + k;
    resident_place_[slot] = drawn[k];
    copy_row(shape, order_.position[drawn[k]], resident_key_.data() + slot * key_bytes,
             resident_value_.data() + slot * value_bytes);
  }
  resident_key_.resize((to + window) * key_bytes);
  resident_value_.resize((to + window) * value_bytes);
  resident_place_.resize(to + window);
  drawn_residents_ = static_cast<std::int64_t>(to);
}

HeadStore::Residents HeadStore::redraw(const LayerShape& shape,
                                       std::span<const std::uint32_t> drawn) const {
  Residents result;
  const std::size_t room = drawn.size() + bytes(tokens_ - compressed_ + spare());
  result.place.reserve(room);
  result.place.assign(drawn.begin(), drawn.end());
  result.drawn = static_cast<std::int64_t>(drawn.size());
  for (std::int64_t i = compressed_; i < tokens_; ++i)
    result.place.push_back(static_cast<std::uint32_t>(i));

  const std::size_t key_bytes = bytes(shape.config.key_dim) * size_bytes(shape.storage);
  const std::size_t value_bytes = bytes(shape.config.value_dim) * size_bytes(shape.storage);
  result.key.reserve(room * key_bytes);
  result.value.reserve(room * value_bytes);
  result.key.resize(result.place.size() * key_bytes);
  result.value.resize(result.place.size() * value_bytes);
  for (std::size_t slot = 0; slot < result.place.size(); ++slot) {
    const std::uint32_t place = result.place[slot];
    copy_row(shape, slot < drawn.size() ? order_.position[place] : place,
             result.key.data() + slot * key_bytes, result.value.data() + slot * value_bytes);
  }
  return result;
}

void HeadStore::take(Residents&& residents) noexcept {
  resident_key_ = std::move(residents.key);
  resident_value_ = std::move(residents.value);
  resident_place_ = std::move(residents.place);
  drawn_residents_ = residents.drawn;
}

void HeadStore::add_memory(const LayerShape& shape, MemoryReport& report) const {
  const auto used = [](const auto& vector) {
    return static_cast<std::int64_t>(vector.size() * sizeof(vector[0]));
  };
  const auto unused = [&report](const auto& vector) {
    report.reserved_bytes +=
        static_cast<std::int64_t>((vector.capacity() - vector.size()) * sizeof(vector[0]));
  };
  report.host_bytes += tokens_ * shape.row_bytes();
  report.resident_bytes += used(resident_key_) + used(resident_value_);
  report.sketch_bytes += used(codes_) + used(scales_) + used(channel_means_) + used(basis_.query) +
                         used(centroids_) + used(spreads_);
  report.basis_bytes += used(basis_.encode) + order_.bytes();
  report.metadata_bytes += used(resident_place_) + used(odds_) + scores_.bytes();
  report.reserved_bytes += scores_.spare_bytes();
  unused(host_);
  unused(resident_key_);
  unused(resident_value_);
  unused(resident_place_);
  unused(codes_);
  unused(scales_);
  unused(odds_);
  unused(centroids_);
  unused(spreads_);
  unused(order_.position);
  unused(order_.walk_end);
}

}  // namespace verkv::cpu
