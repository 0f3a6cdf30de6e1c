// A KV head of a layer with a sliding window: its last tokens, all of them on the fast tier.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "cpu/head_store.hpp"
#include "saved_bytes.hpp"

namespace verkv::cpu {
namespace {

// Rows that are made room for at a time, so that a file which lies about its length is refused where
// it ends.
constexpr std::int64_t kRestoredAtOnce = 4096;

bool is_finite(const PagedRows& rows, std::int64_t row, DType type) {
  return with_element(type, [&](auto zero) {
    using Element = decltype(zero);
    const auto* element = reinterpret_cast<const Element*>(rows.row(row));
    return std::all_of(element, element + rows.row_bytes() / static_cast<std::int64_t>(sizeof zero),
                       [](Element x) { return std::isfinite(to_float(x)); });
  });
}

}  // namespace

// A ring whose pages of the prompt are held on to has not left anything.
std::optional<Window> HeadStore::reserve_leave(const LayerShape& shape, std::int64_t count) const {
  if (!window_.key.holds_on(count)) return std::nullopt;
  Window rest(shape);
  rest.key = window_.key.copy_from(count, spare());
  rest.value = window_.value.copy_from(count, spare());
  return rest;
}

std::int64_t HeadStore::bytes_to_leave(const LayerShape& shape, std::int64_t count,
                                       std::int64_t spare) const {
  if (count <= 0 || !window_.key.holds_on(count)) return 0;
  const Window rest(shape);
  const std::int64_t left = window_.key.size() - count + spare;
  return rest.key.bytes_for_more(left) + rest.value.bytes_for_more(left);
}

void HeadStore::leave(std::int64_t count, std::optional<Window>&& rest) noexcept {
  if (rest) {
    window_ = std::move(*rest);
  } else {
    window_.key.drop_front(count);
    window_.value.drop_front(count);
  }
  left_ += count;
}

void HeadStore::append_sliding(const LayerShape& shape, const Kernels& kernels,
                               const TensorView& keys, const TensorView& values,
                               std::int64_t head) noexcept {
  const std::int64_t before = window_.key.size();
  window_.key.resize(before + keys.tokens);
  window_.value.resize(before + keys.tokens);
  for (std::int64_t t = 0; t < keys.tokens; ++t) {
    kernels.convert(keys.row(t, head), keys.type, window_.key.row(before + t), shape.storage,
                    keys.dim);
    if (shape.config.value_is_key_prefix) continue;
    kernels.convert(values.row(t, head), values.type, window_.value.row(before + t), shape.storage,
                    values.dim);
  }
}

void HeadStore::truncate_sliding(std::int64_t tokens) noexcept {
  left_ = std::min(left_, tokens);
  window_.key.resize(tokens - left_);
  window_.value.resize(tokens - left_);
}

void HeadStore::save_sliding(SavedWriter& writer) const {
  writer.put(left_);
  writer.end();
  for (std::int64_t i = 0; i < window_.key.size(); ++i) {
    writer.put_bytes({window_.key.row(i), static_cast<std::size_t>(window_.key.row_bytes())});
    writer.put_bytes({window_.value.row(i), static_cast<std::size_t>(window_.value.row_bytes())});
  }
  writer.end();
}

void HeadStore::restore_sliding(const LayerShape& shape, SavedReader& reader, std::int64_t tokens) {
  left_ = reader.get<std::int64_t>();
  reader.end();
  if (left_ < 0 || left_ > tokens || (left_ > 0 && tokens - left_ < sliding_))
    reader.refuse("tokens that have left a sliding window which needs them");
  const std::int64_t held = tokens - left_;
  for (std::int64_t i = 0; i < held; ++i) {
    if (i % kRestoredAtOnce == 0) {
      const std::int64_t end = std::min(held, i + kRestoredAtOnce);
      window_.key.reserve(i, end);
      window_.value.reserve(i, end);
    }
    window_.key.resize(i + 1);
    window_.value.resize(i + 1);
    reader.get_bytes({window_.key.row(i), static_cast<std::size_t>(window_.key.row_bytes())});
    reader.get_bytes({window_.value.row(i), static_cast<std::size_t>(window_.value.row_bytes())});
  }
  reader.end();
  for (std::int64_t i = 0; i < held; ++i) {
    if (!is_finite(window_.key, i, shape.storage) || !is_finite(window_.value, i, shape.storage))
      reader.refuse("a number that is not finite");
  }
  room_ = tokens;
}

}  // namespace verkv::cpu
