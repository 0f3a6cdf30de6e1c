// A rule that may be off is no number until somebody has asked.
// Expected: cannot convert|no viable conversion
#include <verkv/verkv.hpp>

void use(const verkv::CacheConfig& config) {
#ifdef VERKV_MISUSE
  const double epsilon = config.fetch.epsilon;
  static_cast<void>(epsilon);
#else
  const double epsilon = config.fetch.epsilon.value_or(1);
  static_cast<void>(epsilon);
#endif
}
