// The inner loops of a CPU step, over one KV head and its group of query heads. Two
// implementations: scalar (the reference, kernels_scalar.cpp) and portable vectors with run-time
// dispatch (kernels_simd.cpp, by topic in simd/).
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

#include "rows.hpp"
#include "sum_order.hpp"

namespace verkv::cpu {

// Most query heads handed to one kernel call; larger groups are cut by the caller. Query groups of
// today's models have at most 8 heads, and vectors take 4 at a time.
inline constexpr int kMaxHeads = 8;
// Rows of a block of weighted_rows: a block's rounding errors stay below 256 * 2^-24 of its sum of
// magnitudes, and its coefficients in the first cache.
inline constexpr std::int64_t kBlockRows = 256;

// What sketch_logits needs of a query head: logit = factor * scale * (dot - 127 query_sum) + shift.
struct HeadConstants {
  std::int32_t query_sum = 0;
  float factor = 0;
  float shift = 0;
};

// One head's tokens during the search for a threshold (fetch_search.hpp): arrays in the caller's
// memory.
struct PlanArrays {
  float* weight = nullptr;
  float* odds = nullptr;
  float* worth = nullptr;
  std::uint32_t* place = nullptr;
  std::int64_t count = 0;
};

// Odds are those of the compressed tokens, infinite for tokens of H; w and rho are the weight and
// the odds of a token. All comparisons are in binary32.
//
// The odds of a head lie in pieces that begin at multiples of kBlockTokens. Kernels that read them
// are called once for each piece, in order, and go on where the call before ended: what they say of
// their sums and of their lists is of all pieces together, and has the bits of one call.
struct Kernels {
  // The instruction set.
  const char* name;

  // out[h][i] = q[h] . row(index ? index[i] : i), 0 <= i < count. The rows may lie in pages.
  //   q: [heads][q_stride], zero-padded to a multiple of 16
  // Coordinate j is added to lane j % 16 by fma, ascending; fold16. Reads no element past a row's
  // end.
  void (*dot_rows)(const Rows& rows, const std::uint32_t* index, std::int64_t count, const float* q,
                   int heads, std::int64_t q_stride, float* out, std::int64_t out_stride);

  // out[h][j] += sum over i of c[h][i] * row(index ? index[i] : i)[j], 0 <= i < count. The rows may
  // lie in pages.
  // Blocks of kBlockRows rows: fma ascending from 0, then one addition to out.
  void (*weighted_rows)(const Rows& rows, const std::uint32_t* index, std::int64_t count,
                        const float* c, int heads, std::int64_t c_stride, float* out,
                        std::int64_t out_stride);

  // out[h][i] = sketch_logit of token i (sketch.hpp), 0 <= i < count.
  //   q: [heads][q_stride] bytes, padded_dim() used
  //   codes: whole groups of 16 tokens; scale, odds: readable up to the next multiple of 16
  //   out: may be written up to the next multiple of 16
  //   out_largest[h]: max over the tokens with finite odds, -infinity where there are none; NaN is
  //   ignored, a zero is +0
  void (*sketch_logits)(const SketchShape& shape, const std::uint8_t* codes,
                        const Positive16* scale, const Positive16* odds, std::int64_t count,
                        const std::int8_t* q, int heads, std::int64_t q_stride,
                        const HeadConstants* constants, float* out, std::int64_t out_stride,
                        float* out_largest);

  // In place: w[h][i] = odds finite ? weight_exp(w[h][i] - shift[h]) : 0.
  //   sum[h]: lane sum of w; 0 before the first piece
  void (*weights)(float* w, std::int64_t stride, const Positive16* odds, std::int64_t count,
                  int heads, const float* shift, double* sum);

  // For each cluster of kClusterTokens tokens of one head: out_sum of w, out_square of w^2, as
  // fold16 of lanes.
  void (*cluster_sums)(const float* w, std::int64_t count, float* out_sum, float* out_square);

  // x and y of clusters.hpp (1) for resident slots of one head. sketched: weights, negative where
  // the slot counts exactly, and then x and y are 0. exact: weights. out_plain, out_known: lane sums
  // of c v and of v over the others.
  void (*cluster_terms)(const float* sketched, const float* exact, const float* odds,
                        std::int64_t count, float beta, float cap, float* out_x, float* out_y,
                        double& out_plain, double& out_known);

