// What the environment says: docs/llama_cpp.md has the table.
#ifndef VERKV_SRC_GGML_SETTINGS_HPP
#define VERKV_SRC_GGML_SETTINGS_HPP

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace verkv_ggml {

struct Settings {
  bool on = true;
  // Of CacheConfig.
  double keep = 0.0625;
  std::optional<double> risk = 1e-4;
  std::optional<double> epsilon = 0.3;
  // Sequences of more cells are compressed.
  std::int64_t from = 2048;
  // Compares residents with the engine's rows after every step.
  bool check = false;
  // Layers of the model, as ranges with both ends; empty: all.
  std::vector<std::pair<int, int>> layers;
  // File for a report in JSON lines; empty: none.
  std::string report;

  bool takes(int layer) const;
};

// The value of a variable, or null.
using Lookup = std::function<const char*(const char* name)>;

// Throws std::invalid_argument, whose text names the variable, its value and what it may be.
Settings read_settings(const Lookup& lookup);

}  // namespace verkv_ggml

#endif  // VERKV_SRC_GGML_SETTINGS_HPP
