// KvCacheManager on a backend (support/test_backend.hpp): bad input is refused, names what is
// wrong, and leaves the cache as it was.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "catch.hpp"
#include "reference/statistics.hpp"
#include "reference/step.hpp"
#include "support/blocks.hpp"
#include "support/configurations.hpp"
#include "support/results.hpp"
#include "support/test_backend.hpp"
#include "support/victim.hpp"

using namespace verkv;
using namespace verkv::test;
using verkv::reference::kInfinite;
using verkv::reference::Random;

TEST_CASE("Bad keys and values are refused and change nothing") {
  for (const DType storage : {DType::f32, DType::f16, DType::bf16}) {
    CacheConfig config = victim_config();
    config.storage = storage;
    const Victim victim(config);
    KvCacheManager& cache = *victim.cache;
    Random random(21);
    const Block keys = random_block(random, 3, 2, 64, 1);
    const Block values = random_block(random, 3, 2, 48, 1);
    const auto append = [&](const TensorView& k, const TensorView& v) {
      return [&cache, &victim, k, v] { cache.append(victim.a, 0, k, v); };
    };
    struct Number {
      float value;
      std::string text;
    };
    std::vector<Number> numbers = {{kNaN, "nan"}, {kInfinity, "inf"}, {-kInfinity, "-inf"}};
    if (storage == DType::f16) numbers.push_back({1e5f, "100000"});
    if (storage == DType::f16) numbers.push_back({-65520.0f, "-65520"});
    // The largest bfloat16 is 3.3895e38; the largest float would be rounded up to infinity.
    if (storage == DType::bf16) numbers.push_back({3.4e38f, "3.4e+38"});
    for (const Number& number : numbers) {
      Block bad = keys;
      bad.at(1, 1, 5) = number.value;
      victim.refuses<InvalidArgument>(append(bad.view(), values.view()),
                                      {"keys", "token 1", "head 1", "5", number.text});
      bad = values;
      bad.at(2, 0, 7) = number.value;
      victim.refuses<InvalidArgument>(append(keys.view(), bad.view()),
                                      {"values", "token 2", "head 0", "7", number.text});
    }
    if (storage == DType::f16) {
      Block bad = keys;
      bad.at(0, 0, 0) = 1e5f;
      victim.refuses<InvalidArgument>(append(bad.view(), values.view()),
                                      {"100000", "65504", "f16"});
    }
    // The same in the views' own types.
    std::vector<verkv::BFloat16> brain(keys.data.size());
    brain[77] = {0x7fc0};
    victim.refuses<InvalidArgument>(
        append(verkv::token_major(brain.data(), DType::bf16, 3, 2, 64), values.view()),
        {"keys", "nan"});
    std::vector<verkv::Half> half(keys.data.size());
    half[77] = {0x7c00};
    victim.refuses<InvalidArgument>(
        append(verkv::token_major(half.data(), DType::f16, 3, 2, 64), values.view()),
        {"keys", "inf"});
  }
}

