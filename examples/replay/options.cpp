#include "options.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <set>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

namespace verkv::replay {

namespace {

constexpr const char* kWords = R"(Words
  What happens. The prompt's keys and values go to the host tier. A few tokens stay resident on the fast tier,
  chosen by importance; of all others only a sketch stays there. In each decode step the sketch tells how wrong
  attention over the residents can be; tokens are fetched from the host until that is good enough.

  keep         Share of the tokens that stays resident, 0.0625 = "16x". Sinks and local window are paid from it.
               Smaller saves memory and costs transfers.
  select       poisson (PoissonComp): each token stays with a probability that follows its importance, so that
               attention over the rest can be estimated, with a known error. topk: the most important stay.
  importance   How much a token matters, from the recording. kvzip: the largest attention probability it received
               while the model repeated its own context (KVzip). kvzip_mean, kvzip_rms: the mean and the root mean
               square of the same. A maximum suits top-k, sampling wants a mean. Others: what the file has.
  epsilon      The paper's rule: fetch until the denominator D of the softmax is certified to be within this
               relative error. 0.05 is strict, 0.3 a coarse floor.
  delta        How often the certified bound may be missed: 0.1 promises at most one draw in ten.
  risk         A price per token: fetch each token that alone would put more than sqrt(risk) on the relative error
               of D; 1e-4: more than 1 %. Spends transfers where they help most; the certificate is reported.
  probability  Baseline for top-k: fetch each token whose sketched attention probability is above this.
               A rule that is named switches the others off. None named: epsilon 0.3 with risk 1e-4 for poisson,
               probability 1e-3 for topk.
  fetch        verified: what the rules ask for. never: residents only. always: everything not resident.
  sketch       Bits per key coordinate on the fast tier, 2, 3 or 4 on average, in a basis made from keys, importance
               and the prompt's queries; exact: the keys themselves, the oracle of experiments, no saving.
  order        Which tokens are fetched first. worth: by one number per token, cheap. exact: by Eq. 9 of the paper.
  cap          Bound on the weight of drawn tokens, for where the sketch was too small; off: none.
  pool         Which tokens share a budget: those of a head, of a layer, or of the whole sequence.
  sink, local  The first and the last tokens of the prompt that always stay.
  seeds        Draws of the residents; each is followed through all steps.
  redraws      Draws at a few fixed queries: what the promise speaks of.

Exit codes: 0 done, 1 something wrong with the data, 2 something wrong with the command line.)";

constexpr double kUnbounded = std::numeric_limits<double>::infinity();

// The numbers an option takes.
struct Range {
  double low = 0;
  bool low_included = false;
  double high = kUnbounded;
  bool high_included = false;
};

std::string text_of(const Range& range) {
  std::string text;
  if (range.low_included && range.high < kUnbounded) {
    text = fmt::format("from {:g} to {}{:g}", range.low, range.high_included ? "" : "below ",
                       range.high);
  } else if (range.low_included) {
    text = fmt::format("of {:g} or more", range.low);
  } else {
    text = fmt::format("above {:g}", range.low);
    if (range.high < kUnbounded) {
      text += fmt::format(" and {} {:g}", range.high_included ? "at most" : "below", range.high);
    }
  }
  return text;
}

// The number that the whole text is, if it is one.
template <class T>
std::optional<T> read_all(const std::string& text) {
  T value{};
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || rest != end) return std::nullopt;
  return value;
}

// what: of the number, for the message.
double parse_number(const std::string& name, const std::string& text, const Range& range,
                    const std::string& what) {
  const auto value = read_all<double>(text);
  const bool inside = value && std::isfinite(*value) &&
                      (range.low_included ? *value >= range.low : *value > range.low) &&
                      (range.high_included ? *value <= range.high : *value < range.high);
  if (!inside) {
    throw UsageError(fmt::format("{} is '{}', but must be a number {}", name, text, what));
  }
  return *value;
}

std::int64_t parse_integer(const std::string& name, const std::string& text, std::int64_t low,
                           std::int64_t high) {
  const auto value = read_all<std::int64_t>(text);
  if (!value || *value < low || *value > high) {
    throw UsageError(
        fmt::format("{} is '{}', but must be a whole number from {} to {}", name, text, low, high));
  }
  return *value;
}

