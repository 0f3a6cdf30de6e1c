// Attention over rows of keys and values, 4 query heads at a time: the kernels by themselves, the
// blocked dense attention made of them, and the reference in double.
#include <verkv/attention.hpp>

#include "dense.hpp"
#include "support.hpp"

namespace {

using namespace verkv;
using namespace verkv::bench;

struct Tensors {
  std::vector<std::byte> keys;
  std::vector<std::byte> values;
  DType type;

  Tensors(const StageData& data, DType t)
      : keys(stored(data.cache.keys, t)), values(stored(data.cache.values, t)), type(t) {}
  static Rows rows(const std::vector<std::byte>& bytes, DType type, std::int64_t dim) {
    return {bytes.data(), type, dim, static_cast<int>(dim)};
  }
};

void dot_rows(benchmark::State& state, const cpu::Kernels* kernels, const StageData* data,
              const Tensors* tensors) {
  cpu::AlignedVector<float> out(data->logit.size());
  for (auto _ : state) {
    kernels->dot_rows(Tensors::rows(tensors->keys, tensors->type, data->dim), nullptr, data->tokens,
                      data->query.data(), data->heads, data->dim, out.data(), data->tokens);
    benchmark::ClobberMemory();
  }
  count_tokens(state, data->tokens,
               static_cast<double>(data->dim) * static_cast<double>(size_bytes(tensors->type)));
}

// Rows scattered over the whole tensor, as moved tokens are.
void gathered_dot_rows(benchmark::State& state, const cpu::Kernels* kernels, const StageData* data,
                       const Tensors* tensors) {
  std::vector<std::uint32_t> index;
  for (std::int64_t i = 7; i < data->tokens; i += 16)
    index.push_back(static_cast<std::uint32_t>(i));
  const std::int64_t count = static_cast<std::int64_t>(index.size());
  cpu::AlignedVector<float> out(at(data->heads * count));
  for (auto _ : state) {
    kernels->dot_rows(Tensors::rows(tensors->keys, tensors->type, data->dim), index.data(), count,
                      data->query.data(), data->heads, data->dim, out.data(), count);
    benchmark::ClobberMemory();
  }
  count_tokens(state, count,
               static_cast<double>(data->dim) * static_cast<double>(size_bytes(tensors->type)));
}

void weighted_rows(benchmark::State& state, const cpu::Kernels* kernels, const StageData* data,
                   const Tensors* tensors) {
  std::vector<float> out(at(data->heads * data->dim));
  for (auto _ : state) {
    kernels->weighted_rows(Tensors::rows(tensors->values, tensors->type, data->dim), nullptr,
                           data->tokens, data->weight.data(), data->heads, data->tokens, out.data(),
                           data->dim);
    benchmark::ClobberMemory();
  }
  count_tokens(state, data->tokens,
               static_cast<double>(data->dim) * static_cast<double>(size_bytes(tensors->type)));
}

void weights(benchmark::State& state, const cpu::Kernels* kernels, const StageData* data) {
  // In place, so the logits of the next iteration are weights; they are as good as any numbers.
  cpu::AlignedVector<float> w = data->logit;
  for (auto _ : state) {
    double sum[cpu::kMaxHeads] = {};
    kernels->weights(w.data(), data->tokens, data->odds.data(), data->tokens, data->heads,
                     data->shift.data(), sum);
    benchmark::DoNotOptimize(sum);
    benchmark::ClobberMemory();
  }
  count_tokens(state, data->tokens, data->heads * 4.0 + 2);
}

void blocked_dense(benchmark::State& state, const cpu::Kernels* kernels, const StageData* data,
                   const Tensors* tensors) {
  const DenseHead head{Tensors::rows(tensors->keys, tensors->type, data->dim),
                       Tensors::rows(tensors->values, tensors->type, data->dim), data->tokens,
                       1 / std::sqrt(static_cast<float>(data->dim)), data->heads};
  DenseAttention dense(*kernels);
  std::vector<float> out(at(data->heads * data->dim));
  std::vector<float> lse(at(data->heads));
  for (auto _ : state) {
    dense.run(head, data->cache.queries.data(), out.data(), lse.data());
    benchmark::ClobberMemory();
  }
  count_tokens(
      state, data->tokens,
      2.0 * static_cast<double>(data->dim) * static_cast<double>(size_bytes(tensors->type)));
}

void reference_in_double(benchmark::State& state, const StageData* data) {
  std::vector<double> query(data->cache.queries.begin(), data->cache.queries.begin() + data->dim);
  std::vector<double> logit(at(data->tokens));
  std::vector<double> out(at(data->dim));
  const auto key = [&](std::int64_t i, std::int64_t j) {
    return data->cache.keys[at(i * data->dim + j)];
  };
  const auto value = [&](std::int64_t i, std::int64_t j) {
    return data->cache.values[at(i * data->dim + j)];
  };
  for (auto _ : state) {
    benchmark::DoNotOptimize(dense_attention(data->tokens, std::span<const double>(query),
                                             1 / std::sqrt(static_cast<double>(data->dim)), 0.0,
                                             key, value, logit, out));
  }
  count_tokens(state, data->tokens, 2.0 * static_cast<double>(data->dim) * 4);
}

}  // namespace

int main(int argc, char** argv) {
  const StageData data;
  const Tensors f16(data, DType::f16);
  const Tensors f32(data, DType::f32);
  benchmark::RegisterBenchmark("dense_reference_one_head", reference_in_double, &data);
  for (const cpu::Kernels* kernels : both_kernels()) {
    const std::string name = std::string("/") + kernels->name;
    benchmark::RegisterBenchmark(("weights" + name).c_str(), weights, kernels, &data);
    for (const Tensors* t : {&f16, &f32}) {
      const std::string type = std::string("/") + verkv::name(t->type) + name;
      benchmark::RegisterBenchmark(("dot_rows" + type).c_str(), dot_rows, kernels, &data, t);
      benchmark::RegisterBenchmark(("dot_rows_gathered" + type).c_str(), gathered_dot_rows, kernels,
                                   &data, t);
      benchmark::RegisterBenchmark(("weighted_rows" + type).c_str(), weighted_rows, kernels, &data,
                                   t);
      benchmark::RegisterBenchmark(("dense" + type).c_str(), blocked_dense, kernels, &data, t);
    }
  }
  return run_benchmarks(argc, argv);
}
