// A KV head that goes back to before its local window. Its sample, sketch and order are those of the
// tokens that stay: what was drawn stays drawn, with the same probabilities.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include <verkv/clusters.hpp>

#include "cpu/head_store.hpp"

namespace verkv::cpu {
namespace {

// Of the places of a head those whose positions stay.
struct Remaining {
  std::vector<std::uint32_t> position;
  std::vector<Positive16> odds;
  std::vector<std::uint32_t> walk_end;
  std::vector<std::uint32_t> drawn;
};

Remaining remaining_of(const HeadStore& head, std::int64_t tokens) {
  const HeadOrder order = head.order();
  const std::vector<Positive16> odds = head.all_odds();
  std::vector<bool> resident(order.position.size());
  head.drawn().each_place([&](std::int64_t, std::uint32_t place) { resident[place] = true; });
  Remaining result;
  std::size_t place = 0;
  for (const std::uint32_t end : order.walk_end) {
    const std::size_t before = result.position.size();
    for (; place < end; ++place) {
      if (order.position[place] >= tokens) continue;
      if (resident[place])
        result.drawn.push_back(static_cast<std::uint32_t>(result.position.size()));
      result.position.push_back(order.position[place]);
      result.odds.push_back(odds[place]);
    }
    const std::size_t after = result.position.size();
    if (after > before) result.walk_end.push_back(static_cast<std::uint32_t>(after));
  }
  return result;
}

// make_clusters, of rows in a file cluster by cluster.
Clusters clusters_of_host(const HostRows& host, const LayerShape& shape,
                          std::span<const std::uint32_t> position,
                          std::span<const Positive16> odds) {
  if (!host.is_file()) return make_clusters(host.values(shape), position, odds);
  const std::size_t row = static_cast<std::size_t>(shape.value_bytes());
  std::vector<std::byte> block(kClusterTokens * row);
  std::vector<std::uint32_t> all(kClusterTokens);
  std::iota(all.begin(), all.end(), 0u);
  const Rows rows{block.data(), shape.storage, shape.config.value_dim,
                  static_cast<int>(shape.config.value_dim)};
  Clusters result;
  for (std::size_t first = 0; first < position.size(); first += kClusterTokens) {
    const std::size_t count = std::min<std::size_t>(kClusterTokens, position.size() - first);
    for (std::size_t i = 0; i < count; ++i)
      host.copy(position[first + i], nullptr, block.data() + i * row);
    const Clusters one =
        make_clusters(rows, std::span(all).first(count), odds.subspan(first, count));
    result.spread.insert(result.spread.end(), one.spread.begin(), one.spread.end());
    result.centroids.insert(result.centroids.end(), one.centroids.begin(), one.centroids.end());
  }
  return result;
}

template <class T>
void fill(PagedRows& rows, std::span<const T> from) {
  for (std::size_t i = 0; i < from.size(); ++i)
    std::memcpy(rows.row(static_cast<std::int64_t>(i)), &from[i], sizeof(T));
}

}  // namespace

HeadStore HeadStore::shortened(const LayerShape& shape, const Kernels& kernels,
                               std::int64_t tokens) {
  HeadStore result(shape);
  result.host_ = host_.fork();
  result.host_.truncate(tokens);
  result.room_ = tokens;
  if (tokens == 0) return result;
  Remaining rest = remaining_of(*this, tokens);
  result.sketched_ = std::make_unique<Sketched>(shape, sketch(shape));
  Sketched& s = *result.sketched_;
  s.basis = sketched_->basis;
  s.walk_end = std::move(rest.walk_end);
  const auto room = [](PagedRows& rows, std::int64_t count) {
    rows.reserve(0, count);
    rows.resize(count);
    for (std::int64_t i = 0; i < count; ++i)
      std::memset(rows.row(i), 0, static_cast<std::size_t>(rows.row_bytes()));
  };
  const std::int64_t padded = round_up(tokens, kSketchGroup);
  room(s.position, tokens);
  fill(s.position, std::span<const std::uint32_t>(rest.position));
  room(s.odds, padded);
  fill(s.odds, std::span<const Positive16>(rest.odds));
  if (has_codes(shape.sketch.kind)) {
    room(s.codes, padded / kSketchGroup);
    room(s.scale, padded);
    std::vector<float> scratch(
        static_cast<std::size_t>(2 * round_up(shape.config.key_dim, kLanes)));
    const bool is_file = host_.is_file();
    std::vector<std::byte> key(static_cast<std::size_t>(is_file ? shape.key_bytes() : 0));
    Rows keys{key.data(), shape.storage, 0, static_cast<int>(shape.config.key_dim)};
    if (!is_file) keys = result.host_.keys(shape);
    for (std::int64_t place = 0; place < tokens; ++place) {
      const std::int64_t position = result.position(place);
      if (is_file) result.host_.copy(position, key.data(), nullptr);
      result.encode_place(shape, kernels, place, keys, is_file ? 0 : position, scratch);
    }
  }
  if (shape.clusters) {
    s.centroid.reserve(0, clusters_of(tokens));
    s.spread.reserve(0, clusters_of(tokens));
    result.take_clusters(clusters_of_host(result.host_, shape, rest.position, rest.odds), tokens);
  }
  for (PagedRows* rows : {&s.drawn.key, &s.drawn.value, &s.drawn.place})
    rows->reserve(0, static_cast<std::int64_t>(rest.drawn.size()));
  result.add_drawn(rest.drawn, s.drawn);
  result.compressed_ = tokens;
  return result;
}

}  // namespace verkv::cpu
