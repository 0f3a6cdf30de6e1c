// The mutex by which the calls of a manager take turns, in the process that made the manager. A
// child after fork() has none of its parent's threads: what they had locked stays locked there, and
// what they were changing stays half changed. So a child is refused before it waits.
#ifndef VERKV_SRC_CALL_MUTEX_HPP
#define VERKV_SRC_CALL_MUTEX_HPP

#include <mutex>

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

#include "invalid.hpp"

namespace verkv {

class CallMutex {
 public:
  // Throws InvalidArgument in another process.
  void lock() {
    if (const long here = this_process(); here != maker_) {
      invalid(ErrorCode::wrong_process,
              "the cache belongs to process {}, this is process {}: a child has a copy that it "
              "cannot use",
              maker_, here);
    }
    mutex_.lock();
  }
  void unlock() { mutex_.unlock(); }

  bool in_another_process() const noexcept { return this_process() != maker_; }

 private:
  static long this_process() noexcept {
#if defined(__unix__) || defined(__APPLE__)
    return static_cast<long>(getpid());
#else
    return 0;
#endif
  }

  std::mutex mutex_;
  const long maker_ = this_process();
};

}  // namespace verkv

#endif  // VERKV_SRC_CALL_MUTEX_HPP
