#include "json_report.hpp"

#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "../common/output_file.hpp"

namespace verkv::replay {

namespace {

using Json = nlohmann::ordered_json;

Json number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

const char* word(Selection select) { return select == Selection::poisson ? "poisson" : "topk"; }
const char* word(FetchOrder order) { return order == FetchOrder::key ? "key" : "exact"; }

const char* word(FetchMode mode) {
  switch (mode) {
    case FetchMode::verified:
      return "verified";
    case FetchMode::never:
      return "never";
    case FetchMode::always:
      return "always";
  }
  return "?";
}

const char* word(Pool pool) {
  switch (pool) {
    case Pool::head:
      return "head";
    case Pool::layer:
      return "layer";
    case Pool::sequence:
      return "sequence";
  }
  return "?";
}

const char* word(Promise promise) {
  switch (promise) {
    case Promise::none:
      return "none";
    case Promise::epsilon:
      return "epsilon";
    case Promise::certificate:
      return "certificate";
  }
  return "?";
}

std::string sketch_word(const SketchConfig& sketch) {
  switch (sketch.kind) {
    case SketchKind::exact:
      return "exact";
    case SketchKind::minmax:
      return "minmax";
    case SketchKind::lloyd_max:
      return fmt::format("{}", sketch.bits);
  }
  return "?";
}

// Rate, trials and interval under one name.
void add_rate(Json& json, const std::string& name, const std::string& trials, const Rate& rate) {
  const Interval interval = wilson_interval(rate);
  json["failure_" + name] = number(rate.value());
  json["failure_" + name + "_low"] = number(interval.low);
  json["failure_" + name + "_high"] = number(interval.high);
  json[trials] = rate.trials;
}

Json row_json(const Row& row) {
  const Method& method = *row.method;
  const FetchConfig& fetch = method.config.fetch;
  Json json;
  json["method"] = method.name;
  json["layer"] = row.layer ? Json(*row.layer) : Json("all");
  json["keep"] =
      method.name == "dense_offload" && method.config.keep < 1e-9 ? 0.0 : method.config.keep;
  json["epsilon"] = number(fetch.epsilon);
  json["delta"] = fetch.delta;
  json["risk"] = number(fetch.risk);
  json["probability"] = number(fetch.probability);
  json["sketch"] = sketch_word(method.config.sketch);
  json["select"] = word(method.config.select);
  json["fetch"] = word(fetch.mode);
  json["importance"] = method.importance;
  json["promise"] = word(method.promise);
  json["tolerance"] =
      method.promise == Promise::certificate ? Json(nullptr) : Json(method.tolerance);

  json["resident_fraction"] = number(row.resident_fraction);
  json["fetched_fraction"] = number(row.fetched_fraction);
  json["moved_fraction"] = number(row.moved_fraction);
  json["moved_tokens"] = number(row.moved_tokens);
  json["read_fraction"] = number(row.read_fraction);
  json["read_with_sketch_fraction"] = number(row.read_with_sketch_fraction);
  json["fetching_share"] = number(row.fetching_share);
  json["fetched_per_fetching"] = number(row.fetched_per_fetching);

  add_rate(json, "redraws", "trials_redraws", row.redraws);
  json["failure_redraws_worst_query"] = number(row.worst_query.value());
  add_rate(json, "steps", "trials", row.steps);
  add_rate(json, "steps_unfetched", "trials_unfetched", row.steps_unfetched);
  add_rate(json, "steps_fetched", "trials_fetched", row.steps_fetched);
  add_rate(json, "any_head", "trials_any_head", row.any_head);
  json["uncertified_share"] = number(row.uncertified);
  json["certificate_median"] = number(row.certificate_median);
  json["certificate_p95"] = number(row.certificate_p95);

  json["output_error_median"] = number(row.output_error_median);
  json["output_error_p95"] = number(row.output_error_p95);
  json["output_error_worst"] = number(row.output_error_worst);

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

}  // namespace

std::string json_report(const RecordedCache& cache, const Options& options,
                        const Measurement& measurement) {
  Json settings;
  settings["version"] =
      fmt::format("{}.{}.{}", VERKV_VERSION_MAJOR, VERKV_VERSION_MINOR, VERKV_VERSION_PATCH);
  settings["file"] = options.file;
  Json metadata = Json::object();
  for (const auto& [key, value] : cache.metadata()) metadata[key] = value;
  settings["metadata"] = metadata;
  settings["prompt_tokens"] = cache.prompt_tokens();
  settings["steps"] = measurement.steps;
  settings["layers"] = measurement.layers;
  settings["compare"] = options.compare;
  settings["delta"] = options.delta;
  settings["cap"] = number(options.cap);
  settings["order"] = word(options.order);
  settings["shortlist"] = options.shortlist;
  settings["pool"] = word(options.pool);
  settings["sink"] = options.sink;
  settings["local"] = options.local;
  settings["seeds"] = options.seeds;
  settings["redraws"] = options.redraws;
  settings["redraw_steps"] = measurement.redraw_steps;
  settings["storage"] = name(measurement.storage);
  settings["backend"] = measurement.description;
  settings["threads"] = measurement.threads;

  Json rows = Json::array();
  for (const Row& row : measurement.rows) rows.push_back(row_json(row));
  Json report;
  report["settings"] = std::move(settings);
  report["rows"] = std::move(rows);
  // A path need not be UTF-8; JSON is.
  return report.dump(1, ' ', true, Json::error_handler_t::replace) + "\n";
}

void check_writable(const std::string& path, const std::string& recording) {
  try {
    examples::check_writable(path, recording, "recording");
  } catch (const examples::OutputFileError& error) {
    throw UsageError(fmt::format("--json {}", error.what()));
  }
}

void write_file(const std::string& path, const std::string& text) {
  try {
    examples::write_file(path, text);
  } catch (const examples::OutputFileError& error) {
    throw Error(fmt::format("--json {}", error.what()));
  }
}

}  // namespace verkv::replay
