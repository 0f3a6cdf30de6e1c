// The host tier of a KV head: every row, by position. Of the cache's own, or where the engine has them.
#ifndef VERKV_SRC_CPU_HOST_ROWS_HPP
#define VERKV_SRC_CPU_HOST_ROWS_HPP

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <verkv/reports.hpp>
#include <verkv/view.hpp>

#include "cpu/kernels.hpp"
#include "cpu/layer_shape.hpp"
#include "cpu/paged_rows.hpp"
#include "rows.hpp"

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
  std::int64_t size() const { return is_engine() ? size_ : own_.size(); }
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

  // Room for `count` more; afterwards append of them cannot fail.
  void reserve_more(std::int64_t count);
  bool has_room(std::int64_t count) const;
  // Tokens of KV head `head` of the views.
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

  void add_memory(MemoryReport& report, bool exclusive) const;

 private:
  std::int64_t key_offset() const { return head_ * engine_->key_head_stride * element_; }
  std::int64_t value_offset() const { return head_ * engine_->value_head_stride * element_; }

  PagedRows own_;
  std::shared_ptr<EngineRows> engine_;
  std::int64_t size_ = 0;  // of the engine's
  std::int64_t head_;
  std::int64_t element_;
  std::int64_t value_at_;  // byte of a row of its own
};

}  // namespace verkv::cpu

#endif  // VERKV_SRC_CPU_HOST_ROWS_HPP
