// Decode rows answered exactly, from the engine's own rows.
#ifndef VERKV_SRC_GGML_DENSE_HPP
#define VERKV_SRC_GGML_DENSE_HPP

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <verkv/row_attention.hpp>
#include <verkv/settings.hpp>

#include "masks.hpp"
#include "nodes.hpp"
#include "stock.hpp"

namespace verkv_ggml {

// What the library is to know of a layer.
verkv::LayerConfig layer_of(const Attention& attention);
bool same_attention(const verkv::LayerConfig& a, const verkv::LayerConfig& b);

class Dense {
 public:
  explicit Dense(Stock& stock) : stock_(stock) {}
  // Both throw what RowAttention throws.
  // The rows that are not yet answered, by [stream][row].
  void answer(const Attention& attention, const Visible& visible,
              const std::vector<bool>& is_answered);
  void importance(const verkv::LayerConfig& layer, const verkv::RowAttentionBatch& batch,
                  std::span<float> out);

 private:
  std::int64_t place_of(const verkv::LayerConfig& layer);

  Stock& stock_;
  // Shapes of layers; most models have one or two.
  std::vector<verkv::LayerConfig> layers_;
  int threads_ = 0;
  std::unique_ptr<verkv::RowAttention> rows_;
};

}  // namespace verkv_ggml

#endif  // VERKV_SRC_GGML_DENSE_HPP
