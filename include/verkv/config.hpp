// Version and the two macros every other header needs.
#ifndef VERKV_CONFIG_HPP
#define VERKV_CONFIG_HPP

// The version lives here only; CMake reads it from these three lines.
#define VERKV_VERSION_MAJOR 0
#define VERKV_VERSION_MINOR 1
#define VERKV_VERSION_PATCH 0

// Marks a scalar formula that host code and kernels share.
#if defined(__CUDACC__)
#define VERKV_HD __host__ __device__
#else
#define VERKV_HD
#endif

// Exported from the compiled runtime when it is built as a shared library.
#if defined(__GNUC__)
#define VERKV_API __attribute__((visibility("default")))
#else
#define VERKV_API
#endif

#endif  // VERKV_CONFIG_HPP
