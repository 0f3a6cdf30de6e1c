// Races and barriers: faulty kernels are found, their correct twins are not accused.

#include <algorithm>
#include <numeric>
#include <random>

#include "catch.hpp"
#include "mutation.hpp"
#include "test_support.hpp"

using namespace verkv::cpu_device;
using namespace verkv::cpu_device::test;

namespace {

struct Outcome {
  std::vector<int> out;
  std::string text;
  FaultKind kind = FaultKind::launch;
  bool failed = false;
};

// Launches with `out` of `outputs` numbers, zero before.
Outcome run(const std::string& ptx, const std::string& name, unsigned threads, std::size_t outputs,
            std::uint64_t thread_order = 0) {
  DeviceOptions options;
  options.machine.thread_order = thread_order;
  Device device(options);
  const auto kernel = device.load(ptx)->find(name);
  const Address out = upload(device, std::vector<int>(outputs), "out");
  LaunchShape shape;
  shape.block.x = threads;
  device.launch_with(kernel, shape, kLegacyStream, out);
  device.synchronize();
  Outcome outcome;
  if (!device.faults().empty()) {
    outcome.failed = true;
    outcome.kind = device.faults()[0].kind;
    outcome.text = device.faults()[0].what();
  } else {
    outcome.out = download<int>(device, out, outputs);
  }
  return outcome;
}

void check_twins(const std::string& name, unsigned threads, std::size_t outputs, FaultKind kind,
                 const std::string& place) {
  for (std::uint64_t order = 0; order < 5; ++order) {
    const Outcome right =
        run(samples_ptx(), "samples::" + name + "<true>(int*)", threads, outputs, order);
    INFO(name << ' ' << right.text);
    CHECK_FALSE(right.failed);
    const Outcome wrong =
        run(samples_ptx(), "samples::" + name + "<false>(int*)", threads, outputs, order);
    INFO(wrong.text);
    CHECK(wrong.failed);
    CHECK((wrong.kind == kind || wrong.kind == FaultKind::uninitialised));
    CHECK(contains(wrong.text, "kernel samples::" + name + "<false>(int*) at " + place));
  }
}

std::string entry(const std::string& body, const std::string& declarations = "") {
  return module_of(
      ".file 1 \"test.cu\"\n.entry k(.param .u64 out) {\n"
      ".reg .pred %p<9>; .reg .b32 %r<12>; .reg .b64 %q<9>; .shared .align 16 .b8 tile[1024];\n" +
      declarations +
      "ld.param.u64 %q1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %q2, %r1, 4; add.s64 %q2, %q1, "
      "%q2; cvt.u32.u64 %r3, %q2;\n"
      "shl.b32 %r2, %r1, 2; mov.u32 %r4, tile; add.u32 %r2, %r4, %r2; setp.eq.u32 %p1, %r1, 0; "
      "setp.lt.u32 %p2, %r1, 32;\n" +
      body + "\nret; }");
}

Outcome run_entry(const std::string& body, unsigned threads = 64, std::size_t outputs = 64) {
  return run(entry(body), "k", threads, outputs);
}

}  // namespace

TEST_CASE("A missing barrier in shared memory is found, in every order of the threads") {
  check_twins("neighbour", 128, 128, FaultKind::race, "samples.cu:");
  check_twins("warp_neighbour", 32, 64, FaultKind::race, "samples.cu:");
  check_twins("reuse", 128, 128, FaultKind::race, "samples.cu:");
}

TEST_CASE("The message names both sides of a race") {
  const Outcome outcome =
      run_entry(".loc 1 10 0\nst.shared.u32 [tile], %r1;\n.loc 1 20 0\nld.shared.u32 %r5, [tile];");
  INFO(outcome.text);
  REQUIRE(outcome.kind == FaultKind::race);
  CHECK(
      contains(outcome.text,
               "race in kernel k at test.cu:10: st.shared.u32 of thread (1,0,0) of block (0,0,0)"));
  CHECK(contains(outcome.text, "write of shared memory+0 (4 bytes) without order after the"));
  CHECK(contains(outcome.text, "by thread (0,0,0) of block (0,0,0) of kernel k at test.cu:"));
}

