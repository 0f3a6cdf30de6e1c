#include <verkv/importance.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "catch.hpp"
#include "reference/reference.hpp"
#include "reference/statistics.hpp"
#include "tolerance.hpp"

namespace {

using verkv::reference::Random;

struct Storage {
  explicit Storage(std::size_t n) : largest(n, 0.0f), sum(n, 0.0), squares(n, 0.0) {}
  verkv::ProbabilityMoments moments() { return {largest, sum, squares}; }

  std::vector<float> largest;
  std::vector<double> sum;
  std::vector<double> squares;
};

TEST_CASE("moments of rows of probabilities") {
  Random random(91);
  const std::size_t n = 37;
  Storage storage(n);
  verkv::ProbabilityMoments moments = storage.moments();
  std::vector<std::vector<float>> rows;
  for (int row = 0; row < 200; ++row) {
    std::vector<float> p;
    for (std::size_t i = 0; i < n; ++i)
      p.push_back(static_cast<float>(std::pow(random.uniform(), 6)));
    rows.push_back(p);
    moments.add(p);
  }
  CHECK(moments.rows == 200);
  for (std::size_t i = 0; i < n; ++i) {
    float largest = 0;
    double sum = 0;
    double square = 0;
    for (const auto& row : rows) {
      largest = std::max(largest, row[i]);
      sum += static_cast<double>(row[i]);
      square += static_cast<double>(row[i]) * static_cast<double>(row[i]);
    }
    CHECK(moments.largest[i] == largest);
    CHECK_THAT(moments.mean(i), Catch::WithinRel(sum / 200, verkv::tolerance::kIdentity));
    CHECK_THAT(moments.root_mean_square(i),
               Catch::WithinRel(std::sqrt(square / 200), verkv::tolerance::kIdentity));
    // A mean is never above the root mean square, nor that above the largest.
    CHECK(moments.mean(i) <= moments.root_mean_square(i) * (1 + verkv::tolerance::kInequality));
    CHECK(moments.root_mean_square(i) <=
          static_cast<double>(largest) * (1 + verkv::tolerance::kInequality));
  }
}

TEST_CASE("moments of no row, of no token, of one row") {
  Storage storage(2);
  verkv::ProbabilityMoments moments = storage.moments();
  CHECK(moments.mean(0) == 0);
  CHECK(moments.root_mean_square(1) == 0);
  moments.add(std::vector<float>{0.25f, 0.75f});
  CHECK(moments.mean(0) == 0.25);
  CHECK(moments.root_mean_square(1) == 0.75);
  CHECK(moments.largest[1] == 0.75f);
  Storage none(0);
  none.moments().add(std::span<const float>());
}

// Neyman: for weights p_i and inclusion probabilities r_i that sum to a budget, the variance of the
// Horvitz-Thompson sum, E p_i^2 (1 / r_i - 1) summed, is least at r_i proportional to sqrt(E
// p_i^2).
TEST_CASE("the root mean square is the best importance for the expected variance") {
  Random random(92);
  const std::size_t n = 50;
  Storage storage(n);
  verkv::ProbabilityMoments moments = storage.moments();
  for (int row = 0; row < 300; ++row) {
    std::vector<float> p;
    for (std::size_t i = 0; i < n; ++i) {
      p.push_back(
          static_cast<float>(std::exp(2 * random.normal() - 0.05 * static_cast<double>(i))));
    }
    moments.add(p);
  }
  const double budget = 5;
  const auto variance = [&](const std::vector<double>& tau) {
    const auto r = verkv::reference::inclusion(tau, budget).r;
    double sum = 0;
    for (std::size_t i = 0; i < n; ++i) {
      const double square = moments.root_mean_square(i) * moments.root_mean_square(i);
      sum += square * (1 / r[i] - 1);
    }
    return sum;
  };
  std::vector<double> best;
  std::vector<double> mean;
  std::vector<double> largest;
  for (std::size_t i = 0; i < n; ++i) {
    best.push_back(moments.root_mean_square(i));
    mean.push_back(moments.mean(i));
    largest.push_back(static_cast<double>(moments.largest[i]));
  }
  const double least = variance(best);
  CHECK(least <= variance(mean));
  CHECK(least <= variance(largest));
  for (int other = 0; other < 200; ++other) {
    std::vector<double> tau = best;
    for (double& t : tau) t *= std::exp(random.uniform(0, 1) * random.normal());
    REQUIRE(variance(tau) >= least * (1 - verkv::tolerance::kInequality));
  }
}

TEST_CASE("SnapKV: running maximum against looking at every neighbour") {
  Random random(93);
  for (int trial = 0; trial < 100; ++trial) {
    const auto n = static_cast<std::int64_t>(random.below(60));
    const auto width = static_cast<std::int64_t>(2 * random.below(12) + 1);
    std::vector<double> window;
    for (std::int64_t i = 0; i < n; ++i) window.push_back(random.uniform());
    std::vector<float> score(window.size(), -1.0f);
    verkv::snapkv_importance(std::span<const double>(window), width, std::span<float>(score));
    for (std::int64_t i = 0; i < n; ++i) {
      double best = 0;
      for (std::int64_t j = 0; j < n; ++j) {
        if (2 * std::abs(i - j) < width) best = std::max(best, window[static_cast<std::size_t>(j)]);
      }
      REQUIRE(score[static_cast<std::size_t>(i)] == static_cast<float>(best));
    }
  }
}

TEST_CASE("SnapKV: width 1 leaves the sums, a wide one levels them") {
  const std::vector<float> window = {0.5f, 0.0f, 2.0f, 1.0f};
  std::vector<float> score(4);
  verkv::snapkv_importance(std::span<const float>(window), 1, std::span<float>(score));
  CHECK(score == window);
  verkv::snapkv_importance(std::span<const float>(window), 99, std::span<float>(score));
  CHECK(score == std::vector<float>(4, 2.0f));
  verkv::snapkv_importance(std::span<const float>(window), 3, std::span<float>(score));
  CHECK(score == std::vector<float>{0.5f, 2.0f, 2.0f, 2.0f});
}

TEST_CASE("short keys score high, and a zero key finitely") {
  const auto score = [](const std::vector<float>& key) {
    return verkv::key_norm_importance(std::span<const float>(key));
  };
  CHECK(score({3, -4}) == 0.2);
  CHECK(score({0.5f}) == 2);
  CHECK(score({2e-6f}) < 1e6);
  for (const std::vector<float>& key : {std::vector<float>{}, {0, 0}, {1e-30f}})
    CHECK(score(key) == 1 / 1e-6);
  CHECK_THAT(score({3e25f, 4e25f}), Catch::WithinRel(2e-26, 1e-6));
}

TEST_CASE("key norm") {
  const auto norm = [](const std::vector<float>& key) {
    return verkv::key_norm(std::span<const float>(key));
  };
  CHECK(norm({}) == 0);
  CHECK(norm({3, -4}) == 5);
  CHECK_THAT(norm({3e25f, 4e25f}),
             Catch::WithinRel(5e25, verkv::tolerance::kThroughBinary32));  // its square is beyond
}

}  // namespace