TEST_CASE("Wrong shapes, sequences and layers are refused and change nothing") {
  const Victim victim(victim_config());
  KvCacheManager& cache = *victim.cache;
  Random random(22);
  const Block keys = random_block(random, 3, 2, 64, 1);
  const Block values = random_block(random, 3, 2, 48, 1);
  const auto append = [&](std::int64_t layer, const TensorView& k, const TensorView& v,
                          SequenceId id) {
    return [&cache, layer, k, v, id] { cache.append(id, layer, k, v); };
  };
  TensorView view = keys.view();
  view.heads = 3;
  victim.refuses<InvalidArgument>(append(0, view, values.view(), victim.a), {"keys", "3", "2"});
  view = keys.view();
  view.dim = 63;
  victim.refuses<InvalidArgument>(append(0, view, values.view(), victim.a), {"keys", "63", "64"});
  view = values.view();
  view.heads = 1;
  victim.refuses<InvalidArgument>(append(0, keys.view(), view, victim.a), {"values", "1", "2"});
  view = values.view();
  view.dim = 64;
  victim.refuses<InvalidArgument>(append(0, keys.view(), view, victim.a), {"values", "64", "48"});
  view = values.view();
  view.tokens = 2;
  victim.refuses<InvalidArgument>(append(0, keys.view(), view, victim.a), {"3", "2"});
  view = keys.view();
  view.tokens = -1;
  victim.refuses<InvalidArgument>(append(0, view, values.view(), victim.a), {"keys", "-1"});
  view = keys.view();
  view.data = nullptr;
  victim.refuses<InvalidArgument>(append(0, view, values.view(), victim.a), {"keys", "null", "3"});
  view = values.view();
  view.data = nullptr;
  victim.refuses<InvalidArgument>(append(0, keys.view(), view, victim.a), {"values", "null"});
  TensorView many_keys = keys.view();
  TensorView many_values = values.view();
  many_keys.tokens = many_values.tokens = std::int64_t{1} << 32;
  victim.refuses<CapacityError>(append(0, many_keys, many_values, victim.a),
                                {"4294967376", "4294967295"});

  const SequenceId unknown{12345};
  victim.refuses<InvalidArgument>(append(0, keys.view(), values.view(), unknown), {"12345"});
  victim.refuses<InvalidArgument>(append(0, keys.view(), values.view(), kNoSequence), {"-1"});
  victim.refuses<InvalidArgument>(append(3, keys.view(), values.view(), victim.a),
                                  {"layer 3", "2"});
  victim.refuses<InvalidArgument>(append(-1, keys.view(), values.view(), victim.a), {"layer -1"});
  victim.refuses<InvalidArgument>(append(1, keys.view(), values.view(), victim.a),
                                  {"layer 1", "no cache"});
  victim.refuses<InvalidArgument>([&] { cache.erase(unknown); }, {"12345"});
  victim.refuses<InvalidArgument>([&] { cache.tokens(unknown, 0); }, {"12345"});
  victim.refuses<InvalidArgument>([&] { cache.compressed_tokens(victim.a, 9); }, {"layer 9"});
  victim.refuses<InvalidArgument>([&] { cache.redraw(unknown, 1); }, {"12345"});
  victim.refuses<InvalidArgument>([&] { (void)cache.memory(unknown); }, {"12345"});
  victim.refuses<InvalidArgument>([&] { (void)cache.statistics(3); }, {"layer 3"});

  // Fine: nothing at all.
  cache.append(victim.a, 0, TensorView{nullptr, DType::f32, 0, 2, 64, 128, 64},
               TensorView{nullptr, DType::f32, 0, 2, 48, 96, 48});
  victim.check_unchanged();
  AttendBatch empty;
  empty.queries = TensorView{nullptr, DType::f32, 0, 6, 64, 384, 64};
  cache.attend(0, empty);
  victim.check_unchanged();
}

