// Rows of a KV head in a file, by position: pages of 64 keys and then their 64 values. A fork shares
// pages; who is to write to one that is shared copies it first.
#ifndef VERKV_SRC_CPU_FILE_ROWS_HPP
#define VERKV_SRC_CPU_FILE_ROWS_HPP

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <verkv/reports.hpp>

#include "host_file.hpp"
#include "rows.hpp"

namespace verkv::cpu {

class FileRows {
 public:
  FileRows(std::shared_ptr<HostFile> file, std::int64_t key_bytes, std::int64_t value_bytes)
      : file_(std::move(file)), key_bytes_(key_bytes), value_bytes_(value_bytes) {}

  std::int64_t size() const { return size_; }
  const HostFile& file() const { return *file_; }

  // Room for `count` more. Throws as HostFile::allocate, read and write, and changes nothing that can be
  // read.
  void reserve_more(std::int64_t count);
  bool has_room(std::int64_t count) const;
  // Rows [first, first + count), behind size() or not, in pages that nobody shares: keys, and values,
  // side by side. Throws FileError.
  void write(std::int64_t first, std::int64_t count, const std::byte* keys,
             const std::byte* values);
  void resize(std::int64_t size) noexcept;

  // As HostFile::read. Either may be null.
  int read(std::int64_t position, std::byte* key, std::byte* value) const noexcept;

  // Shares the rows. Throws std::bad_alloc.
  FileRows fork() const;

  // Bytes of whole pages, those in use as host_bytes.
  void add_memory(MemoryReport& report, bool exclusive) const;

 private:
  struct Page {
    Page(std::shared_ptr<HostFile> in, std::int64_t size)
        : file(std::move(in)), bytes(size), offset(file->allocate(size)) {}
    ~Page() { file->release(offset, bytes); }
    Page(const Page&) = delete;
    Page& operator=(const Page&) = delete;

    std::shared_ptr<HostFile> file;
    std::int64_t bytes;
    std::int64_t offset;
  };

  static std::int64_t pages_of(std::int64_t rows) { return (rows + kPageRows - 1) >> kPageShift; }
  std::int64_t page_bytes() const { return kPageRows * (key_bytes_ + value_bytes_); }
  bool is_shared(std::int64_t page) const {
    return pages_[static_cast<std::size_t>(page)].use_count() > 1;
  }

  std::shared_ptr<HostFile> file_;
  std::int64_t key_bytes_;
  std::int64_t value_bytes_;
  std::int64_t size_ = 0;
  std::vector<std::shared_ptr<Page>> pages_;
};

}  // namespace verkv::cpu

#endif  // VERKV_SRC_CPU_FILE_ROWS_HPP
