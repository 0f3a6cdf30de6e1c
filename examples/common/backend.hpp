// The backend that a program's caches compute with, chosen at run time.
#ifndef VERKV_EXAMPLES_COMMON_BACKEND_HPP
#define VERKV_EXAMPLES_COMMON_BACKEND_HPP

#include <cstdint>
#include <memory>
#include <string>

#include <verkv/kv_cache_manager.hpp>

namespace verkv {

enum class BackendKind : std::uint8_t { cpu, cuda };

// Why a cache of this configuration cannot be made: the program was built without the backend,
// there is no device, or the backend does not do what is asked for. Empty where it can; the layers
// are not looked at.
std::string backend_refusal(BackendKind kind, CacheConfig config);

// With views on the host. Throws what the backend's own function throws; DeviceError where the
// program was built without it.
std::unique_ptr<KvCacheManager> make_cache(BackendKind kind, CacheConfig config);

}  // namespace verkv

#endif  // VERKV_EXAMPLES_COMMON_BACKEND_HPP
