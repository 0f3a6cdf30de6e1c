// The cache in C: each function is a call of KvCacheManager, with checks of what C cannot express.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <verkv/kv_cache_manager.hpp>
#include <verkv/metrics.hpp>

#include "c_face.hpp"

struct verkv_cache {
  std::unique_ptr<verkv::KvCacheManager> manager;
};

namespace verkv::c_face {

verkv_memory_report to_c(const MemoryReport& report) noexcept {
  verkv_memory_report c = {};
  c.resident_bytes = report.resident_bytes;
  c.sketch_bytes = report.sketch_bytes;
  c.metadata_bytes = report.metadata_bytes;
  c.host_bytes = report.host_bytes;
  c.basis_bytes = report.basis_bytes;
  c.workspace_bytes = report.workspace_bytes;
  c.reserved_bytes = report.reserved_bytes;
  c.pageable_bytes = report.pageable_bytes;
  c.shared_bytes = report.shared_bytes;
  c.engine_bytes = report.engine_bytes;
  c.fast_reserved_bytes = report.fast_reserved_bytes;
  c.host_reserved_bytes = report.host_reserved_bytes;
  c.file_bytes = report.file_bytes;
  return c;
}

verkv_layer_statistics to_c(const LayerStatistics& statistics) noexcept {
  verkv_layer_statistics c = {};
  c.steps = statistics.steps;
  c.decisions = statistics.decisions;
  c.certified = statistics.certified;
  c.enlarged = statistics.enlarged;
  c.fetching = statistics.fetching;
  c.planned_tokens = statistics.planned_tokens;
  c.fetched_tokens = statistics.fetched_tokens;
  c.moved_tokens = statistics.moved_tokens;
  c.moved_bytes = statistics.moved_bytes;
  c.cached_tokens = statistics.cached_tokens;
  c.resident_tokens = statistics.resident_tokens;
  static_assert(std::size(verkv_layer_statistics{}.bounds) == std::size(LayerStatistics{}.bounds));
  std::copy(std::begin(statistics.bounds), std::end(statistics.bounds), std::begin(c.bounds));
  c.attend_ns = statistics.attend_ns;
  c.append_ns = statistics.append_ns;
  c.compress_ns = statistics.compress_ns;
  return c;
}

namespace {

KvCacheManager& manager(verkv_cache* cache) { return *needed(cache, "the cache").manager; }
const KvCacheManager& manager(const verkv_cache* cache) {
  return *needed(cache, "the cache").manager;
}

// Arrays of the caller that the manager reads and writes as its own: same members, same places.
template <class To, class From>
constexpr bool same_shape = sizeof(To) == sizeof(From) && alignof(To) == alignof(From) &&
                            std::is_trivially_copyable_v<To>&& std::is_standard_layout_v<To>;
static_assert(same_shape<SequenceId, std::int64_t>);
static_assert(same_shape<RowStatus, std::uint8_t>);
static_assert(
    same_shape<QueryHeadReport, verkv_query_head_report> &&
    offsetof(QueryHeadReport, epsilon) == offsetof(verkv_query_head_report, epsilon) &&
    offsetof(QueryHeadReport, certified) == offsetof(verkv_query_head_report, certified) &&
    offsetof(QueryHeadReport, planned_tokens) ==
        offsetof(verkv_query_head_report, planned_tokens) &&
    offsetof(QueryHeadReport, sketch_error) == offsetof(verkv_query_head_report, sketch_error) &&
    offsetof(QueryHeadReport, output_error) == offsetof(verkv_query_head_report, output_error));
static_assert(
    same_shape<KvHeadReport, verkv_kv_head_report> &&
    offsetof(KvHeadReport, fetched_tokens) == offsetof(verkv_kv_head_report, fetched_tokens) &&
    offsetof(KvHeadReport, moved_tokens) == offsetof(verkv_kv_head_report, moved_tokens) &&
    offsetof(KvHeadReport, moved_bytes) == offsetof(verkv_kv_head_report, moved_bytes) &&
    offsetof(KvHeadReport, resident_tokens) == offsetof(verkv_kv_head_report, resident_tokens) &&
    offsetof(KvHeadReport, limited) == offsetof(verkv_kv_head_report, limited));

std::span<const SequenceId> sequences(const std::int64_t* data, std::int64_t rows) {
  return array(reinterpret_cast<const SequenceId*>(data), rows, "sequences");
}

// What compress is given.
struct Prompt {
  Prompt(const verkv_importance_view* importance, std::int64_t importance_count,
         const verkv_tensor_view* prompt_queries, std::int64_t prompt_query_count) {
    for (const auto& c : array(importance, importance_count, "importance"))
      scores.push_back({c.data, c.heads, c.tokens, c.head_stride});
    for (const auto& c : array(prompt_queries, prompt_query_count, "prompt_queries"))
      queries.push_back(view(c, "prompt_queries"));
  }
  std::vector<ImportanceView> scores;
  std::vector<TensorView> queries;
};

// The caller's array of reports: its own memory where an element is as large as the library's, else
// one that is handed out afterwards.
template <class Report, class CReport>
class Reports {
 public:
  Reports(CReport* data, std::int64_t count, std::size_t size, const char* what)
      : to_(reinterpret_cast<unsigned char*>(data)),
        span_(array(reinterpret_cast<Report*>(data), count, what)),
        size_(size) {
    if (count == 0) return;
    check_size(size, alignof(Report), alignof(Report), what);
    if (size == sizeof(Report)) return;
    own_.resize(span_.size());
    span_ = own_;
  }
  std::span<Report> span() const { return span_; }
  void finish() noexcept {
    for (std::size_t i = 0; i < own_.size(); ++i) hand_out(own_[i], to_ + i * size_, size_);
  }

