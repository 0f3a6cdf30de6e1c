// The JSON of a run: {settings, rows}.
#ifndef VERKV_EXAMPLES_REPLAY_JSON_REPORT_HPP
#define VERKV_EXAMPLES_REPLAY_JSON_REPORT_HPP

#include <string>

#include "measure.hpp"
#include "options.hpp"

namespace verkv::replay {

// Numbers that do not apply or are not finite are null.
std::string json_report(const RecordedCache& cache, const Options& options,
                        const Measurement& measurement);

// Throws UsageError, beginning with the option, if no file can be written at `path`. Leaves nothing
// behind.
void check_writable(const std::string& path, const std::string& recording,
                    const std::string& option = "--json");
// Writes beside `path` and renames, so that `path` is never half-written. Throws verkv::Error.
void write_file(const std::string& path, const std::string& text,
                const std::string& option = "--json");

}  // namespace verkv::replay

#endif  // VERKV_EXAMPLES_REPLAY_JSON_REPORT_HPP
