// Settings and errors of the C interface.
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <limits>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "c_face.hpp"

#include <verkv/kv_cache_manager.hpp>

namespace verkv::c_face {
namespace {

constexpr std::size_t kTextBytes = sizeof(verkv_error::text);

// ---- Optional numbers and enumerations

std::optional<double> from_c(const verkv_optional_double& x) {
  return x.has_value != 0 ? std::optional(x.value) : std::nullopt;
}

std::optional<std::int64_t> from_c(const verkv_optional_int64& x) {
  return x.has_value != 0 ? std::optional(x.value) : std::nullopt;
}

verkv_optional_double optional(const std::optional<double>& x) noexcept {
  return {x.has_value(), x.value_or(0)};
}

verkv_optional_int64 optional(const std::optional<std::int64_t>& x) noexcept {
  return {x.has_value(), x.value_or(0)};
}

template <class Enumeration>
std::int32_t number(Enumeration value) noexcept {
  return static_cast<std::int32_t>(value);
}

// unsupported_reasons judges the rest.
template <class Enumeration>
Enumeration enumerator(std::int64_t value, const char* what) {
  if (value < 0 || value > std::numeric_limits<std::underlying_type_t<Enumeration>>::max())
    invalid(ErrorCode::setting, "{} {}; not a value of its enumeration", what, value);
  return static_cast<Enumeration>(value);
}

int narrow(std::int64_t value, const char* what) {
  if (value < std::numeric_limits<int>::min() || value > std::numeric_limits<int>::max())
    invalid(ErrorCode::setting, "{} {}; a number of 32 bits is needed", what, value);
  return static_cast<int>(value);
}

// Found again in a configuration by its type.
struct CExecutor {
  verkv_executor executor;
  void* user;

