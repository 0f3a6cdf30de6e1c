// beta: Newton's iteration in double (the host formula), and one round of sums over 4 query heads
// (the kernel).
#include <verkv/shrinkage.hpp>

#include "support.hpp"

namespace {

using namespace verkv;
using namespace verkv::bench;

void newton(benchmark::State& state, const StageData* data) {
  std::vector<float> rho;
  for (std::int64_t i = 0; i < data->tokens; ++i) rho.push_back(to_float(data->odds[at(i)]));
  int rounds = 0;
  for (auto _ : state) {
    const Shrinkage solved = solve_shrinkage(data->head_weight(0), std::span<const float>(rho));
    benchmark::DoNotOptimize(solved.beta);
    rounds = solved.rounds;
  }
  count_tokens(state, data->tokens, 8.0 * rounds);
  state.counters["rounds"] = rounds;
}

void beta_sums(benchmark::State& state, const cpu::Kernels* kernels, const StageData* data) {
  for (auto _ : state) {
    double weight[cpu::kMaxHeads] = {};
    double odds[cpu::kMaxHeads] = {};
    kernels->beta_sums(data->weight.data(), data->tokens, data->odds.data(), data->tokens,
                       data->heads, data->beta.data(), weight, odds);
    benchmark::DoNotOptimize(weight);
  }
  count_tokens(state, data->tokens, data->heads * 4.0 + 2);
}

}  // namespace

int main(int argc, char** argv) {
  const StageData data;
  benchmark::RegisterBenchmark("newton_one_head", newton, &data);
  for (const cpu::Kernels* kernels : both_kernels()) {
    benchmark::RegisterBenchmark((std::string("beta_sums/") + kernels->name).c_str(), beta_sums,
                                 kernels, &data);
  }
  return run_benchmarks(argc, argv);
}
