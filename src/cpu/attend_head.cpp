#include "cpu/attend_head.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include <verkv/attention.hpp>
#include <verkv/certificate.hpp>
#include <verkv/fetch_plan.hpp>
#include <verkv/shrinkage.hpp>

namespace verkv::cpu {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

std::int64_t padded(std::int64_t n) { return round_up(n, kLanes); }

bool uses_exact_order(const FetchRules& fetch) {
  return fetch.mode == FetchMode::verified && fetch.certifies() && fetch.order == FetchOrder::exact;
}

bool uses_search(const FetchRules& fetch) {
  return fetch.mode == FetchMode::verified && fetch.certifies() && !uses_exact_order(fetch);
}

bool is_low(Positive16 odds) { return odds.bits < kPositive16Infinity.bits; }

// The step, stage by stage, in the order of the method. Arrays of the group are [head][stride].
class Step {
 public:
  Step(const Kernels& kernels, const LayerShape& shape, const FetchRules& fetch, HeadStore& store,
       Workspace& ws, const HeadStep& step)
      : kernels_(kernels),
        shape_(shape),
        fetch_(fetch),
        store_(store),
        ws_(ws),
        step_(step),
        group_(shape.group),
        compressed_(store.compressed()),
        residents_(store.residents()),
        drawn_(store.drawn_residents()),
        query_stride_(padded(shape.config.key_dim)),
        sketch_(store.sketch(shape)),
        code_stride_(round_up(shape.sketch.padded_dim(), 64)),
        weight_stride_(padded(compressed_)),
        resident_stride_(padded(residents_)),
        log_term_(fetch.log_term) {}

  void run() {
    *step_.kv_report = {};
    step_.kv_report->resident_tokens = residents_;
    load_query();
    resident_logits();
    sketch_logits();
    weights();
    plan();
    verify();
    attend();
  }

 private:
  float* query(int h) { return ws_.query.data() + h * query_stride_; }
  float* weight(int h) { return ws_.weight.data() + h * weight_stride_; }
  float* resident_logit(int h) { return ws_.resident_logit.data() + h * resident_stride_; }
  float* resident_weight(int h) { return ws_.resident_weight.data() + h * resident_stride_; }
  float* resident_sketched(int h) { return ws_.resident_sketched.data() + h * resident_stride_; }
  std::size_t at(int h) const { return static_cast<std::size_t>(h); }

  // Calls f(first head, heads) over parts of the group that a kernel takes at once.
  template <class F>
  void in_parts(F&& f) {
    for (int first = 0; first < group_; first += kMaxHeads)
      f(first, std::min(kMaxHeads, group_ - first));
  }

  // Calls f(slot) for the residents of H: drawn slots with infinite odds, then the local window.
  template <class F>
  void for_high(F&& f) {
    for (std::int64_t i = 0; i < drawn_; ++i) {
      if (ws_.slot_odds[static_cast<std::size_t>(i)] == std::numeric_limits<float>::infinity())
        f(i);
    }
    for (std::int64_t i = drawn_; i < residents_; ++i) f(i);
  }

  // The query times the attention scale, zero-padded.
  void load_query() {
    const Rows rows{step_.query, step_.query_type, step_.query_stride,
                    static_cast<int>(shape_.config.key_dim)};
    for (int h = 0; h < group_; ++h) {
      float* q = query(h);
      std::fill(q, q + query_stride_, 0.0f);
      for (std::int64_t j = 0; j < shape_.config.key_dim; ++j)
        q[j] = shape_.scale * load_element(rows, h, j);
    }
  }

  void cap_softly(float* logit, std::int64_t count) {
    const float cap = shape_.soft_cap;
    if (!(cap > 0)) return;
    for (std::int64_t i = 0; i < count; ++i) logit[i] = soft_capped(logit[i], cap);
  }

