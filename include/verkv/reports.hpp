// What goes in and out of a decode step besides keys and values, and what a cache reports about
// itself.
#ifndef VERKV_REPORTS_HPP
#define VERKV_REPORTS_HPP

#include <cstdint>
#include <span>

#include <verkv/view.hpp>

namespace verkv {

// Name of a sequence, given by KvCacheManager::create_sequence. It means something to that manager
// only: another one gives the same numbers to sequences of its own.
struct SequenceId {
  std::int64_t value = -1;
  friend bool operator==(SequenceId, SequenceId) = default;
};

// A padding row of a batch: output 0, LSE -infinity.
inline constexpr SequenceId kNoSequence{};

// What a step did for one query head.
struct QueryHeadReport {
  // The bound of Eq. 7 on |D_hat - D| / D of the plain estimate over what was not fetched, from
  // sketched weights, enlarged where the sketch was measured to be far off (sketch_error.hpp). D of
  // Estimator::clusters is within twice of it, as often. 0 where the answer is exact, infinite
  // where the bound cannot be computed (a NaN logit) or the sketch not be measured.
  double epsilon = 0;
  // epsilon is not above FetchConfig::epsilon; false where that rule is off, since nothing was
  // promised. A value, not an error: a fetch limit may prevent it. With the rule on, true where the
  // sequence has no token in the layer: nothing is missing from an answer of 0.
  bool certified = false;
  // Tokens that this head alone asked for, residents included.
  std::int64_t planned_tokens = 0;
  // The sketch's error in natural-log units of a weight, as measured on drawn tokens. 0 where the
  // sketch is exact or nothing is compressed; infinite where no token of L was drawn.
  double sketch_error = 0;
  // An estimate, not a bound, of how far the output is from the exact one: a standard error, as a
  // Euclidean length in units of the values (clusters.hpp, (5)). 0 where nothing is estimated,
  // infinite where nothing is known: by Estimator::plain, or with a sketch that is of no use.
  double output_error = 0;
};

// What a step did for one KV head: the union over its group of query heads.
struct KvHeadReport {
  std::int64_t fetched_tokens = 0;  // exact in this step though not always resident
  std::int64_t moved_tokens = 0;    // of those, copied from the host (not resident already)
  std::int64_t moved_bytes = 0;
  std::int64_t resident_tokens = 0;  // read on the fast tier
  bool limited = false;              // FetchConfig::limit_tokens cut the plan
};

// Tokens of one layer. Row i is the next token of sequences[i]; consecutive rows of a sequence are
// its next tokens, in order. Rows of kNoSequence are skipped.
struct AppendBatch {
  std::span<const SequenceId> sequences = {};
  TensorView keys = {};    // [row][KV head][key_dim]; f32, f16 or bf16, any strides
  TensorView values = {};  // [row][KV head][value_dim]
};

// What KvCacheManager::truncate came to.
struct Truncation {
  // false: nothing has changed, because `layer` has compressed its first `least_tokens` tokens and
  // the backend cannot go back further, or because it has a sliding window, and of what fewer than
  // `least_tokens` tokens would attend to some has left it.
  bool done = true;
  // Everything is, bit for bit, as if the tokens had never come. false: `layer` had compressed some
  // of them, its first `least_tokens`, together with tokens that stay, and whose sample stays as it
  // was drawn.
  bool exact = true;
  // Of several such layers, the one that has compressed the most; -1: none.
  std::int64_t layer = -1;
  std::int64_t least_tokens = 0;

  explicit operator bool() const { return done; }
};

// What became of a row.
enum class RowStatus : std::uint8_t {
  answered,   // padding rows too
  bad_query,  // a query that is not finite: output 0, LSE -infinity, empty reports, not counted
};

// One decode step of a ragged batch. Row i attends with sequences[i]. A sequence may stand in k
// consecutive rows: they are its last k tokens of the layer, in order, each of which attends to the
// tokens up to itself. k: at most the tokens of the local window, or 1; of a layer with a sliding
// window at most one more than KvCacheManager::truncate can take back.
// Outputs and reports must not overlap each other nor any input. Sizes are exact.
struct AttendBatch {
  std::span<const SequenceId> sequences = {};
  // [row][query head][key_dim], f32, f16 or bf16, any strides.
  TensorView queries = {};
  // [row][query head][value_dim], dense.
  std::span<float> output = {};
  // [row][query head], natural logarithm of the softmax denominator, a sink included; or empty.
  std::span<float> lse = {};
  // [row][query head]; or empty.
  std::span<QueryHeadReport> query_reports = {};
  // [row][KV head]; or empty.
  std::span<KvHeadReport> kv_reports = {};
  // [row]; or empty, and then a query that is not finite fails the call.
  std::span<RowStatus> row_status = {};
};

// Bytes in use, by tier and purpose.
struct MemoryReport {
  std::int64_t resident_bytes = 0;  // keys and values on the fast tier, local window included
  // Codes, scales, channel means, the queries' side of a basis, centroids and spreads of clusters.
  std::int64_t sketch_bytes = 0;
  // Odds, places, scores of the local window, and what the queries of its last tokens gave to them.
  std::int64_t metadata_bytes = 0;
  // Keys and values on the host tier; in a file (HostTier::file) whole pages of 64 tokens.
  std::int64_t host_bytes = 0;
  // Main memory, for tokens to come, for redraws and to find moved tokens: a calibrated sketch's
  // basis, the order of compressed tokens; what a compression in slices was given and has ready.
  std::int64_t basis_bytes = 0;
  // Buffers of a step, shared by all sequences. On the CPU those of as many threads as the sequences
  // have KV heads in a layer, as long as the longest of them need.
  std::int64_t workspace_bytes = 0;
  std::int64_t reserved_bytes = 0;  // allocated beyond all of the above, for growth
  // Main memory: blocks of the host tier, with their room for growth, that the device reads though
  // they could not be pinned. host_bytes, basis_bytes and reserved_bytes count them already.
  std::int64_t pageable_bytes = 0;
  // Of a sequence: of all of the above, what forks of it (or what it was forked from) hold too.
  // 0 in the report of all sequences, which counts these bytes once.
  std::int64_t shared_bytes = 0;
  // Keys and values that the engine holds for the cache (HostTier::engine), of every sequence by itself
  // also where forks have the same rows. No memory of the cache, and in none of the above: resident_bytes
  // are then those of drawn tokens, host_bytes 0, and basis_bytes has 16 more per token, addresses.
  std::int64_t engine_bytes = 0;
  // Of reserved_bytes, those on either tier; the rest is main memory, tables.
  std::int64_t fast_reserved_bytes = 0;
  std::int64_t host_reserved_bytes = 0;
  // HostTier::file: of host_bytes and reserved_bytes, what is on the disk and takes no main memory. In the
  // report of all sequences, the size of the file, with what it has left over.
  std::int64_t file_bytes = 0;

