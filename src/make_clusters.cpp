// Centroids and spreads of clusters: what a compression stores of them.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include <verkv/clusters.hpp>

#include "compression.hpp"

namespace verkv {

Clusters make_clusters(const Rows& values, std::span<const std::uint32_t> position,
                       std::span<const Positive16> odds) {
  return with_element(values.type, [&](auto zero) {
    using Element = decltype(zero);
    const std::size_t dim = static_cast<std::size_t>(values.dim);
    Clusters result;
    std::vector<double> mean(dim);
    for (std::size_t first = 0; first < position.size(); first += kClusterTokens) {
      const std::size_t end = std::min(position.size(), first + kClusterTokens);
      // Calls f(row) for the tokens of L.
      const auto for_low = [&](auto&& f) {
        for (std::size_t i = first; i < end; ++i) {
          if (odds[i].bits < kPositive16Infinity.bits)
            f(row_of<Element>(values, static_cast<std::int64_t>(position[i])));
        }
      };
      double tokens = 0;
      std::fill(mean.begin(), mean.end(), 0.0);
      for_low([&](const Element* row) {
        tokens += 1;
        for (std::size_t j = 0; j < dim; ++j) mean[j] += static_cast<double>(to_float(row[j]));
      });
      for (double& x : mean) {
        const Element stored = from_float<Element>(static_cast<float>(tokens > 0 ? x / tokens : 0));
        x = static_cast<double>(to_float(stored));
        const auto* bytes = reinterpret_cast<const std::byte*>(&stored);
        result.centroids.insert(result.centroids.end(), bytes, bytes + sizeof stored);
      }
      double square = 0;
      for_low([&](const Element* row) {
        for (std::size_t j = 0; j < dim; ++j) {
          const double off = static_cast<double>(to_float(row[j])) - mean[j];
          square += off * off;
        }
      });
      const double spread = tokens > 0 ? std::sqrt(square / tokens) : 0;
      result.spread.push_back(
          to_positive16(static_cast<float>(std::min(spread, static_cast<double>(kMostSpread)))));
    }
    return result;
  });
}

Clusters make_clusters_of_both(const HeadRows& rows, std::span<std::uint32_t> position,
                               std::span<const Positive16> odds) {
  const std::size_t open = rows.open_odds.size();
  const std::size_t bytes = rows.open_values.size() / open;
  std::vector<const std::byte*> list;
  for (std::size_t i = 0; i < open; ++i) list.push_back(rows.open_values.data() + i * bytes);
  for (const std::uint32_t one : position.subspan(open)) {
    list.push_back(with_element(rows.values.type, [&](auto zero) {
      return reinterpret_cast<const std::byte*>(row_of<decltype(zero)>(rows.values, one));
    }));
  }
  std::iota(position.begin(), position.end(), 0u);
  Rows all;
  all.type = rows.values.type;
  all.dim = rows.values.dim;
  all.list = list.data();
  return make_clusters(all, position, odds);
}

}  // namespace verkv
