// Windows of memory: bounds, alignment, lifetime, initialisation, sizes beyond the machine's,
// counts.

#include <algorithm>

#include "catch.hpp"
#include "test_support.hpp"

using namespace verkv::cpu_device;
using namespace verkv::cpu_device::test;

namespace {

// out[tid] = in[index], by an instruction of the caller's choice.
std::string access_kernel(const std::string& instruction, const std::string& shared = "") {
  return module_of(
      ".file 1 \"folder/access.cu\"\n"
      ".entry access(.param .u64 p, .param .u64 offset) {\n"
      ".reg .b32 %r<9>; .reg .b64 %q<6>;\n" +
      shared +
      "ld.param.u64 %q1, [p]; ld.param.u64 %q2, [offset]; add.s64 %q3, %q1, %q2; mov.u32 %r1, "
      "%tid.x; cvt.u32.u64 %r8, %q2;\n"
      ".loc 1 17 0\n" +
      instruction + "\nret; }");
}

struct Outcome {
  Status status = Status::success;
  FaultKind kind = FaultKind::launch;
  std::string text;
};

Outcome access_once(Device& device, const std::string& instruction, Address p, std::uint64_t offset,
                    const std::string& shared = "") {
  const auto kernel = device.load(access_kernel(instruction, shared))->find("access");
  device.launch_with(kernel, {}, kLegacyStream, p, offset);
  Outcome outcome;
  outcome.status = device.synchronize();
  if (!device.faults().empty()) {
    outcome.kind = device.faults().front().kind;
    outcome.text = device.faults().front().what();
  }
  return outcome;
}

Outcome access_once(const std::string& instruction, std::uint64_t offset,
                    const std::string& shared = "") {
  Device device;
  const Address p = upload(device, std::vector<std::uint32_t>(16), "numbers");
  return access_once(device, instruction, p, offset, shared);
}

}  // namespace

TEST_CASE("Accesses to global memory within bounds, and one beyond either end") {
  CHECK(access_once("ld.global.u32 %r2, [%q3];", 60).status == Status::success);
  CHECK(access_once("ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%q3];", 48).status == Status::success);
  CHECK(access_once("st.global.u8 [%q3], %r1;", 63).status == Status::success);
  for (const std::string instruction :
       {"ld.global.u32 %r2, [%q3];", "st.global.u32 [%q3], %r1;", "ld.u32 %r2, [%q3];",
        "atom.global.add.u32 %r2, [%q3], 1;", "red.global.add.u32 [%q3], 1;"}) {
    for (const std::uint64_t offset : {std::uint64_t{64}, 0 - std::uint64_t{4}}) {
      const Outcome outcome = access_once(instruction, offset);
      INFO(instruction << ' ' << outcome.text);
      CHECK(outcome.status == Status::illegal_address);
      CHECK(outcome.kind == FaultKind::out_of_bounds);
      CHECK(contains(outcome.text, "kernel access at access.cu:17"));
      CHECK(contains(outcome.text, "thread (0,0,0) of block (0,0,0)"));
      CHECK(contains(outcome.text, "numbers"));
    }
  }
}

TEST_CASE("Misaligned accesses") {
  for (const auto& [instruction, offset] : std::vector<std::pair<std::string, std::uint64_t>>{
           {"ld.global.u32 %r2, [%q3];", 2},
           {"ld.global.u16 %r2, [%q3];", 1},
           {"ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%q3];", 8},
           {"st.global.v2.u32 [%q3], {%r1, %r1};", 4},
           {"st.global.u64 [%q3], %q1;", 4}}) {
    const Outcome outcome = access_once(instruction, offset);
    INFO(instruction << ' ' << outcome.text);
    CHECK(outcome.status == Status::misaligned_address);
    CHECK(contains(outcome.text, "access.cu:17"));
  }
}

