// A manager comes from a factory, which gives it a backend.
// Expected: no matching|is private
#include <verkv/verkv.hpp>

void use(const verkv::CacheConfig& config) {
#ifdef VERKV_MISUSE
  verkv::KvCacheManager cache(config);
  cache.reset_statistics();
#else
  const auto cache = verkv::make_cpu_cache(config);
  cache->reset_statistics();
#endif
}
