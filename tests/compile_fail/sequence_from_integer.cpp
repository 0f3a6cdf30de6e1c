// A number, say of a layer or a row, is no sequence.
// Expected: could not convert|no viable conversion|cannot convert|no known conversion
#include <verkv/verkv.hpp>

void use(const verkv::KvCacheManager& cache, verkv::SequenceId sequence) {
  static_cast<void>(sequence);
#ifdef VERKV_MISUSE
  cache.tokens(0, 0);
#else
  cache.tokens(sequence, 0);
#endif
}
