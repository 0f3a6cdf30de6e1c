// The sketch: encoding of keys that are in the basis (once at compression), the 8-bit query, and
// the logits of all tokens from the codes, 4 query heads at a time (every step).
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

void encode_keys(benchmark::State& state, const cpu::Kernels* kernels, SketchShape shape) {
  constexpr std::int64_t tokens = 1024;
  const std::vector<float> keys = normal_numbers(tokens * shape.dim);
  std::vector<std::uint8_t> codes(at(code_storage_bytes(shape, tokens)));
  for (auto _ : state) {
    for (std::int64_t i = 0; i < tokens; ++i) {
      benchmark::DoNotOptimize(kernels->encode_key(
          shape, SketchBands{}, keys.data() + i * shape.dim,
          codes.data() + code_storage_bytes(shape, i / kSketchGroup * kSketchGroup),
          i % kSketchGroup));
    }
  }
  count_tokens(state, tokens, shape.dim * static_cast<double>(sizeof(float)));
}

void logits(benchmark::State& state, const cpu::Kernels* kernels, SketchShape shape) {
  constexpr int heads = 4;
  const std::int64_t tokens = 32768;
  std::mt19937_64 engine(1);
  cpu::AlignedVector<std::uint8_t> codes(at(code_storage_bytes(shape, tokens)));
  for (std::uint8_t& byte : codes) byte = static_cast<std::uint8_t>(engine());
  const std::vector<Positive16> scale(at(tokens), to_positive16(1));
  const std::vector<Positive16> odds(at(tokens), to_positive16(0.1f));
  std::vector<std::int8_t> query(heads * kDim);
  for (std::int8_t& q : query) q = static_cast<std::int8_t>(engine() % 255);
  const cpu::HeadConstants constants[heads] = {
      {0, 1e-4f, 0}, {0, 1e-4f, 0}, {0, 1e-4f, 0}, {0, 1e-4f, 0}};
  cpu::AlignedVector<float> out(at(heads * tokens));
  float largest[heads];
  for (auto _ : state) {
    kernels->sketch_logits(shape, codes.data(), scale.data(), odds.data(), tokens, query.data(),
                           heads, kDim, constants, out.data(), tokens, largest);
    benchmark::ClobberMemory();
  }
  count_tokens(state, tokens, shape.token_bytes() + 2.0);
}

}  // namespace

int main(int argc, char** argv) {
  // 2 bits a coordinate on average in two ways, then 3 and 4.
  const SketchShape shapes[] = {{SketchKind::calibrated, kDim, 0},
                                {SketchKind::calibrated, 96, 32},
                                {SketchKind::calibrated, kDim, 64},
                                {SketchKind::calibrated, kDim, kDim}};
  for (const SketchShape& shape : shapes) {
    const std::string name =
        std::to_string(shape.fine) + "x4+" + std::to_string(shape.dim - shape.fine) + "x2bit";
    for (const cpu::Kernels* kernels : verkv::bench::both_kernels()) {
      benchmark::RegisterBenchmark(("encode/" + name + "/" + kernels->name).c_str(), encode_keys,
                                   kernels, shape);
      benchmark::RegisterBenchmark(("sketch_logits/" + name + "/" + kernels->name).c_str(), logits,
                                   kernels, shape);
    }
  }
  return verkv::bench::run_benchmarks(argc, argv);
}
