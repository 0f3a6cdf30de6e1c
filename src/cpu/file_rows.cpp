#include "cpu/file_rows.hpp"

#include <algorithm>
#include <utility>

namespace verkv::cpu {

void FileRows::reserve_more(std::int64_t count) {
  if (count == 0 || has_room(count)) return;
  // The page that the next row goes to, if a fork has it too.
  const std::int64_t last = size_ >> kPageShift;
  const bool copies = (size_ & (kPageRows - 1)) != 0 && is_shared(last);
  std::vector<std::shared_ptr<Page>> made;
  const std::int64_t kept = copies ? last : static_cast<std::int64_t>(pages_.size());
  const std::int64_t pages =
      std::max(pages_of(size_ + count), static_cast<std::int64_t>(pages_.size()));
  for (std::int64_t page = kept; page < pages; ++page)
    made.push_back(std::make_shared<Page>(file_, page_bytes()));
  if (copies) {
    std::vector<std::byte> rows(static_cast<std::size_t>(page_bytes()));
    const int error =
        file_->read(pages_[static_cast<std::size_t>(last)]->offset, rows.data(), page_bytes());
    if (error != 0) file_->refuse(error);
    file_->write(made.front()->offset, rows.data(), page_bytes());
  }
  if (pages_.capacity() < static_cast<std::size_t>(pages))
    pages_.reserve(std::max(static_cast<std::size_t>(pages), pages_.capacity() * 3 / 2));
  pages_.resize(static_cast<std::size_t>(kept));
  pages_.insert(pages_.end(), made.begin(), made.end());
}

bool FileRows::has_room(std::int64_t count) const {
  if (count == 0) return true;
  if (pages_of(size_ + count) > static_cast<std::int64_t>(pages_.size())) return false;
  // Of the pages behind it none is shared: resize.
  return !is_shared(size_ >> kPageShift);
}

void FileRows::write(std::int64_t first, std::int64_t count, const std::byte* keys,
                     const std::byte* values) {
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t at = first + done;
    const std::int64_t in_page = at & (kPageRows - 1);
    const std::int64_t rows = std::min(count - done, kPageRows - in_page);
    const std::int64_t page = pages_[static_cast<std::size_t>(at >> kPageShift)]->offset;
    file_->write(page + in_page * key_bytes_, keys + done * key_bytes_, rows * key_bytes_);
    file_->write(page + kPageRows * key_bytes_ + in_page * value_bytes_,
                 values + done * value_bytes_, rows * value_bytes_);
    done += rows;
  }
}

void FileRows::resize(std::int64_t size) noexcept {
  size_ = size;
  // A page behind the rows that a fork has is no room.
  const std::size_t used = static_cast<std::size_t>(pages_of(size));
  const bool shared = std::any_of(pages_.begin() + static_cast<std::ptrdiff_t>(used), pages_.end(),
                                  [](const auto& page) { return page.use_count() > 1; });
  if (shared) pages_.resize(used);
}

int FileRows::read(std::int64_t position, std::byte* key, std::byte* value) const noexcept {
  const std::int64_t page = pages_[static_cast<std::size_t>(position >> kPageShift)]->offset;
  const std::int64_t in_page = position & (kPageRows - 1);
  int error = 0;
  if (key != nullptr) error = file_->read(page + in_page * key_bytes_, key, key_bytes_);
  if (error == 0 && value != nullptr) {
    error =
        file_->read(page + kPageRows * key_bytes_ + in_page * value_bytes_, value, value_bytes_);
  }
  return error;
}

FileRows FileRows::fork() const {
  FileRows result(file_, key_bytes_, value_bytes_);
  result.size_ = size_;
  result.pages_.assign(pages_.begin(), pages_.begin() + pages_of(size_));
  return result;
}

void FileRows::add_memory(MemoryReport& report, bool exclusive) const {
  report.reserved_bytes += static_cast<std::int64_t>(pages_.capacity() * sizeof(pages_[0]));
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(pages_.size()); ++i) {
    if (exclusive && is_shared(i)) continue;
    if (i < pages_of(size_)) {
      report.host_bytes += page_bytes();
    } else {
      report.reserved_bytes += page_bytes();
      report.host_reserved_bytes += page_bytes();
    }
    report.file_bytes += page_bytes();
    report.reserved_bytes += static_cast<std::int64_t>(sizeof(Page));
  }
}

}  // namespace verkv::cpu
