// Second and third launch of a step: what each query head knows and asks for, what its KV head
// fetches, and the certificate over the rest. One block per (row, query head).
#include <verkv/attention.hpp>
#include <verkv/certificate.hpp>
#include <verkv/fetch_plan.hpp>

#include "launch.hpp"
#include "step_kernels.hpp"
#include "verify_search.cuh"
#include "verify_sums.cuh"

namespace verkv::cuda {
namespace {

VERKV_DEVICE bool is_low(Positive16 odds) { return odds.bits < kPositive16Infinity.bits; }

// One query head of a row, and the passes over its tokens.
class Head {
 public:
  VERKV_DEVICE Head(const StepArguments& arguments, const HeadView& view, std::int64_t query_head,
                    const std::uint32_t* fetched)
      : tokens_(view.compressed),
        blocks_((view.compressed + kBlockTokens - 1) / kBlockTokens),
        odds_(view.odds),
        weight_(arguments.workspace.weight + query_head * arguments.workspace.token_stride),
        active_(arguments.workspace.active + query_head * arguments.workspace.mask_stride),
        fetched_(fetched) {}

  // Logits to weights, D over L and what the first round of beta needs.
  VERKV_DEVICE double to_weights(VerifyShared& shared, float shift, double& out_weight,
                                 double& out_odds) const {
    double sums[3];
    float unused = 0;
    lane_sums(
        shared, blocks_,
        [&](std::int64_t block, int lane, float(&sum)[3], float&) {
          std::uint32_t bits = 0;
          for_lane(block, lane, [&](int k, std::int64_t i) {
            const Positive16 odds = odds_[i];
            const float w = is_low(odds) ? weight_exp(weight_[i] - shift) : 0.0f;
            weight_[i] = w;
            sum[0] += w;
            if (w > 0) {
              sum[1] += w;
              sum[2] += to_float(odds);
              bits |= 1u << k;
            }
          });
          active_[block * kLanes + lane] = bits;
        },
        sums, unused);
    out_weight = sums[1];
    out_odds = sums[2];
    return sums[0];
  }

  // The first round of beta over what is not fetched.
  VERKV_DEVICE void first_sums(VerifyShared& shared, double& out_weight, double& out_odds) const {
    double sums[2];
    float unused = 0;
    lane_sums(
        shared, blocks_,
        [&](std::int64_t block, int lane, float(&sum)[2], float&) {
          std::uint32_t bits = 0;
          const std::uint32_t gone = fetched_[block * kLanes + lane];
          for_lane(block, lane, [&](int k, std::int64_t i) {
            const float w = weight_[i];
            if (w > 0 && (gone >> k & 1u) == 0) {
              sum[0] += w;
              sum[1] += to_float(odds_[i]);
              bits |= 1u << k;
            }
          });
          active_[block * kLanes + lane] = bits;
        },
        sums, unused);
    out_weight = sums[0];
    out_odds = sums[1];
  }

  // beta from the sums of its first round. The set of tokens with w > beta * rho only shrinks as
  // beta rises, so a round looks at those of the round before.
  VERKV_DEVICE float solve_beta(VerifyShared& shared, double weight, double odds) const {
    float beta = 0;
    for (int round = 0; round < 100; ++round) {
      if (round > 0) {
        double sums[2];
        float unused = 0;
        lane_sums(
            shared, blocks_,
            [&](std::int64_t block, int lane, float(&sum)[2], float&) {
              // Most tokens are still there in the second round: their loads had better overlap.
              if (round == 1) {
                all_sums(block, lane, beta, sum);
              } else {
                active_sums(block, lane, beta, sum);
              }
            },
            sums, unused);
        weight = sums[0];
        odds = sums[1];
      }
      const float next = static_cast<float>(weight / (1 + odds));
      if (!(next > beta)) break;
      beta = next;
    }
    return beta;
  }

