// The draw of PoissonComp and the top-k selection of the baselines.
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
