// What the launches of a step leave for each other, in StepView::workspace. Plain structures and
// arithmetic on sizes, no CUDA: tests look into it too.
//
// A token's bit in a mask is in "lane layout": word (block * 16 + lane), bit k is token
// block * 512 + 16 * k + lane. So a mask word belongs to the thread that adds up these tokens in
// the fixed order of sums (src/sum_order.hpp).
#ifndef VERKV_CUDA_STEP_WORKSPACE_HPP
#define VERKV_CUDA_STEP_WORKSPACE_HPP

#include <cstdint>

#include "sum_order.hpp"
#include "tuning.hpp"
#include "views.hpp"

namespace verkv::cuda {

// A block of the attention takes its query heads by tiles, and value coordinates by columns of 64.
// A warp has two columns at most.
inline constexpr int kTileHeads = 4;
inline constexpr int kMostColumns = 2 * kAttentionThreads / 32;
// Most fetched rows in the shared memory of such a block at a time: four warps have eight each.
inline constexpr int kMostTile = 32;

// What a step knows of one query head.
struct HeadState {
  // D of the plan, relative to shift.
  double denominator = 0;
  // Certificate of the plan, enlarged outward; only where `known`.
  double bound = 0;
  std::int64_t planned = 0;
  // Of the plan's weights.
  float shift = 0;
  // Of the plan, then of what is not fetched.
  float beta = 0;
  // Whether D is a positive finite number.
  std::int32_t computable = 0;
  // Whether the plan has computed `bound` over all tokens.
  std::int32_t known = 0;
  // Whether the attention estimates by clusters; of the certificate.
  std::int32_t by_clusters = 0;
  std::int32_t unused = 0;
};

// What a step knows of one KV head.
struct GroupState {
  std::int64_t fetched = 0;
  std::int64_t moved = 0;
  // Query heads whose plan is written.
  std::uint32_t planned_heads = 0;
  std::uint32_t unused = 0;
};

// [query head] is row * query_heads + head, [KV head] is row * kv_heads + head. Strides in
// elements.
struct StepWorkspace {
  std::int64_t token_stride = 0;     // a multiple of 512
  std::int64_t resident_stride = 0;  // a multiple of 16
  std::int64_t mask_stride = 0;      // token_stride / 32
  std::int64_t cluster_stride = 0;   // 0 unless the layer estimates by clusters
  // [query head][token]: logits, then weights; the certificate sets those of fetched tokens to 0.
  float* weight = nullptr;
  // [query head][resident slot]. Where a head estimates by clusters, the certificate makes them of
  // drawn slots logarithms of what these count, relative to the plan's shift.
  float* resident_logit = nullptr;
  // [query head][cluster], where a head estimates by clusters: logarithms of what centroids count,
  // relative to the plan's shift.
  float* centroid_logit = nullptr;
  // [query head][cluster], likewise: ClusterShare::drawn, of the certificate for itself.
  float* cluster_factor = nullptr;
  float* slice_top = nullptr;  // [query head][score split]
  HeadState* heads = nullptr;  // [query head]
  // [query head] masks: what the head asks for; tokens with weight > beta * odds.
  std::uint32_t* wanted = nullptr;
  std::uint32_t* active = nullptr;
  // [query head][token]: the list of a search; null where no search can happen.
  std::uint32_t* plan_index = nullptr;
  GroupState* groups = nullptr;      // [KV head]
  std::uint32_t* fetched = nullptr;  // [KV head] masks
  std::uint32_t* moved = nullptr;    // [KV head][token], positions in order of place
  // [KV head][part of the attention]: blocks that have written their partial sums.
  std::uint32_t* finished = nullptr;
  // [query head][attention split]; outputs are padded to a multiple of four coordinates.
  float* partial_top = nullptr;
  float* partial_sum = nullptr;
  float* partial_output = nullptr;
};

// How a step is cut into blocks: depends on sizes alone, so that a captured step stays valid.
struct StepGrid {
  int score_splits = 1;
  int score_parts = 1;
  int attention_splits = 1;
  int attention_parts = 1;
  // Query heads of a part of the attention.
  int part_heads = 1;
  // Value coordinates of one head, in fours.
  int units = 1;
  // A warp's columns of 64 value coordinates of four heads.
  int warp_columns = 1;
  // Fetched rows that are in shared memory at a time.
  int tile = 1;
};

StepGrid step_grid(const LayerView& layer, int rows, std::int64_t most_compressed,
                   std::int64_t most_residents);

// Lays the workspace out from `base`; returns its bytes.
std::int64_t lay_out(const LayerView& layer, const StepGrid& grid, int rows,
                     std::int64_t most_compressed, std::int64_t most_residents, std::byte* base,
                     StepWorkspace& out_workspace);

// What a launch is given, by value.
struct StepArguments {
  StepView view;
  StepWorkspace workspace;
  StepGrid grid;
};

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_STEP_WORKSPACE_HPP
