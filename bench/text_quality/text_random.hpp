// Random choices of the generated texts: the same on every machine.
#ifndef VERKV_BENCH_TEXT_QUALITY_TEXT_RANDOM_HPP
#define VERKV_BENCH_TEXT_QUALITY_TEXT_RANDOM_HPP

#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace verkv::lab {

// The distributions of <random> differ between standard libraries; its engine does not.
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

// Draws from lists so that every entry of a list comes once before any entry comes again. A list is
// told from others by where its entries stand.
class Deck {
 public:
  explicit Deck(TextRandom& random) : random_(random) {}

  template <class T>
  const T& draw(std::span<const T> list) {
    return list[index(list.data(), list.size())];
  }

 private:
  std::size_t index(const void* list, std::size_t count);

  TextRandom& random_;
  std::map<const void*, std::vector<std::size_t>> left_;
};

}  // namespace verkv::lab

#endif  // VERKV_BENCH_TEXT_QUALITY_TEXT_RANDOM_HPP
