#include "masks.hpp"

#include <algorithm>
#include <cstring>

namespace verkv_ggml {
namespace {

// A model has one mask or, with window layers, two.
constexpr std::size_t kMasks = 4;

// Bits of f16.
constexpr std::uint16_t kZero = 0x0000;
constexpr std::uint16_t kMinusZero = 0x8000;
constexpr std::uint16_t kMinusInfinity = 0xfc00;

// Whether each number says seen (0) or not seen (-infinity).
bool read_row(const std::uint16_t* row, std::int64_t cells, std::vector<std::uint32_t>& out) {
  out.clear();
  for (std::int64_t i = 0; i < cells; ++i) {
    if (row[i] == kMinusInfinity) continue;
    if (row[i] != kZero && row[i] != kMinusZero) return false;
    out.push_back(static_cast<std::uint32_t>(i));
  }
  return true;
}

// Calls f(row of the mask, its place) for all rows.
template <class F>
void each_row(const Attention& attention, F&& f) {
  std::size_t place = 0;
  for (std::int64_t s = 0; s < attention.streams(); ++s)
    for (std::int64_t r = 0; r < attention.rows(); ++r) f(attention.mask_row(s, r), place++);
}

}  // namespace

bool Masks::is_of(const Known& known, const Attention& attention) {
  if (known.cells != attention.cells() || known.streams != attention.streams() ||
      known.visible.rows != attention.rows())
    return false;
  const std::size_t cells = static_cast<std::size_t>(known.cells);
  bool same = true;
  each_row(attention, [&](const std::uint16_t* row, std::size_t place) {
    same = same && std::memcmp(row, known.bits.data() + place * cells, cells * sizeof *row) == 0;
  });
  return same;
}

void Masks::fill(Known& known, const Attention& attention) {
  known.cells = attention.cells();
  known.streams = attention.streams();
  const std::size_t cells = static_cast<std::size_t>(known.cells);
  const std::size_t rows = static_cast<std::size_t>(attention.streams() * attention.rows());
  Visible& visible = known.visible;
  visible.version = time_;
  visible.plain = true;
  visible.rows = attention.rows();
  visible.cells.resize(rows);
  known.bits.resize(rows * cells);
  each_row(attention, [&](const std::uint16_t* row, std::size_t place) {
    std::copy_n(row, cells, known.bits.data() + place * cells);
    visible.plain = read_row(row, known.cells, visible.cells[place]) && visible.plain;
  });
  visible.lists.assign(visible.cells.begin(), visible.cells.end());
}

const Visible& Masks::read(const Attention& attention) {
  ++time_;
  for (const auto& known : known_) {
    if (!is_of(*known, attention)) continue;
    known->used = time_;
    return known->visible;
  }
  if (known_.size() < kMasks) known_.push_back(std::make_unique<Known>());
  const auto oldest = std::min_element(
      known_.begin(), known_.end(), [](const auto& a, const auto& b) { return a->used < b->used; });
  fill(**oldest, attention);
  (*oldest)->used = time_;
  return (*oldest)->visible;
}

}  // namespace verkv_ggml
