#include "saved_bytes.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <verkv/error.hpp>
#include <verkv/settings.hpp>

#include "catch.hpp"
#include "saved_settings.hpp"

namespace {

using verkv::CacheConfig;
using verkv::Checksum;
using verkv::FormatError;
using verkv::SavedReader;
using verkv::SavedWriter;

using Bytes = std::vector<std::byte>;

Bytes bytes_of(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

std::uint64_t checksum(std::span<const std::byte> bytes) {
  Checksum sum;
  sum.add(bytes);
  return sum.value();
}

// Bit by bit, from the polynomial.
std::uint64_t plain_checksum(std::span<const std::byte> bytes) {
  std::uint64_t crc = ~std::uint64_t{0};
  for (const std::byte b : bytes) {
    crc ^= std::to_integer<std::uint64_t>(b);
    for (int bit = 0; bit < 8; ++bit)
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xc96c5795d7870f42 : std::uint64_t{0});
  }
  return ~crc;
}

struct Store {
  Bytes bytes;
  std::size_t next = 0;
  std::size_t most = std::numeric_limits<std::size_t>::max();

  verkv::WriteBytes writer() {
    return [this](std::span<const std::byte> more) {
      bytes.insert(bytes.end(), more.begin(), more.end());
    };
  }
  verkv::ReadBytes reader() {
    return [this](std::span<std::byte> to) {
      const std::size_t count = std::min({to.size(), most, bytes.size() - next});
      std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(next), count, to.begin());
      next += count;
      return count;
    };
  }
};

void write_two_sections(const verkv::WriteBytes& write) {
  SavedWriter writer(write);
  writer.put(std::uint32_t{7});
  const std::vector<float> numbers = {1, 2, 3};
  writer.put_all(std::span<const float>(numbers));
  writer.end();
  writer.put(std::uint8_t{9});
  writer.end();
}

void read_two_sections(const verkv::ReadBytes& read) {
  SavedReader reader(read);
  reader.begin("first");
  CHECK(reader.get<std::uint32_t>() == 7);
  std::vector<float> numbers(3);
  reader.get_all(std::span(numbers));
  reader.end();
  CHECK(numbers == std::vector<float>{1, 2, 3});
  reader.begin("second");
  CHECK(reader.get<std::uint8_t>() == 9);
  reader.end();
}

TEST_CASE("Saved bytes: the checksum is CRC-64 of xz, in whatever pieces it comes") {
  CHECK(checksum(bytes_of("123456789")) == 0x995dc9bbdf1939fa);
  CHECK(checksum({}) == 0);
  Bytes bytes;
  for (int i = 0; i < 100; ++i) {
    CHECK(checksum(bytes) == plain_checksum(bytes));
    bytes.push_back(std::byte(i * 37 % 256));
  }
  for (std::size_t cut = 0; cut <= bytes.size(); ++cut) {
    Checksum sum;
    sum.add(std::span(bytes).first(cut));
    sum.add(std::span(bytes).subspan(cut));
    CHECK(sum.value() == checksum(bytes));
  }
}

TEST_CASE("Saved bytes: what was written is read, in pieces of any size") {
  Store store;
  write_two_sections(store.writer());
  for (const std::size_t most : {std::size_t{1}, std::size_t{3}, std::size_t{1000}}) {
    store.next = 0;
    store.most = most;
    read_two_sections(store.reader());
  }
}

TEST_CASE("Saved bytes: every cut and every altered bit is an error that names the section") {
  Store store;
  write_two_sections(store.writer());
  const Bytes whole = store.bytes;
  const auto read = [&] {
    store.next = 0;
    SavedReader reader(store.reader());
    reader.begin("first");
    reader.get<std::uint32_t>();
    std::vector<float> numbers(3);
    reader.get_all(std::span(numbers));
    reader.end();
    reader.begin("second");
    reader.get<std::uint8_t>();
    reader.end();
  };
  for (std::size_t length = 0; length < whole.size(); ++length) {
    store.bytes.assign(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length));
    REQUIRE_THROWS_WITH(read(), Catch::Contains(length < 24 ? "first" : "second") &&
                                    Catch::Contains("byte " + std::to_string(length)));
  }
  for (std::size_t bit = 0; bit < whole.size() * 8; ++bit) {
    store.bytes = whole;
    store.bytes[bit / 8] ^= std::byte(1 << bit % 8);
    REQUIRE_THROWS_WITH(
        read(), Catch::Contains(bit / 8 < 24 ? "first" : "second") && Catch::Contains("damaged"));
  }
}

TEST_CASE("Saved settings: equal where a sequence would go on alike, and named where not") {
  CacheConfig config;
  config.layers = {{.kv_heads = 2, .query_heads = 4, .key_dim = 64, .value_dim = 32},
                   {.cached = false}};
  const std::string saved = saved_settings(config);
  CHECK(verkv::first_difference(saved, saved).empty());

  CacheConfig other = config;
  other.threads = 3;
  other.fetch.risk = 1;
  other.fast_bytes_limit = 1;
  other.study.vector_code = false;
  other.layers[1].key_dim = 8;
  CHECK(saved_settings(other) == saved);

  const auto differs = [&](auto&& change, const std::string& there, const std::string& here) {
    CacheConfig changed = config;
    change(changed);
    const std::string text = verkv::first_difference(saved, saved_settings(changed));
    CHECK(text == "\"" + there + "\" there, \"" + here + "\" here");
  };
  differs([](CacheConfig& c) { c.storage = verkv::DType::bf16; }, "storage f16", "storage bf16");
  differs([](CacheConfig& c) { c.layers[0].key_dim = 128; }, "layer 0: key size 64",
          "layer 0: key size 128");
  differs([](CacheConfig& c) { c.layers[1].cached = true; }, "layer 1: cached false",
          "layer 1: cached true");
  differs([](CacheConfig& c) { c.layers.pop_back(); }, "layers 2", "layers 1");
  differs([](CacheConfig& c) { c.keep = 0.1; }, "keep 0.0625", "keep 0.1");
  differs([](CacheConfig& c) { c.sketch.bits = 3; }, "sketch bits 2", "sketch bits 3");
  differs([](CacheConfig& c) { c.sketch.kind = verkv::SketchKind::exact; }, "sketch calibrated",
          "sketch exact");
  differs([](CacheConfig& c) { c.study.estimator = verkv::Estimator::plain; }, "estimator clusters",
          "estimator plain");
  differs([](CacheConfig& c) { c.layers[0].scale = 0.5; }, "layer 0: scale none",
          "layer 0: scale 0.5");
  differs([](CacheConfig& c) { c.seed = 1; }, "seed 0", "seed 1");
  CHECK(verkv::first_difference("a 1\n", "a 1\nb 2\n") == "\"\" there, \"b 2\" here");
}

}  // namespace