TEST_CASE("Bytes of a word have owners of their own") {
  CHECK_FALSE(
      run_entry("add.u32 %r5, %r4, %r1; st.shared.u8 [%r5], %r1; ld.shared.u8 %r6, [%r5];").failed);
  CHECK(run_entry("add.u32 %r5, %r4, %r1; st.shared.u8 [%r5], %r1; and.b32 %r5, %r5, -4; "
                  "ld.shared.u32 %r6, [%r5];")
            .failed);
  CHECK_FALSE(run_entry("add.u32 %r5, %r4, %r1; st.shared.u8 [%r5], %r1; bar.sync 0; and.b32 %r5, "
                        "%r5, -4; ld.shared.u32 %r6, [%r5];")
                  .failed);
  // Words first, then a byte: the finer record inherits the coarser.
  CHECK(
      run_entry("st.shared.u32 [%r2], %r1; add.u32 %r5, %r4, %r1; ld.shared.u8 %r6, [%r5];").kind ==
      FaultKind::race);
}

TEST_CASE("Atomics race with plain accesses, not with each other") {
  CHECK_FALSE(
      run_entry("@%p1 st.shared.u32 [tile], 0; bar.sync 0; atom.shared.add.u32 %r5, [tile], 1;")
          .failed);
  CHECK(run_entry("@%p1 st.shared.u32 [tile], 0; bar.sync 0; atom.shared.add.u32 %r5, [tile], 1; "
                  "ld.shared.u32 %r6, [tile];")
            .kind == FaultKind::race);
  CHECK_FALSE(run_entry("@%p1 st.shared.u32 [tile], 0; bar.sync 0; atom.shared.add.u32 %r5, "
                        "[tile], 1; bar.sync 0; ld.shared.u32 %r6, [tile];")
                  .failed);
}

TEST_CASE("An atomic does not hide the same thread's plain write") {
  const std::string store = "@%p1 st.global.u32 [%q1], 0; ";
  const std::string add = "atom.global.add.u32 %r5, [%q1], 1; ";
  for (std::uint64_t order = 0; order < 3; ++order) {
    const auto outcome = [&](const std::string& body) {
      return run(entry(body), "k", 64, 64, order);
    };
    CHECK(outcome(store + add).kind == FaultKind::race);
    CHECK_FALSE(outcome(store + "bar.sync 0; " + add).failed);
    CHECK_FALSE(outcome(store + "@%p1 " + add + "bar.sync 0; " + add).failed);
  }
}

TEST_CASE("Every thread reads, one writes: the write needs a barrier for all readers") {
  const std::string start = "@%p1 st.shared.u32 [tile], 5; bar.sync 0; ld.shared.u32 %r5, [tile];";
  CHECK(run_entry(start + "setp.eq.u32 %p3, %r1, 63; @%p3 st.shared.u32 [tile], 6;").kind ==
        FaultKind::race);
  CHECK_FALSE(
      run_entry(start + "bar.sync 0; setp.eq.u32 %p3, %r1, 63; @%p3 st.shared.u32 [tile], 6;")
          .failed);
  // A barrier of the writer's warp is not enough.
  CHECK(
      run_entry(start + "bar.warp.sync -1; setp.eq.u32 %p3, %r1, 63; @%p3 st.shared.u32 [tile], 6;")
          .kind == FaultKind::race);
  CHECK_FALSE(
      run(entry(start +
                "bar.warp.sync -1; setp.eq.u32 %p3, %r1, 31; @%p3 st.shared.u32 [tile], 6;"),
          "k", 32, 32)
          .failed);
}

TEST_CASE("Races in global memory: within a block, between blocks, with constant loads") {
  const std::string shift = "add.s64 %q3, %q1, 4; mul.wide.u32 %q4, %r1, 4; add.s64 %q3, %q3, %q4;";
  CHECK(run_entry(shift + "st.global.u32 [%q2], %r1; ld.global.u32 %r5, [%q3];", 64, 65).kind ==
        FaultKind::race);
  CHECK_FALSE(
      run_entry(shift + "st.global.u32 [%q2], %r1; bar.sync 0; ld.global.u32 %r5, [%q3];", 64, 65)
          .failed);
  const Outcome constant = run_entry("st.global.u32 [%q2], %r1; ld.global.nc.u32 %r5, [%q2];");
  INFO(constant.text);
  CHECK(constant.kind == FaultKind::race);
  CHECK(contains(constant.text, "constant memory"));

  for (const bool atomic : {false, true}) {
    Device device;
    const auto kernel =
        device.load(entry(atomic ? "red.global.add.u32 [%q1], 1;" : "st.global.u32 [%q1], 1;"))
            ->find("k");
    device.launch_with(kernel, {{4, 1, 1}, {1, 1, 1}, 0}, kLegacyStream,
                       upload(device, std::vector<int>(1)));
    CHECK((device.synchronize() == Status::success) == atomic);
  }
}

