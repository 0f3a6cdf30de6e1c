// The draw of PoissonComp (one Philox block a token) and the top-k selection of the baselines. Once
// at compression.
#include <verkv/sample.hpp>

#include "support.hpp"

namespace {

using namespace verkv;
using namespace verkv::bench;

void draw(benchmark::State& state) {
  const std::int64_t tokens = state.range(0);
  const DrawId key{1, 2, 3, 4};
  for (auto _ : state) {
    std::int64_t kept = 0;
    for (std::int64_t i = 0; i < tokens; ++i) kept += drawn(key, at(i), 1.0 / 16);
    benchmark::DoNotOptimize(kept);
  }
  count_tokens(state, tokens, sizeof(Positive16));
}
BENCHMARK(draw)->Arg(32768);

void top_k(benchmark::State& state) {
  const std::int64_t tokens = state.range(0);
  std::mt19937_64 engine(1);
  std::normal_distribution<float> normal;
  std::vector<float> score(at(tokens));
  for (float& x : score) x = normal(engine);
  std::vector<std::uint32_t> index(score.size());
  std::vector<std::uint8_t> kept(score.size());
  for (auto _ : state) {
    select_top_k(std::span<const float>(score), score.size() / 16, std::span(index),
                 std::span(kept));
    benchmark::ClobberMemory();
  }
  count_tokens(state, tokens, sizeof(float));
}
BENCHMARK(top_k)->Arg(32768);

}  // namespace

int main(int argc, char** argv) { return verkv::bench::run_benchmarks(argc, argv); }
