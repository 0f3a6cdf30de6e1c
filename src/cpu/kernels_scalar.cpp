// The reference kernels: one token after the other, in the order of sum_order.hpp.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include <verkv/attention.hpp>
#include <verkv/certificate.hpp>
#include <verkv/clusters.hpp>
#include <verkv/fetch_plan.hpp>
#include <verkv/shrinkage.hpp>

#include "cpu/kernels.hpp"

namespace verkv::cpu {
namespace {

// A lane sum over tokens (sum_order.hpp).
class LaneSum {
 public:
  // Goes on from the sum of the blocks before.
  explicit LaneSum(double before = 0) : total_(before) {}
  void add(std::int64_t i, float x) {
    if (i % kBlockTokens == 0 && i > 0) flush();
    lane_[i % kLanes] += x;
  }
  double total() {
    flush();
    return total_;
  }

 private:
  void flush() {
    total_ += static_cast<double>(fold16(lane_));
    for (float& x : lane_) x = 0;
  }
  float lane_[kLanes] = {};
  double total_;
};

void dot_rows(const Rows& rows, const std::uint32_t* index, std::int64_t count, const float* q,
              int heads, std::int64_t q_stride, float* out, std::int64_t out_stride) {
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t row = index != nullptr ? index[i] : i;
    for (int h = 0; h < heads; ++h) {
      float lane[kLanes] = {};
      for (int j = 0; j < rows.dim; ++j) {
        lane[j % kLanes] =
            std::fma(load_element(rows, row, j), q[h * q_stride + j], lane[j % kLanes]);
      }
      out[h * out_stride + i] = fold16(lane);
    }
  }
}

void weighted_rows(const Rows& rows, const std::uint32_t* index, std::int64_t count, const float* c,
                   int heads, std::int64_t c_stride, float* out, std::int64_t out_stride) {
  for (std::int64_t begin = 0; begin < count; begin += kBlockRows) {
    const std::int64_t end = std::min(begin + kBlockRows, count);
    for (int h = 0; h < heads; ++h) {
      for (int j = 0; j < rows.dim; ++j) {
        float sum = 0;
        for (std::int64_t i = begin; i < end; ++i) {
          const std::int64_t row = index != nullptr ? index[i] : i;
          sum = std::fma(c[h * c_stride + i], load_element(rows, row, j), sum);
        }
        out[h * out_stride + j] += sum;
      }
    }
  }
}

void sketch_logits(const SketchShape& shape, const std::uint8_t* codes, const Positive16* scale,
                   const Positive16* odds, std::int64_t count, const std::int8_t* q, int heads,
                   std::int64_t q_stride, const HeadConstants* constants, float* out,
                   std::int64_t out_stride, float* out_largest) {
  for (int h = 0; h < heads; ++h) {
    out_largest[h] = -std::numeric_limits<float>::infinity();
    const std::span<const std::int8_t> query(q + h * q_stride,
                                             static_cast<std::size_t>(shape.padded_dim()));
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int32_t dot = sketch_dot(shape, codes, i, query);
      const float logit = sketch_logit(dot, constants[h].query_sum, scale[i], constants[h].factor,
                                       constants[h].shift);
      out[h * out_stride + i] = logit;
      if (odds[i].bits < kPositive16Infinity.bits && logit > out_largest[h]) out_largest[h] = logit;
    }
    out_largest[h] += 0.0f;  // the largest of -0 and 0 is 0, in whichever order they come
  }
}

void weights(float* w, std::int64_t stride, const Positive16* odds, std::int64_t count, int heads,
             const float* shift, double* sums) {
  for (int h = 0; h < heads; ++h) {
    LaneSum sum(sums[h]);
    for (std::int64_t i = 0; i < count; ++i) {
      float& x = w[h * stride + i];
      x = odds[i].bits < kPositive16Infinity.bits ? weight_exp(x - shift[h]) : 0.0f;
      sum.add(i, x);
    }
    sums[h] = sum.total();
  }
}

void cluster_sums(const float* w, std::int64_t count, float* out_sum, float* out_square) {
  for (std::int64_t first = 0; first < count; first += kClusterTokens) {
    float lane[kLanes] = {};
    float square[kLanes] = {};
    for (std::int64_t i = first; i < std::min(first + kClusterTokens, count); ++i) {
      lane[i % kLanes] += w[i];
      square[i % kLanes] = std::fma(w[i], w[i], square[i % kLanes]);
    }
    out_sum[first / kClusterTokens] = fold16(lane);
    out_square[first / kClusterTokens] = fold16(square);
  }
}

