// The replay program: its command line, its measurements on a small synthetic recording, and what
// it writes.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__unix__)
#include <sys/wait.h>
#endif

#include "../examples/replay/json_report.hpp"
#include "../examples/replay/measure.hpp"
#include "../examples/replay/options.hpp"
#include "../examples/replay/parallel.hpp"
#include "../examples/replay/promise.hpp"
#include "../examples/replay/statistics.hpp"
#include "../examples/replay/table.hpp"
#include "catch.hpp"
#include "support/child.hpp"
#include "support/safetensors_writer.hpp"
#include "tolerance.hpp"

namespace {

using namespace verkv::replay;
using verkv::CapacityError;
using verkv::DType;
using verkv::RecordedCache;
using verkv::test::make_tensor;
using verkv::test::SafeTensorsFile;
using verkv::test::TemporaryFile;
using Json = nlohmann::json;

constexpr std::int64_t kTokens = 400;
constexpr std::int64_t kSteps = 6;

// Two layers of unlike shape; keys and queries normal, importance log-normal and unrelated to them,
// so that sampling has something to get wrong.
std::string synthetic_recording() {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const auto tensor = [&](DType type, std::vector<std::int64_t> shape, float scale,
                          bool positive = false) {
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& value : values)
      value = positive ? std::exp(normal(random)) : scale * normal(random);
    return make_tensor(type, std::move(shape), values);
  };
  SafeTensorsFile file;
  for (const std::int64_t layer : {2, 5}) {
    const std::int64_t kv_heads = layer == 2 ? 2 : 1;
    const std::int64_t dim = 16;
    const std::string prefix = "layers." + std::to_string(layer) + ".";
    file.tensors[prefix + "key"] = tensor(DType::f16, {kv_heads, kTokens, dim}, 1.5f);
    file.tensors[prefix + "value"] = tensor(DType::f16, {kv_heads, kTokens, dim}, 1);
    file.tensors[prefix + "query"] = tensor(DType::f32, {kSteps, 4, dim}, 1.5f);
    file.tensors[prefix + "new_key"] = tensor(DType::f16, {kSteps, kv_heads, dim}, 1.5f);
    file.tensors[prefix + "new_value"] = tensor(DType::f16, {kSteps, kv_heads, dim}, 1);
    for (const char* name : {"kvzip", "kvzip_mean", "h2o"}) {
      file.tensors[prefix + "importance." + name] =
          tensor(DType::f32, {kv_heads, kTokens}, 1, true);
    }
  }
  file.metadata = {{"model", "synthetic"}, {"prompt_tokens", std::to_string(kTokens)}};
  return file.bytes();
}

Options parse(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "file");
  const Parsed parsed = parse_options(arguments);
  INFO(parsed.text);
  REQUIRE(parsed.options.has_value());
  return *parsed.options;
}

struct Run {
  std::vector<Method> methods;
  Measurement measurement;
};

Run run(const RecordedCache& cache, const Options& options) {
  Run result;
  result.methods = select_methods(options, cache);
  result.measurement = measure(cache, options, result.methods, {});
  return result;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// The message of the UsageError that f ends in.
template <class F>
std::string usage_error(F&& f) {
  try {
    f();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

// No line too wide for the terminal, nothing that is not ASCII.
void check_text(const std::string& text) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    INFO(line);
    CHECK(line.size() <= kTableWidth);
    for (const char c : line) CHECK((c >= ' ' && c <= '~'));
  }
}

const std::vector<std::string> kRowFields{"method",
                                          "layer",
                                          "keep",
                                          "epsilon",
                                          "delta",
                                          "risk",
                                          "probability",
                                          "sketch",
                                          "select",
                                          "estimator",
                                          "fetch",
                                          "importance",
                                          "promise",
                                          "tolerance",
                                          "resident_fraction",
                                          "fetched_fraction",
                                          "moved_fraction",
                                          "moved_tokens",
                                          "read_fraction",
                                          "read_with_sketch_fraction",
                                          "fetching_share",
                                          "fetched_per_fetching",
                                          "failure_redraws",
                                          "failure_redraws_low",
                                          "failure_redraws_high",
                                          "trials_redraws",
                                          "failure_redraws_worst_query",
                                          "failure_steps",
                                          "failure_steps_low",
                                          "failure_steps_high",
                                          "trials",
                                          "failure_steps_unfetched",
                                          "trials_unfetched",
                                          "failure_steps_fetched",
                                          "trials_fetched",
                                          "failure_any_head",
                                          "failure_above_estimate",
                                          "failure_above_two_estimates",
                                          "trials_any_head",
                                          "uncertified_share",
                                          "certificate_median",
                                          "certificate_p95",
                                          "output_error_median",
                                          "output_error_p95",
                                          "output_error_worst",
                                          "denominator_error_rms",
                                          "denominator_error_median",
                                          "denominator_error_p95",
                                          "step_ns",
                                          "dense_ns",
                                          "cache_bytes",
                                          "resident_bytes",
                                          "sketch_bytes",
                                          "metadata_bytes",
                                          "host_bytes",
                                          "workspace_bytes",
                                          "fetched_bytes"};

}  // namespace

