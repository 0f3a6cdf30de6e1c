// The memory of a step: the buffers of a thread, and one KV head's view of them.
#ifndef VERKV_SRC_CPU_WORKSPACE_HPP
#define VERKV_SRC_CPU_WORKSPACE_HPP

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include <verkv/attention.hpp>
#include <verkv/clusters.hpp>
#include <verkv/fetch_plan.hpp>

#include "cpu/head_store.hpp"
#include "cpu/kernels.hpp"
#include "fetch_rules.hpp"

namespace verkv::cpu {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

// What a step knows of one query head.
struct HeadState {
  // LayerConfig::sink_logits; -infinity where there is none.
  float sink = -kInfinity;
  // Of the plan's weights.
  float shift = 0;
  // D of the plan, relative to shift, and whether it can divide.
  double denominator = 0;
  bool computable = false;
  float beta = 0;
  // The certificate, enlarged outward; that of the rest also for the sketch's error.
  double bound = 0;
  double sketch_error = 0;
  // Whether the attention estimates by clusters.
  bool by_clusters = false;
  float correction = 1;  // cluster_correction
  double output_error = 0;
  // What the stop rules ask for.
  RuleThresholds rules;
  FetchThreshold threshold;
  // The head's whole plan is in the marks (exact order).
  bool marked = false;
  float attention_shift = 0;
  // D_hat, relative to attention_shift.
  double estimate = 0;
};

// Sums over a cluster's drawn tokens (clusters.hpp): of x, x^2, w and w^2, one beside the other, so
// that a token's four are added at once.
struct ClusterSums {
  float x = 0;
  float x_square = 0;
  float drawn = 0;
  float drawn_square = 0;

  void add(float token_x, float weight) {
    x += token_x;
    x_square += token_x * token_x;
    drawn += weight;
    drawn_square += weight * weight;
  }
};

// Tokens of a sequence that a step takes together: their query heads share what is read of the
// sketch and of the residents.
constexpr int rows_together(int group) { return std::max(1, kMaxHeads / group); }

// Of so many residents those that rows which are answered together see at most.
inline std::int64_t seen_together(const LayerShape& shape, std::int64_t residents) {
  if (!shape.config.window) return residents;
  return std::min(residents, *shape.config.window + rows_together(shape.group) - 1);
}

// Numbers in an array of logits up to which rows are taken together: 4 MB. A guess: above it, what
// lies between two rows' use of it falls out of the caches, and the memory of each thread counts.
inline constexpr std::int64_t kSharedLogits = std::int64_t{1} << 20;

// rows_together, but for so long arrays that they would have more than kSharedLogits numbers.
constexpr int rows_together(int group, std::int64_t stride) {
  return static_cast<int>(std::clamp<std::int64_t>(
      kSharedLogits / std::max<std::int64_t>(1, group * stride), 1, rows_together(group)));
}

// What a step reads of a KV head: compressed tokens, those of them that are drawn, the local window.
struct StepLengths {
  std::int64_t compressed = 0;
  std::int64_t drawn = 0;
  std::int64_t window = 0;

  void cover(const StepLengths& other) {
    compressed = std::max(compressed, other.compressed);
    drawn = std::max(drawn, other.drawn);
    window = std::max(window, other.window);
  }
};

// Elements of the arrays of a Workspace. They follow from the lengths that were ever asked for
// together, not from the order in which they were.
struct WorkspaceSizes {
  // Room for steps on a KV head of this shape. Somewhat longer heads have room too.
  void cover(const LayerShape& shape, const FetchRules& rules, const StepLengths& lengths);
  void cover(const WorkspaceSizes& other);
  bool covers(const WorkspaceSizes& other) const;
  std::int64_t bytes() const;

  enum Array {
    query,
    code_query,
    weight,
    resident_logit,
    resident_weight,
    slot_of_group,
    slot,
    cluster_of_group,
    cluster,
    output,
    states,
    file_rows,
    token,
    fetched,
    plan,
    exact,
    exact_scratch,
    kArrays
  };
  std::array<std::int64_t, kArrays> count{};
};

// Buffers of one thread. Sized outside the step, so that the step allocates nothing.
struct Workspace {
  explicit Workspace(const TierMemory* fast = nullptr) : memory_(fast) {}

  // Throws std::bad_alloc, and then is what it was. What it held is gone.
  void resize(const WorkspaceSizes& sizes);
  const WorkspaceSizes& sizes() const { return sizes_; }
  std::int64_t bytes() const { return bytes_; }