void cluster_terms(const float* sketched, const float* exact, const float* odds, std::int64_t count,
                   float beta, float cap, float* out_x, float* out_y, double& out_plain,
                   double& out_known) {
  LaneSum plain;
  LaneSum known;
  for (std::int64_t i = 0; i < count; ++i) {
    const float w = sketched[i];
    const float v = exact[i];
    const bool low = w >= 0;
    const float cw = w * drawn_coefficient(w, w, odds[i], beta, cap);
    const float cv = cluster_term(v * drawn_coefficient(w, v, odds[i], beta, cap));
    out_x[i] = low ? beyond_itself(cw, w) : 0.0f;
    out_y[i] = low ? beyond_itself(cv, v) : 0.0f;
    plain.add(i, low ? cv : 0.0f);
    known.add(i, low ? v : 0.0f);
  }
  out_plain = plain.total();
  out_known = known.total();
}

void cluster_counts(const float* y, const std::uint32_t* cluster, const float* share,
                    const float* spread_square, std::int64_t count, float* sketched,
                    double& out_mass, double& out_error, float& out_top) {
  LaneSum mass;
  LaneSum error;
  out_top = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const bool low = sketched[i] >= 0;
    const float counts = share[cluster[i]] * y[i];
    mass.add(i, low ? counts : 0.0f);
    error.add(i, low ? spread_square[cluster[i]] * capped_square(counts) : 0.0f);
    if (!low) continue;
    sketched[i] = counts;
    out_top = std::max(out_top, counts);
  }
  out_mass = mass.total();
  out_error = error.total();
}

void beta_sums(const float* w, std::int64_t stride, const Positive16* odds, std::int64_t count,
               int heads, const float* beta, double* weight_sum, double* odds_sum) {
  for (int h = 0; h < heads; ++h) {
    LaneSum weight(weight_sum[h]);
    LaneSum odd(odds_sum[h]);
    for (std::int64_t i = 0; i < count; ++i) {
      const float x = w[h * stride + i];
      const float rho = to_float(odds[i]);
      const bool in = x > beta[h] * rho;
      weight.add(i, in ? x : 0.0f);
      odd.add(i, in ? rho : 0.0f);
    }
    weight_sum[h] = weight.total();
    odds_sum[h] = odd.total();
  }
}

void tail_sums(const float* w, std::int64_t stride, const Positive16* odds, std::int64_t count,
               int heads, const float* beta, double* variance_sum, float* largest_jump) {
  for (int h = 0; h < heads; ++h) {
    LaneSum variance(variance_sum[h]);
    float jump = largest_jump[h];
    for (std::int64_t i = 0; i < count; ++i) {
      const float x = w[h * stride + i];
      const float rho = to_float(odds[i]);
      variance.add(i, x > 0 ? variance_term(x, rho, beta[h]) : 0.0f);
      if (x > 0) jump = std::fmax(jump, jump_term(x, rho, beta[h]));
    }
    variance_sum[h] = variance.total();
    largest_jump[h] = jump;
  }
}

std::int64_t select_tokens(const float* w, std::int64_t stride, const Positive16* odds,
                           std::int64_t first, std::int64_t count, int heads, const float* beta,
                           const float* worth_threshold, const float* weight_threshold,
                           std::uint32_t* out, std::int64_t* out_planned) {
  std::int64_t found = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    bool any = false;
    const float rho = to_float(odds[i]);
    for (int h = 0; h < heads; ++h) {
      const float x = w[h * stride + i];
      const bool wanted = x > 0 && (x > weight_threshold[h] || worth_threshold[h] < 0 ||
                                    fetch_worth(x, rho, beta[h]) > worth_threshold[h]);
      out_planned[h] += wanted;
      any = any || wanted;
    }
    if (any) out[found++] = static_cast<std::uint32_t>(first + i);
  }
  return found;
}

void plan_start(const float* w, const Positive16* odds, std::int64_t first, std::int64_t count,
                float beta, PlanArrays& plan) {
  for (std::int64_t i = 0; i < count; ++i) {
    if (!(w[i] > 0)) continue;
    const float rho = to_float(odds[i]);
    plan.weight[plan.count] = w[i];
    plan.odds[plan.count] = rho;
    plan.worth[plan.count] = fetch_worth(w[i], rho, beta);
    plan.place[plan.count] = static_cast<std::uint32_t>(first + i);
    ++plan.count;
  }
}

