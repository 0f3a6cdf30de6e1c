// The estimate by clusters (verkv/clusters.hpp) of one query head by a block of threads: what its
// drawn tokens and centroids count, for the attention. The loops of src/cpu/clusters.cpp; nothing
// decided hangs on their sums, but whether there is a cluster that weighs something.
#ifndef VERKV_CUDA_CLUSTERS_CUH
#define VERKV_CUDA_CLUSTERS_CUH

#include <cstdint>

#include <verkv/attention.hpp>
#include <verkv/clusters.hpp>
#include <verkv/shrinkage.hpp>
#include <verkv/sketch_error.hpp>

#include "masks.cuh"
#include "ranks.cuh"
#include "sums.cuh"
#include "terms.cuh"
#include "tuning.hpp"

namespace verkv::cuda {

class ClusterPasses {
 public:
  VERKV_DEVICE ClusterPasses(const StepArguments& arguments, const HeadView& view,
                             std::int64_t query_head, const std::uint32_t* fetched)
      : compressed_(view.compressed),
        drawn_(view.drawn),
        clusters_(clusters_of(view.compressed)),
        odds_(view.odds),
        spread_(view.spreads),
        place_(view.resident_place),
        fetched_(fetched),
        weight_(arguments.workspace.weight + query_head * arguments.workspace.token_stride),
        logit_(arguments.workspace.resident_logit +
               query_head * arguments.workspace.resident_stride),
        factor_(arguments.workspace.cluster_factor +
                query_head * arguments.workspace.cluster_stride),
        centroid_(arguments.workspace.centroid_logit +
                  query_head * arguments.workspace.cluster_stride) {}

  // The sketched weights of the clusters, where their centroids' logarithms will be, and their
  // squares. Returns how many of them this thread knows to be above 0.
  VERKV_DEVICE int sum_weights() const {
    const int part = threadIdx.x % kLaneParts;
    const std::int64_t own = threadIdx.x / kLaneParts;
    int count = 0;
    // All of a warp makes the same rounds: its folds are one instruction.
    for (std::int64_t c = own; c - own % (32 / kLaneParts) < clusters_;
         c += kHeadThreads / kLaneParts) {
      float lane[kLanesPerThread] = {};
      float square[kLanesPerThread] = {};
      if (c < clusters_) add_weights(c, part, lane, square);
      const float sum = fold_lanes(lane);
      const float all = fold_lanes(square);
      if (c >= clusters_ || part != 0) continue;
      centroid_[c] = sum;
      factor_[c] = all;
      count += sum > 0;
    }
    return count;
  }

  // Of clusters: what the centroid counts, and what a drawn token counts of its y. Adds the
  // centroids of this thread to out_mass, and to out_error what tokens that are not drawn add to
  // (5). After a barrier; another must follow.
  VERKV_DEVICE void share(float beta, float cap, double& out_mass, double& out_error) const {
#pragma unroll 1
    for (std::int64_t c = threadIdx.x; c < clusters_; c += kHeadThreads) {
      const std::int64_t end_place = (c + 1) * kClusterTokens;
      float sum = 0;
      float square = 0;
      float drawn = 0;
      float drawn_square = 0;
#pragma unroll 1
      for (std::int64_t slot = first_slot(c * kClusterTokens); slot < drawn_; ++slot) {
        const std::uint32_t place = place_[slot];
        if (place >= end_place) break;
        if (!is_estimated(place)) continue;
        const float w = weight_[place];
        const float x =
            beyond_itself(w * drawn_coefficient(w, w, to_float(odds_[place]), beta, cap), w);
        sum += x;
        square += x * x;
        drawn += w;
        drawn_square += w * w;
      }
      const float rest = cluster_rest(centroid_[c], drawn);
      const ClusterShare share = cluster_share(rest, sum, square);
      const float rest_square = cluster_rest_square(rest, factor_[c], drawn_square);
      factor_[c] = share.drawn;
      centroid_[c] = share.centroid;
      out_mass += static_cast<double>(share.centroid);
      out_error += static_cast<double>(spread_square(c) * rest_square);
    }
  }

  // Adds what this thread's drawn slots predict, their c v and v, and what they add to (5).
  VERKV_DEVICE void sum_drawn(float shift, float beta, float cap, double& out_mass,
                              double& out_plain, double& out_known, double& out_error) const {
#pragma unroll 1
    for (std::int64_t slot = threadIdx.x; slot < drawn_; slot += kHeadThreads) {
      const std::uint32_t place = place_[slot];
      if (!is_estimated(place)) continue;
      const std::uint32_t c = place / static_cast<std::uint32_t>(kClusterTokens);
      const Term term = term_of(slot, place, shift, beta, cap);
      const float predicted = factor_[c] * beyond_itself(term.cv, term.v);
      out_mass += static_cast<double>(predicted);
      out_plain += static_cast<double>(term.cv);
      out_known += static_cast<double>(term.v);
      out_error += static_cast<double>(spread_square(c) * capped_square(predicted));
    }
  }

  // Leaves logarithms of what drawn slots and centroids count, what is predicted multiplied by
  // `correction`; of slots that count exactly, the logit relative to the shift.
  VERKV_DEVICE void count(float shift, float beta, float cap, float correction) const {
#pragma unroll 1
    for (std::int64_t slot = threadIdx.x; slot < drawn_; slot += kHeadThreads) {
      const std::uint32_t place = place_[slot];
      const float logit = logit_[slot] - shift;
      float counts = logit;
      if (is_estimated(place)) {
        const std::uint32_t c = place / static_cast<std::uint32_t>(kClusterTokens);
        const Term term = term_of(slot, place, shift, beta, cap);
        const float more = correction * (factor_[c] * beyond_itself(term.cv, term.v));
        // A weight too small for a number counts as itself where nothing is predicted by it.
        if (more > 0) counts = fmaxf(logit, approximate_log(term.v + more));
      }
      logit_[slot] = counts;
    }
#pragma unroll 1
    for (std::int64_t c = threadIdx.x; c < clusters_; c += kHeadThreads)
      centroid_[c] = approximate_log(correction * centroid_[c]);
  }

