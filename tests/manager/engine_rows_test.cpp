// HostTier::engine on the CPU: rows that stay in an engine's memory (support/engine_cells.hpp), beside a
// cache that copies them and gets the same calls. Random calls are in manager_property_test.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "catch.hpp"
#include "reference/statistics.hpp"
#include "support/allocations.hpp"
#include "support/blocks.hpp"
#include "support/configurations.hpp"
#include "support/engine_cells.hpp"
#include "support/results.hpp"
#include "support/test_backend.hpp"
#include "support/victim.hpp"

using namespace verkv;
using namespace verkv::test;
using verkv::reference::Random;

namespace {

CacheConfig of_engine(CacheConfig config) {
  config.host = HostTier::engine;
  return config;
}

// A sequence in both caches.
struct Both {
  SequenceId own;
  SequenceId engine;
  std::vector<std::vector<EngineCells::Row>> cells;  // [layer]
};

// Two caches that differ in their host tier, and the engine's memory.
class Pair {
 public:
  explicit Pair(const CacheConfig& config)
      : own(make_cache(config)), engine(make_cache(of_engine(config))) {
    for (const LayerConfig& layer : config.layers)
      memory_.push_back(std::make_unique<EngineCells>(layer, config.storage, random));
  }

  Both create() {
    return {own->create_sequence(3), engine->create_sequence(3),
            std::vector<std::vector<EngineCells::Row>>(memory_.size())};
  }

  void append(Both& both, std::int64_t count) {
    each_layer([&](std::int64_t l, const LayerConfig& layer) {
      const Block keys = random_block(random, count, layer.kv_heads, layer.key_dim, 1);
      const Block values = random_block(random, count, layer.kv_heads, layer.value_dim, 1);
      const auto placed = memory_[size(l)]->place(keys, values, {}, random);
      own->append(both.own, l, keys.view(), values.view());
      engine->append(both.engine, l, placed->keys, placed->values);
      auto& cells = both.cells[size(l)];
      cells.insert(cells.end(), placed->rows.begin(), placed->rows.end());
    });
  }

  // Tokens in the engine's memory.
  std::unique_ptr<EngineCells::Placed> place(std::int64_t layer, std::int64_t count) {
    const LayerConfig& l = own->config().layers[size(layer)];
    return memory_[size(layer)]->place(random_block(random, count, l.kv_heads, l.key_dim, 1),
                                       random_block(random, count, l.kv_heads, l.value_dim, 1), {},
                                       random);
  }

  // What was there is NaN afterwards.
  void move(Both& both, std::int64_t first, std::int64_t count) {
    each_layer([&](std::int64_t l, const LayerConfig&) {
      auto& cells = both.cells[size(l)];
      const auto placed =
          memory_[size(l)]->move(std::span(cells).subspan(size(first), size(count)), random);
      engine->move(both.engine, l, first, placed->keys, placed->values);
      std::copy(placed->rows.begin(), placed->rows.end(), cells.begin() + first);
    });
  }

  void truncate(Both& both, std::int64_t tokens) {
    CHECK(own->truncate(both.own, tokens).exact == engine->truncate(both.engine, tokens).exact);
    for (auto& cells : both.cells) cells.resize(size(tokens));
  }

  void compress(const Both& both) {
    std::vector<Scores> scores;
    std::vector<Block> queries;
    each_layer([&](std::int64_t l, const LayerConfig& layer) {
      scores.push_back(random_scores(random, layer.kv_heads,
                                     own->tokens(both.own, l) - own->compressed_tokens(both.own, l),
                                     ScoreKind::random));
      queries.push_back(random_block(random, 8, layer.query_heads, layer.key_dim, 1));
    });
    test::compress(*own, both.own, scores, queries);
    test::compress(*engine, both.engine, scores, queries);
  }

  // The last `rows` tokens.
  void attend(const Both& both, std::int64_t rows) {
    each_layer([&](std::int64_t l, const LayerConfig& layer) {
      const Block queries = random_block(random, rows, layer.query_heads, layer.key_dim, 1);
      const Result copied =
          test::attend(*own, l, std::vector<SequenceId>(size(rows), both.own), queries);
      const Result in_place =
          test::attend(*engine, l, std::vector<SequenceId>(size(rows), both.engine), queries);
      INFO("layer " << l << ", " << own->tokens(both.own, l) << " tokens");
      CHECK(same(in_place, copied));
      CHECK(engine->compressed_tokens(both.engine, l) == own->compressed_tokens(both.own, l));
      CHECK(engine->changed_row(both.engine, l) == -1);
      CHECK(own->changed_row(both.own, l) == -1);
      CHECK(rows_of(*engine, both.engine, l) == rows_of(*own, both.own, l));
    });
  }

