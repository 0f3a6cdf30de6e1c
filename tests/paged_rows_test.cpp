// Rows in pages that forks share (src/cpu/paged_rows.hpp), against plain vectors.
#include "cpu/paged_rows.hpp"

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "catch.hpp"
#include "cpu/head_store.hpp"
#include "reference/statistics.hpp"

namespace {

using verkv::MemoryReport;
using verkv::cpu::HeadStore;
using verkv::cpu::LayerShape;
using verkv::cpu::PagedRows;
using verkv::cpu::RowBytes;
using verkv::reference::Random;

constexpr std::int64_t kRowBytes = 12;

std::uint32_t number(const PagedRows& rows, std::int64_t i) {
  std::uint32_t x = 0;
  std::memcpy(&x, rows.row(i) + 4, sizeof x);
  return x;
}

void put(PagedRows& rows, std::int64_t i, std::uint32_t x) {
  std::memset(rows.row(i), 0, kRowBytes);
  std::memcpy(rows.row(i) + 4, &x, sizeof x);
}

void append(PagedRows& rows, const std::vector<std::uint32_t>& numbers) {
  const std::int64_t before = rows.size();
  rows.reserve_more(static_cast<std::int64_t>(numbers.size()));
  rows.resize(before + static_cast<std::int64_t>(numbers.size()));
  for (std::size_t i = 0; i < numbers.size(); ++i)
    put(rows, before + static_cast<std::int64_t>(i), numbers[i]);
}

std::vector<std::uint32_t> some(Random& random, std::size_t count) {
  std::vector<std::uint32_t> numbers(count);
  for (std::uint32_t& x : numbers) x = static_cast<std::uint32_t>(random.bits());
  return numbers;
}

// Runs cover the rows, and rows of a run lie side by side.
void check_same(const PagedRows& rows, const std::vector<std::uint32_t>& expected) {
  REQUIRE(rows.size() == static_cast<std::int64_t>(expected.size()));
  std::int64_t next = 0;
  verkv::cpu::each_run(rows, [&](std::int64_t first, std::int64_t count) {
    REQUIRE(first == next);
    REQUIRE(count > 0);
    next += count;
    for (std::int64_t i = first; i < next; ++i) {
      REQUIRE(rows.row(i) == rows.row(first) + (i - first) * kRowBytes);
      REQUIRE(number(rows, i) == expected[static_cast<std::size_t>(i)]);
    }
  });
  REQUIRE(next == rows.size());
}

}  // namespace

TEST_CASE("Rows never move once their page is full") {
  for (const int shift : {2, 6}) {
    Random random(1);
    PagedRows rows(shift, kRowBytes);
    const std::int64_t page = std::int64_t{1} << shift;
    std::vector<std::uint32_t> expected;
    std::vector<const std::byte*> at;
    for (int step = 0; step < 200; ++step) {
      const std::vector<std::uint32_t> more =
          some(random, step % 7 == 0 ? random.below(40) : 1 + random.below(2));
      append(rows, more);
      expected.insert(expected.end(), more.begin(), more.end());
      const std::int64_t whole = rows.size() / page * page;
      for (std::size_t i = 0; i < at.size(); ++i)
        REQUIRE(at[i] == rows.row(static_cast<std::int64_t>(i)));
      for (std::int64_t i = static_cast<std::int64_t>(at.size()); i < whole; ++i)
        at.push_back(rows.row(i));
      REQUIRE(rows.bytes().used == rows.size() * kRowBytes);
    }
    check_same(rows, expected);
    // No more than a page is allocated beyond what is there, besides the tables.
    CHECK(rows.bytes().spare < page * kRowBytes + rows.size() / page * 200 + 1000);
  }
}

TEST_CASE("Short rows take what they need") {
  PagedRows rows(6, 256);
  CHECK(rows.bytes().used + rows.bytes().spare == 0);
  rows.reserve_more(1);
  rows.resize(1);
  CHECK(rows.bytes().used + rows.bytes().spare < 256 + 256);
  rows.reserve_more(0);
  CHECK(rows.bytes().used + rows.bytes().spare < 256 + 256);
}

