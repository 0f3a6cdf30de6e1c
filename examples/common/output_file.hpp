// Files that a program leaves behind: whole or not at all.
#ifndef VERKV_EXAMPLES_COMMON_OUTPUT_FILE_HPP
#define VERKV_EXAMPLES_COMMON_OUTPUT_FILE_HPP

#include <string>

#include <verkv/error.hpp>

namespace verkv::examples {

// A file cannot be written; the text begins with its path.
class OutputFileError : public Error {
 public:
  using Error::Error;
};

// Throws OutputFileError if no file can be written at `path`, or if it is the file `input`, which
// the text calls `input_name`. Leaves nothing behind.
void check_writable(const std::string& path, const std::string& input = {},
                    const std::string& input_name = "input");
// Writes beside `path` and renames, so that `path` is never half-written. Throws OutputFileError.
void write_file(const std::string& path, const std::string& text);

}  // namespace verkv::examples

#endif  // VERKV_EXAMPLES_COMMON_OUTPUT_FILE_HPP
