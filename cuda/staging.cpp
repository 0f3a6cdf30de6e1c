#include "staging.hpp"

#include <algorithm>
#include <cstring>

#include "sizes.hpp"
#include "tuning.hpp"

namespace verkv::cuda {
namespace {

// Bytes at which the values of a piece start after its keys are a multiple of this: the largest
// alignment that a kernel can ask for.
constexpr std::int64_t kAlignment = 256;

}  // namespace

void pack(const TensorView& view, std::int64_t first, std::int64_t count,
          std::vector<std::byte>& out) {
  const std::size_t row = size(view.dim) * size_bytes(view.type);
  out.resize(size(count * view.heads) * row);
  std::byte* to = out.data();
  for (std::int64_t t = first; t < first + count; ++t) {
    for (std::int64_t h = 0; h < view.heads; ++h, to += row) {
      std::memcpy(to, view.row(t, h), row);
    }
  }
}

TensorView host_copy(const TensorView& view, const Stream& stream, std::vector<std::byte>& copy) {
  const std::size_t row = size(view.dim) * size_bytes(view.type);
  copy.resize(size(view.tokens * view.heads) * row);
  std::byte* to = copy.data();
  for (std::int64_t t = 0; t < view.tokens; ++t) {
    for (std::int64_t h = 0; h < view.heads; ++h, to += row)
      stream.copy_out(to, static_cast<const std::byte*>(view.row(t, h)), row);
  }
  return token_major(copy.data(), view.type, view.tokens, view.heads, view.dim);
}

ImportanceView host_copy(const ImportanceView& view, const Stream& stream,
                         std::vector<float>& copy) {
  copy.resize(size(view.heads * view.tokens));
  for (std::int64_t h = 0; h < view.heads; ++h) {
    stream.copy_out(copy.data() + h * view.tokens, view.data + h * view.head_stride,
                    size(view.tokens));
  }
  return {copy.data(), view.heads, view.tokens, view.tokens};
}

RowStaging::Piece RowStaging::piece_of(std::int64_t tokens, std::int64_t key_row,
                                       std::int64_t value_row) {
  Piece piece{};
  piece.tokens = std::clamp<std::int64_t>(kStagingBytes / (4 * (key_row + value_row)), 1, tokens);
  piece.key_bytes = round_up(4 * piece.tokens * key_row, kAlignment);
  piece.bytes = piece.key_bytes + 4 * piece.tokens * value_row;
  return piece;
}

void RowStaging::reserve(std::int64_t tokens, std::int64_t key_row, std::int64_t value_row,
                         const Stream& stream) {
  if (tokens == 0) return;
  const Piece piece = piece_of(tokens, key_row, value_row);
  if (piece.bytes <= device_.size()) return;
  DeviceBuffer<std::byte> larger(piece.bytes, "appended rows");
  packed_.reserve(size(4 * piece.tokens * std::max(key_row, value_row)));
  stream.synchronize();
  device_.swap(larger);
}

void RowStaging::each_piece(
    const TensorView& keys, const TensorView& values, const Stream& stream,
    const std::function<void(const TensorView&, const TensorView&, std::int64_t)>& f) {
  const std::int64_t key_row = keys.heads * keys.dim;
  const std::int64_t value_row = values.heads * values.dim;
  reserve(keys.tokens, key_row, value_row, stream);
  const Piece piece = piece_of(keys.tokens, key_row, value_row);
  const auto stage = [&](const TensorView& view, std::int64_t first, std::int64_t count,
                         std::byte* to) {
    pack(view, first, count, packed_);
    stream.copy_in(to, packed_.data(), packed_.size());
    return token_major(to, view.type, count, view.heads, view.dim);
  };
  for (std::int64_t first = 0; first < keys.tokens; first += piece.tokens) {
    const std::int64_t count = std::min(piece.tokens, keys.tokens - first);
    const TensorView key_piece = stage(keys, first, count, device_.data());
    const TensorView value_piece = stage(values, first, count, device_.data() + piece.key_bytes);
    f(key_piece, value_piece, first);
  }
}

}  // namespace verkv::cuda
