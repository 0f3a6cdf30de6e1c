#include "head_tables.hpp"

#include <algorithm>

#include "sizes.hpp"

namespace verkv::cuda {

std::int64_t HeadTables::find_free(const Stream& stream) {
  // Room for every slot that there will be, so that give_back cannot fail.
  free_.reserve(size(used_) + 1);
  if (!free_.empty()) return free_.back();
  reserve(used_ + 1, stream);
  return used_;
}

void HeadTables::take(std::int64_t slot) noexcept {
  if (slot == used_) {
    ++used_;
  } else {
    free_.pop_back();
  }
}

void HeadTables::give_back(std::int64_t slot) noexcept { free_.push_back(slot); }

void HeadTables::reserve(std::int64_t slots, const Stream& stream) {
  if (slots <= capacity_) return;
  const std::int64_t capacity = std::max<std::int64_t>({4, slots, 2 * capacity_});
  std::vector<DeviceBuffer<HeadView>> tables(tables_.size());
  for (std::size_t i = 0; i < tables.size(); ++i) {
    if (!layers_[i].config.cached) continue;
    tables[i] = DeviceBuffer<HeadView>(capacity * layers_[i].config.kv_heads, "the table of heads");
    const DeviceBuffer<HeadView>& old = tables_[i];
    if (old.size() == 0) continue;
    VERKV_CUDA_CHECK(cudaMemcpyAsync(tables[i].data(), old.data(), size(old.bytes()),
                                     cudaMemcpyDeviceToDevice, stream));
  }
  stream.synchronize();
  tables_.swap(tables);
  capacity_ = capacity;
  ++generation_;
}

std::int64_t HeadTables::bytes() const {
  std::int64_t sum = 0;
  for (const DeviceBuffer<HeadView>& table : tables_) sum += table.bytes();
  return sum;
}

}  // namespace verkv::cuda
