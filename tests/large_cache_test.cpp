// A million tokens: one step stays within a gibibyte beyond the cache itself, and within its
// certificate.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "catch.hpp"
#include "reference/statistics.hpp"

namespace {

using verkv::DType;
using verkv::Half;
using verkv::reference::Random;

constexpr std::int64_t kTokens = 1048576;
constexpr std::int64_t kChunk = 16384;
// What grows with the tokens does not depend on it, but its square is the time of the encoding.
constexpr std::int64_t kDim = 64;
constexpr std::int64_t kQueryHeads = 4;

// Peak resident memory of this process in bytes; 0 where the system does not say.
std::int64_t peak_memory() {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    std::int64_t kibibytes = 0;
    if (word == "VmHWM:" && status >> kibibytes) return kibibytes * 1024;
  }
  return 0;
}

// Keys and values of one chunk, the same every time it is asked for: numbers from a table of normal
// ones, since a quarter of a billion logarithms would take longer than everything else.
class Source {
 public:
  Source() {
    Random random(50);
    for (Half& x : table_) x = verkv::to_half(static_cast<float>(random.normal()));
  }

  void chunk(std::int64_t first, std::vector<Half>& keys, std::vector<Half>& values) const {
    Random random(1000 + static_cast<std::uint64_t>(first));
    for (std::vector<Half>* block : {&keys, &values}) {
      block->resize(static_cast<std::size_t>(kChunk * kDim));
      for (std::size_t i = 0; i < block->size(); i += 4) {
        const std::uint64_t bits = random.bits();
        for (std::size_t j = 0; j < 4; ++j) (*block)[i + j] = table_[(bits >> (16 * j)) & 0xffffu];
      }
    }
  }

 private:
  std::vector<Half> table_ = std::vector<Half>(65536);
};

}  // namespace

TEST_CASE("A step over a million tokens") {
  verkv::CacheConfig config;
  verkv::LayerConfig layer;
  layer.query_heads = kQueryHeads;
  layer.key_dim = kDim;
  layer.value_dim = kDim;
  config.layers = {layer};
  config.storage = DType::f16;
  config.keep = 0.0625;

  const Source source;
  Random random(51);
  std::vector<float> query(static_cast<std::size_t>(kQueryHeads * kDim));
  for (float& x : query) x = static_cast<float>(1.6 * random.normal());
  std::vector<float> importance(static_cast<std::size_t>(kTokens));
  for (float& x : importance) x = static_cast<float>(std::exp(random.normal()));

  // The answer, in blocks: no logit of these is above 40 in size, so no shift is needed.
  std::vector<double> denominator(kQueryHeads, 0.0);
  std::vector<double> numerator(static_cast<std::size_t>(kQueryHeads * kDim), 0.0);
  std::vector<Half> keys, values;
  std::vector<float> key(kDim), value(kDim);
  for (std::int64_t first = 0; first < kTokens; first += kChunk) {
    source.chunk(first, keys, values);
    for (std::int64_t t = 0; t < kChunk; ++t) {
      for (std::size_t j = 0; j < kDim; ++j) {
        key[j] = to_float(keys[static_cast<std::size_t>(t * kDim) + j]);
        value[j] = to_float(values[static_cast<std::size_t>(t * kDim) + j]);
      }
      for (std::size_t h = 0; h < kQueryHeads; ++h) {
        double dot = 0;
        for (std::size_t j = 0; j < kDim; ++j)
          dot += static_cast<double>(query[h * kDim + j]) * static_cast<double>(key[j]);
        const double w = std::exp(dot / std::sqrt(static_cast<double>(kDim)));
        denominator[h] += w;
        for (std::size_t j = 0; j < kDim; ++j)
          numerator[h * kDim + j] += w * static_cast<double>(value[j]);
      }
    }
  }

  const std::int64_t cache_bytes = kTokens * 2 * kDim * 2;
  for (const bool certificate : {false, true}) {
    config.fetch.epsilon.reset();
    config.fetch.risk.reset();
    if (certificate) config.fetch.epsilon = 0.05;
    if (!certificate) config.fetch.risk = 1e-4;
    const auto cache = verkv::make_cpu_cache(config);
    const verkv::SequenceId sequence = cache->create_sequence(3);
    for (std::int64_t first = 0; first < kTokens; first += kChunk) {
      source.chunk(first, keys, values);
      cache->append(sequence, 0, verkv::token_major(keys.data(), DType::f16, kChunk, 1, kDim),
                    verkv::token_major(values.data(), DType::f16, kChunk, 1, kDim));
    }
    const verkv::ImportanceView view{importance.data(), 1, kTokens, kTokens};
    cache->compress(sequence, std::span(&view, 1));
    REQUIRE(cache->tokens(sequence, 0) == kTokens);
    CHECK(cache->memory().host_bytes == cache_bytes);

    std::vector<float> output(static_cast<std::size_t>(kQueryHeads * kDim));
    std::vector<float> lse(kQueryHeads);
    std::vector<verkv::QueryHeadReport> query_reports(kQueryHeads);
    std::vector<verkv::KvHeadReport> kv_reports(1);
    verkv::AttendBatch batch;
    batch.sequences = std::span(&sequence, 1);
    batch.queries = verkv::token_major(query.data(), DType::f32, 1, kQueryHeads, kDim);
    batch.output = output;
    batch.lse = lse;
    batch.query_reports = query_reports;
    batch.kv_reports = kv_reports;
    cache->attend(0, batch);

    const double share =
        static_cast<double>(kv_reports[0].resident_tokens) / static_cast<double>(kTokens);
    CHECK(std::fabs(share - config.keep) < 0.002);
    for (std::size_t h = 0; h < kQueryHeads; ++h) {
      INFO("certificate " << certificate << ", head " << h << ", epsilon "
                          << query_reports[h].epsilon << ", fetched "
                          << kv_reports[0].fetched_tokens);
      CHECK(query_reports[h].epsilon < 0.5);
      if (certificate) CHECK(query_reports[h].certified);
      if (certificate) CHECK(query_reports[h].planned_tokens > 0);
      CHECK(std::fabs(std::exp(static_cast<double>(lse[h]) - std::log(denominator[h])) - 1) <=
            query_reports[h].epsilon);
      double square = 0;
      double length = 0;
      for (std::size_t j = 0; j < kDim; ++j) {
        const double x = static_cast<double>(output[h * kDim + j]);
        REQUIRE(std::isfinite(x));
        const double expected = numerator[h * kDim + j] / denominator[h];
        square += (x - expected) * (x - expected);
        length += expected * expected;
      }
      // The values are noise, so the output is of the size of its own error; it only has to be of
      // that size.
      CHECK(std::sqrt(square) < 10 * std::sqrt(length));
    }
  }

  const std::int64_t peak = peak_memory();
  INFO("peak " << peak / 1048576 << " MiB, cache " << cache_bytes / 1048576 << " MiB");
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  CHECK(peak - cache_bytes < std::int64_t{1} << 30);
#endif
}
