#include "options.hpp"

#include <algorithm>
#include <initializer_list>
#include <utility>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "option_reader.hpp"

namespace verkv::replay {

namespace {

constexpr const char* kAbout =
    "Replays a recorded KV cache of a real model (docs/recorded_cache.md): how good, how small "
    "and how honest\n"
    "compressed attention is, for one setting or, with --compare, for all methods at 8x, 16x and "
    "32x;\n"
    "with --promise FILE [FILE...], where the error of D stays within eps in all but delta of the "
    "cases.";

constexpr const char* kWords = R"(Words
  What happens. The prompt's keys and values go to the host tier. A few tokens stay resident on the fast tier,
  chosen by importance; of all others only a sketch stays there. In each decode step the sketch tells how wrong
  attention over the residents can be; tokens are fetched from the host until that is good enough.

  keep         Share of the tokens that stays resident, 0.0625 = "16x". Sinks and local window are paid from it.
               Smaller saves memory and costs transfers.
  select       spread, poisson (PoissonComp): each token stays with a probability that follows its importance, so
               that attention over the rest can be estimated, with a known error. poisson: independently of each
               other; spread: similar tokens compete. topk: the most important stay.
  importance   How much a token matters, from the recording. kvzip: the largest attention probability it received
               while the model repeated its own context (KVzip). kvzip_mean, kvzip_rms: the mean and the root mean
               square of the same. A maximum suits top-k, sampling wants a mean. Others: what the file has.
  estimator    plain: the drawn tokens alone, each for those like it (the paper's). clusters: of each cluster of 64
               similar tokens the drawn ones and the mean of its values; the sketch says what a cluster weighs.
  epsilon      The paper's rule: fetch until the denominator D of the softmax is certified to be within this
               relative error. 0.05 is strict, 0.3 a coarse floor.
  delta        How often the certified bound may be missed: 0.1 promises at most one draw in ten.
  risk         A price per token: fetch each token that alone would put more than sqrt(risk) on the relative error
               of D; 1e-4: more than 1 %. Spends transfers where they help most; the certificate is reported.
  probability  Baseline for top-k: fetch each token whose sketched attention probability is above this.
               A rule that is named switches the others off. None named: epsilon 0.3 with risk 1e-4 for samples,
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
  for (const T value : values) words.emplace_back(name(value), value);
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

// The program's command line: each option with its place in Options.
class CommandLine {
 public:
  CommandLine() : app_(kAbout, "verkv_replay"), reader_(app_) {
    app_.footer(kWords);
    app_.get_formatter()->column_width(44);
    app_.get_formatter()->label("REQUIRED", "");
    app_.set_help_flag("-h,--help", "This text");
    add_modes();
    add_method();
    add_run();
  }

  std::string help() const { return app_.help(); }

  // Throws CLI::ParseError and UsageError.
  Options parse(const std::vector<std::string>& arguments) {
    // CLI11 takes arguments from the back.
    app_.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
    options_.file = options_.files.front();
    if (options_.compare) {
      if (options_.promise) throw UsageError("--promise and --compare exclude each other");
      refuse("--compare", {keep_, epsilon_, risk_, probability_, select_, estimator_, fetch_});
    }
    if (options_.promise) {
      take_promise();
    } else {
      take_one_file();
    }
    if (!options_.compare && !options_.promise) take_rules();
    return std::move(options_);
  }

 private:
  void add_modes() {
    app_.add_option("FILE", options_.files, "Recorded cache, safetensors; several with --promise")
        ->type_name("")
        ->required();
    app_.add_flag("--compare", options_.compare, "The table of all methods at 8x, 16x, 32x");
    app_.add_flag("--by-layer", options_.by_layer,
                  "With --compare: also print the rows of single layers");
    app_.add_flag("--promise", options_.promise,
                  "The grid of promises: sketch, rate, eps and delta");
  }

  void add_method() {
    const Range open_unit{0, false, 1, false};
    keep_ =
        reader_.number("--keep", options_.keep, {0, false, 1, true}, "Share of tokens resident");
    epsilon_ =
        reader_.number("--epsilon", options_.epsilon, open_unit, "Certificate rule", "see Words");
    delta_ = reader_.number("--delta", options_.delta, open_unit, "Share of draws that may fail");
    risk_ = reader_.number("--risk", options_.risk, {0, false, kUnbounded, false}, "Risk rule",
                           "see Words");
    probability_ = reader_.number("--probability", options_.probability, open_unit,
                                  "Probability rule", "see Words");
    select_ = reader_.word<Selection>(
        "--select", options_.select,
        worded({Selection::poisson, Selection::spread, Selection::topk}), "Who stays resident");
    estimator_ = reader_.word<Estimator>("--estimator", options_.estimator,
                                         worded({Estimator::plain, Estimator::clusters}),
                                         "Who speaks for what is not fetched");
    fetch_ =
        reader_.word<FetchMode>("--fetch", options_.fetch,
                                worded({FetchMode::verified, FetchMode::never, FetchMode::always}),
                                "When tokens are fetched");
    reader_.add("--sketch", fmt::format("{}", fmt::join(kSketches, "|")),
                "Estimate of all logits; with --promise a list, a,b,...",
                fmt::format("{}; {}", options_.sketch, fmt::join(kPromiseSketches, ",")),
                [this](const std::string& text) { sketches_ = parse_sketches(text); });
    reader_.word<FetchOrder>("--order", options_.order,
                             worded({FetchOrder::exact, FetchOrder::worth}), "Order of fetching");
    reader_.number("--cap", options_.cap, {1, true, kUnbounded, false},
                   "Bound on the weight of drawn tokens", fmt::format("{:g}", *options_.cap));
    reader_.text("--importance", options_.importance, "NAME", "Score of the tokens",
                 "kvzip_mean; for top-k kvzip");
    reader_.word<Pool>("--pool", options_.pool, worded({Pool::head, Pool::layer, Pool::sequence}),
                       "Who shares a budget");
    reader_.integer("--sink", options_.sink, 0, 1'000'000'000, "First tokens, always resident");
    reader_.integer("--local", options_.local, 0, 1'000'000'000,
                    "Last prompt tokens, always resident");
  }

  void add_run() {
    reader_.integer("--seeds", options_.seeds, 1, 1000, "Draws followed through all steps");
    reader_.integer("--redraws", options_.redraws, 0, 100'000, "Draws at each of 4 fixed steps");
    reader_.add("--layers", "N,N,...", "Recorded layers to use", "all",
                [this](const std::string& text) { options_.layers = parse_layers(text); });
    reader_.integer("--steps", options_.steps, 1, 1'000'000'000, "Decode steps to replay", "all");
    reader_.integer("--threads", options_.threads, 1, 1024, "Threads; results do not depend on it",
                    "all");
    reader_.word<bool>("--simd", options_.vector_code, {{"auto", true}, {"scalar", false}},
                       "Kernels");
    reader_.word<BackendKind>("--backend", options_.backend,
                              {{"cpu", BackendKind::cpu}, {"cuda", BackendKind::cuda}},
                              "Where the cache computes");
    reader_.text("--json", options_.json, "OUT", "Write settings and rows, all layers, as JSON",
                 "");
  }

  static void refuse(const char* mode, std::initializer_list<const CLI::Option*> own) {
    for (const CLI::Option* option : own) {
      if (option->count() == 0) continue;
      throw UsageError(
          fmt::format("{} sets {} itself; give one or the other", mode, option->get_name()));
    }
  }

  void take_promise() {
    refuse("--promise", {keep_, epsilon_, delta_, risk_, probability_, select_, fetch_});
    if (options_.by_layer)
      throw UsageError("--by-layer is for --compare; the JSON of --promise has each layer");
    // Pooled rates would count it twice.
    for (auto file = options_.files.begin(); file != options_.files.end(); ++file) {
      if (std::find(options_.files.begin(), file, *file) != file)
        throw UsageError(fmt::format("'{}' is named twice", *file));
    }
    options_.sketches = std::move(sketches_);
    if (options_.sketches.empty())
      options_.sketches.assign(kPromiseSketches.begin(), kPromiseSketches.end());
  }

  void take_one_file() {
    if (options_.files.size() > 1) {
      throw UsageError(fmt::format("'{}' is one recording too many; only --promise takes several",
                                   options_.files[1]));
    }
    if (sketches_.size() > 1)
      throw UsageError("--sketch is a list, but only --promise takes several");
    if (!sketches_.empty()) options_.sketch = sketches_.front();
  }

  // Where no rule is named, those that suit the selection.
  void take_rules() {
    if (options_.fetch != FetchMode::verified) return;
    const bool named = epsilon_->count() + risk_->count() + probability_->count() > 0;
    if (!named && options_.select != Selection::topk) {
      options_.epsilon = FetchConfig{}.epsilon;
      options_.risk = FetchConfig{}.risk;
    } else if (!named) {
      options_.probability = 1e-3;
    }
    if (options_.keep < 1 && !(options_.epsilon || options_.risk || options_.probability)) {
      throw UsageError(
          "--fetch verified needs one of --epsilon, --risk, --probability that is not off");
    }
  }

  CLI::App app_;
  Reader reader_;
  Options options_;
  std::vector<std::string> sketches_;
  CLI::Option* keep_ = nullptr;
  CLI::Option* epsilon_ = nullptr;
  CLI::Option* delta_ = nullptr;
  CLI::Option* risk_ = nullptr;
  CLI::Option* probability_ = nullptr;
  CLI::Option* select_ = nullptr;
  CLI::Option* estimator_ = nullptr;
  CLI::Option* fetch_ = nullptr;
};

}  // namespace

Parsed parse_options(const std::vector<std::string>& arguments) {
  CommandLine line;
  Parsed parsed;
  try {
    parsed.options = line.parse(arguments);
  } catch (const CLI::CallForHelp&) {
    parsed.text = line.help();
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

}  // namespace verkv::replay