TEST_CASE("options are read", "[replay]") {
  const Options standard = parse({});
  CHECK(standard.file == "file");
  CHECK(standard.keep == 0.0625);
  CHECK(standard.delta == 0.1);
  CHECK(standard.epsilon == verkv::FetchConfig{}.epsilon);
  CHECK(standard.risk == verkv::FetchConfig{}.risk);
  CHECK(standard.sketch == "2");
  CHECK(standard.sink == 4);
  CHECK(standard.local == 32);

  // A rule that is named switches the others off.
  const Options paper = parse({"--epsilon", "0.05"});
  CHECK(paper.epsilon == 0.05);
  CHECK(!paper.risk);
  const Options risk = parse({"--risk", "1e-4", "--epsilon", "off"});
  CHECK(!risk.epsilon);
  CHECK(risk.risk == 1e-4);
  const Options both = parse({"--risk=1e-5", "--epsilon=0.3"});
  CHECK(both.epsilon == 0.3);
  CHECK(both.risk == 1e-5);
  const Options topk = parse({"--select", "topk"});
  CHECK(topk.probability == 1e-3);
  CHECK(!topk.epsilon);
  CHECK(!topk.risk);

  const Options other = parse({"--keep", "0.5", "--sketch", "exact", "--fetch", "never", "--order",
                               "exact", "--pool", "sequence", "--layers", "5,2,5", "--cap", "off",
                               "--simd", "scalar", "--threads", "3"});
  CHECK(other.keep == 0.5);
  CHECK(other.sketch == "exact");
  CHECK(other.fetch == verkv::FetchMode::never);
  CHECK(other.order == verkv::FetchOrder::exact);
  CHECK(other.pool == verkv::Pool::sequence);
  CHECK(other.layers == std::vector<std::int64_t>{2, 5});
  CHECK(!other.cap);
  CHECK(!other.vector_code);
  CHECK(other.threads == 3);
}

TEST_CASE("bad options give the exit code of usage and name value and limit", "[replay]") {
  struct Case {
    std::vector<std::string> arguments;
    std::vector<std::string> says;
  };
  const std::vector<Case> cases{
      {{}, {"FILE"}},
      {{"file", "other"}, {"other"}},
      {{"file", "--keep", "1.5"}, {"--keep", "1.5", "at most 1"}},
      {{"file", "--keep", "0"}, {"--keep", "'0'", "above 0"}},
      {{"file", "--keep", "-1"}, {"--keep", "-1", "above 0"}},
      {{"file", "--keep", "nan"}, {"--keep", "nan"}},
      {{"file", "--keep", "inf"}, {"--keep", "inf"}},
      {{"file", "--keep", "off"}, {"--keep", "off"}},
      {{"file", "--keep", "0.1x"}, {"--keep", "0.1x"}},
      {{"file", "--keep"}, {"--keep"}},
      {{"file", "--epsilon", "1"}, {"--epsilon", "'1'", "below 1", "off"}},
      {{"file", "--epsilon", "0"}, {"--epsilon", "above 0"}},
      {{"file", "--delta", "1"}, {"--delta", "'1'", "below 1"}},
      {{"file", "--delta", "off"}, {"--delta", "off"}},
      {{"file", "--risk", "0"}, {"--risk", "above 0", "off"}},
      {{"file", "--risk", "inf"}, {"--risk", "inf"}},
      {{"file", "--probability", "2"}, {"--probability", "below 1"}},
      {{"file", "--cap", "0.5"}, {"--cap", "0.5", "1 or more"}},
      {{"file", "--sketch", "5"}, {"--sketch", "'5'", "exact, 2, 3, 4"}},
      {{"file", "--select", "best"}, {"--select", "best", "poisson, spread, topk"}},
      {{"file", "--fetch", "maybe"}, {"--fetch", "maybe", "verified, never, always"}},
      {{"file", "--order", "size"}, {"--order", "exact, worth"}},
      {{"file", "--pool", "row"}, {"--pool", "head, layer, sequence"}},
      {{"file", "--sink", "-1"}, {"--sink", "-1", "from 0"}},
      {{"file", "--local", "1.5"}, {"--local", "1.5", "whole number"}},
      {{"file", "--seeds", "0"}, {"--seeds", "'0'", "from 1 to 1000"}},
      {{"file", "--redraws", "-2"}, {"--redraws", "-2"}},
      {{"file", "--threads", "0"}, {"--threads", "from 1"}},
      {{"file", "--steps", "99999999999999999999"}, {"--steps", "99999999999999999999"}},
      {{"file", "--layers", "1,,2"}, {"--layers"}},
      {{"file", "--layers", "-1"}, {"--layers", "-1"}},
      {{"file", "--importance", ""}, {"--importance"}},
      {{"file", "--json", ""}, {"--json"}},
      {{"file", "--nonsense"}, {"--nonsense"}},
      {{"file", "--epsilon", "off", "--risk", "off"}, {"--epsilon", "--risk", "off"}},
      {{"file", "--compare", "--keep", "0.5"}, {"--compare", "--keep"}},
      {{"file", "--compare", "--epsilon", "0.5"}, {"--compare", "--epsilon"}},
      {{"--promise"}, {"FILE"}},
      {{"file", "--promise", "--compare"}, {"--promise", "--compare"}},
      {{"file", "--promise", "--by-layer"}, {"--by-layer"}},
      {{"file", "--promise", "--epsilon", "0.1"}, {"--promise", "--epsilon"}},
      {{"file", "--promise", "--delta", "0.1"}, {"--promise", "--delta"}},
      {{"file", "--promise", "--keep", "0.1"}, {"--promise", "--keep"}},
      {{"file", "--promise", "--risk", "off"}, {"--promise", "--risk"}},
      {{"file", "--promise", "--probability", "0.1"}, {"--promise", "--probability"}},
      {{"file", "--promise", "--select", "topk"}, {"--promise", "--select"}},
      {{"file", "--promise", "--fetch", "never"}, {"--promise", "--fetch"}},
      {{"file", "--promise", "--sketch", "2,5"}, {"--sketch", "'5'", "exact, 2, 3, 4"}},
      {{"file", "--promise", "--sketch", "2,"}, {"--sketch", "''"}},
      {{"file", "other", "file", "--promise"}, {"'file'", "twice"}},
      {{"file", "--sketch", "2,3"}, {"--sketch", "--promise"}},
      {{"file", "--promise", "--json", ""}, {"--json", "empty"}},
  };
  for (const Case& c : cases) {
    std::string command;
    for (const std::string& argument : c.arguments) command += argument + " ";
    INFO(command);
    const Parsed parsed = parse_options(c.arguments);
    INFO(parsed.text);
    CHECK(!parsed.options.has_value());
    CHECK(parsed.exit_code == kExitUsage);
    CHECK(!contains(parsed.text, "\n"));
    for (const std::string& part : c.says) CHECK(contains(parsed.text, part));
  }
}

