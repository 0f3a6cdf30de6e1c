// The head of a saved sequence: what it is, and the settings on which it rests (what is stored, and
// what later compressions of it would do).
#ifndef VERKV_SRC_SAVED_SETTINGS_HPP
#define VERKV_SRC_SAVED_SETTINGS_HPP

#include <string>
#include <string_view>

#include <verkv/config.hpp>
#include <verkv/settings.hpp>

#include "saved_bytes.hpp"

namespace verkv {

// One line for each setting, "name value". Not in it: limits, threads, rules of fetching and
// kernels, which may change from one use of a sequence to the next.
VERKV_API std::string saved_settings(const CacheConfig& config);

// Which line differs first, in words; empty if none does.
VERKV_API std::string first_difference(std::string_view saved, std::string_view here);

VERKV_API void put_head(SavedWriter& writer, const CacheConfig& config);
// Throws FormatError unless what follows is a sequence of this configuration.
VERKV_API void check_head(SavedReader& reader, const CacheConfig& config);

}  // namespace verkv

#endif  // VERKV_SRC_SAVED_SETTINGS_HPP
