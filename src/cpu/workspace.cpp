#include "cpu/workspace.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace verkv::cpu {
namespace {

std::int64_t padded(std::int64_t n) { return round_up(n, kLanes); }

// Byte vectors of 64: the widest that the sketch's kernels read.
std::int64_t code_stride_of(const SketchShape& sketch) { return round_up(sketch.padded_dim(), 64); }

// An eighth more at most, so that single tokens do not make the arrays grow each time.
std::int64_t roomy(std::int64_t n) {
  std::int64_t unit = 1;
  while (unit * 16 <= n) unit *= 2;
  return round_up(n, unit);
}

// Numbers in [row and query head][stride] where the heads have any length up to `stride`.
std::int64_t shared_numbers(int group, std::int64_t stride) {
  const std::int64_t one = group * stride;
  return std::max(one, std::min(one * rows_together(group), kSharedLogits));
}

// Calls f(array, elements) for the arrays of a workspace.
template <class F>
void each_array(Workspace& w, const WorkspaceSizes& sizes, F&& f) {
  using S = WorkspaceSizes;
  const auto all = [&](S::Array which, auto&... arrays) { (f(arrays, sizes.count[which]), ...); };
  all(S::query, w.query, w.basis_query);
  all(S::code_query, w.code_query);
  all(S::weight, w.weight);
  all(S::resident_logit, w.resident_logit);
  all(S::resident_weight, w.resident_weight);
  all(S::slot_of_group, w.drawn_sketched);
  all(S::slot, w.slot_odds, w.slot_cluster, w.slot_x, w.slot_y);
  all(S::cluster_of_group, w.cluster_weight, w.cluster_square);
  all(S::cluster, w.cluster_spread_square, w.cluster_sums, w.cluster_drawn);
  all(S::output, w.output);
  all(S::states, w.states);
  all(S::file_rows, w.file_rows);
  all(S::token, w.mark);
  all(S::fetched, w.fetched, w.moved);
  all(S::plan, w.plan_weight, w.plan_odds, w.plan_worth, w.plan_place);
  all(S::exact, w.exact_weight, w.exact_odds, w.exact_gain, w.exact_order, w.exact_index);
  all(S::exact_scratch, w.exact_scratch);
}

}  // namespace

void WorkspaceSizes::cover(const LayerShape& shape, const FetchRules& rules,
                           const StepLengths& lengths) {
  const std::int64_t compressed = roomy(lengths.compressed);
  const std::int64_t drawn = roomy(lengths.drawn);
  const std::int64_t group = shape.group;
  const std::int64_t heads = group * rows_together(shape.group);
  // Kernels write whole vectors.
  const std::int64_t places = compressed + kLanes;
  const auto at_least = [&](Array which, std::int64_t wanted) {
    count[which] = std::max(count[which], wanted);
  };
  at_least(query, heads * padded(shape.config.key_dim));
  at_least(code_query, heads * code_stride_of(shape.sketch));
  const std::int64_t residents = padded(drawn + roomy(seen_together(shape, lengths.window)));
  at_least(resident_logit, shared_numbers(shape.group, residents));
  at_least(resident_weight, group * residents);
  at_least(output, group * shape.config.value_dim);
  at_least(states, heads);
  if (lengths.compressed == 0) return;
  if (shape.file)
    at_least(file_rows, kBlockRows * std::max(shape.key_bytes(), shape.value_bytes()));
  at_least(weight, shared_numbers(shape.group, padded(compressed)));
  at_least(slot_of_group, group * padded(drawn));
  at_least(slot, padded(drawn));
  at_least(token, compressed);
  at_least(fetched, places);
  if (shape.clusters) {
    at_least(cluster_of_group, group * padded(clusters_of(compressed)));
    at_least(cluster, padded(clusters_of(compressed)));
  }
  if (!rules.searches()) return;
  switch (rules.order) {
    case FetchOrder::worth:
      at_least(plan, places);
      break;
    case FetchOrder::exact:
      at_least(exact, compressed);
      at_least(exact_scratch, static_cast<std::int64_t>(kGainScratchDoubles) * (compressed + 1));
      break;
  }
}