// A set of options on a CLI::App, their values read by the functions above.
class Reader {
 public:
  explicit Reader(CLI::App& app) : app_(app) {}

  CLI::Option* number(const std::string& name, double& to, Range range, const std::string& about) {
    return add(name, "X", about, fmt::format("{:g}", to),
               [&to, name, range](const std::string& text) {
                 to = parse_number(name, text, range, text_of(range));
               });
  }

  // A number, or the word off.
  CLI::Option* number(const std::string& name, std::optional<double>& to, Range range,
                      const std::string& about, const std::string& standard) {
    return add(name, "off|X", about, standard, [&to, name, range](const std::string& text) {
      to.reset();
      if (text != "off") to = parse_number(name, text, range, text_of(range) + ", or off");
    });
  }

  CLI::Option* integer(const std::string& name, std::int64_t& to, std::int64_t low,
                       std::int64_t high, const std::string& about,
                       const std::string& standard = {}) {
    const std::string shown = standard.empty() ? fmt::format("{}", to) : standard;
    return add(name, "N", about, shown, [&to, name, low, high](const std::string& text) {
      to = parse_integer(name, text, low, high);
    });
  }

  template <class T>
  CLI::Option* word(const std::string& name, T& to, std::vector<std::pair<std::string, T>> words,
                    const std::string& about) {
    std::vector<std::string> names;
    std::string standard;
    for (const auto& [word, value] : words) {
      names.push_back(word);
      if (value == to) standard = word;
    }
    return add(name, fmt::format("{}", fmt::join(names, "|")), about, standard,
               [&to, name, words, names](const std::string& text) {
                 for (const auto& [word, value] : words) {
                   if (word == text) {
                     to = value;
                     return;
                   }
                 }
                 throw UsageError(fmt::format("{} is '{}', but must be one of {}", name, text,
                                              fmt::join(names, ", ")));
               });
  }

  CLI::Option* text(const std::string& name, std::string& to, const std::string& form,
                    const std::string& about, const std::string& standard) {
    return add(name, form, about, standard, [&to, name](const std::string& text) {
      if (text.empty()) throw UsageError(fmt::format("{} is empty", name));
      to = text;
    });
  }

  CLI::Option* add(const std::string& name, const std::string& form, const std::string& about,
                   const std::string& standard, std::function<void(const std::string&)> read) {
    const std::string shown = standard.empty() ? about : fmt::format("{} [{}]", about, standard);
    return app_.add_option_function<std::string>(name, std::move(read), shown)->type_name(form);
  }

 private:
  CLI::App& app_;
};

