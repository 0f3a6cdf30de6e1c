// What callers wait for, layer by layer: LayerStatistics::attend_ns, append_ns and compress_ns.
#ifndef VERKV_SRC_CALL_TIMES_HPP
#define VERKV_SRC_CALL_TIMES_HPP

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <verkv/reports.hpp>

namespace verkv {

// Adds its own life to a count of nanoseconds.
class Stopwatch {
 public:
  explicit Stopwatch(std::int64_t& nanoseconds) : nanoseconds_(nanoseconds) {}
  ~Stopwatch() {
    nanoseconds_ += std::chrono::duration_cast<std::chrono::nanoseconds>(
                        std::chrono::steady_clock::now() - begin_)
                        .count();
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  std::int64_t& nanoseconds_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

class CallTimes {
 public:
  explicit CallTimes(std::size_t layers = 0) : of_(layers) {}

  Stopwatch attending(std::int64_t layer) { return Stopwatch(at(layer).attend_ns); }
  Stopwatch appending(std::int64_t layer) { return Stopwatch(at(layer).append_ns); }
  Stopwatch compressing(std::int64_t layer) { return Stopwatch(at(layer).compress_ns); }
  // Shares the nanoseconds of a call about all layers out by weight [layer], not below 0: all of
  // them, or none where no layer weighs anything.
  void compressed(std::int64_t nanoseconds, std::span<const std::int64_t> weight);

  void reset() { of_.assign(of_.size(), Times{}); }
  // Puts the times of a layer beside its counters.
  void add_to(LayerStatistics& statistics, std::int64_t layer) const;

 private:
  struct Times {
    std::int64_t attend_ns = 0;
    std::int64_t append_ns = 0;
    std::int64_t compress_ns = 0;
  };

  Times& at(std::int64_t layer) { return of_[static_cast<std::size_t>(layer)]; }

  std::vector<Times> of_;
};

}  // namespace verkv

#endif  // VERKV_SRC_CALL_TIMES_HPP
