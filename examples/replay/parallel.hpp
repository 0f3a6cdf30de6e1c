// Tasks on a few threads.
#ifndef VERKV_EXAMPLES_REPLAY_PARALLEL_HPP
#define VERKV_EXAMPLES_REPLAY_PARALLEL_HPP

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace verkv::replay {

// Runs f(index) for 0 <= index < count on up to `threads` threads, in order of index; rethrows the
// first exception.
template <class F>
void run_parallel(std::int64_t count, std::int64_t threads, F&& f) {
  std::atomic<std::int64_t> next{0};
  std::exception_ptr failure;
  std::mutex mutex;
  const auto work = [&] {
    for (;;) {
      const std::int64_t index = next.fetch_add(1);
      if (index >= count) return;
      try {
        f(index);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
        next = count;
        return;
      }
    }
  };
  std::vector<std::thread> workers;
  for (std::int64_t i = 1; i < std::min(threads, count); ++i) workers.emplace_back(work);
  work();
  for (std::thread& worker : workers) worker.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace verkv::replay

#endif  // VERKV_EXAMPLES_REPLAY_PARALLEL_HPP
