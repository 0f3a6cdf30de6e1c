// Long because every public call passes through it, each checked before it touches anything.
#include <verkv/kv_cache_manager.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "call_mutex.hpp"
#include "call_times.hpp"
#include "invalid.hpp"
#include "manager_access.hpp"
#include "saved_bytes.hpp"
#include "saved_settings.hpp"
#include "settings.hpp"
#include "tier_bytes.hpp"
#include "view_checks.hpp"
#include "window_score.hpp"

namespace verkv {
namespace {

// A position is 32 bits of a Philox counter.
constexpr std::int64_t kMaxTokens = (std::int64_t{1} << 32) - 1;

}  // namespace

struct KvCacheManager::Impl final : Totals {
  // Calls share the backend's threads and workspaces, so they take turns.
  CallMutex mutex;
  struct Sequence {
    std::uint64_t last_batch = 0;  // finds a sequence that appears twice in one batch
    // [layer]: `reserve` has made room for so many tokens.
    std::vector<std::int64_t> reserved;
  };
  CacheConfig config;
  std::unique_ptr<Backend> backend;
  std::unordered_map<std::int64_t, Sequence> sequences;
  std::int64_t next_sequence = 0;
  std::uint64_t batch_count = 0;
  // Of all sequences, without the workspace: kept, so that nobody has to sum over sequences.
  MemoryReport total;
  CallTimes times;
  // Of a batched append; with room for every sequence.
  std::vector<AppendPart> parts;

  // row: of a batch.
  Sequence& find(SequenceId id, std::int64_t row = -1) {
    const auto it = sequences.find(id.value);
    if (it == sequences.end())
      invalid(ErrorCode::unknown_sequence, {.row = row}, "sequence {} is unknown", id.value);
    return it->second;
  }

  const LayerConfig& layer(std::int64_t index) const {
    if (index < 0 || index >= static_cast<std::int64_t>(config.layers.size())) {
      invalid(ErrorCode::unknown_layer, "layer {}; the configuration has layers 0 to {}", index,
              config.layers.size() - 1);
    }
    const LayerConfig& result = config.layers[static_cast<std::size_t>(index)];
    if (!result.cached)
      invalid(ErrorCode::unknown_layer, "layer {} is configured to keep no cache", index);
    return result;
  }

  TokenRules token_rules(std::int64_t index) const {
    return {layer(index), config, backend->takes_lists()};
  }

  // Calls f(sequence, layer) for the layers that are cached.
  auto all_layers(SequenceId id) const {
    return [this, id](auto&& f) {
      for (std::size_t i = 0; i < config.layers.size(); ++i) {
        if (config.layers[i].cached) f(id, static_cast<std::int64_t>(i));
      }
    };
  }

  MemoryReport held(SequenceId id) const noexcept {
    MemoryReport sum;
    all_layers(id)([&](SequenceId, std::int64_t layer) { add(sum, backend->memory(id, layer)); });
    return sum;
  }

  MemoryReport own(SequenceId id, std::int64_t layer) const noexcept override {
    return backend->own_memory(id, layer);
  }
  void changed(const MemoryReport& before, SequenceId id, std::int64_t layer) noexcept override {
    add(total, before, -1);
    add(total, backend->own_memory(id, layer));
  }
  void allow(const TierBytes& more) const override { check_tiers(config, tiers(), more); }

  TierBytes tiers() const {
    return {total.host_held_bytes(), total.fast_held_bytes() + backend->workspace_bytes()};
  }

  // Calls change(), which may change what one sequence holds in the layers that each(f) calls f with,
  // and keeps the totals right even where it throws: an operation that fails may have reserved.
  template <class Each, class Change>
  void booked(const Each& each, Change&& change) {
    struct Bracket {
      Impl& impl;
      const Each& each;
      const MemoryReport before;

      Bracket(Impl& to, const Each& all) : impl(to), each(all), before(sum()) {}
      ~Bracket() {
        add(impl.total, before, -1);
        add(impl.total, sum());
      }
      MemoryReport sum() const noexcept {
        MemoryReport all;
        each([&](SequenceId id, std::int64_t layer) { add(all, impl.own(id, layer)); });
        return all;
      }
    };
    const Bracket bracket(*this, each);
    change();
  }

  void erase(SequenceId id) noexcept {
    all_layers(id)([this](SequenceId one, std::int64_t layer) { add(total, own(one, layer), -1); });
    backend->release(id);
    sequences.erase(id.value);
  }

