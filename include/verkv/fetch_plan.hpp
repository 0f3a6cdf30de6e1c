// Which tokens to fetch: the stop rules, the order (Eq. 9, or what fetching a token is worth), the
// smallest prefix of it that certifies (Eq. 10). Nothing here may look at which tokens happen to be
// resident: Theorem 2 needs the plan to be independent of the draw given the query.
//
// Dialect: src/cpu/simd/plan-inl.hpp: fetch_worth
// Dialect: cuda/terms.cuh: tail_of
#ifndef VERKV_FETCH_PLAN_HPP
#define VERKV_FETCH_PLAN_HPP

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>

#include <verkv/certificate.hpp>
#include <verkv/config.hpp>
#include <verkv/shrinkage.hpp>

namespace verkv {

// What fetching token i is worth: its share in the mean square error of D_hat at fixed beta,
//
//   worth_i = w_i t_i                       where t_i <= beta                                 (5)
//   worth_i = beta (2 w_i - beta rho_i)     where t_i >  beta
//
// with t_i = w_i / rho_i. (5) is the Horvitz-Thompson variance of a token with lambda = 1. The
// second line is the integral of d MSE / d w_i = 2 min(t_i, beta) from 0 to w_i: (5) alone is
// infinite for a token that is never drawn (rho = 0) however little it weighs. beta = infinity
// gives (5) for every token with rho > 0.
template <class T>
VERKV_HD constexpr T fetch_worth(T w, T rho, T beta) {
  if (w <= beta * rho) return w > T(0) ? w * (w / rho) : T(0);
  return beta * (T(2) * w - beta * rho);
}

// ---- Stop rules ---------------------------------------------------------------------------------

// When a query head stops asking for tokens. Plain numbers, the same for every head of a layer;
// infinity switches a rule off.
struct StopRules {
  static constexpr double kNone = std::numeric_limits<double>::infinity();
  // The certificate of what is not fetched shall be at most this.
  double epsilon = kNone;
  // log(2 / delta), which that certificate is computed with.
  double log_term = 0;
  // Tokens whose worth is above risk * D^2 are fetched: their share in the relative mean square
  // error.
  double risk = kNone;
  // Tokens whose weight is above probability * D are fetched: their share in the attention.
  double probability = kNone;

