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

std::int64_t key_bytes(const LayerShape& shape) {
  return shape.config.key_dim * static_cast<std::int64_t>(size_bytes(shape.storage));
}
std::int64_t value_bytes(const LayerShape& shape) {
  return shape.config.value_dim * static_cast<std::int64_t>(size_bytes(shape.storage));
}

// A sketch's pages are allocated for a quarter of what is there, so that a long decode does not cut
// it into many pieces. A guess: kernels start over at each piece.
constexpr std::int64_t kSketchGrowth = 4;

template <class T>
PagedRows by_place() {
  return {kPlaceShift, sizeof(T), kSketchGroup, kSketchGrowth};
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
    : key(kPageShift, key_bytes(shape)), value(kPageShift, value_bytes(shape)) {}

Window Window::fork() {
  Window result(*this);
  result.key = key.fork();
  result.value = value.fork();
  return result;
}

Drawn::Drawn(const LayerShape& shape)
    : key(kPageShift, key_bytes(shape)),
      value(kPageShift, value_bytes(shape)),
      place(kPageShift, sizeof(std::uint32_t)) {}

Drawn Drawn::fork() {
  Drawn result(*this);
  result.key = key.fork();
  result.value = value.fork();
  result.place = place.fork();
  return result;
}

std::int64_t HeadBasis::fast_bytes() const {
  return used_bytes(sketch.query) + used_bytes(channel_means);
}

std::int64_t HeadBasis::main_bytes() const {
  return used_bytes(sketch.encode) + used_bytes(directions.key) + used_bytes(directions.value);
}

Sketched::Sketched(const LayerShape& shape, const SketchShape& form)
    : codes(kPlaceShift - 4, code_storage_bytes(form, kSketchGroup), 1, kSketchGrowth),
      scale(by_place<Positive16>()),
      odds(by_place<Positive16>()),
      centroid(kPageShift, value_bytes(shape)),
      spread(kPageShift, sizeof(Positive16)),
      position(by_place<std::uint32_t>()),
      drawn(shape),
      basis(std::make_shared<HeadBasis>()) {
  static_assert(kSketchGroup == 1 << 4);
  if (has_codes(shape.sketch.kind)) basis->channel_means.resize(bytes(shape.config.key_dim));
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

HeadStore::HeadStore(const LayerShape& shape)
    : host_(kPageShift, shape.row_bytes()), window_(shape) {}

Rows HeadStore::host_keys(const LayerShape& shape) const {
  return {nullptr,
          shape.storage,
          shape.row_elements(),
          static_cast<int>(shape.config.key_dim),
          host_.pages(),
          host_.first(),
          0};
}

Rows HeadStore::host_values(const LayerShape& shape) const {
  return {
      nullptr,       shape.storage, shape.row_elements(), static_cast<int>(shape.config.value_dim),
      host_.pages(), host_.first(), shape.config.key_dim};
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
  host_.reserve_more(count);
  window_.key.reserve_more(count);
  window_.value.reserve_more(count);
  scores_.reserve(count, scores);
  room_ = tokens() + count;
}

bool HeadStore::has_room(std::int64_t count, bool scores) const {
  return count <= spare() && scores_.has_room(count, scores) && host_.has_room(count) &&
         window_.key.has_room(count) && window_.value.has_room(count);
}

void HeadStore::append(const LayerShape& shape, const Kernels& kernels, const TensorView& keys,
                       const TensorView& values, std::int64_t head, bool scores) noexcept {
  const std::size_t key = bytes(key_bytes(shape));
  const std::size_t value = bytes(value_bytes(shape));
  const std::int64_t before = tokens();
  const std::int64_t window = window_.key.size();
  host_.resize(before + keys.tokens);
  window_.key.resize(window + keys.tokens);
  window_.value.resize(window + keys.tokens);
  for (std::int64_t t = 0; t < keys.tokens; ++t) {
    std::byte* const row = host_.row(before + t);
    kernels.convert(keys.row(t, head), keys.type, row, shape.storage, keys.dim);
    kernels.convert(values.row(t, head), values.type, row + key, shape.storage, values.dim);
    std::memcpy(window_.key.row(window + t), row, key);
    std::memcpy(window_.value.row(window + t), row + key, value);
  }
  scores_.append(keys.tokens, scores);
}

void HeadStore::truncate(std::int64_t tokens) noexcept {
  host_.resize(tokens);
  window_.key.resize(tokens - compressed_);
  window_.value.resize(tokens - compressed_);
  scores_.truncate(tokens - compressed_);
}

HeadRows HeadStore::rows(const LayerShape& shape) const {
  HeadRows result{host_keys(shape), host_values(shape), nullptr, {}, {}};
  if (!sketched_) return result;
  result.directions = &basis().directions;
  // The places of a cluster lie in one page.
  const std::int64_t open = shape.clusters ? compressed_ % kClusterTokens : 0;
  if (open == 0) return result;
  const std::int64_t first = compressed_ - open;
  result.positions = {positions(first), bytes(open)};
  result.open_odds = {odds(first), bytes(open)};
  return result;
}

void HeadStore::reserve_sketch(const LayerShape& shape, const SketchShape& codes,
                               const HeadCompression& head) {
  const std::int64_t begin = compressed_;
  const std::int64_t end = head.end();
  const std::int64_t padded = round_up(end, kSketchGroup);
  // What a compression that failed has left may have codes of another form.
  if (begin == 0) sketched_ = std::make_unique<Sketched>(shape, codes);
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

void HeadStore::encode_place(const LayerShape& shape, const Kernels& kernels, std::int64_t place,
                             std::span<float> scratch) noexcept {
  const Rows keys = host_keys(shape);
  const SketchBasis& sketch = basis().sketch;
  const std::span<const float> mean = basis().channel_means;
  const std::size_t dim = bytes(shape.config.key_dim);
  const std::size_t padded_dim = bytes(round_up(shape.config.key_dim, kLanes));
  const std::span<float> key = scratch.first(dim);
  for (std::size_t j = 0; j < dim; ++j)
    key[j] = load_element(keys, position(place), static_cast<std::int64_t>(j));
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
      encode_key(sketch.shape, kSketchLevels, sketch.bands, stored, group, place % kSketchGroup);
  std::memcpy(sketched_->scale.row(place), &scale, sizeof scale);
}

void HeadStore::encode(const LayerShape& shape, const Kernels& kernels, HeadCompression& head,
                       std::span<float> scratch) noexcept {
  Sketched& s = *sketched_;
  const std::int64_t begin = compressed_;
  const std::int64_t end = head.end();
  const std::int64_t padded = round_up(end, kSketchGroup);
  if (begin == 0) {
    s.basis->sketch = std::move(head.basis);
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
  if (begin == 0) column_means(host_keys(shape), head.first_tokens, s.basis->channel_means);
  for (std::int64_t i = begin; i < end; ++i) encode_place(shape, kernels, i, scratch);
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
  add_drawn(shape, head.drawn, s.drawn);

  if (window) {
    window_ = std::move(*window);
  } else {
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

// Their rows come from the host tier.
void HeadStore::add_drawn(const LayerShape& shape, std::span<const std::uint32_t> places,
                          Drawn& drawn) const noexcept {
  const std::size_t key = bytes(key_bytes(shape));
  const std::size_t value = bytes(value_bytes(shape));
  const std::int64_t before = drawn.size();
  const std::int64_t after = before + static_cast<std::int64_t>(places.size());
  drawn.key.resize(after);
  drawn.value.resize(after);
  drawn.place.resize(after);
  write(drawn.place, before, places);
  for (std::int64_t slot = before; slot < after; ++slot) {
    const std::byte* const row = host_.row(position(drawn.place_of(slot)));
    std::memcpy(drawn.key.row(slot), row, key);
    std::memcpy(drawn.value.row(slot), row + key, value);
  }
}

Drawn HeadStore::redraw(const LayerShape& shape, std::span<const std::uint32_t> places) const {
  Drawn result(shape);
  const std::int64_t count = static_cast<std::int64_t>(places.size());
  result.key.reserve_more(count);
  result.value.reserve_more(count);
  result.place.reserve_more(count);
  if (sketched_) add_drawn(shape, places, result);
  return result;
}

void HeadStore::take(Drawn&& drawn) noexcept {
  if (sketched_) sketched_->drawn = std::move(drawn);
}

HeadStore HeadStore::fork() {
  HeadStore result(host_.fork(), window_.fork());
  result.compressed_ = compressed_;
  result.scores_ = scores_;
  result.room_ = tokens();
  if (compressed_ > 0) result.sketched_ = sketched_->fork();
  return result;
}

void HeadStore::add_memory(MemoryReport& report, bool exclusive) const {
  const auto add = [&](std::int64_t& to, const PagedRows& rows) {
    const RowBytes held = exclusive ? rows.exclusive_bytes() : rows.bytes();
    to += held.used;
    report.reserved_bytes += held.spare;
  };
  report.reserved_bytes += static_cast<std::int64_t>(sizeof *this);
  add(report.host_bytes, host_);
  add(report.resident_bytes, window_.key);
  add(report.resident_bytes, window_.value);
  report.metadata_bytes += scores_.bytes();
  report.reserved_bytes += scores_.spare_bytes();
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
  add(report.basis_bytes, s.position);
  report.basis_bytes += used_bytes(s.walk_end);
  report.reserved_bytes += static_cast<std::int64_t>((s.walk_end.capacity() - s.walk_end.size()) *
                                                     sizeof(std::uint32_t));
  if (exclusive && s.basis.use_count() > 1) return;
  // Of a first compression that failed, nothing counts yet.
  (compressed_ > 0 ? report.sketch_bytes : report.reserved_bytes) += s.basis->fast_bytes();
  report.basis_bytes += s.basis->main_bytes();
}

}  // namespace verkv::cpu
