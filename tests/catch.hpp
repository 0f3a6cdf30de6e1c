// Catch2 is packaged in two incompatible layouts: version 2 is one header, version 3 many. Tests
// include this file and use what both have: WithinAbs, WithinRel and WithinULP instead of Approx.
#ifndef VERKV_TESTS_CATCH_HPP
#define VERKV_TESTS_CATCH_HPP

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#endif  // VERKV_TESTS_CATCH_HPP
