// What the manager checks of views and batches without reading a number: shapes, types, strides,
// sizes. Each throws InvalidArgument with value and limit.
#ifndef VERKV_SRC_VIEW_CHECKS_HPP
#define VERKV_SRC_VIEW_CHECKS_HPP

#include <cstddef>
#include <cstdint>
#include <span>

#include <verkv/reports.hpp>
#include <verkv/settings.hpp>
#include <verkv/view.hpp>

namespace verkv {

// Rows of a view of so many heads and numbers, not listed. what: how the sentence names them.
void check_rows(const char* what, const TensorView& view, std::int64_t heads, std::int64_t dim);

// Keys and values of tokens of a layer, not listed.
void check_tokens(const TensorView& keys, const TensorView& values, const LayerConfig& layer);

// What a cache takes of keys and values.
struct TokenRules {
  const LayerConfig& layer;
  const CacheConfig& config;
  bool lists = true;  // of rows
};

void check_tokens(const TensorView& keys, const TensorView& values, const TokenRules& rules);

// Scores of `open` tokens of layer i.
void check_importance(std::size_t i, const ImportanceView& view, const LayerConfig& layer,
                      std::int64_t open);

// Sizes of a batch's spans and of its views. A batch of no rows may leave its views empty.
void check_batch(const AppendBatch& batch, const TokenRules& rules);
void check_batch(const AttendBatch& batch, const LayerConfig& layer);

}  // namespace verkv

#endif  // VERKV_SRC_VIEW_CHECKS_HPP
