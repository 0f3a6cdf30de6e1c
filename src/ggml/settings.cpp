#include "settings.hpp"

#include <charconv>
#include <stdexcept>
#include <string_view>
#include <system_error>

namespace verkv_ggml {
namespace {

[[noreturn]] void refuse(const char* name, std::string_view value, const char* right) {
  throw std::invalid_argument(std::string(name) + "=" + std::string(value) + ": it may be " +
                              right);
}

// The whole of a text as a number.
template <class T>
std::optional<T> number(std::string_view text) {
  T value{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || text.empty()) return std::nullopt;
  return value;
}

constexpr const char* kLayers = "VERKV_GGML_LAYERS";
constexpr const char* kLayersRight =
    "layers and ranges of layers from 0 on, such as 0,4-11; without it: all";

std::vector<std::pair<int, int>> read_layers(std::string_view text) {
  std::vector<std::pair<int, int>> ranges;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t comma = std::min(text.find(',', begin), text.size());
    const std::string_view part = text.substr(begin, comma - begin);
    const std::size_t dash = std::min(part.find('-'), part.size());
    const std::optional<int> first = number<int>(part.substr(0, dash));
    const std::optional<int> last = dash < part.size() ? number<int>(part.substr(dash + 1)) : first;
    if (!first || !last || *first < 0 || *last < *first) refuse(kLayers, text, kLayersRight);
    ranges.emplace_back(*first, *last);
    begin = comma + 1;
  }
  return ranges;
}

}  // namespace

bool Settings::takes(int layer) const {
  for (const auto& [first, last] : layers)
    if (first <= layer && layer <= last) return true;
  return layers.empty();
}

Settings read_settings(const Lookup& lookup) {
  Settings settings;
  if (const char* text = lookup("VERKV_GGML")) {
    const std::string_view value = text;
    if (value != "on" && value != "off") refuse("VERKV_GGML", value, "on or off");
    settings.on = value == "on";
  }
  if (const char* text = lookup(kLayers)) settings.layers = read_layers(text);
  if (const char* text = lookup("VERKV_GGML_REPORT")) {
    if (*text == '\0') refuse("VERKV_GGML_REPORT", text, "the name of a file to be written");
    settings.report = text;
  }
  return settings;
}

}  // namespace verkv_ggml
