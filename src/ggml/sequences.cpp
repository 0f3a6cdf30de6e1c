#include "sequences.hpp"

#include <algorithm>
#include <cstddef>

namespace verkv_ggml {

void Sequence::push(std::uint32_t cell) {
  if (cell >= has.size()) has.resize(cell + 1);
  has[cell] = true;
  cells.push_back(cell);
}

void Sequence::cut(std::int64_t size) {
  for (std::size_t i = static_cast<std::size_t>(size); i < cells.size(); ++i) has[cells[i]] = false;
  cells.resize(static_cast<std::size_t>(size));
}

std::int64_t Sequence::place_of(std::uint32_t cell) const {
  std::int64_t place = size() - 1;
  while (place >= 0 && cells[static_cast<std::size_t>(place)] != cell) --place;
  return place;
}

Sight::Sight(std::span<const std::uint32_t> visible, std::int64_t cells)
    : visible_(visible), seen_(static_cast<std::size_t>(cells)) {
  for (const std::uint32_t cell : visible) seen_[cell] = true;
}

std::int64_t Sight::shared(const Sequence& sequence) const {
  std::size_t i = 0;
  while (i < sequence.cells.size() && sees(sequence.cells[i])) ++i;
  return static_cast<std::int64_t>(i);
}

std::vector<std::uint32_t> Sight::others(const Sequence* sequence, std::int64_t shared,
                                         std::uint32_t own,
                                         std::span<const std::uint64_t> time) const {
  std::vector<bool> rest = seen_;
  rest[own] = false;
  for (std::int64_t i = 0; i < shared; ++i)
    rest[sequence->cells[static_cast<std::size_t>(i)]] = false;
  std::vector<std::uint32_t> result;
  for (const std::uint32_t cell : visible_)
    if (rest[cell]) result.push_back(cell);
  std::stable_sort(result.begin(), result.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return time[a] < time[b]; });
  return result;
}

Match best_match(std::list<Sequence>& sequences, std::int64_t stream, const Sight& sight) {
  Match best;
  for (Sequence& sequence : sequences) {
    if (sequence.stream != stream) continue;
    const std::int64_t shared = sight.shared(sequence);
    if (shared > best.shared ||
        (shared > 0 && shared == best.shared && sequence.size() < best.sequence->size()))
      best = {&sequence, shared};
  }
  return best;
}

}  // namespace verkv_ggml
