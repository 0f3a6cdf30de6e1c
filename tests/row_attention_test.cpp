// Attention over an engine's own rows: against plain loops in double, and the same bits whatever the
// threads, the kernels, the other rows, and where the visible tokens lie.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <verkv/attention.hpp>
#include <verkv/row_attention.hpp>
#include <verkv/types.hpp>

#include "catch.hpp"
#include "tolerance.hpp"

using namespace verkv;

namespace {

using Visible = std::vector<std::vector<std::uint32_t>>;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

CacheConfig config_of(const LayerConfig& layer, int threads = 1, bool vector_code = true) {
  CacheConfig config;
  config.layers = {layer};
  config.threads = threads;
  config.study.vector_code = vector_code;
  return config;
}

// Rows [token][head][dim] with room between tokens, as an engine's cache has.
struct Block {
  Block(std::mt19937& random, DType of_type, std::int64_t n, std::int64_t of_heads,
        std::int64_t of_dim, std::int64_t gap)
      : type(of_type), tokens(n), heads(of_heads), dim(of_dim), stride(of_heads * of_dim + gap) {
    std::normal_distribution<float> normal;
    bytes.resize(at(n * stride) * size_bytes(type));
    for (std::int64_t i = 0; i < n * stride; ++i) set(i, normal(random));
  }
  void set(std::int64_t i, float x) {
    with_element(type, [&](auto zero) {
      using T = decltype(zero);
      const T element = from_float<T>(x);
      std::memcpy(bytes.data() + at(i) * sizeof(T), &element, sizeof(T));
    });
  }
  float get(std::int64_t token, std::int64_t head, std::int64_t j) const {
    return with_element(type, [&](auto zero) {
      std::memcpy(&zero, bytes.data() + at(token * stride + head * dim + j) * sizeof(zero),
                  sizeof(zero));
      return to_float(zero);
    });
  }
  TensorView view() const { return {bytes.data(), type, tokens, heads, dim, stride, dim}; }
  // The tokens of a list alone, side by side.
  Block only(const std::vector<std::uint32_t>& list) const {
    Block result = *this;
    const std::size_t row = at(stride) * size_bytes(type);
    result.tokens = static_cast<std::int64_t>(list.size());
    for (std::size_t i = 0; i < list.size(); ++i)
      std::memcpy(result.bytes.data() + i * row, bytes.data() + list[i] * row, row);
    return result;
  }

