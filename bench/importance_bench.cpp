// Reductions of attention probabilities to importance scores. Once for a prompt.
#include <verkv/importance.hpp>

#include "support.hpp"

namespace {

using namespace verkv;
using namespace verkv::bench;

constexpr std::int64_t kTokens = 32768;

void moments(benchmark::State& state) {
  std::vector<float> probability(kTokens, 1.0f / kTokens);
  std::vector<float> largest(kTokens);
  std::vector<double> sum(kTokens), squares(kTokens);
  ProbabilityMoments moments{largest, sum, squares};
  for (auto _ : state) {
    moments.add(probability);
    benchmark::ClobberMemory();
  }
  count_tokens(state, kTokens, 4 + 4 + 8 + 8);
}
BENCHMARK(moments);

void snapkv(benchmark::State& state) {
  std::vector<float> sum(kTokens, 1.0f);
  std::vector<float> score(kTokens);
  for (auto _ : state) {
    snapkv_importance(std::span<const float>(sum), 7, std::span(score));
    benchmark::ClobberMemory();
  }
  count_tokens(state, kTokens, 4);
}
BENCHMARK(snapkv);

void key_norm(benchmark::State& state) {
  constexpr std::int64_t dim = 128;
  const std::vector<float> keys(1024 * dim, 1.0f);
  for (auto _ : state) {
    for (std::int64_t i = 0; i < 1024; ++i) {
      benchmark::DoNotOptimize(
          key_norm_importance(std::span<const float>(keys).subspan(at(i * dim), dim)));
    }
  }
  count_tokens(state, 1024, dim * 4);
}
BENCHMARK(key_norm);

}  // namespace

int main(int argc, char** argv) { return verkv::bench::run_benchmarks(argc, argv); }
