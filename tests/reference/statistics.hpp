// Thresholds for tests of random behaviour. Each is an inequality that holds for every sample size,
// not an approximation, unless it says so; kFalseAlarm is the probability that a correct
// implementation is rejected by one call. Seeds are fixed, so a test that passes once passes
// always.
#ifndef VERKV_TESTS_STATISTICS_HPP
#define VERKV_TESTS_STATISTICS_HPP

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace verkv::reference {

inline constexpr double kFalseAlarm = 1e-7;

// log of how many times less likely than certain: the l of P(...) <= 2 tests exp(-l) = kFalseAlarm
// (union bound over two tails and `tests` statistics).
inline double log_of_false_alarm(double tests) { return std::log(2 * tests / kFalseAlarm); }

// Kullback-Leibler divergence of Bernoulli(a) from Bernoulli(b).
inline double bernoulli_divergence(double a, double b) {
  const auto part = [](double x, double y) {
    if (x == 0) return 0.0;
    return y > 0 ? x * std::log(x / y) : std::numeric_limits<double>::infinity();
  };
  return part(a, b) + part(1 - a, 1 - b);
}

// Whether `count` of `trials` fits Binomial(trials, p) as one of `tests` such questions. Chernoff:
// the probability of a share at least as far out on its side is at most exp(-trials KL(share ||
// p)).
inline bool binomial_fits(std::int64_t count, std::int64_t trials, double p, double tests) {
  const double n = static_cast<double>(trials);
  return n * bernoulli_divergence(static_cast<double>(count) / n, p) <= log_of_false_alarm(tests);
}

// Whether the success probability may be at most p: as binomial_fits, upper tail only.
inline bool binomial_not_above(std::int64_t count, std::int64_t trials, double p) {
  return static_cast<double>(count) <= p * static_cast<double>(trials) ||
         binomial_fits(count, trials, p, 1);
}

// Bernstein: a sum of independent centred variables with total variance `variance`, none above
// `jump` in size, exceeds this in size with probability at most kFalseAlarm / tests.
inline double bernstein_bound(double variance, double jump, double tests) {
  const double l = log_of_false_alarm(tests);
  const double a = jump * l / 3;
  return a + std::sqrt(a * a + 2 * variance * l);
}

// Random cases that do not depend on the standard library's distributions: SplitMix64 and
// Box-Muller.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t bits() {
    state_ += 0x9e3779b97f4a7c15ull;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  // In (0, 1).
  double uniform() { return (static_cast<double>(bits() >> 11) + 0.5) / 9007199254740992.0; }
  double uniform(double low, double high) { return low + (high - low) * uniform(); }
  std::size_t below(std::size_t n) { return static_cast<std::size_t>(bits() % n); }
  double normal() {
    return std::sqrt(-2 * std::log(uniform())) * std::cos(2 * std::acos(-1.0) * uniform());
  }

 private:
  std::uint64_t state_;
};

// The low set of one query: weights and inclusion probabilities below 1, and D of all tokens.
struct LowCase {
  std::vector<double> w;
  std::vector<double> r;
  double denominator = 0;

  std::vector<double> odds() const {
    std::vector<double> rho;
    for (const double x : r) rho.push_back(x / (1 - x));
    return rho;
  }
};

// Log-normal weights of any spread, odds over many decades; by kind of case also ties, tokens that
// are never drawn, weightless tokens, one token above all others, more mass in H than in L.
inline LowCase random_low_case(Random& random, std::size_t n) {
  LowCase result;
  const double weight_spread = random.uniform(0, 4);
  const double odds_spread = random.uniform(0, 4);
  const double odds_middle = random.uniform(-6, 1);
  const std::size_t kind = random.below(6);
  for (std::size_t i = 0; i < n; ++i) {
    double w = std::exp(weight_spread * random.normal());
    double rho = std::exp(odds_middle + odds_spread * random.normal());
    if (rho > 1e4) rho = 1e4;
    if (kind == 1 && random.below(3) == 0) rho = 0;
    if (kind == 2) w = std::exp(static_cast<double>(random.below(3)));
    if (kind == 2) rho = 0.1 + 0.2 * static_cast<double>(random.below(3));
    if (kind == 3 && random.below(4) == 0) w = 0;
    if (kind == 4 && i == 0) w *= 1e4;
    result.w.push_back(w);
    result.r.push_back(rho / (1 + rho));
    result.denominator += w;
  }
  if (kind == 5) result.denominator *= 10;
  if (!(result.denominator > 0)) result.denominator = 1;
  return result;
}

}  // namespace verkv::reference

#endif  // VERKV_TESTS_STATISTICS_HPP
