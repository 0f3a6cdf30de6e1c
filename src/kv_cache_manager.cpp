#include <verkv/kv_cache_manager.hpp>

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "call_mutex.hpp"
#include "invalid.hpp"
#include "manager_access.hpp"
#include "settings.hpp"

namespace verkv {
namespace {

// A position is 32 bits of a Philox counter.
constexpr std::int64_t kMaxTokens = (std::int64_t{1} << 32) - 1;
// Position and score of a token of the local window.
constexpr std::int64_t kWindowMetadataBytes = 12;

std::uint64_t magnitude(std::int64_t x) {
  const std::uint64_t bits = static_cast<std::uint64_t>(x);
  return x < 0 ? 0 - bits : bits;
}

// Whether one axis is nested in the other, so that no two rows meet. There is a row.
bool rows_are_disjoint(const TensorView& view) {
  struct Axis {
    std::uint64_t count = 1;
    std::uint64_t stride = 0;
  };
  Axis inner{magnitude(view.tokens), magnitude(view.token_stride)};
  Axis outer{magnitude(view.heads), magnitude(view.head_stride)};
  // The stride of an axis with one element is never used.
  if (outer.count == 1 || (inner.count > 1 && inner.stride > outer.stride)) std::swap(inner, outer);
  const std::uint64_t row = magnitude(view.dim);
  if (inner.count > 1 && inner.stride < row) return false;
  if (outer.count == 1) return true;
  if (outer.stride < row) return false;
  // outer.stride >= (inner.count - 1) * inner.stride + row, without overflow.
  return inner.count == 1 || (outer.stride - row) / inner.stride >= inner.count - 1;
}

void check_rows(const char* what, const TensorView& view, std::int64_t heads, std::int64_t dim) {
  if (!is_known(view.type)) {
    invalid("{}: element type {}; f32, f16 and bf16 are supported", what,
            static_cast<int>(view.type));
  }
  if (view.tokens < 0) invalid("{}: {} tokens; the number cannot be negative", what, view.tokens);
  if (view.heads != heads) invalid("{}: {} heads given, the layer has {}", what, view.heads, heads);
  if (view.dim != dim) invalid("{}: head size {} given, the layer has {}", what, view.dim, dim);
  if (view.tokens == 0) return;
  if (!rows_are_disjoint(view)) {
    invalid(
        "{}: strides of {} elements a token and {} a head for {} tokens and {} heads of {} "
        "elements "
        "make rows share memory; the smaller must span a row, the larger all rows of the smaller",
        what, view.token_stride, view.head_stride, view.tokens, view.heads, view.dim);
  }
  if (view.data == nullptr) invalid("{}: null data for {} tokens", what, view.tokens);
  const std::size_t element = size_bytes(view.type);
  const std::size_t off = reinterpret_cast<std::uintptr_t>(view.data) % element;
  if (off != 0) {
    invalid("{}: data {} bytes past a multiple of {}, the size of an {} element", what, off,
            element, name(view.type));
  }
}

void check_importance(std::size_t i, const ImportanceView& view, const LayerConfig& layer,
                      std::int64_t open) {
  if (view.heads != layer.kv_heads || view.tokens != open) {
    invalid(
        "layer {}: importance of {} heads and {} tokens given; {} heads and {} tokens that are not "
        "yet compressed are expected",
        i, view.heads, view.tokens, layer.kv_heads, open);
  }
  if (open > 0 && view.data == nullptr) invalid("layer {}: null importance for {} tokens", i, open);
  if (view.heads > 1 && view.head_stride < open && view.head_stride > -open) {
    invalid(
        "layer {}: importance of {} heads with a stride of {} elements; their {} tokens need at "
        "least "
        "as many, or heads share scores",
        i, view.heads, view.head_stride, open);
  }
}

// Sizes of a batch's spans and of its queries.
void check_batch(const AttendBatch& batch, const LayerConfig& layer) {
  const std::int64_t rows = static_cast<std::int64_t>(batch.sequences.size());
  check_rows("queries", batch.queries, layer.query_heads, layer.key_dim);
  if (batch.queries.tokens != rows)
    invalid("queries of {} rows for {} sequences", batch.queries.tokens, rows);
  const std::size_t query_count = static_cast<std::size_t>(rows * layer.query_heads);
  const std::size_t kv_count = static_cast<std::size_t>(rows * layer.kv_heads);
  if (batch.output.size() != query_count * static_cast<std::size_t>(layer.value_dim)) {
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
}

// to += sign * one.
void add(MemoryReport& to, const MemoryReport& one, std::int64_t sign = 1) {
  to.resident_bytes += sign * one.resident_bytes;
  to.sketch_bytes += sign * one.sketch_bytes;
  to.metadata_bytes += sign * one.metadata_bytes;
  to.host_bytes += sign * one.host_bytes;
  to.basis_bytes += sign * one.basis_bytes;
  to.workspace_bytes += sign * one.workspace_bytes;
  to.reserved_bytes += sign * one.reserved_bytes;
  to.pageable_bytes += sign * one.pageable_bytes;
}

}  // namespace

struct KvCacheManager::Impl {
  // Calls share the backend's threads and workspaces, so they take turns.
  CallMutex mutex;
  struct Sequence {
    std::uint64_t last_batch = 0;  // finds a sequence that appears twice in one batch
  };

