// Third launch of a step: the certificate over what is not fetched, the report of each query head,
// and what the step adds to the layer's counters. One block per (row, query head).
#include "head_passes.cuh"
#include "launch.hpp"
#include "statistics.cuh"
#include "step_kernels.hpp"
#include "sums.cuh"
#include "tuning.hpp"

namespace verkv::cuda {
namespace {

__global__ void __launch_bounds__(kHeadThreads, kHeadBlocks)
    certificate_kernel(const StepArguments arguments) {
  __shared__ Uninitialized<HeadShared> room;
  HeadShared& shared = room.get();
  const StepView& step = arguments.view;
  const LayerView& layer = step.layer;
  const StepWorkspace& ws = arguments.workspace;
  const std::int64_t query_head = blockIdx.x;
  const std::int64_t row = query_head / layer.query_heads();
  const std::int64_t pair = query_head / layer.group;
  std::int64_t* report = reinterpret_cast<std::int64_t*>(step.query_reports + query_head);
  const int slot = step.slots[row];
  if (slot < 0) {
    if (threadIdx.x < 3) report[threadIdx.x] = 0;
    if (threadIdx.x < 5 && query_head % layer.group == 0)
      reinterpret_cast<std::int64_t*>(step.kv_reports + pair)[threadIdx.x] = 0;
    return;
  }
  const HeadView view =
      step.heads[static_cast<std::int64_t>(slot) * layer.kv_heads + pair % layer.kv_heads];
  const HeadState& state = ws.heads[query_head];
  const bool computable = state.computable != 0;
  double bound = state.bound;
  if (view.compressed == 0) {
    bound = bound_without_estimate(computable, view.residents() > 0);
  } else if (state.known == 0 || ws.groups[pair].fetched != 0) {
    const HeadPasses head(arguments, view, query_head);
    const double denominator = state.denominator;
    double weight = 0;
    double odds = 0;
    head.first_sums(shared, ws.fetched + pair * ws.mask_stride, weight, odds);
    const float beta = head.solve_beta(shared, weight, odds);
    bound = infinite_double();
    if (computable) bound = head.certificate_at(shared, beta, denominator, layer.rules.log_term);
    if (threadIdx.x == 0) ws.heads[query_head].beta = beta;
  }
  if (threadIdx.x == 0) {
    const bool certified = is_certified(bound, layer.rules.epsilon);
    report[0] = __double_as_longlong(bound);
    report[1] = certified;
    report[2] = state.planned;
    count_decision(step, query_head, certified, state.planned);
    if (query_head % layer.group == 0) count_group(step, pair);
  }
}

}  // namespace

cudaError_t launch_certificate(const StepArguments& arguments, cudaStream_t stream) {
  const unsigned blocks =
      static_cast<unsigned>(arguments.view.rows * arguments.view.layer.query_heads());
  return launch(certificate_kernel, blocks, kHeadThreads, 0, stream, arguments);
}

}  // namespace verkv::cuda
