#include "text_random.hpp"

namespace verkv::lab {

std::string TextRandom::uuid() {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string text;
  for (int i = 0; i < 32; ++i) {
    if (i == 8 || i == 12 || i == 16 || i == 20) text += '-';
    const std::size_t digit = below(16);
    if (i == 12) {
      text += '4';
    } else {
      text += digits[i == 16 ? 8 + digit % 4 : digit];
    }
  }
  return text;
}

std::size_t Deck::index(const void* list, std::size_t count) {
  std::vector<std::size_t>& left = left_[list];
  if (left.empty()) {
    for (std::size_t i = 0; i < count; ++i) left.push_back(i);
  }
  std::swap(left[random_.below(left.size())], left.back());
  const std::size_t drawn = left.back();
  left.pop_back();
  return drawn;
}

}  // namespace verkv::lab