  CacheConfig config;
  std::unique_ptr<Backend> backend;
  std::unordered_map<std::int64_t, Sequence> sequences;
  std::int64_t next_sequence = 0;
  std::uint64_t batch_count = 0;
  // Of all sequences, without the workspace: kept, so that nobody has to sum over sequences.
  MemoryReport total;

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

  static bool compressible(const LayerConfig& l) { return l.cached && !l.dense; }

  MemoryReport held(SequenceId id) const noexcept {
    MemoryReport sum;
    for (std::size_t i = 0; i < config.layers.size(); ++i) {
      if (config.layers[i].cached) add(sum, backend->memory(id, static_cast<std::int64_t>(i)));
    }
    return sum;
  }

  // Calls change(), which may change what the sequence holds in one layer (or in all), and keeps
  // the total right even where it throws: an operation that fails may have reserved.
  template <class Change>
  void booked(SequenceId id, std::optional<std::int64_t> layer, Change&& change) {
    struct Booking {
      Impl& impl;
      SequenceId id;
      std::optional<std::int64_t> layer;

      Booking(Impl& to, SequenceId sequence, std::optional<std::int64_t> one)
          : impl(to), id(sequence), layer(one) {
        add(impl.total, now(), -1);
      }
      ~Booking() { add(impl.total, now()); }
      MemoryReport now() const noexcept {
        return layer ? impl.backend->memory(id, *layer) : impl.held(id);
      }
    };
    const Booking booking(*this, id, layer);
    change();
  }

  void check_limits(const LayerConfig& l, std::int64_t tokens) const {
    const std::int64_t rows = tokens * l.kv_heads;
    const std::int64_t added =
        rows * (l.key_dim + l.value_dim) * static_cast<std::int64_t>(size_bytes(config.storage));
    const auto check = [](const char* tier, std::int64_t used, std::int64_t wanted,
                          std::optional<std::int64_t> limit) {
      if (limit && used + wanted > *limit) {
        throw CapacityError(
            fmt::format("{} tier: {} bytes in use and {} more wanted, the limit is {}", tier, used,
                        wanted, *limit));
      }
    };
    check("host", total.host_bytes, added, config.host_bytes_limit);
    check("fast", total.fast_bytes(), added + rows * kWindowMetadataBytes, config.fast_bytes_limit);
  }

