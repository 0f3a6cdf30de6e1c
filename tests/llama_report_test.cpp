// What an evaluation reports: JSON, tables and charts; and the statistics that go into its rows.
#include <cmath>
#include <cstdint>
#include <fstream>
#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <verkv/error.hpp>

#include "../examples/common/output_file.hpp"
#include "../examples/common/statistics.hpp"
#include "../examples/llama_cpp/chart.hpp"
#include "../examples/llama_cpp/eval_report.hpp"
#include "../examples/llama_cpp/eval_row.hpp"
#include "catch.hpp"
#include "support/safetensors_writer.hpp"

namespace {

using namespace verkv::llm;
using verkv::examples::Interval;
using verkv::examples::mean_interval;
using verkv::examples::student_t_quantile;
using verkv::test::TemporaryFile;
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

// Every tag is closed in order, every & begins an entity, and no number is missing.
void check_svg(const std::string& svg) {
  CHECK(svg.rfind("<svg ", 0) == 0);
  std::vector<std::string> open;
  std::size_t at = 0;
  bool good = true;
  while (good && (at = svg.find('<', at)) != std::string::npos) {
    const std::size_t end = svg.find('>', at);
    good = end != std::string::npos;
    if (!good) break;
    const std::string tag = svg.substr(at + 1, end - at - 1);
    CHECK(!contains(tag, "<"));
    CHECK(count(tag, "\"") % 2 == 0);
    const std::string name = tag.substr(0, tag.find_first_of(" />", tag[0] == '/' ? 1 : 0));
    if (tag[0] == '/') {
      good = !open.empty() && "/" + open.back() == name;
      if (good) open.pop_back();
    } else if (tag.back() != '/') {
      open.push_back(name);
    }
    at = end;
  }
  CHECK(good);
  CHECK(open.empty());
  for (std::size_t amp = svg.find('&'); amp != std::string::npos; amp = svg.find('&', amp + 1)) {
    const std::string entity = svg.substr(amp, svg.find(';', amp) - amp + 1);
    CHECK((entity == "&amp;" || entity == "&lt;" || entity == "&gt;" || entity == "&quot;"));
  }
  for (const char* number : {"\"nan", "\"-nan", "\"inf", "\"-inf", "nan,", ",nan", "inf,", ",inf"})
    CHECK(!contains(svg, number));
  for (const char c : svg) CHECK((c == '\n' || (c >= ' ' && c <= '~')));
}

// The message of the FormatError that reading `text` ends in.
std::string read_error(const std::string& text) {
  const TemporaryFile file("verkv-llama-report", text);
  try {
    read_rows(file.path());
  } catch (const verkv::FormatError& error) {
    CHECK(contains(error.what(), file.path()));
    return error.what();
  }
  return "";
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

TEST_CASE("rows come back from JSON as they were", "[llama_report]") {
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
  const TemporaryFile file("verkv-llama-report", "");
  verkv::examples::write_file(file.path(), text);
  const std::vector<EvalRow> back = read_rows(file.path());
  REQUIRE(back.size() == 2);
  CHECK(json_report(settings, back) == text);
  CHECK(back[0].model == full.model);
  CHECK(back[0].seconds == full.seconds);
  CHECK(back[0].draws == full.draws);
  CHECK(back[1].keep == sparse.keep);
  CHECK(back[1].score == sparse.score);
  CHECK(std::isnan(back[1].kl_mean));

  const Json json = Json::parse(text);
  CHECK(json.at("settings").at("seed") == ~std::uint64_t{0});
  CHECK(json.at("settings").at("steps") == -1);
  CHECK(json.at("settings").at("model_path") == "/models/a");
  // The fields of EvalRow, each under its name.
  CHECK(json.at("rows").at(0).size() == 44);
  CHECK(json.at("rows").at(0).at("certified_share") == full.certified_share);
}

TEST_CASE("what does not apply is null in JSON", "[llama_report]") {
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

TEST_CASE("a damaged report is refused by file and field", "[llama_report]") {
  const std::vector<EvalRow> rows(2, text_row("risk", 0.125, 0.01, 0.02));
  const std::string good = json_report({}, rows);
  const auto spoilt = [&good](const char* field, const Json& value) {
    Json json = Json::parse(good);
    json["rows"][1][field] = value;
    return read_error(json.dump());
  };
  CHECK(read_error(good) == "");
  CHECK(contains(read_error(good.substr(0, good.size() / 2)), "JSON"));
  CHECK(contains(read_error("{\"rows\": [{\"keep\": 1e999}]}"), "JSON"));
  CHECK(contains(read_error(""), "empty"));
  CHECK(contains(read_error("[]"), "rows is missing"));
  CHECK(contains(read_error("{\"rows\": {}}"), "rows is not an array"));
  CHECK(contains(read_error("{\"rows\": [7]}"), "rows[0] is not an object"));
  CHECK(contains(spoilt("kl_mean", "0.1"), "rows[1].kl_mean is neither a number nor null"));
  CHECK(contains(spoilt("model", 3), "rows[1].model is not a string"));
  CHECK(contains(spoilt("samples", 1.5), "rows[1].samples is not a count"));
  CHECK(contains(spoilt("samples", -1), "rows[1].samples"));
  CHECK(contains(spoilt("draws", ~std::uint64_t{0}), "rows[1].draws"));
  CHECK(contains(spoilt("draws", nullptr), "rows[1].draws"));
  CHECK(contains(spoilt("method", ""), "rows[1].method"));
  CHECK(contains(spoilt("task", "needle"), "rows[1].text and task are both set"));
  CHECK(contains(spoilt("text", ""), "rows[1].text and task are both empty"));
  Json json = Json::parse(good);
  json["rows"][0].erase("kl_p95");
  CHECK(contains(read_error(json.dump()), "rows[0].kl_p95 is missing"));
  json = Json::parse(good);
  json["rows"][0]["of a later version"] = 1;
  CHECK(read_error(json.dump()) == "");
  CHECK_THROWS_AS(read_rows("/nonexistent/report.json"), verkv::FormatError);
  CHECK_THROWS_AS(read_rows("/"), verkv::FormatError);
}

TEST_CASE("tables show each group once and only columns with numbers", "[llama_report]") {
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

  // As many cells in each line of a table as in its head.
  const std::string markdown = markdown_table(rows);
  CHECK(contains(markdown, "needle\\|&lt;1>"));
  std::istringstream lines(markdown);
  std::size_t cells = 0;
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line[0] != '|') {
      cells = 0;
      continue;
    }
    const std::size_t bars = count(line, "|") - count(line, "\\|");
    CHECK((cells == 0 || cells == bars));
    cells = bars;
  }

  rows[0].model = "escape \x1b[31m";
  CHECK(!contains(text_table(rows), "\x1b"));
  CHECK(contains(text_table({}), "nothing was measured"));
  CHECK(contains(markdown_table({}), "nothing was measured"));
  CHECK(rate_label(0.0625) == "16x");
  CHECK(rate_label(0.3) == "keep 0.3");
  CHECK(rate_label(kNone) == "");
  CHECK(method_label("new one") == "new one");
}

TEST_CASE("charts of nothing say so", "[llama_report]") {
  const std::vector<EvalRow> unmeasured{EvalRow{}, task_row("risk", "hard", 0.125, 0.1, 0.2),
                                        text_row("risk", 0.125, kNone, 0.1),
                                        text_row("dense", kNone, 0, 0)};
  for (const std::vector<EvalRow>& rows : {std::vector<EvalRow>{}, unmeasured}) {
    for (const std::string& svg :
         {kl_against_moved_chart(rows, "A & <B>"), quality_against_rate_chart(rows, "A & <B>")}) {
      check_svg(svg);
      CHECK(contains(svg, "Nothing was measured"));
      CHECK(contains(svg, "A &amp; &lt;B&gt;"));
    }
  }
}

TEST_CASE("the chart of divergence shows every method of every panel", "[llama_report]") {
  std::vector<EvalRow> rows;
  for (const double keep : {0.125, 0.0625}) {
    for (const double epsilon : {0.3, 0.1, 0.05}) {
      rows.push_back(text_row("paper", keep, 0.001 / epsilon, 0.1 * epsilon));
      rows.back().epsilon = epsilon;
    }
    rows.push_back(text_row("top_k", keep, 0, 0.5));
    rows.push_back(text_row("risk_and_epsilon", keep, 0.004, 0.001));
    rows.back().risk = 1e-4;
    rows.back().epsilon = 0.3;
    rows.back().kl_low = -1;  // a t interval may reach below zero
  }
  rows.push_back(text_row("dense_offload", 0, 1, 0));
  const std::string svg = kl_against_moved_chart(rows, "title");
  check_svg(svg);
  CHECK(contains(svg, ">tiny, essays 4K, 8x<"));
  CHECK(contains(svg, ">tiny, essays 4K, 16x<"));
  CHECK(count(svg, "<polyline") == 2);
  CHECK(count(svg, ">eps 0.05<") == 2);
  CHECK(count(svg, ">risk 1e-4, eps 0.3<") == 2);
  CHECK(contains(svg, ">dense, offloaded<"));
  CHECK(count(svg, ">0<") == 3);  // two columns of what moved nothing, one band without divergence

  // Runs of one method that differ in their sketch are two curves.
  std::vector<EvalRow> sketches(rows.begin(), rows.begin() + 3);
  for (int i = 0; i < 3; ++i) {
    sketches.push_back(sketches[static_cast<std::size_t>(i)]);
    sketches.back().sketch = "3 bits";
  }
  const std::string two = kl_against_moved_chart(sketches, "title");
  check_svg(two);
  CHECK(count(two, "<polyline") == 2);
  CHECK(contains(two, ">paper, 3 bits<"));
}

TEST_CASE("charts of a single point and of extremes are whole", "[llama_report]") {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  for (const double kl : {0.0, 1e-320, 1e-12, 0.02, 5.0, 1e300}) {
    for (const double moved : {0.0, 1e-300, 1e-3, 1.0, 3.0}) {
      for (const double keep : {kNone, 0.0, 1e-9, 0.3, 1.0}) {
        EvalRow row = text_row("poisson", keep, moved, kl);
        const std::string svg = kl_against_moved_chart(std::vector<EvalRow>{row}, "title");
        check_svg(svg);
        CHECK(!contains(svg, "Nothing was measured"));
      }
    }
  }
  EvalRow row = text_row("risk", 0.125, 0.01, 0.02);
  row.kl_low = -infinity;
  row.kl_high = infinity;
  check_svg(kl_against_moved_chart(std::vector<EvalRow>{row}, "title"));
  for (const double keep : {kNone, 0.0, 1e-9, 0.3, 1.0}) {
    for (const double score : {0.0, 0.5, 1.0, 1e9}) {
      const std::string svg = quality_against_rate_chart(
          std::vector<EvalRow>{task_row("risk", "needle", keep, score, 1)}, "title");
      check_svg(svg);
      CHECK(!contains(svg, "Nothing was measured"));
    }
  }
}

TEST_CASE("names of models, texts and methods are escaped in charts", "[llama_report]") {
  EvalRow row = text_row("a<b>&\"c\"", 0.125, 0.01, 0.02);
  row.model = "m<&>";
  row.text = "t\x01\xc3\xa9";
  const std::string svg = kl_against_moved_chart(std::vector<EvalRow>{row}, "]]> & '");
  check_svg(svg);
  CHECK(contains(svg, "m&lt;&amp;&gt;, t???"));
  CHECK(contains(svg, "a&lt;b&gt;&amp;&quot;c&quot;"));
  EvalRow task = task_row("x<&", "needle", 0.125, 0.5, 1);
  task.model = "<script>";
  const std::string quality = quality_against_rate_chart(std::vector<EvalRow>{task}, "t");
  check_svg(quality);
  CHECK(!contains(quality, "<script>"));
}

TEST_CASE("the chart of quality averages the tasks that dense solves", "[llama_report]") {
  std::vector<EvalRow> rows;
  for (const double keep : {0.125, 0.0625, 0.03125}) {
    rows.push_back(task_row("risk", "easy", keep, 0.9, 1));
    rows.push_back(task_row("risk", "half", keep, 0.4, 0.5));
    rows.push_back(task_row("risk", "hard", keep, 0.49, 0.49));
    for (std::size_t i = rows.size() - 3; i < rows.size(); ++i) rows[i].risk = 1e-3;
  }
  const std::string svg = quality_against_rate_chart(rows, "title");
  check_svg(svg);
  CHECK(contains(svg, "tiny, 4K (2 tasks)"));
  for (const char* label : {">8x<", ">16x<", ">32x<", ">risk 1e-3<", ">dense<"})
    CHECK(contains(svg, label));
  CHECK(!contains(svg, "Hollow"));
  // 90 % and 80 % make 85 %: as if there were one task of that quality.
  std::vector<EvalRow> even;
  for (const EvalRow& row : rows) {
    if (row.task == "hard") continue;
    even.push_back(row);
    even.back().score = 0.85 * row.score_dense;
  }
  CHECK(quality_against_rate_chart(even, "title") == svg);

  rows.erase(rows.begin());
  const std::string partial = quality_against_rate_chart(rows, "title");
  check_svg(partial);
  CHECK(contains(partial, "Hollow"));
  CHECK(count(partial, "fill=\"white\" stroke=\"#D55E00\"") == 1);
}

TEST_CASE("batch means by hand", "[llama_report]") {
  // Blocks of 2 average 1.5, 3.5 and 5.5; the last value is no block. Mean 3.5, standard deviation
  // 2, error 2 / sqrt(3), t with 2 degrees of freedom 4.30265.
  const std::vector<double> values{1, 2, 3, 4, 5, 6, 100};
  const Interval interval = mean_interval(values, 2);
  CHECK(std::fabs(interval.low - (3.5 - 4.30265 * 2 / std::sqrt(3.0))) < 1e-4);
  CHECK(std::fabs(interval.high - (3.5 + 4.30265 * 2 / std::sqrt(3.0))) < 1e-4);
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
    CHECK(std::fabs(student_t_quantile(degrees) - t) < 1e-4);
  }
  CHECK_THROWS_AS(student_t_quantile(0), verkv::InvalidArgument);
}

TEST_CASE("batch means cover the mean as often as they promise", "[llama_report]") {
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