  DType type;
  std::int64_t tokens, heads, dim, stride;
  std::vector<std::byte> bytes;
};

struct Answer {
  std::vector<float> output;
  std::vector<float> lse;
  friend bool operator==(const Answer&, const Answer&) = default;
};

Answer attend(const CacheConfig& config, const Block& keys, const Block& values,
              const Block& queries, const Visible& visible) {
  const LayerConfig& layer = config.layers[0];
  const std::vector<std::span<const std::uint32_t>> lists(visible.begin(), visible.end());
  Answer answer;
  answer.output.resize(lists.size() * at(layer.query_heads * layer.value_dim));
  answer.lse.resize(lists.size() * at(layer.query_heads));
  RowAttention attention(config);
  attention.attend(0, {.keys = keys.view(),
                       .values = values.view(),
                       .queries = queries.view(),
                       .visible = lists,
                       .output = answer.output,
                       .lse = answer.lse});
  return answer;
}

std::vector<double> logits(const LayerConfig& layer, const Block& keys, const Block& queries,
                           std::int64_t row, std::int64_t head,
                           const std::vector<std::uint32_t>& visible) {
  const std::int64_t kv_head = head / (layer.query_heads / layer.kv_heads);
  const double scale = layer.scale.value_or(1 / std::sqrt(static_cast<double>(layer.key_dim)));
  std::vector<double> result;
  for (const std::uint32_t i : visible) {
    double dot = 0;
    for (std::int64_t j = 0; j < layer.key_dim; ++j) {
      dot += static_cast<double>(queries.get(row, head, j)) *
             static_cast<double>(keys.get(i, kv_head, j));
    }
    result.push_back(soft_capped(scale * dot, layer.soft_cap.value_or(0)));
  }
  return result;
}

double log_sum(const std::vector<double>& logit) {
  double top = -std::numeric_limits<double>::infinity();
  for (const double x : logit) top = std::max(top, x);
  double sum = 0;
  for (const double x : logit) sum += std::exp(x - top);
  return logit.empty() ? top : top + std::log(sum);
}

void check_answer(const LayerConfig& layer, const Block& keys, const Block& values,
                  const Block& queries, const Visible& visible, const Answer& answer) {
  for (std::int64_t r = 0; r < queries.tokens; ++r) {
    for (std::int64_t h = 0; h < layer.query_heads; ++h) {
      const auto logit = logits(layer, keys, queries, r, h, visible[at(r)]);
      auto terms = logit;
      if (!layer.sink_logits.empty())
        terms.push_back(static_cast<double>(layer.sink_logits[at(h)]));
      const double lse = log_sum(terms);
      const std::int64_t place = r * layer.query_heads + h;
      INFO("row " << r << ", head " << h << " of " << visible[at(r)].size() << " tokens");
      if (logit.empty()) {
        REQUIRE(answer.lse[at(place)] == static_cast<float>(lse));
      } else {
        REQUIRE(std::fabs(static_cast<double>(answer.lse[at(place)]) - lse) < tolerance::kDense);
      }
      double error = 0;
      double length = 1e-30;
      for (std::int64_t j = 0; j < layer.value_dim; ++j) {
        double expected = 0;
        for (std::size_t i = 0; i < logit.size(); ++i) {
          expected += std::exp(logit[i] - lse) *
                      static_cast<double>(values.get(visible[at(r)][i],
                                                     h / (layer.query_heads / layer.kv_heads), j));
        }
        const double got = static_cast<double>(answer.output[at(place * layer.value_dim + j)]);
        error += (got - expected) * (got - expected);
        length += expected * expected;
      }
      REQUIRE(std::sqrt(error) <= tolerance::kDense * std::max(1.0, std::sqrt(length)));
    }
  }
}

std::vector<std::uint32_t> all(std::int64_t n) {
  std::vector<std::uint32_t> list(at(n));
  std::iota(list.begin(), list.end(), 0u);
  return list;
}

// Of n tokens: all, a run, a random half, every third, one, none.
Visible lists_of(std::mt19937& random, std::int64_t n) {
  Visible lists(6);
  lists[0] = all(n);
  for (std::uint32_t i = 0; i < n; ++i) {
    if (i >= n / 4 && i < n - n / 4) lists[1].push_back(i);
    if (random() % 2 == 0) lists[2].push_back(i);
    if (i % 3 == 1) lists[3].push_back(i);
  }
  lists[4] = {static_cast<std::uint32_t>(random() % at(n))};
  return lists;
}

}  // namespace