  void check_length(SequenceId id, std::int64_t layer, std::int64_t count) const {
    const std::int64_t held_now = backend->tokens(id, layer);
    if (count <= kMaxTokens - held_now) return;
    const std::uint64_t wanted =
        static_cast<std::uint64_t>(held_now) + static_cast<std::uint64_t>(count);
    throw CapacityError(
        fmt::format("{} tokens would be held; a sequence has at most {}", wanted, kMaxTokens),
        ErrorCode::token_limit, {.layer = layer});
  }

  void check_range(SequenceId id, std::int64_t layer, std::int64_t first,
                   std::int64_t count) const {
    const std::int64_t held_now = backend->tokens(id, layer);
    if (first < 0 || count < 0 || first > held_now || count > held_now - first)
      invalid("{} tokens from token {} on; the layer has {}", count, first, held_now);
    if (const std::int64_t left = backend->left_tokens(id, layer); first < left)
      invalid("{} tokens from token {} on; the first {} have left the layer's sliding window",
              count, first, left);
  }

  // Calls f(sequence, row, rows) for the runs of consecutive rows of one sequence. Throws
  // InvalidArgument on a sequence that is unknown or has two runs.
  template <class F>
  void each_run(std::span<const SequenceId> rows, F&& f) {
    ++batch_count;
    for (std::size_t row = 0; row < rows.size();) {
      const SequenceId id = rows[row];
      std::size_t end = row + 1;
      while (end < rows.size() && rows[end] == id) ++end;
      if (id != kNoSequence) {
        const std::int64_t first = static_cast<std::int64_t>(row);
        Sequence& sequence = find(id, first);
        if (sequence.last_batch == batch_count) {
          invalid(ErrorCode::repeated, {.row = first},
                  "sequence {} appears again in row {}; its rows in a batch must be consecutive",
                  id.value, row);
        }
        sequence.last_batch = batch_count;
        f(id, first, static_cast<std::int64_t>(end - row));
      }
      row = end;
    }
  }

  // Fills `parts`, a part for each run.
  void cut_into_parts(const AppendBatch& batch) {
    parts.clear();
    each_run(batch.sequences, [&](SequenceId id, std::int64_t row, std::int64_t count) {
      AppendPart part{id, batch.keys, batch.values};
      for (TensorView* view : {&part.keys, &part.values}) {
        if (view->tokens == 0) continue;
        if (view->rows != nullptr) {
          view->rows += row;
        } else {
          view->data = view->row(row, 0);
        }
        view->tokens = count;
      }
      part.row = row;
      parts.push_back(part);
    });
  }

  // The fewest tokens, but for none, that a layer can go back to for its sliding window.
  std::int64_t least_tokens(SequenceId id, std::int64_t layer) const {
    const std::int64_t left = backend->left_tokens(id, layer);
    return left > 0 ? left + *config.layers[static_cast<std::size_t>(layer)].window : 0;
  }

  // Whether the last `count` tokens can be asked together.
  void check_burst(SequenceId id, std::int64_t layer, std::int64_t row, std::int64_t count) const {
    if (count == 1) return;
    const std::int64_t tokens = backend->tokens(id, layer);
    if (const std::int64_t least = least_tokens(id, layer); count > tokens - least + 1) {
      invalid(ErrorCode::shape, {.row = row},
              "sequence {} stands in {} rows from row {} on; of its {} tokens in layer {} no more "
              "than the last {} can be asked together: what others attend to has left the sliding "
              "window",
              id.value, count, row, tokens, layer, tokens - least + 1);
    }
    const std::int64_t compressed = backend->compressed_tokens(id, layer);
    if (count <= tokens - compressed) return;
    invalid(
        ErrorCode::shape, {.row = row},
        "sequence {} stands in {} rows from row {} on; of its {} tokens in layer {} the last {} "
        "are not compressed, and no more can be asked together",
        id.value, count, row, tokens, layer, tokens - compressed);
  }

  // Whether `reserve` has made room already.
  bool is_reserved(const AppendPart& part, std::int64_t layer) {
    return backend->tokens(part.sequence, layer) + part.keys.tokens <=
           find(part.sequence).reserved[static_cast<std::size_t>(layer)];
  }

  // Each sequence at most once.
  void append(std::int64_t layer, std::span<AppendPart> all) {
    const Stopwatch watch = times.appending(layer);
    for (AppendPart& part : all) {
      check_length(part.sequence, layer, part.keys.tokens);
      part.reserved = is_reserved(part, layer);
    }
    backend->append(layer, all, *this);
  }

