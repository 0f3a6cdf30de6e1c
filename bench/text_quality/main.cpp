// verkv_lab: what a cache does to the text of a model. docs/text_quality.md says what each command
// measures; the engine and the hook into its attention are those of examples/llama_cpp.
#include <algorithm>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "../../examples/common/input_file.hpp"
#include "../../examples/common/output_file.hpp"
#include "../../examples/common/progress.hpp"
#include "eval_report.hpp"
#include "evaluate.hpp"
#include "example.hpp"
#include "gate.hpp"
#include "options.hpp"
#include "record.hpp"
#include "record_like.hpp"
#include "unpack.hpp"

#include <verkv/config.hpp>
#include <verkv/recorded_cache.hpp>

namespace {

using namespace verkv::lab;
using verkv::examples::ProgressLine;

constexpr int kExitFailure = 1;
constexpr std::int64_t kWhole = 1'000'000;  // of a progress line that shows shares

// Room for `tokens`, or for what the model was trained for where that is less: the commands refuse
// what does not fit with both numbers. Exactly what the user says, where he does.
Engine open(const Options& options, std::int64_t tokens) {
  verkv::llm::EngineOptions engine;
  engine.model_path = options.model;
  engine.threads = options.threads;
  engine.flexible = options.engine_tokens == 0;
  engine.context_tokens = engine.flexible ? tokens : options.engine_tokens;
  return Engine(engine);
}

// What scoring a prompt and decoding after it take, with the prompt.
std::int64_t room_for(std::int64_t prompt_tokens, std::int64_t steps) {
  return prompt_tokens +
         std::max<std::int64_t>(std::min<std::int64_t>(prompt_tokens, 2000) + 64, steps + 256);
}

// Nothing that is read may be written over. Throws before any work.
void check_output(const std::string& output, const std::vector<std::string>& inputs) {
  if (output.empty()) return;
  for (const std::string& input : inputs) {
    if (!input.empty()) verkv::examples::check_writable(output, input, "a file to read");
  }
  verkv::examples::check_writable(output);
}

std::string file_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }

EvalSettings settings_of(const Options& options, const std::string& command, const Engine& engine,
                         const AttentionHook& hook) {
  EvalSettings settings;
  settings.command = command;
  settings.engine = Engine::version();
  settings.cache =
      fmt::format("verkv {}.{}.{}", VERKV_VERSION_MAJOR, VERKV_VERSION_MINOR, VERKV_VERSION_PATCH);
  settings.model_path = file_name(options.model);
  settings.seed = options.evaluation.seed;
  settings.steps = options.evaluation.steps;
  settings.layers_replaced =
      std::count_if(hook.layers().begin(), hook.layers().end(),
                    [](const AttentionLayer& layer) { return layer.window_tokens == 0; });
  settings.layers = engine.layers();
  return settings;
}

void run_evaluate(const Options& options, const std::string& command) {
  EvalOptions evaluation = options.evaluation;
  std::vector<std::string> inputs = evaluation.files;
  inputs.insert(inputs.end(), {options.model, options.gate});
  check_output(options.json, inputs);
  // Refuses a wrong name before anything is loaded.
  (void)select_methods(evaluation.grid, evaluation.seed, evaluation.threads);
  Engine engine = open(options, room_for(evaluation.context_tokens, evaluation.steps));
  const AttentionHook hook(engine);
  Gate gate;
  if (!options.gate.empty()) {
    gate = Gate::load(options.gate, hook);
    evaluation.gate = &gate;
  }
  const EvalSettings settings = settings_of(options, command, engine, hook);
  std::vector<EvalRow> rows;
  {
    ProgressLine line(kWhole, "reading");
    const auto progress = [&line](double share, const std::string& text) {
      line.update(static_cast<std::int64_t>(share * static_cast<double>(kWhole)), text);
    };
    const auto save = [&](const std::vector<EvalRow>& so_far) {
      if (options.json.empty()) return;
      verkv::examples::write_file(options.json, json_report(settings, so_far));
    };
    rows = evaluate(engine, hook, evaluation, progress, save);
  }
  fmt::print("{}", text_table(rows));
}

std::vector<Token> text_tokens(const Engine& engine, const std::string& text, std::int64_t tokens,
                               const std::string& what) {
  std::vector<Token> all = engine.tokenize(text, true);
  if (static_cast<std::int64_t>(all.size()) < tokens) {
    throw EngineError(fmt::format("{} has {} tokens; {} are needed", what, all.size(), tokens));
  }
  all.resize(static_cast<std::size_t>(tokens));
  return all;
}

// More bytes than any generated text takes for so many tokens.
std::size_t bytes_for(std::int64_t tokens) { return static_cast<std::size_t>(tokens) * 8; }

