// The manager's running totals of memory: equal to the sum over sequences, and kept without asking
// for any sequence but the one that a call is about.
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "catch.hpp"
#include "manager_access.hpp"
#include "reference/statistics.hpp"

namespace {

using verkv::AttendBatch;
using verkv::CacheConfig;
using verkv::CapacityError;
using verkv::DType;
using verkv::ImportanceView;
using verkv::KvCacheManager;
using verkv::LayerStatistics;
using verkv::MemoryReport;
using verkv::SequenceId;
using verkv::TensorView;
using verkv::reference::Random;

constexpr std::int64_t kDim = 8;

std::vector<std::int64_t> fields(const MemoryReport& r) {
  return {r.resident_bytes, r.sketch_bytes,    r.metadata_bytes,      r.host_bytes,
          r.basis_bytes,    r.workspace_bytes, r.reserved_bytes,      r.pageable_bytes,
          r.shared_bytes,   r.engine_bytes,    r.fast_reserved_bytes, r.host_reserved_bytes};
}

// The sum that the totals have to be.
std::vector<std::int64_t> summed(const KvCacheManager& cache,
                                 const std::vector<SequenceId>& sequences) {
  std::vector<std::int64_t> sum = fields({.workspace_bytes = cache.memory().workspace_bytes});
  for (const SequenceId id : sequences) {
    const std::vector<std::int64_t> one = fields(cache.memory(id));
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += one[i];
  }
  return sum;
}

TEST_CASE("Totals of memory are the sum over sequences after any operations") {
  for (const std::uint32_t seed : {1u, 2u, 3u}) {
    Random random(seed);
    CacheConfig config;
    config.layers.assign(3, {.kv_heads = 2, .query_heads = 4, .key_dim = kDim, .value_dim = kDim});
    config.layers[1].dense = true;
    config.layers[2].cached = seed != 2;
    config.keep = 0.25;
    config.local_tokens = 4;
    config.chunk_tokens = 8;
    config.compress_from = 0;
    config.threads = 1;
    config.fast_bytes_limit = 60'000;
    const auto cache = verkv::make_cpu_cache(config);
    std::vector<SequenceId> sequences;
    std::vector<float> numbers(static_cast<std::size_t>(64 * 4 * kDim));
    for (float& x : numbers) x = static_cast<float>(random.normal());
    const std::vector<float> scores(5000, 1.0f);
    int refused = 0;
    int compressed = 0;
    int shortened = 0;
    const auto operate = [&] {
      const std::size_t what = random.below(11);
      if (sequences.empty() || what == 0) sequences.push_back(cache->create_sequence());
      const std::size_t at = random.below(sequences.size());
      const SequenceId id = sequences[at];
      if (what == 1) {
        cache->erase(id);
        sequences.erase(sequences.begin() + static_cast<std::ptrdiff_t>(at));
      } else if (what == 2) {
        std::vector<ImportanceView> views(3);
        for (const std::int64_t layer : {0, 2}) {
          if (!config.layers[static_cast<std::size_t>(layer)].cached) continue;
          const std::int64_t open = cache->tokens(id, layer) - cache->compressed_tokens(id, layer);
          views[static_cast<std::size_t>(layer)] = {scores.data(), 2, open, open};
        }
        cache->compress(id, views);
        ++compressed;
      } else if (what == 3) {
        cache->redraw(id, random.bits());
      } else if (what == 4) {
        // Also to before the local window.
        const std::int64_t held = cache->tokens(id, 0);
        const std::int64_t kept = held - static_cast<std::int64_t>(random.below(12));
        if (kept >= 0) shortened += !cache->truncate(id, kept).exact;
      } else {
        const std::int64_t tokens = static_cast<std::int64_t>(random.below(24));
        const std::int64_t layer = static_cast<std::int64_t>(random.below(seed != 2 ? 3 : 2));
        const TensorView rows = verkv::token_major(numbers.data(), DType::f32, tokens, 2, kDim);
        TensorView bad = rows;
        bad.type = DType::bf16;  // halves of binary32 numbers: some are not finite
        try {
          cache->append(id, layer, rows, random.below(8) == 0 ? bad : rows);
        } catch (const verkv::InvalidArgument&) {
        }
      }
    };
    for (int step = 0; step < 600; ++step) {
      try {
        operate();
      } catch (const CapacityError&) {
        ++refused;
      }
      REQUIRE(fields(cache->memory()) == summed(*cache, sequences));
    }
    CHECK(refused > 5);
    CHECK(compressed > 5);
    CHECK(shortened > 3);
    for (const SequenceId id : sequences) cache->erase(id);
    sequences.clear();
    CHECK(fields(cache->memory()) == summed(*cache, sequences));
  }
}

TEST_CASE("Totals count once what sequences of one batch stop sharing") {
  CacheConfig config;
  config.layers = {{.kv_heads = 2, .query_heads = 2, .key_dim = kDim, .value_dim = kDim}};
  config.keep = 0.25;
  config.local_tokens = 4;
  config.chunk_tokens = 8;
  config.compress_from = 0;
  config.threads = 1;
  const auto cache = verkv::make_cpu_cache(config);
  const std::vector<std::int64_t> empty = fields(cache->memory());
  Random random(5);
  std::vector<float> numbers(static_cast<std::size_t>(40 * 2 * kDim));
  for (float& x : numbers) x = static_cast<float>(random.normal());
  const std::vector<float> scores(80, 1.0f);
  const auto rows = [&](std::int64_t count) {
    return verkv::token_major(numbers.data(), DType::f32, count, 2, kDim);
  };
  const SequenceId parent = cache->create_sequence();
  cache->append(parent, 0, rows(40), rows(40));
  const ImportanceView importance{scores.data(), 2, 40, 40};
  cache->compress(parent, {&importance, 1});
  const SequenceId child = cache->fork(parent);
  // Rows of the window at first, and of the sketch where a chunk goes.
  const std::vector<SequenceId> both = {child, child, parent};
  for (int i = 0; i < 20; ++i) cache->append(0, {both, rows(3), rows(3)});
  REQUIRE(cache->compressed_tokens(child, 0) > 40);
  cache->erase(parent);
  CHECK(fields(cache->memory()) == summed(*cache, {child}));
  cache->erase(child);
  std::vector<std::int64_t> left = fields(cache->memory());
  left[5] = empty[5];  // buffers of a step
  CHECK(left == empty);
}

// Counts what the manager asks for. A sequence's layer holds 10 bytes a token.
class CountingBackend final : public verkv::Backend {
 public:
  std::string description() const override { return "counting"; }
  void create(SequenceId id, std::uint64_t) override { touched(id), lengths_[id.value]; }
  void release(SequenceId id) noexcept override { touched(id), lengths_.erase(id.value); }
  std::int64_t tokens(SequenceId id, std::int64_t layer) const override {
    touched(id);
    return length(id, layer);
  }
  std::int64_t compressed_tokens(SequenceId id, std::int64_t) const override {
    return touched(id), 0;
  }
  bool scores_window(SequenceId id, std::int64_t) const override { return touched(id), false; }
  void reserve(std::span<const verkv::Growth> growths, verkv::Totals&) override {
    for (const verkv::Growth& growth : growths) touched(growth.sequence);
  }
  void append(std::int64_t layer, std::span<const verkv::AppendPart> parts,
              verkv::Totals& totals) override {
    for (const verkv::AppendPart& part : parts) {
      const verkv::Booking booking(&totals, part.sequence, layer);
      touched(part.sequence);
      lengths_[part.sequence.value][layer] += part.keys.tokens;
    }
    if (fails)
      throw verkv::DeviceError("after memory was taken", 2, verkv::ErrorCode::device_memory);
  }
  void truncate(SequenceId id, std::int64_t layer, std::int64_t tokens) override {
    touched(id);
    lengths_[id.value][layer] = tokens;
  }
  void compress(SequenceId id, std::span<const ImportanceView>, std::span<const TensorView>,
                verkv::Totals&) override {
    touched(id);
  }
  void begin_compress(SequenceId id, std::span<const ImportanceView>,
                      std::span<const TensorView>) override {
    touched(id);
  }
  std::int64_t continue_compress(SequenceId id, std::int64_t, verkv::Totals&) override {
    return touched(id), 0;
  }
  void cancel_compress(SequenceId id) noexcept override { touched(id); }
  const verkv::PendingCompression* pending(SequenceId) const override { return nullptr; }
  void redraw(SequenceId id, std::uint64_t) override { touched(id); }
  void move(SequenceId, std::int64_t, std::int64_t, const TensorView&, const TensorView&) override {
  }
  std::int64_t changed_row(SequenceId, std::int64_t) const override { return -1; }
  void prepare_attend(const AttendBatch&) override {}
  void attend(std::int64_t, const AttendBatch&) override {}
  LayerStatistics statistics(std::int64_t) const override { return {}; }
  void reset_statistics() override {}
  bool shorten(SequenceId id, std::span<const std::int64_t> layers, std::int64_t tokens) override {
    touched(id);
    for (const std::int64_t layer : layers) lengths_[id.value][layer] = tokens;
    return true;
  }
  void read(SequenceId, std::int64_t, std::int64_t, std::int64_t, std::byte*,
            std::byte*) const override {}
  void save(SequenceId, verkv::SavedWriter&) const override {}
  void restore(SequenceId id, verkv::SavedReader&) override { touched(id); }
  void fork(SequenceId from, SequenceId to) override {
    touched(from);
    lengths_[to.value] = lengths_[from.value];
  }
  MemoryReport memory(SequenceId id, std::int64_t layer) const noexcept override {
    touched(id);
    return {.resident_bytes = 10 * length(id, layer), .host_bytes = 10 * length(id, layer)};
  }
  std::int64_t workspace_bytes() const override { return 0; }

