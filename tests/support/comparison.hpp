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

// The step computes in binary32, the reference in double. A logit l has an error of about 1e-6 |l|
// (64 to 256 rounded products), so a weight has that relative error; D, the certificate and the
// output inherit it. 1e-3 leaves room for logits up to a few hundred. A plan may end one token
// earlier or later where the certificate of a prefix meets epsilon (or a key the price) to within
// these errors; outputs are then of different plans and not compared. Certificates below 1e-18 lose
// their variance, which is a sum of squares, to the smallest binary32 number.
struct Tolerance {
  double epsilon = 1e-3;
  double lse = 1e-4;
  double output = 1e-3;
};

void compare(const CacheConfig& config, std::int64_t layer, const Result& result, std::size_t row,
             const std::vector<reference::StepAnswer>& answers, const std::string& what,
             Tally& tally, const Tolerance& tolerance = {});

void report(const Tally& tally);

}  // namespace verkv::test

#endif  // VERKV_TESTS_SUPPORT_COMPARISON_HPP