std::vector<std::int64_t> parse_layers(const std::string& text) {
  std::vector<std::int64_t> layers;
  std::size_t begin = 0;
  for (;;) {
    const std::size_t comma = text.find(',', begin);
    layers.push_back(parse_integer("--layers", text.substr(begin, comma - begin), 0, 999'999));
    if (comma == std::string::npos) break;
    begin = comma + 1;
  }
  std::sort(layers.begin(), layers.end());
  layers.erase(std::unique(layers.begin(), layers.end()), layers.end());
  return layers;
}

// The values of an option with the words for them.
template <class T>
std::vector<std::pair<std::string, T>> worded(std::initializer_list<T> values) {
  std::vector<std::pair<std::string, T>> words;
  for (const T value : values) words.emplace_back(word(value), value);
  return words;
}

constexpr std::array<const char*, 4> kSketches{"exact", "2", "3", "4"};
// Of the grid of promises, unless others are named: no error of the sketch, the shipped one, and
// one bit more.
constexpr std::array<const char*, 3> kPromiseSketches{"exact", "2", "3"};

// Words from a list, each once.
std::vector<std::string> parse_sketches(const std::string& text) {
  std::vector<std::string> words;
  std::size_t begin = 0;
  for (;;) {
    const std::size_t comma = text.find(',', begin);
    const std::string word = text.substr(begin, comma - begin);
    if (std::find(kSketches.begin(), kSketches.end(), word) == kSketches.end()) {
      throw UsageError(
          fmt::format("--sketch is '{}', but must be one of {}", word, fmt::join(kSketches, ", ")));
    }
    if (std::find(words.begin(), words.end(), word) == words.end()) words.push_back(word);
    if (comma == std::string::npos) return words;
    begin = comma + 1;
  }
}

SketchConfig sketch_config(const std::string& word) {
  if (word == "exact") return {SketchKind::exact, 2};
  return {SketchKind::calibrated, word[0] - '0'};
}

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
  config.sketch = sketch_config(options.sketch);
  config.fetch.mode = options.fetch;
  config.fetch.epsilon = options.epsilon;
  config.fetch.delta = options.delta;
  config.fetch.risk = options.risk;
  config.study.select = options.select;
  config.study.order = options.order;
  config.study.probability = options.probability;
  config.study.cap = options.cap;
  config.study.vector_code = options.vector_code;
  return config;
}

// A method of the comparison: poisson or top-k, with at most one rule.
Method compared(const Options& options, double keep, const std::string& importance,
                Selection select, std::optional<double> epsilon, std::optional<double> risk,
                std::optional<double> probability) {
  Method method;
  method.importance = importance;
  method.config = base_config(options);
  method.config.keep = keep;
  method.config.study.select = select;
  method.config.fetch.epsilon = epsilon;
  method.config.fetch.risk = risk;
  method.config.study.probability = probability;
  const bool fetches = epsilon || risk || probability;
  method.config.fetch.mode = fetches ? FetchMode::verified : FetchMode::never;
  method.random = select == Selection::poisson;
  if (select == Selection::topk) {
    method.name = fetches ? "topk_fetch" : "topk";
    method.label =
        fetches ? fmt::format("top-k, p > {}", price_label(*probability)) : "top-k, no fetch";
  } else if (!fetches) {
    method.name = "poisson";
    method.label = "Poisson, no fetch";
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
    method.name = topk ? "topk" : "poisson";
    method.label = topk ? "top-k, no fetch" : "Poisson, no fetch";
  } else {
    std::vector<std::string> rules;
    if (fetch.epsilon) rules.push_back(fmt::format("eps {:g}", *fetch.epsilon));
    if (fetch.risk) rules.push_back(fmt::format("risk {}", price_label(*fetch.risk)));
    if (probability) rules.push_back(fmt::format("p > {}", price_label(*probability)));
    method.label = fmt::format("{}{}", topk ? "top-k, " : "", fmt::join(rules, ", "));
    method.name = topk            ? "topk_fetch"
                  : fetch.risk    ? "risk"
                  : fetch.epsilon ? "certificate"
                                  : "poisson_fetch";
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
          Method method = compared(options, keep, importance, Selection::poisson, epsilon, {}, {});
          method.config.sketch = sketch_config(sketch);
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
      Method method = compared(options, keep, importance, Selection::poisson, {}, {}, {});
      method.tolerance = epsilon;
      methods.push_back(std::move(method));
    }
  }
  return methods;
}

}  // namespace

const char* word(Selection select) {
  switch (select) {
    case Selection::poisson:
      return "poisson";
    case Selection::topk:
      return "topk";
  }
  return "?";
}

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