  bool fails = false;
  mutable std::int64_t calls = 0;
  mutable std::set<std::int64_t> asked_for;

 private:
  void touched(SequenceId id) const {
    ++calls;
    asked_for.insert(id.value);
  }
  std::int64_t length(SequenceId id, std::int64_t layer) const {
    const auto& layers = lengths_.at(id.value);
    const auto found = layers.find(layer);
    return found == layers.end() ? 0 : found->second;
  }

  std::map<std::int64_t, std::map<std::int64_t, std::int64_t>> lengths_;
};

TEST_CASE("An append under byte limits asks for its own sequence only") {
  CacheConfig config;
  config.layers.assign(50, {.kv_heads = 1, .query_heads = 1, .key_dim = kDim, .value_dim = kDim});
  config.fast_bytes_limit = 1'000'000;
  config.host_bytes_limit = 1'000'000;
  std::vector<float> numbers(kDim);
  const TensorView row = verkv::token_major(numbers.data(), DType::f32, 1, 1, kDim);
  std::optional<std::int64_t> calls;
  for (const int others : {0, 1, 1000}) {
    auto owned = std::make_unique<CountingBackend>();
    CountingBackend& backend = *owned;
    const auto cache = verkv::ManagerAccess::make(config, std::move(owned));
    const SequenceId id = cache->create_sequence();
    for (int i = 0; i < others; ++i) cache->append(cache->create_sequence(), 0, row, row);
    backend.calls = 0;
    backend.asked_for.clear();
    cache->append(id, 7, row, row);
    CHECK(backend.asked_for == std::set<std::int64_t>{id.value});
    CHECK(backend.calls < 10);  // nor does it walk the 50 layers
    CHECK(backend.calls == calls.value_or(backend.calls));
    calls = backend.calls;
    CHECK(cache->memory().host_bytes == 10 * (others + 1));
    CHECK(backend.asked_for.size() == 1);
  }
}

TEST_CASE("Totals stay right where a call fails after it has taken memory") {
  CacheConfig config;
  config.layers = {{.kv_heads = 1, .query_heads = 1, .key_dim = kDim, .value_dim = kDim}};
  auto owned = std::make_unique<CountingBackend>();
  CountingBackend& backend = *owned;
  const auto cache = verkv::ManagerAccess::make(config, std::move(owned));
  const SequenceId id = cache->create_sequence();
  std::vector<float> numbers(kDim);
  const TensorView row = verkv::token_major(numbers.data(), DType::f32, 1, 1, kDim);
  backend.fails = true;
  CHECK_THROWS_AS(cache->append(id, 0, row, row), verkv::DeviceError);
  CHECK(cache->memory().host_bytes == cache->memory(id).host_bytes);
  CHECK(cache->memory().host_bytes == 10);
  cache->erase(id);
  CHECK(cache->memory().host_bytes == 0);
}

}  // namespace