  std::vector<std::byte> saved(const KvCacheManager& cache, SequenceId id) const {
    std::vector<std::byte> bytes;
    cache.save(id, [&](std::span<const std::byte> piece) {
      bytes.insert(bytes.end(), piece.begin(), piece.end());
    });
    return bytes;
  }

  template <class F>
  void each_layer(F&& f) const {
    for (std::int64_t l = 0; l < static_cast<std::int64_t>(memory_.size()); ++l)
      f(l, own->config().layers[size(l)]);
  }

  Random random{11};
  std::unique_ptr<KvCacheManager> own;
  std::unique_ptr<KvCacheManager> engine;

 private:
  static std::vector<std::byte> rows_of(const KvCacheManager& cache, SequenceId id,
                                        std::int64_t layer) {
    const LayerConfig& l = cache.config().layers[size(layer)];
    const std::int64_t tokens = cache.tokens(id, layer);
    const std::size_t each = size(tokens * l.kv_heads) * size_bytes(cache.config().storage);
    std::vector<std::byte> all(each * size(l.key_dim + l.value_dim));
    const std::span<std::byte> to = all;
    cache.read(id, layer, 0, tokens, to.first(each * size(l.key_dim)),
               to.subspan(each * size(l.key_dim)));
    return all;
  }

  std::vector<std::unique_ptr<EngineCells>> memory_;
};

CacheConfig three_layers() {
  CacheConfig config = small_config();
  config.layers = {layer_of(2, 4, 128, 128), layer_of(3, 1, 72, 40), layer_of(1, 2, 64, 64)};
  config.layers[1].soft_cap = 20;
  config.layers[2].dense = true;
  config.storage = DType::f16;
  return config;
}

}  // namespace

TEST_CASE("Rows in an engine's memory give the bits of rows that are copied", "[cpu]") {
  std::vector<CacheConfig> configs(4, three_layers());
  configs[1].storage = DType::bf16;
  configs[1].sketch.kind = SketchKind::exact;
  configs[1].study.vector_code = false;
  configs[2].storage = DType::f32;
  configs[2].study.estimator = Estimator::plain;
  configs[2].study.select = Selection::poisson;
  configs[2].fetch.mode = FetchMode::always;
  configs[3].threads = 2;
  configs[3].fetch.risk = 1e-4;
  for (const CacheConfig& config : configs) {
    INFO(name(config.storage));
    Pair pair(config);
    Both a = pair.create();
    pair.attend(a, 1);
    for (const std::int64_t count : {1, 250, 40, 20}) pair.append(a, count);
    // Nothing is compressed yet: more than a block of weighted rows, read in place.
    pair.attend(a, 5);
    pair.move(a, 100, 150);
    pair.attend(a, 1);
    pair.compress(a);
    pair.attend(a, 3);
    Both b{pair.own->fork(a.own), pair.engine->fork(a.engine), a.cells};
    for (int step = 0; step < 40; ++step) {
      pair.append(a, 1 + step % 3);
      pair.attend(a, 1 + step % 3);
      if (step % 8 == 3) pair.move(a, 0, 290 + step);
    }
    // The fork still has the rows where they were.
    pair.attend(b, 1);
    pair.truncate(a, 330);
    pair.append(a, 2);
    pair.attend(a, 2);
    CHECK(pair.saved(*pair.own, a.own) == pair.saved(*pair.engine, a.engine));
    // Back into what is compressed, and on.
    pair.truncate(a, 200);
    pair.attend(a, 1);
    pair.append(a, 30);
    pair.attend(a, 4);
    pair.own->redraw(a.own, 8);
    pair.engine->redraw(a.engine, 8);
    pair.attend(a, 1);
    pair.truncate(a, 0);
    pair.append(a, 60);
    pair.attend(a, 1);
    pair.own->erase(a.own);
    pair.engine->erase(a.engine);
    a.cells.clear();
    pair.append(b, 5);
    pair.attend(b, 5);
  }
}

TEST_CASE("Reserved steps over an engine's rows allocate nothing", "[cpu]") {
  Pair pair(three_layers());
  Both a = pair.create();
  pair.append(a, 200);
  pair.compress(a);
  const std::int64_t steps = 12;
  pair.engine->reserve(a.engine, steps);
  const LayerConfig& layer = pair.own->config().layers[0];
  const auto placed = pair.place(0, steps);
  const Block queries = random_block(pair.random, 1, layer.query_heads, layer.key_dim, 1);
  std::vector<float> output(size(layer.query_heads * layer.value_dim));
  const std::vector<SequenceId> rows{a.engine};
  const auto step = [&](std::int64_t i) {
    TensorView keys = placed->keys;
    TensorView values = placed->values;
    const void* const key = keys.row(i, 0);
    const void* const value = values.row(i, 0);
    keys.rows = &key;
    values.rows = &value;
    keys.tokens = values.tokens = 1;
    pair.engine->append(0, {rows, keys, values});
    pair.engine->attend(0, {rows, queries.view(), output, {}, {}, {}, {}});
  };
  step(0);
  const std::int64_t before = allocations;
  for (std::int64_t i = 1; i < steps; ++i) step(i);
  CHECK(allocations - before == 0);
}

