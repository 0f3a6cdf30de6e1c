// A KV head as a saved sequence has it: rows of the host tier, scores of the local window, and what
// compression made. Residents are copies of rows, and are made of them again.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <verkv/clusters.hpp>

#include "cpu/head_store.hpp"
#include "saved_bytes.hpp"

namespace verkv::cpu {
namespace {

// Rows that are read at a time, so that a file which lies about its length is refused where it ends,
// and not for want of memory.
constexpr std::int64_t kRowsAtOnce = 4096;
constexpr std::int64_t kMaxTokens = (std::int64_t{1} << 32) - 1;

void put_rows(SavedWriter& writer, const PagedRows& rows) {
  each_run(rows, [&](std::int64_t first, std::int64_t count) {
    writer.put_bytes({rows.row(first), static_cast<std::size_t>(count * rows.row_bytes())});
  });
}

// Key and value of each token side by side, wherever they lie.
void put_rows(SavedWriter& writer, const LayerShape& shape, const HostRows& rows) {
  if (!rows.is_engine() && !rows.is_file()) return put_rows(writer, rows.own());
  const std::size_t key = static_cast<std::size_t>(shape.key_bytes());
  const std::size_t value = static_cast<std::size_t>(shape.value_bytes());
  std::vector<std::byte> block(static_cast<std::size_t>(kPageRows) * (key + value));
  for (std::int64_t i = 0; i < rows.size();) {
    std::byte* to = block.data();
    for (const std::int64_t end = std::min(rows.size(), i + kPageRows); i < end; ++i) {
      rows.copy(i, to, to + key);
      to += key + value;
    }
    writer.put_bytes({block.data(), to});
  }
}

void get_rows(SavedReader& reader, PagedRows& rows, std::int64_t count) {
  for (std::int64_t at = rows.size(); at < count;) {
    const std::int64_t end = std::min(count, at + kRowsAtOnce);
    rows.reserve(at, end);
    rows.resize(end);
    while (at < end) {
      const std::int64_t run = std::min(end, rows.run_end(at));
      reader.get_bytes({rows.row(at), static_cast<std::size_t>((run - at) * rows.row_bytes())});
      at = run;
    }
  }
}

// Numbers that a step could not compute with.
void check_finite(SavedReader& reader, std::span<const float> numbers) {
  if (!std::all_of(numbers.begin(), numbers.end(), [](float x) { return std::isfinite(x); }))
    reader.refuse("a number that is not finite");
}

void check_rows_finite(SavedReader& reader, const PagedRows& rows, DType type) {
  with_element(type, [&](auto zero) {
    using Element = decltype(zero);
    const std::int64_t count = rows.row_bytes() / static_cast<std::int64_t>(sizeof(Element));
    for (std::int64_t i = 0; i < rows.size(); ++i) {
      const auto* row = reinterpret_cast<const Element*>(rows.row(i));
      for (std::int64_t j = 0; j < count; ++j) {
        if (!std::isfinite(to_float(row[j]))) reader.refuse("a number that is not finite");
      }
    }
  });
}

// Into a file, of which they are not read again to be checked.
void get_rows(SavedReader& reader, const LayerShape& shape, HostRows& rows, std::int64_t count) {
  PagedRows block(kPageShift, shape.row_bytes());
  PagedRows keys(kPageShift, shape.key_bytes());
  PagedRows values(kPageShift, shape.value_bytes());
  for (PagedRows* one : {&block, &keys, &values}) one->reserve(0, kPageRows);
  for (std::int64_t at = 0; at < count;) {
    const std::int64_t here = std::min(kPageRows, count - at);
    for (PagedRows* one : {&block, &keys, &values}) one->resize(here);
    reader.get_bytes({block.row(0), static_cast<std::size_t>(here * block.row_bytes())});
    check_rows_finite(reader, block, shape.storage);
    for (std::int64_t i = 0; i < here; ++i) {
      std::memcpy(keys.row(i), block.row(i), static_cast<std::size_t>(keys.row_bytes()));
      std::memcpy(values.row(i), block.row(i) + keys.row_bytes(),
                  static_cast<std::size_t>(values.row_bytes()));
    }
    rows.reserve_more(here);
    rows.file().write(at, here, keys.row(0), values.row(0));
    at += here;
    rows.truncate(at);
  }
}

void check_positive16(SavedReader& reader, const PagedRows& rows, Positive16 most) {
  const std::int64_t count = rows.row_bytes() / static_cast<std::int64_t>(sizeof(Positive16));
  for (std::int64_t i = 0; i < rows.size(); ++i) {
    const auto* row = reinterpret_cast<const Positive16*>(rows.row(i));
    for (std::int64_t j = 0; j < count; ++j) {
      if (row[j].bits > most.bits) reader.refuse("a scale or odds that are no number");
    }
  }
}

template <class T>
std::vector<T> get_vector(SavedReader& reader, std::int64_t count) {
  std::vector<T> result;
  while (static_cast<std::int64_t>(result.size()) < count) {
    const std::size_t at = result.size();
    const std::int64_t left = count - static_cast<std::int64_t>(at);
    result.resize(at + static_cast<std::size_t>(std::min(left, 16 * kRowsAtOnce)));
    reader.get_all(std::span(result).subspan(at));
  }
  return result;
}

template <class T>
void get_into(SavedReader& reader, AlignedVector<T>& to, std::int64_t count) {
  const std::vector<T> numbers = get_vector<T>(reader, count);
  to.assign(numbers.begin(), numbers.end());
}

}  // namespace

void HeadStore::save(const LayerShape& shape, SavedWriter& writer) const {
  SavedCounts counts;
  counts.tokens = tokens();
  counts.compressed = compressed_;
  if (compressed_ > 0) {
    const HeadBasis& basis = *sketched_->basis;
    counts.drawn = sketched_->drawn.size();
    counts.walks = static_cast<std::int64_t>(sketched_->walk_end.size());
    counts.dim = basis.sketch.shape.dim;
    counts.fine = basis.sketch.shape.fine;
    counts.key_directions = static_cast<std::int64_t>(basis.directions.key.size());
    counts.value_directions = static_cast<std::int64_t>(basis.directions.value.size());
  }
  writer.put(counts);
  writer.end();
  if (sliding_ > 0) return save_sliding(writer);
  put_rows(writer, shape, host_);
  writer.end();
  scores_.save(writer);
  writer.end();
  if (compressed_ == 0) return;
  const Sketched& s = *sketched_;
  for (const PagedRows* rows :
       {&s.codes, &s.scale, &s.odds, &s.centroid, &s.spread, &s.position, &s.drawn.place})
    put_rows(writer, *rows);
  writer.put_all(std::span<const std::uint32_t>(s.walk_end));
  writer.end();
  const HeadBasis& basis = *s.basis;
  writer.put(basis.sketch.bands.fine_square);
  writer.put(basis.sketch.bands.coarse_square);
  writer.put(basis.sketch.unit);
  writer.put_all(std::span<const float>(basis.sketch.encode));
  writer.put_all(std::span<const Half>(basis.query));
  writer.put_all(std::span<const float>(basis.channel_means));
  writer.put_all(std::span<const float>(basis.directions.key));
  writer.put_all(std::span<const float>(basis.directions.value));
  writer.end();
}

namespace {

void check_counts(SavedReader& reader, const LayerShape& shape, const SavedCounts& c) {
  const auto in = [](std::int64_t x, std::int64_t most) { return x >= 0 && x <= most; };
  bool right = in(c.tokens, kMaxTokens) && in(c.compressed, c.tokens) &&
               in(c.drawn, c.compressed) && in(c.walks, c.compressed);
  if (c.compressed == 0) {
    right = right && c.dim == 0 && c.fine == 0 && c.key_directions == 0 && c.value_directions == 0;
  } else {
    const auto directions = [&](std::int64_t count, std::int64_t dim, std::int64_t most) {
      return in(count, dim * most) && count % dim == 0;
    };
    right = right && directions(c.key_directions, shape.config.key_dim, kOrderKeys) &&
            directions(c.value_directions, shape.config.value_dim, kOrderValues);
    if (has_codes(shape.sketch.kind)) {
      const SketchShape codes{shape.sketch.kind, static_cast<int>(c.dim), static_cast<int>(c.fine)};
      right = right && in(c.dim, shape.sketch.dim) && c.dim > 0 && in(c.fine, c.dim) &&
              (c.fine % kLanes == 0 || c.fine == c.dim) &&
              codes.code_bytes() <= shape.sketch.code_bytes();
    } else {
      right = right && c.dim == 0 && c.fine == 0;
    }
  }
  if (!right) reader.refuse("numbers of tokens or of coordinates that no head has");
}

std::shared_ptr<HeadBasis> get_basis(SavedReader& reader, const LayerShape& shape,
                                     const SavedCounts& counts) {
  auto basis = std::make_shared<HeadBasis>(shape.fast);
  const bool codes = has_codes(shape.sketch.kind);
  const std::int64_t numbers = counts.dim * shape.config.key_dim;
  if (codes) {
    basis->sketch.shape = {shape.sketch.kind, static_cast<int>(counts.dim),
                           static_cast<int>(counts.fine)};
  }
  basis->sketch.bands.fine_square = reader.get<float>();
  basis->sketch.bands.coarse_square = reader.get<float>();
  basis->sketch.unit = reader.get<float>();
  basis->sketch.encode = get_vector<float>(reader, numbers);
  get_into(reader, basis->query, numbers);
  get_into(reader, basis->channel_means, codes ? shape.config.key_dim : 0);
  basis->directions.key = get_vector<float>(reader, counts.key_directions);
  basis->directions.value = get_vector<float>(reader, counts.value_directions);
  reader.end();
  const std::array<float, 3> scales = {basis->sketch.bands.fine_square,
                                       basis->sketch.bands.coarse_square, basis->sketch.unit};
  check_finite(reader, scales);
  check_finite(reader, basis->sketch.encode);
  check_finite(reader, basis->channel_means);
  check_finite(reader, basis->directions.key);
  check_finite(reader, basis->directions.value);
  for (const Half x : basis->query) {
    const float number = to_float(x);
    check_finite(reader, std::span(&number, 1));
  }
  return basis;
}

// That places are a permutation of the compressed positions, that walks follow each other, and that
// of the places every one that is always resident is drawn, and none that never is.
void check_places(SavedReader& reader, const Sketched& sketched, std::int64_t compressed,
                  std::span<const std::uint32_t> drawn) {
  std::uint32_t before = 0;
  for (const std::uint32_t end : sketched.walk_end) {
    if (end <= before) reader.refuse("walks that do not follow each other");
    before = end;
  }
  if (before != compressed) reader.refuse("walks that do not follow each other");
  std::vector<bool> seen(static_cast<std::size_t>(compressed));
  std::size_t slot = 0;
  for (std::int64_t place = 0; place < compressed; ++place) {
    std::uint32_t position = 0;
    std::memcpy(&position, sketched.position.row(place), sizeof position);
    if (position >= compressed || seen[position]) reader.refuse("a position that is there twice");
    seen[position] = true;
    const bool is_drawn = slot < drawn.size() && drawn[slot] == static_cast<std::uint32_t>(place);
    slot += is_drawn;
    Positive16 odds;
    std::memcpy(&odds, sketched.odds.row(place), sizeof odds);
    if (odds.bits == (is_drawn ? 0 : kPositive16Infinity.bits))
      reader.refuse("residents that do not fit their odds");
  }
  if (slot != drawn.size()) reader.refuse("residents that are not in order");
}

}  // namespace

HeadStore HeadStore::restore(const LayerShape& shape, SavedReader& reader) {
  const auto counts = reader.get<SavedCounts>();
  reader.end();
  check_counts(reader, shape, counts);
  HeadStore head(shape);
  if (shape.config.window) {
    if (counts.compressed > 0) reader.refuse("a sliding window has no compressed tokens");
    head.restore_sliding(shape, reader, counts.tokens);
    return head;
  }
  if (head.host_.is_file()) {
    get_rows(reader, shape, head.host_, counts.tokens);
  } else {
    get_rows(reader, head.host_.own(), counts.tokens);
  }
  reader.end();
  if (!head.host_.is_file()) check_rows_finite(reader, head.host_.own(), shape.storage);
  head.compressed_ = counts.compressed;
  const std::int64_t window = counts.tokens - counts.compressed;
  head.scores_.restore(reader, window);
  reader.end();
  head.window_.key.reserve(0, window);
  head.window_.value.reserve(0, window);
  head.window_.key.resize(window);
  head.window_.value.resize(window);
  for (std::int64_t i = 0; i < window; ++i)
    head.host_.copy(counts.compressed + i, head.window_.key.row(i), head.window_.value.row(i));
  head.room_ = counts.tokens;
  if (counts.compressed > 0) head.restore_sketch(shape, reader, counts);
  return head;
}

void HeadStore::restore_sketch(const LayerShape& shape, SavedReader& reader,
                               const SavedCounts& counts) {
  const bool codes = has_codes(shape.sketch.kind);
  const SketchShape form = codes ? SketchShape{shape.sketch.kind, static_cast<int>(counts.dim),
                                               static_cast<int>(counts.fine)}
                                 : shape.sketch;
  sketched_ = std::make_unique<Sketched>(shape, form);
  Sketched& s = *sketched_;
  const std::int64_t padded = round_up(compressed_, kSketchGroup);
  get_rows(reader, s.codes, codes ? padded / kSketchGroup : 0);
  get_rows(reader, s.scale, codes ? padded : 0);
  get_rows(reader, s.odds, padded);
  get_rows(reader, s.centroid, shape.clusters ? clusters_of(compressed_) : 0);
  get_rows(reader, s.spread, shape.clusters ? clusters_of(compressed_) : 0);
  get_rows(reader, s.position, compressed_);
  const std::vector<std::uint32_t> drawn = get_vector<std::uint32_t>(reader, counts.drawn);
  s.walk_end = get_vector<std::uint32_t>(reader, counts.walks);
  reader.end();
  s.basis = get_basis(reader, shape, counts);
  const Positive16 largest{static_cast<std::uint16_t>(kPositive16Infinity.bits - 1)};
  check_positive16(reader, s.scale, largest);
  check_positive16(reader, s.odds, kPositive16Infinity);
  check_positive16(reader, s.spread, largest);
  check_rows_finite(reader, s.centroid, shape.storage);
  check_places(reader, s, compressed_, drawn);
  for (PagedRows* rows : {&s.drawn.key, &s.drawn.value, &s.drawn.place})
    rows->reserve(0, counts.drawn);
  add_drawn(drawn, s.drawn);
}

std::vector<HeadStore> restore_heads(const LayerShape& shape, std::size_t layer,
                                     SavedReader& reader) {
  std::vector<HeadStore> heads;
  for (std::int64_t h = 0; h < shape.config.kv_heads; ++h) {
    reader.begin(fmt::format("layer {}, head {}", layer, h));
    heads.push_back(HeadStore::restore(shape, reader));
    if (heads.back().tokens() != heads.front().tokens() ||
        heads.back().compressed() != heads.front().compressed() ||
        heads.back().left() != heads.front().left())
      reader.refuse("a length that is not that of the layer's first head");
  }
  return heads;
}

void read_tokens(const LayerShape& shape, std::span<const HeadStore> heads, std::int64_t first,
                 std::int64_t count, std::byte* keys, std::byte* values) {
  const std::size_t key_bytes = static_cast<std::size_t>(shape.key_bytes());
  const std::size_t value_bytes = static_cast<std::size_t>(shape.value_bytes());
  for (std::int64_t token = first; token < first + count; ++token) {
    for (const HeadStore& head : heads) {
      if (head.in_file()) {
        head.host().copy(token, keys, values);
        if (keys != nullptr) keys += key_bytes;
        if (values != nullptr) values += value_bytes;
        continue;
      }
      if (keys != nullptr) keys = std::copy_n(head.key(token), key_bytes, keys);
      if (values != nullptr) values = std::copy_n(head.value(shape, token), value_bytes, values);
    }
  }
}

}  // namespace verkv::cpu
