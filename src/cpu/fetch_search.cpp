#include "cpu/fetch_search.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

namespace verkv::cpu {
namespace {

// Few enough to be sorted and tried one by one.
constexpr std::int64_t kFew = 256;
constexpr std::size_t kSamples = 63;

struct Evaluation {
  float beta = 0;
  double bound = 0;
};

class Search {
 public:
  Search(const Kernels& kernels, PlanArrays& plan, float beta_all, double denominator, double log_term,
         double epsilon)
      : kernels_(kernels),
        plan_(plan),
        denominator_(denominator),
        log_term_(log_term),
        epsilon_(epsilon),
        beta_high_(beta_all) {}

  FetchThreshold run() {
    // Invariant: keeping the keys <= good_ certifies (nothing at first), keeping those <= bad_ does not.
    for (;;) {
      const std::int64_t open = count_open();
      if (open <= kFew) break;
      const float pivot = choose_pivot();
      if (!(pivot > good_ && pivot < bad_)) break;  // all open keys are equal
      const Evaluation at = evaluate(pivot);
      if (at.bound <= epsilon_) {
        good_ = pivot;
        beta_low_ = at.beta;
      } else {
        bad_ = pivot;
        beta_high_ = at.beta;
      }
      kernels_.plan_compact(plan_, bad_, good_, beta_low_, beta_high_, base_);
    }
    return finish();
  }

 private:
  bool open(std::int64_t i) const { return plan_.key[i] > good_ && plan_.key[i] <= bad_; }

  std::int64_t count_open() const {
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < plan_.count; ++i) count += open(i);
    return count;
  }

  // The median of an evenly spaced sample of open keys, moved below bad_ where ties at bad_ are many.
  float choose_pivot() const {
    std::array<float, kSamples> sample{};
    std::size_t found = 0;
    const std::int64_t step = std::max<std::int64_t>(1, plan_.count / static_cast<std::int64_t>(kSamples));
    for (std::int64_t i = 0; i < plan_.count && found < kSamples; i += step) {
      if (open(i)) sample[found++] = plan_.key[i];
    }
    // A sample that missed every open token, or saw only the ties at bad_: look at all of them.
    float below = good_;
    if (found > 0) {
      std::sort(sample.begin(), sample.begin() + static_cast<std::ptrdiff_t>(found));
      const float median = sample[found / 2];
      if (median < bad_) return median;
    }
    for (std::int64_t i = 0; i < plan_.count; ++i) {
      if (open(i) && plan_.key[i] < bad_) below = std::max(below, plan_.key[i]);
    }
    if (below > good_) return below;
    // Every open key equals bad_. If the settled ones have not been tried yet, one evaluation settles whether any is needed.
    return good_;
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
    result.bound = bound_of(beta, variance,
                            std::max({static_cast<double>(jump), static_cast<double>(base_.out_jump),
                                      beta * static_cast<double>(base_.in_largest_odds)}));
    return result;
  }

  // Moves the open tokens, sorted by the order, to the front and tries how many of them must go.
  FetchThreshold finish() {
    std::int64_t candidates = 0;
    for (std::int64_t i = 0; i < plan_.count; ++i) {
      if (!open(i)) continue;
      swap(i, candidates);
      ++candidates;
    }
    sort(candidates);
    // Keys above bad_ were dropped by plan_compact, or there were none; what is left beyond the candidates is kept.
    std::int64_t bad = 0;
    std::int64_t good = candidates;
    while (good - bad > 1) {
      const std::int64_t middle = bad + (good - bad) / 2;
      (bound_without(middle) <= epsilon_ ? good : bad) = middle;
    }
    FetchThreshold result;
    if (good == candidates) {
      result.key = good_;
      return result;
    }
    result.key = plan_.key[good];
    for (std::int64_t i = 0; i < good; ++i) result.ties += plan_.key[i] == result.key;
    return result;
  }

  void swap(std::int64_t a, std::int64_t b) {
    std::swap(plan_.weight[a], plan_.weight[b]);
    std::swap(plan_.odds[a], plan_.odds[b]);
    std::swap(plan_.key[a], plan_.key[b]);
    std::swap(plan_.position[a], plan_.position[b]);
  }

  bool before(std::int64_t a, std::int64_t b) const {
    return plan_.key[a] != plan_.key[b] ? plan_.key[a] > plan_.key[b] : plan_.position[a] < plan_.position[b];
  }

  // Heap sort of the first n entries of four parallel arrays, in place.
  void sort(std::int64_t n) {
    const auto sift = [this](std::int64_t root, std::int64_t end) {
      for (;;) {
        std::int64_t child = 2 * root + 1;
        if (child >= end) return;
        if (child + 1 < end && before(child, child + 1)) ++child;
        if (!before(root, child)) return;
        swap(root, child);
        root = child;
      }
    };
    for (std::int64_t i = n / 2; i-- > 0;) sift(i, n);
    for (std::int64_t end = n - 1; end > 0; --end) {
      swap(0, end);
      sift(0, end);
    }
  }

  // The bound when the first k candidates are fetched: scalar, in double.
  double bound_without(std::int64_t k) const {
    const auto kept = [&](std::int64_t i) { return i >= k && plan_.key[i] <= bad_; };
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
    double jump =
        std::max(static_cast<double>(base_.out_jump), beta * static_cast<double>(base_.in_largest_odds));
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