const char* word(FetchOrder order) {
  switch (order) {
    case FetchOrder::worth:
      return "worth";
    case FetchOrder::exact:
      return "exact";
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

std::string word(const SketchConfig& sketch) {
  return sketch.kind == SketchKind::exact ? "exact" : fmt::format("{}", sketch.bits);
}

std::string sketch_label(const SketchConfig& sketch) {
  if (sketch.kind == SketchKind::exact) return "exact sketch";
  return fmt::format("{}-bit sketch", sketch.bits);
}

std::string rate_label(double keep) {
  const double rate = 1 / keep;
  return std::fabs(rate - std::round(rate)) < 1e-9 * rate ? fmt::format("{:.0f}x", rate)
                                                          : fmt::format("keep {:.4g}", keep);
}

std::string price_label(double price) {
  int exponent = static_cast<int>(std::floor(std::log10(price)));
  double mantissa = price / std::pow(10.0, exponent);
  if (mantissa > 9.9995) {
    mantissa = 1;
    ++exponent;
  }
  return fmt::format("{:.4g}e{}", mantissa, exponent);
}

Parsed parse_options(const std::vector<std::string>& arguments) {
  Options options;
  CLI::App app{
      "Replays a recorded KV cache of a real model (docs/recorded_cache.md): how good, how small "
      "and how honest\n"
      "compressed attention is, for one setting or, with --compare, for all methods at 8x, 16x and "
      "32x;\n"
      "with --promise FILE [FILE...], where the error of D stays within eps in all but delta of "
      "the "
      "cases.",
      "verkv_replay"};
  app.footer(kWords);
  app.get_formatter()->column_width(44);
  app.get_formatter()->label("REQUIRED", "");
  app.set_help_flag("-h,--help", "This text");
  Reader reader(app);
  app.add_option("FILE", options.files, "Recorded cache, safetensors; several with --promise")
      ->type_name("")
      ->required();
  app.add_flag("--compare", options.compare, "The table of all methods at 8x, 16x, 32x");
  app.add_flag("--by-layer", options.by_layer,
               "With --compare: also print the rows of single layers");
  app.add_flag("--promise", options.promise, "The grid of promises: sketch, rate, eps and delta");

  const Range open_unit{0, false, 1, false};
  CLI::Option* keep =
      reader.number("--keep", options.keep, {0, false, 1, true}, "Share of tokens resident");
  CLI::Option* epsilon =
      reader.number("--epsilon", options.epsilon, open_unit, "Certificate rule", "see Words");
  CLI::Option* delta =
      reader.number("--delta", options.delta, open_unit, "Share of draws that may fail");
  CLI::Option* risk = reader.number("--risk", options.risk, {0, false, kUnbounded, false},
                                    "Risk rule", "see Words");
  CLI::Option* probability = reader.number("--probability", options.probability, open_unit,
                                           "Probability rule", "see Words");
  CLI::Option* select =
      reader.word<Selection>("--select", options.select,
                             worded({Selection::poisson, Selection::topk}), "Who stays resident");
  CLI::Option* fetch = reader.word<FetchMode>(
      "--fetch", options.fetch, worded({FetchMode::verified, FetchMode::never, FetchMode::always}),
      "When tokens are fetched");
  std::vector<std::string> sketches;
  reader.add("--sketch", fmt::format("{}", fmt::join(kSketches, "|")),
             "Estimate of all logits; with --promise a list, a,b,...",
             fmt::format("{}; {}", options.sketch, fmt::join(kPromiseSketches, ",")),
             [&sketches](const std::string& text) { sketches = parse_sketches(text); });
  reader.word<FetchOrder>("--order", options.order, worded({FetchOrder::exact, FetchOrder::worth}),
                          "Order of fetching");
  reader.number("--cap", options.cap, {1, true, kUnbounded, false},
                "Bound on the weight of drawn tokens", fmt::format("{:g}", *options.cap));
  reader.text("--importance", options.importance, "NAME", "Score of the tokens",
              "kvzip_mean; for top-k kvzip");
  reader.word<Pool>("--pool", options.pool, worded({Pool::head, Pool::layer, Pool::sequence}),
                    "Who shares a budget");
  reader.integer("--sink", options.sink, 0, 1'000'000'000, "First tokens, always resident");
  reader.integer("--local", options.local, 0, 1'000'000'000, "Last prompt tokens, always resident");
  reader.integer("--seeds", options.seeds, 1, 1000, "Draws followed through all steps");
  reader.integer("--redraws", options.redraws, 0, 100'000, "Draws at each of 4 fixed steps");
  reader.add("--layers", "N,N,...", "Recorded layers to use", "all",
             [&options](const std::string& text) { options.layers = parse_layers(text); });
  reader.integer("--steps", options.steps, 1, 1'000'000'000, "Decode steps to replay", "all");
  reader.integer("--threads", options.threads, 1, 1024, "Threads; results do not depend on it",
                 "all");
  reader.word<bool>("--simd", options.vector_code, {{"auto", true}, {"scalar", false}}, "Kernels");
  reader.word<BackendKind>("--backend", options.backend,
                           {{"cpu", BackendKind::cpu}, {"cuda", BackendKind::cuda}},
                           "Where the cache computes");
  reader.text("--json", options.json, "OUT", "Write settings and rows, all layers, as JSON", "");

  Parsed parsed;
  try {
    // CLI11 takes arguments from the back.
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
    options.file = options.files.front();
    const auto refuse = [](const char* mode, std::initializer_list<const CLI::Option*> own) {
      for (const CLI::Option* option : own) {
        if (option->count() > 0) {
          throw UsageError(
              fmt::format("{} sets {} itself; give one or the other", mode, option->get_name()));
        }
      }
    };
    if (options.compare) {
      if (options.promise) throw UsageError("--promise and --compare exclude each other");
      refuse("--compare", {keep, epsilon, risk, probability, select, fetch});
    }
    if (options.promise) {
      refuse("--promise", {keep, epsilon, delta, risk, probability, select, fetch});
      if (options.by_layer)
        throw UsageError("--by-layer is for --compare; the JSON of --promise has each layer");
      // Pooled rates would count it twice.
      for (auto file = options.files.begin(); file != options.files.end(); ++file) {
        if (std::find(options.files.begin(), file, *file) != file)
          throw UsageError(fmt::format("'{}' is named twice", *file));
      }
      options.sketches = std::move(sketches);
      if (options.sketches.empty())
        options.sketches.assign(kPromiseSketches.begin(), kPromiseSketches.end());
    } else {
      if (options.files.size() > 1) {
        throw UsageError(fmt::format("'{}' is one recording too many; only --promise takes several",
                                     options.files[1]));
      }
      if (sketches.size() > 1)
        throw UsageError("--sketch is a list, but only --promise takes several");
      if (!sketches.empty()) options.sketch = sketches.front();
    }
    const bool rule_named = epsilon->count() + risk->count() + probability->count() > 0;
    if (!options.compare && !options.promise && options.fetch == FetchMode::verified) {
      if (!rule_named && options.select == Selection::poisson) {
        options.epsilon = FetchConfig{}.epsilon;
        options.risk = FetchConfig{}.risk;
      } else if (!rule_named) {
        options.probability = 1e-3;
      }
      if (options.keep < 1 && !(options.epsilon || options.risk || options.probability)) {
        throw UsageError(
            "--fetch verified needs one of --epsilon, --risk, --probability that is not off");
      }
    }
    parsed.options = std::move(options);
  } catch (const CLI::CallForHelp&) {
    parsed.text = app.help();
  } catch (const CLI::ParseError& error) {
    parsed.exit_code = kExitUsage;
    parsed.text = fmt::format("{} (see --help)", error.what());
  } catch (const UsageError& error) {
    parsed.exit_code = kExitUsage;
    parsed.text = fmt::format("{} (see --help)", error.what());
  }
  std::replace(parsed.text.begin(), parsed.text.end(), '\n', parsed.exit_code == 0 ? '\n' : ' ');
  return parsed;
}

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
  offload.config.sink_tokens = 0;
  offload.config.local_tokens = 0;
  offload.config.sketch.kind = SketchKind::exact;  // needs none, and this one takes no bytes
  offload.config.fetch.mode = FetchMode::always;
  methods.push_back(offload);

  for (const double keep : kRates) {
    methods.push_back(compared(options, keep, largest, Selection::topk, {}, {}, {}));
    methods.push_back(compared(options, keep, largest, Selection::topk, {}, {}, 1e-3));
    methods.push_back(compared(options, keep, sampled, Selection::poisson, {}, {}, {}));
    for (const double epsilon : {0.05, 0.1, 0.3}) {
      methods.push_back(compared(options, keep, sampled, Selection::poisson, epsilon, {}, {}));
    }
    for (const double risk : {1e-3, 1e-4, 1e-5}) {
      methods.push_back(compared(options, keep, sampled, Selection::poisson, {}, risk, {}));
    }
  }
  return methods;
}

}  // namespace verkv::replay