TEST_CASE("Blocks hand results on through a fence and an atomic") {
  for (const bool fence : {true, false}) {
    for (const std::uint64_t order : {std::uint64_t{0}, std::uint64_t{7}, std::uint64_t{8}}) {
      DeviceOptions options;
      options.machine.block_order = order;
      Device device(options);
      const auto kernel = device.load(samples_ptx())
                              ->find(std::string("last_block_sum<") + (fence ? "true>" : "false>"));
      std::vector<int> values(8 * 64);
      std::iota(values.begin(), values.end(), 0);
      const Address x = upload(device, values);
      const Address partial = upload(device, std::vector<int>(16));
      const Address counter = upload(device, std::vector<unsigned>(1));
      const Address out = allocate<int>(device, 1);
      for (int repeat = 0; repeat < 2; ++repeat) {
        device.fill(partial, 0, 64, kLegacyStream);
        device.launch_with(kernel, {{8, 1, 1}, {64, 1, 1}, 0}, kLegacyStream, x, partial, counter,
                           out);
      }
      device.synchronize();
      INFO(first_fault(device));
      REQUIRE(device.faults().empty() == fence);
      if (fence)
        CHECK(download<int>(device, out, 1)[0] == 512 * 511 / 2);
      else
        CHECK(device.faults()[0].kind == FaultKind::race);
    }
  }
}

TEST_CASE("Fences and atomics of too narrow a scope do not order blocks") {
  // The writer's fence, or the reader's, is one of the block only.
  for (const int which : {0, 1}) {
    std::string ptx = samples_ptx();
    std::size_t at = ptx.find("membar.gl", ptx.find(".entry _ZN7samples14last_block_sumILb1E"));
    if (which == 1) at = ptx.find("membar.gl", at + 1);
    REQUIRE(at < ptx.find(".entry _ZN7samples14last_block_sumILb0E"));
    ptx.replace(at, 9, "membar.cta");
    Device device;
    const auto kernel = device.load(ptx)->find("last_block_sum<true>");
    const Address x = upload(device, std::vector<int>(8 * 64));
    const Address partial = upload(device, std::vector<int>(16));
    const Address counter = upload(device, std::vector<unsigned>(1));
    const Address out = allocate<int>(device, 1);
    device.launch_with(kernel, {{8, 1, 1}, {64, 1, 1}, 0}, kLegacyStream, x, partial, counter, out);
    device.synchronize();
    INFO(which);
    REQUIRE(device.faults().size() == 1);
    CHECK(device.faults()[0].kind == FaultKind::race);
  }

  for (const bool wide : {true, false}) {
    Device other;
    const auto add = other
                         .load(entry(wide ? "red.relaxed.gpu.global.add.u32 [%q1], 1;"
                                          : "red.relaxed.cta.global.add.u32 [%q1], 1;"))
                         ->find("k");
    other.launch_with(add, {{2, 1, 1}, {32, 1, 1}, 0}, kLegacyStream,
                      upload(other, std::vector<int>(1)));
    CHECK((other.synchronize() == Status::success) == wide);
  }
}