 private:
  unsigned char* to_;
  std::span<Report> span_;
  std::size_t size_;
  std::vector<Report> own_;
};

// Calls f(batch) with the caller's batch.
template <class F>
void with_batch(const verkv_attend_batch* from, F&& f) {
  const verkv_attend_batch c = taken(from, verkv_attend_batch{}, "verkv_attend_batch");
  Reports<QueryHeadReport, verkv_query_head_report> query_reports(
      c.query_reports, c.query_report_count, c.query_report_size, "query_reports");
  Reports<KvHeadReport, verkv_kv_head_report> kv_reports(c.kv_reports, c.kv_report_count,
                                                         c.kv_report_size, "kv_reports");
  AttendBatch batch;
  batch.sequences = sequences(c.sequences, c.rows);
  batch.queries = view(c.queries, "queries");
  batch.output = array(c.output, c.output_count, "output");
  batch.lse = array(c.lse, c.lse_count, "lse");
  batch.query_reports = query_reports.span();
  batch.kv_reports = kv_reports.span();
  batch.row_status =
      array(reinterpret_cast<RowStatus*>(c.row_status), c.row_status_count, "row_status");
  f(batch);
  query_reports.finish();
  kv_reports.finish();
}

// Calls f and hands out its result, a number.
template <class F>
verkv_code number(std::int64_t* to, const char* what, verkv_error* error, F&& f) noexcept {
  return guarded(error, [&] {
    std::int64_t& result = needed(to, what);
    result = f();
  });
}

// Calls f and hands out its result, a report.
template <class CReport, class F>
verkv_code report(CReport* to, const char* what, verkv_error* error, F&& f) noexcept {
  return guarded(error, [&] {
    Result<CReport> result(to, what);
    result.set(to_c(f()));
  });
}

template <class F>
verkv_code text_result(char* text, std::size_t bytes, std::size_t* length, verkv_error* error,
                       F&& f) noexcept {
  return guarded(error, [&] {
    TextResult result(text, bytes, length);
    result.set(f());
  });
}

WriteBytes writer(verkv_write_bytes write, void* user) {
  if (write == nullptr) invalid("the function that writes is NULL");
  return [write, user](std::span<const std::byte> bytes) {
    const std::int64_t status = write(user, bytes.data(), bytes.size());
    if (status != 0) throw CallbackFailure{"the function that writes has failed", status};
  };
}

ReadBytes reader(verkv_read_bytes read, void* user) {
  if (read == nullptr) invalid("the function that reads is NULL");
  return [read, user](std::span<std::byte> bytes) {
    const std::int64_t count = read(user, bytes.data(), bytes.size());
    if (count < 0) throw CallbackFailure{"the function that reads has failed", count};
    if (static_cast<std::uint64_t>(count) > bytes.size())
      throw CallbackFailure{"the function that reads claims more bytes than it was asked for",
                            count};
    return static_cast<std::size_t>(count);
  };
}

std::span<std::byte> bytes_of(void* data, std::size_t bytes, const char* what) {
  if (data == nullptr && bytes > 0) invalid("{} is NULL for {} bytes", what, bytes);
  return {static_cast<std::byte*>(data), bytes};
}

}  // namespace
}  // namespace verkv::c_face