TEST_CASE("A resident whose row has changed without a word is found", "[cpu]") {
  CacheConfig config = of_engine(small_config());
  config.layers = {layer_of(2, 1, 64, 64)};
  Random random(4);
  const std::int64_t tokens = 200;
  std::vector<float> keys(size(tokens * 2 * 64)), values(keys.size());
  for (float& x : keys) x = static_cast<float>(random.normal());
  for (float& x : values) x = static_cast<float>(random.normal());
  const auto cache = make_cache(config);
  const SequenceId id = cache->create_sequence(1);
  cache->append(id, 0, token_major(keys.data(), DType::f32, tokens, 2, 64),
                token_major(values.data(), DType::f32, tokens, 2, 64));
  CHECK(cache->changed_row(id, 0) == -1);
  compress(*cache, id, {random_scores(random, 2, tokens, ScoreKind::random)});
  CHECK(cache->changed_row(id, 0) == -1);
  std::int64_t found = 0;
  for (std::int64_t token = tokens; token-- > 0;) {
    // Of either head, first or last coordinate, key or value.
    float& x = (token % 2 == 0 ? keys : values)[size(token * 128 + token % 4 / 2 * 127)];
    const float before = x;
    x += 1;
    const std::int64_t row = cache->changed_row(id, 0);
    CHECK((row == -1 || row == token));
    found += row == token;
    x = before;
    CHECK(cache->changed_row(id, 0) == -1);
  }
  const std::int64_t row_bytes = 2 * 64 * 4;
  const std::int64_t residents = cache->memory().resident_bytes / row_bytes;
  CHECK(found >= residents / 3);
  CHECK(found <= residents);
  // Of several the first.
  for (float& x : keys) x = -x;
  CHECK(cache->changed_row(id, 0) == 0);
}

TEST_CASE("What an engine's rows must be is said", "[cpu]") {
  CacheConfig config = of_engine(small_config());
  config.layers = {layer_of(2, 1, 8, 8)};
  config.storage = DType::f16;
  const auto cache = make_cache(config);
  const SequenceId id = cache->create_sequence();
  const std::vector<Half> numbers(64 * 16, from_float<Half>(1));
  const std::vector<float> wide(64 * 16, 1);
  const auto view = [&](std::int64_t count) {
    return token_major(numbers.data(), DType::f16, count, 2, 8);
  };
  const auto refuses = [&](auto&& call, const std::vector<std::string>& parts,
                           ErrorCode code = ErrorCode::shape) {
    const MemoryReport before = cache->memory();
    check_names(error_of<InvalidArgument>(call), parts);
    try {
      call();
    } catch (const Error& error) {
      CHECK(error.code() == code);
    }
    CHECK(same(cache->memory(), before));
    CHECK(cache->tokens(id, 0) == 10);
  };
  cache->append(id, 0, view(10), view(10));
  const TensorView floats = token_major(wide.data(), DType::f32, 1, 2, 8);
  refuses([&] { cache->append(id, 0, floats, floats); }, {"keys", "f32", "f16"});
  TensorView apart = head_major(numbers.data(), DType::f16, 3, 2, 8);
  refuses([&] { cache->append(id, 0, apart, view(3)); }, {"keys", "24", "8"});
  refuses([&] { cache->append(id, 0, view(3), apart); }, {"values", "24", "8"});
  refuses([&] { cache->move(id, 0, 0, apart, view(3)); }, {"keys", "24", "8"});
  refuses([&] { cache->move(id, 0, 8, view(3), view(3)); }, {"3", "8", "10"});
  refuses([&] { cache->move(id, 0, -1, view(3), view(3)); }, {"-1"});
  refuses([&] { cache->move(id, 0, 0, view(3), view(2)); }, {"3", "2"});
  refuses([&] { cache->move(id, 0, 0, floats, floats); }, {"f32"});
  refuses([&] { cache->restore([](std::span<std::byte>) { return std::size_t{0}; }); }, {"restore"},
          ErrorCode::wrong_backend);
  // All tokens may move to where heads lie otherwise; then the next ones lie so too.
  apart = head_major(numbers.data(), DType::f16, 10, 2, 8);
  cache->move(id, 0, 0, apart, apart);
  refuses([&] { cache->append(id, 0, view(1), view(1)); }, {"keys", "8", "80"});
  cache->move(id, 0, 0, view(10), view(10));

  // Lists.
  std::vector<const void*> rows(3, numbers.data());
  TensorView list = listed_rows(rows.data(), DType::f16, 3, 2, 8, 8);
  cache->move(id, 0, 0, list, list);
  rows[1] = nullptr;
  refuses([&] { cache->append(id, 0, list, list); }, {"keys", "null"});
  rows[1] = reinterpret_cast<const std::byte*>(numbers.data()) + 1;
  refuses([&] { cache->append(id, 0, list, list); }, {"keys", "1", "2", "f16"});
  rows[1] = numbers.data();
  list.head_stride = 7;
  refuses([&] { cache->append(id, 0, list, list); }, {"keys", "7"});
  list.head_stride = 8;
  std::vector<Half> bad = numbers;
  bad[13] = from_float<Half>(kInfinity);
  rows[2] = bad.data();
  refuses([&] { cache->append(id, 0, list, list); }, {"token 2", "head 1", "coordinate 5"},
          ErrorCode::number);
  refuses([&] { cache->move(id, 0, 0, list, list); }, {"token 2", "head 1", "coordinate 5"},
          ErrorCode::number);
  std::vector<float> output(16);
  const std::vector<SequenceId> one{id};
  refuses(
      [&] {
        cache->attend(
            0, {one, listed_rows(rows.data(), DType::f16, 1, 2, 8, 8), output, {}, {}, {}, {}});
      },
      {"queries", "listed"});
  // Of padding rows no address is looked at.
  rows = {numbers.data(), nullptr, numbers.data()};
  cache->append(0,
                {std::vector<SequenceId>{id, kNoSequence, cache->create_sequence()}, list, list});
  CHECK(cache->tokens(id, 0) == 11);

  // A cache with rows of its own takes lists, of any type, and has nothing to move.
  config.host = HostTier::own;
  const auto own = make_cache(config);
  const SequenceId other = own->create_sequence();
  rows[1] = numbers.data();
  std::vector<const void*> wide_rows{wide.data() + 16, wide.data(), wide.data() + 32};
  own->append(other, 0, listed_rows(wide_rows.data(), DType::f32, 3, 2, 8, 8), list);
  CHECK(own->tokens(other, 0) == 3);
  check_names(error_of<InvalidArgument>([&] { own->move(other, 0, 0, list, list); }), {"move"});
}

