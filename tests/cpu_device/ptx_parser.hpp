// PTX text to instructions.
#ifndef VERKV_TESTS_CPU_DEVICE_PTX_PARSER_HPP
#define VERKV_TESTS_CPU_DEVICE_PTX_PARSER_HPP

#include <string>

#include "ptx.hpp"

namespace verkv::cpu_device {

// Throws ParseError, with the line, for text that is not understood. Instructions that are not
// supported, and calls of functions, do not throw: they are refused when a thread reaches them.
Module parse_ptx(const std::string& text);

}  // namespace verkv::cpu_device

#endif  // VERKV_TESTS_CPU_DEVICE_PTX_PARSER_HPP
