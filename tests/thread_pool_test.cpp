// The pool runs every index exactly once, generation after generation.

#include <atomic>
#include <cstdint>
#include <functional>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <verkv/error.hpp>
#include <verkv/kv_cache_manager.hpp>

#include "catch.hpp"
#include "support/child.hpp"
#include "thread_pool.hpp"

using namespace verkv::test;

TEST_CASE("Every index runs exactly once, with a valid worker") {
  for (const int threads : {1, 2, 3, 4}) {
    verkv::ThreadPool pool(threads);
    REQUIRE(pool.size() == threads);
    for (int generation = 0; generation < 300; ++generation) {
      for (const std::int64_t count : {0, 1, 2, 3, 5, 64}) {
        std::vector<int> runs(
            static_cast<std::size_t>(count));  // not atomic: an index belongs to one worker
        std::atomic<bool> workers_valid{true};
        pool.run(count, [&](int worker, std::int64_t index) {
          if (worker < 0 || worker >= threads) workers_valid = false;
          ++runs[static_cast<std::size_t>(index)];
        });
        bool once = true;
        for (const int r : runs) once = once && r == 1;
        REQUIRE(once);
        REQUIRE(workers_valid);
      }
    }
    std::vector<int> runs(1000);
    pool.run(1000, [&](int, std::int64_t index) { ++runs[static_cast<std::size_t>(index)]; });
    for (const int r : runs) REQUIRE(r == 1);
  }
}

TEST_CASE("A worker never runs two tasks at a time") {
  verkv::ThreadPool pool(4);
  std::vector<int> scratch(4);  // one per worker, as the workspaces of a step are
  std::vector<int> result(1000);
  for (int generation = 0; generation < 50; ++generation) {
    pool.run(1000, [&](int worker, std::int64_t index) {
      int& own = scratch[static_cast<std::size_t>(worker)];
      own = static_cast<int>(index);
      for (volatile int spin = 0; spin < 20;) spin = spin + 1;
      result[static_cast<std::size_t>(index)] = own;
    });
    for (int i = 0; i < 1000; ++i) REQUIRE(result[static_cast<std::size_t>(i)] == i);
  }
}

TEST_CASE("A pool may be made and destroyed unused, and picks a size by itself") {
  for (int i = 0; i < 50; ++i) verkv::ThreadPool pool(1 + i % 4);
  const verkv::ThreadPool own(0);
  CHECK(own.size() >= 1);
}

TEST_CASE("A pool whose threads do not all start leaves none behind") {
  std::atomic<int> running{0};
  int given = 0;
  int most = 0;
  bool out_of_memory = false;
  const auto start = [&](std::function<void()> loop) {
    if (given == most) {
      if (out_of_memory) throw std::bad_alloc();
      throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
    }
    ++given;
    return std::thread([&running, loop = std::move(loop)] {
      ++running;
      loop();
      --running;
    });
  };
  for (const bool memory : {false, true}) {
    out_of_memory = memory;
    for (most = 0; most < 3; ++most) {
      given = 0;
      try {
        const verkv::ThreadPool pool(4, start);
        FAIL_CHECK("a pool of " << pool.size());
      } catch (const verkv::CapacityError& error) {
        CHECK(error.code() == verkv::ErrorCode::thread_limit);
        const std::string text = error.what();
        INFO(text);
        CHECK(text.find("4 threads") != std::string::npos);
        CHECK(text.find("than " + std::to_string(most + 1)) != std::string::npos);
      }
      CHECK(given == most);
      CHECK(running == 0);
    }
  }
  // With all its threads the same pool works.
  given = 0;
  most = 3;
  verkv::ThreadPool pool(4, start);
  std::atomic<int> sum{0};
  pool.run(10, [&](int, std::int64_t index) { sum += static_cast<int>(index); });
  CHECK(sum == 45);
}

#if VERKV_TEST_CAN_LIMIT_MEMORY

TEST_CASE("Where the address space ends no thread is left and nobody waits") {
  constexpr int wanted = 256;
  for (const std::size_t limit : {std::size_t{1} << 28, std::size_t{1} << 30}) {
    for (int repetition = 0; repetition < 10; ++repetition) {
      const Child child = run_child([&] {
        if (!limit_address_space(limit)) return std::string("no limit");
        verkv::CacheConfig config;
        config.layers = {{.kv_heads = 1, .query_heads = 1, .key_dim = 16, .value_dim = 16}};
        config.threads = wanted;
        std::string said;
        // The second time memory of the first lies about.
        for (int time = 0; time < 2; ++time) {
          try {
            verkv::make_cpu_cache(config);
            return std::string("a cache");
          } catch (const verkv::CapacityError& error) {
            said = error.what();
          }
          if (threads_of_this_process() != 1) return std::string("threads are left");
        }
        config.threads = 2;
        verkv::make_cpu_cache(config);
        return said;
      });
      INFO(child.said);
      REQUIRE(child.ended_well);
      CHECK(child.said.find("256 threads are wanted; the system gives no more than ") == 0);
    }
  }
}

#endif
