// verkv_llama: an unmodified llama.cpp decodes while every attention of the chosen layers goes
// through VERKV. Read hook.cpp for how it is attached, prompt.cpp for what is taken from the prompt
// and cache_decoder.cpp for what is called.
#include <cstdint>
#include <exception>
#include <new>
#include <string>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "../common/backend.hpp"
#include "../common/cache_options.hpp"
#include "../common/input_file.hpp"
#include "engine.hpp"
#include "generate.hpp"
#include "hook.hpp"
#include "self_test.hpp"

#include <verkv/config.hpp>

namespace {

using namespace verkv::llm;
using namespace verkv::examples;

constexpr int kExitFailure = 1;  // what was measured is not as it must be, or cannot be measured
constexpr int kExitUsage = 2;

// The words of the command line.
struct Options {
  std::string model;
  std::int64_t engine_tokens = 0;
  int threads = 0;
  std::string backend = "cpu";

  std::int64_t context_tokens = 1000;
  std::int64_t steps = 64;

  std::string prompt_file;
  std::string keep = "0.0625";
  std::string risk = "1e-4";
  std::string epsilon = "0.3";
  std::string sketch = "2";
  GenerateOptions generate;
};

void add_common(CLI::App& app, Options& options) {
  app.add_option("--model", options.model, "GGUF file")->required();
  app.add_option("--engine-context", options.engine_tokens,
                 "Tokens the engine has room for (default: what the command needs)")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--threads", options.threads, "Threads of engine and cache (default: all)")
      ->check(CLI::Range(1, 1024));
  app.add_option("--backend", options.backend, "Where the cache computes: cpu or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
}

void add_self_test(CLI::App& app, Options& options) {
  add_common(app, options);
  app.add_option("--context", options.context_tokens, "Tokens of the prompt")
      ->check(CLI::Range(64, 1 << 20))
      ->capture_default_str();
  app.add_option("--steps", options.steps, "Decode steps")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
}

void add_generate(CLI::App& app, Options& options) {
  GenerateOptions& generate = options.generate;
  add_common(app, options);
  app.add_option("--prompt", options.prompt_file, "File with the prompt")->required();
  app.add_option("--ask", generate.question,
                 "Text that follows the prompt and is decoded through the cache");
  app.add_flag("--chat", generate.chat, "In the form the model gives to a user's turn");
  app.add_option("--tokens", generate.tokens, "New tokens at most")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20))
      ->capture_default_str();
  app.add_option("--keep", options.keep, "Share of the tokens that stays resident")
      ->capture_default_str();
  app.add_option("--risk", options.risk, "Risk rule, or off")->capture_default_str();
  app.add_option("--epsilon", options.epsilon, "Certificate rule, or off")->capture_default_str();
  app.add_option("--sketch", options.sketch, "2, 3, 4 (bits) or exact")->capture_default_str();
  app.add_option("--seed", generate.draw, "Of the draw")->capture_default_str();
}

verkv::BackendKind backend_of(const Options& options, const verkv::CacheConfig& config) {
  const verkv::BackendKind kind =
      options.backend == "cuda" ? verkv::BackendKind::cuda : verkv::BackendKind::cpu;
  const std::string refusal = backend_refusal(kind, config);
  if (!refusal.empty()) throw UsageError("--backend cuda: " + refusal);
  return kind;
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

int run_self_test(const Options& options) {
  const verkv::BackendKind backend = backend_of(options, {});
  Engine engine = open(options, options.context_tokens + options.steps);
  const AttentionHook hook(engine);
  const bool passed =
      self_test(engine, hook, options.context_tokens, options.steps, options.threads, backend);
  return passed ? 0 : kExitFailure;
}

int run_generate(const Options& options) {
  GenerateOptions generation = options.generate;
  verkv::CacheConfig& config = generation.config;
  config.keep = parse_number(options.keep, "--keep", 0, 1);
  config.fetch.risk = parse_rule(options.risk, "--risk", 1e9);
  config.fetch.epsilon = parse_rule(options.epsilon, "--epsilon", 1);
  if (!config.fetch.risk && !config.fetch.epsilon) config.fetch.mode = verkv::FetchMode::never;
  config.sketch = parse_sketch(options.sketch);
  if (options.threads > 0) config.threads = options.threads;
  generation.backend = backend_of(options, config);
  generation.prompt = read_file(options.prompt_file);
  // The length of the prompt is known only when the model is there.
  std::int64_t tokens = generation.tokens;
  {
    const SplitPrompt split = split_prompt(open(options, 0), generation);
    tokens += static_cast<std::int64_t>(split.held.size() + split.question.size());
  }
  Engine engine = open(options, tokens);
  const AttentionHook hook(engine);
  generate(engine, hook, generation);
  return 0;
}

int run(int argc, char** argv) {
  const std::string version =
      fmt::format("verkv {}.{}.{}, {}", VERKV_VERSION_MAJOR, VERKV_VERSION_MINOR,
                  VERKV_VERSION_PATCH, Engine::version());
  Options options;
  CLI::App app("verkv_llama: models of llama.cpp, unmodified, whose attention goes through VERKV");
  app.require_subcommand(1);
  app.set_help_all_flag("--help-all", "Help of both commands");
  app.set_version_flag("--version", version);
  CLI::App* self_test = app.add_subcommand("self-test", "Shows that the hook acts on this model");
  add_self_test(*self_test, options);
  add_generate(*app.add_subcommand("generate", "Answers a prompt, dense and with the cache"),
               options);
  try {
    app.parse(argc, argv);
    return self_test->parsed() ? run_self_test(options) : run_generate(options);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    fmt::print(stderr, "verkv_llama: {} (see --help)\n", error.what());
  } catch (const UsageError& error) {
    fmt::print(stderr, "verkv_llama: {} (see --help)\n", error.what());
  }
  return kExitUsage;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "verkv_llama: not enough memory\n");
  } catch (const std::exception& error) {
    fmt::print(stderr, "verkv_llama: {}\n", error.what());
  }
  return kExitFailure;
}
