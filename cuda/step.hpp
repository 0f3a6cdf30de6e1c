// One decode step on the device: sketched weights, shrinkage, certificate, fetch plan, gather,
// attention. The CPU's src/cpu/step.cpp is the specification; decisions (fetch lists,
// certificates, window scores) are equal to it bit for bit.
#ifndef VERKV_CUDA_STEP_HPP
#define VERKV_CUDA_STEP_HPP

#include <cuda_runtime_api.h>

#include "views.hpp"

namespace verkv::cuda {

// Bytes of StepView::workspace for this layer, rows and upper bounds; enough for fewer rows and
// smaller bounds too.
std::int64_t step_workspace_bytes(const LayerView& layer, int rows, std::int64_t most_compressed,
                                  std::int64_t most_residents);

// Enqueues the step on `stream`. At most four dependent launches, no allocation, no
// synchronisation, nothing that depends on data: may be captured in a graph. Returns the first
// error of a launch.
cudaError_t launch_step(const StepView& step, cudaStream_t stream);

// Most shared memory of a block in a step of this layer, bytes; a device may have less.
int step_shared_bytes(const LayerView& layer);

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_STEP_HPP
