// Sums of bytes, and the limits of both tiers.
#ifndef VERKV_SRC_TIER_BYTES_HPP
#define VERKV_SRC_TIER_BYTES_HPP

#include <cstdint>

#include <verkv/reports.hpp>
#include <verkv/settings.hpp>

namespace verkv {

struct TierBytes {
  std::int64_t host = 0;
  std::int64_t fast = 0;

  void add(const TierBytes& other, std::int64_t sign = 1) {
    host += sign * other.host;
    fast += sign * other.fast;
  }
};

// to += sign * one.
void add(MemoryReport& to, const MemoryReport& one, std::int64_t sign = 1);

// Rows, in whole pages, that a file has more when `count` tokens come to `held`.
std::int64_t file_rows_added(std::int64_t held, std::int64_t count);

// Throws CapacityError where what is held and what is wanted exceed a limit of the configuration.
void check_tiers(const CacheConfig& config, const TierBytes& held, const TierBytes& wanted);
// That of one tier.
[[noreturn]] void raise_limit(bool is_fast, std::int64_t held, std::int64_t wanted,
                              std::int64_t limit);

}  // namespace verkv

#endif  // VERKV_SRC_TIER_BYTES_HPP
