// Configurations of any numbers: unsupported_reasons says why not, or a cache is made and serves.
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "fuzz/fuzz.hpp"

namespace {

using namespace verkv;
using fuzz::Input;
using fuzz::require;

// Once in n; never where an input has ended.
bool rarely(Input& input, std::uint8_t n) { return input.below(n) == n - 1; }

// Small, at the edges, or anything.
std::int64_t whole(Input& input) {
  if (rarely(input, 48)) return input.take<std::int64_t>();
  if (rarely(input, 48)) return input.take<std::int16_t>();
  return 1 + input.below(20);
}

// In (0, 1), or anything.
double real(Input& input) {
  if (rarely(input, 48)) return input.take<double>();
  return (rarely(input, 48) ? -1 : 1) * (1 + input.below(127)) / 128.0;
}

// One of the first `count` values of an enumeration, or any number.
template <class T>
T value_of(Input& input, std::uint8_t count) {
  return static_cast<T>(rarely(input, 64) ? input.take<std::uint8_t>() : input.below(count));
}

template <class F>
auto maybe(Input& input, F&& f) {
  using T = decltype(f(input));
  return rarely(input, 2) ? std::optional<T>(f(input)) : std::optional<T>();
}

LayerConfig layer_of(Input& input) {
  LayerConfig layer;
  layer.kv_heads = rarely(input, 16) ? whole(input) : 1 + input.below(3);
  layer.query_heads = rarely(input, 32) || layer.kv_heads < 0 || layer.kv_heads > 100
                          ? whole(input)
                          : layer.kv_heads * (1 + input.below(3));
  layer.key_dim = whole(input);
  layer.value_dim = whole(input);
  layer.value_is_key_prefix = rarely(input, 8);
  if (rarely(input, 4)) layer.scale = real(input);
  if (rarely(input, 4)) layer.soft_cap = real(input);
  layer.cached = !rarely(input, 8);
  layer.dense = rarely(input, 4);
  if (rarely(input, 8)) layer.window = whole(input);
  if (rarely(input, 8)) {
    const std::int64_t heads =
        rarely(input, 16) ? 3 : std::clamp<std::int64_t>(layer.query_heads, 0, 400);
    for (std::int64_t h = 0; h < heads; ++h)
      layer.sink_logits.push_back(
          rarely(input, 96) ? input.take<float>() : static_cast<float>(input.take<std::int8_t>()));
  }
  if (rarely(input, 8)) layer.global_layer = whole(input);
  if (rarely(input, 8)) layer.first_global_kv_head = whole(input);
  if (rarely(input, 16)) layer.global_kv_heads = whole(input);
  if (rarely(input, 16)) layer.global_query_heads = whole(input);
  if (rarely(input, 8)) layer.compress_from = whole(input);
  return layer;
}

CacheConfig config_of(Input& input) {
  CacheConfig config;
  for (std::uint8_t n = input.below(4); n > 0; --n) config.layers.push_back(layer_of(input));
  config.storage = value_of<DType>(input, 3);
  config.keep = real(input);
  config.fetch.mode = value_of<FetchMode>(input, 3);
  config.fetch.risk = maybe(input, real);
  config.fetch.epsilon = maybe(input, real);
  if (rarely(input, 4)) config.fetch.delta = real(input);
  if (rarely(input, 4)) config.fetch.limit_tokens = whole(input);
  if (rarely(input, 8)) config.fast_bytes_limit = whole(input);
  if (rarely(input, 8)) config.host_bytes_limit = whole(input);
  config.local_tokens = whole(input);
  config.sink_tokens = whole(input);
  if (rarely(input, 8)) config.window_margin = whole(input);
  config.chunk_tokens = maybe(input, whole);
  config.compress_from = maybe(input, whole);
  config.pool = value_of<Pool>(input, 3);
  config.sketch.kind = value_of<SketchKind>(input, 2);
  config.sketch.bits = rarely(input, 32) ? static_cast<int>(whole(input)) : 2 + input.below(3);
  config.seed = input.take<std::uint64_t>();
  config.threads = rarely(input, 8) ? static_cast<int>(whole(input)) : 1;
  config.study.select = value_of<Selection>(input, 3);
  config.study.estimator = value_of<Estimator>(input, 2);
  if (rarely(input, 4)) config.study.inclusion_floor = config.keep * real(input);
  config.study.order = value_of<FetchOrder>(input, 2);
  if (rarely(input, 4)) config.study.probability = real(input);
  config.study.cap = maybe(input, [](Input& in) { return 1 + real(in); });
  config.study.vector_code = rarely(input, 2);
  return config;
}

// Of one token of all layers: what a run of a few tokens is small enough for.
std::int64_t numbers(const CacheConfig& config) {
  std::int64_t sum = 0;
  for (const LayerConfig& layer : config.layers)
    if (layer.cached) sum += layer.query_heads * (layer.key_dim + layer.value_dim);
  return sum;
}

void serve(KvCacheManager& cache, Input& input) {
  const CacheConfig& config = cache.config();
  const SequenceId id = cache.create_sequence();
  for (int round = 0; round < 2; ++round) {
    std::vector<ImportanceView> importance(config.layers.size());
    std::vector<float> scores;
    for (std::size_t l = 0; l < config.layers.size(); ++l) {
      const LayerConfig& layer = config.layers[l];
      if (!layer.cached) continue;
      const std::int64_t index = static_cast<std::int64_t>(l);
      const std::int64_t tokens = 1 + input.below(40);
      std::vector<float> rows(
          static_cast<std::size_t>(tokens * std::max(layer.kv_heads, layer.query_heads) *
                                   std::max(layer.key_dim, layer.value_dim)));
      for (float& x : rows) x = static_cast<float>(input.take<std::int8_t>()) / 32;
      cache.append(
          id, index, token_major(rows.data(), DType::f32, tokens, layer.kv_heads, layer.key_dim),
          layer.value_is_key_prefix
              ? TensorView{}
              : token_major(rows.data(), DType::f32, tokens, layer.kv_heads, layer.value_dim));
      const std::int64_t open = cache.tokens(id, index) - cache.compressed_tokens(id, index);
      importance[l] = {nullptr, layer.kv_heads, open, open};
      scores.resize(std::max(scores.size(), static_cast<std::size_t>(layer.kv_heads * open)));
    }
    for (float& x : scores) x = input.take<std::uint8_t>();
    for (ImportanceView& view : importance) view.data = scores.data();
    cache.compress(id, importance);
    for (std::size_t l = 0; l < config.layers.size(); ++l) {
      const LayerConfig& layer = config.layers[l];
      if (!layer.cached) continue;
      std::vector<float> query(static_cast<std::size_t>(layer.query_heads * layer.key_dim), 0.5f);
      std::vector<float> output(static_cast<std::size_t>(layer.query_heads * layer.value_dim));
      std::vector<QueryHeadReport> reports(static_cast<std::size_t>(layer.query_heads));
      cache.attend(static_cast<std::int64_t>(l),
                   {{&id, 1},
                    token_major(query.data(), DType::f32, 1, layer.query_heads, layer.key_dim),
                    output,
                    {},
                    reports,
                    {},
                    {}});
      for (const float x : output) require(!std::isnan(x), "an output is a number");
      for (const QueryHeadReport& report : reports)
        require(report.epsilon >= 0, "a bound is not negative");
    }
  }
  cache.redraw(id, 5);
  cache.erase(id);
  require(cache.memory().host_bytes == 0, "what is erased takes no memory");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  const CacheConfig config = config_of(input);
  const bool supported = unsupported_reasons(config).empty();
  if (supported && (numbers(config) > 400 || config.threads.value_or(1) > 4)) return 0;
  try {
    const auto cache = make_cpu_cache(config);
    require(supported, "what is not supported is refused");
    serve(*cache, input);
  } catch (const InvalidArgument&) {
    require(!supported, "what is supported is served");
  } catch (const CapacityError&) {
    require(config.fast_bytes_limit || config.host_bytes_limit, "no limit is met that is not set");
  }
  return 0;
}
