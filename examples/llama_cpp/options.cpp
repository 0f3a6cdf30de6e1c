#include "options.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

namespace verkv::llm {

namespace {

constexpr int kExitUsage = 2;

SketchConfig parse_sketch(const std::string& text) {
  SketchConfig sketch;
  if (text == "exact") {
    sketch.kind = SketchKind::exact;
  } else if (text == "2" || text == "3" || text == "4") {
    sketch.bits = text[0] - '0';
  } else {
    throw UsageError(fmt::format("a sketch is 2, 3, 4 or exact, not {}", text));
  }
  return sketch;
}

double parse_number(const std::string& text, const char* what, double low, double high) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(value > low) ||
      !(value <= high)) {
    throw UsageError(
        fmt::format("{} is {}; it must be above {} and at most {}", what, text, low, high));
  }
  return value;
}

std::optional<double> parse_rule(const std::string& text, const char* what, double high) {
  if (text == "off") return std::nullopt;
  return parse_number(text, what, 0, high);
}

Score to_score(const std::string& text) {
  const std::optional<Score> score = parse_score(text);
  if (!score) {
    throw UsageError(fmt::format(
        "there is no score {}; there are kvzip, kvzip_mean, kvzip_rms, snapkv, h2o, key_norm, gate",
        text));
  }
  return *score;
}

TextKind to_text(const std::string& text) {
  const std::optional<TextKind> kind = parse_text_kind(text);
  if (!kind)
    throw UsageError(fmt::format("there is no text {}; there are prose, code, uuids", text));
  return *kind;
}

