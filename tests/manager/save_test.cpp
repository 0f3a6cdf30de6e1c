// KvCacheManager on a backend (support/test_backend.hpp): sequences that are saved and restored, and
// rows that are read back.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <verkv/error.hpp>
#include <verkv/kv_cache_manager.hpp>

#include "catch.hpp"
#include "reference/statistics.hpp"
#include "saved_bytes.hpp"
#include "support/blocks.hpp"
#include "support/configurations.hpp"
#include "support/results.hpp"
#include "support/test_backend.hpp"
#include "support/victim.hpp"

using namespace verkv;
using namespace verkv::test;
using verkv::reference::Random;

namespace {

using Bytes = std::vector<std::byte>;

Bytes saved(const KvCacheManager& cache, SequenceId sequence) {
  Bytes bytes;
  cache.save(sequence, [&](std::span<const std::byte> more) {
    bytes.insert(bytes.end(), more.begin(), more.end());
  });
  return bytes;
}

// At most `most` bytes at a time.
ReadBytes reader_of(std::span<const std::byte> bytes, std::size_t most = std::size_t(-1)) {
  return [bytes, most, at = std::size_t{0}](std::span<std::byte> to) mutable {
    const std::size_t count = std::min({to.size(), most, bytes.size() - at});
    std::memcpy(to.data(), bytes.data() + at, count);
    at += count;
    return count;
  };
}

SequenceId restored(KvCacheManager& cache, std::span<const std::byte> bytes) {
  return cache.restore(reader_of(bytes));
}

// The same tokens for two caches: of two layers, of which the second is dense.
class Narration {
 public:
  explicit Narration(const CacheConfig& config) : config_(config) {}

  void append(KvCacheManager& cache, SequenceId sequence, std::int64_t count) {
    for (std::size_t l = 0; l < config_.layers.size(); ++l) {
      const LayerConfig& layer = config_.layers[l];
      const std::int64_t index = static_cast<std::int64_t>(l);
      Random random(1000 * l + static_cast<std::uint64_t>(cache.tokens(sequence, index)));
      const Block keys = random_block(random, count, layer.kv_heads, layer.key_dim, 1);
      const Block values = random_block(random, count, layer.kv_heads, layer.value_dim, 1);
      cache.append(sequence, index, keys.view(), values.view());
    }
  }

  Result step(KvCacheManager& cache, SequenceId sequence) {
    Result all;
    for (std::size_t l = 0; l < config_.layers.size(); ++l) {
      const LayerConfig& layer = config_.layers[l];
      const std::int64_t index = static_cast<std::int64_t>(l);
      Random random(77 + 1000 * l + static_cast<std::uint64_t>(cache.tokens(sequence, index)));
      append_result(all, attend(cache, index, {sequence},
                                random_block(random, 1, layer.query_heads, layer.key_dim, 1)));
    }
    return all;
  }

  void compress(KvCacheManager& cache, SequenceId sequence) {
    std::vector<Scores> scores;
    for (std::size_t l = 0; l < config_.layers.size(); ++l) {
      const std::int64_t index = static_cast<std::int64_t>(l);
      Random random(5 + l);
      scores.push_back(
          random_scores(random, config_.layers[l].kv_heads,
                        cache.tokens(sequence, index) - cache.compressed_tokens(sequence, index),
                        ScoreKind::random));
    }
    test::compress(cache, sequence, scores);
  }

