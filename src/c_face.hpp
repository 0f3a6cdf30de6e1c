// What the functions of the C interface share: structures of several versions, errors, arrays.
#ifndef VERKV_SRC_C_FACE_HPP
#define VERKV_SRC_C_FACE_HPP

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <type_traits>

#include <verkv/verkv.h>
#include <verkv/error.hpp>
#include <verkv/reports.hpp>
#include <verkv/settings.hpp>
#include <verkv/view.hpp>

#include "invalid.hpp"

namespace verkv::c_face {

// A larger size is no later version's but memory that nobody has set.
inline constexpr std::size_t kLargestStruct = 4096;

template <class T>
T& needed(T* pointer, const char* what) {
  if (pointer == nullptr) invalid("{} is NULL", what);
  return *pointer;
}

inline void check_size(std::size_t size, std::size_t smallest, std::size_t alignment,
                       const char* what) {
  if (size < smallest || size > kLargestStruct || size % alignment != 0) {
    invalid("{} has a size of {} bytes; {} to {} in multiples of {} are possible, see sizeof", what,
            size, smallest, kLargestStruct, alignment);
  }
}

// The first `size` bytes of a T of the caller over the defaults.
template <class T>
T taken(const void* from, std::size_t size, T defaults, const char* what) {
  const auto* bytes = static_cast<const unsigned char*>(from);
  if (std::any_of(bytes + std::min(size, sizeof(T)), bytes + size,
                  [](unsigned char byte) { return byte != 0; })) {
    invalid("{} of {} bytes sets what this version, which knows {} bytes, does not have", what,
            size, sizeof(T));
  }
  std::memcpy(&defaults, from, std::min(size, sizeof(T)));
  return defaults;
}

// A structure that begins with its size.
template <class T>
T taken(const T* from, const T& defaults, const char* what) {
  const std::size_t size = needed(from, what).size;
  check_size(size, sizeof(size), alignof(T), what);
  return taken(static_cast<const void*>(from), size, defaults, what);
}

// Sets `size` bytes of the caller's T.
template <class T>
void hand_out(const T& value, void* to, std::size_t size) noexcept {
  std::memcpy(to, &value, std::min(size, sizeof(T)));
  if (size > sizeof(T))
    std::memset(static_cast<unsigned char*>(to) + sizeof(T), 0, size - sizeof(T));
}

// Checks the size before a call, which hands its result out afterwards and cannot fail then.
template <class T>
class Result {
 public:
  Result(T* to, const char* what) : to_(&needed(to, what)), size_(to->size) {
    check_size(size_, sizeof(size_), alignof(T), what);
  }
  void set(T value) noexcept {
    value.size = size_;
    hand_out(value, to_, size_);
  }

 private:
  T* to_;
  std::size_t size_;
};

template <class T>
std::span<T> array(T* data, std::int64_t count, const char* what) {
  if (count < 0 || (data == nullptr && count > 0))
    invalid("{}: {} elements{}", what, count, data == nullptr ? " at NULL" : "");
  return {data, static_cast<std::size_t>(count)};
}

inline TensorView view(const verkv_tensor_view& c, const char* what) {
  if (c.type < 0 || c.type > std::numeric_limits<std::underlying_type_t<DType>>::max())
    invalid("{}: element type {}; f32, f16 and bf16 are supported", what, c.type);
  return {c.data,       static_cast<DType>(c.type), c.tokens, c.heads, c.dim, c.token_stride,
          c.head_stride};
}
inline TensorView view(const verkv_tensor_view* c, const char* what) {
  return view(needed(c, what), what);
}

// A function of the caller that has failed.
struct CallbackFailure {
  std::string text;
  std::int64_t status = 0;
};

// False where the error has a size that is none; then there is nowhere to say so.
bool is_usable(const verkv_error* error) noexcept;
// What the exception in flight is, as a code and into `error` if there is one.
verkv_code caught(verkv_error* error) noexcept;

// Runs call(), whose exceptions become a code.
template <class Call>
verkv_code guarded(verkv_error* error, Call&& call) noexcept {
  if (!is_usable(error)) return VERKV_ERROR_SHAPE;
  try {
    call();
    return VERKV_OK;
  } catch (...) {
    return caught(error);
  }
}

// Where a text goes; checked before the call that makes it.
class TextResult {
 public:
  TextResult(char* text, std::size_t bytes, std::size_t* length);
  void set(const std::string& text) noexcept;

 private:
  char* text_;
  std::size_t bytes_;
  std::size_t* length_;
};

CacheConfig cache_config(const verkv_cache_config* from);
verkv_cache_config to_c(const CacheConfig& config) noexcept;
verkv_layer_config to_c(const LayerConfig& layer) noexcept;
verkv_memory_report to_c(const MemoryReport& report) noexcept;
verkv_layer_statistics to_c(const LayerStatistics& statistics) noexcept;
double keep(double fast_share, const verkv_layer_config* layer, std::size_t layer_size,
            std::int32_t storage, std::int32_t kind, std::int64_t bits, std::int32_t estimator);
void check_layer_size(std::size_t size);

}  // namespace verkv::c_face

#endif  // VERKV_SRC_C_FACE_HPP
