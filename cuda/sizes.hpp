// Arithmetic on sizes.
#ifndef VERKV_CUDA_SIZES_HPP
#define VERKV_CUDA_SIZES_HPP

#include <cstddef>
#include <cstdint>

namespace verkv::cuda {

constexpr std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

constexpr std::int64_t round_up(std::int64_t n, std::int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_SIZES_HPP
