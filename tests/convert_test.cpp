// What happens to a key or value on its way in. Rows from one element type to another: every vector
// implementation gives the bits of types.hpp, over all 16-bit numbers and the borders of rounding, and
// finds the numbers that do not fit. Codes of keys: it gives the bits of sketch.hpp.
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include <verkv/sketch.hpp>
#include <verkv/types.hpp>

#include "catch.hpp"
#include "cpu/kernels.hpp"

namespace {

using verkv::BFloat16;
using verkv::DType;
using verkv::Half;
using verkv::cpu::Kernels;

std::vector<const Kernels*> all_kernels() {
  std::vector<const Kernels*> all = verkv::cpu::all_vector_kernels();
  all.push_back(&verkv::cpu::scalar_kernels());
  return all;
}

template <class T>
std::vector<T> all_of_16_bits() {
  std::vector<T> all;
  for (std::uint32_t i = 0; i < 0x10000; ++i) all.push_back(T{static_cast<std::uint16_t>(i)});
  return all;
}

// Numbers of binary32 where rounding to 16 bits decides: each 16-bit number, the middle between it and
// the next, and what lies right beside both.
std::vector<float> borders() {
  std::vector<float> result;
  const auto add = [&](std::uint32_t bits) {
    for (const std::uint32_t near : {bits - 1, bits, bits + 1})
      result.push_back(std::bit_cast<float>(near));
  };
  for (std::uint32_t i = 0; i < 0x10000; ++i) {
    add(i << 16);
    add((i << 16) + 0x8000);
    add(std::bit_cast<std::uint32_t>(verkv::to_float(Half{static_cast<std::uint16_t>(i)})));
  }
  // Between two neighbours of binary16, also below its smallest normal number.
  for (std::uint32_t i = 0; i < 0x7c00; ++i) {
    const float low = verkv::to_float(Half{static_cast<std::uint16_t>(i)});
    const float high =
        i == 0x7bff ? 65536.0f : verkv::to_float(Half{static_cast<std::uint16_t>(i + 1)});
    const float middle = (low + high) / 2;
    add(std::bit_cast<std::uint32_t>(middle));
    add(std::bit_cast<std::uint32_t>(-middle));
  }
  std::mt19937 engine(5);
  for (int i = 0; i < 20000; ++i)
    result.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(engine())));
  return result;
}

template <class T>
std::vector<std::byte> bytes_of(const std::vector<T>& x) {
  std::vector<std::byte> bytes(x.size() * sizeof(T));
  std::memcpy(bytes.data(), x.data(), bytes.size());
  return bytes;
}

template <class From>
void check_conversions(DType type, const std::vector<From>& from) {
  for (const DType to : {DType::f32, DType::f16, DType::bf16}) {
    std::vector<std::byte> expected = bytes_of(from);
    if (to != type) {
      expected.resize(from.size() * size_bytes(to));
      with_element(to, [&](auto element) {
        for (std::size_t i = 0; i < from.size(); ++i) {
          element = verkv::from_float<decltype(element)>(verkv::to_float(from[i]));
          std::memcpy(expected.data() + i * sizeof element, &element, sizeof element);
        }
      });
    }
    for (const Kernels* kernels : all_kernels()) {
      INFO(kernels->name << ", " << name(type) << " to " << name(to));
      std::vector<std::byte> result(expected.size());
      kernels->convert(from.data(), type, result.data(), to,
                       static_cast<std::int64_t>(from.size()));
      // Not printed byte by byte.
      const bool same = result == expected;
      CHECK(same);
    }
  }
}

TEST_CASE("convert: vectors give the bits of the scalar conversions", "[kernels]") {
  check_conversions(DType::f16, all_of_16_bits<Half>());
  check_conversions(DType::bf16, all_of_16_bits<BFloat16>());
  check_conversions(DType::f32, borders());
}

TEST_CASE("convert writes what it is asked for, from and to anywhere", "[kernels]") {
  for (const Kernels* kernels : all_kernels()) {
    for (const DType from : {DType::f32, DType::f16, DType::bf16}) {
      for (const DType to : {DType::f32, DType::f16, DType::bf16}) {
        INFO(kernels->name << ", " << name(from) << " to " << name(to));
        for (std::int64_t count = 0; count <= 50; ++count) {
          std::vector<std::byte> given(60 * size_bytes(from));
          for (std::size_t i = 0; i < given.size(); ++i)
            given[i] = static_cast<std::byte>(37 * i % 120);
          const std::byte* const start = given.data() + size_bytes(from);
          std::vector<std::byte> result(60 * size_bytes(to), std::byte{0xa5});
          std::vector<std::byte> expected = result;
          kernels->convert(start, from, result.data() + 3 * size_bytes(to), to, count);
          verkv::cpu::scalar_kernels().convert(start, from, expected.data() + 3 * size_bytes(to),
                                               to, count);
          const bool same = result == expected;
          REQUIRE(same);
          const auto at =
              static_cast<std::ptrdiff_t>((3 + static_cast<std::size_t>(count)) * size_bytes(to));
          REQUIRE(std::all_of(result.begin() + at, result.end(),
                              [](std::byte x) { return x == std::byte{0xa5}; }));
        }
      }
    }
  }
}

