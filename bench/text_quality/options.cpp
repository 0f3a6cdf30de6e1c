#include "options.hpp"

#include <algorithm>
#include <memory>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "../../examples/common/cache_options.hpp"

#include <verkv/config.hpp>

namespace verkv::lab {

namespace {

using examples::parse_number;
using examples::UsageError;

constexpr int kExitUsage = 2;

// What `parse` finds, or a UsageError that names the kinds there are.
template <class Parse>
auto named(const std::string& text, const char* what, const char* all, Parse&& parse) {
  const auto found = parse(text);
  if (!found) throw UsageError(fmt::format("there is no {} {}; there are {}", what, text, all));
  return *found;
}

Score to_score(const std::string& text) {
  return named(text, "score", "kvzip, kvzip_mean, kvzip_rms, snapkv, h2o, key_norm, gate",
               parse_score);
}

TextKind to_text(const std::string& text) {
  return named(text, "text", "prose, code, uuids", parse_text_kind);
}

TaskKind to_task(const std::string& text) {
  return named(text, "task", "single, mk1, mk3, mv, cwe, qa1", parse_task_kind);
}

// "none" is the empty list; what is named twice counts once.
template <class T, class Convert>
void convert(const std::vector<std::string>& words, std::vector<T>& values, Convert&& one) {
  values.clear();
  std::set<std::string> seen;
  for (const std::string& word : words) {
    if (word != "none" && seen.insert(word).second) values.push_back(one(word));
  }
}

// The words of a command line, before they are checked.
struct Words {
  std::vector<std::string> texts{"prose", "code", "uuids"};
  std::vector<std::string> tasks{"none"};
  std::vector<std::string> keeps{"0.125", "0.0625", "0.03125"};
  std::vector<std::string> epsilons{"0.01", "0.05", "0.1", "0.3", "0.5"};
  std::vector<std::string> risks{"1e-2", "1e-3", "1e-4", "1e-5", "1e-6"};
  std::vector<std::string> probabilities{"1e-2", "1e-3", "1e-4"};
  std::vector<std::string> sketches{"2"};
  std::vector<std::string> estimators{"clusters"};
  std::vector<std::string> exponents{"1"};
  std::vector<std::string> floors{"none"};
  std::vector<std::string> caps{"2"};
  std::vector<std::string> sampling{"kvzip_mean"};
  std::vector<std::string> largest{"kvzip"};
  std::vector<std::string> methods;
  std::vector<std::string> scores{"kvzip", "kvzip_mean", "kvzip_rms", "h2o", "snapkv"};
  std::string text = "prose";
  std::string backend = "cpu";
};

// Sizes whose defaults differ between the commands.
struct Sizes {
  std::int64_t context_tokens = 0;
  std::int64_t steps = 0;
  std::int64_t prompts = 1;
  std::uint64_t seed = 0;
};

std::string version_text() {
  return fmt::format("verkv {}.{}.{}, {}", VERKV_VERSION_MAJOR, VERKV_VERSION_MINOR,
                     VERKV_VERSION_PATCH, Engine::version());
}

class Reader {
 public:
  Reader(Options& options, Words& words) : options_(options), words_(words) {
    app_.require_subcommand(1);
    app_.set_help_all_flag("--help-all", "Help of all commands");
    app_.set_version_flag("--version", version_text());
    add_evaluate();
    add_record();
    add_train_gate();
    add_unpack();
    add_show();
  }

  CLI::App& app() { return app_; }

  // After parsing: the command and its sizes.
  void settle(Options& options) const {
    for (const auto& [app, command, sizes] : commands_) {
      if (!app->parsed()) continue;
      options.command = command;
      options.evaluation.context_tokens = sizes->context_tokens;
      options.evaluation.steps = sizes->steps;
      options.evaluation.prompts = sizes->prompts;
      options.evaluation.seed = sizes->seed;
    }
  }

 private:
  struct Entry {
    CLI::App* app;
    Command command;
    std::unique_ptr<Sizes> sizes;
  };

  std::pair<CLI::App&, Sizes&> begin(const char* name, const char* text, Command command,
                                     const Sizes& sizes) {
    CLI::App* app = app_.add_subcommand(name, text);
    commands_.push_back({app, command, std::make_unique<Sizes>(sizes)});
    return {*app, *commands_.back().sizes};
  }

  static void list(CLI::App& app, const char* flag, std::vector<std::string>& words,
                   const char* text) {
    app.add_option(flag, words, text)->delimiter(',')->capture_default_str();
  }

  static void count(CLI::App& app, const char* flag, std::int64_t& value, std::int64_t least,
                    const char* text) {
    app.add_option(flag, value, text)
        ->check(CLI::Range(least, std::int64_t{1} << 24))
        ->capture_default_str();
  }