void run_record_like(const Options& options) {
  const verkv::RecordedCache like = verkv::RecordedCache::load(options.like);
  Engine engine = open(options, room_for(like.prompt_tokens(), like.steps()));
  const AttentionHook hook(engine);
  ProgressLine line(kWhole);
  const auto progress = [&line](std::int64_t done, std::int64_t total) {
    line.update(kWhole * done / std::max<std::int64_t>(1, total), "recording");
  };
  const LikeReport report =
      record_like(engine, hook, options.like, options.out, file_name(options.model), progress);
  fmt::print("{}", like_table(report));
}

void run_record(const Options& options) {
  check_output(options.out, {options.model, options.text_file, options.like});
  if (!options.like.empty()) return run_record_like(options);
  const std::int64_t context = options.evaluation.context_tokens;
  const std::int64_t steps = options.evaluation.steps;
  const std::uint64_t seed = options.evaluation.seed;
  RecordOptions recording;
  recording.out = options.out;
  recording.layers = options.layers;
  recording.steps = steps;
  recording.scores = {options.scores.begin(), options.scores.end()};
  const bool generated = options.text_file.empty();
  recording.source = generated ? fmt::format("generated {}, seed {}", name(options.text_kind), seed)
                               : file_name(options.text_file);
  Engine engine = open(options, room_for(context, steps));
  const AttentionHook hook(engine);
  const std::string text = generated
                               ? generate_text(options.text_kind, seed, bytes_for(context + steps))
                               : verkv::examples::read_file(options.text_file);
  const std::vector<Token> tokens = text_tokens(engine, text, context + steps, recording.source);
  const std::span<const Token> all(tokens);
  ProgressLine line(2 * context, "recording");
  record(engine, hook, all.first(static_cast<std::size_t>(context)),
         all.subspan(static_cast<std::size_t>(context)), recording,
         [&line](std::int64_t done, std::int64_t) { line.update(done, "recording"); });
}

void run_train_gate(const Options& options) {
  check_output(options.out, {options.model});
  const EvalOptions& wanted = options.evaluation;
  Engine engine = open(options, room_for(wanted.context_tokens, 0));
  const AttentionHook hook(engine);
  std::vector<std::vector<Token>> texts;
  for (std::int64_t number = 0; number < wanted.prompts; ++number) {
    const std::uint64_t seed = wanted.seed + static_cast<std::uint64_t>(number);
    for (const TextKind kind : {TextKind::prose, TextKind::code, TextKind::uuids}) {
      texts.push_back(text_tokens(engine,
                                  generate_text(kind, seed, bytes_for(wanted.context_tokens)),
                                  wanted.context_tokens, std::string(name(kind))));
    }
  }
  GateTraining training;
  {
    ProgressLine line(kWhole, "training");
    const auto progress = [&line](std::int64_t done, std::int64_t total) {
      line.update(kWhole * done / std::max<std::int64_t>(1, total), "training");
    };
    training = train_gate(engine, hook, texts, Score::kvzip, options.out, progress);
  }
  fmt::print("{}: {} tokens; correlation with log kvzip {:.3f} on them, {:.3f} on texts held out\n",
             options.out, training.tokens, training.correlation_training,
             training.correlation_held_out);
}

void run_show(const Options& options) {
  const auto bytes = static_cast<std::size_t>(options.bytes);
  const std::uint64_t seed = options.evaluation.seed;
  if (const std::optional<TextKind> kind = parse_text_kind(options.kind)) {
    fmt::print("{}", generate_text(*kind, seed, bytes));
    return;
  }
  const std::optional<TaskKind> kind = parse_task_kind(options.kind);
  if (!kind) {
    throw verkv::InvalidArgument(fmt::format("there is no text and no task {}", options.kind));
  }
  const Task task = generate_task(*kind, seed, bytes);
  fmt::print("{}{}\n\nAnswers:", task.context, task.question);
  for (const std::string& answer : task.answers) fmt::print(" {}", answer);
  fmt::print("\n");
}

void run(const Options& options, const std::string& command) {
  switch (options.command) {
    case Command::evaluate:
      return run_evaluate(options, command);
    case Command::record:
      return run_record(options);
    case Command::train_gate:
      return run_train_gate(options);
    case Command::unpack:
      check_output(options.out, {options.model});
      return unpack_model(options.model, options.out, options.threads);
    case Command::show:
      return run_show(options);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Parsed parsed = parse_options(argc, argv);
    if (!parsed.options) {
      if (parsed.exit_code == 0) {
        fmt::print("{}", parsed.text);
      } else {
        fmt::print(stderr, "verkv_lab: {}", parsed.text);
      }
      return parsed.exit_code;
    }
    std::string command = "verkv_lab";
    for (int i = 1; i < argc; ++i) command += std::string(" ") + argv[i];
    run(*parsed.options, command);
    return 0;
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "verkv_lab: not enough memory\n");
  } catch (const std::exception& error) {
    fmt::print(stderr, "verkv_lab: {}\n", error.what());
  }
  return kExitFailure;
}
