// The threshold of Eq. 10 by a block of threads: the search of src/cpu/fetch_search.cpp, step by
// step. The arrays of the CPU are a list of places here, from which weight, odds and worth of an
// entry follow. Lanes and blocks are by index in the list, which is compacted where the CPU's
// arrays are, so that the sums are equal.
#ifndef VERKV_CUDA_SEARCH_CUH
#define VERKV_CUDA_SEARCH_CUH

#include <cstdint>
#include <span>

#include <verkv/certificate.hpp>
#include <verkv/fetch_plan.hpp>
#include <verkv/shrinkage.hpp>

#include "ranks.cuh"
#include "sums.cuh"
#include "terms.cuh"
#include "tuning.hpp"

namespace verkv::cuda {

class ThresholdSearch {
 public:
  VERKV_DEVICE ThresholdSearch(HeadShared& shared, const float* weight, const Positive16* odds,
                               std::uint32_t* index, std::uint32_t* active, float beta_all,
                               double denominator, double log_term, double target)
      : shared_(shared), weight_(weight), odds_(odds), index_(index), beta_high_(beta_all) {
    if (threadIdx.x == 0) {
      shared.search = {denominator, log_term, target, active, {}, beta_all};
    }
    __syncthreads();
  }

  // All threads call and get the result.
  VERKV_DEVICE FetchThreshold run(std::int64_t tokens) {
    start(tokens);
    std::int64_t open = count_;
    for (bool first = true; open > kFew; first = false) {
      const float pivot = choose_pivot(open, first);
      if (!(pivot > good_ && pivot < bad_)) break;  // all open worths are equal
      narrow(pivot);
      open = compact();
    }
    return finish(open);
  }

 private:
  static constexpr std::int64_t kFew = kSearchFew;
  static constexpr int kSamples = kSearchSample;

  struct Entry {
    float weight;
    float odds;
    float quotient;  // weight / odds, where the worth needs it
    float worth;
  };

  VERKV_DEVICE Entry entry(std::int64_t i) const {
    const std::uint32_t place = index_[i];
    const float w = weight_[place];
    const float rho = to_float(odds_[place]);
    const float t = quotient(w, rho);
    return {w, rho, t, tail_of(w, rho, shared_.search.beta_all, t).worth};
  }

  VERKV_DEVICE bool open(float worth) const { return worth > good_ && worth <= bad_; }

  VERKV_DEVICE int blocks() const {
    return static_cast<int>((count_ + kBlockTokens - 1) / kBlockTokens);
  }

