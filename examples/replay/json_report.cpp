#include "json_report.hpp"

#include <cmath>
#include <map>
#include <optional>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "../common/output_file.hpp"
#include "promise.hpp"

namespace verkv::replay {

namespace {

using Json = nlohmann::ordered_json;

Json number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

Json number(const std::optional<double>& value) { return value ? Json(*value) : Json(nullptr); }

// Rate, trials and interval under one name.
void add_rate(Json& json, const std::string& name, const std::string& trials, const Rate& rate) {
  const Interval interval = wilson_interval(rate);
  json["failure_" + name] = number(rate.value());
  json["failure_" + name + "_low"] = number(interval.low);
  json["failure_" + name + "_high"] = number(interval.high);
  json[trials] = rate.trials;
}

// What was run.
void add_method(Json& json, const Row& row) {
  const Method& method = *row.method;
  const FetchConfig& fetch = method.config.fetch;
  json["method"] = method.name;
  json["layer"] = row.layer ? Json(*row.layer) : Json("all");
  json["keep"] =
      method.name == "dense_offload" && method.config.keep < 1e-9 ? 0.0 : method.config.keep;
  json["epsilon"] = number(fetch.epsilon);
  json["delta"] = fetch.delta;
  json["risk"] = number(fetch.risk);
  json["probability"] = number(method.config.study.probability);
  json["sketch"] = word(method.config.sketch);
  json["select"] = name(method.config.study.select);
  json["estimator"] = name(method.config.study.estimator);
  json["fetch"] = name(fetch.mode);
  json["importance"] = method.importance;
  json["promise"] = name(method.promise);
  json["tolerance"] =
      method.promise == Promise::certificate ? Json(nullptr) : Json(method.tolerance);
}

// How often the denominator was off by more than promised.
void add_failures(Json& json, const Row& row) {
  add_rate(json, "redraws", "trials_redraws", row.redraws);
  json["failure_redraws_worst_query"] = number(row.worst_query.value());
  add_rate(json, "steps", "trials", row.steps);
  add_rate(json, "steps_unfetched", "trials_unfetched", row.steps_unfetched);
  add_rate(json, "steps_fetched", "trials_fetched", row.steps_fetched);
  add_rate(json, "any_head", "trials_any_head", row.any_head);
}

// Each rate beside delta; null where nothing was promised or tried.
void add_verdicts(Json& json, const Row& row) {
  const std::pair<const char*, const Rate*> rates[] = {
      {"redraws", &row.redraws}, {"steps", &row.steps}, {"any_head", &row.any_head}};
  for (const auto& [name, rate] : rates) {
    std::optional<Verdict> verdict;
    if (row.method->promise == Promise::epsilon)
      verdict = judge(*rate, row.method->config.fetch.delta);
    json[fmt::format("kept_{}", name)] = verdict ? Json(verdict->kept) : Json(nullptr);
    json[fmt::format("kept_{}_sure", name)] = verdict ? Json(verdict->sure) : Json(nullptr);
  }
}

Json row_json(const Row& row) {
  Json json;
  add_method(json, row);
  json["resident_fraction"] = number(row.resident_fraction);
  json["fetched_fraction"] = number(row.fetched_fraction);
  json["moved_fraction"] = number(row.moved_fraction);
  json["moved_tokens"] = number(row.moved_tokens);
  json["read_fraction"] = number(row.read_fraction);
  json["read_with_sketch_fraction"] = number(row.read_with_sketch_fraction);
  json["fetching_share"] = number(row.fetching_share);
  json["fetched_per_fetching"] = number(row.fetched_per_fetching);

  add_failures(json, row);
  json["uncertified_share"] = number(row.uncertified);
  json["certificate_median"] = number(row.certificate_median);
  json["certificate_p95"] = number(row.certificate_p95);

  json["output_error_median"] = number(row.output_error_median);
  json["output_error_p95"] = number(row.output_error_p95);
  json["output_error_worst"] = number(row.output_error_worst);
  add_rate(json, "above_estimate", "trials_estimate", row.above_estimate);
  add_rate(json, "above_two_estimates", "trials_estimate", row.above_two_estimates);
  json["denominator_error_rms"] = number(row.denominator_error_rms);
  json["denominator_error_median"] = number(row.denominator_error_median);
  json["denominator_error_p95"] = number(row.denominator_error_p95);

  json["step_ns"] = number(row.step_ns);
  json["dense_ns"] = number(row.dense_ns);
  json["cache_bytes"] = number(row.cache_bytes);
  json["resident_bytes"] = number(row.resident_bytes);
  json["sketch_bytes"] = number(row.sketch_bytes);
  json["metadata_bytes"] = number(row.metadata_bytes);
  json["host_bytes"] = number(row.host_bytes);
  json["workspace_bytes"] = number(row.workspace_bytes);
  json["fetched_bytes"] = number(row.fetched_bytes);
  return json;
}

// What is the same for every row and recording.
void add_settings(Json& json, const Options& options, const Measurement& measurement) {
  json["cap"] = number(options.cap);
  json["order"] = name(options.order);
  json["pool"] = name(options.pool);
  json["sink"] = options.sink;
  json["local"] = options.local;
  json["seeds"] = options.seeds;
  json["redraws"] = options.redraws;
  json["backend"] = measurement.description;
  json["threads"] = measurement.threads;
}

// The recording, and what was used of it.
void add_recording(Json& json, const std::string& file,
                   const std::map<std::string, std::string>& metadata, std::int64_t prompt_tokens,
                   const Measurement& measurement) {
  json["file"] = file;
  json["metadata"] = Json(metadata);
  json["prompt_tokens"] = prompt_tokens;
  json["steps"] = measurement.steps;
  json["redraw_steps"] = measurement.redraw_steps;
  json["layers"] = measurement.layers;
  json["storage"] = name(measurement.storage);
}

Json version() {
  return fmt::format("{}.{}.{}", VERKV_VERSION_MAJOR, VERKV_VERSION_MINOR, VERKV_VERSION_PATCH);
}

// A path need not be UTF-8; JSON is.
std::string text_of(const Json& json) {
  return json.dump(1, ' ', true, Json::error_handler_t::replace) + "\n";
}

}  // namespace

std::string json_report(const RecordedCache& cache, const Options& options,
                        const Measurement& measurement) {
  Json settings;
  settings["version"] = version();
  add_recording(settings, options.file, cache.metadata(), cache.prompt_tokens(), measurement);
  settings["compare"] = options.compare;
  settings["delta"] = options.delta;
  add_settings(settings, options, measurement);

  Json rows = Json::array();
  for (const Row& row : measurement.rows) rows.push_back(row_json(row));
  Json report;
  report["settings"] = std::move(settings);
  report["rows"] = std::move(rows);
  return text_of(report);
}

std::string promise_report(const std::vector<PromiseRun>& runs, const Options& options) {
  Json settings;
  settings["version"] = version();
  settings["keeps"] = kRates;
  settings["epsilons"] = kPromiseEpsilons;
  settings["deltas"] = kPromiseDeltas;
  settings["sketches"] = options.sketches;
  add_settings(settings, options, runs.front().measurement);

  Json files = Json::array();
  for (const PromiseRun& run : runs) {
    Json file;
    add_recording(file, run.file, run.metadata, run.prompt_tokens, run.measurement);
    Json rows = Json::array();
    for (const Row& row : run.measurement.rows) {
      Json json = row_json(row);
      add_verdicts(json, row);
      rows.push_back(std::move(json));
    }
    file["rows"] = std::move(rows);
    files.push_back(std::move(file));
  }
  Json pooled = Json::array();
  for (const Cell& cell : pooled_cells(runs)) {
    Json json;
    add_method(json, cell.all);
    json["moved_fraction"] = number(cell.all.moved_fraction);
    add_failures(json, cell.all);
    add_verdicts(json, cell.all);
    pooled.push_back(std::move(json));
  }
  Json report;
  report["settings"] = std::move(settings);
  report["files"] = std::move(files);
  report["pooled"] = std::move(pooled);
  return text_of(report);
}

void check_writable(const std::string& path, const std::string& recording,
                    const std::string& option) {
  try {
    examples::check_writable(path, recording, "recording");
  } catch (const examples::OutputFileError& error) {
    throw UsageError(fmt::format("{} {}", option, error.what()));
  }
}

void write_file(const std::string& path, const std::string& text, const std::string& option) {
  try {
    examples::write_file(path, text);
  } catch (const examples::OutputFileError& error) {
    throw Error(fmt::format("{} {}", option, error.what()));
  }
}

}  // namespace verkv::replay