  VERKV_HD constexpr bool certifies() const { return epsilon < kNone; }
  // Whether a rule asks for tokens that the certificate does not need.
  VERKV_HD constexpr bool asks_for_more() const { return risk < kNone || probability < kNone; }
};

// The rules in the units of one head's weights.
struct RuleThresholds {
  float worth = std::numeric_limits<float>::infinity();   // a token worth more is fetched,
  float weight = std::numeric_limits<float>::infinity();  // and one that weighs more
  // The certificate that the plan must reach, by its own sums.
  double target = StopRules::kNone;
};

// Nothing is asked for where D does not compute. The price of risk is cut to the range of binary32.
// The plan's target is below epsilon by kOutward: the certificate of a step sums what the plan
// leaves in another order, and a step must not fetch for the sake of a certificate and then miss it
// by a rounding error.
VERKV_HD inline RuleThresholds thresholds(const StopRules& rules, double denominator) {
  RuleThresholds result;
  if (!is_computable(denominator)) return result;
  const double most = static_cast<double>(std::numeric_limits<float>::max());
  const double price = rules.risk * denominator * denominator;
  result.worth = static_cast<float>(most < price ? most : price);
  result.weight = static_cast<float>(rules.probability * denominator);
  result.target = rules.epsilon / kOutward;
  return result;
}

// What a limit ranks the tokens by that are asked for: the largest worth / D^2 of any head whose D
// computes. rank: over the heads before, 0 at first.
VERKV_HD constexpr float limit_rank(float rank, float worth, double denominator) {
  const float d = static_cast<float>(denominator);
  const float own = worth / d / d;
  return rank < own ? own : rank;
}

// Where a head's prefix of the order of worth ends.
struct FetchThreshold {
  float worth = 0;        // fetch every token that is worth more
  std::int64_t ties = 0;  // and so many tokens that are worth exactly this, lowest places first
};

// The first pivot of the search for that threshold. sorted: a sample of the open tokens' worth,
// ascending, not empty; open_count: how many tokens it stands for.
//
// While lambda = 1, worth is variance (5), so the worth of what is kept sums to its V. Were there
// no bias and no largest jump, eps(L) = sqrt(2 V l) / D, and V = (target D)^2 / (2 l) would just
// certify. The pivot gives the variance a share of the bound and leaves the rest to bias and jump:
//
//   V = share^2 / 2 (target D)^2 / l = 0.18 (target D)^2 / l
//
// This form is derived, the share is measured: on the shipped recording the search looks at the
// fewest tokens with 0.6 (epsilon = 0.05), and at 4 % more at most from 0.4 to 0.9. A wrong share
// costs rounds of the search, never the result.
inline constexpr double kVarianceShare = 0.6;
VERKV_HD inline float first_pivot(std::span<const float> sorted, std::int64_t open_count,
                                  double target, double denominator, double log_term) {
  const double wanted =
      kVarianceShare * kVarianceShare / 2 * target * target * denominator * denominator / log_term;
  const double each = static_cast<double>(open_count) / static_cast<double>(sorted.size());
  double variance = 0;
  std::size_t at = 0;
  while (at + 1 < sorted.size() && (variance += each * static_cast<double>(sorted[at])) < wanted)
    ++at;
  return sorted[at];
}

// The other numbers of that search. They decide in what groups sums are rounded, so every backend
// has these: a sample of so many open tokens costs little beside a pass over all, and its median
// halves what is open but for a tenth; below so many open tokens each is tried in turn.
inline constexpr int kSearchSample = 31;
inline constexpr int kSearchFew = 64;

// ---- Prefixes of an order -----------------------------------------------------------------------

// Smallest k in [0, n] with certificate_at(k) <= epsilon, for a certificate_at that never rises
// with k and is 0 at n. Bisection; at most 2 + log2(n) evaluations.
template <class Evaluate>
std::size_t smallest_certified_prefix(std::size_t n, double epsilon, Evaluate&& certificate_at) {
  if (certificate_at(std::size_t{0}) <= epsilon) return 0;
  std::size_t bad = 0;
  std::size_t good = n;
  while (good - bad > 1) {
    const std::size_t middle = bad + (good - bad) / 2;
    (certificate_at(middle) <= epsilon ? good : bad) = middle;
  }
  return good;
}

// Sorts token indices by descending value, ties by lower index; NaN comes first.
template <class T>
void order_by_descending(std::span<const T> value, std::span<std::uint32_t> out_order) {
  std::iota(out_order.begin(), out_order.end(), std::uint32_t{0});
  std::sort(out_order.begin(), out_order.end(), [value](std::uint32_t a, std::uint32_t b) {
    const T x = value[a];
    const T y = value[b];
    if (!(x == x && y == y)) return x != x && (y == y || a < b);  // keeps the order strict
    return x != y ? x > y : a < b;
  });
}

// ---- The exact order, Eq. 9 ---------------------------------------------------------------------

// Rows of GainTable.
inline constexpr std::size_t kGainScratchDoubles = 10;

// The tokens of L by descending t = w / rho, and sums over the first p of them or over all from p
// on: enough to take any one token out of beta, V and b. Rows of n + 1 doubles, the caller's.
struct GainTable {
  std::size_t tokens = 0;
  std::span<double> t, w, rho;
  // Sums over the tokens before p.
  std::span<double> sum_w, sum_rho;
  // The largest and second largest max(rho, 1) before p.
  std::span<double> head_odds1, head_odds2;
  // From p on, unclipped: the sum of w t, the largest and second largest max(w, t).
  std::span<double> tail_variance, tail_jump1, tail_jump2;

