// verkv_replay: the keys, values and queries that a real model left in a file go through the whole
// method, and a table says how good, how small and how honest the result is. What it shows about
// the library is in measure.cpp: the calls an engine would make (create, append, compress, attend),
// and the report that comes back.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "../common/progress.hpp"
#include "json_report.hpp"
#include "measure.hpp"
#include "options.hpp"
#include "table.hpp"

namespace {

using namespace verkv::replay;

void replay(const Options& options) {
  if (!options.json.empty()) check_writable(options.json, options.file);
  const verkv::RecordedCache cache = verkv::RecordedCache::load(options.file);
  const std::vector<Method> methods = select_methods(options, cache);
  fmt::print("{}", heading(cache, options, methods));
  std::fflush(stdout);
  const auto begin = std::chrono::steady_clock::now();
  Measurement measurement;
  {
    std::optional<verkv::examples::ProgressLine> line;
    line.emplace(0, "dense reference in double ...");
    bool first = true;
    measurement = measure(
        cache, options, methods, [&](std::int64_t done, std::int64_t total, std::size_t method) {
          const std::string text =
              fmt::format("method {} of {} ({} {})", method + 1, methods.size(),
                          rate_label(methods[method].config.keep), methods[method].label);
          // The work is only known, and its time only counts, from here on.
          if (first) line.emplace(total, text);
          first = false;
          line->update(done, text);
        });
  }
  if (!options.json.empty()) write_file(options.json, json_report(cache, options, measurement));
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  fmt::print("{}{}{}", table(measurement, options), legend(measurement, options),
             conclusion(measurement, options));
  fmt::print("{:.1f} s on {} thread{}{}\n", seconds, measurement.threads,
             measurement.threads == 1 ? "" : "s",
             options.json.empty() ? "" : "; rows of all layers in " + options.json);
  if (std::fflush(stdout) != 0) throw verkv::Error("the table could not be written to the output");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Parsed parsed = parse_options(std::vector<std::string>(argv + (argc > 0), argv + argc));
    if (!parsed.options) {
      if (parsed.exit_code == 0) {
        fmt::print("{}", parsed.text);
      } else {
        fmt::print(stderr, "verkv_replay: {}\n", parsed.text);
      }
      return parsed.exit_code;
    }
    replay(*parsed.options);
    return 0;
  } catch (const UsageError& error) {
    fmt::print(stderr, "verkv_replay: {}\n", error.what());
    return kExitUsage;
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "verkv_replay: not enough memory for this recording\n");
    return kExitData;
  } catch (const std::exception& error) {
    fmt::print(stderr, "verkv_replay: {}\n", error.what());
    return kExitData;
  }
}
