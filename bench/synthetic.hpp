// A synthetic cache whose attention looks like a model's, for the benchmarks of both backends.
#ifndef VERKV_BENCH_SYNTHETIC_HPP
#define VERKV_BENCH_SYNTHETIC_HPP

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace verkv::bench {

// A count as the index of a vector.
inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

struct SyntheticShape {
  std::int64_t tokens = 0;
  std::int64_t kv_heads = 1;
  std::int64_t group = 4;
  std::int64_t dim = 128;
  std::int64_t steps = 16;
  friend bool operator==(const SyntheticShape&, const SyntheticShape&) = default;
};

// Keys with a few strong directions in isotropic noise, and queries that look along them, so that
// logits have a standard deviation of about 3 while a 2-bit sketch errs by about 0.5, as on
// recorded caches. The first direction is asked for by every query: what importance scores can
// know. Its share makes the logarithms of importance and weight correlate with about 0.6. Each step
// also looks for one needle that no score foresees.
struct SyntheticCache {
  SyntheticShape shape;
  std::vector<float> keys;        // [KV head][token][dim]
  std::vector<float> values;      // [KV head][token][dim]
  std::vector<float> queries;     // [step][query head][dim]
  std::vector<float> importance;  // [KV head][token]

  explicit SyntheticCache(const SyntheticShape& s) : shape(s) {
    constexpr std::int64_t kDirections = 9;
    constexpr float kStrength = 4;     // of a direction in a key, in units of the noise
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
            importance[at(head * s.tokens + i)] = std::exp(kSalience * z + 0.3f * normal(engine));
          }
          for (std::int64_t j = 0; j < s.dim; ++j)
            key[j] += kStrength * z * direction[at(r * s.dim + j)];
        }
      }
      for (std::int64_t step = 0; step < s.steps; ++step) {
        const float* needle =
            head_keys + static_cast<std::int64_t>(engine() % at(s.tokens)) * s.dim;
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

}  // namespace verkv::bench

#endif  // VERKV_BENCH_SYNTHETIC_HPP
