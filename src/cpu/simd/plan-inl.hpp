// Which tokens to fetch: select_tokens, and the arrays of the search for a threshold.
//
// The guard opens once for every instruction set.
#if defined(VERKV_SRC_CPU_SIMD_PLAN_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef VERKV_SRC_CPU_SIMD_PLAN_INL_HPP
#undef VERKV_SRC_CPU_SIMD_PLAN_INL_HPP
#else
#define VERKV_SRC_CPU_SIMD_PLAN_INL_HPP
#endif

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <verkv/types.hpp>

#include "cpu/kernels.hpp"
#include "cpu/simd/weights-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace verkv::cpu {
namespace HWY_NAMESPACE {
#if VERKV_VECTORS
namespace {

// Dialect of verkv/fetch_plan.hpp: fetch_worth, where w > 0.
HWY_INLINE VF fetch_worth(VF w, VF rho, VF beta) {
  const VF edge = hn::Mul(beta, rho);
  const VF inside = hn::Mul(w, hn::Div(w, rho));
  // Twice w is exact, so this is the difference rounded once.
  const VF outside = hn::Mul(beta, hn::MulSub(hn::Set(df, 2.0f), w, edge));
  return hn::IfThenElse(hn::Le(w, edge), inside, outside);
}

HWY_INLINE VU32 places(std::int64_t first) {
  return hn::Iota(du32, static_cast<std::uint32_t>(first));
}
HWY_INLINE std::int64_t count_true(MF mask) {
  return static_cast<std::int64_t>(hn::CountTrue(df, mask));
}

#if HWY_TARGET == HWY_AVX2
// Lane numbers of the set bits of every mask of 8 lanes, ascending. Highway has the same table, but
// as a local constant that GCC copies to the stack for every use.
struct PackTable {
  alignas(64) std::uint8_t lane[256][8] = {};
};
constexpr PackTable pack_table() {
  PackTable table;
  for (unsigned bits = 0; bits < 256; ++bits) {
    int at = 0;
    for (unsigned lane = 0; lane < 8; ++lane) {
      if ((bits >> lane & 1u) != 0) table.lane[bits][at++] = static_cast<std::uint8_t>(lane);
    }
  }
  return table;
}
constexpr PackTable kPackTable = pack_table();
#endif

// Moves the lanes of a mask to the front of a vector.
class LanePacker {
 public:
#if HWY_TARGET == HWY_AVX2
  HWY_INLINE explicit LanePacker(MF mask) {
    std::uint8_t bits[8] = {};
    hn::StoreMaskBits(df, mask, bits);
    const hn::Rebind<std::uint8_t, DF> d8;
    lanes_ = hn::IndicesFromVec(du32, hn::PromoteTo(du32, hn::LoadU(d8, kPackTable.lane[bits[0]])));
  }
  // Whole vectors are written; what follows the lanes of the mask is arbitrary.
  HWY_INLINE void store(VU32 v, std::uint32_t* p) const {
    hn::StoreU(hn::TableLookupLanes(v, lanes_), du32, p);
  }
  HWY_INLINE void store(VF v, float* p) const {
    hn::StoreU(hn::BitCast(df, hn::TableLookupLanes(hn::BitCast(du32, v), lanes_)), df, p);
  }

 private:
  decltype(hn::IndicesFromVec(du32, hn::Zero(du32))) lanes_;
#else
  HWY_INLINE explicit LanePacker(MF mask) : mask_(mask) {}
  HWY_INLINE void store(VU32 v, std::uint32_t* p) const {
    hn::StoreU(hn::Compress(v, hn::RebindMask(du32, mask_)), du32, p);
  }
  HWY_INLINE void store(VF v, float* p) const { hn::StoreU(hn::Compress(v, mask_), df, p); }

