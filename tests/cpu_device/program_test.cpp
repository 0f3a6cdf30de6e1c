// Objects that nvcc made, with CUB inside, run through the entry points of the CUDA runtime.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <random>

#include "catch.hpp"
#include "cudart.hpp"
#include "kernels/samples.hpp"
#include "kernels/verify.hpp"
#include "mutation.hpp"
#include "test_support.hpp"

using namespace verkv::cpu_device;
using namespace verkv::cpu_device::test;

namespace {

template <typename T>
T* to_device(const std::vector<T>& values) {
  void* memory = nullptr;
  REQUIRE(cudaMalloc(&memory, values.size() * sizeof(T)) == cudaSuccess);
  REQUIRE(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice) ==
          cudaSuccess);
  return static_cast<T*>(memory);
}

template <typename T>
std::vector<T> from_device(const T* memory, std::size_t count) {
  std::vector<T> values(count);
  INFO(first_fault(current_device()));
  REQUIRE(cudaMemcpy(values.data(), memory, count * sizeof(T), cudaMemcpyDeviceToHost) ==
          cudaSuccess);
  return values;
}

struct VerifyInput {
  int heads = 1, keys = samples::kVerifyKeys - 100;
  float budget = 60;
  unsigned seed = 42;
  std::vector<unsigned> sketch;
  std::vector<float> scale, query;

  explicit VerifyInput(int head_count = 1) : heads(head_count) {
    std::mt19937 random(7);
    const auto cells = static_cast<std::size_t>(heads) * static_cast<std::size_t>(keys);
    sketch.resize(cells * 8);
    for (auto& word : sketch) word = static_cast<unsigned>(random());
    scale.resize(cells);
    for (auto& s : scale) s = 0.002F + 0.00001F * static_cast<float>(random() % 300);
    query.resize(static_cast<std::size_t>(heads) * 128);
    for (auto& q : query) q = (static_cast<float>(random() % 2001) - 1000) / 20;
  }
};

struct VerifyResult {
  std::vector<int> index, count, total;
  std::vector<float> probability, top;
};

std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> c, std::uint32_t k0,
                                    std::uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53U} * c[0],
                        p1 = std::uint64_t{0xCD9E8D57U} * c[2];
    c = {static_cast<std::uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<std::uint32_t>(p1),
         static_cast<std::uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<std::uint32_t>(p0)};
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  return c;
}

// The weights that the kernel sorts, and the inclusion of each key by its probability in double.
void check_against_reference(const VerifyInput& in, const VerifyResult& out) {
  const auto keys = static_cast<std::size_t>(in.keys);
  int all = 0;
  for (std::size_t head = 0; head < static_cast<std::size_t>(in.heads); ++head) {
    std::vector<double> weight(keys);
    for (std::size_t i = 0; i < keys; ++i) {
      float sum = 0;  // in the kernel's order, so that it is the same number
      for (std::size_t d = 0; d < 128; ++d) {
        const unsigned word = in.sketch[(head * keys + i) * 8 + d / 16];
        const auto level =
            static_cast<float>(static_cast<int>((word >> (2 * (d % 16))) & 3) * 2 - 3);
        sum = std::fma(level, in.query[head * 128 + d], sum);
      }
      weight[i] = static_cast<double>(sum * in.scale[head * keys + i]);
    }
    const double largest = *std::max_element(weight.begin(), weight.end());
    for (double& w : weight) w = std::exp(w - largest);
    double beta =
        static_cast<double>(in.budget) / std::accumulate(weight.begin(), weight.end(), 0.0);
    for (int round = 0; round < 32; ++round) {
      int saturated = 0;
      double rest = 0;
      for (const double w : weight) (beta* w >= 1 ? saturated += 1 : rest += w);
      const double next = rest > 0 ? (static_cast<double>(in.budget) - saturated) / rest : beta;
      if (!(next > beta)) break;
      beta = next;
    }
    const auto count = static_cast<std::size_t>(out.count[head]);
    all += out.count[head];
    REQUIRE(count > 10);
    std::size_t at = 0;
    for (std::size_t i = 0; i < keys; ++i) {
      const auto random = philox(
          {static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(head), 0, 0}, in.seed, 0x5eed);
      const double u = static_cast<double>(random[0] >> 8) * 0x1p-24;
      const double p = beta * weight[i];
      if (std::fabs(u - p) < 1e-5) continue;  // float may decide otherwise
      const bool listed = at < count && out.index[head * keys + at] == static_cast<int>(i);
      REQUIRE(listed == (u < p));
      if (listed) {
        REQUIRE(std::fabs(static_cast<double>(out.probability[head * keys + at]) -
                          std::min(1.0, p)) < 1e-4);
        ++at;
      }
    }
    std::sort(weight.rbegin(), weight.rend());
    for (std::size_t j = 0; j < samples::kVerifyTop; ++j) {
      REQUIRE(std::fabs(static_cast<double>(out.top[head * samples::kVerifyTop + j]) - weight[j]) <
              1e-4);
    }
  }
  REQUIRE(out.total[0] == all);
}

}  // namespace

