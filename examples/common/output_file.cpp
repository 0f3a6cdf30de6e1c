#include "output_file.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <system_error>

#include <unistd.h>

#include <fmt/format.h>

namespace verkv::examples {

namespace {

// A file of this process beside the one that is meant.
std::string temporary_name(const std::string& path) {
  return fmt::format("{}.{}.tmp", path, ::getpid());
}

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, CloseFile>;

}  // namespace

void check_writable(const std::string& path, const std::string& input,
                    const std::string& input_name) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error))
    throw OutputFileError(fmt::format("{}: is a directory", path));
  if (!input.empty() && std::filesystem::equivalent(path, input, error))
    throw OutputFileError(fmt::format("{}: is the {} itself", path, input_name));
  // The new file is renamed over its target, which must not be a link or a device.
  const auto status = std::filesystem::symlink_status(path, error);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))
    throw OutputFileError(fmt::format("{}: exists and is not a regular file", path));
  const std::string temporary = temporary_name(path);
  const File file(std::fopen(temporary.c_str(), "wb"));
  if (!file)
    throw OutputFileError(fmt::format("{}: cannot be written: {}", path, std::strerror(errno)));
  std::filesystem::remove(temporary, error);
}

void write_file(const std::string& path, const std::string& text) {
  const std::string temporary = temporary_name(path);
  File file(std::fopen(temporary.c_str(), "wb"));
  bool good = file && std::fwrite(text.data(), 1, text.size(), file.get()) == text.size() &&
              std::fflush(file.get()) == 0 && ::fsync(::fileno(file.get())) == 0;
  std::error_code error(good ? 0 : errno, std::generic_category());
  file.reset();
  if (good) std::filesystem::rename(temporary, path, error);
  if (error) {
    const std::string reason = error.message();
    std::filesystem::remove(temporary, error);
    throw OutputFileError(fmt::format("{}: cannot be written: {}", path, reason));
  }
}

}  // namespace verkv::examples
