// The generated code: Python and C++ modules about one record each, whose definitions use earlier
// ones. The names are in data/code.txt, the patterns in data/python.txt and data/cpp.txt.
#include <algorithm>
#include <array>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text_random.hpp"
#include "texts.hpp"
#include "word_lists.hpp"

namespace verkv::lab {

namespace {

const WordLists& code_lists() {
  static const WordLists lists(kCodeData);
  return lists;
}

struct Record {
  std::string_view type;
  std::string_view item;
  std::string_view items;
};

const std::vector<Record>& records() {
  static const std::vector<Record> all = [] {
    std::vector<Record> read;
    for (const std::string_view line : code_lists()["records"]) {
      const std::vector<std::string_view> parts = fields(line);
      read.push_back({parts.at(0), parts.at(1), parts.at(2)});
    }
    return read;
  }();
  return all;
}

struct Pattern {
  std::string_view id;
  std::string_view name;
  // Identifiers of other patterns, separated by spaces.
  std::string_view needs;
  std::string_view body;
};

std::vector<Pattern> read_patterns(std::string_view file) {
  std::vector<Pattern> read;
  for (const Section& section : sections(file)) {
    const std::vector<std::string_view> parts = fields(section.heading);
    read.push_back({parts.at(0), parts.at(1), parts.at(2), section.body});
  }
  return read;
}

const std::vector<Pattern>& patterns(bool python) {
  static const std::vector<Pattern> python_patterns = read_patterns(kPythonData);
  static const std::vector<Pattern> cpp_patterns = read_patterns(kCppData);
  return python ? python_patterns : cpp_patterns;
}

std::string replaced(std::string text, std::string_view from, std::string_view to) {
  for (std::size_t at = text.find(from); at != std::string::npos;
       at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
  return text;
}

class Code {
 public:
  explicit Code(std::uint64_t seed) : lists_(code_lists()), random_(seed, 2), deck_(random_) {}

  std::string definition() {
    if (pending_.empty()) return start_module();
    const std::size_t count = pending_.size();
    // The first one whose parts are there: what needs nothing always is.
    for (std::size_t i = 0; i < count; ++i) {
      const Pattern& pattern = *pending_[i];
      if (!ready(pattern)) continue;
      pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
      const std::string name = fill(pattern.name);
      defined_[std::string(pattern.id)] = name;
      return replaced(fill(pattern.body), "$name", name) + gap();
    }
    pending_.clear();
    return start_module();
  }

 private:
  std::string gap() const { return python_ ? "\n\n" : "\n"; }

  bool ready(const Pattern& pattern) const {
    std::string_view needs = pattern.needs;
    while (!needs.empty()) {
      const std::size_t space = needs.find(' ');
      if (defined_.find(std::string(needs.substr(0, space))) == defined_.end()) return false;
      needs = space == std::string_view::npos ? "" : needs.substr(space + 1);
    }
    return true;
  }

  std::string start_module() {
    const std::string before =
        record_ == nullptr ? "" : std::string(record_->items) + (python_ ? "" : ".hpp");
    const bool was_python = python_;
    const bool continues = record_ != nullptr && random_.percent(50);
    python_ = random_.percent(65);
    record_ = &deck_.draw(std::span<const Record>(records()));
    number_ = random_.pick(lists_["number fields"]);
    text_ = random_.pick(lists_["text fields"]);
    flag_ = random_.pick(lists_["flag fields"]);
    defined_.clear();
    pending_.clear();
    for (const Pattern& pattern : patterns(python_)) {
      if (random_.percent(75)) pending_.push_back(&pattern);
    }
    random_.shuffle(pending_);
    // Tests follow what they test.
    std::stable_partition(pending_.begin(), pending_.end(), [](const Pattern* pattern) {
      return pattern->id.substr(0, 5) != "test_";
    });
    const std::string folder(random_.pick(lists_["packages"]));
    std::string text;
    if (python_) {
      text = "# " + folder + R"(/$items.py
"""Everything that $folder knows about $items."""

from dataclasses import dataclass
from pathlib import Path

import pytest
)";
      if (continues && was_python) text += "\nfrom " + folder + " import " + before + "\n";
      text += R"(

@dataclass
class $Class:
    $text: str
    $num: float
    $flag: bool = False
)";
    } else {
      text = "// " + folder + "/$items.hpp: everything that $folder knows about $items.\n" + R"(
#include <algorithm>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>
)";
      if (continues && !was_python) text += "\n#include \"" + before + "\"\n";
      text += R"(
struct $Class {
  std::string $text;
  double $num = 0;
  bool $flag = false;
};
)";
    }
    return fill(replaced(text, "$folder", folder)) + gap();
  }

  std::string fill(std::string_view pattern) {
    std::string text(pattern);
    for (const auto& [id, name] : defined_) text = replaced(text, "$f(" + id + ")", name);
    text = replaced(text, "$Class", record_->type);
    text = replaced(text, "$items", record_->items);
    text = replaced(text, "$item", record_->item);
    text = replaced(text, "$num", number_);
    text = replaced(text, "$text", text_);
    text = replaced(text, "$flag", flag_);
    text = replaced(text, "$limit", std::to_string(random_.between(2, 40) * 25));
    const std::array<int, 3> numbers = {random_.between(1, 90), random_.between(1, 90),
                                        random_.between(1, 90)};
    text = replaced(text, "$sum", std::to_string(numbers[0] + numbers[1] + numbers[2]));
    std::size_t value = random_.below(lists_["text values"].size());
    for (std::size_t i = 0; i < 3; ++i) {
      const std::string place = std::to_string(i + 1);
      text = replaced(text, "$n" + place, std::to_string(numbers[i]));
      text = replaced(text, "$v" + place, lists_["text values"][value]);
      value = (value + 1 + random_.below(3)) % lists_["text values"].size();
    }
    return text;
  }

  const WordLists& lists_;
  TextRandom random_;
  Deck deck_;
  bool python_ = true;
  const Record* record_ = nullptr;
  std::string_view number_;
  std::string_view text_;
  std::string_view flag_;
  std::map<std::string, std::string> defined_;
  std::vector<const Pattern*> pending_;
};

}  // namespace

std::string code_text(std::uint64_t seed, std::size_t bytes) {
  std::string text;
  text.reserve(bytes + 1024);
  Code code(seed);
  while (text.size() < bytes) text += code.definition();
  return text;
}

}  // namespace verkv::lab
