// The GPU benchmark on the CPU device at tiny sizes: every path runs without a fault, dense
// attention is right, the JSON holds what docs/performance.md says, and no time is claimed.

#include <cuda_runtime_api.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "catch.hpp"
#include "cuda_program.hpp"
#include "cuda_report.hpp"
#include "cudart.hpp"

namespace {

using nlohmann::json;
namespace bench = verkv::bench;
namespace device = verkv::cpu_device;

json read_json(const std::string& path) {
  std::ifstream file(path);
  REQUIRE(file);
  return json::parse(file);
}

void no_faults() {
  const auto& faults = device::current_device().faults();
  INFO((faults.empty() ? "" : faults.front().what()));
  REQUIRE(faults.empty());
}

std::size_t lines_with(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
    ++count;
  return count;
}

}  // namespace

TEST_CASE("a quick run") {
  device::reset_device();
  const std::string path = "cuda_bench_smoke.json";
  std::filesystem::remove(path);
  REQUIRE(bench::run_cuda_bench({"--quick", "--json", path}) == bench::kExitDone);
  no_faults();
  CHECK(device::current_device().live_allocations() == 0);
  const json result = read_json(path);
  CHECK(result.at("timings") == false);
  CHECK(result.at("settings").at("quick") == true);
  CHECK(result.at("left_out").empty());
  const json& machine = result.at("machine");
  CHECK(machine.at("name") == "CPU device");
  CHECK(machine.at("device_copy_bytes_per_second").is_null());
  CHECK(machine.at("device_read_bytes_per_second").is_null());
  CHECK(machine.at("copy_engine").size() == 2);
  CHECK(machine.at("mapped_rows").at("scattered_bytes_per_second").is_null());
  CHECK(machine.at("graph_node_gap_seconds").is_null());

  std::set<std::string> what;
  for (const json& r : result.at("results")) {
    what.insert(r.at("what").get<std::string>() + " " + r.at("rule").get<std::string>() + " " +
                std::to_string(r.at("batch").get<int>()));
    for (const char* key : {"median_seconds", "lower_quartile_seconds", "upper_quartile_seconds",
                            "bytes_per_second", "floor_seconds", "floor_share",
                            "dense_resident_ratio", "dense_perfect_ratio", "dense_offload_ratio"})
      CHECK(r.at(key).is_null());
    CHECK(r.at("tokens") == 640);
    CHECK(r.at("repetitions") == 1);
    CHECK(r.at("device_bytes").get<std::int64_t>() + r.at("host_bytes").get<std::int64_t>() > 0);
    CHECK(r.at("cache").is_string());
    CHECK(r.at("detail").is_string());
    const bool step = r.at("what") == "step" || r.at("what") == "graph_step";
    CHECK(r.at("output_error").is_number() == step);
    if (step) CHECK(r.at("moved_share") > 0);
  }
  std::set<std::string> expected{"graph_step risk 1e-4 1", "graph_step eps 0.1 1"};
  for (const char* batch : {" 1", " 2"}) {
    for (const char* dense : {"dense_resident -", "dense_offload -"})
      expected.insert(std::string(dense) + batch);
    for (const char* kernel : {"scores", "plan", "certificate", "attention", "step"}) {
      for (const char* rule : {" risk 1e-4", " eps 0.1"})
        expected.insert(std::string(kernel) + rule + batch);
    }
  }
  CHECK(what == expected);

  std::set<std::string> checked;
  for (const json& check : result.at("checks")) {
    CHECK(check.at("passed") == true);
    CHECK(check.at("worst_error") <= check.at("tolerance"));
    checked.insert(check.at("what").get<std::string>());
  }
  CHECK(checked.count("dense_offload") == 1);
  CHECK(checked.count("graph_step, eps 0.1") == 1);

  // Columns of times are empty; those of counts are not.
  const std::string table = bench::markdown(result);
  CHECK(lines_with(table, "| 640 | 1 | - | dense_resident |  |  |  |  |  |  |  |  |  |\n") == 1);
  CHECK(bench::run_cuda_bench({"--table", path}) == bench::kExitDone);
}

