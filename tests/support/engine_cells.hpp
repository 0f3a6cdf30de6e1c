// Memory of an engine that has the rows of a cache with HostTier::engine: cells of one layer, in slabs
// of one of several layouts. A cell that nobody needs any more is filled with NaN, and used again.
#ifndef VERKV_TESTS_SUPPORT_ENGINE_CELLS_HPP
#define VERKV_TESTS_SUPPORT_ENGINE_CELLS_HPP

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "support/blocks.hpp"

namespace verkv::test {

class EngineCells {
 public:
  // key, value: of KV head 0.
  struct Cell {
    std::byte* key = nullptr;
    std::byte* value = nullptr;
  };
  using Row = std::shared_ptr<const Cell>;

  // Tokens in cells, and views of them; of padding rows there is no cell.
  struct Placed {
    std::vector<Row> rows;
    TensorView keys;
    TensorView values;

    // Lists of the views.
    std::vector<const void*> key_rows;
    std::vector<const void*> value_rows;
  };

  // Must outlive every Row.
  EngineCells(const LayerConfig& layer, DType storage, Random& random);
  EngineCells(const EngineCells&) = delete;
  EngineCells& operator=(const EngineCells&) = delete;

  // sequences: of a batch, or empty.
  std::unique_ptr<Placed> place(const Block& keys, const Block& values,
                                std::span<const SequenceId> sequences, Random& random);
  // Copies of rows in other cells.
  std::unique_ptr<Placed> move(std::span<const Row> rows, Random& random);

 private:
  std::unique_ptr<Placed> take(std::int64_t tokens, Random& random);
  void add_slab();
  void give_back(const Cell& cell);
  // Calls f(KV head, key row, value row).
  template <class F>
  void each_head(const Cell& cell, F&& f) const;

  LayerConfig layer_;
  DType storage_;
  std::size_t element_;
  // In elements.
  std::int64_t key_stride_ = 0, key_head_stride_ = 0, value_stride_ = 0, value_head_stride_ = 0;
  std::vector<std::unique_ptr<std::byte[]>> slabs_;
  std::vector<Cell> free_;
};

}  // namespace verkv::test

#endif  // VERKV_TESTS_SUPPORT_ENGINE_CELLS_HPP
