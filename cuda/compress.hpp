// The kernels around a step: storing new tokens, and the compression of a layer's KV heads (means,
// encoding, draw, ordered compaction of the residents). Each function enqueues one kernel on the
// stream and returns the error of its launch; none synchronises.
#ifndef VERKV_CUDA_COMPRESS_HPP
#define VERKV_CUDA_COMPRESS_HPP

#include <cuda_runtime_api.h>

#include <cstdint>

#include <verkv/sample.hpp>
#include <verkv/view.hpp>

#include "views.hpp"

namespace verkv::cuda {

enum class NumberSource : std::uint32_t { keys, values, queries };

// The first number found that is not finite or does not fit the storage type, by append among keys
// and values, by a step among queries; whoever claims it describes it.
struct BadNumber {
  std::uint32_t claimed = 0;
  NumberSource source = NumberSource::keys;
  std::int64_t sequence = 0;  // not of queries
  std::int64_t layer = 0;
  std::int64_t token = 0;  // of queries: the row of the batch
  std::int64_t head = 0;
  std::int32_t coordinate = 0;
  float number = 0;
};

struct AppendArguments {
  HeadView* heads = nullptr;  // [KV head]
  TensorView keys;            // device memory
  TensorView values;
  std::int64_t first = 0;  // position of the views' first token
  // Whether the kernel also counts the tokens in; if not, they lie beyond the end until the views
  // are written.
  bool counts = false;
  BadNumber* bad = nullptr;
  std::int64_t sequence = 0;      // this and the following for `bad`
  std::int64_t token_offset = 0;  // of the views' first token in the caller's
  std::int64_t layer_index = 0;
};

// Writes the rows to both tiers, the position of each resident, and zero scores of the window.
cudaError_t launch_append(const LayerView& layer, const AppendArguments& arguments,
                          cudaStream_t stream);

// The channel means over positions [0, end), all of them resident.
cudaError_t launch_channel_means(const LayerView& layer, const HeadView* heads, std::int64_t end,
                                 cudaStream_t stream);

// Sketches of positions [HeadView::compressed, end), all of them resident.
cudaError_t launch_encode(const LayerView& layer, const HeadView* heads, std::int64_t end,
                          cudaStream_t stream);

// Positions of [begin, end) that are drawn by the odds in the views, ascending, to
// out_position [KV head][stride], and their number to out_count [KV head]. `draw` is of KV head 0;
// the others follow it.
cudaError_t launch_draw(const LayerView& layer, const HeadView* heads, const DrawId& draw,
                        std::int64_t begin, std::int64_t end, std::uint32_t* out_position,
                        std::int64_t stride, std::int64_t* out_count, cudaStream_t stream);

// How the residents of `to` come from those of `from`.
struct GatherArguments {
  const HeadView* from = nullptr;
  const HeadView* to = nullptr;
  // Compression keeps the old drawn ones first and takes every row from the fast tier; a redraw
  // keeps none and takes all from the host tier.
  bool keeps_drawn = true;
  const std::uint32_t* position = nullptr;  // [KV head][stride], of launch_draw
  std::int64_t stride = 0;
  std::int64_t most_residents = 0;  // of one head of `to`
};

// Rows and positions of the residents of `to`.
cudaError_t launch_gather_residents(const LayerView& layer, const GatherArguments& arguments,
                                    cudaStream_t stream);

// Scores of the local window of `to`: those that `from` has of the same tokens, or zeros.
cudaError_t launch_move_window(const LayerView& layer, const HeadView* from, const HeadView* to,
                               bool zeros, cudaStream_t stream);

// out_slots[first + i] = slots[i]; the slots travel with the launch, so that the caller's array may
// change at once.
cudaError_t launch_write_slots(const std::int32_t* slots, int count, std::int32_t* out_slots,
                               cudaStream_t stream);

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_COMPRESS_HPP
