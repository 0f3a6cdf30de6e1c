// libggml-verkv.so in ggml's own scheduler, over a toy of llama.cpp's KV cache.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
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
// Compressed, and all moved that is worth anything: residents and moved rows.
constexpr double kMoved = 1e-3;
const std::vector<std::pair<std::string, std::string>> kCompressed{{"VERKV_GGML_FROM", "150"},
                                                                   {"VERKV_GGML_KEEP", "0.4"},
                                                                   {"VERKV_GGML_RISK", "1e-12"},
                                                                   {"VERKV_GGML_EPSILON", "off"},
                                                                   {"VERKV_GGML_CHECK", "on"}};

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

TEST_CASE("Sinks of the softmax are in the answer, exact and compressed") {
  const Environment environment({{"VERKV_GGML_FROM", "200"}, {"VERKV_GGML_KEEP", "1"}});
  {
    ToyEngine engine({.sinks = true}, kPlugin, 12);
    engine.step(tokens(0, 0, 150));
    CHECK(error_of(engine, tokens(0, 150, 151)) < kOurs);
    engine.step(tokens(0, 151, 300));
    CHECK(error_of(engine, tokens(0, 300, 301)) < kOurs);
  }
  CHECK(reported("dense_rows") == 2);
  CHECK(reported("compressed_rows") == 2);
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

// ---- Compressed sequences ----

TEST_CASE(
    "A long sequence is compressed at its first decode row; with everything kept it is exact") {
  for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_F32}) {
    for (const float cap : {0.0f, 2.0f}) {
      const Environment environment(
          {{"VERKV_GGML_FROM", "200"}, {"VERKV_GGML_KEEP", "1"}, {"VERKV_GGML_CHECK", "on"}});
      {
        ToyEngine engine({.value_dim = 48, .type = type, .soft_cap = cap}, kPlugin, 7);
        engine.step(tokens(0, 0, 150));
        CHECK(error_of(engine, tokens(0, 150, 151)) < kOurs);
        engine.step(tokens(0, 151, 300));
        for (std::int64_t i = 300; i < 340; ++i)
          CHECK(error_of(engine, tokens(0, i, i + 1)) < kOurs);
        CHECK(error_of(engine, tokens(0, 340, 345)) < kOurs);
        engine.remove(0, 342, 345);
        CHECK(error_of(engine, tokens(0, 342, 344)) < kOurs);
        // A second prompt of the same chat, and its answer.
        engine.step(tokens(0, 350, 500));
        CHECK(error_of(engine, tokens(0, 500, 501)) < kOurs);
      }
      CHECK(reported("compressions") == 2);
      CHECK(reported("late_queries") == 2 * 2 * 64);
      CHECK(reported("dense_rows") == 2);
      CHECK(reported("compressed_rows") == 2 * (40 + 5 + 2 + 1));
      CHECK(reported("stale_rows") == 0);
    }
  }
}

TEST_CASE("A compressed sequence is near, and asks the engine's rows for what it lacks") {
  const auto run = [](const std::string& keep, const std::string& risk) {
    const Environment environment({{"VERKV_GGML_FROM", "200"},
                                   {"VERKV_GGML_KEEP", keep},
                                   {"VERKV_GGML_RISK", risk},
                                   {"VERKV_GGML_EPSILON", "off"},
                                   {"VERKV_GGML_CHECK", "on"}});
    double worst = 0;
    {
      ToyEngine engine({.cells = 2048}, kPlugin, 8);
      engine.step(tokens(0, 0, 1000));
      for (std::int64_t i = 1000; i < 1300; ++i)
        worst = std::max(worst, error_of(engine, tokens(0, i, i + 1)));
    }
    CHECK(reported("compressed_rows") == 2 * 300);
    CHECK(reported("late_queries") == 2 * 64);
    CHECK(reported("stale_rows") == 0);
    return worst;
  };
  const double coarse = run("0.1", "off");
  CHECK(reported("moved_tokens") == 0);
  const double fine = run("0.1", "1e-12");
  CHECK(reported("moved_tokens") > 0);
  CHECK(fine < 1e-3);
  // The answer is ours: with less it is another.
  CHECK(coarse > 10 * fine);
  CHECK(coarse < 1);
}

