// Caches that are told the same tokens and must do the same.
#ifndef VERKV_TESTS_SUPPORT_PASSAGE_HPP
#define VERKV_TESTS_SUPPORT_PASSAGE_HPP

#include <cstdint>
#include <memory>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "catch.hpp"
#include "support/blocks.hpp"
#include "support/configurations.hpp"
#include "support/results.hpp"
#include "support/test_backend.hpp"

namespace verkv::test {

// The same data for as many caches as a test compares: tokens of one layer.
struct Passage {
  explicit Passage(std::int64_t tokens, std::uint64_t seed = 41,
                   const LayerConfig& layer = small_config().layers[0]) {
    Random random(seed);
    keys = random_block(random, tokens, layer.kv_heads, layer.key_dim, 1);
    values = random_block(random, tokens, layer.kv_heads, layer.value_dim, 1);
    queries = random_block(random, tokens, layer.query_heads, layer.key_dim, 1);
  }
  Block keys, values, queries;
};

// A cache with a prompt of a passage that is compressed.
struct Reader {
  Reader(const CacheConfig& config, const Passage& from, std::int64_t prompt)
      : passage(from), cache(make_cache(config)), sequence(cache->create_sequence(5)) {
    append(prompt);
    Random random(42);
    test::compress(*cache, sequence,
                   {random_scores(random, passage.keys.heads, prompt, ScoreKind::random)});
  }
  std::int64_t tokens() const { return cache->tokens(sequence, 0); }
  std::int64_t compressed() const { return cache->compressed_tokens(sequence, 0); }
  // The next tokens of the passage in one call.
  void append(std::int64_t count) {
    const std::int64_t at = tokens();
    const Block keys = passage.keys.part(at, count);
    const Block values = passage.values.part(at, count);
    cache->append(sequence, 0, keys.view(), values.view());
  }
  // With the query of the last token.
  Result attend_last() const {
    return attend(*cache, 0, {sequence}, passage.queries.part(tokens() - 1, 1));
  }
  // With those of the last tokens.
  Result attend_burst(std::int64_t count) const {
    return attend(*cache, 0, std::vector<SequenceId>(size(count), sequence),
                  passage.queries.part(tokens() - count, count));
  }
  bool truncate(std::int64_t tokens) { return cache->truncate(sequence, tokens).done; }

  const Passage& passage;
  std::unique_ptr<KvCacheManager> cache;
  SequenceId sequence;
};

// What is in use; room may differ.
inline void check_same_use(const Reader& a, const Reader& b) {
  const MemoryReport x = a.cache->memory(a.sequence);
  const MemoryReport y = b.cache->memory(b.sequence);
  CHECK(x.resident_bytes == y.resident_bytes);
  CHECK(x.sketch_bytes == y.sketch_bytes);
  CHECK(x.metadata_bytes == y.metadata_bytes);
  CHECK(x.host_bytes == y.host_bytes);
  CHECK(x.basis_bytes == y.basis_bytes);
  CHECK(a.tokens() == b.tokens());
  CHECK(a.compressed() == b.compressed());
}

// What both do from here on is the same, through the next two chunks.
inline void check_same_future(Reader& a, Reader& b) {
  check_same_use(a, b);
  for (std::int64_t step = 0; step < scene(40, 22); ++step) {
    a.append(1);
    b.append(1);
    if (step % scene(1, 7) != 0) continue;
    REQUIRE(same(a.attend_last(), b.attend_last()));
  }
  check_same_use(a, b);
}

}  // namespace verkv::test

#endif  // VERKV_TESTS_SUPPORT_PASSAGE_HPP
