// The order along which a sample is spread (docs/math/sample.md): tokens with similar keys and
// values are neighbours. Made once per compression from a head's own rows; no draw enters.
#ifndef VERKV_SRC_SPREAD_ORDER_HPP
#define VERKV_SRC_SPREAD_ORDER_HPP

#include <cstdint>
#include <span>
#include <vector>

#include <verkv/config.hpp>
#include <verkv/types.hpp>

#include "rows.hpp"

namespace verkv {

// Coordinates by which tokens are told apart, at most: of a key, of a value.
inline constexpr int kOrderKeys = 8;
inline constexpr int kOrderValues = 4;
// Weight of the values' coordinates beside the keys'.
inline constexpr double kOrderValueWeight = 0.5;

// What a head's tokens are projected on. Empty until its first compression.
struct OrderDirections {
  std::vector<float> key;    // [key dim][at most kOrderKeys]
  std::vector<float> value;  // [value dim][at most kOrderValues]
};

// The compressed tokens of a head as its draws walk over them. Main memory.
struct HeadOrder {
  OrderDirections directions;
  // Of the tokens that are drawn at all (0 < r < 1), walk after walk.
  std::vector<std::uint32_t> position;
  // Where each walk ends in `position`. Walks are drawn independently of each other.
  std::vector<std::uint32_t> walk_end;

  std::int64_t bytes() const {
    return static_cast<std::int64_t>(sizeof(float) *
                                     (directions.key.size() + directions.value.size())) +
           static_cast<std::int64_t>(sizeof(std::uint32_t) * (position.size() + walk_end.size()));
  }
};

// Adds the walks of a later compression, and the directions of a first one. reserve_walks makes the
// room, after which take_walks cannot fail.
VERKV_API void reserve_walks(HeadOrder& order, const HeadOrder& more);
VERKV_API void take_walks(HeadOrder& order, HeadOrder&& more) noexcept;

// Reorders `position`, ascending rows of keys and values, so that similar tokens are neighbours: a
// k-d tree over their coordinates, split at the median of the coordinate that varies most; ties go
// to the lower position. Sums in a fixed order: every machine finds the same. O(n log n).
// Allocates.
VERKV_API void spread_order(const OrderDirections& directions, const Rows& keys, const Rows& values,
                            std::span<std::uint32_t> position);

}  // namespace verkv

#endif  // VERKV_SRC_SPREAD_ORDER_HPP