TEST_CASE("Rows of compressed sequences that are rewritten beside decode steps are heard of") {
  const Environment environment(kCompressed);
  {
    ToyEngine engine({}, kPlugin, 11);
    engine.step(tokens(0, 0, 300));
    std::int64_t next = 300;
    const auto go_on = [&] {
      for (int i = 0; i < 40; ++i, ++next)
        CHECK(error_of(engine, tokens(0, next, next + 1)) < kMoved);
    };
    go_on();
    // Rows of one tensor, one by one; the sequence goes on anew from there.
    for (const std::int64_t cell : {290, 270, 265, 240, 222})
      engine.overwrite(1, true, cell, cell + 1);
    go_on();
    engine.overwrite(0, false, 250, 260);
    go_on();
    // All of them.
    engine.scale_keys(1, -0.5f);
    go_on();
  }
  CHECK(reported("compressed_rows") == 2 * 160);
  CHECK(reported("stale_rows") == 0);
}

TEST_CASE("Whatever becomes of cells, no answer rests on a row that is not there any more") {
  double compressed = 0;
  for (const std::uint32_t seed : {1u, 2u, 3u, 4u}) {
    const Environment environment(kCompressed);
    {
      ToyEngine engine({.layers = 3, .kv_heads = 1, .query_heads = 2, .cells = 1024}, kPlugin,
                       seed);
      std::mt19937 random(seed);
      const auto below = [&](std::size_t n) { return random() % n; };
      std::vector<int> sequences;
      int next = 0;
      const auto write = [&](const std::vector<std::pair<int, std::size_t>>& who) {
        const std::vector<std::int64_t> free = engine.free_cells();
        std::vector<ToyToken> list;
        for (const auto& [sequence, count] : who) {
          for (std::size_t i = 0; i < count && list.size() < free.size(); ++i)
            list.push_back({sequence, free[list.size()], 0});
        }
        return list;
      };
      for (int i = 0; i < 250; ++i) {
        const std::size_t what = below(100);
        INFO("seed " << seed << ", call " << i << ", kind " << what);
        if (sequences.empty() || (what < 4 && sequences.size() < 4)) {
          sequences.push_back(next++);
          engine.step(write({{sequences.back(), 160 + below(150)}}));
          continue;
        }
        const std::size_t which = below(sequences.size());
        const int sequence = sequences[which];
        const std::vector<std::int64_t> cells = engine.cells_of(sequence);
        if (what < 8 || cells.empty()) {  // it ends
          engine.remove(sequence, 0, 1024);
          sequences.erase(sequences.begin() + static_cast<std::ptrdiff_t>(which));
        } else if (what < 12) {  // another prompt
          engine.step(write({{sequence, 17 + below(100)}}));
        } else if (what < 15 && sequences.size() < 5) {  // a second answer to the same
          engine.copy(sequence, next);
          sequences.push_back(next++);
        } else if (what < 22) {  // the newest cells leave
          engine.remove(sequence,
                        cells[cells.size() - 1 -
                              below(std::min<std::size_t>(cells.size(), what == 21 ? 200 : 8))],
                        1024);
        } else if (what < 24) {  // some in the middle
          const std::int64_t first = cells[below(cells.size())];
          engine.remove(sequence, first, first + 5);
        } else if (what == 24) {
          engine.overwrite(static_cast<int>(below(3)), below(2) == 0, cells[cells.size() / 2],
                           cells[cells.size() / 2] + 3);
        } else if (what == 25) {
          engine.scale_keys(static_cast<int>(below(3)), 0.9f);
        } else {  // all or some go on, with drafts or without
          std::vector<std::pair<int, std::size_t>> who;
          for (const int s : sequences)
            if (below(4) > 0) who.emplace_back(s, 1 + (below(4) == 0 ? below(3) : 0));
          const std::vector<ToyToken> list = write(who);
          if (!list.empty()) REQUIRE(error_of(engine, list) < kMoved);
        }
      }
    }
    CHECK(reported("stale_rows") == 0);
    CHECK(reported("compressions") > 3);
    compressed += reported("compressed_rows");
  }
  CHECK(compressed > 600);
}