TEST_CASE("Threads of a block hand on through release and acquire") {
  // Thread 0 writes data and a flag, thread 32 waits for the flag; the order of the threads is
  // that.
  const auto body = [](const std::string& store, const std::string& load) {
    return "@!%p1 bra $R; st.shared.u32 [tile+64], 9; " + store +
           " [tile], 1; bra $E;\n"
           "$R: setp.ne.u32 %p3, %r1, 32; @%p3 bra $E; " +
           load + " %r5, [tile]; ld.shared.u32 %r6, [tile+64]; $E:";
  };
  CHECK_FALSE(run_entry(body("st.release.cta.shared.u32", "ld.acquire.cta.shared.u32")).failed);
  CHECK_FALSE(
      run_entry(body("membar.cta; st.volatile.shared.u32",
                     "ld.volatile.shared.u32 %r7, [tile]; membar.cta; ld.volatile.shared.u32"))
          .failed);
  CHECK(run_entry(body("st.relaxed.cta.shared.u32", "ld.relaxed.cta.shared.u32")).kind ==
        FaultKind::race);
  CHECK(run_entry(body("st.release.cta.shared.u32", "ld.relaxed.cta.shared.u32")).kind ==
        FaultKind::race);
}

TEST_CASE("Asynchronous copies are there only once they are awaited") {
  for (const bool wait : {true, false}) {
    Device device;
    const auto kernel =
        device.load(samples_ptx())->find(std::string("async_tile<") + (wait ? "true>" : "false>"));
    std::vector<int> values(4 * 128);
    std::iota(values.begin(), values.end(), 0);
    const Address in = upload(device, values);
    const Address out = allocate<int>(device, values.size());
    device.launch_with(kernel, {{}, {128, 1, 1}, 0}, kLegacyStream, in, out);
    device.synchronize();
    INFO(first_fault(device));
    REQUIRE(device.faults().empty() == wait);
    if (wait) {
      const auto found = download<int>(device, out, values.size());
      for (std::size_t i = 0; i < 128; ++i) REQUIRE(found[4 * i + 1] == values[4 * (127 - i) + 1]);
    } else {
      CHECK(device.faults()[0].kind == FaultKind::uninitialised);
    }
  }
  // The copy may overwrite from its start on, so readers of the old contents must be done by then.
  const std::string old =
      "st.shared.u32 [%r2], %r1; bar.sync 0; xor.b32 %r5, %r2, 4; ld.shared.u32 %r6, [%r5];";
  const std::string copy = "cp.async.ca.shared.global [%r2], [%q2], 4; cp.async.commit_group;";
  CHECK(run_entry(old + copy + "bar.sync 0; cp.async.wait_group 0;").kind == FaultKind::race);
  CHECK_FALSE(run_entry(old + "bar.sync 0;" + copy + "cp.async.wait_group 0;").failed);
  // Of two groups the older is there when one may be under way.
  const std::string two = copy +
                          "cp.async.ca.shared.global [%r2+512], [%q2], 4; cp.async.commit_group; "
                          "cp.async.wait_group 1;";
  CHECK_FALSE(run_entry(two + "ld.shared.u32 %r6, [%r2];").failed);
  CHECK(run_entry(two + "ld.shared.u32 %r6, [%r2+512];").kind == FaultKind::uninitialised);
}

TEST_CASE("Named barriers: producers and consumers") {
  const auto rounds = [](bool free) {
    Device device;
    const auto kernel = device.load(samples_ptx())
                            ->find(std::string("producer_consumer<") + (free ? "true>" : "false>"));
    const Address out = allocate<int>(device, 5 * 64);
    device.launch_with(kernel, {{}, {128, 1, 1}, 0}, kLegacyStream, out, 5);
    device.synchronize();
    if (!device.faults().empty()) return device.faults()[0].kind;
    const auto found = download<int>(device, out, 5 * 64);
    for (int r = 0; r < 5; ++r) {
      for (int i = 0; i < 64; ++i)
        REQUIRE(found[static_cast<std::size_t>(r * 64 + i)] == r * 100 + 63 - i);
    }
    return FaultKind::launch;
  };
  CHECK(rounds(true) == FaultKind::launch);
  // Without the way back the producers arrive twice, or overwrite what is still read.
  const FaultKind kind = rounds(false);
  CHECK((kind == FaultKind::race || kind == FaultKind::barrier));
}

