#include "safetensors_header.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <optional>
#include <set>

namespace verkv {
namespace {

using Json = nlohmann::json;

// Tensors are two levels deep; more is not a safetensors header, and a parser may be asked for much
// more.
constexpr std::size_t kDepthLimit = 8;

std::optional<std::uint64_t> element_bytes(std::string_view type) {
  static constexpr std::array<std::pair<std::string_view, std::uint64_t>, 15> known{{{"BOOL", 1},
                                                                                     {"U8", 1},
                                                                                     {"I8", 1},
                                                                                     {"F8_E4M3", 1},
                                                                                     {"F8_E5M2", 1},
                                                                                     {"U16", 2},
                                                                                     {"I16", 2},
                                                                                     {"F16", 2},
                                                                                     {"BF16", 2},
                                                                                     {"U32", 4},
                                                                                     {"I32", 4},
                                                                                     {"F32", 4},
                                                                                     {"U64", 8},
                                                                                     {"I64", 8},
                                                                                     {"F64", 8}}};
  for (const auto& [name, bytes] : known) {
    if (name == type) return bytes;
  }
  return std::nullopt;
}

std::uint64_t count_of(const Complaints& complaints, const Json& value, std::string_view tensor,
                       std::string_view what) {
  constexpr auto limit = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (!value.is_number_unsigned()) {
    complaints.fail("tensor {}: {} has an element that is not a whole number of 0 or more",
                    in_quotes(tensor), what);
  }
  const auto number = value.get<std::uint64_t>();
  if (number > limit)
    complaints.fail("tensor {}: {} has the element {}, above {}", in_quotes(tensor), what, number,
                    limit);
  return number;
}

// What a parser forgives and the format does not: a zero byte, which ends the text for it, and a byte
// order mark.
void refuse_frame(const Complaints& complaints, const std::string& text) {
  if (const std::size_t zero = text.find('\0'); zero != std::string::npos) {
    complaints.fail("the header is not JSON: byte {} of {} is zero", zero + 1, text.size());
  }
  if (text.substr(0, 3) == "\xef\xbb\xbf") {
    complaints.fail("the header begins with a byte order mark, it must begin with {{");
  }
}

}  // namespace

std::string in_quotes(std::string_view text) {
  constexpr std::size_t longest = 80;
  std::string result = "'";
  for (const char c : text.substr(0, longest)) result += c >= ' ' && c <= '~' ? c : '?';
  if (text.size() > longest) result += "...";
  return result + "'";
}

std::string shown(const std::vector<std::int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

Json parse_header(const Complaints& complaints, const std::string& text) {
  std::vector<std::set<std::string>> keys;
  std::size_t depth = 0;
  const auto watch = [&](int, Json::parse_event_t event, Json& parsed) {
    switch (event) {
      case Json::parse_event_t::object_start:
      case Json::parse_event_t::array_start:
        if (++depth > kDepthLimit)
          complaints.fail("the header nests deeper than {} levels", kDepthLimit);
        keys.emplace_back();
        break;
      case Json::parse_event_t::object_end:
      case Json::parse_event_t::array_end:
        --depth;
        keys.pop_back();
        break;
      case Json::parse_event_t::key: {
        const auto& key = parsed.get_ref<const std::string&>();
        if (!keys.back().insert(key).second)
          complaints.fail("the header has the key {} twice", in_quotes(key));
        break;
      }
      case Json::parse_event_t::value:
        break;
    }
    return true;
  };
  refuse_frame(complaints, text);
  try {
    Json header = Json::parse(text, watch);
    if (!header.is_object()) complaints.fail("the header is not a JSON object");
    if (text.front() != '{')
      complaints.fail("the header begins with white space, it must begin with {{");
    return header;
  } catch (const Json::parse_error& error) {
    complaints.fail("the header is not JSON: error at byte {} of {}", error.byte, text.size());
  } catch (const Json::exception&) {
    complaints.fail("the header is not JSON that can be read");
  }
}

Entry parse_entry(const Complaints& complaints, const std::string& name, const Json& json,
                  std::uint64_t data_bytes) {
  Entry entry;
  entry.name = name;
  const auto member = [&](const char* key) -> const Json& {
    const auto found = json.is_object() ? json.find(key) : json.end();
    if (!json.is_object() || found == json.end())
      complaints.fail("tensor {} has no '{}'", in_quotes(name), key);
    return *found;
  };
  const Json& type = member("dtype");
  if (!type.is_string()) complaints.fail("tensor {}: dtype is not a string", in_quotes(name));
  entry.type = type.get<std::string>();
  const Json& shape = member("shape");
  if (!shape.is_array()) complaints.fail("tensor {}: shape is not an array", in_quotes(name));
  for (const Json& extent : shape) {
    entry.shape.push_back(static_cast<std::int64_t>(count_of(complaints, extent, name, "shape")));
  }
  const Json& offsets = member("data_offsets");
  if (!offsets.is_array() || offsets.size() != 2) {
    complaints.fail("tensor {}: data_offsets is not an array of 2 numbers", in_quotes(name));
  }
  entry.begin = count_of(complaints, offsets[0], name, "data_offsets");
  entry.end = count_of(complaints, offsets[1], name, "data_offsets");
  if (entry.begin > entry.end) {
    complaints.fail("tensor {}: begins at byte {}, behind its end at {}", in_quotes(name),
                    entry.begin, entry.end);
  }
  if (entry.end > data_bytes) {
    complaints.fail("tensor {}: ends at byte {} of the data, which has {} (truncated file?)",
                    in_quotes(name), entry.end, data_bytes);
  }
  if (const auto bytes = element_bytes(entry.type)) {
    std::uint64_t size = *bytes;
    for (const std::int64_t extent : entry.shape) {
      if (__builtin_mul_overflow(size, static_cast<std::uint64_t>(extent), &size)) {
        complaints.fail("tensor {}: the size of shape {} overflows 64 bits", in_quotes(name),
                        shown(entry.shape));
      }
    }
    if (size != entry.end - entry.begin) {
      complaints.fail("tensor {}: {} of shape {} takes {} bytes, but its offsets span {}",
                      in_quotes(name), entry.type, shown(entry.shape), size,
                      entry.end - entry.begin);
    }
  }
  return entry;
}

void refuse_overlaps(const Complaints& complaints, const std::map<std::string, Entry>& entries) {
  std::vector<const Entry*> order;
  for (const auto& [name, entry] : entries) {
    if (entry.begin < entry.end) order.push_back(&entry);
  }
  std::sort(order.begin(), order.end(),
            [](const Entry* a, const Entry* b) { return a->begin < b->begin; });
  for (std::size_t i = 1; i < order.size(); ++i) {
    if (order[i]->begin < order[i - 1]->end) {
      complaints.fail("tensor {} begins at byte {}, inside tensor {}, which ends at {}",
                      in_quotes(order[i]->name), order[i]->begin, in_quotes(order[i - 1]->name),
                      order[i - 1]->end);
    }
  }
}

}  // namespace verkv
