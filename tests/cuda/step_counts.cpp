// What the kernels of one layer step do and which bytes they move, counted on the CPU device: a
// table in Markdown, and checks of it, so that it also is a test.
//   cuda_step_counts [tokens] [rows] [query heads a KV head] [head size] [KV heads] [epsilon]
//                    [clusters]
// epsilon is that of the certificate, without which a step searches no threshold; 0 is off.
// clusters: 0 is the plain estimate (epsilon has to be given).
// Returns 1 if a number is out of place.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <string>
#include <vector>

#include <verkv/clusters.hpp>

#include "cudart.hpp"
#include "step_support.hpp"

using namespace verkv;
using namespace verkv::cuda;
using namespace verkv::cuda::test;

namespace {

// What an allocation is to the step.
enum class Part : std::size_t { sketch, residents, queries, other, workspace, host, positions };
constexpr std::size_t kParts = 7;
constexpr double kMegabyte = 1e6;

using PartBytes = std::array<std::uint64_t, kParts>;

struct LaunchBytes {
  PartBytes read{}, written{};  // distinct sectors
  std::uint64_t requested = 0;  // by all threads, repeats included
};

std::uint64_t of(const PartBytes& bytes, Part part) {
  return bytes[static_cast<std::size_t>(part)];
}
std::uint64_t sum(const PartBytes& bytes) {
  std::uint64_t total = 0;
  for (const std::uint64_t one : bytes) total += one;
  return total;
}
std::uint64_t device_bytes(const LaunchBytes& launch) {
  return sum(launch.read) + sum(launch.written) - of(launch.read, Part::workspace) -
         of(launch.written, Part::workspace) - of(launch.read, Part::host) -
         of(launch.written, Part::host) - of(launch.read, Part::positions);
}

std::map<std::uint32_t, Part> parts_of(const Scene& scene) {
  std::map<std::uint32_t, Part> parts;
  const auto name = [&](const void* memory, Part part) {
    if (memory == nullptr) return;
    const cpu_device::Address address = cpu_device::Device::address_of(memory);
    parts[cpu_device::current_device().memory().at(address, 1).id] = part;
  };
  const StepView step = scene.step_view();
  for (std::size_t slot = 0; slot < scene.setup().lengths.size(); ++slot) {
    for (std::int64_t kv = 0; kv < scene.setup().kv_heads; ++kv) {
      const HeadView& head = scene.head_view(static_cast<int>(slot), kv);
      for (const void* memory :
           {static_cast<const void*>(head.codes), static_cast<const void*>(head.scales),
            static_cast<const void*>(head.odds)})
        name(memory, Part::sketch);
      name(head.resident_keys, Part::residents);
      name(head.resident_values, Part::residents);
      name(head.centroids, Part::residents);
      name(head.spreads, Part::residents);
      name(head.host_rows, Part::host);
      name(head.place_position, Part::positions);
    }
  }
  name(step.queries, Part::queries);
  name(step.output, Part::queries);
  name(step.workspace, Part::workspace);
  return parts;
}

LaunchBytes bytes_of(const cpu_device::LaunchCounters& counters,
                     const std::map<std::uint32_t, Part>& parts) {
  LaunchBytes bytes;
  for (const auto& [id, traffic] : counters.allocations) {
    const auto found = parts.find(id);
    const std::size_t part =
        static_cast<std::size_t>(found == parts.end() ? Part::other : found->second);
    bytes.read[part] += traffic.read_sectors * cpu_device::kSectorBytes;
    bytes.written[part] += traffic.written_sectors * cpu_device::kSectorBytes;
    bytes.requested += traffic.read_bytes + traffic.written_bytes;
  }
  return bytes;
}

// The least that a step must read and write: sketch, scales and odds of all tokens, centroids,
// resident and moved rows, queries and outputs, each once.
std::uint64_t floor_bytes(const Scene& scene) {
  const Setup& setup = scene.setup();
  std::int64_t bytes = 0;
  for (std::size_t slot = 0; slot < setup.lengths.size(); ++slot) {
    for (std::int64_t kv = 0; kv < setup.kv_heads; ++kv) {
      const HeadView& head = scene.head_view(static_cast<int>(slot), kv);
      const SketchShape sketch = sketch_of(scene.layer_view(), head);
      bytes += head.compressed * (sketch.token_bytes() +
                                  static_cast<std::int64_t>(sizeof(Positive16)));  // and the odds
      bytes += head.residents() * scene.shape().row_bytes();
      if (setup.clusters) {
        const std::int64_t element = static_cast<std::int64_t>(size_bytes(setup.storage));
        bytes += clusters_of(head.compressed) *
                 (setup.value_dim * element + static_cast<std::int64_t>(sizeof(Positive16)));
      }
    }
  }
  bytes += scene.totals().moved * scene.shape().row_bytes();
  bytes += static_cast<std::int64_t>(setup.slots.size()) * setup.kv_heads * setup.group *
           (setup.key_dim * static_cast<std::int64_t>(size_bytes(setup.query_type)) +
            setup.value_dim * 4);
  return static_cast<std::uint64_t>(bytes);
}

Setup setup_of(const std::vector<double>& arguments) {
  const auto argument = [&](std::size_t i, std::int64_t otherwise) {
    return i < arguments.size() ? static_cast<std::int64_t>(arguments[i]) : otherwise;
  };
  Setup setup;
  const std::int64_t tokens = argument(0, 4096);
  const std::int64_t rows = argument(1, 1);
  setup.group = static_cast<int>(argument(2, 4));
  setup.key_dim = setup.value_dim = argument(3, 128);
  setup.kv_heads = argument(4, 1);
  setup.query_type = setup.storage = DType::bf16;
  setup.keep = 1.0 / 16;
  setup.fetch.risk = 1e-4;
  setup.fetch.epsilon = arguments.size() > 5 && arguments[5] > 0 ? arguments[5] : kOff;
  setup.clusters = arguments.size() <= 6 || arguments[6] > 0;
  // Attention that falls off: few keys are worth their way.
  setup.query_size = 2;
  // A window of 32 tokens and half a chunk.
  setup.lengths.assign(static_cast<std::size_t>(rows),
                       {tokens, std::max<std::int64_t>(0, tokens - 96)});
  setup.slots.clear();
  for (int row = 0; row < static_cast<int>(rows); ++row) setup.slots.push_back(row);
  return setup;
}

bool check(bool holds, const char* what) {
  if (!holds) std::fprintf(stderr, "not so: %s\n", what);
  return holds;
}

double megabytes(std::uint64_t bytes) { return static_cast<double>(bytes) / kMegabyte; }

void print_row(const std::string& name, const std::string& counts, const LaunchBytes& bytes) {
  const auto read = [&](Part part) { return megabytes(of(bytes.read, part)); };
  const std::uint64_t written = sum(bytes.written) - of(bytes.written, Part::workspace);
  std::printf("| %s | %s | %.3f | %.3f | %.3f | %.3f | %.3f | %.3f | %.3f |\n", name.c_str(),
              counts.c_str(), read(Part::sketch), read(Part::residents),
              read(Part::queries) + read(Part::other), megabytes(written),
              read(Part::workspace) + megabytes(of(bytes.written, Part::workspace)),
              read(Part::host) + read(Part::positions), megabytes(bytes.requested));
}

// Returns whether all numbers are where they belong.
bool count_step(const Setup& setup) {
  cpu_device::DeviceOptions options;
  options.machine.count_sectors = true;
  options.machine.check_races = false;  // cuda_step checks them
  cpu_device::Device& device = cpu_device::reset_device(options);
  Scene scene(setup);
  scene.draw_queries();
  scene.upload();
  scene.launch(nullptr);
  const std::string wrong = scene.compare();
  if (!check(wrong.empty(), wrong.c_str())) return false;
  if (!check(device.launches().size() == 4, "a step has four launches")) return false;

  const std::map<std::uint32_t, Part> parts = parts_of(scene);
  const double tokens_heads = static_cast<double>(setup.lengths[0].tokens) *
                              static_cast<double>(setup.slots.size()) *
                              static_cast<double>(setup.kv_heads * setup.group);
  std::printf(
      "%lld tokens, %zu rows, %lld KV heads of %d query heads, head size %lld; %lld of %lld "
      "compressed tokens moved\n\n",
      static_cast<long long>(setup.lengths[0].tokens), setup.slots.size(),
      static_cast<long long>(setup.kv_heads), setup.group, static_cast<long long>(setup.key_dim),
      static_cast<long long>(scene.totals().moved),
      static_cast<long long>(setup.lengths[0].compressed * setup.kv_heads) *
          static_cast<long long>(setup.slots.size()));
  std::printf(
      "| kernel | instructions per token and query head | barriers | sketch and odds read, MB | "
      "residents and centroids read | other read | written | workspace | host | asked for by "
      "threads |\n"
      "|---|---|---|---|---|---|---|---|---|---|\n");
  const std::array<const char*, 4> names = {"scores", "plan", "certificate", "attention"};
  std::array<LaunchBytes, 4> launches;
  LaunchBytes all;
  for (std::size_t i = 0; i < 4; ++i) {
    const cpu_device::LaunchCounters& counters = device.launches()[i].counters;
    launches[i] = bytes_of(counters, parts);
    for (std::size_t part = 0; part < kParts; ++part) {
      all.read[part] += launches[i].read[part];
      all.written[part] += launches[i].written[part];
    }
    all.requested += launches[i].requested;
    char text[64];
    std::snprintf(text, sizeof text, "%.1f | %llu",
                  static_cast<double>(counters.instructions) / tokens_heads,
                  static_cast<unsigned long long>(counters.barriers));
    print_row(names[i], text, launches[i]);
  }
  print_row("step", " | ", all);

  const std::uint64_t floor = floor_bytes(scene);
  const std::uint64_t host = of(all.read, Part::host);
  const std::uint64_t positions = of(all.read, Part::positions);
  const std::uint64_t workspace = of(all.read, Part::workspace) + of(all.written, Part::workspace);
  const auto moved_bytes =
      static_cast<std::uint64_t>(scene.totals().moved * scene.shape().row_bytes());
  const std::uint64_t without_workspace = device_bytes(all) + host + positions;
  const double ratio = static_cast<double>(without_workspace) / static_cast<double>(floor);
  std::printf("\n| | MB | over the floor |\n|---|---|---|\n");
  std::printf(
      "| floor: sketch, scales, odds, centroids, resident and moved rows, queries, output | %.3f | "
      "1 "
      "|\n",
      megabytes(floor));
  std::printf("| device and host memory, without the workspace | %.3f | %.3f |\n",
              megabytes(without_workspace), ratio);
  std::printf("| workspace: read and written between the launches | %.3f | %.3f |\n",
              megabytes(workspace), static_cast<double>(workspace) / static_cast<double>(floor));
  std::printf(
      "| rows read from host memory, of it those that moved | %.3f | %.3f |\n", megabytes(host),
      moved_bytes == 0 ? 1.0 : static_cast<double>(host) / static_cast<double>(moved_bytes));

  bool right = check(ratio >= 0.99, "the floor is one");
  right &= check(of(launches[3].read, Part::host) == host, "rows move in the last launch only");
  right &= check(host >= moved_bytes, "moved rows are read");
  right &= check(setup.key_dim % 32 != 0 || host == moved_bytes, "and nothing else of the host's");
  right &= check(of(all.written, Part::residents) + of(all.written, Part::sketch) +
                         of(all.written, Part::host) ==
                     0,
                 "a step leaves the cache alone");
  right &= check(ratio < 1.5, "bytes stay near the floor");
  return right;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<double> arguments;
  for (int i = 1; i < argc; ++i) arguments.push_back(std::atof(argv[i]));
  const std::size_t sizes = std::min<std::size_t>(5, arguments.size());
  const bool bad = std::any_of(arguments.begin(), arguments.begin() + static_cast<int>(sizes),
                               [](double x) { return !(x >= 1); });
  if (argc > 8 || bad || (argc > 6 && !(arguments[5] >= 0 && arguments[5] < 1))) {
    std::fprintf(stderr,
                 "usage: %s [tokens] [rows] [group] [head size] [KV heads] [epsilon, 0: off] "
                 "[clusters, 0: off]\n",
                 argv[0]);
    return 2;
  }
  try {
    return count_step(setup_of(arguments)) ? 0 : 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
