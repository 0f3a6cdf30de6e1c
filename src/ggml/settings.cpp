#include "settings.hpp"

#include <algorithm>
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

bool read_switch(const char* name, std::string_view text) {
  if (text != "on" && text != "off") refuse(name, text, "on or off");
  return text == "on";
}

// A number in (low, high], or in (low, high) where `open`.
double read_number(const char* name, std::string_view text, double low, double high, bool open,
                   const char* right) {
  const std::optional<double> value = number<double>(text);
  if (!value || !(*value > low) || !(open ? *value < high : *value <= high))
    refuse(name, text, right);
  return *value;
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
  if (const char* text = lookup("VERKV_GGML")) settings.on = read_switch("VERKV_GGML", text);
  if (const char* text = lookup("VERKV_GGML_KEEP")) {
    settings.keep =
        read_number("VERKV_GGML_KEEP", text, 0, 1, false,
                    "the share of tokens to keep, above 0 and at most 1, such as 0.0625");
  }
  if (const char* text = lookup("VERKV_GGML_RISK")) {
    settings.risk = std::nullopt;
    if (std::string_view(text) != "off") {
      settings.risk = read_number("VERKV_GGML_RISK", text, 0, 1e30, true,
                                  "the price of moving a token, above 0, such as 1e-4, or off");
    }
  }
  if (const char* text = lookup("VERKV_GGML_EPSILON")) {
    settings.epsilon = std::nullopt;
    if (std::string_view(text) != "off") {
      settings.epsilon =
          read_number("VERKV_GGML_EPSILON", text, 0, 1, true,
                      "the certified error, above 0 and below 1, such as 0.3, or off");
    }
  }
  if (const char* text = lookup("VERKV_GGML_FROM")) {
    const std::optional<std::int64_t> from = number<std::int64_t>(text);
    if (!from || *from < 1)
      refuse("VERKV_GGML_FROM", text, "the tokens of a sequence that is compressed, 1 or more");
    settings.from = *from;
  }
  if (const char* text = lookup("VERKV_GGML_CHECK"))
    settings.check = read_switch("VERKV_GGML_CHECK", text);
  if (const char* text = lookup(kLayers)) settings.layers = read_layers(text);
  if (const char* text = lookup("VERKV_GGML_REPORT")) {
    if (*text == '\0') refuse("VERKV_GGML_REPORT", text, "the name of a file to be written");
    settings.report = text;
  }
  return settings;
}

}  // namespace verkv_ggml
