#include <verkv/philox.hpp>

#include <cstdint>

#include "catch.hpp"

namespace {

using verkv::philox4x32_10;
using verkv::PhiloxCounter;
using verkv::PhiloxKey;

void check_words(const PhiloxCounter& actual, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                 std::uint32_t d) {
  CHECK(actual.word[0] == a);
  CHECK(actual.word[1] == b);
  CHECK(actual.word[2] == c);
  CHECK(actual.word[3] == d);
}

// The known answers published with the generator (Random123, philox4x32 with 10 rounds).
TEST_CASE("philox4x32_10 gives the published answers") {
  check_words(philox4x32_10(PhiloxCounter{{0, 0, 0, 0}}, PhiloxKey{{0, 0}}), 0x6627e8d5u,
              0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u);
  constexpr std::uint32_t all = 0xffffffffu;
  check_words(philox4x32_10(PhiloxCounter{{all, all, all, all}}, PhiloxKey{{all, all}}),
              0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu);
  // Digits of pi.
  check_words(philox4x32_10(PhiloxCounter{{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}},
                            PhiloxKey{{0xa4093822u, 0x299f31d0u}}),
              0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u);
}

TEST_CASE("philox4x32_10 is usable in a constant expression") {
  constexpr PhiloxCounter out = philox4x32_10(PhiloxCounter{}, PhiloxKey{});
  STATIC_REQUIRE(out.word[0] == 0x6627e8d5u);
}

TEST_CASE("every word of counter and key reaches every word of the output") {
  const PhiloxCounter base = philox4x32_10(PhiloxCounter{{1, 2, 3, 4}}, PhiloxKey{{5, 6}});
  for (int changed = 0; changed < 6; ++changed) {
    for (int bit = 0; bit < 32; ++bit) {
      PhiloxCounter counter{{1, 2, 3, 4}};
      PhiloxKey key{{5, 6}};
      std::uint32_t& word = changed < 4 ? counter.word[changed] : key.word[changed - 4];
      word ^= 1u << bit;
      const PhiloxCounter out = philox4x32_10(counter, key);
      for (int i = 0; i < 4; ++i) CHECK(out.word[i] != base.word[i]);
    }
  }
}

}  // namespace
