#include "texts.hpp"

#include <algorithm>
#include <array>
#include <vector>

#include <fmt/format.h>

#include "text_random.hpp"
#include "word_lists.hpp"

namespace verkv::lab {

namespace {

constexpr std::array<std::string_view, 3> kTextNames{"prose", "code", "uuids"};

class Uuids {
 public:
  explicit Uuids(std::uint64_t seed) : random_(seed, 3) {}

  // Entries are numbered from 1.
  std::string line() {
    if (entries_.size() >= 4 && random_.percent(25)) {
      // Half of the copies are of recent entries, the others of any.
      const std::size_t reach =
          random_.percent(50) ? std::min<std::size_t>(20, entries_.size()) : entries_.size();
      const std::size_t entry = entries_.size() - 1 - random_.below(reach);
      return fmt::format("copy of entry {}: {}\n", entry + 1, entries_[entry]);
    }
    const std::string_view key = random_.pick(shared_words()["key names"]);
    const int number = random_.between(100, 999);
    entries_.push_back(fmt::format("{}-{} -> {}", key, number, random_.uuid()));
    return fmt::format("entry {}: {}\n", entries_.size(), entries_.back());
  }

 private:
  TextRandom random_;
  std::vector<std::string> entries_;
};

}  // namespace

std::string_view name(TextKind kind) { return kTextNames[static_cast<std::size_t>(kind)]; }

std::optional<TextKind> parse_text_kind(std::string_view text) {
  for (const TextKind kind : {TextKind::prose, TextKind::code, TextKind::uuids}) {
    if (name(kind) == text) return kind;
  }
  return std::nullopt;
}

std::string uuid_text(std::uint64_t seed, std::size_t bytes) {
  std::string text;
  text.reserve(bytes + 1024);
  Uuids uuids(seed);
  while (text.size() < bytes) text += uuids.line();
  return text;
}

std::string generate_text(TextKind kind, std::uint64_t seed, std::size_t bytes) {
  switch (kind) {
    case TextKind::prose:
      return prose_text(seed, bytes);
    case TextKind::code:
      return code_text(seed, bytes);
    case TextKind::uuids:
      break;
  }
  return uuid_text(seed, bytes);
}

}  // namespace verkv::lab
