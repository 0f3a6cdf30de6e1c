// The dense attention that a step is measured against: online softmax over blocks that stay in the
// L2 cache between their two uses, all query heads of a group together, with the library's own
// kernels at the same instruction set.
#ifndef VERKV_BENCH_DENSE_HPP
#define VERKV_BENCH_DENSE_HPP

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "support.hpp"

namespace verkv::bench {

struct DenseHead {
  Rows keys;
  Rows values;
  std::int64_t tokens = 0;
  float scale = 1;
  int group = 1;
};

class DenseAttention {
 public:
  static constexpr std::int64_t kBlock = 512;

  explicit DenseAttention(const cpu::Kernels& kernels) : kernels_(kernels), no_odds_(at(kBlock)) {}

  // query [group][key dim]; output [group][value dim], lse [group].
  void run(const DenseHead& head, const float* query, float* output, float* lse) {
    constexpr int kMost = cpu::kMaxHeads;
    const std::int64_t stride = cpu::round_up(head.keys.dim, kLanes);
    query_.resize(at(kMost * stride));
    logit_.resize(at(kMost * kBlock));
    for (int first = 0; first < head.group; first += kMost) {
      const int heads = std::min(kMost, head.group - first);
      std::fill(query_.begin(), query_.end(), 0.0f);
      for (int h = 0; h < heads; ++h) {
        for (int j = 0; j < head.keys.dim; ++j) {
          query_[at(h * stride + j)] = head.scale * query[(first + h) * head.keys.dim + j];
        }
      }
      float* out = output + first * head.values.dim;
      std::fill(out, out + heads * head.values.dim, 0.0f);
      std::array<float, kMost> shift;
      std::array<double, kMost> sum{};
      shift.fill(-std::numeric_limits<float>::infinity());
      for (std::int64_t begin = 0; begin < head.tokens; begin += kBlock) {
        const std::int64_t count = std::min(kBlock, head.tokens - begin);
        const Rows keys = from(head.keys, begin);
        const Rows values = from(head.values, begin);
        kernels_.dot_rows(keys, nullptr, count, query_.data(), heads, stride, logit_.data(),
                          kBlock);
        for (int h = 0; h < heads; ++h) {
          const float top = std::max(shift[at(h)], largest(logit_.data() + h * kBlock, count));
          if (!(top > shift[at(h)])) continue;
          const float factor = std::exp(shift[at(h)] - top);
          for (int j = 0; j < head.values.dim; ++j) out[h * head.values.dim + j] *= factor;
          sum[at(h)] *= static_cast<double>(factor);
          shift[at(h)] = top;
        }
        kernels_.weights(logit_.data(), kBlock, no_odds_.data(), count, heads, shift.data(),
                         sum.data());
        kernels_.weighted_rows(values, nullptr, count, logit_.data(), heads, kBlock, out,
                               head.values.dim);
      }
      for (int h = 0; h < heads; ++h) {
        const float norm = static_cast<float>(1 / sum[at(h)]);
        for (int j = 0; j < head.values.dim; ++j) out[h * head.values.dim + j] *= norm;
        lse[first + h] = shift[at(h)] + static_cast<float>(std::log(sum[at(h)]));
      }
    }
  }

 private:
  static Rows from(const Rows& rows, std::int64_t begin) {
    Rows part = rows;
    part.data = static_cast<const std::byte*>(rows.data) +
                begin * rows.stride * static_cast<std::int64_t>(size_bytes(rows.type));
    return part;
  }

  // In lanes, which a compiler turns into vectors of any width.
  static float largest(const float* x, std::int64_t count) {
    std::array<float, kLanes> lane;
    lane.fill(-std::numeric_limits<float>::infinity());
    std::int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      for (int l = 0; l < kLanes; ++l)
        lane[at(l)] = x[i + l] > lane[at(l)] ? x[i + l] : lane[at(l)];
    }
    for (; i < count; ++i) lane[0] = std::max(lane[0], x[i]);
    return *std::max_element(lane.begin(), lane.end());
  }

  const cpu::Kernels& kernels_;
  std::vector<Positive16> no_odds_;
  cpu::AlignedVector<float> query_;
  cpu::AlignedVector<float> logit_;
};

}  // namespace verkv::bench

#endif  // VERKV_BENCH_DENSE_HPP
