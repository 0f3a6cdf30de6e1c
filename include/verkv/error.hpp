// The one family of exceptions. Each kind says what the caller can do about it; the text names the
// offending value and the limit it broke and is meant for people, never for parsing.
#ifndef VERKV_ERROR_HPP
#define VERKV_ERROR_HPP

#include <stdexcept>
#include <string>

#include <verkv/config.hpp>

namespace verkv {

// Base of everything the library throws on purpose. std::bad_alloc may still come from a container.
class VERKV_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The call itself is wrong: shape, range, NaN, unknown sequence or layer. Fix the call.
class VERKV_API InvalidArgument : public Error {
 public:
  using Error::Error;
};

// A configured byte or token limit, or what the system gives of threads, would be exceeded. Free
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
  // code: the number of the device runtime's error (cudaError_t).
  DeviceError(const std::string& text, int code, bool out_of_memory)
      : Error(text), code_(code), out_of_memory_(out_of_memory) {}
  int code() const noexcept { return code_; }
  bool out_of_memory() const noexcept { return out_of_memory_; }

 private:
  int code_ = 0;
  bool out_of_memory_ = false;
};

// A file is malformed, truncated, or lacks what was asked of it. Fix the file.
class VERKV_API FormatError : public Error {
 public:
  using Error::Error;
};

}  // namespace verkv

#endif  // VERKV_ERROR_HPP
