// Shared memory of a block that has one query head, and how its threads share the tokens.
#ifndef VERKV_CUDA_HEAD_SHARED_CUH
#define VERKV_CUDA_HEAD_SHARED_CUH

#include <cstdint>

#include <verkv/certificate.hpp>
#include <verkv/fetch_plan.hpp>

#include "step_workspace.hpp"
#include "tuning.hpp"

namespace verkv::cuda {

inline constexpr int kHeadWarps = kHeadThreads / 32;
inline constexpr int kHalfWarps = kHeadThreads / kLanes;
static_assert(kHalfWarps <= 32, "a warp scans what the half warps have");
// Threads that have a row of 16 tokens, and rows of a block of 512.
inline constexpr int kLaneParts = kLanes / static_cast<int>(kLanesPerThread);
inline constexpr int kRowsPerBlock = kBlockTokens / kLanes;
// Most sums and largest values of one lane_sums().
inline constexpr int kMostSums = 3;
inline constexpr int kMostTops = 2;
static_assert(kMostSums + kMostTops <= kHeadWarps);
// Sums over what clusters count (clusters.cuh).
inline constexpr int kClusterSums = 4;

// What the search for a threshold holds beside its brackets; one thread writes it.
struct SearchShared {
  double denominator;
  double log_term;
  double target;
  // Bits of the list in lane layout.
  std::uint32_t* active;
  SettledTerms settled;
  float beta_all;
};

struct HeadShared {
  SearchShared search;
  float sum[kMostSums][kSumSlots];
  double total[kMostSums];
  float warp_top[kMostTops][kHeadWarps];
  float top[kMostTops];
  int count[kHalfWarps];
  unsigned histogram[256];
  float sample[kSearchFew];
  float sorted[kSearchFew];
  int distinct;
  unsigned digit;
  std::int64_t left;
  std::int64_t ties;
  float pivot;
  // Of the estimate by clusters: what clusters know, if they do, may be so far from the plain
  // estimate of D; sums of each warp.
  double slack;
  bool useful;
  double cluster_sum[kClusterSums][kHeadWarps];
};

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_HEAD_SHARED_CUH