using verkv::SequenceId;
namespace c_face = verkv::c_face;

extern "C" {

// ---- The cache

verkv_code verkv_make_cpu_cache(const verkv_cache_config* config, verkv_cache** cache,
                                verkv_error* error) {
  if (cache != nullptr) *cache = nullptr;
  return c_face::guarded(error, [&] {
    verkv_cache*& result = c_face::needed(cache, "where the cache goes");
    auto made = std::make_unique<verkv_cache>();
    made->manager = verkv::make_cpu_cache(c_face::cache_config(config));
    result = made.release();
  });
}

void verkv_destroy(verkv_cache* cache) { delete cache; }

verkv_code verkv_config(const verkv_cache* cache, verkv_cache_config* config, verkv_error* error) {
  return c_face::report(
      config, "verkv_cache_config",
      error, [&]() -> const auto& { return c_face::manager(cache).config(); });
}

verkv_code verkv_config_of_layer(const verkv_cache* cache, int64_t layer,
                                 verkv_layer_config* config, size_t size, verkv_error* error) {
  return c_face::guarded(error, [&] {
    c_face::needed(config, "the layer's configuration");
    c_face::check_layer_size(size);
    const auto& layers = c_face::manager(cache).config().layers;
    if (layer < 0 || layer >= std::ssize(layers)) {
      verkv::invalid(verkv::ErrorCode::unknown_layer, {.layer = layer},
                     "layer {}; the configuration has layers 0 to {}", layer, layers.size() - 1);
    }
    c_face::hand_out(c_face::to_c(layers[static_cast<std::size_t>(layer)]), config, size);
  });
}

verkv_code verkv_description(const verkv_cache* cache, char* text, size_t bytes, size_t* length,
                             verkv_error* error) {
  return c_face::text_result(text, bytes, length, error,
                             [&] { return c_face::manager(cache).description(); });
}

// ---- Sequences

verkv_code verkv_create_sequence(verkv_cache* cache, int64_t* sequence, verkv_error* error) {
  return c_face::number(sequence, "where the sequence goes", error,
                        [&] { return c_face::manager(cache).create_sequence().value; });
}

verkv_code verkv_create_sequence_with_draw(verkv_cache* cache, uint64_t draw, int64_t* sequence,
                                           verkv_error* error) {
  return c_face::number(sequence, "where the sequence goes", error,
                        [&] { return c_face::manager(cache).create_sequence(draw).value; });
}

verkv_code verkv_fork(verkv_cache* cache, int64_t sequence, int64_t* fork, verkv_error* error) {
  return c_face::number(fork, "where the fork goes", error,
                        [&] { return c_face::manager(cache).fork(SequenceId{sequence}).value; });
}

verkv_code verkv_erase(verkv_cache* cache, int64_t sequence, verkv_error* error) {
  return c_face::guarded(error, [&] { c_face::manager(cache).erase(SequenceId{sequence}); });
}

verkv_code verkv_tokens(const verkv_cache* cache, int64_t sequence, int64_t layer, int64_t* tokens,
                        verkv_error* error) {
  return c_face::number(tokens, "where the number of tokens goes", error,
                        [&] { return c_face::manager(cache).tokens(SequenceId{sequence}, layer); });
}

verkv_code verkv_compressed_tokens(const verkv_cache* cache, int64_t sequence, int64_t layer,
                                   int64_t* tokens, verkv_error* error) {
  return c_face::number(tokens, "where the number of tokens goes", error, [&] {
    return c_face::manager(cache).compressed_tokens(SequenceId{sequence}, layer);
  });
}

// ---- Tokens

verkv_code verkv_append(verkv_cache* cache, int64_t sequence, int64_t layer,
                        const verkv_tensor_view* keys, const verkv_tensor_view* values,
                        verkv_error* error) {
  return c_face::guarded(error, [&] {
    c_face::manager(cache).append(SequenceId{sequence}, layer, c_face::view(keys, "keys"),
                                  c_face::view(values, "values"));
  });
}

verkv_code verkv_batch_append(verkv_cache* cache, int64_t layer, const verkv_append_batch* batch,
                              verkv_error* error) {
  return c_face::guarded(error, [&] {
    const auto c = c_face::taken(batch, verkv_append_batch{}, "verkv_append_batch");
    verkv::AppendBatch to{c_face::sequences(c.sequences, c.rows), c_face::view(c.keys, "keys"),
                          c_face::view(c.values, "values")};
    to.keys.rows = c.key_rows;
    to.values.rows = c.value_rows;
    c_face::manager(cache).append(layer, to);
  });
}

verkv_code verkv_move(verkv_cache* cache, int64_t sequence, int64_t layer, int64_t first,
                      const verkv_tensor_view* keys, const verkv_tensor_view* values,
                      const void* const* key_rows, const void* const* value_rows,
                      verkv_error* error) {
  return c_face::guarded(error, [&] {
    verkv::TensorView k = c_face::view(keys, "keys");
    verkv::TensorView v = c_face::view(values, "values");
    k.rows = key_rows;
    v.rows = value_rows;
    c_face::manager(cache).move(SequenceId{sequence}, layer, first, k, v);
  });
}

verkv_code verkv_reserve(verkv_cache* cache, int64_t sequence, int64_t tokens, verkv_error* error) {
  return c_face::guarded(error,
                         [&] { c_face::manager(cache).reserve(SequenceId{sequence}, tokens); });
}

verkv_code verkv_truncate(verkv_cache* cache, int64_t sequence, int64_t tokens,
                          verkv_truncation* truncation, verkv_error* error) {
  return c_face::guarded(error, [&] {
    c_face::Result<verkv_truncation> result(truncation, "verkv_truncation");
    const verkv::Truncation done = c_face::manager(cache).truncate(SequenceId{sequence}, tokens);
    result.set({0, done.layer, done.least_tokens, done.done, done.exact});
  });
}

verkv_code verkv_compress(verkv_cache* cache, int64_t sequence,
                          const verkv_importance_view* importance, int64_t importance_count,
                          const verkv_tensor_view* prompt_queries, int64_t prompt_query_count,
                          verkv_error* error) {
  return c_face::guarded(error, [&] {
    const c_face::Prompt prompt(importance, importance_count, prompt_queries, prompt_query_count);
    c_face::manager(cache).compress(SequenceId{sequence}, prompt.scores, prompt.queries);
  });
}

verkv_code verkv_begin_compress(verkv_cache* cache, int64_t sequence,
                                const verkv_importance_view* importance, int64_t importance_count,
                                const verkv_tensor_view* prompt_queries, int64_t prompt_query_count,
                                int64_t* left, verkv_error* error) {
  return c_face::number(left, "where the number of heads goes", error, [&] {
    const c_face::Prompt prompt(importance, importance_count, prompt_queries, prompt_query_count);
    return c_face::manager(cache).begin_compress(SequenceId{sequence}, prompt.scores,
                                                 prompt.queries);
  });
}

verkv_code verkv_continue_compress(verkv_cache* cache, int64_t sequence, int64_t heads,
                                   int64_t* left, verkv_error* error) {
  return c_face::number(left, "where the number of heads goes", error, [&] {
    return c_face::manager(cache).continue_compress(SequenceId{sequence}, heads);
  });
}

verkv_code verkv_cancel_compress(verkv_cache* cache, int64_t sequence, verkv_error* error) {
  return c_face::guarded(error,
                         [&] { c_face::manager(cache).cancel_compress(SequenceId{sequence}); });
}

// ---- Steps

verkv_code verkv_attend(verkv_cache* cache, int64_t layer, const verkv_attend_batch* batch,
                        verkv_error* error) {
  return c_face::guarded(error, [&] {
    auto& manager = c_face::manager(cache);
    c_face::with_batch(batch, [&](const verkv::AttendBatch& b) { manager.attend(layer, b); });
  });
}

verkv_code verkv_step(verkv_cache* cache, int64_t layer, const verkv_tensor_view* keys,
                      const verkv_tensor_view* values, const verkv_attend_batch* batch,
                      verkv_error* error) {
  return c_face::guarded(error, [&] {
    auto& manager = c_face::manager(cache);
    const verkv::TensorView k = c_face::view(keys, "keys");
    const verkv::TensorView v = c_face::view(values, "values");
    c_face::with_batch(batch, [&](const verkv::AttendBatch& b) { manager.step(layer, k, v, b); });
  });
}

// ---- Reports

verkv_code verkv_memory(const verkv_cache* cache, verkv_memory_report* report, verkv_error* error) {
  return c_face::report(report, "verkv_memory_report", error,
                        [&] { return c_face::manager(cache).memory(); });
}

verkv_code verkv_memory_of_sequence(const verkv_cache* cache, int64_t sequence,
                                    verkv_memory_report* report, verkv_error* error) {
  return c_face::report(report, "verkv_memory_report", error,
                        [&] { return c_face::manager(cache).memory(SequenceId{sequence}); });
}

double verkv_bound_edge(int32_t i) {
  if (i < 0 || i >= verkv::kBoundEdges) return std::numeric_limits<double>::quiet_NaN();
  return verkv::bound_edge(i);
}

verkv_code verkv_statistics(const verkv_cache* cache, verkv_layer_statistics* statistics,
                            verkv_error* error) {
  return c_face::report(statistics, "verkv_layer_statistics", error,
                        [&] { return c_face::manager(cache).statistics(); });
}

verkv_code verkv_statistics_of_layer(const verkv_cache* cache, int64_t layer,
                                     verkv_layer_statistics* statistics, verkv_error* error) {
  return c_face::report(statistics, "verkv_layer_statistics", error,
                        [&] { return c_face::manager(cache).statistics(layer); });
}

verkv_code verkv_reset_statistics(verkv_cache* cache, verkv_error* error) {
  return c_face::guarded(error, [&] { c_face::manager(cache).reset_statistics(); });
}

verkv_code verkv_prometheus_text(const verkv_cache* cache, char* text, size_t bytes, size_t* length,
                                 verkv_error* error) {
  return c_face::text_result(text, bytes, length, error,
                             [&] { return verkv::prometheus_text(c_face::manager(cache)); });
}

verkv_code verkv_changed_row(const verkv_cache* cache, int64_t sequence, int64_t layer,
                             int64_t* token, verkv_error* error) {
  return c_face::number(token, "where the token goes", error, [&] {
    return c_face::manager(cache).changed_row(SequenceId{sequence}, layer);
  });
}

verkv_code verkv_redraw(verkv_cache* cache, int64_t sequence, uint64_t draw, verkv_error* error) {
  return c_face::guarded(error, [&] { c_face::manager(cache).redraw(SequenceId{sequence}, draw); });
}

// ---- Saving

verkv_code verkv_save(const verkv_cache* cache, int64_t sequence, verkv_write_bytes write,
                      void* user, verkv_error* error) {
  return c_face::guarded(error, [&] {
    c_face::manager(cache).save(SequenceId{sequence}, c_face::writer(write, user));
  });
}

verkv_code verkv_restore(verkv_cache* cache, verkv_read_bytes read, void* user, int64_t* sequence,
                         verkv_error* error) {
  return c_face::number(sequence, "where the sequence goes", error, [&] {
    return c_face::manager(cache).restore(c_face::reader(read, user)).value;
  });
}

verkv_code verkv_read(const verkv_cache* cache, int64_t sequence, int64_t layer, int64_t first,
                      int64_t count, void* keys, size_t key_bytes, void* values, size_t value_bytes,
                      verkv_error* error) {
  return c_face::guarded(error, [&] {
    c_face::manager(cache).read(SequenceId{sequence}, layer, first, count,
                                c_face::bytes_of(keys, key_bytes, "keys"),
                                c_face::bytes_of(values, value_bytes, "values"));
  });
}

}  // extern "C"
