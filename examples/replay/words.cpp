// The words of the command line and of the JSON, and the labels of tables.
#include <cmath>

#include <fmt/format.h>

#include "options.hpp"

namespace verkv::replay {

const char* name(Promise promise) {
  switch (promise) {
    case Promise::none:
      return "none";
    case Promise::epsilon:
      return "epsilon";
    case Promise::certificate:
      return "certificate";
  }
  return "?";
}

std::string word(const SketchConfig& sketch) {
  return has_codes(sketch.kind) ? fmt::format("{}", sketch.bits) : "exact";
}

std::string sketch_label(const SketchConfig& sketch) {
  if (!has_codes(sketch.kind)) return "exact sketch";
  return fmt::format("{}-bit sketch", sketch.bits);
}

std::string rate_label(double keep) {
  const double rate = 1 / keep;
  return std::fabs(rate - std::round(rate)) < 1e-9 * rate ? fmt::format("{:.0f}x", rate)
                                                          : fmt::format("keep {:.4g}", keep);
}

std::string price_label(double price) {
  int exponent = static_cast<int>(std::floor(std::log10(price)));
  double mantissa = price / std::pow(10.0, exponent);
  if (mantissa > 9.9995) {
    mantissa = 1;
    ++exponent;
  }
  return fmt::format("{:.4g}e{}", mantissa, exponent);
}

}  // namespace verkv::replay
