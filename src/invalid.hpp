// InvalidArgument with a text that is put together as by fmt::format.
#ifndef VERKV_SRC_INVALID_HPP
#define VERKV_SRC_INVALID_HPP

#include <fmt/format.h>

#include <utility>

#include <verkv/error.hpp>

namespace verkv {

template <class... Args>
[[noreturn]] void invalid(ErrorCode code, const ErrorPlace& place, fmt::format_string<Args...> text,
                          Args&&... args) {
  throw InvalidArgument(fmt::format(text, std::forward<Args>(args)...), code, place);
}

template <class... Args>
[[noreturn]] void invalid(ErrorCode code, fmt::format_string<Args...> text, Args&&... args) {
  throw InvalidArgument(fmt::format(text, std::forward<Args>(args)...), code);
}

// The shape of what was given.
template <class... Args>
[[noreturn]] void invalid(fmt::format_string<Args...> text, Args&&... args) {
  throw InvalidArgument(fmt::format(text, std::forward<Args>(args)...), ErrorCode::shape);
}

}  // namespace verkv

#endif  // VERKV_SRC_INVALID_HPP
