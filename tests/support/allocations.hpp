// A count of all allocations of the program, which can be made to fail.
#ifndef VERKV_TESTS_SUPPORT_ALLOCATIONS_HPP
#define VERKV_TESTS_SUPPORT_ALLOCATIONS_HPP

#include <atomic>
#include <cstdint>

namespace verkv::test {

extern std::atomic<std::int64_t> allocations;
// How many allocations may still succeed; negative: all.
extern std::atomic<std::int64_t> allowed;

}  // namespace verkv::test

#endif  // VERKV_TESTS_SUPPORT_ALLOCATIONS_HPP