TEST_CASE("Attention over an engine's rows is that of plain loops, and the same bits any way") {
  std::mt19937 random(1);
  struct Shape {
    std::int64_t kv_heads, query_heads, key_dim, value_dim;
  };
  int k = 0;
  for (const Shape& s :
       {Shape{1, 1, 16, 16}, Shape{3, 9, 64, 64}, Shape{2, 20, 40, 24}, Shape{1, 4, 7, 130}}) {
    for (const std::int64_t n : {1, 17, 300, 1024, 1025, 2500}) {
      LayerConfig layer{.kv_heads = s.kv_heads,
                        .query_heads = s.query_heads,
                        .key_dim = s.key_dim,
                        .value_dim = s.value_dim};
      ++k;
      if (k % 3 == 0) layer.soft_cap = 3.0;
      if (k % 2 == 0) layer.scale = 0.3;
      for (std::int64_t h = 0; k % 4 == 1 && h < s.query_heads; ++h)
        layer.sink_logits.push_back(static_cast<float>(2 * (h % 5)) - 3);
      const DType type = std::vector{DType::f32, DType::f16, DType::bf16}[at(k % 3)];
      const Block keys(random, type, n, s.kv_heads, s.key_dim, 5 * (k % 2));
      const Block values(random, type, n, s.kv_heads, s.value_dim, 3 * (k % 2));
      const Visible visible = lists_of(random, n);
      const Block queries(random, DType::f32, 6, s.query_heads, s.key_dim, 0);
      const CacheConfig config = config_of(layer);
      const Answer answer = attend(config, keys, values, queries, visible);
      INFO("case " << k << ", " << n << " tokens");
      check_answer(layer, keys, values, queries, visible, answer);
      CHECK(attend(config_of(layer, 3), keys, values, queries, visible) == answer);
      CHECK(attend(config_of(layer, 1, false), keys, values, queries, visible) == answer);
      // Each row alone, and over a copy in which what it sees lies side by side.
      const std::size_t numbers = at(s.query_heads * s.value_dim);
      for (std::uint32_t r = 0; r < 6; ++r) {
        const auto& list = visible[r];
        const Answer alone = attend(config, keys.only(list), values.only(list), queries.only({r}),
                                    {all(static_cast<std::int64_t>(list.size()))});
        CHECK(std::memcmp(alone.output.data(), answer.output.data() + r * numbers,
                          numbers * sizeof(float)) == 0);
      }
    }
  }
}

TEST_CASE("Tokens that a row does not see are not read") {
  std::mt19937 random(2);
  const LayerConfig layer{.kv_heads = 2, .query_heads = 4, .key_dim = 32, .value_dim = 48};
  const std::int64_t n = 1500;
  Block keys(random, DType::f16, n, 2, 32, 0);
  Block values(random, DType::f16, n, 2, 48, 0);
  const Block queries(random, DType::f32, 6, 4, 32, 0);
  Visible visible = lists_of(random, n);
  visible[0].clear();
  const Answer before = attend(config_of(layer), keys, values, queries, visible);
  std::vector<bool> seen(at(n));
  for (const auto& list : visible)
    for (const std::uint32_t i : list) seen[i] = true;
  for (std::int64_t i = 0; i < n; ++i) {
    if (seen[at(i)]) continue;
    for (std::int64_t j = 0; j < keys.stride; ++j)
      keys.set(i * keys.stride + j, std::numeric_limits<float>::quiet_NaN());
    for (std::int64_t j = 0; j < values.stride; ++j)
      values.set(i * values.stride + j, std::numeric_limits<float>::infinity());
  }
  CHECK(attend(config_of(layer), keys, values, queries, visible) == before);
}

TEST_CASE("Importance is the root mean square of what rows give") {
  std::mt19937 random(3);
  const LayerConfig layer{.kv_heads = 2, .query_heads = 6, .key_dim = 32, .value_dim = 16};
  for (const std::int64_t n : {1, 40, 2100}) {
    const Block keys(random, DType::f16, n, 2, 32, 7);
    const Block queries(random, DType::f32, 6, 6, 32, 0);
    const Visible visible = lists_of(random, n);
    const std::vector<std::span<const std::uint32_t>> lists(visible.begin(), visible.end());
    const RowAttentionBatch batch{.keys = keys.view(), .queries = queries.view(), .visible = lists};
    std::vector<float> out(at(2 * n), 7.0f);
    RowAttention(config_of(layer)).importance(0, batch, out);
    std::vector<float> again(at(2 * n));
    RowAttention(config_of(layer, 4, false)).importance(0, batch, again);
    CHECK(out == again);
    std::vector<double> squares(at(2 * n));
    for (std::int64_t r = 0; r < 6; ++r) {
      for (std::int64_t h = 0; h < 6; ++h) {
        const auto logit = logits(layer, keys, queries, r, h, visible[at(r)]);
        const double lse = log_sum(logit);
        for (std::size_t i = 0; i < logit.size(); ++i)
          squares[at(h / 3 * n + visible[at(r)][i])] += std::exp(2 * (logit[i] - lse)) / (6 * 3);
      }
    }
    for (std::size_t i = 0; i < squares.size(); ++i) {
      const double expected = std::sqrt(squares[i]);
      REQUIRE(std::fabs(static_cast<double>(out[i]) - expected) <=
              tolerance::kDense * std::max(expected, 1e-6));
    }
  }
}

