// Streams, events and graphs: what is ordered and what is not, under many legal orders of the work.

#include <set>

#include "catch.hpp"
#include "test_support.hpp"

using namespace verkv::cpu_device;
using namespace verkv::cpu_device::test;

namespace {

constexpr int kSeeds = 24;
constexpr unsigned kCount = 64;

// out[i] = in[i] * 2 + 1; and out[i] = value.
const std::string& ptx() {
  static const std::string text = module_of(
      ".entry step(.param .u64 in, .param .u64 out) { .reg .b32 %r<4>; .reg .b64 %q<6>;\n"
      "ld.param.u64 %q1, [in]; ld.param.u64 %q2, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %q3, "
      "%r1, 4;\n"
      "add.s64 %q4, %q1, %q3; add.s64 %q5, %q2, %q3; ld.global.u32 %r2, [%q4]; mad.lo.s32 %r2, "
      "%r2, 2, 1;\n"
      "st.global.u32 [%q5], %r2; ret; }\n"
      ".entry set(.param .u64 out, .param .u32 value) { .reg .b32 %r<4>; .reg .b64 %q<6>;\n"
      "ld.param.u64 %q1, [out]; ld.param.u32 %r2, [value]; mov.u32 %r1, %tid.x; mul.wide.u32 %q3, "
      "%r1, 4;\n"
      "add.s64 %q4, %q1, %q3; st.global.u32 [%q4], %r2; ret; }\n");
  return text;
}

struct Program {
  Device device;
  std::shared_ptr<const Module> module;
  LaunchShape shape;
  StreamId a = 0, b = 0;
  EventId event = 0, other_event = 0;

  explicit Program(std::uint64_t seed, bool races = true)
      : device(options(seed, races)), module(device.load(ptx())) {
    shape.block.x = kCount;
    device.stream_create(a, false);
    device.stream_create(b, false);
    device.event_create(event);
    device.event_create(other_event);
  }
  static DeviceOptions options(std::uint64_t seed, bool races) {
    DeviceOptions made;
    made.schedule_seed = seed;
    made.machine.check_races = races;
    return made;
  }
  void step(StreamId stream, Address in, Address out) {
    device.launch_with(module->find("step"), shape, stream, in, out);
  }
  void set(StreamId stream, Address out, int value) {
    device.launch_with(module->find("set"), shape, stream, out, value);
  }
  Address numbers(int value) { return upload(device, std::vector<int>(kCount, value)); }
  int first(Address at) { return download<int>(device, at, kCount)[0]; }
};

}  // namespace

TEST_CASE("A missing wait for an event is a race for every seed and a wrong result for some") {
  std::set<int> results;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const auto body = [&](Program& p, bool wait) {
      const Address x = p.numbers(1), y = p.numbers(0), z = p.numbers(0);
      p.device.synchronize();
      p.step(p.a, x, y);
      p.device.event_record(p.event, p.a);
      if (wait) p.device.stream_wait(p.b, p.event);
      p.step(p.b, y, z);
      p.device.synchronize();
      return z;
    };
    Program right(seed);
    const Address z = body(right, true);
    INFO(seed << ' ' << first_fault(right.device));
    REQUIRE(right.device.faults().empty());
    REQUIRE(right.first(z) == 7);

    Program wrong(seed);
    body(wrong, false);
    REQUIRE(wrong.device.faults().size() == 1);
    CHECK(wrong.device.faults()[0].kind == FaultKind::race);
    CHECK(contains(first_fault(wrong.device), "kernel step"));

    Program unchecked(seed, false);
    results.insert(unchecked.first(body(unchecked, false)));
  }
  CHECK(results == std::set<int>{1, 7});
}

TEST_CASE("An event counts as it was recorded when the wait was called") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Program p(seed);
    const Address x = p.numbers(1), y = p.numbers(0), z = p.numbers(0);
    p.device.synchronize();
    p.device.event_record(p.event, p.a);  // before the work
    p.device.stream_wait(p.b, p.event);
    p.step(p.a, x, y);
    p.step(p.b, y, z);
    CHECK(p.device.synchronize() == Status::launch_failure);
    CHECK(p.device.faults().at(0).kind == FaultKind::race);
  }
  // A wait for an event that was never recorded waits for nothing.
  Program p(1);
  CHECK(p.device.stream_wait(p.a, p.event) == Status::success);
  CHECK(p.device.synchronize() == Status::success);
}

