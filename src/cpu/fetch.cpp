#include "cpu/fetch.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>

#include <verkv/fetch_plan.hpp>

#include "cpu/certify.hpp"
#include "cpu/fetch_search.hpp"

namespace verkv::cpu {
namespace {

class Planner {
 public:
  Planner(HeadGroup& group, QueryHeadReport* reports)
      : group_(group), ws_(group.workspace), stop_(group.rules), reports_(reports) {}

  FetchPlan run() {
    if (group_.compressed == 0) return plan_;
    switch (group_.rules.mode) {
      case FetchMode::never:
        return plan_;
      case FetchMode::always:
        take_all();
        break;
      case FetchMode::verified:
        apply_rules();
        break;
    }
    apply_limit();
    return plan_;
  }

 private:
  void take_all() {
    for (std::int64_t i = 0; i < group_.compressed; ++i) {
      if (group_.is_low(i)) push_fetched(i);
    }
    for (int h = 0; h < group_.heads; ++h) reports_[h].planned_tokens = plan_.tokens;
    if (has_limit()) solve_beta(group_);  // ranks by worth
  }

  void apply_rules() {
    solve_beta(group_);
    if (stop_.certifies()) solve_certificate(group_);
    bool any = stop_.asks_for_more();
    for (int h = 0; h < group_.heads; ++h) {
      HeadState& s = group_.state(h);
      s.rules = thresholds(stop_, s.denominator);
      s.threshold = {kInfinity, 0};
      s.marked = false;
      if (!s.computable || !stop_.certifies() || s.bound <= stop_.epsilon) continue;
      any = true;
      switch (group_.rules.order) {
        case FetchOrder::worth:
          s.threshold = searched_threshold(h);
          break;
        case FetchOrder::exact:
          mark_exact_plan(h);
          break;
      }
    }
    if (any) select();
    plan_.is_certified = stop_.certifies() && plan_.tokens == 0;
  }

  // Eq. 10 on the order of worth.
  FetchThreshold searched_threshold(int h) {
    const HeadState& s = group_.state(h);
    PlanArrays arrays{ws_.plan_weight.data(), ws_.plan_odds.data(), ws_.plan_worth.data(),
                      ws_.plan_place.data(), 0};
    group_.store.each_piece([&](std::int64_t at, std::int64_t count) {
      group_.kernels.plan_start(group_.weight(h) + at, group_.store.odds(at), at, count, s.beta,
                                arrays);
    });
    return search_fetch_threshold(group_.kernels, arrays, s.beta, s.denominator, stop_.log_term,
                                  s.rules.target);
  }

  // Eq. 9 and Eq. 10 in double. The order is not one of worth, so the head's plan goes into the
  // marks at once, with what the other rules ask for: a token that two rules want is planned once.
  void mark_exact_plan(int h) {
    HeadState& s = group_.state(h);
    const std::size_t n = gather_exact(h);
    const std::span<const double> w(ws_.exact_weight.data(), n);
    const std::span<const double> rho(ws_.exact_odds.data(), n);
    const std::span<double> gain(ws_.exact_gain.data(), n);
    const std::span<std::uint32_t> order(ws_.exact_order.data(), n);
    exact_gains(w, rho, s.denominator, stop_.log_term, ws_.exact_scratch, order, gain);
    order_by_descending(std::span<const double>(gain), order);
    // certified_prefix does not enlarge its certificates.
    const std::size_t k = certified_prefix<double>(
        w, rho, order, s.denominator, stop_.log_term, s.rules.target / kOutward,
        std::span(ws_.exact_scratch).subspan(0, n), std::span(ws_.exact_scratch).subspan(n, n));
    for (std::size_t p = 0; p < n; ++p) {
      const std::uint32_t i = ws_.exact_index[order[p]];
      const float x = group_.weight(h)[i];
      if (p >= k && !(x > s.rules.weight) && !(worth(h, i) > s.rules.worth)) continue;
      ws_.mark[i] = 1;
      ++reports_[h].planned_tokens;
    }
    s.marked = true;
    has_marks_ = true;
  }

  // Tokens that weigh something, in double; returns their number.
  std::size_t gather_exact(int h) {
    std::size_t n = 0;
    for (std::int64_t i = 0; i < group_.compressed; ++i) {
      if (!(group_.weight(h)[i] > 0)) continue;
      ws_.exact_weight[n] = static_cast<double>(group_.weight(h)[i]);
      ws_.exact_odds[n] = static_cast<double>(group_.odds(i));
      ws_.exact_index[n] = static_cast<std::uint32_t>(i);
      ++n;
    }
    return n;
  }

  // One pass over all tokens for the heads of a kernel call: those above the lower of the
  // certificate's threshold and the price of risk, or above the weight that the rules ask for.
  void select() {
    for (int first = 0; first < group_.heads; first += kMaxHeads)
      select_for(first, std::min(kMaxHeads, group_.heads - first));
    if (has_marks_) collect_marks();
  }

