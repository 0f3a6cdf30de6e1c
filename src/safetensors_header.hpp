// The header of a safetensors file: tensors with types, shapes and places, every number checked.
#ifndef VERKV_SRC_SAFETENSORS_HEADER_HPP
#define VERKV_SRC_SAFETENSORS_HEADER_HPP

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <verkv/error.hpp>

namespace verkv {

// A tensor as the header describes it, offsets checked.
struct Entry {
  std::string name;
  std::string type;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  // in the data section
  std::uint64_t end = 0;
};

// Names come from the file: cut, and free of what would upset a terminal.
std::string in_quotes(std::string_view text);

// "[2, 17, 5]".
std::string shown(const std::vector<std::int64_t>& shape);

// Errors of one file, all prefixed with its path.
class Complaints {
 public:
  explicit Complaints(std::string path) : path_(std::move(path)) {}

  template <class... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> text, Args&&... args) const {
    throw FormatError(path_ + ": " + fmt::format(text, std::forward<Args>(args)...));
  }

 private:
  std::string path_;
};

// Parses the header, refusing keys that come twice: which of them counts would depend on the
// reader.
nlohmann::json parse_header(const Complaints& complaints, const std::string& text);

// data_bytes: length of the data section, in which the tensor has to lie.
Entry parse_entry(const Complaints& complaints, const std::string& name, const nlohmann::json& json,
                  std::uint64_t data_bytes);

void refuse_overlaps(const Complaints& complaints, const std::map<std::string, Entry>& entries);

}  // namespace verkv

#endif  // VERKV_SRC_SAFETENSORS_HEADER_HPP
