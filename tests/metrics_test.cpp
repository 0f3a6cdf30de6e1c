// The text for a monitoring system follows the grammar of its format, and says what the cache says.
#include <verkv/metrics.hpp>

#include <cctype>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "reference/statistics.hpp"

namespace {

using verkv::CacheConfig;
using verkv::DType;
using verkv::kBoundEdges;
using verkv::KvCacheManager;
using verkv::LayerStatistics;
using verkv::MemoryReport;
using verkv::SequenceId;
using verkv::reference::Random;

// A sample: its metric, its labels in order, its value.
struct Sample {
  std::string name;
  std::vector<std::pair<std::string, std::string>> labels;
  double value = 0;
};

// The text format, version 0.0.4, read strictly. Throws std::string with what is wrong.
class Reader {
 public:
  explicit Reader(const std::string& text) {
    if (text.empty() || text.back() != '\n') throw std::string("the last line has no end");
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) read(line);
  }

  std::map<std::string, std::string> types;  // of a family
  std::vector<Sample> samples;

 private:
  void read(const std::string& line) {
    if (line.rfind("# HELP ", 0) == 0) {
      const std::string name = line.substr(7, line.find(' ', 7) - 7);
      check_name(name);
      if (!helped_.insert(name).second) throw "HELP twice: " + line;
      return;
    }
    if (line.rfind("# TYPE ", 0) == 0) {
      const std::size_t space = line.find(' ', 7);
      family_ = line.substr(7, space - 7);
      const std::string type = line.substr(space + 1);
      if (!std::set<std::string>{"counter", "gauge", "histogram"}.count(type)) throw line;
      if (!types.emplace(family_, type).second) throw "TYPE twice: " + line;
      if (!helped_.count(family_)) throw "TYPE without HELP: " + line;
      return;
    }
    samples.push_back(sample(line));
    // All lines of a family stand together, behind its type.
    std::string own = samples.back().name;
    if (types[family_] == "histogram") {
      for (const char* end : {"_bucket", "_count"}) {
        if (own == family_ + end) own = family_;
      }
    }
    if (own != family_) throw "of another family: " + line;
    if (types[family_] == "counter" && !(own.size() > 6 && own.substr(own.size() - 6) == "_total"))
      throw "a counter's name ends in _total: " + line;
  }

  static void check_name(const std::string& name) {
    bool good = !name.empty() && !(name[0] >= '0' && name[0] <= '9');
    for (const char c : name)
      good = good && (std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == ':');
    if (!good) throw "no name: " + name;
  }

  static Sample sample(const std::string& line) {
    Sample result;
    std::size_t at = line.find_first_of("{ ");
    if (at == std::string::npos) throw "no value: " + line;
    result.name = line.substr(0, at);
    check_name(result.name);
    if (line[at] == '{') {
      ++at;
      while (line.at(at) != '}') {
        const std::size_t equals = line.find("=\"", at);
        if (equals == std::string::npos) throw "no label: " + line;
        std::string label = line.substr(at, equals - at);
        check_name(label);
        std::string value;
        for (at = equals + 2; line.at(at) != '"'; ++at) {
          if (line[at] == '\\') {
            ++at;
            if (line.at(at) == 'n')
              value += '\n';
            else if (line[at] == '\\' || line[at] == '"')
              value += line[at];
            else
              throw "no escape: " + line;
          } else {
            value += line[at];
          }
        }
        ++at;
        result.labels.emplace_back(label, value);
        if (line.at(at) == ',') ++at;
      }
      ++at;
    }
    if (line.at(at) != ' ') throw "no space: " + line;
    std::size_t used = 0;
    result.value = std::stod(line.substr(at + 1), &used);
    if (at + 1 + used != line.size()) throw "more than a value: " + line;
    return result;
  }

  std::string family_;
  std::set<std::string> helped_;
};

// The value of a sample with these labels; the test fails where there is not just one.
double value_of(const Reader& text, const std::string& name,
                const std::vector<std::pair<std::string, std::string>>& labels) {
  double value = -1;
  int found = 0;
  for (const Sample& sample : text.samples) {
    if (sample.name != name || sample.labels != labels) continue;
    value = sample.value;
    ++found;
  }
  INFO(name);
  CHECK(found == 1);
  return value;
}

