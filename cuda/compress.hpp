// The compression of a layer's KV heads: means, encoding, ordered compaction of the residents. Each
// function enqueues one kernel on the stream and returns the error of its launch; none
// synchronises.
#ifndef VERKV_CUDA_COMPRESS_HPP
#define VERKV_CUDA_COMPRESS_HPP

#include <cuda_runtime_api.h>

#include <cstdint>

#include "views.hpp"

namespace verkv::cuda {

// The channel means over positions [0, end), all of them resident.
cudaError_t launch_channel_means(const LayerView& layer, const HeadView* heads, std::int64_t end,
                                 cudaStream_t stream);

// Sketches of places [HeadView::compressed, end), whose tokens are all resident.
cudaError_t launch_encode(const LayerView& layer, const HeadView* heads, std::int64_t end,
                          cudaStream_t stream);

// How the residents of `to` come from those of `from`.
struct GatherArguments {
  const HeadView* from = nullptr;
  const HeadView* to = nullptr;
  // A compression keeps the old drawn residents first and takes every row from the fast tier; a
  // redraw keeps none and takes every row from the host tier.
  bool keeps_drawn = true;
  // Places drawn anew, ascending: [KV head][stride].
  const std::uint32_t* place = nullptr;
  std::int64_t stride = 0;
  // Of one head of `to`.
  std::int64_t most_residents = 0;
};

// Rows and places of the residents of `to`.
cudaError_t launch_gather_residents(const LayerView& layer, const GatherArguments& arguments,
                                    cudaStream_t stream);

// Scores of the local window of `to`: those that `from` has of the same tokens.
cudaError_t launch_move_window(const LayerView& layer, const HeadView* from, const HeadView* to,
                               cudaStream_t stream);

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_COMPRESS_HPP
