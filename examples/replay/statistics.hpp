// The statistics that the rows need, by the names that this program uses.
#ifndef VERKV_EXAMPLES_REPLAY_STATISTICS_HPP
#define VERKV_EXAMPLES_REPLAY_STATISTICS_HPP

#include "../common/statistics.hpp"

namespace verkv::replay {

using examples::Interval;
using examples::kNone;
using examples::quantile;
using examples::Rate;
using examples::wilson_interval;

}  // namespace verkv::replay

#endif  // VERKV_EXAMPLES_REPLAY_STATISTICS_HPP
