#include "cpu/paged_rows.hpp"

#include <algorithm>
#include <cstring>
#include <new>

namespace verkv::cpu {
namespace {

constexpr std::int64_t in_units(std::int64_t n, std::int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

// Room for one more beyond `size`, geometrically.
template <class Vector>
void reserve_table(Vector& table, std::size_t size) {
  if (table.capacity() < size) table.reserve(std::max(size, table.capacity() * 3 / 2));
}

}  // namespace

PageBlock::PageBlock(std::int64_t rows, std::int64_t row_bytes, const TierMemory* memory) {
  static_assert(sizeof(Header) <= kHeaderBytes);
  const std::int64_t bytes = kHeaderBytes + rows * row_bytes;
  header_ = ::new (TierMemory::allocate(memory, static_cast<std::size_t>(bytes)))
      Header{1, rows, 0, bytes, memory};
}

PageBlock::~PageBlock() {
  if (header_ == nullptr || header_->owners.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  const std::size_t bytes = static_cast<std::size_t>(header_->bytes);
  const TierMemory* const memory = header_->memory;
  header_->~Header();
  TierMemory::release(memory, header_, bytes);
}

std::size_t PagedRows::slab_of(std::int64_t page) const {
  const auto after =
      std::upper_bound(slabs_.begin(), slabs_.end(), page,
                       [](std::int64_t p, const Slab& slab) { return p < slab.first_page; });
  return static_cast<std::size_t>(after - slabs_.begin()) - 1;
}

std::int64_t PagedRows::end_of(std::size_t slab) const {
  const std::int64_t next = slab + 1 < slabs_.size() ? slabs_[slab + 1].first_page
                                                     : static_cast<std::int64_t>(pages_.size());
  return std::min(begin_of(slab) + slabs_[slab].block.rows(), next * page_rows());
}

std::int64_t PagedRows::run_end_of_many(std::int64_t i) const {
  return std::min(size_, end_of(slab_of((front_ + i) >> page_shift_)) - front_);
}

bool PagedRows::is_shared_from(std::int64_t page) const {
  for (std::size_t i = slab_of(page); i < std::min<std::size_t>(slabs_.size(), forked_); ++i) {
    if (slabs_[i].block.is_shared()) return true;
  }
  return false;
}

bool PagedRows::is_shared() const { return !slabs_.empty() && is_shared_from(0); }

// Whole pages, but for the first one.
std::int64_t PagedRows::rows_to_allocate(std::int64_t first_page, std::int64_t end) const {
  const std::int64_t needed = end - first_page * page_rows();
  if (first_page == 0 && needed < page_rows())
    return std::min(page_rows(), in_units(std::max(needed, 2 * capacity()), unit_));
  const std::int64_t more = growth_ > 0 ? (front_ + size_) / growth_ : 0;
  return in_units(std::max(needed, more), page_rows());
}

bool PagedRows::has_room(std::int64_t count) const {
  const std::int64_t end = front_ + size_;
  if (count == 0) return true;
  return end + count <= capacity() && !is_shared_from(end >> page_shift_);
}

PagedRows::NewBlock PagedRows::new_block(std::int64_t from, std::int64_t end) const {
  if (end <= from) return {};
  const std::int64_t used = front_ + from;
  const std::int64_t page = used >> page_shift_;
  const bool is_there = page < static_cast<std::int64_t>(pages_.size());
  const std::int64_t room = capacity();
  const bool moves =
      is_there && (is_shared_from(page) || (front_ + end > room && room % page_rows() != 0));
  if (!moves && front_ + end <= room) return {};
  NewBlock result;
  result.first_page = moves ? page : static_cast<std::int64_t>(pages_.size());
  // Rows that stay, of the page that moves and of what has been reserved or written behind it.
  result.kept = moves ? front_ + size_ - result.first_page * page_rows() : 0;
  result.rows = rows_to_allocate(result.first_page, front_ + std::max(end, size_));
  return result;
}

std::int64_t PagedRows::bytes_to_reserve(std::int64_t from, std::int64_t end) const {
  const std::int64_t rows = new_block(from, end).rows;
  return rows > 0 ? PageBlock::kHeaderBytes + rows * row_bytes_ : 0;
}

void PagedRows::reserve(std::int64_t from, std::int64_t end) {
  const auto [first_page, kept, rows] = new_block(from, end);
  if (rows == 0) return;
  PageBlock block(rows, row_bytes_, memory_);
  reserve_table(pages_,
                static_cast<std::size_t>(first_page + in_units(rows, page_rows()) / page_rows()));
  reserve_table(slabs_, slabs_.size() + 1);
  for (std::int64_t row = 0; row < kept;) {
    const std::int64_t here = std::min(kept, row + page_rows());
    std::memcpy(block.data() + row * row_bytes_, at(first_page * page_rows() + row),
                static_cast<std::size_t>((here - row) * row_bytes_));
    row = here;
  }
  add(std::move(block), first_page);
}

// In place of the pages from first_page on. There is room in the tables.
void PagedRows::add(PageBlock block, std::int64_t first_page) noexcept {
  pages_.resize(static_cast<std::size_t>(first_page));
  while (!slabs_.empty() && slabs_.back().first_page >= first_page) {
    allocated_ -= slabs_.back().block.rows();
    slabs_.pop_back();
  }
  forked_ = std::min(forked_, static_cast<std::uint32_t>(slabs_.size()));
  for (std::int64_t row = 0; row < block.rows(); row += page_rows())
    pages_.push_back(block.data() + row * row_bytes_);
  allocated_ += block.rows();
  slabs_.push_back({std::move(block), first_page});
  book(slabs_.size() - 1);
  if (slabs_.size() > 1) book(slabs_.size() - 2);
}

void PagedRows::resize(std::int64_t size) noexcept {
  const std::int64_t before = std::min(size, size_);
  size_ = size;
  if (slabs_.empty()) return;
  // The slabs whose rows are more or fewer now.
  for (std::size_t i = slabs_.size(); i-- > 0 && end_of(i) > front_ + before;) book(i);
}

void PagedRows::drop_front(std::int64_t count) noexcept {
  front_ += count;
  size_ -= count;
  if (size_ == 0) {
    pages_.clear();
    slabs_.clear();
    front_ = allocated_ = forked_ = 0;
    return;
  }
  const std::int64_t pages =
      std::min(front_ >> page_shift_, static_cast<std::int64_t>(pages_.size()));
  front_ -= pages * page_rows();
  pages_.erase(pages_.begin(), pages_.begin() + pages);
  std::size_t gone = 0;
  for (Slab& slab : slabs_) slab.first_page -= pages;
  while (gone < slabs_.size() && end_of(gone) <= 0) allocated_ -= slabs_[gone++].block.rows();
  slabs_.erase(slabs_.begin(), slabs_.begin() + static_cast<std::ptrdiff_t>(gone));
  forked_ -= std::min(forked_, static_cast<std::uint32_t>(gone));
  book(0);
}

bool PagedRows::holds_on(std::int64_t dropped) const {
  if (slabs_.empty() || dropped >= size_) return false;
  const std::int64_t first = front_ + dropped;
  return first - begin_of(slab_of(first >> page_shift_)) >= page_rows();
}

PagedRows PagedRows::copy_from(std::int64_t from, std::int64_t spare) const {
  PagedRows result(page_shift_, row_bytes_, memory_, unit_, growth_);
  result.reserve(0, size_ - from + spare);
  result.resize(size_ - from);
  for (std::int64_t i = from; i < size_; ++i)
    std::memcpy(result.row(i - from), row(i), static_cast<std::size_t>(row_bytes_));
  return result;
}

PagedRows PagedRows::fork() {
  PagedRows result(*this);
  // Whole pages beyond the rows are the parent's: a fork would only hold on to them.
  const std::int64_t used = in_units(front_ + size_, page_rows()) >> page_shift_;
  if (used < static_cast<std::int64_t>(result.pages_.size()))
    result.pages_.resize(static_cast<std::size_t>(used));
  while (!result.slabs_.empty() && result.slabs_.back().first_page >= used) {
    result.allocated_ -= result.slabs_.back().block.rows();
    result.slabs_.pop_back();
  }
  result.forked_ = static_cast<std::uint32_t>(result.slabs_.size());
  forked_ = std::max(forked_, result.forked_);
  return result;
}

std::int64_t PagedRows::rows_in(std::size_t slab) const {
  return std::max<std::int64_t>(
      0, std::min(front_ + size_, end_of(slab)) - std::max(front_, begin_of(slab)));
}

void PagedRows::book(std::size_t slab) const noexcept {
  if (!slabs_[slab].block.is_shared()) slabs_[slab].block.book(rows_in(slab));
}

std::int64_t PagedRows::table_bytes() const {
  return static_cast<std::int64_t>(pages_.capacity() * sizeof(pages_[0]) +
                                   slabs_.capacity() * sizeof(slabs_[0]));
}

RowBytes PagedRows::bytes() const {
  const std::int64_t headers = static_cast<std::int64_t>(slabs_.size()) * PageBlock::kHeaderBytes;
  return {size_ * row_bytes_, (allocated_ - size_) * row_bytes_ + headers, table_bytes()};
}

RowBytes PagedRows::exclusive_bytes() const {
  RowBytes sum = bytes();
  for (std::size_t i = 0; i < forked_; ++i) {
    const PageBlock& block = slabs_[i].block;
    const std::int64_t rows = rows_in(i);
    if (block.is_shared()) {
      sum.used -= rows * row_bytes_;
      sum.spare -= (block.rows() - rows) * row_bytes_ + PageBlock::kHeaderBytes;
    } else {
      const std::int64_t off = block.booked_rows() - rows;
      sum.used += off * row_bytes_;
      sum.spare -= off * row_bytes_;
    }
  }
  return sum;
}

}  // namespace verkv::cpu