 private:
  CacheConfig config_;
};

CacheConfig saved_config() {
  CacheConfig config = small_config();
  config.layers = {layer_of(2, 3, 64, 48), layer_of(1, 2, 40, 64)};
  config.layers[1].dense = true;
  config.keep = 0.25;
  config.local_tokens = 8;
  config.chunk_tokens = 16;
  config.compress_from = 32;
  return config;
}

// What the two hold, and what they answer to the same further tokens.
void check_go_on_alike(Narration& passage, KvCacheManager& a, SequenceId x, KvCacheManager& b,
                       SequenceId y, int steps) {
  for (std::int64_t l = 0; l < 2; ++l) {
    REQUIRE(a.tokens(x, l) == b.tokens(y, l));
    REQUIRE(a.compressed_tokens(x, l) == b.compressed_tokens(y, l));
  }
  const MemoryReport p = a.memory(x);
  const MemoryReport q = b.memory(y);
  CHECK(p.resident_bytes == q.resident_bytes);
  CHECK(p.sketch_bytes == q.sketch_bytes);
  CHECK(p.metadata_bytes == q.metadata_bytes);
  CHECK(p.host_bytes == q.host_bytes);
  CHECK(p.basis_bytes == q.basis_bytes);
  for (int step = 0; step < steps; ++step) {
    passage.append(a, x, 1);
    passage.append(b, y, 1);
    REQUIRE(same(passage.step(a, x), passage.step(b, y)));
  }
  CHECK(a.compressed_tokens(x, 0) == b.compressed_tokens(y, 0));
}

TEST_CASE("A restored sequence goes on, bit for bit, wherever it was saved", "[save][cpu]") {
  for (const DType storage : {DType::f16, DType::bf16, DType::f32}) {
    for (const SketchKind kind : {SketchKind::calibrated, SketchKind::exact}) {
      for (const Estimator estimator : {Estimator::clusters, Estimator::plain}) {
        if (storage != DType::f16 && estimator == Estimator::plain) continue;
        CacheConfig config = saved_config();
        config.storage = storage;
        config.sketch.kind = kind;
        config.study.estimator = estimator;
        INFO("storage " << name(storage) << ", sketch " << static_cast<int>(kind) << ", estimator "
                        << static_cast<int>(estimator));
        Narration passage(config);
        const auto cache = make_cache(config);
        const SequenceId sequence = cache->create_sequence(9);
        const auto check = [&](const char* when, int steps) {
          INFO(when);
          const auto other = make_cache(config);
          other->create_sequence(3);  // so that names differ
          const SequenceId sibling = restored(*other, saved(*cache, sequence));
          // The original goes on as a second restored sequence, and stays.
          const auto third = make_cache(config);
          const SequenceId twin = restored(*third, saved(*cache, sequence));
          passage.append(*cache, sequence, 1);
          passage.append(*other, sibling, 1);
          passage.append(*third, twin, 1);
          CHECK(same(passage.step(*cache, sequence), passage.step(*other, sibling)));
          passage.step(*third, twin);
          check_go_on_alike(passage, *third, twin, *other, sibling, steps);
          // A redraw draws the same.
          third->redraw(twin, 12);
          other->redraw(sibling, 12);
          CHECK(same(passage.step(*third, twin), passage.step(*other, sibling)));
        };
        check("empty", 2);
        passage.append(*cache, sequence, 90);
        check("prompt", 2);
        passage.compress(*cache, sequence);
        check("compressed", 40);
        for (int i = 0; i < 30; ++i) {
          passage.append(*cache, sequence, 1);
          passage.step(*cache, sequence);
        }
        check("after chunks, with scores of the window", 40);
        CHECK(cache->truncate(sequence, cache->tokens(sequence, 0) - 2).done);
        check("after two tokens were taken back", 20);
      }
    }
  }
}

TEST_CASE("What is saved of a restored sequence is what it was restored from", "[save][cpu]") {
  const CacheConfig config = saved_config();
  Narration passage(config);
  const auto cache = make_cache(config);
  const SequenceId sequence = cache->create_sequence(9);
  passage.append(*cache, sequence, 90);
  passage.compress(*cache, sequence);
  for (int i = 0; i < 20; ++i) {
    passage.append(*cache, sequence, 1);
    passage.step(*cache, sequence);
  }
  const Bytes bytes = saved(*cache, sequence);
  CHECK(saved(*cache, restored(*cache, bytes)) == bytes);
  // In pieces of any size.
  CHECK(saved(*cache, cache->restore(reader_of(bytes, 1))) == bytes);
  CHECK(saved(*cache, cache->restore(reader_of(bytes, 1000))) == bytes);
}

TEST_CASE("Saved sequences that are cut, altered or foreign are refused, and nothing changes",
          "[save][cpu]") {
  Victim victim(victim_config());
  const Bytes whole = saved(*victim.cache, victim.a);
  // Room for reports of a third sequence stays with the step's buffers.
  victim.cache->erase(victim.cache->create_sequence());
  victim.memory = victim.cache->memory();
  const auto refused = [&](const Bytes& bytes, const std::vector<std::string>& parts) {
    victim.refuses<FormatError>([&] { restored(*victim.cache, bytes); }, parts);
  };
  SECTION("cut") {
    Random random(1);
    for (int trial = 0; trial < 60; ++trial) {
      const std::size_t length =
          trial < 20 ? static_cast<std::size_t>(trial) : random.below(whole.size());
      refused({whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length)},
              {"saved sequence", std::to_string(length)});
    }
    refused({whole.begin(), whole.end() - 1}, {"ends"});
  }
  SECTION("altered") {
    Random random(2);
    for (int trial = 0; trial < 200; ++trial) {
      Bytes bytes = whole;
      const std::size_t at =
          trial < 100 ? static_cast<std::size_t>(trial) : random.below(bytes.size());
      bytes[at] ^= std::byte(1 << random.below(8));
      CAPTURE(at);
      refused(bytes, {"saved sequence"});
    }
  }
  SECTION("foreign") {
    refused({}, {"ends"});
    refused(Bytes(1000, std::byte{0}), {"not a saved sequence"});
    const std::string text = "{\"a\": 1, \"this is\": \"a JSON file, of some length\"}";
    const auto bytes = std::as_bytes(std::span(text));
    refused({bytes.begin(), bytes.end()}, {"not a saved sequence"});
  }
  SECTION("of another configuration") {
    CacheConfig config = victim_config();
    config.storage = DType::bf16;
    const auto other = make_cache(config);
    const std::string text = error_of<FormatError>([&] { restored(*other, whole); });
    check_names(text, {"storage f32", "storage bf16"});
    config = victim_config();
    config.layers[2].key_dim += 8;
    const auto third = make_cache(config);
    check_names(error_of<FormatError>([&] { restored(*third, whole); }),
                {"layer 2: key size 64", "layer 2: key size 72"});
  }
  SECTION("what the caller throws comes through") {
    int calls = 0;
    const auto failing = [&](std::span<std::byte> to) -> std::size_t {
      if (++calls == 12) throw std::runtime_error("disk");
      return reader_of(whole)(to);
    };
    CHECK_THROWS(victim.cache->restore(failing));
    victim.check_unchanged();
    CHECK_THROWS_WITH(
        victim.cache->save(
            victim.a, [](std::span<const std::byte>) { throw std::runtime_error("disk full"); }),
        "disk full");
    victim.check_unchanged();
  }
  SECTION("beyond a limit") {
    CacheConfig config = victim_config();
    config.host_bytes_limit = victim.memory.host_bytes / 4;
    const auto other = make_cache(config);
    check_names(error_of<CapacityError>([&] { restored(*other, whole); }),
                {"host", std::to_string(*config.host_bytes_limit)});
    CHECK(other->memory().host_bytes == 0);
    CHECK(other->memory().fast_bytes() == 0);
  }
  victim.check_unchanged();
}

