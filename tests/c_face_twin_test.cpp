// Every word of the C++ interface has its twin in C, and both give the same bits.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include <verkv/verkv.h>
#include <verkv/kv_cache_manager.hpp>
#include <verkv/row_attention.hpp>

#include "c_face.hpp"
#include "catch.hpp"
#include "reference/statistics.hpp"

namespace {

using namespace verkv;

template <class Enumeration>
constexpr int number(Enumeration value) {
  return static_cast<int>(value);
}

static_assert(VERKV_DTYPE_F32 == number(DType::f32) && VERKV_DTYPE_F16 == number(DType::f16) &&
              VERKV_DTYPE_BF16 == number(DType::bf16));
static_assert(VERKV_SKETCH_KIND_EXACT == number(SketchKind::exact) &&
              VERKV_SKETCH_KIND_CALIBRATED == number(SketchKind::calibrated));
static_assert(VERKV_FETCH_MODE_VERIFIED == number(FetchMode::verified) &&
              VERKV_FETCH_MODE_NEVER == number(FetchMode::never) &&
              VERKV_FETCH_MODE_ALWAYS == number(FetchMode::always));
static_assert(VERKV_POOL_HEAD == number(Pool::head) && VERKV_POOL_LAYER == number(Pool::layer) &&
              VERKV_POOL_SEQUENCE == number(Pool::sequence));
static_assert(VERKV_SELECTION_POISSON == number(Selection::poisson) &&
              VERKV_SELECTION_TOPK == number(Selection::topk) &&
              VERKV_SELECTION_SPREAD == number(Selection::spread));
static_assert(VERKV_ESTIMATOR_PLAIN == number(Estimator::plain) &&
              VERKV_ESTIMATOR_CLUSTERS == number(Estimator::clusters));
static_assert(VERKV_FETCH_ORDER_WORTH == number(FetchOrder::worth) &&
              VERKV_FETCH_ORDER_EXACT == number(FetchOrder::exact));
static_assert(VERKV_HOST_TIER_OWN == number(HostTier::own) &&
              VERKV_HOST_TIER_ENGINE == number(HostTier::engine) &&
              VERKV_HOST_TIER_FILE == number(HostTier::file));
static_assert(VERKV_ROW_STATUS_ANSWERED == number(RowStatus::answered) &&
              VERKV_ROW_STATUS_BAD_QUERY == number(RowStatus::bad_query));
static_assert(VERKV_ERROR_SETTING == number(ErrorCode::setting) &&
              VERKV_ERROR_UNKNOWN_SEQUENCE == number(ErrorCode::unknown_sequence) &&
              VERKV_ERROR_UNKNOWN_LAYER == number(ErrorCode::unknown_layer) &&
              VERKV_ERROR_REPEATED == number(ErrorCode::repeated) &&
              VERKV_ERROR_SHAPE == number(ErrorCode::shape) &&
              VERKV_ERROR_NUMBER == number(ErrorCode::number) &&
              VERKV_ERROR_WRONG_PROCESS == number(ErrorCode::wrong_process) &&
              VERKV_ERROR_WRONG_BACKEND == number(ErrorCode::wrong_backend) &&
              VERKV_ERROR_FAST_LIMIT == number(ErrorCode::fast_limit) &&
              VERKV_ERROR_HOST_LIMIT == number(ErrorCode::host_limit) &&
              VERKV_ERROR_TOKEN_LIMIT == number(ErrorCode::token_limit) &&
              VERKV_ERROR_ROW_LIMIT == number(ErrorCode::row_limit) &&
              VERKV_ERROR_THREAD_LIMIT == number(ErrorCode::thread_limit) &&
              VERKV_ERROR_DEVICE == number(ErrorCode::device) &&
              VERKV_ERROR_DEVICE_MEMORY == number(ErrorCode::device_memory) &&
              VERKV_ERROR_SYSTEM_MEMORY == number(ErrorCode::system_memory) &&
              VERKV_ERROR_FORMAT == number(ErrorCode::format) &&
              VERKV_ERROR_BEING_COMPRESSED == number(ErrorCode::being_compressed) &&
              VERKV_ERROR_FILE_FULL == number(ErrorCode::file_full) &&
              VERKV_ERROR_FILE == number(ErrorCode::file));
static_assert(VERKV_BOUND_EDGES == kBoundEdges && VERKV_NO_SEQUENCE == kNoSequence.value);

TEST_CASE("no enumerator is without its twin in C") {
  for (int code = 1; code <= VERKV_ERROR_FILE; ++code)
    CHECK(std::string(verkv_code_name(code)) == name(static_cast<ErrorCode>(code)));
  // The number behind the last is none: a new one needs a twin.
  CHECK(std::string(verkv_code_name(VERKV_ERROR_FILE + 1)) == "?");
  CHECK(std::string(verkv_code_name(VERKV_OK)) == "ok");
  CHECK(std::string(verkv_code_name(256 + VERKV_ERROR_SHAPE)) == "?");
  CHECK(std::string(verkv_code_name(-1)) == "?");

  const auto reasons = [](auto change) {
    CacheConfig config;
    config.layers = {{.key_dim = 8, .value_dim = 8}};
    change(config);
    return unsupported_reasons(config).size();
  };
  CHECK(reasons([](auto&) {}) == 0);
  CHECK(reasons([](auto& c) { c.storage = static_cast<DType>(VERKV_DTYPE_BF16 + 1); }) > 0);
  CHECK(reasons([](auto& c) { c.host = static_cast<HostTier>(VERKV_HOST_TIER_FILE + 1); }) > 0);
  CHECK(reasons([](auto& c) { c.pool = static_cast<Pool>(VERKV_POOL_SEQUENCE + 1); }) > 0);
  CHECK(reasons([](auto& c) {
          c.sketch.kind = static_cast<SketchKind>(VERKV_SKETCH_KIND_CALIBRATED + 1);
        }) > 0);
  CHECK(reasons([](auto& c) {
          c.fetch.mode = static_cast<FetchMode>(VERKV_FETCH_MODE_ALWAYS + 1);
        }) > 0);
  CHECK(reasons([](auto& c) {
          c.study.select = static_cast<Selection>(VERKV_SELECTION_SPREAD + 1);
        }) > 0);
  CHECK(reasons([](auto& c) {
          c.study.estimator = static_cast<Estimator>(VERKV_ESTIMATOR_CLUSTERS + 1);
        }) > 0);
  CHECK(reasons([](auto& c) {
          c.study.order = static_cast<FetchOrder>(VERKV_FETCH_ORDER_EXACT + 1);
        }) > 0);
}

bool same(const verkv_optional_double& c, const std::optional<double>& x) {
  return (c.has_value != 0) == x.has_value() && (!x || c.value == *x);
}
bool same(const verkv_optional_int64& c, const std::optional<std::int64_t>& x) {
  return (c.has_value != 0) == x.has_value() && (!x || c.value == *x);
}
template <class A, class B>
requires(std::is_arithmetic_v<A> && (std::is_arithmetic_v<B> || std::is_enum_v<B>)) bool same(A c,
                                                                                              B x) {
  return c == static_cast<A>(x);
}

// Each has all members by name: another member does not compile.
void check_same(const verkv_layer_config& c, const LayerConfig& x) {
  const auto& [kv_heads, query_heads, key_dim, value_dim, scale, soft_cap, cached, dense, window,
               global_layer, first, sinks, prefix, all_kv, all_queries, from] = x;
  const auto& [c_kv_heads, c_query_heads, c_key_dim, c_value_dim, c_scale, c_soft_cap, c_cached,
               c_dense, c_window, c_global_layer, c_first, c_sinks, c_sink_count, c_prefix,
               c_all_kv, c_all_queries, c_from] = c;
  CHECK(same(c_kv_heads, kv_heads));
  CHECK(same(c_query_heads, query_heads));
  CHECK(same(c_key_dim, key_dim));
  CHECK(same(c_value_dim, value_dim));
  CHECK(same(c_scale, scale));
  CHECK(same(c_soft_cap, soft_cap));
  CHECK(same(c_cached, cached));
  CHECK(same(c_dense, dense));
  CHECK(same(c_window, window));
  CHECK(same(c_global_layer, global_layer));
  CHECK(same(c_first, first));
  REQUIRE(same(c_sink_count, sinks.size()));
  CHECK(std::equal(sinks.begin(), sinks.end(), c_sinks));
  CHECK(same(c_prefix, prefix));
  CHECK(same(c_all_kv, all_kv));
  CHECK(same(c_all_queries, all_queries));
  CHECK(same(c_from, from));
}

void check_same(const verkv_cache_config& c, const CacheConfig& x) {
  const auto& [layers, storage, host, directory, keep, fetch, fast_limit, host_limit, local, sinks,
               margin, chunk, in_turn, from, pool, sketch, seed, threads, executor, fast_allocator,
               host_allocator, study] = x;
  const auto& [mode, risk, epsilon, delta, limit] = fetch;
  const auto& [kind, bits] = sketch;
  const auto& [select, estimator, floor, order, probability, cap, vector_code] = study;
  CHECK(same(c.layer_count, layers.size()));
  CHECK(same(c.storage, storage));
  CHECK(same(c.host, host));
  CHECK(directory == (c.host_directory == nullptr ? "" : c.host_directory));
  CHECK(same(c.keep, keep));
  CHECK(same(c.fast_bytes_limit, fast_limit));
  CHECK(same(c.host_bytes_limit, host_limit));
  CHECK(same(c.local_tokens, local));
  CHECK(same(c.sink_tokens, sinks));
  CHECK(same(c.window_margin, margin));
  CHECK(same(c.chunk_tokens, chunk));
  CHECK(same(c.chunks_in_turn, in_turn));
  CHECK(same(c.compress_from, from));
  CHECK(same(c.pool, pool));
  CHECK(same(c.seed, seed));
  CHECK(same(c.threads, threads));
  CHECK((c.executor != nullptr) == (executor != nullptr));
  const auto check_allocator = [](const verkv_tier_allocator& a, const TierAllocator& b) {
    CHECK(a.allocate == b.allocate);
    CHECK(a.release == b.release);
    CHECK(a.user == b.user);
  };
  check_allocator(c.fast_allocator, fast_allocator);
  check_allocator(c.host_allocator, host_allocator);
  CHECK(same(c.fetch_mode, mode));
  CHECK(same(c.fetch_risk, risk));
  CHECK(same(c.fetch_epsilon, epsilon));
  CHECK(same(c.fetch_delta, delta));
  CHECK(same(c.fetch_limit_tokens, limit));
  CHECK(same(c.sketch_kind, kind));
  CHECK(same(c.sketch_bits, bits));
  CHECK(same(c.study_select, select));
  CHECK(same(c.study_estimator, estimator));
  CHECK(same(c.study_inclusion_floor, floor));
  CHECK(same(c.study_order, order));
  CHECK(same(c.study_probability, probability));
  CHECK(same(c.study_cap, cap));
  CHECK(same(c.study_vector_code, vector_code));
}

// No two fields alike.
LayerConfig odd_layer() {
  return {2, 6, 11, 12, 0.5, 30.0, true, true, 77, 8, 9, {0.25f, -1}, true, 23, 24, 25};
}

CacheConfig odd_config() {
  CacheConfig config;
  config.layers = {odd_layer(), odd_layer(), {}};
  config.storage = DType::bf16;
  config.host = HostTier::file;
  config.host_directory = "somewhere";
  config.keep = 0.3;
  config.fetch = {FetchMode::always, 0.01, 0.02, 0.03, 4};
  config.fast_bytes_limit = 500;
  config.host_bytes_limit = 600;
  config.local_tokens = 7;
  config.sink_tokens = 8;
  config.window_margin = 21;
  config.chunk_tokens = 9;
  config.chunks_in_turn = true;
  config.compress_from = 10;
  config.pool = Pool::sequence;
  config.sketch = {SketchKind::exact, 3};
  config.seed = ~std::uint64_t{0};
  config.threads = 12;
  int* const users = reinterpret_cast<int*>(sizeof(int));
  config.fast_allocator = {[](void*, std::size_t, std::size_t) -> void* { return nullptr; },
                           [](void*, void*, std::size_t, std::size_t) {}, users};
  config.host_allocator = {
      [](void* user, std::size_t, std::size_t) { return user; },
      [](void* user, void* memory, std::size_t, std::size_t) { CHECK(memory == user); }, users + 1};
  config.study = {Selection::topk, Estimator::plain, 0.13, FetchOrder::exact, 0.14, 15.0, false};
  return config;
}

TEST_CASE("settings go to C and back as they are") {
  for (const CacheConfig& config : {CacheConfig{}, odd_config()}) {
    std::vector<verkv_layer_config> layers;
    for (const LayerConfig& layer : config.layers) layers.push_back(c_face::to_c(layer));
    verkv_cache_config c = c_face::to_c(config);
    c.layers = layers.data();
    check_same(c, config);
    const CacheConfig back = c_face::cache_config(&c);
    check_same(c, back);
    REQUIRE(back.layers.size() == config.layers.size());
    for (std::size_t i = 0; i < layers.size(); ++i) {
      check_same(layers[i], config.layers[i]);
      check_same(layers[i], back.layers[i]);
    }
  }
  verkv_cache_config c;
  REQUIRE(verkv_cache_config_init(&c, sizeof(c), nullptr) == VERKV_OK);
  check_same(c, CacheConfig{});
}

TEST_CASE("reports go to C as they are") {
  MemoryReport memory;
  auto& [resident, sketch, metadata, host, basis, workspace, reserved, pageable, shared, engine,
         fast_reserved, host_reserved, file] = memory;
  std::int64_t next = 1;
  for (std::int64_t* field : {&resident, &sketch, &metadata, &host, &basis, &workspace, &reserved,
                              &pageable, &shared, &engine, &fast_reserved, &host_reserved, &file})
    *field = next++;
  const auto [size, c_resident, c_sketch, c_metadata, c_host, c_basis, c_workspace, c_reserved,
              c_pageable, c_shared, c_engine, c_fast_reserved, c_host_reserved, c_file] =
      c_face::to_c(memory);
  CHECK(c_resident == memory.resident_bytes);
  CHECK(c_sketch == memory.sketch_bytes);
  CHECK(c_metadata == memory.metadata_bytes);
  CHECK(c_host == memory.host_bytes);
  CHECK(c_basis == memory.basis_bytes);
  CHECK(c_workspace == memory.workspace_bytes);
  CHECK(c_reserved == memory.reserved_bytes);
  CHECK(c_pageable == memory.pageable_bytes);
  CHECK(c_shared == memory.shared_bytes);
  CHECK(c_engine == memory.engine_bytes);
  CHECK(c_fast_reserved == memory.fast_reserved_bytes);
  CHECK(c_host_reserved == memory.host_reserved_bytes);
  CHECK(c_file == memory.file_bytes);

  LayerStatistics s;
  auto& [steps, decisions, certified, enlarged, fetching, planned, fetched, moved, moved_bytes,
         cached, residents, bounds, attend, append, compress] = s;
  for (std::int64_t* field :
       {&steps, &decisions, &certified, &enlarged, &fetching, &planned, &fetched, &moved,
        &moved_bytes, &cached, &residents, &attend, &append, &compress})
    *field = next++;
  for (std::int64_t& bound : bounds) bound = next++;
  const verkv_layer_statistics c = c_face::to_c(s);
  CHECK(c.steps == s.steps);
  CHECK(c.decisions == s.decisions);
  CHECK(c.certified == s.certified);
  CHECK(c.enlarged == s.enlarged);
  CHECK(c.fetching == s.fetching);
  CHECK(c.planned_tokens == s.planned_tokens);
  CHECK(c.fetched_tokens == s.fetched_tokens);
  CHECK(c.moved_tokens == s.moved_tokens);
  CHECK(c.moved_bytes == s.moved_bytes);
  CHECK(c.cached_tokens == s.cached_tokens);
  CHECK(c.resident_tokens == s.resident_tokens);
  CHECK(std::equal(std::begin(bounds), std::end(bounds), std::begin(c.bounds), std::end(c.bounds)));
  CHECK(c.attend_ns == s.attend_ns);
  CHECK(c.append_ns == s.append_ns);
  CHECK(c.compress_ns == s.compress_ns);
}

TEST_CASE("keep for a share of bytes is that of C++") {
  const LayerConfig layer{2, 6, 64, 48};
  const verkv_layer_config c = c_face::to_c(layer);
  double keep = -1;
  const auto ask = [&](double share, std::int64_t bits, std::int32_t estimator) {
    return verkv_keep_for_fast_share(share, &c, sizeof(c), VERKV_DTYPE_BF16,
                                     VERKV_SKETCH_KIND_CALIBRATED, bits, estimator, &keep, nullptr);
  };
  for (const auto estimator : {Estimator::plain, Estimator::clusters}) {
    REQUIRE(ask(0.3, 3, number(estimator)) == VERKV_OK);
    CHECK(keep ==
          keep_for_fast_share(0.3, layer, DType::bf16, {SketchKind::calibrated, 3}, estimator));
  }
  const double before = keep;
  CHECK(ask(0.001, 3, VERKV_ESTIMATOR_PLAIN) == VERKV_ERROR_SETTING);
  CHECK(ask(0.3, std::int64_t{1} << 33, VERKV_ESTIMATOR_PLAIN) == VERKV_ERROR_SETTING);
  CHECK(ask(0.3, 3, 256) == VERKV_ERROR_SETTING);
  CHECK(keep == before);
  CHECK(verkv_keep_for_fast_share(0.3, nullptr, sizeof(c), 0, 0, 2, 0, &keep, nullptr) ==
        VERKV_ERROR_SHAPE);
  CHECK(verkv_keep_for_fast_share(0.3, &c, 0, 0, 0, 2, 0, &keep, nullptr) == VERKV_ERROR_SHAPE);
  CHECK(verkv_keep_for_fast_share(0.3, &c, sizeof(c), 0, 0, 2, 0, nullptr, nullptr) ==
        VERKV_ERROR_SHAPE);
}

TEST_CASE("bytes of a sequence are those of C++") {
  CacheConfig config;
  config.layers = {{.kv_heads = 2, .query_heads = 4, .key_dim = 32, .value_dim = 24}};
  verkv_cache_config c = c_face::to_c(config);
  const verkv_layer_config layer = c_face::to_c(config.layers[0]);
  c.layers = &layer;
  verkv_memory_report appended = {};
  verkv_memory_report compressed = {};
  appended.size = compressed.size = sizeof(appended);
  double mean = 0;
  std::int64_t fast = 0;
  std::int64_t host = 0;
  const auto ask = [&](std::int64_t tokens, verkv_memory_report* to) {
    return verkv_sequence_bytes(&c, tokens, to, &compressed, &mean, &fast, &host, nullptr);
  };
  REQUIRE(ask(1000, &appended) == VERKV_OK);
  const SequenceBytes expected = sequence_bytes(config, 1000);
  CHECK(appended.host_bytes == expected.appended.host_bytes);
  CHECK(appended.fast_reserved_bytes == expected.appended.fast_reserved_bytes);
  CHECK(compressed.sketch_bytes == expected.compressed.sketch_bytes);
  CHECK(mean == expected.mean_resident_bytes);
  CHECK(fast == expected.most_fast_bytes);
  CHECK(host == expected.most_host_bytes);
  CHECK(ask(-1, &appended) == VERKV_ERROR_SHAPE);
  CHECK(ask(1000, nullptr) == VERKV_ERROR_SHAPE);
  CHECK(appended.host_bytes == expected.appended.host_bytes);
}

verkv_tensor_view twin(const TensorView& view) {
  // Lists of rows stand beside a view in C.
  const auto& [data, type, tokens, heads, dim, token_stride, head_stride, rows] = view;
  REQUIRE(rows == nullptr);
  return {data, static_cast<std::int64_t>(type), tokens, heads, dim, token_stride, head_stride};
}

TEST_CASE("a sequence in C and one in C++ give the same bits") {
  constexpr std::int64_t tokens = 300, kv_heads = 2, heads = 4, key_dim = 32, value_dim = 24;
  constexpr std::size_t rows = 2;
  CacheConfig config;
  config.layers = {{kv_heads, heads, key_dim, value_dim}};
  config.compress_from = 0;
  config.local_tokens = 8;
  config.threads = 1;
  reference::Random random(5);
  const auto floats = [&](std::int64_t count) {
    std::vector<float> all(static_cast<std::size_t>(count));
    for (float& x : all) x = static_cast<float>(random.normal());
    return all;
  };
  const std::vector<float> keys = floats(tokens * kv_heads * key_dim);
  const std::vector<float> values = floats(tokens * kv_heads * value_dim);
  const std::vector<float> queries = floats(rows * heads * key_dim);
  std::vector<float> scores = floats(kv_heads * tokens);
  for (float& score : scores) score = score * score;
  const TensorView k = token_major(keys.data(), DType::f32, tokens, kv_heads, key_dim);
  const TensorView v = token_major(values.data(), DType::f32, tokens, kv_heads, value_dim);
  const TensorView q = token_major(queries.data(), DType::f32, rows, heads, key_dim);
  const ImportanceView importance{scores.data(), kv_heads, tokens, tokens};

  struct Answer {
    std::vector<float> output = std::vector<float>(rows * heads * value_dim);
    std::vector<float> lse = std::vector<float>(rows * heads);
    std::vector<QueryHeadReport> heads_of = std::vector<QueryHeadReport>(rows * heads);
    std::vector<KvHeadReport> kv = std::vector<KvHeadReport>(rows * kv_heads);
  } x;
  const auto manager = make_cpu_cache(config);
  const SequenceId id = manager->create_sequence(3);
  manager->append(id, 0, k, v);
  manager->compress(id, {&importance, 1}, {&q, 1});
  const std::vector<SequenceId> ids(rows, id);
  manager->attend(0, {ids, q, x.output, x.lse, x.heads_of, x.kv, {}});

  const verkv_layer_config layer = c_face::to_c(config.layers[0]);
  verkv_cache_config c_config = c_face::to_c(config);
  c_config.layers = &layer;
  verkv_cache* cache = nullptr;
  REQUIRE(verkv_make_cpu_cache(&c_config, &cache, nullptr) == VERKV_OK);
  const std::unique_ptr<verkv_cache, void (*)(verkv_cache*)> owner(cache, verkv_destroy);
  std::int64_t c_id = -1;
  REQUIRE(verkv_create_sequence_with_draw(cache, 3, &c_id, nullptr) == VERKV_OK);
  const verkv_tensor_view c_k = twin(k), c_v = twin(v), c_q = twin(q);
  const verkv_importance_view c_importance{scores.data(), kv_heads, tokens, tokens};
  REQUIRE(verkv_append(cache, c_id, 0, &c_k, &c_v, nullptr) == VERKV_OK);
  std::int64_t left = -1;
  SECTION("compressed at once") {
    REQUIRE(verkv_compress(cache, c_id, &c_importance, 1, &c_q, 1, nullptr) == VERKV_OK);
  }
  SECTION("in slices, begun twice") {
    const auto begin = [&] {
      return verkv_begin_compress(cache, c_id, &c_importance, 1, &c_q, 1, &left, nullptr);
    };
    REQUIRE(begin() == VERKV_OK);
    CHECK(left == kv_heads);
    CHECK(begin() == VERKV_ERROR_BEING_COMPRESSED);
    REQUIRE(verkv_cancel_compress(cache, c_id, nullptr) == VERKV_OK);
    REQUIRE(begin() == VERKV_OK);
    REQUIRE(verkv_continue_compress(cache, c_id, 1, &left, nullptr) == VERKV_OK);
    CHECK(left == kv_heads - 1);
    CHECK(verkv_continue_compress(cache, c_id, 0, &left, nullptr) == VERKV_ERROR_SHAPE);
    REQUIRE(verkv_continue_compress(cache, c_id, kv_heads, &left, nullptr) == VERKV_OK);
    CHECK(left == 0);
  }

  std::vector<float> output(x.output.size()), lse(x.lse.size());
  std::vector<verkv_query_head_report> reports(x.heads_of.size());
  std::vector<verkv_kv_head_report> kv(x.kv.size());
  const std::vector<std::int64_t> c_ids(rows, c_id);
  verkv_attend_batch batch = {};
  batch.size = sizeof(batch);
  batch.sequences = c_ids.data();
  batch.rows = rows;
  batch.queries = c_q;
  batch.output = output.data();
  batch.output_count = std::ssize(output);
  batch.lse = lse.data();
  batch.lse_count = std::ssize(lse);
  batch.query_reports = reports.data();
  batch.query_report_count = std::ssize(reports);
  batch.query_report_size = sizeof(reports[0]);
  batch.kv_reports = kv.data();
  batch.kv_report_count = std::ssize(kv);
  batch.kv_report_size = sizeof(kv[0]);
  REQUIRE(verkv_attend(cache, 0, &batch, nullptr) == VERKV_OK);

  CHECK(std::memcmp(output.data(), x.output.data(), output.size() * sizeof(float)) == 0);
  CHECK(std::memcmp(lse.data(), x.lse.data(), lse.size() * sizeof(float)) == 0);
  std::int64_t moved = 0;
  for (std::size_t i = 0; i < reports.size(); ++i) {
    const auto& [epsilon, certified, planned, sketch_error, output_error] = x.heads_of[i];
    const auto& [c_epsilon, c_certified, c_planned, c_sketch_error, c_output_error] = reports[i];
    CHECK(c_epsilon == epsilon);
    CHECK(c_certified == certified);
    CHECK(c_planned == planned);
    CHECK(c_sketch_error == sketch_error);
    CHECK(c_output_error == output_error);
  }
  for (std::size_t i = 0; i < kv.size(); ++i) {
    const auto& [fetched, moved_tokens, moved_bytes, residents, limited] = x.kv[i];
    const auto& [c_fetched, c_moved_tokens, c_moved_bytes, c_residents, c_limited] = kv[i];
    CHECK(c_fetched == fetched);
    CHECK(c_moved_tokens == moved_tokens);
    CHECK(c_moved_bytes == moved_bytes);
    CHECK(c_residents == residents);
    CHECK(c_limited == limited);
    moved += moved_tokens;
  }
  CHECK(moved > 0);
}

TEST_CASE("attention over an engine's rows has the same bits through C") {
  constexpr std::int64_t tokens = 40, kv_heads = 2, heads = 4, dim = 8;
  constexpr std::size_t rows = 2;
  const LayerConfig layer{kv_heads, heads, dim, dim};
  CacheConfig config;
  config.layers = {layer};
  config.threads = 1;
  reference::Random random(3);
  std::vector<float> memory(2 * tokens * kv_heads * dim + rows * heads * dim);
  for (float& x : memory) x = static_cast<float>(random.normal());
  const float* values = memory.data() + tokens * kv_heads * dim;
  const TensorView k = token_major(memory.data(), DType::f32, tokens, kv_heads, dim);
  const TensorView v = token_major(values, DType::f32, tokens, kv_heads, dim);
  const TensorView q = token_major(values + tokens * kv_heads * dim, DType::f32, rows, heads, dim);
  const std::vector<std::uint32_t> first{0, 1, 5, 39}, second{7};
  const std::vector<std::span<const std::uint32_t>> visible{first, second};
  std::vector<float> output(rows * heads * dim), lse(rows * heads), scores(kv_heads * tokens);
  const RowAttentionBatch batch{k, v, q, visible, output, lse};
  RowAttention twin_of(config);
  twin_of.attend(0, batch);
  twin_of.importance(0, batch, scores);

  const verkv_layer_config c_layer = c_face::to_c(layer);
  verkv_cache_config c_config = c_face::to_c(config);
  c_config.layers = &c_layer;
  c_config.layer_count = 1;
  verkv_row_attention* attention = nullptr;
  REQUIRE(verkv_make_row_attention(&c_config, &attention, nullptr) == VERKV_OK);
  const std::unique_ptr<verkv_row_attention, void (*)(verkv_row_attention*)> owner(
      attention, verkv_destroy_row_attention);
  const std::uint32_t* const lists[] = {first.data(), second.data()};
  const std::int64_t counts[] = {4, 1};
  std::vector<float> c_output(output.size()), c_lse(lse.size()), c_scores(scores.size());
  verkv_row_batch c = {};
  c.size = sizeof(c);
  c.keys = twin(k);
  c.values = twin(v);
  c.queries = twin(q);
  c.visible = lists;
  c.visible_counts = counts;
  c.rows = rows;
  c.output = c_output.data();
  c.output_count = static_cast<std::int64_t>(c_output.size());
  c.lse = c_lse.data();
  c.lse_count = static_cast<std::int64_t>(c_lse.size());
  REQUIRE(verkv_attend_rows(attention, 0, &c, nullptr) == VERKV_OK);
  const std::int64_t score_count = static_cast<std::int64_t>(scores.size());
  REQUIRE(verkv_importance_of_rows(attention, 0, &c, c_scores.data(), score_count, nullptr) ==
          VERKV_OK);
  CHECK(c_output == output);
  CHECK(c_lse == lse);
  CHECK(c_scores == scores);

  CHECK(verkv_attend_rows(attention, 1, &c, nullptr) == VERKV_ERROR_UNKNOWN_LAYER);
  CHECK(verkv_attend_rows(nullptr, 0, &c, nullptr) == VERKV_ERROR_SHAPE);
  CHECK(verkv_importance_of_rows(attention, 0, &c, c_scores.data(), 3, nullptr) ==
        VERKV_ERROR_SHAPE);
  c.visible_counts = nullptr;
  CHECK(verkv_attend_rows(attention, 0, &c, nullptr) == VERKV_ERROR_SHAPE);
  c_config.layer_count = 0;
  CHECK(verkv_make_row_attention(&c_config, &attention, nullptr) == VERKV_ERROR_SETTING);
  CHECK(attention == nullptr);
  verkv_destroy_row_attention(nullptr);
}

TEST_CASE("an engine's rows are listed, moved and compared through C") {
  constexpr std::int64_t tokens = 40, dim = 8;
  verkv_layer_config layer = c_face::to_c(LayerConfig{1, 1, dim, dim});
  verkv_cache_config config = c_face::to_c(CacheConfig{});
  config.layers = &layer;
  config.layer_count = 1;
  config.storage = VERKV_DTYPE_F32;
  config.host = VERKV_HOST_TIER_ENGINE;
  config.local_tokens = 4;
  config.compress_from = {1, 0};
  verkv_cache* cache = nullptr;
  REQUIRE(verkv_make_cpu_cache(&config, &cache, nullptr) == VERKV_OK);
  const std::unique_ptr<verkv_cache, void (*)(verkv_cache*)> owner(cache, verkv_destroy);
  std::int64_t id = -1;
  REQUIRE(verkv_create_sequence(cache, &id, nullptr) == VERKV_OK);
  reference::Random random(2);
  std::vector<float> memory(2 * tokens * dim);
  for (float& x : memory) x = static_cast<float>(random.normal());
  // Backwards.
  std::vector<const void*> keys, values;
  for (std::int64_t t = tokens; t-- > 0;) {
    keys.push_back(memory.data() + t * dim);
    values.push_back(memory.data() + (tokens + t) * dim);
  }
  verkv_tensor_view shape = twin(token_major(nullptr, DType::f32, tokens, 1, dim));
  const std::vector<std::int64_t> rows(tokens, id);
  verkv_append_batch batch = {};
  batch.size = sizeof(batch);
  batch.sequences = rows.data();
  batch.rows = tokens;
  batch.keys = batch.values = shape;
  REQUIRE(verkv_batch_append(cache, 0, &batch, nullptr) == VERKV_ERROR_SHAPE);
  batch.key_rows = keys.data();
  batch.value_rows = values.data();
  REQUIRE(verkv_batch_append(cache, 0, &batch, nullptr) == VERKV_OK);
  const std::vector<float> scores(tokens, 1);
  const verkv_importance_view importance{scores.data(), 1, tokens, tokens};
  REQUIRE(verkv_compress(cache, id, &importance, 1, nullptr, 0, nullptr) == VERKV_OK);
  std::int64_t row = 0;
  REQUIRE(verkv_changed_row(cache, id, 0, &row, nullptr) == VERKV_OK);
  CHECK(row == -1);
  const std::vector<float> copy = memory;
  std::fill(memory.begin(), memory.end(), 7.0f);
  REQUIRE(verkv_changed_row(cache, id, 0, &row, nullptr) == VERKV_OK);
  CHECK(row == 0);  // a sink
  for (std::int64_t t = 0; t < tokens; ++t) {
    keys[static_cast<std::size_t>(t)] = copy.data() + (tokens - 1 - t) * dim;
    values[static_cast<std::size_t>(t)] = copy.data() + (2 * tokens - 1 - t) * dim;
  }
  REQUIRE(verkv_move(cache, id, 0, 1, &shape, &shape, keys.data(), values.data(), nullptr) ==
          VERKV_ERROR_SHAPE);
  REQUIRE(verkv_move(cache, id, 0, 0, &shape, &shape, keys.data(), values.data(), nullptr) ==
          VERKV_OK);
  REQUIRE(verkv_changed_row(cache, id, 0, &row, nullptr) == VERKV_OK);
  CHECK(row == -1);
  verkv_memory_report report = {};
  report.size = sizeof(report);
  REQUIRE(verkv_memory(cache, &report, nullptr) == VERKV_OK);
  CHECK(report.engine_bytes == 2 * tokens * dim * 4);
}

// What throws, and what no error of the library is.
TEST_CASE("every exception becomes a code") {
  const auto code = [](auto exception, verkv_error* error) {
    return c_face::guarded(error, [&] { throw exception; });
  };
  verkv_error error = {};
  error.size = sizeof(error);
  CHECK(code(std::bad_alloc(), &error) == VERKV_ERROR_NO_MEMORY);
  CHECK(code(std::length_error("long"), &error) == VERKV_ERROR_INTERNAL);
  CHECK(std::string(error.text) == "long");
  CHECK(code(42, &error) == VERKV_ERROR_INTERNAL);
  CHECK(code(Error("somebody's"), &error) == VERKV_ERROR_INTERNAL);
  CHECK(code(DeviceError("gone", 7, ErrorCode::device), &error) == VERKV_ERROR_DEVICE);
  CHECK(error.device_code == 7);
  const std::string text(1000, 'x');
  CHECK(code(CapacityError(text, ErrorCode::fast_limit, {1, 2, 3, 4}), &error) ==
        VERKV_ERROR_FAST_LIMIT);
  CHECK(error.text == text.substr(0, sizeof(error.text) - 1));
  CHECK(error.device_code == 0);
  CHECK((error.layer == 1 && error.row == 2 && error.head == 3 && error.token == 4));
  CHECK(code(std::bad_alloc(), nullptr) == VERKV_ERROR_NO_MEMORY);
}

}  // namespace