TEST_CASE("Memory that was freed, or is not the device's") {
  Device device;
  const Address p = upload(device, std::vector<int>(16), "old");
  CHECK(device.free(p) == Status::success);
  CHECK(device.free(p) == Status::invalid_value);
  device.last_error();
  const Outcome freed = access_once(device, "ld.global.u32 %r2, [%q3];", p, 0);
  INFO(freed.text);
  CHECK(freed.kind == FaultKind::use_after_free);
  CHECK(contains(freed.text, "old"));

  Device other;
  int on_the_host = 0;
  CHECK(access_once(other, "ld.global.u32 %r2, [%q3];", Device::address_of(&on_the_host), 0).kind ==
        FaultKind::out_of_bounds);
  CHECK(access_once("ld.global.u32 %r2, [%q2];", 0).kind == FaultKind::out_of_bounds);  // null
  Device third;
  CHECK(third.free(Device::address_of(&on_the_host)) == Status::invalid_value);
}

TEST_CASE("Reads of memory that nobody wrote") {
  Device device;
  const Address p = allocate<std::uint32_t>(device, 16, "fresh");
  const Outcome outcome = access_once(
      device, "st.global.u32 [%q3], %r1;\nld.global.u32 %r2, [%q3];\nld.global.u32 %r3, [%q3+4];",
      p, 0);
  INFO(outcome.text);
  CHECK(outcome.kind == FaultKind::uninitialised);
  CHECK(contains(outcome.text, "fresh+4"));
  CHECK(access_once("ld.shared.u32 %r2, [tile+4];", 0, ".shared .align 4 .b8 tile[8];\n").kind ==
        FaultKind::uninitialised);
  CHECK(access_once("ld.local.u32 %r2, [own];", 0, ".local .align 4 .b8 own[8];\n").kind ==
        FaultKind::uninitialised);
  // Part of what a vector load reads.
  CHECK(access_once("st.shared.u32 [tile], %r1; ld.shared.v2.u32 {%r2, %r3}, [tile];", 0,
                    ".shared .align 8 .b8 tile[8];\n")
            .kind == FaultKind::uninitialised);

  DeviceOptions relaxed;
  relaxed.machine.check_uninitialised = false;
  Device lenient(relaxed);
  CHECK(access_once(lenient, "ld.global.u32 %r2, [%q3];", allocate<int>(lenient, 1), 0).status ==
        Status::success);

  // A copy takes it along, a fill ends it.
  Device copies;
  const Address from = allocate<std::uint32_t>(copies, 4);
  const Address to = upload(copies, std::vector<std::uint32_t>(4));
  copies.copy(to, from, 8, CopyKind::device_to_device, kLegacyStream, false);
  CHECK(access_once(copies, "ld.global.u32 %r2, [%q3];", to, 8).status == Status::success);
  copies.fill(from, 0, 4, kLegacyStream);
  CHECK(access_once(copies, "ld.global.u32 %r2, [%q3];", from, 0).status == Status::success);
  CHECK(access_once(copies, "ld.global.u32 %r2, [%q3];", to, 4).kind == FaultKind::uninitialised);
}

TEST_CASE("Shared, local and parameter windows") {
  const std::string tile = ".shared .align 16 .b8 tile[64];\n";
  CHECK(access_once("st.shared.u32 [tile+60], %r1;", 0, tile).status == Status::success);
  // Static shared memory is rounded up to 128 bytes, where the dynamic part begins.
  const Outcome beyond = access_once("st.shared.u32 [tile+128], %r1;", 0, tile);
  INFO(beyond.text);
  CHECK(beyond.kind == FaultKind::out_of_bounds);
  CHECK(contains(beyond.text, "shared memory"));
  CHECK(access_once("st.local.u32 [own+8], %r1;", 0, ".local .align 4 .b8 own[8];\n").kind ==
        FaultKind::out_of_bounds);
  // Addresses of shared memory computed in 32 bits wrap around.
  CHECK(access_once("mov.u32 %r4, tile; sub.u32 %r4, %r4, 4; st.shared.u32 [%r4+4], %r1;", 0, tile)
            .status == Status::success);
  // Through generic addresses.
  const std::string generic =
      "mov.u64 %q4, tile; cvta.shared.u64 %q4, %q4; st.u32 [%q4+4], 5; ld.shared.u32 %r2, "
      "[tile+4]; st.global.u32 [%q3], %r2;";
  Device device;
  const Address p = allocate<std::uint32_t>(device, 1);
  const Outcome outcome = access_once(device, generic, p, 0, tile);
  INFO(outcome.text);
  CHECK(outcome.status == Status::success);
  CHECK(download<std::uint32_t>(device, p, 1)[0] == 5);
}

