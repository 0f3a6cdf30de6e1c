// The device's tables of HeadView, one per cached layer, [slot][KV head]. A sequence has one slot,
// the same in all tables.
#ifndef VERKV_CUDA_HEAD_TABLES_HPP
#define VERKV_CUDA_HEAD_TABLES_HPP

#include <cstddef>
#include <cstdint>
#include <vector>

#include "device_memory.hpp"
#include "layer.hpp"
#include "stream.hpp"

namespace verkv::cuda {

class HeadTables {
 public:
  // layers: must outlive this object, and stay as they are.
  explicit HeadTables(const std::vector<Layer>& layers) : layers_(layers), tables_(layers.size()) {}

  // A slot that is free, with its room in all tables; free until it is taken. Waits for the stream
  // if the tables grow. Throws DeviceError and changes nothing if memory is short.
  std::int64_t find_free(const Stream& stream);
  void take(std::int64_t slot) noexcept;
  void give_back(std::int64_t slot) noexcept;

  // The whole table of a layer, and a slot's entries in it.
  HeadView* table(std::size_t layer) const { return tables_[layer].data(); }
  HeadView* entries(std::size_t layer, std::int64_t slot) const {
    return table(layer) + slot * layers_[layer].config.kv_heads;
  }

  // How often tables have been replaced.
  std::uint64_t generation() const { return generation_; }
  std::int64_t bytes() const;

 private:
  void reserve(std::int64_t slots, const Stream& stream);

  const std::vector<Layer>& layers_;
  std::vector<DeviceBuffer<HeadView>> tables_;
  std::vector<std::int64_t> free_;
  std::int64_t used_ = 0;  // slots [0, used_) are taken or in free_
  std::int64_t capacity_ = 0;
  std::uint64_t generation_ = 0;
};

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_HEAD_TABLES_HPP