  // The time is shared out by the rows that each layer compressed.
  void compress(SequenceId id, std::span<const ImportanceView> importance,
                std::span<const TensorView> prompt_queries) {
    std::vector<std::int64_t> rows(config.layers.size());
    const auto count = [&](std::int64_t sign) {
      all_layers(id)([&](SequenceId, std::int64_t layer) {
        const std::size_t i = static_cast<std::size_t>(layer);
        rows[i] += sign * config.layers[i].kv_heads * backend->compressed_tokens(id, layer);
      });
    };
    count(-1);
    std::int64_t elapsed = 0;
    {
      const Stopwatch watch(elapsed);
      backend->compress(id, importance, prompt_queries, *this);
    }
    count(1);
    times.compressed(elapsed, rows);
  }

  // Throws InvalidArgument unless these can be given to compress.
  void check_prompt(SequenceId id, std::span<const ImportanceView> importance,
                    std::span<const TensorView> prompt_queries) const {
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
      if (!compresses(layer)) continue;
      const std::int64_t index = static_cast<std::int64_t>(i);
      const std::int64_t open = backend->tokens(id, index) - backend->compressed_tokens(id, index);
      check_importance(i, importance[i], layer, open);
      if (prompt_queries.empty() || prompt_queries[i].tokens == 0) continue;
      try {
        check_rows("prompt queries", prompt_queries[i], layer.query_heads, layer.key_dim);
      } catch (Error& error) {
        error.add_place({.layer = index});
        throw;
      }
    }
  }

  std::int64_t left_to_compress(SequenceId id) const {
    const PendingCompression* pending = backend->pending(id);
    return pending != nullptr ? pending->left() : 0;
  }

  void refuse_pending(SequenceId id, const char* call) const {
    if (backend->pending(id) == nullptr) return;
    invalid(ErrorCode::being_compressed,
            "sequence {} is being compressed in slices, {} KV heads are left; {} has to wait for "
            "continue_compress or cancel_compress",
            id.value, left_to_compress(id), call);
  }

  std::int64_t continue_compress(SequenceId id, std::int64_t heads) {
    while (heads > 0 && backend->pending(id) != nullptr) {
      const std::int64_t layer = static_cast<std::int64_t>(backend->pending(id)->layer());
      const Stopwatch watch = times.compressing(layer);
      booked(all_layers(id), [&] {
        heads -= std::max<std::int64_t>(1, backend->continue_compress(id, heads, *this));
      });
    }
    return left_to_compress(id);
  }

  LayerStatistics statistics(std::int64_t layer) const {
    LayerStatistics result = backend->statistics(layer);
    times.add_to(result, layer);
    return result;
  }

  // make(id): in the backend. reserved: Sequence::reserved.
  template <class Make>
  SequenceId add_sequence(std::vector<std::int64_t> reserved, Make&& make) {
    const SequenceId id{next_sequence};
    parts.reserve(sequences.size() + 1);
    Sequence sequence;
    sequence.reserved = std::move(reserved);
    sequences.emplace(id.value, std::move(sequence));
    try {
      make(id);
    } catch (...) {
      sequences.erase(id.value);
      throw;
    }
    all_layers(id)([this](SequenceId one, std::int64_t layer) { add(total, own(one, layer)); });
    ++next_sequence;
    return id;
  }

  SequenceId create(std::uint64_t draw) {
    return add_sequence(std::vector<std::int64_t>(config.layers.size()),
                        [&](SequenceId id) { backend->create(id, draw); });
  }

  SequenceId fork(SequenceId from) {
    return add_sequence(find(from).reserved, [&](SequenceId id) {
      const TierBytes before = tiers();
      backend->fork(from, id);
      try {
        TierBytes copied = {0, backend->workspace_bytes() + total.fast_held_bytes() - before.fast};
        all_layers(id)([&](SequenceId, std::int64_t layer) {
          const MemoryReport added = own(id, layer);
          copied.add({added.host_held_bytes(), added.fast_held_bytes()});
        });
        check_tiers(config, before, copied);
      } catch (...) {
        backend->release(id);
        throw;
      }
    });
  }
};