TEST_CASE("Dynamic shared memory begins after the static part and is bounded") {
  const std::string ptx = module_of(
      ".extern .shared .align 16 .b8 dynamic[];\n"
      ".entry k(.param .u32 at) { .reg .b32 %r<4>; .shared .align 4 .b8 fixed[4]; ld.param.u32 "
      "%r1, [at];\n"
      "st.shared.u32 [fixed], 7; mov.u32 %r2, dynamic; add.u32 %r2, %r2, %r1; st.shared.u32 [%r2], "
      "9; ld.shared.u32 %r3, [fixed];\n"
      "{ .reg .pred %p; setp.eq.u32 %p, %r3, 7; @!%p trap; }\nret; }");
  Device device;
  const auto kernel = device.load(ptx)->find("k");
  LaunchShape shape;
  shape.dynamic_shared = 256;
  device.launch_with(kernel, shape, kLegacyStream, std::uint32_t{0});
  device.launch_with(kernel, shape, kLegacyStream, std::uint32_t{252});
  CHECK(device.synchronize() == Status::success);
  device.launch_with(kernel, shape, kLegacyStream, std::uint32_t{256});
  CHECK(device.synchronize() == Status::illegal_address);
}

TEST_CASE("Limits of a launch") {
  Device device;
  const auto module =
      device.load(module_of(".entry plain() { ret; }\n.entry bounded() .maxntid 64, 1, 1 { ret; "
                            "}\n.entry exact() .reqntid 32 { ret; }"));
  const auto launch = [&](const char* name, Dim3 grid, Dim3 block, std::size_t shared = 0) {
    return device.launch_with(module->find(name), {grid, block, shared}, kLegacyStream);
  };
  CHECK(launch("plain", {}, {1024, 1, 1}) == Status::success);
  CHECK(launch("plain", {}, {1025, 1, 1}) == Status::invalid_configuration);
  CHECK(launch("plain", {}, {32, 33, 1}) == Status::invalid_configuration);
  CHECK(launch("plain", {}, {1, 1, 65}) == Status::invalid_configuration);
  CHECK(launch("plain", {0, 1, 1}, {}) == Status::invalid_configuration);
  CHECK(launch("plain", {1, 65536, 1}, {}) == Status::invalid_configuration);
  CHECK(launch("bounded", {}, {65, 1, 1}) == Status::out_of_resources);
  CHECK(launch("exact", {}, {64, 1, 1}) == Status::invalid_configuration);
  CHECK(launch("exact", {}, {32, 1, 1}) == Status::success);
  CHECK(launch("plain", {}, {}, 49 << 10) == Status::invalid_value);
  device.allow_shared(*module->find("plain"), 100 << 10);
  CHECK(launch("plain", {}, {}, 100 << 10) == Status::success);
  CHECK(launch("plain", {}, {}, 101 << 10) == Status::invalid_value);
  CHECK(device.last_error() == Status::invalid_value);
  CHECK(device.last_error() == Status::success);
  CHECK(device.synchronize() == Status::success);
}

