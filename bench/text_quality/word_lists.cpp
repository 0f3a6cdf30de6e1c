#include "word_lists.hpp"

#include <verkv/error.hpp>

namespace verkv::lab {

namespace {

// Takes the first line of `text` off, without its end.
std::string_view take_line(std::string_view& text) {
  const std::size_t end = text.find('\n');
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  return line;
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

}  // namespace

std::vector<Section> sections(std::string_view file) {
  constexpr std::string_view mark = "=== ";
  std::vector<Section> result;
  while (!file.empty()) {
    const std::string_view line = take_line(file);
    if (line.starts_with(mark)) {
      result.push_back({line.substr(mark.size()), {file.data(), 0}});
    } else if (!result.empty()) {
      std::string_view& body = result.back().body;
      body = {body.data(), static_cast<std::size_t>(file.data() - body.data())};
    }
  }
  return result;
}

std::vector<std::string_view> fields(std::string_view line) {
  std::vector<std::string_view> result;
  while (true) {
    const std::size_t bar = line.find('|');
    result.push_back(trimmed(line.substr(0, bar)));
    if (bar == std::string_view::npos) return result;
    line.remove_prefix(bar + 1);
  }
}

WordLists::WordLists(std::string_view file) {
  for (const Section& section : sections(file)) {
    std::vector<std::string_view>& entries = lists_[section.heading];
    for (std::string_view body = section.body; !body.empty();) {
      const std::string_view line = take_line(body);
      if (!line.empty()) entries.push_back(line);
    }
  }
}

Words WordLists::operator[](std::string_view name) const {
  const auto found = lists_.find(name);
  if (found == lists_.end()) {
    throw InvalidArgument("there is no word list \"" + std::string(name) + "\"");
  }
  return found->second;
}

const WordLists& shared_words() {
  static const WordLists lists(kWordsData);
  return lists;
}

}  // namespace verkv::lab
