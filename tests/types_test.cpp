#include <verkv/types.hpp>
#include <verkv/view.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

#include "catch.hpp"
#include "reference/reference.hpp"
#include "reference/statistics.hpp"

namespace {

using verkv::BFloat16;
using verkv::Half;
using verkv::Positive16;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::uint16_t pattern(std::uint32_t bits) { return static_cast<std::uint16_t>(bits); }

TEST_CASE("Half: value and round trip of all 65,536 patterns") {
  int wrong_value = 0;
  int wrong_trip = 0;
  for (std::uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const Half h{pattern(bits)};
    const double value = verkv::reference::value_of_half(h);
    const float x = verkv::to_float(h);
    if (std::isnan(value)) {
      wrong_value += !std::isnan(x);
      wrong_trip += !std::isnan(verkv::to_float(verkv::to_half(x)));
    } else {
      wrong_value += static_cast<double>(x) != value || std::signbit(x) != std::signbit(value);
      wrong_trip += verkv::to_half(x).bits != h.bits;
    }
  }
  CHECK(wrong_value == 0);
  CHECK(wrong_trip == 0);
}

TEST_CASE("Half: between neighbours rounding is to the nearer one, ties to the even one") {
  int wrong = 0;
  for (std::uint32_t bits = 0; bits < 0x7bff; ++bits) {  // finite, up to the largest
    const float low = verkv::to_float(Half{pattern(bits)});
    const float high = verkv::to_float(Half{pattern(bits + 1)});
    const float middle = low + (high - low) / 2;  // exact: 12 significant bits
    const std::uint32_t even = bits % 2 == 0 ? bits : bits + 1;
    for (const float sign : {1.0f, -1.0f}) {
      const std::uint32_t s = sign < 0 ? 0x8000u : 0u;
      wrong += verkv::to_half(sign * middle).bits != (even | s);
      wrong += verkv::to_half(sign * std::nextafter(middle, 0.0f)).bits != (bits | s);
      wrong += verkv::to_half(sign * std::nextafter(middle, kInfinity)).bits != ((bits + 1) | s);
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("Half: overflow, infinity, NaN") {
  CHECK(verkv::to_half(65504.0f).bits == 0x7bff);
  CHECK(verkv::to_half(std::nextafter(65520.0f, 0.0f)).bits == 0x7bff);
  CHECK(verkv::to_half(65520.0f).bits == 0x7c00);
  CHECK(verkv::to_half(-1e30f).bits == 0xfc00);
  CHECK(verkv::to_half(kInfinity).bits == 0x7c00);
  CHECK(std::isnan(verkv::to_float(verkv::to_half(kNaN))));
  CHECK(verkv::to_half(0x1p-25f).bits == 0);  // half the smallest subnormal: tie to even
  CHECK(verkv::to_half(std::nextafter(0x1p-25f, 1.0f)).bits == 1);
  CHECK(verkv::to_half(1e-40f).bits == 0);
}

TEST_CASE("BFloat16: value and round trip of all 65,536 patterns") {
  int wrong = 0;
  for (std::uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const float x = verkv::to_float(BFloat16{pattern(bits)});
    wrong += std::bit_cast<std::uint32_t>(x) != bits << 16;
    if (std::isnan(x)) {
      wrong += !std::isnan(verkv::to_float(verkv::to_bfloat16(x)));
    } else {
      wrong += verkv::to_bfloat16(x).bits != bits;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("BFloat16: rounding is to nearest, ties to even; a NaN stays one") {
  int wrong = 0;
  for (std::uint32_t bits = 0; bits < 0x7f80; ++bits) {  // the last step goes to infinity
    for (const std::uint32_t s : {0u, 0x80000000u}) {
      const std::uint32_t middle = s | (bits << 16) | 0x8000u;
      const std::uint32_t sign = s >> 16;
      const std::uint32_t even = bits % 2 == 0 ? bits : bits + 1;
      wrong += verkv::to_bfloat16(std::bit_cast<float>(middle)).bits != (sign | even);
      wrong += verkv::to_bfloat16(std::bit_cast<float>(middle - 1)).bits != (sign | bits);
      wrong += verkv::to_bfloat16(std::bit_cast<float>(middle + 1)).bits != (sign | (bits + 1));
    }
  }
  CHECK(wrong == 0);
  CHECK(verkv::to_bfloat16(kInfinity).bits == 0x7f80);
  // Cut to 16 bits this NaN would be an infinity.
  CHECK(std::isnan(verkv::to_float(verkv::to_bfloat16(std::bit_cast<float>(0x7f800001u)))));
}

TEST_CASE("Positive16: round trip of all finite patterns, infinity and 0") {
  int wrong = 0;
  for (std::uint32_t bits = 0; bits <= 0xff00; ++bits) {
    wrong += verkv::to_positive16(verkv::to_float(Positive16{pattern(bits)})).bits != bits;
  }
  CHECK(wrong == 0);
  CHECK(verkv::to_float(verkv::to_positive16(kInfinity)) == kInfinity);
  CHECK(verkv::to_positive16(kInfinity).bits == verkv::kPositive16Infinity.bits);
  CHECK(verkv::to_float(verkv::to_positive16(0.0f)) == 0.0f);
  CHECK(std::isnan(verkv::to_float(verkv::to_positive16(kNaN))));
}

TEST_CASE("Positive16: relative error at most 2^-9, ties to even, never decreasing") {
  verkv::reference::Random random(1);
  double worst = 0;
  for (int i = 0; i < 200000; ++i) {
    const float x = static_cast<float>(std::exp(random.uniform(-80.0, 80.0)));
    const double y = static_cast<double>(verkv::to_float(verkv::to_positive16(x)));
    worst = std::max(worst, std::fabs(y / static_cast<double>(x) - 1));
  }
  CHECK(worst <= 0x1p-9);  // half a unit of 8 bits of mantissa
  CHECK(worst > 0.9 * 0x1p-9);
  int wrong = 0;
  for (std::uint32_t bits = 0; bits < 0xfeff; ++bits) {
    const std::uint32_t middle = (bits << 15) | 0x4000u;
    const std::uint32_t even = bits % 2 == 0 ? bits : bits + 1;
    wrong += verkv::to_positive16(std::bit_cast<float>(middle)).bits != even;
    wrong += verkv::to_positive16(std::bit_cast<float>(middle - 1)).bits != bits;
    wrong += verkv::to_positive16(std::bit_cast<float>(middle + 1)).bits != bits + 1;
  }
  CHECK(wrong == 0);
}

TEST_CASE("sizes and names of element types") {
  CHECK(verkv::size_bytes(verkv::DType::f32) == 4);
  CHECK(verkv::size_bytes(verkv::DType::f16) == 2);
  CHECK(verkv::size_bytes(verkv::DType::bf16) == 2);
  CHECK(std::string(verkv::name(verkv::DType::f32)) == "f32");
  CHECK(std::string(verkv::name(verkv::DType::f16)) == "f16");
  CHECK(std::string(verkv::name(verkv::DType::bf16)) == "bf16");
  STATIC_REQUIRE(sizeof(Half) == 2);
  STATIC_REQUIRE(sizeof(BFloat16) == 2);
  STATIC_REQUIRE(sizeof(Positive16) == 2);
}

TEST_CASE("with_element: each type by its own element") {
  const auto bytes = [](verkv::DType type) {
    return verkv::with_element(type, [](auto zero) { return sizeof zero; });
  };
  const auto third = [](verkv::DType type) {
    return verkv::with_element(type, [](auto zero) {
      return verkv::to_float(verkv::from_float<decltype(zero)>(1.0f / 3));
    });
  };
  for (const verkv::DType type : {verkv::DType::f32, verkv::DType::f16, verkv::DType::bf16}) {
    CAPTURE(verkv::name(type));
    CHECK(bytes(type) == verkv::size_bytes(type));
  }
  CHECK(third(verkv::DType::f32) == 1.0f / 3);
  CHECK(third(verkv::DType::f16) == to_float(verkv::to_half(1.0f / 3)));
  CHECK(third(verkv::DType::bf16) == to_float(verkv::to_bfloat16(1.0f / 3)));
  STATIC_REQUIRE(std::is_same_v<decltype(verkv::with_element(verkv::DType::f32,
                                                             [](auto) { return std::uint8_t{}; })),
                                std::uint8_t>);
}

TEST_CASE("largest_number: the next number of the type is infinite") {
  CHECK(verkv::largest_number(verkv::DType::f32) == std::numeric_limits<float>::max());
  CHECK(verkv::to_half(verkv::largest_number(verkv::DType::f16)).bits == 0x7bff);
  CHECK(verkv::to_bfloat16(verkv::largest_number(verkv::DType::bf16)).bits == 0x7f7f);
  CHECK(to_float(Half{0x7c00}) == kInfinity);
  CHECK(to_float(BFloat16{0x7f80}) == kInfinity);
}

TEST_CASE("TensorView: both dense layouts address the same rows") {
  STATIC_REQUIRE(std::is_trivially_copyable_v<verkv::TensorView>);
  STATIC_REQUIRE(std::is_trivially_copyable_v<verkv::ImportanceView>);
  const std::uint16_t base[3 * 2 * 4] = {};
  const auto offset = [&](const verkv::TensorView& view, int token, int head) {
    return static_cast<const std::uint16_t*>(view.row(token, head)) - base;
  };
  const auto by_token = verkv::token_major(base, verkv::DType::f16, 3, 2, 4);
  const auto by_head = verkv::head_major(base, verkv::DType::f16, 3, 2, 4);
  for (int token = 0; token < 3; ++token) {
    for (int head = 0; head < 2; ++head) {
      CHECK(offset(by_token, token, head) == (token * 2 + head) * 4);
      CHECK(offset(by_head, token, head) == (head * 3 + token) * 4);
    }
  }
}

TEST_CASE("TensorView: offsets beyond 2^31 bytes") {
  verkv::TensorView view;
  view.type = verkv::DType::f32;
  view.token_stride = std::int64_t{1} << 31;
  const char base = 0;
  view.data = &base;
  const auto address = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p); };
  CHECK(address(view.row(3, 0)) - address(&base) == std::uintptr_t{3} << 33);
}

}  // namespace
