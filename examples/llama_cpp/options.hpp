// The command line of verkv_llama.
#ifndef VERKV_EXAMPLES_LLAMA_CPP_OPTIONS_HPP
#define VERKV_EXAMPLES_LLAMA_CPP_OPTIONS_HPP

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "../common/backend.hpp"
#include "evaluate.hpp"

#include <verkv/error.hpp>

namespace verkv::llm {

enum class Command { self_test, generate, record, evaluate, chart, train_gate, unpack };

class UsageError : public Error {
 public:
  using Error::Error;
};

struct Options {
  Command command = Command::self_test;
  std::string model;
  std::int64_t engine_tokens = 0;  // context of the engine; 0: what the command needs
  int threads = 0;
  BackendKind backend = BackendKind::cpu;

  // generate, and the one method of it
  std::string prompt_file;
  std::string question;
  bool chat = false;
  std::int64_t new_tokens = 128;
  Method method;
  std::uint64_t draw = 0;

  // texts of record, train-gate and self-test
  std::string text_file;
  TextKind text_kind = TextKind::prose;
  std::string like;
  std::vector<std::int64_t> layers;
  std::vector<Score> scores;
  std::string out;

  EvalOptions evaluation;  // its context, steps, prompts and seed serve the other commands too
  std::string gate;
  std::string json;
  std::string svg;                  // names of pictures begin with it
  std::vector<std::string> inputs;  // of chart
};

struct Parsed {
  std::optional<Options> options;
  std::string text;  // help or error, where there are none
  int exit_code = 0;
};

Parsed parse_options(int argc, char** argv);

}  // namespace verkv::llm

#endif  // VERKV_EXAMPLES_LLAMA_CPP_OPTIONS_HPP
