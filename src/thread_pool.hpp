// A fixed set of threads that run the independent tasks of one step.
#ifndef VERKV_SRC_THREAD_POOL_HPP
#define VERKV_SRC_THREAD_POOL_HPP

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

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
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(threads_.size()) + 1; }

  // Runs task(worker, index) for index in [0, count), worker in [0, size()), and waits for all.
  // Allocates nothing. The task must not throw. One call at a time.
  template <class Task>
  void run(std::int64_t count, const Task& task) {
    run_erased(
        count,
        [](const void* context, int worker, std::int64_t index) {
          (*static_cast<const Task*>(context))(worker, index);
        },
        &task);
  }

 private:
  using Function = void (*)(const void* context, int worker, std::int64_t index);
  void run_erased(std::int64_t count, Function function, const void* context);
  void work(int worker);
  void loop(int worker);
  void stop() noexcept;

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable done_;
  Function function_ = nullptr;
  const void* context_ = nullptr;
  std::int64_t count_ = 0;
  std::int64_t next_ = 0;
  std::uint64_t generation_ = 0;
  int busy_ = 0;
  bool stop_ = false;
};

}  // namespace verkv

#endif  // VERKV_SRC_THREAD_POOL_HPP
