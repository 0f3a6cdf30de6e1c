#include "cpu/step.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>

#include <verkv/attention.hpp>
#include <verkv/certificate.hpp>
#include <verkv/shrinkage.hpp>

#include "cpu/certify.hpp"
#include "cpu/clusters.hpp"
#include "cpu/fetch.hpp"
#include "cpu/logits.hpp"
#include "window_score.hpp"

namespace verkv::cpu {
namespace {

// The plan's shift serves the attention too while the largest summand of D_hat is within this of
// it. Weights then reach exp(20) = 5e8, and those that weight_exp cuts off are below
// exp(-67) = 8e-30 of the largest: neither matters in binary32. A guess; 40 would do as well.
constexpr float kSharedShift = 20;

class Step {
 public:
  Step(HeadGroup& group, const StepArguments& arguments)
      : group_(group), ws_(group.workspace), store_(group.store), arguments_(arguments) {}

  void run() {
    std::fill_n(arguments_.query_reports, group_.heads, QueryHeadReport{});
    weights();
    // Definition 2, then Eqs. 7, 9 and 10 over L, then Eq. 7 over what the plan leaves of it.
    const FetchPlan plan = plan_fetch(group_, arguments_.query_reports);
    certify_rest(group_, plan.tokens, plan.is_certified, arguments_.query_reports);
    sum_clusters(group_);
    gather(plan.tokens);
    attention();
    // The call fails, and what the query would give must not count.
    if (ws_.file_error != 0) return;
    for (int h = 0; h < group_.heads; ++h)
      arguments_.query_reports[h].output_error = state(h).output_error;
    score_window();
    *arguments_.kv_report = {.fetched_tokens = plan.tokens,
                             .moved_tokens = moved_,
                             .moved_bytes = moved_ * group_.shape.row_bytes(),
                             .resident_tokens = group_.residents,
                             .limited = plan.limited};
  }

 private:
  HeadState& state(int h) { return group_.state(h); }
  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

  // ---- Weights of the plan ----

  // Weights relative to the shift, 0 for tokens of H; D as the plan knows it: exact over H,
  // sketched over L.
  void weights() {
    group_.in_parts([&](int first, int heads) {
      std::array<float, kMaxHeads> shift{};
      std::array<double, kMaxHeads> sum{};
      for (int h = 0; h < heads; ++h) shift[at(h)] = state(first + h).shift;
      store_.each_piece([&](std::int64_t i, std::int64_t count) {
        group_.kernels.weights(group_.weight(first) + i, group_.weight_stride, store_.odds(i),
                               count, heads, shift.data(), sum.data());
      });
      for (int h = 0; h < heads; ++h) state(first + h).denominator = sum[at(h)];
      resident_weights(first, heads, shift.data());
    });
    for (int h = 0; h < group_.heads; ++h) {
      HeadState& s = state(h);
      const float* w = group_.resident_weight(h);
      group_.for_high([&](std::int64_t i) { s.denominator += static_cast<double>(w[i]); });
      s.denominator += sink_weight(s, s.shift);
      s.computable = is_computable(s.denominator);
    }
  }

  void resident_weights(int first, int heads, const float* shift) {
    const float* logit = group_.resident_logit(first);
    std::copy(logit, logit + heads * group_.resident_stride - group_.other_slots,
              group_.resident_weight(first));
    std::array<double, kMaxHeads> unused{};
    weights_of_all(group_.resident_weight(first), group_.resident_stride, group_.residents, heads,
                   shift, unused.data());
  }

  // Kernels::weights where no token is one of H.
  void weights_of_all(float* w, std::int64_t stride, std::int64_t count, int heads,
                      const float* shift, double* sum) {
    alignas(64) static constexpr std::array<Positive16, kBlockTokens> kNoOdds{};
    for (std::int64_t i = 0; i < count; i += kBlockTokens) {
      group_.kernels.weights(w + i, stride, kNoOdds.data(),
                             std::min<std::int64_t>(kBlockTokens, count - i), heads, shift, sum);
    }
  }

  // Of the sink of the softmax; 0 where there is none.
  static double sink_weight(const HeadState& s, float shift) {
    return s.sink > -kInfinity ? static_cast<double>(weight_exp(s.sink - shift)) : 0.0;
  }

  // ---- Attention ----