TEST_CASE("A program: memory, launches, copies") {
  reset_device();
  int devices = 0;
  CHECK(cudaGetDeviceCount(&devices) == cudaSuccess);
  CHECK(devices == 1);
  float* x = to_device(std::vector<float>(1000, 1));
  float* y = to_device(std::vector<float>(1000, 2));
  cudaStream_t stream = nullptr;
  REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
  CHECK(samples::launch_axpy(3, x, y, 1000, stream) == cudaSuccess);
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  CHECK(from_device(y, 1000) == std::vector<float>(1000, 5));
  CHECK(samples::launch_axpy_extended(3, x, y, 1000, 1, stream) == cudaSuccess);
  CHECK(from_device(y, 1000) == std::vector<float>(1000, 8));
  CHECK(samples::launch_axpy_extended(3, x, y, 1000, 2, stream) == cudaErrorNotSupported);
  CHECK(cudaGetLastError() == cudaErrorNotSupported);
  float table[16];
  std::iota(table, table + 16, 0.0F);
  CHECK(samples::set_table(table) == cudaSuccess);
  CHECK(samples::launch_table(x, stream) == cudaSuccess);
  CHECK(from_device(x, 32)[17] == 2);
  CHECK(cudaFree(x) == cudaSuccess);
  CHECK(cudaFree(y) == cudaSuccess);
  CHECK(cudaStreamDestroy(stream) == cudaSuccess);
  CHECK(current_device().live_allocations() == 0);
}

TEST_CASE("A fault of a program has its text in the error string") {
  reset_device();
  float* x = to_device(std::vector<float>(10, 1));
  CHECK(samples::launch_axpy(1, x, x, 11, nullptr) == cudaSuccess);
  const cudaError_t error = cudaDeviceSynchronize();
  CHECK(error == cudaErrorIllegalAddress);
  const std::string text = cudaGetErrorString(error);
  INFO(text);
  CHECK(contains(
      text,
      "out of bounds in kernel samples::axpy(float, float const*, float*, int) at samples.cu:"));
  CHECK(contains(text, "thread (10,0,0) of block (0,0,0)"));
  CHECK(cudaMalloc(reinterpret_cast<void**>(&x), 4) == cudaErrorIllegalAddress);
}

TEST_CASE("Out of memory, no device, refused pinning") {
  DeviceOptions options;
  options.memory_bytes = 1000;
  options.devices = 0;
  Device& device = reset_device(options);
  void* memory = nullptr;
  CHECK(cudaMalloc(&memory, 1001) == cudaErrorMemoryAllocation);
  CHECK(memory == nullptr);
  int devices = -1;
  CHECK(cudaGetDeviceCount(&devices) == cudaErrorNoDevice);
  CHECK(devices == 0);
  device.fail_call(Call::host_malloc, Status::out_of_memory, 0, true);
  CHECK(cudaHostAlloc(&memory, 10, cudaHostAllocMapped) == cudaErrorMemoryAllocation);
  CHECK(cudaMallocHost(&memory, 10) == cudaErrorMemoryAllocation);
}

TEST_CASE("A captured program with pinned memory, on every order of two streams") {
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    DeviceOptions options;
    options.schedule_seed = seed;
    reset_device(options);
    constexpr std::size_t n = 512;
    void* host = nullptr;
    void* mapped = nullptr;
    REQUIRE(cudaHostAlloc(&host, n * 4, cudaHostAllocMapped) == cudaSuccess);
    REQUIRE(cudaHostGetDevicePointer(&mapped, host, 0) == cudaSuccess);
    auto* numbers = static_cast<int*>(host);
    std::fill_n(numbers, n, 1);
    int* scanned = to_device(std::vector<int>(n));
    int* totals = to_device(std::vector<int>(4));
    cudaStream_t a = nullptr, b = nullptr;
    cudaEvent_t forked = nullptr, joined = nullptr;
    cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking);
    cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking);
    cudaEventCreateWithFlags(&forked, cudaEventDisableTiming);
    cudaEventCreateWithFlags(&joined, cudaEventDisableTiming);
    REQUIRE(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal) == cudaSuccess);
    CHECK(samples::launch_block_scan(static_cast<int*>(mapped), scanned, totals, 4, a) ==
          cudaSuccess);
    cudaEventRecord(forked, a);
    cudaStreamWaitEvent(b, forked, 0);
    CHECK(cudaMemcpyAsync(host, scanned, n * 4, cudaMemcpyDeviceToHost, b) == cudaSuccess);
    cudaEventRecord(joined, b);
    cudaStreamWaitEvent(a, joined, 0);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    REQUIRE(cudaStreamEndCapture(a, &graph) == cudaSuccess);
    REQUIRE(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
    CHECK(cudaGraphLaunch(exec, a) == cudaSuccess);
    CHECK(cudaGraphLaunch(exec, a) == cudaSuccess);
    CHECK(cudaStreamSynchronize(a) == cudaSuccess);
    INFO(first_fault(current_device()));
    // Twice an inclusive scan of ones, in blocks of 128.
    for (std::size_t i = 0; i < n; ++i) {
      const auto k = static_cast<int>(i % 128) + 1;
      REQUIRE(numbers[i] == k * (k + 1) / 2);
    }
    CHECK(cudaFreeHost(host) == cudaSuccess);
  }
}