TEST_CASE("An allocation of more than 2^31 elements takes only what is touched") {
  Device device;
  const std::uint64_t elements = (std::uint64_t{5} << 31) + 1000;
  const Address bytes = allocate<std::uint8_t>(device, elements, "vast");
  const auto kernel = device.load(samples_ptx())->find("store_far");
  LaunchShape shape;
  shape.block.x = 64;
  for (const std::uint64_t offset :
       {std::uint64_t{0}, std::uint64_t{1} << 31, std::uint64_t{1} << 32, elements - 64}) {
    device.launch_with(kernel, shape, kLegacyStream, bytes, offset);
    const auto found = download<std::uint8_t>(device, bytes + offset, 64);
    for (std::size_t i = 0; i < 64; ++i) REQUIRE(found[i] == i);
  }
  INFO(first_fault(device));
  CHECK(device.faults().empty());
  CHECK(device.memory().find(bytes)->contents->touched_bytes() <= 8 * kPageBytes);
  device.launch_with(kernel, shape, kLegacyStream, bytes, elements - 63);
  CHECK(device.synchronize() == Status::illegal_address);
}

TEST_CASE("The device's memory is finite, and calls can be made to fail") {
  DeviceOptions options;
  options.memory_bytes = 1 << 20;
  Device device(options);
  Address a = 0, b = 0;
  CHECK(device.malloc(a, 1 << 19) == Status::success);
  CHECK(device.malloc(b, (1 << 19) + 1) == Status::out_of_memory);
  CHECK(device.last_error() == Status::out_of_memory);
  CHECK(device.malloc(b, 1 << 19) == Status::success);
  CHECK(device.free(b) == Status::success);
  CHECK(device.memory().used() == 1 << 19);
  CHECK(device.live_allocations() == 1);

  device.fail_call(Call::malloc, Status::out_of_memory, 1);
  CHECK(device.malloc(b, 8) == Status::success);
  CHECK(device.malloc(b, 8) == Status::out_of_memory);
  CHECK(device.malloc(b, 8) == Status::success);
  device.fail_call(Call::host_register, Status::not_supported, 0, true);
  std::vector<std::uint64_t> host(4096);
  CHECK(device.host_register(host.data(), 4096) == Status::not_supported);
  CHECK(device.host_register(host.data(), 4096) == Status::not_supported);
  device.stop_failing();
  CHECK(device.host_register(host.data(), 4096) == Status::success);
  CHECK(device.host_register(host.data() + 8, 64) == Status::already_registered);
  CHECK(device.host_unregister(host.data()) == Status::success);
  CHECK(device.host_unregister(host.data()) == Status::not_registered);
}

TEST_CASE("Kernels read and write pinned memory of the host, within its bounds") {
  Device device;
  void* host = nullptr;
  CHECK(device.host_malloc(host, 64) == Status::success);
  auto* numbers = static_cast<std::uint32_t*>(host);
  numbers[3] = 41;
  CHECK(access_once(device,
                    "ld.global.u32 %r2, [%q3]; add.u32 %r2, %r2, 1; st.global.u32 [%q3+4], %r2;",
                    Device::address_of(host), 12)
            .status == Status::success);
  CHECK(numbers[4] == 42);
  const Address p = Device::address_of(host);
  CHECK(access_once(device, "ld.global.u32 %r2, [%q3];", p, 64).kind == FaultKind::out_of_bounds);

  Device second;
  CHECK(second.host_malloc(host, 64) == Status::success);
  CHECK(second.host_free(host) == Status::success);
  CHECK(access_once(second, "ld.global.u32 %r2, [%q3];", Device::address_of(host), 0).kind ==
        FaultKind::use_after_free);
}

