#include "unpack.hpp"

#include <filesystem>
#include <system_error>

#include <fmt/format.h>
#include <llama.h>

#include "example.hpp"

namespace verkv::lab {

void unpack_model(const std::string& from, const std::string& to, int threads) {
  llm::last_engine_error();
  std::error_code error;
  if (!std::filesystem::is_regular_file(from, error)) {
    throw EngineError(fmt::format("{}: there is no such model file", from));
  }
  if (std::filesystem::equivalent(from, to, error)) {
    throw EngineError(fmt::format("{}: a model cannot be unpacked onto itself", from));
  }
  llama_model_quantize_params parameters = llama_model_quantize_default_params();
  parameters.ftype = LLAMA_FTYPE_ALL_F32;
  parameters.allow_requantize = true;
  parameters.nthread = threads;
  const std::string partial = to + ".partial";
  const bool good = llama_model_quantize(from.c_str(), partial.c_str(), &parameters) == 0;
  if (good) std::filesystem::rename(partial, to, error);
  if (!good || error) {
    std::error_code ignored;
    std::filesystem::remove(partial, ignored);
    throw EngineError(
        fmt::format("{}: cannot be unpacked to {}{}", from, to, llm::last_engine_error()));
  }
}

}  // namespace verkv::lab