TEST_CASE("the help explains each option", "[replay]") {
  const Parsed parsed = parse_options({"--help"});
  CHECK(!parsed.options.has_value());
  CHECK(parsed.exit_code == 0);
  check_text(parsed.text);
  for (const char* option :
       {"--keep",   "--epsilon", "--delta",   "--risk",       "--probability", "--sketch",
        "--select", "--fetch",   "--order",   "--importance", "--pool",        "--sink",
        "--local",  "--seeds",   "--redraws", "--json",       "--compare",     "--layers",
        "--steps",  "--threads", "--cap",     "--simd",       "--promise",     "KVzip"}) {
    INFO(option);
    CHECK(contains(parsed.text, option));
  }
}

TEST_CASE("what the recording does not have is named with what it has", "[replay]") {
  const TemporaryFile file("verkv-replay", synthetic_recording());
  const RecordedCache cache = RecordedCache::load(file.path());
  const std::string importance = usage_error([&] {
    select_methods(parse({"--importance", "gate"}), cache);
  });
  CHECK(contains(importance, "gate"));
  CHECK(contains(importance, "h2o, kvzip, kvzip_mean"));
  const std::string layer = usage_error([&] { select_layers(parse({"--layers", "2,3"}), cache); });
  CHECK(contains(layer, "3"));
  CHECK(contains(layer, "2, 5"));
  const std::string steps = usage_error([&] { select_steps(parse({"--steps", "7"}), cache); });
  CHECK(contains(steps, "7"));
  CHECK(contains(steps, "6"));

  // A recording with neither of the usual scores.
  SafeTensorsFile bare;
  for (const char* part : {"key", "value"})
    bare.tensors[std::string("layers.0.") + part] = make_tensor(DType::f16, {1, 2, 1}, {1, 1});
  for (const char* part : {"query", "new_key", "new_value"})
    bare.tensors[std::string("layers.0.") + part] = make_tensor(DType::f16, {1, 1, 1}, {1});
  file.write(bare.bytes());
  const RecordedCache without = RecordedCache::load(file.path());
  CHECK(contains(usage_error([&] { select_methods(parse({}), without); }), "none"));
  bare.tensors["layers.0.importance.h2o"] = make_tensor(DType::f16, {1, 2}, {1, 1});
  file.write(bare.bytes());
  const RecordedCache other = RecordedCache::load(file.path());
  CHECK(contains(usage_error([&] { select_methods(parse({}), other); }), "h2o"));
  CHECK(select_methods(parse({"--importance", "h2o"}), other).front().importance == "h2o");
}

