// FetchConfig and StudyConfig as a step uses them: plain numbers, converted once.
#ifndef VERKV_SRC_FETCH_RULES_HPP
#define VERKV_SRC_FETCH_RULES_HPP

#include <cmath>
#include <cstdint>
#include <limits>

#include <verkv/certificate.hpp>
#include <verkv/fetch_plan.hpp>
#include <verkv/settings.hpp>
#include <verkv/types.hpp>

namespace verkv {

// What a FetchMode says. Code asks the flags: a new mode is a warning here and forgotten nowhere.
struct FetchFlags {
  bool fetches = true;   // at all
  bool by_rules = true;  // what the stop rules ask for; otherwise every token
};

constexpr FetchFlags flags_of(FetchMode mode) {
  switch (mode) {
    case FetchMode::verified:
      return {true, true};
    case FetchMode::never:
      return {false, false};
    case FetchMode::always:
      return {true, false};
  }
  detail::unreachable();
}

struct FetchRules : StopRules {
  FetchMode mode = FetchMode::verified;
  FetchOrder order = FetchOrder::worth;
  // On lambda of drawn tokens; infinity: none.
  float cap = std::numeric_limits<float>::infinity();
  // 0: no limit.
  std::int64_t limit_tokens = 0;

  // Whether a step searches for the threshold that the certificate asks for.
  bool searches() const { return flags_of(mode).by_rules && certifies(); }
};

inline FetchRules fetch_rules(const CacheConfig& config) {
  const FetchConfig& fetch = config.fetch;
  const StudyConfig& study = config.study;
  FetchRules rules;
  rules.epsilon = fetch.epsilon.value_or(StopRules::kNone);
  rules.log_term = log_two_over(fetch.delta);
  rules.risk = fetch.risk.value_or(StopRules::kNone);
  rules.probability = study.probability.value_or(StopRules::kNone);
  rules.mode = fetch.mode;
  rules.order = study.order;
  rules.cap = static_cast<float>(study.cap.value_or(StopRules::kNone));
  rules.limit_tokens = fetch.limit_tokens.value_or(0);
  return rules;
}

// The scale of a layer's logits.
inline float logit_scale(const LayerConfig& layer) {
  return static_cast<float>(
      layer.scale.value_or(1 / std::sqrt(static_cast<double>(layer.key_dim))));
}

}  // namespace verkv

#endif  // VERKV_SRC_FETCH_RULES_HPP
