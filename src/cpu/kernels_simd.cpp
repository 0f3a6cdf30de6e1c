// The kernels over vectors, compiled once for every instruction set and chosen at run time.

// Arm has one (HWY_NEON), but the tests of these kernels have not passed there yet.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_NEON | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif
#ifndef HWY_WANT_AVX3_DL
#define HWY_WANT_AVX3_DL
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels_simd.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/kernels.hpp"
#include "cpu/simd/convert-inl.hpp"
#include "cpu/simd/encode-inl.hpp"
#include "cpu/simd/lanes-inl.hpp"
#include "cpu/simd/plan-inl.hpp"
#include "cpu/simd/rows-inl.hpp"
#include "cpu/simd/sketch-inl.hpp"
#include "cpu/simd/weights-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace verkv::cpu {
namespace HWY_NAMESPACE {

const Kernels* target_kernels() {
#if VERKV_VECTORS
  static const Kernels kernels{.name = hwy::TargetName(HWY_TARGET),
                               .dot_rows = dot_rows,
                               .weighted_rows = weighted_rows,
                               .sketch_logits = sketch_logits,
                               .weights = weights,
                               .cluster_sums = cluster_sums,
                               .cluster_terms = cluster_terms,
                               .cluster_counts = cluster_counts,
                               .beta_sums = beta_sums,
                               .tail_sums = tail_sums,
                               .select_tokens = select_tokens,
                               .plan_start = plan_start,
                               .plan_beta_sums = plan_beta_sums,
                               .plan_tail_sums = plan_tail_sums,
                               .plan_compact = plan_compact,
                               .encode_key = encode_key,
                               .convert = convert,
                               .all_within = all_within};
  return &kernels;
#else
  return &scalar_kernels();
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace verkv::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace verkv::cpu {

HWY_EXPORT(target_kernels);

const Kernels& vector_kernels() {
  static const Kernels* const best = HWY_DYNAMIC_DISPATCH(target_kernels)();
  return *best;
}

std::vector<const Kernels*> all_vector_kernels() {
  std::vector<const Kernels*> result;
  // Lower bits are better targets.
  for (std::int64_t targets = hwy::SupportedTargets() & HWY_TARGETS; targets != 0;
       targets &= targets - 1) {
    hwy::ChosenTarget chosen;
    chosen.Update(targets & -targets);
    const std::size_t at =
        std::size(HWY_DISPATCH_TABLE(target_kernels)) > 1 ? chosen.GetIndex() : 0;
    const Kernels* kernels = HWY_DISPATCH_TABLE(target_kernels)[at]();
    if (kernels != &scalar_kernels()) result.push_back(kernels);
  }
  return result;
}

}  // namespace verkv::cpu

#endif  // HWY_ONCE
