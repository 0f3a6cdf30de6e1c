// Queries of prompts as they pass: the last ones of each stream. They say which tokens matter and
// what the sketch of a prompt is made for.
#ifndef VERKV_SRC_GGML_LATE_QUERIES_HPP
#define VERKV_SRC_GGML_LATE_QUERIES_HPP

#include <cstdint>
#include <vector>

#include <verkv/types.hpp>
#include <verkv/view.hpp>

namespace verkv_ggml {

// Of one layer.
class LateQueries {
 public:
  // Of a stream.
  static constexpr std::int64_t kMost = 64;

  // A query of the token in `cell`, written at `time`: [query head][key_dim], row `row` of a view.
  void add(std::int64_t stream, std::uint32_t cell, std::uint64_t time,
           const verkv::TensorView& queries, std::int64_t row);
  void forget(std::int64_t stream);

  // Queries in the order of their tokens.
  struct Found {
    std::vector<verkv::Half> numbers;  // [query][query head][key_dim]
    std::vector<std::uint64_t> times;
    verkv::TensorView view;
  };
  // Those of a stream whose token is accepted: accept(cell, time).
  template <class Accept>
  Found find(std::int64_t stream, Accept&& accept) const {
    Found found;
    if (stream >= static_cast<std::int64_t>(rings_.size())) return found;
    const Ring& ring = rings_[static_cast<std::size_t>(stream)];
    const std::int64_t count = static_cast<std::int64_t>(ring.tokens.size());
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t place = (ring.next + i) % count;
      const Token& token = ring.tokens[static_cast<std::size_t>(place)];
      if (!accept(token.cell, token.time)) continue;
      const auto first = ring.numbers.begin() + place * heads_ * dim_;
      found.numbers.insert(found.numbers.end(), first, first + heads_ * dim_);
      found.times.push_back(token.time);
    }
    found.view = verkv::token_major(found.numbers.data(), verkv::DType::f16,
                                    static_cast<std::int64_t>(found.times.size()), heads_, dim_);
    return found;
  }

 private:
  struct Token {
    std::uint32_t cell = 0;
    std::uint64_t time = 0;
  };
  // The oldest is at `next`, where the next one goes once there are kMost.
  struct Ring {
    std::vector<Token> tokens;
    std::vector<verkv::Half> numbers;
    std::int64_t next = 0;
  };

  std::int64_t heads_ = 0;
  std::int64_t dim_ = 0;
  std::vector<Ring> rings_;
};

}  // namespace verkv_ggml

#endif  // VERKV_SRC_GGML_LATE_QUERIES_HPP
