// The one family of exceptions. Each kind says what the caller can do about it, its code says more
// finely where an engine acts differently, its place says where. The text names the offending value
// and the limit it broke and is meant for people, never for parsing.
#ifndef VERKV_ERROR_HPP
#define VERKV_ERROR_HPP

#include <cstdint>
#include <stdexcept>
#include <string>

#include <verkv/config.hpp>

namespace verkv {

// New codes come at the end: their numbers are part of the C interface.
enum class ErrorCode : std::uint8_t {
  other,  // of programs that throw an Error of their own; the library's have one of the following
  // InvalidArgument
  setting,           // configurations and options: unsupported_reasons
  unknown_sequence,  // never created, or erased
  unknown_layer,     // not in the configuration, or configured to keep no cache
  repeated,          // a sequence in rows of a batch that are not consecutive
  shape,             // sizes, strides, element type, alignment, null data
  number,            // not finite, negative, or too large for the storage type
  wrong_process,     // a child after fork() uses the cache of its parent
  wrong_backend,     // a call that the cache's backend does not serve
  // CapacityError
  fast_limit,    // CacheConfig::fast_bytes_limit
  host_limit,    // CacheConfig::host_bytes_limit
  token_limit,   // a sequence has as many tokens as it can have
  row_limit,     // a captured batch with more rows than CudaOptions::rows
  thread_limit,  // CacheConfig::threads that the system does not give
  // DeviceError
  device,         // a fault: nothing on the device can be used on
  device_memory,  // the cache is as it was
  system_memory,  // no main memory that the device can reach; the cache is as it was
  // FormatError
  format,
  // InvalidArgument
  being_compressed,  // a call that begin_compress has to be finished or cancelled for
  // CapacityError
  file_full,  // no room on the disk for the file of the host tier; the cache is as it was
  // FileError
  file  // that file cannot be made, read or written
};

// The enumerator's name.
constexpr const char* name(ErrorCode code) {
  switch (code) {
    case ErrorCode::other:
      return "other";
    case ErrorCode::setting:
      return "setting";
    case ErrorCode::unknown_sequence:
      return "unknown_sequence";
    case ErrorCode::unknown_layer:
      return "unknown_layer";
    case ErrorCode::repeated:
      return "repeated";
    case ErrorCode::shape:
      return "shape";
    case ErrorCode::number:
      return "number";
    case ErrorCode::wrong_process:
      return "wrong_process";
    case ErrorCode::wrong_backend:
      return "wrong_backend";
    case ErrorCode::fast_limit:
      return "fast_limit";
    case ErrorCode::host_limit:
      return "host_limit";
    case ErrorCode::token_limit:
      return "token_limit";
    case ErrorCode::row_limit:
      return "row_limit";
    case ErrorCode::thread_limit:
      return "thread_limit";
    case ErrorCode::device:
      return "device";
    case ErrorCode::device_memory:
      return "device_memory";
    case ErrorCode::system_memory:
      return "system_memory";
    case ErrorCode::format:
      return "format";
    case ErrorCode::being_compressed:
      return "being_compressed";
    case ErrorCode::file_full:
      return "file_full";
    case ErrorCode::file:
      return "file";
  }
  return "?";
}

// Where it went wrong, as far as that is one place: -1 where it is not, or not known.
struct ErrorPlace {
  std::int64_t layer = -1;
  std::int64_t row = -1;    // of a batch
  std::int64_t head = -1;   // KV head of keys, values and importance, query head of queries
  std::int64_t token = -1;  // of the view that was given: a token, of prompt queries a position
  friend bool operator==(const ErrorPlace&, const ErrorPlace&) = default;
};

// Base of everything the library throws on purpose. std::bad_alloc of the containers stays what it
// is, and also leaves the cache as it was.
class VERKV_API Error : public std::runtime_error {
 public:
  explicit Error(const std::string& text, ErrorCode code = ErrorCode::other,
                 const ErrorPlace& place = {})
      : std::runtime_error(text), place_(place), code_(code) {}
  ErrorCode code() const noexcept { return code_; }
  const ErrorPlace& place() const noexcept { return place_; }

  // Fills in what place() leaves open.
  void add_place(const ErrorPlace& known) noexcept {
    if (place_.layer < 0) place_.layer = known.layer;
    if (place_.row < 0) place_.row = known.row;
    if (place_.head < 0) place_.head = known.head;
    if (place_.token < 0) place_.token = known.token;
  }

 private:
  ErrorPlace place_;
  ErrorCode code_ = ErrorCode::other;
};

// The call itself is wrong: shape, range, NaN, unknown sequence or layer. Fix the call.
class VERKV_API InvalidArgument : public Error {
 public:
  using Error::Error;
};

// A configured byte or token limit, or what the system gives of threads or of a disk, would be exceeded. Free
// something or raise the limit.
class VERKV_API CapacityError : public Error {
 public:
  using Error::Error;
};

// A device refused a call: out of memory, pinning refused, a launch that failed. The text names the
// call and its place in the library. After out of memory the cache is as it was and may be used on;
// after a fault of the device itself nothing on it can be.
class VERKV_API DeviceError : public Error {
 public:
  // device_code: the number of the device runtime's error (cudaError_t). code: device,
  // device_memory or system_memory.
  DeviceError(const std::string& text, int device_code, ErrorCode code)
      : Error(text, code), device_code_(device_code) {}
  int device_code() const noexcept { return device_code_; }
  bool out_of_memory() const noexcept { return code() != ErrorCode::device; }

 private:
  int device_code_ = 0;
};

// A file or a saved sequence is malformed, truncated, or lacks what was asked of it. Fix it.
class VERKV_API FormatError : public Error {
 public:
  explicit FormatError(const std::string& text) : Error(text, ErrorCode::format) {}
};

// The file of the host tier (HostTier::file) cannot be made, read or written. A call that cannot read or
// write leaves the cache as it was, except that `step` may have appended; what needs the rows that
// cannot be read fails again, all else works on.
class VERKV_API FileError : public Error {
 public:
  explicit FileError(const std::string& text) : Error(text, ErrorCode::file) {}
};

}  // namespace verkv

#endif  // VERKV_ERROR_HPP
