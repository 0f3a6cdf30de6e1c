// The four launches of a step, in order. Each enqueues one kernel and returns the error of its
// launch; none synchronises.
#ifndef VERKV_CUDA_STEP_KERNELS_HPP
#define VERKV_CUDA_STEP_KERNELS_HPP

#include <cuda_runtime_api.h>

#include "step_workspace.hpp"

namespace verkv::cuda {

// Sketched logits of all tokens, exact logits of residents, and their maxima by slice.
cudaError_t launch_scores(const StepArguments& arguments, cudaStream_t stream);
// Per query head: weights, D, beta, certificate, threshold; per KV head: what is fetched and moved.
cudaError_t launch_plan(const StepArguments& arguments, cudaStream_t stream);
// Per query head: beta and certificate of what is not fetched, the report, and what it adds to the
// layer's counters.
cudaError_t launch_certificate(const StepArguments& arguments, cudaStream_t stream);
// Residents with their coefficients and moved rows, outputs and LSE, scores of the local window;
// queries that are not finite.
cudaError_t launch_attention(const StepArguments& arguments, cudaStream_t stream);
// Shared memory of its blocks, what is declared in the kernel included; that of the others fits
// everywhere.
int attention_shared_bytes(const LayerView& layer, const StepGrid& grid);

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_STEP_KERNELS_HPP
