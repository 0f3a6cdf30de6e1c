#include "safetensors.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "output_file.hpp"

namespace verkv::examples {

namespace {

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

using Json = nlohmann::json;

constexpr std::uint64_t kHeaderLimit = 100'000'000;  // the format's own
constexpr std::size_t kAlignment = 64;
constexpr std::size_t kLengthBytes = 8;
constexpr int kDepthLimit = 8;

struct TypeName {
  std::string_view name;
  std::uint64_t bytes;
};

TypeName type_name(TensorType type) {
  switch (type) {
    case TensorType::f32:
      return {"F32", 4};
    case TensorType::f16:
      return {"F16", 2};
    case TensorType::i64:
      return {"I64", 8};
  }
  return {"?", 0};
}

std::optional<std::uint64_t> element_bytes(std::string_view type) {
  for (const TensorType known : {TensorType::f32, TensorType::f16, TensorType::i64}) {
    if (type_name(known).name == type) return type_name(known).bytes;
  }
  return std::nullopt;
}

// Nothing where it overflows.
std::optional<std::uint64_t> size_of(const std::vector<std::int64_t>& shape, std::uint64_t bytes) {
  for (const std::int64_t extent : shape) {
    if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(extent), &bytes)) {
      return std::nullopt;
    }
  }
  return bytes;
}

// Names come from the file: cut, and free of what would upset a terminal.
std::string in_quotes(std::string_view text) {
  std::string result = "'";
  for (const char c : text.substr(0, 80)) result += c >= ' ' && c <= '~' ? c : '?';
  return result + (text.size() > 80 ? "...'" : "'");
}

std::string shown(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t extent : shape) {
    text += (text.empty() ? "" : ", ") + std::to_string(extent);
  }
  return "[" + text + "]";
}

template <class... Args>
[[noreturn]] void fail(const std::string& path, fmt::format_string<Args...> text, Args&&... args) {
  throw FormatError(path + ": " + fmt::format(text, std::forward<Args>(args)...));
}

Json parse_header(const std::string& path, std::string_view text) {
  // Which of two equal keys counts would depend on the reader; deep nesting is no header.
  std::vector<std::set<std::string>> keys;
  const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth > kDepthLimit) fail(path, "the header nests deeper than {} levels", kDepthLimit);
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys.back().insert(key).second) {
        fail(path, "the header has the key {} twice", in_quotes(key));
      }
    }
    return true;
  };
  // A parser takes a zero byte for the end of the text, and forgives what stands before a brace.
  if (text.find('\0') != std::string_view::npos) fail(path, "the header has a zero byte");
  if (text.substr(0, 3) == "\xef\xbb\xbf") fail(path, "the header begins with a byte order mark");
  Json header;
  try {
    header = Json::parse(text, watch);
  } catch (const Json::exception&) {
    fail(path, "the header is not JSON");
  }
  if (!header.is_object()) fail(path, "the header is not a JSON object");
  if (text.front() != '{') fail(path, "the header begins with white space, it must begin with {{");
  return header;
}

// A list of whole numbers that fit 63 bits.
std::vector<std::int64_t> counts(const std::string& path, const std::string& tensor,
                                 const Json& entry, const char* member) {
  const auto found = entry.find(member);
  if (found == entry.end() || !found->is_array()) {
    fail(path, "tensor {}: {} is not an array", in_quotes(tensor), member);
  }
  std::vector<std::int64_t> result;
  for (const Json& number : *found) {
    if (!number.is_number_unsigned() ||
        number.get<std::uint64_t>() >
            static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      fail(path, "tensor {}: {} has an element that is not a whole number below 2^63",
           in_quotes(tensor), member);
    }
    result.push_back(number.get<std::int64_t>());
  }
  return result;
}

}  // namespace

void write_safetensors(const std::string& path, const std::vector<TensorData>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<const TensorData*> order;
  for (const TensorData& tensor : tensors) order.push_back(&tensor);
  std::stable_sort(order.begin(), order.end(), [](const TensorData* a, const TensorData* b) {
    return type_name(a->type).bytes > type_name(b->type).bytes;
  });

  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::uint64_t bytes = 0;
  for (const TensorData* tensor : order) {
    const auto [type, element] = type_name(tensor->type);
    const bool empty = std::any_of(tensor->shape.begin(), tensor->shape.end(),
                                   [](std::int64_t extent) { return extent <= 0; });
    const std::optional<std::uint64_t> size = size_of(tensor->shape, element);
    if (empty || !size || tensor->data == nullptr) {
      throw InvalidArgument(
          fmt::format("tensor {}: no data, or the shape {}", tensor->name, shown(tensor->shape)));
    }
    if (header.contains(tensor->name)) {
      throw InvalidArgument(fmt::format("tensor {}: comes twice", tensor->name));
    }
    header[tensor->name] = {
        {"dtype", type}, {"shape", tensor->shape}, {"data_offsets", {bytes, bytes + *size}}};
    bytes += *size;
  }

  std::string text = header.dump(-1, ' ', false, Json::error_handler_t::replace);
  const std::size_t unaligned = (kLengthBytes + text.size()) % kAlignment;
  if (unaligned > 0) text.append(kAlignment - unaligned, ' ');
  std::string file;
  file.reserve(kLengthBytes + text.size() + bytes);
  const std::uint64_t length = text.size();
  file.append(reinterpret_cast<const char*>(&length), kLengthBytes);
  file += text;
  for (const TensorData* tensor : order) {
    file.append(static_cast<const char*>(tensor->data),
                *size_of(tensor->shape, type_name(tensor->type).bytes));
  }
  write_file(path, file);
}

