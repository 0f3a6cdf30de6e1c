// Every number of the CUDA backend that is a guess, with its reason. None has been tried on a GPU.
// No decision depends on them; what a number must not break is asserted where kernels use it.
// Numbers that are layouts (of masks, tiles, products) stay with what they lay out.
#ifndef VERKV_CUDA_TUNING_HPP
#define VERKV_CUDA_TUNING_HPP

#include <cstddef>
#include <cstdint>

namespace verkv::cuda {

// ---- How a step is cut into blocks (step.cpp) ---------------------------------------------------

// Blocks of the scores that run at a time: one on each multiprocessor of an H100 or H200.
inline constexpr std::int64_t kScoreBlocks = 132;
// Tokens of a split of the scores that take about as long as a block takes to prepare the query;
// also enough that all warps of a block have something to do.
inline constexpr std::int64_t kScoreTokens = 1024;
// Blocks of the attention that keep every multiprocessor busy: two rounds of the two that it runs
// at a time. A step with fewer (row, KV head) pairs cuts the pairs' rows.
inline constexpr std::int64_t kAttentionBlocks = 512;
// Rows below which a split of the attention is not worth its start: one round of a block.
inline constexpr std::int64_t kAttentionRows = 256;
// One compressed token in so many is expected to move; the host does not know how many do.
inline constexpr std::int64_t kTokensPerMoved = 16;
// Most splits of either: what they leave has to be read again, and is reserved for all of them.
inline constexpr std::int64_t kMostSplits = 64;
// Shared memory of a block of the attention for fetched rows: two blocks, with queries and weights
// beside it, fit a multiprocessor.
inline constexpr std::int64_t kTileBytes = 32 << 10;
// Fewest fetched rows that are in shared memory at a time: one copy alone would not hide its way.
inline constexpr std::int64_t kLeastTile = 4;

// ---- Scores (scores.cu) -------------------------------------------------------------------------

// Sixteen warps, one block a multiprocessor: 128 registers a thread, which eight heads need.
inline constexpr int kScoreThreads = 512;
// Most query heads that a block takes, two matrix products of four: more do not fit the registers.
inline constexpr int kScoreHeads = 8;
// A warp asks for codes so many of its units before it reads them: about a way to memory and back.
inline constexpr int kUnitsAhead = 2;

// ---- Plan and certificate (head_passes.cuh, sums.cuh, search.cuh) -------------------------------

// Threads of a block, which has one query head. Four lanes each, they take 32K tokens at once.
inline constexpr int kHeadThreads = 256;
// Such blocks on a multiprocessor: two fill its registers.
inline constexpr int kHeadBlocks = 2;
// Lanes that a thread adds up, side by side, so that one load brings the tokens of all of them and
// few threads fold.
inline constexpr std::size_t kLanesPerThread = 4;
// Rows of tokens that a thread loads before it looks at the first: what registers allow.
inline constexpr int kRowsAtOnce = 4;
// Block sums kept at a time: 2^20 tokens without a further round, and all of them fit shared memory
// that needs no permission.
inline constexpr int kSumSlots = 2048;
// Neighbouring entries of a list that a thread keeps or drops at once: a scan then costs a quarter.
inline constexpr int kEntriesPerThread = 4;

// ---- Attention (attention.cu) -------------------------------------------------------------------

// Threads of a block, and rows that it weighs at once: two blocks a multiprocessor, of 128
// registers a thread.
inline constexpr int kAttentionThreads = 256;
// Most query heads that a block takes; a larger group reads its rows once for each such part.
inline constexpr int kAttentionHeads = 16;
// How far above e^0 the largest weight of a head may be before sums are scaled anew: weights of 16
// bits have room for about 11.
inline constexpr float kMostAbove = 10;
// How far below e^0 it may be where nothing has been added yet: small weights lose bits below that.
inline constexpr float kMostBelow = 12;

// ---- Around the step (append.cu, compress.cu, staging.cpp, step_buffers.cpp, cuda_backend.cpp)
// ----

// Threads of a block that appends one token of one KV head: as many as a usual row has coordinates.
inline constexpr int kAppendThreads = 128;
// Threads of a block of a compression's kernels: no step waits for them, and small blocks fill the
// device for short prompts too.
inline constexpr int kCompressThreads = 128;
// Keys that a thread of the channel means loads ahead: about a way to memory and back.
inline constexpr int kMeansAhead = 16;
// More blocks than this of any of them loop over their items: a device holds far fewer at a time.
inline constexpr std::int64_t kMostBlocks = 1 << 16;

// A step is cut for lengths that are longer by one part in so many: memory against how often a
// captured step has to be captured anew.
inline constexpr std::int64_t kLengthRoom = 4;
// Host views are staged in pieces of this many bytes: large enough that a copy runs at the bus's
// speed, small beside what a cache holds.
inline constexpr std::int64_t kStagingBytes = std::int64_t{32} << 20;
// Room that a compressed head has for further residents: until the next chunk is compressed, if
// chunks are neither tiny nor large.
inline constexpr std::int64_t kLeastSpare = 64;
inline constexpr std::int64_t kMostSpare = 1024;

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_TUNING_HPP