// Where sections end: before and behind their checksums.
struct Section {
  std::size_t begin = 0;
  std::size_t end = 0;
};

std::uint64_t checksum_of(std::span<const std::byte> bytes) {
  Checksum sum;
  sum.add(bytes);
  return sum.value();
}

std::vector<Section> sections_of(const Bytes& bytes) {
  std::vector<Section> sections;
  Checksum sum;
  Section section;
  for (std::size_t at = 0; at + 8 <= bytes.size(); ++at) {
    std::uint64_t here = 0;
    std::memcpy(&here, bytes.data() + at, 8);
    if (at > section.begin && here == sum.value()) {
      section.end = at;
      sections.push_back(section);
      section.begin = at + 8;
      sum = {};
      at += 7;
      continue;
    }
    sum.add(std::span(bytes).subspan(at, 1));
  }
  return sections;
}

TEST_CASE("Saved sequences that someone made up are refused, or answer", "[save][cpu]") {
  CacheConfig config = saved_config();
  config.layers = {layer_of(1, 2, 24, 16)};
  config.compress_from = 16;
  Narration passage(config);
  const auto cache = make_cache(config);
  const SequenceId sequence = cache->create_sequence(9);
  passage.append(*cache, sequence, 40);
  passage.compress(*cache, sequence);
  passage.append(*cache, sequence, 1);
  passage.step(*cache, sequence);
  const Bytes whole = saved(*cache, sequence);
  const std::vector<Section> sections = sections_of(whole);
  REQUIRE(sections.size() == 7);
  REQUIRE(sections.back().end + 8 == whole.size());
  Random random(4);
  int refused = 0;
  int answered = 0;
  for (int trial = 0; trial < trials(3000); ++trial) {
    // Checksums fit; lengths, places and numbers do not.
    Bytes bytes = whole;
    const Section& section = sections[1 + random.below(sections.size() - 1)];
    const std::size_t length = section.end - section.begin;
    for (std::uint64_t change = 0; change < 1 + random.below(3); ++change) {
      const std::size_t at = section.begin + random.below(length);
      bytes[at] = std::byte(random.below(4) == 0 ? 255 : random.below(256));
    }
    const std::uint64_t sum = checksum_of(std::span(bytes).subspan(section.begin, length));
    std::memcpy(bytes.data() + section.end, &sum, 8);
    try {
      const SequenceId made_up = restored(*cache, bytes);
      ++answered;
      passage.append(*cache, made_up, 3);
      passage.step(*cache, made_up);
      passage.append(*cache, made_up, 30);
      cache->redraw(made_up, 3);
      passage.step(*cache, made_up);
      cache->erase(made_up);
    } catch (const FormatError&) {
      ++refused;
    }
  }
  CHECK(refused > trials(300));
  CHECK(answered > trials(300));
}

