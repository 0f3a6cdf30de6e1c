// The search for the certificate's threshold against sorting all tokens and trying how many must
// go, in double.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <verkv/certificate.hpp>
#include <verkv/fetch_plan.hpp>
#include <verkv/inclusion.hpp>
#include <verkv/shrinkage.hpp>

#include "catch.hpp"
#include "cpu/fetch_search.hpp"
#include "reference/reference.hpp"
#include "reference/statistics.hpp"
#include "tolerance.hpp"

namespace {

using verkv::FetchThreshold;
using verkv::kOutward;
using verkv::Positive16;
using verkv::cpu::Kernels;
using verkv::cpu::PlanArrays;
using verkv::reference::Indices;
using verkv::reference::Random;
using verkv::reference::Vector;

struct Plan {
  std::vector<float> weight;  // padded as the step's arrays are
  std::vector<Positive16> odds;
  std::int64_t count = 0;
  double denominator = 0;
};

// By kind: log-normal weights and odds; tokens that are never drawn; heavy ties; all worth the
// same; one or a few dominant tokens; weights that are 0.
Plan random_plan(Random& random, std::size_t n, std::size_t kind) {
  Plan plan;
  plan.count = static_cast<std::int64_t>(n);
  const double spread = random.uniform(0, 3);
  const double odds_spread = random.uniform(0, 2);
  for (std::size_t i = 0; i < n; ++i) {
    double w = std::exp(spread * random.normal() - 6);
    double r = 1 / (1 + std::exp(2 + odds_spread * random.normal()));
    if (kind == 1 && random.below(2) == 0) r = 0;
    if (kind == 2) w = std::exp2(-static_cast<double>(random.below(4)));
    if (kind == 2) r = 0.0625 * static_cast<double>(1 + random.below(3));
    if (kind == 3) w = 0.25;
    if (kind == 3) r = 0.0625;
    if (kind == 4 && (i == n / 2 || i == n / 3)) w = 50 * static_cast<double>(n);
    if (kind == 5 && random.below(3) == 0) w = 0;
    if (kind == 6) r = 0;
    plan.weight.push_back(static_cast<float>(w));
    plan.odds.push_back(verkv::stored_odds(r));
  }
  for (const float w : plan.weight) plan.denominator += static_cast<double>(w);
  plan.denominator = plan.denominator * random.uniform(1, 3) + 1e-6;
  const std::size_t padded = (n + 15) / 16 * 16;
  plan.weight.resize(padded, 0.0f);
  plan.odds.resize(padded);
  return plan;
}

// beta over the tokens that have a weight, as a step solves it.
float step_beta(const Kernels& kernels, const std::vector<float>& weight, const Plan& plan) {
  return verkv::newton_beta(0.0f, [&](float beta) {
    verkv::BetaSums sums;
    kernels.beta_sums(weight.data(), static_cast<std::int64_t>(weight.size()), plan.odds.data(),
                      plan.count, 1, &beta, &sums.weight, &sums.odds);
    return sums;
  });
}

// The certificate that the step reports.
double step_bound(const Kernels& kernels, const std::vector<float>& weight, const Plan& plan,
                  double log_term) {
  const float beta = step_beta(kernels, weight, plan);
  double variance = 0;
  float jump = 0;
  kernels.tail_sums(weight.data(), static_cast<std::int64_t>(weight.size()), plan.odds.data(),
                    plan.count, 1, &beta, &variance, &jump);
  return verkv::outward_certificate(
      {static_cast<double>(beta), variance, static_cast<double>(jump)}, plan.denominator, log_term);
}

struct Counts {
  std::int64_t searched = 0;
  std::int64_t boundary = 0;
};

void check(const Kernels& kernels, const Plan& plan, double delta, double epsilon, Counts& counts) {
  const double log_term = verkv::log_two_over(delta);
  if (!(step_bound(kernels, plan.weight, plan, log_term) > epsilon)) return;
  ++counts.searched;
  const float beta = step_beta(kernels, plan.weight, plan);

  const std::size_t room = static_cast<std::size_t>(plan.count) + 16;
  std::vector<float> weight(room), odds(room), worth(room);
  std::vector<std::uint32_t> position(room);
  PlanArrays arrays{weight.data(), odds.data(), worth.data(), position.data(), 0};
  kernels.plan_start(plan.weight.data(), plan.odds.data(), 0, plan.count, beta, arrays);
  Vector w, r, worths;
  std::vector<std::uint32_t> place;
  for (std::int64_t i = 0; i < arrays.count; ++i) {
    w.push_back(static_cast<double>(arrays.weight[i]));
    const double rho = static_cast<double>(arrays.odds[i]);
    r.push_back(rho / (1 + rho));
    worths.push_back(static_cast<double>(arrays.worth[i]));
    place.push_back(arrays.place[i]);
  }
  const Indices order = verkv::reference::descending(worths);

  // The step asks for a little less than epsilon, so that the bound it reports afterwards is not
  // above it.
  const double target = epsilon / kOutward;
  const FetchThreshold found =
      verkv::cpu::search_fetch_threshold(kernels, arrays, beta, plan.denominator, log_term, target);
  std::size_t above = 0;
  std::size_t tied = 0;
  for (const double k : worths) {
    above += k > static_cast<double>(found.worth);
    tied += k == static_cast<double>(found.worth);
  }
  REQUIRE(found.ties >= 0);
  REQUIRE(static_cast<std::size_t>(found.ties) <= tied);
  const std::size_t k = above + static_cast<std::size_t>(found.ties);

  const auto bound = [&](std::size_t gone) {
    return verkv::reference::certificate_after(w, r, order, gone, plan.denominator, delta);
  };
  INFO("n " << plan.count << ", epsilon " << epsilon << ", k " << k << " of " << worths.size()
            << ", beta " << beta);
  REQUIRE(k >= 1);
  REQUIRE(k <= worths.size());
  // What is kept certifies; one token less does not, to within the outward rounding (twice) and
  // binary32's sums.
  REQUIRE(bound(k) <= epsilon);
  REQUIRE(bound(k - 1) > epsilon * (1 - 4e-5));
  std::size_t expected = 0;
  if (worths.size() <= 300) {
    while (bound(expected) > target / kOutward) ++expected;
  } else {
    std::size_t bad = 0;
    expected = worths.size();
    while (expected - bad > 1) {
      const std::size_t middle = bad + (expected - bad) / 2;
      (bound(middle) <= target / kOutward ? expected : bad) = middle;
    }
  }
  if (k != expected) {
    ++counts.boundary;
    // Another number only where both meet epsilon to within rounding; next to each other unless
    // tokens there weigh nothing measurable.
    const std::size_t low = std::min(k, expected);
    const std::size_t high = std::max(k, expected);
    REQUIRE(std::fabs(bound(low) - bound(high - 1)) <= verkv::tolerance::kSearch * epsilon);
    REQUIRE((high - low == 1 || bound(low) - bound(high) <= verkv::tolerance::kSearch * epsilon));
  }

  // The step's own sums over what is kept, in their own order.
  std::vector<float> rest = plan.weight;
  for (std::size_t p = 0; p < k; ++p) rest[place[order[p]]] = 0;
  REQUIRE(step_bound(kernels, rest, plan, log_term) <= epsilon);
}

}  // namespace

