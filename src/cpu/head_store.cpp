#include "cpu/head_store.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include <verkv/clusters.hpp>

#include "window_score.hpp"

namespace verkv::cpu {
namespace {

std::size_t bytes(std::int64_t n) { return static_cast<std::size_t>(n); }

// A sketch's pages are allocated for a quarter of what is there, so that a long decode does not cut
// it into many pieces. A guess: kernels start over at each piece.
constexpr std::int64_t kSketchGrowth = 4;

template <class T>
PagedRows by_place(const TierMemory* memory) {
  return {kPlaceShift, sizeof(T), memory, kSketchGroup, kSketchGrowth};
}

template <class T>
void write(PagedRows& rows, std::int64_t from, std::span<const T> values) {
  for (const T& x : values) std::memcpy(rows.row(from++), &x, sizeof x);
}

std::int64_t used_bytes(const auto& vector) {
  return static_cast<std::int64_t>(vector.size() * sizeof(vector[0]));
}

}  // namespace

Window::Window(const LayerShape& shape)
    : key(kPageShift, shape.key_bytes(), shape.fast),
      value(kPageShift, shape.own_value_bytes(), shape.fast) {}

Window Window::fork() {
  Window result(*this);
  result.key = key.fork();
  result.value = value.fork();
  return result;
}

Drawn::Drawn(const LayerShape& shape)
    : key(kPageShift, shape.key_bytes(), shape.fast),
      value(kPageShift, shape.own_value_bytes(), shape.fast),
      place(kPageShift, sizeof(std::uint32_t), shape.fast) {}

Drawn Drawn::fork() {
  Drawn result(*this);
  result.key = key.fork();
  result.value = value.fork();
  result.place = place.fork();
  return result;
}

HeadBasis::HeadBasis(const LayerShape& shape, const SketchShape& codes) : HeadBasis(shape.fast) {
  if (!has_codes(shape.sketch.kind)) return;
  channel_means.resize(bytes(shape.config.key_dim));
  query.resize(bytes(codes.dim * shape.config.key_dim));
}

std::int64_t HeadBasis::fast_bytes() const { return used_bytes(query) + used_bytes(channel_means); }

std::int64_t HeadBasis::main_bytes() const {
  return used_bytes(sketch.encode) + used_bytes(directions.key) + used_bytes(directions.value);
}

Sketched::Sketched(const LayerShape& shape, const SketchShape& form)
    : codes(kPlaceShift - 4, code_storage_bytes(form, kSketchGroup), shape.fast, 1, kSketchGrowth),
      scale(by_place<Positive16>(shape.fast)),
      odds(by_place<Positive16>(shape.fast)),
      centroid(kPageShift, shape.value_bytes(), shape.fast),
      spread(kPageShift, sizeof(Positive16), shape.fast),
      position(by_place<std::uint32_t>(nullptr)),
      drawn(shape) {
  static_assert(kSketchGroup == 1 << 4);
}

std::unique_ptr<Sketched> Sketched::fork() {
  auto result = std::make_unique<Sketched>(*this);
  result->codes = codes.fork();
  result->scale = scale.fork();
  result->odds = odds.fork();
  result->centroid = centroid.fork();
  result->spread = spread.fork();
  result->position = position.fork();
  result->drawn = drawn.fork();
  return result;
}

HeadStore::HeadStore(const LayerShape& shape, std::shared_ptr<EngineRows> engine, std::int64_t head)
    : sliding_(shape.config.window.value_or(0)),
      host_(shape, std::move(engine), head),
      window_(shape),
      scores_(shape.fast) {}

Rows HeadStore::window_values(const LayerShape& shape, std::int64_t begin) const {
  if (!host_.is_engine()) return values_of(shape, window_, begin);
  Rows rows = host_.values(shape);
  rows.first = compressed_ + begin;
  return rows;
}

Rows HeadStore::centroids(const LayerShape& shape) const {
  const PagedRows& rows = sketched_->centroid;
  return {nullptr,
          shape.storage,
          shape.config.value_dim,
          static_cast<int>(shape.config.value_dim),
          rows.pages(),
          rows.first(),
          0};
}

HeadOrder HeadStore::order() const {
  HeadOrder result;
  if (!sketched_) return result;
  result.directions = basis().directions;
  for (std::int64_t i = 0; i < compressed_; ++i) result.position.push_back(position(i));
  result.walk_end = sketched_->walk_end;
  return result;
}

std::vector<Positive16> HeadStore::all_odds() const {
  std::vector<Positive16> result;
  for (std::int64_t i = 0; i < compressed_; ++i) result.push_back(*odds(i));
  return result;
}

void HeadStore::reserve_append(std::int64_t count, bool scores) {
  if (!host_.is_engine()) {
    window_.key.reserve_more(count);
    window_.value.reserve_more(count);
  }
  if (sliding_ == 0) {
    host_.reserve_more(count);
    scores_.reserve(count, scores);
  }
  room_ = tokens() + count;
}

TierBytes HeadStore::bytes_to_append(std::int64_t count, bool scores) const {
  TierBytes more;
  if (sliding_ == 0) more = {host_.bytes_for_more(count), scores_.bytes_to_reserve(count, scores)};
  if (!host_.is_engine())
    more.fast += window_.key.bytes_for_more(count) + window_.value.bytes_for_more(count);
  return more;
}

bool HeadStore::has_room(std::int64_t count, bool scores) const {
  return count <= spare() &&
         (sliding_ > 0 || (scores_.has_room(count, scores) && host_.has_room(count))) &&
         (host_.is_engine() || (window_.key.has_room(count) && window_.value.has_room(count)));
}

void HeadStore::append(const LayerShape& shape, const Kernels& kernels, const TensorView& keys,
                       const TensorView& values, std::int64_t head, bool scores) noexcept {
  if (sliding_ > 0) return append_sliding(shape, kernels, keys, values, head);
  const std::int64_t before = tokens();
  scores_.append(keys.tokens, scores);
  if (host_.is_file()) {
    host_.truncate(before + keys.tokens);
  } else {
    host_.append(shape, kernels, keys, values, head);
  }
  if (host_.is_engine()) return;
  const std::int64_t window = window_.key.size();
  window_.key.resize(window + keys.tokens);
  window_.value.resize(window + keys.tokens);
  if (host_.is_file()) return;
  const std::size_t value_bytes = bytes(shape.own_value_bytes());
  for (std::int64_t t = 0; t < keys.tokens; ++t) {
    std::memcpy(window_.key.row(window + t), host_.key(before + t), bytes(shape.key_bytes()));
    std::memcpy(window_.value.row(window + t), host_.value(before + t), value_bytes);
  }
}

void HeadStore::truncate(std::int64_t tokens) noexcept {
  if (sliding_ > 0) return truncate_sliding(tokens);
  host_.truncate(tokens);
  scores_.truncate(tokens - compressed_);
  if (host_.is_engine()) return;
  window_.key.resize(tokens - compressed_);
  window_.value.resize(tokens - compressed_);
}

HeadRows HeadStore::rows(const LayerShape& shape) const {
  HeadRows result{keys_to_compress(shape), values_to_compress(shape), nullptr, {}, {}, {}};
  if (!sketched_) return result;
  result.directions = &basis().directions;
  // The places of a cluster lie in one page.
  const std::int64_t open = shape.clusters ? compressed_ % kClusterTokens : 0;
  if (open == 0) return result;
  const std::int64_t first = compressed_ - open;
  result.positions = {positions(first), bytes(open)};
  result.open_odds = {odds(first), bytes(open)};
  if (!host_.is_file()) return result;
  result.open_values.resize(bytes(open * shape.value_bytes()));
  for (std::int64_t i = 0; i < open; ++i)
    host_.copy(position(first + i), nullptr, &result.open_values[bytes(i * shape.value_bytes())]);
  return result;
}

void HeadStore::reserve_sketch(const LayerShape& shape, const SketchShape& codes,
                               const HeadCompression& head) {
  const std::int64_t begin = compressed_;
  const std::int64_t end = head.end();
  const std::int64_t padded = round_up(end, kSketchGroup);
  // What a compression that failed has left may have codes of another form.
  if (begin == 0) {
    auto made = std::make_unique<Sketched>(shape, codes);
    made->basis = std::make_shared<HeadBasis>(shape, codes);
    sketched_ = std::move(made);
  }
  Sketched& s = *sketched_;
  s.odds.reserve(begin, padded);
  s.position.reserve(begin, end);
  if (s.walk_end.capacity() < s.walk_end.size() + head.order.walk_end.size())
    s.walk_end.reserve((s.walk_end.size() + head.order.walk_end.size()) * 3 / 2);
  if (has_codes(shape.sketch.kind)) {
    s.codes.reserve(begin / kSketchGroup, padded / kSketchGroup);
    s.scale.reserve(begin, padded);
  }
  if (shape.clusters) {
    s.centroid.reserve(begin / kClusterTokens, clusters_of(end));
    s.spread.reserve(begin / kClusterTokens, clusters_of(end));
  }
  const std::int64_t drawn = static_cast<std::int64_t>(head.drawn.size());
  s.drawn.key.reserve_more(drawn);
  s.drawn.value.reserve_more(drawn);
  s.drawn.place.reserve_more(drawn);
}

std::optional<Window> HeadStore::rest_of_window(const LayerShape& shape,
                                                const HeadCompression& head,
                                                std::int64_t spare) const {
  if (host_.is_engine()) return std::nullopt;
  // A fast tier that holds on to the memory of the prefill has saved nothing.
  const std::int64_t gone = head.end() - compressed_;
  if (gone < window_.key.size() && !window_.key.holds_on(gone)) return std::nullopt;
  Window rest(shape);
  rest.key = window_.key.copy_from(gone, spare);
  rest.value = window_.value.copy_from(gone, spare);
  return rest;
}

std::optional<Window> HeadStore::reserve_compress(const LayerShape& shape, const SketchShape& codes,
                                                  const HeadCompression& head, std::int64_t spare) {
  reserve_sketch(shape, codes, head);
  return rest_of_window(shape, head, spare);
}

std::int64_t HeadStore::bytes_to_compress(const LayerShape& shape, const SketchShape& codes,
                                          const HeadCompression& head, std::int64_t spare) const {
  const std::int64_t begin = compressed_;
  const std::int64_t end = head.end();
  const std::int64_t padded = round_up(end, kSketchGroup);
  const Sketched fresh(shape, codes);
  const Sketched& s = begin == 0 ? fresh : *sketched_;
  const std::int64_t drawn = static_cast<std::int64_t>(head.drawn.size());
  std::int64_t sum = s.odds.bytes_to_reserve(begin, padded) + s.drawn.key.bytes_for_more(drawn) +
                     s.drawn.value.bytes_for_more(drawn) + s.drawn.place.bytes_for_more(drawn);
  if (has_codes(shape.sketch.kind)) {
    sum += s.codes.bytes_to_reserve(begin / kSketchGroup, padded / kSketchGroup) +
           s.scale.bytes_to_reserve(begin, padded);
    if (begin == 0)
      sum += shape.config.key_dim *
             static_cast<std::int64_t>(sizeof(float) +
                                       static_cast<std::size_t>(codes.dim) * sizeof(Half));
  }
  if (shape.clusters) {
    sum += s.centroid.bytes_to_reserve(begin / kClusterTokens, clusters_of(end)) +
           s.spread.bytes_to_reserve(begin / kClusterTokens, clusters_of(end));
  }
  const std::int64_t gone = end - begin;
  if (host_.is_engine()) return sum;
  if (gone < window_.key.size() && !window_.key.holds_on(gone)) return sum;
  const Window rest(shape);
  const std::int64_t left = window_.key.size() - gone + spare;
  return sum + rest.key.bytes_for_more(left) + rest.value.bytes_for_more(left);
}

void HeadStore::encode_place(const LayerShape& shape, const Kernels& kernels, std::int64_t place,
                             const Rows& keys, std::int64_t row,
                             std::span<float> scratch) noexcept {
  const SketchBasis& sketch = basis().sketch;
  const std::span<const float> mean = basis().channel_means;
  const std::size_t dim = bytes(shape.config.key_dim);
  const std::size_t padded_dim = bytes(round_up(shape.config.key_dim, kLanes));
  const std::span<float> key = scratch.first(dim);
  with_element(keys.type, [&](auto zero) {
    kernels.convert(row_of<decltype(zero)>(keys, row), keys.type, key.data(), DType::f32,
                    shape.config.key_dim);
  });
  for (std::size_t j = 0; j < dim; ++j) key[j] -= mean[j];
  std::fill(scratch.begin() + static_cast<std::ptrdiff_t>(dim),
            scratch.begin() + static_cast<std::ptrdiff_t>(padded_dim), 0.0f);
  const std::span<float> stored = scratch.subspan(padded_dim, bytes(sketch.shape.dim));
  kernels.dot_rows({sketch.encode.data(), DType::f32, shape.config.key_dim,
                    static_cast<int>(shape.config.key_dim)},
                   nullptr, sketch.shape.dim, key.data(), 1, static_cast<std::int64_t>(padded_dim),
                   stored.data(), static_cast<std::int64_t>(padded_dim));
  auto* const group = reinterpret_cast<std::uint8_t*>(sketched_->codes.row(place / kSketchGroup));
  const Positive16 scale =
      kernels.encode_key(sketch.shape, sketch.bands, stored.data(), group, place % kSketchGroup);
  std::memcpy(sketched_->scale.row(place), &scale, sizeof scale);
}

void HeadStore::encode(const LayerShape& shape, const Kernels& kernels, HeadCompression& head,
                       std::span<float> scratch) noexcept {
  Sketched& s = *sketched_;
  const std::int64_t begin = compressed_;
  const std::int64_t end = head.end();
  const std::int64_t padded = round_up(end, kSketchGroup);
  if (begin == 0) {
    std::copy(head.basis.query.begin(), head.basis.query.end(), s.basis->query.begin());
    s.basis->sketch = std::move(head.basis);
    s.basis->sketch.query = {};
    s.basis->directions = std::move(head.order.directions);
  }
  write(s.position, begin, std::span<const std::uint32_t>(head.order.position));
  // Kernels read whole groups.
  const auto pad = [&](PagedRows& rows) {
    for (std::int64_t i = end; i < padded; ++i) std::memset(rows.row(i), 0, sizeof(Positive16));
  };
  pad(s.odds);
  write(s.odds, begin, std::span<const Positive16>(head.odds));
  if (!has_codes(shape.sketch.kind)) return;
  for (std::int64_t g = round_up(begin, kSketchGroup) / kSketchGroup; g < padded / kSketchGroup;
       ++g)
    std::memset(s.codes.row(g), 0, bytes(s.codes.row_bytes()));
  pad(s.scale);
  // Any centre is allowed (softmax does not see it), so it is fixed at the first compression.
  const Rows keys = keys_to_compress(shape);
  if (begin == 0) column_means(keys, head.first_tokens, s.basis->channel_means);
  for (std::int64_t i = begin; i < end; ++i)
    encode_place(shape, kernels, i, keys, position(i), scratch);
}

void HeadStore::apply(const LayerShape& shape, const HeadCompression& head,
                      std::optional<Window>&& window) noexcept {
  Sketched& s = *sketched_;
  const std::int64_t begin = compressed_;
  const std::int64_t end = head.end();
  const std::int64_t padded = round_up(end, kSketchGroup);
  s.position.resize(end);
  for (const std::uint32_t walk : head.order.walk_end)
    s.walk_end.push_back(static_cast<std::uint32_t>(begin) + walk);
  s.odds.resize(padded);
  if (has_codes(shape.sketch.kind)) {
    s.codes.resize(padded / kSketchGroup);
    s.scale.resize(padded);
  }
  if (shape.clusters) take_clusters(head.clusters, end);
  add_drawn(head.drawn, s.drawn);

  if (window) {
    window_ = std::move(*window);
  } else if (!host_.is_engine()) {
    window_.key.drop_front(end - begin);
    window_.value.drop_front(end - begin);
  }
  scores_.drop_front(end - begin, spare());
  compressed_ = end;
}

void HeadStore::compress(const LayerShape& shape, const Kernels& kernels, HeadCompression& head,
                         std::optional<Window>&& window, std::span<float> scratch) noexcept {
  encode(shape, kernels, head, scratch);
  apply(shape, head, std::move(window));
}

// The first of them may have begun before.
void HeadStore::take_clusters(const Clusters& clusters, std::int64_t end) noexcept {
  Sketched& s = *sketched_;
  const std::int64_t count = clusters_of(end);
  const std::int64_t first = count - static_cast<std::int64_t>(clusters.spread.size());
  s.centroid.resize(count);
  s.spread.resize(count);
  write(s.spread, first, std::span<const Positive16>(clusters.spread));
  const std::size_t row = bytes(s.centroid.row_bytes());
  for (std::size_t c = 0; c < clusters.spread.size(); ++c) {
    std::memcpy(s.centroid.row(first + static_cast<std::int64_t>(c)),
                clusters.centroids.data() + c * row, row);
  }
}

// Their rows come from the host tier; where that is a file, those of the window from there.
void HeadStore::add_drawn(std::span<const std::uint32_t> places, Drawn& drawn) const {
  const std::int64_t before = drawn.size();
  const std::int64_t after = before + static_cast<std::int64_t>(places.size());
  drawn.key.resize(after);
  drawn.value.resize(after);
  drawn.place.resize(after);
  write(drawn.place, before, places);
  for (std::int64_t slot = before; slot < after; ++slot) {
    copy_row(position(drawn.place_of(slot)), drawn.key.row(slot), drawn.value.row(slot));
  }
}

Drawn HeadStore::redraw(const LayerShape& shape, std::span<const std::uint32_t> places) const {
  Drawn result(shape);
  const std::int64_t count = static_cast<std::int64_t>(places.size());
  result.key.reserve_more(count);
  result.value.reserve_more(count);
  result.place.reserve_more(count);
  if (sketched_) add_drawn(places, result);
  return result;
}

void HeadStore::take(Drawn&& drawn) noexcept {
  if (sketched_) sketched_->drawn = std::move(drawn);
}

HeadStore HeadStore::fork() {
  HeadStore result(host_.fork(), window_.fork());
  result.sliding_ = sliding_;
  result.left_ = left_;
  result.compressed_ = compressed_;
  result.scores_ = scores_;
  result.room_ = tokens();
  if (compressed_ > 0) result.sketched_ = sketched_->fork();
  return result;
}

std::int64_t HeadStore::changed_row() const {
  std::int64_t first = -1;
  if (!sketched_) return first;
  const Drawn& drawn = sketched_->drawn;
  std::vector<std::byte> key(bytes(drawn.key.row_bytes()));
  std::vector<std::byte> value(bytes(drawn.value.row_bytes()));
  drawn.each_place([&](std::int64_t slot, std::uint32_t place) {
    const std::int64_t at = position(place);
    if (first >= 0 && at > first) return;
    host_.copy(at, key.data(), value.data());
    if (std::memcmp(drawn.key.row(slot), key.data(), key.size()) != 0 ||
        std::memcmp(drawn.value.row(slot), value.data(), value.size()) != 0)
      first = at;
  });
  return first;
}

void HeadStore::add_memory(MemoryReport& report, bool exclusive) const {
  // spare: which of the reserved bytes are spare rows; null: those of main memory.
  const auto add = [&](std::int64_t& to, const PagedRows& rows,
                       std::int64_t MemoryReport::*spare = &MemoryReport::fast_reserved_bytes) {
    const RowBytes held = exclusive ? rows.exclusive_bytes() : rows.bytes();
    to += held.used;
    report.reserved_bytes += held.spare + held.tables;
    if (spare != nullptr) report.*spare += held.spare;
  };
  const auto reserve = [&](std::int64_t bytes) {
    report.reserved_bytes += bytes;
    report.fast_reserved_bytes += bytes;
  };
  report.reserved_bytes += static_cast<std::int64_t>(sizeof *this);
  host_.add_memory(report, exclusive);
  add(report.resident_bytes, window_.key);
  add(report.resident_bytes, window_.value);
  report.metadata_bytes += scores_.bytes();
  reserve(scores_.spare_bytes());
  if (!sketched_) return;
  const Sketched& s = *sketched_;
  report.reserved_bytes += static_cast<std::int64_t>(sizeof s);
  add(report.resident_bytes, s.drawn.key);
  add(report.resident_bytes, s.drawn.value);
  add(report.metadata_bytes, s.drawn.place);
  add(report.metadata_bytes, s.odds);
  add(report.sketch_bytes, s.codes);
  add(report.sketch_bytes, s.scale);
  add(report.sketch_bytes, s.centroid);
  add(report.sketch_bytes, s.spread);
  add(report.basis_bytes, s.position, nullptr);
  report.basis_bytes += used_bytes(s.walk_end);
  report.reserved_bytes += static_cast<std::int64_t>((s.walk_end.capacity() - s.walk_end.size()) *
                                                     sizeof(std::uint32_t));
  if (exclusive && s.basis.use_count() > 1) return;
  // Of a first compression that failed, nothing counts yet.
  if (compressed_ > 0) {
    report.sketch_bytes += s.basis->fast_bytes();
  } else {
    reserve(s.basis->fast_bytes());
  }
  report.basis_bytes += s.basis->main_bytes();
}

}  // namespace verkv::cpu
