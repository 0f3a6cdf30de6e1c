#include "cuda_report.hpp"

#include <cmath>
#include <cstdio>
#include <utility>

#include <verkv/config.hpp>

namespace verkv::bench {
namespace {

using nlohmann::json;

// Null where the number means nothing.
json number(bool valid, double value) {
  return valid && std::isfinite(value) ? json(value) : json(nullptr);
}

json optional_number(const std::optional<double>& value) {
  return value ? number(true, *value) : json(nullptr);
}

// With the decimals that are wanted; `empty` for null.
std::string text(const json& value, double scale, int decimals, const char* empty) {
  if (value.is_null()) return empty;
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, "%.*f", decimals, scale * value.get<double>());
  return buffer;
}

json machine_json(const Machine& m, const ProbeSizes& probes) {
  const auto rate = [&](double value) { return number(m.timings, value); };
  return {
      {"name", m.name},
      {"compute_capability", std::to_string(m.major) + "." + std::to_string(m.minor)},
      {"multiprocessors", m.multiprocessors},
      {"clock_hz", m.clock_hz},
      {"second_level_cache_bytes", m.cache_bytes},
      {"memory_bytes", m.memory_bytes},
      {"cuda_driver", m.driver},
      {"cuda_runtime", m.runtime},
      {"device_copy_bytes_per_second", rate(m.copy_rate)},
      {"device_read_bytes_per_second", rate(m.read_rate)},
      {"copy_engine",
       {{{"piece_bytes", probes.small_piece}, {"bytes_per_second", rate(m.engine_small_rate)}},
        {{"piece_bytes", probes.large_piece}, {"bytes_per_second", rate(m.engine_large_rate)}}}},
      {"mapped_rows",
       {{"row_bytes", 512},
        {"in_order_bytes_per_second", rate(m.mapped_rate)},
        {"scattered_bytes_per_second", rate(m.mapped_scattered_rate)}}},
      {"graph_node_gap_seconds", rate(m.node_gap_seconds)},
      {"graph_nodes", probes.nodes}};
}

const char* const kRuleOfDense = "-";
const std::string kVersion = std::to_string(VERKV_VERSION_MAJOR) + "." +
                             std::to_string(VERKV_VERSION_MINOR) + "." +
                             std::to_string(VERKV_VERSION_PATCH);

}  // namespace

Report::Report(const Machine& machine, const ProbeSizes& probes, json settings)
    : machine_(machine) {
  json_ = {{"program", "cuda_bench"},         {"version", kVersion},
           {"timings", machine.timings},      {"machine", machine_json(machine, probes)},
           {"settings", std::move(settings)}, {"results", json::array()},
           {"checks", json::array()},         {"left_out", json::array()}};
}

std::optional<double> Report::seconds_of(const Result& like, const std::string& what) const {
  for (const json& other : json_["results"]) {
    if (other["tokens"] == like.tokens && other["batch"] == like.batch && other["what"] == what &&
        !other["median_seconds"].is_null())
      return other["median_seconds"].get<double>();
  }
  return std::nullopt;
}

void Report::add(const Result& result) {
  const bool timed = machine_.timings;
  const double seconds = result.timing.median;
  const double bytes = static_cast<double>(result.device_bytes + result.host_bytes);
  const double floor = static_cast<double>(result.device_bytes) / machine_.copy_rate +
                       static_cast<double>(result.host_bytes) / machine_.engine_large_rate;
  const std::int64_t heads = json_["settings"]["kv_heads"].get<std::int64_t>();
  const std::int64_t row = json_["settings"]["row_bytes"].get<std::int64_t>();
  const double all = static_cast<double>(result.tokens * result.batch * heads * row);
  const auto ratio = [&](const std::optional<double>& dense) {
    return result.whole && dense ? number(timed, *dense / seconds) : json(nullptr);
  };
  json entry = {{"tokens", result.tokens},
                {"batch", result.batch},
                {"rule", result.rule.empty() ? kRuleOfDense : result.rule},
                {"what", result.what},
                {"cache", result.cache},
                {"detail", result.detail},
                {"repetitions", result.timing.repetitions},
                {"median_seconds", number(timed, seconds)},
                {"lower_quartile_seconds", number(timed, result.timing.lower)},
                {"upper_quartile_seconds", number(timed, result.timing.upper)},
                {"device_bytes", result.device_bytes},
                {"host_bytes", result.host_bytes},
                {"bytes_per_second", number(timed, bytes / seconds)},
                {"floor_seconds", number(timed, floor)},
                {"floor_share", number(timed, floor / seconds)},
                {"moved_share", optional_number(result.moved_share)},
                {"output_error", optional_number(result.output_error)}};
  // The entry itself is one of those that are looked for.
  json_["results"].push_back(entry);
  entry["dense_resident_ratio"] = ratio(seconds_of(result, "dense_resident"));
  entry["dense_perfect_ratio"] = ratio(all / machine_.copy_rate);
  entry["dense_offload_ratio"] = ratio(seconds_of(result, "dense_offload"));
  json_["results"].back() = entry;
  std::printf(
      "  %-15s %-10s %10s us (%s - %s) %8s GB/s, floor %6s %%, dense/this %s, perfect dense/this "
      "%s, offload/this %s\n",
      result.what.c_str(), entry["rule"].get<std::string>().c_str(),
      text(entry["median_seconds"], 1e6, 1, "-").c_str(),
      text(entry["lower_quartile_seconds"], 1e6, 1, "-").c_str(),
      text(entry["upper_quartile_seconds"], 1e6, 1, "-").c_str(),
      text(entry["bytes_per_second"], 1e-9, 1, "-").c_str(),
      text(entry["floor_share"], 100, 1, "-").c_str(),
      text(entry["dense_resident_ratio"], 1, 2, "-").c_str(),
      text(entry["dense_perfect_ratio"], 1, 2, "-").c_str(),
      text(entry["dense_offload_ratio"], 1, 1, "-").c_str());
  std::fflush(stdout);
}

