// The backend that the suite of the manager (tests/manager) runs on: whichever source
// is linked, tests/support/cpu_test_backend.cpp or tests/cuda/cuda_test_backend.cpp. Cases with the
// tag [cpu] speak of what only the CPU backend has.
#ifndef VERKV_TESTS_SUPPORT_TEST_BACKEND_HPP
#define VERKV_TESTS_SUPPORT_TEST_BACKEND_HPP

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

namespace verkv::test {

struct TestBackend {
  // Serves FetchOrder::exact.
  bool exact_order = true;
  // Outputs and LSE do not change by a bit with rows of the batch or the room of the buffers;
  // otherwise they agree to rounding. Decisions never change.
  bool equal_outputs = true;
  // Serves save, restore and read.
  bool saves = true;
  // Goes back to before the local window.
  bool shortens = true;
  // Has scalar kernels beside the vector ones.
  bool vector_code = true;
  // Holds a place for each token of the window, and the odds of a cluster that is not full twice.
  bool window_places = false;
  // Of so many trials of a case one is run.
  int thinning = 1;
};

const TestBackend& backend();

std::unique_ptr<KvCacheManager> make_cache(const CacheConfig& config);
std::vector<std::string> reasons_against(const CacheConfig& config);

// Of `count` trials those that the backend has time for; at least one.
inline int trials(int count) { return (count + backend().thinning - 1) / backend().thinning; }

// A size of a scene: on a backend that has little time the second, which proves the same.
inline std::int64_t scene(std::int64_t full, std::int64_t small) {
  return backend().thinning > 1 ? small : full;
}

}  // namespace verkv::test

#endif  // VERKV_TESTS_SUPPORT_TEST_BACKEND_HPP
