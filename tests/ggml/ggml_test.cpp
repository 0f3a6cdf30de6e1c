// libggml-verkv.so in ggml's own scheduler, over a toy of llama.cpp's KV cache.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "catch.hpp"
#include "toy_engine.hpp"

using namespace verkv::test;

namespace {

const std::string kPlugin = VERKV_GGML_PLUGIN;
const std::string kReport = VERKV_GGML_TEST_REPORT;

// The variables of the environment, for as long as this lives.
class Environment {
 public:
  explicit Environment(const std::vector<std::pair<std::string, std::string>>& variables)
      : variables_(variables) {
    std::remove(kReport.c_str());
    variables_.emplace_back("VERKV_GGML_REPORT", kReport);
    for (const auto& [name, value] : variables_) setenv(name.c_str(), value.c_str(), 1);
  }
  ~Environment() {
    for (const auto& [name, value] : variables_) unsetenv(name.c_str());
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  std::vector<std::pair<std::string, std::string>> variables_;
};

// A number of the last report.
double reported(const std::string& name) {
  std::ifstream file(kReport);
  std::string line;
  std::string last;
  while (std::getline(file, line)) last = line;
  const std::size_t place = last.find("\"" + name + "\": ");
  return place == std::string::npos ? -1
                                    : std::strtod(last.c_str() + place + name.size() + 4, nullptr);
}

// The largest difference between a step's answers and attention in double, of averages of numbers of
// size 1.
double error_of(ToyEngine& engine, const std::vector<ToyToken>& tokens) {
  const auto answers = engine.step(tokens);
  const auto expected = engine.reference();
  double result = 0;
  REQUIRE(answers.size() == expected.size());
  for (std::size_t l = 0; l < answers.size(); ++l) {
    REQUIRE(answers[l].size() == expected[l].size());
    for (std::size_t i = 0; i < answers[l].size(); ++i)
      result = std::max(result, std::fabs(static_cast<double>(answers[l][i]) - expected[l][i]));
  }
  return result;
}

// ggml's kernel rounds queries and sums of values to 16 bits; ours only sums in binary32.
constexpr double kOurs = 1e-5;
constexpr double kStock = 5e-3;

std::vector<ToyToken> tokens(int sequence, std::int64_t first, std::int64_t last,
                             std::int64_t stream = 0) {
  std::vector<ToyToken> result;
  for (std::int64_t cell = first; cell < last; ++cell) result.push_back({sequence, cell, stream});
  return result;
}

}  // namespace

TEST_CASE("Decode rows are answered exactly, prompts by ggml") {
  for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_F32}) {
    for (const float cap : {0.0f, 2.0f}) {
      const ToyShape shape{.value_dim = 48, .type = type, .soft_cap = cap};
      const Environment environment({});
      {
        ToyEngine engine(shape, kPlugin, 1);
        engine.step(tokens(0, 0, 200));
        CHECK(error_of(engine, tokens(0, 200, 201)) < kOurs);
        // Drafts, of which each sees the ones before it.
        CHECK(error_of(engine, tokens(0, 201, 206)) < kOurs);
        // They are taken back, and others come.
        engine.remove(0, 202, 206);
        CHECK(error_of(engine, tokens(0, 202, 204)) < kOurs);
      }
      CHECK(reported("dense_rows") == 2 * (1 + 5 + 2));
      CHECK(reported("passed_rows") == 2 * 200);
    }
  }
}

TEST_CASE("Sequences that share cells, and streams, are told apart") {
  const Environment environment({});
  {
    ToyEngine engine({}, kPlugin, 2);
    engine.step(tokens(0, 0, 100));
    engine.copy(0, 1);
    engine.step(tokens(2, 300, 340));
    for (std::int64_t i = 0; i < 5; ++i) {
      CHECK(error_of(engine, {{0, 100 + 3 * i, 0}, {1, 101 + 3 * i, 0}, {2, 102 + 3 * i, 0}}) <
            kOurs);
    }
    // Cells that have left are written by another.
    engine.remove(0, 0, 512);
    CHECK(error_of(engine, {{2, 100, 0}, {1, 400, 0}}) < kOurs);
  }
  CHECK(reported("dense_rows") == 2 * (5 * 3 + 2));
  {
    ToyEngine engine({.streams = 3}, kPlugin, 3);
    std::vector<ToyToken> prompt = tokens(0, 0, 50, 0);
    for (const ToyToken& token : tokens(1, 0, 50, 1)) prompt.push_back(token);
    for (const ToyToken& token : tokens(2, 20, 70, 2)) prompt.push_back(token);
    engine.step(prompt);
    CHECK(error_of(engine, {{0, 50, 0}, {1, 50, 1}, {2, 70, 2}}) < kOurs);
  }
  CHECK(reported("dense_rows") == 2 * 3);
}

TEST_CASE("What writes to the cache beside decode steps is seen") {
  const Environment environment({});
  ToyEngine engine({}, kPlugin, 4);
  engine.step(tokens(0, 0, 150));
  CHECK(error_of(engine, tokens(0, 150, 151)) < kOurs);
  engine.scale_keys(1, -0.5f);
  CHECK(error_of(engine, tokens(0, 151, 152)) < kOurs);
  engine.overwrite(0, true, 20, 90);
  engine.overwrite(1, false, 0, 130);
  CHECK(error_of(engine, tokens(0, 152, 153)) < kOurs);
}

TEST_CASE("What is not understood is left to ggml") {
  const ToyShape biased{.largest_bias = 8};
  const ToyShape with_sinks{.sinks = true};
  const ToyShape coded{.type = GGML_TYPE_Q8_0};
  for (const ToyShape& shape : {biased, with_sinks, coded}) {
    const Environment environment({});
    ToyEngine ours(shape, kPlugin, 5);
    ToyEngine stock(shape, "", 5);
    for (const auto& part : {tokens(0, 0, 40), tokens(0, 40, 41)})
      CHECK(ours.step(part) == stock.step(part));
  }
  CHECK(reported("dense_rows") == -1);
}

TEST_CASE("A switch, a list of layers, and wrong values") {
  const auto rows_with = [](const std::string& name, const std::string& value) {
    const Environment environment({{name, value}});
    {
      ToyEngine engine({.layers = 4}, kPlugin, 6);
      engine.step(tokens(0, 0, 30));
      CHECK(error_of(engine, tokens(0, 30, 31)) < kStock);
    }
    return reported("dense_rows");
  };
  CHECK(rows_with("VERKV_GGML", "on") == 4);
  CHECK(rows_with("VERKV_GGML", "off") == -1);
  CHECK(rows_with("VERKV_GGML_LAYERS", "0,2-3") == 3);
  CHECK(rows_with("VERKV_GGML_LAYERS", "7") == -1);
  for (const auto& [name, value] :
       std::vector<std::pair<std::string, std::string>>{{"VERKV_GGML", "of"},
                                                        {"VERKV_GGML", ""},
                                                        {"VERKV_GGML_LAYERS", ""},
                                                        {"VERKV_GGML_LAYERS", "3-"},
                                                        {"VERKV_GGML_LAYERS", "-1"},
                                                        {"VERKV_GGML_LAYERS", "5-2"},
                                                        {"VERKV_GGML_LAYERS", "all"}}) {
    INFO(name << "=" << value);
    const Environment environment({{name, value}});
    CHECK_THROWS_WITH(ToyEngine({}, kPlugin, 6), "the plug-in is not loaded");
  }
}
