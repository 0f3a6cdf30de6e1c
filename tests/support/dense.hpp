// Dense attention over what a sequence stores, to compare a step with.
#ifndef VERKV_TESTS_SUPPORT_DENSE_HPP
#define VERKV_TESTS_SUPPORT_DENSE_HPP

#include <cstdint>
#include <memory>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "reference/step.hpp"
#include "support/results.hpp"

namespace verkv::test {

using reference::Vector;

struct Filled {
  std::unique_ptr<KvCacheManager> cache;
  SequenceId sequence;
  std::vector<Block> keys;  // per layer
  std::vector<Block> values;
  std::vector<Scores> scores;
};

// One sequence with all of its tokens appended at once; compressed unless scores is empty.
Filled fill(const CacheConfig& config, const std::vector<Block>& keys,
            const std::vector<Block>& values, const std::vector<Scores>& scores,
            std::uint64_t draw = 0);

struct Dense {
  Vector output;
  double lse = 0;
};

// Dense attention over the values as stored.
Dense dense(const CacheConfig& config, std::int64_t layer, const Block& keys, const Block& values,
            const std::vector<float>& query, std::int64_t query_head);

// Relative error of the outputs and absolute error of the LSE of one row, the worst over its heads.
struct WorstError {
  double output = 0;
  double lse = 0;
};

WorstError worst_error(const CacheConfig& config, std::int64_t layer, const Filled& filled,
                       const Block& queries, std::int64_t row, const Result& result);

}  // namespace verkv::test

#endif  // VERKV_TESTS_SUPPORT_DENSE_HPP