  void resident_logits() {
    in_parts([&](int first, int heads) {
      kernels_.dot_rows(store_.resident_keys(shape_), nullptr, residents_, query(first), heads,
                        query_stride_, resident_logit(first), resident_stride_);
    });
    const std::span<const std::uint32_t> position = store_.resident_positions();
    for (std::int64_t i = 0; i < drawn_; ++i) {
      const std::size_t slot = static_cast<std::size_t>(i);
      ws_.slot_odds[slot] = to_float(store_.odds()[position[slot]]);
    }
    for (int h = 0; h < group_; ++h) {
      cap_softly(resident_logit(h), residents_);
      // The shift may use every logit that does not depend on the draw: those of H here, the
      // sketched ones later.
      float top = kMinusInfinity;
      for_high([&](std::int64_t i) { top = std::max(top, resident_logit(h)[i]); });
      state(h).shift = top;
    }
  }

  void sketch_logits() {
    if (compressed_ == 0) return;
    if (shape_.sketch.kind == SketchKind::exact) {
      in_parts([&](int first, int heads) {
        kernels_.dot_rows(store_.host_keys(shape_), nullptr, compressed_, query(first), heads,
                          query_stride_, weight(first), weight_stride_);
      });
      for (int h = 0; h < group_; ++h) {
        cap_softly(weight(h), compressed_);
        raise_shift_over_low(h);
      }
      return;
    }
    in_parts([&](int first, int heads) {
      std::array<HeadConstants, kMaxHeads> constants;
      std::array<float, kMaxHeads> largest{};
      const SketchBasis& basis = store_.basis();
      kernels_.dot_rows({basis.query.data(), DType::f16, shape_.config.key_dim,
                         static_cast<int>(shape_.config.key_dim)},
                        nullptr, basis.shape.dim, query(first), heads, query_stride_,
                        ws_.basis_query.data() + first * query_stride_, query_stride_);
      for (int h = 0; h < heads; ++h) constants[at(h)] = encode_head(first + h);
      kernels_.sketch_logits(sketch_, store_.codes(), store_.scales(), store_.odds(), compressed_,
                             ws_.code_query.data() + first * code_stride_, heads, code_stride_,
                             constants.data(), weight(first), weight_stride_, largest.data());
      for (int h = 0; h < heads; ++h) {
        if (shape_.soft_cap > 0) {
          cap_softly(weight(first + h), compressed_);
          raise_shift_over_low(first + h);
        } else {
          state(first + h).shift = std::max(state(first + h).shift, largest[at(h)]);
        }
      }
    });
  }

  void raise_shift_over_low(int h) {
    for (std::int64_t i = 0; i < compressed_; ++i) {
      if (is_low(store_.odds()[i])) state(h).shift = std::max(state(h).shift, weight(h)[i]);
    }
  }

  HeadConstants encode_head(int h) {
    const std::span<const float> q(ws_.basis_query.data() + h * query_stride_,
                                   static_cast<std::size_t>(sketch_.dim));
    const std::span<const float> mean = store_.channel_means();
    double share = 0;
    for (std::size_t j = 0; j < mean.size(); ++j)
      share += static_cast<double>(query(h)[j]) * static_cast<double>(mean[j]);
    HeadConstants constants;
    constants.shift = static_cast<float>(share);
    const std::span<std::int8_t> code(ws_.code_query.data() + h * code_stride_,
                                      static_cast<std::size_t>(code_stride_));
    const SketchQuery encoded = encode_query(q, code);
    constants.query_sum = encoded.sum;
    constants.factor = encoded.scale * store_.basis().unit;
    return constants;
  }

