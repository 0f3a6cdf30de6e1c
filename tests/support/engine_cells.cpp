#include "support/engine_cells.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "reference/statistics.hpp"

namespace verkv::test {
namespace {

constexpr std::int64_t kSlabCells = 48;

}  // namespace

EngineCells::EngineCells(const LayerConfig& layer, DType storage, Random& random)
    : layer_(layer), storage_(storage), element_(size_bytes(storage)) {
  const bool head_major = random.below(3) == 0;
  const auto strides = [&](std::int64_t dim, std::int64_t& token, std::int64_t& head) {
    const std::int64_t row = dim + static_cast<std::int64_t>(random.below(4));
    token = head_major ? row : layer_.kv_heads * row;
    head = head_major ? kSlabCells * row : row;
  };
  strides(layer_.key_dim, key_stride_, key_head_stride_);
  strides(layer_.value_dim, value_stride_, value_head_stride_);
}

template <class F>
void EngineCells::each_head(const Cell& cell, F&& f) const {
  for (std::int64_t h = 0; h < layer_.kv_heads; ++h)
    f(h, cell.key + size(h * key_head_stride_) * element_,
      cell.value + size(h * value_head_stride_) * element_);
}

// 0xffff... is NaN in every storage type.
void EngineCells::give_back(const Cell& cell) {
  each_head(cell, [&](std::int64_t, std::byte* key, std::byte* value) {
    std::memset(key, 0xff, size(layer_.key_dim) * element_);
    std::memset(value, 0xff, size(layer_.value_dim) * element_);
  });
  free_.push_back(cell);
}

void EngineCells::add_slab() {
  const std::size_t key = size(kSlabCells * layer_.kv_heads * (layer_.key_dim + 3)) * element_;
  const std::size_t value = size(kSlabCells * layer_.kv_heads * (layer_.value_dim + 3)) * element_;
  slabs_.push_back(std::make_unique<std::byte[]>(key + value));
  std::byte* const slab = slabs_.back().get();
  std::memset(slab, 0xff, key + value);
  for (std::int64_t i = kSlabCells; i-- > 0;)
    free_.push_back(
        {slab + size(i * key_stride_) * element_, slab + key + size(i * value_stride_) * element_});
}

std::unique_ptr<EngineCells::Placed> EngineCells::take(std::int64_t tokens, Random& random) {
  auto placed = std::make_unique<Placed>();
  // Side by side, in a view with strides, perhaps from behind; or anywhere, in a list.
  const bool side_by_side = tokens <= kSlabCells && random.below(2) == 0;
  const bool backwards = side_by_side && random.below(4) == 0;
  if (side_by_side) {
    add_slab();
  } else {
    while (static_cast<std::int64_t>(free_.size()) < tokens) add_slab();
    if (random.below(2) == 0) {
      for (std::size_t i = free_.size(); i > 1; --i)
        std::swap(free_[i - 1], free_[random.below(i)]);
    }
  }
  std::vector<Cell> cells(free_.end() - tokens, free_.end());
  free_.resize(free_.size() - size(tokens));
  if (!backwards) std::reverse(cells.begin(), cells.end());
  for (const Cell& cell : cells) {
    placed->rows.emplace_back(new Cell(cell), [this](const Cell* last) {
      give_back(*last);
      delete last;
    });
    placed->key_rows.push_back(cell.key);
    placed->value_rows.push_back(cell.value);
  }
  placed->keys = listed_rows(placed->key_rows.data(), storage_, tokens, layer_.kv_heads,
                             layer_.key_dim, key_head_stride_);
  placed->values = listed_rows(placed->value_rows.data(), storage_, tokens, layer_.kv_heads,
                               layer_.value_dim, value_head_stride_);
  if (side_by_side && tokens > 0) {
    placed->keys.rows = placed->values.rows = nullptr;
    placed->keys.data = cells.front().key;
    placed->values.data = cells.front().value;
    placed->keys.token_stride = backwards ? -key_stride_ : key_stride_;
    placed->values.token_stride = backwards ? -value_stride_ : value_stride_;
  }
  return placed;
}

std::unique_ptr<EngineCells::Placed> EngineCells::place(const Block& keys, const Block& values,
                                                        std::span<const SequenceId> sequences,
                                                        Random& random) {
  std::unique_ptr<Placed> placed = take(keys.tokens, random);
  const auto put = [&](const Block& block, std::int64_t token, std::int64_t head, std::byte* to) {
    with_element(storage_, [&](auto zero) {
      for (std::int64_t j = 0; j < block.dim; ++j) {
        const auto x = from_float<decltype(zero)>(block.at(token, head, j));
        std::memcpy(to + size(j) * element_, &x, element_);
      }
    });
  };
  for (std::int64_t t = 0; t < keys.tokens; ++t) {
    each_head(*placed->rows[size(t)], [&](std::int64_t h, std::byte* key, std::byte* value) {
      put(keys, t, h, key);
      put(values, t, h, value);
    });
    if (sequences.empty() || sequences[size(t)] != kNoSequence) continue;
    placed->rows[size(t)].reset();
    placed->key_rows[size(t)] = placed->value_rows[size(t)] = nullptr;
  }
  return placed;
}

std::unique_ptr<EngineCells::Placed> EngineCells::move(std::span<const Row> rows, Random& random) {
  std::unique_ptr<Placed> placed = take(static_cast<std::int64_t>(rows.size()), random);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Cell& from = *rows[i];
    each_head(*placed->rows[i], [&](std::int64_t h, std::byte* key, std::byte* value) {
      std::memcpy(key, from.key + size(h * key_head_stride_) * element_,
                  size(layer_.key_dim) * element_);
      std::memcpy(value, from.value + size(h * value_head_stride_) * element_,
                  size(layer_.value_dim) * element_);
    });
  }
  return placed;
}

}  // namespace verkv::test
