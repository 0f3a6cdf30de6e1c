// The draw of PoissonComp (one Philox block a token), the spread draw and its order, and the top-k
// selection of the baselines. Once at compression.
#include <numeric>

#include <verkv/sample.hpp>

#include "compression.hpp"

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

void spread_draw(benchmark::State& state) {
  const std::int64_t tokens = state.range(0);
  const DrawId key{1, 2, 3, 4};
  std::vector<std::uint32_t> order(at(tokens));
  std::iota(order.begin(), order.end(), 0u);
  const std::vector<double> r(order.size(), 1.0 / 16);
  std::vector<std::uint8_t> kept(order.size());
  for (auto _ : state) {
    pivotal_draw(key, order, r, kept);
    benchmark::ClobberMemory();
  }
  count_tokens(state, tokens, sizeof(Positive16));
}
BENCHMARK(spread_draw)->Arg(32768);

// A prompt, and a chunk of decode.
void order(benchmark::State& state) {
  const std::int64_t tokens = state.range(0);
  constexpr int kDim = 128;
  std::mt19937_64 engine(1);
  std::normal_distribution<float> normal;
  std::vector<Half> rows(at(tokens * 2 * kDim));
  for (Half& x : rows) x = to_half(normal(engine));
  const Rows keys{rows.data(), DType::f16, 2 * kDim, kDim};
  const Rows values{rows.data() + kDim, DType::f16, 2 * kDim, kDim};
  const std::vector<Positive16> odds(at(tokens), stored_odds(1.0 / 16));
  OrderDirections directions;
  directions.key = order_directions(keys, odds, nullptr, kOrderKeys, 1);
  directions.value = order_directions(values, odds, nullptr, kOrderValues, kOrderValueWeight);
  std::vector<std::uint32_t> position(at(tokens));
  for (auto _ : state) {
    std::iota(position.begin(), position.end(), 0u);
    spread_order(directions, keys, values, position);
    benchmark::ClobberMemory();
  }
  count_tokens(state, tokens, 4 * kDim);
}
BENCHMARK(order)->Arg(32768)->Arg(128);

// Directions of the values, which come on top of the sketch's basis.
void value_directions(benchmark::State& state) {
  constexpr int kDim = 128;
  const std::int64_t tokens = state.range(0);
  std::mt19937_64 engine(1);
  std::normal_distribution<float> normal;
  std::vector<Half> rows(at(tokens * kDim));
  for (Half& x : rows) x = to_half(normal(engine));
  const std::vector<Positive16> odds(at(tokens), stored_odds(1.0 / 16));
  for (auto _ : state) {
    benchmark::DoNotOptimize(order_directions({rows.data(), DType::f16, kDim, kDim}, odds, nullptr,
                                              kOrderValues, kOrderValueWeight));
  }
  count_tokens(state, tokens, 2 * kDim);
}
BENCHMARK(value_directions)->Arg(32768);

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
