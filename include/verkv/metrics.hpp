// What a cache reports about itself, as text for a monitoring system.
#ifndef VERKV_METRICS_HPP
#define VERKV_METRICS_HPP

#include <string>

#include <verkv/config.hpp>
#include <verkv/kv_cache_manager.hpp>

namespace verkv {

// Statistics of every cached layer and bytes of memory in the Prometheus text format, version
// 0.0.4 (docs/metrics.md lists the names). Counters begin anew at reset_statistics. Layers are asked
// one after the other: calls of other threads may come between. Throws what
// KvCacheManager::statistics and memory throw.
VERKV_API std::string prometheus_text(const KvCacheManager& manager);

}  // namespace verkv

#endif  // VERKV_METRICS_HPP