TEST_CASE("Write after read across streams needs a wait as well") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    for (const bool wait : {true, false}) {
      Program p(seed);
      const Address x = p.numbers(1), y = p.numbers(0);
      p.device.synchronize();
      p.step(p.a, x, y);
      p.device.event_record(p.event, p.a);
      if (wait) p.device.stream_wait(p.b, p.event);
      p.set(p.b, x, 50);
      p.device.synchronize();
      REQUIRE(p.device.faults().empty() == wait);
      if (wait) REQUIRE(p.first(y) == 3);
    }
  }
}

TEST_CASE("The legacy stream and blocking streams wait for each other") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    for (const bool blocking : {true, false}) {
      Program p(seed);
      StreamId c = 0;
      p.device.stream_create(c, blocking);
      const Address x = p.numbers(1), y = p.numbers(0), z = p.numbers(0);
      p.device.synchronize();
      p.step(c, x, y);
      p.step(kLegacyStream, y, z);
      p.step(c, z, y);
      p.device.synchronize();
      REQUIRE(p.device.faults().empty() == blocking);
      if (blocking) REQUIRE(p.first(y) == 15);
    }
  }
}

TEST_CASE("Pinned memory is read when the copy runs, pageable memory at the call") {
  std::set<int> pinned_results;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Program p(seed);
    void* pinned = nullptr;
    p.device.host_malloc(pinned, kCount * 4);
    std::vector<int> pageable(kCount, 5);
    auto* numbers = static_cast<int*>(pinned);
    std::fill_n(numbers, kCount, 5);
    const Address x = p.numbers(0), y = p.numbers(0);
    p.device.synchronize();
    p.device.copy(x, Device::address_of(pinned), kCount * 4, CopyKind::host_to_device, p.a, false);
    p.device.copy(y, Device::address_of(pageable.data()), kCount * 4, CopyKind::host_to_device, p.b,
                  false);
    std::fill_n(numbers, kCount, 6);  // too early for the first copy
    std::fill(pageable.begin(), pageable.end(), 6);
    p.device.synchronize();
    pinned_results.insert(p.first(x));
    REQUIRE(p.first(y) == 5);
  }
  CHECK(pinned_results == std::set<int>{5, 6});

  // And written when it runs: only a synchronisation makes it visible.
  std::set<int> seen;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Program p(seed);
    void* pinned = nullptr;
    p.device.host_malloc(pinned, kCount * 4);
    auto* numbers = static_cast<int*>(pinned);
    numbers[0] = -1;
    const Address x = p.numbers(3);
    p.device.copy(Device::address_of(pinned), x, kCount * 4, CopyKind::device_to_host, p.a, false);
    seen.insert(numbers[0]);
    p.device.stream_synchronize(p.a);
    REQUIRE(numbers[0] == 3);
  }
  CHECK(seen == std::set<int>{-1, 3});
}

TEST_CASE("Synchronising one stream orders what the host then does, and no more") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    for (const int how : {0, 1, 2, 3}) {
      Program p(seed);
      const Address x = p.numbers(1), y = p.numbers(0), z = p.numbers(0);
      p.device.synchronize();
      p.step(p.a, x, y);
      p.device.event_record(p.event, p.a);
      if (how == 0) p.device.stream_synchronize(p.a);
      if (how == 1) p.device.event_synchronize(p.event);
      if (how == 2) p.device.stream_synchronize(p.b);  // another one
      if (how == 3) {
        while (p.device.event_query(p.event) == Status::not_ready) {
        }
      }
      p.step(p.b, y, z);
      p.device.synchronize();
      INFO(seed << ' ' << how);
      REQUIRE(p.device.faults().empty() == (how != 2));
    }
  }
}

