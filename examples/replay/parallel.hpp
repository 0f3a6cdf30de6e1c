// Tasks on a few threads.
#ifndef VERKV_EXAMPLES_REPLAY_PARALLEL_HPP
#define VERKV_EXAMPLES_REPLAY_PARALLEL_HPP

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <verkv/error.hpp>

namespace verkv::replay {

// Runs f(index) for 0 <= index < count on up to `threads` threads, in order of index; rethrows the
// first exception. Throws CapacityError, with no thread left behind, where the system refuses one.
// start(work): a std::thread that runs it; for tests.
template <class F, class Start>
void run_parallel(std::int64_t count, std::int64_t threads, F&& f, const Start& start) {
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
  const std::int64_t wanted = std::min(threads, count);
  std::vector<std::thread> workers;
  bool refused = false;
  try {
    for (std::int64_t i = 1; i < wanted; ++i) workers.push_back(start(work));
  } catch (const std::exception&) {
    refused = true;
    next = count;
  }
  work();
  for (std::thread& worker : workers) worker.join();
  if (refused) {
    throw CapacityError(std::to_string(wanted) +
                            " threads are wanted; the system gives no more than " +
                            std::to_string(workers.size() + 1),
                        ErrorCode::thread_limit);
  }
  if (failure) std::rethrow_exception(failure);
}

template <class F>
void run_parallel(std::int64_t count, std::int64_t threads, F&& f) {
  run_parallel(count, threads, std::forward<F>(f),
               [](const auto& work) { return std::thread(work); });
}

}  // namespace verkv::replay

#endif  // VERKV_EXAMPLES_REPLAY_PARALLEL_HPP
