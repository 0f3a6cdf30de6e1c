// A manager owns its sequences: no second one may answer for them.
// Expected: deleted function|deleted constructor
#include <verkv/verkv.hpp>

void use(verkv::KvCacheManager& cache) {
#ifdef VERKV_MISUSE
  verkv::KvCacheManager copy = cache;
  copy.reset_statistics();
#else
  verkv::KvCacheManager& same = cache;
  same.reset_statistics();
#endif
}