std::unique_ptr<KvCacheManager> ManagerAccess::make(CacheConfig config,
                                                    std::unique_ptr<Backend> backend) {
  auto impl = std::make_unique<KvCacheManager::Impl>();
  impl->config = std::move(config);
  impl->backend = std::move(backend);
  impl->times = CallTimes(impl->config.layers.size());
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

SequenceId KvCacheManager::fork(SequenceId sequence) {
  const std::lock_guard lock(impl_->mutex);
  impl_->find(sequence);
  return impl_->fork(sequence);
}

void KvCacheManager::erase(SequenceId sequence) {
  const std::lock_guard lock(impl_->mutex);
  impl_->find(sequence);
  impl_->erase(sequence);
}

std::int64_t KvCacheManager::tokens(SequenceId sequence, std::int64_t layer) const try {
  const std::lock_guard lock(impl_->mutex);
  impl_->find(sequence);
  impl_->layer(layer);
  return impl_->backend->tokens(sequence, layer);
} catch (Error& error) {
  error.add_place({.layer = layer});
  throw;
}

std::int64_t KvCacheManager::compressed_tokens(SequenceId sequence, std::int64_t layer) const try {
  const std::lock_guard lock(impl_->mutex);
  impl_->find(sequence);
  impl_->layer(layer);
  return impl_->backend->compressed_tokens(sequence, layer);
} catch (Error& error) {
  error.add_place({.layer = layer});
  throw;
}

void KvCacheManager::append(SequenceId sequence, std::int64_t layer_index, const TensorView& keys,
                            const TensorView& values) try {
  const std::lock_guard lock(impl_->mutex);
  impl_->find(sequence);
  check_tokens(keys, values, impl_->token_rules(layer_index));
  if (keys.tokens == 0) return;
  AppendPart part{sequence, keys, values};
  impl_->append(layer_index, std::span(&part, 1));
} catch (Error& error) {
  error.add_place({.layer = layer_index});
  throw;
}

void KvCacheManager::append(std::int64_t layer_index, const AppendBatch& batch) try {
  const std::lock_guard lock(impl_->mutex);
  check_batch(batch, impl_->token_rules(layer_index));
  impl_->cut_into_parts(batch);
  impl_->append(layer_index, impl_->parts);
} catch (Error& error) {
  error.add_place({.layer = layer_index});
  throw;
}

void KvCacheManager::move(SequenceId sequence, std::int64_t layer, std::int64_t first,
                          const TensorView& keys, const TensorView& values) try {
  const std::lock_guard lock(impl_->mutex);
  impl_->find(sequence);
  check_tokens(keys, values, impl_->token_rules(layer));
  if (impl_->config.host != HostTier::engine)
    invalid(ErrorCode::wrong_backend, {}, "move: the host tier is the cache's own");
  impl_->check_range(sequence, layer, first, keys.tokens);
  if (keys.tokens > 0) impl_->backend->move(sequence, layer, first, keys, values);
} catch (Error& error) {
  error.add_place({.layer = layer});
  throw;
}

std::int64_t KvCacheManager::changed_row(SequenceId sequence, std::int64_t layer) const try {
  const std::lock_guard lock(impl_->mutex);
  impl_->find(sequence);
  impl_->layer(layer);
  return impl_->backend->changed_row(sequence, layer);
} catch (Error& error) {
  error.add_place({.layer = layer});
  throw;
}

void KvCacheManager::reserve(SequenceId id, std::int64_t tokens) {
  const std::lock_guard lock(impl_->mutex);
  Impl::Sequence& sequence = impl_->find(id);
  if (tokens < 0) invalid("{} tokens reserved; the number cannot be negative", tokens);
  std::vector<Growth> growths;
  const auto each = impl_->all_layers(id);
  each([&](SequenceId, std::int64_t layer) {
    impl_->check_length(id, layer, tokens);
    growths.push_back({id, layer, tokens});
  });
  impl_->booked(each, [&] {
    impl_->backend->reserve(growths, *impl_);
    each([&](SequenceId, std::int64_t layer) {
      sequence.reserved[static_cast<std::size_t>(layer)] =
          impl_->backend->tokens(id, layer) + tokens;
    });
  });
}

Truncation KvCacheManager::truncate(SequenceId id, std::int64_t tokens) {
  const std::lock_guard lock(impl_->mutex);
  Impl::Sequence& sequence = impl_->find(id);
  if (tokens < 0) invalid("{} tokens to keep; the number cannot be negative", tokens);
  const auto each = impl_->all_layers(id);
  std::int64_t longest = 0;
  Truncation result;
  Truncation refused;
  std::vector<std::int64_t> shorter;
  each([&](SequenceId, std::int64_t layer) {
    const std::int64_t compressed = impl_->backend->compressed_tokens(id, layer);
    const std::int64_t least = impl_->least_tokens(id, layer);
    if (tokens > 0 && tokens < least && least > refused.least_tokens)
      refused = {false, false, layer, least};
    longest = std::max(longest, impl_->backend->tokens(id, layer));
    if (compressed <= tokens) return;
    shorter.push_back(layer);
    if (compressed > result.least_tokens) result = {true, false, layer, compressed};
  });
  if (tokens > longest)
    invalid("{} tokens to keep; sequence {} has at most {} in a layer", tokens, id.value, longest);
  if (!refused.done) return refused;
  impl_->booked(each, [&] {
    if (!shorter.empty() && !impl_->backend->shorten(id, shorter, tokens)) {
      result.done = false;
      return;
    }
    if (const PendingCompression* pending = impl_->backend->pending(id);
        pending != nullptr && pending->needs_more_than(tokens))
      impl_->backend->cancel_compress(id);
    for (const std::int64_t layer : shorter) sequence.reserved[static_cast<std::size_t>(layer)] = 0;
    each([&](SequenceId, std::int64_t layer) {
      if (impl_->backend->tokens(id, layer) > tokens) impl_->backend->truncate(id, layer, tokens);
    });
  });
  return result;
}

void KvCacheManager::compress(SequenceId sequence, std::span<const ImportanceView> importance,
                              std::span<const TensorView> prompt_queries) {
  const std::lock_guard lock(impl_->mutex);
  Impl::Sequence& found = impl_->find(sequence);
  impl_->refuse_pending(sequence, "compress");
  impl_->check_prompt(sequence, importance, prompt_queries);
  impl_->booked(impl_->all_layers(sequence), [&] {
    impl_->compress(sequence, importance, prompt_queries);
    // Its tokens have no room for what their queries will give.
    std::fill(found.reserved.begin(), found.reserved.end(), std::int64_t{0});
  });
}

std::int64_t KvCacheManager::begin_compress(SequenceId sequence,
                                            std::span<const ImportanceView> importance,
                                            std::span<const TensorView> prompt_queries) {
  const std::lock_guard lock(impl_->mutex);
  impl_->find(sequence);
  impl_->refuse_pending(sequence, "begin_compress");
  impl_->check_prompt(sequence, importance, prompt_queries);
  impl_->booked(impl_->all_layers(sequence),
                [&] { impl_->backend->begin_compress(sequence, importance, prompt_queries); });
  return impl_->left_to_compress(sequence);
}

std::int64_t KvCacheManager::continue_compress(SequenceId sequence, std::int64_t heads) {
  const std::lock_guard lock(impl_->mutex);
  impl_->find(sequence);
  if (heads < 1) invalid("{} KV heads to compress at a time; at least 1 is needed", heads);
  return impl_->continue_compress(sequence, heads);
}

void KvCacheManager::cancel_compress(SequenceId sequence) {
  const std::lock_guard lock(impl_->mutex);
  impl_->find(sequence);
  impl_->booked(impl_->all_layers(sequence), [&] { impl_->backend->cancel_compress(sequence); });
}

void KvCacheManager::redraw(SequenceId sequence, std::uint64_t draw) {
  const std::lock_guard lock(impl_->mutex);
  impl_->find(sequence);
  impl_->refuse_pending(sequence, "redraw");
  impl_->booked(impl_->all_layers(sequence), [&] { impl_->backend->redraw(sequence, draw); });
}

void KvCacheManager::attend(std::int64_t layer_index, const AttendBatch& batch) try {
  const std::lock_guard lock(impl_->mutex);
  check_batch(batch, impl_->layer(layer_index));
  impl_->each_run(batch.sequences, [&](SequenceId id, std::int64_t row, std::int64_t count) {
    impl_->check_burst(id, layer_index, row, count);
  });
  const Stopwatch watch = impl_->times.attending(layer_index);
  impl_->backend->attend(layer_index, batch);
} catch (Error& error) {
  error.add_place({.layer = layer_index});
  throw;
}

void KvCacheManager::step(std::int64_t layer_index, const TensorView& keys,
                          const TensorView& values, const AttendBatch& batch) try {
  const std::lock_guard lock(impl_->mutex);
  const LayerConfig& layer = impl_->layer(layer_index);
  check_batch(batch, layer);
  const AppendBatch appended{batch.sequences, keys, values};
  check_batch(appended, impl_->token_rules(layer_index));
  impl_->backend->prepare_attend(batch);
  impl_->cut_into_parts(appended);
  impl_->append(layer_index, impl_->parts);
  const Stopwatch watch = impl_->times.attending(layer_index);
  impl_->backend->attend(layer_index, batch);
} catch (Error& error) {
  error.add_place({.layer = layer_index});
  throw;
}

void KvCacheManager::save(SequenceId sequence, const WriteBytes& write) const {
  const std::lock_guard lock(impl_->mutex);
  impl_->find(sequence);
  if (!write) invalid(ErrorCode::shape, "save is given no function to write with");
  impl_->backend->require_saving();
  impl_->refuse_pending(sequence, "save");
  SavedWriter writer(write);
  put_head(writer, impl_->config);
  impl_->backend->save(sequence, writer);
}

SequenceId KvCacheManager::restore(const ReadBytes& read) {
  const std::lock_guard lock(impl_->mutex);
  if (!read) invalid(ErrorCode::shape, "restore is given no function to read with");
  impl_->backend->require_saving();
  if (impl_->config.host == HostTier::engine) {
    invalid(ErrorCode::wrong_backend, {},
            "restore: the rows of this cache are the engine's, and what is saved has others");
  }
  SavedReader reader(read);
  check_head(reader, impl_->config);
  const TierBytes before = impl_->tiers();
  const SequenceId id = impl_->create(0);
  try {
    impl_->booked(impl_->all_layers(id), [&] { impl_->backend->restore(id, reader); });
    TierBytes added = impl_->tiers();
    added.add(before, -1);
    check_tiers(impl_->config, before, added);
  } catch (...) {
    impl_->erase(id);
    --impl_->next_sequence;  // so that names and draws of later sequences stay what they were
    throw;
  }
  return id;
}

void KvCacheManager::read(SequenceId sequence, std::int64_t layer, std::int64_t first,
                          std::int64_t count, std::span<std::byte> keys,
                          std::span<std::byte> values) const try {
  const std::lock_guard lock(impl_->mutex);
  impl_->find(sequence);
  const LayerConfig& shape = impl_->layer(layer);
  impl_->check_range(sequence, layer, first, count);
  const auto check_size = [&](const char* what, std::span<std::byte> to, std::int64_t dim) {
    const std::int64_t wanted =
        count * shape.kv_heads * dim * static_cast<std::int64_t>(size_bytes(impl_->config.storage));
    if (!to.empty() && to.size() != static_cast<std::size_t>(wanted)) {
      invalid("{} bytes for {} of {} tokens, {} heads and head size {}; {} are needed", to.size(),
              what, count, shape.kv_heads, dim, wanted);
    }
  };
  check_size("keys", keys, shape.key_dim);
  check_size("values", values, shape.value_dim);
  impl_->backend->read(sequence, layer, first, count, keys.data(), values.data());
} catch (Error& error) {
  error.add_place({.layer = layer});
  throw;
}

MemoryReport KvCacheManager::memory() const {
  const std::lock_guard lock(impl_->mutex);
  MemoryReport report = impl_->total;
  report.shared_bytes = 0;
  report.workspace_bytes = impl_->backend->workspace_bytes();
  report.file_bytes = impl_->backend->file_bytes();
  return report;
}

MemoryReport KvCacheManager::memory(SequenceId sequence) const {
  const std::lock_guard lock(impl_->mutex);
  impl_->find(sequence);
  return impl_->held(sequence);
}

LayerStatistics KvCacheManager::statistics(std::int64_t layer) const try {
  const std::lock_guard lock(impl_->mutex);
  impl_->layer(layer);
  return impl_->statistics(layer);
} catch (Error& error) {
  error.add_place({.layer = layer});
  throw;
}

LayerStatistics KvCacheManager::statistics() const {
  const std::lock_guard lock(impl_->mutex);
  LayerStatistics sum;
  for (std::size_t i = 0; i < impl_->config.layers.size(); ++i) {
    if (impl_->config.layers[i].cached) sum += impl_->statistics(static_cast<std::int64_t>(i));
  }
  return sum;
}

void KvCacheManager::reset_statistics() {
  const std::lock_guard lock(impl_->mutex);
  impl_->backend->reset_statistics();
  impl_->times.reset();
}

}  // namespace verkv