TEST_CASE("all_within finds a number that does not fit, wherever it stands", "[kernels]") {
  for (const Kernels* kernels : all_kernels()) {
    for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
      INFO(kernels->name << ", " << name(type));
      with_element(type, [&](auto zero) {
        using T = decltype(zero);
        const float limit = verkv::largest_number(type == DType::f32 ? DType::f16 : type);
        const auto bad = {limit * 1.01f, -limit * 1.01f, std::bit_cast<float>(0x7f800000u),
                          std::bit_cast<float>(0x7fc00000u), std::bit_cast<float>(0xffc00000u)};
        for (std::int64_t count = 0; count <= 50; ++count) {
          const std::size_t n = static_cast<std::size_t>(count);
          std::vector<T> x(n + 1, verkv::from_float<T>(-limit));
          x[n] = verkv::from_float<T>(std::bit_cast<float>(0x7fc00000u));
          REQUIRE(kernels->all_within(x.data(), type, count, limit));
          for (std::size_t i = 0; i < n; ++i) {
            for (const float number : bad) {
              x[i] = verkv::from_float<T>(number);
              REQUIRE_FALSE(kernels->all_within(x.data(), type, count, limit));
            }
            x[i] = verkv::from_float<T>(limit);
          }
        }
      });
      // The border itself, and what lies right above it.
      const float above = std::bit_cast<float>(0x477fe001u);
      const float at = 65504.0f;
      CHECK(kernels->all_within(&at, DType::f32, 1, 65504.0f));
      CHECK_FALSE(kernels->all_within(&above, DType::f32, 1, 65504.0f));
    }
  }
}

TEST_CASE("encode_key: vectors give the bits of the scalar code", "[kernels]") {
  std::mt19937 engine(11);
  std::normal_distribution<float> normal;
  std::vector<verkv::SketchShape> shapes;
  for (const int dim : {1, 3, 4, 15, 16, 17, 37, 64, 100, 128, 512, 1100}) {
    for (const int fine : {0, 16, 64, dim}) {
      if (fine <= dim) shapes.push_back({.dim = dim, .fine = fine});
    }
  }
  for (const verkv::SketchShape& shape : shapes) {
    const verkv::SketchBands bands{.fine_square = 0.7f,
                                   .coarse_square = 0.01f + normal(engine) / 500};
    const std::size_t dim = static_cast<std::size_t>(shape.dim);
    for (std::int64_t token = 0; token < verkv::kSketchGroup; ++token) {
      std::vector<float> x(dim);
      for (float& v : x) v = normal(engine);
      // Nothing, next to nothing, the largest, one that sticks out, borders of codes, and no number.
      if (token == 1) std::fill(x.begin(), x.end(), 0.0f);
      if (token == 2)
        for (float& v : x) v *= 1e-38f;
      if (token == 3)
        for (float& v : x) v *= 3e18f;
      if (token == 4) x.back() = 500;
      if (token == 5)
        for (std::size_t j = 0; j < dim; ++j) x[j] = verkv::kSketchLevels.threshold[j % 15];
      if (token == 6) x.front() = std::bit_cast<float>(0x7fc00000u);
      std::vector<std::uint8_t> expected(
          static_cast<std::size_t>(verkv::code_storage_bytes(shape, verkv::kSketchGroup)));
      const std::vector<std::uint8_t> empty = expected;
      const verkv::Positive16 scale =
          verkv::encode_key(shape, verkv::kSketchLevels, bands, x, expected.data(), token);
      for (const Kernels* kernels : all_kernels()) {
        INFO(kernels->name << ", dim " << shape.dim << ", fine " << shape.fine << ", token "
                           << token);
        std::vector<std::uint8_t> codes = empty;
        const verkv::Positive16 result =
            kernels->encode_key(shape, bands, x.data(), codes.data(), token);
        const bool same = codes == expected;
        CHECK(same);
        CHECK(result.bits == scale.bits);
      }
    }
  }
}

}  // namespace
