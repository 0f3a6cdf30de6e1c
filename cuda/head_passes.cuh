// The passes of a block of threads over the compressed tokens of one query head: weights, beta,
// certificate and the choice of tokens.
#ifndef VERKV_CUDA_HEAD_PASSES_CUH
#define VERKV_CUDA_HEAD_PASSES_CUH

#include <cstdint>
#include <type_traits>

#include <verkv/attention.hpp>
#include <verkv/certificate.hpp>
#include <verkv/fetch_plan.hpp>
#include <verkv/shrinkage.hpp>

#include "masks.cuh"
#include "ranks.cuh"
#include "search.cuh"
#include "sums.cuh"
#include "terms.cuh"
#include "tuning.hpp"

namespace verkv::cuda {

// A thread's tokens of a row of 16.
struct TokenRow {
  float weight[kLanesPerThread];
  float odds[kLanesPerThread];
};

// One query head of a row, and the passes over its tokens. A word of a mask belongs to one thread
// in all of them.
class HeadPasses {
 public:
  VERKV_DEVICE HeadPasses(const StepArguments& arguments, const HeadView& view,
                          std::int64_t query_head)
      : tokens_(view.compressed),
        blocks_(static_cast<int>((view.compressed + kBlockTokens - 1) / kBlockTokens)),
        odds_(view.odds),
        weight_(arguments.workspace.weight + query_head * arguments.workspace.token_stride),
        active_(arguments.workspace.active + query_head * arguments.workspace.mask_stride) {}

