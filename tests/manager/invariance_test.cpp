// KvCacheManager on a backend (support/test_backend.hpp): what must not matter, bit for bit:
// threads, vectors, chunks, neighbours, layouts, splits of heads.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "catch.hpp"
#include "reference/statistics.hpp"
#include "reference/step.hpp"
#include "support/blocks.hpp"
#include "support/configurations.hpp"
#include "support/results.hpp"
#include "support/test_backend.hpp"

using namespace verkv;
using namespace verkv::test;
using verkv::reference::Random;

namespace {

// A prefill, a compression and a decode long enough to compress twice, all answers one after the
// other.
struct Story {
  std::vector<Block> keys, values, queries;  // per layer
  std::vector<Scores> scores;
};

const std::int64_t kPrefill = scene(200, 70);
const std::int64_t kDecode = scene(34, 6);

// A chunk leaves its window before the decode ends.
CacheConfig story_config() {
  CacheConfig config = small_config();
  config.local_tokens = scene(8, 2);
  config.chunk_tokens = scene(16, 4);
  return config;
}

Story make_story(const CacheConfig& config, std::uint64_t seed) {
  Random random(seed);
  Story story;
  for (const LayerConfig& layer : config.layers) {
    story.keys.push_back(
        random_block(random, kPrefill + kDecode, layer.kv_heads, layer.key_dim, 1.5, 0.5));
    story.values.push_back(
        random_block(random, kPrefill + kDecode, layer.kv_heads, layer.value_dim, 1));
    story.queries.push_back(random_block(random, kDecode, layer.query_heads, layer.key_dim, 1.5));
    story.scores.push_back(random_scores(random, layer.kv_heads, kPrefill, ScoreKind::with_zeros));
  }
  return story;
}

Result tell(const CacheConfig& config, const Story& story, std::int64_t first_chunk = kPrefill) {
  const auto cache = make_cache(config);
  const SequenceId sequence = cache->create_sequence(17);
  for (std::size_t l = 0; l < config.layers.size(); ++l) {
    for (std::int64_t begin = 0; begin < kPrefill; begin += first_chunk) {
      const std::int64_t count = std::min(first_chunk, kPrefill - begin);
      cache->append(sequence, static_cast<std::int64_t>(l), story.keys[l].part(begin, count).view(),
                    story.values[l].part(begin, count).view());
    }
  }
  compress(*cache, sequence, story.scores);
  Result all;
  for (std::int64_t step = 0; step < kDecode; ++step) {
    for (std::size_t l = 0; l < config.layers.size(); ++l) {
      const std::int64_t layer = static_cast<std::int64_t>(l);
      cache->append(sequence, layer, story.keys[l].part(kPrefill + step, 1).view(),
                    story.values[l].part(kPrefill + step, 1).view());
      append_result(all, attend(*cache, layer, {sequence}, story.queries[l].part(step, 1)));
    }
  }
  CHECK(cache->compressed_tokens(sequence, 0) > kPrefill);
  return all;
}

std::vector<CacheConfig> story_configs() {
  std::vector<CacheConfig> configs;
  for (const int kind : {0, 1, 2, 3, 4}) {
    CacheConfig config = story_config();
    config.storage = kind == 0 ? DType::f32 : kind == 1 ? DType::bf16 : DType::f16;
    config.layers = {layer_of(2, kind == 2 ? 12 : 3, kind == 3 ? 100 : 64, 80),
                     layer_of(3, 5, 128, 128)};
    config.pool = kind == 0 ? Pool::head : kind == 1 ? Pool::layer : Pool::sequence;
    if (kind == 1) config.sketch = {SketchKind::exact, 2};
    if (kind == 3) config.sketch.bits = 3;
    if (kind == 4) config.sketch.bits = 4;
    if (kind == 1 && backend().exact_order) config.study.order = FetchOrder::exact;
    if (kind == 3) config.fetch.risk = 1e-4;
    if (kind == 4) config.fetch.limit_tokens = 10;
    configs.push_back(config);
  }
  if (backend().thinning > 1) {
    configs = {configs[3]};
    configs[0].layers[1] = layer_of(1, 5, 128, 128);
  }
  return configs;
}

}  // namespace

TEST_CASE("Threads and vector code change no bit", "[cpu]") {
  for (const CacheConfig& base : story_configs()) {
    const Story story = make_story(base, 11);
    const Result expected = tell(base, story);
    struct Case {
      int threads;
      bool vector_code;
    };
    for (const Case& c : {Case{2, true}, Case{3, true}, Case{1, false}}) {
      CacheConfig config = base;
      config.threads = c.threads;
      config.study.vector_code = c.vector_code;
      INFO("threads " << c.threads << ", vector code " << c.vector_code << ", sketch "
                      << static_cast<int>(base.sketch.kind) << "/" << base.sketch.bits);
      CHECK(same(tell(config, story), expected));
    }
  }
}