void plan_beta_sums(const PlanArrays& plan, float threshold, float beta, double& out_weight,
                    double& out_odds) {
  LaneSum weight, odd;
  for (std::int64_t i = 0; i < plan.count; ++i) {
    const bool in = plan.worth[i] <= threshold && plan.weight[i] > beta * plan.odds[i];
    weight.add(i, in ? plan.weight[i] : 0.0f);
    odd.add(i, in ? plan.odds[i] : 0.0f);
  }
  out_weight = weight.total();
  out_odds = odd.total();
}

void plan_tail_sums(const PlanArrays& plan, float threshold, float beta, double& out_variance,
                    float& out_jump) {
  LaneSum variance;
  out_jump = 0;
  for (std::int64_t i = 0; i < plan.count; ++i) {
    const bool in = plan.worth[i] <= threshold;
    variance.add(i, in ? variance_term(plan.weight[i], plan.odds[i], beta) : 0.0f);
    if (in) out_jump = std::fmax(out_jump, jump_term(plan.weight[i], plan.odds[i], beta));
  }
  out_variance = variance.total();
}

void plan_compact(PlanArrays& plan, float drop_above, float settle_below, float beta_low,
                  float beta_high, SettledTerms& settled) {
  LaneSum weight, odds, variance;
  std::int64_t kept = 0;
  for (std::int64_t i = 0; i < plan.count; ++i) {
    const float w = plan.weight[i];
    const float rho = plan.odds[i];
    const float worth = plan.worth[i];
    const bool settles = worth <= settle_below;
    const bool above = settles && w > beta_high * rho;
    const bool below = settles && !above && w <= beta_low * rho;
    weight.add(i, above ? w : 0.0f);
    odds.add(i, above ? rho : 0.0f);
    variance.add(i, below ? variance_term(w, rho, beta_low) : 0.0f);
    if (above) settled.above_largest_odds = std::fmax(settled.above_largest_odds, jump_odds(rho));
    if (below) settled.below_jump = std::fmax(settled.below_jump, jump_term(w, rho, beta_low));
    if (above || below || worth > drop_above) continue;
    plan.weight[kept] = w;
    plan.odds[kept] = rho;
    plan.worth[kept] = worth;
    plan.place[kept] = plan.place[i];
    ++kept;
  }
  plan.count = kept;
  settled.above_weight += weight.total();
  settled.above_odds += odds.total();
  settled.below_variance += variance.total();
}

Positive16 encode_key(const SketchShape& shape, const SketchBands& bands, const float* x,
                      std::uint8_t* group, std::int64_t token) {
  return verkv::encode_key(shape, kSketchLevels, bands,
                           std::span<const float>(x, static_cast<std::size_t>(shape.dim)), group,
                           token);
}

void convert(const void* from, DType from_type, void* to, DType to_type, std::int64_t count) {
  if (from_type == to_type) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * size_bytes(to_type));
    return;
  }
  with_element(from_type, [&](auto given) {
    with_element(to_type, [&](auto stored) {
      const auto* in = static_cast<const decltype(given)*>(from);
      auto* out = static_cast<decltype(stored)*>(to);
      for (std::int64_t i = 0; i < count; ++i)
        out[i] = from_float<decltype(stored)>(to_float(in[i]));
    });
  });
}

bool all_within(const void* x, DType type, std::int64_t count, float limit) {
  bool result = true;
  with_element(type, [&](auto zero) {
    const auto* in = static_cast<const decltype(zero)*>(x);
    for (std::int64_t i = 0; i < count; ++i) result = result && std::fabs(to_float(in[i])) <= limit;
  });
  return result;
}

}  // namespace

const Kernels& scalar_kernels() {
  static constexpr Kernels kernels{
      "scalar",       dot_rows,       weighted_rows, sketch_logits, weights,       cluster_sums,
      cluster_terms,  cluster_counts, beta_sums,     tail_sums,     select_tokens, plan_start,
      plan_beta_sums, plan_tail_sums, plan_compact,  encode_key,    convert,       all_within};
  return kernels;
}

}  // namespace verkv::cpu