  void select_for(int first, int heads) {
    std::array<float, kMaxHeads> beta{};
    std::array<float, kMaxHeads> least_worth{};
    std::array<float, kMaxHeads> least_weight{};
    std::array<std::int64_t, kMaxHeads> planned{};
    bool ties = false;
    for (int h = 0; h < heads; ++h) {
      const std::size_t i = static_cast<std::size_t>(h);
      HeadState& s = group_.state(first + h);
      if (s.rules.worth < s.threshold.worth) s.threshold = {s.rules.worth, 0};
      beta[i] = s.beta;
      least_worth[i] = s.marked ? kInfinity : s.threshold.worth;
      least_weight[i] = s.marked ? kInfinity : s.rules.weight;
      ties = ties || s.threshold.ties > 0;
    }
    const auto select_into = [&](AlignedVector<std::uint32_t>& out) {
      std::int64_t found = 0;
      group_.store.each_piece([&](std::int64_t at, std::int64_t count) {
        found += group_.kernels.select_tokens(group_.weight(first) + at, group_.weight_stride,
                                              group_.store.odds(at), at, count, heads, beta.data(),
                                              least_worth.data(), least_weight.data(),
                                              out.data() + found, planned.data());
      });
      return found;
    };
    if (group_.heads <= kMaxHeads && !ties && !has_marks_) {
      plan_.tokens = select_into(ws_.fetched);
    } else {
      // Marks join the parts of a large group, ties, and the tokens of the exact order.
      const std::int64_t found = select_into(ws_.moved);
      for (std::int64_t i = 0; i < found; ++i) ws_.mark[ws_.moved[static_cast<std::size_t>(i)]] = 1;
      for (int h = 0; h < heads; ++h) planned[static_cast<std::size_t>(h)] += mark_ties(first + h);
      has_marks_ = true;
    }
    for (int h = 0; h < heads; ++h)
      reports_[first + h].planned_tokens += planned[static_cast<std::size_t>(h)];
  }

  // Returns how many of them have not been counted for their weight already.
  std::int64_t mark_ties(int h) {
    const HeadState& s = group_.state(h);
    std::int64_t left = s.threshold.ties;
    std::int64_t counted = 0;
    for (std::int64_t i = 0; i < group_.compressed && left > 0; ++i) {
      const float w = group_.weight(h)[i];
      if (!(w > 0) || worth(h, i) != s.threshold.worth) continue;
      ws_.mark[static_cast<std::size_t>(i)] = 1;
      --left;
      counted += !(w > s.rules.weight);
    }
    return counted;
  }

  void collect_marks() {
    plan_.tokens = 0;
    for (std::int64_t i = 0; i < group_.compressed; ++i) {
      if (ws_.mark[static_cast<std::size_t>(i)] == 0) continue;
      ws_.mark[static_cast<std::size_t>(i)] = 0;
      push_fetched(i);
    }
    has_marks_ = false;
  }

  // Keeps the tokens with the largest share of any head's relative variance.
  void apply_limit() {
    const std::int64_t limit = group_.rules.limit_tokens;
    if (!has_limit() || plan_.tokens <= limit) return;
    plan_.limited = true;
    const auto rank = [&](std::uint32_t place) {
      float best = 0;
      for (int h = 0; h < group_.heads; ++h) {
        const HeadState& s = group_.state(h);
        if (s.computable) best = limit_rank(best, worth(h, place), s.denominator);
      }
      return best;
    };
    const auto begin = ws_.fetched.begin();
    std::nth_element(begin, begin + limit, begin + plan_.tokens,
                     [&](std::uint32_t a, std::uint32_t b) {
                       const float rank_a = rank(a);
                       const float rank_b = rank(b);
                       return rank_a != rank_b ? rank_a > rank_b : a < b;
                     });
    plan_.tokens = limit;
    std::sort(begin, begin + plan_.tokens);
  }

  bool has_limit() const { return group_.rules.limit_tokens > 0; }
  float worth(int h, std::int64_t place) const {
    return fetch_worth(group_.weight(h)[place], group_.odds(place), group_.state(h).beta);
  }
  void push_fetched(std::int64_t place) {
    ws_.fetched[static_cast<std::size_t>(plan_.tokens++)] = static_cast<std::uint32_t>(place);
  }

  HeadGroup& group_;
  Workspace& ws_;
  const StopRules& stop_;
  QueryHeadReport* reports_;
  FetchPlan plan_;
  bool has_marks_ = false;
};

}  // namespace

FetchPlan plan_fetch(HeadGroup& group, QueryHeadReport* out_reports) {
  return Planner(group, out_reports).run();
}

}  // namespace verkv::cpu
