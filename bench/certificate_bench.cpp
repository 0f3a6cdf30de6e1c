// V and b of the certificate: in double over one head (the host formula) and over 4 query heads
// (the kernel).
#include <verkv/certificate.hpp>

#include "support.hpp"

namespace {

using namespace verkv;
using namespace verkv::bench;

void terms(benchmark::State& state, const StageData* data) {
  std::vector<float> rho;
  for (std::int64_t i = 0; i < data->tokens; ++i) rho.push_back(to_float(data->odds[at(i)]));
  const double log_term = log_two_over(0.1);
  for (auto _ : state) {
    const TailTerms t = tail_terms(data->head_weight(0), std::span<const float>(rho),
                                   static_cast<double>(data->beta[0]));
    benchmark::DoNotOptimize(certificate(t, data->denominator[0], log_term));
  }
  count_tokens(state, data->tokens, 2 * sizeof(float));
}

void tail_sums(benchmark::State& state, const cpu::Kernels* kernels, const StageData* data) {
  for (auto _ : state) {
    double variance[cpu::kMaxHeads] = {};
    float jump[cpu::kMaxHeads] = {};
    kernels->tail_sums(data->weight.data(), data->tokens, data->odds.data(), data->tokens,
                       data->heads, data->beta.data(), variance, jump);
    benchmark::DoNotOptimize(variance);
  }
  count_tokens(state, data->tokens, data->heads * 4.0 + 2);
}

}  // namespace

int main(int argc, char** argv) {
  const StageData data;
  benchmark::RegisterBenchmark("certificate_one_head", terms, &data);
  for (const cpu::Kernels* kernels : both_kernels()) {
    benchmark::RegisterBenchmark((std::string("tail_sums/") + kernels->name).c_str(), tail_sums,
                                 kernels, &data);
  }
  return run_benchmarks(argc, argv);
}
