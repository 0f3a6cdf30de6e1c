#include "host_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <system_error>

#include <verkv/error.hpp>

namespace verkv {
namespace {

// The file grows by so much at least, where the disk has it: a call of the system for some hundred
// pages of rows. A guess.
constexpr std::int64_t kGrowth = std::int64_t{4} << 20;

std::string words(int error) { return std::generic_category().message(error); }

bool is_full(int error) { return error == ENOSPC || error == EDQUOT || error == EFBIG; }

// Beyond this the system ends the process with a signal.
std::int64_t largest_file() {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return INT64_MAX;
  return static_cast<std::int64_t>(std::min<rlim_t>(limit.rlim_cur, INT64_MAX));
}

int open_nameless(const std::string& directory) {
#ifdef O_TMPFILE
  const int file = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | O_EXCL, 0600);
  if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return file;
#endif
  // Of file systems that know no files without a name.
  std::string name = directory + "/verkv-XXXXXX";
  const int named = ::mkostemp(name.data(), O_CLOEXEC);
  if (named >= 0) ::unlink(name.c_str());
  return named;
}

}  // namespace

HostFile::HostFile(const std::string& directory)
    : directory_(directory), file_(open_nameless(directory)) {
  if (file_ >= 0) return;
  const int error = errno;
  throw FileError(fmt::format("no file for the host tier in \"{}\": {}", directory, words(error)));
}

HostFile::~HostFile() { ::close(file_); }

void HostFile::grow(std::int64_t bytes) {
  const std::int64_t wanted = end_ + bytes;
  if (wanted <= size_) return;
  const std::int64_t most = largest_file();
  int error = EFBIG;
  for (const std::int64_t size : {std::min(std::max(wanted, size_ + kGrowth), most), wanted}) {
    if (size < wanted || size > most) continue;
    do {
      error = ::posix_fallocate(file_, size_, size - size_);
    } while (error == EINTR);
    if (error == 0) {
      size_ = size;
      return;
    }
  }
  // Of what was refused a part may have come.
  static_cast<void>(::ftruncate(file_, size_));
  if (!is_full(error)) {
    throw FileError(
        fmt::format("the file of the host tier in \"{}\" cannot grow from {} bytes to {}: {}",
                    directory_, size_, wanted, words(error)));
  }
  throw CapacityError(
      fmt::format(
          "the file of the host tier in \"{}\" has {} bytes and there is no room for {} more: {}",
          directory_, size_, wanted - size_, words(error)),
      ErrorCode::file_full);
}

std::int64_t HostFile::allocate(std::int64_t bytes) {
  Regions& regions = regions_[bytes];
  if (!regions.free.empty()) {
    const std::int64_t offset = regions.free.back();
    regions.free.pop_back();
    return offset;
  }
  if (regions.free.capacity() <= regions.count)
    regions.free.reserve(std::max<std::size_t>(16, 2 * regions.count));
  grow(bytes);
  ++regions.count;
  end_ += bytes;
  return end_ - bytes;
}

void HostFile::release(std::int64_t offset, std::int64_t bytes) noexcept {
  regions_.find(bytes)->second.free.push_back(offset);
}

void HostFile::write(std::int64_t offset, const std::byte* from, std::int64_t bytes) {
  while (bytes > 0) {
    const ssize_t done = ::pwrite(file_, from, static_cast<std::size_t>(bytes), offset);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) {
      const int error = done < 0 ? errno : EIO;
      throw FileError(fmt::format("writing to the file of the host tier in \"{}\": {}", directory_,
                                  words(error)));
    }
    offset += done;
    from += done;
    bytes -= done;
  }
}

int HostFile::read(std::int64_t offset, std::byte* to, std::int64_t bytes) const noexcept {
  while (bytes > 0) {
    const ssize_t done = ::pread(file_, to, static_cast<std::size_t>(bytes), offset);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return errno;
    if (done == 0) return kEndsEarly;
    offset += done;
    to += done;
    bytes -= done;
  }
  return 0;
}

void HostFile::refuse(int error) const {
  throw FileError(fmt::format("reading from the file of the host tier in \"{}\": {}", directory_,
                              error == kEndsEarly ? "it has been cut" : words(error)));
}

}  // namespace verkv