// With a checksum that fits.
void seal(Bytes& bytes, const Section& section) {
  const std::uint64_t sum =
      checksum_of(std::span(bytes).subspan(section.begin, section.end - section.begin));
  std::memcpy(bytes.data() + section.end, &sum, 8);
}

TEST_CASE("What no sequence of the configuration holds is refused", "[save][cpu]") {
  CacheConfig config = saved_config();
  config.layers = {layer_of(1, 2, 24, 16)};
  config.compress_from = 16;
  config.keep = 0.5;
  Narration passage(config);
  const auto cache = make_cache(config);
  const SequenceId sequence = cache->create_sequence(9);
  passage.append(*cache, sequence, 400);
  passage.compress(*cache, sequence);
  passage.append(*cache, sequence, 1);
  passage.step(*cache, sequence);
  const Bytes whole = saved(*cache, sequence);
  const Section scores = sections_of(whole)[4];
  for (const float bad : {kNaN, kInfinity, -1.0f}) {
    Bytes bytes = whole;
    std::memcpy(bytes.data() + scores.begin, &bad, sizeof bad);
    seal(bytes, scores);
    check_names(error_of<FormatError>([&] { restored(*cache, bytes); }), {"score"});
  }
  // Tokens that are compressed where the budget is for all of them.
  const std::string text(reinterpret_cast<const char*>(whole.data()), whole.size());
  const std::string before = "keep 0.5\n";
  const std::size_t at = text.find(before);
  REQUIRE(at < text.size());
  config.keep = 1;
  std::uint64_t length = 0;
  std::memcpy(&length, whole.data() + 16, sizeof length);
  length -= 2;
  Bytes bytes = whole;
  std::memcpy(bytes.data() + 16, &length, sizeof length);
  bytes[at + 5] = std::byte{'1'};
  bytes.erase(bytes.begin() + static_cast<std::ptrdiff_t>(at) + 6,
              bytes.begin() + static_cast<std::ptrdiff_t>(at) + 8);
  seal(bytes, {0, 24 + static_cast<std::size_t>(length)});
  const auto all_kept = make_cache(config);
  check_names(error_of<FormatError>([&] { restored(*all_kept, bytes); }), {"layer 0"});
  CHECK(all_kept->memory().host_bytes == 0);
  CHECK_THROWS_AS(cache->save(sequence, nullptr), InvalidArgument);
  CHECK_THROWS_AS(cache->restore(nullptr), InvalidArgument);
}

