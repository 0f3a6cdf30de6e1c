// Data of the tests of the manager: rows of keys, values and queries, importance.
#ifndef VERKV_TESTS_SUPPORT_BLOCKS_HPP
#define VERKV_TESTS_SUPPORT_BLOCKS_HPP

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "reference/statistics.hpp"

namespace verkv::test {

using reference::Random;

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

inline std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

// A dense [token][head][dim] block.
struct Block {
  std::int64_t tokens = 0;
  std::int64_t heads = 0;
  std::int64_t dim = 0;
  std::vector<float> data;

  TensorView view() const {
    return verkv::token_major(data.data(), DType::f32, tokens, heads, dim);
  }
  float& at(std::int64_t t, std::int64_t h, std::int64_t j) {
    return data[size((t * heads + h) * dim + j)];
  }
  float at(std::int64_t t, std::int64_t h, std::int64_t j) const {
    return data[size((t * heads + h) * dim + j)];
  }
  std::vector<float> row(std::int64_t t, std::int64_t h) const {
    const auto begin = data.begin() + (t * heads + h) * dim;
    return {begin, begin + dim};
  }
  Block part(std::int64_t begin, std::int64_t count) const {
    const auto from = data.begin() + begin * heads * dim;
    return {count, heads, dim, {from, from + count * heads * dim}};
  }
};

Block constant_block(std::int64_t tokens, std::int64_t heads, std::int64_t dim, float value);

// Normal numbers around a centre of each (head, coordinate), as keys have them.
Block random_block(Random& random, std::int64_t tokens, std::int64_t heads, std::int64_t dim,
                   double spread, double centre = 0);

// Importance [head][token] of one layer.
struct Scores {
  std::int64_t heads = 0;
  std::int64_t tokens = 0;
  std::vector<float> data;

  ImportanceView view() const { return {data.data(), heads, tokens, tokens}; }
};

enum class ScoreKind { random, zero, equal, with_zeros };

Scores random_scores(Random& random, std::int64_t heads, std::int64_t tokens, ScoreKind kind);

void compress(KvCacheManager& cache, SequenceId sequence, const std::vector<Scores>& scores,
              const std::vector<Block>& prompt_queries = {});

}  // namespace verkv::test

#endif  // VERKV_TESTS_SUPPORT_BLOCKS_HPP