SafetensorsFile SafetensorsFile::load(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) fail(path, "there is no such file");
  SafetensorsFile file;
  file.path_ = path;
  {
    std::ifstream stream(path, std::ios::binary);
    const std::uintmax_t size = std::filesystem::file_size(path, error);
    if (error || !stream) fail(path, "cannot be read");
    file.bytes_.resize(size);
    stream.read(file.bytes_.data(), static_cast<std::streamsize>(size));
    if (!stream) fail(path, "cannot be read to its end");
  }
  const std::string& bytes = file.bytes_;
  if (bytes.size() < kLengthBytes) fail(path, "has {} bytes and no header", bytes.size());
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), kLengthBytes);
  if (length > kHeaderLimit || length > bytes.size() - kLengthBytes) {
    fail(path, "a header of {} bytes, in a file of {} (limit {})", length, bytes.size(),
         kHeaderLimit);
  }
  const Json header = parse_header(path, std::string_view(bytes).substr(kLengthBytes, length));
  const std::uint64_t data = kLengthBytes + length;
  const std::uint64_t available = bytes.size() - data;

  for (const auto& [name, json] : header.items()) {
    if (name == "__metadata__") {
      if (!json.is_object()) fail(path, "__metadata__ is not an object");
      for (const auto& [key, value] : json.items()) {
        if (!value.is_string()) fail(path, "metadata {} is not a string", in_quotes(key));
        file.metadata_[key] = value.get<std::string>();
      }
      continue;
    }
    if (!json.is_object()) fail(path, "tensor {}: is not an object", in_quotes(name));
    Entry entry;
    const auto type = json.find("dtype");
    if (type == json.end() || !type->is_string()) {
      fail(path, "tensor {}: dtype is not a string", in_quotes(name));
    }
    entry.type = type->get<std::string>();
    entry.shape = counts(path, name, json, "shape");
    const std::vector<std::int64_t> offsets = counts(path, name, json, "data_offsets");
    if (offsets.size() != 2 || offsets[0] > offsets[1]) {
      fail(path, "tensor {}: data_offsets are not a begin and an end", in_quotes(name));
    }
    entry.begin = static_cast<std::uint64_t>(offsets[0]);
    entry.end = static_cast<std::uint64_t>(offsets[1]);
    if (entry.end > available) {
      fail(path, "tensor {}: ends at byte {} of the data, which has {} (truncated file?)",
           in_quotes(name), entry.end, available);
    }
    if (const auto element = element_bytes(entry.type)) {
      const std::optional<std::uint64_t> size = size_of(entry.shape, *element);
      if (!size || *size != entry.end - entry.begin) {
        fail(path, "tensor {}: its offsets span {} bytes, which {} of shape {} does not take",
             in_quotes(name), entry.end - entry.begin, in_quotes(entry.type), shown(entry.shape));
      }
    }
    entry.begin += data;
    entry.end += data;
    file.entries_[name] = std::move(entry);
  }
  return file;
}

FloatTensor SafetensorsFile::floats(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) fail(path_, "has no tensor {}", in_quotes(name));
  const Entry& entry = found->second;
  if (entry.type != "F32") {
    fail(path_, "tensor {}: is of type {}, F32 is needed", in_quotes(name), in_quotes(entry.type));
  }
  FloatTensor tensor;
  tensor.shape = entry.shape;
  tensor.values.resize((entry.end - entry.begin) / sizeof(float));
  if (!tensor.values.empty()) {
    std::memcpy(tensor.values.data(), bytes_.data() + entry.begin, entry.end - entry.begin);
  }
  for (std::size_t i = 0; i < tensor.values.size(); ++i) {
    if (!std::isfinite(tensor.values[i])) {
      fail(path_, "tensor {}: number {} is not finite", in_quotes(name), i);
    }
  }
  return tensor;
}

}  // namespace verkv::examples