 private:
  MF mask_;
#endif
};

// kHeads of 0: any number of heads, given at run time.
template <int kHeads>
std::int64_t select_tokens_of(const float* w, std::int64_t stride, const Positive16* odds,
                              std::int64_t first, std::int64_t count, int heads, const float* beta,
                              const float* worth_threshold, const float* weight_threshold,
                              std::uint32_t* out, std::int64_t* out_planned) {
  // With thresholds of at least 0, w > 0 needs no test of its own: worth is 0 or NaN where w is 0.
  float least_worth[kMaxHeads] = {};
  float least_weight[kMaxHeads] = {};
  std::int64_t planned[kMaxHeads] = {};
  for (int h = 0; h < heads; ++h) {
    const bool all = worth_threshold[h] < 0;
    least_worth[h] = all ? 0.0f : worth_threshold[h];
    least_weight[h] = all || weight_threshold[h] < 0 ? 0.0f : weight_threshold[h];
  }
  std::int64_t found = 0;
  each_part(0, count, [&](std::int64_t i, auto, auto lanes) VERKV_LAMBDA {
    const VF rho = load(odds + i);
    MF any = hn::FirstN(df, 0);
    const auto add_head = [&](auto h) VERKV_LAMBDA {
      const VF x = lanes.load(w + h * stride + i);
      const VF worth = fetch_worth(x, rho, hn::Set(df, beta[h]));
      const MF wanted = hn::Or(hn::Gt(x, hn::Set(df, least_weight[h])),
                               hn::Gt(worth, hn::Set(df, least_worth[h])));
      planned[h] += count_true(wanted);
      any = hn::Or(any, wanted);
    };
    if constexpr (kHeads > 0) {
      unroll<kHeads>(add_head);
    } else {
      for (int h = 0; h < heads; ++h) add_head(h);
    }
    LanePacker(any).store(places(first + i), out + found);
    found += count_true(any);
  });
  for (int h = 0; h < heads; ++h) out_planned[h] += planned[h];
  return found;
}

std::int64_t select_tokens(const float* w, std::int64_t stride, const Positive16* odds,
                           std::int64_t first, std::int64_t count, int heads, const float* beta,
                           const float* worth_threshold, const float* weight_threshold,
                           std::uint32_t* out, std::int64_t* out_planned) {
  const auto run = [&](auto n) HWY_ATTR {
    return select_tokens_of<n>(w, stride, odds, first, count, heads, beta, worth_threshold,
                               weight_threshold, out, out_planned);
  };
  switch (heads) {
    case 1:
      return run(std::integral_constant<int, 1>{});
    case 2:
      return run(std::integral_constant<int, 2>{});
    case 3:
      return run(std::integral_constant<int, 3>{});
    case 4:
      return run(std::integral_constant<int, 4>{});
    default:
      return run(std::integral_constant<int, 0>{});
  }
}

void plan_start(const float* w, const Positive16* odds, std::int64_t first, std::int64_t count,
                float beta, PlanArrays& plan) {
  const PlanArrays to = plan;
  std::int64_t kept = plan.count;
  each_part(0, count, [&](std::int64_t i, auto, auto lanes) VERKV_LAMBDA {
    const VF x = lanes.load(w + i);
    const VF rho = load(odds + i);
    const MF positive = hn::Gt(x, hn::Zero(df));
    const LanePacker packer(positive);
    packer.store(x, to.weight + kept);
    packer.store(rho, to.odds + kept);
    packer.store(fetch_worth(x, rho, hn::Set(df, beta)), to.worth + kept);
    packer.store(places(first + i), to.place + kept);
    kept += count_true(positive);
  });
  plan.count = kept;
}

void plan_beta_sums(const PlanArrays& plan, float threshold, float beta, double& out_weight,
                    double& out_odds) {
  double total[2] = {};
  for (std::int64_t begin = 0; begin < plan.count; begin += kBlockTokens) {
    VF lane[2][kParts];
    zero(lane);
    each_part(begin, std::min(begin + kBlockTokens, plan.count),
              [&](std::int64_t i, auto part, auto lanes) VERKV_LAMBDA {
                const VF x = lanes.load(plan.weight + i);
                const VF rho = lanes.load(plan.odds + i);
                const MF left = hn::Le(lanes.load(plan.worth + i), hn::Set(df, threshold));
                const MF in = lanes.only(hn::And(left, hn::Gt(x, hn::Mul(hn::Set(df, beta), rho))));
                lane[0][part] = hn::IfThenElse(in, hn::Add(lane[0][part], x), lane[0][part]);
                lane[1][part] = hn::IfThenElse(in, hn::Add(lane[1][part], rho), lane[1][part]);
              });
    add_folds(lane, total);
  }
  out_weight = total[0];
  out_odds = total[1];
}

void plan_tail_sums(const PlanArrays& plan, float threshold, float beta, double& out_variance,
                    float& out_jump) {
  double total[1] = {};
  VF jump[1][kParts];
  zero(jump);
  for (std::int64_t begin = 0; begin < plan.count; begin += kBlockTokens) {
    VF lane[1][kParts];
    zero(lane);
    each_part(begin, std::min(begin + kBlockTokens, plan.count),
              [&](std::int64_t i, auto part, auto lanes) VERKV_LAMBDA {
                const VF x = lanes.load(plan.weight + i);
                const VF rho = lanes.load(plan.odds + i);
                const MF left =
                    lanes.only(hn::Le(lanes.load(plan.worth + i), hn::Set(df, threshold)));
                const Tail tail = tail_of(x, rho, hn::Set(df, beta));
                lane[0][part] =
                    hn::IfThenElse(left, hn::Add(lane[0][part], tail.variance), lane[0][part]);
                raise(jump[0][part], tail.jump, left);
              });
    add_folds(lane, total);
  }
  out_variance = total[0];
  out_jump = largest(jump[0], 0.0f);
}

// Dialect of verkv/certificate.hpp: variance_term, jump_term of settled tokens.
void plan_compact(PlanArrays& plan, float drop_above, float settle_below, float beta_low,
                  float beta_high, SettledTerms& settled) {
  const PlanArrays to = plan;
  double total[3] = {};
  VF top[2][kParts];
  zero(top);
  const VF one = hn::Set(df, 1.0f);
  std::int64_t kept = 0;
  for (std::int64_t begin = 0; begin < to.count; begin += kBlockTokens) {
    VF lane[3][kParts];
    zero(lane);
    each_part(begin, std::min(begin + kBlockTokens, to.count),
              [&](std::int64_t i, auto part, auto lanes) VERKV_LAMBDA {
                const VF x = lanes.load(to.weight + i);
                const VF rho = lanes.load(to.odds + i);
                const VF worth = lanes.load(to.worth + i);
                const VU32 place = hn::LoadU(du32, to.place + i);
                const MF settles = lanes.only(hn::Le(worth, hn::Set(df, settle_below)));
                const MF above = hn::And(settles, hn::Gt(x, hn::Mul(hn::Set(df, beta_high), rho)));
                const MF low = hn::And(settles, hn::Le(x, hn::Mul(hn::Set(df, beta_low), rho)));
                const MF below = hn::AndNot(above, low);
                const MF dropped =
                    hn::Or(hn::Or(above, below), hn::Gt(worth, hn::Set(df, drop_above)));
                const MF keep = lanes.only(hn::Not(dropped));
                const VF t = hn::Div(x, rho);
                const VF largest_odds = hn::IfThenElse(hn::Gt(rho, one), rho, one);
                lane[0][part] = hn::IfThenElse(above, hn::Add(lane[0][part], x), lane[0][part]);
                lane[1][part] = hn::IfThenElse(above, hn::Add(lane[1][part], rho), lane[1][part]);
                lane[2][part] =
                    hn::IfThenElse(below, hn::Add(lane[2][part], hn::Mul(x, t)), lane[2][part]);
                raise(top[0][part], largest_odds, above);
                raise(top[1][part], hn::Mul(t, largest_odds), below);
                // kept <= i, so whole vectors may be written over what has been read.
                const LanePacker packer(keep);
                packer.store(x, to.weight + kept);
                packer.store(rho, to.odds + kept);
                packer.store(worth, to.worth + kept);
                packer.store(place, to.place + kept);
                kept += count_true(keep);
              });
    add_folds(lane, total);
  }
  plan.count = kept;
  settled.above_weight += total[0];
  settled.above_odds += total[1];
  settled.below_variance += total[2];
  settled.above_largest_odds = largest(top[0], settled.above_largest_odds);
  settled.below_jump = largest(top[1], settled.below_jump);
}

}  // namespace
#endif  // VERKV_VECTORS
}  // namespace HWY_NAMESPACE
}  // namespace verkv::cpu
HWY_AFTER_NAMESPACE();

#endif  // VERKV_SRC_CPU_SIMD_PLAN_INL_HPP
