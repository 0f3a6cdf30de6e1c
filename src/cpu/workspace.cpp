#include "cpu/workspace.hpp"

#include <cstddef>

namespace verkv::cpu {
namespace {

std::int64_t padded(std::int64_t n) { return round_up(n, kLanes); }

// Byte vectors of 64: the widest that the sketch's kernels read.
std::int64_t code_stride_of(const SketchShape& sketch) { return round_up(sketch.padded_dim(), 64); }

// An eighth more than asked for keeps single tokens from growing it each time. A vector left to
// itself would take twice as much.
template <class Vector>
void grow(Vector& vector, std::int64_t size) {
  const std::size_t wanted = static_cast<std::size_t>(size);
  if (vector.size() >= wanted) return;
  if (vector.capacity() < wanted) vector.reserve(wanted + wanted / 8);
  vector.resize(wanted);
}

}  // namespace

void Workspace::reserve(const LayerShape& shape, const FetchRules& rules, std::int64_t compressed,
                        std::int64_t residents) {
  const std::int64_t group = shape.group;
  const std::int64_t heads = group * rows_together(shape.group);
  grow(query, heads * padded(shape.config.key_dim));
  grow(basis_query, heads * padded(shape.config.key_dim));
  grow(code_query, heads * code_stride_of(shape.sketch));
  grow(weight, heads * padded(compressed));
  grow(resident_logit, heads * padded(residents));
  grow(resident_weight, group * padded(residents));
  grow(resident_sketched, group * padded(residents));
  if (shape.clusters) {
    const std::int64_t clusters = clusters_of(compressed);
    grow(cluster_weight, group * padded(clusters));
    grow(cluster_square, group * padded(clusters));
    grow(slot_cluster, residents);
    grow(cluster_spread_square, clusters);
    grow(slot_x, residents);
    grow(slot_y, residents);
    grow(cluster_sums, clusters);
    grow(cluster_drawn, clusters);
  }
  grow(output, group * shape.config.value_dim);
  grow(states, heads);
  grow(slot_odds, residents);
  // Kernels write whole vectors.
  const std::int64_t room = compressed + kLanes;
  grow(fetched, room);
  grow(moved, room);
  grow(no_odds, padded(std::max(compressed, residents)));
  grow(mark, compressed);
  if (!rules.searches()) return;
  switch (rules.order) {
    case FetchOrder::worth:
      grow(plan_weight, room);
      grow(plan_odds, room);
      grow(plan_worth, room);
      grow(plan_place, room);
      break;
    case FetchOrder::exact:
      grow(exact_weight, compressed);
      grow(exact_odds, compressed);
      grow(exact_gain, compressed);
      grow(exact_order, compressed);
      grow(exact_index, compressed);
      grow(exact_scratch, static_cast<std::int64_t>(kGainScratchDoubles) * (compressed + 1));
      break;
  }
}

std::int64_t Workspace::bytes() const {
  std::int64_t sum = 0;
  const auto add = [&sum](const auto&... vector) {
    ((sum += static_cast<std::int64_t>(vector.capacity() * sizeof(vector[0]))), ...);
  };
  add(query, basis_query, code_query, weight, resident_logit, resident_weight, resident_sketched,
      cluster_weight, cluster_square, slot_cluster, cluster_spread_square, slot_x, slot_y,
      cluster_sums, cluster_drawn, output, states, slot_odds, fetched, moved, no_odds, mark,
      plan_weight, plan_odds, plan_worth, plan_place, exact_weight, exact_odds, exact_gain,
      exact_scratch, exact_order, exact_index);
  return sum;
}

std::int64_t Workspaces::bytes() const {
  std::int64_t sum = 0;
  for (const Workspace& workspace : of_thread_) sum += workspace.bytes();
  return sum;
}

HeadGroup::HeadGroup(const Kernels& the_kernels, const LayerShape& the_shape,
                     const FetchRules& the_rules, HeadStore& the_store, Workspace& the_workspace,
                     const QueryRows& rows)
    : kernels(the_kernels),
      shape(the_shape),
      rules(the_rules),
      store(the_store),
      workspace(the_workspace),
      heads(shape.group * rows.rows),
      first_head(shape.group * rows.first),
      compressed(store.compressed()),
      residents(store.residents() - rows.back),
      drawn(store.drawn_residents()),
      clusters(shape.clusters ? clusters_of(compressed) : 0),
      query_stride(padded(shape.config.key_dim)),
      code_stride(code_stride_of(shape.sketch)),
      weight_stride(padded(compressed)),
      resident_stride(padded(store.residents())),
      cluster_stride(padded(clusters)) {}

}  // namespace verkv::cpu