  // Weights relative to the shift, 0 for tokens of H; D as the plan knows it: exact over H,
  // sketched over L.
  void weights() {
    in_parts([&](int first, int heads) {
      std::array<float, kMaxHeads> shift{};
      std::array<double, kMaxHeads> sum{};
      for (int h = 0; h < heads; ++h) shift[at(h)] = state(first + h).shift;
      if (compressed_ > 0) {
        kernels_.weights(weight(first), weight_stride_, store_.odds(), compressed_, heads,
                         shift.data(), sum.data());
      }
      for (int h = 0; h < heads; ++h) state(first + h).denominator = sum[at(h)];
      resident_weights(first, heads, shift.data());
    });
    for (int h = 0; h < group_; ++h) {
      HeadState& s = state(h);
      for_high(
          [&](std::int64_t i) { s.denominator += static_cast<double>(resident_weight(h)[i]); });
      s.computable = s.denominator > 0 && s.denominator < std::numeric_limits<double>::infinity();
    }
  }

  void resident_weights(int first, int heads, const float* shift) {
    std::copy(resident_logit(first), resident_logit(first) + heads * resident_stride_,
              resident_weight(first));
    std::array<double, kMaxHeads> unused{};
    kernels_.weights(resident_weight(first), resident_stride_, ws_.no_odds.data(), residents_,
                     heads, shift, unused.data());
  }

  // beta over the tokens of L that still have a weight.
  void solve_beta() {
    in_parts([&](int first, int heads) {
      std::array<float, kMaxHeads> beta{};
      std::array<double, kMaxHeads> weight_sum{};
      std::array<double, kMaxHeads> odds_sum{};
      // Heads finish after different numbers of rounds; one more round does not change a finished
      // one.
      for (int round = 0; round < 100; ++round) {
        kernels_.beta_sums(weight(first), weight_stride_, store_.odds(), compressed_, heads,
                           beta.data(), weight_sum.data(), odds_sum.data());
        bool rose = false;
        for (int h = 0; h < heads; ++h) {
          const float next = static_cast<float>(weight_sum[at(h)] / (1 + odds_sum[at(h)]));
          if (!(next > beta[at(h)])) continue;
          beta[at(h)] = next;
          rose = true;
        }
        if (!rose) break;
      }
      for (int h = 0; h < heads; ++h) state(first + h).beta = beta[at(h)];
    });
  }

  // The certificate over the tokens of L that still have a weight, at state.beta.
  void solve_certificate() {
    in_parts([&](int first, int heads) {
      std::array<float, kMaxHeads> beta{};
      std::array<double, kMaxHeads> variance{};
      std::array<float, kMaxHeads> jump{};
      for (int h = 0; h < heads; ++h) beta[at(h)] = state(first + h).beta;
      kernels_.tail_sums(weight(first), weight_stride_, store_.odds(), compressed_, heads,
                         beta.data(), variance.data(), jump.data());
      for (int h = 0; h < heads; ++h) {
        HeadState& s = state(first + h);
        const TailTerms terms{static_cast<double>(s.beta), variance[at(h)],
                              static_cast<double>(jump[at(h)])};
        s.bound = s.computable ? certificate(terms, s.denominator, log_term_) * kOutward
                               : std::numeric_limits<double>::infinity();
      }
    });
  }

  // Fills ws_.fetched with the union of what the query heads of the group ask for. Nothing in here
  // looks at which tokens are resident.
  void plan() {
    fetched_count_ = 0;
    for (int h = 0; h < group_; ++h) step_.query_reports[h] = {};
    if (compressed_ == 0 || fetch_.mode == FetchMode::never) return;
    if (fetch_.mode == FetchMode::always) {
      for (std::int64_t i = 0; i < compressed_; ++i) {
        if (is_low(store_.odds()[i]))
          ws_.fetched[static_cast<std::size_t>(fetched_count_++)] = static_cast<std::uint32_t>(i);
      }
      for (int h = 0; h < group_; ++h) step_.query_reports[h].planned_tokens = fetched_count_;
      if (fetch_.limit_tokens > 0) solve_beta();  // ranks by keys
      apply_limit();
      return;
    }
    solve_beta();
    const bool certify = fetch_.certifies();
    if (certify) solve_certificate();
    constexpr float none = std::numeric_limits<float>::infinity();
    bool any = fetch_.asks_for_more();
    for (int h = 0; h < group_; ++h) {
      HeadState& s = state(h);
      s.threshold = {none, 0};
      s.marked = false;
      if (!s.computable || !certify || s.bound <= fetch_.epsilon) continue;
      any = true;
      s.threshold = uses_exact_order(fetch_) ? exact_threshold(h) : searched_threshold(h);
    }
    if (any) select();
    certificate_known_ = certify && fetched_count_ == 0;
    apply_limit();
  }

