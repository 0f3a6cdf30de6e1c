#include "spread_order.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

namespace verkv {
namespace {

constexpr std::size_t kAxes = static_cast<std::size_t>(kOrderKeys + kOrderValues);
// A part of so few tokens is left in the order of its positions.
constexpr std::size_t kLeafTokens = 2;

using Point = std::array<float, kAxes>;

// Products of one row with `directions`, [dim][count], to out[0 .. count - 1].
void project(const Rows& rows, std::int64_t row, std::span<const float> directions, float* out) {
  const std::size_t dim = static_cast<std::size_t>(rows.dim);
  const std::size_t count = directions.size() / dim;
  with_element(rows.type, [&](auto zero) {
    using Element = decltype(zero);
    const Element* x = row_of<Element>(rows, row);
    double sum[kAxes] = {};
    for (std::size_t j = 0; j < dim; ++j) {
      const double y = static_cast<double>(to_float(x[j]));
      for (std::size_t c = 0; c < count; ++c)
        sum[c] += y * static_cast<double>(directions[j * count + c]);
    }
    for (std::size_t c = 0; c < count; ++c) out[c] = static_cast<float>(sum[c]);
  });
}

// A token of the tree, and one coordinate of it where a median is sought.
struct Item {
  std::uint32_t position;
  std::uint32_t point;  // index of its coordinates
};
struct Key {
  float coordinate;
  std::uint32_t position;
};

class Tree {
 public:
  explicit Tree(std::vector<Point> points) : points_(std::move(points)) {
    keys_.resize(points_.size());
    upper_.resize(points_.size());
  }

  // items: positions ascending, as in every part that is split off.
  void arrange(std::span<Item> items) {
    while (items.size() > kLeafTokens) {
      const std::size_t half = split(items, widest_axis(items));
      arrange(items.first(half));
      items = items.subspan(half);
    }
  }

 private:
  float at(const Item& item, std::size_t axis) const { return points_[item.point][axis]; }

  std::size_t widest_axis(std::span<const Item> items) const {
    std::array<double, kAxes> sum{};
    std::array<double, kAxes> square{};
    const Point& origin = points_[items.front().point];
    for (const Item& item : items) {
      for (std::size_t c = 0; c < kAxes; ++c) {
        const double x = static_cast<double>(at(item, c)) - static_cast<double>(origin[c]);
        sum[c] += x;
        square[c] += x * x;
      }
    }
    std::size_t widest = 0;
    double most = -1;
    for (std::size_t c = 0; c < kAxes; ++c) {
      const double spread = square[c] - sum[c] * sum[c] / static_cast<double>(items.size());
      if (!(spread > most)) continue;
      most = spread;
      widest = c;
    }
    return widest;
  }

  // Tokens below the median come first, both parts in the order they had. Returns their number.
  std::size_t split(std::span<Item> items, std::size_t axis) {
    const std::size_t half = items.size() / 2;
    const std::span<Key> keys = std::span(keys_).first(items.size());
    for (std::size_t i = 0; i < items.size(); ++i)
      keys[i] = {at(items[i], axis), items[i].position};
    const auto before = [](const Key& a, const Key& b) {
      return a.coordinate != b.coordinate ? a.coordinate < b.coordinate : a.position < b.position;
    };
    const auto middle = keys.begin() + static_cast<std::ptrdiff_t>(half);
    std::nth_element(keys.begin(), middle, keys.end(), before);
    const Key median = *middle;
    std::size_t lower = 0;
    std::size_t upper = 0;
    for (const Item& item : items) {
      if (before(Key{at(item, axis), item.position}, median)) {
        items[lower++] = item;
      } else {
        upper_[upper++] = item;
      }
    }
    std::copy_n(upper_.begin(), upper, items.begin() + static_cast<std::ptrdiff_t>(lower));
    return lower;
  }

  std::vector<Point> points_;
  std::vector<Key> keys_;
  std::vector<Item> upper_;
};

}  // namespace

void reserve_places(HeadOrder& order, const HeadOrder& more) {
  const auto room = [](auto& vector, std::size_t count) {
    const std::size_t wanted = vector.size() + count;
    if (wanted > vector.capacity())
      vector.reserve(std::max(wanted, vector.size() + vector.size() / 2));
  };
  room(order.position, more.position.size());
  room(order.walk_end, more.walk_end.size());
}

void take_places(HeadOrder& order, HeadOrder&& more) noexcept {
  if (order.directions.key.empty()) order.directions = std::move(more.directions);
  const std::uint32_t before = static_cast<std::uint32_t>(order.position.size());
  order.position.insert(order.position.end(), more.position.begin(), more.position.end());
  for (const std::uint32_t end : more.walk_end) order.walk_end.push_back(before + end);
  order.open_odds = std::move(more.open_odds);
}

void spread_order(const OrderDirections& directions, const Rows& keys, const Rows& values,
                  std::span<std::uint32_t> position) {
  std::vector<Point> points(position.size());
  std::vector<Item> items(position.size());
  for (std::size_t i = 0; i < position.size(); ++i) {
    const std::int64_t row = static_cast<std::int64_t>(position[i]);
    project(keys, row, directions.key, points[i].data());
    project(values, row, directions.value, points[i].data() + kOrderKeys);
    items[i] = {position[i], static_cast<std::uint32_t>(i)};
  }
  Tree(std::move(points)).arrange(items);
  for (std::size_t i = 0; i < position.size(); ++i) position[i] = items[i].position;
}

}  // namespace verkv
