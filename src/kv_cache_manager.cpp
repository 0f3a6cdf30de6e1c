#include <verkv/kv_cache_manager.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include <verkv/inclusion.hpp>

#include "backend.hpp"
#include "settings.hpp"

namespace verkv {
namespace {

// A position is 32 bits of a Philox counter.
constexpr std::int64_t kMaxTokens = (std::int64_t{1} << 32) - 1;
// Position and score of a token of the local window.
constexpr std::int64_t kWindowMetadataBytes = 12;

template <class... Args>
[[noreturn]] void invalid(fmt::format_string<Args...> text, Args&&... args) {
  throw InvalidArgument(fmt::format(text, std::forward<Args>(args)...));
}

void check_rows(const char* what, const TensorView& view, std::int64_t heads, std::int64_t dim) {
  if (!is_known(view.type)) {
    invalid("{}: element type {}; f32, f16 and bf16 are supported", what,
            static_cast<int>(view.type));
  }
  if (view.tokens < 0) invalid("{}: {} tokens; the number cannot be negative", what, view.tokens);
  if (view.heads != heads) invalid("{}: {} heads given, the layer has {}", what, view.heads, heads);
  if (view.dim != dim) invalid("{}: head size {} given, the layer has {}", what, view.dim, dim);
  if ((view.tokens > 1 && view.token_stride == 0) || (view.heads > 1 && view.head_stride == 0)) {
    invalid(
        "{}: strides of {} elements a token and {} a head for {} tokens and {} heads; 0 would make "
        "rows share memory",
        what, view.token_stride, view.head_stride, view.tokens, view.heads);
  }
  if (view.tokens > 0 && view.data == nullptr)
    invalid("{}: null data for {} tokens", what, view.tokens);
}

// First element of a view that is not finite: (token, head, coordinate), token -1 if there is none.
struct Place {
  std::int64_t token = -1;
  std::int64_t head = 0;
  std::int64_t coordinate = 0;
};

Place first_not_finite(const TensorView& view) {
  return with_element(view.type, [&](auto zero) {
    for (std::int64_t t = 0; t < view.tokens; ++t) {
      for (std::int64_t h = 0; h < view.heads; ++h) {
        const auto* row = static_cast<const decltype(zero)*>(view.row(t, h));
        for (std::int64_t j = 0; j < view.dim; ++j) {
          if (!std::isfinite(to_float(row[j]))) return Place{t, h, j};
        }
      }
    }
    return Place{};
  });
}

}  // namespace

struct KvCacheManager::Impl {
  // Calls share the backend's threads and workspaces, so they take turns.
  std::mutex mutex;
  struct Sequence {
    std::uint64_t last_batch = 0;  // finds a sequence that appears twice in one batch
  };

  CacheConfig config;
  std::unique_ptr<Backend> backend;
  std::unordered_map<std::int64_t, Sequence> sequences;
  std::int64_t next_sequence = 0;
  std::uint64_t batch_count = 0;
  std::vector<LayerStatistics> statistics;
  // Reports of a step when the caller wants none; sized whenever a sequence is created.
  std::vector<QueryHeadReport> query_reports;
  std::vector<KvHeadReport> kv_reports;

  SequenceId create(std::uint64_t draw);

  Sequence& find(SequenceId id) {
    const auto it = sequences.find(id.value);
    if (it == sequences.end()) invalid("sequence {} is unknown", id.value);
    return it->second;
  }

  const LayerConfig& layer(std::int64_t index) const {
    if (index < 0 || index >= static_cast<std::int64_t>(config.layers.size())) {
      invalid("layer {}; the configuration has layers 0 to {}", index, config.layers.size() - 1);
    }
    const LayerConfig& result = config.layers[static_cast<std::size_t>(index)];
    if (!result.cached) invalid("layer {} is configured to keep no cache", index);
    return result;
  }

  bool compressible(const LayerConfig& l) const { return l.cached && !l.dense; }

