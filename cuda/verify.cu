// Second and third launch of a step: what each query head knows and asks for, what its KV head
// fetches, and the certificate over the rest. One block per (row, query head).
#include <verkv/attention.hpp>
#include <verkv/certificate.hpp>
#include <verkv/fetch_plan.hpp>

#include "launch.hpp"
#include "step_kernels.hpp"
#include "verify_search.cuh"
#include "verify_sums.cuh"
#include "verify_terms.cuh"

namespace verkv::cuda {
namespace {

VERKV_DEVICE bool is_low(Positive16 odds) { return odds.bits < kPositive16Infinity.bits; }
VERKV_DEVICE float infinity() { return __int_as_float(0x7f800000); }

// What neighbouring lanes have of something, moved by one instruction.
template <class T>
struct alignas(kEach * sizeof(T)) Own {
  T lane[kEach];
};

// A thread's tokens of a row of 16.
struct Row {
  float weight[kEach];
  float odds[kEach];
};

// Words of a mask in the making: eight rows at a time, so that a token's bit is a constant.
struct MaskWords {
  Own<std::uint32_t> word{};
  std::uint32_t eight[kEach] = {};

  VERKV_DEVICE void set(std::size_t j, int row) { eight[j] |= 1u << row; }
  VERKV_DEVICE void close(int first_row) {
#pragma unroll
    for (std::size_t j = 0; j < kEach; ++j) {
      word.lane[j] |= eight[j] << first_row;
      eight[j] = 0;
    }
  }
};

// One query head of a row, and the passes over its tokens. A word of a mask belongs to one thread
// in all of them.
class Head {
 public:
  VERKV_DEVICE Head(const StepArguments& arguments, const HeadView& view, std::int64_t query_head)
      : tokens_(view.compressed),
        blocks_(static_cast<int>((view.compressed + kBlockTokens - 1) / kBlockTokens)),
        odds_(view.odds),
        weight_(arguments.workspace.weight + query_head * arguments.workspace.token_stride),
        active_(arguments.workspace.active + query_head * arguments.workspace.mask_stride) {}

  // Logits to weights, D over L and what the first round of beta needs.
  VERKV_DEVICE double to_weights(VerifyShared& shared, float shift, double& out_weight,
                                 double& out_odds) const {
    double sums[2];
    float no_number[1];
    lane_sums<1>(
        shared, blocks_,
        [&](int block, int part, float(&sum)[2][kEach], float(&nan)[1]) {
          for_rows(block, part, [&](int, Own<float>* at, const Row& row) {
            Own<float> w;
#pragma unroll
            for (std::size_t j = 0; j < kEach; ++j) {
              // Dialect of verkv/attention.hpp: weight_exp. Never above 0: the shift is the largest
              // of these logits, or more.
              const float x = row.weight[j] - shift;
              const bool none = (x < exp_terms::kLowest) | !(row.odds[j] < infinity());
              const float weight = weight_exp_within(x);
              w.lane[j] = none ? 0.0f : weight;
              sum[0][j] += w.lane[j];
              sum[1][j] += none ? 0.0f : row.odds[j];
            }
            *at = w;
          });
          // D is no number where a weight is none, but beta leaves those out.
          float all = 0;
#pragma unroll
          for (const float x : sum[0]) all += x;
          if (!(all >= 0)) {
            nan[0] = 1;
            positive_sums(block, part, sum);
          }
        },
        sums, no_number);
    out_weight = sums[0];
    out_odds = sums[1];
    return no_number[0] > 0 ? __longlong_as_double(0x7ff8000000000000ll) : sums[0];
  }

  // The first round of beta over what is not fetched. Fetched tokens weigh nothing from here on.
  VERKV_DEVICE void first_sums(VerifyShared& shared, const std::uint32_t* fetched,
                               double& out_weight, double& out_odds) const {
    double sums[2];
    float unused[1];
    lane_sums<0>(
        shared, blocks_,
        [&](int block, int part, float(&sum)[2][kEach], float(&)[1]) {
          float* weight = weight_ + first_of(block, part);
          each_bit(load(fetched, block, part), [&](std::size_t j, unsigned k) {
            in_row(weight + j, k) = 0;
            return true;
          });
          positive_sums(block, part, sum);
        },
        sums, unused);
    out_weight = sums[0];
    out_odds = sums[1];
  }

