// A fixed set of threads that run the independent tasks of one step, of its own or of an engine's.
#ifndef VERKV_SRC_THREAD_POOL_HPP
#define VERKV_SRC_THREAD_POOL_HPP

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <verkv/settings.hpp>

namespace verkv {

class ThreadPool {
 public:
  // Starts a thread; throws std::system_error or std::bad_alloc where the system refuses.
  using StartThread = std::function<std::thread(std::function<void()>)>;

  // threads <= 0: one per hardware thread. The calling thread is one of them. Throws CapacityError,
  // with no thread left behind, where the system refuses one. start_thread: for tests.
  explicit ThreadPool(
      int threads, const StartThread& start_thread = [](std::function<void()> loop) {
        return std::thread(std::move(loop));
      });
  // With the threads of an executor, at most so many at a time; <= 0: as above. Starts none.
  ThreadPool(int threads, Executor executor);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }

  // Runs task(worker, index) for index in [0, count), and waits for all. worker: below size(), count
  // and `most`, another one in each thread. Wakes no more threads than there are workers. Allocates
  // nothing. The task must not throw. One call at a time.
  template <class Task>
  void run(std::int64_t count, const Task& task, int most = std::numeric_limits<int>::max()) {
    run_erased(
        count, std::min(size_, most),
        [](const void* context, int worker, std::int64_t index) {
          (*static_cast<const Task*>(context))(worker, index);
        },
        &task);
  }

 private:
  using Function = void (*)(const void* context, int worker, std::int64_t index);
  void run_erased(std::int64_t count, int most, Function function, const void* context);
  void run_on_own_threads(int helpers);
  void run_on_executor(int parts) noexcept;
  void run_part(int worker);
  void work(int worker);
  void loop();
  void stop() noexcept;

  int size_ = 1;
  std::vector<std::thread> threads_;
  Executor executor_;
  std::function<void(int)> part_;
  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable done_;
  Function function_ = nullptr;
  const void* context_ = nullptr;
  std::int64_t count_ = 0;
  std::int64_t next_ = 0;
  // Threads that are still to begin with these tasks, which are workers open_, ..., 1, and those that
  // have begun. Of an executor:
  // parts that may begin are below parts_, and has_begun_ says which have.
  int open_ = 0;
  int busy_ = 0;
  int parts_ = 0;
  std::vector<std::uint8_t> has_begun_;
  bool stop_ = false;
};

}  // namespace verkv

#endif  // VERKV_SRC_THREAD_POOL_HPP
