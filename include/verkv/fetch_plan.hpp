// Which tokens to fetch: the order (Eq. 9 or one key), the smallest prefix that certifies (Eq. 10),
// and the risk rule. Nothing here may look at which tokens happen to be resident: Theorem 2 needs
// the plan to be independent of the draw given the query.
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

// The one-key order: what token i adds to the mean square error of D_hat,
//
//   key_i = w_i t_i                     where t_i <= beta (lambda = 1: its Horvitz-Thompson
//   variance) (5) key_i = beta (2 w_i - beta rho_i)   where t_i >  beta (lambda < 1)
//
// The second line is the integral of d MSE / d w_i = 2 min(t_i, beta) from 0 to w_i at fixed beta:
// (5) alone is infinite for a token that is never drawn (rho = 0) however little it weighs. beta =
// infinity gives (5) for every token with rho > 0.
template <class T>
VERKV_HD constexpr T fetch_key(T w, T rho, T beta) {
  if (w <= beta * rho) return w > T(0) ? w * (w / rho) : T(0);
  return beta * (T(2) * w - beta * rho);
}

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

// Scratch of the exact order: doubles and indices per token of L.
inline constexpr std::size_t kGainScratchDoubles = 10;

// The gain of Eq. 9 for every token, g_i = eps(L) - eps(L without i), each with its own beta, V and
// b. O(n log n) by prefix sums over the tokens sorted by t. L here is the whole of `w` and `rho`
// (all rho finite). A token whose weight is NaN has an infinite gain. scratch: kGainScratchDoubles
// * (n + 1) doubles; scratch_order: n indices. No allocation.
inline void exact_gains(std::span<const double> w, std::span<const double> rho, double denominator,
                        double log_term, std::span<double> scratch,
                        std::span<std::uint32_t> scratch_order, std::span<double> out_gain) {
  const std::size_t n = w.size();
  if (n == 0) return;
  const std::size_t stride = n + 1;
  const auto row = [&](std::size_t k) { return scratch.subspan(k * stride, stride); };
  const auto t = row(0), sum_w = row(1), sum_rho = row(2), tail_v = row(3), head_rho1 = row(4),
             head_rho2 = row(5), tail_jump1 = row(6), tail_jump2 = row(7), sw = row(8),
             srho = row(9);
  const auto ratio = [&](std::size_t i) { return w[i] > 0 ? w[i] / rho[i] : 0.0; };
  for (std::size_t i = 0; i < n; ++i) t[i] = ratio(i);
  order_by_descending(std::span<const double>(t.first(n)), scratch_order.first(n));
  for (std::size_t p = 0; p < n; ++p) {
    sw[p] = w[scratch_order[p]];
    srho[p] = rho[scratch_order[p]];
  }
  for (std::size_t p = 0; p < n; ++p) t[p] = sw[p] > 0 ? sw[p] / srho[p] : 0.0;
  t[n] = 0;

  // Prefix sums; largest and second largest of max(rho, 1) before p, and of the unclipped jump from
  // p on.
  sum_w[0] = sum_rho[0] = head_rho1[0] = head_rho2[0] = 0;
  for (std::size_t p = 0; p < n; ++p) {
    sum_w[p + 1] = sum_w[p] + sw[p];
    sum_rho[p + 1] = sum_rho[p] + srho[p];
    const double candidate = sw[p] > 0 ? std::max(srho[p], 1.0) : 0.0;
    head_rho1[p + 1] = std::max(head_rho1[p], candidate);
    head_rho2[p + 1] = std::max(head_rho2[p], std::min(head_rho1[p], candidate));
  }
  tail_v[n] = tail_jump1[n] = tail_jump2[n] = 0;
  for (std::size_t p = n; p-- > 0;) {
    tail_v[p] = tail_v[p + 1] + sw[p] * t[p];
    const double candidate = std::max(sw[p], t[p]);
    tail_jump1[p] = std::max(tail_jump1[p + 1], candidate);
    tail_jump2[p] = std::max(tail_jump2[p + 1], std::min(tail_jump1[p + 1], candidate));
  }

  const double beta = shrinkage_beta(w, rho);
  if (beta != beta) {  // nothing certifies before what is not a number is gone
    for (std::size_t i = 0; i < n; ++i) {
      const bool number = w[i] == w[i] && rho[i] == rho[i];
      out_gain[i] = number ? 0.0 : std::numeric_limits<double>::infinity();
    }
    return;
  }
  const double before = certificate(tail_terms(w, rho, beta), denominator, log_term);
  // The tokens before `corner` are those with t > beta. Only they have a share in beta.
  // Taking j out of a sum that it dominates leaves rounding errors of that sum. They do no harm:
  // what they do to eps(L without j) is within 1e-16 sqrt(sum of rho) of eps(L), from which it is
  // subtracted.
  std::size_t corner = 0;
  while (corner < n && t[corner] > beta) ++corner;

  for (std::size_t j = 0; j < n; ++j) {
    TailTerms terms;
    const double wj = sw[j];
    const double rj = srho[j];
    if (j < corner) {
      // beta falls, so the tokens above it are a prefix m >= corner: the first whose next token no
      // longer raises beta.
      const auto beta_at = [&](std::size_t m) { return (sum_w[m] - wj) / (1 + (sum_rho[m] - rj)); };
      std::size_t low = corner;
      std::size_t high = n;
      while (low < high) {
        const std::size_t middle = low + (high - low) / 2;
        if (t[middle] <= beta_at(middle)) {
          high = middle;
        } else {
          low = middle + 1;
        }
      }
      const std::size_t m = low;
      const double own_rho = wj > 0 ? std::max(rj, 1.0) : 0.0;
      const double clipped = own_rho == head_rho1[m] ? head_rho2[m] : head_rho1[m];
      terms.beta = beta_at(m);
      terms.variance = tail_v[m] + terms.beta * terms.beta * (sum_rho[m] - rj);
      terms.max_jump = std::max(terms.beta * clipped, tail_jump1[m]);
    } else {
      const double own_jump = std::max(wj, t[j]);
      const double unclipped =
          own_jump == tail_jump1[corner] ? tail_jump2[corner] : tail_jump1[corner];
      terms.beta = beta;
      terms.variance = (tail_v[corner] - wj * t[j]) + beta * beta * sum_rho[corner];
      terms.max_jump = std::max(beta * head_rho1[corner], unclipped);
    }
    out_gain[scratch_order[j]] = before - certificate(terms, denominator, log_term);
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
