// Every barrier in the kernels of a step is taken out in turn: the device must report the step that
// runs without it, or the barrier must be in a list, with the reason why nothing can go wrong.
#include "mutation.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <regex>
#include <stdexcept>
#include <string>
#include <vector>

#include "catch.hpp"
#include "cudart.hpp"
#include "ptx_parser.hpp"
#include "step_support.hpp"

using namespace verkv;
using namespace verkv::cuda;
using namespace verkv::cuda::test;

namespace {

using cpu_device::Kernel;
using KernelPointer = std::shared_ptr<const Kernel>;

// The lines of a source of the kernels.
const std::vector<std::string>& source(const std::string& name) {
  static std::map<std::string, std::vector<std::string>> files;
  std::vector<std::string>& lines = files[name];
  if (lines.empty()) {
    std::ifstream file(std::string(VERKV_TEST_CUDA_DIR) + "/" + name);
    for (std::string line; std::getline(file, line);) lines.push_back(line);
  }
  return lines;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// The line, from 0, where the function begins that this line (from 1) is in.
std::size_t function_begin(const std::vector<std::string>& lines, std::size_t line) {
  std::size_t at = std::min(line, lines.size());
  while (at > 0 && !contains(lines[at - 1], "VERKV_DEVICE ") &&
         !contains(lines[at - 1], "__global__ "))
    --at;
  if (at == 0) throw std::runtime_error("no function around line " + std::to_string(line));
  return at - 1;
}

// The first name before a bracket.
std::string function_name(const std::vector<std::string>& lines, std::size_t line) {
  std::string text;
  for (std::size_t at = function_begin(lines, line); text.size() < 300 && at < lines.size(); ++at)
    text += lines[at] + " ";
  static const std::regex call("(\\w+)\\(");
  for (std::sregex_iterator it(text.begin(), text.end(), call), end; it != end; ++it) {
    if (!contains((*it)[1], "__")) return (*it)[1];
  }
  throw std::runtime_error("no name of a function in " + text);
}

// "rank_in_block 2 in add_residents": the second barrier of a function, where it is inlined. Holds
// while lines move.
std::string place_of(const Kernel& kernel, std::uint32_t pc) {
  const cpu_device::Location& location = kernel.locations[pc];
  const auto file = [&](std::int32_t index) {
    return index < 0 ? std::string() : kernel.files->at(static_cast<std::size_t>(index));
  };
  std::string name = file(location.file);
  int line = location.line;
  std::string caller = file(location.caller_file);
  // __syncwarp is itself a function of the toolkit.
  if (source(name).empty()) {
    name = caller;
    line = location.caller_line;
    caller.clear();
  }
  const std::vector<std::string>& lines = source(name);
  int ordinal = 0;
  for (std::size_t at = function_begin(lines, static_cast<std::size_t>(line));
       at < static_cast<std::size_t>(line); ++at)
    ordinal += contains(lines[at], "__syncthreads()") || contains(lines[at], "__syncwarp()");
  std::string place =
      function_name(lines, static_cast<std::size_t>(line)) + " " + std::to_string(ordinal);
  if (!caller.empty()) {
    place += " in " + function_name(source(caller), static_cast<std::size_t>(location.caller_line));
  }
  return place;
}

// Why a barrier may be left out without a report.
enum class Reason {
  redundant,  // something else orders what it orders
  copy,       // here, while another copy that the compiler made of it is reported
  not_met     // no scene gets here
};

struct Unreported {
  const char* kernel;  // a part of its name
  const char* place;
  Reason reason;
  const char* why;
};

constexpr const char* kSomeTokens = "called with one token or more";
constexpr const char* kLong = "only beyond 2^20 tokens, see the test of a million";
constexpr const char* kLater = "a barrier follows before the counts are written again";

const std::vector<Unreported>& unreported() {
  static const std::vector<Unreported> list = {
      {"plan_kernel", "lane_sums 3 in to_weights", Reason::not_met, kLong},
      {"plan_kernel", "lane_sums 1 in solve_beta", Reason::not_met, kSomeTokens},
      {"plan_kernel", "lane_sums 3 in solve_beta", Reason::not_met, kLong},
      {"plan_kernel", "lane_sums 1 in certificate_and_select", Reason::not_met, kSomeTokens},
      {"plan_kernel", "lane_sums 3 in certificate_and_select", Reason::not_met, kLong},
      {"plan_kernel", "lane_sums 1 in evaluate", Reason::not_met, kSomeTokens},
      {"plan_kernel", "lane_sums 3 in evaluate", Reason::not_met, kLong},
      {"plan_kernel", "lane_sums 1 in compact", Reason::not_met, kSomeTokens},
      {"plan_kernel", "lane_sums 3 in compact", Reason::not_met, kLong},
      {"plan_kernel", "rank_in_block 2 in add_residents", Reason::redundant, kLater},
      {"plan_kernel", "add_residents 2 in plan_kernel", Reason::redundant,
       "the next round's ranks, or the barrier of the total, come before the chunk changes"},
      {"plan_kernel", "count_in_block 2 in select_among", Reason::redundant, kLater},
      {"plan_kernel", "count_in_block 2 in certificate_and_select", Reason::redundant, kLater},
      {"plan_kernel", "count_in_block 2 in compact", Reason::redundant, kLater},
      {"plan_kernel", "count_in_block 2 in select_ties", Reason::redundant, kLater},
      {"plan_kernel", "ThresholdSearch 1 in plan_head", Reason::redundant,
       "the first list is made, with barriers, before anything reads what it protects"},
      {"plan_kernel", "comes_last 1 in plan_kernel", Reason::redundant,
       "every pass over tokens or residents ends in a barrier after its last write"},
      {"certificate_kernel", "lane_sums 1 in first_sums", Reason::not_met, kSomeTokens},
      {"certificate_kernel", "lane_sums 3 in first_sums", Reason::not_met, kLong},
      {"certificate_kernel", "lane_sums 1 in solve_beta", Reason::not_met, kSomeTokens},
      {"certificate_kernel", "lane_sums 3 in solve_beta", Reason::not_met, kLong},
      {"certificate_kernel", "lane_sums 1 in certificate_at", Reason::not_met, kSomeTokens},
      {"certificate_kernel", "lane_sums 3 in certificate_at", Reason::not_met, kLong},
      {"certificate_kernel", "count_in_block 2 in share_clusters", Reason::redundant,
       "the counts are not written again"},
  };
  return list;
}

// Uploads the scene to a new device, whose kernels are changed, runs the step and returns the first
// fault; empty if there was none.
std::string fault_of(Scene& scene, cpu_device::Device::KernelChange change) {
  cpu_device::Device& device = cpu_device::reset_device();
  device.change_kernels(std::move(change));
  scene.upload();
  scene.launch(nullptr);
  device.synchronize();
  return device.faults().empty() ? "" : device.faults().front().what();
}

std::string fault_without(Scene& scene, const Kernel& kernel, std::uint32_t pc) {
  return fault_of(scene, [&](KernelPointer one) {
    if (one->readable_name != kernel.readable_name) return one;
    return KernelPointer(cpu_device::without_instruction(*one, pc));
  });
}

Setup base() {
  Setup setup;
  setup.kv_heads = 1;
  setup.group = 2;
  setup.key_dim = 16;
  setup.value_dim = 8;
  setup.lengths = {{600, 560}};
  setup.fetch.epsilon = kOff;
  setup.query_size = 2;
  return setup;
}

// Small steps that together reach every barrier.
std::vector<Setup> scenes() {
  std::vector<Setup> all;
  // The sketches.
  for (const SketchKind sketch : {SketchKind::exact, SketchKind::calibrated}) {
    Setup setup = base();
    setup.sketch.kind = sketch;
    setup.key_dim = 48;
    setup.lengths = {{100, 90}};
    for (const int group : {2, 5}) {
      setup.group = group;
      all.push_back(setup);
    }
  }
  // Storage types and sizes of the heads' values.
  for (const DType storage : {DType::f32, DType::f16, DType::bf16}) {
    for (const int group : {1, 3, 5}) {
      Setup setup = base();
      setup.group = group;
      setup.value_dim = group == 1 ? 8 : 512;
      setup.storage = storage;
      setup.lengths = {{440, 250}};  // two splits of the attention
      setup.keep = 0.3;
      all.push_back(setup);
    }
  }
  // Rules of fetching.
  Setup setup = base();
  setup.keep = 0.6;
  setup.lengths = {{1300, 1250}};
  all.push_back(setup);
  setup.fetch.epsilon = 0.1;  // a search
  setup.group = 1;
  setup.lengths = {{1300, 1250}};
  all.push_back(setup);
  setup = base();
  setup.fetch.epsilon = 0.2;  // a search that ends in ties
  setup.fetch.risk = kOff;
  setup.equal_keys = true;
  setup.equal_odds = true;
  setup.lengths = {{360, 350}};
  all.push_back(setup);
  setup.lengths = {{400, 384}};  // whose sample sees one of the four keys
  all.push_back(setup);
  setup = base();
  setup.fetch.mode = FetchMode::always;
  setup.fetch.limit_tokens = 37;
  all.push_back(setup);
  // More blocks of 512 tokens than half warps.
  setup = base();
  setup.group = 1;
  setup.lengths = {{16650, 16600}};
  all.push_back(setup);
  // Nothing compressed.
  setup = base();
  setup.lengths = {{40, 0}};
  all.push_back(setup);
  return all;
}

// The scenes, cheapest first, and what their kernels did.
struct Run {
  std::unique_ptr<Scene> scene;
  std::uint64_t instructions = 0;
  std::map<std::string, std::vector<bool>> met;  // LaunchCounters::barriers_met, by kernel
};

struct Runs {
  std::vector<Run> all;
  std::map<std::string, KernelPointer> kernels;

  // Also requires that the unchanged step is right.
  void add(const Setup& setup) {
    Run run;
    run.scene = std::make_unique<Scene>(setup);
    run.scene->draw_queries();
    REQUIRE(fault_of(*run.scene, [this](const KernelPointer& kernel) {
              return kernels[kernel->readable_name] = kernel;
            }) == "");
    REQUIRE(run.scene->compare() == "");
    for (const auto& launch : cpu_device::current_device().launches()) {
      run.instructions += launch.counters.instructions;
      run.met[launch.kernel] = launch.counters.barriers_met;
    }
    all.push_back(std::move(run));
  }
  void sort() {
    std::sort(all.begin(), all.end(),
              [](const Run& a, const Run& b) { return a.instructions < b.instructions; });
  }
  bool meets(const Run& run, const Kernel& kernel, std::uint32_t pc) const {
    const auto found = run.met.find(kernel.readable_name);
    return found != run.met.end() && found->second[pc];
  }
};

struct Site {
  std::uint32_t pc = 0;
  std::string place;
  bool met = false;
  std::string fault;  // without it; empty if nothing is noticed
};

std::vector<Site> try_without_each(const Runs& runs, const Kernel& kernel) {
  std::vector<Site> sites;
  for (const std::uint32_t pc : cpu_device::barriers_of(kernel)) {
    Site site{pc, place_of(kernel, pc), false, ""};
    for (const Run& run : runs.all) {
      if (!site.fault.empty()) break;
      if (!runs.meets(run, kernel, pc)) continue;
      site.met = true;
      site.fault = fault_without(*run.scene, kernel, pc);
    }
    sites.push_back(std::move(site));
  }
  return sites;
}

// The name without namespaces and parameters.
std::string short_name(const Kernel& kernel) {
  const std::string& name = kernel.readable_name;
  const std::string scope = "(anonymous namespace)::";
  const std::size_t begin = name.find(scope);
  const std::size_t from = begin == std::string::npos ? 0 : begin + scope.size();
  return name.substr(from, name.rfind('(') - from);
}

}  // namespace

TEST_CASE("no barrier of a step can be left out") {
  Runs runs;
  for (const Setup& setup : scenes()) runs.add(setup);
  runs.sort();
  for (const char* file : {"scores.cu", "plan.cu", "certificate.cu", "attention.cu"}) {
    const std::string ptx = cpu_device::ptx_of(file);
    REQUIRE(!ptx.empty());
    for (const auto& [name, kernel] : cpu_device::parse_ptx(ptx).kernels) {
      CAPTURE(name);
      CHECK(runs.kernels.count(kernel->readable_name) == 1);
    }
  }
  std::vector<bool> used(unreported().size());
  for (const auto& [name, kernel] : runs.kernels) {
    const std::vector<Site> sites = try_without_each(runs, *kernel);
    std::size_t argued = 0;
    for (const Site& site : sites) {
      if (!site.fault.empty()) continue;
      ++argued;
      INFO(name << " at " << kernel->where(site.pc) << " (" << site.place << ")");
      const auto entry =
          std::find_if(unreported().begin(), unreported().end(), [&](const Unreported& one) {
            return contains(name, one.kernel) && site.place == one.place;
          });
      if (entry == unreported().end()) {
        CHECK(!site.fault.empty());
        continue;
      }
      used[static_cast<std::size_t>(entry - unreported().begin())] = true;
      INFO("not needed: " << entry->why);
      CHECK(site.met == (entry->reason != Reason::not_met));
      const bool copy_reported = std::any_of(sites.begin(), sites.end(), [&](const Site& other) {
        return other.place == site.place && !other.fault.empty();
      });
      CHECK(copy_reported == (entry->reason == Reason::copy));
    }
    std::cout << short_name(*kernel) << ": " << sites.size() << " barriers, "
              << sites.size() - argued << " reported, " << argued << " argued\n";
  }
  for (std::size_t i = 0; i < used.size(); ++i) {
    INFO(unreported()[i].kernel << ": " << unreported()[i].place);
    CHECK(used[i]);
  }
}

// The barriers between parts of 2^20 tokens.
TEST_CASE("no barrier of a sum over a million tokens can be left out") {
  Setup setup = base();
  setup.group = 1;
  setup.value_dim = 4;
  setup.keep = 0.002;
  setup.fetch.mode = FetchMode::never;
  setup.lengths = {{(1 << 20) + 700, (1 << 20) + 650}};
  Runs runs;
  runs.add(setup);
  const auto plan = std::find_if(runs.kernels.begin(), runs.kernels.end(), [](const auto& one) {
    return contains(one.first, "plan_kernel");
  });
  REQUIRE(plan != runs.kernels.end());
  const Kernel& kernel = *plan->second;
  std::size_t tried = 0;
  for (const std::uint32_t pc : cpu_device::barriers_of(kernel)) {
    if (place_of(kernel, pc) != "lane_sums 3 in to_weights") continue;
    REQUIRE(runs.meets(runs.all[0], kernel, pc));
    CHECK(contains(fault_without(*runs.all[0].scene, kernel, pc), "race"));
    ++tried;
  }
  REQUIRE(tried == 1);
}