  // Keeps, in order, the entries for which keep(i) holds. A barrier must follow.
  template <class Place, class Keep>
  VERKV_DEVICE void keep_in_order(std::int64_t count, Place&& place, Keep&& keep) {
    constexpr int kOwn = kEntriesPerThread;
    std::int64_t kept = 0;
    for (std::int64_t first = 0; first < count; first += kOwn * kHeadThreads) {
      const std::int64_t own = first + kOwn * threadIdx.x;
      std::uint32_t at[kOwn];
      bool stays[kOwn];
      int stay = 0;
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        stays[j] = own + j < count && keep(own + j);
        at[j] = stays[j] ? place(own + j) : 0;
        stay += stays[j];
      }
      int total = 0;
      std::uint32_t* to = index_ + (kept + rank_by_count(shared_, stay, total));
      // Every entry of this round has been read, and those of later rounds lie behind.
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        if (stays[j]) *to++ = at[j];
      }
      kept += total;
    }
    count_ = kept;
  }

  // plan_start.
  VERKV_DEVICE void start(std::int64_t tokens) {
    keep_in_order(
        tokens, [](std::int64_t i) { return static_cast<std::uint32_t>(i); },
        [this](std::int64_t i) { return weight_[i] > 0; });
    __syncthreads();
  }

  VERKV_DEVICE void narrow(float threshold) {
    float beta = 0;
    const double bound = evaluate(threshold, beta);
    if (bound <= shared_.search.target) {
      good_ = threshold;
      beta_low_ = beta;
    } else {
      bad_ = threshold;
      beta_high_ = beta;
    }
  }

  // From an evenly spaced sample of the open entries: first_pivot, then the median.
  VERKV_DEVICE float choose_pivot(std::int64_t open_count, bool first) {
    if (threadIdx.x < 32) {
      const int found = sort_sample();
      if (threadIdx.x == 0) {
        float pivot = minus_infinity();
        if (found > 0) {
          const SearchShared& search = shared_.search;
          const std::span<const float> sorted(shared_.sorted, static_cast<std::size_t>(found));
          pivot = first ? first_pivot(sorted, open_count, search.target, search.denominator,
                                      search.log_term)
                        : shared_.sorted[found / 2];
          if (!(pivot < bad_)) pivot = minus_infinity();
        }
        shared_.pivot = pivot;
      }
    }
    __syncthreads();
    const float pivot = shared_.pivot;
    if (pivot > minus_infinity()) return pivot;
    // The sample missed every open entry, or saw only the ties at bad_: look at all of them.
    float below = good_;
    for (std::int64_t i = threadIdx.x; i < count_; i += kHeadThreads) {
      const float worth = entry(i).worth;
      if (open(worth) && worth < bad_) below = raise(below, worth);
    }
    below = warp_top(below);
    if (threadIdx.x % 32 == 0) shared_.warp_top[0][threadIdx.x / 32] = below;
    __syncthreads();
    return top_of_warps(shared_, 0);  // not written again before the next sums
  }

  // The worth of kSamples open entries, or fewer, ascending in shared_.sorted, by one warp; all of
  // it gets their number.
  VERKV_DEVICE int sort_sample() {
    // At most 46 places are looked at: fewer than two a lane.
    static_assert(kSamples < 32);
    const int lane = threadIdx.x;
    const std::int64_t step = max(std::int64_t{1}, count_ / kSamples);
    int found = 0;
    for (int round = 0; round < 2; ++round) {
      const std::int64_t i = (lane + 32 * round) * step;
      float worth = 0;
      bool hit = false;
      if (i < count_) {
        worth = entry(i).worth;
        hit = open(worth);
      }
      const unsigned hits = __ballot_sync(kWholeWarp, hit);
      const int rank = found + __popc(hits & ((1u << lane) - 1));
      if (hit && rank < kSamples) shared_.sample[rank] = worth;
      found += __popc(hits);
    }
    found = min(found, kSamples);
    __syncwarp();
    if (lane < found) {
      const float own = shared_.sample[lane];
      int rank = 0;
      for (int j = 0; j < found; ++j) {
        const float other = shared_.sample[j];
        rank += other < own || (other == own && j < lane);
      }
      shared_.sorted[rank] = own;
    }
    __syncwarp();
    return found;
  }

  VERKV_DEVICE double bound_of(const TailTerms& terms) const {
    return outward_certificate(terms, shared_.search.denominator, shared_.search.log_term);
  }

  // add(lane of the thread, bit of the row, entry) for the thread's entries of a block, ascending.
  template <class Add>
  VERKV_DEVICE void for_entries(int block, int part, Add&& add) const {
    const std::int64_t first =
        std::int64_t{block} * kBlockTokens + part * static_cast<int>(kLanesPerThread);
    const int left = static_cast<int>(min(std::int64_t{kBlockTokens}, count_ - first));
    std::uint32_t bit = 1;
#pragma unroll 1
    for (int i = 0; i < left && bit != 0; i += kLanes, bit <<= 1) {
#pragma unroll
      for (std::size_t j = 0; j < kLanesPerThread; ++j) {
        if (i + static_cast<int>(j) < left) add(j, bit, entry(first + i + j));
      }
    }
  }

  // Bits of the list in lane layout, those of a thread.
  VERKV_DEVICE std::uint32_t* active(std::int64_t block, int part) const {
    return shared_.search.active + block * kLanes + part * static_cast<int>(kLanesPerThread);
  }

  // The first round of beta, from `at`, over the worths up to the threshold: those that count are
  // the ones for the next round to look at, as in HeadPasses::solve_beta.
  VERKV_DEVICE void first_sums(int block, int part, float threshold, float at,
                               float (&sum)[2][kLanesPerThread]) const {
    std::uint32_t kept[kLanesPerThread] = {};
    for_entries(block, part, [&](std::size_t j, std::uint32_t bit, const Entry& e) {
      if ((e.worth <= threshold) & (e.weight > at * e.odds)) {
        sum[0][j] += e.weight;
        sum[1][j] += e.odds;
        kept[j] |= bit;
      }
    });
#pragma unroll
    for (std::size_t j = 0; j < kLanesPerThread; ++j) active(block, part)[j] = kept[j];
  }

  VERKV_DEVICE void active_sums(int block, int part, float at,
                                float (&sum)[2][kLanesPerThread]) const {
    std::uint32_t* words = active(block, part);
    const std::uint32_t* index =
        index_ + std::int64_t{block} * kBlockTokens + part * static_cast<int>(kLanesPerThread);
#pragma unroll
    for (std::size_t j = 0; j < kLanesPerThread; ++j) {
      std::uint32_t kept = 0;
      for (std::uint32_t left = words[j]; left != 0;) {
        const std::uint32_t lowest = left & -left;
        left ^= lowest;
        const int row = 31 - __clz(static_cast<int>(lowest));
        const std::uint32_t place = index[row * kLanes + static_cast<int>(j)];
        const float w = weight_[place];
        const float rho = to_float(odds_[place]);
        if (w > at * rho) {
          sum[0][j] += w;
          sum[1][j] += rho;
          kept |= lowest;
        }
      }
      words[j] = kept;
    }
  }

  VERKV_DEVICE double evaluate(float threshold, float& out_beta) {
    float unused[1];
    bool first = true;
    const float beta = newton_beta(beta_low_, [&](float at) -> BetaSums {
      double sums[2];
      lane_sums<0>(
          shared_, blocks(),
          [&](int block, int part, float(&sum)[2][kLanesPerThread], float(&)[1]) {
            if (first) {
              first_sums(block, part, threshold, at, sum);
            } else {
              active_sums(block, part, at, sum);
            }
          },
          sums, unused);
      first = false;
      return {sums[0] + shared_.search.settled.above_weight,
              sums[1] + shared_.search.settled.above_odds};
    });
    double variance[1];
    float jump[1];
    lane_sums<1>(
        shared_, blocks(),
        [&](int block, int part, float(&sum)[1][kLanesPerThread], float(&top)[1]) {
          for_entries(block, part, [&](std::size_t j, std::uint32_t, const Entry& e) {
            const bool in = e.worth <= threshold;
            const Tail tail = tail_of(e.weight, e.odds, beta, e.quotient);
            sum[0][j] += in ? tail.variance : 0.0f;
            if (in) top[0] = fmaxf(top[0], tail.jump);
          });
        },
        variance, jump);
    out_beta = beta;
    return bound_of(joined({static_cast<double>(beta), variance[0], static_cast<double>(jump[0])},
                           shared_.search.settled));
  }

  // plan_compact; returns how many of the entries kept are open.
  VERKV_DEVICE std::int64_t compact() {
    const auto settles_in = [this](const Entry& e) {
      return e.worth <= good_ && e.weight > beta_high_ * e.odds;
    };
    const auto settles_out = [this](const Entry& e) {
      return e.worth <= good_ && !(e.weight > beta_high_ * e.odds) &&
             e.weight <= beta_low_ * e.odds;
    };
    double sums[3];
    float tops[2];
    int open_found = 0;
    lane_sums<2>(
        shared_, blocks(),
        [&](int block, int part, float(&sum)[3][kLanesPerThread], float(&top)[2]) {
          std::uint32_t kept[kLanesPerThread] = {};
          for_entries(block, part, [&](std::size_t j, std::uint32_t bit, const Entry& e) {
            const bool in = settles_in(e);
            const bool out = settles_out(e);
            sum[0][j] += in ? e.weight : 0.0f;
            sum[1][j] += in ? e.odds : 0.0f;
            const Tail tail = tail_of(e.weight, e.odds, beta_low_, e.quotient);
            sum[2][j] += out ? tail.variance : 0.0f;
            if (in) top[0] = fmaxf(top[0], jump_odds(e.odds));
            if (out) top[1] = fmaxf(top[1], tail.jump);
            if (!(in | out | (e.worth > bad_))) kept[j] |= bit;
            open_found += open(e.worth);
          });
#pragma unroll
          for (std::size_t j = 0; j < kLanesPerThread; ++j) active(block, part)[j] = kept[j];
        },
        sums, tops);
    if (threadIdx.x == 0) {  // read again after the barriers below
      SettledTerms& settled = shared_.search.settled;
      settled.above_largest_odds = fmaxf(settled.above_largest_odds, tops[0]);
      settled.below_jump = fmaxf(settled.below_jump, tops[1]);
      settled.above_weight += sums[0];
      settled.above_odds += sums[1];
      settled.below_variance += sums[2];
    }
    keep_in_order(
        count_, [this](std::int64_t i) { return index_[i]; },
        [&](std::int64_t i) {
          const std::uint32_t word = *(active(i / kBlockTokens, 0) + i % kLanes);
          return (word >> (i % kBlockTokens / kLanes) & 1u) != 0;
        });
    return count_in_block(shared_, open_found);
  }

  // Distinct open worths, ascending, in shared_.sorted; all threads get their number.
  VERKV_DEVICE int sort_open_worths(std::int64_t open_count) {
    if (open_count > kFew) {  // all equal bad_: there is none between it and good_
      if (threadIdx.x == 0) shared_.sorted[0] = bad_;
      __syncthreads();
      return 1;
    }
    if (threadIdx.x == 0) shared_.distinct = 0;
    __syncthreads();
    for (std::int64_t i = threadIdx.x; i < count_; i += kHeadThreads) {
      const float worth = entry(i).worth;
      if (open(worth)) shared_.sample[atomicAdd(&shared_.distinct, 1)] = worth;
    }
    __syncthreads();
    const int n = shared_.distinct;
    __syncthreads();
    if (threadIdx.x == 0) shared_.distinct = 0;
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < n) {
      const float own = shared_.sample[threadIdx.x];
      bool first = true;
      int rank = 0;
      for (int j = 0; j < n; ++j) {
        const float other = shared_.sample[j];
        if (other == own && j < static_cast<int>(threadIdx.x)) first = false;
        if (!(other < own)) continue;
        bool repeated = false;
        for (int k = 0; k < j; ++k) repeated = repeated || shared_.sample[k] == other;
        rank += !repeated;
      }
      if (first) {
        shared_.sorted[rank] = own;
        atomicAdd(&shared_.distinct, 1);
      }
    }
    __syncthreads();
    return shared_.distinct;
  }

  VERKV_DEVICE FetchThreshold finish(std::int64_t open_count) {
    const int distinct = sort_open_worths(open_count);
    // Only where rounding makes two evaluations of one set disagree at the border.
    if (distinct == 0) return {good_, 0};
    int low = 0;
    int tied = distinct - 1;
    while (low < tied) {
      const int middle = low + (tied - low) / 2;
      const float worth = shared_.sorted[middle];
      narrow(worth);
      if (good_ == worth) {
        low = middle + 1;
      } else {
        tied = middle;
      }
    }
    FetchThreshold result;
    result.worth = good_;
    bad_ = shared_.sorted[tied];
    // Ties are rare, and their sums are in order of the list: one thread.
    if (threadIdx.x == 0) shared_.ties = split_ties(shared_.left);
    __syncthreads();
    const std::int64_t good = shared_.left;
    if (shared_.ties > 1 && good < shared_.ties) {
      result.worth = bad_;
      result.ties = good;
    }
    return result;
  }

  // Returns how many entries have the worth bad_; out_good: how many of them must go.
  VERKV_DEVICE std::int64_t split_ties(std::int64_t& out_good) {
    std::int64_t ties = 0;
    for (std::int64_t i = 0; i < count_; ++i) {
      if (entry(i).worth != bad_) continue;
      const std::uint32_t moved = index_[i];
      index_[i] = index_[ties];
      index_[ties] = moved;
      ++ties;
    }
    std::int64_t bad = 0;
    std::int64_t good = ties;
    while (ties > 1 && good - bad > 1) {
      const std::int64_t middle = bad + (good - bad) / 2;
      if (bound_without_ties(middle, ties) <= shared_.search.target) {
        good = middle;
      } else {
        bad = middle;
      }
    }
    out_good = good;
    return ties;
  }

  VERKV_DEVICE double bound_without_ties(std::int64_t k, std::int64_t ties) const {
    const auto kept = [&](std::int64_t i, const Entry& e) { return i < ties || e.worth <= good_; };
    const float solved = newton_beta(beta_low_, [&](float beta) {
      BetaSums sums{shared_.search.settled.above_weight, shared_.search.settled.above_odds};
      for (std::int64_t i = k; i < count_; ++i) {
        const Entry e = entry(i);
        if (!kept(i, e) || !(e.weight > beta * e.odds)) continue;
        sums.weight += static_cast<double>(e.weight);
        sums.odds += static_cast<double>(e.odds);
      }
      return sums;
    });
    TailTerms terms = joined({static_cast<double>(solved), 0, 0}, shared_.search.settled);
    for (std::int64_t i = k; i < count_; ++i) {
      const Entry e = entry(i);
      if (!kept(i, e)) continue;
      terms.variance += static_cast<double>(variance_term(e.weight, e.odds, solved));
      const double own = static_cast<double>(jump_term(e.weight, e.odds, solved));
      if (terms.max_jump < own) terms.max_jump = own;
    }
    return bound_of(terms);
  }

  HeadShared& shared_;
  const float* weight_;
  const Positive16* odds_;
  std::uint32_t* index_;
  std::int64_t count_ = 0;
  // Keeping the worths <= good_ certifies (nothing at first), keeping those <= bad_ does not.
  float good_ = -1;
  float bad_ = kLargestFloat;
  float beta_low_ = 0;
  float beta_high_;
};

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_SEARCH_CUH
