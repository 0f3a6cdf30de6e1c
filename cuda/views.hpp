// What kernels are given: plain structures of device addresses and numbers, no ownership. The
// backend fills them, kernels read them; their meaning is that of the CPU backend's HeadStore and
// LayerShape, so that every kernel has a CPU loop to be equal to.
#ifndef VERKV_CUDA_VIEWS_HPP
#define VERKV_CUDA_VIEWS_HPP

#include <cstddef>
#include <cstdint>

#include <verkv/fetch_plan.hpp>
#include <verkv/reports.hpp>
#include <verkv/settings.hpp>
#include <verkv/sketch.hpp>
#include <verkv/types.hpp>

#include "fetch_rules.hpp"

namespace verkv::cuda {

// One (sequence, layer, KV head). Lives in device memory, in a table [slot][KV head] per layer, so
// that a captured step sees lengths that changed since.
// Positions [0, compressed) have sketch and odds, which lie in the order of HeadOrder, by *place*;
// of them the first `drawn` resident slots hold those drawn, in order of place. Positions
// [compressed, tokens) are the local window, in the resident slots that follow, and their places
// are their positions: residents = drawn + tokens - compressed.
// Every array starts at a multiple of 16 bytes: kernels read codes, scales and odds by
// words and rows by 16 bytes where their parts are multiples of that.
struct HeadView {
  std::int64_t tokens = 0;
  std::int64_t compressed = 0;
  std::int64_t drawn = 0;
  // Host tier: key and value of a token side by side, rows of row_bytes(layer) bytes. Main memory
  // by the address that the device reads it at (host_buffer.hpp).
  const std::byte* host_rows = nullptr;
  // Positions of places [0, compressed); beside the host tier, so that the fast tier need not hold
  // what only tokens that move are asked for.
  const std::uint32_t* place_position = nullptr;
  // Fast tier, by resident slot.
  std::byte* resident_keys = nullptr;
  std::byte* resident_values = nullptr;
  std::uint32_t* resident_place = nullptr;
  // Fast tier, by place; whole groups of 16 are readable.
  std::uint8_t* codes = nullptr;
  Positive16* scales = nullptr;
  Positive16* odds = nullptr;
  float* channel_means = nullptr;
  // Fast tier, by cluster: centroids, rows of value_dim elements, and spreads
  // (src/compression.hpp); null unless LayerView::clusters.
  std::byte* centroids = nullptr;
  Positive16* spreads = nullptr;
  // The form of the head's codes, and its basis (src/sketch_basis.hpp).
  std::int32_t sketch_dim = 0;
  std::int32_t sketch_fine = 0;
  SketchBands sketch_bands;
  float basis_unit = 1;
  const float* basis_encode = nullptr;  // [sketch_dim][key_dim]; only while tokens are encoded
  const Half* basis_query = nullptr;    // [sketch_dim][key_dim]
  // Scores of the local window, by position - compressed.
  float* window_square = nullptr;
  std::uint32_t* window_steps = nullptr;
  // What the queries of tokens [first_scored, tokens) gave to the window and what has still to be
  // taken in: row r is of position first_scored + r, and counts where has_given[r] is not 0. Null:
  // queries do not score. [kMostScoredTokens rows at most][given_stride], and as many flags.
  float* given = nullptr;
  std::uint32_t* has_given = nullptr;
  std::int64_t given_stride = 0;
  std::int64_t first_scored = 0;

  VERKV_HD std::int64_t residents() const { return drawn + (tokens - compressed); }
};

// What is fixed for a layer; goes to kernels by value.
struct LayerView {
  int kv_heads = 1;
  int group = 1;  // query heads per KV head
  int key_dim = 0;
  int value_dim = 0;
  float scale = 1;
  float soft_cap = 0;                  // 0: none
  const float* sink_logits = nullptr;  // [query head], in device memory; null: none
  DType storage = DType::f16;
  SketchShape sketch;                   // the largest; each head has its own
  bool clusters = false;                // estimates by clusters
  SketchLevels levels = kSketchLevels;  // device code cannot index constants of the host
  FetchFlags fetch;
  StopRules rules;
  float cap = 2;
  std::int64_t limit_tokens = 0;  // 0: no limit

  VERKV_HD int query_heads() const { return kv_heads * group; }
  VERKV_HD std::int64_t row_bytes() const {
    return static_cast<std::int64_t>(key_dim + value_dim) *
           static_cast<std::int64_t>(size_bytes(storage));
  }
};

struct BadNumber;  // bad_number.hpp

// Whose query a row of a batch is: that of the last token of the sequence in `slot` but `back`. A slot
// of -1 is a row that gets no answer.
struct StepRow {
  std::int32_t slot = -1;
  std::int32_t back = 0;
  friend bool operator==(const StepRow&, const StepRow&) = default;
};

// One decode step of a ragged batch on one layer. All addresses are device addresses; strides in
// elements.
struct StepView {
  LayerView layer;
  const HeadView* heads = nullptr;  // [slot][KV head]
  const StepRow* batch = nullptr;   // [row]
  int rows = 0;
  const void* queries = nullptr;  // [row][query head][key_dim]
  DType query_type = DType::f32;
  std::int64_t query_row_stride = 0;
  std::int64_t query_head_stride = 0;
  float* output = nullptr;                   // [row][query head][value_dim], dense
  float* lse = nullptr;                      // [row][query head], or null
  QueryHeadReport* query_reports = nullptr;  // [row][query head]
  KvHeadReport* kv_reports = nullptr;        // [row][KV head]
  // Upper bounds over the rows: grids and strides of the workspace follow them, so that a captured
  // step stays valid while the lengths stay below.
  std::int64_t most_compressed = 0;
  std::int64_t most_residents = 0;
  std::byte* workspace = nullptr;       // step_workspace_bytes(...) bytes, 256-byte aligned
  LayerStatistics* counters = nullptr;  // the step is added to them; null: it is not counted
  BadNumber* bad = nullptr;             // of queries that are not finite; null: nobody looks
  std::int64_t layer_index = 0;         // for `bad`
};

// Residents that a row sees of its sequence's head.
VERKV_HD inline std::int64_t residents_of(const HeadView& head, const StepRow& row) {
  const std::int64_t window = head.tokens - head.compressed - row.back;
  // A step that is replayed has checked nothing.
  return head.drawn + (window > 0 ? window : 0);
}

// The form of a head's codes.
VERKV_HD inline SketchShape sketch_of(const LayerView& layer, const HeadView& head) {
  if (!has_codes(layer.sketch.kind)) return layer.sketch;
  return {layer.sketch.kind, head.sketch_dim, head.sketch_fine};
}

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_VIEWS_HPP