  // The verification sums what the plan leaves in another order. The plan stops early by as much as
  // that may differ, or a step would fetch for the sake of a certificate and then miss it by a
  // rounding error.
  double plan_target() const { return fetch_.epsilon / kOutward; }

  FetchThreshold searched_threshold(int h) {
    PlanArrays arrays{ws_.plan_weight.data(), ws_.plan_odds.data(), ws_.plan_worth.data(),
                      ws_.plan_position.data(), 0};
    kernels_.plan_start(weight(h), store_.odds(), compressed_, state(h).beta, arrays);
    return search_fetch_threshold(kernels_, arrays, state(h).beta, state(h).denominator, log_term_,
                                  plan_target());
  }

  // Eq. 9 and Eq. 10 in double. The order is not one of keys, so the tokens go into the mark array
  // at once and the threshold stays off.
  FetchThreshold exact_threshold(int h) {
    std::size_t n = 0;
    for (std::int64_t i = 0; i < compressed_; ++i) {
      if (!(weight(h)[i] > 0)) continue;
      ws_.exact_weight[n] = static_cast<double>(weight(h)[i]);
      ws_.exact_odds[n] = static_cast<double>(to_float(store_.odds()[i]));
      ws_.exact_index[n] = static_cast<std::uint32_t>(i);
      ++n;
    }
    const std::span<const double> w(ws_.exact_weight.data(), n);
    const std::span<const double> rho(ws_.exact_odds.data(), n);
    const std::span<double> gain(ws_.exact_gain.data(), n);
    const std::span<std::uint32_t> order(ws_.exact_order.data(), n);
    const HeadState& s = state(h);
    exact_gains(w, rho, s.denominator, log_term_, ws_.exact_scratch, order, gain);
    order_by_descending(std::span<const double>(gain), order);
    const std::size_t k = certified_prefix<double>(
        w, rho, order, s.denominator, log_term_, plan_target() / kOutward,
        std::span(ws_.exact_scratch).subspan(0, n), std::span(ws_.exact_scratch).subspan(n, n));
    // What the other rules ask for joins here: a token that two rules want is planned once.
    const float price = price_of(h);
    const float floor = weight_floor(h);
    for (std::size_t p = 0; p < n; ++p) {
      const std::uint32_t i = ws_.exact_index[order[p]];
      const float x = weight(h)[i];
      const bool wanted =
          p < k || x > floor || fetch_worth(x, to_float(store_.odds()[i]), s.beta) > price;
      if (!wanted) continue;
      ws_.mark[i] = 1;
      ++step_.query_reports[h].planned_tokens;
    }
    state(h).marked = true;
    marked_ = true;
    return {std::numeric_limits<float>::infinity(), 0};
  }

  // Keys above it are worth their transfer under the risk rule; infinite where the rule is off.
  float price_of(int h) {
    const double d = state(h).denominator;
    return static_cast<float>(
        std::min(fetch_.risk * d * d, static_cast<double>(std::numeric_limits<float>::max())));
  }

  float weight_floor(int h) {
    if (fetch_.probability == StopRules::kNone) return std::numeric_limits<float>::infinity();
    return static_cast<float>(fetch_.probability * state(h).denominator);
  }