  // Splits the fetched tokens into residents, which count exactly from here on, and moved ones,
  // whose logits are computed from the host's keys. They overwrite the sketched weights, so those
  // that lambda needs are kept first.
  void gather(std::int64_t fetched) {
    std::int64_t next = 0;
    moved_ = 0;
    const auto move_next = [&] {
      ws_.moved[at(moved_++)] = store_.position(ws_.fetched[at(next++)]);
    };
    const auto take = [&](std::int64_t i, std::uint32_t p) {
      while (next < fetched && ws_.fetched[at(next)] < p) move_next();
      const bool is_fetched = next < fetched && ws_.fetched[at(next)] == p;
      if (is_fetched) ++next;
      const bool exact = is_fetched || ws_.slot_odds[at(i)] == kInfinity;
      for (int h = 0; h < group_.heads; ++h)
        group_.drawn_sketched(h)[i] = exact ? -1.0f : group_.weight(h)[p];
    };
    if (group_.drawn > 0) store_.drawn().each_place(take);
    while (next < fetched) move_next();
    if (moved_ == 0) return;
    group_.in_parts([&](int first, int heads) {
      group_.note(store_.host().each_part(
          group_.shape, false, ws_.moved.data(), moved_, ws_.file_rows.data(),
          [&](const Rows& rows, const std::uint32_t* list, std::int64_t at, std::int64_t count) {
            group_.kernels.dot_rows(rows, list, count, group_.query(first), heads,
                                    group_.query_stride, group_.weight(first) + at,
                                    group_.weight_stride);
          }));
    });
    for (int h = 0; h < group_.heads; ++h) group_.cap_softly(group_.weight(h), moved_);
  }

  // Residents with their coefficients, then the moved tokens, under one shift.
  void attention() {
    const std::int64_t dim = group_.shape.config.value_dim;
    std::fill(ws_.output.begin(), ws_.output.begin() + group_.heads * dim, 0.0f);
    for (int h = 0; h < group_.heads; ++h) attention_shift(h);
    group_.in_parts([&](int first, int heads) { attention_weights(first, heads); });
    for (int h = 0; h < group_.heads; ++h) {
      state(h).by_clusters ? take_shares(h) : apply_coefficients(h);
      sum_estimate(h);
    }
    group_.in_parts([&](int first, int heads) {
      float* out = ws_.output.data() + first * dim;
      const auto add = [&](const Rows& values, std::int64_t count, std::int64_t first_slot) {
        group_.kernels.weighted_rows(values, nullptr, count,
                                     group_.resident_weight(first) + first_slot, heads,
                                     group_.resident_stride, out, dim);
      };
      if (group_.drawn > 0) add(values_of(group_.shape, store_.drawn(), 0), group_.drawn, 0);
      add(store_.window_values(group_.shape, group_.first_slot), group_.residents - group_.drawn,
          group_.drawn);
      if (moved_ > 0) {
        group_.note(store_.host().each_part(
            group_.shape, true, ws_.moved.data(), moved_, ws_.file_rows.data(),
            [&](const Rows& rows, const std::uint32_t* list, std::int64_t at, std::int64_t count) {
              group_.kernels.weighted_rows(rows, list, count, group_.weight(first) + at, heads,
                                           group_.weight_stride, out, dim);
            }));
      }
      if (group_.clusters > 0) {
        group_.kernels.weighted_rows(store_.centroids(group_.shape), nullptr, group_.clusters,
                                     group_.cluster_weight(first), heads, group_.cluster_stride,
                                     out, dim);
      }
    });
    for (int h = 0; h < group_.heads; ++h) write_output(h);
  }

  // The plan's shift unless the largest summand of D_hat is far from it: an exact logit shows that
  // the sketch was far off. A drawn token adds no more than cap * beta * (1 + rho), however large
  // its logit.
  void attention_shift(int h) {
    HeadState& s = state(h);
    const float* logit = group_.resident_logit(h);
    float top = -kInfinity;
    for (std::int64_t i = 0; i < moved_; ++i) top = std::max(top, group_.weight(h)[i]);
    top = std::max(top, s.sink);
    float any = top;
    for (std::int64_t i = 0; i < group_.residents; ++i) any = std::max(any, logit[i]);
    if (s.by_clusters) {
      set_attention_shift(s, std::max(any, s.shift + std::log(share_clusters(group_, h))));
      return;
    }
    const float most = s.shift + std::log(group_.rules.cap * s.beta);
    if (any <= s.shift + kSharedShift && !(most < s.shift - kSharedShift)) {
      top = any;
    } else {
      for (std::int64_t i = 0; i < group_.residents; ++i) {
        float summand = logit[i];
        if (i < group_.drawn && group_.drawn_sketched(h)[i] >= 0 && summand > most)
          summand = std::min(summand, most + std::log1p(ws_.slot_odds[at(i)]));
        top = std::max(top, summand);
      }
    }
    set_attention_shift(s, top);
  }

  static void set_attention_shift(HeadState& s, float top) {
    s.attention_shift =
        std::fabs(top - s.shift) <= kSharedShift || top == -kInfinity ? s.shift : top;
  }

  // Weights under the attention's shift; D_hat starts with the moved tokens and the sink.
  void attention_weights(int first, int heads) {
    std::array<float, kMaxHeads> shift{};
    std::array<double, kMaxHeads> sum{};
    bool other_shift = false;
    for (int h = 0; h < heads; ++h) {
      shift[at(h)] = state(first + h).attention_shift;
      other_shift = other_shift || shift[at(h)] != state(first + h).shift;
    }
    if (other_shift) resident_weights(first, heads, shift.data());
    if (moved_ > 0) {
      weights_of_all(group_.weight(first), group_.weight_stride, moved_, heads, shift.data(),
                     sum.data());
    }
    for (int h = 0; h < heads; ++h) {
      HeadState& s = state(first + h);
      s.estimate = sum[at(h)] + sink_weight(s, s.attention_shift);
    }
  }