  void operator()(int parts, const std::function<void(int)>& part) const {
    const auto call = [](void* argument, std::int32_t index) {
      (*static_cast<const std::function<void(int)>*>(argument))(index);
    };
    executor(user, parts, call, const_cast<std::function<void(int)>*>(&part));
  }
};

LayerConfig layer_config(const verkv_layer_config& c) {
  LayerConfig layer;
  layer.kv_heads = c.kv_heads;
  layer.query_heads = c.query_heads;
  layer.key_dim = c.key_dim;
  layer.value_dim = c.value_dim;
  layer.scale = from_c(c.scale);
  layer.soft_cap = from_c(c.soft_cap);
  layer.cached = c.cached != 0;
  layer.dense = c.dense != 0;
  layer.window = from_c(c.window);
  layer.global_layer = from_c(c.global_layer);
  layer.first_global_kv_head = c.first_global_kv_head;
  const auto sinks = array(c.sink_logits, c.sink_logit_count, "sink logits");
  layer.sink_logits.assign(sinks.begin(), sinks.end());
  layer.value_is_key_prefix = c.value_is_key_prefix != 0;
  layer.global_kv_heads = from_c(c.global_kv_heads);
  layer.global_query_heads = from_c(c.global_query_heads);
  layer.compress_from = from_c(c.compress_from);
  return layer;
}

// Layers of another version lie as far from each other as the caller says.
std::vector<LayerConfig> layers(const verkv_cache_config& c) {
  const auto first =
      array(reinterpret_cast<const unsigned char*>(c.layers), c.layer_count, "layers");
  std::vector<LayerConfig> result;
  if (first.empty()) return result;
  check_layer_size(c.layer_size);
  const verkv_layer_config defaults = to_c(LayerConfig{});
  for (std::size_t i = 0; i < first.size(); ++i) {
    result.push_back(
        layer_config(taken(first.data() + i * c.layer_size, c.layer_size, defaults, "a layer")));
  }
  return result;
}

// ---- Errors

void write_error(verkv_error* to, verkv_error error, const char* text) noexcept {
  if (to == nullptr) return;
  const std::size_t length = std::min(std::strlen(text), kTextBytes - 1);
  std::memcpy(error.text, text, length);
  error.size = to->size;
  hand_out(error, to, to->size);
  // A caller with less room for the text.
  const std::size_t end = std::min(to->size, offsetof(verkv_error, text) + kTextBytes);
  if (end > offsetof(verkv_error, text)) reinterpret_cast<char*>(to)[end - 1] = 0;
}

verkv_error nowhere(verkv_code code) noexcept {
  verkv_error error = {};
  error.code = code;
  error.layer = error.row = error.head = error.token = -1;
  return error;
}

verkv_error error_of(const Error& from) noexcept {
  // The library's errors have a code; without one it is somebody else's.
  verkv_error error =
      nowhere(from.code() == ErrorCode::other ? VERKV_ERROR_INTERNAL
                                              : static_cast<verkv_code>(from.code()));
  error.layer = from.place().layer;
  error.row = from.place().row;
  error.head = from.place().head;
  error.token = from.place().token;
  return error;
}

}  // namespace

bool is_usable(const verkv_error* error) noexcept {
  return error == nullptr ||
         (error->size >= offsetof(verkv_error, text) && error->size <= kLargestStruct &&
          error->size % alignof(verkv_error) == 0);
}

verkv_code caught(verkv_error* to) noexcept {
  verkv_error error = nowhere(VERKV_ERROR_INTERNAL);
  try {
    throw;
  } catch (const CallbackFailure& failure) {
    error.code = VERKV_ERROR_CALLBACK;
    error.callback_status = failure.status;
    write_error(to, error, failure.text.c_str());
  } catch (const DeviceError& failure) {
    error = error_of(failure);
    error.device_code = failure.device_code();
    write_error(to, error, failure.what());
  } catch (const Error& failure) {
    error = error_of(failure);
    write_error(to, error, failure.what());
  } catch (const std::bad_alloc&) {
    error.code = VERKV_ERROR_NO_MEMORY;
    write_error(to, error, "out of main memory");
  } catch (const std::exception& failure) {
    write_error(to, error, failure.what());
  } catch (...) {
    write_error(to, error, "an exception of an unknown type");
  }
  return error.code;
}

TextResult::TextResult(char* text, std::size_t bytes, std::size_t* length)
    : text_(text), bytes_(bytes), length_(length) {
  if (text == nullptr && (bytes > 0 || length == nullptr))
    invalid("the text is NULL for {} bytes{}", bytes, length == nullptr ? ", its length too" : "");
  if (text != nullptr && bytes == 0 && length == nullptr)
    invalid("there is no room for a text: 0 bytes, and its length is NULL");
}

void TextResult::set(const std::string& text) noexcept {
  if (bytes_ > 0) {
    const std::size_t count = std::min(text.size(), bytes_ - 1);
    std::memcpy(text_, text.data(), count);
    text_[count] = 0;
  }
  if (length_ != nullptr) *length_ = text.size();
}

void check_layer_size(std::size_t size) {
  check_size(size, alignof(verkv_layer_config), alignof(verkv_layer_config), "a layer");
}

verkv_layer_config to_c(const LayerConfig& layer) noexcept {
  verkv_layer_config c = {};
  c.kv_heads = layer.kv_heads;
  c.query_heads = layer.query_heads;
  c.key_dim = layer.key_dim;
  c.value_dim = layer.value_dim;
  c.scale = optional(layer.scale);
  c.soft_cap = optional(layer.soft_cap);
  c.cached = layer.cached;
  c.dense = layer.dense;
  c.window = optional(layer.window);
  c.global_layer = optional(layer.global_layer);
  c.first_global_kv_head = layer.first_global_kv_head;
  c.sink_logits = layer.sink_logits.data();
  c.sink_logit_count = std::ssize(layer.sink_logits);
  c.value_is_key_prefix = layer.value_is_key_prefix;
  c.global_kv_heads = optional(layer.global_kv_heads);
  c.global_query_heads = optional(layer.global_query_heads);
  c.compress_from = optional(layer.compress_from);
  return c;
}

verkv_cache_config to_c(const CacheConfig& config) noexcept {
  verkv_cache_config c = {};
  c.size = sizeof(c);
  c.layer_count = static_cast<std::int64_t>(config.layers.size());
  c.layer_size = sizeof(verkv_layer_config);
  c.keep = config.keep;
  c.storage = number(config.storage);
  c.pool = number(config.pool);
  c.fetch_mode = number(config.fetch.mode);
  c.sketch_kind = number(config.sketch.kind);
  c.fetch_risk = optional(config.fetch.risk);
  c.fetch_epsilon = optional(config.fetch.epsilon);
  c.fetch_delta = config.fetch.delta;
  c.fetch_limit_tokens = optional(config.fetch.limit_tokens);
  c.fast_bytes_limit = optional(config.fast_bytes_limit);
  c.host_bytes_limit = optional(config.host_bytes_limit);
  c.local_tokens = config.local_tokens;
  c.sink_tokens = config.sink_tokens;
  c.window_margin = config.window_margin;
  c.chunk_tokens = optional(config.chunk_tokens);
  c.compress_from = optional(config.compress_from);
  c.sketch_bits = config.sketch.bits;
  c.seed = config.seed;
  c.threads = {config.threads.has_value(), config.threads.value_or(0)};
  if (const auto* executor = config.executor.target<CExecutor>()) {
    c.executor = executor->executor;
    c.executor_user = executor->user;
  }
  c.study_select = number(config.study.select);
  c.study_estimator = number(config.study.estimator);
  c.study_inclusion_floor = config.study.inclusion_floor;
  c.study_order = number(config.study.order);
  c.study_vector_code = config.study.vector_code;
  c.study_probability = optional(config.study.probability);
  c.study_cap = optional(config.study.cap);
  c.host = number(config.host);
  c.chunks_in_turn = config.chunks_in_turn;
  const TierAllocator& fast = config.fast_allocator;
  const TierAllocator& host = config.host_allocator;
  c.fast_allocator = {fast.allocate, fast.release, fast.user};
  c.host_allocator = {host.allocate, host.release, host.user};
  c.host_directory = config.host_directory.empty() ? nullptr : config.host_directory.c_str();
  return c;
}

CacheConfig cache_config(const verkv_cache_config* from) {
  const verkv_cache_config c = taken(from, to_c(CacheConfig{}), "verkv_cache_config");
  CacheConfig config;
  config.layers = layers(c);
  config.keep = c.keep;
  config.storage = enumerator<DType>(c.storage, "storage type");
  config.pool = enumerator<Pool>(c.pool, "pool");
  config.fetch.mode = enumerator<FetchMode>(c.fetch_mode, "fetch mode");
  config.sketch.kind = enumerator<SketchKind>(c.sketch_kind, "sketch kind");
  config.fetch.risk = from_c(c.fetch_risk);
  config.fetch.epsilon = from_c(c.fetch_epsilon);
  config.fetch.delta = c.fetch_delta;
  config.fetch.limit_tokens = from_c(c.fetch_limit_tokens);
  config.fast_bytes_limit = from_c(c.fast_bytes_limit);
  config.host_bytes_limit = from_c(c.host_bytes_limit);
  config.local_tokens = c.local_tokens;
  config.sink_tokens = c.sink_tokens;
  config.window_margin = c.window_margin;
  config.chunk_tokens = from_c(c.chunk_tokens);
  config.compress_from = from_c(c.compress_from);
  config.chunks_in_turn = c.chunks_in_turn != 0;
  config.sketch.bits = narrow(c.sketch_bits, "sketch bits");
  config.seed = c.seed;
  config.threads = std::nullopt;
  if (c.threads.has_value != 0) config.threads = narrow(c.threads.value, "threads");
  if (c.executor != nullptr) config.executor = CExecutor{c.executor, c.executor_user};
  config.study.select = enumerator<Selection>(c.study_select, "selection");
  config.study.estimator = enumerator<Estimator>(c.study_estimator, "estimator");
  config.study.inclusion_floor = c.study_inclusion_floor;
  config.study.order = enumerator<FetchOrder>(c.study_order, "fetch order");
  config.study.vector_code = c.study_vector_code != 0;
  config.study.probability = from_c(c.study_probability);
  config.study.cap = from_c(c.study_cap);
  config.host = enumerator<HostTier>(c.host, "host tier");
  const verkv_tier_allocator& fast = c.fast_allocator;
  const verkv_tier_allocator& host = c.host_allocator;
  config.fast_allocator = {fast.allocate, fast.release, fast.user};
  config.host_allocator = {host.allocate, host.release, host.user};
  if (c.host_directory != nullptr) config.host_directory = c.host_directory;
  return config;
}

double keep(double fast_share, const verkv_layer_config* layer, std::size_t layer_size,
            std::int32_t storage, std::int32_t kind, std::int64_t bits, std::int32_t estimator) {
  needed(layer, "the layer");
  check_layer_size(layer_size);
  const void* const from = layer;
  return keep_for_fast_share(
      fast_share, layer_config(taken(from, layer_size, to_c(LayerConfig{}), "a layer")),
      enumerator<DType>(storage, "storage type"),
      {enumerator<SketchKind>(kind, "sketch kind"), narrow(bits, "sketch bits")},
      enumerator<Estimator>(estimator, "estimator"));
}

}  // namespace verkv::c_face