  // One pass over all tokens: those above the lower of the certificate's threshold and the price of
  // risk.
  void select() {
    for (int first = 0; first < group_; first += kMaxHeads) {
      const int heads = std::min(kMaxHeads, group_ - first);
      std::array<float, kMaxHeads> beta{};
      std::array<float, kMaxHeads> key{};
      std::array<float, kMaxHeads> floor{};
      std::array<std::int64_t, kMaxHeads> planned{};
      bool ties = false;
      for (int h = 0; h < heads; ++h) {
        HeadState& s = state(first + h);
        beta[at(h)] = s.beta;
        key[at(h)] = s.threshold.worth;
        floor[at(h)] = std::numeric_limits<float>::infinity();
        if (!s.computable || s.marked) {
          key[at(h)] = std::numeric_limits<float>::infinity();
          continue;
        }
        const float price = price_of(first + h);
        if (price < key[at(h)]) {
          key[at(h)] = price;
          s.threshold.ties = 0;
        }
        floor[at(h)] = weight_floor(first + h);
        ties = ties || s.threshold.ties > 0;
      }
      if (group_ <= kMaxHeads && !ties && !marked_) {
        fetched_count_ = kernels_.select_tokens(weight(first), weight_stride_, store_.odds(),
                                                compressed_, heads, beta.data(), key.data(),
                                                floor.data(), ws_.fetched.data(), planned.data());
      } else {
        // Marks join the parts of a large group, ties, and the tokens of the exact order.
        const std::int64_t found = kernels_.select_tokens(
            weight(first), weight_stride_, store_.odds(), compressed_, heads, beta.data(),
            key.data(), floor.data(), ws_.moved.data(), planned.data());
        for (std::int64_t i = 0; i < found; ++i)
          ws_.mark[ws_.moved[static_cast<std::size_t>(i)]] = 1;
        for (int h = 0; h < heads; ++h) planned[at(h)] += mark_ties(first + h, floor[at(h)]);
        marked_ = true;
      }
      for (int h = 0; h < heads; ++h)
        step_.query_reports[first + h].planned_tokens += planned[at(h)];
    }
    if (!marked_) return;
    fetched_count_ = 0;
    for (std::int64_t i = 0; i < compressed_; ++i) {
      if (ws_.mark[static_cast<std::size_t>(i)] == 0) continue;
      ws_.mark[static_cast<std::size_t>(i)] = 0;
      ws_.fetched[static_cast<std::size_t>(fetched_count_++)] = static_cast<std::uint32_t>(i);
    }
    marked_ = false;
  }

  // Returns how many of them have not been counted for their weight already.
  std::int64_t mark_ties(int h, float floor) {
    const FetchThreshold& threshold = state(h).threshold;
    std::int64_t left = threshold.ties;
    std::int64_t counted = 0;
    for (std::int64_t i = 0; i < compressed_ && left > 0; ++i) {
      const float w = weight(h)[i];
      if (!(w > 0) || fetch_worth(w, to_float(store_.odds()[i]), state(h).beta) != threshold.worth)
        continue;
      ws_.mark[static_cast<std::size_t>(i)] = 1;
      --left;
      counted += !(w > floor);
    }
    return counted;
  }

  // Keeps the tokens with the largest share of any head's relative variance.
  void apply_limit() {
    if (fetch_.limit_tokens == 0 || fetched_count_ <= fetch_.limit_tokens) return;
    step_.kv_report->limited = true;
    const auto rank = [&](std::uint32_t position) {
      float best = 0;
      for (int h = 0; h < group_; ++h) {
        const HeadState& s = state(h);
        if (!s.computable) continue;
        const float d = static_cast<float>(s.denominator);
        const float key =
            fetch_worth(weight(h)[position], to_float(store_.odds()[position]), s.beta);
        best = std::max(best, key / d / d);
      }
      return best;
    };
    const auto begin = ws_.fetched.begin();
    std::nth_element(begin, begin + fetch_.limit_tokens, begin + fetched_count_,
                     [&](std::uint32_t a, std::uint32_t b) {
                       const float ra = rank(a);
                       const float rb = rank(b);
                       return ra != rb ? ra > rb : a < b;
                     });
    fetched_count_ = fetch_.limit_tokens;
    std::sort(begin, begin + fetched_count_);
  }

