// What KvCacheManager::append costs for a token of a layer of 8 KV heads and head size 128, beside a
// copy of as many bytes, and the kernels that it is made of.
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "support.hpp"

namespace {

using namespace verkv;
using namespace verkv::bench;

constexpr std::int64_t kHeads = 8;
constexpr std::int64_t kDim = 128;
// Of a call.
constexpr std::int64_t kTokens = 64;

std::vector<std::byte> numbers(DType type) {
  std::vector<float> x(at(kTokens * kHeads * kDim));
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] = static_cast<float>(static_cast<int>(i * 2654435761u % 2001) - 1000) / 300.0f;
  return stored(x, type);
}

void append(benchmark::State& state, DType type, DType storage) {
  CacheConfig config;
  config.layers = {{.kv_heads = kHeads, .query_heads = kHeads, .key_dim = kDim, .value_dim = kDim}};
  config.storage = storage;
  config.threads = 1;
  const auto cache = make_cpu_cache(config);
  const SequenceId sequence = cache->create_sequence(0);
  const std::vector<std::byte> rows = numbers(type);
  const TensorView view = token_major(rows.data(), type, kTokens, kHeads, kDim);
  for (auto _ : state) {
    cache->append(sequence, 0, view, view);
    cache->truncate(sequence, 0);
  }
  count_tokens(state, kTokens,
               static_cast<double>(2 * kHeads * kDim) * static_cast<double>(size_bytes(type)));
}

// The bytes that append writes, to both tiers, from memory that is as large.
void copy(benchmark::State& state, DType storage) {
  const std::vector<std::byte> rows = numbers(storage);
  std::vector<std::byte> out(4 * rows.size());
  for (auto _ : state) {
    for (std::size_t i = 0; i < 4; ++i) {
      std::memcpy(out.data() + i * rows.size(), rows.data(), rows.size());
      benchmark::ClobberMemory();
    }
  }
  count_tokens(state, kTokens,
               static_cast<double>(2 * kHeads * kDim) * static_cast<double>(size_bytes(storage)));
}

void convert(benchmark::State& state, const cpu::Kernels* kernels, DType from, DType to) {
  const std::vector<std::byte> rows = numbers(from);
  std::vector<std::byte> out(at(kTokens * kHeads * kDim) * size_bytes(to));
  for (auto _ : state) {
    kernels->convert(rows.data(), from, out.data(), to, kTokens * kHeads * kDim);
    benchmark::ClobberMemory();
  }
  count_tokens(state, kTokens,
               static_cast<double>(kHeads * kDim) * static_cast<double>(size_bytes(from)));
}

void all_within(benchmark::State& state, const cpu::Kernels* kernels, DType type) {
  const std::vector<std::byte> rows = numbers(type);
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        kernels->all_within(rows.data(), type, kTokens * kHeads * kDim, largest_number(type)));
  }
  count_tokens(state, kTokens,
               static_cast<double>(kHeads * kDim) * static_cast<double>(size_bytes(type)));
}

}  // namespace

int main(int argc, char** argv) {
  constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16};
  for (const DType to : {DType::f16, DType::bf16}) {
    const std::string name = verkv::name(to);
    for (const DType from : kTypes) {
      const std::string types = std::string(verkv::name(from)) + "_to_" + name;
      benchmark::RegisterBenchmark(("append/" + types).c_str(), append, from, to);
      if (from == to) continue;
      for (const cpu::Kernels* kernels : both_kernels()) {
        benchmark::RegisterBenchmark(("convert/" + types + "/" + kernels->name).c_str(), convert,
                                     kernels, from, to);
      }
    }
    benchmark::RegisterBenchmark(("copy/" + name).c_str(), copy, to);
  }
  for (const DType type : kTypes) {
    for (const cpu::Kernels* kernels : both_kernels()) {
      benchmark::RegisterBenchmark(
          (std::string("all_within/") + verkv::name(type) + "/" + kernels->name).c_str(),
          all_within, kernels, type);
    }
  }
  return run_benchmarks(argc, argv);
}