Reader read(const KvCacheManager& cache) {
  try {
    return Reader(verkv::prometheus_text(cache));
  } catch (const std::string& wrong) {
    FAIL(wrong);
    throw;
  }
}

// A cache of two layers and one that is not cached, in use.
std::unique_ptr<KvCacheManager> used_cache() {
  CacheConfig config;
  config.layers.assign(3, {.kv_heads = 2, .query_heads = 4, .key_dim = 16, .value_dim = 16});
  config.layers[1].cached = false;
  config.keep = 0.25;
  config.local_tokens = 4;
  config.compress_from = 0;
  config.threads = 1;
  auto cache = verkv::make_cpu_cache(config);
  const SequenceId id = cache->create_sequence();
  Random random(5);
  std::vector<float> numbers(300 * 4 * 16);
  for (float& x : numbers) x = static_cast<float>(2 * random.normal());
  const auto rows = [&](std::int64_t tokens, std::int64_t heads) {
    return verkv::token_major(numbers.data(), DType::f32, tokens, heads, 16);
  };
  const std::vector<float> scores(600, 1.0f);
  for (const std::int64_t layer : {0, 2}) cache->append(id, layer, rows(300, 2), rows(300, 2));
  const verkv::ImportanceView view{scores.data(), 2, 300, 300};
  const std::vector<verkv::ImportanceView> importance{view, {}, view};
  cache->compress(id, importance);
  std::vector<float> output(4 * 16);
  for (int step = 0; step < 5; ++step) {
    verkv::AttendBatch batch;
    batch.sequences = std::span(&id, 1);
    batch.queries = rows(1, 4);
    batch.output = output;
    cache->attend(0, batch);
    if (step < 2) cache->attend(2, batch);
  }
  return cache;
}

std::string label(double edge) {
  std::ostringstream text;
  text << edge;
  return text.str();
}

}  // namespace

TEST_CASE("The text follows the grammar and has every number of the reports") {
  const auto cache = used_cache();
  const Reader text = read(*cache);
  CHECK(value_of(text, "verkv_info", {{"backend", cache->description()}}) == 1);
  for (const std::string layer : {"0", "2"}) {
    const LayerStatistics s = cache->statistics(std::stoll(layer));
    const auto is = [&](const std::string& name, std::int64_t value) {
      CHECK(value_of(text, "verkv_" + name + "_total", {{"layer", layer}}) ==
            static_cast<double>(value));
    };
    CHECK(s.steps == (layer == "0" ? 5 : 2));
    is("steps", s.steps);
    is("decisions", s.decisions);
    is("certified_decisions", s.certified);
    is("enlarged_decisions", s.enlarged);
    is("fetching_decisions", s.fetching);
    is("planned_tokens", s.planned_tokens);
    is("fetched_tokens", s.fetched_tokens);
    is("moved_tokens", s.moved_tokens);
    is("moved_bytes", s.moved_bytes);
    is("held_tokens", s.cached_tokens);
    is("resident_tokens", s.resident_tokens);
    const auto seconds = [&](const std::string& name, std::int64_t ns) {
      const double shown = value_of(text, "verkv_" + name + "_seconds_total", {{"layer", layer}});
      CHECK(static_cast<std::int64_t>(shown * 1e9 + 0.5) == ns);
      CHECK(ns > 0);
    };
    seconds("attend", s.attend_ns);
    seconds("append", s.append_ns);
    seconds("compress", s.compress_ns);
    std::int64_t count = 0;
    for (int i = 0; i <= kBoundEdges; ++i) {
      count += s.bounds[i];
      const std::string edge = i < kBoundEdges ? label(verkv::bound_edge(i)) : "+Inf";
      CHECK(value_of(text, "verkv_bound_bucket", {{"layer", layer}, {"le", edge}}) ==
            static_cast<double>(count));
    }
    CHECK(count == s.decisions);
    CHECK(value_of(text, "verkv_bound_count", {{"layer", layer}}) == static_cast<double>(count));
  }
  const MemoryReport memory = cache->memory();
  const auto is = [&](const std::string& kind, std::int64_t bytes) {
    CHECK(value_of(text, "verkv_memory_bytes", {{"kind", kind}}) == static_cast<double>(bytes));
  };
  is("resident", memory.resident_bytes);
  is("sketch", memory.sketch_bytes);
  is("metadata", memory.metadata_bytes);
  is("host", memory.host_bytes);
  is("basis", memory.basis_bytes);
  is("workspace", memory.workspace_bytes);
  is("reserved", memory.reserved_bytes);
  CHECK(value_of(text, "verkv_pageable_bytes", {}) == 0);
  CHECK(value_of(text, "verkv_engine_bytes", {}) == 0);
  CHECK(value_of(text, "verkv_file_bytes", {}) == 0);
  for (const Sample& sample : text.samples) {
    for (const auto& [name, value] : sample.labels) CHECK_FALSE((name == "layer" && value == "1"));
  }
}