TEST_CASE("Barriers that not all reach") {
  const Outcome early = run(samples_ptx(), "early_exit", 128, 128);
  INFO(early.text);
  CHECK(early.kind == FaultKind::barrier);
  CHECK(contains(early.text, "32 threads have exited"));
  CHECK(contains(early.text, "samples.cu:"));
  const Outcome apart = run(samples_ptx(), "divergent", 128, 128);
  INFO(apart.text);
  CHECK(apart.kind == FaultKind::barrier);
  CHECK(contains(apart.text, "divergent"));
  // Threads of one warp at two barriers with the same number.
  const Outcome warp = run_entry(
      "setp.lt.u32 %p3, %r1, 16; @%p3 bra $A; bar.sync 0; bra $E;\n$A: bar.sync 0;\n$E:", 32, 32);
  CHECK(warp.kind == FaultKind::barrier);
  CHECK(contains(warp.text, "from different places"));
  // Different numbers: both wait for ever.
  const Outcome never = run_entry("@%p2 bra $A; bar.sync 1; bra $E;\n$A: bar.sync 2;\n$E:");
  CHECK(never.kind == FaultKind::barrier);
  CHECK(contains(never.text, "nobody can go on"));
}

TEST_CASE("Numbers of threads that do not fit") {
  const Outcome differ = run_entry(
      "@%p2 bra $A; bar.sync 1, 64; bra $E;\n$A: bar.sync 1, 32;\n bar.sync 1, 64;\n$E:", 96, 96);
  INFO(differ.text);
  CHECK(differ.kind == FaultKind::barrier);
  CHECK(run_entry("bar.sync 1, 48;").kind == FaultKind::barrier);
  CHECK(contains(run_entry("bar.sync 1, 48;").text, "multiple of a warp"));
  CHECK(run_entry("bar.sync 16;").kind == FaultKind::barrier);
  CHECK(run_entry("bar.sync 1, 96;").kind == FaultKind::barrier);  // of 64 threads
  CHECK_FALSE(run_entry("@%p2 bra $E; bar.sync 1, 32;\n$E: bar.sync 0;").failed);
}

TEST_CASE("Barriers that reduce") {
  const Outcome outcome = run_entry(
      "setp.lt.u32 %p3, %r1, 10; bar.red.popc.u32 %r5, 0, %p3; bar.red.or.pred %p4, 0, %p3; "
      "bar.red.and.pred %p5, 0, %p3;\n"
      "@%p4 add.u32 %r5, %r5, 100; @%p5 add.u32 %r5, %r5, 1000; st.global.u32 [%q2], %r5;");
  INFO(outcome.text);
  CHECK(outcome.out == std::vector<int>(64, 110));
}

TEST_CASE("Masks of warp operations") {
  CHECK(run_entry("shfl.sync.bfly.b32 %r5, %r1, 1, 31, 0xfffe;", 32, 32).kind ==
        FaultKind::warp);  // lane 0 calls
  CHECK(run_entry("@%p1 bra $E; vote.sync.ballot.b32 %r5, %p2, -1;\n$E:", 32, 32).kind ==
        FaultKind::warp);                                                 // lane 0 does not
  CHECK(run_entry("bar.warp.sync -1;", 16, 16).kind == FaultKind::warp);  // half a warp
  CHECK_FALSE(run_entry("bar.warp.sync 0xffff;", 16, 16).failed);
  const Outcome outside = run_entry(
      "setp.gt.u32 %p3, %r1, 15; @%p3 bra $E; shfl.sync.idx.b32 %r5, %r1, 20, 31, 0xffff;\n$E:", 32,
      32);
  INFO(outside.text);
  CHECK(contains(outside.text, "reads lane 20, which is not in the mask"));
  const Outcome masks = run_entry(
      "@%p1 mov.u32 %r5, -1; @!%p1 mov.u32 %r5, 0xfffffffe; mov.u32 %r6, %r5; bar.warp.sync %r6;",
      32, 32);
  CHECK(masks.kind == FaultKind::warp);
}

TEST_CASE("A thread that never stops is reported") {
  DeviceOptions options;
  options.machine.instruction_limit = 10000;
  Device device(options);
  const auto kernel =
      device
          .load(
              entry("$A: ld.volatile.global.u32 %r5, [%q1]; setp.eq.u32 %p3, %r5, 0; @%p3 bra $A;"))
          ->find("k");
  device.launch_with(kernel, {}, kLegacyStream, upload(device, std::vector<int>(1)));
  CHECK(device.synchronize() == Status::launch_failure);
  CHECK(device.faults().at(0).kind == FaultKind::endless);
}

