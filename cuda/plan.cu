// Second launch of a step: what each query head knows and asks for, and what its KV head fetches.
// One block per (row, query head); the last block of a KV head's group plans for the group.
#include <verkv/attention.hpp>
#include <verkv/fetch_plan.hpp>

#include "head_passes.cuh"
#include "launch.hpp"
#include "masks.cuh"
#include "radix_select.cuh"
#include "ranks.cuh"
#include "search.cuh"
#include "step_kernels.hpp"
#include "sums.cuh"
#include "tuning.hpp"

namespace verkv::cuda {
namespace {

// ---- What a query head knows --------------------------------------------------------------------

// The learned sink of a head, which is there.
VERKV_DEVICE float sink_of(const LayerView& layer, std::int64_t query_head) {
  return layer.sink_logits[query_head % layer.query_heads()];
}

// The largest logit of the head that the plan may use.
VERKV_DEVICE float shift_of(const StepArguments& arguments, std::int64_t query_head) {
  const StepWorkspace& ws = arguments.workspace;
  const int lane = threadIdx.x % 32;
  float shift = minus_infinity();
  for (int s = lane; s < arguments.grid.score_splits; s += 32)
    shift = raise(shift, ws.slice_top[query_head * arguments.grid.score_splits + s]);
  shift = warp_top(shift);
  const LayerView& layer = arguments.view.layer;
  return layer.sink_logits == nullptr ? shift : raise(shift, sink_of(layer, query_head));
}

// D over H, in order of the slots, added to what L has.
VERKV_DEVICE double add_residents(HeadShared& shared, const StepArguments& arguments,
                                  const HeadView& view, std::int64_t residents,
                                  std::int64_t query_head, float shift, double denominator) {
  const float* logit =
      arguments.workspace.resident_logit + query_head * arguments.workspace.resident_stride;
  float* chunk = shared.sum[0];
  for (std::int64_t first = 0; first < residents; first += kHeadThreads) {
    const std::int64_t i = first + threadIdx.x;
    const bool high =
        i < residents && (i >= view.drawn || !is_low(view.odds[view.resident_place[i]]));
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

// ---- What a KV head fetches: the union over its group -------------------------------------------

// The token's limit_rank over `group` heads, as bits: ranks are not negative, so their bits are in
// their order.
VERKV_DEVICE unsigned rank_in_group(const StepWorkspace& ws, const HeadView& view,
                                    std::int64_t first_head, int group, std::int64_t token) {
  float best = 0;
#pragma unroll 1
  for (int h = 0; h < group; ++h) {
    const HeadState& state = ws.heads[first_head + h];
    if (!state.computable) continue;
    const float w = ws.weight[(first_head + h) * ws.token_stride + token];
    best =
        limit_rank(best, fetch_worth(w, to_float(view.odds[token]), state.beta), state.denominator);
  }
  return __float_as_uint(best);
}

// Blocks of 512 tokens under sketch, the last one not full.
VERKV_DEVICE std::int64_t blocks_of(const HeadView& view) {
  return (view.compressed + kBlockTokens - 1) / kBlockTokens;
}

// Lists the positions, in order of place, of what the mask holds and no resident slot does; returns
// how many.
VERKV_DEVICE std::int64_t list_moved(HeadShared& shared, const HeadView& view,
                                     const std::uint32_t* mask, std::uint32_t* out) {
  const std::int64_t blocks = blocks_of(view);
  const int half = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const auto is_resident = [&](std::int64_t i) {
    std::int64_t low = 0;
    std::int64_t high = view.drawn;
    while (low < high) {
      const std::int64_t middle = low + (high - low) / 2;
      if (view.resident_place[middle] < i) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low < view.drawn && view.resident_place[low] == i;
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
    for (unsigned any = __reduce_or_sync(kWholeWarp, moved); any != 0; any &= any - 1) {
      const int k = __ffs(static_cast<int>(any)) - 1;
      const bool own = (moved >> k & 1u) != 0;
      const unsigned row = half_warp_row(own);
      if (own) {
        out[at + __popc(row & ((1u << lane) - 1))] =
            static_cast<std::uint32_t>(block * kBlockTokens + k * kLanes + lane);
      }
      at += __popc(row);
    }
  }
  __syncthreads();
  // Positions come from main memory, which is far: by all threads, when all places are known.
  for (std::int64_t i = threadIdx.x; i < before; i += kHeadThreads)
    out[i] = view.place_position[out[i]];
  return before;
}

// By the last block of a group: what its heads ask for, cut to the limit, and the report. Looks
// everything up anew: the search for a threshold leaves no register to keep it in.
VERKV_DEVICE void plan_group(HeadShared& shared, const StepArguments& arguments,
                             std::int64_t pair) {
  const LayerView& layer = arguments.view.layer;
  const std::int64_t first_head = pair * layer.group;
  const StepRow& of_row = arguments.view.batch[pair / layer.kv_heads];
  const HeadView& view =
      arguments.view.heads[std::int64_t{of_row.slot} * layer.kv_heads + pair % layer.kv_heads];
  const StepWorkspace& ws = arguments.workspace;
  const std::int64_t words = blocks_of(view) * kLanes;
  std::uint32_t* mask = ws.fetched + pair * ws.mask_stride;
  int count = 0;
  for (std::int64_t i = threadIdx.x; i < words; i += kHeadThreads) {
    std::uint32_t bits = 0;
    if (layer.fetch.fetches) {
#pragma unroll 4
      for (int h = 0; h < layer.group; ++h)
        bits |= ws.wanted[(first_head + h) * ws.mask_stride + i];
    }
    mask[i] = bits;
    count += __popc(bits);
  }
  std::int64_t fetched = count_in_block(shared, count);
  const bool limited = layer.limit_tokens > 0 && fetched > layer.limit_tokens;
  if (limited) {
    const int group = layer.group;
    keep_largest(shared, blocks_of(view), mask, layer.limit_tokens,
                 [&](std::int64_t i) { return rank_in_group(ws, view, first_head, group, i); });
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
    report[3] = residents_of(view, of_row);
    report[4] = limited;
  }
}

static_assert(sizeof(KvHeadReport) == 40 && sizeof(QueryHeadReport) == 40);

// ---- The kernel ---------------------------------------------------------------------------------

// How many compressed tokens a query head asks for, and the beta at which it does.
struct Asked {
  std::int64_t tokens = 0;
  float beta = 0;
};

// The plan of one query head: sets the bits of what it asks for, and the state's certificate where
// that has been computed over all tokens. `weight` and `odds`: of the first round of beta.
VERKV_DEVICE Asked plan_head(HeadShared& shared, const StepArguments& arguments,
                             const HeadPasses& head, std::int64_t query_head, double weight,
                             double odds, double denominator, bool computable, HeadState& state) {
  const LayerView& layer = arguments.view.layer;
  const StepWorkspace& ws = arguments.workspace;
  float beta = 0;
  std::int64_t planned = 0;
  std::uint32_t* wanted = ws.wanted + query_head * ws.mask_stride;
  const bool always = !layer.fetch.by_rules;
  // What the rules other than the certificate ask for.
  const RuleThresholds limits = thresholds(layer.rules, denominator);
  FetchThreshold threshold{limits.worth, 0};
  const float floor = limits.weight;
  float ruled_out = ruled_out_below(threshold.worth);
  const auto likely = [&](float w, float rho) {
    return (w > floor) | !is_ruled_out(w, rho, ruled_out);
  };
  const auto wants_worth = [&](float w, float worth) {
    return (w > floor) | (worth > threshold.worth);
  };
  const auto wants = [&](float w, float rho) {
    return w > 0 && wants_worth(w, fetch_worth(w, rho, beta));
  };
  const bool certifies = !always && layer.rules.certifies();
  const bool marks = !always && !certifies;
  if (!always || layer.limit_tokens > 0)
    beta = head.solve_beta(shared, weight, odds, marks ? wanted : nullptr, likely);
  bool looks_at_all = always || (marks && !(beta > 0));
  if (certifies) {
    double bound = head.certificate_and_select(shared, beta, denominator, layer.rules.log_term,
                                               wanted, wants_worth, planned);
    if (!computable) bound = infinite_double();
    if (threadIdx.x == 0) {
      state.bound = bound;
      state.known = 1;
    }
    if (computable && !(bound <= layer.rules.epsilon)) {
      ThresholdSearch search(shared, head.weights(), head.all_odds(),
                             ws.plan_index + query_head * ws.token_stride,
                             ws.active + query_head * ws.mask_stride, beta, denominator,
                             layer.rules.log_term, limits.target);
      const FetchThreshold found = search.run(head.tokens());
      if (!(threshold.worth < found.worth)) {
        threshold = found;
        ruled_out = ruled_out_below(found.worth);
        looks_at_all = true;
      }
    }
  } else if (!looks_at_all) {
    planned = head.select_among(shared, wanted, wants);
  }
  if (looks_at_all) {
    planned = head.select(shared, wanted, [&](float w, float rho) {
      return always ? rho < infinity() : likely(w, rho) && wants(w, rho);
    });
  }
  if (threshold.ties > 0) {
    planned += head.select_ties(shared, wanted, beta, threshold,
                                [&](float w) { return w > floor ? 0 : 1; });
  }
  return {planned, beta};
}

__global__ void __launch_bounds__(kHeadThreads, kHeadBlocks)
    plan_kernel(const StepArguments arguments) {
  __shared__ Uninitialized<HeadShared> room;
  HeadShared& shared = room.get();
  __shared__ bool is_last;
  const StepView& step = arguments.view;
  const LayerView& layer = step.layer;
  const StepWorkspace& ws = arguments.workspace;
  const std::int64_t query_head = blockIdx.x;
  const std::int64_t row = query_head / layer.query_heads();
  const std::int64_t pair = query_head / layer.group;
  const int slot = step.batch[row].slot;
  if (slot < 0) return;
  const HeadView& view =
      step.heads[static_cast<std::int64_t>(slot) * layer.kv_heads + pair % layer.kv_heads];
  const HeadPasses head(arguments, view, query_head);
  const float shift = shift_of(arguments, query_head);
  double weight = 0;
  double odds = 0;
  double denominator = head.to_weights(shared, shift, weight, odds);
  denominator = add_residents(shared, arguments, view, residents_of(view, step.batch[row]),
                              query_head, shift, denominator);
  if (layer.sink_logits != nullptr)
    denominator += static_cast<double>(weight_exp(sink_of(layer, query_head) - shift));
  const bool computable = is_computable(denominator);
  // What is known goes out before a search needs the registers.
  HeadState& state = ws.heads[query_head];
  if (threadIdx.x == 0) {
    state.shift = shift;
    state.denominator = denominator;
    state.computable = computable ? 1 : 0;
    state.bound = 0;
    state.known = 0;
  }

  Asked asked;
  if (view.compressed > 0 && layer.fetch.fetches) {
    asked = plan_head(shared, arguments, head, query_head, weight, odds, denominator, computable,
                      state);
  }
  if (threadIdx.x == 0) {
    state.planned = asked.tokens;
    state.beta = asked.beta;
  }

  const auto planned_heads = [&]() -> std::uint32_t& { return ws.groups[pair].planned_heads; };
  if (!comes_last(planned_heads, static_cast<unsigned>(layer.group), is_last)) return;
  plan_group(shared, arguments, pair);
}

}  // namespace

cudaError_t launch_plan(const StepArguments& arguments, cudaStream_t stream) {
  const unsigned blocks =
      static_cast<unsigned>(arguments.view.rows * arguments.view.layer.query_heads());
  return launch(plan_kernel, blocks, kHeadThreads, 0, stream, arguments);
}

}  // namespace verkv::cuda
