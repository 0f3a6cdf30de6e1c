// What we say, through ggml's log.
#ifndef VERKV_SRC_GGML_LOG_HPP
#define VERKV_SRC_GGML_LOG_HPP

#include <set>
#include <string>

namespace verkv_ggml {

void log_info(const std::string& line);
void log_error(const std::string& line);

// Says each line once.
class Once {
 public:
  void info(const std::string& line) {
    if (said_.insert(line).second) log_info(line);
  }

 private:
  std::set<std::string> said_;
};

}  // namespace verkv_ggml

#endif  // VERKV_SRC_GGML_LOG_HPP
