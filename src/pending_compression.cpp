#include "pending_compression.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace verkv {
namespace {

// A dense copy.
TensorView copy_of(const TensorView& view, std::vector<std::byte>& rows) {
  const std::size_t row = static_cast<std::size_t>(view.dim) * size_bytes(view.type);
  rows.resize(static_cast<std::size_t>(view.tokens * view.heads) * row);
  std::byte* to = rows.data();
  for (std::int64_t t = 0; t < view.tokens; ++t) {
    for (std::int64_t h = 0; h < view.heads; ++h, to += row) std::memcpy(to, view.row(t, h), row);
  }
  return token_major(rows.data(), view.type, view.tokens, view.heads, view.dim);
}

std::int64_t held(const auto& vector) {
  return static_cast<std::int64_t>(vector.capacity() * sizeof(vector[0]));
}

std::int64_t held_by(const HeadCompression& head) {
  return held(head.odds) + held(head.basis.encode) + held(head.basis.query) +
         held(head.order.position) + held(head.order.walk_end) + held(head.order.open_odds) +
         held(head.order.directions.key) + held(head.order.directions.value) + held(head.drawn) +
         held(head.clusters.centroids) + held(head.clusters.spread);
}

}  // namespace

PendingCompression::PendingCompression(const Compressor& compressor,
                                       std::vector<HeadCompression> heads,
                                       std::span<const TensorView> prompt_queries)
    : heads_(std::move(heads)) {
  Inputs inputs;
  const std::size_t layers = heads_.back().layer + 1;
  inputs.importance.resize(layers);
  for (const HeadCompression& head : heads_) {
    inputs.importance[head.layer].insert(inputs.importance[head.layer].end(), head.importance,
                                         head.importance + head.odds.size());
  }
  for (HeadCompression& head : heads_)
    head.importance = inputs.importance[head.layer].data() + head.head * head.odds.size();
  if (!prompt_queries.empty()) {
    inputs.queries.resize(prompt_queries.size());
    inputs.query_rows.resize(prompt_queries.size());
    for (const HeadCompression& head : heads_) {
      const TensorView& view = prompt_queries[head.layer];
      if (head.head != 0 || view.tokens == 0 || !compressor.needs_basis(head)) continue;
      gather_queries(view, head.layer, 0, view.heads);  // throws on a number that is not finite
      inputs.queries[head.layer] = copy_of(view, inputs.query_rows[head.layer]);
    }
  }
  inputs_ = std::make_shared<const Inputs>(std::move(inputs));
  reserve_prepared();
}

PendingCompression PendingCompression::fork() const {
  PendingCompression result;
  result.inputs_ = inputs_;
  result.heads_ = heads_;
  result.reserve_prepared();
  return result;
}

// For the layer with the most heads.
void PendingCompression::reserve_prepared() {
  std::size_t most = 0;
  for (const HeadCompression& head : heads_) most = std::max(most, head.head + 1);
  prepared_.reserve(most);
}

std::int64_t PendingCompression::left() const {
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(heads_.size()) - prepared_count());
}

std::int64_t PendingCompression::left_of_layer() const {
  const auto other = std::find_if(heads_.begin(), heads_.end(), [&](const HeadCompression& head) {
    return head.layer != layer();
  });
  return other - heads_.begin() - prepared_count();
}

bool PendingCompression::covers(std::size_t layer) const {
  return std::any_of(heads_.begin(), heads_.end(),
                     [&](const HeadCompression& head) { return head.layer == layer; });
}

bool PendingCompression::needs_more_than(std::int64_t tokens) const {
  return std::any_of(heads_.begin(), heads_.end(),
                     [&](const HeadCompression& head) { return head.end() > tokens; });
}

std::vector<HeadCompression> PendingCompression::next(std::int64_t count) const {
  const auto first = heads_.begin() + prepared_count();
  return {first, first + std::min(count, left_of_layer())};
}

void PendingCompression::take(std::vector<HeadCompression>&& heads) noexcept {
  if (forgotten_) prepared_.clear();
  forgotten_ = false;
  for (HeadCompression& head : heads) prepared_.push_back(std::move(head));
}

bool PendingCompression::finish_layer() noexcept {
  heads_.erase(heads_.begin(), heads_.begin() + static_cast<std::ptrdiff_t>(prepared_.size()));
  prepared_.clear();
  return heads_.empty();
}

std::int64_t PendingCompression::bytes(std::size_t layer, bool exclusive) const noexcept {
  std::int64_t result = 0;
  for (const std::vector<HeadCompression>* heads : {&heads_, &prepared_}) {
    for (const HeadCompression& head : *heads) {
      if (head.layer == layer) result += held_by(head);
    }
  }
  if (exclusive && inputs_.use_count() > 1) return result;
  if (layer < inputs_->importance.size()) result += held(inputs_->importance[layer]);
  if (layer < inputs_->query_rows.size()) result += held(inputs_->query_rows[layer]);
  return result;
}

}  // namespace verkv