  void engine(CLI::App& app) {
    app.add_option("--model", options_.model, "GGUF file")->required();
    app.add_option("--engine-context", options_.engine_tokens,
                   "Tokens the engine has room for (default: what the command needs)")
        ->check(CLI::NonNegativeNumber);
    app.add_option("--threads", options_.threads, "Threads of engine and cache (default: all)")
        ->check(CLI::Range(1, 1024));
  }

  void add_evaluate() {
    auto [app, sizes] = begin("eval", "KL, agreement, perplexity and task scores against dense",
                              Command::evaluate, {4000, 256, 1, 0});
    EvalOptions& options = options_.evaluation;
    engine(app);
    app.add_option("--backend", words_.backend, "Where the cache computes: cpu or cuda")
        ->check(CLI::IsMember({"cpu", "cuda"}))
        ->capture_default_str();
    count(app, "--context", sizes.context_tokens, 64, "Tokens of the prompt");
    count(app, "--steps", sizes.steps, 1, "Decode steps");
    list(app, "--texts", words_.texts, "Generated texts: prose, code, uuids, or none");
    app.add_option("--text", options.files, "File with a text of your own; may be repeated");
    list(app, "--tasks", words_.tasks, "single, mk1, mk3, mv, cwe, qa1, or none");
    list(app, "--methods", words_.methods, "Only these methods (default: all)");
    list(app, "--keep", words_.keeps, "Shares that stay resident");
    list(app, "--epsilon", words_.epsilons, "Of the paper's rule");
    list(app, "--risk", words_.risks, "Of the risk rule");
    list(app, "--probability", words_.probabilities, "Of top-k with fetch");
    list(app, "--sketch", words_.sketches, "2, 3, 4 (bits), exact");
    list(app, "--estimator", words_.estimators,
         "plain, clusters: of the methods that draw and fetch");
    list(app, "--exponent", words_.exponents,
         "risk: also with inclusion by these powers of the importance");
    list(app, "--floor", words_.floors,
         "risk: also with these least inclusion probabilities, shares of --keep, or none");
    list(app, "--cap", words_.caps,
         "risk: also with these bounds on the coefficient of a drawn token by its exact weight, "
         "or none");
    list(app, "--importance", words_.sampling, "Scores of the methods that draw");
    list(app, "--importance-topk", words_.largest, "Scores of top-k");
    app.add_option("--gate", options_.gate, "File of a gate: adds top-k at its scores");
    count(app, "--prompts", sizes.prompts, 1, "Prompts of each text");
    count(app, "--instances", options.instances, 1, "Instances of each task");
    count(app, "--draws", options.draws, 1, "Draws of each random method");
    app.add_option("--seed", sizes.seed, "Of texts, tasks and draws")->capture_default_str();
    app.add_option("--json", options_.json, "Write settings and rows");
  }

  void add_record() {
    auto [app, sizes] = begin("record", "Writes a recorded cache (docs/recorded_cache.md)",
                              Command::record, {4000, 64, 1, 0});
    engine(app);
    app.add_option("--out", options_.out, "File to write");
    app.add_option("--text", options_.text_file, "File with the text (default: generated)");
    app.add_option("--kind", words_.text, "Generated text: prose, code, uuids")
        ->capture_default_str();
    app.add_option("--seed", sizes.seed, "Of the generated text")->capture_default_str();
    CLI::Option* like = app.add_option(
        "--like", options_.like,
        "Make this recording again: its tokens, layers, steps and scores; compares both");
    count(app, "--context", sizes.context_tokens, 64, "Tokens of the prompt");
    count(app, "--steps", sizes.steps, 1, "Decode steps");
    app.add_option("--layers", options_.layers, "Layers of the model (default: all)")
        ->delimiter(',');
    list(app, "--importance", words_.scores, "Scores to record");
    for (const char* other :
         {"--text", "--kind", "--seed", "--context", "--steps", "--layers", "--importance"}) {
      like->excludes(other);
    }
  }

  void add_train_gate() {
    auto [app, sizes] = begin("train-gate", "Fits a linear gate to KVzip's score",
                              Command::train_gate, {2000, 0, 6, 1000});
    engine(app);
    app.add_option("--out", options_.out, "File to write")->required();
    count(app, "--context", sizes.context_tokens, 64, "Tokens of each text");
    count(app, "--prompts", sizes.prompts, 2, "Texts of each kind");
    app.add_option("--seed", sizes.seed, "Of the texts")->capture_default_str();
  }

  void add_unpack() {
    auto [app, sizes] = begin("unpack",
                              "Copies a model with its weights as 32-bit floats, so that rounding "
                              "of activations does not hide what a cache does",
                              Command::unpack, {});
    app.add_option("--model", options_.model, "GGUF file")->required();
    app.add_option("--out", options_.out, "File to write")->required();
  }

  void add_show() {
    auto [app, sizes] = begin("show", "Prints a generated text or task", Command::show, {});
    app.add_option("kind", options_.kind, "prose, code, uuids, or a task: single, mk1, ...")
        ->required();
    app.add_option("--seed", sizes.seed, "Of the text")->capture_default_str();
    count(app, "--bytes", options_.bytes, 1, "Length of the text, about");
  }