  // Logits to weights. Returns D over L; out_weight and out_odds: the first round of beta.
  // Dialect of verkv/attention.hpp: weight_exp, without the cut above.
  VERKV_DEVICE double to_weights(HeadShared& shared, float shift, double& out_weight,
                                 double& out_odds) const {
    double sums[2];
    float no_number[1];
    lane_sums<1>(
        shared, blocks_,
        [&](int block, int part, float(&sum)[2][kLanesPerThread], float(&nan)[1]) {
          for_rows(block, part, [&](int, PerLane<float>* at, const TokenRow& row) {
            PerLane<float> w;
#pragma unroll
            for (std::size_t j = 0; j < kLanesPerThread; ++j) {
              // Never above 0: the shift is the largest of these logits, or more.
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
    return no_number[0] > 0 ? no_double() : sums[0];
  }

  // The first round of beta over what is not fetched. Fetched tokens get the weight 0 on the way.
  VERKV_DEVICE void first_sums(HeadShared& shared, const std::uint32_t* fetched, double& out_weight,
                               double& out_odds) const {
    double sums[2];
    float unused[1];
    lane_sums<0>(
        shared, blocks_,
        [&](int block, int part, float(&sum)[2][kLanesPerThread], float(&)[1]) {
          float* weight = weight_ + first_of(block, part);
          each_bit(load_mask(fetched, block, part), [&](std::size_t j, unsigned k) {
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
  // Dialect of verkv/shrinkage.hpp: newton_beta, whose first sums are there; no sum is NaN.
  template <class Likely>
  VERKV_DEVICE float solve_beta(HeadShared& shared, double weight, double odds,
                                std::uint32_t* likely_mask, Likely&& likely) const {
    float beta = 0;
    for (int round = 0; round < kMostBetaRounds; ++round) {
      if (round > 0) {
        double sums[2];
        float unused[1];
        lane_sums<0>(
            shared, blocks_,
            [&](int block, int part, float(&sum)[2][kLanesPerThread], float(&)[1]) {
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
      const float next = static_cast<float>(beta_of_sums(weight, odds));
      if (!(next > beta)) break;
      beta = next;
    }
    return beta;
  }
  VERKV_DEVICE float solve_beta(HeadShared& shared, double weight, double odds) const {
    return solve_beta(shared, weight, odds, nullptr, [](float, float) { return false; });
  }

  // The certificate over all tokens that weigh something, enlarged outward.
  VERKV_DEVICE double certificate_at(HeadShared& shared, float beta, double denominator,
                                     double log_term) const {
    double variance[1];
    float jump[1];
    lane_sums<1>(
        shared, blocks_,
        [&](int block, int part, float(&sum)[1][kLanesPerThread], float(&top)[1]) {
          add_tails(block, part, beta, sum[0], top[0], [](std::size_t, int, float, float) {});
        },
        variance, jump);
    return bound_of(beta, variance[0], jump[0], denominator, log_term);
  }

  // The same, and on the way the bits of the tokens for which wants(weight, worth) holds;
  // out_count: how many.
  template <class Wants>
  VERKV_DEVICE double certificate_and_select(HeadShared& shared, float beta, double denominator,
                                             double log_term, std::uint32_t* mask, Wants&& wants,
                                             std::int64_t& out_count) const {
    double variance[1];
    float jump[1];
    int count = 0;
    lane_sums<1>(
        shared, blocks_,
        [&](int block, int part, float(&sum)[1][kLanesPerThread], float(&top)[1]) {
          MaskWords bits;
          add_tails(
              block, part, beta, sum[0], top[0],
              [&](std::size_t j, int row, float w, float worth) {
                if ((w > 0) & wants(w, worth)) bits.set(j, row);
              },
              bits);
          count += put_mask(mask, block, part, bits.word);
        },
        variance, jump);
    out_count = count_in_block(shared, count);
    return bound_of(beta, variance[0], jump[0], denominator, log_term);
  }

  // Sets the bits of the tokens for which wants(weight, odds) holds; returns how many.
  template <class Wants>
  VERKV_DEVICE std::int64_t select(HeadShared& shared, std::uint32_t* mask, Wants&& wants) const {
    int count = 0;
    for_words([&](int block, int part) {
      MaskWords bits;
      for_rows(
          block, part,
          [&](int row, const PerLane<float>*, const TokenRow& tokens) {
#pragma unroll
            for (std::size_t j = 0; j < kLanesPerThread; ++j) {
              if (wants(tokens.weight[j], tokens.odds[j])) bits.set(j, row);
            }
          },
          bits);
      count += put_mask(mask, block, part, bits.word);
    });
    return count_in_block(shared, count);
  }

  // Keeps the bits of the mask for which wants(weight, odds) holds; returns how many.
  template <class Wants>
  VERKV_DEVICE std::int64_t select_among(HeadShared& shared, std::uint32_t* mask,
                                         Wants&& wants) const {
    int count = 0;
    for_words([&](int block, int part) {
      const float* weight = weight_ + first_of(block, part);
      const Positive16* odds = odds_ + first_of(block, part);
      const auto kept = each_bit(load_mask(mask, block, part), [&](std::size_t j, unsigned k) {
        return wants(in_row(weight + j, k), to_float(in_row(odds + j, k)));
      });
      count += put_mask(mask, block, part, kept);
    });
    return count_in_block(shared, count);
  }

  // Adds the first `ties` tokens with exactly this worth to the mask; returns how many of them
  // `counts`.
  template <class Counts>
  VERKV_DEVICE std::int64_t select_ties(HeadShared& shared, std::uint32_t* mask, float beta,
                                        const FetchThreshold& threshold, Counts&& counts) const {
    std::int64_t before = 0;
    int counted = 0;
    for (std::int64_t first = 0; first < tokens_ && before < threshold.ties;
         first += kHeadThreads) {
      const std::int64_t i = first + threadIdx.x;
      const float w = i < tokens_ ? weight_[i] : 0.0f;
      const bool tied = w > 0 && fetch_worth(w, to_float(odds_[i]), beta) == threshold.worth;
      int total = 0;
      const int rank = rank_in_block(shared, tied, total);
      if (tied && before + rank < threshold.ties) {
        atomicOr(mask + mask_word(i), 1u << mask_row(i));
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
  VERKV_DEVICE static std::int64_t first_of(int block, int part) {
    return std::int64_t{block} * kBlockTokens + part * static_cast<int>(kLanesPerThread);
  }

  // visit(block, part) for the words of a thread, those that it has in lane_sums.
  template <class Visit>
  VERKV_DEVICE void for_words(Visit&& visit) const {
    for (int block = threadIdx.x / kLaneParts; block < blocks_; block += kHeadThreads / kLaneParts)
      visit(block, static_cast<int>(threadIdx.x % kLaneParts));
  }

  // The odds of a thread's tokens of a row, two to a word.
  struct alignas(kLanesPerThread * sizeof(Positive16)) OddsWords {
    std::uint32_t word[kLanesPerThread / 2];
  };

  VERKV_DEVICE static TokenRow row_of(const PerLane<float>& weight, const OddsWords& odds) {
    TokenRow row;
#pragma unroll
    for (std::size_t j = 0; j < kLanesPerThread; j += 2) {
      const std::uint32_t two = odds.word[j / 2];
      row.weight[j] = weight.lane[j];
      row.weight[j + 1] = weight.lane[j + 1];
      row.odds[j] = __uint_as_float((two & 0xffffu) << 15);
      row.odds[j + 1] = __uint_as_float(two >> 1 & 0x7fff8000u);
    }
    return row;
  }

  // visit(row % kRowsAtOnce, where the weights are, the row) for the thread's tokens of a block,
  // ascending, with odds of infinity behind the last token. Closes the masks after kRowsAtOnce
  // rows.
  template <class Visit, class... Masks>
  VERKV_DEVICE void for_rows(int block, int part, Visit&& visit, Masks&... masks) const {
    const std::int64_t first = first_of(block, part);
    auto* weight = reinterpret_cast<PerLane<float>*>(weight_ + first);
    const auto* odds = reinterpret_cast<const OddsWords*>(odds_ + first);
    const std::int64_t left = tokens_ - std::int64_t{block} * kBlockTokens;
    const int full = left < kBlockTokens ? static_cast<int>(left) / kLanes : kRowsPerBlock;
    int begin = 0;
    for (; begin + kRowsAtOnce <= full; begin += kRowsAtOnce) {
      PerLane<float> w[kRowsAtOnce];
      OddsWords rho[kRowsAtOnce];
#pragma unroll
      for (int k = 0; k < kRowsAtOnce; ++k) {
        w[k] = weight[(begin + k) * kLaneParts];
        rho[k] = odds[(begin + k) * kLaneParts];
      }
#pragma unroll
      for (int k = 0; k < kRowsAtOnce; ++k)
        visit(k, weight + (begin + k) * kLaneParts, row_of(w[k], rho[k]));
      (masks.close(begin), ...);
    }
    if (left < kBlockTokens) for_last_rows(first, left, begin, visit, masks...);
  }

  // The rest of for_rows in a block that is not full: rows from `begin` on.
  template <class Visit, class... Masks>
  VERKV_DEVICE void for_last_rows(std::int64_t first, std::int64_t left, int begin, Visit&& visit,
                                  Masks&... masks) const {
    auto* weight = reinterpret_cast<PerLane<float>*>(weight_ + first);
#pragma unroll 1
    for (; begin * kLanes < left; begin += kRowsAtOnce) {
#pragma unroll 1
      for (int k = 0; k < kRowsAtOnce && (begin + k) * kLanes < left; ++k) {
        TokenRow row;
#pragma unroll
        for (std::size_t j = 0; j < kLanesPerThread; ++j) {
          const std::int64_t i = first + (begin + k) * kLanes + j;
          row.weight[j] = i < tokens_ ? weight_[i] : 0.0f;
          row.odds[j] = i < tokens_ ? to_float(odds_[i]) : infinity();
        }
        visit(k, weight + (begin + k) * kLaneParts, row);
      }
      (masks.close(begin), ...);
    }
  }

  VERKV_DEVICE void positive_sums(int block, int part, float (&sum)[2][kLanesPerThread]) const {
#pragma unroll
    for (std::size_t j = 0; j < kLanesPerThread; ++j) sum[0][j] = sum[1][j] = 0;
    for_rows(block, part, [&](int, const PerLane<float>*, const TokenRow& row) {
#pragma unroll
      for (std::size_t j = 0; j < kLanesPerThread; ++j) {
        if (row.weight[j] > 0) {
          sum[0][j] += row.weight[j];
          sum[1][j] += row.odds[j];
        }
      }
    });
  }

  // Weights of 0 are not above beta * odds either.
  template <class Likely>
  VERKV_DEVICE void all_sums(int block, int part, float beta, float (&sum)[2][kLanesPerThread],
                             std::uint32_t* likely_mask, Likely&& likely) const {
    MaskWords active;
    MaskWords marked;
    for_rows(
        block, part,
        [&](int k, const PerLane<float>*, const TokenRow& row) {
#pragma unroll
          for (std::size_t j = 0; j < kLanesPerThread; ++j) {
            if (row.weight[j] > beta * row.odds[j]) {
              sum[0][j] += row.weight[j];
              sum[1][j] += row.odds[j];
              active.set(j, k);
            }
            if (likely(row.weight[j], row.odds[j])) marked.set(j, k);
          }
        },
        active, marked);
    put_mask(active_, block, part, active.word);
    if (likely_mask != nullptr) put_mask(likely_mask, block, part, marked.word);
  }

  VERKV_DEVICE void active_sums(int block, int part, float beta,
                                float (&sum)[2][kLanesPerThread]) const {
    const float* weight = weight_ + first_of(block, part);
    const Positive16* odds = odds_ + first_of(block, part);
    const PerLane<std::uint32_t> after =
        each_bit(load_mask(active_, block, part), [&](std::size_t j, unsigned k) {
          const float w = in_row(weight + j, k);
          const float rho = to_float(in_row(odds + j, k));
          const bool above = w > beta * rho;
          if (above) {
            sum[0][j] += w;
            sum[1][j] += rho;
          }
          return above;
        });
    put_mask(active_, block, part, after);
  }

  // Adds what the thread's tokens that weigh something have in the certificate, and calls
  // each(lane of the thread, row % kRowsAtOnce, weight, worth), which may set bits of the masks.
  template <class Each, class... Masks>
  VERKV_DEVICE void add_tails(int block, int part, float beta, float (&sum)[kLanesPerThread],
                              float& top, Each&& each, Masks&... masks) const {
    float jump = 0;
    std::uint32_t least = ~0u;
    const auto add_with = [&](auto&& quotient) {
      for_rows(
          block, part,
          [&](int k, const PerLane<float>*, const TokenRow& row) {
#pragma unroll
            for (std::size_t j = 0; j < kLanesPerThread; ++j) {
              const float w = row.weight[j];
              const Tail tail = tail_of(w, row.odds[j], beta, quotient(w, row.odds[j]));
              // Without a weight, the jump is 0 or no number, which fmaxf leaves out.
              sum[j] += w > 0 ? tail.variance : 0.0f;
              jump = fmaxf(jump, tail.jump);
              each(j, k, w, tail.worth);
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
    return outward_certificate(terms, denominator, log_term);
  }

  std::int64_t tokens_;
  int blocks_;
  const Positive16* odds_;
  float* weight_;
  std::uint32_t* active_;
};

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_HEAD_PASSES_CUH
