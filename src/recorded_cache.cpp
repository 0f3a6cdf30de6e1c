// Reader of recorded caches. A file is a stranger: every number in it is checked before it is used,
// and whatever is wrong with it ends in a FormatError that names tensor, value and limit.
// Long because the checks of one format belong together.
#include <verkv/recorded_cache.hpp>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <ios>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "safetensors_header.hpp"

namespace verkv {

namespace {

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

using Json = nlohmann::json;

// The limit that the format itself sets.
constexpr std::uint64_t kHeaderLimit = 100'000'000;
constexpr std::int64_t kLayerLimit = 1'000'000;
// Of every tensor in memory. Files align none.
constexpr std::uint64_t kAlignment = 64;

constexpr std::string_view kImportancePrefix = "importance.";

// A whole decimal number without sign, space or leading zero.
std::optional<std::int64_t> parse_count(std::string_view text) {
  if (text.empty() || text.size() > 18 || (text.size() > 1 && text[0] == '0')) return std::nullopt;
  std::int64_t value = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') return std::nullopt;
    value = 10 * value + (c - '0');
  }
  return value;
}

std::optional<double> parse_real(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || !std::isfinite(value))
    return std::nullopt;
  return value;
}

// "layers.{l}.{part}" taken apart; nothing for names of another form.
struct LayerName {
  std::int64_t layer = 0;
  std::string_view part;
};

std::optional<LayerName> parse_layer_name(std::string_view name) {
  constexpr std::string_view prefix = "layers.";
  if (name.substr(0, prefix.size()) != prefix) return std::nullopt;
  name.remove_prefix(prefix.size());
  const std::size_t dot = name.find('.');
  if (dot == std::string_view::npos) return std::nullopt;
  const auto layer = parse_count(name.substr(0, dot));
  if (!layer || *layer >= kLayerLimit) return std::nullopt;
  return LayerName{*layer, name.substr(dot + 1)};
}

float read_float(const std::byte* address, DType type) {
  return with_element(type, [address](auto element) {
    std::memcpy(&element, address, sizeof element);
    return to_float(element);
  });
}

// "[2, 17, 5]" of a flat index.
std::string place(const std::vector<std::int64_t>& shape, std::int64_t flat) {
  std::vector<std::int64_t> index(shape.size());
  for (std::size_t i = shape.size(); i-- > 0;) {
    index[i] = flat % shape[i];
    flat /= shape[i];
  }
  return shown(index);
}

// What a loaded cache owns.
struct Contents {
  struct alignas(kAlignment) Block {
    std::byte bytes[kAlignment];
  };

  std::vector<Block> data;  // all tensors of the layers, each at a multiple of kAlignment
  std::vector<std::vector<float>> converted;  // importance that is not f32 in the file
  std::vector<RecordedLayer> layers;
  std::int64_t prompt_tokens = 0;
  std::int64_t steps = 0;
  double scale = 0;
  std::optional<double> soft_cap;
  std::optional<std::int64_t> window;
  std::map<std::string, std::string> metadata;
};

// A tensor of a layer, read.
struct Loaded {
  const Entry* entry = nullptr;
  DType type = DType::f32;
  const std::byte* data = nullptr;

  std::int64_t extent(std::size_t i) const { return entry->shape[i]; }
};

class Loader {
 public:
  explicit Loader(const std::string& path) : complaints_(path), path_(path) {}

  void load(Contents& out) {
    read_header(out);
    plan_layers();
    read_data(out);
    for (const auto& [layer, parts] : layers_) out.layers.push_back(make_layer(out, layer, parts));
    check_layers(out);
    read_numbers(out);
  }

 private:
  using Parts = std::map<std::string, Loaded, std::less<>>;

