// RowAttention in C.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <verkv/row_attention.hpp>

#include "c_face.hpp"

struct verkv_row_attention {
  std::unique_ptr<verkv::RowAttention> attention;
};

namespace verkv::c_face {
namespace {

// Calls f(attention, batch) with the caller's batch.
template <class F>
verkv_code with_rows(verkv_row_attention* attention, const verkv_row_batch* from,
                     verkv_error* error, F&& f) noexcept {
  return guarded(error, [&] {
    RowAttention& rows = *needed(attention, "the attention").attention;
    const verkv_row_batch c = taken(from, verkv_row_batch{}, "verkv_row_batch");
    const std::span<const std::uint32_t* const> lists = array(c.visible, c.rows, "visible");
    const std::span<const std::int64_t> counts = array(c.visible_counts, c.rows, "visible_counts");
    std::vector<std::span<const std::uint32_t>> visible;
    for (std::size_t r = 0; r < lists.size(); ++r)
      visible.push_back(array(lists[r], counts[r], "visible"));
    f(rows, RowAttentionBatch{.keys = view(c.keys, "keys"),
                              .values = view(c.values, "values"),
                              .queries = view(c.queries, "queries"),
                              .visible = visible,
                              .output = array(c.output, c.output_count, "output"),
                              .lse = array(c.lse, c.lse_count, "lse")});
  });
}

}  // namespace
}  // namespace verkv::c_face

namespace c_face = verkv::c_face;

extern "C" {

verkv_code verkv_make_row_attention(const verkv_cache_config* config,
                                    verkv_row_attention** attention, verkv_error* error) {
  if (attention != nullptr) *attention = nullptr;
  return c_face::guarded(error, [&] {
    verkv_row_attention*& result = c_face::needed(attention, "where the attention goes");
    auto made = std::make_unique<verkv_row_attention>();
    made->attention = std::make_unique<verkv::RowAttention>(c_face::cache_config(config));
    result = made.release();
  });
}

void verkv_destroy_row_attention(verkv_row_attention* attention) { delete attention; }

verkv_code verkv_attend_rows(verkv_row_attention* attention, int64_t layer,
                             const verkv_row_batch* batch, verkv_error* error) {
  return c_face::with_rows(attention, batch, error,
                           [&](auto& rows, const auto& b) { rows.attend(layer, b); });
}

verkv_code verkv_importance_of_rows(verkv_row_attention* attention, int64_t layer,
                                    const verkv_row_batch* batch, float* importance,
                                    int64_t importance_count, verkv_error* error) {
  return c_face::with_rows(attention, batch, error, [&](auto& rows, const auto& b) {
    rows.importance(layer, b, c_face::array(importance, importance_count, "importance"));
  });
}

}  // extern "C"
