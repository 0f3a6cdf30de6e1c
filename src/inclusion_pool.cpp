#include "inclusion_pool.hpp"

#include <algorithm>
#include <cstddef>
#include <vector>

#include <verkv/inclusion.hpp>
#include <verkv/sample.hpp>

namespace verkv {

void solve_pool(const CacheConfig& config, std::span<const PoolHead> heads, bool pays_window) {
  const auto sinks_of = [&config](const PoolHead& head) {
    return std::clamp<std::int64_t>(config.sink_tokens - head.begin, 0,
                                    static_cast<std::int64_t>(head.odds.size()));
  };
  double budget = 0;
  std::vector<float> tau;
  for (const PoolHead& head : heads) {
    const std::int64_t sinks = sinks_of(head);
    const std::int64_t count = static_cast<std::int64_t>(head.odds.size());
    const std::int64_t window = pays_window && head.begin == 0 ? head.tokens - count : 0;
    budget +=
        config.keep * static_cast<double>(count + window) - static_cast<double>(sinks + window);
    tau.insert(tau.end(), head.importance + sinks, head.importance + count);
  }
  budget = std::max(0.0, budget);

  std::size_t next = 0;
  const auto assign = [&](auto&& odds_of) {
    for (const PoolHead& head : heads) {
      const std::size_t sinks = static_cast<std::size_t>(sinks_of(head));
      std::fill(head.odds.begin(), head.odds.begin() + static_cast<std::ptrdiff_t>(sinks),
                kPositive16Infinity);
      for (std::size_t i = sinks; i < head.odds.size(); ++i) head.odds[i] = odds_of(next++);
    }
  };
  if (config.study.select == Selection::topk) {
    std::vector<std::uint32_t> index(tau.size());
    std::vector<std::uint8_t> kept(tau.size());
    select_top_k(std::span<const float>(tau), static_cast<std::size_t>(budget + 0.5), index, kept);
    assign([&](std::size_t i) { return kept[i] != 0 ? kPositive16Infinity : Positive16{}; });
    return;
  }
  std::vector<float> scratch(tau.size());
  const FlooredInclusion inclusion = solve_inclusion(
      std::span<const float>(tau), budget, config.study.inclusion_floor, std::span(scratch));
  assign([&](std::size_t i) {
    return stored_odds(inclusion.probability(static_cast<double>(tau[i])));
  });
}

}  // namespace verkv
