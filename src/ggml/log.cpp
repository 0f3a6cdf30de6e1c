#include "log.hpp"

#include <ggml-impl.h>

namespace verkv_ggml {

void log_info(const std::string& line) {
  ggml_log_internal(GGML_LOG_LEVEL_INFO, "VERKV: %s\n", line.c_str());
}

void log_error(const std::string& line) {
  ggml_log_internal(GGML_LOG_LEVEL_ERROR, "VERKV: %s\n", line.c_str());
}

}  // namespace verkv_ggml