  // Certificate over what is not fetched, for every head of the group.
  void verify() {
    for (std::int64_t i = 0; i < fetched_count_; ++i) {
      for (int h = 0; h < group_; ++h) weight(h)[ws_.fetched[static_cast<std::size_t>(i)]] = 0;
    }
    if (compressed_ > 0 && !certificate_known_) {
      solve_beta();
      solve_certificate();
    }
    for (int h = 0; h < group_; ++h) {
      HeadState& s = state(h);
      if (compressed_ == 0)
        s.bound = s.computable || residents_ == 0 ? 0 : std::numeric_limits<double>::infinity();
      QueryHeadReport& report = step_.query_reports[h];
      report.epsilon = s.bound;
      report.certified =
          s.bound < std::numeric_limits<double>::infinity() && s.bound <= fetch_.epsilon;
    }
  }

  // Residents with their coefficients, then the moved tokens, merged under one shift.
  void attend() {
    const std::span<const std::uint32_t> position = store_.resident_positions();
    // lambda needs the sketched weights of drawn tokens, which the logits of moved tokens then
    // overwrite.
    std::int64_t moved = 0;
    std::int64_t next = 0;
    for (std::int64_t i = 0; i < drawn_; ++i) {
      const std::uint32_t p = position[static_cast<std::size_t>(i)];
      while (next < fetched_count_ && ws_.fetched[static_cast<std::size_t>(next)] < p) {
        ws_.moved[static_cast<std::size_t>(moved++)] =
            ws_.fetched[static_cast<std::size_t>(next++)];
      }
      const bool is_fetched =
          next < fetched_count_ && ws_.fetched[static_cast<std::size_t>(next)] == p;
      if (is_fetched) ++next;
      const bool exact = is_fetched || ws_.slot_odds[static_cast<std::size_t>(i)] ==
                                           std::numeric_limits<float>::infinity();
      for (int h = 0; h < group_; ++h) resident_sketched(h)[i] = exact ? -1.0f : weight(h)[p];
    }
    while (next < fetched_count_) {
      ws_.moved[static_cast<std::size_t>(moved++)] = ws_.fetched[static_cast<std::size_t>(next++)];
    }

    const std::int64_t moved_stride = weight_stride_;
    if (moved > 0) {
      in_parts([&](int first, int heads) {
        kernels_.dot_rows(store_.host_keys(shape_), ws_.moved.data(), moved, query(first), heads,
                          query_stride_, weight(first), moved_stride);
      });
      for (int h = 0; h < group_; ++h) cap_softly(weight(h), moved);
    }

    std::fill(ws_.output.begin(), ws_.output.begin() + group_ * shape_.config.value_dim, 0.0f);
    for (int h = 0; h < group_; ++h) attention_shift(h, moved);
    in_parts([&](int first, int heads) { exponentials(first, heads, moved, moved_stride); });
    for (int h = 0; h < group_; ++h) apply_coefficients(h);
    in_parts([&](int first, int heads) {
      float* out = ws_.output.data() + first * shape_.config.value_dim;
      kernels_.weighted_rows(store_.resident_values(shape_), nullptr, residents_,
                             resident_weight(first), heads, resident_stride_, out,
                             shape_.config.value_dim);
      if (moved > 0) {
        kernels_.weighted_rows(store_.host_values(shape_), ws_.moved.data(), moved, weight(first),
                               heads, moved_stride, out, shape_.config.value_dim);
      }
    });
    for (int h = 0; h < group_; ++h) finish(h, moved);
    if (step_.score_window) score_window();

    KvHeadReport& report = *step_.kv_report;
    report.fetched_tokens = fetched_count_;
    report.moved_tokens = moved;
    report.moved_bytes = moved * shape_.row_bytes();
  }

