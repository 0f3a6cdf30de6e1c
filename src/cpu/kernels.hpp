// The inner loops of a CPU step, over one KV head and its group of query heads. Two
// implementations: scalar (the reference, kernels_scalar.cpp) and portable vectors with run-time
// dispatch (kernels_simd.cpp).
//
// The order of every summation is fixed: sum_order.hpp says what a lane sum is.
// [heads][stride] arrays are head-major: element (h, i) at h * stride + i.
#ifndef VERKV_SRC_CPU_KERNELS_HPP
#define VERKV_SRC_CPU_KERNELS_HPP

#include <cstdint>
#include <string>
#include <vector>

#include <verkv/certificate.hpp>
#include <verkv/sketch.hpp>
#include <verkv/types.hpp>

#include "sum_order.hpp"

namespace verkv::cpu {

// Most query heads handed to one kernel call; larger groups are cut by the caller.
inline constexpr int kMaxHeads = 8;

// Rows of keys or values: row i starts at element i * stride and has dim elements.
struct Rows {
  const void* data = nullptr;
  DType type = DType::f16;
  std::int64_t stride = 0;
  int dim = 0;
};

// Coordinate j of a row.
inline float load_element(const Rows& rows, std::int64_t row, std::int64_t j) {
  const std::int64_t at = row * rows.stride + j;
  switch (rows.type) {
    case DType::f32:
      return static_cast<const float*>(rows.data)[at];
    case DType::f16:
      return to_float(static_cast<const Half*>(rows.data)[at]);
    case DType::bf16:
      return to_float(static_cast<const BFloat16*>(rows.data)[at]);
  }
  return 0;
}

// Per query head constants of sketch_logits.
struct HeadConstants {
  std::int32_t query_sum = 0;
  float factor = 0;
  float shift = 0;
};

// One head's tokens during the search for the certificate's threshold. Structure of arrays,
// caller's memory.
struct PlanArrays {
  float* weight = nullptr;
  float* odds = nullptr;
  float* worth = nullptr;
  std::uint32_t* position = nullptr;
  std::int64_t count = 0;
};

struct Kernels {
  const char* name;  // instruction set

  // out[h][i] = q[h] . row(index ? index[i] : i), 0 <= i < count. Queries [heads][q_stride] are
  // zero-padded to a multiple of 16. Coordinate j goes to lane j % 16 by fma, ascending; fold16.
  // Reads no element past a row's end.
  void (*dot_rows)(const Rows& rows, const std::uint32_t* index, std::int64_t count, const float* q,
                   int heads, std::int64_t q_stride, float* out, std::int64_t out_stride);

  // out[h][j] += sum over i of c[h][i] * row(...)[j]: blocks of 256 rows, fma ascending from 0,
  // then one addition to out.
  void (*weighted_rows)(const Rows& rows, const std::uint32_t* index, std::int64_t count,
                        const float* c, int heads, std::int64_t c_stride, float* out,
                        std::int64_t out_stride);

  // out[h][i] = sketch_logit of token i, 0 <= i < count (sketch.hpp). q: [heads][q_stride] bytes,
  // padded_dim() used. out may be written up to the next multiple of 16 past count (the arrays have
  // room; codes hold whole groups; scale and odds arrays are readable up to there).
  // out_largest[h] = max over tokens i < count with finite odds, -infinity where none (NaN ignored;
  // a zero is +0).
  void (*sketch_logits)(const SketchShape& shape, const std::uint8_t* codes,
                        const Positive16* scale, const Positive16* odds, std::int64_t count,
                        const std::int8_t* q, int heads, std::int64_t q_stride,
                        const HeadConstants* constants, float* out, std::int64_t out_stride,
                        float* out_largest);

  // In place: w[h][i] = odds finite ? weight_exp(w[h][i] - shift[h]) : 0. out_sum[h]: lane sum of
  // w.
  void (*weights)(float* w, std::int64_t stride, const Positive16* odds, std::int64_t count,
                  int heads, const float* shift, double* out_sum);

  // Lane sums of w and rho over the tokens with w > beta * rho (product rounded to binary32). H
  // tokens have w = 0 and never pass.
  void (*beta_sums)(const float* w, std::int64_t stride, const Positive16* odds, std::int64_t count,
                    int heads, const float* beta, double* out_weight, double* out_odds);

  // variance: lane sum of variance_term, jump: max of jump_term, over tokens with w > 0
  // (certificate.hpp, binary32).
  void (*tail_sums)(const float* w, std::int64_t stride, const Positive16* odds, std::int64_t count,
                    int heads, const float* beta, double* out_variance, float* out_jump);

  // Appends to out, ascending, every token for which some head has fetch_worth(w, rho, beta[h]) >
  // worth_threshold[h] or w > weight_threshold[h] (binary32; w > 0; a negative worth_threshold
  // takes every such token). Returns how many; out_planned[h] += tokens that head h asked for. out
  // has room for count + 16.
  std::int64_t (*select_tokens)(const float* w, std::int64_t stride, const Positive16* odds,
                                std::int64_t count, int heads, const float* beta,
                                const float* worth_threshold, const float* weight_threshold,
                                std::uint32_t* out, std::int64_t* out_planned);

  // Fills `plan` with the tokens of one head that have w > 0, ascending, and their worth. plan
  // arrays have room for count + 16.
  void (*plan_start)(const float* w, const Positive16* odds, std::int64_t count, float beta,
                     PlanArrays& plan);

  // beta_sums and tail_sums over the tokens of the plan with worth <= threshold (lanes and blocks
  // by index in the arrays).
  void (*plan_beta_sums)(const PlanArrays& plan, float threshold, float beta, double& out_weight,
                         double& out_odds);
  void (*plan_tail_sums)(const PlanArrays& plan, float threshold, float beta, double& out_variance,
                         float& out_jump);

  // Drops from the plan, keeping the order of the rest: tokens with worth > drop_above; of
  // those with worth <= settle_below, tokens with w > beta_high * rho (added to settled.above_*)
  // and tokens with w <= beta_low * rho (added to settled.below_*). The additions are lane sums of
  // this call, then one addition in double.
  void (*plan_compact)(PlanArrays& plan, float drop_above, float settle_below, float beta_low,
                       float beta_high, SettledTerms& settled);
};

// The reference.
const Kernels& scalar_kernels();
// The best that this machine can run; scalar if there is nothing better.
const Kernels& vector_kernels();
// Every vector implementation that this machine can run, best first, for tests.
std::vector<const Kernels*> all_vector_kernels();

}  // namespace verkv::cpu

#endif  // VERKV_SRC_CPU_KERNELS_HPP