TaskKind to_task(const std::string& text) {
  const std::optional<TaskKind> kind = parse_task_kind(text);
  if (!kind) {
    throw UsageError(
        fmt::format("there is no task {}; there are single, mk1, mk3, mv, cwe, qa1", text));
  }
  return *kind;
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
  std::vector<std::string> sampling{"kvzip_mean"};
  std::vector<std::string> largest{"kvzip"};
  std::vector<std::string> methods;
  std::vector<std::string> scores{"kvzip", "kvzip_mean", "kvzip_rms", "h2o", "snapkv"};
  std::string text = "prose";
  std::string keep = "0.0625";
  std::string epsilon = "0.3";
  std::string risk = "1e-4";
  std::string probability = "off";
  std::string sketch = "2";
  std::string importance = "kvzip_mean";
  std::string select = "poisson";
  std::string backend = "cpu";
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
    self_test();
    generate();
    evaluate();
    chart();
    record();
    train_gate();
    unpack();
  }

  CLI::App& app() { return app_; }
  Command command() const {
    for (const auto& [app, command] : commands_) {
      if (app->parsed()) return command;
    }
    return Command::self_test;
  }

 private:
  CLI::App& begin(const char* name, const char* text, Command command) {
    CLI::App* sub = app_.add_subcommand(name, text);
    commands_.emplace_back(sub, command);
    return *sub;
  }

  static void list(CLI::App& sub, const char* flag, std::vector<std::string>& words,
                   const char* text) {
    sub.add_option(flag, words, text)->delimiter(',')->capture_default_str();
  }

  void engine(CLI::App& sub) {
    sub.add_option("--model", options_.model, "GGUF file")->required();
    sub.add_option("--engine-context", options_.engine_tokens,
                   "Tokens the engine has room for (default: what the command needs)")
        ->check(CLI::NonNegativeNumber);
    sub.add_option("--threads", options_.threads, "Threads of engine and cache (default: all)")
        ->check(CLI::Range(1, 1024));
  }

  void backend(CLI::App& sub) {
    sub.add_option("--backend", words_.backend, "Where the cache computes: cpu or cuda")
        ->check(CLI::IsMember({"cpu", "cuda"}))
        ->capture_default_str();
  }

  void context(CLI::App& sub, std::int64_t tokens, std::int64_t steps) {
    options_.evaluation.context_tokens = tokens;
    options_.evaluation.steps = steps;
    sub.add_option("--context", options_.evaluation.context_tokens,
                   fmt::format("Tokens of the prompt (default {})", tokens))
        ->check(CLI::Range(std::int64_t{64}, std::int64_t{1} << 24));
    sub.add_option("--steps", options_.evaluation.steps,
                   fmt::format("Decode steps (default {})", steps))
        ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20));
  }

  void self_test() {
    CLI::App& sub =
        begin("self-test", "Shows that the hook acts on this model", Command::self_test);
    engine(sub);
    backend(sub);
    sub.add_option("--context", self_test_context_, "Tokens of the prompt (default 1000)")
        ->check(CLI::Range(64, 1 << 20));
    sub.add_option("--steps", self_test_steps_, "Decode steps (default 64)")
        ->check(CLI::Range(1, 4096));
  }

  void generate() {
    CLI::App& sub =
        begin("generate", "Answers a prompt, dense and with the cache", Command::generate);
    engine(sub);
    backend(sub);
    sub.add_option("--prompt", options_.prompt_file, "File with the prompt")->required();
    sub.add_option("--ask", options_.question,
                   "Text that follows the prompt and is decoded through the cache");
    sub.add_flag("--chat", options_.chat, "In the form the model gives to a user's turn");
    sub.add_option("--tokens", options_.new_tokens, "New tokens at most")
        ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20))
        ->capture_default_str();
    sub.add_option("--keep", words_.keep, "Share of the tokens that stays resident")
        ->capture_default_str();
    sub.add_option("--epsilon", words_.epsilon, "Certificate rule, or off")->capture_default_str();
    sub.add_option("--risk", words_.risk, "Risk rule, or off")->capture_default_str();
    sub.add_option("--probability", words_.probability, "Probability rule of top-k, or off")
        ->capture_default_str();
    sub.add_option("--sketch", words_.sketch, "2, 3, 4 (bits) or exact")->capture_default_str();
    sub.add_option("--importance", words_.importance, "Score of the tokens")->capture_default_str();
    sub.add_option("--select", words_.select, "poisson or topk")
        ->check(CLI::IsMember({"poisson", "topk"}))
        ->capture_default_str();
    sub.add_option("--gate", options_.gate, "File of the gate, for --importance gate");
    sub.add_option("--seed", options_.draw, "Of the draw")->capture_default_str();
  }

  void evaluate() {
    CLI::App& sub =
        begin("eval", "KL, agreement, perplexity and task scores against dense", Command::evaluate);
    EvalOptions& options = options_.evaluation;
    engine(sub);
    backend(sub);
    context(sub, 4000, 256);
    list(sub, "--texts", words_.texts, "Generated texts: prose, code, uuids, or none");
    sub.add_option("--text", options.files, "File with a text of your own; may be repeated");
    list(sub, "--tasks", words_.tasks, "single, mk1, mk3, mv, cwe, qa1, or none");
    list(sub, "--methods", words_.methods, "Only these methods (default: all)");
    list(sub, "--keep", words_.keeps, "Shares that stay resident");
    list(sub, "--epsilon", words_.epsilons, "Of the paper's rule");
    list(sub, "--risk", words_.risks, "Of the risk rule");
    list(sub, "--probability", words_.probabilities, "Of top-k with fetch");
    list(sub, "--sketch", words_.sketches, "2, 3, 4 (bits), exact");
    list(sub, "--importance", words_.sampling, "Scores of the methods that draw");
    list(sub, "--importance-topk", words_.largest, "Scores of top-k");
    sub.add_option("--gate", options_.gate, "File of a gate: adds top-k at its scores");
    count(sub, "--prompts", options.prompts, "Prompts of each text");
    count(sub, "--instances", options.instances, "Instances of each task");
    count(sub, "--draws", options.draws, "Draws of each random method");
    sub.add_option("--seed", options.seed, "Of texts, tasks and draws")->capture_default_str();
    sub.add_option("--json", options_.json, "Write settings and rows");
    sub.add_option("--svg", options_.svg, "Draw PREFIX-kl.svg and PREFIX-rate.svg");
  }

  static void count(CLI::App& sub, const char* flag, std::int64_t& value, const char* text) {
    sub.add_option(flag, value, text)
        ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20))
        ->capture_default_str();
  }

  void chart() {
    CLI::App& sub =
        begin("chart", "Tables and pictures of JSON files that eval wrote", Command::chart);
    sub.add_option("files", options_.inputs, "JSON files")->required();
    sub.add_option("--svg", options_.svg, "Draw PREFIX-kl.svg and PREFIX-rate.svg");
  }

  void record() {
    CLI::App& sub =
        begin("record", "Writes a recorded cache (docs/recorded_cache.md)", Command::record);
    engine(sub);
    sub.add_option("--out", options_.out, "File to write");
    sub.add_option("--text", options_.text_file, "File with the text (default: generated)");
    sub.add_option("--kind", words_.text, "Generated text: prose, code, uuids")
        ->capture_default_str();
    sub.add_option("--seed", options_.evaluation.seed, "Of the generated text")
        ->capture_default_str();
    CLI::Option* like =
        sub.add_option("--like", options_.like,
                       "Make this recording again: its tokens, layers, steps and scores; compares "
                       "both");
    sub.add_option("--context", record_context_, "Tokens of the prompt (default 4000)")
        ->check(CLI::Range(64, 1 << 24));
    sub.add_option("--steps", record_steps_, "Decode steps (default 64)")
        ->check(CLI::Range(1, 1 << 20));
    sub.add_option("--layers", options_.layers, "Layers of the model (default: all)")
        ->delimiter(',');
    list(sub, "--importance", words_.scores, "Scores to record");
    for (const char* other :
         {"--text", "--kind", "--seed", "--context", "--steps", "--layers", "--importance"}) {
      like->excludes(other);
    }
  }

  void train_gate() {
    CLI::App& sub = begin("train-gate", "Fits a linear gate to KVzip's score", Command::train_gate);
    engine(sub);
    sub.add_option("--out", options_.out, "File to write")->required();
    sub.add_option("--context", gate_context_, "Tokens of each text (default 2000)")
        ->check(CLI::Range(64, 1 << 24));
    sub.add_option("--prompts", gate_prompts_, "Texts of each kind (default 6)")
        ->check(CLI::Range(2, 1 << 16));
    sub.add_option("--seed", gate_seed_, "Of the texts (default 1000)");
  }

  void unpack() {
    CLI::App& sub = begin("unpack",
                          "Copies a model with its weights as 32-bit floats, so that rounding of "
                          "activations does not hide what a cache does",
                          Command::unpack);
    sub.add_option("--model", options_.model, "GGUF file")->required();
    sub.add_option("--out", options_.out, "File to write")->required();
  }

 public:
  // Defaults that differ between commands that share a field.
  void settle(Options& options) const {
    EvalOptions& evaluation = options.evaluation;
    switch (options.command) {
      case Command::self_test:
        evaluation.context_tokens = self_test_context_;
        evaluation.steps = self_test_steps_;
        break;
      case Command::record:
        evaluation.context_tokens = record_context_;
        evaluation.steps = record_steps_;
        break;
      case Command::train_gate:
        evaluation.context_tokens = gate_context_;
        evaluation.prompts = gate_prompts_;
        evaluation.seed = gate_seed_;
        break;
      default:
        break;
    }
  }

 private:
  Options& options_;
  Words& words_;
  CLI::App app_{"verkv_llama: models of llama.cpp, unmodified, whose attention goes through VERKV"};
  std::vector<std::pair<CLI::App*, Command>> commands_;
  std::int64_t self_test_context_ = 1000;
  std::int64_t self_test_steps_ = 64;
  std::int64_t record_context_ = 4000;
  std::int64_t record_steps_ = 64;
  std::int64_t gate_context_ = 2000;
  std::int64_t gate_prompts_ = 6;
  std::uint64_t gate_seed_ = 1000;
};

