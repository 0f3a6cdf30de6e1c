// Inclusion over one pool of a budget: what both backends do before they compress. Eq. 3 and top-k,
// docs/math/inclusion.md.
#ifndef VERKV_SRC_INCLUSION_POOL_HPP
#define VERKV_SRC_INCLUSION_POOL_HPP

#include <cstdint>
#include <span>

#include <verkv/config.hpp>
#include <verkv/settings.hpp>
#include <verkv/types.hpp>

namespace verkv {

// One KV head in a pool: positions [begin, begin + odds.size()) of the `tokens` that it holds.
struct PoolHead {
  std::int64_t begin = 0;
  std::int64_t tokens = 0;
  const float* importance = nullptr;  // of these positions
  std::span<Positive16> odds;
};

// Fills the odds of all heads of a pool. Sinks are in H: out of the pool, paid from its budget.
// pays_window: the budget of positions from 0 on includes the local window, which is paid once, at
// the first compression. Allocates.
VERKV_API void solve_pool(const CacheConfig& config, std::span<const PoolHead> heads,
                          bool pays_window);

}  // namespace verkv

#endif  // VERKV_SRC_INCLUSION_POOL_HPP