TEST_CASE("Kernels read and write managed memory, and ordinary memory where the device can") {
  const std::string increment =
      "ld.global.u32 %r2, [%q3]; add.u32 %r2, %r2, 1; st.global.u32 [%q3], %r2;";
  DeviceOptions options;
  options.pageable_access = true;
  Device device(options);
  void* managed = nullptr;
  CHECK(device.managed_malloc(managed, 64) == Status::success);
  CHECK(device.advise(managed, 64) == Status::success);
  static_cast<std::uint32_t*>(managed)[3] = 41;
  CHECK(access_once(device, increment, Device::address_of(managed), 12).status == Status::success);
  CHECK(static_cast<std::uint32_t*>(managed)[3] == 42);
  std::vector<std::uint32_t> ordinary(32, 6);
  CHECK(device.advise(ordinary.data(), 64) == Status::success);
  CHECK(access_once(device, increment, Device::address_of(ordinary.data()), 8).status ==
        Status::success);
  CHECK(ordinary[2] == 7);
  CHECK(device.live_allocations() == 1);
  CHECK(device.free(Device::address_of(managed)) == Status::success);
  CHECK(device.live_allocations() == 0);
  device.fail_call(Call::managed_malloc, Status::out_of_memory);
  CHECK(device.managed_malloc(managed, 64) == Status::out_of_memory);
  device.fail_call(Call::advise, Status::not_supported);
  CHECK(device.advise(ordinary.data(), 64) == Status::not_supported);
  CHECK(access_once(device, increment, Device::address_of(ordinary.data()), 64).kind ==
        FaultKind::out_of_bounds);

  Device second;  // reaches nothing that was not given to it
  CHECK(second.advise(ordinary.data(), 64) == Status::invalid_value);
  CHECK(access_once(second, increment, Device::address_of(ordinary.data()), 8).kind ==
        FaultKind::out_of_bounds);
  options.host_register = false;
  Device third(options);
  CHECK(third.host_register(ordinary.data(), 64) == Status::not_supported);
}

TEST_CASE("Copies check what kernels' accesses check") {
  const auto outcome = [](auto&& body) {
    Device device;
    body(device, upload(device, std::vector<int>(4), "four"));
    device.synchronize();
    return device.faults().empty() ? std::string() : std::string(device.faults()[0].what());
  };
  std::vector<int> host(8);
  const auto here = Device::address_of(host.data());
  CHECK(contains(outcome([&](Device& d, Address p) {
                   d.copy(p, here, 20, CopyKind::host_to_device, kLegacyStream, true);
                 }),
                 "20 bytes at offset 0 of the 16 bytes of four"));
  CHECK(contains(outcome([&](Device& d, Address p) {
                   d.copy(here, p + 8, 12, CopyKind::device_to_host, kLegacyStream, true);
                 }),
                 "four"));
  CHECK(contains(outcome([&](Device& d, Address p) { d.fill(p + 4, 0, 16, kLegacyStream); }),
                 "fill"));
  Device device;
  const Address p = upload(device, std::vector<int>(4));
  CHECK(device.copy(p, here, 16, CopyKind::device_to_host, kLegacyStream, true) ==
        Status::invalid_memcpy_direction);
  CHECK(device.copy(p, here, 16, CopyKind::any, kLegacyStream, true) == Status::success);

  // Rows of a larger matrix.
  std::vector<int> matrix(6 * 4);
  for (std::size_t i = 0; i < matrix.size(); ++i) matrix[i] = static_cast<int>(i);
  CHECK(device.copy_2d(p, 8, Device::address_of(&matrix[7]), 24, 8, 2, CopyKind::host_to_device,
                       kLegacyStream, true) == Status::success);
  CHECK(download<int>(device, p, 4) == std::vector<int>{7, 8, 13, 14});
}

TEST_CASE("Variables of a module") {
  Device device;
  const auto module = device.load(samples_ptx());
  Address table = 0, reads = 0;
  std::uint64_t bytes = 0;
  REQUIRE(device.variable(*module, "_ZN7samples5tableE", table, bytes) == Status::success);
  CHECK(bytes == 64);
  REQUIRE(device.variable(*module, "_ZN7samples11table_readsE", reads, bytes) == Status::success);
  CHECK(device.variable(*module, "missing", table, bytes) == Status::not_found);
  const std::vector<float> values(16, 1.5F);
  device.copy(table, Device::address_of(values.data()), 64, CopyKind::host_to_device, kLegacyStream,
              true);
  LaunchShape shape;
  shape.block.x = 32;
  const Address out = allocate<float>(device, 32);
  device.launch_with(module->find("use_table"), shape, kLegacyStream, out);
  CHECK(download<float>(device, out, 32) == std::vector<float>(32, 3.0F));
  CHECK(download<int>(device, reads, 1)[0] == 6);
  INFO(first_fault(device));
  CHECK(device.faults().empty());
}