  MemoryReport total() const {
    MemoryReport sum;
    for (const auto& [id, sequence] : sequences) {
      const MemoryReport one = backend->memory(SequenceId{id});
      sum.resident_bytes += one.resident_bytes;
      sum.sketch_bytes += one.sketch_bytes;
      sum.metadata_bytes += one.metadata_bytes;
      sum.host_bytes += one.host_bytes;
      sum.basis_bytes += one.basis_bytes;
      sum.pageable_bytes += one.pageable_bytes;
      sum.reserved_bytes += one.reserved_bytes;
    }
    sum.workspace_bytes = backend->workspace_bytes();
    return sum;
  }
};

KvCacheManager::KvCacheManager(CacheConfig config, std::unique_ptr<Backend> backend)
    : impl_(std::make_unique<Impl>()) {
  check_config(config);
  impl_->config = std::move(config);
  impl_->backend = std::move(backend);
  impl_->statistics.resize(impl_->config.layers.size());
}

KvCacheManager::~KvCacheManager() = default;

const CacheConfig& KvCacheManager::config() const { return impl_->config; }

std::string KvCacheManager::description() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->backend->description();
}

std::uint64_t KvCacheManager::graph_generation() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->backend->graph_generation();
}

SequenceId KvCacheManager::create_sequence() {
  const std::lock_guard lock(impl_->mutex);
  // From the top down, so that the small numbers which callers choose are not met.
  return impl_->create(~static_cast<std::uint64_t>(impl_->next_sequence));
}

SequenceId KvCacheManager::create_sequence(std::uint64_t draw) {
  const std::lock_guard lock(impl_->mutex);
  return impl_->create(draw);
}

SequenceId KvCacheManager::Impl::create(std::uint64_t draw) {
  const SequenceId id{next_sequence};
  std::int64_t query_heads = 0;
  std::int64_t kv_heads = 0;
  for (const LayerConfig& layer : config.layers) {
    if (!layer.cached) continue;
    query_heads = std::max(query_heads, layer.query_heads);
    kv_heads = std::max(kv_heads, layer.kv_heads);
  }
  const std::size_t rows = sequences.size() + 1;
  if (query_reports.size() < rows * static_cast<std::size_t>(query_heads)) {
    query_reports.resize(rows * static_cast<std::size_t>(query_heads));
    kv_reports.resize(rows * static_cast<std::size_t>(kv_heads));
  }
  sequences.emplace(id.value, Impl::Sequence{});
  try {
    backend->create(id, draw);
  } catch (...) {
    sequences.erase(id.value);
    throw;
  }
  ++next_sequence;
  return id;
}

void KvCacheManager::erase(SequenceId sequence) {
  const std::lock_guard lock(impl_->mutex);
  impl_->find(sequence);
  impl_->backend->release(sequence);
  impl_->sequences.erase(sequence.value);
}

std::int64_t KvCacheManager::tokens(SequenceId sequence, std::int64_t layer) const {
  const std::lock_guard lock(impl_->mutex);
  impl_->find(sequence);
  impl_->layer(layer);
  return impl_->backend->tokens(sequence, layer);
}

std::int64_t KvCacheManager::compressed_tokens(SequenceId sequence, std::int64_t layer) const {
  const std::lock_guard lock(impl_->mutex);
  impl_->find(sequence);
  impl_->layer(layer);
  return impl_->backend->compressed_tokens(sequence, layer);
}

void KvCacheManager::append(SequenceId sequence, std::int64_t layer_index, const TensorView& keys,
                            const TensorView& values) {
  const std::lock_guard lock(impl_->mutex);
  impl_->find(sequence);
  const LayerConfig& layer = impl_->layer(layer_index);
  check_rows("keys", keys, layer.kv_heads, layer.key_dim);
  check_rows("values", values, layer.kv_heads, layer.value_dim);
  if (keys.tokens != values.tokens) {
    invalid("{} tokens of keys but {} of values", keys.tokens, values.tokens);
  }
  const std::int64_t held = impl_->backend->tokens(sequence, layer_index);
  if (keys.tokens > kMaxTokens - held) {
    throw CapacityError(fmt::format("{} tokens would be held; a sequence has at most {}",
                                    held + keys.tokens, kMaxTokens));
  }
  const CacheConfig& config = impl_->config;
  if (config.host_bytes_limit || config.fast_bytes_limit) {
    const std::int64_t rows = keys.tokens * layer.kv_heads;
    const std::int64_t added = rows * (layer.key_dim + layer.value_dim) *
                               static_cast<std::int64_t>(size_bytes(config.storage));
    const MemoryReport now = impl_->total();
    const auto check = [](const char* tier, std::int64_t used, std::int64_t wanted,
                          std::optional<std::int64_t> limit) {
      if (limit && used + wanted > *limit) {
        throw CapacityError(
            fmt::format("{} tier: {} bytes in use and {} more wanted, the limit is {}", tier, used,
                        wanted, *limit));
      }
    };
    check("host", now.host_bytes, added, config.host_bytes_limit);
    check("fast", now.fast_bytes(), added + rows * kWindowMetadataBytes, config.fast_bytes_limit);
  }
  impl_->backend->append(sequence, layer_index, keys, values);
}

