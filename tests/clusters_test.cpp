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

// Possible x of drawn tokens, (1).
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

TEST_CASE("Clusters: what rounding leaves of a cluster that is all drawn is nothing") {
  using verkv::cluster_rest;
  CHECK(cluster_rest(0, 0) == 0);
  CHECK(cluster_rest(1, 1) == 0);
  CHECK(cluster_rest(1, 1.25f) == 0);
  CHECK(cluster_rest(1, 1 - 0x1p-22f) == 0);
  CHECK(cluster_rest(1, 1 - 0x1p-18f) == 0x1p-18f);
  CHECK(cluster_rest(1e-30f, 0.25e-30f) == 0.75e-30f);
  CHECK(verkv::beyond_itself(3, 2) == 1);
  CHECK(verkv::beyond_itself(1.5f, 2) == 0);
  using verkv::cluster_rest_square;
  CHECK(cluster_rest_square(0, 1, 1) == 0);
  CHECK(cluster_rest_square(0.5f, 1, 0.75f) == 0.25f);
  CHECK(cluster_rest_square(0x1p-14f, 1, 1) == 0x1p-28f);
  CHECK(cluster_rest_square(0x1p-4f, 1, 1) == 0x1p-20f);
  CHECK(cluster_share(0, 1, 1).drawn == 0);
  CHECK(cluster_share(0, 1, 1).centroid == 0);
  CHECK(cluster_share(0, 0, 0).centroid == 0);
}

TEST_CASE("Clusters: what is corrected lies in the certified interval, its nearest point") {
  constexpr double kNear = verkv::tolerance::kIdentity;
  CHECK(cluster_correction(1, 0, 1.05, 0.1) == 1);
  CHECK_THAT(cluster_correction(1, 0, 2, 0.5), Catch::WithinRel(1.5, kNear));
  CHECK_THAT(cluster_correction(4, 0, 2, 0.5), Catch::WithinRel(0.625, kNear));
  // Only what is predicted moves.
  CHECK_THAT(cluster_correction(1, 1, 3, 0.5), Catch::WithinRel(1.5, kNear));
  CHECK_THAT(cluster_correction(4, 1, 2, 0.5), Catch::WithinRel(0.375, kNear));
  CHECK(cluster_correction(4, 3, 2, 0.5) == 0);
  CHECK(cluster_correction(4, 0, 2, kInfinite) == 1);
  CHECK(cluster_correction(4, 0, 2, std::numeric_limits<double>::quiet_NaN()) == 1);
  CHECK(cluster_correction(0, 0, 2, 0.5) == 1);
  CHECK(std::isfinite(static_cast<float>(cluster_correction(1e-40, 0, 5, 0.5))));
  // So where the plain estimate is within its bound of D over L, which is no less than what is
  // known, this one is within twice of it.
  Random random(3);
  for (int trial = 0; trial < 2000; ++trial) {
    const double plain = 3 * random.uniform();
    const double slack = random.uniform();
    const double mass = 0.01 + 5 * random.uniform();
    const double truth = std::max(0.0, plain + slack * (2 * random.uniform() - 1));
    const double known = truth * random.uniform();
    const double ours = known + mass * cluster_correction(mass, known, plain, slack);
    CHECK(std::fabs(ours - truth) <= 2 * slack * (1 + verkv::tolerance::kInequality));
    CHECK(ours >= known);
  }
}

// A cluster of 64 tokens of which each is drawn with r; values are numbers, larger where weights
// are. leader: one token outweighs the others and is nearly always drawn.
struct Scene {
  std::vector<double> weight, value, r;
  double sum = 0;  // of weight times value
  double centroid = 0;

  Scene(Random& random, bool leader) {
    for (int i = 0; i < 64; ++i) {
      weight.push_back(std::exp(random.normal()));
      value.push_back(std::log(weight.back()) + 0.5 * random.normal());
      r.push_back(0.1 + 0.4 * random.uniform());
      if (leader && i == 0) {
        weight[0] = 300;
        value[0] = 5;
        r[0] = 0.98;
      }
      sum += weight.back() * value.back();
      centroid += value.back() / 64;
    }
  }

  // (3) for one draw; coefficients are 1 / r. Without the part that drawn tokens count for
  // themselves all 64 are estimated together.
  double answer(Random& random, bool count_themselves) const {
    std::vector<float> x;
    double known = 0;
    double mix = 0;
    double rest = 0;
    for (std::size_t i = 0; i < weight.size(); ++i) {
      if (random.uniform() >= r[i]) {
        rest += weight[i];
        continue;
      }
      const double c = count_themselves ? 1 / r[i] - 1 : 1 / r[i];
      x.push_back(static_cast<float>(c * weight[i]));
      mix += c * weight[i] * value[i];
      (count_themselves ? known : rest) += weight[i] * (count_themselves ? value[i] : 1);
    }
    const ClusterShare share = share_of(static_cast<float>(rest), x);
    return known + static_cast<double>(share.drawn) * mix +
           static_cast<double>(share.centroid) * centroid;
  }
};

struct Moments {
  double mean = 0;
  double variance = 0;
};

Moments moments(const Scene& scene, Random& random, bool count_themselves, int trials) {
  double sum = 0;
  double square = 0;
  for (int trial = 0; trial < trials; ++trial) {
    const double answer = scene.answer(random, count_themselves);
    sum += answer;
    square += answer * answer;
  }
  const double mean = sum / trials;
  return {mean, square / trials - mean * mean};
}

TEST_CASE("Clusters: samples of a cluster follow its sum, which its centroid alone misses",
          "[statistical]") {
  Random random(4);
  const Scene scene(random, false);
  double total = 0;
  for (const double w : scene.weight) total += w;
  constexpr int kTrials = 20000;
  const Moments ours = moments(scene, random, true, kTrials);
  // The mean of the answers is the sum but for the centroid's share, 1 / (n + 1), of what it is
  // off. n is about 8 here, and twice the expected share covers that it varies.
  const double off = std::fabs(scene.centroid * total - scene.sum);
  const double noise = 5 * std::sqrt(ours.variance / kTrials);
  CHECK(std::fabs(ours.mean - scene.sum) < off / 4 + noise);
  CHECK(off > off / 4 + noise);
}

TEST_CASE("Clusters: drawn tokens that count themselves leave less to chance", "[statistical]") {
  Random random(5);
  double themselves = 0;
  double together = 0;
  for (int scene = 0; scene < 20; ++scene) {
    const Scene one(random, true);
    const auto error = [&](bool count_themselves) {
      const Moments m = moments(one, random, count_themselves, 2000);
      return m.variance + (m.mean - one.sum) * (m.mean - one.sum);
    };
    themselves += error(true);
    together += error(false);
  }
  CHECK(themselves < 0.8 * together);
}

}  // namespace
