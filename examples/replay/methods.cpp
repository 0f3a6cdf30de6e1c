// The methods that options select, as configurations of a cache.
#include <algorithm>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "../common/cache_options.hpp"
#include "options.hpp"

namespace verkv::replay {

namespace {

// Names of scores that every one of the layers has.
std::set<std::string> common_importance(const Options& options, const RecordedCache& cache) {
  std::set<std::string> names;
  bool first = true;
  for (const std::size_t place : select_layers(options, cache)) {
    std::set<std::string> here;
    for (const auto& [name, view] : cache.layers()[place].importance) {
      if (first || names.contains(name)) here.insert(name);
    }
    names = std::move(here);
    first = false;
  }
  return names;
}

// The score to use: the one asked for, else the first of `preferred` that is there.
std::string choose_importance(const Options& options, const std::set<std::string>& available,
                              const std::vector<std::string>& preferred) {
  const std::string list =
      available.empty() ? "none" : fmt::format("{}", fmt::join(available, ", "));
  if (!options.importance.empty()) {
    if (available.contains(options.importance)) return options.importance;
    throw UsageError(
        fmt::format("--importance is '{}', but the recording has {}", options.importance, list));
  }
  for (const std::string& name : preferred) {
    if (available.contains(name)) return name;
  }
  throw UsageError(fmt::format(
      "the recording has no importance called {}; choose with --importance from what it has: {}",
      fmt::join(preferred, " or "), list));
}

CacheConfig base_config(const Options& options) {
  CacheConfig config;
  config.keep = options.keep;
  config.pool = options.pool;
  config.sink_tokens = options.sink;
  config.local_tokens = options.local;
  // The decoded tokens stay in the local window: every step sees the same sample.
  config.chunk_tokens.reset();
  config.sketch = examples::parse_sketch(options.sketch);
  config.fetch.mode = options.fetch;
  config.fetch.epsilon = options.epsilon;
  config.fetch.delta = options.delta;
  config.fetch.risk = options.risk;
  config.study.select = options.select;
  config.study.estimator = options.estimator;
  config.study.order = options.order;
  config.study.probability = options.probability;
  config.study.cap = options.cap;
  config.study.vector_code = options.vector_code;
  return config;
}

// How a method samples that no option describes.
constexpr Selection kSampled = StudyConfig{}.select;
constexpr Estimator kEstimator = StudyConfig{}.estimator;

// "Poisson, no fetch".
std::string sample_label(Selection select, Estimator estimator) {
  const char* what = select == Selection::poisson ? "Poisson" : name(select);
  return fmt::format("{}, no fetch",
                     estimator == Estimator::clusters && select == kSampled ? "cluster" : what);
}

// A method of the comparison: a sample or top-k, with at most one rule.
Method compared(const Options& options, double keep, const std::string& importance,
                Selection select, Estimator estimator, std::optional<double> epsilon,
                std::optional<double> risk, std::optional<double> probability) {
  Method method;
  method.importance = importance;
  method.config = base_config(options);
  method.config.keep = keep;
  method.config.study.select = select;
  method.config.study.estimator = estimator;
  method.config.fetch.epsilon = epsilon;
  method.config.fetch.risk = risk;
  method.config.study.probability = probability;
  const bool fetches = epsilon || risk || probability;
  method.config.fetch.mode = fetches ? FetchMode::verified : FetchMode::never;
  method.random = select != Selection::topk;
  if (select == Selection::topk) {
    const bool clusters = estimator == Estimator::clusters;
    method.name = clusters ? "topk_clusters" : fetches ? "topk_fetch" : "topk";
    method.label = fetches ? fmt::format("{}, p > {}", clusters ? "cluster" : "top-k",
                                         price_label(*probability))
                           : "top-k, no fetch";
  } else if (!fetches) {
    method.name = name(select);
    method.label = sample_label(select, method.config.study.estimator);
  } else if (epsilon) {
    method.name = "certificate";
    method.label = fmt::format("paper, eps {:g}", *epsilon);
    method.promise = Promise::epsilon;
    method.tolerance = *epsilon;
  } else {
    method.name = "risk";
    method.label = fmt::format("risk {}", price_label(*risk));
    method.promise = Promise::certificate;
  }
  return method;
}

// The one method that the options spell out.
Method described(const Options& options, const std::set<std::string>& available) {
  const bool topk = options.select == Selection::topk;
  if (options.keep >= 1)
    return dense_method(options, choose_importance(options, available, {"kvzip_mean", "kvzip"}));
  Method method;
  method.importance = choose_importance(options, available,
                                        topk ? std::vector<std::string>{"kvzip", "kvzip_mean"}
                                             : std::vector<std::string>{"kvzip_mean", "kvzip"});
  method.config = base_config(options);
  method.random = !topk;
  const FetchConfig& fetch = method.config.fetch;
  const std::optional<double>& probability = method.config.study.probability;
  if (fetch.epsilon) method.tolerance = *fetch.epsilon;
  if (fetch.mode == FetchMode::always) {
    method.name = "dense_offload";
    method.label = "fetch everything";
  } else if (fetch.mode == FetchMode::never) {
    method.name = name(options.select);
    method.label = topk ? "top-k, no fetch" : sample_label(options.select, options.estimator);
  } else {
    std::vector<std::string> rules;
    if (fetch.epsilon) rules.push_back(fmt::format("eps {:g}", *fetch.epsilon));
    if (fetch.risk) rules.push_back(fmt::format("risk {}", price_label(*fetch.risk)));
    if (probability) rules.push_back(fmt::format("p > {}", price_label(*probability)));
    method.label = fmt::format("{}{}", topk ? "top-k, " : "", fmt::join(rules, ", "));
    method.name = topk         ? "topk_fetch"
                  : fetch.risk ? "risk"
                  : fetch.epsilon
                      ? "certificate"
                      : (options.select == Selection::spread ? "spread_fetch" : "poisson_fetch");
    if (fetch.epsilon) {
      method.promise = Promise::epsilon;
    } else if (!topk) {
      method.promise = Promise::certificate;
    }
  }
  return method;
}

// Every promise of the grid, and beside each rate and epsilon what comes of promising nothing.
std::vector<Method> promise_methods(const Options& options, const std::string& importance) {
  std::vector<Method> methods;
  for (const std::string& sketch : options.sketches) {
    for (const double keep : kRates) {
      for (const double epsilon : kPromiseEpsilons) {
        for (const double delta : kPromiseDeltas) {
          Method method =
              compared(options, keep, importance, kSampled, options.estimator, epsilon, {}, {});
          method.config.sketch = examples::parse_sketch(sketch);
          method.config.fetch.delta = delta;
          method.label = fmt::format("{}, eps {:g}, delta {:g}", sketch_label(method.config.sketch),
                                     epsilon, delta);
          methods.push_back(std::move(method));
        }
      }
    }
  }
  for (const double keep : kRates) {
    for (const double epsilon : kPromiseEpsilons) {
      Method method = compared(options, keep, importance, kSampled, options.estimator, {}, {}, {});
      method.tolerance = epsilon;
      methods.push_back(std::move(method));
    }
  }
  return methods;
}

}  // namespace

Method dense_method(const Options& options, const std::string& importance) {
  Method method;
  method.name = "dense";
  method.label = "dense";
  method.importance = importance;
  method.config = base_config(options);
  method.config.keep = 1;
  method.config.fetch.mode = FetchMode::never;
  method.random = false;
  return method;
}

std::vector<std::size_t> select_layers(const Options& options, const RecordedCache& cache) {
  std::vector<std::size_t> places;
  std::vector<std::int64_t> indices;
  for (std::size_t place = 0; place < cache.layers().size(); ++place) {
    const std::int64_t index = cache.layers()[place].index;
    indices.push_back(index);
    if (options.layers.empty() ||
        std::binary_search(options.layers.begin(), options.layers.end(), index)) {
      places.push_back(place);
    }
  }
  for (const std::int64_t wanted : options.layers) {
    if (!std::binary_search(indices.begin(), indices.end(), wanted)) {
      throw UsageError(fmt::format("--layers names layer {}, but the recording has {}", wanted,
                                   fmt::join(indices, ", ")));
    }
  }
  return places;
}

std::int64_t select_steps(const Options& options, const RecordedCache& cache) {
  if (options.steps > cache.steps()) {
    throw UsageError(
        fmt::format("--steps is {}, but the recording has {}", options.steps, cache.steps()));
  }
  return options.steps == 0 ? cache.steps() : options.steps;
}

std::vector<Method> select_methods(const Options& options, const RecordedCache& cache) {
  const std::set<std::string> available = common_importance(options, cache);
  if (options.promise) {
    return promise_methods(options, choose_importance(options, available, {"kvzip_mean", "kvzip"}));
  }
  if (!options.compare) return {described(options, available)};

  const std::string sampled = choose_importance(options, available, {"kvzip_mean", "kvzip"});
  const std::string largest = choose_importance(options, available, {"kvzip", "kvzip_mean"});
  std::vector<Method> methods;
  methods.push_back(dense_method(options, sampled));

  // Nothing stays: no sinks, no window, and a budget that no pool can turn into a token.
  Method offload = dense_method(options, largest);
  offload.name = "dense_offload";
  offload.label = "dense offload";
  offload.config.keep = 1e-12;
  offload.config.study.select = Selection::topk;
  offload.config.study.estimator = Estimator::plain;
  offload.config.sink_tokens = 0;
  offload.config.local_tokens = 0;
  offload.config.sketch.kind = SketchKind::exact;  // needs none, and this one takes no bytes
  offload.config.fetch.mode = FetchMode::always;
  methods.push_back(offload);

  for (const double keep : kRates) {
    const auto add = [&](const std::string& importance, Selection select, Estimator estimator,
                         std::optional<double> epsilon, std::optional<double> risk,
                         std::optional<double> probability) {
      methods.push_back(
          compared(options, keep, importance, select, estimator, epsilon, risk, probability));
    };
    add(largest, Selection::topk, Estimator::plain, {}, {}, {});
    add(largest, Selection::topk, Estimator::plain, {}, {}, 1e-3);
    add(largest, Selection::topk, Estimator::clusters, {}, {}, 1e-3);
    add(sampled, Selection::poisson, Estimator::plain, {}, {}, {});
    add(sampled, Selection::spread, Estimator::plain, {}, {}, {});
    add(sampled, kSampled, kEstimator, {}, {}, {});
    for (const double epsilon : {0.05, 0.1, 0.3})
      add(sampled, kSampled, kEstimator, epsilon, {}, {});
    for (const double risk : {1e-3, 1e-4, 1e-5}) add(sampled, kSampled, kEstimator, {}, risk, {});
  }
  return methods;
}

}  // namespace verkv::replay