void KvCacheManager::compress(SequenceId sequence, std::span<const ImportanceView> importance,
                              std::span<const TensorView> prompt_queries) {
  const std::lock_guard lock(impl_->mutex);
  impl_->find(sequence);
  const CacheConfig& config = impl_->config;
  if (importance.size() != config.layers.size()) {
    invalid("importance of {} layers given, the configuration has {}", importance.size(),
            config.layers.size());
  }
  for (std::size_t i = 0; i < config.layers.size(); ++i) {
    const LayerConfig& layer = config.layers[i];
    if (!impl_->compressible(layer)) continue;
    const std::int64_t index = static_cast<std::int64_t>(i);
    const std::int64_t open = impl_->backend->tokens(sequence, index) -
                              impl_->backend->compressed_tokens(sequence, index);
    const ImportanceView& view = importance[i];
    if (view.heads != layer.kv_heads || view.tokens != open) {
      invalid(
          "layer {}: importance of {} heads and {} tokens given; {} heads and {} tokens that are "
          "not yet "
          "compressed are expected",
          i, view.heads, view.tokens, layer.kv_heads, open);
    }
    if (open == 0) continue;
    if (view.data == nullptr) invalid("layer {}: null importance for {} tokens", i, open);
    if (!impl_->backend->host_views()) continue;
    for (std::int64_t h = 0; h < view.heads; ++h) {
      const std::span<const float> scores(view.data + h * view.head_stride,
                                          static_cast<std::size_t>(open));
      const std::int64_t bad = first_invalid_importance(scores);
      if (bad >= 0) {
        invalid(
            "layer {}, head {}, token {}: importance {}; scores must be finite and not negative", i,
            h, bad, scores[static_cast<std::size_t>(bad)]);
      }
    }
  }
  if (!prompt_queries.empty() && prompt_queries.size() != config.layers.size()) {
    invalid("prompt queries of {} layers given, the configuration has {}", prompt_queries.size(),
            config.layers.size());
  }
  for (std::size_t i = 0; i < prompt_queries.size(); ++i) {
    const LayerConfig& layer = config.layers[i];
    if (!impl_->compressible(layer) || prompt_queries[i].tokens == 0) continue;
    check_rows("prompt queries", prompt_queries[i], layer.query_heads, layer.key_dim);
  }
  impl_->backend->compress(sequence, importance, prompt_queries);
}

void KvCacheManager::redraw(SequenceId sequence, std::uint64_t draw) {
  const std::lock_guard lock(impl_->mutex);
  impl_->find(sequence);
  impl_->backend->redraw(sequence, draw);
}