void WorkspaceSizes::cover(const WorkspaceSizes& other) {
  for (std::size_t i = 0; i < count.size(); ++i) count[i] = std::max(count[i], other.count[i]);
}

bool WorkspaceSizes::covers(const WorkspaceSizes& other) const {
  for (std::size_t i = 0; i < count.size(); ++i) {
    if (count[i] < other.count[i]) return false;
  }
  return true;
}

std::int64_t WorkspaceSizes::bytes() const {
  Workspace none;
  std::int64_t sum = 0;
  each_array(none, *this, [&]<class T>(const AlignedVector<T>&, std::int64_t n) {
    sum += n * static_cast<std::int64_t>(sizeof(T));
  });
  return sum;
}

void Workspace::resize(const WorkspaceSizes& sizes) {
  Workspace made(memory_);
  each_array(made, sizes, [this]<class T>(AlignedVector<T>& array, std::int64_t n) {
    array = AlignedVector<T>(memory_);
    array.reserve(static_cast<std::size_t>(n));
    array.resize(static_cast<std::size_t>(n));
  });
  made.sizes_ = sizes;
  made.bytes_ = sizes.bytes();
  *this = std::move(made);
}

int Workspaces::take_file_error() {
  int first = 0;
  for (Workspace& workspace : of_thread_) {
    if (first == 0) first = workspace.file_error;
    workspace.file_error = 0;
  }
  return first;
}

void Workspaces::reserve(int count, const WorkspaceSizes& sizes) {
  WorkspaceSizes all = sizes;
  if (count_ > 0) all.cover(of_thread_.front().sizes());
  const int wanted = std::clamp(count, count_, static_cast<int>(of_thread_.size()));
  for (int i = 0; i < wanted; ++i) {
    if (!of(i).sizes().covers(all)) of(i).resize(all);
    count_ = std::max(count_, i + 1);
  }
}

std::int64_t Workspaces::bytes_to_reserve(int count, const WorkspaceSizes& sizes) const {
  WorkspaceSizes all = sizes;
  if (count_ > 0) all.cover(of_thread_.front().sizes());
  const int wanted = std::clamp(count, count_, static_cast<int>(of_thread_.size()));
  std::int64_t sum = 0;
  std::int64_t replaced = 0;
  for (int i = 0; i < wanted; ++i) {
    const Workspace& one = of_thread_[static_cast<std::size_t>(i)];
    if (one.sizes().covers(all)) continue;
    sum += all.bytes() - one.bytes();
    replaced = std::max(replaced, one.bytes());
  }
  return sum + replaced;
}

void Workspaces::give_back(int count, const WorkspaceSizes& sizes) noexcept {
  for (; count_ > count; --count_) of(count_ - 1) = Workspace(memory_);
  for (int i = 0; i < count_; ++i) {
    if (sizes.covers(of(i).sizes())) continue;
    try {
      of(i).resize(sizes);
    } catch (...) {
      return;  // keeping the larger blocks is correct, only larger
    }
  }
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
      first_slot(0),
      other_slots(0),
      drawn(store.drawn_residents()),
      clusters(shape.clusters ? clusters_of(compressed) : 0),
      query_stride(padded(shape.config.key_dim)),
      code_stride(code_stride_of(shape.sketch)),
      weight_stride(padded(compressed)),
      resident_stride(padded(seen_together(the_shape, store.residents()))),
      drawn_stride(padded(drawn)),
      cluster_stride(padded(clusters)) {
  if (!shape.config.window) return;
  // Of the first row, and of the first of all rows that are answered together.
  const auto first_seen = [&](std::int64_t rows_before) {
    return std::max<std::int64_t>(0, residents - rows_before - *shape.config.window);
  };
  first_slot = first_seen(rows.rows - 1);
  other_slots = first_slot - first_seen(rows.first + rows.rows - 1);
  residents -= first_slot;
}

}  // namespace verkv::cpu
