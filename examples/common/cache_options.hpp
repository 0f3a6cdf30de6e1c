// Settings of a cache as words of a command line.
#ifndef VERKV_EXAMPLES_COMMON_CACHE_OPTIONS_HPP
#define VERKV_EXAMPLES_COMMON_CACHE_OPTIONS_HPP

#include <charconv>
#include <optional>
#include <string>
#include <system_error>

#include <fmt/format.h>

#include <verkv/error.hpp>
#include <verkv/kv_cache_manager.hpp>

namespace verkv::examples {

// A command line that makes no sense.
class UsageError : public Error {
 public:
  using Error::Error;
};

// A number above `low` and at most `high`; `what` names it. Throws UsageError.
inline double parse_number(const std::string& text, const char* what, double low, double high) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(value > low) ||
      !(value <= high)) {
    throw UsageError(
        fmt::format("{} is {}; it must be above {} and at most {}", what, text, low, high));
  }
  return value;
}

// The price or bound of a stop rule, above 0; "off" is none. Throws UsageError.
inline std::optional<double> parse_rule(const std::string& text, const char* what, double high) {
  if (text == "off") return std::nullopt;
  return parse_number(text, what, 0, high);
}

// Throws UsageError.
inline Estimator parse_estimator(const std::string& text) {
  for (const Estimator estimator : {Estimator::plain, Estimator::clusters}) {
    if (text == name(estimator)) return estimator;
  }
  throw UsageError(fmt::format("an estimator is plain or clusters, not {}", text));
}

// "2", "3", "4" (bits) or "exact". Throws UsageError.
inline SketchConfig parse_sketch(const std::string& text) {
  SketchConfig sketch;
  if (text == "exact") {
    sketch.kind = SketchKind::exact;
  } else if (text == "2" || text == "3" || text == "4") {
    sketch.bits = text[0] - '0';
  } else {
    throw UsageError(fmt::format("a sketch is 2, 3, 4 or exact, not {}", text));
  }
  return sketch;
}

}  // namespace verkv::examples

#endif  // VERKV_EXAMPLES_COMMON_CACHE_OPTIONS_HPP