  // The plan's shift serves the attention too unless the largest summand of D_hat is far from it:
  // an exact logit shows that the sketch was far off. A drawn token adds no more than cap * beta *
  // (1 + rho), however large its logit.
  void attention_shift(int h, std::int64_t moved) {
    HeadState& s = state(h);
    constexpr float tolerated = 20;
    float top = kMinusInfinity;
    for (std::int64_t i = 0; i < moved; ++i) top = std::max(top, weight(h)[i]);
    float any = top;
    for (std::int64_t i = 0; i < residents_; ++i) any = std::max(any, resident_logit(h)[i]);
    const float most = s.shift + std::log(fetch_.cap * s.beta);
    if (any <= s.shift + tolerated && !(most < s.shift - tolerated)) {
      top = any;
    } else {
      for (std::int64_t i = 0; i < residents_; ++i) {
        float logit = resident_logit(h)[i];
        if (i < drawn_ && resident_sketched(h)[i] >= 0 && logit > most) {
          logit = std::min(logit, most + std::log1p(ws_.slot_odds[static_cast<std::size_t>(i)]));
        }
        top = std::max(top, logit);
      }
    }
    s.attention_shift =
        std::fabs(top - s.shift) <= tolerated || top == kMinusInfinity ? s.shift : top;
  }

  // Weights under the attention's shift; D_hat starts with the moved tokens.
  void exponentials(int first, int heads, std::int64_t moved, std::int64_t moved_stride) {
    std::array<float, kMaxHeads> shift{};
    std::array<double, kMaxHeads> sum{};
    bool other_shift = false;
    for (int h = 0; h < heads; ++h) {
      shift[at(h)] = state(first + h).attention_shift;
      other_shift = other_shift || shift[at(h)] != state(first + h).shift;
    }
    if (other_shift) resident_weights(first, heads, shift.data());
    if (moved > 0) {
      kernels_.weights(weight(first), moved_stride, ws_.no_odds.data(), moved, heads, shift.data(),
                       sum.data());
    }
    for (int h = 0; h < heads; ++h) state(first + h).estimate = sum[at(h)];
  }

  // Multiplies the residents' weights with their coefficients and sums them into D_hat.
  void apply_coefficients(int h) {
    HeadState& s = state(h);
    float* w = resident_weight(h);
    const float* sketched = resident_sketched(h);
    const float cap = fetch_.cap;
    // To the plan's units, in which beta and the sketched weights are; clamped, since 0 * infinity
    // is no weight, and a weight that vanishes in them would escape the cap.
    const float to_plan =
        std::clamp(std::exp(s.attention_shift - s.shift), std::numeric_limits<float>::min(), 1e30f);
    double sum = 0;
    for (std::int64_t i = 0; i < drawn_; ++i) {
      if (sketched[i] >= 0) {
        w[i] *= drawn_coefficient(sketched[i], w[i] * to_plan,
                                  ws_.slot_odds[static_cast<std::size_t>(i)], s.beta, cap);
      }
      sum += static_cast<double>(w[i]);
    }
    for (std::int64_t i = drawn_; i < residents_; ++i) sum += static_cast<double>(w[i]);
    s.estimate += sum;
  }

  void finish(int h, std::int64_t moved) {
    const HeadState& s = state(h);
    const std::int64_t dim = shape_.config.value_dim;
    const float* sum = ws_.output.data() + h * dim;
    float* out = step_.output + h * dim;
    const bool empty = residents_ + moved == 0 || s.estimate == 0;
    for (std::int64_t j = 0; j < dim; ++j) {
      out[j] = empty ? 0.0f : static_cast<float>(static_cast<double>(sum[j]) / s.estimate);
    }
    if (step_.lse != nullptr) {
      step_.lse[h] =
          empty ? kMinusInfinity
                : static_cast<float>(static_cast<double>(s.attention_shift) + std::log(s.estimate));
    }
  }