TEST_CASE("Totals are the sums over layers, and a reset begins anew") {
  const auto cache = used_cache();
  LayerStatistics sum = cache->statistics(0);
  const LayerStatistics all = cache->statistics();
  sum += cache->statistics(2);
  CHECK(all.steps == 7);
  CHECK(all.steps == sum.steps);
  CHECK(all.decisions == sum.decisions);
  CHECK(all.certified == sum.certified);
  CHECK(all.enlarged == sum.enlarged);
  CHECK(all.fetching == sum.fetching);
  CHECK(all.planned_tokens == sum.planned_tokens);
  CHECK(all.fetched_tokens == sum.fetched_tokens);
  CHECK(all.moved_tokens == sum.moved_tokens);
  CHECK(all.moved_bytes == sum.moved_bytes);
  CHECK(all.cached_tokens == sum.cached_tokens);
  CHECK(all.resident_tokens == sum.resident_tokens);
  for (int i = 0; i <= kBoundEdges; ++i) CHECK(all.bounds[i] == sum.bounds[i]);
  CHECK(all.attend_ns == sum.attend_ns);
  CHECK(all.append_ns == sum.append_ns);
  CHECK(all.compress_ns == sum.compress_ns);
  cache->reset_statistics();
  const Reader text = read(*cache);
  CHECK(value_of(text, "verkv_steps_total", {{"layer", "0"}}) == 0);
  CHECK(value_of(text, "verkv_attend_seconds_total", {{"layer", "0"}}) == 0);
  CHECK(value_of(text, "verkv_bound_count", {{"layer", "2"}}) == 0);
}

TEST_CASE("The bucket of a bound is the first whose edge is not below it") {
  for (int i = 0; i < kBoundEdges; ++i) {
    const double edge = verkv::bound_edge(i);
    CHECK(verkv::bound_bucket(edge) == i);
    CHECK(verkv::bound_bucket(std::nextafter(edge, 10)) == i + 1);
    if (i > 0) CHECK(verkv::bound_edge(i - 1) < edge);
  }
  CHECK(verkv::bound_bucket(std::numeric_limits<double>::infinity()) == kBoundEdges);
  CHECK(verkv::bound_bucket(std::numeric_limits<double>::quiet_NaN()) == kBoundEdges);
}

TEST_CASE("The reader of this test is strict") {
  const std::string head = "# HELP a_total x\n# TYPE a_total counter\n";
  CHECK_NOTHROW(Reader(head + "a_total 1\na_total{b=\"c\\\"\\\\\\n\"} 2.5\n"));
  for (const std::string& bad :
       {head + "a_total 1", head + "b_total 1\n", head + "a_total\n", head + "a_total{b=c} 1\n",
        head + "a_total{b=\"\\x\"} 1\n", head + "a_total 1 2 3\n", head + head,
        std::string("# TYPE a_total counter\n"), std::string("# HELP a x\n# TYPE a counter\na 1\n"),
        head + "a-total 1\n"}) {
    CHECK_THROWS(Reader(bad));
  }
}