  void read_header(Contents& out) {
    std::error_code error;
    const auto status = std::filesystem::status(path_, error);
    if (!std::filesystem::exists(status)) complaints_.fail("no such file");
    if (!std::filesystem::is_regular_file(status)) complaints_.fail("not a regular file");
    const std::uintmax_t size = std::filesystem::file_size(path_, error);
    if (error) complaints_.fail("cannot tell its size: {}", error.message());
    file_.open(path_, std::ios::binary);
    if (!file_) complaints_.fail("cannot be opened for reading");

    std::array<unsigned char, 8> prefix{};
    if (size < prefix.size()) {
      complaints_.fail(
          "has {} bytes; a safetensors file begins with {} that give the length of its header",
          size, prefix.size());
    }
    read(prefix.data(), prefix.size(), "the length of the header");
    std::uint64_t header_bytes = 0;
    for (std::size_t i = prefix.size(); i-- > 0;) header_bytes = header_bytes << 8 | prefix[i];
    if (header_bytes > size - prefix.size()) {
      complaints_.fail(
          "the header is said to have {} bytes, but only {} follow (truncated, or not a "
          "safetensors file)",
          header_bytes, size - prefix.size());
    }
    if (header_bytes > kHeaderLimit) {
      complaints_.fail("the header is said to have {} bytes; the limit is {}", header_bytes,
                       kHeaderLimit);
    }
    std::string text(static_cast<std::size_t>(header_bytes), '\0');
    read(text.data(), text.size(), "the header");
    data_begin_ = prefix.size() + header_bytes;
    const std::uint64_t data_bytes = size - data_begin_;

    const Json header = parse_header(complaints_, text);
    for (const auto& [name, value] : header.items()) {
      if (name == "__metadata__") {
        if (!value.is_object()) complaints_.fail("__metadata__ is not an object");
        for (const auto& [key, word] : value.items()) {
          if (!word.is_string()) complaints_.fail("metadata {} is not a string", in_quotes(key));
          out.metadata[key] = word.get<std::string>();
        }
        continue;
      }
      entries_.emplace(name, parse_entry(complaints_, name, value, data_bytes));
    }
    refuse_overlaps(complaints_, entries_);
  }

  // Which tensors belong to which layer, and that none is missing or of a wrong type or rank.
  void plan_layers() {
    static constexpr std::array<std::string_view, 5> required{"key", "value", "query", "new_key",
                                                              "new_value"};
    for (const auto& [name, entry] : entries_) {
      const auto parsed = parse_layer_name(name);
      if (!parsed) continue;
      const bool importance =
          parsed->part.substr(0, kImportancePrefix.size()) == kImportancePrefix &&
          parsed->part.size() > kImportancePrefix.size();
      const bool known =
          importance || parsed->part == "prompt_query" ||
          std::find(required.begin(), required.end(), parsed->part) != required.end();
      if (!known) continue;
      Loaded tensor;
      tensor.entry = &entry;
      tensor.type = float_type(entry);
      const std::size_t rank = importance ? 2 : 3;
      if (entry.shape.size() != rank) {
        complaints_.fail("tensor {}: shape {} has {} dimensions, expected {}", in_quotes(name),
                         shown(entry.shape), entry.shape.size(), rank);
      }
      for (const std::int64_t extent : entry.shape) {
        if (extent == 0)
          complaints_.fail("tensor {}: shape {} is empty", in_quotes(name), shown(entry.shape));
      }
      layers_[parsed->layer].emplace(parsed->part, tensor);
    }
    if (layers_.empty())
      complaints_.fail("no recorded layer: there is no tensor 'layers.0.key' nor of another layer");
    for (const auto& [layer, parts] : layers_) {
      for (const std::string_view part : required) {
        if (!parts.contains(part))
          complaints_.fail("tensor 'layers.{}.{}' is missing", layer, part);
      }
    }
  }

  DType float_type(const Entry& entry) const {
    if (entry.type == "F32") return DType::f32;
    if (entry.type == "F16") return DType::f16;
    if (entry.type == "BF16") return DType::bf16;
    complaints_.fail("tensor {}: type {} is not one of F32, F16, BF16", in_quotes(entry.name),
                     in_quotes(entry.type));
  }

  void read_data(Contents& out) {
    const auto blocks = [](const Entry& entry) {
      return (entry.end - entry.begin + kAlignment - 1) / kAlignment;
    };
    std::uint64_t total = 0;
    for (const auto& [layer, parts] : layers_) {
      for (const auto& [part, tensor] : parts) total += blocks(*tensor.entry);
    }
    out.data.resize(static_cast<std::size_t>(total));
    Contents::Block* block = out.data.data();
    for (auto& [layer, parts] : layers_) {
      for (auto& [part, tensor] : parts) {
        const Entry& entry = *tensor.entry;
        file_.seekg(static_cast<std::streamoff>(data_begin_ + entry.begin));
        read(block, static_cast<std::size_t>(entry.end - entry.begin), entry.name);
        tensor.data = block->bytes;
        block += blocks(entry);
      }
    }
  }

  void read(void* to, std::size_t bytes, std::string_view what) {
    file_.read(static_cast<char*>(to), static_cast<std::streamsize>(bytes));
    if (!file_ || file_.gcount() != static_cast<std::streamsize>(bytes)) {
      complaints_.fail("cannot read the {} bytes of {}", bytes, what);
    }
  }

