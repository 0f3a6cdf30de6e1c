#include "cpu/certify.hpp"

#include <array>
#include <limits>

#include <verkv/certificate.hpp>
#include <verkv/shrinkage.hpp>
#include <verkv/sketch_error.hpp>

#include "sum_order.hpp"

namespace verkv::cpu {

// For the heads of a kernel call side by side. Heads finish after different numbers of rounds; one
// more round does not change a finished one.
// Dialect of verkv/shrinkage.hpp: newton_beta, for several heads.
void solve_beta(HeadGroup& group) {
  group.in_parts([&](int first, int heads) {
    std::array<float, kMaxHeads> beta{};
    std::array<double, kMaxHeads> weight{};
    std::array<double, kMaxHeads> odds{};
    for (int round = 0; round < kMostBetaRounds; ++round) {
      weight.fill(0);
      odds.fill(0);
      group.store.each_piece([&](std::int64_t at, std::int64_t count) {
        group.kernels.beta_sums(group.weight(first) + at, group.weight_stride, group.store.odds(at),
                                count, heads, beta.data(), weight.data(), odds.data());
      });
      bool rose = false;
      for (std::size_t h = 0; h < static_cast<std::size_t>(heads); ++h) {
        const float next = static_cast<float>(beta_of_sums(weight[h], odds[h]));
        if (!(next > beta[h])) continue;
        beta[h] = next;
        rose = true;
      }
      if (!rose) break;
    }
    for (int h = 0; h < heads; ++h) group.state(first + h).beta = beta[static_cast<std::size_t>(h)];
  });
}

void solve_certificate(HeadGroup& group) {
  group.in_parts([&](int first, int heads) {
    std::array<float, kMaxHeads> beta{};
    std::array<double, kMaxHeads> variance{};
    std::array<float, kMaxHeads> jump{};
    for (int h = 0; h < heads; ++h) beta[static_cast<std::size_t>(h)] = group.state(first + h).beta;
    group.store.each_piece([&](std::int64_t at, std::int64_t count) {
      group.kernels.tail_sums(group.weight(first) + at, group.weight_stride, group.store.odds(at),
                              count, heads, beta.data(), variance.data(), jump.data());
    });
    for (int h = 0; h < heads; ++h) {
      const std::size_t i = static_cast<std::size_t>(h);
      HeadState& s = group.state(first + h);
      const TailTerms terms{static_cast<double>(beta[i]), variance[i],
                            static_cast<double>(jump[i])};
      s.bound = s.computable ? outward_certificate(terms, s.denominator, group.rules.log_term)
                             : std::numeric_limits<double>::infinity();
    }
  });
}

double measure_sketch(HeadGroup& group, int h) {
  const Drawn& drawn = group.store.drawn();
  const float* weight = group.weight(h);
  const float* logit = group.resident_logit(h);
  const float shift = group.state(h).shift;
  float lanes[3][kLanes] = {};
  const std::int64_t stride = measured_stride(group.drawn);
  // A row of lanes at a time, so that the compiler has vectors for what a row has.
  for (std::int64_t first = 0; first < group.drawn; first += kLanes * stride) {
    float w[kLanes] = {};
    float exact[kLanes] = {};
    float rho[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      const std::int64_t slot = first + lane * stride;
      rho[lane] = std::numeric_limits<float>::infinity();
      if (slot >= group.drawn) continue;
      w[lane] = weight[drawn.place_of(slot)];
      exact[lane] = logit[slot] - shift;
      rho[lane] = group.workspace.slot_odds[static_cast<std::size_t>(slot)];
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      const SketchErrorTerms terms = sketch_error_terms(w[lane], exact[lane], rho[lane]);
      const bool low = rho[lane] < std::numeric_limits<float>::infinity();
      lanes[0][lane] += low ? terms.weight : 0.0f;
      lanes[1][lane] += low ? terms.weight_square : 0.0f;
      lanes[2][lane] += low ? terms.error_square : 0.0f;
    }
  }
  static_assert(kMeasuredTokens <= kBlockTokens, "the sums are of one block");
  return sketch_error(static_cast<double>(fold16(lanes[0])), static_cast<double>(fold16(lanes[1])),
                      static_cast<double>(fold16(lanes[2])));
}

namespace {

bool all_is_fetched(const HeadGroup& group, std::int64_t fetched) {
  std::int64_t low = 0;
  for (std::int64_t i = 0; i < group.compressed; ++i) low += group.is_low(i);
  return low == fetched;
}

}  // namespace

void certify_rest(HeadGroup& group, std::int64_t fetched, bool is_known,
                  QueryHeadReport* out_reports) {
  const bool measures = group.compressed > 0 && has_codes(group.shape.sketch.kind);
  for (int h = 0; h < group.heads; ++h)
    group.state(h).sketch_error = measures ? measure_sketch(group, h) : 0;
  for (std::int64_t i = 0; i < fetched; ++i) {
    const std::uint32_t place = group.workspace.fetched[static_cast<std::size_t>(i)];
    for (int h = 0; h < group.heads; ++h) group.weight(h)[place] = 0;
  }
  if (group.compressed > 0 && !is_known) {
    solve_beta(group);
    solve_certificate(group);
  }
  for (int h = 0; h < group.heads; ++h) {
    HeadState& s = group.state(h);
    if (group.compressed == 0) s.bound = bound_without_estimate(s.computable, group.residents > 0);
    // Counted only where the answer hangs on it.
    if (!(s.bound == 0 && is_useless(s.sketch_error) && all_is_fetched(group, fetched)))
      s.bound = enlarged_for_sketch(s.bound, s.sketch_error);
    out_reports[h].sketch_error = s.sketch_error;
    out_reports[h].epsilon = s.bound;
    out_reports[h].certified = is_certified(s.bound, group.rules.epsilon);
  }
}

}  // namespace verkv::cpu
