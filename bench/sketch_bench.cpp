// The sketch: rotation and encoding of keys (once at compression), the 8-bit query, and the logits
// of all tokens from the codes, 4 query heads at a time (every step).
#include <verkv/sketch.hpp>

#include "support.hpp"

namespace {

using namespace verkv;
using namespace verkv::bench;

constexpr int kDim = 128;

std::vector<float> normal_numbers(std::int64_t count) {
  std::mt19937_64 engine(1);
  std::normal_distribution<float> normal;
  std::vector<float> x(at(count));
  for (float& v : x) v = normal(engine);
  return x;
}

SketchScale encode(const SketchShape& shape, const SketchLevels& levels, std::span<const float> key,
                   std::uint8_t* codes, std::int64_t token) {
  return shape.kind == SketchKind::minmax ? encode_minmax(shape, key, codes, token)
                                          : encode_lloyd_max(shape, levels, key, codes, token);
}

void encode_keys(benchmark::State& state, SketchShape shape) {
  constexpr std::int64_t tokens = 1024;
  const SketchLevels levels = sketch_levels(shape.kind, shape.bits);
  const std::vector<float> keys = normal_numbers(tokens * kDim);
  std::vector<std::uint8_t> codes(at(code_storage_bytes(shape, tokens)));
  for (auto _ : state) {
    for (std::int64_t i = 0; i < tokens; ++i) {
      const auto key = std::span<const float>(keys).subspan(at(i * kDim), kDim);
      benchmark::DoNotOptimize(encode(shape, levels, key, codes.data(), i));
    }
  }
  count_tokens(state, tokens, kDim * sizeof(float));
}

void rotate_keys(benchmark::State& state) {
  std::vector<float> signs(2 * kDim);
  rotation_signs(1, kDim, signs);
  std::vector<float> key = normal_numbers(kDim);
  for (auto _ : state) {
    rotate(key, signs);
    benchmark::DoNotOptimize(key.data());
  }
  count_tokens(state, 1, kDim * sizeof(float));
}

void logits(benchmark::State& state, const cpu::Kernels* kernels, SketchShape shape) {
  constexpr int heads = 4;
  const std::int64_t tokens = 32768;
  const SketchLevels levels = sketch_levels(shape.kind, shape.bits);
  std::mt19937_64 engine(1);
  cpu::AlignedVector<std::uint8_t> codes(at(code_storage_bytes(shape, tokens)));
  for (std::uint8_t& byte : codes) byte = static_cast<std::uint8_t>(engine());
  const std::vector<Positive16> scale(at(tokens), to_positive16(1));
  const std::vector<BFloat16> offset(at(tokens), to_bfloat16(-1));
  const std::vector<Positive16> odds(at(tokens), to_positive16(0.1f));
  std::vector<std::int8_t> query(heads * kDim);
  for (std::int8_t& q : query) q = static_cast<std::int8_t>(engine() % 255);
  const cpu::HeadConstants constants[heads] = {
      {0, 1e-4f, 0}, {0, 1e-4f, 0}, {0, 1e-4f, 0}, {0, 1e-4f, 0}};
  cpu::AlignedVector<float> out(at(heads * tokens));
  float largest[heads];
  for (auto _ : state) {
    kernels->sketch_logits(shape, levels, codes.data(), scale.data(),
                           shape.kind == SketchKind::minmax ? offset.data() : nullptr, odds.data(),
                           tokens, query.data(), heads, kDim, constants, out.data(), tokens,
                           largest);
    benchmark::ClobberMemory();
  }
  count_tokens(state, tokens, shape.token_bytes() + 2.0);
}

}  // namespace

int main(int argc, char** argv) {
  const SketchShape shapes[] = {{SketchKind::lloyd_max, 2, kDim},
                                {SketchKind::lloyd_max, 3, kDim},
                                {SketchKind::lloyd_max, 4, kDim},
                                {SketchKind::minmax, 2, kDim}};
  benchmark::RegisterBenchmark("rotate", rotate_keys);
  for (const SketchShape& shape : shapes) {
    const std::string name = (shape.kind == SketchKind::minmax ? "minmax" : "lloyd_max") +
                             std::string("/") + std::to_string(shape.bits) + "bit";
    benchmark::RegisterBenchmark(("encode/" + name).c_str(), encode_keys, shape);
    for (const cpu::Kernels* kernels : verkv::bench::both_kernels()) {
      benchmark::RegisterBenchmark(("sketch_logits/" + name + "/" + kernels->name).c_str(), logits,
                                   kernels, shape);
    }
  }
  return verkv::bench::run_benchmarks(argc, argv);
}
