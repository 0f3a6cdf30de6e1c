// The order in which compressed tokens are stored (docs/math/sample.md): tokens with similar keys
// and values are neighbours. Made once per compression from a head's own rows; no draw enters.
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

// The compressed tokens of a head in their order: sketch and odds of the token at `position[place]`
// lie at `place`. Main memory.
struct HeadOrder {
  OrderDirections directions;
  std::vector<std::uint32_t> position;
  // Where each walk ends in `position`: a walk has the tokens of a prompt or chunk, and walks are
  // drawn independently of each other.
  std::vector<std::uint32_t> walk_end;
  // Odds of the last places, those of a cluster that is not full.
  std::vector<Positive16> open_odds;

  std::int64_t bytes() const {
    return static_cast<std::int64_t>(sizeof(float) *
                                         (directions.key.size() + directions.value.size()) +
                                     sizeof(std::uint32_t) * (position.size() + walk_end.size()) +
                                     sizeof(Positive16) * open_odds.size());
  }
};

// Adds the places of a later compression, and the directions of a first one. reserve_places makes
// the room, after which take_places cannot fail.
VERKV_API void reserve_places(HeadOrder& order, const HeadOrder& more);
VERKV_API void take_places(HeadOrder& order, HeadOrder&& more) noexcept;

// Reorders `position`, ascending rows of keys and values, so that similar tokens are neighbours: a
// k-d tree over their coordinates, split at the median of the coordinate that varies most; ties go
// to the lower position. Sums in a fixed order: every machine finds the same. O(n log n).
// Allocates.
VERKV_API void spread_order(const OrderDirections& directions, const Rows& keys, const Rows& values,
                            std::span<std::uint32_t> position);

}  // namespace verkv

#endif  // VERKV_SRC_SPREAD_ORDER_HPP
