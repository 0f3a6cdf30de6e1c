// What the launches of a step leave for each other, in StepView::workspace. Plain structures and
// arithmetic on sizes, no CUDA: tests look into it too.
//
// A token's bit in a mask is in "lane layout": word (block * 16 + lane), bit k is token
// block * 512 + 16 * k + lane. So a mask word belongs to the thread that adds up these tokens in
// the fixed order of sums (src/cpu/kernels.hpp).
#ifndef VERKV_CUDA_STEP_WORKSPACE_HPP
#define VERKV_CUDA_STEP_WORKSPACE_HPP

#include <cstdint>

#include "views.hpp"

namespace verkv::cuda {

inline constexpr int kLanes = 16;
inline constexpr int kBlockTokens = 512;
// Most query heads that one block of the scores takes: two matrix products of four.
inline constexpr int kScoreHeads = 8;
// Most query heads that one block of the attention takes; a larger group reads its rows once a
// part.
inline constexpr int kAttendHeads = 16;
// Threads of such a block. They take its query heads by tiles, and value coordinates by columns of
// 64, of which a warp has two at most.
inline constexpr int kAttendThreads = 256;
inline constexpr int kTileHeads = 4;
inline constexpr int kMostColumns = 2 * kAttendThreads / 32;
inline constexpr int kMostTile = 32;
inline constexpr int kMostAttendSplits = 64;

// What a step knows of one query head.
struct HeadState {
  double denominator = 0;  // D of the plan, relative to shift
  double bound = 0;  // certificate of the plan, enlarged outward; valid where `certified` says
  std::int64_t planned = 0;
  float shift = 0;          // of the plan's weights
  float beta = 0;           // of the plan, then of what is not fetched
  std::int32_t usable = 0;  // D is a positive finite number
  std::int32_t known = 0;   // bound has been computed over all tokens
};

// What a step knows of one KV head.
struct GroupState {
  std::int64_t fetched = 0;
  std::int64_t moved = 0;
  std::uint32_t planned_heads = 0;  // query heads whose plan is written
  std::uint32_t unused = 0;
};

// [query head] is row * query_heads + head, [KV head] is row * kv_heads + head. Strides in
// elements.
struct StepWorkspace {
  std::int64_t token_stride = 0;     // a multiple of 512
  std::int64_t resident_stride = 0;  // a multiple of 16
  std::int64_t mask_stride = 0;      // token_stride / 32
  float* weight =
      nullptr;  // [query head][token]: logits, then weights, 0 where fetched after the certificate
  float* resident_logit = nullptr;      // [query head][resident slot]
  float* slice_top = nullptr;           // [query head][score split]
  HeadState* heads = nullptr;           // [query head]
  std::uint32_t* wanted = nullptr;      // [query head] masks
  std::uint32_t* active = nullptr;      // [query head] masks: tokens with weight > beta * odds
  std::uint32_t* plan_index = nullptr;  // [query head][token]; null where no search can happen
  GroupState* groups = nullptr;         // [KV head]
  std::uint32_t* fetched = nullptr;     // [KV head] masks
  std::uint32_t* moved = nullptr;       // [KV head][token], positions ascending
  std::uint32_t* attended = nullptr;    // [KV head][part]: blocks that have written their part
  float* partial_top = nullptr;         // [query head][attend split]
  float* partial_sum = nullptr;         // [query head][attend split]
  float* partial_output = nullptr;      // [query head][attend split][padded value_dim]
};

// How a step is cut into blocks: depends on sizes alone, so that a captured step stays valid.
struct StepGrid {
  int score_splits = 1;
  int score_parts = 1;
  int attend_splits = 1;
  int attend_parts = 1;
  int part_heads = 1;    // query heads of a part of the attention
  int units = 1;         // value coordinates of one head, in fours
  int warp_columns = 1;  // a warp's columns of 64 value coordinates of four heads
  int tile = 1;          // fetched rows that are in shared memory at a time
};

StepGrid step_grid(const LayerView& layer, int rows, std::int64_t most_compressed,
                   std::int64_t most_residents);

// Lays the workspace out from `base`; returns its bytes.
std::int64_t lay_out(const LayerView& layer, const StepGrid& grid, int rows,
                     std::int64_t most_compressed, std::int64_t most_residents, std::byte* base,
                     StepWorkspace& out_workspace);

struct StepArguments {
  StepView view;
  StepWorkspace workspace;
  StepGrid grid;
};

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_STEP_WORKSPACE_HPP
