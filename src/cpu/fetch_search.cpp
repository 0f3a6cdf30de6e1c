#include "cpu/fetch_search.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>
#include <utility>

#include <verkv/certificate.hpp>
#include <verkv/shrinkage.hpp>

namespace verkv::cpu {
namespace {

constexpr std::int64_t kFew = kSearchFew;
constexpr auto kSamples = static_cast<std::size_t>(kSearchSample);

struct Evaluation {
  float beta = 0;
  double bound = 0;
};

class Search {
 public:
  Search(const Kernels& kernels, PlanArrays& plan, float beta_all, double denominator,
         double log_term, double target)
      : kernels_(kernels),
        plan_(plan),
        denominator_(denominator),
        log_term_(log_term),
        target_(target),
        beta_high_(beta_all) {}

  FetchThreshold run() {
    // Invariant: keeping the tokens worth at most good_ certifies (none at first), keeping those
    // worth at most bad_ does not.
    for (bool first = true;; first = false) {
      const std::int64_t open = count_open();
      if (open <= kFew) break;
      const float pivot = choose_pivot(open, first);
      if (!(pivot > good_ && pivot < bad_)) break;  // all open tokens are worth the same
      narrow(pivot);
      kernels_.plan_compact(plan_, bad_, good_, beta_low_, beta_high_, settled_);
    }
    return finish();
  }

 private:
  bool open(std::int64_t i) const { return plan_.worth[i] > good_ && plan_.worth[i] <= bad_; }

  std::int64_t count_open() const {
    const float* worth = plan_.worth;
    const float good = good_;
    const float bad = bad_;
    std::int32_t count = 0;
    for (std::int64_t i = 0; i < plan_.count; ++i) {
      count +=
          static_cast<std::int32_t>(worth[i] > good) & static_cast<std::int32_t>(worth[i] <= bad);
    }
    return count;
  }

  // Moves one end of the bracket to `threshold`.
  void narrow(float threshold) {
    const Evaluation at = evaluate(threshold);
    if (at.bound <= target_) {
      good_ = threshold;
      beta_low_ = at.beta;
    } else {
      bad_ = threshold;
      beta_high_ = at.beta;
    }
  }

  // From an evenly spaced sample of the open tokens: first_pivot, then the median.
  float choose_pivot(std::int64_t open_count, bool first) const {
    std::array<float, kSamples> sample{};
    std::size_t found = 0;
    const std::int64_t step =
        std::max<std::int64_t>(1, plan_.count / static_cast<std::int64_t>(kSamples));
    for (std::int64_t i = 0; i < plan_.count && found < kSamples; i += step) {
      if (open(i)) sample[found++] = plan_.worth[i];
    }
    if (found > 0) {
      std::sort(sample.begin(), sample.begin() + static_cast<std::ptrdiff_t>(found));
      const std::span<const float> sorted(sample.data(), found);
      const float pivot = first ? first_pivot(sorted, open_count, target_, denominator_, log_term_)
                                : sorted[found / 2];
      if (pivot < bad_) return pivot;
    }
    // The sample missed every open token, or saw only the ties at bad_: look at all of them.
    float below = good_;
    for (std::int64_t i = 0; i < plan_.count; ++i) {
      if (open(i) && plan_.worth[i] < bad_) below = std::max(below, plan_.worth[i]);
    }
    return below;
  }

  Evaluation evaluate(float threshold) const {
    Evaluation result;
    result.beta = newton_beta(beta_low_, [&](float beta) {
      BetaSums sums;
      kernels_.plan_beta_sums(plan_, threshold, beta, sums.weight, sums.odds);
      sums.weight += settled_.above_weight;
      sums.odds += settled_.above_odds;
      return sums;
    });
    double variance = 0;
    float jump = 0;
    kernels_.plan_tail_sums(plan_, threshold, result.beta, variance, jump);
    const TailTerms open{static_cast<double>(result.beta), variance, static_cast<double>(jump)};
    result.bound = outward_certificate(joined(open, settled_), denominator_, log_term_);
    return result;
  }

