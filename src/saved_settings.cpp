#include "saved_settings.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <optional>
#include <span>

#include <verkv/clusters.hpp>
#include <verkv/sketch.hpp>

namespace verkv {
namespace {

template <class T>
std::string or_none(const std::optional<T>& value) {
  return value ? fmt::format("{}", *value) : "none";
}

class Lines {
 public:
  template <class T>
  void add(std::string_view name, const T& value) {
    fmt::format_to(std::back_inserter(text_), "{} {}\n", name, value);
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

void add_layer(Lines& lines, std::size_t index, const LayerConfig& layer) {
  const auto add = [&](std::string_view name, const auto& value) {
    lines.add(fmt::format("layer {}: {}", index, name), value);
  };
  add("cached", layer.cached);
  if (!layer.cached) return;
  add("dense", layer.dense);
  if (layer.window) add("window", *layer.window);
  add("KV heads", layer.kv_heads);
  add("query heads", layer.query_heads);
  add("key size", layer.key_dim);
  add("value size", layer.value_dim);
  if (layer.value_is_key_prefix) add("values", "the first numbers of keys");
  add("scale", or_none(layer.scale));
  add("soft cap", or_none(layer.soft_cap));
  add("global layer", layer.global_layer.value_or(static_cast<std::int64_t>(index)));
  add("first global KV head", layer.first_global_kv_head);
  if (layer.compress_from) add("compress from", *layer.compress_from);
  if (layer.sink_logits.empty()) return;
  // The scores of the local window rest on them. Their checksum: a model has thousands.
  Checksum sinks;
  sinks.add(std::as_bytes(std::span(layer.sink_logits)));
  add("sink logits", fmt::format("{:016x}", sinks.value()));
}

constexpr std::array<char, 8> kName = {'V', 'E', 'R', 'K', 'V', 'S', 'E', 'Q'};
// Of the form of what follows; any change of it is another version.
constexpr std::uint32_t kVersion = 1;
constexpr std::uint32_t kByteOrder = 0x01020304;
constexpr std::uint32_t kOtherByteOrder = 0x04030201;
constexpr std::uint64_t kMostSettings = std::uint64_t{1} << 26;  // bytes; 65,536 layers have fewer

std::string_view take_line(std::string_view& text) {
  const std::size_t end = text.find('\n');
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  return line;
}

}  // namespace

std::string saved_settings(const CacheConfig& config) {
  Lines lines;
  lines.add("storage", name(config.storage));
  lines.add("layers", config.layers.size());
  for (std::size_t i = 0; i < config.layers.size(); ++i) add_layer(lines, i, config.layers[i]);
  lines.add("keep", config.keep);
  lines.add("local tokens", config.local_tokens);
  lines.add("sink tokens", config.sink_tokens);
  lines.add("chunk tokens", or_none(config.chunk_tokens));
  if (config.chunks_in_turn) lines.add("chunks", "in turn");
  lines.add("compress from", or_none(config.compress_from));
  lines.add("pool", name(config.pool));
  lines.add("sketch", name(config.sketch.kind));
  if (has_codes(config.sketch.kind)) lines.add("sketch bits", config.sketch.bits);
  lines.add("seed", config.seed);
  lines.add("selection", name(config.study.select));
  lines.add("inclusion floor", config.study.inclusion_floor);
  lines.add("estimator", name(config.study.estimator));
  lines.add("tokens of a cluster", kClusterTokens);
  lines.add("tokens of a sketch group", kSketchGroup);
  return lines.take();
}

std::string first_difference(std::string_view saved, std::string_view here) {
  while (!saved.empty() || !here.empty()) {
    const std::string_view theirs = take_line(saved);
    const std::string_view ours = take_line(here);
    if (theirs != ours) return fmt::format("\"{}\" there, \"{}\" here", theirs, ours);
  }
  return {};
}

void put_head(SavedWriter& writer, const CacheConfig& config) {
  const std::string settings = saved_settings(config);
  writer.put_all(std::span<const char>(kName));
  writer.put(kByteOrder);
  writer.put(kVersion);
  writer.put(std::uint64_t{settings.size()});
  writer.put_all(std::span<const char>(settings));
  writer.end();
}

void check_head(SavedReader& reader, const CacheConfig& config) {
  reader.begin("head");
  std::array<char, 8> name{};
  reader.get_all(std::span<char>(name));
  if (name != kName) reader.refuse("this is not a saved sequence");
  const auto order = reader.get<std::uint32_t>();
  if (order == kOtherByteOrder) reader.refuse("it is of a machine with the other byte order");
  if (order != kByteOrder) reader.refuse("this is not a saved sequence, or it is damaged");
  const auto version = reader.get<std::uint32_t>();
  if (version != kVersion) {
    reader.refuse(
        fmt::format("version {} of the form; this library reads version {}", version, kVersion));
  }
  const auto size = reader.get<std::uint64_t>();
  if (size > kMostSettings) reader.refuse(fmt::format("{} bytes of settings: it is damaged", size));
  std::string settings;
  while (settings.size() < size) {
    const std::size_t at = settings.size();
    settings.resize(at + static_cast<std::size_t>(std::min<std::uint64_t>(size - at, 65536)));
    reader.get_all(std::span(settings).subspan(at));
  }
  reader.end();
  const std::string difference = first_difference(settings, saved_settings(config));
  if (!difference.empty()) reader.refuse("it is of another configuration: " + difference);
}

}  // namespace verkv
