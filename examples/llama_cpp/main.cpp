// verkv_llama: an unmodified llama.cpp decodes while every attention of the chosen layers goes
// through VERKV. Read hook.cpp for how it is attached and cache_decoder.cpp for what it calls.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "../common/output_file.hpp"
#include "../common/progress.hpp"
#include "chart.hpp"
#include "engine.hpp"
#include "eval_report.hpp"
#include "evaluate.hpp"
#include "gate.hpp"
#include "generate.hpp"
#include "hook.hpp"
#include "options.hpp"
#include "record.hpp"
#include "self_test.hpp"

#include <verkv/config.hpp>
#include <verkv/recorded_cache.hpp>

namespace {

using namespace verkv::llm;
using verkv::examples::ProgressLine;

constexpr int kExitFailure = 1;  // what was measured is not as it must be, or cannot be measured
constexpr int kExitUsage = 2;

std::string read_file(const std::string& path) {
  if (!std::filesystem::is_regular_file(path))
    throw EngineError(fmt::format("{}: cannot be read", path));
  std::ifstream stream(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(stream)), {});
  if (!stream.is_open() || stream.bad()) throw EngineError(fmt::format("{}: cannot be read", path));
  return text;
}

// Room for `tokens`, or for what the model was trained for where that is less: the commands refuse
// what does not fit with both numbers. Exactly what the user says, where he does.
Engine open(const Options& options, std::int64_t tokens) {
  EngineOptions engine;
  engine.model_path = options.model;
  engine.threads = options.threads;
  engine.flexible = options.engine_tokens == 0;
  engine.context_tokens = engine.flexible ? tokens : options.engine_tokens;
  return Engine(engine);
}

std::int64_t layers_to_replace(const AttentionHook& hook) {
  return std::count_if(hook.layers().begin(), hook.layers().end(),
                       [](const AttentionLayer& layer) { return layer.window_tokens == 0; });
}

// What scoring a prompt and decoding after it take beyond the prompt.
std::int64_t room_for(std::int64_t prompt_tokens, std::int64_t steps) {
  return prompt_tokens +
         std::max<std::int64_t>(std::min<std::int64_t>(prompt_tokens, 2000) + 64, steps + 256);
}

std::vector<std::string> pictures(const std::string& prefix) {
  if (prefix.empty()) return {};
  return {prefix + "-kl.svg", prefix + "-rate.svg"};
}

// Nothing that is read may be written over, and no file be written twice. Throws before any work.
void check_outputs(std::vector<std::string> outputs, const std::vector<std::string>& inputs) {
  std::erase(outputs, std::string());
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    for (const std::string& input : inputs) {
      if (!input.empty()) verkv::examples::check_writable(outputs[i], input, "a file to read");
    }
    verkv::examples::check_writable(outputs[i]);
    for (std::size_t j = 0; j < i; ++j) {
      if (std::filesystem::weakly_canonical(outputs[i]) ==
          std::filesystem::weakly_canonical(outputs[j])) {
        throw EngineError(fmt::format("{} would be written twice", outputs[i]));
      }
    }
  }
}

void draw(const std::string& prefix, const std::vector<EvalRow>& rows) {
  if (prefix.empty()) return;
  verkv::examples::write_file(pictures(prefix)[0],
                              kl_against_moved_chart(rows, "What quality costs"));
  verkv::examples::write_file(pictures(prefix)[1],
                              quality_against_rate_chart(rows, "Tasks, relative to dense"));
}

int evaluate_command(const Options& options, const std::string& command) {
  const EvalOptions& wanted = options.evaluation;
  std::vector<std::string> outputs = pictures(options.svg);
  outputs.push_back(options.json);
  std::vector<std::string> inputs = wanted.files;
  inputs.insert(inputs.end(), {options.model, options.gate});
  check_outputs(std::move(outputs), inputs);
  (void)select_methods(wanted);  // refuses a wrong name before anything is loaded
  Engine engine = open(options, room_for(wanted.context_tokens, wanted.steps));
  const AttentionHook hook(engine);
  EvalOptions evaluation = wanted;
  Gate gate;
  if (!options.gate.empty()) {
    gate = Gate::load(options.gate, hook);
    evaluation.gate = &gate;
  }
  EvalSettings settings;
  settings.command = command;
  settings.engine = Engine::version();
  settings.cache =
      fmt::format("verkv {}.{}.{}", VERKV_VERSION_MAJOR, VERKV_VERSION_MINOR, VERKV_VERSION_PATCH);
  settings.model_path = options.model.substr(options.model.rfind('/') + 1);
  settings.seed = evaluation.seed;
  settings.steps = evaluation.steps;
  settings.layers_replaced = layers_to_replace(hook);
  settings.layers = engine.layers();
  constexpr std::int64_t whole = 1'000'000;
  std::vector<EvalRow> rows;
  {
    ProgressLine line(whole, "reading");
    rows = evaluate(
        engine, hook, evaluation,
        [&line](double share, const std::string& text) {
          line.update(static_cast<std::int64_t>(share * static_cast<double>(whole)), text);
        },
        [&](const std::vector<EvalRow>& so_far) {
          if (!options.json.empty()) {
            verkv::examples::write_file(options.json, json_report(settings, so_far));
          }
        });
  }
  fmt::print("{}", text_table(rows));
  draw(options.svg, rows);
  return 0;
}

int chart_command(const Options& options) {
  check_outputs(pictures(options.svg), options.inputs);
  std::vector<EvalRow> rows;
  for (const std::string& input : options.inputs) {
    const std::vector<EvalRow> more = read_rows(input);
    rows.insert(rows.end(), more.begin(), more.end());
  }
  fmt::print("{}", markdown_table(rows));
  draw(options.svg, rows);
  return 0;
}

