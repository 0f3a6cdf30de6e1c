#include "thread_pool.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <system_error>
#include <utility>

#include <verkv/error.hpp>

namespace verkv {

namespace {

int wanted_threads(int threads) {
  return threads > 0 ? threads
                     : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

}  // namespace

ThreadPool::ThreadPool(int threads, const StartThread& start_thread) {
  const int wanted = wanted_threads(threads);
  const auto refuse = [&](const char* reason) {
    const int running = static_cast<int>(threads_.size()) + 1;
    stop();
    throw CapacityError(fmt::format("{} threads are wanted; the system gives no more than {}: {}",
                                    wanted, running, reason),
                        ErrorCode::thread_limit);
  };
  try {
    threads_.reserve(static_cast<std::size_t>(wanted - 1));
    for (int worker = 1; worker < wanted; ++worker) {
      threads_.push_back(start_thread([this] { loop(); }));
    }
  } catch (const std::system_error& error) {
    refuse(error.what());
  } catch (const std::bad_alloc&) {
    refuse("out of memory");
  } catch (...) {
    stop();
    throw;
  }
  size_ = wanted;
}

ThreadPool::ThreadPool(int threads, Executor executor)
    : size_(wanted_threads(threads)),
      executor_(std::move(executor)),
      part_([this](int part) { run_part(part); }),
      has_begun_(static_cast<std::size_t>(size_)) {}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run_erased(std::int64_t count, int most, Function function, const void* context) {
  const int parts = static_cast<int>(std::min<std::int64_t>(count, most));
  if (parts <= 1) {
    for (std::int64_t index = 0; index < count; ++index) function(context, 0, index);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    function_ = function;
    context_ = context;
    count_ = count;
    next_ = 0;
  }
  executor_ ? run_on_executor(parts) : run_on_own_threads(parts - 1);
}

void ThreadPool::run_on_own_threads(int helpers) {
  {
    const std::lock_guard lock(mutex_);
    open_ = helpers;
  }
  for (int i = 0; i < helpers; ++i) start_.notify_one();
  work(0);
  std::unique_lock lock(mutex_);
  open_ = 0;  // nothing is left for those that have not woken up
  done_.wait(lock, [this] { return busy_ == 0; });
}

void ThreadPool::run_on_executor(int parts) noexcept {
  {
    const std::lock_guard lock(mutex_);
    parts_ = parts;
  }
  try {
    executor_(parts, part_);
  } catch (...) {
    // What is left is done below.
  }
  {
    std::unique_lock lock(mutex_);
    parts_ = 0;  // a part that comes later finds nothing
    done_.wait(lock, [this] { return busy_ == 0; });
    std::fill(has_begun_.begin(), has_begun_.end(), std::uint8_t{0});
  }
  work(0);
}

void ThreadPool::run_part(int part) {
  {
    const std::lock_guard lock(mutex_);
    if (part < 0 || part >= parts_) return;
    std::uint8_t& begun = has_begun_[static_cast<std::size_t>(part)];
    if (begun != 0) return;  // buffers of a worker serve one thread
    begun = 1;
    ++busy_;
  }
  work(part);
  {
    const std::lock_guard lock(mutex_);
    --busy_;
  }
  done_.notify_one();
}

void ThreadPool::work(int worker) {
  for (;;) {
    std::int64_t index = 0;
    {
      // A task is a whole (row, KV head), tens of microseconds at least: a lock a task is cheap
      // enough.
      const std::lock_guard lock(mutex_);
      if (next_ >= count_) return;
      index = next_++;
    }
    function_(context_, worker, index);
  }
}

void ThreadPool::loop() {
  for (;;) {
    int worker = 0;
    {
      std::unique_lock lock(mutex_);
      start_.wait(lock, [&] { return stop_ || open_ > 0; });
      if (stop_) return;
      worker = open_--;
      ++busy_;
    }
    work(worker);
    {
      const std::lock_guard lock(mutex_);
      --busy_;
    }
    done_.notify_one();
  }
}

}  // namespace verkv