  Options& options_;
  Words& words_;
  CLI::App app_{"verkv_lab: what a cache does to the text of a model, measured"};
  std::vector<Entry> commands_;
};

// The defaults, and each of the values with the defaults of all else.
std::vector<Drawing> drawings(const Words& words) {
  std::vector<Drawing> result{Drawing{}};
  const auto vary = [&result](const std::vector<std::string>& values, double Drawing::*member,
                              const char* what, double high) {
    for (const std::string& word : values) {
      Drawing drawing;
      drawing.*member = word == "none" ? 0 : parse_number(word, what, 0, high);
      if (drawing.*member != Drawing{}.*member) result.push_back(drawing);
    }
  };
  vary(words.exponents, &Drawing::exponent, "--exponent", 8);
  vary(words.floors, &Drawing::inclusion_floor, "--floor", 1);
  vary(words.caps, &Drawing::cap, "--cap", 1e9);
  return result;
}

void check_evaluation(const Words& words, Options& options) {
  EvalOptions& evaluation = options.evaluation;
  MethodGrid& grid = evaluation.grid;
  convert(words.texts, evaluation.texts, to_text);
  convert(words.tasks, evaluation.tasks, to_task);
  const auto numbers = [](const char* what, double high) {
    return [what, high](const std::string& text) { return parse_number(text, what, 0, high); };
  };
  convert(words.keeps, grid.keeps, numbers("--keep", 1));
  convert(words.epsilons, grid.epsilons, numbers("--epsilon", 1));
  convert(words.risks, grid.risks, numbers("--risk", 1e9));
  convert(words.probabilities, grid.probabilities, numbers("--probability", 1));
  convert(words.sketches, grid.sketches, examples::parse_sketch);
  convert(words.estimators, grid.estimators, examples::parse_estimator);
  convert(words.sampling, grid.sampling_scores, to_score);
  convert(words.largest, grid.largest_scores, to_score);
  grid.drawings = drawings(words);
  grid.methods = {words.methods.begin(), words.methods.end()};
  grid.gate = !options.gate.empty();
  evaluation.threads = options.threads;
  evaluation.backend = words.backend == "cuda" ? BackendKind::cuda : BackendKind::cpu;
  const std::string refusal = backend_refusal(evaluation.backend, {});
  if (!refusal.empty()) throw UsageError("--backend cuda: " + refusal);

  if (grid.largest_scores.empty()) throw UsageError("--importance-topk names no score");
  if (evaluation.texts.empty() && evaluation.files.empty() && evaluation.tasks.empty()) {
    throw UsageError("there is nothing to evaluate: name --texts, --text or --tasks");
  }
  std::vector<Score> scores = grid.sampling_scores;
  scores.insert(scores.end(), grid.largest_scores.begin(), grid.largest_scores.end());
  const bool gate = std::find(scores.begin(), scores.end(), Score::gate) != scores.end();
  if (options.gate.empty() && (gate || grid.methods.count("top_k_gate") > 0)) {
    throw UsageError("the score gate needs the file of a gate: --gate FILE");
  }
  std::set<std::string> names;
  for (const std::string& file : evaluation.files) {
    const std::string name = file.substr(file.rfind('/') + 1);
    if (!names.insert(name).second) {
      throw UsageError(fmt::format("--text names two files {}", name));
    }
  }
}

void check_record(const Words& words, Options& options) {
  options.text_kind = to_text(words.text);
  convert(words.scores, options.scores, to_score);
  if (options.out.empty() && options.like.empty()) {
    throw UsageError("record needs --out FILE, or --like FILE to compare only");
  }
  if (std::find(options.scores.begin(), options.scores.end(), Score::gate) !=
      options.scores.end()) {
    throw UsageError("record writes no gate scores");
  }
}

}  // namespace

Parsed parse_options(int argc, char** argv) {
  Options options;
  Words words;
  Reader reader(options, words);
  Parsed parsed;
  try {
    reader.app().parse(argc, argv);
    reader.settle(options);
    if (options.command == Command::evaluate) check_evaluation(words, options);
    if (options.command == Command::record) check_record(words, options);
    parsed.options = std::move(options);
  } catch (const CLI::CallForHelp&) {
    parsed.text = reader.app().help();
  } catch (const CLI::CallForAllHelp&) {
    parsed.text = reader.app().help("", CLI::AppFormatMode::All);
  } catch (const CLI::CallForVersion&) {
    parsed.text = version_text() + "\n";
  } catch (const CLI::ParseError& error) {
    parsed.exit_code = kExitUsage;
    parsed.text = fmt::format("{} (see --help)\n", error.what());
  } catch (const UsageError& error) {
    parsed.exit_code = kExitUsage;
    parsed.text = fmt::format("{} (see --help)\n", error.what());
  }
  return parsed;
}

}  // namespace verkv::lab
