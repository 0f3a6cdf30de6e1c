// The host tier of a KV head: every row, by position. Of the cache's own, in memory or in a file, or
// where the engine has them.
#ifndef VERKV_SRC_CPU_HOST_ROWS_HPP
#define VERKV_SRC_CPU_HOST_ROWS_HPP

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <verkv/reports.hpp>
#include <verkv/view.hpp>

#include "cpu/file_rows.hpp"
#include "cpu/kernels.hpp"
#include "cpu/layer_shape.hpp"
#include "cpu/paged_rows.hpp"
#include "rows.hpp"
#include "tier_bytes.hpp"

namespace verkv::cpu {

// Where the engine has the rows of a layer of a sequence: addresses of KV head 0, by position, and how
// far apart KV heads lie, in elements. One for all KV heads, each of which writes the same to it.
struct EngineRows {
  std::vector<const std::byte*> key;
  std::vector<const std::byte*> value;
  std::int64_t key_head_stride = 0;
  std::int64_t value_head_stride = 0;

  void reserve(std::int64_t tokens);
  bool has_room(std::int64_t tokens) const;
  // From position `first` on. There is room.
  void put(std::int64_t first, const TensorView& keys, const TensorView& values) noexcept;
};

class HostRows {
 public:
  // engine: none where the rows are copied; then `head`, of the layer, is not used.
  HostRows(const LayerShape& shape, std::shared_ptr<EngineRows> engine, std::int64_t head);

  bool is_engine() const { return engine_ != nullptr; }
  bool is_file() const { return file_.has_value(); }
  std::int64_t size() const {
    return is_engine() ? size_ : is_file() ? file_->size() : own_.size();
  }
  // Not of a file; nor are the next three.
  Rows keys(const LayerShape& shape) const;
  Rows values(const LayerShape& shape) const;
  const std::byte* key(std::int64_t position) const {
    return is_engine() ? engine_->key[static_cast<std::size_t>(position)] + key_offset()
                       : own_.row(position);
  }
  const std::byte* value(std::int64_t position) const {
    return is_engine() ? engine_->value[static_cast<std::size_t>(position)] + value_offset()
                       : own_.row(position) + value_at_;
  }

  // Copies of a row, wherever it lies. Either may be null. read: as HostFile::read; copy throws FileError.
  int read(std::int64_t position, std::byte* key, std::byte* value) const noexcept;
  void copy(std::int64_t position, std::byte* key, std::byte* value) const;
  // Calls f(rows, list, first, count) with rows that kernels read, for parts [first, first + count) of
  // what `index` lists: rows list[0], ..., or 0, 1, ... where `list` is null. In a file they are
  // read into `buffer` first, in parts of kBlockRows. value: of values. Returns as HostFile::read.
  template <class F>
  int each_part(const LayerShape& shape, bool value, const std::uint32_t* index, std::int64_t count,
                std::byte* buffer, F&& f) const;

  // Room for `count` more; afterwards append of them cannot fail. In a file: throws what it does.
  void reserve_more(std::int64_t count);
  // What it would add to the host tier.
  std::int64_t bytes_for_more(std::int64_t count) const {
    if (is_file()) return file_rows_added(size(), count) * own_.row_bytes();
    return is_engine() ? 0 : own_.bytes_for_more(count);
  }
  bool has_room(std::int64_t count) const;
  // Tokens of KV head `head` of the views; not of a file, whose rows are written before they count.
  void append(const LayerShape& shape, const Kernels& kernels, const TensorView& keys,
              const TensorView& values, std::int64_t head) noexcept;
  // Of the engine: the rows from `first` on lie elsewhere now.
  void move(std::int64_t first, const TensorView& keys, const TensorView& values) noexcept {
    engine_->put(first, keys, values);
  }
  void truncate(std::int64_t size) noexcept;

  // Shares rows, and addresses too: before one of the two changes, `use` gives it others.
  HostRows fork();
  const EngineRows& engine() const { return *engine_; }
  void use(std::shared_ptr<EngineRows> engine) noexcept { engine_ = std::move(engine); }
  // Key and value side by side; of the cache's own.
  PagedRows& own() { return own_; }
  const PagedRows& own() const { return own_; }
  FileRows& file() { return *file_; }

  void add_memory(MemoryReport& report, bool exclusive) const;

 private:
  std::int64_t key_offset() const { return head_ * engine_->key_head_stride * element_; }
  std::int64_t value_offset() const { return head_ * engine_->value_head_stride * element_; }

  PagedRows own_;
  std::shared_ptr<EngineRows> engine_;
  std::optional<FileRows> file_;
  std::int64_t size_ = 0;  // of the engine's
  std::int64_t head_;
  std::int64_t element_;
  std::int64_t key_bytes_;
  std::int64_t value_at_;  // byte of a row of its own
};

template <class F>
int HostRows::each_part(const LayerShape& shape, bool value, const std::uint32_t* index,
                        std::int64_t count, std::byte* buffer, F&& f) const {
  if (!is_file()) {
    f(value ? values(shape) : keys(shape), index, std::int64_t{0}, count);
    return 0;
  }
  const std::int64_t dim = value ? shape.config.value_dim : shape.config.key_dim;
  const std::int64_t bytes = value ? shape.value_bytes() : shape.key_bytes();
  const Rows rows{buffer, shape.storage, dim, static_cast<int>(dim)};
  for (std::int64_t first = 0; first < count; first += kBlockRows) {
    const std::int64_t part = std::min(kBlockRows, count - first);
    for (std::int64_t i = 0; i < part; ++i) {
      std::byte* const to = buffer + i * bytes;
      const int error =
          read(std::int64_t{index[first + i]}, value ? nullptr : to, value ? to : nullptr);
      if (error != 0) return error;
    }
    f(rows, static_cast<const std::uint32_t*>(nullptr), first, part);
  }
  return 0;
}

}  // namespace verkv::cpu

#endif  // VERKV_SRC_CPU_HOST_ROWS_HPP