  // Few open tokens, or many worth the same: tries each worth in order, then how many of a group of
  // ties must go.
  FetchThreshold finish() {
    std::array<float, kFew> worth{};
    std::size_t distinct = 0;
    for (std::int64_t i = 0; i < plan_.count; ++i) {
      if (!open(i) || std::find(worth.begin(), worth.begin() + distinct, plan_.worth[i]) !=
                          worth.begin() + distinct)
        continue;
      worth[distinct++] = plan_.worth[i];
    }
    // Only where rounding makes two evaluations of one set disagree at the border.
    if (distinct == 0) return {good_, 0};
    std::sort(worth.begin(), worth.begin() + static_cast<std::ptrdiff_t>(distinct));
    // worth[tied] is the smallest that cannot be kept altogether: the largest is known to be such.
    std::size_t low = 0;
    std::size_t tied = distinct - 1;
    while (low < tied) {
      const std::size_t middle = low + (tied - low) / 2;
      narrow(worth[middle]);
      if (good_ == worth[middle]) {
        low = middle + 1;
      } else {
        tied = middle;
      }
    }
    FetchThreshold result;
    result.worth = good_;
    bad_ = worth[tied];
    const std::int64_t ties = gather_ties();
    if (ties > 1) {
      std::int64_t bad = 0;
      std::int64_t good = ties;
      while (good - bad > 1) {
        const std::int64_t middle = bad + (good - bad) / 2;
        (bound_without_ties(middle, ties) <= target_ ? good : bad) = middle;
      }
      if (good < ties) {
        result.worth = bad_;
        result.ties = good;
      }
    }
    return result;
  }

  // Moves the tokens worth bad_ to the front of the plan, by place, and returns their number.
  std::int64_t gather_ties() {
    std::int64_t ties = 0;
    for (std::int64_t i = 0; i < plan_.count; ++i) {
      if (plan_.worth[i] != bad_) continue;
      std::swap(plan_.weight[i], plan_.weight[ties]);
      std::swap(plan_.odds[i], plan_.odds[ties]);
      std::swap(plan_.worth[i], plan_.worth[ties]);
      std::swap(plan_.place[i], plan_.place[ties]);
      ++ties;
    }
    return ties;
  }

  // The bound when the first k of the ties at the front are fetched, and all that is worth more:
  // scalar, in double.
  double bound_without_ties(std::int64_t k, std::int64_t ties) const {
    const auto kept = [&](std::int64_t i) { return i < ties ? i >= k : plan_.worth[i] <= good_; };
    const float beta = newton_beta(beta_low_, [&](float at) {
      BetaSums sums{settled_.above_weight, settled_.above_odds};
      for (std::int64_t i = k; i < plan_.count; ++i) {
        if (!kept(i) || !(plan_.weight[i] > at * plan_.odds[i])) continue;
        sums.weight += static_cast<double>(plan_.weight[i]);
        sums.odds += static_cast<double>(plan_.odds[i]);
      }
      return sums;
    });
    TailTerms terms = joined({static_cast<double>(beta), 0, 0}, settled_);
    for (std::int64_t i = k; i < plan_.count; ++i) {
      if (!kept(i)) continue;
      terms.variance += static_cast<double>(variance_term(plan_.weight[i], plan_.odds[i], beta));
      terms.max_jump = std::max(
          terms.max_jump, static_cast<double>(jump_term(plan_.weight[i], plan_.odds[i], beta)));
    }
    return outward_certificate(terms, denominator_, log_term_);
  }

  const Kernels& kernels_;
  PlanArrays& plan_;
  double denominator_;
  double log_term_;
  double target_;
  float good_ = -1;
  float bad_ = std::numeric_limits<float>::max();
  float beta_low_ = 0;
  float beta_high_;
  SettledTerms settled_;
};

}  // namespace

FetchThreshold search_fetch_threshold(const Kernels& kernels, PlanArrays& plan, float beta_all,
                                      double denominator, double log_term, double target) {
  return Search(kernels, plan, beta_all, denominator, log_term, target).run();
}

}  // namespace verkv::cpu