  // ---- [row and query head][stride] arrays ----
  // Scaled, zero-padded.
  AlignedVector<float> query;
  // In the sketch's basis, and rounded to 8 bits there.
  AlignedVector<float> basis_query;
  AlignedVector<std::int8_t> code_query;
  // Sketched logits, then weights, then logits of moved tokens, then their weights.
  AlignedVector<float> weight;
  // Exact.
  AlignedVector<float> resident_logit;

  // ---- [query head][stride] arrays, of one row after the other ----
  AlignedVector<float> resident_weight;
  // Sketched weights of drawn slots, -1 where the slot counts exactly; then what is predicted by the
  // slots in their clusters, if there are any.
  AlignedVector<float> drawn_sketched;
  // Of clusters: their sketched weights, then what the centroids count.
  AlignedVector<float> cluster_weight;
  // Sums of their squares.
  AlignedVector<float> cluster_square;
  // Sums of weighted values.
  AlignedVector<float> output;

  // Rows that are read from a file, kBlockRows at a time; what reading came to (HostRows::read).
  AlignedVector<std::byte> file_rows;
  int file_error = 0;
  AlignedVector<HeadState> states;  // [row and query head]
  // The cluster of each drawn slot; squares of spreads.
  AlignedVector<std::uint32_t> slot_cluster;
  AlignedVector<float> cluster_spread_square;
  // Of one query head: x and y of drawn slots; sums over those of each cluster; what a drawn token
  // counts of its y.
  AlignedVector<float> slot_x, slot_y;
  AlignedVector<ClusterSums> cluster_sums;
  AlignedVector<float> cluster_drawn;
  // Odds of drawn slots, infinite for those in H.
  AlignedVector<float> slot_odds;
  // The tokens to fetch, by place, ascending; positions of those of them that are not resident.
  AlignedVector<std::uint32_t> fetched;
  AlignedVector<std::uint32_t> moved;
  // [compressed], 0 between steps.
  AlignedVector<std::uint8_t> mark;
  // Of the search for a threshold (fetch_search.hpp).
  AlignedVector<float> plan_weight, plan_odds, plan_worth;
  AlignedVector<std::uint32_t> plan_place;
  // Of the exact order (Eq. 9), in double.
  AlignedVector<double> exact_weight, exact_odds, exact_gain, exact_scratch;
  AlignedVector<std::uint32_t> exact_order, exact_index;

 private:
  const TierMemory* memory_;
  WorkspaceSizes sizes_;
  std::int64_t bytes_ = 0;
};

// The workspaces of a backend's threads, all of one size. Whatever makes a layer's heads longer calls
// `reserve` once, before it changes anything.
class Workspaces {
 public:
  Workspaces(int threads, const FetchRules& rules, const TierMemory* fast)
      : rules_(rules),
        memory_(fast),
        of_thread_(static_cast<std::size_t>(threads), Workspace(fast)) {}

  // Makes them at least as many and as large. Throws std::bad_alloc; what is there stays usable.
  void reserve(int count, const WorkspaceSizes& sizes);
  // How much more that allocates, with one that is replaced.
  std::int64_t bytes_to_reserve(int count, const WorkspaceSizes& sizes) const;
  // Gives back those beyond `count`, and of the others what is beyond `sizes`.
  void give_back(int count, const WorkspaceSizes& sizes) noexcept;
  // So many tasks may run side by side, of threads [0, count()).
  int count() const { return count_; }
  Workspace& of(int thread) { return of_thread_[static_cast<std::size_t>(thread)]; }
  const FetchRules& rules() const { return rules_; }
  // What a step has noted of reading from a file, if anything; it is forgotten.
  int take_file_error();
  std::int64_t bytes() const;