TEST_CASE("Queries tell what is done and let a polling program get on") {
  Program p(0);
  const Address x = p.numbers(1), y = p.numbers(0);
  p.device.synchronize();
  CHECK(p.device.stream_query(p.a) == Status::success);
  p.step(p.a, x, y);
  CHECK(p.device.stream_query(p.a) == Status::not_ready);
  CHECK(p.device.stream_query(p.a) == Status::success);
  CHECK(p.device.last_error() == Status::success);  // not ready is no error
  float elapsed = -1;
  p.device.event_record(p.event, p.a);
  p.step(p.a, x, y);
  p.device.event_record(p.other_event, p.a);
  CHECK(p.device.event_elapsed(elapsed, p.event, p.other_event) == Status::not_ready);
  p.device.synchronize();
  CHECK(p.device.event_elapsed(elapsed, p.event, p.other_event) == Status::success);
  CHECK(elapsed > 0);
}

TEST_CASE("Memory of a stream: before its allocation, and after its release") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Program p(seed);
    const Address x = p.numbers(1), y = p.numbers(0);
    p.device.synchronize();
    Address scratch = 0;
    CHECK(p.device.malloc_async(scratch, kCount * 4, p.a) == Status::success);
    p.step(p.a, x, scratch);
    p.step(p.a, scratch, y);
    CHECK(p.device.free_async(scratch, p.a) == Status::success);
    p.device.synchronize();
    INFO(first_fault(p.device));
    REQUIRE(p.device.faults().empty());
    CHECK(p.first(y) == 7);
    p.step(p.a, scratch, y);
    CHECK(p.device.synchronize() == Status::illegal_address);
  }
  // Released in one stream while another still reads: a race or a use after free, whatever the
  // order.
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Program p(seed);
    const Address y = p.numbers(0);
    Address scratch = 0;
    p.device.malloc_async(scratch, kCount * 4, p.a);
    p.set(p.a, scratch, 1);
    p.device.synchronize();
    p.step(p.b, scratch, y);
    p.device.free_async(scratch, p.a);
    p.device.synchronize();
    REQUIRE(p.device.faults().size() == 1);
  }
}

TEST_CASE("A captured graph is replayed with its order, and may fork and join") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    for (const bool join : {true, false}) {
      Program p(seed);
      const Address x = p.numbers(1), y = p.numbers(0), z = p.numbers(0), w = p.numbers(0);
      p.device.synchronize();
      REQUIRE(p.device.capture_begin(p.a) == Status::success);
      p.step(p.a, x, y);
      p.device.event_record(p.event, p.a);
      p.device.stream_wait(p.b, p.event);
      CHECK(p.device.capturing(p.b));
      p.step(p.b, y, z);
      p.step(p.a, y, w);
      p.device.event_record(p.other_event, p.b);
      if (join) p.device.stream_wait(p.a, p.other_event);
      if (join) p.step(p.a, z, x);
      GraphId graph = 0;
      const Status status = p.device.capture_end(p.a, graph);
      if (!join) {
        CHECK(status == Status::capture_unjoined);
        continue;
      }
      REQUIRE(status == Status::success);
      CHECK(p.device.graph_nodes(graph) == 4);
      CHECK_FALSE(p.device.capturing(p.b));
      CHECK(p.device.launches().empty());
      GraphExecId exec = 0;
      REQUIRE(p.device.graph_instantiate(exec, graph) == Status::success);
      p.device.graph_destroy(graph);
      for (int i = 0; i < 3; ++i)
        REQUIRE(p.device.graph_launch(exec, i % 2 ? p.b : p.a) == Status::success);
      p.device.synchronize();
      INFO(seed << ' ' << first_fault(p.device));
      REQUIRE(p.device.faults().empty());
      // Three times x -> 2 (2 (2 x + 1) + 1) + 1.
      REQUIRE(p.first(x) == 1023);
      CHECK(p.device.launches().size() == 12);
      CHECK(p.device.graph_exec_destroy(exec) == Status::success);
    }
  }
}

TEST_CASE("A fork within a graph that lacks its wait is a race") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Program p(seed);
    const Address x = p.numbers(1), y = p.numbers(0), z = p.numbers(0);
    p.device.synchronize();
    p.device.capture_begin(p.a);
    p.device.event_record(p.event, p.a);
    p.device.stream_wait(p.b, p.event);  // forks before the step that it needs
    p.step(p.a, x, y);
    p.step(p.b, y, z);
    p.device.event_record(p.other_event, p.b);
    p.device.stream_wait(p.a, p.other_event);
    p.set(p.a, z, 1);
    GraphId graph = 0;
    GraphExecId exec = 0;
    REQUIRE(p.device.capture_end(p.a, graph) == Status::success);
    REQUIRE(p.device.graph_instantiate(exec, graph) == Status::success);
    p.device.graph_launch(exec, p.a);
    p.device.synchronize();
    REQUIRE(p.device.faults().size() == 1);
    CHECK(p.device.faults()[0].kind == FaultKind::race);
  }
}

