// Options of a command line whose values are read and refused in the program's own words.
#ifndef VERKV_EXAMPLES_REPLAY_OPTION_READER_HPP
#define VERKV_EXAMPLES_REPLAY_OPTION_READER_HPP

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "options.hpp"

namespace verkv::replay {

inline constexpr double kUnbounded = std::numeric_limits<double>::infinity();

// The numbers an option takes.
struct Range {
  double low = 0;
  bool low_included = false;
  double high = kUnbounded;
  bool high_included = false;
};

// "above 0 and at most 1".
std::string text_of(const Range& range);

// Throw UsageError naming the option where the text is anything else. what: of the number, for the
// message.
double parse_number(const std::string& name, const std::string& text, const Range& range,
                    const std::string& what);
std::int64_t parse_integer(const std::string& name, const std::string& text, std::int64_t low,
                           std::int64_t high);

// A set of options on a CLI::App, their values read by the functions above.
class Reader {
 public:
  explicit Reader(CLI::App& app) : app_(app) {}

  CLI::Option* number(const std::string& name, double& to, Range range, const std::string& about) {
    return add(name, "X", about, fmt::format("{:g}", to),
               [&to, name, range](const std::string& text) {
                 to = parse_number(name, text, range, text_of(range));
               });
  }

  // A number, or the word off.
  CLI::Option* number(const std::string& name, std::optional<double>& to, Range range,
                      const std::string& about, const std::string& standard) {
    return add(name, "off|X", about, standard, [&to, name, range](const std::string& text) {
      to.reset();
      if (text != "off") to = parse_number(name, text, range, text_of(range) + ", or off");
    });
  }

  CLI::Option* integer(const std::string& name, std::int64_t& to, std::int64_t low,
                       std::int64_t high, const std::string& about,
                       const std::string& standard = {}) {
    const std::string shown = standard.empty() ? fmt::format("{}", to) : standard;
    return add(name, "N", about, shown, [&to, name, low, high](const std::string& text) {
      to = parse_integer(name, text, low, high);
    });
  }

  template <class T>
  CLI::Option* word(const std::string& name, T& to, std::vector<std::pair<std::string, T>> words,
                    const std::string& about) {
    std::vector<std::string> names;
    std::string standard;
    for (const auto& [word, value] : words) {
      names.push_back(word);
      if (value == to) standard = word;
    }
    return add(name, fmt::format("{}", fmt::join(names, "|")), about, standard,
               [&to, name, words, names](const std::string& text) {
                 for (const auto& [word, value] : words) {
                   if (word == text) {
                     to = value;
                     return;
                   }
                 }
                 throw UsageError(fmt::format("{} is '{}', but must be one of {}", name, text,
                                              fmt::join(names, ", ")));
               });
  }

  CLI::Option* text(const std::string& name, std::string& to, const std::string& form,
                    const std::string& about, const std::string& standard) {
    return add(name, form, about, standard, [&to, name](const std::string& text) {
      if (text.empty()) throw UsageError(fmt::format("{} is empty", name));
      to = text;
    });
  }

  CLI::Option* add(const std::string& name, const std::string& form, const std::string& about,
                   const std::string& standard, std::function<void(const std::string&)> read) {
    const std::string shown = standard.empty() ? about : fmt::format("{} [{}]", about, standard);
    return app_.add_option_function<std::string>(name, std::move(read), shown)->type_name(form);
  }

 private:
  CLI::App& app_;
};

}  // namespace verkv::replay

#endif  // VERKV_EXAMPLES_REPLAY_OPTION_READER_HPP
