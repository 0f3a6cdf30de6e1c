// Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random
// numbers: as easy as 1, 2, 3" (SC 2011). A draw is a pure function of (key, counter): the same on
// every machine, in any order, under any number of threads.
#ifndef VERKV_PHILOX_HPP
#define VERKV_PHILOX_HPP

#include <cstdint>

#include <verkv/config.hpp>

namespace verkv {

struct PhiloxCounter {
  std::uint32_t word[4] = {0, 0, 0, 0};
};

struct PhiloxKey {
  std::uint32_t word[2] = {0, 0};
};

// Ten rounds; returns the 128 random bits of this counter.
VERKV_HD constexpr PhiloxCounter philox4x32_10(PhiloxCounter counter, PhiloxKey key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = 0xD2511F53ull * counter.word[0];
    const std::uint64_t p1 = 0xCD9E8D57ull * counter.word[2];
    counter = PhiloxCounter{{static_cast<std::uint32_t>(p1 >> 32) ^ counter.word[1] ^ key.word[0],
                             static_cast<std::uint32_t>(p1),
                             static_cast<std::uint32_t>(p0 >> 32) ^ counter.word[3] ^ key.word[1],
                             static_cast<std::uint32_t>(p0)}};
    key.word[0] += 0x9E3779B9u;
    key.word[1] += 0xBB67AE85u;
  }
  return counter;
}

}  // namespace verkv

#endif  // VERKV_PHILOX_HPP
