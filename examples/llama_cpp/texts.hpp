// Invented texts of three kinds to run a model over, the same on every machine.
#ifndef VERKV_EXAMPLES_LLAMA_CPP_TEXTS_HPP
#define VERKV_EXAMPLES_LLAMA_CPP_TEXTS_HPP

#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace verkv::llm {

// The distributions of <random> differ between standard libraries; the engine does not.
class TextRandom {
 public:
  TextRandom(std::uint64_t seed, std::uint64_t stream)
      : engine_(seed * 0x9E3779B97F4A7C15ull + stream) {}

  // From 0 to count - 1; count > 0. No value is favoured by more than count / 2^64.
  std::size_t below(std::size_t count) { return static_cast<std::size_t>(engine_() % count); }
  // From low to high, both included.
  int between(int low, int high) {
    return low + static_cast<int>(below(static_cast<std::size_t>(high - low) + 1));
  }
  bool percent(int share) { return between(0, 99) < share; }

  template <class T>
  const T& pick(std::span<const T> items) {
    return items[below(items.size())];
  }
  template <class T>
  void shuffle(std::vector<T>& items) {
    for (std::size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[below(i)]);
  }
  // A version 4 UUID in lower case, 36 characters.
  std::string uuid();

 private:
  std::mt19937_64 engine_;
};

enum class TextKind { prose, code, uuids };

std::string_view name(TextKind kind);
std::optional<TextKind> parse_text_kind(std::string_view text);

// At least `bytes` bytes of ASCII, deterministic in (kind, seed): it ends with the first whole
// paragraph (definition, line) that reaches the length, so a longer text begins with a shorter one.
// prose: a chronicle whose persons, things and events recur. code: Python and C++ modules whose
// definitions use earlier ones. uuids: numbered entries, some of them copies of earlier entries.
std::string generate_text(TextKind kind, std::uint64_t seed, std::size_t bytes);

}  // namespace verkv::llm

#endif  // VERKV_EXAMPLES_LLAMA_CPP_TEXTS_HPP