TEST_CASE("ratios, floors and the table") {
  bench::Machine machine;
  machine.name = "a card";
  machine.copy_rate = 2e12;
  machine.engine_large_rate = 5e10;
  bench::Report report(machine, {}, {{"kv_heads", 8}, {"row_bytes", 512}});
  bench::Result dense;
  dense.tokens = 1000;
  dense.batch = 2;
  dense.what = "dense_resident";
  dense.device_bytes = 2 * 1000 * 8 * 512;
  dense.timing = {8e-6, 7e-6, 9e-6, 5};
  report.add(dense);
  bench::Result step = dense;
  step.what = "step";
  step.rule = "risk 1e-4";
  step.device_bytes = 2000000;
  step.host_bytes = 50000;
  step.moved_share = 0.01;
  step.output_error = 0.25;
  step.timing = {4e-6, 3e-6, 5e-6, 5};
  report.add(step);
  bench::Result kernel = step;
  kernel.what = "scores";
  kernel.whole = false;
  report.add(kernel);
  bench::Result other = step;
  other.batch = 1;
  report.add(other);
  const json& results = report.document().at("results");
  CHECK(results[0].at("dense_resident_ratio").get<double>() == Approx(1));
  CHECK(results[0].at("floor_share").get<double>() == Approx(4.096e-6 / 8e-6));
  CHECK(results[1].at("floor_seconds").get<double>() == Approx(1e-6 + 1e-6));
  CHECK(results[1].at("floor_share").get<double>() == Approx(0.5));
  CHECK(results[1].at("bytes_per_second").get<double>() == Approx(2050000 / 4e-6));
  CHECK(results[1].at("dense_resident_ratio").get<double>() == Approx(2));
  CHECK(results[1].at("dense_perfect_ratio").get<double>() == Approx(4.096e-6 / 4e-6));
  CHECK(results[1].at("dense_offload_ratio").is_null());
  // A part of a step is not compared with attention, nor is one batch with another.
  CHECK(results[2].at("dense_resident_ratio").is_null());
  CHECK(results[3].at("dense_resident_ratio").is_null());
  CHECK(lines_with(bench::markdown(report.document()),
                   "| 1000 | 2 | risk 1e-4 | step | 4.0 | 3.0 - 5.0 | 512.5 | 50.0 | 2.00 | 1.02 | "
                   " | 1.000 | 0.2500 |\n") == 1);
  CHECK(report.passed());
  CHECK_FALSE(report.check(1000, 2, "a result", 1e-3, 1e-4));
  CHECK_FALSE(report.passed());
}

TEST_CASE("what is left out is said") {
  device::reset_device();
  const std::string path = "cuda_bench_limit.json";
  REQUIRE(bench::run_cuda_bench({"--quick", "--json", path, "--time-limit", "0"}) ==
          bench::kExitDone);
  json result = read_json(path);
  CHECK(result.at("results").empty());
  CHECK(result.at("left_out").size() == 2);

  // No pinned memory for the copies of a batch.
  device::Device& machine = device::reset_device();
  machine.fail_call(device::Call::host_malloc, device::Status::out_of_memory, 1);
  machine.fail_call(device::Call::host_register, device::Status::out_of_memory);
  REQUIRE(bench::run_cuda_bench({"--quick", "--json", path, "--tokens", "256"}) ==
          bench::kExitDone);
  result = read_json(path);
  REQUIRE(result.at("left_out").size() == 1);
  CHECK(result.at("left_out")[0].at("reason").get<std::string>().find("pinned memory") !=
        std::string::npos);
  // The smaller batch is measured all the same.
  CHECK(result.at("left_out")[0].at("batch") == 2);
  CHECK_FALSE(result.at("results").empty());
  for (const json& row : result.at("results")) CHECK(row.at("batch") == 1);
}

TEST_CASE("bad options and no device") {
  device::reset_device();
  CHECK(bench::run_cuda_bench({"--help"}) == bench::kExitDone);
  for (const std::vector<std::string>& bad : {std::vector<std::string>{"--fast"},
                                              {"--tokens"},
                                              {"--tokens", "12"},
                                              {"--tokens", "1024,"},
                                              {"--batch", "0"},
                                              {"--batch", "two"},
                                              {"--repetitions", "0"},
                                              {"--time-limit", "-1"}}) {
    CAPTURE(bad.front());
    CHECK(bench::run_cuda_bench(bad) == bench::kExitOptions);
  }
  CHECK(bench::run_cuda_bench({"--table", "no such file.json"}) == bench::kExitFailed);
  std::ofstream("cuda_bench_other.json") << "{}";
  CHECK(bench::run_cuda_bench({"--table", "cuda_bench_other.json"}) == bench::kExitFailed);
  CHECK(bench::run_cuda_bench({"--quick", "--json", "no such folder/x.json"}) ==
        bench::kExitFailed);
  device::DeviceOptions none;
  none.devices = 0;
  device::reset_device(none);
  CHECK(bench::run_cuda_bench({"--quick"}) == bench::kExitNoDevice);
}
