#include "option_reader.hpp"

#include <charconv>
#include <cmath>
#include <system_error>

namespace verkv::replay {

namespace {

// The number that the whole text is, if it is one.
template <class T>
std::optional<T> read_all(const std::string& text) {
  T value{};
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || rest != end) return std::nullopt;
  return value;
}

}  // namespace

std::string text_of(const Range& range) {
  std::string text;
  if (range.low_included && range.high < kUnbounded) {
    text = fmt::format("from {:g} to {}{:g}", range.low, range.high_included ? "" : "below ",
                       range.high);
  } else if (range.low_included) {
    text = fmt::format("of {:g} or more", range.low);
  } else {
    text = fmt::format("above {:g}", range.low);
    if (range.high < kUnbounded) {
      text += fmt::format(" and {} {:g}", range.high_included ? "at most" : "below", range.high);
    }
  }
  return text;
}

double parse_number(const std::string& name, const std::string& text, const Range& range,
                    const std::string& what) {
  const auto value = read_all<double>(text);
  const bool inside = value && std::isfinite(*value) &&
                      (range.low_included ? *value >= range.low : *value > range.low) &&
                      (range.high_included ? *value <= range.high : *value < range.high);
  if (!inside) {
    throw UsageError(fmt::format("{} is '{}', but must be a number {}", name, text, what));
  }
  return *value;
}

std::int64_t parse_integer(const std::string& name, const std::string& text, std::int64_t low,
                           std::int64_t high) {
  const auto value = read_all<std::int64_t>(text);
  if (!value || *value < low || *value > high) {
    throw UsageError(
        fmt::format("{} is '{}', but must be a whole number from {} to {}", name, text, low, high));
  }
  return *value;
}

}  // namespace verkv::replay
