// verkv_replay: the keys, values and queries that a real model left in a file go through the whole
// method, and a table says how good, how small and how honest the result is. What it shows about
// the library is in measure.cpp: the calls an engine would make (create, append, compress, attend),
// and the report that comes back.
#include <chrono>
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include <unistd.h>

#include <fmt/format.h>

#include "json_report.hpp"
#include "measure.hpp"
#include "options.hpp"
#include "table.hpp"

namespace {

using namespace verkv::replay;

// One line that is redrawn on a terminal; now and then a line elsewhere.
class ProgressLine {
 public:
  explicit ProgressLine(const std::vector<Method>& methods)
      : methods_(methods), terminal_(::isatty(::fileno(stderr)) != 0) {
    if (terminal_) fmt::print(stderr, "dense reference in double ...");
  }

  ~ProgressLine() {
    if (terminal_) fmt::print(stderr, "\r\033[K");
  }

  void operator()(std::int64_t done, std::int64_t total, std::size_t method) {
    const auto now = std::chrono::steady_clock::now();
    if (now - last_ < (terminal_ ? std::chrono::milliseconds(100) : std::chrono::seconds(5)))
      return;
    last_ = now;
    std::string text =
        fmt::format("method {} of {} ({} {})", method + 1, methods_.size(),
                    rate_label(methods_[method].config.keep), methods_[method].label);
    if (done > 0) {
      const double spent = std::chrono::duration<double>(now - begin_).count();
      text += fmt::format(", {} % done, {:.0f} s left", 100 * done / total,
                          spent * static_cast<double>(total - done) / static_cast<double>(done));
    }
    fmt::print(stderr, "{}{}{}", terminal_ ? "\r\033[K" : "", text, terminal_ ? "" : "\n");
    std::fflush(stderr);
  }

 private:
  const std::vector<Method>& methods_;
  bool terminal_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point last_ = begin_;
};

void replay(const Options& options) {
  if (!options.json.empty()) check_writable(options.json, options.file);
  const verkv::RecordedCache cache = verkv::RecordedCache::load(options.file);
  const std::vector<Method> methods = select_methods(options, cache);
  fmt::print("{}", heading(cache, options, methods));
  std::fflush(stdout);
  const auto begin = std::chrono::steady_clock::now();
  Measurement measurement;
  {
    ProgressLine line(methods);
    measurement = measure(cache, options, methods,
                          [&line](std::int64_t done, std::int64_t total, std::size_t method) {
                            line(done, total, method);
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
