// Settings that no build of the library would make, and what the umbrella header brings.
#include <verkv/verkv.hpp>

#include <algorithm>
#include <cstdint>
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

// One field of the settings: what its sentence calls it, how many values it has, how it is set.
struct EnumField {
  std::string name;
  int values;
  std::function<void(CacheConfig&, std::uint8_t)> set;
};

const std::vector<EnumField>& enum_fields() {
  using verkv::Estimator, verkv::FetchMode, verkv::FetchOrder;
  using verkv::Pool, verkv::Selection, verkv::SketchKind;
  static const std::vector<EnumField> fields{
      {"storage type", 3, [](CacheConfig& c, std::uint8_t v) { c.storage = DType{v}; }},
      {"fetch mode", 3, [](CacheConfig& c, std::uint8_t v) { c.fetch.mode = FetchMode{v}; }},
      {"pool", 3, [](CacheConfig& c, std::uint8_t v) { c.pool = Pool{v}; }},
      {"sketch kind", 2, [](CacheConfig& c, std::uint8_t v) { c.sketch.kind = SketchKind{v}; }},
      {"selection", 3, [](CacheConfig& c, std::uint8_t v) { c.study.select = Selection{v}; }},
      {"estimator", 2, [](CacheConfig& c, std::uint8_t v) { c.study.estimator = Estimator{v}; }},
      {"host tier", 3,
       [](CacheConfig& c, std::uint8_t v) {
         c.host = verkv::HostTier{v};
         c.host_directory = c.host == verkv::HostTier::file ? "." : "";
       }},
      {"fetch order", 2, [](CacheConfig& c, std::uint8_t v) { c.study.order = FetchOrder{v}; }}};
  return fields;
}

// Saved sequences, JSON and command lines hold them.
TEST_CASE("Values of settings have names") {
  using verkv::Estimator, verkv::FetchMode, verkv::FetchOrder;
  using verkv::Pool, verkv::Selection, verkv::SketchKind;
  const auto check = []<class E>(E, const std::vector<std::string>& names) {
    for (std::size_t i = 0; i < names.size(); ++i)
      CHECK(names[i] == verkv::name(static_cast<E>(i)));
    CHECK(std::string("?") == verkv::name(static_cast<E>(names.size())));
  };
  check(FetchMode{}, {"verified", "never", "always"});
  check(Pool{}, {"head", "layer", "sequence"});
  check(Selection{}, {"poisson", "topk", "spread"});
  check(Estimator{}, {"plain", "clusters"});
  check(FetchOrder{}, {"worth", "exact"});
  check(verkv::HostTier{}, {"own", "engine", "file"});
  check(SketchKind{}, {"exact", "calibrated"});
  check(DType{}, {"f32", "f16", "bf16"});
}

TEST_CASE("A setting outside its enumeration is refused by name and number") {
  CHECK(verkv::unsupported_reasons(small_config()).empty());
  for (const EnumField& field : enum_fields()) {
    for (int value = 0; value < 256; ++value) {
      CacheConfig config = small_config();
      field.set(config, static_cast<std::uint8_t>(value));
      const std::vector<std::string> reasons = verkv::unsupported_reasons(config);
      const std::string names = field.name + " " + std::to_string(value) + ";";
      INFO(names);
      if (value < field.values) {
        CHECK(reasons.empty());
        CHECK(verkv::make_cpu_cache(config) != nullptr);
        continue;
      }
      REQUIRE(reasons.size() == 1);
      CHECK(reasons[0].find(names) == 0);
      CHECK_THROWS_AS(verkv::make_cpu_cache(config), InvalidArgument);
    }
  }
}

TEST_CASE("All settings outside their enumerations are named at once") {
  CacheConfig config = small_config();
  for (const EnumField& field : enum_fields()) field.set(config, 9);
  const std::vector<std::string> reasons = verkv::unsupported_reasons(config);
  CHECK(reasons.size() == enum_fields().size());
  for (const EnumField& field : enum_fields()) {
    INFO(field.name);
    CHECK(std::count_if(reasons.begin(), reasons.end(), [&](const std::string& reason) {
            return reason.find(field.name + " 9;") == 0;
          }) == 1);
  }
}

TEST_CASE("A view whose type is none is refused wherever it enters, and changes nothing") {
  const auto cache = verkv::make_cpu_cache(small_config());
  const verkv::SequenceId id = cache->create_sequence();
  std::vector<float> numbers(kTokens * kDim, 0.5f);
  const auto view = [&](DType type, std::int64_t tokens) {
    return verkv::token_major(numbers.data(), type, tokens, 1, kDim);
  };
  const int none = GENERATE(3, 9, 255);
  const TensorView good = view(DType::f32, kTokens);
  const TensorView bad = view(static_cast<DType>(none), kTokens);
  const std::vector<float> scores(kTokens, 1.0f);
  const verkv::ImportanceView importance{scores.data(), 1, kTokens, kTokens};
  std::vector<float> output(kDim, 7.0f);
  const auto refused = [none](auto&& call) {
    try {
      call();
    } catch (const InvalidArgument& error) {
      return std::string(error.what()).find("type " + std::to_string(none) + ";") !=
             std::string::npos;
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
  batch.queries = view(static_cast<DType>(none), 1);
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
