// Decode rows answered exactly, from the engine's own rows.
#ifndef VERKV_SRC_GGML_DENSE_HPP
#define VERKV_SRC_GGML_DENSE_HPP

#include <memory>
#include <vector>

#include <verkv/row_attention.hpp>
#include <verkv/settings.hpp>

#include "masks.hpp"
#include "nodes.hpp"
#include "stock.hpp"

namespace verkv_ggml {

// What the library is to know of a layer.
verkv::LayerConfig layer_of(const Attention& attention);

class Dense {
 public:
  explicit Dense(Stock& stock) : stock_(stock) {}
  // Throws what RowAttention throws.
  void answer(const Attention& attention, const Visible& visible);

 private:
  std::int64_t place_of(const Attention& attention);

  Stock& stock_;
  // Shapes of layers; most models have one or two.
  std::vector<verkv::LayerConfig> layers_;
  int threads_ = 0;
  std::unique_ptr<verkv::RowAttention> rows_;
};

}  // namespace verkv_ggml

#endif  // VERKV_SRC_GGML_DENSE_HPP
