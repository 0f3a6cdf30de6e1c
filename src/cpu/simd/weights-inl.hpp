// Weights of all tokens, and the sums of beta and of the certificate over them.
//
// The guard opens once for every instruction set.
#if defined(VERKV_SRC_CPU_SIMD_WEIGHTS_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef VERKV_SRC_CPU_SIMD_WEIGHTS_INL_HPP
#undef VERKV_SRC_CPU_SIMD_WEIGHTS_INL_HPP
#else
#define VERKV_SRC_CPU_SIMD_WEIGHTS_INL_HPP
#endif

#include <algorithm>
#include <cstdint>

#include <verkv/attention.hpp>
#include <verkv/clusters.hpp>
#include <verkv/types.hpp>

#include "cpu/kernels.hpp"
#include "cpu/simd/lanes-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace verkv::cpu {
namespace HWY_NAMESPACE {
#if VERKV_VECTORS
namespace {

// Dialect of verkv/attention.hpp: weight_exp where `keep`, 0 elsewhere.
HWY_INLINE VF weight_exp(VF x, MF keep) {
  using namespace exp_terms;
  const MF below = hn::Lt(x, hn::Set(df, kLowest));
  const VF highest = hn::Set(df, kHighest);
#if HWY_ARCH_X86
  const VF top = hn::Min(highest, x);  // NaN where x is
#else
  const VF top = hn::IfThenElse(hn::Gt(x, highest), highest, x);
#endif
  // 127 more than weight_exp adds, so that the low bits are a biased exponent. It moves no
  // rounding: the product is never half-way between integers, as the constant has 24 significant
  // bits.
  const VF magic = hn::Set(df, kRounder + 127.0f);
  const VF shifted = hn::MulAdd(top, hn::Set(df, kPerLog2), magic);
  const VF n = hn::Sub(shifted, magic);
  VF r = hn::MulAdd(n, hn::Set(df, -kLog2High), top);
  r = hn::MulAdd(n, hn::Set(df, -kLog2Low), r);
  VF p = hn::Set(df, kC7);
  p = hn::MulAdd(p, r, hn::Set(df, kC6));
  p = hn::MulAdd(p, r, hn::Set(df, kC5));
  p = hn::MulAdd(p, r, hn::Set(df, kC4));
  p = hn::MulAdd(p, r, hn::Set(df, kC3));
  p = hn::MulAdd(p, r, hn::Set(df, kC2));
  const VF y = hn::Add(hn::MulAdd(p, hn::Mul(r, r), r), hn::Set(df, 1.0f));
  const VF power = hn::BitCast(df, hn::ShiftLeft<23>(hn::BitCast(du32, shifted)));
  return hn::IfThenElseZero(hn::AndNot(below, keep), hn::Mul(y, power));
}

template <int kHeads>
void weights_of(float* w, std::int64_t stride, const Positive16* odds, std::int64_t count,
                const float* shift, double* sum) {
  double total[kHeads];
  std::copy_n(sum, kHeads, total);
  for (std::int64_t begin = 0; begin < count; begin += kBlockTokens) {
    VF lane[kHeads][kParts];
    zero(lane);
    each_part(begin, std::min(begin + kBlockTokens, count),
              [&](std::int64_t i, auto part, auto lanes) VERKV_LAMBDA {
                const MF finite = lanes.only(hn::Lt(load(odds + i), infinity()));
                unroll<kHeads>([&](auto h) VERKV_LAMBDA {
                  float* at = w + h * stride + i;
                  const VF x = hn::Sub(lanes.load(at), hn::Set(df, shift[h]));
                  const VF weight = weight_exp(x, finite);
                  lanes.store(weight, at);
                  lane[h][part] = hn::Add(lane[h][part], weight);
                });
              });
    add_folds(lane, total);
  }
  std::copy_n(total, kHeads, sum);
}

void weights(float* w, std::int64_t stride, const Positive16* odds, std::int64_t count, int heads,
             const float* shift, double* sum) {
  each_heads(heads, [&](int h, auto n) HWY_ATTR {
    weights_of<n>(w + h * stride, stride, odds, count, shift + h, sum + h);
  });
}

// Sums and squares of as many clusters as fill a vector, folded at once.
void cluster_sums(const float* w, std::int64_t count, float* out_sum, float* out_square) {
  constexpr int kAtOnce = kN / 2;
  const std::int64_t clusters = clusters_of(count);
  for (std::int64_t first = 0; first < clusters; first += kAtOnce) {
    VF acc[2 * kAtOnce][kParts];
    zero(acc);
    const std::int64_t here = std::min<std::int64_t>(kAtOnce, clusters - first);
    unroll<kAtOnce>([&](auto k) VERKV_LAMBDA {
      if (k >= here) return;
      const std::int64_t begin = (first + k) * kClusterTokens;
      each_part(begin, std::min(begin + kClusterTokens, count),
                [&](std::int64_t i, auto part, auto lanes) VERKV_LAMBDA {
                  const VF x = lanes.load(w + i);
                  acc[k][part] = hn::Add(acc[k][part], x);
                  acc[kAtOnce + k][part] = hn::MulAdd(x, x, acc[kAtOnce + k][part]);
                });
    });
    alignas(64) float sums[2 * kAtOnce];
    fold(acc, sums);
    std::copy_n(sums, here, out_sum + first);
    std::copy_n(sums + kAtOnce, here, out_square + first);
  }
}

// Dialect of verkv/shrinkage.hpp: drawn_coefficient, lambda of (1) being given.
HWY_INLINE VF drawn_coefficient(VF lambda, VF exact, VF rho, VF bound) {
  const MF beyond = hn::Gt(hn::Mul(lambda, exact), bound);
  const VF capped = hn::IfThenElse(beyond, hn::Div(bound, exact), lambda);
  return hn::Div(hn::Mul(capped, hn::Add(hn::Set(df, 1.0f), rho)), rho);
}

// Dialect of verkv/clusters.hpp: beyond_itself.
HWY_INLINE VF beyond_itself(VF cw, VF w) {
  return hn::IfThenElseZero(hn::Gt(cw, w), hn::Sub(cw, w));
}

void cluster_terms(const float* sketched, const float* exact, const float* odds, std::int64_t count,
                   float beta, float cap, float* out_x, float* out_y, double& out_plain,
                   double& out_known) {
  const VF most = hn::Set(df, kMostClusterTerm);
  double total[2] = {};
  for (std::int64_t begin = 0; begin < count; begin += kBlockTokens) {
    VF lane[2][kParts];
    zero(lane);
    each_part(begin, std::min(begin + kBlockTokens, count),
              [&](std::int64_t i, auto part, auto lanes) VERKV_LAMBDA {
                const VF w = lanes.load(sketched + i);
                const VF v = lanes.load(exact + i);
                const VF rho = lanes.load(odds + i);
                const MF low = lanes.only(hn::Ge(w, hn::Zero(df)));
                const VF edge = hn::Mul(hn::Set(df, beta), rho);
                const VF lambda =
                    hn::IfThenElse(hn::Le(w, edge), hn::Set(df, 1.0f), hn::Div(edge, w));
                // Without a cap the bound is infinite, or no number where beta is 0, and nothing is
                // above it.
                const VF bound = hn::Mul(hn::Set(df, cap * beta), rho);
                const VF cw = hn::Mul(w, drawn_coefficient(lambda, w, rho, bound));
                const VF uncapped = hn::Mul(v, drawn_coefficient(lambda, v, rho, bound));
                const VF cv = hn::IfThenElse(hn::Gt(uncapped, most), most, uncapped);
                lanes.store(hn::IfThenElseZero(low, beyond_itself(cw, w)), out_x + i);
                lanes.store(hn::IfThenElseZero(low, beyond_itself(cv, v)), out_y + i);
                lane[0][part] = hn::Add(lane[0][part], hn::IfThenElseZero(low, cv));
                lane[1][part] = hn::Add(lane[1][part], hn::IfThenElseZero(low, v));
              });
    add_folds(lane, total);
  }
  out_plain = total[0];
  out_known = total[1];
}

// Dialect of verkv/clusters.hpp: capped_square.
HWY_INLINE VF capped_square(VF e) {
  const VF most = hn::Set(df, kMostSpread);
  return hn::IfThenElse(hn::Gt(e, most), hn::Mul(most, most), hn::Mul(e, e));
}

void cluster_counts(const float* y, const std::uint32_t* cluster, const float* share,
                    const float* spread_square, std::int64_t count, float* sketched,
                    double& out_mass, double& out_error, float& out_top) {
  double total[2] = {};
  VF top[kParts];
  unroll<kParts>([&](auto part) VERKV_LAMBDA { top[part] = hn::Zero(df); });
  for (std::int64_t begin = 0; begin < count; begin += kBlockTokens) {
    VF lane[2][kParts];
    zero(lane);
    each_part(begin, std::min(begin + kBlockTokens, count),
              [&](std::int64_t i, auto part, auto lanes) VERKV_LAMBDA {
                const VF w = lanes.load(sketched + i);
                const MF low = lanes.only(hn::Ge(w, hn::Zero(df)));
                // Clusters of slots that are not there are 0, as MaskedLoad gives them.
                const VI32 at =
                    hn::BitCast(di32, lanes.load(reinterpret_cast<const float*>(cluster) + i));
                const VF counts = hn::Mul(hn::GatherIndex(df, share, at), lanes.load(y + i));
                const VF square = capped_square(counts);
                const VF spread = hn::GatherIndex(df, spread_square, at);
                lane[0][part] = hn::Add(lane[0][part], hn::IfThenElseZero(low, counts));
                lane[1][part] =
                    hn::Add(lane[1][part], hn::IfThenElseZero(low, hn::Mul(spread, square)));
                raise(top[part], counts, low);
                lanes.store(hn::IfThenElse(low, counts, w), sketched + i);
              });
    add_folds(lane, total);
  }
  out_mass = total[0];
  out_error = total[1];
  out_top = largest(top, 0);
}

template <int kHeads>
void beta_sums_of(const float* w, std::int64_t stride, const Positive16* odds, std::int64_t count,
                  const float* beta, double* weight_sum, double* odds_sum) {
  double total[2 * kHeads];
  std::copy_n(weight_sum, kHeads, total);
  std::copy_n(odds_sum, kHeads, total + kHeads);
  for (std::int64_t begin = 0; begin < count; begin += kBlockTokens) {
    VF lane[2 * kHeads][kParts];
    zero(lane);
    each_part(begin, std::min(begin + kBlockTokens, count),
              [&](std::int64_t i, auto part, auto lanes) VERKV_LAMBDA {
                const VF rho = load(odds + i);
                unroll<kHeads>([&](auto h) VERKV_LAMBDA {
                  const VF x = lanes.load(w + h * stride + i);
                  const MF in = lanes.only(hn::Gt(x, hn::Mul(hn::Set(df, beta[h]), rho)));
                  VF& weight = lane[h][part];
                  VF& odd = lane[kHeads + h][part];
                  weight = hn::IfThenElse(in, hn::Add(weight, x), weight);
                  odd = hn::IfThenElse(in, hn::Add(odd, rho), odd);
                });
              });
    add_folds(lane, total);
  }
  std::copy_n(total, kHeads, weight_sum);
  std::copy_n(total + kHeads, kHeads, odds_sum);
}

void beta_sums(const float* w, std::int64_t stride, const Positive16* odds, std::int64_t count,
               int heads, const float* beta, double* weight_sum, double* odds_sum) {
  each_heads(heads, [&](int h, auto n) HWY_ATTR {
    beta_sums_of<n>(w + h * stride, stride, odds, count, beta + h, weight_sum + h, odds_sum + h);
  });
}

struct Tail {
  VF variance;
  VF jump;
};
// Dialect of verkv/certificate.hpp: variance_term, jump_term.
HWY_INLINE Tail tail_of(VF w, VF rho, VF beta) {
  const MF inside = hn::Le(w, hn::Mul(beta, rho));
  const VF t = hn::Div(w, rho);
  const VF variance = hn::IfThenElse(inside, hn::Mul(w, t), hn::Mul(hn::Mul(beta, beta), rho));
  const VF clipped = hn::IfThenElse(inside, t, beta);
  const VF jump = hn::IfThenElse(hn::Gt(rho, hn::Set(df, 1.0f)), hn::Mul(clipped, rho), clipped);
  return {variance, jump};
}

template <int kHeads>
void tail_sums_of(const float* w, std::int64_t stride, const Positive16* odds, std::int64_t count,
                  const float* beta, double* variance_sum, float* largest_jump) {
  double total[kHeads];
  std::copy_n(variance_sum, kHeads, total);
  VF jump[kHeads][kParts];
  zero(jump);
  for (std::int64_t begin = 0; begin < count; begin += kBlockTokens) {
    VF lane[kHeads][kParts];
    zero(lane);
    each_part(begin, std::min(begin + kBlockTokens, count),
              [&](std::int64_t i, auto part, auto lanes) VERKV_LAMBDA {
                const VF rho = load(odds + i);
                unroll<kHeads>([&](auto h) VERKV_LAMBDA {
                  const VF x = lanes.load(w + h * stride + i);
                  const MF positive = hn::Gt(x, hn::Zero(df));
                  const Tail tail = tail_of(x, rho, hn::Set(df, beta[h]));
                  VF& variance = lane[h][part];
                  variance = hn::IfThenElse(positive, hn::Add(variance, tail.variance), variance);
                  raise(jump[h][part], tail.jump, positive);
                });
              });
    add_folds(lane, total);
  }
  unroll<kHeads>([&](auto h) VERKV_LAMBDA {
    variance_sum[h] = total[h];
    largest_jump[h] = largest(jump[h], largest_jump[h]);
  });
}

void tail_sums(const float* w, std::int64_t stride, const Positive16* odds, std::int64_t count,
               int heads, const float* beta, double* variance_sum, float* largest_jump) {
  each_heads(heads, [&](int h, auto n) HWY_ATTR {
    tail_sums_of<n>(w + h * stride, stride, odds, count, beta + h, variance_sum + h,
                    largest_jump + h);
  });
}

}  // namespace
#endif  // VERKV_VECTORS
}  // namespace HWY_NAMESPACE
}  // namespace verkv::cpu
HWY_AFTER_NAMESPACE();

#endif  // VERKV_SRC_CPU_SIMD_WEIGHTS_INL_HPP
