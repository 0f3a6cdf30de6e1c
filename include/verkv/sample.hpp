// The draw of PoissonComp, its spread over an order of the tokens, and the top-k selection of the
// baselines.
#ifndef VERKV_SAMPLE_HPP
#define VERKV_SAMPLE_HPP

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include <verkv/config.hpp>
#include <verkv/inclusion.hpp>
#include <verkv/philox.hpp>

namespace verkv {

// Names one stream of draws. `layer` and `kv_head` are the *global* indices of the model (16 bits
// each), so that a split of heads over ranks draws the same sample.
struct DrawId {
  std::uint64_t seed = 0;
  std::uint64_t sequence = 0;
  std::uint32_t layer = 0;
  std::uint32_t kv_head = 0;
};

// 64 random bits of one (stream, position). Positions below 2^32.
VERKV_HD constexpr std::uint64_t draw_bits(const DrawId& id, std::uint64_t position) {
  const PhiloxCounter out = philox4x32_10(
      PhiloxCounter{
          {static_cast<std::uint32_t>(position), (id.layer << 16) | (id.kv_head & 0xffffu),
           static_cast<std::uint32_t>(id.sequence), static_cast<std::uint32_t>(id.sequence >> 32)}},
      PhiloxKey{{static_cast<std::uint32_t>(id.seed), static_cast<std::uint32_t>(id.seed >> 32)}});
  return (static_cast<std::uint64_t>(out.word[0]) << 32) | out.word[1];
}

// Z ~ Bernoulli(r). The comparison is of integers, so every machine decides alike.
VERKV_HD inline bool drawn(const DrawId& id, std::uint64_t position, double r) {
  if (r >= 1) return true;
  if (!(r > 0)) return false;
  // r * 2^64 is exact; the conversion drops what is below 2^-64.
  return draw_bits(id, position) < static_cast<std::uint64_t>(r * 18446744073709551616.0);
}

// Uniform in [0, 1), of the same bits: their first 53, so exact.
VERKV_HD constexpr double draw_uniform(const DrawId& id, std::uint64_t position) {
  return static_cast<double>(draw_bits(id, position) >> 11) * 0x1p-53;
}

// Ordered pivotal sampling (Deville and Tille 1998): neighbours in the order compete, so that the
// sample spreads over it. Token k of the order has position[k], below 2^32 and its own, and
// inclusion probability r[k]; out_kept[k]: 1 if it is drawn, else 0. All of one size. r >= 1 is
// always drawn, r <= 0 or NaN never; those are not part of the walk. Each other token is drawn with
// probability r[k], and their number is their sum of r rounded up or down. O(n), no allocation;
// sums, quotients and comparisons in binary64 only, so every machine decides alike.
inline void pivotal_draw(const DrawId& id, std::span<const std::uint32_t> position,
                         std::span<const double> r, std::span<std::uint8_t> out_kept) {
  constexpr std::size_t kNone = static_cast<std::size_t>(-1);
  std::size_t first = kNone;  // its number decides over the last one in hand
  std::size_t hand = kNone;
  double a = 0;  // what remains of the probability of the one in hand
  for (std::size_t k = 0; k < position.size(); ++k) {
    const double b = r[k];
    out_kept[k] = b >= 1 ? 1 : 0;
    if (b >= 1 || !(b > 0)) continue;
    if (hand == kNone) {
      first = hand = k;
      a = b;
      continue;
    }
    const double u = draw_uniform(id, position[k]);
    const double both = a + b;
    if (both < 1) {
      if (u * both < b) hand = k;
      a = both;
    } else {
      const bool hand_is_in = u * (2 - both) < 1 - b;
      out_kept[hand_is_in ? hand : k] = 1;
      if (hand_is_in) hand = k;
      a = both - 1;
    }
  }
  if (hand != kNone && draw_uniform(id, position[first]) < a) out_kept[hand] = 1;
}

// Writes 1 into out_kept[i] for the k largest scores, 0 elsewhere; ties go to the lower index.
// scratch_index: at least n elements. O(n) expected.
template <class T>
void select_top_k(std::span<const T> score, std::size_t k, std::span<std::uint32_t> scratch_index,
                  std::span<std::uint8_t> out_kept) {
  const std::size_t n = score.size();
  k = std::min(k, n);
  const auto index = scratch_index.first(n);
  for (std::size_t i = 0; i < n; ++i) {
    index[i] = static_cast<std::uint32_t>(i);
    out_kept[i] = 0;
  }
  const auto before = [score](std::uint32_t a, std::uint32_t b) {
    return score[a] != score[b] ? score[a] > score[b] : a < b;
  };
  if (k > 0 && k < n) {
    std::nth_element(index.begin(), index.begin() + static_cast<std::ptrdiff_t>(k), index.end(),
                     before);
  }
  for (std::size_t i = 0; i < k; ++i) out_kept[index[i]] = 1;
}

}  // namespace verkv

#endif  // VERKV_SAMPLE_HPP
