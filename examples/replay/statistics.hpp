// The few statistics that the rows need.
#ifndef VERKV_EXAMPLES_REPLAY_STATISTICS_HPP
#define VERKV_EXAMPLES_REPLAY_STATISTICS_HPP

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace verkv::replay {

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

// Wilson's interval at 95 % for a binomial proportion; none without trials.
inline Interval wilson_interval(const Rate& rate) {
  if (rate.trials == 0) return {};
  constexpr double z = 1.959963984540054;
  const double n = static_cast<double>(rate.trials);
  const double p = rate.value();
  const double centre = p + z * z / (2 * n);
  const double reach = z * std::sqrt(p * (1 - p) / n + z * z / (4 * n * n));
  const double scale = 1 + z * z / n;
  // At the ends the exact values are 0 and 1; rounding must not say otherwise.
  return {rate.failures == 0 ? 0.0 : std::max(0.0, (centre - reach) / scale),
          rate.failures == rate.trials ? 1.0 : std::min(1.0, (centre + reach) / scale)};
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

}  // namespace verkv::replay

#endif  // VERKV_EXAMPLES_REPLAY_STATISTICS_HPP
