// Writes safetensors files for tests: good ones, and bad ones through the raw header.
#ifndef VERKV_TESTS_SUPPORT_SAFETENSORS_WRITER_HPP
#define VERKV_TESTS_SUPPORT_SAFETENSORS_WRITER_HPP

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <verkv/types.hpp>

namespace verkv::test {

// One tensor in its file form.
struct SafeTensor {
  std::string type;  // as in the header: "F32", "F16", "BF16", ...
  std::vector<std::int64_t> shape;
  std::string bytes;
};

// From floats, rounded to `type`.
inline SafeTensor make_tensor(DType type, std::vector<std::int64_t> shape,
                              const std::vector<float>& values) {
  SafeTensor tensor{type == DType::f32   ? "F32"
                    : type == DType::f16 ? "F16"
                                         : "BF16",
                    std::move(shape),
                    {}};
  tensor.bytes.resize(values.size() * size_bytes(type));
  char* to = tensor.bytes.data();
  for (const float value : values) {
    if (type == DType::f32) {
      std::memcpy(to, &value, sizeof value);
    } else {
      const std::uint16_t bits = type == DType::f16 ? to_half(value).bits : to_bfloat16(value).bits;
      std::memcpy(to, &bits, sizeof bits);
    }
    to += size_bytes(type);
  }
  return tensor;
}

// A file in the making. `header` and `data` may be spoilt before bytes() joins them.
struct SafeTensorsFile {
  std::map<std::string, SafeTensor> tensors;
  std::map<std::string, std::string> metadata;

  // The header as the format wants it, data laid out in order of the names.
  nlohmann::json header() const {
    nlohmann::json result = nlohmann::json::object();
    if (!metadata.empty()) result["__metadata__"] = metadata;
    std::size_t offset = 0;
    for (const auto& [name, tensor] : tensors) {
      result[name] = {{"dtype", tensor.type},
                      {"shape", tensor.shape},
                      {"data_offsets", {offset, offset + tensor.bytes.size()}}};
      offset += tensor.bytes.size();
    }
    return result;
  }

  std::string data() const {
    std::string result;
    for (const auto& [name, tensor] : tensors) result += tensor.bytes;
    return result;
  }

  std::string bytes() const { return join(header().dump(), data()); }

  // Length of the header, header, data.
  static std::string join(const std::string& header, const std::string& data) {
    std::string result;
    for (unsigned shift = 0; shift < 64; shift += 8) {
      result += static_cast<char>(static_cast<std::uint64_t>(header.size()) >> shift & 0xffu);
    }
    return result + header + data;
  }
};

// A file that is removed with the object, in the directory of temporary files.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& stem, const std::string& bytes = {})
      : path_((std::filesystem::temp_directory_path() / (stem + "-" + unique())).string()) {
    write(bytes);
  }
  ~TemporaryFile() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  const std::string& path() const { return path_; }

  void write(const std::string& bytes) const {
    std::ofstream file(path_, std::ios::binary | std::ios::trunc);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    file.close();
    if (!file) throw std::runtime_error("cannot write " + path_);
  }

 private:
  // Tests run as parallel processes; the address differs between objects, the time between
  // processes.
  std::string unique() const {
    const auto now = std::filesystem::file_time_type::clock::now().time_since_epoch().count();
    return std::to_string(now) + "-" + std::to_string(reinterpret_cast<std::uintptr_t>(this));
  }

  std::string path_;
};

}  // namespace verkv::test

#endif  // VERKV_TESTS_SUPPORT_SAFETENSORS_WRITER_HPP