TEST_CASE("The size of appended chunks changes no bit") {
  for (const CacheConfig& config : story_configs()) {
    const Story story = make_story(config, 12);
    const Result expected = tell(config, story);
    for (const std::int64_t chunk : {7, 1, 128}) CHECK(same(tell(config, story, chunk), expected));
  }
}

TEST_CASE("A row does not depend on its neighbours in the batch") {
  for (const CacheConfig& config : story_configs()) {
    Random random(13);
    const auto cache = make_cache(config);
    const std::int64_t kRows = backend().thinning > 1 ? 9 : 33;
    std::vector<SequenceId> sequences;
    for (std::int64_t row = 0; row < kRows; ++row) {
      if (row % 8 == 5) {
        sequences.push_back(kNoSequence);
        continue;
      }
      const SequenceId sequence = cache->create_sequence();
      sequences.push_back(sequence);
      const std::int64_t n = row == 3 ? 0 : row * row % 150 + 1;  // an empty sequence among them
      std::vector<Scores> scores;
      for (std::size_t l = 0; l < config.layers.size(); ++l) {
        const LayerConfig& layer = config.layers[l];
        cache->append(sequence, static_cast<std::int64_t>(l),
                      random_block(random, n, layer.kv_heads, layer.key_dim, 1.5).view(),
                      random_block(random, n, layer.kv_heads, layer.value_dim, 1).view());
        scores.push_back(random_scores(random, layer.kv_heads, n, ScoreKind::random));
      }
      if (row % 3 != 1) compress(*cache, sequence, scores);
    }
    for (std::size_t l = 0; l < config.layers.size(); ++l) {
      const std::int64_t layer = static_cast<std::int64_t>(l);
      const LayerConfig& shape = config.layers[l];
      const Block queries = random_block(random, kRows, shape.query_heads, shape.key_dim, 1.5);
      const Result all = attend(*cache, layer, sequences, queries);
      for (std::int64_t row = 0; row < kRows; ++row) {
        INFO("row " << row);
        const Result alone = attend(*cache, layer, {sequences[size(row)]}, queries.part(row, 1));
        CHECK(same(row_of(all, size(row), size(kRows)), alone));
      }
      // In another order, and between other neighbours.
      std::vector<SequenceId> reversed(sequences.rbegin(), sequences.rend());
      Block turned = queries;
      for (std::int64_t row = 0; row < kRows; ++row) {
        const Block one = queries.part(kRows - 1 - row, 1);
        std::copy(one.data.begin(), one.data.end(),
                  turned.data.begin() + row * shape.query_heads * shape.key_dim);
      }
      const Result other = attend(*cache, layer, reversed, turned);
      for (std::size_t row = 0; row < size(kRows); ++row) {
        CHECK(
            same(row_of(all, row, size(kRows)), row_of(other, size(kRows) - 1 - row, size(kRows))));
      }
      // Padding rows and empty sequences give the empty answer.
      for (const std::size_t row : {std::size_t{5}, std::size_t{3}}) {
        const Result empty = row_of(all, row, size(kRows));
        for (const float x : empty.output) CHECK(x == 0);
        for (const float x : empty.lse) CHECK(x == -kInfinity);
        for (const QueryHeadReport& query : empty.query) {
          CHECK((query.epsilon == 0 && query.planned_tokens == 0));
          CHECK(query.certified == (sequences[row] != kNoSequence));
        }
        for (const KvHeadReport& kv : empty.kv)
          CHECK((kv.resident_tokens == 0 && kv.fetched_tokens == 0));
      }
    }
  }
}

