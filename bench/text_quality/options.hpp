// The command line of verkv_lab.
#ifndef VERKV_BENCH_TEXT_QUALITY_OPTIONS_HPP
#define VERKV_BENCH_TEXT_QUALITY_OPTIONS_HPP

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "evaluate.hpp"

namespace verkv::lab {

enum class Command { evaluate, record, train_gate, unpack, show };

struct Options {
  Command command = Command::evaluate;
  std::string model;
  // Context of the engine; 0: what the command needs.
  std::int64_t engine_tokens = 0;
  int threads = 0;

  // The context, steps, prompts and seed of the evaluation serve the other commands too.
  EvalOptions evaluation;
  std::string gate;
  std::string json;

  // record
  std::string text_file;
  TextKind text_kind = TextKind::prose;
  std::string like;
  std::vector<std::int64_t> layers;
  std::vector<Score> scores;

  // record, train-gate and unpack
  std::string out;

  // show: a text or a task
  std::string kind;
  std::int64_t bytes = 4000;
};

struct Parsed {
  std::optional<Options> options;
  std::string text;  // help or error, where there are none
  int exit_code = 0;
};

Parsed parse_options(int argc, char** argv);

}  // namespace verkv::lab

#endif  // VERKV_BENCH_TEXT_QUALITY_OPTIONS_HPP
