// Configurations of the tests of the manager: a small one, and draws from all that there is.
#ifndef VERKV_TESTS_SUPPORT_CONFIGURATIONS_HPP
#define VERKV_TESTS_SUPPORT_CONFIGURATIONS_HPP

#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "reference/statistics.hpp"
#include "support/blocks.hpp"

namespace verkv::test {

using reference::Random;

inline const std::vector<std::optional<double>> kCaps{1, 2, std::nullopt};

template <class T>
std::string shown(const std::optional<T>& setting) {
  if (!setting) return "off";
  std::ostringstream text;
  text << *setting;
  return text.str();
}

std::vector<FetchOrder> orders();

std::vector<bool> vector_codes();

LayerConfig layer_of(std::int64_t kv_heads, std::int64_t group, std::int64_t key_dim,
                     std::int64_t value_dim);

// Of a layer of so many query heads, some above and some below its logits.
std::vector<float> random_sinks(Random& random, std::int64_t query_heads);

CacheConfig small_config();

template <class T>
T one_of(Random& random, const std::vector<T>& from) {
  return from[random.below(from.size())];
}

struct Drawn {
  CacheConfig config;
  std::int64_t tokens = 0;
  double logit_spread = 1;
  ScoreKind scores = ScoreKind::random;
  std::string text;
};

// A sample of the product of everything that the configuration offers.
Drawn random_setting(Random& random);

}  // namespace verkv::test

#endif  // VERKV_TESTS_SUPPORT_CONFIGURATIONS_HPP
