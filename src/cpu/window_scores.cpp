#include "cpu/window_scores.hpp"

#include <algorithm>
#include <cmath>

#include "cpu/room.hpp"

namespace verkv::cpu {

void WindowScores::reserve(std::int64_t count, bool scores) {
  const std::size_t n = static_cast<std::size_t>(count);
  reserve_more(square_, n);
  reserve_more(steps_, n);
  if (!scores) return;
  const std::size_t wanted = static_cast<std::size_t>(given_numbers(count, tokens() + count));
  if (wanted > given_.size()) reserve_more(given_, wanted - given_.size());
}

std::int64_t WindowScores::bytes_to_reserve(std::int64_t count, bool scores) const {
  const std::size_t n = static_cast<std::size_t>(count);
  const std::int64_t bytes = bytes_for_more(square_, n) + bytes_for_more(steps_, n);
  const std::size_t wanted =
      scores ? static_cast<std::size_t>(given_numbers(count, tokens() + count)) : 0;
  return wanted > given_.size() ? bytes + bytes_for_more(given_, wanted - given_.size()) : bytes;
}

bool WindowScores::has_room(std::int64_t count, bool scores) const {
  const std::size_t all = static_cast<std::size_t>(tokens() + count);
  if (all > square_.capacity() || all > steps_.capacity()) return false;
  return !scores ||
         static_cast<std::size_t>(given_numbers(count, tokens() + count)) <= given_.capacity();
}

void WindowScores::append(std::int64_t count, bool scores) noexcept {
  settle();
  const std::int64_t all = tokens() + count;
  first_ = first_scored(tokens(), all, scores);
  square_.resize(static_cast<std::size_t>(all), 0.0f);
  steps_.resize(static_cast<std::size_t>(all), 0u);
  stride_ = all;
  given_.resize(static_cast<std::size_t>(rows() * stride_));
}

void WindowScores::truncate(std::int64_t count) noexcept {
  square_.resize(static_cast<std::size_t>(count));
  steps_.resize(static_cast<std::size_t>(count));
  first_ = std::min(first_, count);
  std::fill(has_given_.begin() + rows(), has_given_.end(), std::uint8_t{0});
}

void WindowScores::drop_front(std::int64_t count, std::int64_t spare) noexcept {
  settle();
  square_.erase(square_.begin(), square_.begin() + static_cast<std::ptrdiff_t>(count));
  steps_.erase(steps_.begin(), steps_.begin() + static_cast<std::ptrdiff_t>(count));
  first_ = tokens();
  const std::size_t room = static_cast<std::size_t>(spare);
  shrink(square_, room);
  shrink(steps_, room);
  given_.clear();
  shrink(given_, static_cast<std::size_t>(given_numbers(spare, tokens() + spare)));
}

void WindowScores::settle() noexcept {
  for (std::int64_t r = 0; r < rows(); ++r) {
    if (has_given_[static_cast<std::size_t>(r)] == 0) continue;
    const float* given = given_.data() + r * stride_;
    for (std::size_t i = 0; i <= static_cast<std::size_t>(first_ + r); ++i) {
      square_[i] += given[i];
      ++steps_[i];
    }
  }
  has_given_.fill(0);
  first_ = tokens();
}

float* WindowScores::given_by(std::int64_t window) noexcept {
  const std::int64_t row = window - 1 - first_;
  return row >= 0 && row < rows() ? given_.data() + row * stride_ : nullptr;
}

void WindowScores::has_given(std::int64_t window, bool given) noexcept {
  has_given_[static_cast<std::size_t>(window - 1 - first_)] = given ? 1 : 0;
}

float WindowScores::score(std::int64_t token) const noexcept {
  const std::size_t at = static_cast<std::size_t>(token);
  return window_score(square_[at], steps_[at]);
}

float WindowScores::settled_score(std::int64_t token) const noexcept {
  const std::size_t at = static_cast<std::size_t>(token);
  float square = square_[at];
  std::uint32_t steps = steps_[at];
  // The sum that settle makes.
  for (std::int64_t r = std::max<std::int64_t>(0, token - first_); r < rows(); ++r) {
    if (has_given_[static_cast<std::size_t>(r)] == 0) continue;
    square += given_[static_cast<std::size_t>(r * stride_) + at];
    ++steps;
  }
  return window_score(square, steps);
}

namespace {

// Squares of probabilities, or sums of them.
void check_squares(SavedReader& reader, std::span<const float> squares) {
  for (const float x : squares) {
    if (!(x >= 0 && std::isfinite(x))) reader.refuse("a score that is no number, or negative");
  }
}

}  // namespace

void WindowScores::save(SavedWriter& writer) const {
  writer.put_all(std::span<const float>(square_));
  writer.put_all(std::span<const std::uint32_t>(steps_));
  writer.put(first_);
  writer.put_all(std::span<const std::uint8_t>(has_given_));
  for (std::int64_t r = 0; r < rows(); ++r) {
    if (has_given_[static_cast<std::size_t>(r)] == 0) continue;
    writer.put_all(std::span(given_).subspan(static_cast<std::size_t>(r * stride_),
                                             static_cast<std::size_t>(first_ + r + 1)));
  }
}

void WindowScores::restore(SavedReader& reader, std::int64_t tokens) {
  square_.resize(static_cast<std::size_t>(tokens));
  steps_.resize(static_cast<std::size_t>(tokens));
  reader.get_all(std::span(square_));
  reader.get_all(std::span(steps_));
  first_ = reader.get<std::int64_t>();
  reader.get_all(std::span<std::uint8_t>(has_given_));
  check_squares(reader, square_);
  if (first_ < 0 || first_ > tokens || rows() > kMostScoredTokens)
    reader.refuse("scores of tokens that are not there");
  stride_ = tokens;
  given_.assign(static_cast<std::size_t>(rows() * stride_), 0.0f);
  for (std::int64_t r = 0; r < kMostScoredTokens; ++r) {
    const std::uint8_t given = has_given_[static_cast<std::size_t>(r)];
    if (given > 1 || (given == 1 && r >= rows()))
      reader.refuse("scores of tokens that are not there");
    if (given == 0) continue;
    const std::span<float> row = std::span(given_).subspan(
        static_cast<std::size_t>(r * stride_), static_cast<std::size_t>(first_ + r + 1));
    reader.get_all(row);
    check_squares(reader, row);
  }
}

std::int64_t WindowScores::bytes() const {
  return tokens() * static_cast<std::int64_t>(sizeof(float) + sizeof(std::uint32_t)) +
         rows() * tokens() * static_cast<std::int64_t>(sizeof(float));
}

std::int64_t WindowScores::spare_bytes() const {
  return static_cast<std::int64_t>(square_.capacity() * sizeof(float) +
                                   steps_.capacity() * sizeof(std::uint32_t) +
                                   given_.capacity() * sizeof(float)) -
         bytes();
}

}  // namespace verkv::cpu
