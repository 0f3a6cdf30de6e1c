// What the benchmarks share: a synthetic cache whose attention looks like a model's, and counters.
#ifndef VERKV_BENCH_SUPPORT_HPP
#define VERKV_BENCH_SUPPORT_HPP

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <verkv/sketch.hpp>
#include <verkv/types.hpp>

#include "cpu/head_store.hpp"
#include "cpu/kernels.hpp"

namespace verkv::bench {

// A count as the index of a vector.
inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// Median of a copy; 0 where empty.
inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Pearson's correlation.
inline double correlation(std::span<const double> x, std::span<const double> y) {
  double sx = 0, sy = 0, xx = 0, yy = 0, xy = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    sx += x[i];
    sy += y[i];
    xx += x[i] * x[i];
    yy += y[i] * y[i];
    xy += x[i] * y[i];
  }
  const double n = static_cast<double>(x.size());
  return (n * xy - sx * sy) / std::sqrt((n * xx - sx * sx) * (n * yy - sy * sy));
}

// Elements as the storage type has them.
inline std::vector<std::byte> stored(std::span<const float> x, DType type) {
  std::vector<std::byte> bytes(x.size() * size_bytes(type));
  for (std::size_t i = 0; i < x.size(); ++i) {
    const std::uint16_t half = type == DType::f16 ? to_half(x[i]).bits : to_bfloat16(x[i]).bits;
    const void* from = type == DType::f32 ? static_cast<const void*>(&x[i]) : &half;
    std::memcpy(bytes.data() + i * size_bytes(type), from, size_bytes(type));
  }
  return bytes;
}

struct SyntheticShape {
  std::int64_t tokens = 0;
  std::int64_t kv_heads = 1;
  std::int64_t group = 4;
  std::int64_t dim = 128;
  std::int64_t steps = 16;
  friend bool operator==(const SyntheticShape&, const SyntheticShape&) = default;
};

// Keys with a few strong directions in isotropic noise, and queries that look along them, so that logits have a
// standard deviation of about 3 while a 2-bit sketch errs by about 0.5, as on recorded caches. The first
// direction is asked for by every query: what importance scores can know. Its share makes the logarithms of
// importance and weight correlate with about 0.6. Each step also looks for one needle that no score foresees.
struct SyntheticCache {
  SyntheticShape shape;
  std::vector<float> keys;        // [KV head][token][dim]
  std::vector<float> values;      // [KV head][token][dim]
  std::vector<float> queries;     // [step][query head][dim]
  std::vector<float> importance;  // [KV head][token]

  explicit SyntheticCache(const SyntheticShape& s) : shape(s) {
    constexpr std::int64_t kDirections = 9;
    constexpr float kStrength = 4;    // of a direction in a key, in units of the noise
    constexpr float kSalience = 1.8f;  // standard deviations of the logit's parts
    constexpr float kTopics = 1.6f;
    constexpr float kNoise = 0.8f;
    constexpr float kNeedle = 6;  // added to a needle's logit
    std::mt19937_64 engine(1);
    std::normal_distribution<float> normal;
    const float root = std::sqrt(static_cast<float>(s.dim));
    keys.resize(at(s.kv_heads * s.tokens * s.dim));
    values.resize(keys.size());
    importance.resize(at(s.kv_heads * s.tokens));
    queries.resize(at(s.steps * s.kv_heads * s.group * s.dim));
    std::vector<float> direction(at(kDirections * s.dim));
    std::vector<float> key_mean(at(s.dim));
    std::vector<float> value_mean(at(s.dim));
    for (std::int64_t head = 0; head < s.kv_heads; ++head) {
      for (float& x : direction) x = normal(engine) / root;
      for (float& x : key_mean) x = normal(engine);
      for (float& x : value_mean) x = normal(engine) / 2;
      float* head_keys = keys.data() + head * s.tokens * s.dim;
      for (std::int64_t i = 0; i < s.tokens; ++i) {
        float* key = head_keys + i * s.dim;
        float* value = values.data() + (head * s.tokens + i) * s.dim;
        for (std::int64_t j = 0; j < s.dim; ++j) {
          key[j] = key_mean[at(j)] + normal(engine);
          value[j] = value_mean[at(j)] + normal(engine);
        }
        for (std::int64_t r = 0; r < kDirections; ++r) {
          const float z = normal(engine);
          if (r == 0) {
            importance[at(head * s.tokens + i)] =
                std::exp(kSalience * z + 0.3f * normal(engine));
          }
          for (std::int64_t j = 0; j < s.dim; ++j) key[j] += kStrength * z * direction[at(r * s.dim + j)];
        }
      }
      for (std::int64_t step = 0; step < s.steps; ++step) {
        const float* needle = head_keys + static_cast<std::int64_t>(engine() % at(s.tokens)) * s.dim;
        float needle_square = 0;
        for (std::int64_t j = 0; j < s.dim; ++j) {
          needle_square += (needle[j] - key_mean[at(j)]) * (needle[j] - key_mean[at(j)]);
        }
        for (std::int64_t g = 0; g < s.group; ++g) {
          float* q = queries.data() + ((step * s.kv_heads + head) * s.group + g) * s.dim;
          for (std::int64_t j = 0; j < s.dim; ++j) q[j] = kNoise * normal(engine);
          float topic[kDirections];
          float square = 0;
          for (float& y : topic) y = normal(engine);
          for (std::int64_t r = 1; r < kDirections; ++r) square += topic[r] * topic[r];
          for (std::int64_t r = 1; r < kDirections; ++r) topic[r] *= kTopics / std::sqrt(square);
          topic[0] = kSalience;
          for (std::int64_t r = 0; r < kDirections; ++r) {
            for (std::int64_t j = 0; j < s.dim; ++j) {
              q[j] += root / kStrength * topic[r] * direction[at(r * s.dim + j)];
            }
          }
          for (std::int64_t j = 0; j < s.dim; ++j) {
            q[j] += kNeedle * root / needle_square * (needle[j] - key_mean[at(j)]);
          }
        }
      }
    }
  }
};

// "time per token" and bytes per second as counters of a benchmark that handles `tokens` tokens and reads
// `bytes_per_token` bytes for each in every iteration.
inline void count_tokens(benchmark::State& state, std::int64_t tokens, double bytes_per_token) {
  using benchmark::Counter;
  const double n = static_cast<double>(tokens);
  // Seconds per token, which the console shows with a prefix, for instance 3.1n.
  state.counters["s_per_token"] = Counter(n, Counter::kIsIterationInvariantRate | Counter::kInvert);
  state.counters["bytes_per_token"] = bytes_per_token;
  state.SetBytesProcessed(static_cast<std::int64_t>(static_cast<double>(state.iterations()) * n * bytes_per_token));
}

}  // namespace verkv::bench

#endif  // VERKV_BENCH_SUPPORT_HPP
