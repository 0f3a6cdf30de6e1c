#include "cpu/logits.hpp"

#include <algorithm>
#include <array>
#include <cstddef>

namespace verkv::cpu {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// The queries times the attention scale, zero-padded.
void load_queries(HeadGroup& group, std::span<const StepArguments> rows) {
  const std::int64_t dim = group.shape.config.key_dim;
  for (int h = 0; h < group.heads; ++h) {
    const StepArguments& row = rows[at(h / group.shape.group)];
    const Rows heads{row.query, row.query_type, row.query_stride, static_cast<int>(dim)};
    float* q = group.query(h);
    std::fill(q, q + group.query_stride, 0.0f);
    for (std::int64_t j = 0; j < dim; ++j)
      q[j] = group.shape.scale * load_element(heads, h % group.shape.group, j);
  }
}

void resident_logits(HeadGroup& group) {
  group.in_parts([&](int first, int heads) {
    // Of rows that begin in `slot`, those that the queries see.
    const auto products = [&](const Rows& keys, std::int64_t slot, std::int64_t count) {
      if (slot >= group.residents) return;
      group.kernels.dot_rows(keys, nullptr, std::min(count, group.residents - slot),
                             group.query(first), heads, group.query_stride,
                             group.resident_logit(first) + slot, group.resident_stride);
    };
    if (group.drawn > 0) {
      const PagedRows& keys = group.store.drawn().key;
      const std::int64_t dim = group.shape.config.key_dim;
      each_run(keys, [&](std::int64_t i, std::int64_t count) {
        products({keys.row(i), group.shape.storage, dim, static_cast<int>(dim)}, i, count);
      });
    }
    group.store.each_window_key(group.shape, group.first_slot,
                                [&](const Rows& keys, std::int64_t i, std::int64_t count) {
                                  products(keys, group.drawn + i - group.first_slot, count);
                                });
  });
  if (group.drawn > 0) {
    group.store.drawn().each_place([&](std::int64_t slot, std::uint32_t place) {
      group.workspace.slot_odds[at(slot)] = group.odds(place);
    });
  }
  for (int h = 0; h < group.heads; ++h) group.cap_softly(group.resident_logit(h), group.residents);
}

void find_largest_low(HeadGroup& group, int h) {
  float& largest = group.state(h).shift;
  for (std::int64_t i = 0; i < group.compressed; ++i) {
    if (group.is_low(i)) largest = std::max(largest, group.weight(h)[i]);
  }
}

void logits_of_full_keys(HeadGroup& group) {
  group.in_parts([&](int first, int heads) {
    group.store.each_position([&](std::int64_t i, std::int64_t count) {
      group.note(group.store.host().each_part(
          group.shape, false, group.store.positions(i), count, group.workspace.file_rows.data(),
          [&](const Rows& rows, const std::uint32_t* list, std::int64_t at, std::int64_t part) {
            group.kernels.dot_rows(rows, list, part, group.query(first), heads, group.query_stride,
                                   group.weight(first) + i + at, group.weight_stride);
          }));
    });
  });
  for (int h = 0; h < group.heads; ++h) {
    group.cap_softly(group.weight(h), group.compressed);
    find_largest_low(group, h);
  }
}

HeadConstants encode_head(HeadGroup& group, int h) {
  const std::span<const float> mean = group.store.basis().channel_means;
  double share = 0;
  for (std::size_t j = 0; j < mean.size(); ++j)
    share += static_cast<double>(group.query(h)[j]) * static_cast<double>(mean[j]);
  const SketchQuery encoded = encode_query(
      std::span<const float>(group.basis_query(h), at(group.store.sketch(group.shape).dim)),
      std::span<std::int8_t>(group.code_query(h), at(group.code_stride)));
  return {.query_sum = encoded.sum,
          .factor = encoded.scale * group.store.basis().sketch.unit,
          .shift = static_cast<float>(share)};
}

void logits_of_codes(HeadGroup& group, int first, int heads) {
  const HeadStore& store = group.store;
  const SketchBasis& basis = store.basis().sketch;
  const std::int64_t dim = group.shape.config.key_dim;
  std::array<HeadConstants, kMaxHeads> constants;
  std::array<float, kMaxHeads> largest{};
  std::array<float, kMaxHeads> largest_of_piece{};
  largest.fill(-kInfinity);
  group.kernels.dot_rows({store.basis().query.data(), DType::f16, dim, static_cast<int>(dim)},
                         nullptr, basis.shape.dim, group.query(first), heads, group.query_stride,
                         group.basis_query(first), group.query_stride);
  for (int h = 0; h < heads; ++h) constants[at(h)] = encode_head(group, first + h);
  store.each_piece([&](std::int64_t i, std::int64_t count) {
    group.kernels.sketch_logits(store.sketch(group.shape), store.codes(i), store.scales(i),
                                store.odds(i), count, group.code_query(first), heads,
                                group.code_stride, constants.data(), group.weight(first) + i,
                                group.weight_stride, largest_of_piece.data());
    for (int h = 0; h < heads; ++h)
      largest[at(h)] = std::max(largest[at(h)], largest_of_piece[at(h)]);
  });
  for (int h = 0; h < heads; ++h) {
    if (group.shape.soft_cap > 0) {
      group.cap_softly(group.weight(first + h), group.compressed);
      find_largest_low(group, first + h);
    } else {
      group.state(first + h).shift = largest[at(h)];
    }
  }
}

}  // namespace

void compute_logits(HeadGroup& group, std::span<const StepArguments> rows) {
  load_queries(group, rows);
  resident_logits(group);
  for (int h = 0; h < group.heads; ++h) group.state(h).shift = -kInfinity;
  if (group.compressed == 0) return;
  switch (group.shape.sketch.kind) {
    case SketchKind::exact:
      logits_of_full_keys(group);
      break;
    case SketchKind::calibrated:
      group.in_parts([&](int first, int heads) { logits_of_codes(group, first, heads); });
      break;
  }
}

// The shift may use every logit that does not depend on the draw.
void find_shifts(HeadGroup& group, const StepArguments& row) {
  for (int h = 0; h < group.heads; ++h) {
    float top = -kInfinity;
    group.for_high([&](std::int64_t i) { top = std::max(top, group.resident_logit(h)[i]); });
    HeadState& s = group.state(h);
    s.sink = row.sink_logits == nullptr ? -kInfinity : row.sink_logits[h];
    s.shift = std::max({top, s.shift, s.sink});
  }
}

}  // namespace verkv::cpu