  // The probabilities use the plan's D, which does not depend on the draw.
  void score_window() {
    const std::int64_t window = residents_ - drawn_;
    std::fill(ws_.square.begin(), ws_.square.begin() + window, 0.0f);
    for (int h = 0; h < group_; ++h) {
      const HeadState& s = state(h);
      if (!s.computable) return;
      const float to_probability = static_cast<float>(1 / s.denominator);
      for (std::int64_t i = 0; i < window; ++i) {
        // Not from the attention's weights: under a shift far above the plan's they are all 0.
        const float p = weight_exp(resident_logit(h)[drawn_ + i] - s.shift) * to_probability;
        ws_.square[static_cast<std::size_t>(i)] += p * p;
      }
    }
    store_.add_window_step(
        std::span<const float>(ws_.square).first(static_cast<std::size_t>(window)));
  }

  HeadState& state(int h) { return ws_.states[at(h)]; }

  const Kernels& kernels_;
  const LayerShape& shape_;
  const FetchRules& fetch_;
  HeadStore& store_;
  Workspace& ws_;
  const HeadStep& step_;
  int group_;
  std::int64_t compressed_;
  std::int64_t residents_;
  std::int64_t drawn_;
  std::int64_t query_stride_;
  const SketchShape& sketch_;
  std::int64_t code_stride_;
  std::int64_t weight_stride_;
  std::int64_t resident_stride_;
  double log_term_;
  std::int64_t fetched_count_ = 0;
  bool marked_ = false;
  bool certificate_known_ = false;  // of what is not fetched
};

}  // namespace

void Workspace::reserve(const LayerShape& shape, const FetchRules& fetch, std::int64_t compressed,
                        std::int64_t residents) {
  const auto grow = [](auto& vector, std::int64_t size) {
    if (static_cast<std::int64_t>(vector.size()) < size)
      vector.resize(static_cast<std::size_t>(size));
  };
  const std::int64_t group = shape.group;
  grow(query, group * padded(shape.config.key_dim));
  grow(code_query, group * round_up(shape.sketch.padded_dim(), 64));
  grow(basis_query, group * padded(shape.config.key_dim));
  grow(weight, group * padded(compressed));
  grow(resident_logit, group * padded(residents));
  grow(resident_weight, group * padded(residents));
  grow(resident_sketched, group * padded(residents));
  grow(slot_odds, residents);
  grow(states, group);
  grow(output, group * shape.config.value_dim);
  grow(square, residents);
  grow(fetched, compressed + kLanes);
  grow(moved, compressed + kLanes);
  grow(no_odds, padded(std::max(compressed, residents)));
  grow(mark, compressed);
  if (uses_search(fetch)) {
    grow(plan_weight, compressed + kLanes);
    grow(plan_odds, compressed + kLanes);
    grow(plan_worth, compressed + kLanes);
    grow(plan_position, compressed + kLanes);
  }
  if (uses_exact_order(fetch)) {
    grow(exact_weight, compressed);
    grow(exact_odds, compressed);
    grow(exact_gain, compressed);
    grow(exact_order, compressed);
    grow(exact_index, compressed);
    grow(exact_scratch, static_cast<std::int64_t>(kGainScratchDoubles) * (compressed + 1));
  }
}

std::int64_t Workspace::bytes() const {
  std::int64_t sum = 0;
  const auto add = [&sum](const auto&... vector) {
    ((sum += static_cast<std::int64_t>(vector.capacity() * sizeof(vector[0]))), ...);
  };
  add(query, code_query, basis_query, weight, resident_logit, resident_weight, resident_sketched,
      slot_odds, states, output, square, fetched, moved, no_odds, plan_weight, plan_odds,
      plan_worth, plan_position, exact_weight, exact_odds, exact_gain, exact_scratch, exact_order,
      exact_index, mark);
  return sum;
}

void attend_head(const Kernels& kernels, const LayerShape& shape, const FetchRules& fetch,
                 HeadStore& store, Workspace& workspace, const HeadStep& step) noexcept {
  Step(kernels, shape, fetch, store, workspace, step).run();
}

}  // namespace verkv::cpu
