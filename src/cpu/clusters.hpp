// The estimate by clusters (verkv/clusters.hpp) in a step.
#ifndef VERKV_SRC_CPU_CLUSTERS_HPP
#define VERKV_SRC_CPU_CLUSTERS_HPP

#include "cpu/workspace.hpp"

namespace verkv::cpu {

// The sketched weights of the clusters of every query head, from the plan's weights, those of
// fetched tokens being 0.
void sum_clusters(HeadGroup& group);

// For one query head, relative to the plan's shift: what centroids count, in place of the clusters'
// weights (HeadGroup::cluster_weight), and what is predicted by drawn tokens beside themselves, in
// place of their sketched weights (resident_sketched), both still to be multiplied by
// HeadState::correction. Returns the largest of all, corrected.
float share_clusters(HeadGroup& group, int h);

}  // namespace verkv::cpu

#endif  // VERKV_SRC_CPU_CLUSTERS_HPP
