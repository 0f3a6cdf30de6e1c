#include <verkv/clusters.hpp>

#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "catch.hpp"
#include "reference/statistics.hpp"
#include "tolerance.hpp"

namespace {

using verkv::cluster_correction;
using verkv::cluster_share;
using verkv::ClusterShare;
using verkv::reference::Random;

constexpr double kInfinite = std::numeric_limits<double>::infinity();

// x of drawn tokens, (1).
std::vector<float> random_terms(Random& random, std::size_t count) {
  std::vector<float> x(count);
  for (float& one : x) {
    const double r = 0.01 + 0.99 * random.uniform();
    one = static_cast<float>(std::exp(-8 * random.uniform()) / r);
  }
  return x;
}

ClusterShare share_of(float weight, const std::vector<float>& x) {
  float sum = 0;
  float square = 0;
  for (const float one : x) {
    sum += one;
    square += one * one;
  }
  return cluster_share(weight, sum, square);
}

TEST_CASE("Clusters: shares are those of the definition, and convex") {
  Random random(1);
  for (int trial = 0; trial < 2000; ++trial) {
    const std::vector<float> x = random_terms(random, 1 + random.below(12));
    const float weight = static_cast<float>(4 * random.uniform());
    double sum = 0;
    double square = 0;
    for (const float one : x) {
      sum += static_cast<double>(one);
      square += static_cast<double>(one) * static_cast<double>(one);
    }
    const double total = static_cast<double>(weight);
    const double n = std::min(1.0, sum / total) * sum * sum / square;
    const double p = n / (n + 1);
    const ClusterShare share = share_of(weight, x);
    CHECK_THAT(static_cast<double>(share.drawn),
               Catch::WithinRel(p * total / sum, verkv::tolerance::kThroughBinary32 * 4));
    CHECK_THAT(static_cast<double>(share.centroid),
               Catch::WithinRel((1 - p) * total, verkv::tolerance::kThroughBinary32 * 4));
    // Exact weights that are the sketched ones leave the cluster's weight.
    CHECK_THAT(static_cast<double>(share.drawn) * sum + static_cast<double>(share.centroid),
               Catch::WithinRel(total, verkv::tolerance::kThroughBinary32 * 4));
  }
}

TEST_CASE("Clusters: without a drawn token, or with one that weighs nothing, the centroid stands") {
  const ClusterShare none = cluster_share(0.7f, 0, 0);
  CHECK(none.centroid == 0.7f);
  CHECK(none.drawn == 0);
  // A sketched weight of 1e-15 says next to nothing of a cluster that weighs 0.7.
  CHECK(share_of(0.7f, {1e-15f}).centroid == 0.7f);
  // Its square is lost in binary32.
  CHECK(share_of(0.7f, {1e-25f}).centroid == 0.7f);
  CHECK(share_of(0.7f, {1e-25f}).drawn == 0);
}

TEST_CASE(
    "Clusters: no weights make shares more than numbers, or a token count 65 times its term") {
  for (const float weight : {0.0f, 1e-44f, 1e-38f, 1e-19f, 1.0f, 1e18f}) {
    for (const float x : {0.0f, 1e-44f, 1e-19f, 2e-19f, 1e-3f, 1.0f, 1e18f}) {
      for (const std::size_t count : {std::size_t{1}, std::size_t{64}}) {
        CAPTURE(weight, x, count);
        const ClusterShare share = share_of(weight, std::vector<float>(count, x));
        CHECK((share.drawn >= 0 && share.drawn < 65));
        CHECK((share.centroid >= 0 && share.centroid <= weight));
      }
    }
  }
  CHECK(verkv::cluster_term(std::numeric_limits<float>::infinity()) == 1e30f);
  CHECK(verkv::cluster_term(2.0f) == 2.0f);
}

TEST_CASE("Clusters: what is corrected lies in the certified interval, its nearest point") {
  CHECK(cluster_correction(1, 1.05, 0.1) == 1);
  CHECK_THAT(cluster_correction(1, 2, 0.5), Catch::WithinRel(1.5, verkv::tolerance::kIdentity));
  CHECK_THAT(cluster_correction(4, 2, 0.5), Catch::WithinRel(0.625, verkv::tolerance::kIdentity));
  CHECK(cluster_correction(4, 2, kInfinite) == 1);
  CHECK(cluster_correction(4, 2, std::numeric_limits<double>::quiet_NaN()) == 1);
  CHECK(cluster_correction(0, 2, 0.5) == 1);
  // So where the plain estimate is within its bound of D over L, this one is within twice of it.
  Random random(3);
  for (int trial = 0; trial < 2000; ++trial) {
    const double plain = 3 * random.uniform();
    const double slack = random.uniform();
    const double mass = 0.01 + 5 * random.uniform();
    const double truth = plain + slack * (2 * random.uniform() - 1);
    const double ours = mass * cluster_correction(mass, plain, slack);
    CHECK(std::fabs(ours - truth) <= 2 * slack * (1 + verkv::tolerance::kInequality));
  }
}

TEST_CASE("Clusters: samples of a cluster follow its sum, which its centroid alone misses",
          "[statistical]") {
  // 64 tokens of which each is drawn with r; values are numbers, larger where weights are. The mean
  // of the answers is the cluster's sum but for the centroid's share, 1 / (n + 1), of what it is
  // off.
  Random random(4);
  constexpr std::size_t kTokens = 64;
  std::vector<double> weight(kTokens);
  std::vector<double> value(kTokens);
  std::vector<double> r(kTokens);
  double total = 0;
  double sum = 0;
  double centroid = 0;
  double rs = 0;
  for (std::size_t i = 0; i < kTokens; ++i) {
    weight[i] = std::exp(random.normal());
    value[i] = std::log(weight[i]) + 0.5 * random.normal();
    r[i] = 0.1 + 0.4 * random.uniform();
    total += weight[i];
    sum += weight[i] * value[i];
    centroid += r[i] * value[i];
    rs += r[i];
  }
  centroid /= rs;
  double ours = 0;
  double square = 0;
  constexpr int kTrials = 20000;
  for (int trial = 0; trial < kTrials; ++trial) {
    std::vector<float> x;
    double mix = 0;
    for (std::size_t i = 0; i < kTokens; ++i) {
      if (random.uniform() >= r[i]) continue;
      x.push_back(static_cast<float>(weight[i] / r[i]));
      mix += weight[i] * value[i] / r[i];
    }
    const ClusterShare share = share_of(static_cast<float>(total), x);
    const double answer =
        static_cast<double>(share.drawn) * mix + static_cast<double>(share.centroid) * centroid;
    ours += answer;
    square += answer * answer;
  }
  const double mean = ours / kTrials;
  const double deviation = std::sqrt(square / kTrials - mean * mean);
  // n is about 8 here, and twice the expected share covers that it varies.
  const double off = std::fabs(centroid * total - sum);
  const double noise = 5 * deviation / std::sqrt(double{kTrials});
  CHECK(std::fabs(mean - sum) < off / 4 + noise);
  CHECK(off > off / 4 + noise);
}

}  // namespace