void check(const Words& words, Options& options) {
  EvalOptions& evaluation = options.evaluation;
  convert(words.texts, evaluation.texts, to_text);
  convert(words.tasks, evaluation.tasks, to_task);
  convert(words.keeps, evaluation.keeps,
          [](const std::string& text) { return parse_number(text, "--keep", 0, 1); });
  convert(words.epsilons, evaluation.epsilons,
          [](const std::string& text) { return parse_number(text, "--epsilon", 0, 1); });
  convert(words.risks, evaluation.risks,
          [](const std::string& text) { return parse_number(text, "--risk", 0, 1e9); });
  convert(words.probabilities, evaluation.probabilities,
          [](const std::string& text) { return parse_number(text, "--probability", 0, 1); });
  convert(words.sketches, evaluation.sketches, parse_sketch);
  convert(words.sampling, evaluation.sampling_scores, to_score);
  convert(words.largest, evaluation.largest_scores, to_score);
  convert(words.scores, options.scores, to_score);
  evaluation.methods = {words.methods.begin(), words.methods.end()};
  evaluation.threads = options.threads;
  if (evaluation.largest_scores.empty()) throw UsageError("--importance-topk names no score");
  if (options.command == Command::evaluate && evaluation.texts.empty() &&
      evaluation.files.empty() && evaluation.tasks.empty()) {
    throw UsageError("there is nothing to evaluate: name --texts, --text or --tasks");
  }
  if (options.command == Command::evaluate) {
    std::vector<Score> scores = evaluation.sampling_scores;
    scores.insert(scores.end(), evaluation.largest_scores.begin(), evaluation.largest_scores.end());
    if (options.gate.empty() &&
        (std::find(scores.begin(), scores.end(), Score::gate) != scores.end() ||
         evaluation.methods.count("top_k_gate") > 0)) {
      throw UsageError("the score gate needs the file of a gate: --gate FILE");
    }
    std::set<std::string> names;
    for (const std::string& file : evaluation.files) {
      if (!names.insert(file.substr(file.rfind('/') + 1)).second) {
        throw UsageError(
            fmt::format("--text names two files {}", file.substr(file.rfind('/') + 1)));
      }
    }
  }
  options.text_kind = to_text(words.text);

  CacheConfig& config = options.method.config;
  config.keep = parse_number(words.keep, "--keep", 0, 1);
  config.fetch.epsilon = parse_rule(words.epsilon, "--epsilon", 1);
  config.fetch.risk = parse_rule(words.risk, "--risk", 1e9);
  config.study.probability = parse_rule(words.probability, "--probability", 1);
  config.sketch = parse_sketch(words.sketch);
  config.study.select = words.select == "topk" ? Selection::topk : Selection::poisson;
  evaluation.backend = options.backend =
      words.backend == "cuda" ? BackendKind::cuda : BackendKind::cpu;
  const std::string refusal = backend_refusal(options.backend, config);
  if (!refusal.empty()) throw UsageError("--backend cuda: " + refusal);
  const bool fetches = config.fetch.epsilon || config.fetch.risk || config.study.probability;
  if (!fetches) config.fetch.mode = FetchMode::never;
  if (options.threads > 0) config.threads = options.threads;
  options.method.score = to_score(words.importance);
  if (options.command == Command::generate && options.method.score == Score::gate &&
      options.gate.empty()) {
    throw UsageError("--importance gate needs the file of a gate: --gate FILE");
  }
  if (options.command == Command::record && options.out.empty() && options.like.empty()) {
    throw UsageError("record needs --out FILE, or --like FILE to compare only");
  }
  if (options.command == Command::record) {
    if (std::find(options.scores.begin(), options.scores.end(), Score::gate) !=
        options.scores.end()) {
      throw UsageError("record writes no gate scores");
    }
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
    options.command = reader.command();
    reader.settle(options);
    check(words, options);
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

}  // namespace verkv::llm
