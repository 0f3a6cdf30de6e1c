// What a long run shows while it works.
#ifndef VERKV_EXAMPLES_COMMON_PROGRESS_HPP
#define VERKV_EXAMPLES_COMMON_PROGRESS_HPP

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

#include <sys/ioctl.h>
#include <unistd.h>

#include <fmt/format.h>

namespace verkv::examples {

// "48 s", "12 min", "3 h 20 min".
inline std::string duration_text(double seconds) {
  if (seconds < 99.5) return fmt::format("{:.0f} s", seconds);
  const std::int64_t minutes = static_cast<std::int64_t>(seconds / 60 + 0.5);
  if (minutes < 100) return fmt::format("{} min", minutes);
  return fmt::format("{} h {} min", minutes / 60, minutes % 60);
}

// One line on `out` that is redrawn on a terminal and wiped at the end; elsewhere a line at most
// every 5 s. For one thread at a time.
class ProgressLine {
 public:
  // total: the work in any unit; 0 if it is not known, then no share and no time is shown. The text
  // is shown at once, on a terminal.
  explicit ProgressLine(std::int64_t total, std::string_view text = {}, std::FILE* out = stderr)
      : total_(total), out_(out), terminal_(::isatty(::fileno(out)) != 0) {
    if (terminal_ && !text.empty()) draw(text);
  }

  ~ProgressLine() {
    if (!terminal_) return;
    std::fputs("\r\033[K", out_);
    std::fflush(out_);
  }

  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  // done: of the total.
  void update(std::int64_t done, std::string_view text) {
    const auto now = std::chrono::steady_clock::now();
    if (now - last_ < (terminal_ ? std::chrono::milliseconds(100) : std::chrono::seconds(5)))
      return;
    last_ = now;
    std::string tail;
    if (done > 0 && total_ > 0) {
      const double share = static_cast<double>(done) / static_cast<double>(total_);
      const double spent = std::chrono::duration<double>(now - begin_).count();
      tail = fmt::format(", {:.0f} % done, {} left", 100 * share,
                         duration_text(share < 1 ? spent * (1 / share - 1) : 0));
    }
    draw(text, tail);
  }

 private:
  void draw(std::string_view text, std::string_view tail = {}) {
    if (terminal_) {
      // A line that wraps could not be redrawn.
      ::winsize size{};
      const bool known = ::ioctl(::fileno(out_), TIOCGWINSZ, &size) == 0 && size.ws_col > 1;
      const std::size_t width = known ? size.ws_col - std::size_t{1} : 79;
      tail = tail.substr(0, width);
      text = text.substr(0, width - tail.size());
    }
    const std::string line =
        fmt::format("{}{}{}{}", terminal_ ? "\r\033[K" : "", text, tail, terminal_ ? "" : "\n");
    std::fputs(line.c_str(), out_);
    std::fflush(out_);
  }

  std::int64_t total_;
  std::FILE* out_;
  bool terminal_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point last_ = begin_;
};

}  // namespace verkv::examples

#endif  // VERKV_EXAMPLES_COMMON_PROGRESS_HPP
