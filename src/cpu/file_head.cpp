// A KV head whose host tier is in a file: rows are written before they count, and what is not yet
// compressed is read in the local window, where it is too.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/head_store.hpp"

namespace verkv::cpu {

void HeadStore::write_ahead(const LayerShape& shape, const Kernels& kernels, const TensorView& keys,
                            const TensorView& values, std::int64_t head) {
  const std::int64_t window = window_.key.size();
  const auto in_page = [](const PagedRows& rows, std::int64_t row) {
    return kPageRows - ((rows.first() + row) & (kPageRows - 1));
  };
  for (std::int64_t t = 0; t < keys.tokens;) {
    // As many as lie side by side.
    const std::int64_t count = std::min(
        {keys.tokens - t, in_page(window_.key, window + t), in_page(window_.value, window + t)});
    std::byte* const key = window_.key.row(window + t);
    std::byte* const value = window_.value.row(window + t);
    for (std::int64_t i = 0; i < count; ++i, ++t) {
      kernels.convert(keys.row(t, head), keys.type, key + i * shape.key_bytes(), shape.storage,
                      keys.dim);
      kernels.convert(values.row(t, head), values.type, value + i * shape.value_bytes(),
                      shape.storage, values.dim);
    }
    host_.file().write(tokens() + t - count, count, key, value);
  }
}

Rows HeadStore::keys_to_compress(const LayerShape& shape) const {
  if (!host_.is_file()) return host_.keys(shape);
  const std::int64_t dim = shape.config.key_dim;
  return {nullptr,
          shape.storage,
          dim,
          static_cast<int>(dim),
          window_.key.pages(),
          window_.key.first() - compressed_,
          0};
}

Rows HeadStore::values_to_compress(const LayerShape& shape) const {
  if (!host_.is_file()) return host_.values(shape);
  const std::int64_t dim = shape.config.value_dim;
  return {nullptr,
          shape.storage,
          dim,
          static_cast<int>(dim),
          window_.value.pages(),
          window_.value.first() - compressed_,
          0};
}

void HeadStore::copy_row(std::int64_t position, std::byte* key, std::byte* value) const {
  const std::int64_t at = position - compressed_;
  if (at < 0 || at >= window_.key.size()) return host_.copy(position, key, value);
  std::memcpy(key, window_.key.row(at), static_cast<std::size_t>(window_.key.row_bytes()));
  std::memcpy(value, window_.value.row(at), static_cast<std::size_t>(window_.value.row_bytes()));
}

}  // namespace verkv::cpu