  void expect(const Loaded& tensor, const std::vector<std::int64_t>& shape,
              std::string_view form) const {
    if (tensor.entry->shape != shape) {
      complaints_.fail("tensor {}: shape {} should be {}, {}", in_quotes(tensor.entry->name),
                       shown(tensor.entry->shape), shown(shape), form);
    }
  }

  void refuse_non_finite(const Loaded& tensor) const {
    const std::size_t step = size_bytes(tensor.type);
    const std::size_t count =
        static_cast<std::size_t>(tensor.entry->end - tensor.entry->begin) / step;
    for (std::size_t i = 0; i < count; ++i) {
      if (!std::isfinite(read_float(tensor.data + i * step, tensor.type))) {
        complaints_.fail("tensor {}: element {} is {}, not a finite number",
                         in_quotes(tensor.entry->name),
                         place(tensor.entry->shape, static_cast<std::int64_t>(i)),
                         read_float(tensor.data + i * step, tensor.type));
      }
    }
  }

  RecordedLayer make_layer(Contents& out, std::int64_t index, const Parts& parts) const {
    RecordedLayer layer;
    layer.index = index;
    const Loaded& key = parts.find("key")->second;
    const Loaded& value = parts.find("value")->second;
    const Loaded& query = parts.find("query")->second;
    const Loaded& new_key = parts.find("new_key")->second;
    const Loaded& new_value = parts.find("new_value")->second;

    const std::int64_t tokens = key.extent(1);
    const std::int64_t steps = query.extent(0);
    layer.kv_heads = key.extent(0);
    layer.key_dim = key.extent(2);
    layer.value_dim = value.extent(2);
    layer.query_heads = query.extent(1);
    expect(value, {layer.kv_heads, tokens, layer.value_dim},
           "[kv_heads, tokens, head_dim] as the key");
    expect(query, {steps, layer.query_heads, layer.key_dim},
           "[steps, query_heads, head_dim] with the key's head_dim");
    expect(new_key, {steps, layer.kv_heads, layer.key_dim},
           "[steps, kv_heads, head_dim] as key and query");
    expect(new_value, {steps, layer.kv_heads, layer.value_dim},
           "[steps, kv_heads, head_dim] as value and query");
    if (layer.query_heads % layer.kv_heads != 0) {
      complaints_.fail("tensor {}: {} query heads are no multiple of the {} KV heads",
                       in_quotes(query.entry->name), layer.query_heads, layer.kv_heads);
    }
    layer.key = head_major(key.data, key.type, tokens, layer.kv_heads, layer.key_dim);
    layer.value = head_major(value.data, value.type, tokens, layer.kv_heads, layer.value_dim);
    layer.query = token_major(query.data, query.type, steps, layer.query_heads, layer.key_dim);
    layer.new_key = token_major(new_key.data, new_key.type, steps, layer.kv_heads, layer.key_dim);
    layer.new_value =
        token_major(new_value.data, new_value.type, steps, layer.kv_heads, layer.value_dim);
    if (const auto found = parts.find("prompt_query"); found != parts.end()) {
      const Loaded& prompt = found->second;
      expect(prompt, {prompt.extent(0), layer.query_heads, layer.key_dim},
             "[positions, query_heads, head_dim] as the query");
      layer.prompt_query =
          token_major(prompt.data, prompt.type, prompt.extent(0), layer.query_heads, layer.key_dim);
    }
    for (const auto& [part, tensor] : parts) {
      if (part.substr(0, kImportancePrefix.size()) == kImportancePrefix) {
        expect(tensor, {layer.kv_heads, tokens}, "[kv_heads, tokens] as the key");
        layer.importance[part.substr(kImportancePrefix.size())] = make_importance(out, tensor);
      } else {
        refuse_non_finite(tensor);
      }
    }
    return layer;
  }

  ImportanceView make_importance(Contents& out, const Loaded& tensor) const {
    const std::int64_t count = tensor.extent(0) * tensor.extent(1);
    const std::size_t step = size_bytes(tensor.type);
    ImportanceView view{nullptr, tensor.extent(0), tensor.extent(1), tensor.extent(1)};
    std::vector<float> scores(tensor.type == DType::f32 ? 0 : static_cast<std::size_t>(count));
    for (std::int64_t i = 0; i < count; ++i) {
      const float score = read_float(tensor.data + static_cast<std::size_t>(i) * step, tensor.type);
      if (!(score >= 0) || std::isinf(score)) {
        complaints_.fail("tensor {}: element {} is {}; an importance is finite and not below 0",
                         in_quotes(tensor.entry->name), place(tensor.entry->shape, i), score);
      }
      if (!scores.empty()) scores[static_cast<std::size_t>(i)] = score;
    }
    if (scores.empty()) {
      view.data = reinterpret_cast<const float*>(tensor.data);
    } else {
      out.converted.push_back(std::move(scores));
      view.data = out.converted.back().data();
    }
    return view;
  }

