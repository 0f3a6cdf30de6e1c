// Masks of tokens in lane layout (step_workspace.hpp): one bit a token, and the loops over bits.
#ifndef VERKV_CUDA_MASKS_CUH
#define VERKV_CUDA_MASKS_CUH

#include <cstdint>
#include <type_traits>

#include "device_math.cuh"
#include "head_shared.cuh"
#include "step_workspace.hpp"
#include "tuning.hpp"

namespace verkv::cuda {

// The word of a token's bit, and its bit in the word: the row of 16 in a block of 512.
template <class Index>
VERKV_DEVICE Index mask_word(Index token) {
  return token / kBlockTokens * kLanes + token % kLanes;
}
template <class Index>
VERKV_DEVICE Index mask_row(Index token) {
  return token % kBlockTokens / kLanes;
}

VERKV_DEVICE bool in_mask(const std::uint32_t* mask, std::uint32_t token) {
  return (mask[mask_word(token)] >> mask_row(token) & 1u) != 0;
}

// What neighbouring lanes have of something, moved by one instruction.
template <class T>
struct alignas(kLanesPerThread * sizeof(T)) PerLane {
  T lane[kLanesPerThread];
};

// Words of a mask in the making, kRowsAtOnce rows at a time, so that a token's bit is a constant.
struct MaskWords {
  PerLane<std::uint32_t> word{};
  std::uint32_t open[kLanesPerThread] = {};  // bits of the rows at hand

  // `row`: of those at hand.
  VERKV_DEVICE void set(std::size_t j, int row) { open[j] |= 1u << row; }
  VERKV_DEVICE void close(int first_row) {
#pragma unroll
    for (std::size_t j = 0; j < kLanesPerThread; ++j) {
      word.lane[j] |= open[j] << first_row;
      open[j] = 0;
    }
  }
};

// A thread's words of a mask.
VERKV_DEVICE PerLane<std::uint32_t> load_mask(const std::uint32_t* mask, std::int64_t block,
                                              int part) {
  return reinterpret_cast<const PerLane<std::uint32_t>*>(
      mask)[std::int64_t{block} * kLaneParts + part];
}
// Returns how many bits are set.
VERKV_DEVICE int put_mask(std::uint32_t* mask, int block, int part,
                          const PerLane<std::uint32_t>& word) {
  reinterpret_cast<PerLane<std::uint32_t>*>(mask)[std::int64_t{block} * kLaneParts + part] = word;
  int count = 0;
#pragma unroll
  for (const std::uint32_t bits : word.lane) count += __popc(bits);
  return count;
}

// The weight or the odds of a token `row` rows behind the one of `first`: one instruction for the
// address.
template <class T>
VERKV_DEVICE T& in_row(T* first, unsigned row) {
  using Bytes = std::conditional_t<std::is_const_v<T>, const char, char>;
  return *reinterpret_cast<T*>(reinterpret_cast<Bytes*>(first) +
                               std::uint64_t{row} * (kLanes * sizeof(T)));
}

// keep(lane of the thread, row) for every bit, by lane and ascending; returns the bits kept.
template <class Keep>
VERKV_DEVICE PerLane<std::uint32_t> each_bit(const PerLane<std::uint32_t>& word, Keep&& keep) {
  PerLane<std::uint32_t> kept;
#pragma unroll
  for (std::size_t j = 0; j < kLanesPerThread; ++j) {
    kept.lane[j] = 0;
    for (std::uint32_t left = word.lane[j]; left != 0;) {
      const std::uint32_t lowest = left & -left;
      left ^= lowest;
      if (keep(j, 31u - __clz(static_cast<int>(lowest)))) kept.lane[j] |= lowest;
    }
  }
  return kept;
}

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_MASKS_CUH