  SequenceId create(std::uint64_t draw) {
    const SequenceId id{next_sequence};
    sequences.emplace(id.value, Sequence{});
    try {
      backend->create(id, draw);
    } catch (...) {
      sequences.erase(id.value);
      throw;
    }
    add(total, held(id));
    ++next_sequence;
    return id;
  }
};

std::unique_ptr<KvCacheManager> ManagerAccess::make(CacheConfig config,
                                                    std::unique_ptr<Backend> backend) {
  auto impl = std::make_unique<KvCacheManager::Impl>();
  impl->config = std::move(config);
  impl->backend = std::move(backend);
  return std::unique_ptr<KvCacheManager>(new KvCacheManager(std::move(impl)));
}

std::uint64_t ManagerAccess::ask(const KvCacheManager& manager,
                                 std::uint64_t (*question)(const Backend&)) {
  const std::lock_guard lock(manager.impl_->mutex);
  return question(*manager.impl_->backend);
}

KvCacheManager::KvCacheManager(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

KvCacheManager::~KvCacheManager() {
  // In a child process the threads to be joined are missing: its copy is left to the system.
  if (impl_->mutex.in_another_process()) static_cast<void>(impl_.release());
}

const CacheConfig& KvCacheManager::config() const { return impl_->config; }

std::string KvCacheManager::description() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->backend->description();
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

void KvCacheManager::erase(SequenceId sequence) {
  const std::lock_guard lock(impl_->mutex);
  impl_->find(sequence);
  add(impl_->total, impl_->held(sequence), -1);
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
  impl_->check_limits(layer, keys.tokens);
  impl_->booked(sequence, layer_index,
                [&] { impl_->backend->append(sequence, layer_index, keys, values); });
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
  if (!prompt_queries.empty() && prompt_queries.size() != config.layers.size()) {
    invalid("prompt queries of {} layers given, the configuration has {}", prompt_queries.size(),
            config.layers.size());
  }
  for (std::size_t i = 0; i < config.layers.size(); ++i) {
    const LayerConfig& layer = config.layers[i];
    if (!Impl::compressible(layer)) continue;
    const std::int64_t index = static_cast<std::int64_t>(i);
    const std::int64_t open = impl_->backend->tokens(sequence, index) -
                              impl_->backend->compressed_tokens(sequence, index);
    check_importance(i, importance[i], layer, open);
    if (prompt_queries.empty() || prompt_queries[i].tokens == 0) continue;
    check_rows("prompt queries", prompt_queries[i], layer.query_heads, layer.key_dim);
  }
  impl_->booked(sequence, std::nullopt,
                [&] { impl_->backend->compress(sequence, importance, prompt_queries); });
}

void KvCacheManager::redraw(SequenceId sequence, std::uint64_t draw) {
  const std::lock_guard lock(impl_->mutex);
  impl_->find(sequence);
  impl_->booked(sequence, std::nullopt, [&] { impl_->backend->redraw(sequence, draw); });
}

void KvCacheManager::attend(std::int64_t layer_index, const AttendBatch& batch) {
  const std::lock_guard lock(impl_->mutex);
  check_batch(batch, impl_->layer(layer_index));
  ++impl_->batch_count;
  for (const SequenceId id : batch.sequences) {
    if (id == kNoSequence) continue;
    Impl::Sequence& sequence = impl_->find(id);
    if (sequence.last_batch == impl_->batch_count)
      invalid("sequence {} appears twice in one batch", id.value);
    sequence.last_batch = impl_->batch_count;
  }
  impl_->backend->attend(layer_index, batch);
}

MemoryReport KvCacheManager::memory() const {
  const std::lock_guard lock(impl_->mutex);
  MemoryReport report = impl_->total;
  report.workspace_bytes = impl_->backend->workspace_bytes();
  return report;
}

MemoryReport KvCacheManager::memory(SequenceId sequence) const {
  const std::lock_guard lock(impl_->mutex);
  impl_->find(sequence);
  return impl_->held(sequence);
}

LayerStatistics KvCacheManager::statistics(std::int64_t layer) const {
  const std::lock_guard lock(impl_->mutex);
  impl_->layer(layer);
  return impl_->backend->statistics(layer);
}

void KvCacheManager::reset_statistics() {
  const std::lock_guard lock(impl_->mutex);
  impl_->backend->reset_statistics();
}

}  // namespace verkv
