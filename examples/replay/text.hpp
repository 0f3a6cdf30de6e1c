// Numbers and names as the tables show them.
#ifndef VERKV_EXAMPLES_REPLAY_TEXT_HPP
#define VERKV_EXAMPLES_REPLAY_TEXT_HPP

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "statistics.hpp"

namespace verkv::replay {

// Words from a file, safe for a terminal.
inline std::string printable(std::string_view text, std::size_t longest) {
  std::string result;
  for (const char c : text.substr(0, longest)) result += c >= ' ' && c <= '~' ? c : '?';
  return result + (text.size() > longest ? "..." : "");
}

// A path's last part.
inline std::string file_name(const std::string& path) {
  const std::size_t slash = path.find_last_of('/');
  return printable(path.substr(slash == std::string::npos ? 0 : slash + 1), 40);
}

// "4,090".
inline std::string grouped(std::int64_t value) {
  std::string digits = fmt::format("{}", value);
  for (std::ptrdiff_t place = static_cast<std::ptrdiff_t>(digits.size()) - 3; place > 0;
       place -= 3) {
    digits.insert(static_cast<std::size_t>(place), 1, ',');
  }
  return digits;
}

// A number in at most five characters: about three digits, decimals only where they matter.
inline std::string short_number(double value) {
  if (std::isnan(value)) return "-";
  if (std::isinf(value)) return "inf";
  if (value == 0) return "0";
  if (value < 0.0005) return "<.001";
  if (value < 0.0995) return fmt::format("{:.3f}", value);
  if (value < 9.995) return fmt::format("{:.2f}", value);
  if (value < 99.95) return fmt::format("{:.1f}", value);
  if (value < 99999.5) return fmt::format("{:.0f}", value);
  return fmt::format("{:.0e}", value);
}

inline std::string percent(double share) { return short_number(100 * share); }

inline std::string interval_percent(const Rate& rate) {
  const Interval interval = wilson_interval(rate);
  if (rate.trials == 0) return "";
  return fmt::format("{}-{}", percent(interval.low), percent(interval.high));
}

inline std::string of_trials(const Rate& rate) {
  return fmt::format("{} of {}", grouped(rate.failures), grouped(rate.trials));
}

inline std::string trimmed(std::string text) {
  while (!text.empty() && text.back() == ' ') text.pop_back();
  return text + "\n";
}

}  // namespace verkv::replay

#endif  // VERKV_EXAMPLES_REPLAY_TEXT_HPP