TEST_CASE("The threshold search finds what sorting and trying finds") {
  Random random(40);
  Counts counts;
  const Kernels& kernels = verkv::cpu::scalar_kernels();
  for (int trial = 0; trial < 4000; ++trial) {
    const std::size_t n = trial % 40 == 0 ? 1 + random.below(5000) : 1 + random.below(120);
    const Plan plan = random_plan(random, n, random.below(7));
    const double delta = random.uniform(0.02, 0.5);
    const double epsilon = std::exp(random.uniform(std::log(1e-6), std::log(0.9)));
    check(kernels, plan, delta, epsilon, counts);
  }
  CHECK(counts.searched > 3000);
  CHECK(counts.boundary * 100 < counts.searched);
}

TEST_CASE("The threshold search ends where an epsilon is only just met") {
  // epsilon is the certificate of some prefix, enlarged as the search or the step's report enlarge
  // it, to within binary32's rounding of the sums.
  Random random(41);
  Counts counts;
  const Kernels& kernels = verkv::cpu::scalar_kernels();
  for (int trial = 0; trial < 600; ++trial) {
    const Plan plan =
        random_plan(random, 2 + random.below(trial % 3 == 0 ? 3000 : 300), random.below(7));
    const double delta = 0.1;
    Vector w, r, worths;
    const double beta = static_cast<double>(step_beta(kernels, plan.weight, plan));
    for (std::int64_t i = 0; i < plan.count; ++i) {
      const double x = static_cast<double>(plan.weight[static_cast<std::size_t>(i)]);
      const double rho = static_cast<double>(to_float(plan.odds[static_cast<std::size_t>(i)]));
      if (!(x > 0)) continue;
      w.push_back(x);
      r.push_back(rho / (1 + rho));
      worths.push_back(verkv::fetch_worth(x, rho, beta));
    }
    const std::size_t k = random.below(w.size());
    const double at = verkv::reference::certificate_after(
        w, r, verkv::reference::descending(worths), k, plan.denominator, delta);
    const double enlarged = at * (trial % 2 == 0 ? kOutward : kOutward * kOutward);
    const double epsilon = enlarged * (1 + 3e-7 * random.uniform(-1, 1));
    if (epsilon > 0 && epsilon < 1) check(kernels, plan, delta, epsilon, counts);
  }
  CHECK(counts.searched > 200);
}

TEST_CASE("Vector kernels give the same threshold") {
  Random random(42);
  for (const Kernels* kernels : verkv::cpu::all_vector_kernels()) {
    for (int trial = 0; trial < 200; ++trial) {
      const Plan plan = random_plan(random, 1 + random.below(3000), random.below(7));
      const double epsilon = std::exp(random.uniform(std::log(1e-4), std::log(0.9)));
      const double log_term = verkv::log_two_over(0.1);
      std::vector<FetchThreshold> found;
      for (const Kernels* k : {kernels, &verkv::cpu::scalar_kernels()}) {
        if (!(step_bound(*k, plan.weight, plan, log_term) > epsilon)) continue;
        const float beta = step_beta(*k, plan.weight, plan);
        const std::size_t room = static_cast<std::size_t>(plan.count) + 16;
        std::vector<float> weight(room), odds(room), worth(room);
        std::vector<std::uint32_t> position(room);
        PlanArrays arrays{weight.data(), odds.data(), worth.data(), position.data(), 0};
        k->plan_start(plan.weight.data(), plan.odds.data(), 0, plan.count, beta, arrays);
        found.push_back(
            search_fetch_threshold(*k, arrays, beta, plan.denominator, log_term, epsilon));
      }
      REQUIRE(found.size() != 1);
      if (found.empty()) continue;
      INFO(kernels->name << ", n " << plan.count << ", epsilon " << epsilon);
      REQUIRE(found[0].worth == found[1].worth);
      REQUIRE(found[0].ties == found[1].ties);
    }
  }
}