TEST_CASE("What may not be done while a stream is captured") {
  const auto attempt = [](auto&& call) {
    Program p(0);
    const Address x = p.numbers(1);
    p.device.synchronize();
    p.device.capture_begin(p.a);
    p.set(p.a, x, 1);
    const Status status = call(p, x);
    GraphId graph = 0;
    CHECK(p.device.capture_end(p.a, graph) == Status::capture_invalidated);
    CHECK(p.device.synchronize() == Status::success);
    return status;
  };
  Address address = 0;
  CHECK(attempt([&](Program& p, Address) { return p.device.synchronize(); }) ==
        Status::capture_unsupported);
  CHECK(attempt([&](Program& p, Address) { return p.device.stream_synchronize(p.a); }) ==
        Status::capture_unsupported);
  CHECK(attempt([&](Program& p, Address) { return p.device.malloc(address, 4); }) ==
        Status::capture_unsupported);
  CHECK(attempt([&](Program& p, Address x) { return p.device.free(x); }) ==
        Status::capture_unsupported);
  int host = 0;
  CHECK(attempt([&](Program& p, Address x) {
          return p.device.copy(Device::address_of(&host), x, 4, CopyKind::device_to_host, p.a,
                               false);
        }) == Status::capture_unsupported);
  Program p(0);
  CHECK(p.device.capture_begin(kLegacyStream) == Status::capture_unsupported);
  GraphId graph = 0;
  CHECK(p.device.capture_end(p.a, graph) == Status::capture_unmatched);
}

TEST_CASE("Host functions run in their stream's order") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Program p(seed);
    std::vector<int> calls;
    for (int i = 0; i < 3; ++i) p.device.host_function(p.a, [&calls, i] { calls.push_back(i); });
    p.device.stream_synchronize(p.a);
    REQUIRE(calls == std::vector<int>{0, 1, 2});
  }
}

TEST_CASE("A fault stays and ends the work that follows; injected failures pass") {
  Program p(0);
  const Address x = p.numbers(1);
  const Address freed = p.numbers(0);
  p.device.synchronize();
  p.device.free(freed);
  p.step(p.a, freed, x);
  p.set(p.a, x, 99);
  CHECK(p.device.stream_synchronize(p.a) == Status::illegal_address);
  CHECK(p.device.last_error() == Status::illegal_address);
  CHECK(p.device.last_error() == Status::illegal_address);
  Address y = 0;
  CHECK(p.device.malloc(y, 4) == Status::illegal_address);
  CHECK(p.device.launches().empty());

  Program q(0);
  q.device.fail_call(Call::launch, Status::out_of_resources);
  const Address z = q.numbers(1);
  CHECK(q.device.launch_with(q.module->find("set"), q.shape, q.a, z, 2) ==
        Status::out_of_resources);
  CHECK(q.device.launch_with(q.module->find("set"), q.shape, q.a, z, 2) == Status::success);
  CHECK(q.device.launch_with(q.module->find("set"), q.shape, q.a, z) == Status::invalid_value);
  CHECK(q.device.launch_with(q.module->find("set"), q.shape, 12345, z, 2) ==
        Status::invalid_handle);
  q.device.fail_call(Call::synchronize, Status::launch_failure);
  CHECK(q.device.synchronize() == Status::launch_failure);
  CHECK(q.device.synchronize() == Status::success);
}

TEST_CASE("The same seed gives the same run") {
  const auto run = [](std::uint64_t seed) {
    Program p(seed, false);
    const Address x = p.numbers(1), y = p.numbers(2);
    p.device.synchronize();
    for (int i = 0; i < 10; ++i) {
      p.step(i % 2 ? p.a : p.b, i % 3 ? x : y, i % 3 ? y : x);
    }
    p.device.synchronize();
    return std::pair(p.first(x), p.first(y));
  };
  std::set<std::pair<int, int>> results;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    results.insert(run(seed));
    REQUIRE(run(seed) == run(seed));
  }
  CHECK(results.size() > 3);
}