TEST_CASE("Views whose rows meet are refused, and every layout of disjoint rows is served") {
  const Victim victim(victim_config());
  KvCacheManager& cache = *victim.cache;
  const std::vector<float> data(100'000, 1.0f);
  const float* middle = data.data() + data.size() / 2;
  const auto give = [&](std::int64_t tokens, std::int64_t token_stride, std::int64_t head_stride,
                        SequenceId id) {
    return [&cache, middle, tokens, token_stride, head_stride, id] {
      cache.append(id, 0, {middle, DType::f32, tokens, 2, 64, token_stride, head_stride},
                   {middle, DType::f32, tokens, 2, 48, 96, 48});
    };
  };
  struct Strides {
    std::int64_t tokens;
    std::int64_t token;
    std::int64_t head;
  };
  const std::int64_t least = std::numeric_limits<std::int64_t>::min();
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  for (const Strides& s : {Strides{3, 0, 64},
                           {3, 128, 0},
                           {3, 0, 0},
                           {3, 63, 256},
                           {3, 256, 63},
                           {3, 64, 64},
                           {3, 127, 64},
                           {3, -127, 64},
                           {3, 64, 191},
                           {3, 64, -191},
                           {3, -63, -256},
                           {1, 0, 63},
                           {1, most, -63},
                           {3, least, 0},
                           {3, 1, most},
                           {5, 64, 319}}) {
    victim.refuses<InvalidArgument>(
        give(s.tokens, s.token, s.head, victim.a),
        {"keys", std::to_string(s.token), std::to_string(s.head), "64", "2 heads"});
  }
  const SequenceId other = cache.create_sequence();
  std::int64_t held = 0;
  for (const Strides& s : {Strides{3, 128, 64},
                           {3, -128, 64},
                           {3, 128, -64},
                           {3, 64, 192},
                           {3, -64, -192},
                           {3, 64, 5000},
                           {3, 5000, 64},
                           {3, 200, 100},
                           {1, 0, 64},
                           {1, least, -64},
                           {5, 64, 320},
                           {0, 0, 0},
                           {0, 1, 1}}) {
    give(s.tokens, s.token, s.head, other)();
    held += s.tokens;
    CHECK(cache.tokens(other, 0) == held);
  }
  // One head: its stride is never used.
  CacheConfig single = small_config();
  single.layers = {layer_of(1, 1, 64, 64)};
  const auto one = make_cache(single);
  const SequenceId id = one->create_sequence();
  for (const std::int64_t head_stride : {std::int64_t{0}, std::int64_t{-1}, least}) {
    const TensorView view{middle, DType::f32, 4, 1, 64, 64, head_stride};
    one->append(id, 0, view, view);
    check_names(error_of<InvalidArgument>([&] {
                  TensorView bad = view;
                  bad.token_stride = -63;
                  one->append(id, 0, view, bad);
                }),
                {"values", "-63"});
  }
  CHECK(one->tokens(id, 0) == 12);
  cache.erase(other);
}

TEST_CASE("Views that are not aligned to their elements are refused") {
  const Victim victim(victim_config());
  KvCacheManager& cache = *victim.cache;
  alignas(4) const std::byte bytes[4 * 3 * 2 * 64 + 4] = {};
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    for (std::size_t off = 1; off < size_bytes(type); ++off) {
      const TensorView keys = verkv::token_major(bytes + off, type, 3, 2, 64);
      const TensorView values = verkv::token_major(bytes, type, 3, 2, 48);
      victim.refuses<InvalidArgument>([&] { cache.append(victim.a, 0, keys, values); },
                                      {"keys", std::to_string(off) + " bytes past",
                                       std::to_string(size_bytes(type)), name(type)});
    }
  }
  // Fine: any element of an array.
  const SequenceId other = cache.create_sequence();
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    cache.append(other, 0, verkv::token_major(bytes + size_bytes(type), type, 3, 2, 64),
                 verkv::token_major(bytes, type, 3, 2, 48));
  }
  CHECK(cache.tokens(other, 0) == 9);
}

TEST_CASE("Bad importance is refused and changes nothing") {
  const Victim victim(victim_config());
  KvCacheManager& cache = *victim.cache;
  Random random(23);
  const Scores good = random_scores(random, 2, 80, ScoreKind::random);
  const auto give = [&](const Scores& third) {
    return [&cache, &victim, &good, third] { compress(cache, victim.b, {good, {}, third}); };
  };
  struct Number {
    float value;
    std::string text;
  };
  for (const Number& number :
       {Number{kNaN, "nan"}, Number{-0.5f, "-0.5"}, Number{kInfinity, "inf"}}) {
    Scores bad = good;
    bad.data[80 + 33] = number.value;
    victim.refuses<InvalidArgument>(give(bad), {"layer 2", "head 1", "token 33", number.text});
    bad = good;
    bad.data[79] = number.value;  // in the local window: never used, refused all the same
    victim.refuses<InvalidArgument>(give(bad), {"layer 2", "head 0", "token 79", number.text});
  }
  Scores few = random_scores(random, 2, 79, ScoreKind::random);
  victim.refuses<InvalidArgument>(give(few), {"layer 2", "79", "80"});
  victim.refuses<InvalidArgument>(give(random_scores(random, 1, 80, ScoreKind::random)),
                                  {"layer 2", "1 head", "2 head"});
  victim.refuses<InvalidArgument>(
      [&] {
        std::vector<ImportanceView> views = {good.view(), {}, {nullptr, 2, 80, 80}};
        cache.compress(victim.b, views);
      },
      {"layer 2", "null", "80"});
  victim.refuses<InvalidArgument>([&] { compress(cache, victim.b, {good, {}}); }, {"2", "3"});
  victim.refuses<InvalidArgument>(
      [&] {
        compress(cache, SequenceId{77}, {good, {}, good});
      },
      {"77"});
  // A second compression is about the tokens that are not compressed yet: 8 of them.
  victim.refuses<InvalidArgument>(
      [&] {
        compress(cache, victim.a, {good, {}, good});
      },
      {"layer 0", "80", "8"});

  // A view whose stride nobody has set would give every head the scores of the first.
  for (const std::int64_t stride : {0, 79, -79}) {
    victim.refuses<InvalidArgument>(
        [&] {
          const std::vector<ImportanceView> views = {
              good.view(), {}, {good.data.data() + 80, 2, 80, stride}};
          cache.compress(victim.b, views);
        },
        {"layer 2", "2 heads", std::to_string(stride), "80"});
  }

  // Fine: an empty sequence, whatever the stride.
  const SequenceId empty = cache.create_sequence();
  const std::vector<ImportanceView> none(3, ImportanceView{nullptr, 2, 0, 80});
  cache.compress(empty, none);
  cache.erase(empty);
  CHECK(same_bits(attend(cache, 0, {victim.a, victim.b}, victim.queries).output,
                  victim.answers[0].output));
}