  // The certificate over what is not fetched (`fetched_` null: over everything), enlarged outward.
  VERKV_DEVICE double certificate_at(VerifyShared& shared, float beta, double denominator,
                                     double log_term) const {
    double variance[1];
    float jump = 0;
    lane_sums(
        shared, blocks_,
        [&](std::int64_t block, int lane, float(&sum)[1], float& top) {
          const std::uint32_t gone = fetched_ != nullptr ? fetched_[block * kLanes + lane] : 0;
          for_lane(block, lane, [&](int k, std::int64_t i) {
            const float w = weight_[i];
            if (w > 0 && (gone >> k & 1u) == 0) add_tail(w, to_float(odds_[i]), beta, sum[0], top);
          });
        },
        variance, jump);
    return bound_of(beta, variance[0], jump, denominator, log_term);
  }

  // The same over everything, and on the way the bits of the tokens for which wants(weight, odds)
  // holds; out_count: how many.
  template <class Wants>
  VERKV_DEVICE double certificate_and_select(VerifyShared& shared, float beta, double denominator,
                                             double log_term, std::uint32_t* mask, Wants&& wants,
                                             std::int64_t& out_count) const {
    double variance[1];
    float jump = 0;
    int count = 0;
    lane_sums(
        shared, blocks_,
        [&](std::int64_t block, int lane, float(&sum)[1], float& top) {
          std::uint32_t bits = 0;
          for_lane(block, lane, [&](int k, std::int64_t i) {
            const float w = weight_[i];
            if (!(w > 0)) return;
            const float rho = to_float(odds_[i]);
            add_tail(w, rho, beta, sum[0], top);
            if (wants(w, rho)) bits |= 1u << k;
          });
          mask[block * kLanes + lane] = bits;
          count += __popc(bits);
        },
        variance, jump);
    out_count = count_in_block(shared, count);
    return bound_of(beta, variance[0], jump, denominator, log_term);
  }

  // Sets the bits of the tokens for which wants(token) holds; returns how many.
  template <class Wants>
  VERKV_DEVICE std::int64_t select(VerifyShared& shared, std::uint32_t* mask, Wants&& wants) const {
    int count = 0;
    for (std::int64_t block = threadIdx.x / kLanes; block < blocks_; block += kHalfWarps) {
      const int lane = threadIdx.x % kLanes;
      std::uint32_t bits = 0;
      for_lane(block, lane, [&](int k, std::int64_t i) {
        if (wants(i)) bits |= 1u << k;
      });
      mask[block * kLanes + lane] = bits;
      count += __popc(bits);
    }
    return count_in_block(shared, count);
  }

  // Adds the first `ties` tokens with exactly this key to the mask; returns how many of them
  // `counts`.
  template <class Counts>
  VERKV_DEVICE std::int64_t select_ties(VerifyShared& shared, std::uint32_t* mask, float beta,
                                        const FetchThreshold& threshold, Counts&& counts) const {
    std::int64_t before = 0;
    int counted = 0;
    for (std::int64_t first = 0; first < tokens_ && before < threshold.ties;
         first += kVerifyThreads) {
      const std::int64_t i = first + threadIdx.x;
      const float w = i < tokens_ ? weight_[i] : 0.0f;
      const bool tied = w > 0 && fetch_key(w, to_float(odds_[i]), beta) == threshold.key;
      int total = 0;
      const int rank = rank_in_block(shared, tied, total);
      if (tied && before + rank < threshold.ties) {
        const std::int64_t word = i / kBlockTokens * kLanes + i % kLanes;
        atomicOr(mask + word, 1u << (i % kBlockTokens / kLanes));
        counted += counts(w);
      }
      before += total;
    }
    return count_in_block(shared, counted);
  }

  VERKV_DEVICE float weight(std::int64_t i) const { return weight_[i]; }
  VERKV_DEVICE Positive16 odds(std::int64_t i) const { return odds_[i]; }
  VERKV_DEVICE std::int64_t tokens() const { return tokens_; }
  VERKV_DEVICE const float* weights() const { return weight_; }
  VERKV_DEVICE const Positive16* all_odds() const { return odds_; }

