// The few statistics that reports of measurements need.
#ifndef VERKV_EXAMPLES_COMMON_STATISTICS_HPP
#define VERKV_EXAMPLES_COMMON_STATISTICS_HPP

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <verkv/error.hpp>

namespace verkv::examples {

// Not applicable: null in the JSON, "-" in the table.
inline constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

// Failures among trials.
struct Rate {
  std::int64_t failures = 0;
  std::int64_t trials = 0;

  void add(bool failed) {
    failures += failed;
    ++trials;
  }
  void add(const Rate& other) {
    failures += other.failures;
    trials += other.trials;
  }
  double value() const {
    return trials > 0 ? static_cast<double>(failures) / static_cast<double>(trials) : kNone;
  }
};

struct Interval {
  double low = kNone;
  double high = kNone;
};

// Wilson's interval at 95 % for the mean p of n independent values from 0 to 1: a binomial
// proportion, or anything between, whose variance is smaller; none without trials.
inline Interval wilson_interval(double p, double n) {
  if (!(n > 0)) return {};
  constexpr double z = 1.959963984540054;
  const double centre = p + z * z / (2 * n);
  const double reach = z * std::sqrt(p * (1 - p) / n + z * z / (4 * n * n));
  const double scale = 1 + z * z / n;
  // At the ends the exact values are 0 and 1; rounding must not say otherwise.
  return {p <= 0 ? 0.0 : std::max(0.0, (centre - reach) / scale),
          p >= 1 ? 1.0 : std::min(1.0, (centre + reach) / scale)};
}

inline Interval wilson_interval(const Rate& rate) {
  return rate.trials == 0 ? Interval{}
                          : wilson_interval(rate.value(), static_cast<double>(rate.trials));
}

// The nearest-rank quantile of values in any order (reordered), 0 < p <= 1; none if there are none.
inline double quantile(std::vector<double>& values, double p) {
  if (values.empty()) return kNone;
  const double rank = std::ceil(p * static_cast<double>(values.size()));
  const std::size_t place = static_cast<std::size_t>(std::max(1.0, rank)) - 1;
  const auto nth = values.begin() + static_cast<std::ptrdiff_t>(std::min(place, values.size() - 1));
  std::nth_element(values.begin(), nth, values.end());
  return *nth;
}

// The 97.5 % quantile of Student's t: what a two-sided interval at 95 % reaches out by. Within 1e-4
// of the exact value. Throws InvalidArgument for less than one degree of freedom.
inline double student_t_quantile(std::int64_t degrees) {
  if (degrees < 1) throw InvalidArgument("Student's t has no quantile without degrees of freedom");
  constexpr std::array<double, 30> table{
      12.70620, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814,
      2.20099,  2.17881, 2.16037, 2.14479, 2.13145, 2.11991, 2.10982, 2.10092, 2.09302, 2.08596,
      2.07961,  2.07387, 2.06866, 2.06390, 2.05954, 2.05553, 2.05183, 2.04841, 2.04523, 2.04227};
  if (degrees <= static_cast<std::int64_t>(table.size()))
    return table[static_cast<std::size_t>(degrees - 1)];
  // The expansion of Abramowitz and Stegun 26.7.5 in 1 / degrees.
  constexpr double z = 1.959963984540054;
  const double n = static_cast<double>(degrees);
  const double z2 = z * z;
  return z + z * (z2 + 1) / (4 * n) + z * ((5 * z2 + 16) * z2 + 3) / (96 * n * n);
}

// The 95 % interval of the mean of a correlated series, by batch means (Law, Simulation Modeling
// and Analysis, section on output data analysis): consecutive blocks of `block` values are
// averaged, and Student's t is used on the averages. It assumes a stationary series and blocks that
// are much longer than its correlation, so that their averages are nearly independent and normal;
// with shorter blocks it is too narrow. Values after the last whole block do not count. None with
// fewer than two blocks or where a value is not finite. Throws InvalidArgument if block is 0.
inline Interval mean_interval(std::span<const double> values, std::size_t block) {
  if (block == 0) throw InvalidArgument("a block of a series must hold at least one value");
  const std::size_t blocks = values.size() / block;
  if (blocks < 2) return {};
  std::vector<double> means(blocks);
  double centre = 0;
  for (std::size_t i = 0; i < blocks; ++i) {
    double sum = 0;
    for (const double value : values.subspan(i * block, block)) sum += value;
    means[i] = sum / static_cast<double>(block);
    centre += means[i] / static_cast<double>(blocks);
  }
  double squares = 0;
  for (const double mean : means) squares += (mean - centre) * (mean - centre);
  const double error =
      std::sqrt(squares / static_cast<double>(blocks - 1) / static_cast<double>(blocks));
  if (!std::isfinite(error)) return {};
  const double reach = student_t_quantile(static_cast<std::int64_t>(blocks - 1)) * error;
  return {centre - reach, centre + reach};
}

}  // namespace verkv::examples

#endif  // VERKV_EXAMPLES_COMMON_STATISTICS_HPP
