// Bytes of a sequence before there is one.
#ifndef VERKV_SRC_CPU_SEQUENCE_BYTES_HPP
#define VERKV_SRC_CPU_SEQUENCE_BYTES_HPP

#include <cstdint>

#include <verkv/reports.hpp>
#include <verkv/settings.hpp>

namespace verkv::cpu {

// As verkv::sequence_bytes, of a configuration that is served.
SequenceBytes estimated_bytes(const CacheConfig& config, std::int64_t tokens);

}  // namespace verkv::cpu

#endif  // VERKV_SRC_CPU_SEQUENCE_BYTES_HPP
