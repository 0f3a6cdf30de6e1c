// A part of a test that runs in a child process: it may come to an end that the test must survive.
#ifndef VERKV_TESTS_SUPPORT_CHILD_HPP
#define VERKV_TESTS_SUPPORT_CHILD_HPP

#if defined(__unix__) || defined(__APPLE__)
#define VERKV_TEST_CAN_FORK 1
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#else
#define VERKV_TEST_CAN_FORK 0
#endif

// Sanitizers need more address space than there would be.
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define VERKV_TEST_CAN_LIMIT_MEMORY 1
#else
#define VERKV_TEST_CAN_LIMIT_MEMORY 0
#endif

#include <cstddef>
#include <exception>
#include <filesystem>
#include <iterator>
#include <string>

namespace verkv::test {

#if VERKV_TEST_CAN_FORK

struct Child {
  bool ended_well = false;  // neither a signal nor too late
  std::string said;
};

// Runs f() in a child process, for at most 20 seconds; f returns what the child says. An exception
// is said too. No assertion of the test's framework may be in f.
template <class F>
Child run_child(F&& f) {
  int pipe_ends[2] = {-1, -1};
  if (pipe(pipe_ends) != 0) return {};
  const pid_t id = fork();
  if (id == 0) {
    alarm(20);
    std::string said;
    try {
      said = f();
    } catch (const std::exception& error) {
      said = std::string("exception: ") + error.what();
    }
    const ssize_t written = write(pipe_ends[1], said.data(), said.size());
    _exit(written == static_cast<ssize_t>(said.size()) ? 0 : 1);
  }
  close(pipe_ends[1]);
  Child child;
  char buffer[512];
  for (ssize_t count = 0; id > 0 && (count = read(pipe_ends[0], buffer, sizeof buffer)) > 0;)
    child.said.append(buffer, static_cast<std::size_t>(count));
  close(pipe_ends[0]);
  int status = 0;
  child.ended_well =
      id > 0 && waitpid(id, &status, 0) == id && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  return child;
}

#endif

#if VERKV_TEST_CAN_LIMIT_MEMORY

inline bool limit_address_space(std::size_t bytes) {
  const rlimit limit{bytes, bytes};
  return setrlimit(RLIMIT_AS, &limit) == 0;
}

inline std::ptrdiff_t threads_of_this_process() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}

#endif

}  // namespace verkv::test

#endif  // VERKV_TESTS_SUPPORT_CHILD_HPP
