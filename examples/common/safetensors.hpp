// Safetensors files of the programs: a writer, and a reader of 32-bit floats. Recorded caches have
// a reader of their own in the library (verkv/recorded_cache.hpp).
#ifndef VERKV_EXAMPLES_COMMON_SAFETENSORS_HPP
#define VERKV_EXAMPLES_COMMON_SAFETENSORS_HPP

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <verkv/error.hpp>

namespace verkv::examples {

enum class TensorType : std::uint8_t { f32, f16, i64 };

// A dense tensor of caller memory, last dimension innermost.
struct TensorData {
  std::string name;
  TensorType type = TensorType::f32;
  std::vector<std::int64_t> shape;
  const void* data = nullptr;
};

// Writes the tensors, those of larger elements first and otherwise in order, so that each is
// aligned to its elements; the data begin at a multiple of 64 bytes. `path` is never half-written.
// Throws InvalidArgument for an empty, negative or overflowing shape, no data, or a name that comes
// twice, and OutputFileError (output_file.hpp).
void write_safetensors(const std::string& path, const std::vector<TensorData>& tensors,
                       const std::map<std::string, std::string>& metadata);

struct FloatTensor {
  std::vector<std::int64_t> shape;
  std::vector<float> values;
};

// A file held in memory.
class SafetensorsFile {
 public:
  // Throws FormatError naming the file, and the tensor where it is one: no regular file, truncated,
  // no header, offsets that leave the data or do not span shape times type.
  static SafetensorsFile load(const std::string& path);

  const std::string& path() const { return path_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  bool has(const std::string& name) const { return entries_.count(name) > 0; }
  // Throws FormatError where there is no such tensor, it is not F32, or a number is not finite.
  FloatTensor floats(const std::string& name) const;

 private:
  struct Entry {
    std::string type;
    std::vector<std::int64_t> shape;
    std::uint64_t begin = 0;  // in bytes_
    std::uint64_t end = 0;
  };
  std::string path_;
  std::string bytes_;
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace verkv::examples

#endif  // VERKV_EXAMPLES_COMMON_SAFETENSORS_HPP