  // Sorts and sums. out_order: the token of each place.
  static GainTable make(std::span<const double> w, std::span<const double> rho,
                        std::span<double> scratch, std::span<std::uint32_t> out_order) {
    GainTable table;
    const std::size_t n = table.tokens = w.size();
    std::size_t k = 0;
    for (std::span<double>* part :
         {&table.t, &table.w, &table.rho, &table.sum_w, &table.sum_rho, &table.head_odds1,
          &table.head_odds2, &table.tail_variance, &table.tail_jump1, &table.tail_jump2}) {
      *part = scratch.subspan(k++ * (n + 1), n + 1);
    }
    const auto ratio = [](double x, double odds) { return x > 0 ? x / odds : 0.0; };
    for (std::size_t i = 0; i < n; ++i) table.t[i] = ratio(w[i], rho[i]);
    order_by_descending(std::span<const double>(table.t.first(n)), out_order.first(n));
    for (std::size_t p = 0; p < n; ++p) {
      table.w[p] = w[out_order[p]];
      table.rho[p] = rho[out_order[p]];
    }
    for (std::size_t p = 0; p < n; ++p) table.t[p] = ratio(table.w[p], table.rho[p]);
    table.t[n] = 0;
    table.sum_up();
    return table;
  }

  // How many tokens have t > beta. Only they have a share in beta.
  std::size_t above(double beta) const {
    std::size_t p = 0;
    while (p < tokens && t[p] > beta) ++p;
    return p;
  }

  // beta, V and b of L without the token at place j. beta: of the whole of L; corner: above(beta).
  TailTerms without(std::size_t j, double beta, std::size_t corner) const {
    return j < corner ? without_large(j, corner) : without_small(j, beta, corner);
  }

 private:
  // Of a token that is not clipped, odds of 0 included: w t is its V, max(w, t) its b.
  // Dialect of verkv/certificate.hpp: variance_term, jump_term.
  void sum_up() {
    const std::size_t n = tokens;
    sum_w[0] = sum_rho[0] = head_odds1[0] = head_odds2[0] = 0;
    for (std::size_t p = 0; p < n; ++p) {
      sum_w[p + 1] = sum_w[p] + w[p];
      sum_rho[p + 1] = sum_rho[p] + rho[p];
      const double candidate = w[p] > 0 ? jump_odds(rho[p]) : 0.0;
      head_odds1[p + 1] = std::max(head_odds1[p], candidate);
      head_odds2[p + 1] = std::max(head_odds2[p], std::min(head_odds1[p], candidate));
    }
    tail_variance[n] = tail_jump1[n] = tail_jump2[n] = 0;
    for (std::size_t p = n; p-- > 0;) {
      tail_variance[p] = tail_variance[p + 1] + w[p] * t[p];
      const double candidate = std::max(w[p], t[p]);
      tail_jump1[p] = std::max(tail_jump1[p + 1], candidate);
      tail_jump2[p] = std::max(tail_jump2[p + 1], std::min(tail_jump1[p + 1], candidate));
    }
  }

