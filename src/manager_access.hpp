// What factories of managers and the functions of one backend may do beyond the public interface.
#ifndef VERKV_SRC_MANAGER_ACCESS_HPP
#define VERKV_SRC_MANAGER_ACCESS_HPP

#include <cstdint>
#include <memory>

#include <verkv/config.hpp>
#include <verkv/settings.hpp>

#include "backend.hpp"

namespace verkv {

class KvCacheManager;

struct VERKV_API ManagerAccess {
  // config: one that the backend serves.
  static std::unique_ptr<KvCacheManager> make(CacheConfig config, std::unique_ptr<Backend> backend);

  // Returns question(backend), asked while no other call is under way.
  static std::uint64_t ask(const KvCacheManager& manager,
                           std::uint64_t (*question)(const Backend& backend));
};

}  // namespace verkv

#endif  // VERKV_SRC_MANAGER_ACCESS_HPP