TEST_CASE("Each barrier of a scan is missed when it is dropped") {
  const auto scan = [](const std::string& ptx, std::string& text) {
    Device device;
    const auto kernel = device.load(ptx)->find("block_scan");
    std::vector<int> values(256);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int>(i * i % 37);
    const Address in = upload(device, values);
    const Address out = allocate<int>(device, 256);
    const Address totals = allocate<int>(device, 2);
    device.launch_with(kernel, {{2, 1, 1}, {128, 1, 1}, 0}, kLegacyStream, in, out, totals);
    if (device.synchronize() != Status::success) {
      text = first_fault(device);
      return false;
    }
    const auto found = download<int>(device, out, 256);
    for (std::size_t i = 0, sum = 0; i < 256; ++i) {
      if (i % 128 == 0) sum = 0;
      sum += static_cast<std::size_t>(values[i]);
      if (found[i] != static_cast<int>(sum)) return false;
    }
    return true;
  };
  std::string text;
  REQUIRE(scan(samples_ptx(), text));
  const auto mutants = without_one_barrier(samples_ptx(), "block_scan");
  REQUIRE(mutants.size() == 3);
  for (const Mutant& mutant : mutants) {
    INFO(mutant.what);
    CHECK_FALSE(scan(mutant.ptx, text));
    CHECK(contains(text, "race"));
  }
  CHECK(without_one_barrier(samples_ptx(), "warp_neighbourILb1", true).size() == 1);
  CHECK(without_one_barrier(samples_ptx(), "warp_neighbourILb1").empty());
}

TEST_CASE("A launch runs what the kernel was changed to") {
  Device device;
  const auto kernel = device.load(samples_ptx())->find("block_scan");
  const Address in = upload(device, std::vector<int>(128, 1));
  const Address out = allocate<int>(device, 128);
  const Address totals = allocate<int>(device, 1);
  const auto scan = [&] {
    device.launch_with(kernel, {{1, 1, 1}, {128, 1, 1}, 0}, kLegacyStream, in, out, totals);
    return device.synchronize() == Status::success;
  };
  REQUIRE(scan());
  const std::vector<std::uint32_t> barriers = barriers_of(*kernel);
  REQUIRE(barriers.size() == 3);
  const std::vector<bool> met = device.launches()[0].counters.barriers_met;
  REQUIRE(met.size() == kernel->code.size());
  CHECK(std::count(met.begin(), met.end(), true) == 3);
  for (const std::uint32_t barrier : barriers) CHECK(met[barrier]);
  device.change_kernels(
      [&](const auto& one) { return without_instruction(*one, barriers_of(*one)[1]); });
  CHECK_FALSE(scan());
  CHECK(contains(first_fault(device), "race"));
  CHECK_THROWS(without_instruction(*kernel, static_cast<std::uint32_t>(kernel->code.size())));
}

TEST_CASE("Tensor cores score a sketch exactly") {
  Device device;
  const auto kernel = device.load(samples_ptx())->find("sketch_scores");
  const std::size_t n = 300;
  std::vector<std::uint32_t> sketch(n * 8);
  std::vector<std::int16_t> query(512);
  std::uint64_t state = 3;
  const auto random = [&] {
    return static_cast<std::uint32_t>(
        (state = state * 6364136223846793005ULL + 1442695040888963407ULL) >> 32);
  };
  for (auto& word : sketch) word = random();
  for (auto& q : query) q = static_cast<std::int16_t>(random() % 32767 - 16383);
  const Address out = allocate<int>(device, 4 * n);
  device.launch_with(kernel, {{3, 1, 1}, {256, 1, 1}, 0}, kLegacyStream, upload(device, sketch),
                     upload(device, query), static_cast<int>(n), out);
  const auto found = download<int>(device, out, 4 * n);
  INFO(first_fault(device));
  REQUIRE(device.faults().empty());
  for (std::size_t h = 0; h < 4; ++h) {
    for (std::size_t i = 0; i < n; ++i) {
      int expected = 0;
      for (std::size_t d = 0; d < 128; ++d) {
        expected += (static_cast<int>((sketch[i * 8 + d / 16] >> (2 * (d % 16))) & 3) * 2 - 3) *
                    query[h * 128 + d];
      }
      REQUIRE(found[h * n + i] == expected);
    }
  }
}

