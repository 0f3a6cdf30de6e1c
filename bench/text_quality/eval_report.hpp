// The rows of an evaluation as JSON, which bench/tables.py and bench/pictures.py read, and as
// tables for a terminal.
#ifndef VERKV_BENCH_TEXT_QUALITY_EVAL_REPORT_HPP
#define VERKV_BENCH_TEXT_QUALITY_EVAL_REPORT_HPP

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "eval_row.hpp"

namespace verkv::lab {

struct EvalSettings {
  std::string command;
  std::string engine;
  std::string cache;
  std::string model_path;
  std::uint64_t seed = 0;
  std::int64_t steps = 0;
  std::int64_t layers_replaced = 0;  // of the model's layers
  std::int64_t layers = 0;
};

// {settings, rows}, in ASCII. Numbers that are not finite are null.
std::string json_report(const EvalSettings& settings, std::span<const EvalRow> rows);

// One table for each model, text or task, and context; columns without any number are left out.
std::string text_table(std::span<const EvalRow> rows);

// "top_k_fetch" is "top-k, fetch"; a method that is not known is its own label.
std::string method_label(const std::string& method);
// The rules that are on: "risk 1e-4", "risk 1e-4, eps 0.05", "p 1e-3"; empty if none.
std::string parameter_label(const EvalRow& row);
// "16x" for 0.0625, "keep 0.3" where 1 / keep is not a whole number, empty for none.
std::string rate_label(double keep);

}  // namespace verkv::lab

#endif  // VERKV_BENCH_TEXT_QUALITY_EVAL_REPORT_HPP