  // A token with a share in beta: beta falls, so the tokens above it are a prefix m >= corner, the
  // first whose next token no longer raises beta.
  // Dialect of verkv/certificate.hpp: variance_term, jump_term of clipped and other tokens.
  TailTerms without_large(std::size_t j, std::size_t corner) const {
    const auto beta_at = [&](std::size_t m) {
      return beta_of_sums(sum_w[m] - w[j], sum_rho[m] - rho[j]);
    };
    std::size_t low = corner;
    std::size_t high = tokens;
    while (low < high) {
      const std::size_t middle = low + (high - low) / 2;
      if (t[middle] <= beta_at(middle)) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    const std::size_t m = low;
    const double own_odds = w[j] > 0 ? jump_odds(rho[j]) : 0.0;
    const double clipped = own_odds == head_odds1[m] ? head_odds2[m] : head_odds1[m];
    TailTerms terms;
    terms.beta = beta_at(m);
    terms.variance = tail_variance[m] + terms.beta * terms.beta * (sum_rho[m] - rho[j]);
    terms.max_jump = std::max(terms.beta * clipped, tail_jump1[m]);
    return terms;
  }

  // Any other token: beta stays.
  // Dialect of verkv/certificate.hpp: variance_term, jump_term of clipped and other tokens.
  TailTerms without_small(std::size_t j, double beta, std::size_t corner) const {
    const double own_jump = std::max(w[j], t[j]);
    const double unclipped =
        own_jump == tail_jump1[corner] ? tail_jump2[corner] : tail_jump1[corner];
    TailTerms terms;
    terms.beta = beta;
    terms.variance = (tail_variance[corner] - w[j] * t[j]) + beta * beta * sum_rho[corner];
    terms.max_jump = std::max(beta * head_odds1[corner], unclipped);
    return terms;
  }
};

// The gain of Eq. 9 for every token, g_i = eps(L) - eps(L without i), each with its own beta, V and
// b. L is the whole of `w` and `rho` (all rho finite). A token whose weight is NaN has an infinite
// gain.
//   scratch: kGainScratchDoubles * (n + 1) doubles. scratch_order: n indices. out_gain: n doubles.
// O(n log n), no allocation.
//
// Taking a token out of a sum that it dominates leaves rounding errors of that sum. They do no
// harm: what they do to eps(L without i) is within 1e-16 sqrt(sum of rho) of eps(L), from which it
// is subtracted.
inline void exact_gains(std::span<const double> w, std::span<const double> rho, double denominator,
                        double log_term, std::span<double> scratch,
                        std::span<std::uint32_t> scratch_order, std::span<double> out_gain) {
  if (w.empty()) return;
  const GainTable table = GainTable::make(w, rho, scratch, scratch_order);
  const double beta = shrinkage_beta(w, rho);
  if (beta != beta) {  // nothing certifies before what is not a number is gone
    for (std::size_t i = 0; i < w.size(); ++i) {
      const bool number = w[i] == w[i] && rho[i] == rho[i];
      out_gain[i] = number ? 0.0 : std::numeric_limits<double>::infinity();
    }
    return;
  }
  const double before = certificate(tail_terms(w, rho, beta), denominator, log_term);
  const std::size_t corner = table.above(beta);
  for (std::size_t j = 0; j < w.size(); ++j) {
    const TailTerms after = table.without(j, beta, corner);
    out_gain[scratch_order[j]] = before - certificate(after, denominator, log_term);
  }
}

// Eq. 10 on a given order: the smallest k such that L without its first k tokens certifies. Weights
// and odds of L; scratch_w, scratch_rho: n elements each. O(n log n), no allocation.
template <class T>
std::size_t certified_prefix(std::span<const T> w, std::span<const T> rho,
                             std::span<const std::uint32_t> order, double denominator,
                             double log_term, double epsilon, std::span<T> scratch_w,
                             std::span<T> scratch_rho) {
  const std::size_t n = order.size();
  for (std::size_t p = 0; p < n; ++p) {
    scratch_w[p] = w[order[p]];
    scratch_rho[p] = rho[order[p]];
  }
  return smallest_certified_prefix(n, epsilon, [&](std::size_t k) {
    const std::span<const T> rest_w = scratch_w.subspan(k, n - k);
    const std::span<const T> rest_rho = scratch_rho.subspan(k, n - k);
    const double beta = shrinkage_beta(rest_w, rest_rho);
    return certificate(tail_terms(rest_w, rest_rho, beta), denominator, log_term);
  });
}

}  // namespace verkv

#endif  // VERKV_FETCH_PLAN_HPP
