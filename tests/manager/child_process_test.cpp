// KvCacheManager on a backend (support/test_backend.hpp): in a child process after fork().
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "catch.hpp"
#include "support/child.hpp"
#include "support/victim.hpp"

using namespace verkv;
using namespace verkv::test;

#if VERKV_TEST_CAN_FORK

namespace {

// The name of the first call that a child is not refused; empty if all are refused.
std::string first_answered(KvCacheManager& cache, SequenceId id) {
  const std::vector<float> zeros(4096);
  const TensorView keys = token_major(zeros.data(), DType::f32, 1, 2, 64);
  const TensorView values = token_major(zeros.data(), DType::f32, 1, 2, 48);
  const std::vector<std::pair<const char*, std::function<void()>>> calls{
      {"description", [&] { cache.description(); }},
      {"create_sequence", [&] { cache.create_sequence(); }},
      {"create_sequence of a draw", [&] { cache.create_sequence(7); }},
      {"tokens", [&] { cache.tokens(id, 0); }},
      {"compressed_tokens", [&] { cache.compressed_tokens(id, 0); }},
      {"append", [&] { cache.append(id, 0, keys, values); }},
      {"append of a batch", [&] { cache.append(0, AppendBatch{}); }},
      {"reserve", [&] { cache.reserve(id, 1); }},
      {"truncate", [&] { cache.truncate(id, 1); }},
      {"compress", [&] { cache.compress(id, {}); }},
      {"attend", [&] { cache.attend(0, {}); }},
      {"memory", [&] { cache.memory(); }},
      {"memory of a sequence", [&] { cache.memory(id); }},
      {"statistics", [&] { cache.statistics(0); }},
      {"reset_statistics", [&] { cache.reset_statistics(); }},
      {"redraw", [&] { cache.redraw(id, 3); }},
      {"erase", [&] { cache.erase(id); }}};
  for (const auto& [name, call] : calls) {
    try {
      call();
    } catch (const InvalidArgument& error) {
      const std::string text = error.what();
      if (error.code() == ErrorCode::wrong_process &&
          text.find("process " + std::to_string(getppid())) != std::string::npos &&
          text.find("process " + std::to_string(getpid())) != std::string::npos) {
        continue;
      }
    }
    return name;
  }
  return {};
}

}  // namespace

TEST_CASE("A child process is refused by every call, waits for nobody and ends") {
  CacheConfig config = victim_config();
  config.threads = 3;
  Victim victim(config);
  // A thread that is missing in the child holds the lock in many of the forks.
  std::atomic<bool> stop{false};
  std::thread caller([&] {
    while (!stop) victim.cache->description();
  });
  Child child;
  for (int repetition = 0; repetition < 20; ++repetition) {
    child = run_child([&] {
      const std::string answered = first_answered(*victim.cache, victim.a);
      victim.cache.reset();
      return answered;
    });
    if (!child.ended_well || !child.said.empty()) break;
  }
  stop = true;
  caller.join();
  CHECK(child.ended_well);
  CHECK(child.said.empty());
  victim.check_unchanged();
}

TEST_CASE("A child process may have a cache of its own", "[cpu]") {
  const Victim victim(victim_config());
  const Child child = run_child([&] {
    const auto cache = make_cpu_cache(victim.config);
    const SequenceId id = cache->create_sequence();
    return std::to_string(cache->tokens(id, 0));
  });
  CHECK(child.ended_well);
  CHECK(child.said == "0");
}

#endif
