#include "cpu/fetch_search.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

namespace verkv::cpu {
namespace {

// Few enough to be sorted and tried one by one.
constexpr std::int64_t kFew = 64;
constexpr std::size_t kSamples = 31;

struct Evaluation {
  float beta = 0;
  double bound = 0;
};

class Search {
 public:
  Search(const Kernels& kernels, PlanArrays& plan, float beta_all, double denominator,
         double log_term, double epsilon)
      : kernels_(kernels),
        plan_(plan),
        denominator_(denominator),
        log_term_(log_term),
        epsilon_(epsilon),
        beta_high_(beta_all) {}

  FetchThreshold run() {
    // Invariant: keeping the keys <= good_ certifies (nothing at first), keeping those <= bad_ does
    // not.
    for (bool first = true;; first = false) {
      const std::int64_t open = count_open();
      if (open <= kFew) break;
      const float pivot = choose_pivot(open, first);
      if (!(pivot > good_ && pivot < bad_)) break;  // all open keys are equal
      narrow(pivot);
      kernels_.plan_compact(plan_, bad_, good_, beta_low_, beta_high_, base_);
    }
    return finish();
  }

 private:
  bool open(std::int64_t i) const { return plan_.key[i] > good_ && plan_.key[i] <= bad_; }

  std::int64_t count_open() const {
    const float* key = plan_.key;
    const float good = good_;
    const float bad = bad_;
    std::int32_t count = 0;
    for (std::int64_t i = 0; i < plan_.count; ++i) {
      count += static_cast<std::int32_t>(key[i] > good) & static_cast<std::int32_t>(key[i] <= bad);
    }
    return count;
  }

  // Moves one end of the bracket to `threshold`.
  void narrow(float threshold) {
    const Evaluation at = evaluate(threshold);
    if (at.bound <= epsilon_) {
      good_ = threshold;
      beta_low_ = at.beta;
    } else {
      bad_ = threshold;
      beta_high_ = at.beta;
    }
  }

  // From an evenly spaced sample of open keys: at first the key up to which their variances, where
  // lambda = 1, would fill the larger part of the bound; then the median.
  float choose_pivot(std::int64_t open_count, bool first) const {
    std::array<float, kSamples> sample{};
    std::size_t found = 0;
    const std::int64_t step =
        std::max<std::int64_t>(1, plan_.count / static_cast<std::int64_t>(kSamples));
    for (std::int64_t i = 0; i < plan_.count && found < kSamples; i += step) {
      if (open(i)) sample[found++] = plan_.key[i];
    }
    if (found > 0) {
      std::sort(sample.begin(), sample.begin() + static_cast<std::ptrdiff_t>(found));
      std::size_t at = found / 2;
      if (first) {
        const double wanted = 0.18 * epsilon_ * epsilon_ * denominator_ * denominator_ / log_term_;
        const double each = static_cast<double>(open_count) / static_cast<double>(found);
        double variance = 0;
        at = 0;
        while (at + 1 < found && (variance += each * static_cast<double>(sample[at])) < wanted)
          ++at;
      }
      if (sample[at] < bad_) return sample[at];
    }
    // The sample missed every open token, or saw only the ties at bad_: look at all of them.
    float below = good_;
    for (std::int64_t i = 0; i < plan_.count; ++i) {
      if (open(i) && plan_.key[i] < bad_) below = std::max(below, plan_.key[i]);
    }
    return below;
  }

  double bound_of(double beta, double variance, double jump) const {
    return certificate(TailTerms{beta, variance, jump}, denominator_, log_term_) * kOutward;
  }

  Evaluation evaluate(float threshold) const {
    Evaluation result;
    result.beta = newton_beta(beta_low_, [&](float beta) {
      double weight = 0;
      double odds = 0;
      kernels_.plan_beta_sums(plan_, threshold, beta, weight, odds);
      return std::pair(weight + base_.in_weight, odds + base_.in_odds);
    });
    double variance = 0;
    float jump = 0;
    kernels_.plan_tail_sums(plan_, threshold, result.beta, variance, jump);
    const double beta = static_cast<double>(result.beta);
    variance += base_.out_variance + beta * beta * base_.in_odds;
    result.bound =
        bound_of(beta, variance,
                 std::max({static_cast<double>(jump), static_cast<double>(base_.out_jump),
                           beta * static_cast<double>(base_.in_largest_odds)}));
    return result;
  }

