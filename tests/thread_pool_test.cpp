// The pool runs every index exactly once, generation after generation.

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <new>
#include <stdexcept>
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

// What an engine's threads may do with the parts.
std::vector<verkv::Executor> executors() {
  using Part = std::function<void(int)>;
  const auto on_threads = [](int parts, const Part& part) {
    std::vector<std::thread> threads;
    for (int i = 0; i < parts; ++i) threads.emplace_back([&part, i] { part(i); });
    for (std::thread& thread : threads) thread.join();
  };
  return {
      on_threads,
      // One after the other, from the last.
      [](int parts, const Part& part) {
        for (int i = parts; i-- > 0;) part(i);
      },
      // Parts left out, twice, and that there are none of.
      [](int, const Part& part) {
        part(1);
        part(1);
        part(-1);
        part(1000);
      },
      [](int, const Part&) {},
      [](int, const Part& part) {
        part(0);
        throw std::runtime_error("no");
      },
      // Twice at a time.
      [on_threads](int parts, const Part& part) {
        std::thread other([&] { on_threads(parts, part); });
        on_threads(parts, part);
        other.join();
      },
  };
}

TEST_CASE("On an engine's threads every index runs exactly once, whatever the engine does") {
  for (const verkv::Executor& executor : executors()) {
    verkv::ThreadPool pool(3, executor);
    REQUIRE(pool.size() == 3);
    for (int generation = 0; generation < 20; ++generation) {
      for (const std::int64_t count : {0, 1, 2, 3, 50}) {
        std::vector<int> runs(static_cast<std::size_t>(count));
        std::vector<std::atomic<int>> inside(3);
        std::atomic<bool> valid{true};
        pool.run(count, [&](int worker, std::int64_t index) {
          std::atomic<int>& own = inside.at(static_cast<std::size_t>(worker));
          if (own.fetch_add(1) != 0) valid = false;
          ++runs[static_cast<std::size_t>(index)];
          own.fetch_sub(1);
        });
        for (const int r : runs) REQUIRE(r == 1);
        REQUIRE(valid);
      }
    }
  }
}

TEST_CASE("An engine's part that comes after its call finds nothing to do") {
  std::function<void(int)> late;
  verkv::ThreadPool pool(2, [&](int, const std::function<void(int)>& part) { late = part; });
  int runs = 0;
  pool.run(5, [&](int, std::int64_t) { ++runs; });
  CHECK(runs == 5);
  late(1);
  CHECK(runs == 5);
}

TEST_CASE("No more threads wake than there are tasks") {
  verkv::ThreadPool pool(4);
  for (int generation = 0; generation < 200; ++generation) {
    std::array<std::atomic<int>, 4> used{};
    pool.run(2, [&](int worker, std::int64_t) { ++used[static_cast<std::size_t>(worker)]; });
    int workers = 0;
    for (const std::atomic<int>& u : used) workers += u > 0;
    REQUIRE(workers <= 2);
  }
}

TEST_CASE("A cache on an engine's threads gives the bits of its own") {
  verkv::CacheConfig config;
  config.layers = {{.kv_heads = 4, .query_heads = 8, .key_dim = 32, .value_dim = 32}};
  config.threads = 2;
  std::vector<float> rows(200 * 4 * 32);
  for (std::size_t i = 0; i < rows.size(); ++i)
    rows[i] = static_cast<float>(i * 2654435761u % 1000) / 500 - 1;
  const std::vector<float> scores(4 * 200, 1.0f);
  const auto answer = [&] {
    const auto cache = verkv::make_cpu_cache(config);
    const verkv::SequenceId sequence = cache->create_sequence(1);
    const auto view = verkv::token_major(rows.data(), verkv::DType::f32, 200, 4, 32);
    cache->append(sequence, 0, view, view);
    const verkv::ImportanceView importance{scores.data(), 4, 200, 200};
    cache->compress(sequence, {&importance, 1});
    std::vector<float> output(8 * 32);
    verkv::AttendBatch batch;
    batch.sequences = {&sequence, 1};
    batch.queries = verkv::token_major(rows.data(), verkv::DType::f32, 1, 8, 32);
    batch.output = output;
    cache->attend(0, batch);
    return output;
  };
  const std::vector<float> own = answer();
  int calls = 0;
  config.executor = [&](int parts, const std::function<void(int)>& part) {
    ++calls;
    for (int i = 0; i < parts; ++i) part(i);
  };
  CHECK(answer() == own);
  CHECK(calls > 0);
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
