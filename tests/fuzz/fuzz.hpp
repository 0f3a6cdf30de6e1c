// What the fuzz targets share. A target is LLVMFuzzerTestOneInput in a file of its own: libFuzzer
// calls it, or replay.cpp, which is the test. It returns 0 where all is well, and ends the process
// where it is not.
#ifndef VERKV_TESTS_FUZZ_FUZZ_HPP
#define VERKV_TESTS_FUZZ_FUZZ_HPP

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace verkv::fuzz {

inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "violated: %s\n", what);
  std::abort();
}

// Takes numbers from the front of an input; zeros once it has ended.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  bool empty() const { return size_ == 0; }

  template <class T>
  T take() {
    T value{};
    const std::size_t count = std::min(size_, sizeof value);
    if (count > 0) std::memcpy(&value, data_, count);
    data_ += count;
    size_ -= count;
    return value;
  }
  std::uint8_t below(std::uint8_t n) { return static_cast<std::uint8_t>(take<std::uint8_t>() % n); }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
};

}  // namespace verkv::fuzz

#endif  // VERKV_TESTS_FUZZ_FUZZ_HPP