TEST_CASE("a budget that covers everything reproduces dense attention", "[replay]") {
  const TemporaryFile file("verkv-replay", synthetic_recording());
  const RecordedCache cache = RecordedCache::load(file.path());
  const Run result = run(cache, parse({"--keep", "1"}));
  REQUIRE(result.measurement.rows.size() == 3);
  for (const Row& row : result.measurement.rows) {
    CHECK(row.method->name == "dense");
    CHECK(row.output_error_worst < verkv::tolerance::kReplay);
    CHECK(row.steps.failures == 0);
    CHECK(row.steps.trials > 0);
    CHECK(row.resident_fraction == 1);
    CHECK(row.moved_fraction == 0);
    CHECK(row.fetching_share == 0);
  }
  // So does fetching all that is missing.
  const Run offload = run(cache, parse({"--fetch", "always", "--keep", "0.1"}));
  CHECK(offload.measurement.rows.back().method->name == "dense_offload");
  CHECK(offload.measurement.rows.back().output_error_worst < verkv::tolerance::kReplay);
  CHECK(offload.measurement.rows.back().moved_fraction > 0.8);
}

TEST_CASE("with the exact sketch the promise holds over redraws", "[replay][statistical]") {
  const TemporaryFile file("verkv-replay", synthetic_recording());
  const RecordedCache cache = RecordedCache::load(file.path());
  for (const std::vector<std::string>& rule :
       {std::vector<std::string>{"--epsilon", "0.3"}, std::vector<std::string>{"--epsilon", "0.1"},
        std::vector<std::string>{"--risk", "1e-3"}}) {
    std::vector<std::string> arguments{"--sketch", "exact",   "--keep", "0.25",      "--local",
                                       "8",        "--delta", "0.1",    "--redraws", "200"};
    arguments.insert(arguments.end(), rule.begin(), rule.end());
    const Run result = run(cache, parse(arguments));
    for (const Row& row : result.measurement.rows) {
      CHECK(row.redraws.trials > 0);
      // delta is an upper bound of each query's rate, and the bound is loose; a rate above it is a
      // defect, not chance.
      CHECK(row.redraws.value() <= 0.1);
    }
  }
}

TEST_CASE("measurements add up", "[replay]") {
  const TemporaryFile file("verkv-replay", synthetic_recording());
  const RecordedCache cache = RecordedCache::load(file.path());
  const Run result = run(cache, parse({"--epsilon", "0.2", "--keep", "0.25", "--local", "8",
                                       "--seeds", "3", "--redraws", "5"}));
  const std::vector<Row>& rows = result.measurement.rows;
  REQUIRE(rows.size() == 3);
  CHECK(rows[0].layer == 2);
  CHECK(rows[1].layer == 5);
  CHECK(!rows[2].layer.has_value());
  const Row& all = rows[2];
  CHECK(all.method->name == "certificate");
  CHECK(all.steps.trials == rows[0].steps.trials + rows[1].steps.trials);
  CHECK(all.steps.trials == all.steps_fetched.trials + all.steps_unfetched.trials);
  CHECK(all.steps.failures == all.steps_fetched.failures + all.steps_unfetched.failures);
  CHECK(all.steps.trials <= 3 * kSteps * 8);
  CHECK(all.redraws.trials <= 5 * 4 * 8);
  CHECK(all.any_head.trials == 3 * kSteps);
  CHECK(all.cache_bytes == 2.0 * 32 * (2 + 1) * static_cast<double>(kTokens + kSteps));
  for (const Row& row : rows) {
    CHECK(row.moved_fraction <= row.fetched_fraction);
    CHECK(row.fetched_fraction <= 1);
    // Enlarged where drawn tokens say that the sketch is far off.
    CHECK(row.certificate_median <= 0.2);
    CHECK(row.resident_fraction > 0.1);
    CHECK(row.resident_fraction < 0.4);
    CHECK(row.output_error_median <= row.output_error_p95);
    CHECK(row.output_error_p95 <= row.output_error_worst);
    CHECK(row.step_ns > 0);
    CHECK(row.dense_ns > 0);
  }

  // Neither threads nor instruction sets change what is measured, but for the times.
  for (const std::vector<std::string>& other :
       {std::vector<std::string>{"--threads", "1"}, std::vector<std::string>{"--threads", "7"},
        std::vector<std::string>{"--simd", "scalar"}}) {
    std::vector<std::string> arguments{"--epsilon", "0.2",     "--keep", "0.25",      "--local",
                                       "8",         "--seeds", "3",      "--redraws", "5"};
    arguments.insert(arguments.end(), other.begin(), other.end());
    const Row again = run(cache, parse(arguments)).measurement.rows.back();
    CHECK(again.fetched_fraction == all.fetched_fraction);
    CHECK(again.fetched_per_fetching == all.fetched_per_fetching);
    CHECK(std::fabs(again.output_error_median - all.output_error_median) <
          verkv::tolerance::kReplay * (1 + all.output_error_median));
  }

  // One pool over the sequence: one manager, bytes known for all layers together only.
  const Run pooled = run(cache, parse({"--risk", "1e-3", "--pool", "sequence", "--keep", "0.25"}));
  CHECK(std::isnan(pooled.measurement.rows[0].resident_bytes));
  CHECK(pooled.measurement.rows[2].resident_bytes > 0);
  CHECK(pooled.measurement.rows[0].moved_fraction >= 0);
}