using verkv::c_face::guarded;

extern "C" {

int32_t verkv_version(void) { return VERKV_VERSION; }

const char* verkv_code_name(verkv_code code) {
  if (code == VERKV_OK) return "ok";
  if (code == VERKV_ERROR_NO_MEMORY) return "no_memory";
  if (code == VERKV_ERROR_INTERNAL) return "internal";
  if (code == VERKV_ERROR_CALLBACK) return "callback";
  if (code < 0 || code > 255) return "?";
  return verkv::name(static_cast<verkv::ErrorCode>(code));
}

verkv_code verkv_layer_config_init(verkv_layer_config* layer, size_t size, verkv_error* error) {
  return guarded(error, [&] {
    verkv::c_face::needed(layer, "the layer");
    verkv::c_face::check_layer_size(size);
    verkv::c_face::hand_out(verkv::c_face::to_c(verkv::LayerConfig{}), layer, size);
  });
}

verkv_code verkv_cache_config_init(verkv_cache_config* config, size_t size, verkv_error* error) {
  return guarded(error, [&] {
    verkv::c_face::needed(config, "the configuration");
    verkv::c_face::check_size(size, sizeof(size), alignof(verkv_cache_config),
                              "verkv_cache_config");
    verkv_cache_config defaults = verkv::c_face::to_c(verkv::CacheConfig{});
    defaults.size = size;
    verkv::c_face::hand_out(defaults, config, size);
  });
}

verkv_code verkv_unsupported_reasons(const verkv_cache_config* config, char* text, size_t bytes,
                                     size_t* length, verkv_error* error) {
  return guarded(error, [&] {
    verkv::c_face::TextResult result(text, bytes, length);
    std::string all;
    for (const std::string& reason : unsupported_reasons(verkv::c_face::cache_config(config)))
      all += reason + "\n";
    result.set(all);
  });
}

verkv_code verkv_keep_for_fast_share(double fast_share, const verkv_layer_config* layer,
                                     size_t layer_size, int32_t storage, int32_t sketch_kind,
                                     int64_t sketch_bits, int32_t study_estimator, double* keep,
                                     verkv_error* error) {
  return guarded(error, [&] {
    double& result = verkv::c_face::needed(keep, "where keep goes");
    result = verkv::c_face::keep(fast_share, layer, layer_size, storage, sketch_kind, sketch_bits,
                                 study_estimator);
  });
}

verkv_code verkv_sequence_bytes(const verkv_cache_config* config, int64_t tokens,
                                verkv_memory_report* appended, verkv_memory_report* compressed,
                                double* mean_resident_bytes, int64_t* most_fast_bytes,
                                int64_t* most_host_bytes, verkv_error* error) {
  return guarded(error, [&] {
    verkv::c_face::Result first(appended, "verkv_memory_report");
    verkv::c_face::Result second(compressed, "verkv_memory_report");
    double& mean = verkv::c_face::needed(mean_resident_bytes, "where mean_resident_bytes goes");
    std::int64_t& fast = verkv::c_face::needed(most_fast_bytes, "where most_fast_bytes goes");
    std::int64_t& host = verkv::c_face::needed(most_host_bytes, "where most_host_bytes goes");
    const verkv::SequenceBytes bytes =
        verkv::sequence_bytes(verkv::c_face::cache_config(config), tokens);
    first.set(verkv::c_face::to_c(bytes.appended));
    second.set(verkv::c_face::to_c(bytes.compressed));
    mean = bytes.mean_resident_bytes;
    fast = bytes.most_fast_bytes;
    host = bytes.most_host_bytes;
  });
}

}  // extern "C"
