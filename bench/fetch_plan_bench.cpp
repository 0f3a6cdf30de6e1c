// What to fetch: the exact gains of Eq. 9 (one head, double), the threshold search on the order of
// worth (one head), and the selection by threshold over 4 query heads.
#include <verkv/certificate.hpp>
#include <verkv/fetch_plan.hpp>

#include "cpu/fetch_search.hpp"
#include "support.hpp"

namespace {

using namespace verkv;
using namespace verkv::bench;

void gains(benchmark::State& state, const StageData* data) {
  std::vector<double> w;
  std::vector<double> rho;
  for (std::int64_t i = 0; i < data->tokens; ++i) {
    if (!(data->weight[at(i)] > 0)) continue;
    w.push_back(static_cast<double>(data->weight[at(i)]));
    rho.push_back(static_cast<double>(to_float(data->odds[at(i)])));
  }
  std::vector<double> scratch(kGainScratchDoubles * (w.size() + 1));
  std::vector<std::uint32_t> order(w.size());
  std::vector<double> gain(w.size());
  for (auto _ : state) {
    exact_gains(w, rho, data->denominator[0], log_two_over(0.1), scratch, order, gain);
    benchmark::ClobberMemory();
  }
  count_tokens(state, data->tokens, 2 * sizeof(double));
}

void search(benchmark::State& state, const cpu::Kernels* kernels, const StageData* data,
            double target) {
  const std::size_t room = at(data->tokens + kLanes);
  cpu::AlignedVector<float> weight(room), odds(room), worth(room);
  std::vector<std::uint32_t> position(room);
  for (auto _ : state) {
    cpu::PlanArrays plan{weight.data(), odds.data(), worth.data(), position.data(), 0};
    kernels->plan_start(data->weight.data(), data->odds.data(), 0, data->tokens, data->beta[0],
                        plan);
    benchmark::DoNotOptimize(cpu::search_fetch_threshold(
        *kernels, plan, data->beta[0], data->denominator[0], log_two_over(0.1), target));
  }
  count_tokens(state, data->tokens, 4 + 2);
}

void select_tokens(benchmark::State& state, const cpu::Kernels* kernels, const StageData* data) {
  std::vector<float> price;
  for (const double d : data->denominator) price.push_back(static_cast<float>(1e-4 * d * d));
  const std::vector<float> none(price.size(), std::numeric_limits<float>::infinity());
  std::vector<std::uint32_t> out(at(data->tokens + kLanes));
  std::int64_t found = 0;
  for (auto _ : state) {
    std::int64_t planned[cpu::kMaxHeads] = {};
    found = kernels->select_tokens(data->weight.data(), data->tokens, data->odds.data(), 0,
                                   data->tokens, data->heads, data->beta.data(), price.data(),
                                   none.data(), out.data(), planned);
    benchmark::DoNotOptimize(planned);
  }
  count_tokens(state, data->tokens, data->heads * 4.0 + 2);
  state.counters["found"] = static_cast<double>(found);
}

}  // namespace

int main(int argc, char** argv) {
  const StageData data;
  benchmark::RegisterBenchmark("exact_gains_one_head", gains, &data);
  for (const cpu::Kernels* kernels : both_kernels()) {
    const std::string name = std::string("/") + kernels->name;
    benchmark::RegisterBenchmark(("search_one_head/eps:0.05" + name).c_str(), search, kernels,
                                 &data, 0.05);
    benchmark::RegisterBenchmark(("search_one_head/eps:0.1" + name).c_str(), search, kernels, &data,
                                 0.1);
    benchmark::RegisterBenchmark(("select_tokens/risk:1e-4" + name).c_str(), select_tokens, kernels,
                                 &data);
  }
  return run_benchmarks(argc, argv);
}