TEST_CASE("the JSON has every field for every method", "[replay]") {
  const TemporaryFile file("verkv-replay", synthetic_recording());
  const RecordedCache cache = RecordedCache::load(file.path());
  const Options options = parse({"--compare", "--local", "8", "--redraws", "4"});
  const Run result = run(cache, options);
  const Json report = Json::parse(json_report(cache, options, result.measurement));
  CHECK(report.at("settings").at("prompt_tokens") == kTokens);
  CHECK(report.at("settings").at("steps") == kSteps);
  const Json& rows = report.at("rows");
  REQUIRE(rows.size() == 3 * (2 + 3 * 12));
  std::map<std::string, int> methods;
  for (const Json& row : rows) {
    ++methods[row.at("method").get<std::string>()];
    for (const std::string& field : kRowFields) {
      INFO(field);
      CHECK(row.contains(field));
    }
    CHECK((row.at("layer") == "all" || row.at("layer") == 2 || row.at("layer") == 5));
    CHECK(row.at("output_error_median").is_number());
  }
  CHECK(methods == std::map<std::string, int>{{"dense", 3},
                                              {"dense_offload", 3},
                                              {"topk", 9},
                                              {"topk_fetch", 9},
                                              {"topk_clusters", 9},
                                              {"poisson", 9},
                                              {"spread", 18},
                                              {"certificate", 27},
                                              {"risk", 27}});
  for (const Json& row : rows) {
    const std::string method = row.at("method");
    CHECK(row.at("epsilon").is_null() == (method != "certificate"));
    CHECK(row.at("risk").is_null() == (method != "risk"));
    CHECK(row.at("failure_redraws").is_null() == !(method == "certificate" || method == "risk" ||
                                                   method == "poisson" || method == "spread"));
    if (method == "dense" || method == "dense_offload")
      CHECK(row.at("output_error_worst") < verkv::tolerance::kReplay);
    if (method == "dense_offload") {
      CHECK(row.at("keep") == 0);
      CHECK(row.at("moved_fraction") > 0.98);
    }
    if (method == "topk" || method == "poisson" || method == "spread")
      CHECK(row.at("moved_fraction") == 0);
    if (method.starts_with("topk")) {
      CHECK(row.at("importance") == "kvzip");
    } else if (method != "dense_offload") {
      CHECK(row.at("importance") == "kvzip_mean");
    }
  }

  check_text(heading(cache, options, result.methods));
  check_text(table(result.measurement, options));
  check_text(legend(result.measurement, options));
  check_text(conclusion(result.measurement, options));
  CHECK(contains(conclusion(result.measurement, options), "At 16x"));
  Options by_layer = options;
  by_layer.by_layer = true;
  check_text(table(result.measurement, by_layer));
  CHECK(contains(table(result.measurement, by_layer), "layer 5"));

  const Options single = parse({"--risk", "1e-3", "--keep", "0.25"});
  const Run one = run(cache, single);
  check_text(heading(cache, single, one.methods));
  check_text(table(one.measurement, single));
  check_text(legend(one.measurement, single));
  check_text(conclusion(one.measurement, single));
}

namespace {

PromiseRun promise_run(const RecordedCache& cache, const Options& options,
                       const std::string& file = "file") {
  PromiseRun run;
  run.file = file;
  run.prompt_tokens = cache.prompt_tokens();
  run.metadata = cache.metadata();
  run.methods = select_methods(options, cache);
  run.measurement = measure(cache, options, run.methods, {});
  return run;
}

}  // namespace

TEST_CASE("--promise runs the whole grid", "[replay][promise]") {
  const TemporaryFile file("verkv-replay", synthetic_recording());
  const RecordedCache cache = RecordedCache::load(file.path());
  const Options options = parse({"--promise"});
  CHECK(options.sketches == std::vector<std::string>{"exact", "2", "3"});
  CHECK(parse({"--promise", "--sketch", "4,exact,4"}).sketches ==
        std::vector<std::string>{"4", "exact"});
  CHECK(parse({"other", "--promise"}).files == std::vector<std::string>{"file", "other"});

  const std::vector<Method> methods = select_methods(options, cache);
  std::set<std::string> cells;
  std::size_t bare = 0;
  for (const Method& method : methods) {
    const verkv::FetchConfig& fetch = method.config.fetch;
    CHECK(method.importance == "kvzip_mean");
    CHECK(method.random);
    CHECK(!fetch.risk);
    CHECK(!method.config.study.probability);
    if (method.promise == Promise::none) {
      CHECK(fetch.mode == verkv::FetchMode::never);
      ++bare;
      continue;
    }
    CHECK(method.promise == Promise::epsilon);
    CHECK(method.tolerance == fetch.epsilon);
    cells.insert(word(method.config.sketch) + " " + rate_label(method.config.keep) + " " +
                 std::to_string(fetch.epsilon.value()) + " " + std::to_string(fetch.delta));
  }
  CHECK(cells.size() == 3 * 3 * 5 * 3);
  CHECK(bare == 3 * 5);
  CHECK(methods.size() == 135 + 15);

  // Without that score the next best, as for one setting; without any, an error that names both.
  CHECK(select_methods(parse({"--promise", "--importance", "h2o"}), cache).front().importance ==
        "h2o");
  CHECK(contains(usage_error([&] {
                   select_methods(parse({"--promise", "--importance", "gate"}), cache);
                 }),
                 "gate"));
}

