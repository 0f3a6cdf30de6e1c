// Which cells a row sees, read from the mask once a step though every layer asks.
#ifndef VERKV_SRC_GGML_MASKS_HPP
#define VERKV_SRC_GGML_MASKS_HPP

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "nodes.hpp"

namespace verkv_ggml {

// The rows of one mask.
struct Visible {
  // Of what was read: other numbers for other masks.
  std::uint64_t version = 0;
  // false: the mask says more than seen or not seen.
  bool plain = true;
  std::int64_t rows = 0;  // of a stream
  // Cells by [stream][row], ascending.
  std::vector<std::vector<std::uint32_t>> cells;
  // The same as spans, as RowAttention takes them.
  std::vector<std::span<const std::uint32_t>> lists;

  std::span<const std::span<const std::uint32_t>> of_stream(std::int64_t stream) const {
    return std::span(lists).subspan(static_cast<std::size_t>(stream * rows),
                                    static_cast<std::size_t>(rows));
  }
};

// Masks are known again by what is in them: graphs are built anew, and nothing tells where a step
// begins. To compare costs a hundredth of what attention to the same cells does.
class Masks {
 public:
  // Stands until the next call.
  const Visible& read(const Attention& attention);

 private:
  struct Known {
    std::int64_t cells = 0;
    std::int64_t streams = 0;
    std::vector<std::uint16_t> bits;  // [stream][row][cell]
    Visible visible;
    std::uint64_t used = 0;
  };
  static bool is_of(const Known& known, const Attention& attention);
  void fill(Known& known, const Attention& attention);

  std::vector<std::unique_ptr<Known>> known_;
  std::uint64_t time_ = 0;
};

}  // namespace verkv_ggml

#endif  // VERKV_SRC_GGML_MASKS_HPP
