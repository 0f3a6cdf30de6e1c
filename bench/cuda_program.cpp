#include "cuda_program.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>

#include <nlohmann/json.hpp>
#include <verkv/cuda_cache.hpp>

#include "cuda_dense.hpp"
#include "cuda_machine.hpp"
#include "cuda_options.hpp"
#include "cuda_report.hpp"
#include "cuda_scene.hpp"
#include "cuda_timing.hpp"
#include "step.hpp"
#include "step_kernels.hpp"

namespace verkv::bench {
namespace {

nlohmann::json settings_json(const Plan& plan, bool quick) {
  return {{"quick", quick},
          {"kv_heads", plan.kv_heads},
          {"query_heads", plan.kv_heads * kDenseGroup},
          {"head_dim", kDenseDim},
          {"row_bytes", kRowBytes},
          {"storage", "f16"},
          {"sketch", "calibrated, 2 bits"},
          {"keep", kKeep},
          {"warm_up", plan.warm_up},
          {"repetitions", plan.repetitions},
          {"flush_bytes", plan.flush_bytes},
          {"offload_piece_bytes", plan.piece_bytes}};
}

// Bytes of main memory that can still be taken; of a container that has less than the machine,
// that.
std::int64_t available_host_memory() {
  std::int64_t available = std::numeric_limits<std::int64_t>::max();
  std::ifstream meminfo("/proc/meminfo");
  for (std::string name, unit; meminfo >> name;) {
    std::int64_t kilobytes = 0;
    if (!(meminfo >> kilobytes)) break;
    std::getline(meminfo, unit);
    if (name == "MemAvailable:") available = 1024 * kilobytes;
  }
  std::int64_t most = 0;
  std::int64_t used = 0;
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> most &&
      std::ifstream("/sys/fs/cgroup/memory.current") >> used) {
    available = std::min(available, most - used);
  }
  return available;
}

// Beside the file, then renamed, so that it is never half-written.
void write_json(const std::string& path, const nlohmann::json& json) {
  if (path.empty()) return;
  const std::string partial = path + ".partial";
  std::ofstream file(partial);
  file << json.dump(1) << '\n';
  file.close();
  if (!file) throw std::runtime_error(path + ": cannot be written");
  std::filesystem::rename(partial, path);
}

std::vector<float> from_device(const float* data, std::int64_t count) {
  std::vector<float> result(at(count));
  VERKV_CUDA_CHECK(
      cudaMemcpy(result.data(), data, sizeof(float) * result.size(), cudaMemcpyDeviceToHost));
  return result;
}

// The largest difference, relative to the largest expected number.
double worst_error(const std::vector<float>& got, std::size_t first,
                   const std::vector<double>& expected) {
  double worst = 0;
  double largest = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double error = std::fabs(static_cast<double>(got[first + i]) - expected[i]);
    worst = std::max(worst, std::isfinite(error) ? error : INFINITY);
    largest = std::max(largest, std::fabs(expected[i]));
  }
  return worst / largest;
}

// Median over query heads of the difference's length relative to the exact output's.
double output_error(const std::vector<float>& got, const std::vector<float>& exact) {
  std::vector<double> errors;
  for (std::size_t first = 0; first < got.size(); first += kDenseDim) {
    double difference = 0;
    double length = 0;
    for (std::size_t i = first; i < first + kDenseDim; ++i) {
      const double x = static_cast<double>(exact[i]);
      const double d = static_cast<double>(got[i]) - x;
      difference += d * d;
      length += x * x;
    }
    const double error = std::sqrt(difference / length);
    errors.push_back(std::isfinite(error) ? error : INFINITY);
  }
  return timing_of(std::move(errors)).median;
}

constexpr double kDenseTolerance = 1e-4;
// A step that does no better than an output of zeros is broken; what it promises is tested
// elsewhere.
constexpr double kStepTolerance = 1;

class Program {
 public:
  Program(const Options& options, const Machine& machine)
      : options_(options), plan_(plan_of(options)), machine_(machine), flush_(plan_.flush_bytes) {}

