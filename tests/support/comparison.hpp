// Comparison of a step with the reference.
#ifndef VERKV_TESTS_SUPPORT_COMPARISON_HPP
#define VERKV_TESTS_SUPPORT_COMPARISON_HPP

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "reference/step.hpp"
#include "support/results.hpp"
#include "tolerance.hpp"

namespace verkv::test {

using reference::kInfinite;
using reference::Vector;

struct Tally {
  std::int64_t heads = 0;     // query heads compared
  std::int64_t boundary = 0;  // of them, plans that differ by one token
  std::vector<std::string> failures;

  void fail(const std::string& text) {
    if (failures.size() < 20) failures.push_back(text);
  }
};

double norm(const Vector& x);

// A plan may end one token earlier or later where the certificate of a prefix meets epsilon (or a
// worth the price) to within the tolerance; outputs are then of different plans and not compared.
struct Tolerance {
  double epsilon = tolerance::kStepEpsilon;
  double lse = tolerance::kStepLse;
  double output = tolerance::kStepOutput;
};

void compare(const CacheConfig& config, std::int64_t layer, const Result& result, std::size_t row,
             const std::vector<reference::StepAnswer>& answers, const std::string& what,
             Tally& tally, const Tolerance& within = {});

void report(const Tally& tally);

}  // namespace verkv::test

#endif  // VERKV_TESTS_SUPPORT_COMPARISON_HPP
