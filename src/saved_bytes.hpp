// The bytes of a saved sequence, written and read in one direction: numbers as they lie in memory,
// in sections that end with a checksum. What a section says is used only after its checksum, but
// for the contents of rows and tables whose sizes an earlier section gave.
#ifndef VERKV_SRC_SAVED_BYTES_HPP
#define VERKV_SRC_SAVED_BYTES_HPP

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include <verkv/config.hpp>
#include <verkv/view.hpp>

namespace verkv {

// CRC-64 of ECMA-182, reflected, as xz has it: finds every altered bit, and every burst of up to 64.
class VERKV_API Checksum {
 public:
  void add(std::span<const std::byte> bytes) noexcept;
  std::uint64_t value() const { return ~state_; }

 private:
  std::uint64_t state_ = ~std::uint64_t{0};
};

class VERKV_API SavedWriter {
 public:
  explicit SavedWriter(WriteBytes write) : write_(std::move(write)) {}

  template <class T>
  void put(const T& number) {
    static_assert(std::is_trivially_copyable_v<T>);
    // No padding, whose bytes would be anything.
    static_assert(std::has_unique_object_representations_v<T> || std::is_floating_point_v<T>);
    put_bytes(std::as_bytes(std::span(&number, 1)));
  }
  template <class T>
  void put_all(std::span<const T> numbers) {
    static_assert(std::is_trivially_copyable_v<T>);
    put_bytes(std::as_bytes(numbers));
  }
  void put_bytes(std::span<const std::byte> bytes);
  // Ends a section.
  void end();

 private:
  WriteBytes write_;
  Checksum checksum_;
};

// Every function throws FormatError, which says what is wrong and at which byte.
class VERKV_API SavedReader {
 public:
  explicit SavedReader(ReadBytes read) : read_(std::move(read)) {}

  // Names the section that follows, for the texts of errors.
  void begin(std::string section) { section_ = std::move(section); }
  template <class T>
  T get() {
    static_assert(std::is_trivially_copyable_v<T>);
    T number;
    get_bytes(std::as_writable_bytes(std::span(&number, 1)));
    return number;
  }
  template <class T>
  void get_all(std::span<T> numbers) {
    static_assert(std::is_trivially_copyable_v<T>);
    get_bytes(std::as_writable_bytes(numbers));
  }
  void get_bytes(std::span<std::byte> bytes);
  // Ends a section.
  void end();
  [[noreturn]] void refuse(std::string_view why) const;

 private:
  ReadBytes read_;
  Checksum checksum_;
  std::string section_ = "header";
  std::int64_t at_ = 0;
};

}  // namespace verkv

#endif  // VERKV_SRC_SAVED_BYTES_HPP
