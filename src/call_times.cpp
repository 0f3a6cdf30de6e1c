#include "call_times.hpp"

#include <numeric>

namespace verkv {

void CallTimes::compressed(std::int64_t nanoseconds, std::span<const std::int64_t> weight) {
  std::int64_t left = std::accumulate(weight.begin(), weight.end(), std::int64_t{0});
  for (std::size_t i = 0; i < of_.size() && left > 0; ++i) {
    // Of what the layers before have left, so that nothing is lost to rounding.
    const double share = static_cast<double>(weight[i]) / static_cast<double>(left);
    const auto own = static_cast<std::int64_t>(share * static_cast<double>(nanoseconds));
    of_[i].compress_ns += own;
    nanoseconds -= own;
    left -= weight[i];
  }
}

void CallTimes::add_to(LayerStatistics& statistics, std::int64_t layer) const {
  const Times& times = of_[static_cast<std::size_t>(layer)];
  statistics.attend_ns += times.attend_ns;
  statistics.append_ns += times.append_ns;
  statistics.compress_ns += times.compress_ns;
}

}  // namespace verkv
