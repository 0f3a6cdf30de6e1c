// Which sequence a decode row continues. Nothing but masks tells: a sequence is the set of cells that
// its last row saw, and the row that sees these and its own cell is its next token.
#ifndef VERKV_SRC_GGML_SEQUENCES_HPP
#define VERKV_SRC_GGML_SEQUENCES_HPP

#include <cstdint>
#include <list>
#include <span>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

namespace verkv_ggml {

struct Sequence {
  verkv::SequenceId id;
  std::int64_t stream = 0;
  // In the order in which they were written; layers may be some tokens behind.
  std::vector<std::uint32_t> cells;
  std::vector<bool> has;  // [cell]
  // Step in which a row last belonged to it, and rows since it was made.
  std::uint64_t used = 0;
  std::int64_t answered = 0;

  std::int64_t size() const { return static_cast<std::int64_t>(cells.size()); }
  void push(std::uint32_t cell);
  void cut(std::int64_t size);
  // Place of a cell that it has.
  std::int64_t place_of(std::uint32_t cell) const;
};

// What a row sees, for finding its sequence.
class Sight {
 public:
  Sight(std::span<const std::uint32_t> visible, std::int64_t cells);
  bool sees(std::uint32_t cell) const { return cell < seen_.size() && seen_[cell]; }
  std::int64_t size() const { return static_cast<std::int64_t>(visible_.size()); }
  // How many of the first cells of a sequence are all seen.
  std::int64_t shared(const Sequence& sequence) const;
  // What is seen but for the first `shared` cells of a sequence and one more, by time.
  std::vector<std::uint32_t> others(const Sequence* sequence, std::int64_t shared,
                                    std::uint32_t own, std::span<const std::uint64_t> time) const;

 private:
  std::span<const std::uint32_t> visible_;
  std::vector<bool> seen_;
};

// The sequence of the stream that shares the most first cells with what is seen, of those the one with
// the fewest cells beyond; null: none shares any.
struct Match {
  Sequence* sequence = nullptr;
  std::int64_t shared = 0;
};
Match best_match(std::list<Sequence>& sequences, std::int64_t stream, const Sight& sight);

}  // namespace verkv_ggml

#endif  // VERKV_SRC_GGML_SEQUENCES_HPP