TEST_CASE("Layout and type of the views change no bit") {
  CacheConfig config = small_config();
  config.storage = DType::f16;
  config.layers = {layer_of(3, 2, 64, 80)};
  Random random(14);
  const std::int64_t n = 150;
  Block keys = random_block(random, n, 3, 64, 1.5);
  Block values = random_block(random, n, 3, 80, 1);
  Block queries = random_block(random, 2, 6, 64, 1);
  for (Block* block : {&keys, &values, &queries}) {
    for (float& x : block->data)
      x = reference::as_stored(x, DType::f16);  // so that f16 input is the same
  }
  const Scores scores = random_scores(random, 3, n, ScoreKind::random);

  // Copies `block` to memory with the given strides (in elements) and gaps of NaN.
  const auto laid_out = [](const Block& block, std::int64_t token_stride, std::int64_t head_stride,
                           bool half, std::vector<float>& floats,
                           std::vector<verkv::Half>& halves) {
    const std::size_t room =
        size((block.tokens - 1) * token_stride + (block.heads - 1) * head_stride + block.dim);
    floats.assign(room, kNaN);
    halves.assign(room, verkv::to_half(kNaN));
    for (std::int64_t t = 0; t < block.tokens; ++t) {
      for (std::int64_t h = 0; h < block.heads; ++h) {
        for (std::int64_t j = 0; j < block.dim; ++j) {
          const float x = block.at(t, h, j);
          floats[size(t * token_stride + h * head_stride + j)] = x;
          halves[size(t * token_stride + h * head_stride + j)] = verkv::to_half(x);
        }
      }
    }
    return TensorView{half ? static_cast<const void*>(halves.data()) : floats.data(),
                      half ? DType::f16 : DType::f32,
                      block.tokens,
                      block.heads,
                      block.dim,
                      token_stride,
                      head_stride};
  };

  std::vector<Result> results;
  for (const int layout : {0, 1, 2, 3}) {
    const auto cache = make_cache(config);
    const SequenceId a = cache->create_sequence(1);
    const SequenceId b = cache->create_sequence(2);
    const auto view = [&](const Block& block, std::vector<float>& floats,
                          std::vector<verkv::Half>& halves) {
      switch (layout) {
        case 0:
          return laid_out(block, block.heads * block.dim, block.dim, false, floats, halves);
        case 1:
          return laid_out(block, block.dim, block.tokens * block.dim, false, floats, halves);
        case 2:
          return laid_out(block, block.heads * (block.dim + 3) + 5, block.dim + 3, false, floats,
                          halves);
        default:
          return laid_out(block, block.dim + 1, block.tokens * (block.dim + 1) + 7, true, floats,
                          halves);
      }
    };
    std::vector<float> f0, f1, f2;
    std::vector<verkv::Half> h0, h1, h2;
    const TensorView key_view = view(keys, f0, h0);
    const TensorView value_view = view(values, f1, h1);
    for (const SequenceId id : {a, b}) {
      cache->append(id, 0, key_view, value_view);
      if (layout == 0) {
        compress(*cache, id, {scores});
      } else {
        // Scores with gaps between the heads.
        std::vector<float> spaced(size(3 * (n + 9)), kNaN);
        for (std::int64_t h = 0; h < 3; ++h) {
          std::copy(scores.data.begin() + h * n, scores.data.begin() + (h + 1) * n,
                    spaced.begin() + h * (n + 9));
        }
        const ImportanceView one{spaced.data(), 3, n, n + 9};
        cache->compress(id, std::span(&one, 1));
      }
    }
    results.push_back(attend(*cache, 0, {a, b}, view(queries, f2, h2)));
  }
  for (const Result& result : results) CHECK(same(result, results[0]));
  CHECK_FALSE(
      same(row_of(results[0], 0, 2), row_of(results[0], 1, 2)));  // other draws, other queries
}

TEST_CASE("Heads split over two managers answer as in one") {
  for (const SketchKind kind : {SketchKind::calibrated, SketchKind::exact}) {
    if (kind == SketchKind::exact && backend().thinning > 1) continue;
    CacheConfig whole = story_config();
    whole.sketch.kind = kind;
    whole.layers = {layer_of(4, 3, 64, 64), layer_of(4, 3, 64, 64)};
    const Story story = make_story(whole, 15);
    const Result expected = tell(whole, story);
    for (const std::int64_t first : {0, 2}) {
      CacheConfig part = whole;
      Story own = story;
      for (std::size_t l = 0; l < 2; ++l) {
        part.layers[l] = layer_of(2, 3, 64, 64);
        part.layers[l].first_global_kv_head = first;
        const auto cut = [](const Block& block, std::int64_t begin, std::int64_t heads) {
          Block result = constant_block(block.tokens, heads, block.dim, 0);
          for (std::int64_t t = 0; t < block.tokens; ++t) {
            for (std::int64_t h = 0; h < heads; ++h) {
              const std::vector<float> row = block.row(t, begin + h);
              std::copy(row.begin(), row.end(), result.data.begin() + (t * heads + h) * block.dim);
            }
          }
          return result;
        };
        own.keys[l] = cut(story.keys[l], first, 2);
        own.values[l] = cut(story.values[l], first, 2);
        own.queries[l] = cut(story.queries[l], 3 * first, 6);
        own.scores[l] = {2, kPrefill,
                         std::vector<float>(story.scores[l].data.begin() + first * kPrefill,
                                            story.scores[l].data.begin() + (first + 2) * kPrefill)};
      }
      const Result result = tell(part, own);
      for (std::size_t row = 0; row < size(2 * kDecode); ++row) {
        const Result all = row_of(expected, row, size(2 * kDecode));
        const Result half = row_of(result, row, size(2 * kDecode));
        const Result same_half = row_of(all, size(first / 2), 2);
        CHECK(same(half, same_half));
      }
    }
    // The second of two layers on another rank.
    CacheConfig last = whole;
    last.layers = {whole.layers[1]};
    last.layers[0].global_layer = 1;
    const Story own{{story.keys[1]}, {story.values[1]}, {story.queries[1]}, {story.scores[1]}};
    const Result result = tell(last, own);
    for (std::size_t step = 0; step < size(kDecode); ++step) {
      CHECK(same(row_of(result, step, size(kDecode)),
                 row_of(expected, 2 * step + 1, size(2 * kDecode))));
    }
  }
}
