// What we say, through ggml's log.
#ifndef VERKV_SRC_GGML_LOG_HPP
#define VERKV_SRC_GGML_LOG_HPP

#include <mutex>
#include <set>
#include <string>

namespace verkv_ggml {

void log_info(const std::string& line);
void log_error(const std::string& line);

// Says each line once. Any thread may call.
class Once {
 public:
  void info(const std::string& line) {
    const std::lock_guard lock(mutex_);
    if (said_.insert(line).second) log_info(line);
  }

 private:
  std::mutex mutex_;
  std::set<std::string> said_;
};

}  // namespace verkv_ggml

#endif  // VERKV_SRC_GGML_LOG_HPP
