// Modes and kinds have names.
// Expected: cannot convert|incompatible type
#include <verkv/verkv.hpp>

void use(verkv::CacheConfig& config) {
#ifdef VERKV_MISUSE
  config.fetch.mode = 0;
#else
  config.fetch.mode = verkv::FetchMode::never;
#endif
}