TEST_CASE("Rows are read back as they are stored", "[save][cpu]") {
  CacheConfig config = saved_config();
  config.layers = {layer_of(3, 2, 40, 24)};
  for (const DType storage : {DType::f16, DType::f32}) {
    config.storage = storage;
    const auto cache = make_cache(config);
    const SequenceId sequence = cache->create_sequence();
    Random random(3);
    const Block keys = random_block(random, 100, 3, 40, 1);
    const Block values = random_block(random, 100, 3, 24, 1);
    cache->append(sequence, 0, keys.view(), values.view());
    for (const bool compressed : {false, true}) {
      if (compressed) {
        test::compress(*cache, sequence, {random_scores(random, 3, 100, ScoreKind::random)});
        CHECK(cache->compressed_tokens(sequence, 0) > 0);
      }
      const std::size_t element = size_bytes(storage);
      Bytes key(7 * 3 * 40 * element);
      Bytes value(7 * 3 * 24 * element);
      cache->read(sequence, 0, 90, 7, key, value);
      const auto check = [&](const Bytes& got, const Block& block, std::int64_t dim) {
        const TensorView stored = token_major(got.data(), storage, 7, 3, dim);
        for (std::int64_t t = 0; t < 7; ++t) {
          for (std::int64_t h = 0; h < 3; ++h) {
            const TensorView all = block.view();
            for (std::int64_t j = 0; j < dim; ++j) {
              const float given = static_cast<const float*>(all.row(90 + t, h))[j];
              const float back = with_element(storage, [&](auto zero) {
                using Element = decltype(zero);
                return to_float(static_cast<const Element*>(stored.row(t, h))[j]);
              });
              const float expected = storage == DType::f16 ? to_float(to_half(given)) : given;
              REQUIRE(back == expected);
            }
          }
        }
      };
      check(key, keys, 40);
      check(value, values, 24);
    }
    Bytes none;
    cache->read(sequence, 0, 100, 0, none, none);
    const auto refuses = [&](std::int64_t first, std::int64_t count, std::size_t bytes,
                             const std::vector<std::string>& parts) {
      Bytes key(bytes);
      check_names(
          error_of<InvalidArgument>([&] { cache->read(sequence, 0, first, count, key, none); }),
          parts);
    };
    refuses(-1, 1, 0, {"-1"});
    refuses(0, -1, 0, {"-1"});
    refuses(100, 1, 0, {"1 tokens", "100"});
    refuses(0, 1, 3, {"3 bytes", std::to_string(3 * 40 * size_bytes(storage))});
  }
}

TEST_CASE("A backend that does not save says so, and nothing changes", "[save]") {
  Victim victim(victim_config());
  if (backend().saves) return;
  const auto none = [](std::span<const std::byte>) {};
  victim.refuses<InvalidArgument>([&] { victim.cache->save(victim.a, none); }, {"save"});
  victim.refuses<InvalidArgument>([&] { victim.cache->read(victim.a, 0, 0, 0, {}, {}); }, {"read"});
  victim.refuses<InvalidArgument>([&] { victim.cache->changed_row(victim.a, 0); }, {"changed_row"});
  const std::vector<float> row(2 * 64);
  const void* const address = row.data();
  const TensorView keys = listed_rows(&address, DType::f32, 1, 2, 64, 64);
  const TensorView values = listed_rows(&address, DType::f32, 1, 2, 48, 48);
  victim.refuses<InvalidArgument>([&] { victim.cache->append(victim.a, 0, keys, values); },
                                  {"keys", "listed"});
  // Before a byte is asked for.
  const auto broken = [](std::span<std::byte>) -> std::size_t { throw std::runtime_error("read"); };
  victim.refuses<InvalidArgument>([&] { victim.cache->restore(broken); }, {"restore"});
}

}  // namespace
