// Files that a program reads as a whole.
#ifndef VERKV_EXAMPLES_COMMON_INPUT_FILE_HPP
#define VERKV_EXAMPLES_COMMON_INPUT_FILE_HPP

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include <verkv/error.hpp>

namespace verkv::examples {

// The bytes of a regular file. Throws FormatError with the path where it cannot be read.
inline std::string read_file(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream || !std::filesystem::is_regular_file(path)) {
    throw FormatError(path + ": cannot be read");
  }
  std::string text((std::istreambuf_iterator<char>(stream)), {});
  if (stream.bad()) throw FormatError(path + ": cannot be read");
  return text;
}

}  // namespace verkv::examples

#endif  // VERKV_EXAMPLES_COMMON_INPUT_FILE_HPP