  // Multiplies the residents' weights with their coefficients. Centroids count nothing.
  void apply_coefficients(int h) {
    HeadState& s = state(h);
    std::fill_n(group_.cluster_weight(h), group_.clusters, 0.0f);
    // Of what is left, nothing is known where anything weighs.
    s.output_error = s.bound == 0 ? 0 : kInfinity;
    float* w = group_.resident_weight(h);
    const float* sketched = group_.drawn_sketched(h);
    // To the plan's units, in which beta and the sketched weights are; clamped, since 0 * infinity
    // is no weight, and a weight that vanishes in them would escape the cap.
    const float to_plan =
        std::clamp(std::exp(s.attention_shift - s.shift), std::numeric_limits<float>::min(), 1e30f);
    for (std::int64_t i = 0; i < group_.drawn; ++i) {
      if (sketched[i] >= 0) {
        w[i] *= drawn_coefficient(sketched[i], w[i] * to_plan, ws_.slot_odds[at(i)], s.beta,
                                  group_.rules.cap);
      }
    }
  }

  // What the clusters say, under the attention's shift.
  void take_shares(int h) {
    const HeadState& s = state(h);
    // Where it is larger, all that is predicted is 0.
    const float factor = s.correction * std::min(std::exp(s.shift - s.attention_shift), 1e30f);
    float* w = group_.resident_weight(h);
    const float* drawn = group_.drawn_sketched(h);
    for (std::int64_t i = 0; i < group_.drawn; ++i)
      if (drawn[i] >= 0) w[i] += drawn[i] * factor;
    float* centroid = group_.cluster_weight(h);
    for (std::int64_t c = 0; c < group_.clusters; ++c) centroid[c] *= factor;
  }

  // What residents and centroids add to D_hat.
  void sum_estimate(int h) {
    const float* w = group_.resident_weight(h);
    double sum = 0;
    for (std::int64_t i = 0; i < group_.residents; ++i) sum += static_cast<double>(w[i]);
    const float* centroid = group_.cluster_weight(h);
    for (std::int64_t c = 0; c < group_.clusters; ++c) sum += static_cast<double>(centroid[c]);
    state(h).estimate += sum;
  }

  void write_output(int h) {
    const HeadState& s = state(h);
    const std::int64_t dim = group_.shape.config.value_dim;
    const float* sum = ws_.output.data() + h * dim;
    float* out = arguments_.output + h * dim;
    const bool empty = s.estimate == 0;
    for (std::int64_t j = 0; j < dim; ++j)
      out[j] = empty ? 0.0f : static_cast<float>(static_cast<double>(sum[j]) / s.estimate);
    if (arguments_.lse == nullptr) return;
    const double lse = static_cast<double>(s.attention_shift) + std::log(s.estimate);
    arguments_.lse[h] = empty ? -kInfinity : static_cast<float>(lse);
  }

  void score_window() {
    WindowScores& scores = store_.window_scores();
    const std::int64_t window = group_.residents - group_.drawn;
    float* square = scores.given_by(window);
    if (square == nullptr) return;
    bool computable = true;
    for (int h = 0; h < group_.heads; ++h) computable = computable && state(h).computable;
    scores.has_given(window, computable);
    if (!computable) return;
    std::fill_n(square, window, 0.0f);
    for (int h = 0; h < group_.heads; ++h) {
      const HeadState& s = state(h);
      const float per_denominator = static_cast<float>(1 / s.denominator);
      const float* logit = group_.resident_logit(h) + group_.drawn;
      for (std::int64_t i = 0; i < window; ++i) {
        // Not from the attention's weights: under a shift far above the plan's they are all 0.
        square[i] += window_square(logit[i], s.shift, per_denominator);
      }
    }
  }

  HeadGroup& group_;
  Workspace& ws_;
  HeadStore& store_;
  const StepArguments& arguments_;
  // Tokens in Workspace::moved.
  std::int64_t moved_ = 0;
};

}  // namespace

void run_step(const Kernels& kernels, const LayerShape& shape, const FetchRules& fetch_rules,
              HeadStore& store, Workspace& workspace,
              std::span<const StepArguments> rows) noexcept {
  const auto group_of = [&](const QueryRows& which) {
    return HeadGroup(kernels, shape, fetch_rules, store, workspace, which);
  };
  const int count = static_cast<int>(rows.size());
  HeadGroup all = group_of({0, count, rows.back().back});
  compute_logits(all, rows);
  for (int r = 0; r < count; ++r) {
    const StepArguments& row = rows[static_cast<std::size_t>(r)];
    HeadGroup group = group_of({r, 1, row.back});
    find_shifts(group, row);
    Step(group, row).run();
  }
}

}  // namespace verkv::cpu