 private:
  // c v and v of a drawn slot (1).
  struct Term {
    float cv;
    float v;
  };
  VERKV_DEVICE Term term_of(std::int64_t slot, std::uint32_t place, float shift, float beta,
                            float cap) const {
    const float v = weight_exp(logit_[slot] - shift);
    return {
        cluster_term(v * drawn_coefficient(weight_[place], v, to_float(odds_[place]), beta, cap)),
        v};
  }

  // Whether a token is of L and neither fetched nor without a weight that is a number.
  VERKV_DEVICE bool is_estimated(std::uint32_t place) const {
    return is_low(odds_[place]) && weight_[place] >= 0 && !in_mask(fetched_, place);
  }

  VERKV_DEVICE float spread_square(std::int64_t c) const {
    const float spread = to_float(spread_[c]);
    return spread * spread;
  }

  // Lanes of a thread, in the order of src/sum_order.hpp, and those of the squares.
  VERKV_DEVICE void add_weights(std::int64_t c, int part, float (&lane)[kLanesPerThread],
                                float (&square)[kLanesPerThread]) const {
    static_assert(kClusterTokens % kLanes == 0);
    constexpr int kOwn = static_cast<int>(kLanesPerThread);
    const float* weight = weight_ + c * kClusterTokens + part * kOwn;
    const std::int64_t left = compressed_ - c * kClusterTokens;
    const auto add = [&](int j, float w) {
      lane[j] += w;
      square[j] = fmaf(w, w, square[j]);
    };
    if (left >= kClusterTokens) {
#pragma unroll
      for (int row = 0; row < kClusterTokens; row += kLanes) {
        const auto own = *reinterpret_cast<const PerLane<float>*>(weight + row);
#pragma unroll
        for (int j = 0; j < kOwn; ++j) add(j, own.lane[j]);
      }
      return;
    }
#pragma unroll 1
    for (int row = 0; row < left; row += kLanes) {
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        if (row + part * kOwn + j < left) add(j, weight[row + j]);
      }
    }
  }

  // The first drawn slot whose place is not before this one.
  VERKV_DEVICE std::int64_t first_slot(std::int64_t place) const {
    std::int64_t low = 0;
    std::int64_t high = drawn_;
#pragma unroll 1
    while (low < high) {
      const std::int64_t middle = low + (high - low) / 2;
      if (place_[middle] < place) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  std::int64_t compressed_;
  std::int64_t drawn_;
  std::int64_t clusters_;
  const Positive16* odds_;
  const Positive16* spread_;
  const std::uint32_t* place_;
  const std::uint32_t* fetched_;
  const float* weight_;
  float* logit_;
  float* factor_;
  float* centroid_;
};

// Sums over the block, each thread adding its own; all threads call and get them. In no fixed order
// of terms: nothing decided may hang on them.
VERKV_DEVICE void add_over_block(HeadShared& shared, double (&sum)[kClusterSums]) {
#pragma unroll
  for (int s = 0; s < kClusterSums; ++s) {
#pragma unroll
    for (int half = 16; half > 0; half /= 2) sum[s] += __shfl_xor_sync(kWholeWarp, sum[s], half);
    if (threadIdx.x % 32 == 0) shared.cluster_sum[s][threadIdx.x / 32] = sum[s];
  }
  __syncthreads();
#pragma unroll
  for (int s = 0; s < kClusterSums; ++s) {
    sum[s] = 0;
#pragma unroll
    for (int warp = 0; warp < kHeadWarps; ++warp) sum[s] += shared.cluster_sum[s][warp];
  }
}

// Leaves what the attention needs of one query head, and whether it needs it, in the workspace;
// out_error: the error of the output, unless clusters know nothing. bound, sketch_error: as
// reported; those of the first thread count. All threads call.
VERKV_DEVICE void share_clusters(HeadShared& shared, const StepArguments& arguments,
                                 const HeadView& view, std::int64_t query_head, double bound,
                                 double sketch_error, double& out_error) {
  const LayerView& layer = arguments.view.layer;
  const StepWorkspace& ws = arguments.workspace;
  HeadState& state = ws.heads[query_head];
  const std::int64_t pair = query_head / layer.group;
  const ClusterPasses head(arguments, view, query_head, ws.fetched + pair * ws.mask_stride);
  if (threadIdx.x == 0) {
    shared.slack = bound * state.denominator;
    shared.useful = !is_useless(sketch_error);
  }
  double sum[kClusterSums] = {};
  double& mass = sum[0];
  double& plain = sum[1];
  double& known = sum[2];
  double& error = sum[3];
  const int count = head.sum_weights();
  const bool by_clusters = count_in_block(shared, count) > 0 && shared.useful;
  if (threadIdx.x == 0) state.by_clusters = by_clusters;
  if (!by_clusters) return;
  head.share(state.beta, layer.cap, mass, error);
  __syncthreads();
  head.sum_drawn(state.shift, state.beta, layer.cap, mass, plain, known, error);
  add_over_block(shared, sum);
  const double correction = cluster_correction(mass, known, plain, shared.slack);
  head.count(state.shift, state.beta, layer.cap, static_cast<float>(correction));
  out_error = output_error(error, state.denominator);
}

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_CLUSTERS_CUH