  // What is predicted by the slots that do not count exactly, clusters.hpp (3), in place of their
  // sketched weights: share[cluster] * y. out_mass: lane sum of it. out_error: lane sum of its
  // square times spread_square[cluster]. out_top: the largest, 0 or more.
  void (*cluster_counts)(const float* y, const std::uint32_t* cluster, const float* share,
                         const float* spread_square, std::int64_t count, float* sketched,
                         double& out_mass, double& out_error, float& out_top);

  // Lane sums of w and rho over the tokens with w > beta * rho. Tokens of H have w = 0 and never
  // pass.
  //   weight_sum, odds_sum: 0 before the first piece
  void (*beta_sums)(const float* w, std::int64_t stride, const Positive16* odds, std::int64_t count,
                    int heads, const float* beta, double* weight_sum, double* odds_sum);

  // Over the tokens with w > 0: the lane sum of variance_term, the max of jump_term
  // (certificate.hpp).
  //   variance_sum, largest_jump: 0 before the first piece
  void (*tail_sums)(const float* w, std::int64_t stride, const Positive16* odds, std::int64_t count,
                    int heads, const float* beta, double* variance_sum, float* largest_jump);

  // Writes to out, ascending, first + i for every token i of the piece that some head asks for:
  // w > 0 and
  //   fetch_worth(w, rho, beta[h]) > worth_threshold[h], or w > weight_threshold[h],
  // where a negative worth_threshold takes every token with w > 0.
  //   out: room for count + 16
  //   out_planned[h]: raised by the number of tokens that head h asks for
  // Returns how many tokens were written.
  std::int64_t (*select_tokens)(const float* w, std::int64_t stride, const Positive16* odds,
                                std::int64_t first, std::int64_t count, int heads,
                                const float* beta, const float* worth_threshold,
                                const float* weight_threshold, std::uint32_t* out,
                                std::int64_t* out_planned);

  // Adds to `plan` the tokens of one head that have w > 0, ascending, as place first + i, and what
  // they are worth.
  //   plan: arrays with room for count + 16 more
  void (*plan_start)(const float* w, const Positive16* odds, std::int64_t first, std::int64_t count,
                     float beta, PlanArrays& plan);

  // beta_sums and tail_sums over the tokens of the plan with worth <= threshold; lanes and blocks
  // are by index in the arrays.
  void (*plan_beta_sums)(const PlanArrays& plan, float threshold, float beta, double& out_weight,
                         double& out_odds);
  void (*plan_tail_sums)(const PlanArrays& plan, float threshold, float beta, double& out_variance,
                         float& out_jump);

  // Drops from the plan, keeping the order of the rest:
  //   tokens with worth > drop_above;
  //   tokens with worth <= settle_below and w > beta_high * rho, added to settled.above_*;
  //   tokens with worth <= settle_below and w <= beta_low * rho, added to settled.below_*.
  // The additions are lane sums of this call, then one addition in double.
  void (*plan_compact)(PlanArrays& plan, float drop_above, float settle_below, float beta_low,
                       float beta_high, SettledTerms& settled);

  // encode_key (sketch.hpp) with kSketchLevels, of shape.dim coordinates, as token `token` of a group whose
  // codes were all 0 before its first token.
  Positive16 (*encode_key)(const SketchShape& shape, const SketchBands& bands, const float* x,
                           std::uint8_t* group, std::int64_t token);

  // to[i] = from_float(to_float(from[i])), 0 <= i < count; the same bits where the types are equal.
  // The two do not overlap.
  void (*convert)(const void* from, DType from_type, void* to, DType to_type, std::int64_t count);

  // Whether no x[i], 0 <= i < count, is NaN or larger in size than limit.
  bool (*all_within)(const void* x, DType type, std::int64_t count, float limit);
};

// The reference.
const Kernels& scalar_kernels();
// The best that this machine can run; scalar if there is nothing better.
const Kernels& vector_kernels();
// Every vector implementation that this machine can run, best first, for tests.
std::vector<const Kernels*> all_vector_kernels();

}  // namespace verkv::cpu

#endif  // VERKV_SRC_CPU_KERNELS_HPP
