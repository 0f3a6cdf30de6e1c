// Where rows belong, and how a sequence begins.
#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include <verkv/importance.hpp>

#include "compressed.hpp"

namespace verkv_ggml {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// Sequences of a cache at a time; beyond, the one that was asked for least recently goes.
constexpr std::size_t kMostSequences = 32;
// Tokens that are taken back as drafts are; a longer end belongs to somebody who may come back.
constexpr std::int64_t kDrafts = 16;
// New tokens that were not asked for one by one: a prompt, with an importance of its own.
constexpr std::int64_t kPrompt = 128;
// Queries too few to say which tokens matter.
constexpr std::int64_t kFewQueries = 8;

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

const Compressed::Decision& Compressed::decide(const Layer& layer, const Visible& visible) {
  std::erase_if(decisions_, [&](const Decision& known) { return known.epoch != epoch_; });
  for (const Decision& known : decisions_)
    if (known.mask == visible.version) return known;
  ++step_;
  Decision decision{.mask = visible.version, .places = std::vector<Place>(own_.size())};
  for (std::size_t r = 0; r < own_.size(); ++r) {
    const std::span<const std::uint32_t> seen = visible.cells[r];
    const std::uint32_t own = static_cast<std::uint32_t>(own_[r] % cells_);
    if (static_cast<std::int64_t>(seen.size()) <= shared_.settings.from) continue;
    if (!std::binary_search(seen.begin(), seen.end(), own)) continue;
    try {
      decision.places[r] = place(layer, own_[r] / cells_, seen, own);
    } catch (const std::exception& error) {
      shared_.once.info(std::string("a sequence is answered exactly: ") + error.what());
    }
  }
  // What deciding has shortened or erased is of no row: they are used in this step.
  decision.epoch = epoch_;
  return decisions_.emplace_back(std::move(decision));
}

bool Compressed::is_own(std::int64_t stream, std::uint32_t cell) const {
  return std::find(own_.begin(), own_.end(), stream * cells_ + cell) != own_.end();
}

Compressed::Place Compressed::place(const Layer& layer, std::int64_t stream,
                                    std::span<const std::uint32_t> visible, std::uint32_t own) {
  const Sight sight(visible, cells_);
  const Match match = best_match(sequences_, stream, sight);
  if (match.sequence != nullptr && match.shared == sight.size()) {
    // Decided before, in this step; the row's own cell must be the last.
    if (match.sequence->cells[at(match.shared - 1)] != own) return {};
    match.sequence->used = step_;
    return {match.sequence, match.shared};
  }
  const bool is_new = match.sequence == nullptr || match.shared <= shared_.settings.from;
  const std::span<const std::uint64_t> time = std::span(time_).subspan(at(stream * cells_));
  std::vector<std::uint32_t> others =
      sight.others(match.sequence, is_new ? 0 : match.shared, own, time);
  // Their rows come later in this step.
  for (const std::uint32_t cell : others)
    if (is_own(stream, cell)) return {};
  Sequence* sequence = nullptr;
  if (is_new) {
    sequence = begin(layer, stream, std::move(others));
    if (sequence == nullptr) return {};
  } else {
    sequence = branch(match);
    sequence->used = step_;
    for (const std::uint32_t cell : others) sequence->push(cell);
    if (static_cast<std::int64_t>(others.size()) >= kPrompt) compress(*sequence);
  }
  sequence->used = step_;
  sequence->push(own);
  return {sequence, sequence->size()};
}

// The sequence with the shared cells alone.
Sequence* Compressed::branch(const Match& match) {
  Sequence& sequence = *match.sequence;
  const std::int64_t beyond = sequence.size() - match.shared;
  if (beyond == 0) return &sequence;
  const auto shorten_to = [&](Sequence& which) {
    std::int64_t most = 0;
    for (std::int64_t l = 0; l < served_; ++l) most = std::max(most, manager_->tokens(which.id, l));
    if (match.shared < most) manager_->truncate(which.id, match.shared);
    which.cut(match.shared);
    ++epoch_;
  };
  if (sequence.used != step_ && beyond <= kDrafts) {
    shorten_to(sequence);
    return &sequence;
  }
  leave_room();
  Sequence fork = sequence;
  fork.id = manager_->fork(sequence.id);
  fork.answered = 0;
  sequences_.push_back(std::move(fork));
  shorten_to(sequences_.back());
  return &sequences_.back();
}

void Compressed::leave_room() {
  if (sequences_.size() < kMostSequences) return;
  auto oldest = sequences_.end();
  for (auto s = sequences_.begin(); s != sequences_.end(); ++s)
    if (s->used != step_ && (oldest == sequences_.end() || s->used < oldest->used)) oldest = s;
  if (oldest == sequences_.end()) throw std::runtime_error("more sequences than are kept");
  manager_->erase(oldest->id);
  sequences_.erase(oldest);
  ++epoch_;
}

// For all layers that are known; where there are new ones, everything begins anew.
bool Compressed::make_manager() {
  if (manager_ != nullptr && served_ == static_cast<std::int64_t>(layers_.size())) return true;
  for (const Layer& layer : layers_) {
    if (layer.keys->type != layers_.front().keys->type || layer.values->type != layer.keys->type) {
      shared_.once.info("keys and values of several types are answered exactly, not compressed");
      return false;
    }
  }
  if (manager_ != nullptr) erase_all();
  count();
  verkv::CacheConfig config;
  for (const Layer& layer : layers_) config.layers.push_back(layer.config);
  config.storage = layers_.front().type();
  config.host = verkv::HostTier::engine;
  config.keep = shared_.settings.keep;
  config.fetch.risk = shared_.settings.risk;
  config.fetch.epsilon = shared_.settings.epsilon;
  config.threads = shared_.stock.threads();
  config.executor = [this](int parts, const std::function<void(int)>& part) {
    shared_.stock.run(parts, part);
  };
  manager_ = verkv::make_cpu_cache(config);
  served_ = static_cast<std::int64_t>(layers_.size());
  return true;
}

// A sequence of these cells, compressed; null where none is begun now.
Sequence* Compressed::begin(const Layer& layer, std::int64_t stream,
                            std::vector<std::uint32_t> cells) {
  if (patience_ > 0) {
    --patience_;
    return nullptr;
  }
  if (!layer.was_asked || !make_manager()) return nullptr;
  leave_room();
  Sequence& sequence = sequences_.emplace_back();
  sequence.stream = stream;
  sequence.used = step_;
  for (const std::uint32_t cell : cells) sequence.push(cell);
  // One name for all: an answer does not depend on who else has asked.
  sequence.id = manager_->create_sequence(0);
  try {
    compress(sequence);
  } catch (...) {
    manager_->erase(sequence.id);
    sequences_.pop_back();
    patience_ = last_patience_ = 4096;
    throw;
  }
  return &sequence;
}

// Gives the sequence all of its cells in every layer, and compresses what is not yet.
void Compressed::compress(Sequence& sequence) {
  const std::int64_t start = now_ns();
  std::vector<std::vector<float>> scores_of;
  std::vector<LateQueries::Found> found;
  std::vector<verkv::ImportanceView> importance;
  std::vector<verkv::TensorView> queries;
  found.reserve(layers_.size());
  std::int64_t index = 0;
  for (Layer& layer : layers_) {
    if (index == served_) break;
    append(layer, sequence, sequence.size());
    scores_of.push_back(scores(layer, sequence, found.emplace_back()));
    const std::int64_t done = manager_->compressed_tokens(sequence.id, index);
    importance.push_back({.data = scores_of.back().data() + done,
                          .heads = layer.config.kv_heads,
                          .tokens = sequence.size() - done,
                          .head_stride = sequence.size()});
    queries.push_back(found.back().view);
    ++index;
  }
  manager_->compress(sequence.id, importance, queries);
  const verkv::MemoryReport memory = manager_->memory();
  shared_.report.own_bytes =
      std::max(shared_.report.own_bytes, memory.fast_bytes() + memory.basis_bytes +
                                             memory.workspace_bytes + memory.reserved_bytes);
  ++shared_.report.compressions;
  shared_.report.compress_ns += now_ns() - start;
}

// Scores [KV head][token] of a layer: by the last queries of the prompt, or by the keys where there are
// none.
std::vector<float> Compressed::scores(Layer& layer, const Sequence& sequence,
                                      LateQueries::Found& out_found) {
  const std::int64_t n = sequence.size();
  const std::int64_t heads = layer.config.kv_heads;
  const std::span<const std::uint64_t> time =
      std::span(time_).subspan(at(sequence.stream * cells_));
  out_found = layer.queries.find(sequence.stream, [&](std::uint32_t cell, std::uint64_t when) {
    return cell < sequence.has.size() && sequence.has[cell] && time[cell] == when;
  });
  const verkv::TensorView keys = layer.key_view(sequence.stream);
  std::vector<float> result(at(heads * n));
  if (static_cast<std::int64_t>(out_found.times.size()) < kFewQueries) {
    std::vector<float> key(at(layer.config.key_dim));
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t i = 0; i < n; ++i) {
        verkv::with_element(keys.type, [&](auto zero) {
          const auto* row = static_cast<const decltype(zero)*>(
              keys.row(static_cast<std::int64_t>(sequence.cells[at(i)]), h));
          for (std::size_t j = 0; j < key.size(); ++j) key[j] = verkv::to_float(row[j]);
        });
        result[at(h * n + i)] =
            static_cast<float>(verkv::key_norm_importance(std::span<const float>(key)));
      }
    }
    return result;
  }
  shared_.report.late_queries += static_cast<std::int64_t>(out_found.times.size());
  std::vector<std::uint32_t> cells = sequence.cells;
  std::sort(cells.begin(), cells.end());
  std::vector<std::vector<std::uint32_t>> visible(out_found.times.size());
  for (std::size_t q = 0; q < visible.size(); ++q)
    for (const std::uint32_t cell : cells)
      if (time[cell] <= out_found.times[q]) visible[q].push_back(cell);
  const std::vector<std::span<const std::uint32_t>> lists(visible.begin(), visible.end());
  std::vector<float> of_cells(at(heads * cells_));
  shared_.dense.importance(layer.config,
                           {.keys = keys, .queries = out_found.view, .visible = lists}, of_cells);
  for (std::int64_t h = 0; h < heads; ++h) {
    const auto score = [&](std::int64_t i) -> float& { return result[at(h * n + i)]; };
    for (std::int64_t i = 0; i < n; ++i)
      score(i) = of_cells[at(h * cells_) + sequence.cells[at(i)]];
    // Tokens beside the queries are seen by few of them, and were near: that says nothing of later
    // queries. They get what the others have on average, but for sinks.
    std::int64_t known = 0;
    while (known < n && time[sequence.cells[at(known)]] < out_found.times.front()) ++known;
    const std::int64_t sinks = std::min(known, verkv::CacheConfig{}.sink_tokens);
    if (known == sinks) continue;
    const float sum = std::accumulate(&score(sinks), &score(0) + known, 0.0f);
    std::fill(&score(0) + known, &score(0) + n, sum / static_cast<float>(known - sinks));
  }
  return result;
}

}  // namespace verkv_ggml