int generate_command(const Options& options) {
  GenerateOptions generation;
  generation.prompt = read_file(options.prompt_file);
  generation.question = options.question;
  generation.chat = options.chat;
  generation.tokens = options.new_tokens;
  generation.method = options.method;
  generation.draw = options.draw;
  generation.backend = options.backend;
  // The length of the prompt is known only when the model is there.
  std::int64_t tokens = 0;
  {
    Engine small = open(options, 512);
    tokens = static_cast<std::int64_t>(
        small.tokenize(generation.prompt + generation.question, true).size());
  }
  Engine engine = open(options, room_for(tokens + 64, generation.tokens));
  const AttentionHook hook(engine);
  Gate gate;
  if (!options.gate.empty()) {
    gate = Gate::load(options.gate, hook);
    generation.gate = &gate;
  }
  generate(engine, hook, generation);
  return 0;
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

int record_command(const Options& options) {
  const std::int64_t context = options.evaluation.context_tokens;
  const std::int64_t steps = options.evaluation.steps;
  RecordOptions recording;
  recording.out = options.out;
  recording.layers = options.layers;
  recording.steps = steps;
  recording.scores = {options.scores.begin(), options.scores.end()};
  check_outputs({options.out}, {options.model, options.text_file, options.like});
  if (!options.like.empty()) {
    const verkv::RecordedCache like = verkv::RecordedCache::load(options.like);
    Engine engine = open(options, room_for(like.prompt_tokens(), like.steps()));
    const AttentionHook hook(engine);
    ProgressLine line(1'000'000);
    const LikeReport report = record_like(
        engine, hook, options.like, options.out, options.model.substr(options.model.rfind('/') + 1),
        [&line](std::int64_t done, std::int64_t total) {
          line.update(1'000'000 * done / std::max<std::int64_t>(1, total), "recording");
        });
    fmt::print("{}", like_table(report));
    return 0;
  }
  Engine engine = open(options, room_for(context, steps));
  const AttentionHook hook(engine);
  const bool generated = options.text_file.empty();
  recording.source = generated ? fmt::format("generated {}, seed {}", name(options.text_kind),
                                             options.evaluation.seed)
                               : options.text_file.substr(options.text_file.rfind('/') + 1);
  const std::string text = generated ? generate_text(options.text_kind, options.evaluation.seed,
                                                     static_cast<std::size_t>(context + steps) * 8)
                                     : read_file(options.text_file);
  const std::vector<Token> tokens = text_tokens(engine, text, context + steps, recording.source);
  const std::span<const Token> all(tokens);
  ProgressLine line(2 * context, "recording");
  record(engine, hook, all.first(static_cast<std::size_t>(context)),
         all.subspan(static_cast<std::size_t>(context)), recording,
         [&line](std::int64_t done, std::int64_t) { line.update(done, "recording"); });
  return 0;
}

int train_gate_command(const Options& options) {
  check_outputs({options.out}, {options.model});
  const EvalOptions& wanted = options.evaluation;
  Engine engine = open(options, room_for(wanted.context_tokens, 0));
  const AttentionHook hook(engine);
  std::vector<std::vector<Token>> texts;
  for (std::int64_t number = 0; number < wanted.prompts; ++number) {
    for (const TextKind kind : {TextKind::prose, TextKind::code, TextKind::uuids}) {
      texts.push_back(
          text_tokens(engine,
                      generate_text(kind, wanted.seed + static_cast<std::uint64_t>(number),
                                    static_cast<std::size_t>(wanted.context_tokens) * 8),
                      wanted.context_tokens, std::string(name(kind))));
    }
  }
  GateTraining training;
  {
    ProgressLine line(1'000'000, "training");
    training =
        train_gate(engine, hook, texts, Score::kvzip, options.out,
                   [&line](std::int64_t done, std::int64_t total) {
                     line.update(1'000'000 * done / std::max<std::int64_t>(1, total), "training");
                   });
  }
  fmt::print("{}: {} tokens; correlation with log kvzip {:.3f} on them, {:.3f} on texts held out\n",
             options.out, training.tokens, training.correlation_training,
             training.correlation_held_out);
  return 0;
}

int self_test_command(const Options& options) {
  const EvalOptions& wanted = options.evaluation;
  Engine engine = open(options, room_for(wanted.context_tokens, wanted.steps));
  const AttentionHook hook(engine);
  return self_test(engine, hook, wanted.context_tokens, wanted.steps, options.threads,
                   options.backend)
             ? 0
             : kExitFailure;
}

int run(const Options& options, const std::string& command) {
  switch (options.command) {
    case Command::self_test:
      return self_test_command(options);
    case Command::generate:
      return generate_command(options);
    case Command::record:
      return record_command(options);
    case Command::evaluate:
      return evaluate_command(options, command);
    case Command::chart:
      return chart_command(options);
    case Command::train_gate:
      return train_gate_command(options);
    case Command::unpack:
      check_outputs({options.out}, {options.model});
      unpack_model(options.model, options.out, options.threads);
      return 0;
  }
  return kExitUsage;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Parsed parsed = parse_options(argc, argv);
    if (!parsed.options) {
      if (parsed.exit_code == 0) {
        fmt::print("{}", parsed.text);
      } else {
        fmt::print(stderr, "verkv_llama: {}", parsed.text);
      }
      return parsed.exit_code;
    }
    std::string command = "verkv_llama";
    for (int i = 1; i < argc; ++i) command += std::string(" ") + argv[i];
    return run(*parsed.options, command);
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "verkv_llama: not enough memory\n");
  } catch (const std::exception& error) {
    fmt::print(stderr, "verkv_llama: {}\n", error.what());
  }
  return kExitFailure;
}