void KvCacheManager::attend(std::int64_t layer_index, const AttendBatch& batch) {
  const std::lock_guard lock(impl_->mutex);
  const LayerConfig& layer = impl_->layer(layer_index);
  const std::int64_t rows = static_cast<std::int64_t>(batch.sequences.size());
  check_rows("queries", batch.queries, layer.query_heads, layer.key_dim);
  if (batch.queries.tokens != rows) {
    invalid("queries of {} rows for {} sequences", batch.queries.tokens, rows);
  }
  const std::size_t query_count = static_cast<std::size_t>(rows * layer.query_heads);
  const std::size_t kv_count = static_cast<std::size_t>(rows * layer.kv_heads);
  const std::size_t output_count = query_count * static_cast<std::size_t>(layer.value_dim);
  if (batch.output.size() != output_count) {
    invalid("output of {} numbers for {} rows of {} heads of {}", batch.output.size(), rows,
            layer.query_heads, layer.value_dim);
  }
  if (!batch.lse.empty() && batch.lse.size() != query_count) {
    invalid("LSE of {} numbers for {} rows of {} heads", batch.lse.size(), rows, layer.query_heads);
  }
  if (!batch.query_reports.empty() && batch.query_reports.size() != query_count) {
    invalid("{} query head reports for {} rows of {} heads", batch.query_reports.size(), rows,
            layer.query_heads);
  }
  if (!batch.kv_reports.empty() && batch.kv_reports.size() != kv_count) {
    invalid("{} KV head reports for {} rows of {} heads", batch.kv_reports.size(), rows,
            layer.kv_heads);
  }
  ++impl_->batch_count;
  for (std::int64_t row = 0; row < rows; ++row) {
    const SequenceId id = batch.sequences[static_cast<std::size_t>(row)];
    if (id == kNoSequence) continue;
    Impl::Sequence& sequence = impl_->find(id);
    if (sequence.last_batch == impl_->batch_count)
      invalid("sequence {} appears twice in one batch", id.value);
    sequence.last_batch = impl_->batch_count;
    if (!impl_->backend->host_views()) continue;
    TensorView one = batch.queries;
    one.data = batch.queries.row(row, 0);
    one.tokens = 1;
    const Place place = first_not_finite(one);
    if (place.token >= 0) {
      invalid("query of row {}, head {}, coordinate {} is not finite", row, place.head,
              place.coordinate);
    }
  }

  if (impl_->backend->counts_steps()) {
    impl_->backend->attend(layer_index, batch, batch.query_reports, batch.kv_reports);
    return;
  }

  // Padding rows may make the batch larger than the number of sequences; only then is there
  // something to grow.
  if (batch.query_reports.empty() && impl_->query_reports.size() < query_count) {
    impl_->query_reports.resize(query_count);
  }
  if (batch.kv_reports.empty() && impl_->kv_reports.size() < kv_count)
    impl_->kv_reports.resize(kv_count);
  const std::span<QueryHeadReport> query_reports =
      batch.query_reports.empty() ? std::span(impl_->query_reports).first(query_count)
                                  : batch.query_reports;
  const std::span<KvHeadReport> kv_reports =
      batch.kv_reports.empty() ? std::span(impl_->kv_reports).first(kv_count) : batch.kv_reports;
  impl_->backend->attend(layer_index, batch, query_reports, kv_reports);

  LayerStatistics& statistics = impl_->statistics[static_cast<std::size_t>(layer_index)];
  for (std::int64_t row = 0; row < rows; ++row) {
    const SequenceId id = batch.sequences[static_cast<std::size_t>(row)];
    if (id == kNoSequence) continue;
    ++statistics.steps;
    const std::int64_t held = impl_->backend->tokens(id, layer_index);
    for (std::int64_t h = 0; h < layer.query_heads; ++h) {
      const QueryHeadReport& report =
          query_reports[static_cast<std::size_t>(row * layer.query_heads + h)];
      ++statistics.decisions;
      statistics.certified += report.certified;
      statistics.fetching += report.planned_tokens > 0;
      statistics.planned_tokens += report.planned_tokens;
    }
    for (std::int64_t h = 0; h < layer.kv_heads; ++h) {
      const KvHeadReport& report = kv_reports[static_cast<std::size_t>(row * layer.kv_heads + h)];
      statistics.fetched_tokens += report.fetched_tokens;
      statistics.moved_tokens += report.moved_tokens;
      statistics.moved_bytes += report.moved_bytes;
      statistics.resident_tokens += report.resident_tokens;
      statistics.cached_tokens += held;
    }
  }
}

MemoryReport KvCacheManager::memory() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->total();
}

MemoryReport KvCacheManager::memory(SequenceId sequence) const {
  const std::lock_guard lock(impl_->mutex);
  impl_->find(sequence);
  return impl_->backend->memory(sequence);
}

LayerStatistics KvCacheManager::statistics(std::int64_t layer) const {
  const std::lock_guard lock(impl_->mutex);
  impl_->layer(layer);
  if (impl_->backend->counts_steps()) return impl_->backend->statistics(layer);
  return impl_->statistics[static_cast<std::size_t>(layer)];
}

void KvCacheManager::reset_statistics() {
  const std::lock_guard lock(impl_->mutex);
  std::fill(impl_->statistics.begin(), impl_->statistics.end(), LayerStatistics{});
  impl_->backend->reset_statistics();
}

}  // namespace verkv