  // In use on the fast tier.
  std::int64_t fast_bytes() const { return resident_bytes + sketch_bytes + metadata_bytes; }
  // Allocated on either tier.
  std::int64_t fast_held_bytes() const {
    return fast_bytes() + fast_reserved_bytes + workspace_bytes;
  }
  std::int64_t host_held_bytes() const { return host_bytes + host_reserved_bytes; }
};

// Bytes of a sequence before there is one.
struct SequenceBytes {
  // Once its tokens have been appended, to each layer at once: what is then reported. reserved_bytes are
  // those of the tiers, without tables in main memory. workspace_bytes: of a cache without others.
  MemoryReport appended;
  // Once it has been compressed, at most: how many tokens are drawn (of Selection::poisson it may be all)
  // and the form of the sketch depend on importance and keys.
  MemoryReport compressed;
  // Mean of resident_bytes then, over draws.
  double mean_resident_bytes = 0;
  // The most that either tier holds at any moment until then: limits of so many bytes refuse nothing.
  std::int64_t most_fast_bytes = 0;
  std::int64_t most_host_bytes = 0;
};

// Edges of the histogram of bounds (LayerStatistics::bounds), rising: 0, for exact answers, and
// about two for each power of ten, 0.001 to 3.
inline constexpr int kBoundEdges = 9;

VERKV_HD constexpr double bound_edge(int i) {
  constexpr double edges[kBoundEdges]{0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3};
  return edges[i];
}

// Of a QueryHeadReport::epsilon, the first bucket whose edge is not below it; kBoundEdges where it
// is above all edges, infinite or NaN.
VERKV_HD constexpr int bound_bucket(double bound) {
  int bucket = 0;
  while (bucket < kBoundEdges && !(bound <= bound_edge(bucket))) ++bucket;
  return bucket;
}

// Counters of one layer since the start or the last reset. A decision is one (row, query head).
struct LayerStatistics {
  std::int64_t steps = 0;  // rows that attended
  std::int64_t decisions = 0;
  // Decisions certified at the end; 0 where FetchConfig::epsilon is off.
  std::int64_t certified = 0;
  std::int64_t enlarged = 0;        // decisions with a sketch error above 1 or unknown
  std::int64_t fetching = 0;        // decisions that asked for at least one token
  std::int64_t planned_tokens = 0;  // over all decisions
  std::int64_t fetched_tokens = 0;  // over all KV heads, unions
  std::int64_t moved_tokens = 0;
  std::int64_t moved_bytes = 0;
  // Tokens that the KV heads held, summed over steps: the denominator of shares.
  std::int64_t cached_tokens = 0;
  std::int64_t resident_tokens = 0;  // of those, resident
  // Decisions by the bound reached, each in the bucket of its QueryHeadReport::epsilon.
  std::int64_t bounds[kBoundEdges + 1] = {};
  // Nanoseconds in the calls, by a steady clock: what callers wait, without the wait for each
  // other's calls. The compression of a local window belongs to its append (by `reserve` it is not
  // counted); a call of compress is shared out among layers by the rows that it compressed, and not
  // counted where there are none. With views in a device's memory calls return before the work is
  // done (docs/cuda.md).
  std::int64_t attend_ns = 0;
  std::int64_t append_ns = 0;
  std::int64_t compress_ns = 0;

  // Counter by counter.
  constexpr LayerStatistics& operator+=(const LayerStatistics& other) {
    steps += other.steps;
    decisions += other.decisions;
    certified += other.certified;
    enlarged += other.enlarged;
    fetching += other.fetching;
    planned_tokens += other.planned_tokens;
    fetched_tokens += other.fetched_tokens;
    moved_tokens += other.moved_tokens;
    moved_bytes += other.moved_bytes;
    cached_tokens += other.cached_tokens;
    resident_tokens += other.resident_tokens;
    for (int i = 0; i <= kBoundEdges; ++i) bounds[i] += other.bounds[i];
    attend_ns += other.attend_ns;
    append_ns += other.append_ns;
    compress_ns += other.compress_ns;
    return *this;
  }
};

}  // namespace verkv

#endif  // VERKV_REPORTS_HPP