TEST_CASE("A kernel like a verification step, with CUB's block algorithms") {
  for (const std::uint64_t order : {std::uint64_t{0}, std::uint64_t{5}}) {
    DeviceOptions options;
    options.machine.thread_order = order;
    options.machine.block_order = order;
    reset_device(options);
    const VerifyInput in(2);
    const auto cells = in.scale.size();
    samples::VerifyOutput out{};
    out.index = to_device(std::vector<int>(cells));
    out.probability = to_device(std::vector<float>(cells));
    out.count = to_device(std::vector<int>(2));
    out.top = to_device(std::vector<float>(2 * samples::kVerifyTop));
    out.total = to_device(std::vector<int>(1));
    REQUIRE(samples::launch_verify(to_device(in.sketch), to_device(in.scale), to_device(in.query),
                                   in.heads, in.keys, in.budget, in.seed, out,
                                   nullptr) == cudaSuccess);
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    INFO(first_fault(current_device()));
    REQUIRE(current_device().faults().empty());
    check_against_reference(
        in, {from_device(out.index, cells), from_device(out.count, 2), from_device(out.total, 1),
             from_device(out.probability, cells), from_device(out.top, 2 * samples::kVerifyTop)});
  }
}

TEST_CASE("An algorithm of CUB over the whole device, whose blocks look back at earlier ones") {
  reset_device();
  std::vector<int> values(20000), expected;
  std::vector<char> flags(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<int>(i * 7);
    flags[i] = i * i % 11 < 4;
    if (flags[i]) expected.push_back(values[i]);
  }
  int* out = to_device(std::vector<int>(values.size()));
  int* count = to_device(std::vector<int>(1));
  cudaStream_t stream = nullptr;
  REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
  CHECK(samples::launch_select(to_device(values), to_device(flags), static_cast<int>(values.size()),
                               out, count, stream) == cudaSuccess);
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  INFO(first_fault(current_device()));
  REQUIRE(from_device(count, 1)[0] == static_cast<int>(expected.size()));
  CHECK(from_device(out, expected.size()) == expected);
}

TEST_CASE("Barriers dropped from the kernel with CUB: most are missed") {
  // Some are redundant: between two of CUB's calls, say, where its own barriers are enough.
  const std::string ptx = [] {
    std::ifstream file(VERKV_TEST_VERIFY_PTX);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
  }();
  const VerifyInput in(1);
  const auto cells = in.scale.size();
  const auto run = [&](const std::string& text) {
    Device device;
    const auto kernel = device.load(text)->find("verify_kernel");
    device.allow_shared(*kernel, 64 << 10);
    samples::VerifyOutput out{};
    const auto made = [&](auto*& pointer, std::size_t count) {
      using T = std::remove_reference_t<decltype(*pointer)>;
      pointer = reinterpret_cast<T*>(upload(device, std::vector<T>(count)));
    };
    made(out.index, cells);
    made(out.probability, cells);
    made(out.count, 1);
    made(out.top, samples::kVerifyTop);
    made(out.total, 1);
    CHECK(device.launch_with(kernel, {{}, {256, 1, 1}, 32 << 10}, kLegacyStream,
                             upload(device, in.sketch), upload(device, in.scale),
                             upload(device, in.query), in.keys, in.budget, in.seed,
                             out) == Status::success);
    return device.synchronize() == Status::success;
  };
  REQUIRE(run(ptx));
  const auto mutants = without_one_barrier(ptx, "verify_kernel");
  std::size_t found = 0;
  for (const Mutant& mutant : mutants) found += !run(mutant.ptx);
  INFO(found << " of " << mutants.size() << " dropped barriers are reported");
  CHECK(found * 4 >= mutants.size() * 3);
}