 private:
  template <class Visit>
  VERKV_DEVICE void for_lane(std::int64_t block, int lane, Visit&& visit) const {
    const std::int64_t base = block * kBlockTokens + lane;
    const int count = static_cast<int>(
        min(std::int64_t{kBlockTokens / kLanes}, (tokens_ - base + kLanes - 1) / kLanes));
#pragma unroll 8
    for (int k = 0; k < count; ++k) visit(k, base + k * kLanes);
  }

  VERKV_DEVICE static void add_tail(float w, float rho, float beta, float& variance, float& jump) {
    variance += variance_term(w, rho, beta);
    jump = fmaxf(jump, jump_term(w, rho, beta));
  }

  VERKV_DEVICE static double bound_of(float beta, double variance, float jump, double denominator,
                                      double log_term) {
    const TailTerms terms{static_cast<double>(beta), variance, static_cast<double>(jump)};
    return certificate(terms, denominator, log_term) * kOutward;
  }

  VERKV_DEVICE void all_sums(std::int64_t block, int lane, float beta, float (&sum)[2]) const {
    const std::uint32_t before = active_[block * kLanes + lane];
    std::uint32_t after = 0;
    for_lane(block, lane, [&](int k, std::int64_t i) {
      const float w = weight_[i];
      const float rho = to_float(odds_[i]);
      if ((before >> k & 1u) != 0 && w > beta * rho) {
        sum[0] += w;
        sum[1] += rho;
        after |= 1u << k;
      }
    });
    active_[block * kLanes + lane] = after;
  }

  VERKV_DEVICE void active_sums(std::int64_t block, int lane, float beta, float (&sum)[2]) const {
    const std::uint32_t before = active_[block * kLanes + lane];
    std::uint32_t after = before;
    const std::int64_t base = block * kBlockTokens + lane;
    for (std::uint32_t left = before; left != 0; left &= left - 1) {
      const int k = __ffs(static_cast<int>(left)) - 1;
      const float w = weight_[base + k * kLanes];
      const float rho = to_float(odds_[base + k * kLanes]);
      if (w > beta * rho) {
        sum[0] += w;
        sum[1] += rho;
      } else {
        after &= ~(1u << k);
      }
    }
    if (after != before) active_[block * kLanes + lane] = after;
  }

  std::int64_t tokens_;
  std::int64_t blocks_;
  const Positive16* odds_;
  float* weight_;
  std::uint32_t* active_;
  const std::uint32_t* fetched_;
};

// ---- Statistics ---------------------------------------------------------------------------------

VERKV_DEVICE void add_to(std::int64_t& counter, std::int64_t n) {
  static_assert(sizeof(unsigned long long) == sizeof(std::int64_t));
  if (n != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&counter), static_cast<unsigned long long>(n));
  }
}

// Reports to the layer's counters, by one thread. Integers: the order of the blocks does not
// matter.
VERKV_DEVICE void count_decision(const StepView& step, std::int64_t query_head, bool certified,
                                 std::int64_t planned) {
  if (step.counters == nullptr) return;
  add_to(step.counters->steps, query_head % step.layer.query_heads() == 0);
  add_to(step.counters->decisions, 1);
  add_to(step.counters->certified, certified);
  add_to(step.counters->fetching, planned > 0);
  add_to(step.counters->planned_tokens, planned);
}

// Looks everything up anew: kernels have no register left to keep it in.
VERKV_DEVICE void count_group(const StepView& step, std::int64_t pair) {
  if (step.counters == nullptr) return;
  const KvHeadReport& report = step.kv_reports[pair];
  const int kv_heads = step.layer.kv_heads;
  const std::int64_t slot = step.slots[pair / kv_heads];
  add_to(step.counters->fetched_tokens, report.fetched_tokens);
  add_to(step.counters->moved_tokens, report.moved_tokens);
  add_to(step.counters->moved_bytes, report.moved_bytes);
  add_to(step.counters->resident_tokens, report.resident_tokens);
  add_to(step.counters->cached_tokens, step.heads[slot * kv_heads + pair % kv_heads].tokens);
}

