// Rows in pages that sequences can share: what a head holds grows without being copied, and a fork
// copies no more than pages that are not full.
#ifndef VERKV_SRC_CPU_PAGED_ROWS_HPP
#define VERKV_SRC_CPU_PAGED_ROWS_HPP

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "cpu/tier_memory.hpp"

namespace verkv::cpu {

// Memory for neighbouring pages, at a multiple of 64 bytes, with the number of its owners.
class PageBlock {
 public:
  PageBlock() = default;
  // Throws std::bad_alloc.
  PageBlock(std::int64_t rows, std::int64_t row_bytes, const TierMemory* memory);
  PageBlock(const PageBlock& other) noexcept : header_(other.header_) {
    if (header_ != nullptr) header_->owners.fetch_add(1, std::memory_order_relaxed);
  }
  PageBlock(PageBlock&& other) noexcept : header_(std::exchange(other.header_, nullptr)) {}
  PageBlock& operator=(PageBlock other) noexcept {
    std::swap(header_, other.header_);
    return *this;
  }
  ~PageBlock();

  std::byte* data() const { return reinterpret_cast<std::byte*>(header_) + kHeaderBytes; }
  std::int64_t rows() const { return header_->rows; }
  bool is_shared() const { return header_->owners.load(std::memory_order_acquire) > 1; }
  // Rows that its only owner said last that it uses: what totals of memory know of the block.
  std::int64_t booked_rows() const { return header_->booked_rows; }
  void book(std::int64_t rows) const { header_->booked_rows = rows; }

  static constexpr std::int64_t kHeaderBytes = 64;

 private:
  struct Header {
    std::atomic<std::int64_t> owners;
    std::int64_t rows;
    std::int64_t booked_rows;
    std::int64_t bytes;
    const TierMemory* memory;
  };
  Header* header_ = nullptr;
};

// Bytes of rows: those in use, and what is allocated beyond them: where the rows lie (for rows to come,
// of rows that have left), and of main memory for tables.
struct RowBytes {
  std::int64_t used = 0;
  std::int64_t spare = 0;
  std::int64_t tables = 0;

  RowBytes& operator+=(const RowBytes& other) {
    used += other.used;
    spare += other.spare;
    tables += other.tables;
    return *this;
  }
};

// Rows 0, 1, ..., size() - 1 of row_bytes each, in pages of 2^page_shift rows. Rows are added at the
// end and leave at the front. A row never moves once its page is full; the pages that are allocated
// together lie side by side. The first page is allocated as it is needed and so may move, all others
// as a whole.
//
// A fork shares all rows. Whoever writes next copies the page that he writes to if it is shared:
// less than a page. Not for two threads at a time, except for reading.
class PagedRows {
 public:
  // unit: the first page has room for a multiple of so many rows. growth: pages are allocated for
  // 1 / growth of the rows that are there at least; 0: for no more than is asked for. memory: of pages.
  PagedRows(int page_shift, std::int64_t row_bytes, const TierMemory* memory = nullptr,
            std::int64_t unit = 1, std::int64_t growth = 0)
      : memory_(memory),
        row_bytes_(row_bytes),
        page_shift_(page_shift),
        unit_(static_cast<std::int32_t>(unit)),
        growth_(static_cast<std::int32_t>(growth)) {}

  std::int64_t size() const { return size_; }
  std::int64_t row_bytes() const { return row_bytes_; }

  std::byte* row(std::int64_t i) { return at(front_ + i); }
  const std::byte* row(std::int64_t i) const { return at(front_ + i); }
  // The pages, and the row of the first page that is row 0.
  const std::byte* const* pages() const { return pages_.data(); }
  std::int64_t first() const { return front_; }
  // The end of the rows that lie side by side with row i, at most size().
  std::int64_t run_end(std::int64_t i) const {
    // Most have one slab, and a step that comes to a cold cache should not have to look at it.
    return slabs_.size() == 1 ? size_ : run_end_of_many(i);
  }

  // Makes rows [from, end) the caller's to write, for from <= size() <= end; after it resize to at
  // most `end` cannot fail. Throws std::bad_alloc and changes nothing that can be read.
  void reserve(std::int64_t from, std::int64_t end);
  // Of the block that reserve would allocate; 0: none.
  std::int64_t bytes_to_reserve(std::int64_t from, std::int64_t end) const;
  std::int64_t bytes_for_more(std::int64_t count) const {
    return bytes_to_reserve(size_, size_ + count);
  }
  // Whether `count` more need no reserve: there is room, and nobody else holds it.
  bool has_room(std::int64_t count) const;
  // Room for `count` more.
  void reserve_more(std::int64_t count) { reserve(size_, size_ + count); }
  // What rows that are added contain is not specified.
  void resize(std::int64_t size) noexcept;
  void drop_front(std::int64_t count) noexcept;
  // Rows [from, size()) in memory of their own, with room for `spare` more.
  PagedRows copy_from(std::int64_t from, std::int64_t spare = 0) const;
  // Whether drop_front of so many would hold on to a page or more that nothing is left in.
  bool holds_on(std::int64_t dropped) const;

  // Shares the rows. Throws std::bad_alloc.
  PagedRows fork();
  bool is_shared() const;

  // All that is held. exclusive: without what others hold too, as totals count it, which is each
  // block once: the rows in use are those that were when the block was last its only owner's.
  RowBytes bytes() const;
  RowBytes exclusive_bytes() const;

 private:
  struct Slab {
    PageBlock block;
    std::int64_t first_page = 0;  // below 0: pages that have left
  };

  std::int64_t page_rows() const { return std::int64_t{1} << page_shift_; }
  std::byte* at(std::int64_t row) const {
    return pages_[static_cast<std::size_t>(row >> page_shift_)] +
           (row & (page_rows() - 1)) * row_bytes_;
  }
  std::int64_t begin_of(std::size_t slab) const { return slabs_[slab].first_page * page_rows(); }
  // The pages from the next slab's on are those of the next, whatever this one has there.
  std::int64_t end_of(std::size_t slab) const;
  std::int64_t capacity() const { return slabs_.empty() ? 0 : end_of(slabs_.size() - 1); }
  std::int64_t run_end_of_many(std::int64_t i) const;
  // Index of the slab of a page.
  std::size_t slab_of(std::int64_t page) const;
  bool is_shared_from(std::int64_t page) const;
  // What reserve does: a block in place of the pages from first_page on, of which `kept` rows stay.
  struct NewBlock {
    std::int64_t first_page = 0;
    std::int64_t kept = 0;
    std::int64_t rows = 0;  // 0: none
  };
  NewBlock new_block(std::int64_t from, std::int64_t end) const;
  std::int64_t rows_to_allocate(std::int64_t first_page, std::int64_t end) const;
  void add(PageBlock block, std::int64_t first_page) noexcept;
  std::int64_t rows_in(std::size_t slab) const;
  void book(std::size_t slab) const noexcept;
  std::int64_t table_bytes() const;

  const TierMemory* memory_;
  std::vector<std::byte*> pages_;
  std::vector<Slab> slabs_;
  std::int64_t front_ = 0;
  std::int64_t size_ = 0;
  std::int64_t row_bytes_;
  std::int64_t allocated_ = 0;  // rows of all slabs
  std::int32_t page_shift_;
  std::int32_t unit_;
  std::int32_t growth_;
  // Slabs that others may hold too: the first so many.
  std::uint32_t forked_ = 0;
};

}  // namespace verkv::cpu

#endif  // VERKV_SRC_CPU_PAGED_ROWS_HPP