TEST_CASE("a rate is judged with its interval", "[replay][promise]") {
  CHECK(!judge({0, 0}, 0.1).has_value());
  const auto is = [](const Rate& rate, double delta, bool kept, bool sure) {
    const std::optional<Verdict> verdict = judge(rate, delta);
    return verdict.has_value() && verdict->kept == kept && verdict->sure == sure;
  };
  CHECK(is({0, 1000}, 0.1, true, true));
  CHECK(is({0, 10}, 0.1, true, false));  // up to 28 % are possible
  CHECK(is({10, 100}, 0.1, true, false));
  CHECK(is({11, 100}, 0.1, false, false));
  CHECK(is({17, 100}, 0.1, false, true) == (wilson_interval({17, 100}).low > 0.1));
  CHECK(is({300, 1000}, 0.2, false, true));
  CHECK(is({50, 50}, 0.2, false, true));
}

TEST_CASE("table and JSON of the grid", "[replay][promise]") {
  const TemporaryFile file("verkv-replay", synthetic_recording());
  const RecordedCache cache = RecordedCache::load(file.path());
  const Options options = parse({"other", "--promise", "--sketch", "exact,2", "--steps", "3",
                                 "--seeds", "1", "--redraws", "3", "--local", "4"});
  std::vector<PromiseRun> runs;
  runs.push_back(promise_run(cache, options, "folder/<a> & \"b\".safetensors"));
  runs.push_back(promise_run(cache, options, "other"));
  const std::size_t methods = 2 * 45 + 15;

  const std::vector<Cell> single = cells_of(runs[0]);
  const std::vector<Cell> pooled = pooled_cells(runs);
  REQUIRE(single.size() == methods);
  REQUIRE(pooled.size() == methods);
  for (std::size_t i = 0; i < methods; ++i) {
    const Row& one = single[i].all;
    const Row& all = pooled[i].all;
    CHECK(all.redraws.trials == 2 * one.redraws.trials);
    CHECK(all.redraws.failures == 2 * one.redraws.failures);
    CHECK(all.steps.trials == 2 * one.steps.trials);
    CHECK(all.any_head.trials == 2 * one.any_head.trials);
    CHECK(all.steps.trials == all.steps_fetched.trials + all.steps_unfetched.trials);
    CHECK(std::fabs(all.moved_fraction - one.moved_fraction) < verkv::tolerance::kIdentity);
    CHECK(pooled[i].worst_layer.layer == single[i].worst_layer.layer);
    CHECK(single[i].worst_layer.redraws.value() >= one.redraws.value());
  }

  const Json report = Json::parse(promise_report(runs, options));
  CHECK(report.at("settings").at("deltas").size() == 3);
  CHECK(report.at("settings").at("epsilons").size() == 5);
  CHECK(report.at("settings").at("sketches") == Json({"exact", "2"}));
  REQUIRE(report.at("files").size() == 2);
  CHECK(report.at("files")[0].at("file") == runs[0].file);
  CHECK(report.at("files")[1].at("prompt_tokens") == kTokens);
  REQUIRE(report.at("pooled").size() == methods);
  const Json& rows = report.at("files")[0].at("rows");
  REQUIRE(rows.size() == 3 * methods);
  for (const Json& row : rows) {
    for (const std::string& field : kRowFields) {
      INFO(field);
      CHECK(row.contains(field));
    }
  }
  for (const Json* part : {&rows, &report.at("pooled")}) {
    for (const Json& row : *part) {
      const bool promised = row.at("promise") == "epsilon";
      for (const char* field : {"kept_redraws", "kept_redraws_sure", "kept_steps",
                                "kept_steps_sure", "kept_any_head", "kept_any_head_sure"}) {
        INFO(field);
        const bool expected =
            promised && (row.value("layer", Json("all")) == "all" ||
                         std::string(field).find("any_head") == std::string::npos);
        CHECK(row.at(field).is_boolean() == expected);
      }
      if (promised) {
        CHECK(row.at("kept_redraws") == (row.at("failure_redraws") <= row.at("delta")));
      }
    }
  }

  const std::string text = promise_heading(runs[0]) + promise_table(single) +
                           promise_verdict(single) + promise_legend(options, runs[0].measurement);
  check_text(text);
  for (const char* part : {"exact sketch, 8x", "2-bit sketch, 32x", "delta 20 %", "no fetch",
                           "of 45 cells", "0.7 %", "11-87 %"}) {
    INFO(part);
    CHECK(contains(text, part));
  }

  // Nothing drawn anew: (a) has no trials, and is neither kept nor missed.
  Options still = options;
  still.redraws = 0;
  still.sketches = {"exact"};
  std::vector<PromiseRun> followed;
  followed.push_back(promise_run(cache, still));
  const std::vector<Cell> cells = cells_of(followed[0]);
  CHECK(cells.front().all.redraws.trials == 0);
  CHECK(cells.front().worst_layer.layer.has_value());
  CHECK(contains(promise_verdict(cells), "nothing was tried"));
  check_text(promise_table(cells));
  const Json quiet = Json::parse(promise_report(followed, still));
  CHECK(quiet.at("pooled")[0].at("kept_redraws").is_null());
}

