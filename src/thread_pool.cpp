#include "thread_pool.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <system_error>

#include <verkv/error.hpp>

namespace verkv {

ThreadPool::ThreadPool(int threads, const StartThread& start_thread) {
  const int wanted =
      threads > 0 ? threads : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const auto refuse = [&](const char* reason) {
    const int running = size();
    stop();
    throw CapacityError(fmt::format("{} threads are wanted; the system gives no more than {}: {}",
                                    wanted, running, reason),
                        ErrorCode::thread_limit);
  };
  try {
    threads_.reserve(static_cast<std::size_t>(wanted - 1));
    for (int worker = 1; worker < wanted; ++worker) {
      threads_.push_back(start_thread([this, worker] { loop(worker); }));
    }
  } catch (const std::system_error& error) {
    refuse(error.what());
  } catch (const std::bad_alloc&) {
    refuse("out of memory");
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run_erased(std::int64_t count, Function function, const void* context) {
  if (count <= 1 || threads_.empty()) {
    for (std::int64_t index = 0; index < count; ++index) function(context, 0, index);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    function_ = function;
    context_ = context;
    count_ = count;
    next_ = 0;
    busy_ = static_cast<int>(threads_.size());
    ++generation_;
  }
  start_.notify_all();
  work(0);
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return busy_ == 0; });
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

void ThreadPool::loop(int worker) {
  std::uint64_t seen = 0;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      start_.wait(lock, [&] { return stop_ || generation_ != seen; });
      if (stop_) return;
      seen = generation_;
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