TEST_CASE("Halves through the toolkit's own conversions") {
  Device device;
  const auto kernel = device.load(samples_ptx())->find("halves");
  const Address a = upload(device, std::vector<std::uint16_t>(32, 0x3fc0));  // 1.5 in bf16
  const Address b = upload(device, std::vector<std::uint16_t>(32, 0x4100));  // 2.5 in f16
  const Address sum = allocate<float>(device, 32);
  const Address pairs = allocate<std::uint32_t>(device, 32);
  const Address products = allocate<std::uint16_t>(device, 32);
  device.launch_with(kernel, {{}, {32, 1, 1}, 0}, kLegacyStream, a, b, sum, pairs, products);
  CHECK(download<float>(device, sum, 32) == std::vector<float>(32, 4.0F));
  CHECK(download<std::uint32_t>(device, pairs, 32) ==
        std::vector<std::uint32_t>(32, 0x41484090));  // 12.5, 4.5
  CHECK(download<std::uint16_t>(device, products, 32) ==
        std::vector<std::uint16_t>(32, 0x4400));  // 4
  INFO(first_fault(device));
  CHECK(device.faults().empty());
}

// ---- shortcuts of the race check

namespace {

// Even operations are before all later ones, odd ones before none.
struct HalfOrdered : History {
  bool ordered(std::uint32_t earlier, std::uint32_t later) const override {
    return earlier == later || (earlier < later && earlier % 2 == 0);
  }
  std::string describe(const Access&) const override { return ""; }
};

bool equal(const Access& a, const Access& b) {
  return a.operation == b.operation && a.block == b.block && a.barriers == b.barriers &&
         a.tick == b.tick && a.pc == b.pc && a.thread == b.thread;
}

bool equal(const Cell& a, const Cell& b) {
  return equal(a.write, b.write) && equal(a.read, b.read) && a.write_strength == b.write_strength &&
         a.reads_strength == b.reads_strength && a.many_blocks == b.many_blocks &&
         a.many_warps == b.many_warps && a.readers == b.readers;
}

// Threads of several blocks that meet at barriers, see each other's ticks, and fence, at random.
struct Crowd {
  static constexpr std::uint32_t kBlocks = 3, kThreads = 70;
  explicit Crowd(std::uint64_t seed)
      : random(seed), blocks(1 + static_cast<std::uint32_t>(seed) % kBlocks) {}

  std::uint32_t below(std::uint32_t count) { return static_cast<std::uint32_t>(random() % count); }
  void start(std::uint32_t number) {
    tick = 1;
    for (std::uint32_t i = 0; i < clocks.size(); ++i) {
      clocks[i] = {};
      clocks[i].operation = number;
      clocks[i].block = i / kThreads;
      clocks[i].thread = static_cast<std::uint16_t>(i % kThreads);
    }
  }
  void meet() {
    const std::uint32_t what = below(8);
    const std::uint32_t block = below(blocks);
    ThreadClock* const threads = &clocks[std::size_t{block} * kThreads];
    ++tick;
    if (what == 0) {
      for (std::uint32_t i = 0; i < kThreads; ++i) {
        ++threads[i].barriers;
        threads[i].latest_seen = 0;
        threads[i].warp_seen = {};
        threads[i].seen.clear();
      }
    } else if (what == 1) {
      ThreadClock& one = threads[below(kThreads)];
      one.release(tick, true);
      ThreadClock& other = clocks[below(blocks * kThreads)];
      other.pending = one.released;
      other.acquire(kThreads, true);
    } else {
      // The lanes of a warp, or two threads.
      const std::uint32_t first = below(3) * 32;
      const std::uint32_t last = std::min(first + 32, kThreads);
      for (std::uint32_t i = first; i < last; ++i) {
        for (std::uint32_t j = first; j < last && what < 4; ++j)
          threads[i].see(static_cast<std::uint16_t>(j), tick, kThreads);
      }
      if (what >= 4) {
        threads[below(kThreads)].see(static_cast<std::uint16_t>(below(kThreads)), tick, kThreads);
      }
    }
  }

  std::mt19937_64 random;
  std::vector<ThreadClock> clocks = std::vector<ThreadClock>(std::size_t{kBlocks} * kThreads);
  std::uint32_t blocks, tick = 1;  // blocks that do anything
};

}  // namespace

