// The sketches of the keys that sketch_study compares.
#ifndef VERKV_BENCH_SKETCH_CANDIDATES_HPP
#define VERKV_BENCH_SKETCH_CANDIDATES_HPP

#include <Eigen/Core>
#include <functional>
#include <string>
#include <vector>

#include <verkv/sample.hpp>

namespace verkv::lab {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Vector = std::vector<double>;
using Index = Eigen::Index;

// One KV head of a recording.
struct Head {
  Matrix keys;
  Matrix values;
  Matrix queries;  // [step * group + query head of the group][dim]
  Matrix prompt_queries;
  std::vector<float> importance;
  std::vector<float> odds;
  double scale = 1;
  int group = 1;
  DrawId draw;
};

struct Candidate {
  std::string name;
  // A coordinate of so many, scales and offsets included.
  std::function<double(int dim)> bits;
  // What the keys look like after the sketch.
  std::function<Matrix(const Head&)> sketch;
};

std::vector<Candidate> candidates();

}  // namespace verkv::lab

#endif  // VERKV_BENCH_SKETCH_CANDIDATES_HPP
