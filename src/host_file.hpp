// The file of a host tier: regions of bytes, written and read by calls of the system, never mapped. A
// disk that is full or fails is so an error of a call; with a mapping it would be a signal.
#ifndef VERKV_SRC_HOST_FILE_HPP
#define VERKV_SRC_HOST_FILE_HPP

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <verkv/config.hpp>

namespace verkv {

// Reads may come from several threads at a time, everything else from one.
class VERKV_API HostFile {
 public:
  // In `directory`, without a name, so that nobody else cuts it; gone with the process. Throws FileError.
  explicit HostFile(const std::string& directory);
  ~HostFile();
  HostFile(const HostFile&) = delete;
  HostFile& operator=(const HostFile&) = delete;

  // A region that has its space on the disk: writing to it cannot find the disk full. Throws
  // CapacityError (ErrorCode::file_full), FileError, std::bad_alloc.
  std::int64_t allocate(std::int64_t bytes);
  // Of allocate, with the same number of bytes.
  void release(std::int64_t offset, std::int64_t bytes) noexcept;

  // Throws FileError.
  void write(std::int64_t offset, const std::byte* from, std::int64_t bytes);
  // 0, or the system's number of an error; kEndsEarly where the file has fewer bytes.
  int read(std::int64_t offset, std::byte* to, std::int64_t bytes) const noexcept;
  static constexpr int kEndsEarly = -1;
  // Throws FileError of what read has returned.
  [[noreturn]] void refuse(int error) const;

  // On the disk.
  std::int64_t size() const { return size_; }

 private:
  struct Regions {
    std::vector<std::int64_t> free;
    std::size_t count = 0;  // in use or free: `free` has room for all
  };

  void grow(std::int64_t bytes);

  std::string directory_;
  int file_ = -1;
  std::int64_t end_ = 0;                     // of the last region
  std::int64_t size_ = 0;                    // what has its space
  std::map<std::int64_t, Regions> regions_;  // by their bytes
};

}  // namespace verkv

#endif  // VERKV_SRC_HOST_FILE_HPP
