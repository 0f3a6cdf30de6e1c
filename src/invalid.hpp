// InvalidArgument with a text that is put together as by fmt::format.
#ifndef VERKV_SRC_INVALID_HPP
#define VERKV_SRC_INVALID_HPP

#include <fmt/format.h>

#include <utility>

#include <verkv/error.hpp>

namespace verkv {

template <class... Args>
[[noreturn]] void invalid(fmt::format_string<Args...> text, Args&&... args) {
  throw InvalidArgument(fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace verkv

#endif  // VERKV_SRC_INVALID_HPP