TEST_CASE("a promise that is not kept is called missed", "[replay][promise][statistical]") {
  const TemporaryFile file("verkv-replay", synthetic_recording());
  const RecordedCache cache = RecordedCache::load(file.path());
  const Options options = parse({"--promise", "--sketch", "exact", "--estimator", "plain",
                                 "--local", "4", "--redraws", "60", "--seeds", "4"});
  const PromiseRun honest = promise_run(cache, options);
  std::size_t missed = 0;
  for (const Cell& cell : cells_of(honest)) {
    if (cell.promised()) missed += !judge(cell.all.redraws, cell.delta())->kept;
  }
  CHECK(missed == 0);
  CHECK(contains(promise_verdict(cells_of(honest)), "(a) kept in 45 of 45 cells"));

  // The same caches under a promise a hundred times tighter than the one they were run with.
  PromiseRun biased;
  biased.file = "biased";
  biased.methods = select_methods(options, cache);
  for (Method& method : biased.methods) method.tolerance /= 100;
  biased.measurement = measure(cache, options, biased.methods, {});
  std::size_t sure = 0;
  for (const Cell& cell : cells_of(biased)) {
    if (!cell.promised()) continue;
    const std::optional<Verdict> verdict = judge(cell.all.redraws, cell.delta());
    REQUIRE(verdict.has_value());
    sure += !verdict->kept && verdict->sure;
  }
  CHECK(sure > 30);
  CHECK(contains(promise_verdict(cells_of(biased)), "; missed: 8x eps "));
  CHECK(contains(promise_table(cells_of(biased)), "!"));

  // Made-up rates, where the outcome is known.
  std::vector<Cell> cells = cells_of(honest);
  for (Cell& cell : cells) cell.all.redraws = cell.all.steps = {0, 10'000};
  cells[0].all.redraws = {900, 10'000};  // delta 0.05
  cells[1].all.redraws = {11, 100};      // delta 0.1, may be chance
  cells[2].all.redraws = {19, 100};      // delta 0.2, likewise
  const std::string text = promise_verdict(cells);
  CHECK(contains(text,
                 "(a) kept in 43 of 45 cells, 1 of them in doubt (~); missed: 8x eps 0.01 (delta "
                 "0.05, 0.1?); ?: in doubt"));
  CHECK(contains(text, "in the worst layer kept in 45 of 45 cells"));
  CHECK(contains(text, "(b) kept in 45 of 45 cells\n"));
  const std::string table = promise_table(cells);
  CHECK(contains(table, "9.00!"));
  CHECK(contains(table, "11.0?"));
  CHECK(contains(table, "19.0~"));
}

TEST_CASE("a JSON file is written whole or not at all", "[replay]") {
  const TemporaryFile file("verkv-replay-json", "old");
  write_file(file.path(), "new text");
  std::ifstream in(file.path());
  std::string text;
  std::getline(in, text);
  CHECK(text == "new text");
  CHECK_NOTHROW(check_writable(file.path(), "recording"));
  // Nothing is left beside it.
  const std::filesystem::path path = file.path();
  for (const auto& entry : std::filesystem::directory_iterator(path.parent_path())) {
    const std::string name = entry.path().filename().string();
    CHECK((name == path.filename().string() || name.rfind(path.filename().string(), 0) != 0));
  }
  CHECK(contains(usage_error([] { check_writable("/nonexistent/folder/out.json", "recording"); }),
                 "/nonexistent/folder/out.json"));
  CHECK(contains(usage_error([&] { check_writable(path.parent_path().string(), "recording"); }),
                 "directory"));
  // Renaming the report over these would destroy them.
  CHECK(contains(usage_error([] { check_writable("/dev/null", "recording"); }), "regular file"));
  CHECK(
      contains(usage_error([&] { check_writable(file.path(), file.path()); }), "recording itself"));
  CHECK_THROWS_AS(write_file("/nonexistent/folder/out.json", "x"), verkv::Error);
}

TEST_CASE("statistics", "[replay]") {
  std::vector<double> values{5, 1, 4, 2, 3};
  CHECK(quantile(values, 0.5) == 3);
  CHECK(quantile(values, 0.95) == 5);
  CHECK(quantile(values, 1) == 5);
  CHECK(quantile(values, 0.2) == 1);
  std::vector<double> none;
  CHECK(std::isnan(quantile(none, 0.5)));
  // Wilson's interval for 10 of 100 (Brown, Cai and DasGupta 2001, formula 4).
  const Interval interval = wilson_interval({10, 100});
  CHECK(std::fabs(interval.low - 0.05522914) < verkv::tolerance::kPublished8);
  CHECK(std::fabs(interval.high - 0.17436566) < verkv::tolerance::kPublished8);
  CHECK(wilson_interval({0, 50}).low == 0);
  CHECK(wilson_interval({50, 50}).high == 1);
  CHECK(std::isnan(wilson_interval({0, 0}).low));
  CHECK(rate_label(0.0625) == "16x");
  CHECK(rate_label(1) == "1x");
  CHECK(rate_label(0.3) == "keep 0.3");
  CHECK(price_label(1e-4) == "1e-4");
  CHECK(price_label(3.5e-5) == "3.5e-5");
}

TEST_CASE("where the system refuses a thread, none is left and the text says how many came",
          "[replay]") {
  std::atomic<int> running{0};
  int given = 0;
  for (int most = 0; most < 3; ++most) {
    given = 0;
    const auto start = [&](const auto& work) {
      if (given == most)
        throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
      ++given;
      return std::thread([&running, &work] {
        ++running;
        work();
        --running;
      });
    };
    try {
      run_parallel(
          100, 4, [](std::int64_t) {}, start);
      FAIL_CHECK("it ran");
    } catch (const CapacityError& error) {
      CHECK(contains(error.what(), "4 threads"));
      CHECK(contains(error.what(), "than " + std::to_string(most + 1)));
    }
    CHECK(given == most);
    CHECK(running == 0);
  }
}

#if defined(VERKV_TEST_REPLAY_PROGRAM) && defined(__unix__)

namespace {

// Exit code and standard error of the program.
struct Outcome {
  int exit_code = -1;
  std::string errors;
};

// before: what the shell does first.
Outcome run_program(const std::string& arguments, const std::string& before = {}) {
  const TemporaryFile errors("verkv-replay-errors");
  const std::string command = before + "'" VERKV_TEST_REPLAY_PROGRAM "' " + arguments +
                              " >/dev/null 2>'" + errors.path() + "'";
  const int status = std::system(command.c_str());
  std::ifstream in(errors.path());
  std::stringstream text;
  text << in.rdbuf();
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, text.str()};
}

std::ptrdiff_t lines(const std::string& text) { return std::count(text.begin(), text.end(), '\n'); }

}  // namespace

TEST_CASE("the program reports by exit code and one line", "[replay]") {
  const TemporaryFile recording("verkv-replay", synthetic_recording());
  const TemporaryFile copy("verkv-replay-copy", synthetic_recording());
  const TemporaryFile broken("verkv-replay", synthetic_recording().substr(0, 5000));
  const TemporaryFile out("verkv-replay-out");
  CHECK(run_program("--help").exit_code == 0);
  const Outcome good =
      run_program("'" + recording.path() + "' --redraws 2 --json '" + out.path() + "'");
  INFO(good.errors);
  CHECK(good.exit_code == 0);
  std::ifstream in(out.path());
  CHECK(Json::parse(in).at("rows").size() == 3);
  const Outcome grid =
      run_program("--promise '" + recording.path() + "' '" + copy.path() +
                  "' --sketch exact --steps 2 --redraws 2 --seeds 1 --json '" + out.path() + "'");
  INFO(grid.errors);
  CHECK(grid.exit_code == 0);
  std::ifstream grid_in(out.path());
  CHECK(Json::parse(grid_in).at("files").size() == 2);

  const std::vector<std::pair<std::string, int>> bad{
      {"", 2},
      {"--keep 2 '" + recording.path() + "'", 2},
      {"--importance gate '" + recording.path() + "'", 2},
      {"--layers 9 '" + recording.path() + "'", 2},
      {"--json /nonexistent/out.json '" + recording.path() + "'", 2},
      {"/nonexistent/file", 1},
      {"--promise '" + recording.path() + "' /nonexistent/file", 1},
      {"--promise '" + recording.path() + "' '" + broken.path() + "'", 1},
      {"--promise --importance gate '" + recording.path() + "'", 2},
      {"--promise --layers 9 '" + recording.path() + "'", 2},
      {"--promise --steps 99 '" + recording.path() + "'", 2},
      {"--promise '" + recording.path() + "' --json '" + recording.path() + "'", 2},
      {"--promise '" + recording.path() + "' --json /nonexistent/out.json", 2},
      {"'" + broken.path() + "'", 1}};
  for (const auto& [arguments, code] : bad) {
    const Outcome outcome = run_program(arguments);
    INFO(arguments);
    INFO(outcome.errors);
    CHECK(outcome.exit_code == code);
    CHECK(lines(outcome.errors) == 1);
    CHECK(contains(outcome.errors, "verkv_replay: "));
  }
}

#if VERKV_TEST_CAN_LIMIT_MEMORY

TEST_CASE("the program ends with one line where the address space ends", "[replay]") {
  const TemporaryFile recording("verkv-replay", synthetic_recording());
  for (int repetition = 0; repetition < 5; ++repetition) {
    const Outcome outcome = run_program(
        "'" + recording.path() + "' --compare --seeds 20 --steps 1 --redraws 1 --threads 256",
        "ulimit -v 524288; ");
    INFO(outcome.errors);
    CHECK(outcome.exit_code == 1);
    CHECK(outcome.errors.find("verkv_replay: 256 threads are wanted") == 0);
    CHECK(lines(outcome.errors) == 1);
  }
}

#endif

#endif
