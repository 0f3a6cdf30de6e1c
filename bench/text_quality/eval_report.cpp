#include "eval_report.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace verkv::lab {

namespace {

using Json = nlohmann::ordered_json;

Json value_json(const std::string& text) { return text; }
Json value_json(std::int64_t number) { return number; }
Json value_json(double number) { return std::isfinite(number) ? Json(number) : Json(nullptr); }

// A number in about three digits.
std::string short_number(double value) {
  if (!std::isfinite(value)) return "-";
  const double size = std::fabs(value);
  if (size == 0) return "0";
  if (size < 0.00095) {
    std::string text = fmt::format("{:.1e}", value);
    // "4.2e-05" is "4.2e-5".
    const std::size_t exponent = text.find('e') + 2;
    while (text[exponent] == '0' && exponent + 1 < text.size()) text.erase(exponent, 1);
    return text;
  }
  if (size < 0.0995) return fmt::format("{:.4f}", value);
  if (size < 9.995) return fmt::format("{:.2f}", value);
  if (size < 99.95) return fmt::format("{:.1f}", value);
  return fmt::format("{:.0f}", value);
}

std::string percent(double share) {
  if (!std::isfinite(share)) return "-";
  const double value = 100 * share;
  if (value == 0) return "0";
  if (value < 0.01) return "<0.01";
  if (value < 0.995) return fmt::format("{:.2f}", value);
  // 99.97 is not everything.
  if (value > 99.95 && value < 100) return ">99.9";
  return fmt::format("{:.1f}", value);
}

std::string interval(std::string (*word)(double), double low, double high) {
  return std::isfinite(low) && std::isfinite(high) ? fmt::format("{}..{}", word(low), word(high))
                                                   : "-";
}

std::string bytes(double count) {
  if (!std::isfinite(count)) return "-";
  if (count == 0) return "0";
  if (count < 9'999.5) return fmt::format("{:.0f} B", count);
  if (count < 999'500) return fmt::format("{:.0f} kB", count / 1e3);
  if (count < 999.5e6) return fmt::format("{} MB", short_number(count / 1e6));
  return fmt::format("{} GB", short_number(count / 1e9));
}

// "4,090".
std::string grouped(std::int64_t value) {
  std::string digits = fmt::format("{}", value);
  for (std::ptrdiff_t place = static_cast<std::ptrdiff_t>(digits.size()) - 3; place > 0;
       place -= 3) {
    digits.insert(static_cast<std::size_t>(place), 1, ',');
  }
  return digits;
}

struct Column {
  const char* head;
  std::string (*cell)(const EvalRow&);
};

// clang-format off
constexpr Column kColumns[] = {
    {"rate", [](const EvalRow& r) { return rate_label(r.keep); }},
    {"importance", [](const EvalRow& r) { return r.importance; }},
    {"sketch", [](const EvalRow& r) { return r.sketch; }},
    {"estimator", [](const EvalRow& r) { return r.estimator; }},
    {"exponent", [](const EvalRow& r) { return short_number(r.exponent); }},
    {"floor", [](const EvalRow& r) { return short_number(r.inclusion_floor); }},
    {"cap", [](const EvalRow& r) { return short_number(r.cap); }},
    {"delta", [](const EvalRow& r) { return short_number(r.delta); }},
    {"resident %", [](const EvalRow& r) { return percent(r.resident_fraction); }},
    {"fetching %", [](const EvalRow& r) { return percent(r.fetching_share); }},
    {"moved %", [](const EvalRow& r) { return percent(r.moved_fraction); }},
    {"moved tokens", [](const EvalRow& r) { return short_number(r.moved_tokens); }},
    {"moved/step", [](const EvalRow& r) { return bytes(r.moved_bytes); }},
    {"read %", [](const EvalRow& r) { return percent(r.read_fraction); }},
    {"fast", [](const EvalRow& r) { return bytes(r.fast_bytes); }},
    {"cache", [](const EvalRow& r) { return bytes(r.cache_bytes); }},
    {"KL mean", [](const EvalRow& r) { return short_number(r.kl_mean); }},
    {"KL 95 % range", [](const EvalRow& r) { return interval(short_number, r.kl_low, r.kl_high); }},
    {"median", [](const EvalRow& r) { return short_number(r.kl_median); }},
    {"p95", [](const EvalRow& r) { return short_number(r.kl_p95); }},
    {"p99.9", [](const EvalRow& r) { return short_number(r.kl_p999); }},
    {"worst", [](const EvalRow& r) { return short_number(r.kl_worst); }},
    {"agree %", [](const EvalRow& r) { return percent(r.agreement); }},
    {"agree range",
     [](const EvalRow& r) { return interval(percent, r.agreement_low, r.agreement_high); }},
    {"ppl", [](const EvalRow& r) { return short_number(r.perplexity); }},
    {"dense ppl", [](const EvalRow& r) { return short_number(r.perplexity_dense); }},
    {"score %", [](const EvalRow& r) { return percent(r.score); }},
    {"score range", [](const EvalRow& r) { return interval(percent, r.score_low, r.score_high); }},
    {"dense %", [](const EvalRow& r) { return percent(r.score_dense); }},
    {"dense range",
     [](const EvalRow& r) { return interval(percent, r.score_dense_low, r.score_dense_high); }},
    {"cert median", [](const EvalRow& r) { return short_number(r.certificate_median); }},
    {"cert p95", [](const EvalRow& r) { return short_number(r.certificate_p95); }},
    {"certified %", [](const EvalRow& r) { return percent(r.certified_share); }},
    {"samples", [](const EvalRow& r) { return grouped(r.samples); }},
    {"prompts", [](const EvalRow& r) { return grouped(r.prompts); }},
    {"draws", [](const EvalRow& r) { return grouped(r.draws); }},
};
// Said once above the table where it is the same in all rows that have it.
constexpr std::string_view kCommon[] = {"importance", "sketch", "estimator", "exponent", "floor",
                                        "cap", "delta", "cache", "dense ppl", "dense %",
                                        "dense range", "samples", "prompts", "draws"};
// clang-format on

struct Table {
  std::string title;
  std::string common;  // empty: nothing is
  std::vector<std::string> heads;
  std::vector<std::vector<std::string>> rows;
};

Table make_table(const std::vector<const EvalRow*>& rows) {
  Table table;
  const EvalRow& first = *rows.front();
  table.title =
      fmt::format("{}, {}{}, {} tokens", first.model, first.task.empty() ? "" : "task ",
                  first.task.empty() ? first.text : first.task, grouped(first.context_tokens));
  table.heads.push_back("method");
  for (const EvalRow* row : rows) {
    const std::string parameters = parameter_label(*row);
    // "risk 1e-4" names its rule.
    const bool named = row->method.starts_with("risk") && parameters.starts_with("risk");
    table.rows.push_back({named                ? parameters
                          : parameters.empty() ? method_label(row->method)
                                               : method_label(row->method) + ", " + parameters});
  }
  for (const Column& column : kColumns) {
    std::set<std::string> distinct;
    std::vector<std::string> cells;
    for (const EvalRow* row : rows) {
      std::string cell = column.cell(*row);
      if (cell.empty()) cell = std::string(1, '-');
      if (cell != "-") distinct.insert(cell);
      cells.push_back(std::move(cell));
    }
    if (distinct.empty()) continue;
    if (distinct.size() == 1 &&
        std::find(std::begin(kCommon), std::end(kCommon), column.head) != std::end(kCommon)) {
      table.common +=
          fmt::format("{}{} {}", table.common.empty() ? "" : ", ", column.head, *distinct.begin());
      continue;
    }
    table.heads.push_back(column.head);
    for (std::size_t i = 0; i < rows.size(); ++i) table.rows[i].push_back(std::move(cells[i]));
  }
  return table;
}

// One table for each model, text or task, and context, in the order of their first rows.
std::vector<Table> make_tables(std::span<const EvalRow> rows) {
  std::vector<std::vector<const EvalRow*>> groups;
  for (const EvalRow& row : rows) {
    const auto same = [&row](const std::vector<const EvalRow*>& group) {
      const EvalRow& other = *group.front();
      return other.model == row.model && other.text == row.text && other.task == row.task &&
             other.context_tokens == row.context_tokens;
    };
    const auto found = std::find_if(groups.begin(), groups.end(), same);
    if (found == groups.end()) {
      groups.push_back({&row});
    } else {
      found->push_back(&row);
    }
  }
  std::vector<Table> tables;
  for (const auto& group : groups) tables.push_back(make_table(group));
  return tables;
}

// Words from a file, safe for a terminal.
std::string printable(std::string_view text) {
  std::string result;
  for (const char c : text) result += c >= ' ' && c <= '~' ? c : '?';
  return result;
}

constexpr const char* kNothing = "nothing was measured\n";

}  // namespace

std::string json_report(const EvalSettings& settings, std::span<const EvalRow> rows) {
  Json report;
  report["settings"] = {{"command", settings.command},
                        {"engine", settings.engine},
                        {"cache", settings.cache},
                        {"model_path", settings.model_path},
                        {"seed", settings.seed},
                        {"steps", settings.steps},
                        {"layers_replaced", settings.layers_replaced},
                        {"layers", settings.layers}};
  report["rows"] = Json::array();
  for (const EvalRow& row : rows) {
    Json json;
    for_each_field(
        row, [&json](const char* field, const auto& value) { json[field] = value_json(value); });
    report["rows"].push_back(std::move(json));
  }
  // A path need not be UTF-8; JSON is.
  return report.dump(1, ' ', true, Json::error_handler_t::replace) + "\n";
}

std::string text_table(std::span<const EvalRow> rows) {
  if (rows.empty()) return kNothing;
  std::string text;
  for (const Table& table : make_tables(rows)) {
    if (!text.empty()) text += "\n";
    text += printable(table.title) + "\n";
    if (!table.common.empty()) text += printable(table.common) + "\n";
    std::vector<std::size_t> widths;
    for (const std::string& head : table.heads) widths.push_back(head.size());
    for (const auto& row : table.rows) {
      for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
    }
    const auto add_line = [&](const std::vector<std::string>& cells) {
      text += fmt::format("{:<{}}", printable(cells[0]), widths[0]);
      for (std::size_t i = 1; i < cells.size(); ++i)
        text += fmt::format("{:>{}}", printable(cells[i]), widths[i] + 2);
      text.erase(text.find_last_not_of(' ') + 1);
      text += "\n";
    };
    add_line(table.heads);
    for (const auto& row : table.rows) add_line(row);
  }
  return text;
}

std::string method_label(const std::string& method) {
  constexpr std::pair<std::string_view, std::string_view> labels[] = {
      {"dense", "dense"},
      {"dense_offload", "dense, offloaded"},
      {"full_budget", "full budget"},
      {"top_k", "top-k"},
      {"top_k_gate", "top-k, gate"},
      {"top_k_fetch", "top-k, fetch"},
      {"poisson", "Poisson"},
      {"paper", "paper"},
      {"risk", "risk"},
      {"risk_and_epsilon", "risk and eps"}};
  for (const auto& [name, label] : labels) {
    if (method == name) return std::string(label);
  }
  return method;
}

std::string parameter_label(const EvalRow& row) {
  std::string text;
  const auto add = [&text](std::string_view word, const std::string& value) {
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", word, value);
  };
  // "1e-4", "3.5e-5".
  const auto price = [](double value) {
    if (!(value > 0 && value < 1)) return fmt::format("{:g}", value);
    double exponent = std::floor(std::log10(value));
    double digits = std::round(value / std::pow(10, exponent) * 10) / 10;
    if (digits >= 10) {
      digits /= 10;
      ++exponent;
    }
    return fmt::format("{:g}e{:.0f}", digits, exponent);
  };
  if (std::isfinite(row.risk)) add("risk", price(row.risk));
  if (std::isfinite(row.epsilon)) add("eps", fmt::format("{:g}", row.epsilon));
  if (std::isfinite(row.probability)) add("p", price(row.probability));
  return text;
}

std::string rate_label(double keep) {
  if (!(keep > 0) || !std::isfinite(keep)) return "";
  const double rate = 1 / keep;
  return std::fabs(rate - std::round(rate)) < 1e-9 * rate ? fmt::format("{:.0f}x", rate)
                                                          : fmt::format("keep {:.4g}", keep);
}

}  // namespace verkv::lab
