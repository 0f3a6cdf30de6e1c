#include "methods.hpp"

#include <algorithm>
#include <array>
#include <string_view>

#include <fmt/format.h>

#include <verkv/error.hpp>

namespace verkv::lab {

namespace {

constexpr std::array<std::string_view, 12> kMethods{
    "dense", "dense_offload",    "few_bits", "full_budget",    "paper",       "poisson",
    "risk",  "risk_and_epsilon", "top_k",    "top_k_clusters", "top_k_fetch", "top_k_gate"};

// Collects the methods of a grid that were asked for.
class Selector {
 public:
  Selector(const MethodGrid& grid, std::uint64_t seed, int threads) : grid_(grid) {
    base_.seed = seed;
    if (threads > 0) base_.threads = threads;
    base_.fetch.epsilon.reset();
    base_.fetch.risk.reset();
  }

  std::vector<Method> select() {
    for (const char* method : {"dense", "dense_offload"}) {
      if (wanted(method)) methods_.push_back({method, base_, Score::kvzip_mean, 1, false, false});
    }
    CacheConfig full = largest_only(1);
    add("full_budget", full, grid_.largest_scores.front());
    for (const int bits : grid_.bits) {
      if (!wanted("few_bits")) continue;
      methods_.push_back({"few_bits", full, grid_.largest_scores.front(), 1, true, false, bits});
    }
    for (const double keep : grid_.keeps) add_rate(keep);
    return std::move(methods_);
  }

 private:
  bool wanted(const std::string& method) const {
    return grid_.methods.empty() || grid_.methods.count(method) > 0;
  }

  void add(const std::string& method, const CacheConfig& config, Score score) {
    if (!wanted(method)) return;
    const bool random = config.study.select != Selection::topk;
    methods_.push_back({method, config, score, 1, true, random});
  }

  // The most important tokens, and nothing is fetched.
  CacheConfig largest_only(double keep) const {
    CacheConfig config = base_;
    config.keep = keep;
    config.study.select = Selection::topk;
    config.study.estimator = Estimator::plain;
    config.fetch.mode = FetchMode::never;
    return config;
  }

  void add_rate(double keep) {
    for (const Score score : grid_.largest_scores) add("top_k", largest_only(keep), score);
    if (grid_.gate) add("top_k_gate", largest_only(keep), Score::gate);
    for (const SketchConfig& sketch : grid_.sketches) {
      for (const Score score : grid_.largest_scores) add_largest(keep, sketch, score);
      for (const Score score : grid_.sampling_scores) {
        add_poisson(keep, sketch, score);
        for (const Estimator estimator : grid_.estimators)
          add_sampling(keep, sketch, score, estimator);
      }
    }
  }

  void add_largest(double keep, const SketchConfig& sketch, Score score) {
    for (const double probability : grid_.probabilities) {
      CacheConfig config = largest_only(keep);
      config.sketch = sketch;
      config.fetch.mode = FetchMode::verified;
      config.study.probability = probability;
      add("top_k_fetch", config, score);
      config.study.estimator = Estimator::clusters;
      add("top_k_clusters", config, score);
    }
  }

  void add_poisson(double keep, const SketchConfig& sketch, Score score) {
    CacheConfig config = base_;
    config.keep = keep;
    config.sketch = sketch;
    config.fetch.mode = FetchMode::never;
    config.study.select = Selection::poisson;
    config.study.estimator = Estimator::plain;
    add("poisson", config, score);
  }

  void add_sampling(double keep, const SketchConfig& sketch, Score score, Estimator estimator) {
    CacheConfig config = base_;
    config.keep = keep;
    config.sketch = sketch;
    config.study.estimator = estimator;
    for (const double epsilon : grid_.epsilons) {
      config.fetch.epsilon = epsilon;
      add("paper", config, score);
    }
    config.fetch.epsilon.reset();
    for (const double risk : grid_.risks) {
      for (const Drawing& drawing : grid_.drawings) add_risk(config, risk, score, drawing);
    }
    config.fetch.epsilon = FetchConfig{}.epsilon;
    config.fetch.risk = FetchConfig{}.risk;
    add("risk_and_epsilon", config, score);
  }

  void add_risk(CacheConfig config, double risk, Score score, const Drawing& drawing) {
    config.fetch.risk = risk;
    config.study.inclusion_floor = drawing.inclusion_floor * config.keep;
    config.study.cap.reset();
    if (drawing.cap > 0) config.study.cap = drawing.cap;
    const std::size_t before = methods_.size();
    add("risk", config, score);
    if (methods_.size() > before) methods_.back().exponent = drawing.exponent;
  }

  const MethodGrid& grid_;
  CacheConfig base_;
  std::vector<Method> methods_;
};

}  // namespace

std::vector<Method> select_methods(const MethodGrid& grid, std::uint64_t seed, int threads) {
  for (const std::string& method : grid.methods) {
    if (std::find(kMethods.begin(), kMethods.end(), method) == kMethods.end()) {
      throw InvalidArgument(
          fmt::format("there is no method {}; there are {}", method, fmt::join(kMethods, ", ")));
    }
  }
  std::vector<Method> methods = Selector(grid, seed, threads).select();
  if (methods.empty()) {
    throw InvalidArgument("no method is left to evaluate: it needs a score, a gate or a parameter");
  }
  return methods;
}

std::string sketch_label(const CacheConfig& config) {
  const bool used = config.keep < 1 && (config.fetch.mode == FetchMode::verified ||
                                        config.study.select != Selection::topk);
  if (!used) return {};
  if (!has_codes(config.sketch.kind)) return "exact";
  return fmt::format("{} bits", config.sketch.bits);
}

}  // namespace verkv::lab
