// Importance of the tokens of one head's local window, from the queries that have attended to them.
// What a query gives stays apart, by the position of the query's token, until the window next
// grows: attending again replaces it, and going back drops it.
#ifndef VERKV_SRC_CPU_WINDOW_SCORES_HPP
#define VERKV_SRC_CPU_WINDOW_SCORES_HPP

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cpu/tier_memory.hpp"
#include "saved_bytes.hpp"
#include "window_score.hpp"

namespace verkv::cpu {

// Tokens are numbered from the start of the window.
class WindowScores {
 public:
  explicit WindowScores(const TierMemory* fast = nullptr)
      : square_(fast), steps_(fast), given_(fast) {}

  std::int64_t tokens() const { return static_cast<std::int64_t>(square_.size()); }

  // Room for `count` more tokens; afterwards append of them cannot fail. scores: whether queries of
  // these tokens are to score.
  void reserve(std::int64_t count, bool scores);
  // Bytes that reserve would allocate.
  std::int64_t bytes_to_reserve(std::int64_t count, bool scores) const;
  // Whether `count` more need no reserve.
  bool has_room(std::int64_t count, bool scores) const;
  // Takes in what queries have given so far, and adds tokens without a score. scores: as above; of
  // the new tokens the last kMostScoredTokens do.
  void append(std::int64_t count, bool scores) noexcept;
  // The newest tokens go, with what their queries gave since the last append.
  void truncate(std::int64_t tokens) noexcept;
  // The oldest tokens go, after what queries have given has been taken in. spare: tokens whose room
  // stays.
  void drop_front(std::int64_t count, std::int64_t spare) noexcept;
  void settle() noexcept;

  // Where the query of the last of the first `window` tokens puts the squares of its probabilities
  // for these tokens, in place of what it gave before; null if it does not score. Then has_given:
  // whether it gave anything.
  float* given_by(std::int64_t window) noexcept;
  void has_given(std::int64_t window, bool given) noexcept;

  // Root mean square probability of a token, of what has been taken in; 0 if it was never attended.
  float score(std::int64_t token) const noexcept;
  // What score is once settle has been called.
  float settled_score(std::int64_t token) const noexcept;

  // All of it; restore takes the place of scores of no tokens. `tokens`: of the saved window.
  void save(SavedWriter& writer) const;
  void restore(SavedReader& reader, std::int64_t tokens);

  std::int64_t bytes() const;
  std::int64_t spare_bytes() const;

 private:
  std::int64_t rows() const { return tokens() - first_; }

  AlignedVector<float> square_;
  AlignedVector<std::uint32_t> steps_;
  // Tokens [first_, tokens()) score; row r is of token first_ + r.
  std::int64_t first_ = 0;
  std::int64_t stride_ = 0;
  AlignedVector<float> given_;
  // Bytes, since rows of one burst may be written by several threads.
  std::array<std::uint8_t, kMostScoredTokens> has_given_{};
};

}  // namespace verkv::cpu

#endif  // VERKV_SRC_CPU_WINDOW_SCORES_HPP