// ---- What a KV head fetches: the union over its group -------------------------------------------

// Keeps the `limit` tokens of the mask with the largest share of any head's relative variance, ties
// by position.
VERKV_DEVICE void keep_largest(VerifyShared& shared, const StepArguments& arguments,
                               const HeadView& view, std::int64_t first_head, std::uint32_t* mask,
                               std::int64_t limit) {
  const StepWorkspace& ws = arguments.workspace;
  const int group = arguments.view.layer.group;
  const std::int64_t blocks = (view.compressed + kBlockTokens - 1) / kBlockTokens;
  const int half = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const auto rank_of = [&](std::int64_t i) {
    float best = 0;
    for (int h = 0; h < group; ++h) {
      const HeadState& state = ws.heads[first_head + h];
      if (!state.usable) continue;
      const float d = static_cast<float>(state.denominator);
      const float w = ws.weight[(first_head + h) * ws.token_stride + i];
      best = raise(best, fetch_key(w, to_float(view.odds[i]), state.beta) / d / d);
    }
    return __float_as_uint(best);
  };
  // The rank of the last one kept, a byte at a time: ranks are not negative, so their bits are in
  // their order.
  unsigned prefix = 0;
  std::int64_t left = limit;
  for (int shift = 24; shift >= 0; shift -= 8) {
    if (threadIdx.x < 256) shared.histogram[threadIdx.x] = 0;
    __syncthreads();
    for (std::int64_t block = half; block < blocks; block += kHalfWarps) {
      for (std::uint32_t bits = mask[block * kLanes + lane]; bits != 0; bits &= bits - 1) {
        const int k = __ffs(static_cast<int>(bits)) - 1;
        const unsigned rank = rank_of(block * kBlockTokens + k * kLanes + lane);
        if (shift == 24 || rank >> (shift + 8) == prefix >> (shift + 8))
          atomicAdd(&shared.histogram[(rank >> shift) & 255u], 1u);
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      unsigned digit = 255;
      while (digit > 0 && shared.histogram[digit] < left) left -= shared.histogram[digit--];
      shared.digit = digit;
      shared.left = left;
    }
    __syncthreads();
    prefix |= shared.digit << shift;
    left = shared.left;
  }
  std::int64_t before = 0;
  for (std::int64_t first = 0; first < blocks; first += kHalfWarps) {
    const std::int64_t block = first + half;
    std::uint32_t above = 0;
    std::uint32_t equal = 0;
    if (block < blocks) {
      for (std::uint32_t bits = mask[block * kLanes + lane]; bits != 0; bits &= bits - 1) {
        const int k = __ffs(static_cast<int>(bits)) - 1;
        const unsigned rank = rank_of(block * kBlockTokens + k * kLanes + lane);
        if (rank > prefix) above |= 1u << k;
        if (rank == prefix) equal |= 1u << k;
      }
    }
    int total = 0;
    std::int64_t rank = before + rank_of_half_warp(shared, __popc(equal), total);
    before += total;
    const int half_lanes = threadIdx.x % 32 / kLanes * kLanes;
    for (int k = 0; k < kBlockTokens / kLanes; ++k) {
      const unsigned row =
          (__ballot_sync(kWholeWarp, (equal >> k & 1u) != 0) >> half_lanes) & 0xffffu;
      const int own = __popc(row & ((1u << lane) - 1));
      if ((equal >> k & 1u) != 0 && rank + own < left) above |= 1u << k;
      rank += __popc(row);
    }
    // Only this thread reads the word again in this launch.
    if (block < blocks) mask[block * kLanes + lane] = above;
  }
}

// Lists, ascending, what the mask holds and no resident slot does; returns how many.
VERKV_DEVICE std::int64_t list_moved(VerifyShared& shared, const HeadView& view,
                                     const std::uint32_t* mask, std::uint32_t* out) {
  const std::int64_t blocks = (view.compressed + kBlockTokens - 1) / kBlockTokens;
  const int half = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const auto is_resident = [&](std::int64_t i) {
    std::int64_t low = 0;
    std::int64_t high = view.drawn;
    while (low < high) {
      const std::int64_t middle = low + (high - low) / 2;
      if (view.resident_position[middle] < i) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low < view.drawn && view.resident_position[low] == i;
  };
  std::int64_t before = 0;
  for (std::int64_t first = 0; first < blocks; first += kHalfWarps) {
    const std::int64_t block = first + half;
    std::uint32_t moved = 0;
    if (block < blocks) {
      for (std::uint32_t bits = mask[block * kLanes + lane]; bits != 0; bits &= bits - 1) {
        const int k = __ffs(static_cast<int>(bits)) - 1;
        if (!is_resident(block * kBlockTokens + k * kLanes + lane)) moved |= 1u << k;
      }
    }
    int total = 0;
    std::int64_t at = before + rank_of_half_warp(shared, __popc(moved), total);
    before += total;
    const int half_lanes = threadIdx.x % 32 / kLanes * kLanes;
    for (unsigned any = __reduce_or_sync(kWholeWarp, moved); any != 0; any &= any - 1) {
      const int k = __ffs(static_cast<int>(any)) - 1;
      const bool own = (moved >> k & 1u) != 0;
      const unsigned row = (__ballot_sync(kWholeWarp, own) >> half_lanes) & 0xffffu;
      if (own) {
        out[at + __popc(row & ((1u << lane) - 1))] =
            static_cast<std::uint32_t>(block * kBlockTokens + k * kLanes + lane);
      }
      at += __popc(row);
    }
  }
  return before;
}

// By the last block of a group: what its heads ask for, cut to the limit, and the report.
VERKV_DEVICE void plan_group(VerifyShared& shared, const StepArguments& arguments,
                             const HeadView& view, std::int64_t pair, std::int64_t first_head) {
  const LayerView& layer = arguments.view.layer;
  const StepWorkspace& ws = arguments.workspace;
  const std::int64_t words = (view.compressed + kBlockTokens - 1) / kBlockTokens * kLanes;
  std::uint32_t* mask = ws.fetched + pair * ws.mask_stride;
  int count = 0;
  for (std::int64_t i = threadIdx.x; i < words; i += kVerifyThreads) {
    std::uint32_t bits = 0;
    if (layer.mode != FetchMode::never) {
      for (int h = 0; h < layer.group; ++h)
        bits |= ws.wanted[(first_head + h) * ws.mask_stride + i];
    }
    mask[i] = bits;
    count += __popc(bits);
  }
  std::int64_t fetched = count_in_block(shared, count);
  const bool limited = layer.limit_tokens > 0 && fetched > layer.limit_tokens;
  if (limited) {
    keep_largest(shared, arguments, view, first_head, mask, layer.limit_tokens);
    fetched = layer.limit_tokens;
  }
  const std::int64_t moved =
      fetched > 0 ? list_moved(shared, view, mask, ws.moved + pair * ws.token_stride) : 0;
  if (threadIdx.x == 0) {
    ws.groups[pair].fetched = fetched;
    ws.groups[pair].moved = moved;
    // By words, so that the bytes beside the flag are written too.
    std::int64_t* report = reinterpret_cast<std::int64_t*>(arguments.view.kv_reports + pair);
    report[0] = fetched;
    report[1] = moved;
    report[2] = moved * layer.row_bytes();
    report[3] = view.residents();
    report[4] = limited;
  }
}

static_assert(sizeof(KvHeadReport) == 40 && sizeof(QueryHeadReport) == 24);

// ---- The kernels --------------------------------------------------------------------------------

// D over H, in order of the slots, added to what L has.
VERKV_DEVICE double add_residents(VerifyShared& shared, const StepArguments& arguments,
                                  const HeadView& view, std::int64_t query_head, float shift,
                                  double denominator) {
  const float* logit =
      arguments.workspace.resident_logit + query_head * arguments.workspace.resident_stride;
  const std::int64_t residents = view.residents();
  float* chunk = shared.sum[0];
  for (std::int64_t first = 0; first < residents; first += kVerifyThreads) {
    const std::int64_t i = first + threadIdx.x;
    const bool high =
        i < residents && (i >= view.drawn || !is_low(view.odds[view.resident_position[i]]));
    int total = 0;
    const int rank = rank_in_block(shared, high, total);
    if (high) chunk[rank] = weight_exp(logit[i] - shift);
    __syncthreads();
    // A chain of additions: more than one warp would only wait for each other's conversions.
    if (threadIdx.x < 32) {
#pragma unroll 8
      for (int j = 0; j < total; ++j) denominator += static_cast<double>(chunk[j]);
    }
    __syncthreads();
  }
  if (residents == 0) return denominator;
  if (threadIdx.x == 0) shared.total[0] = denominator;
  __syncthreads();
  return shared.total[0];
}

__global__ void __launch_bounds__(kVerifyThreads, 1) plan_kernel(const StepArguments arguments) {
  __shared__ VerifyShared shared;
  __shared__ bool is_last;
  const StepView& step = arguments.view;
  const LayerView& layer = step.layer;
  const StepWorkspace& ws = arguments.workspace;
  const std::int64_t query_head = blockIdx.x;
  const std::int64_t row = query_head / layer.query_heads();
  const std::int64_t pair = query_head / layer.group;
  const int slot = step.slots[row];
  if (slot < 0) return;
  const HeadView view =
      step.heads[static_cast<std::int64_t>(slot) * layer.kv_heads + pair % layer.kv_heads];
  const Head head(arguments, view, query_head, nullptr);
  const int lane = threadIdx.x % 32;
  const float infinity = __int_as_float(0x7f800000);

  float shift = minus_infinity();
  for (int s = lane; s < arguments.grid.score_splits; s += 32)
    shift = raise(shift, ws.slice_top[query_head * arguments.grid.score_splits + s]);
  shift = warp_top(shift);

  double weight = 0;
  double odds = 0;
  double denominator = head.to_weights(shared, shift, weight, odds);
  denominator = add_residents(shared, arguments, view, query_head, shift, denominator);
  HeadState state;
  state.shift = shift;
  state.denominator = denominator;
  state.usable =
      denominator > 0 && denominator < __longlong_as_double(0x7ff0000000000000ll) ? 1 : 0;

  const bool plans = view.compressed > 0 && layer.mode != FetchMode::never;
  std::uint32_t* wanted = ws.wanted + query_head * ws.mask_stride;
  if (plans && layer.mode == FetchMode::always) {
    state.planned =
        head.select(shared, wanted, [&](std::int64_t i) { return is_low(head.odds(i)); });
    if (layer.limit_tokens > 0) state.beta = head.solve_beta(shared, weight, odds);
  } else if (plans) {
    state.beta = head.solve_beta(shared, weight, odds);
    // What the other rules ask for; nothing where D is no number.
    FetchThreshold threshold{infinity, 0};
    float floor = infinity;
    if (state.usable) {
      double worth = layer.risk * denominator * denominator;
      const double most = static_cast<double>(3.402823466e+38f);
      if (most < worth) worth = most;
      threshold.key = static_cast<float>(worth);
      if (layer.probability != kOff) floor = static_cast<float>(layer.probability * denominator);
    }
    const auto wants = [&](float w, float rho) {
      return w > floor || threshold.key < 0 || fetch_key(w, rho, state.beta) > threshold.key;
    };
    bool search_needed = false;
    if (layer.epsilon != kOff) {
      state.bound = head.certificate_and_select(shared, state.beta, denominator, layer.log_term,
                                                wanted, wants, state.planned);
      if (!state.usable) state.bound = __longlong_as_double(0x7ff0000000000000ll);
      state.known = 1;
      search_needed = state.usable && !(state.bound <= layer.epsilon);
    }
    if (search_needed) {
      ThresholdSearch search(shared, head.weights(), head.all_odds(),
                             ws.plan_index + query_head * ws.token_stride, state.beta, denominator,
                             layer.log_term, layer.epsilon / kOutward);
      const FetchThreshold found = search.run(head.tokens());
      search_needed = !(threshold.key < found.key);
      if (search_needed) threshold = found;
    }
    if (layer.epsilon == kOff || search_needed) {
      state.planned = head.select(shared, wanted, [&](std::int64_t i) {
        const float w = head.weight(i);
        return w > 0 && wants(w, to_float(head.odds(i)));
      });
    }
    if (threshold.ties > 0) {
      state.planned += head.select_ties(shared, wanted, state.beta, threshold,
                                        [&](float w) { return w > floor ? 0 : 1; });
    }
  }
  if (threadIdx.x == 0) ws.heads[query_head] = state;

  // The last head of a group to get here sees what the others have written.
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last =
        atomicAdd(&ws.groups[pair].planned_heads, 1u) + 1 == static_cast<unsigned>(layer.group);
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return;
  plan_group(shared, arguments, view, pair, pair * layer.group);
}

__global__ void __launch_bounds__(kVerifyThreads)
    certificate_kernel(const StepArguments arguments) {
  __shared__ VerifyShared shared;
  const StepView& step = arguments.view;
  const LayerView& layer = step.layer;
  const StepWorkspace& ws = arguments.workspace;
  const std::int64_t query_head = blockIdx.x;
  const std::int64_t row = query_head / layer.query_heads();
  const std::int64_t pair = query_head / layer.group;
  std::int64_t* report = reinterpret_cast<std::int64_t*>(step.query_reports + query_head);
  const int slot = step.slots[row];
  if (slot < 0) {
    if (threadIdx.x < 3) report[threadIdx.x] = 0;
    if (threadIdx.x < 5 && query_head % layer.group == 0)
      reinterpret_cast<std::int64_t*>(step.kv_reports + pair)[threadIdx.x] = 0;
    return;
  }
  const HeadView view =
      step.heads[static_cast<std::int64_t>(slot) * layer.kv_heads + pair % layer.kv_heads];
  const HeadState& state = ws.heads[query_head];
  const bool usable = state.usable != 0;
  double bound = state.bound;
  if (view.compressed == 0) {
    bound = usable || view.residents() == 0 ? 0 : __longlong_as_double(0x7ff0000000000000ll);
  } else if (state.known == 0 || ws.groups[pair].fetched != 0) {
    const Head head(arguments, view, query_head, ws.fetched + pair * ws.mask_stride);
    const double denominator = state.denominator;
    double weight = 0;
    double odds = 0;
    head.first_sums(shared, weight, odds);
    const float beta = head.solve_beta(shared, weight, odds);
    bound = __longlong_as_double(0x7ff0000000000000ll);
    if (usable) bound = head.certificate_at(shared, beta, denominator, layer.log_term);
    if (threadIdx.x == 0) ws.heads[query_head].beta = beta;
  }
  if (threadIdx.x == 0) {
    const bool certified =
        bound < __longlong_as_double(0x7ff0000000000000ll) && bound <= layer.epsilon;
    report[0] = __double_as_longlong(bound);
    report[1] = certified;
    report[2] = state.planned;
    count_decision(step, query_head, certified, state.planned);
    if (query_head % layer.group == 0) count_group(step, pair);
  }
}

}  // namespace

cudaError_t launch_plan(const StepArguments& arguments, cudaStream_t stream) {
  const unsigned blocks =
      static_cast<unsigned>(arguments.view.rows * arguments.view.layer.query_heads());
  return launch(plan_kernel, blocks, kVerifyThreads, 0, stream, arguments);
}

cudaError_t launch_certificate(const StepArguments& arguments, cudaStream_t stream) {
  const unsigned blocks =
      static_cast<unsigned>(arguments.view.rows * arguments.view.layer.query_heads());
  return launch(certificate_kernel, blocks, kVerifyThreads, 0, stream, arguments);
}

}  // namespace verkv::cuda
