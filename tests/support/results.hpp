// One step of a manager and its answer, and comparisons of answers.
#ifndef VERKV_TESTS_SUPPORT_RESULTS_HPP
#define VERKV_TESTS_SUPPORT_RESULTS_HPP

#include <cstdint>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "support/blocks.hpp"
#include "support/test_backend.hpp"

namespace verkv::test {

struct Result {
  std::vector<float> output;
  std::vector<float> lse;
  std::vector<QueryHeadReport> query;
  std::vector<KvHeadReport> kv;
};

Result attend(KvCacheManager& cache, std::int64_t layer, const std::vector<SequenceId>& sequences,
              const TensorView& queries);

Result attend(KvCacheManager& cache, std::int64_t layer, const std::vector<SequenceId>& sequences,
              const Block& queries);

bool same_bits(const std::vector<float>& a, const std::vector<float>& b);

bool same(const QueryHeadReport& a, const QueryHeadReport& b);

bool same(const KvHeadReport& a, const KvHeadReport& b);

bool same(const Result& a, const Result& b);

bool same(const MemoryReport& a, const MemoryReport& b);

template <class T>
bool same_all(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(),
                                            [](const T& x, const T& y) { return same(x, y); });
}

// The same bits, or to rounding where the backend promises no more.
bool same_floats(const std::vector<float>& a, const std::vector<float>& b);

// Row `row` of a batch of `rows`.
Result row_of(const Result& all, std::size_t row, std::size_t rows);

void append_result(Result& to, const Result& from);

}  // namespace verkv::test

#endif  // VERKV_TESTS_SUPPORT_RESULTS_HPP
