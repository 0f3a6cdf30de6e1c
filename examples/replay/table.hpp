// What people read: heading, table, legend, conclusion. ASCII, at most kTableWidth columns.
#ifndef VERKV_EXAMPLES_REPLAY_TABLE_HPP
#define VERKV_EXAMPLES_REPLAY_TABLE_HPP

#include <cstddef>
#include <string>
#include <vector>

#include "measure.hpp"
#include "options.hpp"

namespace verkv::replay {

inline constexpr std::size_t kTableWidth = 120;

// What the file is and what is about to be done with it.
std::string heading(const RecordedCache& cache, const Options& options,
                    const std::vector<Method>& methods);
// One line a row; the comparison is grouped by rate.
std::string table(const Measurement& measurement, const Options& options);
// What the columns mean.
std::string legend(const Measurement& measurement, const Options& options);
// Two or three lines that say what came out.
std::string conclusion(const Measurement& measurement, const Options& options);

}  // namespace verkv::replay

#endif  // VERKV_EXAMPLES_REPLAY_TABLE_HPP