// Owners that fork, append, rewrite, drop and vanish, each beside a vector of its own.
TEST_CASE("Forks of rows never change each other, and bytes are counted once") {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    Random random(seed);
    struct Owner {
      PagedRows rows;
      std::vector<std::uint32_t> expected;
    };
    std::map<int, Owner> owners;
    int next = 0;
    std::int64_t total = 0;
    const auto exclusive = [](const Owner& owner) {
      const RowBytes bytes = owner.rows.exclusive_bytes();
      return bytes.used + bytes.spare;
    };
    const auto make = [&](PagedRows rows, std::vector<std::uint32_t> expected) {
      owners.emplace(next, Owner{std::move(rows), std::move(expected)});
      total += exclusive(owners.at(next++));
    };
    const int shift = static_cast<int>(2 + random.below(3));
    const std::int64_t growth = random.below(2) == 0 ? 0 : 4;
    make(PagedRows(shift, kRowBytes, nullptr, random.below(2) == 0 ? 1 : 4, growth), {});
    for (int step = 0; step < 150; ++step) {
      auto it = owners.begin();
      std::advance(it, random.below(owners.size()));
      Owner& owner = it->second;
      const std::int64_t before = exclusive(owner);
      switch (random.below(8)) {
        case 0: {
          make(owner.rows.fork(), owner.expected);
          // What the parent has is shared now: no more, no less in all.
          total += 0;
          break;
        }
        case 1: {
          if (owners.size() == 1) break;
          total -= before;
          owners.erase(it);
          break;
        }
        case 2: {
          const std::int64_t gone =
              static_cast<std::int64_t>(random.below(owner.expected.size() + 1));
          owner.rows.drop_front(gone);
          owner.expected.erase(owner.expected.begin(), owner.expected.begin() + gone);
          total += exclusive(owner) - before;
          break;
        }
        case 3: {
          // Rewrites rows from one on.
          if (owner.expected.empty()) break;
          const std::int64_t from = static_cast<std::int64_t>(random.below(owner.expected.size()));
          const std::int64_t size = owner.rows.size();
          owner.rows.reserve(from, size + 3);
          owner.rows.resize(size + 3);
          owner.expected.resize(owner.expected.size() + 3);
          for (std::int64_t i = from; i < size + 3; ++i) {
            owner.expected[static_cast<std::size_t>(i)] = static_cast<std::uint32_t>(random.bits());
            put(owner.rows, i, owner.expected[static_cast<std::size_t>(i)]);
          }
          total += exclusive(owner) - before;
          break;
        }
        case 4: {
          const std::int64_t from =
              static_cast<std::int64_t>(random.below(owner.expected.size() + 1));
          owner.rows = owner.rows.copy_from(from);
          owner.expected.erase(owner.expected.begin(), owner.expected.begin() + from);
          total += exclusive(owner) - before;
          break;
        }
        case 5: {
          // At the end fewer.
          const std::size_t size = random.below(owner.expected.size() + 1);
          owner.rows.resize(static_cast<std::int64_t>(size));
          owner.expected.resize(size);
          total += exclusive(owner) - before;
          break;
        }
        default: {
          const std::vector<std::uint32_t> more = some(random, random.below(30));
          append(owner.rows, more);
          owner.expected.insert(owner.expected.end(), more.begin(), more.end());
          total += exclusive(owner) - before;
          break;
        }
      }
      INFO("seed " << seed << ", step " << step);
      for (const auto& [name, one] : owners) check_same(one.rows, one.expected);
      if (owners.size() == 1) {
        const RowBytes bytes = owners.begin()->second.rows.bytes();
        REQUIRE(bytes.used + bytes.spare == total);
      }
    }
    for (const auto& [name, one] : owners) REQUIRE(exclusive(one) >= 0);
    while (!owners.empty()) {
      total -= exclusive(owners.begin()->second);
      owners.erase(owners.begin());
    }
    CHECK(total == 0);
  }
}

TEST_CASE("A fork copies less than a page") {
  PagedRows rows(6, 256);
  rows.reserve_more(10'000);
  rows.resize(10'000);
  PagedRows fork = rows.fork();
  const std::byte* const whole = rows.row(9'983);
  RowBytes own = fork.exclusive_bytes();
  CHECK(own.used == 0);
  CHECK(own.spare == 0);
  CHECK(own.tables < 3'000);
  fork.reserve_more(1);
  fork.resize(10'001);
  own = fork.exclusive_bytes();
  CHECK(own.used == 17 * 256);
  CHECK(own.used + own.spare < 64 * 256 + 100);
  // The other page is the parent's still, and all the pages before are both's.
  CHECK(fork.row(9'983) == whole);
  CHECK(fork.row(9'984) != rows.row(9'984));
  CHECK(rows.bytes().used == 10'000 * 256);
}

TEST_CASE("The host tier of a head grows in place") {
  LayerShape shape;
  shape.config.key_dim = 16;
  shape.config.value_dim = 16;
  shape.storage = verkv::DType::f32;
  shape.sketch = verkv::largest_sketch_shape(verkv::SketchKind::exact, 2, 16);
  HeadStore store(shape);
  std::vector<float> numbers(700 * 16, 1.0f);
  std::vector<const float*> host, window;
  std::size_t whole = 0;
  for (const std::int64_t count : {700, 1, 300, 1, 1, 64, 63, 1, 700}) {
    const verkv::TensorView view =
        verkv::token_major(numbers.data(), verkv::DType::f32, count, 1, 16);
    store.reserve_append(count, false);
    store.append(shape, verkv::cpu::scalar_kernels(), view, view, 0, false);
    for (std::size_t i = 0; i < whole; ++i) {
      const std::int64_t at = static_cast<std::int64_t>(i);
      REQUIRE(host[i] == verkv::row_of<float>(store.host().keys(shape), at));
      REQUIRE(window[i] == reinterpret_cast<const float*>(store.window().key.row(at)));
    }
    whole = static_cast<std::size_t>(store.tokens() / verkv::kPageRows * verkv::kPageRows);
    host.clear();
    window.clear();
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(whole); ++i) {
      host.push_back(verkv::row_of<float>(store.host().keys(shape), i));
      window.push_back(reinterpret_cast<const float*>(store.window().key.row(i)));
    }
  }
}