TEST_CASE("Counters of a launch") {
  Device device;
  const auto module = device.load(samples_ptx());
  const int n = 1000;
  const Address x = upload(device, std::vector<float>(n, 1), "x");
  const Address y = upload(device, std::vector<float>(n, 2), "y");
  LaunchShape shape;
  shape.grid.x = 4;
  shape.block.x = 256;
  const auto count = [&] {
    device.forget_launches();
    device.launch_with(module->find("axpy"), shape, kLegacyStream, 3.0F, x, y, n);
    device.synchronize();
    return device.launches().at(0).counters;
  };
  const LaunchCounters first = count();
  INFO(first_fault(device));
  REQUIRE(device.faults().empty());
  CHECK(first.global.read_bytes == 2 * 4 * n);
  CHECK(first.global.written_bytes == 4 * n);
  CHECK(first.global.reads == 2 * n);
  const Traffic& of_x = first.allocations.at(device.memory().find(x)->id);
  CHECK(of_x.read_bytes == 4 * n);
  CHECK(of_x.written_bytes == 0);
  CHECK(device.allocation_label(device.memory().find(x)->id) == "x");
  CHECK(first.of(InstructionClass::floating) == n);
  CHECK(first.barriers == 0);
  std::uint64_t sum = 0;
  for (const std::uint64_t one : first.by_class) sum += one;
  CHECK(sum == first.instructions);
  CHECK(count().instructions == first.instructions);
  CHECK(download<float>(device, y, n) == std::vector<float>(n, 8));

  const Address in = upload(device, std::vector<int>(256, 1));
  const Address out = allocate<int>(device, 256);
  const Address totals = allocate<int>(device, 2);
  device.forget_launches();
  device.launch_with(module->find("block_scan"), {{2, 1, 1}, {128, 1, 1}, 0}, kLegacyStream, in,
                     out, totals);
  device.synchronize();
  const LaunchCounters& scan = device.launches().at(0).counters;
  CHECK(scan.barriers == 2 * 3);
  CHECK(scan.warp_operations == 2 * 4 * 5);
  CHECK(scan.shared.written_bytes > 0);
}

TEST_CASE("Sectors that a launch touches") {
  DeviceOptions options;
  options.machine.count_sectors = true;
  Device device(options);
  const auto module = device.load(samples_ptx());
  const Address x = upload(device, std::vector<float>(1000, 1), "x");
  const Address y = upload(device, std::vector<float>(1000, 2), "y");
  LaunchShape shape;
  shape.grid.x = 4;
  shape.block.x = 256;
  // 997 floats from the second on: 3988 bytes from byte 4 on.
  device.launch_with(module->find("axpy"), shape, kLegacyStream, 3.0F, x + 4, y + 4, 997);
  device.launch_with(module->find("axpy"), shape, kLegacyStream, 3.0F, x, x, 9);
  device.synchronize();
  REQUIRE(first_fault(device) == "");
  const auto traffic = [&](std::size_t launch, Address address) {
    return device.launches()[launch].counters.allocations.at(device.memory().find(address)->id);
  };
  CHECK(traffic(0, x).read_sectors == 125);
  CHECK(traffic(0, x).written_sectors == 0);
  CHECK(traffic(0, y).read_sectors == 125);
  CHECK(traffic(0, y).written_sectors == 125);
  // Each launch counts anew, and a sector once however often it is read.
  CHECK(traffic(1, x).reads == 18);
  CHECK(traffic(1, x).read_sectors == 2);
  CHECK(traffic(1, x).written_sectors == 2);
}
