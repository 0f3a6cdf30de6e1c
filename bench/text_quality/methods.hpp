// The ways of holding and fetching a prompt that an evaluation compares.
#ifndef VERKV_BENCH_TEXT_QUALITY_METHODS_HPP
#define VERKV_BENCH_TEXT_QUALITY_METHODS_HPP

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "importance.hpp"

#include <verkv/kv_cache_manager.hpp>

namespace verkv::lab {

// One way of holding and fetching the prompt.
struct Method {
  std::string name;  // as EvalRow::method
  CacheConfig config;
  Score score = Score::kvzip_mean;
  double exponent = 1;  // of the score
  // false: the engine itself answers.
  bool cached = true;
  // Draws differ.
  bool random = false;
  // Of every number of the prompt, all of which is resident; 0: as the engine has them.
  int bits = 0;
};

// How risk draws; the other methods draw by the defaults.
struct Drawing {
  double exponent = 1;                                     // of the importance
  double inclusion_floor = StudyConfig{}.inclusion_floor;  // share of keep
  double cap = *StudyConfig{}.cap;                         // 0: none
};

// What is compared: every method at every value of what it depends on.
struct MethodGrid {
  std::set<std::string> methods;  // names; empty: all
  std::vector<double> keeps{1.0 / 8, 1.0 / 16, 1.0 / 32};
  std::vector<double> epsilons{0.01, 0.05, 0.1, 0.3, 0.5};
  std::vector<double> risks{1e-2, 1e-3, 1e-4, 1e-5, 1e-6};
  std::vector<double> probabilities{1e-2, 1e-3, 1e-4};
  std::vector<SketchConfig> sketches{SketchConfig{}};
  std::vector<Estimator> estimators{StudyConfig{}.estimator};  // of the methods that draw and fetch
  std::vector<Score> sampling_scores{Score::kvzip_mean};       // of the methods that draw
  std::vector<Score> largest_scores{Score::kvzip};             // of top-k
  std::vector<int> bits{2, 3, 4};                              // of caches in few bits
  std::vector<Drawing> drawings{Drawing{}};                    // of risk
  bool gate = false;                                           // top-k at the scores of a gate, too
};

// Every combination that the grid asks for. Throws InvalidArgument, with the names there are, where
// a name in grid.methods is none, and where the grid asks for no method at all.
std::vector<Method> select_methods(const MethodGrid& grid, std::uint64_t seed, int threads);

// "2 bits", "exact"; empty for a method without a sketch.
std::string sketch_label(const CacheConfig& config);

}  // namespace verkv::lab

#endif  // VERKV_BENCH_TEXT_QUALITY_METHODS_HPP