  // beta from the sums of its first round. The set of tokens with w > beta * rho only shrinks as
  // beta rises, so a round looks at those of the round before. `likely_mask` not null: where beta
  // is not 0, it gets the bits of the tokens for which likely(weight, odds) holds.
  template <class Likely>
  VERKV_DEVICE float solve_beta(VerifyShared& shared, double weight, double odds,
                                std::uint32_t* likely_mask, Likely&& likely) const {
    float beta = 0;
    for (int round = 0; round < 100; ++round) {
      if (round > 0) {
        double sums[2];
        float unused[1];
        lane_sums<0>(
            shared, blocks_,
            [&](int block, int part, float(&sum)[2][kEach], float(&)[1]) {
              if (round == 1) {
                all_sums(block, part, beta, sum, likely_mask, likely);
              } else {
                active_sums(block, part, beta, sum);
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
  VERKV_DEVICE float solve_beta(VerifyShared& shared, double weight, double odds) const {
    return solve_beta(shared, weight, odds, nullptr, [](float, float) { return false; });
  }

  // The certificate over all tokens that weigh something, enlarged outward.
  VERKV_DEVICE double certificate_at(VerifyShared& shared, float beta, double denominator,
                                     double log_term) const {
    double variance[1];
    float jump[1];
    lane_sums<1>(
        shared, blocks_,
        [&](int block, int part, float(&sum)[1][kEach], float(&top)[1]) {
          add_tails(block, part, beta, sum[0], top[0], [](std::size_t, int, float, float) {});
        },
        variance, jump);
    return bound_of(beta, variance[0], jump[0], denominator, log_term);
  }

  // The same, and on the way the bits of the tokens for which wants(weight, key) holds; out_count:
  // how many.
  template <class Wants>
  VERKV_DEVICE double certificate_and_select(VerifyShared& shared, float beta, double denominator,
                                             double log_term, std::uint32_t* mask, Wants&& wants,
                                             std::int64_t& out_count) const {
    double variance[1];
    float jump[1];
    int count = 0;
    lane_sums<1>(
        shared, blocks_,
        [&](int block, int part, float(&sum)[1][kEach], float(&top)[1]) {
          MaskWords bits;
          add_tails(
              block, part, beta, sum[0], top[0],
              [&](std::size_t j, int row, float w, float key) {
                if ((w > 0) & wants(w, key)) bits.set(j, row);
              },
              bits);
          count += put(mask, block, part, bits.word);
        },
        variance, jump);
    out_count = count_in_block(shared, count);
    return bound_of(beta, variance[0], jump[0], denominator, log_term);
  }

  // Sets the bits of the tokens for which wants(weight, odds) holds; returns how many.
  template <class Wants>
  VERKV_DEVICE std::int64_t select(VerifyShared& shared, std::uint32_t* mask, Wants&& wants) const {
    int count = 0;
    for_words([&](int block, int part) {
      MaskWords bits;
      for_rows(
          block, part,
          [&](int row, const Own<float>*, const Row& tokens) {
#pragma unroll
            for (std::size_t j = 0; j < kEach; ++j) {
              if (wants(tokens.weight[j], tokens.odds[j])) bits.set(j, row);
            }
          },
          bits);
      count += put(mask, block, part, bits.word);
    });
    return count_in_block(shared, count);
  }

  // Keeps the bits of the mask for which wants(weight, odds) holds; returns how many.
  template <class Wants>
  VERKV_DEVICE std::int64_t select_among(VerifyShared& shared, std::uint32_t* mask,
                                         Wants&& wants) const {
    int count = 0;
    for_words([&](int block, int part) {
      const float* weight = weight_ + first_of(block, part);
      const Positive16* odds = odds_ + first_of(block, part);
      const auto kept = each_bit(load(mask, block, part), [&](std::size_t j, unsigned k) {
        return wants(in_row(weight + j, k), to_float(in_row(odds + j, k)));
      });
      count += put(mask, block, part, kept);
    });
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
      const bool tied = w > 0 && fetch_worth(w, to_float(odds_[i]), beta) == threshold.key;
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

  VERKV_DEVICE std::int64_t tokens() const { return tokens_; }
  VERKV_DEVICE const float* weights() const { return weight_; }
  VERKV_DEVICE const Positive16* all_odds() const { return odds_; }

 private:
  static constexpr int kAtOnce = 4;

  VERKV_DEVICE static std::int64_t first_of(int block, int part) {
    return std::int64_t{block} * kBlockTokens + part * static_cast<int>(kEach);
  }

  // A thread's words of a mask.
  VERKV_DEVICE static Own<std::uint32_t> load(const std::uint32_t* mask, std::int64_t block,
                                              int part) {
    return reinterpret_cast<const Own<std::uint32_t>*>(mask)[std::int64_t{block} * kParts + part];
  }
  // Returns how many bits are set.
  VERKV_DEVICE static int put(std::uint32_t* mask, int block, int part,
                              const Own<std::uint32_t>& word) {
    reinterpret_cast<Own<std::uint32_t>*>(mask)[std::int64_t{block} * kParts + part] = word;
    int count = 0;
#pragma unroll
    for (const std::uint32_t bits : word.lane) count += __popc(bits);
    return count;
  }

  // The weight or the odds of a token `row` rows behind the one of `first`: one instruction for the
  // address.
  template <class T>
  VERKV_DEVICE static T& in_row(T* first, unsigned row) {
    using Bytes = std::conditional_t<std::is_const_v<T>, const char, char>;
    return *reinterpret_cast<T*>(reinterpret_cast<Bytes*>(first) +
                                 std::uint64_t{row} * (kLanes * sizeof(T)));
  }

  // keep(lane of the thread, row) for every bit, by lane and ascending; returns the bits kept.
  template <class Keep>
  VERKV_DEVICE static Own<std::uint32_t> each_bit(const Own<std::uint32_t>& word, Keep&& keep) {
    Own<std::uint32_t> kept;
#pragma unroll
    for (std::size_t j = 0; j < kEach; ++j) {
      kept.lane[j] = 0;
      for (std::uint32_t left = word.lane[j]; left != 0;) {
        const std::uint32_t lowest = left & -left;
        left ^= lowest;
        if (keep(j, 31u - __clz(static_cast<int>(lowest)))) kept.lane[j] |= lowest;
      }
    }
    return kept;
  }

  // visit(block, part) for the words of a thread, those that it has in lane_sums.
  template <class Visit>
  VERKV_DEVICE void for_words(Visit&& visit) const {
    for (int block = threadIdx.x / kParts; block < blocks_; block += kVerifyThreads / kParts)
      visit(block, static_cast<int>(threadIdx.x % kParts));
  }

  // The odds of a thread's tokens of a row, two to a word.
  struct alignas(kEach * sizeof(Positive16)) OddsWords {
    std::uint32_t word[kEach / 2];
  };

  VERKV_DEVICE static Row row_of(const Own<float>& weight, const OddsWords& odds) {
    Row row;
#pragma unroll
    for (std::size_t j = 0; j < kEach; j += 2) {
      const std::uint32_t two = odds.word[j / 2];
      row.weight[j] = weight.lane[j];
      row.weight[j + 1] = weight.lane[j + 1];
      row.odds[j] = __uint_as_float((two & 0xffffu) << 15);
      row.odds[j + 1] = __uint_as_float(two >> 1 & 0x7fff8000u);
    }
    return row;
  }

  // visit(row % 8, where the weights are, the row) for the thread's tokens of a block, ascending,
  // with odds of infinity behind the last token. Closes the masks, whose bits are by row % 8.
  template <class Visit, class... Masks>
  VERKV_DEVICE void for_rows(int block, int part, Visit&& visit, Masks&... masks) const {
    const std::int64_t first = first_of(block, part);
    auto* weight = reinterpret_cast<Own<float>*>(weight_ + first);
    const auto* odds = reinterpret_cast<const OddsWords*>(odds_ + first);
    const std::int64_t left = tokens_ - std::int64_t{block} * kBlockTokens;
    const int full = left < kBlockTokens ? static_cast<int>(left) / kLanes : kRows;
    int begin = 0;
    for (; begin + kAtOnce <= full; begin += kAtOnce) {
      Own<float> w[kAtOnce];
      OddsWords rho[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        w[k] = weight[(begin + k) * kParts];
        rho[k] = odds[(begin + k) * kParts];
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        visit(k, weight + (begin + k) * kParts, row_of(w[k], rho[k]));
      (masks.close(begin), ...);
    }
    if (left >= kBlockTokens) return;
      // The last block.
#pragma unroll 1
    for (; begin * kLanes < left; begin += kAtOnce) {
#pragma unroll 1
      for (int k = 0; k < kAtOnce && (begin + k) * kLanes < left; ++k) {
        Row row;
#pragma unroll
        for (std::size_t j = 0; j < kEach; ++j) {
          const std::int64_t i = first + (begin + k) * kLanes + j;
          row.weight[j] = i < tokens_ ? weight_[i] : 0.0f;
          row.odds[j] = i < tokens_ ? to_float(odds_[i]) : infinity();
        }
        visit(k, weight + (begin + k) * kParts, row);
      }
      (masks.close(begin), ...);
    }
  }

  VERKV_DEVICE void positive_sums(int block, int part, float (&sum)[2][kEach]) const {
#pragma unroll
    for (std::size_t j = 0; j < kEach; ++j) sum[0][j] = sum[1][j] = 0;
    for_rows(block, part, [&](int, const Own<float>*, const Row& row) {
#pragma unroll
      for (std::size_t j = 0; j < kEach; ++j) {
        if (row.weight[j] > 0) {
          sum[0][j] += row.weight[j];
          sum[1][j] += row.odds[j];
        }
      }
    });
  }

  // Weights of 0 are not above beta * odds either.
  template <class Likely>
  VERKV_DEVICE void all_sums(int block, int part, float beta, float (&sum)[2][kEach],
                             std::uint32_t* likely_mask, Likely&& likely) const {
    MaskWords active;
    MaskWords marked;
    for_rows(
        block, part,
        [&](int k, const Own<float>*, const Row& row) {
#pragma unroll
          for (std::size_t j = 0; j < kEach; ++j) {
            if (row.weight[j] > beta * row.odds[j]) {
              sum[0][j] += row.weight[j];
              sum[1][j] += row.odds[j];
              active.set(j, k);
            }
            if (likely(row.weight[j], row.odds[j])) marked.set(j, k);
          }
        },
        active, marked);
    put(active_, block, part, active.word);
    if (likely_mask != nullptr) put(likely_mask, block, part, marked.word);
  }

  VERKV_DEVICE void active_sums(int block, int part, float beta, float (&sum)[2][kEach]) const {
    const float* weight = weight_ + first_of(block, part);
    const Positive16* odds = odds_ + first_of(block, part);
    const Own<std::uint32_t> after =
        each_bit(load(active_, block, part), [&](std::size_t j, unsigned k) {
          const float w = in_row(weight + j, k);
          const float rho = to_float(in_row(odds + j, k));
          const bool above = w > beta * rho;
          if (above) {
            sum[0][j] += w;
            sum[1][j] += rho;
          }
          return above;
        });
    put(active_, block, part, after);
  }

  // Adds what the thread's tokens that weigh something have in the certificate, and calls
  // each(lane of the thread, row % 8, weight, key), which may set bits of the masks.
  template <class Each, class... Masks>
  VERKV_DEVICE void add_tails(int block, int part, float beta, float (&sum)[kEach], float& top,
                              Each&& each, Masks&... masks) const {
    float jump = 0;
    std::uint32_t least = ~0u;
    const auto add_with = [&](auto&& quotient) {
      for_rows(
          block, part,
          [&](int k, const Own<float>*, const Row& row) {
#pragma unroll
            for (std::size_t j = 0; j < kEach; ++j) {
              const float w = row.weight[j];
              const Tail tail = tail_of(w, row.odds[j], beta, quotient(w, row.odds[j]));
              // Without a weight, the jump is 0 or no number, which fmaxf leaves out.
              sum[j] += w > 0 ? tail.variance : 0.0f;
              jump = fmaxf(jump, tail.jump);
              each(j, k, w, tail.key);
            }
          },
          masks...);
    };
    add_with([&](float w, float rho) {
      least = min(least, quickness(w));
      return quick_quotient(w, rho);
    });
    if (least < kQuick) {
#pragma unroll
      for (float& x : sum) x = 0;
      jump = 0;
      ((masks = {}), ...);
      add_with([](float w, float rho) { return w / rho; });
    }
    top = fmaxf(top, jump);
  }

  VERKV_DEVICE static double bound_of(float beta, double variance, float jump, double denominator,
                                      double log_term) {
    const TailTerms terms{static_cast<double>(beta), variance, static_cast<double>(jump)};
    return certificate(terms, denominator, log_term) * kOutward;
  }

  std::int64_t tokens_;
  int blocks_;
  const Positive16* odds_;
  float* weight_;
  std::uint32_t* active_;
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
#pragma unroll 1
    for (int h = 0; h < group; ++h) {
      const HeadState& state = ws.heads[first_head + h];
      if (!state.usable) continue;
      const float d = static_cast<float>(state.denominator);
      const float w = ws.weight[(first_head + h) * ws.token_stride + i];
      best = raise(best, fetch_worth(w, to_float(view.odds[i]), state.beta) / d / d);
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
#pragma unroll 4
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

// By the last block of a group: what its heads ask for, cut to the limit, and the report. Looks
// everything up anew: the search for a threshold leaves no register to keep it in.
VERKV_DEVICE void plan_group(VerifyShared& shared, const StepArguments& arguments,
                             std::int64_t pair) {
  const LayerView& layer = arguments.view.layer;
  const std::int64_t first_head = pair * layer.group;
  const std::int64_t slot = arguments.view.slots[pair / layer.kv_heads];
  const HeadView& view = arguments.view.heads[slot * layer.kv_heads + pair % layer.kv_heads];
  const StepWorkspace& ws = arguments.workspace;
  const std::int64_t words = (view.compressed + kBlockTokens - 1) / kBlockTokens * kLanes;
  std::uint32_t* mask = ws.fetched + pair * ws.mask_stride;
  int count = 0;
  for (std::int64_t i = threadIdx.x; i < words; i += kVerifyThreads) {
    std::uint32_t bits = 0;
    if (layer.mode != FetchMode::never) {
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

__global__ void __launch_bounds__(kVerifyThreads, kVerifyBlocks)
    plan_kernel(const StepArguments arguments) {
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
  const HeadView& view =
      step.heads[static_cast<std::int64_t>(slot) * layer.kv_heads + pair % layer.kv_heads];
  const Head head(arguments, view, query_head);
  const int lane = threadIdx.x % 32;

  float shift = minus_infinity();
  for (int s = lane; s < arguments.grid.score_splits; s += 32)
    shift = raise(shift, ws.slice_top[query_head * arguments.grid.score_splits + s]);
  shift = warp_top(shift);

  double weight = 0;
  double odds = 0;
  double denominator = head.to_weights(shared, shift, weight, odds);
  denominator = add_residents(shared, arguments, view, query_head, shift, denominator);
  const bool usable = denominator > 0 && denominator < __longlong_as_double(0x7ff0000000000000ll);
  // What is known goes out before a search needs the registers.
  HeadState& state = ws.heads[query_head];
  if (threadIdx.x == 0) {
    state.shift = shift;
    state.denominator = denominator;
    state.usable = usable ? 1 : 0;
    state.bound = 0;
    state.known = 0;
  }

  float beta = 0;
  std::int64_t planned = 0;
  const bool plans = view.compressed > 0 && layer.mode != FetchMode::never;
  std::uint32_t* wanted = ws.wanted + query_head * ws.mask_stride;
  const bool always = layer.mode == FetchMode::always;
  if (plans) {
    // What the rules other than the certificate ask for; nothing where D is no number.
    FetchThreshold threshold{infinity(), 0};
    float floor = infinity();
    if (usable) {
      double worth = layer.risk * denominator * denominator;
      const double most = static_cast<double>(3.402823466e+38f);
      if (most < worth) worth = most;
      threshold.key = static_cast<float>(worth);
      if (layer.probability != kOff) floor = static_cast<float>(layer.probability * denominator);
    }
    float ruled_out = ruled_out_below(threshold.key);
    const auto likely = [&](float w, float rho) {
      return (w > floor) | !is_ruled_out(w, rho, ruled_out);
    };
    const auto wants_key = [&](float w, float key) { return (w > floor) | (key > threshold.key); };
    const auto wants = [&](float w, float rho) {
      return w > 0 && wants_key(w, fetch_worth(w, rho, beta));
    };
    const bool certifies = !always && layer.epsilon != kOff;
    const bool marks = !always && !certifies;
    if (!always || layer.limit_tokens > 0)
      beta = head.solve_beta(shared, weight, odds, marks ? wanted : nullptr, likely);
    bool looks_at_all = always || (marks && !(beta > 0));
    if (certifies) {
      double bound = head.certificate_and_select(shared, beta, denominator, layer.log_term, wanted,
                                                 wants_key, planned);
      if (!usable) bound = __longlong_as_double(0x7ff0000000000000ll);
      if (threadIdx.x == 0) {
        state.bound = bound;
        state.known = 1;
      }
      if (usable && !(bound <= layer.epsilon)) {
        ThresholdSearch search(shared, head.weights(), head.all_odds(),
                               ws.plan_index + query_head * ws.token_stride,
                               ws.active + query_head * ws.mask_stride, beta, denominator,
                               layer.log_term, layer.epsilon / kOutward);
        const FetchThreshold found = search.run(head.tokens());
        if (!(threshold.key < found.key)) {
          threshold = found;
          ruled_out = ruled_out_below(found.key);
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
  }
  if (threadIdx.x == 0) {
    state.planned = planned;
    state.beta = beta;
  }

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
  plan_group(shared, arguments, pair);
}

__global__ void __launch_bounds__(kVerifyThreads, kVerifyBlocks)
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
    const Head head(arguments, view, query_head);
    const double denominator = state.denominator;
    double weight = 0;
    double odds = 0;
    head.first_sums(shared, ws.fetched + pair * ws.mask_stride, weight, odds);
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
