#include "cpu/clusters.hpp"

#include <algorithm>
#include <cstddef>
#include <span>

#include <verkv/sketch_error.hpp>

namespace verkv::cpu {

void sum_clusters(HeadGroup& group) {
  // The states are those of another head until now.
  for (int h = 0; h < group.heads; ++h) group.state(h).by_clusters = false;
  if (group.clusters == 0) return;
  Workspace& ws = group.workspace;
  group.store.drawn().each_place([&](std::int64_t slot, std::uint32_t place) {
    ws.slot_cluster[static_cast<std::size_t>(slot)] =
        place / static_cast<std::uint32_t>(kClusterTokens);
  });
  for (std::int64_t c = 0; c < group.clusters; ++c) {
    const float spread = to_float(group.store.spread(c));
    ws.cluster_spread_square[static_cast<std::size_t>(c)] = spread * spread;
  }
  for (int h = 0; h < group.heads; ++h) {
    group.kernels.cluster_sums(group.weight(h), group.compressed, group.cluster_weight(h),
                               group.cluster_square(h));
    const float* sum = group.cluster_weight(h);
    const bool any = std::any_of(sum, sum + group.clusters, [](float x) { return x > 0; });
    group.state(h).by_clusters = any && !is_useless(group.state(h).sketch_error);
  }
}

float share_clusters(HeadGroup& group, int h) {
  Workspace& ws = group.workspace;
  HeadState& state = group.state(h);
  float* drawn = group.drawn_sketched(h);
  double plain = 0;
  double known = 0;
  group.kernels.cluster_terms(drawn, group.resident_weight(h), ws.slot_odds.data(), group.drawn,
                              state.beta, group.rules.cap, ws.slot_x.data(), ws.slot_y.data(),
                              plain, known);
  ClusterSums* sums = ws.cluster_sums.data();
  std::fill_n(sums, group.clusters, ClusterSums{});
  for (std::size_t i = 0; i < static_cast<std::size_t>(group.drawn); ++i)
    sums[ws.slot_cluster[i]].add(ws.slot_x[i], std::max(drawn[i], 0.0f));
  float* centroid = group.cluster_weight(h);
  double mass = 0;
  double error_square = 0;
  float top = 0;
  for (std::int64_t c = 0; c < group.clusters; ++c) {
    const float rest = cluster_rest(centroid[c], sums[c].drawn);
    const ClusterShare share = cluster_share(rest, sums[c].x, sums[c].x_square);
    const std::size_t at = static_cast<std::size_t>(c);
    ws.cluster_drawn[at] = share.drawn;
    centroid[c] = share.centroid;
    mass += static_cast<double>(share.centroid);
    top = std::max(top, share.centroid);
    const float square =
        cluster_rest_square(rest, group.cluster_square(h)[c], sums[c].drawn_square);
    error_square += static_cast<double>(ws.cluster_spread_square[at] * square);
  }
  double drawn_mass = 0;
  double drawn_error = 0;
  float drawn_top = 0;
  group.kernels.cluster_counts(ws.slot_y.data(), ws.slot_cluster.data(), ws.cluster_drawn.data(),
                               ws.cluster_spread_square.data(), group.drawn, drawn, drawn_mass,
                               drawn_error, drawn_top);
  state.output_error = output_error(error_square + drawn_error, state.denominator);
  state.correction = static_cast<float>(
      cluster_correction(mass + drawn_mass, known, plain, state.bound * state.denominator));
  return std::max(top, drawn_top) * state.correction;
}

}  // namespace verkv::cpu
