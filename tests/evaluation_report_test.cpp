// What an evaluation reports (bench/text_quality): JSON and a table, and the statistics that go
// into its rows. The pictures and the tables of the pages are tested by pages_test.py.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <verkv/error.hpp>

#include "../bench/text_quality/eval_report.hpp"
#include "../bench/text_quality/eval_row.hpp"
#include "../bench/text_quality/few_bits.hpp"
#include "../examples/common/statistics.hpp"
#include "catch.hpp"
#include "tolerance.hpp"

namespace {

using namespace verkv::lab;
using verkv::examples::Interval;
using verkv::examples::mean_interval;
using verkv::examples::student_t_quantile;
using Json = nlohmann::json;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
    ++found;
  return found;
}

EvalRow text_row(const std::string& method, double keep, double moved, double kl) {
  EvalRow row;
  row.model = "tiny";
  row.text = "essays";
  row.context_tokens = 4096;
  row.method = method;
  row.importance = "kvzip_mean";
  row.sketch = "2 bits";
  row.keep = keep;
  row.moved_fraction = moved;
  row.kl_mean = kl;
  row.kl_low = 0.8 * kl;
  row.kl_high = 1.3 * kl;
  row.samples = 100;
  return row;
}

EvalRow task_row(const std::string& method, const std::string& task, double keep, double score,
                 double dense) {
  EvalRow row;
  row.model = "tiny";
  row.task = task;
  row.context_tokens = 4096;
  row.method = method;
  row.keep = keep;
  row.score = score;
  row.score_dense = dense;
  row.samples = 50;
  return row;
}

TEST_CASE("few bits: numbers go to the nearest level of their group, the last tokens stay") {
  std::mt19937 random(5);
  const auto number = [&random] {
    return verkv::to_half(static_cast<float>(random()) / 2147483648.0f - 1.0f);
  };
  constexpr std::int64_t kChannels = 6;
  constexpr std::int64_t kTokens = 300;  // two groups and 44 tokens
  std::vector<verkv::Half> start(static_cast<std::size_t>(kTokens * kChannels));
  for (verkv::Half& x : start) x = number();
  const auto at = [](const std::vector<verkv::Half>& rows, std::int64_t token, std::int64_t j) {
    return to_float(rows[static_cast<std::size_t>(token * kChannels + j)]);
  };
  for (const int bits : {1, 2, 3, 4, 8}) {
    std::vector<verkv::Half> keys = start;
    round_keys(keys, kChannels, bits);
    std::vector<verkv::Half> values = start;
    round_values(values, 2, kChannels / 2, bits);
    for (std::int64_t t = 0; t < kTokens; ++t) {
      for (std::int64_t j = 0; j < kChannels; ++j) {
        float least = 2;
        float most = -2;
        for (std::int64_t other = t / 128 * 128; other < std::min(kTokens, t / 128 * 128 + 128);
             ++other) {
          least = std::min(least, at(start, other, j));
          most = std::max(most, at(start, other, j));
        }
        const float step = (most - least) / static_cast<float>((1 << bits) - 1);
        const float off = std::fabs(at(keys, t, j) - at(start, t, j));
        // Half a step, and the rounding of a half near 1.
        if (t < 256) CHECK(off <= 0.5f * step + 0x1p-11f);
        if (t >= 256) CHECK(off == 0);
        if (t >= 256) CHECK(at(values, t, j) == at(start, t, j));
      }
    }
    // A value of three coordinates keeps the least and the largest.
    float least = 2;
    float kept = 2;
    for (std::int64_t j = 0; j < 3; ++j) {
      least = std::min(least, at(start, 7, j));
      kept = std::min(kept, at(values, 7, j));
    }
    CHECK(kept == least);
  }
  // 2.25 bits a key number and 2.5 a value number at head size 64, of 16; the tail at 16.
  CHECK(few_bits_share(64, 64, 256, 256, 2) == (2.25 + 2.5) / 32);
  CHECK(few_bits_share(64, 64, 300, 512, 2) == 0.5 * (2.25 + 2.5) / 32 + 0.5);
}

}  // namespace

