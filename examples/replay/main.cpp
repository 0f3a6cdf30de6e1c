// verkv_replay: the keys, values and queries that a real model left in a file go through the whole
// method, and a table says how good, how small and how honest the result is. What it shows about
// the library is in run.cpp: the calls an engine would make (create, append, compress, attend),
// and the report that comes back.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <new>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "../common/progress.hpp"
#include "json_report.hpp"
#include "measure.hpp"
#include "options.hpp"
#include "promise.hpp"
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

void replay_promise(const Options& options) {
  for (const std::string& file : options.files) {
    if (!options.json.empty()) check_writable(options.json, file);
  }

  // Everything that can be wrong with a recording comes out before any work. Of the time, steps and
  // tokens tell most.
  std::vector<verkv::RecordedCache> caches;
  std::vector<PromiseRun> runs;
  std::vector<std::int64_t> work;
  for (const std::string& file : options.files) {
    caches.push_back(verkv::RecordedCache::load(file));
    const verkv::RecordedCache& cache = caches.back();
    PromiseRun run;
    run.file = file;
    run.prompt_tokens = cache.prompt_tokens();
    run.metadata = cache.metadata();
    try {
      run.methods = select_methods(options, cache);
      std::int64_t heads = 0;
      for (const std::size_t place : select_layers(options, cache))
        heads += cache.layers()[place].query_heads;
      work.push_back(cache.prompt_tokens() * heads *
                     (options.seeds * select_steps(options, cache) + 4 * options.redraws));
    } catch (const UsageError& error) {
      throw UsageError(fmt::format("{}: {}", file, error.what()));
    }
    runs.push_back(std::move(run));
  }
  const std::int64_t whole = std::accumulate(work.begin(), work.end(), std::int64_t{0});

  const auto begin = std::chrono::steady_clock::now();
  {
    verkv::examples::ProgressLine line(whole, "dense reference in double ...");
    std::int64_t before = 0;
    for (std::size_t i = 0; i < runs.size(); ++i) {
      PromiseRun& run = runs[i];
      run.measurement = measure(
          caches[i], options, run.methods,
          [&](std::int64_t done, std::int64_t total, std::size_t method) {
            const double share = static_cast<double>(done) / static_cast<double>(total);
            line.update(before + static_cast<std::int64_t>(share * static_cast<double>(work[i])),
                        fmt::format("recording {} of {}, method {} of {} ({} {})", i + 1,
                                    runs.size(), method + 1, run.methods.size(),
                                    rate_label(run.methods[method].config.keep),
                                    run.methods[method].label));
          });
      before += work[i];
    }
  }
  const std::vector<Cell> pooled = pooled_cells(runs);
  if (!options.json.empty()) write_file(options.json, promise_report(runs, options));
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  for (const PromiseRun& run : runs) {
    const std::vector<Cell> cells = cells_of(run);
    fmt::print("{}{}{}", promise_heading(run), promise_table(cells), promise_verdict(cells));
  }
  if (runs.size() > 1) {
    fmt::print("\nAll {} recordings together\n{}{}", runs.size(), promise_table(pooled),
               promise_verdict(pooled));
  }
  fmt::print("{}{:.1f} s on {} thread{}\n", promise_legend(options, runs.front().measurement),
             seconds, runs.front().measurement.threads,
             runs.front().measurement.threads == 1 ? "" : "s");
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
    if (parsed.options->promise) {
      replay_promise(*parsed.options);
    } else {
      replay(*parsed.options);
    }
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
