// Third launch of a step: the certificate over what is not fetched, the report of each query head,
// what the step adds to the layer's counters, and the shares of the clusters. One block per (row,
// query head).
#include <verkv/sketch_error.hpp>

#include "clusters.cuh"
#include "head_passes.cuh"
#include "launch.hpp"
#include "statistics.cuh"
#include "step_kernels.hpp"
#include "sums.cuh"
#include "tuning.hpp"

namespace verkv::cuda {
namespace {

// The sketch error over drawn tokens of L by the weights of the plan, in the order of
// src/sum_order.hpp. The first warp calls, and gets it.
VERKV_DEVICE double measured_sketch_error(const StepArguments& arguments, const HeadView& view,
                                          std::int64_t query_head) {
  const StepWorkspace& ws = arguments.workspace;
  const float* weight = ws.weight + query_head * ws.token_stride;
  const float* logit = ws.resident_logit + query_head * ws.resident_stride;
  const float shift = ws.heads[query_head].shift;
  const std::int64_t stride = measured_stride(view.drawn);
  SketchErrorTerms sum;
  if (threadIdx.x < kLanes) {
#pragma unroll 4
    for (std::int64_t slot = threadIdx.x * stride; slot < view.drawn; slot += kLanes * stride) {
      const std::uint32_t place = view.resident_place[slot];
      const float w = weight[place];
      const float rho = to_float(view.odds[place]);
      if (!(rho < infinity())) continue;
      const SketchErrorTerms terms = sketch_error_terms(w, logit[slot] - shift, rho);
      sum.weight += terms.weight;
      sum.weight_square += terms.weight_square;
      sum.error_square += terms.error_square;
    }
  }
  // The other half of the warp has folded nothing.
  const auto folded = [](float x) {
    return static_cast<double>(__shfl_sync(kWholeWarp, fold16(x), 0));
  };
  return sketch_error(folded(sum.weight), folded(sum.weight_square), folded(sum.error_square));
}

// Whether no token of L is left. The first warp calls.
VERKV_DEVICE bool all_is_fetched(const HeadView& view, std::int64_t fetched) {
  int low = 0;
#pragma unroll 1
  for (std::int64_t i = threadIdx.x; i < view.compressed; i += 32)
    low += view.odds[i].bits < kPositive16Infinity.bits;
#pragma unroll
  for (int half = 16; half > 0; half /= 2) low += __shfl_xor_sync(kWholeWarp, low, half);
  return low == fetched;
}

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
  const int slot = step.batch[row].slot;
  if (slot < 0) {
    if (threadIdx.x < 5) {
      report[threadIdx.x] = 0;
      if (query_head % layer.group == 0)
        reinterpret_cast<std::int64_t*>(step.kv_reports + pair)[threadIdx.x] = 0;
    }
    return;
  }
  const HeadView view =
      step.heads[static_cast<std::int64_t>(slot) * layer.kv_heads + pair % layer.kv_heads];
  const HeadState& state = ws.heads[query_head];
  const bool computable = state.computable != 0;
  double bound = state.bound;
  double error = 0;
  if (view.compressed > 0 && has_codes(layer.sketch.kind)) {
    if (threadIdx.x < 32) error = measured_sketch_error(arguments, view, query_head);
    __syncthreads();  // weights of fetched tokens become 0 from here on
  }
  if (view.compressed == 0) {
    bound = bound_without_estimate(computable, residents_of(view, step.batch[row]) > 0);
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
  if (threadIdx.x < 32 &&
      !(bound == 0 && is_useless(error) && all_is_fetched(view, ws.groups[pair].fetched))) {
    bound = enlarged_for_sketch(bound, error);
  }
  if (threadIdx.x == 0) {
    const bool certified = is_certified(bound, layer.rules.epsilon);
    report[0] = __double_as_longlong(bound);
    report[1] = certified;
    report[2] = state.planned;
    report[3] = __double_as_longlong(error);
    count_decision(step, query_head, bound, certified, enlarges(error), state.planned);
    if (query_head % layer.group == 0) count_group(step, pair);
  }
  // Without clusters nothing is known of what is left, where anything weighs.
  double output = bound == 0 ? 0 : infinite_double();
  if (layer.clusters && view.compressed > 0) {
    share_clusters(shared, arguments, view, query_head, bound, error, output);
  } else if (threadIdx.x == 0) {
    ws.heads[query_head].by_clusters = 0;
  }
  if (threadIdx.x == 0) report[4] = __double_as_longlong(output);
}

}  // namespace

cudaError_t launch_certificate(const StepArguments& arguments, cudaStream_t stream) {
  const unsigned blocks =
      static_cast<unsigned>(arguments.view.rows * arguments.view.layer.query_heads());
  return launch(certificate_kernel, blocks, kHeadThreads, 0, stream, arguments);
}

}  // namespace verkv::cuda
