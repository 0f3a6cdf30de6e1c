#include "cpu/host_rows.hpp"

#include <algorithm>
#include <utility>

#include <verkv/types.hpp>

namespace verkv::cpu {
namespace {

// Geometrically, by half.
void reserve_for(std::vector<const std::byte*>& table, std::int64_t tokens) {
  const std::size_t wanted = static_cast<std::size_t>(tokens);
  if (wanted > table.capacity())
    table.reserve(std::max(wanted, table.capacity() + table.capacity() / 2));
}

}  // namespace

void EngineRows::reserve(std::int64_t tokens) {
  reserve_for(key, tokens);
  reserve_for(value, tokens);
}

bool EngineRows::has_room(std::int64_t tokens) const {
  return static_cast<std::size_t>(tokens) <= std::min(key.capacity(), value.capacity());
}

void EngineRows::put(std::int64_t first, const TensorView& keys,
                     const TensorView& values) noexcept {
  const auto put_rows = [first](std::vector<const std::byte*>& table, const TensorView& view) {
    const std::size_t end = static_cast<std::size_t>(first + view.tokens);
    if (table.size() < end) table.resize(end);
    for (std::int64_t t = 0; t < view.tokens; ++t)
      table[static_cast<std::size_t>(first + t)] = static_cast<const std::byte*>(view.row(t, 0));
  };
  put_rows(key, keys);
  put_rows(value, values);
  key_head_stride = keys.head_stride;
  value_head_stride = values.head_stride;
}

HostRows::HostRows(const LayerShape& shape, std::shared_ptr<EngineRows> engine, std::int64_t head)
    : own_(kPageShift, shape.row_bytes(), shape.host_memory),
      engine_(std::move(engine)),
      head_(head),
      element_(static_cast<std::int64_t>(size_bytes(shape.storage))),
      key_bytes_(shape.key_bytes()),
      value_at_(shape.config.value_is_key_prefix ? 0 : shape.key_bytes()) {
  if (shape.file && !shape.config.window)
    file_.emplace(shape.file, shape.key_bytes(), shape.value_bytes());
}

int HostRows::read(std::int64_t position, std::byte* to_key, std::byte* to_value) const noexcept {
  if (is_file()) return file_->read(position, to_key, to_value);
  if (to_key != nullptr) std::copy_n(key(position), key_bytes_, to_key);
  if (to_value != nullptr) std::copy_n(value(position), own_.row_bytes() - key_bytes_, to_value);
  return 0;
}

void HostRows::copy(std::int64_t position, std::byte* to_key, std::byte* to_value) const {
  const int error = read(position, to_key, to_value);
  if (error != 0) file_->file().refuse(error);
}

Rows HostRows::keys(const LayerShape& shape) const {
  Rows rows;
  rows.type = shape.storage;
  rows.dim = static_cast<int>(shape.config.key_dim);
  if (is_engine()) {
    rows.list = engine_->key.data();
    rows.offset = head_ * engine_->key_head_stride;
  } else {
    rows.pages = own_.pages();
    rows.first = own_.first();
    rows.stride = shape.row_elements();
  }
  return rows;
}

Rows HostRows::values(const LayerShape& shape) const {
  Rows rows = keys(shape);
  rows.dim = static_cast<int>(shape.config.value_dim);
  if (is_engine()) {
    rows.list = engine_->value.data();
    rows.offset = head_ * engine_->value_head_stride;
  } else {
    rows.offset = shape.config.value_is_key_prefix ? 0 : shape.config.key_dim;
  }
  return rows;
}

void HostRows::reserve_more(std::int64_t count) {
  if (is_engine()) {
    engine_->reserve(size_ + count);
  } else if (is_file()) {
    file_->reserve_more(count);
  } else {
    own_.reserve_more(count);
  }
}

bool HostRows::has_room(std::int64_t count) const {
  if (is_engine()) return engine_->has_room(size_ + count);
  return is_file() ? file_->has_room(count) : own_.has_room(count);
}

void HostRows::append(const LayerShape& shape, const Kernels& kernels, const TensorView& keys,
                      const TensorView& values, std::int64_t head) noexcept {
  if (is_engine()) {
    engine_->put(size_, keys, values);
    size_ += keys.tokens;
    return;
  }
  const std::int64_t before = own_.size();
  own_.resize(before + keys.tokens);
  for (std::int64_t t = 0; t < keys.tokens; ++t) {
    std::byte* const row = own_.row(before + t);
    kernels.convert(keys.row(t, head), keys.type, row, shape.storage, keys.dim);
    if (shape.config.value_is_key_prefix) continue;
    kernels.convert(values.row(t, head), values.type, row + value_at_, shape.storage, values.dim);
  }
}

void HostRows::truncate(std::int64_t size) noexcept {
  if (is_engine()) {
    // What lies behind stays until others come: a longer store of the same layer may still be there.
    size_ = size;
  } else if (is_file()) {
    file_->resize(size);
  } else {
    own_.resize(size);
  }
}

HostRows HostRows::fork() {
  HostRows result(*this);
  result.own_ = own_.fork();
  if (is_file()) result.file_ = file_->fork();
  return result;
}

void HostRows::add_memory(MemoryReport& report, bool exclusive) const {
  if (is_file()) return file_->add_memory(report, exclusive);
  if (!is_engine()) {
    const RowBytes held = exclusive ? own_.exclusive_bytes() : own_.bytes();
    report.host_bytes += held.used;
    report.reserved_bytes += held.spare + held.tables;
    report.host_reserved_bytes += held.spare;
    return;
  }
  report.engine_bytes += size_ * own_.row_bytes();
  if (head_ > 0) return;
  const std::int64_t address = static_cast<std::int64_t>(sizeof(const std::byte*));
  report.basis_bytes += 2 * size_ * address;
  report.reserved_bytes +=
      static_cast<std::int64_t>(sizeof(EngineRows)) +
      (static_cast<std::int64_t>(engine_->key.capacity() + engine_->value.capacity()) - 2 * size_) *
          address;
}

}  // namespace verkv::cpu