bool Report::check(std::int64_t tokens, int batch, const std::string& what, double worst_error,
                   double tolerance) {
  const bool good = worst_error <= tolerance;  // false for a NaN
  json_["checks"].push_back({{"tokens", tokens},
                             {"batch", batch},
                             {"what", what},
                             {"worst_error", number(true, worst_error)},
                             {"tolerance", tolerance},
                             {"passed", good}});
  if (!good) {
    std::printf("  WRONG: %s is off by %g, and %g is allowed\n", what.c_str(), worst_error,
                tolerance);
    passed_ = false;
  }
  return good;
}

void Report::leave_out(std::int64_t tokens, int batch, const std::string& what,
                       const std::string& reason) {
  json_["left_out"].push_back(
      {{"tokens", tokens}, {"batch", batch}, {"what", what}, {"reason", reason}});
  std::printf("  left out: %s at %lld tokens, batch %d: %s\n", what.c_str(),
              static_cast<long long>(tokens), batch, reason.c_str());
  std::fflush(stdout);
}

std::string markdown(const json& json) {
  const auto& m = json.at("machine");
  const bool timed = json.at("timings").get<bool>();
  const auto rate = [&](const nlohmann::json& value) {
    return timed ? text(value, 1e-9, 1, "") : std::string();
  };
  std::string out = "| " + m.at("name").get<std::string>() + ", compute capability " +
                    m.at("compute_capability").get<std::string>() + ", " +
                    std::to_string(m.at("multiprocessors").get<int>()) +
                    " multiprocessors | |\n|---|---|\n";
  const auto line = [&](const std::string& what, const std::string& value) {
    out += "| " + what + " | " + value + " |\n";
  };
  line("device copy, read and written, GB/s", rate(m.at("device_copy_bytes_per_second")));
  line("device read by a kernel, GB/s", rate(m.at("device_read_bytes_per_second")));
  for (const auto& engine : m.at("copy_engine")) {
    line("host to device, copy engine, pieces of " +
             std::to_string(engine.at("piece_bytes").get<std::int64_t>() >> 10) + " KiB, GB/s",
         rate(engine.at("bytes_per_second")));
  }
  const auto& mapped = m.at("mapped_rows");
  line("host to device, rows of 512 B read by a kernel in order, GB/s",
       rate(mapped.at("in_order_bytes_per_second")));
  line("... scattered, GB/s", rate(mapped.at("scattered_bytes_per_second")));
  line("gap between dependent nodes of a graph, us",
       timed ? text(m.at("graph_node_gap_seconds"), 1e6, 2, "") : "");
  out +=
      "\n| tokens | batch | rule | what | us a layer | quartiles | GB/s | floor % | dense / this | "
      "perfect dense / this | offload / this | moved % | output error |\n"
      "|---|---|---|---|---|---|---|---|---|---|---|---|---|\n";
  for (const auto& r : json.at("results")) {
    const auto time = [&](const char* key, double scale, int decimals) {
      return timed ? text(r.at(key), scale, decimals, "") : std::string();
    };
    const std::string lower = time("lower_quartile_seconds", 1e6, 1);
    out += "| " + std::to_string(r.at("tokens").get<std::int64_t>()) + " | " +
           std::to_string(r.at("batch").get<int>()) + " | " + r.at("rule").get<std::string>() +
           " | " + r.at("what").get<std::string>() + " | " + time("median_seconds", 1e6, 1) +
           " | " + lower + (lower.empty() ? "" : " - ") + time("upper_quartile_seconds", 1e6, 1) +
           " | " + time("bytes_per_second", 1e-9, 1) + " | " + time("floor_share", 100, 1) + " | " +
           time("dense_resident_ratio", 1, 2) + " | " + time("dense_perfect_ratio", 1, 2) + " | " +
           time("dense_offload_ratio", 1, 1) + " | " + text(r.at("moved_share"), 100, 3, "") +
           " | " + text(r.at("output_error"), 1, 4, "") + " |\n";
  }
  for (const auto& l : json.at("left_out")) {
    out += "\nLeft out: " + l.at("what").get<std::string>() + " at " +
           std::to_string(l.at("tokens").get<std::int64_t>()) + " tokens, batch " +
           std::to_string(l.at("batch").get<int>()) + ": " + l.at("reason").get<std::string>() +
           "\n";
  }
  return out;
}

}  // namespace verkv::bench
