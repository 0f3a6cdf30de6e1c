// verkv_replay with --backend cuda, on the CPU device: a recording goes through both backends, and
// every number of the report that a decision makes is the same.

#include <cmath>
#include <set>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "catch.hpp"
#include "cudart.hpp"
#include "json_report.hpp"
#include "measure.hpp"
#include "options.hpp"
#include "tolerance.hpp"

namespace {

using namespace verkv::replay;
using verkv::RecordedCache;
using Json = nlohmann::json;
namespace device = verkv::cpu_device;

const std::string kRecording = std::string(VERKV_TEST_DATA_DIR) + "/essays-4k-small.safetensors";

// Little enough for the CPU device, and one thread: it serves one at a time.
Options parse(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), kRecording);
  for (const char* one :
       {"--layers", "21", "--steps", "2", "--seeds", "1", "--redraws", "0", "--threads", "1"}) {
    arguments.emplace_back(one);
  }
  const Parsed parsed = parse_options(arguments);
  INFO(parsed.text);
  REQUIRE(parsed.options.has_value());
  return *parsed.options;
}

Json report(const RecordedCache& cache, const Options& options) {
  const std::vector<Method> methods = select_methods(options, cache);
  return Json::parse(json_report(cache, options, measure(cache, options, methods, {})));
}

}  // namespace

TEST_CASE("--backend cuda reports what --backend cpu reports") {
  const RecordedCache cache = RecordedCache::load(kRecording);
  device::reset_device();
  const Json cpu = report(cache, parse({}));
  const Json cuda = report(cache, parse({"--backend", "cuda"}));
  const auto& faults = device::current_device().faults();
  INFO((faults.empty() ? "" : faults.front().what()));
  REQUIRE(faults.empty());
  CHECK(device::current_device().launches().size() > 20);
  CHECK_THAT(cuda["settings"]["backend"].get<std::string>(), Catch::StartsWith("cuda (CPU device"));
  CHECK_THAT(cpu["settings"]["backend"].get<std::string>(), Catch::StartsWith("cpu ("));

  REQUIRE(cpu["rows"].size() == cuda["rows"].size());
  REQUIRE(cpu["rows"].size() >= 2);
  const std::set<std::string> own{"step_ns", "dense_ns", "workspace_bytes"};
  for (std::size_t i = 0; i < cpu["rows"].size(); ++i) {
    REQUIRE(cpu["rows"][i].size() == cuda["rows"][i].size());
    for (const auto& [name, value] : cpu["rows"][i].items()) {
      CAPTURE(i, name);
      const Json& other = cuda["rows"][i].at(name);
      if (own.count(name) > 0) continue;
      // Sums of outputs are grouped otherwise.
      if (name.rfind("output_error_", 0) == 0 || name.rfind("denominator_error_", 0) == 0) {
        CHECK(std::fabs(value.get<double>() - other.get<double>()) < verkv::tolerance::kReplay);
      } else if (name == "metadata_bytes") {
        // The device has 4 bytes more for each token of the window: 102 of them here.
        CHECK(value.get<double>() + 4 * 102 == other.get<double>());
      } else {
        CHECK(value == other);
      }
    }
    CHECK(cuda["rows"][i]["moved_tokens"].get<double>() > 0);
    CHECK(cuda["rows"][i]["trials"].get<double>() > 0);
  }
}

TEST_CASE("--backend cuda says what is missing") {
  const RecordedCache cache = RecordedCache::load(kRecording);
  device::reset_device();
  const auto refuses = [&](const std::vector<std::string>& arguments, const std::string& text) {
    try {
      report(cache, parse(arguments));
      FAIL("not refused");
    } catch (const UsageError& error) {
      CHECK_THAT(error.what(), Catch::Contains(text));
    }
  };
  refuses({"--backend", "cuda", "--order", "exact"},
          "--backend cuda: the exact order of fetches; a device orders by worth");
  device::DeviceOptions none;
  none.devices = 0;
  device::reset_device(none);
  refuses({"--backend", "cuda"}, "--backend cuda: there is no CUDA device");
  device::reset_device();
}