  int run() {
    // A file that cannot be written should not be found out after ten minutes.
    write_json(options_.json, nlohmann::json::object());
    std::printf("%s, compute capability %d.%d, %d multiprocessors\n", machine_.name.c_str(),
                machine_.major, machine_.minor, machine_.multiprocessors);
    if (!machine_.timings)
      std::printf("this is a stand-in for a GPU: its times mean nothing and are left out\n");
    say("rates of the machine");
    probe_machine(machine_, plan_.probes, stream_);
    report_.emplace(machine_, plan_.probes, settings_json(plan_, options_.quick));
    for (const std::int64_t tokens : plan_.tokens) {
      run_tokens(tokens);
      write_json(options_.json, report_->document());
    }
    say("done");
    std::printf("\n%s", markdown(report_->document()).c_str());
    return report_->passed() ? kExitDone : kExitFailed;
  }

 private:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }

  void say(const std::string& what) const {
    std::printf("[%4.0f s] %s\n", seconds(), what.c_str());
    std::fflush(stdout);
  }

  bool out_of_time(std::int64_t tokens, std::int64_t batch, const std::string& what) {
    if (seconds() < static_cast<double>(options_.time_limit)) return false;
    report_->leave_out(tokens, static_cast<int>(batch), what,
                       "the time limit of " + std::to_string(options_.time_limit) + " s is over");
    return true;
  }

  // Runs it unless memory is short, which is said.
  template <class Work>
  void unless_memory_is_short(std::int64_t tokens, std::int64_t batch, const std::string& what,
                              Work&& work) {
    try {
      work();
    } catch (const DeviceError& error) {
      if (!error.out_of_memory()) throw;
      report_->leave_out(tokens, static_cast<int>(batch), what, error.what());
    }
  }

  // Whether main memory has room for so much pinned memory beside what preparing it takes.
  bool fits(std::int64_t tokens, std::int64_t batch, const std::string& what, std::int64_t pinned) {
    const std::int64_t prompt = 8 * tokens * plan_.kv_heads * kDenseDim;
    const std::int64_t wanted = pinned + pinned / 8 + prompt;
    const std::int64_t available = available_host_memory();
    if (wanted <= available) return true;
    report_->leave_out(tokens, static_cast<int>(batch), what,
                       std::to_string(wanted >> 20) + " MiB of main memory are needed, " +
                           std::to_string(available >> 20) + " are there");
    return false;
  }

  void run_tokens(std::int64_t tokens) {
    std::vector<int> batches;
    for (const std::int64_t batch : plan_.batches) {
      const std::int64_t pinned =
          Scene::pinned_bytes(tokens, plan_.kv_heads, static_cast<int>(batch));
      if (!out_of_time(tokens, batch, "everything") && fits(tokens, batch, "everything", pinned))
        batches.push_back(static_cast<int>(batch));
    }
    // Where the largest batch has no room, a smaller one may.
    for (bool prepared = false; !prepared && !batches.empty();) {
      unless_memory_is_short(tokens, batches.back(), "everything",
                             [&] { run_batches(tokens, batches, prepared); });
      batches.pop_back();
    }
  }

  // All batches on the rows of the largest. out_prepared: there was room for them.
  void run_batches(std::int64_t tokens, const std::vector<int>& batches, bool& out_prepared) {
    exact_.clear();
    say(std::to_string(tokens) + " tokens: preparing");
    const Prompt prompt(tokens, plan_.kv_heads, batches.back());
    {
      const Scene scene(prompt, batches.back(), stream_);
      out_prepared = true;
      for (const int batch : batches) {
        if (out_of_time(tokens, batch, "everything")) continue;
        unless_memory_is_short(tokens, batch, "the rest", [&] { run_batch(scene, batch); });
      }
    }
    run_layers(prompt);
  }

  void run_batch(const Scene& scene, int batch) {
    say(std::to_string(scene.tokens()) + " tokens, batch " + std::to_string(batch));
    const std::vector<float> exact = run_offload(scene, batch);
    unless_memory_is_short(scene.tokens(), batch, "dense_resident",
                           [&] { run_resident(scene, batch); });
    exact_.assign(exact.begin(), exact.begin() + output_count(scene, 1));
    for (const Rule& rule : plan_.rules) {
      if (!out_of_time(scene.tokens(), batch, "the step, " + rule.name))
        run_step(scene, rule, batch, exact);
    }
  }

  Result dense_result(const Scene& scene, int batch, const std::string& what) const {
    Result result;
    result.tokens = scene.tokens();
    result.batch = batch;
    result.what = what;
    result.cache = "flushed";
    return result;
  }

  // The last row's last head against a sum in double.
  void check_dense(const Scene& scene, int batch, const std::string& what,
                   const std::vector<float>& output) {
    const std::vector<double> expected =
        reference_attention(scene, batch - 1, scene.kv_heads() - 1);
    report_->check(scene.tokens(), batch, what,
                   worst_error(output, output.size() - expected.size(), expected), kDenseTolerance);
  }

  std::int64_t output_count(const Scene& scene, int batch) const {
    return batch * scene.prompt().query_heads() * kDenseDim;
  }

  // Returns its output.
  std::vector<float> run_offload(const Scene& scene, int batch) {
    OffloadedDense dense(scene, batch, plan_.piece_bytes);
    Result result = dense_result(scene, batch, "dense_offload");
    result.host_bytes = dense.bytes();
    result.timing = timed([&] { dense.enqueue(stream_); });
    report_->add(result);
    const std::vector<float> output = from_device(dense.output(), output_count(scene, batch));
    check_dense(scene, batch, result.what, output);
    return output;
  }

  void run_resident(const Scene& scene, int batch) {
    const ResidentDense dense(scene, batch, machine_.multiprocessors, stream_);
    Result result = dense_result(scene, batch, "dense_resident");
    result.device_bytes = dense.bytes();
    std::string tried;
    for (const int splits : dense.splits()) {
      const Timing timing = timed([&] { dense.enqueue(splits, stream_); });
      tried += (tried.empty() ? "" : ", ") + std::to_string(splits);
      if (result.timing.repetitions == 0 || timing.median < result.timing.median) {
        result.timing = timing;
        result.detail = std::to_string(splits);
      }
      check_dense(scene, batch, result.what + " in " + std::to_string(splits) + " splits",
                  from_device(dense.output(), output_count(scene, batch)));
    }
    result.detail += " splits of a pair, the fastest of " + tried;
    report_->add(result);
  }

  void run_step(const Scene& scene, const Rule& rule, int batch, const std::vector<float>& exact) {
    const cuda::StepArguments step = scene.step(rule, batch);
    Result result = dense_result(scene, batch, "step");
    result.rule = rule.name;
    result.detail = std::to_string(step.grid.score_splits) + " splits of the scores, " +
                    std::to_string(step.grid.attention_splits) + " of the attention";
    result.timing = timed([&] { VERKV_CUDA_CHECK(cuda::launch_step(step.view, stream_)); });
    const Scene::Sizes sizes = scene.sizes();
    const std::int64_t moved = scene.moved_tokens(batch);
    result.device_bytes =
        batch * (sizes.sketch + sizes.odds + sizes.resident_keys + sizes.near_values());
    result.host_bytes = moved * kRowBytes;
    result.moved_share =
        static_cast<double>(moved) / static_cast<double>(batch * scene.kv_heads() * scene.tokens());
    result.output_error =
        output_error(from_device(scene.output(), output_count(scene, batch)), exact);
    report_->add(result);
    report_->check(scene.tokens(), batch, "step, " + rule.name, *result.output_error,
                   kStepTolerance);
    run_kernels(step, result, sizes);
  }

  // The launches of a step one by one, each behind those before it, as in a step.
  void run_kernels(const cuda::StepArguments& step, const Result& whole,
                   const Scene::Sizes& sizes) {
    struct Kernel {
      const char* name;
      cudaError_t (*launch)(const cuda::StepArguments&, cudaStream_t);
      std::int64_t device_bytes;  // of one row
      std::int64_t host_bytes;    // of all rows
    };
    const std::array kernels{
        Kernel{"scores", cuda::launch_scores, sizes.sketch + sizes.resident_keys, 0},
        Kernel{"plan", cuda::launch_plan, sizes.odds, 0},
        Kernel{"certificate", cuda::launch_certificate, sizes.odds, 0},
        Kernel{"attention", cuda::launch_attention, sizes.near_values(), whole.host_bytes}};
    std::array<Event, kernels.size() + 1> events;
    std::array<std::vector<double>, kernels.size()> seconds;
    for (int i = -plan_.warm_up; i < plan_.repetitions; ++i) {
      flush_.enqueue(stream_);
      events[0].record(stream_);
      for (std::size_t k = 0; k < kernels.size(); ++k) {
        VERKV_CUDA_CHECK(kernels[k].launch(step, stream_));
        events[k + 1].record(stream_);
      }
      events.back().wait();
      for (std::size_t k = 0; k < kernels.size() && i >= 0; ++k)
        seconds[k].push_back(seconds_between(events[k], events[k + 1]));
    }
    for (std::size_t k = 0; k < kernels.size(); ++k) {
      Result result;
      result.tokens = whole.tokens;
      result.batch = whole.batch;
      result.rule = whole.rule;
      result.what = kernels[k].name;
      result.cache = k == 0 ? "flushed" : "flushed before the step";
      result.timing = timing_of(seconds[k]);
      result.device_bytes = whole.batch * kernels[k].device_bytes;
      result.host_bytes = kernels[k].host_bytes;
      result.whole = false;
      report_->add(result);
    }
  }

  // What an engine sees: the layers of a step in a graph, one sequence.
  void run_layers(const Prompt& prompt) {
    const std::int64_t tokens = prompt.shape().tokens;
    const int layers = tokens < plan_.long_tokens ? plan_.short_layers : plan_.long_layers;
    for (const Rule& rule : plan_.rules) {
      const std::string what = "graph_step";
      if (out_of_time(tokens, 1, what + ", " + rule.name) ||
          !fits(tokens, 1, what, layers * Scene::pinned_bytes(tokens, plan_.kv_heads, 1)))
        continue;
      say(std::to_string(tokens) + " tokens, " + std::to_string(layers) +
          " layers in a graph, preparing: " + rule.name);
      unless_memory_is_short(tokens, 1, what, [&] { run_graph(prompt, rule, layers, what); });
    }
  }

  void run_graph(const Prompt& prompt, const Rule& rule, int layers, const std::string& what) {
    const CapturedLayers captured(prompt, rule, layers, stream_);
    Result result;
    result.tokens = prompt.shape().tokens;
    result.rule = rule.name;
    result.what = what;
    result.cache = "flushed";
    result.detail = std::to_string(layers) + " layers";
    result.timing = timed([&] { captured.launch(); });
    for (double* time : {&result.timing.median, &result.timing.lower, &result.timing.upper})
      *time /= layers;
    const double moved = captured.moved_tokens();
    result.device_bytes = captured.fast_bytes();
    result.host_bytes = static_cast<std::int64_t>(moved * static_cast<double>(kRowBytes));
    result.moved_share = moved / static_cast<double>(plan_.kv_heads * result.tokens);
    if (!exact_.empty()) {
      const std::vector<float> output =
          from_device(captured.output(), static_cast<std::int64_t>(exact_.size()));
      result.output_error = output_error(output, exact_);
      report_->check(result.tokens, 1, what + ", " + rule.name, *result.output_error,
                     kStepTolerance);
    }
    report_->add(result);
  }

  template <class Work>
  Timing timed(Work&& work) {
    return measure(
        stream_, plan_.warm_up, plan_.repetitions, [this] { flush_.enqueue(stream_); }, work);
  }

  const Options& options_;
  const Plan plan_;
  Machine machine_;
  const Stream stream_;
  Flush flush_;
  std::optional<Report> report_;
  // Dense output of the first row of the size at hand; empty if it was left out.
  std::vector<float> exact_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

int print_table(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error(path + ": cannot be read");
  std::printf("%s", markdown(nlohmann::json::parse(file)).c_str());
  return kExitDone;
}

int run(const std::vector<std::string>& arguments) {
  const Options options = parse_options(arguments);
  if (options.help) {
    std::printf("%s", kCudaBenchHelp);
    return kExitDone;
  }
  if (!options.table.empty()) return print_table(options.table);
  int devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&devices);
  if (status != cudaSuccess || devices == 0) {
    cudaGetLastError();
    std::fprintf(stderr, "cuda_bench: there is no CUDA device here (%s)\n",
                 status == cudaSuccess ? "the driver lists none" : cudaGetErrorString(status));
    return kExitNoDevice;
  }
  return Program(options, describe_machine()).run();
}

}  // namespace

int run_cuda_bench(const std::vector<std::string>& arguments) noexcept {
  try {
    return run(arguments);
  } catch (const OptionError& error) {
    std::fprintf(stderr, "cuda_bench: %s\n", error.what());
    return kExitOptions;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cuda_bench: %s\n", error.what());
    return kExitFailed;
  }
}

}  // namespace verkv::bench