TEST_CASE("Bad batches are refused and change nothing") {
  const Victim victim(victim_config());
  KvCacheManager& cache = *victim.cache;
  const LayerStatistics before = cache.statistics(0);
  std::vector<float> output(2 * 6 * 48, 5.0f);
  std::vector<QueryHeadReport> query_reports(12);
  std::vector<KvHeadReport> kv_reports(4);
  const std::vector<SequenceId> both = {victim.a, victim.b};
  AttendBatch good;
  good.sequences = both;
  good.queries = victim.queries.view();
  good.output = output;
  const auto refused = [&](const AttendBatch& batch, std::int64_t layer,
                           const std::vector<std::string>& parts) {
    check_names(error_of<InvalidArgument>([&] { cache.attend(layer, batch); }), parts);
    CHECK(std::all_of(output.begin(), output.end(), [](float x) { return x == 5.0f; }));
    CHECK(cache.statistics(0).steps == before.steps);
    CHECK(same(cache.memory(), victim.memory));
  };
  AttendBatch bad = good;
  bad.queries.heads = 7;
  refused(bad, 0, {"queries", "7", "6"});
  bad = good;
  bad.queries.dim = 65;
  refused(bad, 0, {"queries", "65", "64"});
  bad = good;
  bad.queries.tokens = 1;
  refused(bad, 0, {"1", "2"});
  bad = good;
  bad.queries.tokens = 3;
  refused(bad, 0, {"3", "2"});
  bad = good;
  bad.queries.data = nullptr;
  refused(bad, 0, {"queries", "null"});
  bad = good;
  bad.output = {};
  refused(bad, 0, {"output", "0", "2"});
  bad.output = std::span(output).first(output.size() - 1);
  refused(bad, 0, {"output", "575", "2", "6", "48"});
  bad = good;
  bad.lse = std::span(output).first(11);
  refused(bad, 0, {"LSE", "11", "2", "6"});
  bad = good;
  bad.query_reports = std::span(query_reports).first(11);
  refused(bad, 0, {"11", "2", "6"});
  bad = good;
  bad.kv_reports = std::span(kv_reports).first(3);
  refused(bad, 0, {"3", "2"});
  std::vector<RowStatus> status(3);
  bad = good;
  bad.row_status = status;
  refused(bad, 0, {"3", "2 rows"});
  bad = good;
  const std::vector<SequenceId> unknown = {victim.a, SequenceId{99}};
  bad.sequences = unknown;
  refused(bad, 0, {"99"});
  refused(good, 1, {"layer 1"});
  refused(good, 3, {"layer 3"});
  for (const float x : {kNaN, kInfinity, -kInfinity}) {
    Block queries = victim.queries;
    queries.at(1, 4, 13) = x;
    bad = good;
    bad.queries = queries.view();
    refused(bad, 0, {"row 1", "head 4", "13"});
  }
  victim.check_unchanged();

  // A padding row's query is not looked at, and several padding rows are no repetition.
  const std::vector<SequenceId> padding = {kNoSequence, kNoSequence};
  Block queries = victim.queries;
  queries.at(1, 4, 13) = kNaN;
  bad = good;
  bad.sequences = padding;
  bad.queries = queries.view();
  cache.attend(0, bad);
  CHECK(std::all_of(output.begin(), output.end(), [](float x) { return x == 0; }));
}