TEST_CASE("Wilson's interval of a mean is the binomial one where the mean is a proportion") {
  for (const std::int64_t trials : {1, 2, 8, 100}) {
    for (std::int64_t hits = 0; hits <= trials; ++hits) {
      const verkv::examples::Interval counted =
          verkv::examples::wilson_interval(verkv::examples::Rate{hits, trials});
      const verkv::examples::Interval mean = verkv::examples::wilson_interval(
          static_cast<double>(hits) / static_cast<double>(trials), static_cast<double>(trials));
      CHECK(counted.low == mean.low);
      CHECK(counted.high == mean.high);
    }
  }
  // Two of two solved is no certainty: the score test leaves 34 %.
  const verkv::examples::Interval two = verkv::examples::wilson_interval(1.0, 2.0);
  CHECK(two.low == Approx(1 / (1 + 1.959963984540054 * 1.959963984540054 / 2)));
  CHECK(two.high == 1);
  CHECK(std::isnan(verkv::examples::wilson_interval(0.5, 0.0).low));
}

TEST_CASE("every field of a row is in the JSON under its name", "[report]") {
  EvalRow full;
  double number = 0.1;
  for_each_field(full, [&number](const std::string& field, auto& to) {
    using Type = std::remove_reference_t<decltype(to)>;
    if constexpr (std::is_same_v<Type, std::string>) {
      to = "a \"" + field + "\" \\ <&>\n";
    } else {
      to = static_cast<Type>(1e4 * (number *= 1.1));
    }
  });
  full.task.clear();
  EvalRow sparse = task_row("top_k", "needle", 1.0 / 3, 0.1 + 0.2, 1);
  const std::vector<EvalRow> rows{full, sparse};
  const EvalSettings settings{"run --all", "cpu", "f16", "/models/a", ~std::uint64_t{0}, -1};

  const std::string text = json_report(settings, rows);
  const Json json = Json::parse(text);
  CHECK(json.at("settings").at("seed") == ~std::uint64_t{0});
  CHECK(json.at("settings").at("steps") == -1);
  CHECK(json.at("settings").at("model_path") == "/models/a");
  // The fields of EvalRow, each under its name.
  CHECK(json.at("rows").at(0).size() == 49);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    for_each_field(rows[i], [&](const char* field, const auto& value) {
      CAPTURE(i, field);
      const Json& written = json.at("rows").at(i).at(field);
      if constexpr (std::is_same_v<std::remove_cvref_t<decltype(value)>, double>) {
        CHECK((std::isnan(value) ? written.is_null() : written == value));
      } else {
        CHECK(written == value);
      }
    });
  }
}

TEST_CASE("what does not apply is null in JSON", "[report]") {
  EvalRow row = text_row("risk", 0.125, 0.01, 0.02);
  row.certificate_p95 = std::numeric_limits<double>::infinity();
  const Json json = Json::parse(json_report({}, std::vector<EvalRow>{row})).at("rows").at(0);
  CHECK(json.at("score").is_null());
  CHECK(json.at("certificate_p95").is_null());
  CHECK(json.at("kl_mean") == 0.02);
  CHECK(json.at("task") == "");
  CHECK(json.at("seconds").is_null());

  row.model = "not \xff UTF-8";
  CHECK_NOTHROW(Json::parse(json_report({}, std::vector<EvalRow>{row})));
}

TEST_CASE("tables show each group once and only columns with numbers", "[report]") {
  std::vector<EvalRow> rows{text_row("risk", 0.125, 0.01, 0.02),
                            text_row("paper", 1.0 / 16, 0.02, 4e-5),
                            task_row("top_k_fetch", "needle|<1>", 0.125, 0.5, 1)};
  rows[0].risk = 1e-4;
  rows[1].epsilon = 0.05;
  rows[2].probability = 3.5e-3;
  const std::string text = text_table(rows);
  INFO(text);
  CHECK(contains(text, "tiny, essays, 4,096 tokens\n"));
  CHECK(contains(text, "tiny, task needle|<1>, 4,096 tokens\n"));
  CHECK(contains(text, "\nrisk 1e-4 "));
  CHECK(contains(text, "\npaper, eps 0.05 "));
  CHECK(contains(text, "\ntop-k, fetch, p 3.5e-3 "));
  CHECK(contains(text, "sketch 2 bits"));
  CHECK(contains(text, "4.0e-5"));
  CHECK(count(text, "score %") == 1);
  CHECK(count(text, "KL mean") == 1);
  CHECK(!contains(text, "nan"));
  CHECK(!contains(text, "ppl"));

  rows[0].model = "escape \x1b[31m";
  CHECK(!contains(text_table(rows), "\x1b"));
  CHECK(contains(text_table({}), "nothing was measured"));
  CHECK(rate_label(0.0625) == "16x");
  CHECK(rate_label(0.3) == "keep 0.3");
  CHECK(rate_label(kNone) == "");
  CHECK(method_label("new one") == "new one");
}

