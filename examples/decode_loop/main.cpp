// Every call an engine makes, without an engine: a made-up model decodes through VERKV and a dense
// twin. Exits with 1 if D misses its certified bound more often than promised, or a token is lost.
#include <cmath>
#include <random>
#include <vector>

#include <fmt/format.h>
#include <verkv/importance.hpp>
#include <verkv/kv_cache_manager.hpp>

using Floats = std::vector<float>;
constexpr int kLayers = 3, kKvHeads = 2, kHeads = 8, kDim = 64;
constexpr int kPrompt = 4096, kChunk = 512, kSteps = 100;

// Stands for the model: random rows [token][head][kDim]; a share of them lies along one direction.
static Floats rows(int tokens, int heads, double share = 0, float strength = 0) {
  static std::mt19937 random(7);
  std::normal_distribution<float> noise;
  Floats all;
  for (int row = 0; row < tokens * heads; ++row) {
    const float along = std::bernoulli_distribution(share)(random) ? strength : 0;
    for (int d = 0; d < kDim; ++d) all.push_back(noise(random) + (d % 3 == 0 ? along : -along));
  }
  return all;
}

static verkv::TensorView view(const Floats& x, int heads) {
  return verkv::token_major(x.data(), verkv::DType::f32, std::ssize(x) / heads / kDim, heads, kDim);
}

int main() {
  verkv::CacheConfig config;
  config.layers.assign(kLayers, {kKvHeads, kHeads, kDim, kDim});
  config.keep = 1.0 / 8;
  config.fetch = {.epsilon = 0.1, .limit_tokens = 100};  // the limit may cost the certificate
  config.host_bytes_limit =
      5 * kDim * kKvHeads * kLayers * kPrompt;  // a quarter more than a prompt
  for (const auto& reason : verkv::unsupported_reasons(config)) fmt::print("{}\n", reason);
  const auto cache = verkv::make_cpu_cache(config);  // throws if there was a reason
  for (auto& layer : config.layers) layer.dense = true;
  const auto twin = verkv::make_cpu_cache(config);
  const verkv::SequenceId id = cache->create_sequence(), twin_id = twin->create_sequence();
  const auto append = [&](int layer, const Floats& keys, const Floats& values) {
    cache->append(id, layer, view(keys, kKvHeads), view(values, kKvHeads));
    twin->append(twin_id, layer, view(keys, kKvHeads), view(values, kKvHeads));
  };

  // Prefill in chunks, then compress all layers, with scores [KV head][token]. Here the keys that
  // matter are long; for real models importance.hpp has reductions of attention probabilities.
  std::vector<Floats> scores(kLayers, Floats(kKvHeads * kPrompt));
  std::vector<verkv::ImportanceView> importance;
  for (int layer = 0; layer < kLayers; ++layer) {
    float* const score = scores[static_cast<std::size_t>(layer)].data();
    importance.push_back({score, kKvHeads, kPrompt, kPrompt});
    for (int token = 0; token < kPrompt; token += kChunk) {
      const Floats keys = rows(kChunk, kKvHeads, 0.02, 2);
      append(layer, keys, rows(kChunk, kKvHeads));
      for (int i = 0; i < kChunk * kKvHeads; ++i)
        score[i % kKvHeads * kPrompt + token + i / kKvHeads] = static_cast<float>(
            std::pow(verkv::key_norm(std::span(keys.data() + i * kDim, kDim)), 4));
    }
  }
  cache->compress(id, importance);
  try {  // A limit throws and leaves all as it was: let the request wait, or erase a sequence.
    cache->reserve(id, kPrompt);
  } catch (const verkv::CapacityError& error) {
    fmt::print("refused: {}\n", error.what());
  }
  Floats output(kHeads * kDim), truth(kHeads * kDim), lse(kHeads), true_lse(kHeads);
  std::vector<verkv::QueryHeadReport> heads(kHeads);
  std::vector<verkv::KvHeadReport> kv(kKvHeads);
  double error = 0, square = 0, certified = 0, missed = 0, moved = 0, lost = 0;
  for (int step = 1; step <= kSteps; ++step) {
    for (int layer = 0; layer < kLayers; ++layer) {
      append(layer, rows(1, kKvHeads, 0.02, 2), rows(1, kKvHeads));
      const Floats q = rows(1, kHeads, 1, 0.5f);
      cache->attend(layer, {{&id, 1}, view(q, kHeads), output, lse, heads, kv});
      twin->attend(layer, {{&twin_id, 1}, view(q, kHeads), truth, true_lse, {}, {}});
      for (std::size_t h = 0; h < kHeads; ++h) {
        certified += heads[h].certified;  // if not: no error, still the best estimate there is
        missed += std::abs(std::expm1(lse[h] - true_lse[h])) > heads[h].epsilon + 1e-5;
      }
      for (const auto& head : kv) moved += static_cast<double>(head.moved_tokens);
      for (std::size_t i = 0; i < output.size(); ++i) error += std::pow(output[i] - truth[i], 2);
      for (const float x : truth) square += std::pow(x, 2);
      lost += cache->tokens(id, layer) != kPrompt + step;
    }
    if (step % 10 == 0)
      fmt::print("step {:3}: {:.1f} % certified and {:.2f} % of the tokens moved so far\n", step,
                 100 * certified / (step * kLayers * kHeads),
                 100 * moved / (step * kLayers * kKvHeads * kPrompt));
  }
  const verkv::MemoryReport m = cache->memory();
  fmt::print("bytes: residents {}, sketch {}, metadata {}; host tier {}\n", m.resident_bytes,
             m.sketch_bytes, m.metadata_bytes, m.host_bytes);
  missed /= kSteps * kLayers * kHeads;
  fmt::print("output error {:.1f} %, D missed its bound: {:.1f} % (at most {} %), lost: {}\n",
             100 * std::sqrt(error / square), 100 * missed, 100 * config.fetch.delta, lost);
  return lost > 0 || missed > config.fetch.delta;
}
