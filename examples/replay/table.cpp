#include "table.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "text.hpp"

namespace verkv::replay {

namespace {

std::string bytes(double count) {
  if (std::isnan(count)) return "?";
  if (count < 10'000) return fmt::format("{:.0f} B", count);
  if (count < 1'000'000) return fmt::format("{:.0f} kB", count / 1e3);
  return fmt::format("{} MB", short_number(count / 1e6));
}

std::string milliseconds(double ns) { return fmt::format("{} ms", short_number(ns / 1e6)); }

struct Column {
  const char* head;
  std::size_t width;
  std::size_t gap;  // before it
};

// Columns first to first + count - 1 share a heading.
struct Group {
  const char* head;
  std::size_t first;
  std::size_t count;
};

constexpr std::size_t kLabelWidth = 17;
// clang-format off
constexpr std::array<Column, 14> kColumns{{
    {"median", 6, 2}, {"95 %", 5, 1}, {"worst", 5, 1},
    {"(a)", 5, 2}, {"(b)", 5, 1}, {"95 % range", 10, 1},
    {"share %", 7, 2}, {"tokens", 6, 1},
    {"moved", 5, 2}, {"read", 5, 1}, {"+sketch", 7, 1},
    {"median", 6, 2}, {"95 %", 5, 1},
    {"/dense", 6, 2}}};
// clang-format on
constexpr std::array<Group, 6> kGroups{{{"output error, %", 0, 3},
                                        {"D fails, %", 3, 3},
                                        {"fetching", 6, 2},
                                        {"of the cache, %", 8, 3},
                                        {"eps reached", 11, 2},
                                        {"time", 13, 1}}};

constexpr std::size_t table_width() {
  std::size_t width = kLabelWidth;
  for (const Column& column : kColumns) width += column.gap + column.width;
  return width;
}
static_assert(table_width() <= kTableWidth);

std::string line(std::string_view label, const std::array<std::string, kColumns.size()>& cells) {
  std::string text = fmt::format("{:<{}}", label, kLabelWidth);
  for (std::size_t i = 0; i < cells.size(); ++i) {
    text += fmt::format("{:>{}}", cells[i], kColumns[i].gap + kColumns[i].width);
  }
  return trimmed(std::move(text));
}

std::string head_lines() {
  std::string text(kLabelWidth, ' ');
  for (const Group& group : kGroups) {
    std::size_t width = kColumns[group.first].width;
    for (std::size_t i = group.first + 1; i < group.first + group.count; ++i)
      width += kColumns[i].gap + kColumns[i].width;
    text += std::string(kColumns[group.first].gap, ' ') +
            fmt::format("{:-^{}}", fmt::format(" {} ", group.head), width);
  }
  text = trimmed(std::move(text));
  std::array<std::string, kColumns.size()> heads;
  for (std::size_t i = 0; i < heads.size(); ++i) heads[i] = kColumns[i].head;
  return text + line("", heads) + std::string(table_width(), '-') + "\n";
}

std::string row_line(std::string_view label, const Row& row) {
  return line(label, {percent(row.output_error_median), percent(row.output_error_p95),
                      percent(row.output_error_worst), percent(row.redraws.value()),
                      percent(row.steps.value()), interval_percent(row.steps),
                      percent(row.fetching_share), short_number(row.fetched_per_fetching),
                      percent(row.moved_fraction), percent(row.read_fraction),
                      percent(row.read_with_sketch_fraction), short_number(row.certificate_median),
                      short_number(row.certificate_p95), short_number(row.step_ns / row.dense_ns)});
}

// Where the bytes of the fast tier are, in shares of the cache.
std::string memory_line(const Row& row) {
  const auto part = [&row](double count) { return percent(count / row.cache_bytes); };
  return fmt::format(
      "fast tier {} % of the cache's {} = residents {} + sketch {} + metadata {}; host tier {} %",
      percent(row.fast_fraction()), bytes(row.cache_bytes), part(row.resident_bytes),
      part(row.sketch_bytes), part(row.metadata_bytes), part(row.host_bytes));
}

bool has_rate(const Row& row) {
  return row.method->name != "dense" && row.method->name != "dense_offload";
}

std::string details(const Row& row) {
  std::string text = fmt::format(
      "bytes  {}\n"
      "       moved in a step {}; workspace of a thread {}\n",
      memory_line(row), bytes(row.fetched_bytes), bytes(row.workspace_bytes));
  text +=
      fmt::format("time   {} a step over these layers; dense attention by the same kernels {}\n",
                  milliseconds(row.step_ns), milliseconds(row.dense_ns));
  const std::string_view missed = row.method->promise == Promise::none
                                      ? "were off by more than the tolerance"
                                      : "missed what they promised";
  if (row.redraws.trials > 0) {
    text += fmt::format("(a)    {} redraws {}; of the worst query {}\n", of_trials(row.redraws),
                        missed, of_trials(row.worst_query));
  }
  text += fmt::format(
      "(b)    {} decisions {}; {} % were not certified\n"
      "       {} that fetched nothing, {} that fetched\n",
      of_trials(row.steps), missed, percent(row.uncertified), of_trials(row.steps_unfetched),
      of_trials(row.steps_fetched));
  text += fmt::format("(c)    {} steps had such a decision in any head of any layer\n",
                      of_trials(row.any_head));
  if (row.above_estimate.trials > 0) {
    text += fmt::format(
        "error  {} decisions had an output further off than the step estimated\n"
        "       {} than twice of that\n",
        of_trials(row.above_estimate), of_trials(row.above_two_estimates));
  }
  return text;
}

const Row* find_row(const Measurement& measurement, std::string_view name, double keep,
                    std::optional<double> epsilon, std::optional<double> risk) {
  for (const Row& row : measurement.rows) {
    const CacheConfig& config = row.method->config;
    if (!row.layer && row.method->name == name && config.keep == keep &&
        config.fetch.epsilon == epsilon && config.fetch.risk == risk) {
      return &row;
    }
  }
  return nullptr;
}

}  // namespace

std::string heading(const RecordedCache& cache, const Options& options,
                    const std::vector<Method>& methods) {
  const auto meta = [&cache](const char* key) {
    const auto found = cache.metadata().find(key);
    return found == cache.metadata().end() ? std::string("unknown") : printable(found->second, 70);
  };
  const std::vector<std::size_t> places = select_layers(options, cache);
  std::vector<std::int64_t> indices;
  for (const std::size_t place : places) indices.push_back(cache.layers()[place].index);
  const RecordedLayer& layer = cache.layers()[places.front()];
  std::string layers = fmt::format("{}", fmt::join(indices, ", "));
  if (layers.size() > 40)
    layers = fmt::format("{} to {}, {} of them", indices.front(), indices.back(), indices.size());

  std::string text =
      fmt::format("{}: the KV cache of {}\n", file_name(options.file), meta("model"));
  text += fmt::format("  text    {}\n", meta("source"));
  text += fmt::format(
      "  size    {} tokens and {} decode steps; layer{} {}; {} query heads on {} KV heads of {}\n",
      grouped(cache.prompt_tokens()), grouped(select_steps(options, cache)),
      indices.size() == 1 ? "" : "s", layers, layer.query_heads, layer.kv_heads, layer.key_dim);
  if (options.compare) {
    std::string sampled, largest;
    for (const Method& method : methods) (method.random ? sampled : largest) = method.importance;
    text += fmt::format(
        "  compare all methods at 8x, 16x, 32x: {}, delta {:g}, a budget per {}\n"
        "          importance {}, for top-k {}\n\n",
        sketch_label(methods.back().config.sketch), options.delta, name(options.pool),
        printable(sampled, 40), printable(largest, 40));
  } else {
    const Method& method = methods.front();
    text += fmt::format("  method  {}: {}; {}, delta {:g}, a budget per {}, importance {}\n\n",
                        rate_label(method.config.keep), method.label,
                        sketch_label(methods.back().config.sketch), options.delta,
                        name(options.pool), printable(method.importance, 30));
  }
  return text;
}

std::string table(const Measurement& measurement, const Options& options) {
  if (!options.compare) {
    std::string text = head_lines();
    for (const Row& row : measurement.rows) {
      text += row_line(row.layer ? fmt::format("layer {}", *row.layer) : "all layers", row);
    }
    return text + "\n" + details(measurement.rows.back());
  }
  std::string text = head_lines();
  double keep = 0;
  for (const Row& row : measurement.rows) {
    if (row.layer && !options.by_layer) continue;
    if (has_rate(row) && row.method->config.keep != keep) {
      keep = row.method->config.keep;
      const Row* example = find_row(measurement, "risk", keep, {}, 1e-4);
      text += fmt::format("{}: {}\n", rate_label(keep),
                          memory_line(example != nullptr ? *example : row));
    }
    const std::string label = row.layer ? fmt::format("  layer {}", *row.layer) : row.method->label;
    text += row_line(label, row);
  }
  return text;
}

std::string legend(const Measurement& measurement, const Options& options) {
  std::string text =
      "\noutput error  |o' - o| / |o| of the attention output against dense attention in double; a "
      "decision is one\n"
      "              draw, step and query head\n"
      "D fails       share of decisions whose softmax denominator is off by more than promised\n";
  text += fmt::format(
      "              (a) {} draws at each of {} fixed steps (what delta = {:g} speaks of)\n",
      options.redraws, measurement.redraw_steps.size(), options.delta);
  text += fmt::format(
      "              (b) {} draw{} followed through {} steps; the range takes decisions as "
      "independent\n",
      options.seeds, options.seeds == 1 ? "" : "s", measurement.steps);
  text +=
      "              promised: eps where the paper's rule is on (uncertified decisions do not "
      "count), under the\n"
      "              risk rule the eps it reports; nothing by the others, which are counted "
      "beyond ";
  const double tolerance =
      options.compare ? kPlainTolerance : options.epsilon.value_or(kPlainTolerance);
  text += fmt::format("{:g}\n", tolerance);
  text +=
      "fetch         share of decisions that ask for tokens, and how many they ask for\n"
      "moved         tokens copied from the host in a step, of the tokens a KV head holds (group's "
      "union)\n"
      "read          residents and moved tokens; +sketch: with the sketch's bytes, where the "
      "method uses it\n"
      "eps reached   the certificate after fetching, median and 95 % of decisions\n"
      "time          of a step's attention beside dense attention by the same kernels and threads";
  text += measurement.threads > 1 ? "; noisy, since\n              layers and methods run in "
                                    "parallel (--threads 1: quieter)\n"
                                  : "\n";
  text += fmt::format("              {}, {} storage\n", measurement.description,
                      name(measurement.storage));
  if (options.compare && options.importance.empty()) {
    text +=
        "importance    a maximum (kvzip) suits top-k, sampling wants a mean (kvzip_mean); "
        "--importance sets one for all\n";
  }
  return text;
}

std::string conclusion(const Measurement& measurement, const Options& options) {
  if (!options.compare) {
    const Row& row = measurement.rows.back();
    std::string text = fmt::format(
        "\nWith {} % of the tokens resident a step moves {} % of the cache and reads {} % of it; "
        "the output is off by\n"
        "{} % (median; 95 %: {} %).",
        percent(row.resident_fraction), percent(row.moved_fraction), percent(row.read_fraction),
        percent(row.output_error_median), percent(row.output_error_p95));
    if (row.method->promise != Promise::none && row.redraws.trials > 0) {
      text += fmt::format(" Promises missed: {} % of redraws, {} % of steps; {:g} % may be.",
                          percent(row.redraws.value()), percent(row.steps.value()),
                          100 * row.method->config.fetch.delta);
    }
    return text + "\n";
  }
  const Row* risk = find_row(measurement, "risk", 1.0 / 16, {}, 1e-4);
  const Row* paper = find_row(measurement, "certificate", 1.0 / 16, 0.05, {});
  const Row* bare = find_row(measurement, "topk", 1.0 / 16, {}, {});
  if (risk == nullptr || paper == nullptr || bare == nullptr) return "";
  std::string text = fmt::format(
      "\nAt 16x, top-k without fetching is off by {} % (median error of the output; 95 %: {} %).\n"
      "The paper's rule at eps 0.05 brings that to {} % (95 %: {} %) and moves {} % of the cache "
      "in a step,\n"
      "risk 1e-4 to {} % (95 %: {} %) and moves {} %",
      percent(bare->output_error_median), percent(bare->output_error_p95),
      percent(paper->output_error_median), percent(paper->output_error_p95),
      percent(paper->moved_fraction), percent(risk->output_error_median),
      percent(risk->output_error_p95), percent(risk->moved_fraction));
  if (risk->moved_fraction > 0) {
    text +=
        fmt::format(" ({} times less)", short_number(paper->moved_fraction / risk->moved_fraction));
  }
  text += fmt::format(".\nD missed what eps 0.05 promised in {} decisions ({} %; {:g} % may)",
                      of_trials(paper->steps), percent(paper->steps.value()), 100 * options.delta);
  if (paper->redraws.trials > 0)
    text += fmt::format(", {} % of redraws", percent(paper->redraws.value()));
  return text + ".\n";
}

}  // namespace verkv::replay