TEST_CASE("batch means by hand", "[report]") {
  // Blocks of 2 average 1.5, 3.5 and 5.5; the last value is no block. Mean 3.5, standard deviation
  // 2, error 2 / sqrt(3), t with 2 degrees of freedom 4.30265.
  const std::vector<double> values{1, 2, 3, 4, 5, 6, 100};
  const Interval interval = mean_interval(values, 2);
  CHECK(std::fabs(interval.low - (3.5 - 4.30265 * 2 / std::sqrt(3.0))) <
        verkv::tolerance::kPublished4);
  CHECK(std::fabs(interval.high - (3.5 + 4.30265 * 2 / std::sqrt(3.0))) <
        verkv::tolerance::kPublished4);
  CHECK(std::isnan(mean_interval(values, 4).low));
  CHECK(std::isnan(mean_interval({}, 1).high));
  CHECK(std::isnan(mean_interval(std::vector<double>{1, kNone, 2}, 1).low));
  CHECK(mean_interval(std::vector<double>{2, 2, 2}, 1).high == 2);
  CHECK_THROWS_AS(mean_interval(values, 0), verkv::InvalidArgument);

  // Values of printed tables, on both sides of where the expansion takes over.
  for (const auto& [degrees, t] : std::vector<std::pair<std::int64_t, double>>{{1, 12.7062},
                                                                               {10, 2.2281},
                                                                               {30, 2.0423},
                                                                               {31, 2.0395},
                                                                               {40, 2.0211},
                                                                               {60, 2.0003},
                                                                               {120, 1.9799},
                                                                               {1000, 1.9623}}) {
    INFO(degrees);
    CHECK(std::fabs(student_t_quantile(degrees) - t) < verkv::tolerance::kPublished4);
  }
  CHECK_THROWS_AS(student_t_quantile(0), verkv::InvalidArgument);
}

TEST_CASE("batch means cover the mean as often as they promise", "[report]") {
  constexpr int trials = 4000;
  constexpr std::size_t length = 200;
  // Of normal values that are independent, the interval is exact: misses are binomial with 5 %. The
  // threshold is 4.5 of its standard deviations, passed by chance less than once in 100,000 runs.
  const double allowed = 4.5 * std::sqrt(trials * 0.05 * 0.95);
  const auto misses = [](std::uint64_t seed, double correlation, std::size_t block, double bias) {
    std::mt19937_64 random(seed);
    std::normal_distribution<double> normal;
    int result = 0;
    std::vector<double> values(length);
    for (int trial = 0; trial < trials; ++trial) {
      double state = normal(random);
      for (double& value : values) {
        value = state + bias;
        state = correlation * state + std::sqrt(1 - correlation * correlation) * normal(random);
      }
      const Interval interval = mean_interval(values, block);
      result += interval.low > 0 || interval.high < 0;
    }
    return static_cast<double>(result);
  };
  CHECK(std::fabs(misses(1, 0, 10, 0) - 0.05 * trials) < allowed);
  CHECK(std::fabs(misses(2, 0, 100, 0) - 0.05 * trials) < allowed);
  // A mean that is off by one standard error is found out.
  CHECK(misses(3, 0, 10, 1 / std::sqrt(double{length})) > 0.05 * trials + allowed);
  // So is a correlated series in blocks of one, and longer blocks mend most of it.
  const double plain = misses(4, 0.8, 1, 0);
  CHECK(plain > 0.05 * trials + allowed);
  CHECK(misses(4, 0.8, 40, 0) < plain / 3);
}
