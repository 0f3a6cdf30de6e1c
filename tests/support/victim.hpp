// A cache that is mistreated and must stay as it was, and what errors must say.
#ifndef VERKV_TESTS_SUPPORT_VICTIM_HPP
#define VERKV_TESTS_SUPPORT_VICTIM_HPP

#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "catch.hpp"
#include "support/configurations.hpp"
#include "support/results.hpp"

namespace verkv::test {

using reference::Random;

// Runs f, which must throw an E, and returns its text.
template <class E, class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    FAIL_CHECK("another exception: " << error.what());
    return {};
  }
  FAIL_CHECK("no exception");
  return {};
}

void check_names(const std::string& text, const std::vector<std::string>& parts);

// A cache with two sequences, one compressed, and what it looked like before it was mistreated.
struct Victim {
  CacheConfig config;
  std::unique_ptr<KvCacheManager> cache;
  SequenceId a, b;
  Block queries;
  std::vector<Result> answers;
  MemoryReport memory;

  explicit Victim(CacheConfig c) : config(std::move(c)), cache(make_cache(config)) {
    Random random(20);
    a = cache->create_sequence();
    b = cache->create_sequence();
    queries = random_block(random, 2, 6, 64, 1);
    for (const SequenceId id : {a, b}) {
      for (std::int64_t l = 0; l < 3; ++l) {
        if (l == 1) continue;
        cache->append(id, l, random_block(random, 80, 2, 64, 1).view(),
                      random_block(random, 80, 2, 48, 1).view());
      }
    }
    const Scores scores = random_scores(random, 2, 80, ScoreKind::random);
    compress(*cache, a, {scores, {}, scores});
    for (const std::int64_t l : {0, 2}) answers.push_back(attend(*cache, l, {a, b}, queries));
    memory = cache->memory();
  }

  void check_unchanged() const {
    CHECK(same(cache->memory(), memory));
    for (const SequenceId id : {a, b}) {
      for (const std::int64_t l : {0, 2}) {
        CHECK(cache->tokens(id, l) == 80);
        CHECK(cache->compressed_tokens(id, l) == (id == a ? 72 : 0));
      }
    }
    CHECK(same(attend(*cache, 0, {a, b}, queries), answers[0]));
    CHECK(same(attend(*cache, 2, {a, b}, queries), answers[1]));
  }

  template <class E, class F>
  void refuses(F&& f, const std::vector<std::string>& parts) const {
    check_names(error_of<E>(f), parts);
    check_unchanged();
  }
};

CacheConfig victim_config();

}  // namespace verkv::test

#endif  // VERKV_TESTS_SUPPORT_VICTIM_HPP
