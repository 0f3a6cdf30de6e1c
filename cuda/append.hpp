// What enters a device between steps: the rows of new tokens, and whose queries the rows of a
// batch are. Each function enqueues its kernels on the stream and returns the error of the
// launch; none synchronises.
#ifndef VERKV_CUDA_APPEND_HPP
#define VERKV_CUDA_APPEND_HPP

#include <cuda_runtime_api.h>

#include <cstdint>

#include <verkv/view.hpp>

#include "bad_number.hpp"
#include "views.hpp"

namespace verkv::cuda {

struct AppendArguments {
  HeadView* heads = nullptr;  // [KV head]
  TensorView keys;            // device memory
  TensorView values;
  // Position of the views' first token.
  std::int64_t first = 0;
  // Whether the kernel also counts the tokens in. If not, they lie beyond the end until the views
  // are written.
  bool counts = false;
  // Where a number that has no place goes, and how the caller knows it: its sequence, its layer,
  // and the views' first token among those that it gave.
  BadNumber* bad = nullptr;
  std::int64_t sequence = 0;
  std::int64_t token_offset = 0;
  std::int64_t layer_index = 0;
};

// Writes the rows to both tiers, the place of each resident, and zero scores of the window. Where
// it counts the tokens in, it begins as launch_settle.
cudaError_t launch_append(const LayerView& layer, const AppendArguments& arguments,
                          cudaStream_t stream);

// Takes in what queries have given to the scores of the local window.
cudaError_t launch_settle(const LayerView& layer, HeadView* heads, cudaStream_t stream);

// out_rows[i] = rows[i], 0 <= i < count. The rows travel with the launch, so that the caller's array
// may change at once.
cudaError_t launch_write_rows(const StepRow* rows, int count, StepRow* out_rows,
                              cudaStream_t stream);

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_APPEND_HPP