TEST_CASE("the quick check of an access does what the full one does", "[race]") {
  const HalfOrdered history;
  std::array<std::uint64_t, 2> quick{}, full{};  // by kind
  std::uint64_t conflicts = 0;
  for (std::uint64_t seed = 0; seed < 900; ++seed) {
    Crowd crowd(seed);
    Cell cell;
    const bool many_writes = seed / 3 % 2 == 0;
    for (std::uint32_t i = 0; i < 600; ++i) {
      if (i % 150 == 0) crowd.start(1 + i / 150 + crowd.below(2));
      if (crowd.below(2) == 0) crowd.meet();
      const auto kind =
          crowd.below(many_writes ? 3 : 30) == 0 ? AccessKind::write : AccessKind::read;
      const auto strength = crowd.below(5) == 0 ? Strength{1} : Strength::plain;
      // Often the same few threads.
      const ThreadClock& me =
          crowd.clocks[crowd.below(crowd.below(2) == 0 ? 4 : crowd.blocks * Crowd::kThreads)];
      Cell after = cell;
      const Conflict conflict =
          check_access(after, me, crowd.tick, i, kind, strength, crowd.blocks, history);
      const bool raced = conflict.other.operation != 0;
      if (strength == Strength::plain) {
        Cell quickly = cell;
        const bool done = check_quickly(
            quickly, me, crowd.tick, i, kind,
            [&](std::uint32_t operation) { return history.ordered(operation, me.operation); });
        REQUIRE(!(done && raced));
        REQUIRE(equal(quickly, done ? after : cell));
        (done ? quick : full)[static_cast<std::size_t>(kind)] += !raced;
      }
      conflicts += raced;
      if (!raced) cell = after;
    }
  }
  // That it is not vacuous.
  for (const std::size_t kind : {0U, 1U}) {
    CHECK(quick[kind] > 2000);
    CHECK(full[kind] > 100);
  }
  CHECK(conflicts > 1000);
}

TEST_CASE("reads of one place by a warp are remembered as if one after the other", "[race]") {
  const HalfOrdered history;
  std::uint64_t together = 0, apart = 0;
  for (std::uint64_t seed = 0; seed < 12000; ++seed) {
    Crowd crowd(seed);
    Cell cell;
    const auto touch = [&](Cell& at, std::uint32_t thread, AccessKind kind, std::uint32_t pc) {
      Cell after = at;
      const Conflict found = check_access(after, crowd.clocks[thread], crowd.tick, pc, kind,
                                          Strength::plain, crowd.blocks, history);
      if (found.other.operation == 0) at = after;
      return found.other.operation == 0;
    };
    // What was before.
    crowd.start(2);
    for (std::uint32_t i = 0; i < crowd.below(20); ++i) {
      if (i == 10) crowd.start(4);
      if (crowd.below(2) == 0) crowd.meet();
      touch(cell, crowd.below(crowd.blocks * Crowd::kThreads),
            crowd.below(4) == 0 ? AccessKind::write : AccessKind::read, i);
    }
    const std::uint32_t warp = crowd.below(crowd.blocks) * Crowd::kThreads + crowd.below(2) * 32;
    const std::uint32_t lanes = static_cast<std::uint32_t>(crowd.random()) | 1U;
    if (!touch(cell, warp, AccessKind::read, 100)) continue;
    bool alike = read_alike(cell, crowd.clocks[warp], crowd.tick);
    Cell in_turn = cell;
    bool raced = false;
    std::uint32_t last = warp;
    for (std::uint32_t lane = 0; lane < 32; ++lane) {
      if (!((lanes >> lane) & 1)) continue;
      last = warp + lane;
      alike = alike && !crowd.clocks[last].acquired;
      raced = raced || (lane > 0 && !touch(in_turn, last, AccessKind::read, 100));
    }
    (alike ? together : apart) += 1;
    if (!alike) continue;
    REQUIRE_FALSE(raced);
    const ThreadClock& clock = crowd.clocks[last];
    add_alike(cell, lanes,
              {clock.operation, clock.block, clock.barriers, crowd.tick, 100, clock.thread});
    if (lanes != 1) REQUIRE(equal(cell, in_turn));
  }
  CHECK(together > 500);
  CHECK(apart > 100);
}
