// What a step adds to the counters of its layer.
#ifndef VERKV_CUDA_STATISTICS_CUH
#define VERKV_CUDA_STATISTICS_CUH

#include <cstdint>

#include "device_math.cuh"
#include "views.hpp"

namespace verkv::cuda {

VERKV_DEVICE void add_to(std::int64_t& counter, std::int64_t n) {
  static_assert(sizeof(unsigned long long) == sizeof(std::int64_t));
  if (n != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&counter), static_cast<unsigned long long>(n));
  }
}

// Reports to the layer's counters, by one thread. Integers: the order of the blocks does not
// matter.
VERKV_DEVICE void count_decision(const StepView& step, std::int64_t query_head, double bound,
                                 bool certified, bool enlarged, std::int64_t planned) {
  if (step.counters == nullptr) return;
  add_to(step.counters->steps, query_head % step.layer.query_heads() == 0);
  add_to(step.counters->decisions, 1);
  add_to(step.counters->bounds[bound_bucket(bound)], 1);
  add_to(step.counters->certified, certified);
  add_to(step.counters->enlarged, enlarged);
  add_to(step.counters->fetching, planned > 0);
  add_to(step.counters->planned_tokens, planned);
}

// Looks everything up anew: kernels have no register left to keep it in.
VERKV_DEVICE void count_group(const StepView& step, std::int64_t pair) {
  if (step.counters == nullptr) return;
  const KvHeadReport& report = step.kv_reports[pair];
  const int kv_heads = step.layer.kv_heads;
  const StepRow& row = step.batch[pair / kv_heads];
  add_to(step.counters->fetched_tokens, report.fetched_tokens);
  add_to(step.counters->moved_tokens, report.moved_tokens);
  add_to(step.counters->moved_bytes, report.moved_bytes);
  add_to(step.counters->resident_tokens, report.resident_tokens);
  add_to(step.counters->cached_tokens,
         step.heads[std::int64_t{row.slot} * kv_heads + pair % kv_heads].tokens - row.back);
}

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_STATISTICS_CUH