TEST_CASE("What cannot be answered is refused by name") {
  std::mt19937 random(4);
  const LayerConfig layer{.kv_heads = 2, .query_heads = 4, .key_dim = 8, .value_dim = 8};
  const Block keys(random, DType::f32, 5, 2, 8, 0);
  const Block queries(random, DType::f32, 1, 4, 8, 0);
  RowAttention attention(config_of(layer));
  std::vector<float> output(32);
  const auto refused = [&](const std::vector<std::uint32_t>& list, std::int64_t which,
                           std::size_t numbers) -> std::string {
    const std::vector<std::span<const std::uint32_t>> lists{list};
    try {
      attention.attend(which, {.keys = keys.view(),
                               .values = keys.view(),
                               .queries = queries.view(),
                               .visible = lists,
                               .output = std::span(output).first(numbers)});
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "answered";
  };
  CHECK(refused({0, 2, 4}, 0, 32) == "answered");
  CHECK(refused({}, 0, 32) == "answered");
  CHECK_THAT(refused({0, 5}, 0, 32), Catch::Contains("row 0: visible token 5; there are 5"));
  CHECK_THAT(refused({2, 1}, 0, 32), Catch::Contains("row 0: visible tokens that do not ascend"));
  CHECK_THAT(refused({1, 1}, 0, 32), Catch::Contains("row 0: visible tokens that do not ascend"));
  CHECK_THAT(refused({1}, 1, 32), Catch::Contains("layer 1"));
  CHECK_THAT(refused({1}, -1, 32), Catch::Contains("layer -1"));
  CHECK_THAT(refused({1}, 0, 31), Catch::Contains("output of 31 numbers"));
  CHECK_THROWS_AS(RowAttention(CacheConfig{}), InvalidArgument);
  std::vector<float> scores(9);
  const std::vector<std::span<const std::uint32_t>> lists{{}};
  const RowAttentionBatch batch{.keys = keys.view(), .queries = queries.view(), .visible = lists};
  CHECK_THROWS_AS(attention.importance(0, batch, scores), InvalidArgument);
  // Numbers of keys whose product with the heads is none.
  RowAttentionBatch endless = batch;
  endless.keys.tokens = std::int64_t{1} << 62;
  CHECK_THROWS_AS(attention.importance(0, endless, {}), InvalidArgument);
  const std::vector<const void*> rows(5, keys.view().data);
  RowAttentionBatch listed = batch;
  listed.keys = listed_rows(rows.data(), DType::f32, 5, 2, 8, 8);
  try {
    attention.importance(0, listed, std::span(scores));
    FAIL("answered");
  } catch (const InvalidArgument& error) {
    CHECK_THAT(error.what(), Catch::Contains("keys: listed rows"));
    CHECK(error.place() == ErrorPlace{.layer = 0});
  }
}

TEST_CASE("Layers that are not cached may have any numbers") {
  CacheConfig config = config_of({.kv_heads = 1, .query_heads = 1, .key_dim = 8, .value_dim = 8});
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  config.layers.push_back({.kv_heads = -1, .key_dim = most, .value_dim = most, .cached = false});
  RowAttention attention(config);
  std::mt19937 random(5);
  const Block rows(random, DType::f32, 1, 1, 8, 0);
  const std::vector<std::uint32_t> first{0};
  const std::vector<std::span<const std::uint32_t>> lists{first};
  std::vector<float> output(8);
  attention.attend(0, {.keys = rows.view(),
                       .values = rows.view(),
                       .queries = rows.view(),
                       .visible = lists,
                       .output = output});
  for (std::int64_t j = 0; j < 8; ++j) CHECK(output[at(j)] == rows.get(0, 0, j));
}