TEST_CASE("A configuration that cannot be served is refused with every reason") {
  const auto refused = [](const auto& change, const std::vector<std::string>& parts) {
    CacheConfig config = small_config();
    change(config);
    const std::vector<std::string> reasons = reasons_against(config);
    REQUIRE_FALSE(reasons.empty());
    check_names(reasons[0], parts);
    check_names(error_of<InvalidArgument>([&] { make_cache(config); }), parts);
  };
  CHECK(reasons_against(small_config()).empty());
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double x : {0.0, 1.0, -0.1, 1.5, nan, -kInfinite, kInfinite}) {
    refused([x](CacheConfig& c) { c.fetch.epsilon = x; }, {"epsilon", "(0, 1)"});
    refused([x](CacheConfig& c) { c.fetch.delta = x; }, {"delta", "(0, 1)"});
  }
  refused([](CacheConfig& c) { c.fetch.epsilon = 1.5; }, {"1.5"});
  refused([](CacheConfig& c) { c.fetch.delta = kInfinite; }, {"delta"});
  for (const double x : {0.0, -0.25, 1.25, nan, kInfinite}) {
    refused([x](CacheConfig& c) { c.keep = x; }, {"keep", "(0, 1]"});
  }
  refused([](CacheConfig& c) { c.keep = 1.25; }, {"1.25"});
  for (const double x : {0.0, -1.0, nan, kInfinite}) {
    refused([x](CacheConfig& c) { c.fetch.risk = x; }, {"risk", "0"});
    refused([x](CacheConfig& c) { c.study.probability = x; }, {"probability", "0"});
  }
  for (const double x : {0.0, 0.99, -2.0, nan, kInfinite}) {
    refused([x](CacheConfig& c) { c.study.cap = x; }, {"cap", "1"});
  }
  for (const double x : {-0.1, 0.3, nan}) {
    refused([x](CacheConfig& c) { c.study.inclusion_floor = x; }, {"floor", "0.2"});
  }
  const std::int64_t huge = std::numeric_limits<std::int64_t>::max();
  refused([](CacheConfig& c) { c.layers.clear(); }, {"layer"});
  refused([](CacheConfig& c) { c.layers[0].kv_heads = 0; }, {"layer 0", "0"});
  refused([huge](CacheConfig& c) { c.layers[0].kv_heads = huge; }, {"layer 0", "65536"});
  refused([huge](CacheConfig& c) { c.layers[0].first_global_kv_head = huge; },
          {"layer 0", "65536"});
  refused([](CacheConfig& c) { c.layers[0].first_global_kv_head = -1; }, {"layer 0", "-1"});
  refused([](CacheConfig& c) { c.layers[0].query_heads = 5; }, {"layer 0", "5", "2"});
  refused([](CacheConfig& c) { c.layers[0].query_heads = 0; }, {"layer 0", "0", "2"});
  refused([](CacheConfig& c) { c.layers[0].query_heads = std::int64_t{1} << 40; },
          {"layer 0", "1099511627776", "65536"});
  for (const std::int64_t dim : {std::int64_t{0}, std::int64_t{-64}, std::int64_t{577}, huge}) {
    refused([dim](CacheConfig& c) { c.layers[0].key_dim = dim; },
            {"layer 0", "key", std::to_string(dim), "576"});
    refused([dim](CacheConfig& c) { c.layers[0].value_dim = dim; },
            {"layer 0", "value", std::to_string(dim), "576"});
  }
  for (const double x : {0.0, -1.0, nan, kInfinite}) {
    refused([x](CacheConfig& c) { c.layers[0].scale = x; }, {"layer 0", "scale"});
    refused([x](CacheConfig& c) { c.layers[0].soft_cap = x; }, {"layer 0", "soft cap"});
  }
  refused([](CacheConfig& c) { c.layers[0].global_layer = 65536; }, {"layer 0", "65536", "65535"});
  refused([](CacheConfig& c) { c.layers[0].window = 0; }, {"layer 0", "0", "window"});
  refused([](CacheConfig& c) { c.layers[0].global_layer = -2; }, {"layer 0", "-2"});
  refused([](CacheConfig& c) { c.layers[0].global_layer = -1; }, {"layer 0", "-1"});
  refused([](CacheConfig& c) { c.sink_tokens = -1; }, {"-1", "sink"});
  refused([](CacheConfig& c) { c.window_margin = -1; }, {"-1", "windows"});
  refused([](CacheConfig& c) { c.local_tokens = -3; }, {"-3", "local"});
  refused([](CacheConfig& c) { c.compress_from = -1; }, {"-1", "compression from"});
  refused([](CacheConfig& c) { c.chunk_tokens = -2; }, {"-2", "chunk"});
  refused([](CacheConfig& c) { c.chunk_tokens = 0; }, {"0", "chunk"});
  refused([](CacheConfig& c) { c.sketch.bits = 5; }, {"5", "2, 3 and 4"});
  refused([](CacheConfig& c) { c.sketch.bits = 1; }, {"1", "2, 3 and 4"});
  refused([](CacheConfig& c) { c.fetch.limit_tokens = -7; }, {"-7", "limit"});
  refused([](CacheConfig& c) { c.fetch.limit_tokens = 0; }, {"0", "limit"});
  refused([](CacheConfig& c) { c.threads = 0; }, {"0 threads", "1"});
  refused([](CacheConfig& c) { c.fast_bytes_limit = -8; }, {"-8", "fast"});
  refused([](CacheConfig& c) { c.host_bytes_limit = -9; }, {"-9", "host"});

  // Every reason at once, one sentence each.
  CacheConfig bad = small_config();
  bad.keep = 2;
  bad.fetch.delta = 0;
  bad.sketch.bits = 9;
  CHECK(reasons_against(bad).size() == 3);
  check_names(error_of<InvalidArgument>([&] { make_cache(bad); }), {"keep 2", "delta 0", "9 bits"});

  // Layers that are not cached may look like anything.
  CacheConfig skipped = small_config();
  skipped.layers.push_back({});
  skipped.layers[1].cached = false;
  skipped.layers[1].window = 1024;
  CHECK(reasons_against(skipped).empty());
  CHECK(make_cache(skipped) != nullptr);
}