TEST_CASE("An engine's rows are no memory of the cache", "[cpu]") {
  CacheConfig config;
  config.layers = {layer_of(8, 1, 128, 128)};
  config.threads = 1;
  config.fast_bytes_limit = 2'000'000;
  config.host_bytes_limit = 0;
  const std::int64_t tokens = 2048;
  const std::vector<Half> numbers = [] {
    Random random(9);
    std::vector<Half> all(size(tokens * 8 * 128));
    for (Half& x : all) x = from_float<Half>(static_cast<float>(random.normal()));
    return all;
  }();
  const auto cache = make_cache(of_engine(config));
  const SequenceId id = cache->create_sequence();
  const TensorView view = token_major(numbers.data(), DType::f16, tokens, 8, 128);
  cache->append(id, 0, view, view);
  const std::int64_t all = tokens * 8 * 256 * 2;
  MemoryReport memory = cache->memory();
  CHECK(memory.engine_bytes == all);
  CHECK(memory.host_bytes == 0);
  CHECK(memory.resident_bytes == 0);
  CHECK(memory.basis_bytes == 16 * tokens);
  const auto owned = [](const MemoryReport& m) {
    return m.fast_bytes() + m.host_bytes + m.basis_bytes + m.reserved_bytes;
  };
  CHECK(owned(memory) < all / 40);
  Random random(10);
  compress(*cache, id, {random_scores(random, 8, tokens, ScoreKind::random)});
  memory = cache->memory();
  CHECK(memory.engine_bytes == all);
  CHECK(memory.fast_bytes() < all * 17 / 100);
  // Forks have the same rows, and each is told where they are.
  const SequenceId fork = cache->fork(id);
  CHECK(cache->memory().engine_bytes == 2 * all);
  CHECK(cache->memory(fork).engine_bytes == all);
  cache->erase(id);
  CHECK(cache->memory().engine_bytes == all);
  cache->erase(fork);
  CHECK(cache->memory().engine_bytes == 0);
}

TEST_CASE("A sequence of an engine's rows goes on in a cache that copies", "[cpu]") {
  Pair pair(three_layers());
  Both a = pair.create();
  pair.append(a, 180);
  pair.compress(a);
  pair.append(a, 3);
  const std::vector<std::byte> bytes = pair.saved(*pair.engine, a.engine);
  std::size_t at = 0;
  const SequenceId back = pair.own->restore([&](std::span<std::byte> to) {
    const std::size_t count = std::min(to.size(), bytes.size() - at);
    std::memcpy(to.data(), bytes.data() + at, count);
    at += count;
    return count;
  });
  const Both restored{back, a.engine, a.cells};
  pair.attend(restored, 2);
}
