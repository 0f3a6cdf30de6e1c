#include "late_queries.hpp"

#include <algorithm>

namespace verkv_ggml {

void LateQueries::add(std::int64_t stream, std::uint32_t cell, std::uint64_t time,
                      const verkv::TensorView& queries, std::int64_t row) {
  heads_ = queries.heads;
  dim_ = queries.dim;
  const std::size_t s = static_cast<std::size_t>(stream);
  if (s >= rings_.size()) rings_.resize(s + 1);
  Ring& ring = rings_[s];
  std::int64_t place = static_cast<std::int64_t>(ring.tokens.size());
  if (place < kMost) {
    ring.tokens.emplace_back();
    ring.numbers.resize(static_cast<std::size_t>((place + 1) * heads_ * dim_));
  } else {
    place = ring.next;
    ring.next = (ring.next + 1) % kMost;
  }
  ring.tokens[static_cast<std::size_t>(place)] = {cell, time};
  verkv::Half* out = ring.numbers.data() + place * heads_ * dim_;
  constexpr float kLargest = 65504;  // of f16
  for (std::int64_t h = 0; h < heads_; ++h) {
    const float* query = static_cast<const float*>(queries.row(row, h));
    for (std::int64_t j = 0; j < dim_; ++j)
      *out++ = verkv::to_half(std::clamp(query[j], -kLargest, kLargest));
  }
}

void LateQueries::forget(std::int64_t stream) {
  if (stream < static_cast<std::int64_t>(rings_.size()))
    rings_[static_cast<std::size_t>(stream)] = {};
}

}  // namespace verkv_ggml
