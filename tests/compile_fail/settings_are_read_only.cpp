// A running manager's settings are fixed.
// Expected: read-only|const
#include <verkv/verkv.hpp>

void use(verkv::KvCacheManager& cache) {
#ifdef VERKV_MISUSE
  cache.config().keep = 0.5;
#else
  static_cast<void>(cache.config().keep);
#endif
}
