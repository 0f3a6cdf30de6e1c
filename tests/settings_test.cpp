// Settings that no build of the library would make, and what the umbrella header brings.
#include <verkv/verkv.hpp>

#include <functional>
#include <string>
#include <vector>

#include "catch.hpp"

namespace {

using verkv::CacheConfig;
using verkv::DType;
using verkv::InvalidArgument;
using verkv::TensorView;

constexpr std::int64_t kTokens = 8;
constexpr std::int64_t kDim = 4;

CacheConfig small_config() {
  CacheConfig config;
  config.layers = {{.kv_heads = 1, .query_heads = 1, .key_dim = kDim, .value_dim = kDim}};
  config.local_tokens = 0;
  config.threads = 1;
  return config;
}

TEST_CASE("A setting outside its enumeration is refused") {
  struct Case {
    std::string names;
    std::function<void(CacheConfig&)> change;
  };
  const std::vector<Case> cases{
      {"storage type 3", [](CacheConfig& c) { c.storage = DType{3}; }},
      {"fetch mode 3", [](CacheConfig& c) { c.fetch.mode = verkv::FetchMode{3}; }},
      {"pool 3", [](CacheConfig& c) { c.pool = verkv::Pool{3}; }},
      {"sketch kind 2", [](CacheConfig& c) { c.sketch.kind = verkv::SketchKind{2}; }},
      {"selection 3", [](CacheConfig& c) { c.study.select = verkv::Selection{3}; }},
      {"estimator 2", [](CacheConfig& c) { c.study.estimator = verkv::Estimator{2}; }},
      {"fetch order 255", [](CacheConfig& c) { c.study.order = verkv::FetchOrder{255}; }}};
  CHECK(verkv::unsupported_reasons(small_config()).empty());
  for (const Case& c : cases) {
    CacheConfig config = small_config();
    c.change(config);
    const std::vector<std::string> reasons = verkv::unsupported_reasons(config);
    INFO(c.names);
    REQUIRE(reasons.size() == 1);
    CHECK(reasons[0].find(c.names) == 0);
    CHECK_THROWS_AS(verkv::make_cpu_cache(config), InvalidArgument);
  }
}

TEST_CASE("A view whose type is none is refused wherever it enters, and changes nothing") {
  const auto cache = verkv::make_cpu_cache(small_config());
  const verkv::SequenceId id = cache->create_sequence();
  std::vector<float> numbers(kTokens * kDim, 0.5f);
  const auto view = [&](DType type, std::int64_t tokens) {
    return verkv::token_major(numbers.data(), type, tokens, 1, kDim);
  };
  const TensorView good = view(DType::f32, kTokens);
  const TensorView bad = view(DType{3}, kTokens);
  const std::vector<float> scores(kTokens, 1.0f);
  const verkv::ImportanceView importance{scores.data(), 1, kTokens, kTokens};
  std::vector<float> output(kDim, 7.0f);
  const auto refused = [](auto&& call) {
    try {
      call();
    } catch (const InvalidArgument& error) {
      return std::string(error.what()).find("type 3") != std::string::npos;
    }
    return false;
  };

  CHECK(refused([&] { cache->append(id, 0, bad, good); }));
  CHECK(refused([&] { cache->append(id, 0, good, bad); }));
  CHECK(cache->tokens(id, 0) == 0);
  cache->append(id, 0, good, good);
  CHECK(refused([&] { cache->compress(id, {&importance, 1}, {&bad, 1}); }));
  CHECK(cache->compressed_tokens(id, 0) == 0);
  verkv::AttendBatch batch;
  batch.sequences = {&id, 1};
  batch.queries = view(DType{3}, 1);
  batch.output = output;
  CHECK(refused([&] { cache->attend(0, batch); }));
  CHECK(output == std::vector<float>(kDim, 7.0f));
  CHECK(cache->statistics(0).steps == 0);
  batch.queries = view(DType::f32, 1);
  cache->attend(0, batch);
  CHECK(output == std::vector<float>(kDim, 0.5f));
}

TEST_CASE("A cache's defaults are those of the method") {
  const CacheConfig config;
  CHECK(config.fetch.risk == 1e-4);
  CHECK(config.fetch.epsilon == 0.3);
  CHECK_FALSE(config.fetch.limit_tokens);
  CHECK(config.chunk_tokens == 128);
  CHECK_FALSE(config.fast_bytes_limit);
  CHECK_FALSE(config.host_bytes_limit);
  CHECK_FALSE(config.threads);
  CHECK(config.study.cap == 2);
  CHECK_FALSE(config.study.probability);
}

}  // namespace
