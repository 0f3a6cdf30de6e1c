#include "tier_bytes.hpp"

#include <fmt/format.h>

#include <optional>
#include <string>

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

void check_tiers(const CacheConfig& config, const TierBytes& held, const TierBytes& kept,
                 const TierBytes& wanted) {
  const auto check = [&](const char* tier, std::int64_t TierBytes::*bytes,
                         std::optional<std::int64_t> limit, ErrorCode code) {
    if (!limit || held.*bytes + kept.*bytes + wanted.*bytes <= *limit) return;
    const std::string also =
        kept.*bytes > 0 ? fmt::format(", {} reserved for others", kept.*bytes) : "";
    throw CapacityError(
        fmt::format("{} tier: {} bytes in use{} and {} more wanted, the limit is {}", tier,
                    held.*bytes, also, wanted.*bytes, *limit),
        code);
  };
  check("host", &TierBytes::host, config.host_bytes_limit, ErrorCode::host_limit);
  check("fast", &TierBytes::fast, config.fast_bytes_limit, ErrorCode::fast_limit);
}

}  // namespace verkv
