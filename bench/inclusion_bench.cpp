// Inclusion probabilities: the solution of Eq. 3 for one pool, then the stored odds of every token.
// Once at compression.
#include <verkv/inclusion.hpp>

#include "support.hpp"

namespace {

using namespace verkv;
using namespace verkv::bench;

std::vector<float> importance(std::int64_t tokens) {
  std::mt19937_64 engine(1);
  std::normal_distribution<float> normal;
  std::vector<float> tau(at(tokens));
  for (float& x : tau) x = std::exp(2 * normal(engine));
  return tau;
}

void solve(benchmark::State& state) {
  const std::vector<float> tau = importance(state.range(0));
  std::vector<float> scratch(tau.size());
  for (auto _ : state) {
    benchmark::DoNotOptimize(solve_inclusion(
        std::span<const float>(tau), static_cast<double>(tau.size()) / 16, std::span(scratch)));
  }
  count_tokens(state, state.range(0), sizeof(float));
}
BENCHMARK(solve)->Arg(4096)->Arg(32768)->Arg(131072);

void odds_of_all_tokens(benchmark::State& state) {
  const std::vector<float> tau = importance(state.range(0));
  std::vector<float> scratch(tau.size());
  std::vector<Positive16> odds(tau.size());
  const Inclusion inclusion = solve_inclusion(
      std::span<const float>(tau), static_cast<double>(tau.size()) / 16, std::span(scratch));
  for (auto _ : state) {
    for (std::size_t i = 0; i < tau.size(); ++i) {
      odds[i] = stored_odds(inclusion.probability(static_cast<double>(tau[i])));
    }
    benchmark::ClobberMemory();
  }
  count_tokens(state, state.range(0), sizeof(float));
}
BENCHMARK(odds_of_all_tokens)->Arg(32768);

}  // namespace

int main(int argc, char** argv) { return verkv::bench::run_benchmarks(argc, argv); }
