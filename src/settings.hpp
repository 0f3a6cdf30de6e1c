// What the parts of src ask about settings.
#ifndef VERKV_SRC_SETTINGS_HPP
#define VERKV_SRC_SETTINGS_HPP

#include <verkv/settings.hpp>

namespace verkv {

// Throws InvalidArgument with all of unsupported_reasons(config), if there are any.
void check_config(const CacheConfig& config);

// Whether the value is one of its enumeration's.
bool is_known(DType type);

}  // namespace verkv

#endif  // VERKV_SRC_SETTINGS_HPP
