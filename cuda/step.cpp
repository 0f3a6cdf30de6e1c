#include "step.hpp"

#include <algorithm>

#include <verkv/clusters.hpp>

#include "step_kernels.hpp"
#include "step_workspace.hpp"
#include "tuning.hpp"

namespace verkv::cuda {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

int splits(std::int64_t pairs, std::int64_t pieces, std::int64_t blocks) {
  const std::int64_t wanted = ceil_div(blocks, std::max<std::int64_t>(1, pairs));
  return static_cast<int>(std::clamp<std::int64_t>(std::min(wanted, pieces), 1, kMostSplits));
}

// The number of splits with which the last block is done first, by a guess: every block prepares
// the query anew, and what does not run at once waits.
int score_splits(std::int64_t pairs, std::int64_t tokens) {
  const std::int64_t most =
      std::clamp<std::int64_t>(ceil_div(tokens, kScoreTokens), 1, kMostSplits);
  std::int64_t best = 1;
  std::int64_t least = 0;
  for (std::int64_t n = 1; n <= most; ++n) {
    const std::int64_t time =
        ceil_div(pairs * n, kScoreBlocks) * (ceil_div(tokens, n) + kScoreTokens);
    if (n > 1 && time >= least) continue;
    best = n;
    least = time;
  }
  return static_cast<int>(best);
}

// Centroids of one KV head that a step may read.
std::int64_t most_clusters(const LayerView& layer, std::int64_t most_compressed) {
  return layer.clusters ? clusters_of(most_compressed) : 0;
}

bool searches(const LayerView& layer) { return layer.fetch.by_rules && layer.rules.certifies(); }

StepGrid grid_for(const LayerView& layer, int rows, std::int64_t most_compressed,
                  std::int64_t most_residents, std::int64_t blocks) {
  StepGrid grid;
  const std::int64_t pairs = static_cast<std::int64_t>(rows) * layer.kv_heads;
  grid.score_parts = static_cast<int>(ceil_div(layer.group, kScoreHeads));
  grid.score_splits = score_splits(pairs * grid.score_parts, most_compressed + most_residents);
  grid.units = static_cast<int>(ceil_div(layer.value_dim, 4));
  // As many tiles of heads as the warps of a block have columns for.
  const int columns = static_cast<int>(ceil_div(layer.value_dim, 64));
  grid.part_heads =
      std::min({layer.group, kAttentionHeads, kTileHeads * (kMostColumns / std::max(1, columns))});
  grid.warp_columns = ceil_div(grid.part_heads, kTileHeads) * columns > kMostColumns / 2 ? 2 : 1;
  grid.attention_parts = static_cast<int>(ceil_div(layer.group, grid.part_heads));
  // How many tokens move is not known here; the bound is what could.
  grid.attention_splits = splits(pairs * grid.attention_parts,
                                 ceil_div(most_residents + most_clusters(layer, most_compressed) +
                                              most_compressed / kTokensPerMoved,
                                          kAttentionRows),
                                 blocks);
  const std::int64_t row = layer.row_bytes() + 128;
  grid.tile = static_cast<int>(std::clamp<std::int64_t>(kTileBytes / row, kLeastTile, kMostTile));
  return grid;
}

}  // namespace

StepGrid step_grid(const LayerView& layer, int rows, std::int64_t most_compressed,
                   std::int64_t most_residents) {
  return grid_for(layer, rows, most_compressed, most_residents, kAttentionBlocks);
}

std::int64_t lay_out(const LayerView& layer, const StepGrid& grid, int rows,
                     std::int64_t most_compressed, std::int64_t most_residents, std::byte* base,
                     StepWorkspace& out_workspace) {
  StepWorkspace& ws = out_workspace;
  const std::int64_t query_heads = static_cast<std::int64_t>(rows) * layer.query_heads();
  const std::int64_t kv_heads = static_cast<std::int64_t>(rows) * layer.kv_heads;
  ws.token_stride = ceil_div(most_compressed, kBlockTokens) * kBlockTokens;
  ws.resident_stride = ceil_div(most_residents, kLanes) * kLanes;
  ws.mask_stride = ws.token_stride / 32;
  ws.cluster_stride = most_clusters(layer, most_compressed);
  std::int64_t at = 0;
  const auto place = [&](auto*& pointer, std::int64_t count) {
    using Element = std::remove_reference_t<decltype(*pointer)>;
    pointer = reinterpret_cast<Element*>(base + at);
    at += ceil_div(count * static_cast<std::int64_t>(sizeof(Element)), 256) * 256;
  };
  place(ws.weight, query_heads * ws.token_stride);
  place(ws.resident_logit, query_heads * ws.resident_stride);
  place(ws.centroid_logit, query_heads * ws.cluster_stride);
  place(ws.cluster_factor, query_heads * ws.cluster_stride);
  place(ws.slice_top, query_heads * grid.score_splits);
  place(ws.heads, query_heads);
  place(ws.wanted, query_heads * ws.mask_stride);
  place(ws.active, query_heads * ws.mask_stride);
  if (searches(layer)) {
    place(ws.plan_index, query_heads * ws.token_stride);
  } else {
    ws.plan_index = nullptr;
  }
  place(ws.groups, kv_heads);
  place(ws.fetched, kv_heads * ws.mask_stride);
  place(ws.moved, kv_heads * ws.token_stride);
  place(ws.finished, kv_heads * grid.attention_parts);
  place(ws.partial_top, query_heads * grid.attention_splits);
  place(ws.partial_sum, query_heads * grid.attention_splits);
  place(ws.partial_output, query_heads * grid.attention_splits * 4 * grid.units);
  return at;
}

std::int64_t step_workspace_bytes(const LayerView& layer, int rows, std::int64_t most_compressed,
                                  std::int64_t most_residents) {
  // Fewer rows are cut into more splits, and rounding up may give them more blocks altogether: a
  // block more for every pair covers that. For the scores there is room for any number.
  const std::int64_t parts = std::max(1, layer.group);
  const std::int64_t blocks = kAttentionBlocks + rows * layer.kv_heads * parts;
  StepGrid grid = grid_for(layer, rows, most_compressed, most_residents, blocks);
  grid.score_splits = static_cast<int>(kMostSplits);
  StepWorkspace unused;
  return lay_out(layer, grid, rows, most_compressed, most_residents, nullptr, unused);
}

int step_shared_bytes(const LayerView& layer) {
  return attention_shared_bytes(layer, step_grid(layer, 1, 0, 0));
}

cudaError_t launch_step(const StepView& step, cudaStream_t stream) {
  if (step.rows == 0) return cudaSuccess;
  StepArguments arguments;
  arguments.view = step;
  arguments.grid = step_grid(step.layer, step.rows, step.most_compressed, step.most_residents);
  lay_out(step.layer, arguments.grid, step.rows, step.most_compressed, step.most_residents,
          step.workspace, arguments.workspace);
  cudaError_t error = launch_scores(arguments, stream);
  if (error == cudaSuccess) error = launch_plan(arguments, stream);
  if (error == cudaSuccess) error = launch_certificate(arguments, stream);
  if (error == cudaSuccess) error = launch_attention(arguments, stream);
  return error;
}

}  // namespace verkv::cuda
