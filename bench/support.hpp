// What the benchmarks of the CPU backend share: the data of the stages, and counters.
#ifndef VERKV_BENCH_SUPPORT_HPP
#define VERKV_BENCH_SUPPORT_HPP

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include <verkv/inclusion.hpp>
#include <verkv/shrinkage.hpp>
#include <verkv/sketch.hpp>
#include <verkv/types.hpp>

#include "cpu/head_store.hpp"
#include "cpu/kernels.hpp"
#include "synthetic.hpp"

namespace verkv::bench {

// Median of a copy; 0 where empty.
inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Pearson's correlation.
inline double correlation(std::span<const double> x, std::span<const double> y) {
  double sx = 0, sy = 0, xx = 0, yy = 0, xy = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    sx += x[i];
    sy += y[i];
    xx += x[i] * x[i];
    yy += y[i] * y[i];
    xy += x[i] * y[i];
  }
  const double n = static_cast<double>(x.size());
  return (n * xy - sx * sy) / std::sqrt((n * xx - sx * sx) * (n * yy - sy * sy));
}

// Elements as the storage type has them.
inline std::vector<std::byte> stored(std::span<const float> x, DType type) {
  std::vector<std::byte> bytes(x.size() * size_bytes(type));
  with_element(type, [&](auto element) {
    for (std::size_t i = 0; i < x.size(); ++i) {
      element = from_float<decltype(element)>(x[i]);
      std::memcpy(bytes.data() + i * sizeof element, &element, sizeof element);
    }
  });
  return bytes;
}

// Counters of a benchmark that handles `tokens` tokens an iteration and reads `bytes_per_token`
// bytes for each.
inline void count_tokens(benchmark::State& state, std::int64_t tokens, double bytes_per_token) {
  using benchmark::Counter;
  const double n = static_cast<double>(tokens);
  // In seconds; the console shows it with a prefix, for instance per_token=3.4ns.
  state.counters["per_token"] = Counter(n, Counter::kIsIterationInvariantRate | Counter::kInvert);
  state.counters["bytes_per_token"] = bytes_per_token;
  state.SetBytesProcessed(
      static_cast<std::int64_t>(static_cast<double>(state.iterations()) * n * bytes_per_token));
}

// What the stages between the logits and the fetch work on: a group of query heads over one KV
// head.
struct StageData {
  SyntheticCache cache;
  std::int64_t tokens;
  std::int64_t dim;
  int heads;
  std::vector<Positive16> odds;
  std::vector<Positive16> no_odds;  // zeros: every token takes part
  cpu::AlignedVector<float> query;  // [head][dim], scaled
  cpu::AlignedVector<float> logit;  // [head][token]
  cpu::AlignedVector<float> weight;
  std::vector<float> shift;
  std::vector<float> beta;
  std::vector<double> denominator;

  explicit StageData(const SyntheticShape& shape = {.tokens = 32768, .steps = 1})
      : cache(shape), tokens(shape.tokens), dim(shape.dim), heads(static_cast<int>(shape.group)) {
    std::vector<float> scratch(cache.importance.size());
    const Inclusion inclusion =
        solve_inclusion(std::span<const float>(cache.importance), static_cast<double>(tokens) / 16,
                        std::span(scratch));
    for (const float tau : cache.importance)
      odds.push_back(stored_odds(inclusion.probability(static_cast<double>(tau))));
    odds.resize(at(cpu::round_up(tokens, kLanes)));
    no_odds.resize(odds.size());
    const float scale = 1 / std::sqrt(static_cast<float>(dim));
    for (const float q : cache.queries) query.push_back(scale * q);
    logit.resize(at(heads * tokens));
    const cpu::Kernels& kernels = cpu::vector_kernels();
    const Rows keys{cache.keys.data(), DType::f32, dim, static_cast<int>(dim)};
    kernels.dot_rows(keys, nullptr, tokens, query.data(), heads, dim, logit.data(), tokens);
    for (int h = 0; h < heads; ++h) {
      shift.push_back(
          *std::max_element(logit.begin() + h * tokens, logit.begin() + (h + 1) * tokens));
    }
    weight = logit;
    denominator.resize(at(heads));
    kernels.weights(weight.data(), tokens, odds.data(), tokens, heads, shift.data(),
                    denominator.data());
    std::vector<float> rho;
    for (std::int64_t i = 0; i < tokens; ++i) rho.push_back(to_float(odds[at(i)]));
    for (int h = 0; h < heads; ++h) {
      beta.push_back(
          static_cast<float>(shrinkage_beta(head_weight(h), std::span<const float>(rho))));
      for (std::int64_t i = 0; i < tokens; ++i) {
        if (odds[at(i)].bits < kPositive16Infinity.bits) continue;
        denominator[at(h)] +=
            static_cast<double>(std::exp(logit[at(h * tokens + i)] - shift[at(h)]));
      }
    }
  }

  std::span<const float> head_weight(int h) const {
    return std::span<const float>(weight).subspan(at(h * tokens), at(tokens));
  }
};

// The scalar reference and the best vector code of this machine.
inline std::vector<const cpu::Kernels*> both_kernels() {
  return {&cpu::scalar_kernels(), &cpu::vector_kernels()};
}

// Runs what has been registered; the instruction set goes into the context of the JSON output.
inline int run_benchmarks(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::AddCustomContext("instruction_set", cpu::vector_kernels().name);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}

}  // namespace verkv::bench

#endif  // VERKV_BENCH_SUPPORT_HPP