  // Few open keys, or many equal ones: tries them in order, then how many of a group of ties must
  // go.
  FetchThreshold finish() {
    std::array<float, kFew> key{};
    std::size_t distinct = 0;
    for (std::int64_t i = 0; i < plan_.count; ++i) {
      if (!open(i) ||
          std::find(key.begin(), key.begin() + distinct, plan_.key[i]) != key.begin() + distinct)
        continue;
      key[distinct++] = plan_.key[i];
    }
    // Only where rounding makes two evaluations of one set disagree at the border.
    if (distinct == 0) return {good_, 0};
    std::sort(key.begin(), key.begin() + static_cast<std::ptrdiff_t>(distinct));
    // key[tied] is the smallest open key that cannot be kept altogether: the largest one is known
    // to be such.
    std::size_t low = 0;
    std::size_t tied = distinct - 1;
    while (low < tied) {
      const std::size_t middle = low + (tied - low) / 2;
      narrow(key[middle]);
      if (good_ == key[middle]) {
        low = middle + 1;
      } else {
        tied = middle;
      }
    }
    FetchThreshold result;
    result.key = good_;
    bad_ = key[tied];
    const std::int64_t ties = gather_ties();
    if (ties > 1) {
      std::int64_t bad = 0;
      std::int64_t good = ties;
      while (good - bad > 1) {
        const std::int64_t middle = bad + (good - bad) / 2;
        (bound_without_ties(middle, ties) <= epsilon_ ? good : bad) = middle;
      }
      if (good < ties) {
        result.key = bad_;
        result.ties = good;
      }
    }
    return result;
  }

  // Moves the tokens with key bad_ to the front of the plan, by position, and returns their number.
  std::int64_t gather_ties() {
    std::int64_t ties = 0;
    for (std::int64_t i = 0; i < plan_.count; ++i) {
      if (plan_.key[i] != bad_) continue;
      std::swap(plan_.weight[i], plan_.weight[ties]);
      std::swap(plan_.odds[i], plan_.odds[ties]);
      std::swap(plan_.key[i], plan_.key[ties]);
      std::swap(plan_.position[i], plan_.position[ties]);
      ++ties;
    }
    return ties;
  }

  // The bound when the first k of the ties at the front are fetched and all larger keys: scalar, in
  // double.
  double bound_without_ties(std::int64_t k, std::int64_t ties) const {
    const auto kept = [&](std::int64_t i) { return i < ties ? i >= k : plan_.key[i] <= good_; };
    const float solved = newton_beta(beta_low_, [&](float beta) {
      double weight = base_.in_weight;
      double odds = base_.in_odds;
      for (std::int64_t i = k; i < plan_.count; ++i) {
        if (!kept(i) || !(plan_.weight[i] > beta * plan_.odds[i])) continue;
        weight += static_cast<double>(plan_.weight[i]);
        odds += static_cast<double>(plan_.odds[i]);
      }
      return std::pair(weight, odds);
    });
    const double beta = static_cast<double>(solved);
    double variance = base_.out_variance + beta * beta * base_.in_odds;
    double jump = std::max(static_cast<double>(base_.out_jump),
                           beta * static_cast<double>(base_.in_largest_odds));
    for (std::int64_t i = k; i < plan_.count; ++i) {
      if (!kept(i)) continue;
      variance += static_cast<double>(variance_term(plan_.weight[i], plan_.odds[i], solved));
      jump = std::max(jump, static_cast<double>(jump_term(plan_.weight[i], plan_.odds[i], solved)));
    }
    return bound_of(beta, variance, jump);
  }

  const Kernels& kernels_;
  PlanArrays& plan_;
  double denominator_;
  double log_term_;
  double epsilon_;
  float good_ = -1;
  float bad_ = std::numeric_limits<float>::max();
  float beta_low_ = 0;
  float beta_high_;
  PlanBase base_;
};

}  // namespace

FetchThreshold search_fetch_threshold(const Kernels& kernels, PlanArrays& plan, float beta_all,
                                      double denominator, double log_term, double epsilon) {
  return Search(kernels, plan, beta_all, denominator, log_term, epsilon).run();
}

}  // namespace verkv::cpu
