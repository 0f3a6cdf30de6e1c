// Importance is one number a head and token, not rows of keys.
// Expected: could not convert|no viable conversion|cannot convert|no matching|no known conversion
#include <vector>
#include <verkv/verkv.hpp>

void use(verkv::KvCacheManager& cache, verkv::SequenceId sequence,
         const std::vector<verkv::ImportanceView>& importance,
         const std::vector<verkv::TensorView>& tensors) {
  static_cast<void>(importance);
  static_cast<void>(tensors);
#ifdef VERKV_MISUSE
  cache.compress(sequence, tensors);
#else
  cache.compress(sequence, importance);
#endif
}