TEST_CASE("What a forgotten stride or a number beyond binary32 would do is refused") {
  CacheConfig config;
  config.layers = {LayerConfig{.kv_heads = 2, .query_heads = 2, .key_dim = 16, .value_dim = 16}};
  const auto cache = make_cache(config);
  const verkv::SequenceId id = cache->create_sequence();
  const std::vector<float> rows(4 * 2 * 16, 0.5f);
  const verkv::TensorView good = verkv::token_major(rows.data(), DType::f32, 4, 2, 16);
  for (const bool token : {true, false}) {
    verkv::TensorView bad = good;
    (token ? bad.token_stride : bad.head_stride) = 0;
    CHECK_THROWS_AS(cache->append(id, 0, bad, good), verkv::InvalidArgument);
    CHECK_THROWS_AS(cache->append(id, 0, good, bad), verkv::InvalidArgument);
  }
  CHECK(cache->tokens(id, 0) == 0);
  for (const double factor : {1e-60, 1e300, -1.0}) {
    CacheConfig wrong = config;
    wrong.layers[0].scale = factor;
    CHECK_THROWS_AS(make_cache(wrong), verkv::InvalidArgument);
    wrong = config;
    wrong.layers[0].soft_cap = factor;
    CHECK_THROWS_AS(make_cache(wrong), verkv::InvalidArgument);
  }
  CacheConfig wrong = config;
  wrong.threads = -5;
  CHECK_THROWS_AS(make_cache(wrong), verkv::InvalidArgument);
}