 private:
  FetchRules rules_;
  const TierMemory* memory_;
  std::vector<Workspace> of_thread_;
  int count_ = 0;
};

// Rows of a batch for which a sequence that is created makes room, as KvCacheManager::attend says.
inline constexpr std::int64_t kRowsPerSequence = 8;

// Consecutive rows of one sequence that one thread answers, one KV head after the other.
struct RowSlice {
  std::int64_t first = 0;
  std::int64_t rows = 1;
  // Newest tokens of the sequence that the first row does not see.
  std::int64_t back = 0;
};

// Between two rows that are asked there may be one that is not.
constexpr std::int64_t most_slices(std::int64_t rows) { return 2 * rows + 1; }

// Of what is known of rows, which so many sequences make room for.
constexpr std::int64_t step_rows_bytes(std::int64_t sequences, std::int64_t query_heads,
                                       std::int64_t kv_heads) {
  const std::int64_t rows = kRowsPerSequence * sequences;
  return static_cast<std::int64_t>(
      sizeof(QueryHeadReport) * static_cast<std::size_t>(rows * query_heads) +
      sizeof(KvHeadReport) * static_cast<std::size_t>(rows * kv_heads) +
      sizeof(RowSlice) * static_cast<std::size_t>(most_slices(rows)));
}

// Rows of a step, of one sequence: `rows` queries of its last tokens from the workspace's `first` on,
// where row 0 is the first of those that are answered together.
// The last of them does not see the newest `back` tokens.
struct QueryRows {
  int first = 0;
  int rows = 1;
  std::int64_t back = 0;
};

// One KV head with the query heads of some rows during a step: what is fixed while the step runs,
// and its arrays in the workspace. Every stage but the logits takes one row, the group of query
// heads.
struct HeadGroup {
  HeadGroup(const Kernels& kernels, const LayerShape& shape, const FetchRules& rules,
            HeadStore& store, Workspace& workspace, const QueryRows& rows);

  const Kernels& kernels;
  const LayerShape& shape;
  const FetchRules& rules;
  HeadStore& store;
  Workspace& workspace;
  // Query heads, and the first in the workspace.
  int heads;
  int first_head;
  std::int64_t compressed;
  // Without those that none of the rows sees.
  std::int64_t residents;
  // Of a sliding window: the first slot of the window that one of the rows sees, and how many slots
  // before it others of the rows see that are answered together.
  std::int64_t first_slot;
  std::int64_t other_slots;
  // The first so many resident slots are drawn ones, the others the local window.
  std::int64_t drawn;
  // 0 unless the layer estimates by clusters.
  std::int64_t clusters;
  std::int64_t query_stride;
  std::int64_t code_stride;
  std::int64_t weight_stride;
  std::int64_t resident_stride;
  std::int64_t drawn_stride;
  std::int64_t cluster_stride;

  // What reading from a file came to: the first error counts.
  void note(int file_error) {
    if (workspace.file_error == 0) workspace.file_error = file_error;
  }

  HeadState& state(int h) { return workspace.states[static_cast<std::size_t>(first_head + h)]; }
  float* query(int h) { return workspace.query.data() + (first_head + h) * query_stride; }
  float* basis_query(int h) {
    return workspace.basis_query.data() + (first_head + h) * query_stride;
  }
  std::int8_t* code_query(int h) {
    return workspace.code_query.data() + (first_head + h) * code_stride;
  }
  float* weight(int h) { return workspace.weight.data() + (first_head + h) * weight_stride; }
  float* cluster_weight(int h) { return workspace.cluster_weight.data() + h * cluster_stride; }
  float* cluster_square(int h) { return workspace.cluster_square.data() + h * cluster_stride; }
  float* resident_logit(int h) {
    return workspace.resident_logit.data() + (first_head + h) * resident_stride + other_slots;
  }
  float* resident_weight(int h) { return workspace.resident_weight.data() + h * resident_stride; }
  float* drawn_sketched(int h) { return workspace.drawn_sketched.data() + h * drawn_stride; }
  float odds(std::int64_t place) const { return to_float(*store.odds(place)); }
  // Whether a compressed token belongs to L.
  bool is_low(std::int64_t place) const {
    return store.odds(place)->bits < kPositive16Infinity.bits;
  }

  // Calls f(slot) for the residents of H: drawn slots with infinite odds, then the local window.
  template <class F>
  void for_high(F&& f) const {
    for (std::int64_t i = 0; i < drawn; ++i) {
      if (workspace.slot_odds[static_cast<std::size_t>(i)] == kInfinity) f(i);
    }
    for (std::int64_t i = drawn; i < residents; ++i) f(i);
  }

  void cap_softly(float* logit, std::int64_t count) const {
    if (!(shape.soft_cap > 0)) return;
    for (std::int64_t i = 0; i < count; ++i) logit[i] = soft_capped(logit[i], shape.soft_cap);
  }

  // Calls f(first head, heads) over parts of the group that a kernel takes at once.
  template <class F>
  void in_parts(F&& f) const {
    for (int first = 0; first < heads; first += kMaxHeads)
      f(first, std::min(kMaxHeads, heads - first));
  }
};

}  // namespace verkv::cpu

#endif  // VERKV_SRC_CPU_WORKSPACE_HPP