TEST_CASE("Streams are compressed each by itself") {
  const Environment environment(
      {{"VERKV_GGML_FROM", "200"}, {"VERKV_GGML_KEEP", "1"}, {"VERKV_GGML_CHECK", "on"}});
  {
    ToyEngine engine({.cells = 400, .streams = 2}, kPlugin, 9);
    std::vector<ToyToken> prompt = tokens(0, 0, 250, 0);
    for (const ToyToken& token : tokens(1, 100, 350, 1)) prompt.push_back(token);
    engine.step(prompt);
    for (std::int64_t i = 0; i < 20; ++i)
      CHECK(error_of(engine, {{0, 250 + i, 0}, {1, 350 + i, 1}}) < kOurs);
    // The second begins anew over the same cells, the first goes on.
    engine.remove(1, 0, 400, 1);
    CHECK(error_of(engine, {{0, 270, 0}, {1, 100, 1}}) < kOurs);
  }
  CHECK(reported("compressions") == 2);
  CHECK(reported("compressed_rows") == 2 * (2 * 20 + 1));
  CHECK(reported("stale_rows") == 0);
}

TEST_CASE("A cache that is freed takes all that was derived from it along") {
  const Environment environment(kCompressed);
  {
    ToyEngine engine({}, kPlugin, 10);
    for (int i = 0; i < 3; ++i) {
      engine.step(tokens(0, 0, 200));
      CHECK(error_of(engine, tokens(0, 200, 201)) < kMoved);
      engine.renew();
      // The same cells, and rows of which nobody has heard.
      for (int l = 0; l < 2; ++l) engine.overwrite(l, true, 0, 200);
    }
  }
  CHECK(reported("compressions") == 3);
  CHECK(reported("stale_rows") == 0);
}

TEST_CASE("What is not understood is left to ggml") {
  const ToyShape biased{.largest_bias = 8};
  const ToyShape coded{.type = GGML_TYPE_Q8_0};
  for (const ToyShape& shape : {biased, coded}) {
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
  CHECK(rows_with("VERKV_GGML_KEEP", "0.5") == 4);
  CHECK(rows_with("VERKV_GGML_RISK", "off") == 4);
  CHECK(rows_with("VERKV_GGML_EPSILON", "off") == 4);
  for (const auto& [name, value] :
       std::vector<std::pair<std::string, std::string>>{{"VERKV_GGML", "of"},
                                                        {"VERKV_GGML", ""},
                                                        {"VERKV_GGML_LAYERS", ""},
                                                        {"VERKV_GGML_LAYERS", "3-"},
                                                        {"VERKV_GGML_LAYERS", "-1"},
                                                        {"VERKV_GGML_LAYERS", "5-2"},
                                                        {"VERKV_GGML_LAYERS", "all"},
                                                        {"VERKV_GGML_KEEP", "0"},
                                                        {"VERKV_GGML_KEEP", "1.5"},
                                                        {"VERKV_GGML_KEEP", "nan"},
                                                        {"VERKV_GGML_RISK", "-1"},
                                                        {"VERKV_GGML_RISK", "none"},
                                                        {"VERKV_GGML_EPSILON", "1"},
                                                        {"VERKV_GGML_FROM", "0"},
                                                        {"VERKV_GGML_FROM", "2k"},
                                                        {"VERKV_GGML_CHECK", "1"}}) {
    INFO(name << "=" << value);
    const Environment environment({{name, value}});
    CHECK_THROWS_WITH(ToyEngine({}, kPlugin, 6), "the plug-in is not loaded");
  }
}
