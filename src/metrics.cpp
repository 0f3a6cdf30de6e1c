#include <verkv/metrics.hpp>

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace verkv {
namespace {

struct OfLayer {
  std::int64_t layer = 0;
  LayerStatistics statistics;
};

// One counter of every layer.
struct Counter {
  const char* name;
  const char* help;
  std::int64_t LayerStatistics::*value;
};

constexpr Counter kCounters[]{
    {"verkv_steps_total", "Rows that attended.", &LayerStatistics::steps},
    {"verkv_decisions_total", "Decisions, one of each row and query head.",
     &LayerStatistics::decisions},
    {"verkv_certified_decisions_total", "Decisions certified at the end.",
     &LayerStatistics::certified},
    {"verkv_enlarged_decisions_total", "Decisions with a sketch that was far off or not measured.",
     &LayerStatistics::enlarged},
    {"verkv_fetching_decisions_total", "Decisions that asked for at least one token.",
     &LayerStatistics::fetching},
    {"verkv_planned_tokens_total", "Tokens that decisions asked for, residents included.",
     &LayerStatistics::planned_tokens},
    {"verkv_fetched_tokens_total", "Tokens that KV heads made exact for a step.",
     &LayerStatistics::fetched_tokens},
    {"verkv_moved_tokens_total", "Tokens that KV heads copied from the host tier.",
     &LayerStatistics::moved_tokens},
    {"verkv_moved_bytes_total", "Bytes copied from the host tier.", &LayerStatistics::moved_bytes},
    {"verkv_held_tokens_total", "Tokens that KV heads held, summed over steps.",
     &LayerStatistics::cached_tokens},
    {"verkv_resident_tokens_total", "Of the held tokens those that were resident.",
     &LayerStatistics::resident_tokens}};

constexpr Counter kTimes[]{
    {"verkv_attend_seconds_total", "Time in calls of attend.", &LayerStatistics::attend_ns},
    {"verkv_append_seconds_total", "Time in calls of append.", &LayerStatistics::append_ns},
    {"verkv_compress_seconds_total", "Time in calls of compress, by rows compressed.",
     &LayerStatistics::compress_ns}};

struct Bytes {
  const char* kind;
  std::int64_t MemoryReport::*value;
};

constexpr Bytes kMemory[]{
    {"resident", &MemoryReport::resident_bytes}, {"sketch", &MemoryReport::sketch_bytes},
    {"metadata", &MemoryReport::metadata_bytes}, {"host", &MemoryReport::host_bytes},
    {"basis", &MemoryReport::basis_bytes},       {"workspace", &MemoryReport::workspace_bytes},
    {"reserved", &MemoryReport::reserved_bytes}};

class Text {
 public:
  void family(const char* name, const char* type, const char* help) {
    add("# HELP {} {}\n# TYPE {} {}\n", name, help, name, type);
  }
  template <class... Args>
  void add(fmt::format_string<Args...> text, Args&&... args) {
    fmt::format_to(std::back_inserter(text_), text, std::forward<Args>(args)...);
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

// What may stand between the quotes of a label.
std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if (c == '\\' || c == '"') result += '\\';
    if (c == '\n') {
      result += "\\n";
    } else {
      result += c;
    }
  }
  return result;
}

void add_counters(Text& text, const std::vector<OfLayer>& layers) {
  for (const Counter& counter : kCounters) {
    text.family(counter.name, "counter", counter.help);
    for (const OfLayer& one : layers)
      text.add("{}{{layer=\"{}\"}} {}\n", counter.name, one.layer, one.statistics.*counter.value);
  }
  constexpr std::int64_t second = 1'000'000'000;
  for (const Counter& time : kTimes) {
    text.family(time.name, "counter", time.help);
    for (const OfLayer& one : layers) {
      const std::int64_t ns = one.statistics.*time.value;
      text.add("{}{{layer=\"{}\"}} {}.{:09}\n", time.name, one.layer, ns / second, ns % second);
    }
  }
}

// Without a sum: a bound may be infinite.
void add_bounds(Text& text, const std::vector<OfLayer>& layers) {
  constexpr const char* name = "verkv_bound";
  text.family(name, "histogram", "Decisions by the bound reached on the relative error of D.");
  for (const OfLayer& one : layers) {
    std::int64_t count = 0;
    for (int i = 0; i < kBoundEdges; ++i) {
      count += one.statistics.bounds[i];
      text.add("{}_bucket{{layer=\"{}\",le=\"{}\"}} {}\n", name, one.layer, bound_edge(i), count);
    }
    count += one.statistics.bounds[kBoundEdges];
    text.add("{}_bucket{{layer=\"{}\",le=\"+Inf\"}} {}\n", name, one.layer, count);
    text.add("{}_count{{layer=\"{}\"}} {}\n", name, one.layer, count);
  }
}

void add_memory(Text& text, const MemoryReport& memory) {
  text.family("verkv_memory_bytes", "gauge", "Bytes in use, by purpose.");
  for (const Bytes& bytes : kMemory)
    text.add("verkv_memory_bytes{{kind=\"{}\"}} {}\n", bytes.kind, memory.*bytes.value);
  text.family("verkv_pageable_bytes", "gauge",
              "Of these, blocks that a device reads though they could not be pinned.");
  text.add("verkv_pageable_bytes {}\n", memory.pageable_bytes);
  text.family("verkv_engine_bytes", "gauge",
              "Keys and values that the engine holds for the cache.");
  text.add("verkv_engine_bytes {}\n", memory.engine_bytes);
  text.family("verkv_file_bytes", "gauge", "Size of the host tier's file.");
  text.add("verkv_file_bytes {}\n", memory.file_bytes);
}

}  // namespace

std::string prometheus_text(const KvCacheManager& manager) {
  std::vector<OfLayer> layers;
  const std::vector<LayerConfig>& configured = manager.config().layers;
  for (std::size_t i = 0; i < configured.size(); ++i) {
    if (!configured[i].cached) continue;
    const std::int64_t layer = static_cast<std::int64_t>(i);
    layers.push_back({layer, manager.statistics(layer)});
  }
  Text text;
  text.family("verkv_info", "gauge", "What computes; always 1.");
  text.add("verkv_info{{backend=\"{}\"}} 1\n", escaped(manager.description()));
  add_counters(text, layers);
  add_bounds(text, layers);
  add_memory(text, manager.memory());
  return text.take();
}

}  // namespace verkv
