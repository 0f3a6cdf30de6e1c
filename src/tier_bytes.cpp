#include "tier_bytes.hpp"

#include <fmt/format.h>

#include <optional>

#include <verkv/error.hpp>

#include "rows.hpp"

namespace verkv {

void add(MemoryReport& to, const MemoryReport& one, std::int64_t sign) {
  to.resident_bytes += sign * one.resident_bytes;
  to.sketch_bytes += sign * one.sketch_bytes;
  to.metadata_bytes += sign * one.metadata_bytes;
  to.host_bytes += sign * one.host_bytes;
  to.basis_bytes += sign * one.basis_bytes;
  to.workspace_bytes += sign * one.workspace_bytes;
  to.reserved_bytes += sign * one.reserved_bytes;
  to.pageable_bytes += sign * one.pageable_bytes;
  to.shared_bytes += sign * one.shared_bytes;
  to.engine_bytes += sign * one.engine_bytes;
  to.fast_reserved_bytes += sign * one.fast_reserved_bytes;
  to.host_reserved_bytes += sign * one.host_reserved_bytes;
  to.file_bytes += sign * one.file_bytes;
}

std::int64_t file_rows_added(std::int64_t held, std::int64_t count) {
  const auto in_pages = [](std::int64_t rows) {
    return (rows + kPageRows - 1) / kPageRows * kPageRows;
  };
  return in_pages(held + count) - in_pages(held);
}

void raise_limit(bool is_fast, std::int64_t held, std::int64_t wanted, std::int64_t limit) {
  throw CapacityError(fmt::format("{} tier: {} bytes are held and {} more wanted, the limit is {}",
                                  is_fast ? "fast" : "host", held, wanted, limit),
                      is_fast ? ErrorCode::fast_limit : ErrorCode::host_limit);
}

void check_tiers(const CacheConfig& config, const TierBytes& held, const TierBytes& wanted) {
  const auto check = [](bool is_fast, std::int64_t has, std::int64_t more,
                        const std::optional<std::int64_t>& limit) {
    if (more > 0 && limit && has + more > *limit) raise_limit(is_fast, has, more, *limit);
  };
  check(false, held.host, wanted.host, config.host_bytes_limit);
  check(true, held.fast, wanted.fast, config.fast_bytes_limit);
}

}  // namespace verkv