  void check_layers(Contents& out) const {
    const RecordedLayer& first = out.layers.front();
    out.prompt_tokens = first.key.tokens;
    out.steps = first.query.tokens;
    for (const RecordedLayer& layer : out.layers) {
      if (layer.key.tokens != out.prompt_tokens) {
        complaints_.fail("tensor 'layers.{}.key' has {} tokens, 'layers.{}.key' has {}",
                         layer.index, layer.key.tokens, first.index, out.prompt_tokens);
      }
      if (layer.query.tokens != out.steps) {
        complaints_.fail("tensor 'layers.{}.query' has {} steps, 'layers.{}.query' has {}",
                         layer.index, layer.query.tokens, first.index, out.steps);
      }
    }
  }

  // The metadata that the numbers depend on.
  void read_numbers(Contents& out) const {
    const auto text = [&](const char* key) -> const std::string* {
      const auto found = out.metadata.find(key);
      return found == out.metadata.end() ? nullptr : &found->second;
    };
    if (const std::string* tokens = text("prompt_tokens")) {
      const auto value = parse_count(*tokens);
      if (!value)
        complaints_.fail("metadata 'prompt_tokens' is {}, not a whole number", in_quotes(*tokens));
      if (*value != out.prompt_tokens) {
        complaints_.fail("metadata 'prompt_tokens' is {}, but the keys have {} tokens", *value,
                         out.prompt_tokens);
      }
    }
    if (const std::string* scale = text("scale")) {
      const auto value = parse_real(*scale);
      if (!value || !(*value > 0))
        complaints_.fail("metadata 'scale' is {}, not a number above 0", in_quotes(*scale));
      out.scale = *value;
    } else {
      const RecordedLayer& first = out.layers.front();
      for (const RecordedLayer& layer : out.layers) {
        if (layer.key_dim != first.key_dim) {
          complaints_.fail(
              "metadata 'scale' is missing and does not follow from the keys: head_dim is {} in "
              "layer {}, {} in layer {}",
              first.key_dim, first.index, layer.key_dim, layer.index);
        }
      }
      out.scale = 1 / std::sqrt(static_cast<double>(first.key_dim));
    }
    if (const std::string* cap = text("soft_cap")) {
      const auto value = parse_real(*cap);
      if (!value || *value < 0)
        complaints_.fail("metadata 'soft_cap' is {}, not a number of 0 or more", in_quotes(*cap));
      if (*value > 0) out.soft_cap = *value;
    }
    if (const std::string* window = text("window")) {
      const auto value = parse_count(*window);
      if (!value)
        complaints_.fail("metadata 'window' is {}, not a whole number of 0 or more",
                         in_quotes(*window));
      if (*value > 0) out.window = *value;
    }
  }

  Complaints complaints_;
  std::string path_;
  std::ifstream file_;
  std::uint64_t data_begin_ = 0;
  std::map<std::string, Entry> entries_;
  std::map<std::int64_t, Parts> layers_;
};

}  // namespace

struct RecordedCache::Impl : Contents {};

RecordedCache::RecordedCache() : impl_(std::make_unique<Impl>()) {}
RecordedCache::RecordedCache(RecordedCache&&) noexcept = default;
RecordedCache& RecordedCache::operator=(RecordedCache&&) noexcept = default;
RecordedCache::~RecordedCache() = default;

RecordedCache RecordedCache::load(const std::string& path) {
  RecordedCache cache;
  Loader(path).load(*cache.impl_);
  return cache;
}

const std::vector<RecordedLayer>& RecordedCache::layers() const { return impl_->layers; }
std::int64_t RecordedCache::prompt_tokens() const { return impl_->prompt_tokens; }
std::int64_t RecordedCache::steps() const { return impl_->steps; }
double RecordedCache::scale() const { return impl_->scale; }
std::optional<double> RecordedCache::soft_cap() const { return impl_->soft_cap; }
std::optional<std::int64_t> RecordedCache::window() const { return impl_->window; }
const std::map<std::string, std::string>& RecordedCache::metadata() const {
  return impl_->metadata;
}

}  // namespace verkv
