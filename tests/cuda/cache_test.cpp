// make_cuda_cache against make_cpu_cache: the same calls on both. Reports, certificates, lengths,
// statistics and memory are equal; outputs agree to rounding. Then what only a device has: views in
// its memory, capture, refused memory, launches of a step.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <verkv/clusters.hpp>
#include <verkv/cuda_cache.hpp>
#include <verkv/recorded_cache.hpp>

#include "catch.hpp"
#include "cudart.hpp"
#include "device_memory.hpp"
#include "reference/statistics.hpp"
#include "tolerance.hpp"

namespace {

using verkv::AttendBatch;
using verkv::CacheConfig;
using verkv::CudaOptions;
using verkv::DeviceError;
using verkv::DType;
using verkv::Estimator;
using verkv::FetchMode;
using verkv::FetchOrder;
using verkv::ImportanceView;
using verkv::InvalidArgument;
using verkv::kNoSequence;
using verkv::KvCacheManager;
using verkv::KvHeadReport;
using verkv::LayerConfig;
using verkv::LayerStatistics;
using verkv::MemoryReport;
using verkv::MemorySpace;
using verkv::Pool;
using verkv::QueryHeadReport;
using verkv::Selection;
using verkv::SequenceId;
using verkv::SketchKind;
using verkv::TensorView;
using verkv::cuda::DeviceBuffer;
using verkv::reference::Random;
namespace device = verkv::cpu_device;

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

LayerConfig layer_config(std::int64_t kv_heads, std::int64_t group, std::int64_t key_dim,
                         std::int64_t value_dim) {
  LayerConfig layer;
  layer.kv_heads = kv_heads;
  layer.query_heads = kv_heads * group;
  layer.key_dim = key_dim;
  layer.value_dim = value_dim;
  return layer;
}

CacheConfig small_config() {
  CacheConfig config;
  config.layers = {layer_config(2, 1, 64, 64), layer_config(1, 3, 80, 32)};
  config.keep = 0.2;
  config.local_tokens = 8;
  config.chunk_tokens = 16;
  config.compress_from = 0;
  config.sink_tokens = 2;
  config.threads = 1;
  config.seed = 11;
  return config;
}

std::vector<float> normal(Random& random, std::int64_t count, double spread = 1) {
  std::vector<float> result;
  for (std::int64_t i = 0; i < count; ++i) {
    result.push_back(static_cast<float>(spread * random.normal()));
  }
  return result;
}

// Both caches under the same calls.
class Twins {
 public:
  explicit Twins(const CacheConfig& given, std::uint64_t seed = 1, const CudaOptions& options = {})
      : config(given), random(seed), space(options.views) {
    cpu = verkv::make_cpu_cache(config);
    cuda = verkv::make_cuda_cache(config, options);
  }

  SequenceId create() {
    const SequenceId a = cpu->create_sequence();
    const SequenceId b = cuda->create_sequence();
    REQUIRE(a == b);
    return a;
  }

  void erase(SequenceId id) {
    cpu->erase(id);
    cuda->erase(id);
  }

  // The same numbers where the device's views are to lie.
  const float* placed(const std::vector<float>& data) {
    if (space == MemorySpace::host) return data.data();
    copies.emplace_back(static_cast<std::int64_t>(data.size()), "views");
    VERKV_CUDA_CHECK(
        cudaMemcpy(copies.back().data(), data.data(), 4 * data.size(), cudaMemcpyHostToDevice));
    return copies.back().data();
  }

  void append(SequenceId id, std::int64_t tokens) {
    for (std::size_t i = 0; i < config.layers.size(); ++i) {
      const LayerConfig& l = config.layers[i];
      if (!l.cached) continue;
      const std::vector<float> keys = normal(random, tokens * l.kv_heads * l.key_dim);
      const std::vector<float> values = normal(random, tokens * l.kv_heads * l.value_dim);
      const auto call = [&](KvCacheManager& cache, const float* k, const float* v) {
        // Strides of one token even where there is none: 0 would be refused.
        TensorView value_view = verkv::head_major(v, DType::f32, std::max<std::int64_t>(1, tokens),
                                                  l.kv_heads, l.value_dim);
        value_view.tokens = tokens;
        cache.append(id, static_cast<std::int64_t>(i),
                     verkv::token_major(k, DType::f32, tokens, l.kv_heads, l.key_dim), value_view);
      };
      call(*cpu, keys.data(), values.data());
      call(*cuda, placed(keys), placed(values));
    }
  }

  // Scores of the tokens that are open.
  std::vector<std::vector<float>> scores(SequenceId id) {
    std::vector<std::vector<float>> result(config.layers.size());
    for (std::size_t i = 0; i < result.size(); ++i) {
      const LayerConfig& l = config.layers[i];
      if (!l.cached || l.dense) continue;
      const std::int64_t layer = static_cast<std::int64_t>(i);
      const std::int64_t open = cpu->tokens(id, layer) - cpu->compressed_tokens(id, layer);
      for (const float x : normal(random, l.kv_heads * open)) {
        result[i].push_back(random.below(9) == 0 ? 0.0f : std::exp(2 * x));
      }
    }
    return result;
  }

  std::vector<ImportanceView> views(const std::vector<std::vector<float>>& data, bool place) {
    std::vector<ImportanceView> result(data.size());
    for (std::size_t i = 0; i < data.size(); ++i) {
      const LayerConfig& l = config.layers[i];
      if (!l.cached || l.dense) continue;
      const std::int64_t tokens = static_cast<std::int64_t>(data[i].size()) / l.kv_heads;
      result[i] = {place ? placed(data[i]) : data[i].data(), l.kv_heads, tokens, tokens};
    }
    return result;
  }

  void compress(SequenceId id) {
    const std::vector<std::vector<float>> data = scores(id);
    // Of every second compression: queries of a few positions.
    std::vector<TensorView> own;
    std::vector<TensorView> device;
    std::vector<std::vector<float>> queries(config.layers.size());
    const bool calibrated = random.below(2) == 0;
    for (std::size_t i = 0; calibrated && i < queries.size(); ++i) {
      const LayerConfig& l = config.layers[i];
      queries[i] = normal(random, 3 * l.query_heads * l.key_dim);
      const auto view = [&](const float* x) {
        return verkv::token_major(x, DType::f32, 3, l.query_heads, l.key_dim);
      };
      own.push_back(view(queries[i].data()));
      device.push_back(view(placed(queries[i])));
    }
    cpu->compress(id, views(data, false), own);
    cuda->compress(id, views(data, true), device);
  }

  void redraw(SequenceId id, std::uint64_t draw) {
    cpu->redraw(id, draw);
    cuda->redraw(id, draw);
  }

  // A step of all layers, compared. Without reports the device need not be waited for.
  void attend(const std::vector<SequenceId>& sequences, double query_size = 1,
              bool reports = true) {
    const std::int64_t rows = static_cast<std::int64_t>(sequences.size());
    for (std::size_t i = 0; i < config.layers.size(); ++i) {
      const LayerConfig& l = config.layers[i];
      if (!l.cached) continue;
      const std::vector<float> queries =
          normal(random, rows * l.query_heads * l.key_dim, query_size);
      std::vector<float> output[2], lse[2];
      std::vector<QueryHeadReport> query[2];
      std::vector<KvHeadReport> kv[2];
      for (const int which : {0, 1}) {
        AttendBatch batch;
        batch.sequences = sequences;
        batch.queries = verkv::token_major(which == 1 ? placed(queries) : queries.data(),
                                           DType::f32, rows, l.query_heads, l.key_dim);
        output[which].assign(size(rows * l.query_heads * l.value_dim), 9);
        lse[which].assign(size(rows * l.query_heads), 9);
        query[which].resize(lse[which].size());
        kv[which].resize(size(rows * l.kv_heads));
        batch.output = output[which];
        batch.lse = lse[which];
        if (reports) {
          batch.query_reports = query[which];
          batch.kv_reports = kv[which];
        }
        if (which == 0) {
          cpu->attend(static_cast<std::int64_t>(i), batch);
          continue;
        }
        DeviceBuffer<float> output_copy;
        DeviceBuffer<float> lse_copy;
        if (space == MemorySpace::device) {
          output_copy = DeviceBuffer<float>(static_cast<std::int64_t>(output[1].size()), "output");
          lse_copy = DeviceBuffer<float>(static_cast<std::int64_t>(lse[1].size()), "lse");
          batch.output = {output_copy.data(), output[1].size()};
          batch.lse = {lse_copy.data(), lse[1].size()};
        }
        if (capture_on == nullptr) {
          cuda->attend(static_cast<std::int64_t>(i), batch);
        } else {
          attend_captured(static_cast<std::int64_t>(i), batch);
        }
        if (space == MemorySpace::device) {
          VERKV_CUDA_CHECK(cudaMemcpy(output[1].data(), output_copy.data(), 4 * output[1].size(),
                                      cudaMemcpyDeviceToHost));
          VERKV_CUDA_CHECK(cudaMemcpy(lse[1].data(), lse_copy.data(), 4 * lse[1].size(),
                                      cudaMemcpyDeviceToHost));
        }
      }
      CAPTURE(i);
      for (std::size_t k = 0; k < output[0].size(); ++k) {
        worst_output =
            std::max(worst_output, static_cast<double>(std::fabs(output[0][k] - output[1][k])));
        if (!(std::fabs(output[0][k] - output[1][k]) <= verkv::tolerance::kRowOrder)) {
          CAPTURE(k, output[0][k], output[1][k]);
          FAIL("output");
        }
      }
      for (std::size_t k = 0; k < lse[0].size(); ++k) {
        if (lse[0][k] == lse[1][k]) continue;  // infinities
        CAPTURE(k);
        REQUIRE(std::fabs(lse[0][k] - lse[1][k]) <= verkv::tolerance::kRowOrder);
      }
      for (std::size_t k = 0; k < query[0].size(); ++k) {
        CAPTURE(k);
        REQUIRE(query[0][k].epsilon == query[1][k].epsilon);
        REQUIRE(query[0][k].certified == query[1][k].certified);
        REQUIRE(query[0][k].planned_tokens == query[1][k].planned_tokens);
        const double error = query[0][k].output_error;
        if (error != query[1][k].output_error) {
          REQUIRE(std::fabs(error - query[1][k].output_error) <=
                  verkv::tolerance::kBackendOutputError * error);
        }
      }
      for (std::size_t k = 0; k < kv[0].size(); ++k) {
        CAPTURE(k);
        REQUIRE(kv[0][k].fetched_tokens == kv[1][k].fetched_tokens);
        REQUIRE(kv[0][k].moved_tokens == kv[1][k].moved_tokens);
        REQUIRE(kv[0][k].moved_bytes == kv[1][k].moved_bytes);
        REQUIRE(kv[0][k].resident_tokens == kv[1][k].resident_tokens);
        REQUIRE(kv[0][k].limited == kv[1][k].limited);
        moved += kv[0][k].moved_tokens;
      }
    }
  }

  // The same as a graph, launched once.
  void attend_captured(std::int64_t layer, const AttendBatch& batch) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    VERKV_CUDA_CHECK(cudaStreamBeginCapture(capture_on, cudaStreamCaptureModeThreadLocal));
    cuda->attend(layer, batch);
    VERKV_CUDA_CHECK(cudaStreamEndCapture(capture_on, &graph));
    VERKV_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
    VERKV_CUDA_CHECK(cudaGraphLaunch(exec, capture_on));
    VERKV_CUDA_CHECK(cudaStreamSynchronize(capture_on));
    VERKV_CUDA_CHECK(cudaGraphExecDestroy(exec));
    VERKV_CUDA_CHECK(cudaGraphDestroy(graph));
  }

  // Everything that is asked rather than computed.
  void compare(const std::vector<SequenceId>& sequences) {
    for (const SequenceId id : sequences) {
      if (id == kNoSequence) continue;
      const MemoryReport a = cpu->memory(id);
      const MemoryReport b = cuda->memory(id);
      REQUIRE(a.resident_bytes == b.resident_bytes);
      REQUIRE(a.sketch_bytes == b.sketch_bytes);
      // The device has a place for each token of the window, and the odds of a cluster that is not
      // full once more.
      std::int64_t places = 0;
      std::int64_t open_odds = 0;
      for (std::size_t l = 0; l < cpu->config().layers.size(); ++l) {
        const LayerConfig& layer = cpu->config().layers[l];
        if (!layer.cached) continue;
        const std::int64_t compressed = cpu->compressed_tokens(id, static_cast<std::int64_t>(l));
        places += layer.kv_heads * (cpu->tokens(id, static_cast<std::int64_t>(l)) - compressed);
        if (cpu->config().study.estimator == Estimator::clusters)
          open_odds += layer.kv_heads * (compressed % verkv::kClusterTokens);
      }
      REQUIRE(a.metadata_bytes + 4 * places == b.metadata_bytes);
      REQUIRE(a.host_bytes == b.host_bytes);
      REQUIRE(a.basis_bytes + 2 * open_odds == b.basis_bytes);
      REQUIRE(b.reserved_bytes >= 0);
    }
    REQUIRE(cuda->memory().workspace_bytes > 0);
    for (std::int64_t layer = 0; layer < static_cast<std::int64_t>(config.layers.size()); ++layer) {
      if (!config.layers[size(layer)].cached) continue;
      for (const SequenceId id : sequences) {
        if (id == kNoSequence) continue;
        REQUIRE(cpu->tokens(id, layer) == cuda->tokens(id, layer));
        REQUIRE(cpu->compressed_tokens(id, layer) == cuda->compressed_tokens(id, layer));
      }
      const LayerStatistics a = cpu->statistics(layer);
      const LayerStatistics b = cuda->statistics(layer);
      REQUIRE(a.steps == b.steps);
      REQUIRE(a.decisions == b.decisions);
      REQUIRE(a.certified == b.certified);
      REQUIRE(a.fetching == b.fetching);
      REQUIRE(a.planned_tokens == b.planned_tokens);
      REQUIRE(a.fetched_tokens == b.fetched_tokens);
      REQUIRE(a.moved_tokens == b.moved_tokens);
      REQUIRE(a.moved_bytes == b.moved_bytes);
      REQUIRE(a.cached_tokens == b.cached_tokens);
      REQUIRE(a.resident_tokens == b.resident_tokens);
      for (int i = 0; i <= verkv::kBoundEdges; ++i) REQUIRE(a.bounds[i] == b.bounds[i]);
    }
    no_faults();
  }

  static void no_faults() {
    const auto& faults = device::current_device().faults();
    INFO((faults.empty() ? "" : faults.front().what()));
    REQUIRE(faults.empty());
  }

  CacheConfig config;
  Random random;
  MemorySpace space;
  cudaStream_t capture_on = nullptr;  // steps are captured on this stream of the cache
  std::unique_ptr<KvCacheManager> cpu;
  std::unique_ptr<KvCacheManager> cuda;
  std::vector<DeviceBuffer<float>> copies;
  double worst_output = 0;
  std::int64_t moved = 0;
};

// Prompts, chunked prompts, compression, decode that compresses by itself, a batch of sequences of
// which one goes and one comes, redraw. Most steps of decode only append: an attended step takes a
// second of the CPU device.
std::int64_t live(const CacheConfig& config, std::uint64_t seed, const CudaOptions& options = {},
                  bool reports = true, bool whole = false, bool captured = false) {
  Twins twins(config, seed, options);
  const SequenceId a = twins.create();
  SequenceId b = twins.create();
  if (captured) twins.capture_on = static_cast<cudaStream_t>(options.stream);
  if (whole) twins.attend({a, b}, 1, reports);  // nothing in them yet
  twins.append(a, 120);
  twins.append(a, 60);
  twins.append(b, 40);
  if (whole) twins.attend({a, b}, 1, reports);
  twins.compare({a, b});
  twins.compress(a);
  twins.compare({a, b});
  for (int step = 0; step < 18; ++step) {
    twins.append(a, 1);
    if (step % 3 == 1) twins.append(b, 1);
    if (step == 1) twins.attend({a}, 2, reports);
    if (step == 5) twins.compress(b);
    if (step == 7) twins.attend({b, kNoSequence, a}, 3, reports);
    if (step == 15 && whole) twins.attend({a, b}, 1, reports);
    if (step == 17) twins.attend({a}, 2, reports);
    if (step % 6 == 5) twins.compare({a, b});
  }
  twins.erase(b);
  b = twins.create();
  twins.append(b, 90);
  twins.redraw(a, 77);
  if (whole) twins.attend({b, a}, 2, reports);
  twins.compress(b);
  twins.compress(a);
  twins.compare({a, b});
  twins.cpu->reset_statistics();
  twins.cuda->reset_statistics();
  twins.append(a, 50);  // several chunks at once
  twins.attend({b, a}, 2, reports);
  twins.compare({a, b});
  return twins.moved;
}

// Of every kind that changes what a step does.
std::vector<CacheConfig> configurations() {
  std::vector<CacheConfig> configs;
  CacheConfig c = small_config();
  c.storage = DType::bf16;
  c.pool = Pool::sequence;
  c.sketch.bits = 3;
  c.study.inclusion_floor = 0.02;
  c.layers[1].dense = true;
  configs.push_back(c);
  c = small_config();
  c.storage = DType::f32;
  c.pool = Pool::layer;
  c.sketch.bits = 4;
  c.fetch.epsilon = 0.1;
  c.fetch.risk.reset();
  configs.push_back(c);
  c = small_config();
  c.study.select = Selection::topk;
  c.fetch.mode = FetchMode::never;
  c.layers[0].cached = false;
  configs.push_back(c);
  for (const Selection sample : {Selection::poisson, Selection::spread}) {
    c = small_config();
    c.study.select = sample;
    configs.push_back(c);
    c.sketch.kind = SketchKind::exact;
    c.storage = DType::bf16;
    configs.push_back(c);
  }
  c = small_config();
  c.sketch.kind = SketchKind::exact;
  c.fetch.limit_tokens = 5;
  c.chunk_tokens.reset();
  c.layers[0].global_layer = 6;
  c.layers[0].first_global_kv_head = 3;
  configs.push_back(c);
  c = small_config();
  c.fetch.mode = FetchMode::always;
  c.keep = 1;
  configs.push_back(c);
  c = small_config();
  c.layers[0].soft_cap = 20;
  configs.push_back(c);
  const std::size_t count = configs.size();
  for (std::size_t i = 0; i < count; ++i) {
    configs.push_back(configs[i]);
    configs.back().study.estimator = Estimator::plain;
  }
  return configs;
}

}  // namespace

TEST_CASE("a life of sequences is the same on both backends") {
  for (const Estimator estimator : {Estimator::plain, Estimator::clusters}) {
    device::reset_device();
    CacheConfig config = small_config();
    config.study.estimator = estimator;
    REQUIRE(live(config, 1, {}, true, true) > 100);
  }
}

TEST_CASE("configurations") {
  std::uint64_t seed = 10;
  for (const CacheConfig& config : configurations()) {
    CAPTURE(seed);
    device::reset_device();
    live(config, seed++);
  }
}

TEST_CASE("configurations, every step captured in a graph") {
  std::uint64_t seed = 30;
  for (const CacheConfig& config : configurations()) {
    CAPTURE(seed);
    device::reset_device();
    cudaStream_t stream = nullptr;
    VERKV_CUDA_CHECK(cudaStreamCreate(&stream));
    CudaOptions options;
    options.views = MemorySpace::device;
    options.stream = stream;
    options.rows = 3;
    live(config, seed++, options, false, false, true);
    VERKV_CUDA_CHECK(cudaStreamDestroy(stream));
  }
}

TEST_CASE("views in the device's memory, on the caller's stream, without waiting") {
  for (const std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{3}}) {
    CAPTURE(seed);
    device::DeviceOptions machine;
    machine.schedule_seed = seed;
    machine.machine.thread_order = seed;
    device::reset_device(machine);
    cudaStream_t stream = nullptr;
    VERKV_CUDA_CHECK(cudaStreamCreate(&stream));  // keeps order with the copies of the test
    CudaOptions options;
    options.views = MemorySpace::device;
    options.stream = stream;
    live(small_config(), 5 + seed, options, seed != 0);
    VERKV_CUDA_CHECK(cudaStreamDestroy(stream));
  }
}

TEST_CASE("launches of a step, and capture", "[cpu-device]") {
  device::reset_device();
  cudaStream_t stream = nullptr;
  VERKV_CUDA_CHECK(cudaStreamCreate(&stream));
  CudaOptions options;
  options.views = MemorySpace::device;
  options.stream = stream;
  CacheConfig config = small_config();
  config.layers.resize(1);
  Twins twins(config, 3, options);
  const SequenceId id = twins.create();
  twins.append(id, 200);
  twins.compress(id);
  twins.attend({id}, 2, false);
  VERKV_CUDA_CHECK(cudaStreamSynchronize(stream));
  device::Device& machine = device::current_device();

  const LayerConfig& l = config.layers[0];
  Random random(9);
  const std::vector<float> queries = normal(random, l.query_heads * l.key_dim, 2);
  const float* query_copy = twins.placed(queries);
  const DeviceBuffer<float> output(l.query_heads * l.value_dim, "output");
  const std::vector<SequenceId> ids{id};
  AttendBatch batch;
  batch.sequences = ids;
  batch.queries = verkv::token_major(query_copy, DType::f32, 1, l.query_heads, l.key_dim);
  batch.output = {output.data(), size(output.size())};
  machine.forget_launches();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  VERKV_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  twins.cuda->attend(0, batch);
  VERKV_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  VERKV_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  // Appended after the capture, within the room that is there.
  twins.append(id, 3);
  VERKV_CUDA_CHECK(cudaStreamSynchronize(stream));
  machine.forget_launches();
  VERKV_CUDA_CHECK(cudaGraphLaunch(exec, stream));
  VERKV_CUDA_CHECK(cudaStreamSynchronize(stream));
  Twins::no_faults();
  CHECK(machine.launches().size() == 5);  // the graph writes its own list of rows
  std::uint64_t instructions = 0;
  for (const auto& launch : machine.launches()) instructions += launch.counters.instructions;
  INFO(instructions);
  CHECK(instructions > 0);
  std::vector<float> result(size(output.size()));
  VERKV_CUDA_CHECK(
      cudaMemcpy(result.data(), output.data(), 4 * result.size(), cudaMemcpyDeviceToHost));
  std::vector<float> expected(result.size());
  batch.queries.data = queries.data();
  batch.output = expected;
  twins.cpu->attend(0, batch);
  for (std::size_t i = 0; i < result.size(); ++i) {
    REQUIRE(std::fabs(result[i] - expected[i]) <= verkv::tolerance::kRowOrder);
  }
  twins.compare({id});
  VERKV_CUDA_CHECK(cudaGraphExecDestroy(exec));
  VERKV_CUDA_CHECK(cudaGraphDestroy(graph));
  twins.cuda.reset();
  VERKV_CUDA_CHECK(cudaStreamDestroy(stream));
}

// Graphs and steps of two sequences, in every order in which they could be mistaken for each other.
class GraphScene {
 public:
  explicit GraphScene(std::int64_t rows = 0) {
    device::reset_device();
    VERKV_CUDA_CHECK(cudaStreamCreate(&stream_));
    CudaOptions options;
    options.views = MemorySpace::device;
    options.stream = stream_;
    options.rows = rows;
    CacheConfig config = small_config();
    config.layers.resize(1);
    // Only one side takes some of the steps, and scores of windows would tell.
    config.chunk_tokens.reset();
    layer_ = config.layers[0];
    twins_ = std::make_unique<Twins>(config, 3, options);
    ids_ = {twins_->create(), twins_->create(), kNoSequence, kNoSequence};
    for (const SequenceId id : {ids_[0], ids_[1]}) {
      twins_->append(id, 60);
      twins_->compress(id);
    }
    Random random(9);
    queries_ = normal(random, 4 * layer_.query_heads * layer_.key_dim, 2);
    query_copy_ = twins_->placed(queries_);
    output_ = DeviceBuffer<float>(4 * layer_.query_heads * layer_.value_dim, "output");
  }
  ~GraphScene() {
    for (const cudaGraphExec_t exec : graphs_) cudaGraphExecDestroy(exec);
    twins_.reset();
    cudaStreamDestroy(stream_);
  }
  GraphScene(const GraphScene&) = delete;
  GraphScene& operator=(const GraphScene&) = delete;

  // Rows [first, first + rows) of: the two sequences, two rows of padding.
  AttendBatch batch(std::size_t first, std::size_t rows = 1) const {
    AttendBatch result;
    result.sequences = std::span(ids_).subspan(first, rows);
    result.queries = verkv::token_major(query_copy_, DType::f32, static_cast<std::int64_t>(rows),
                                        layer_.query_heads, layer_.key_dim);
    result.output = {output_.data(), rows * size(layer_.query_heads * layer_.value_dim)};
    return result;
  }
  void attend(std::size_t which) { twins_->cuda->attend(0, batch(which)); }
  cudaGraphExec_t capture(const AttendBatch& batch) {
    cudaGraph_t graph = nullptr;
    VERKV_CUDA_CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    try {
      twins_->cuda->attend(0, batch);
    } catch (...) {
      cudaStreamEndCapture(stream_, &graph);
      cudaGraphDestroy(graph);
      throw;
    }
    VERKV_CUDA_CHECK(cudaStreamEndCapture(stream_, &graph));
    graphs_.emplace_back();
    VERKV_CUDA_CHECK(cudaGraphInstantiate(&graphs_.back(), graph, 0));
    VERKV_CUDA_CHECK(cudaGraphDestroy(graph));
    return graphs_.back();
  }
  void replay(cudaGraphExec_t exec) { VERKV_CUDA_CHECK(cudaGraphLaunch(exec, stream_)); }
  // Whether the last output is that of this sequence and not of the other.
  bool answers(std::size_t which) {
    VERKV_CUDA_CHECK(cudaStreamSynchronize(stream_));
    std::vector<float> result(size(layer_.query_heads * layer_.value_dim));
    VERKV_CUDA_CHECK(
        cudaMemcpy(result.data(), output_.data(), 4 * result.size(), cudaMemcpyDeviceToHost));
    Twins::no_faults();
    return near(result, which) && !near(result, 1 - which);
  }
  Twins& twins() { return *twins_; }
  SequenceId id(std::size_t which) const { return ids_[which]; }

 private:
  bool near(const std::vector<float>& result, std::size_t which) {
    std::vector<float> expected(result.size());
    AttendBatch own = batch(which);
    own.queries.data = queries_.data();
    own.output = expected;
    twins_->cpu->attend(0, own);
    return std::equal(result.begin(), result.end(), expected.begin(), [](float a, float b) {
      return std::fabs(a - b) <= verkv::tolerance::kRowOrder;
    });
  }

  cudaStream_t stream_ = nullptr;
  LayerConfig layer_;
  std::unique_ptr<Twins> twins_;
  std::array<SequenceId, 4> ids_;
  std::vector<float> queries_;
  const float* query_copy_ = nullptr;
  DeviceBuffer<float> output_;
  std::vector<cudaGraphExec_t> graphs_;
};

TEST_CASE("a graph answers for the sequences it was captured with, whatever ran in between") {
  GraphScene scene;
  scene.attend(0);
  const cudaGraphExec_t first = scene.capture(scene.batch(0));
  scene.attend(1);
  scene.replay(first);
  REQUIRE(scene.answers(0));
  scene.attend(1);
  REQUIRE(scene.answers(1));
  // Captured and not launched.
  const cudaGraphExec_t second = scene.capture(scene.batch(1));
  scene.attend(0);
  REQUIRE(scene.answers(0));
  scene.replay(second);
  REQUIRE(scene.answers(1));
  scene.replay(first);
  REQUIRE(scene.answers(0));
  scene.attend(0);
  REQUIRE(scene.answers(0));
}

TEST_CASE("a graph sees rows and places that lie elsewhere since its capture") {
  GraphScene scene;
  scene.attend(0);
  const cudaGraphExec_t graph = scene.capture(scene.batch(0));
  const std::uint64_t generation = verkv::cuda_graph_generation(*scene.twins().cuda);
  // The block of the host tier is replaced, by one with other tokens behind more places.
  scene.twins().append(scene.id(0), 70);
  scene.attend(1);
  scene.replay(graph);
  REQUIRE(scene.answers(0));
  scene.twins().compress(scene.id(0));
  scene.attend(1);
  scene.replay(graph);
  REQUIRE(scene.answers(0));
  REQUIRE(scene.twins().cuda->statistics(0).moved_tokens > 0);
  REQUIRE(verkv::cuda_graph_generation(*scene.twins().cuda) == generation);
}

TEST_CASE("padding rows in a capture") {
  SECTION("room was made for them") {
    GraphScene scene(4);
    scene.attend(1);
    const cudaGraphExec_t padded = scene.capture(scene.batch(0, 4));
    scene.attend(1);
    scene.replay(padded);
    REQUIRE(scene.answers(0));
  }
  SECTION("or they are refused, and nothing has happened") {
    GraphScene scene;
    REQUIRE_THROWS_AS(scene.capture(scene.batch(0, 4)), verkv::CapacityError);
    scene.attend(1);
    REQUIRE(scene.answers(1));
    // Outside a capture they make room by themselves, which graphs do not outlive.
    const std::uint64_t before = verkv::cuda_graph_generation(*scene.twins().cuda);
    scene.twins().cuda->attend(0, scene.batch(0, 4));
    REQUIRE(scene.answers(0));
    REQUIRE(verkv::cuda_graph_generation(*scene.twins().cuda) != before);
  }
  for (const std::int64_t rows :
       {std::int64_t{-1}, (std::int64_t{1} << 20) + 1, std::numeric_limits<std::int64_t>::max()}) {
    CudaOptions wrong;
    wrong.rows = rows;
    REQUIRE_THROWS_WITH(verkv::make_cuda_cache(small_config(), wrong),
                        Catch::Contains(std::to_string(rows)) && Catch::Contains("1048576"));
  }
}

TEST_CASE("the graph generation changes when captured sizes or addresses do, and only then") {
  GraphScene scene;
  KvCacheManager& cache = *scene.twins().cuda;
  scene.attend(0);
  std::uint64_t generation = verkv::cuda_graph_generation(cache);
  scene.attend(1);
  scene.twins().append(scene.id(0), 1);
  REQUIRE(verkv::cuda_graph_generation(cache) == generation);
  // Beyond the room of a quarter, at least 256 tokens.
  scene.twins().append(scene.id(0), 500);
  REQUIRE(verkv::cuda_graph_generation(cache) != generation);
  generation = verkv::cuda_graph_generation(cache);
  for (int i = 0; i < 8; ++i) scene.twins().create();
  REQUIRE(verkv::cuda_graph_generation(cache) != generation);
  REQUIRE_THROWS_AS(verkv::cuda_graph_generation(*scene.twins().cpu), InvalidArgument);
}

TEST_CASE("bad input changes nothing") {
  device::reset_device();
  const CacheConfig config = small_config();
  Twins twins(config);
  const SequenceId id = twins.create();
  twins.append(id, 60);
  const LayerConfig& l = config.layers[0];
  std::vector<float> keys(size(2 * l.kv_heads * l.key_dim), 1);
  const std::vector<float> values(size(2 * l.kv_heads * l.value_dim), 1);
  const auto append = [&](float bad) {
    keys[size(l.kv_heads * l.key_dim) + 3] = bad;
    twins.cuda->append(id, 0, verkv::token_major(keys.data(), DType::f32, 2, l.kv_heads, l.key_dim),
                       verkv::token_major(values.data(), DType::f32, 2, l.kv_heads, l.value_dim));
  };
  REQUIRE_THROWS_AS(append(std::numeric_limits<float>::quiet_NaN()), InvalidArgument);
  REQUIRE_THROWS_AS(append(std::numeric_limits<float>::infinity()), InvalidArgument);
  REQUIRE_THROWS_WITH(append(70000), Catch::Contains("keys: token 1, head 0, "
                                                     "coordinate 3 is 70000"));
  REQUIRE_THROWS_AS(twins.cuda->erase(SequenceId{5}), InvalidArgument);
  REQUIRE_THROWS_AS(twins.cuda->compress(id, {}), InvalidArgument);
  twins.attend({id});
  twins.compress(id);
  twins.append(id, 2);
  twins.attend({id});
  twins.compare({id});
}

TEST_CASE("bad numbers in the device's memory are reported by a later call") {
  device::reset_device();
  CudaOptions options;
  options.views = MemorySpace::device;
  const CacheConfig config = small_config();
  Twins twins(config, 1, options);
  const SequenceId id = twins.create();
  twins.append(id, 30);
  const LayerConfig& l = config.layers[1];
  std::vector<float> keys(size(l.key_dim), 1);
  keys[2] = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> values(size(l.value_dim), 1);
  twins.cuda->append(id, 1, verkv::token_major(twins.placed(keys), DType::f32, 1, 1, l.key_dim),
                     verkv::token_major(twins.placed(values), DType::f32, 1, 1, l.value_dim));
  REQUIRE_THROWS_AS(twins.cuda->statistics(0), InvalidArgument);
  REQUIRE_NOTHROW(twins.cuda->statistics(0));
  // Scores are looked at when compress has copied them.
  std::vector<std::vector<float>> scores = twins.scores(id);
  scores[0][7] = -1;
  scores[1].push_back(1);
  REQUIRE_THROWS_AS(twins.cuda->compress(id, twins.views(scores, true)), InvalidArgument);
  scores[0][7] = 1;
  REQUIRE_NOTHROW(twins.cuda->compress(id, twins.views(scores, true)));
}

TEST_CASE("device queries that are not finite are reported by a later call") {
  device::reset_device();
  CudaOptions options;
  options.views = MemorySpace::device;
  CacheConfig config = small_config();
  config.layers.resize(1);
  config.layers[0].query_heads = 4;
  config.layers[0].soft_cap = 20;  // under a cap an infinite logit makes a finite weight
  Twins twins(config, 1, options);
  const std::vector<SequenceId> ids{twins.create(), kNoSequence, twins.create()};
  for (const SequenceId id : {ids[0], ids[2]}) twins.append(id, 50);
  twins.compress(ids[2]);
  const LayerConfig& l = config.layers[0];
  const DeviceBuffer<float> output(3 * l.query_heads * l.value_dim, "output");
  // A step in which one number is bad.
  const auto attend = [&](std::int64_t row, std::int64_t head, std::int64_t coordinate, float bad) {
    std::vector<float> queries(size(3 * l.query_heads * l.key_dim), 1);
    queries[size((row * l.query_heads + head) * l.key_dim + coordinate)] = bad;
    std::vector<QueryHeadReport> reports(size(3 * l.query_heads));
    AttendBatch batch;
    batch.sequences = ids;
    batch.queries =
        verkv::token_major(twins.placed(queries), DType::f32, 3, l.query_heads, l.key_dim);
    batch.output = {output.data(), size(output.size())};
    batch.query_reports = reports;
    twins.cuda->attend(0, batch);
    return reports[size(row * l.query_heads + head)];
  };
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  attend(1, 0, 0, kNan);  // of a padding row
  REQUIRE_NOTHROW(twins.cuda->statistics(0));
  REQUIRE(std::isinf(attend(2, 3, 63, kNan).epsilon));
  REQUIRE_THROWS_WITH(
      twins.cuda->statistics(0),
      Catch::Contains("queries of a step, layer 0: row 2, head 3, coordinate 63 is") &&
          Catch::Contains("nan; it must be finite"));
  REQUIRE_NOTHROW(twins.cuda->statistics(0));
  attend(0, 1, 7, kInfinity);
  REQUIRE_THROWS_WITH(twins.cuda->redraw(ids[2], 1),
                      Catch::Contains("row 0, head 1, coordinate 7 is inf"));
  REQUIRE_NOTHROW(twins.cuda->redraw(ids[2], 0));

  // An append that compresses says so before it changes anything; one that does not, nothing.
  attend(2, 0, 0, -kInfinity);
  const std::vector<float> rows(size(l.key_dim * l.kv_heads * 40), 1);
  const auto append = [&](std::int64_t tokens) {
    const auto view = [&](std::int64_t dim) {
      return verkv::token_major(twins.placed(rows), DType::f32, tokens, l.kv_heads, dim);
    };
    twins.cuda->append(ids[2], 0, view(l.key_dim), view(l.value_dim));
  };
  REQUIRE_NOTHROW(append(40));
  const std::int64_t tokens = twins.cuda->tokens(ids[2], 0);
  const std::int64_t compressed = twins.cuda->compressed_tokens(ids[2], 0);
  REQUIRE_THROWS_AS(append(1), InvalidArgument);
  REQUIRE(twins.cuda->tokens(ids[2], 0) == tokens);
  REQUIRE(twins.cuda->compressed_tokens(ids[2], 0) == compressed);
  append(1);
  REQUIRE(twins.cuda->tokens(ids[2], 0) == tokens + 1);
  REQUIRE(twins.cuda->compressed_tokens(ids[2], 0) > compressed);
  Twins::no_faults();
}

TEST_CASE("what a device does not do is refused before anything is allocated", "[cpu-device]") {
  device::reset_device();
  CacheConfig config = small_config();
  config.study.order = FetchOrder::exact;
  REQUIRE(verkv::cuda_unsupported_reasons(config).size() == 1);
  REQUIRE_THROWS_AS(verkv::make_cuda_cache(config), InvalidArgument);
  config = small_config();
  config.layers.back().window = 4096;
  const std::vector<std::string> reasons = verkv::cuda_unsupported_reasons(config);
  REQUIRE(reasons.size() == 1);
  REQUIRE(reasons[0].find("4096") != std::string::npos);
  REQUIRE_THROWS_AS(verkv::make_cuda_cache(config), InvalidArgument);
  config.layers.back().cached = false;
  REQUIRE(verkv::cuda_unsupported_reasons(config).empty());
  config = small_config();
  REQUIRE(verkv::cuda_unsupported_reasons(config).empty());
  config.host_allocator = {[](void*, std::size_t, std::size_t) -> void* { return nullptr; },
                           [](void*, void*, std::size_t, std::size_t) {}};
  REQUIRE(verkv::cuda_unsupported_reasons(config).size() == 1);
  REQUIRE(verkv::unsupported_reasons(config).empty());
  config = small_config();
  config.host = verkv::HostTier::engine;
  REQUIRE(verkv::cuda_unsupported_reasons(config).size() == 1);
  config.host = verkv::HostTier::file;
  config.host_directory = ".";
  REQUIRE(verkv::cuda_unsupported_reasons(config).size() == 1);
  config = small_config();
  CudaOptions options;
  options.device = 1;
  REQUIRE_THROWS_AS(verkv::make_cuda_cache(config, options), InvalidArgument);
  REQUIRE(verkv::cuda_device_count() == 1);
  REQUIRE(device::current_device().live_allocations() == 0);
  device::DeviceOptions none;
  none.devices = 0;
  device::reset_device(none);
  REQUIRE(verkv::cuda_device_count() == 0);
  REQUIRE_THROWS_AS(verkv::make_cuda_cache(config), InvalidArgument);
}

TEST_CASE("heads that are too large for the device's shared memory are refused", "[cpu-device]") {
  device::DeviceOptions small;
  small.shared_per_block_opt_in = 99 << 10;
  device::reset_device(small);
  CacheConfig config = small_config();
  config.layers = {layer_config(1, 4, 256, 256)};
  REQUIRE_NOTHROW(verkv::make_cuda_cache(config));
  config.layers = {layer_config(1, 16, 512, 64)};
  REQUIRE_THROWS_WITH(verkv::make_cuda_cache(config),
                      Catch::Contains("layer 0") && Catch::Contains("101376"));
  device::reset_device();
  REQUIRE_NOTHROW(verkv::make_cuda_cache(config));
}

TEST_CASE("a cache gives back all memory", "[cpu-device]") {
  device::reset_device();
  {
    Twins twins(small_config());
    const SequenceId id = twins.create();
    twins.append(id, 80);
    twins.compress(id);
    twins.append(id, 40);
    twins.attend({id});
    const std::size_t before = device::current_device().live_allocations();
    const SequenceId other = twins.create();
    twins.append(other, 30);
    twins.erase(other);
    // The buffers of a step of two rows stay; those of the sequence go.
    REQUIRE(device::current_device().live_allocations() <= before);
  }
  REQUIRE(device::current_device().live_allocations() == 0);
  Twins::no_faults();
}

// Each allocation and each pinning fails once; the call is repeated until it passes, and the caches
// stay twins.
TEST_CASE("refused memory leaves the cache as it was", "[cpu-device]") {
  for (const device::Call call : {device::Call::malloc, device::Call::host_malloc}) {
    device::DeviceOptions no_other_way;
    no_other_way.host_register = false;
    device::Device& machine = device::reset_device(no_other_way);
    CacheConfig config = small_config();
    config.chunk_tokens.reset();
    CudaOptions options;
    options.require_pinned = true;
    Twins twins(config, 1, options);
    int failures = 0;
    const auto insist = [&](const auto& action) {
      for (int skip = 0;; ++skip) {
        REQUIRE(skip < 200);
        machine.fail_call(call, device::Status::out_of_memory, skip);
        try {
          action();
          machine.stop_failing();
          return;
        } catch (const DeviceError& error) {
          REQUIRE(error.out_of_memory());
          REQUIRE(error.code() != verkv::ErrorCode::device);
          REQUIRE(std::string(error.what()).find("bytes") != std::string::npos);
          ++failures;
        }
      }
    };
    SequenceId id;
    SequenceId twin = twins.cpu->create_sequence();
    insist([&] { id = twins.cuda->create_sequence(); });
    REQUIRE(id == twin);
    for (const std::int64_t tokens : {60, 50}) {
      for (std::size_t i = 0; i < config.layers.size(); ++i) {
        const LayerConfig& l = config.layers[i];
        const std::vector<float> keys = normal(twins.random, tokens * l.kv_heads * l.key_dim);
        const std::vector<float> values = normal(twins.random, tokens * l.kv_heads * l.value_dim);
        const auto append = [&](KvCacheManager& cache) {
          cache.append(
              id, static_cast<std::int64_t>(i),
              verkv::token_major(keys.data(), DType::f32, tokens, l.kv_heads, l.key_dim),
              verkv::token_major(values.data(), DType::f32, tokens, l.kv_heads, l.value_dim));
        };
        append(*twins.cpu);
        insist([&] { append(*twins.cuda); });
      }
      const std::vector<std::vector<float>> data = twins.scores(id);
      const std::vector<ImportanceView> views = twins.views(data, false);
      twins.cpu->compress(id, views);
      insist([&] { twins.cuda->compress(id, views); });
    }
    twins.cpu->redraw(id, 5);
    insist([&] { twins.cuda->redraw(id, 5); });
    twins.attend({id});
    twins.compare({id});
    CHECK(failures > (call == device::Call::malloc ? 30 : 2));
  }
}

// Where the host tier lies when pinning is refused: ways of the device, and what is said of it.
struct PinningRefused {
  bool registers = true;
  bool reads_ordinary = false;
  bool advises = true;
  bool manages = true;
  std::string kind;  // empty: nothing is left
};

TEST_CASE("where pinning is refused pageable memory stands in", "[cpu-device]") {
  const PinningRefused ways[] = {{true, false, true, true, "pinned"},
                                 {false, true, true, true, "ordinary"},
                                 {false, false, true, true, "managed"},
                                 {false, true, false, false, ""},
                                 {false, false, true, false, ""}};
  for (const PinningRefused& way : ways) {
    CAPTURE(way.kind, way.reads_ordinary);
    device::DeviceOptions device_options;
    device_options.host_register = way.registers;
    device_options.pageable_access = way.reads_ordinary;
    device_options.concurrent_managed = way.manages;
    device::Device& machine = device::reset_device(device_options);
    {
      CacheConfig config = small_config();
      config.layers.resize(1);
      Twins twins(config);
      const SequenceId id = twins.create();
      twins.append(id, 60);
      REQUIRE(twins.cuda->memory().pageable_bytes == 0);
      REQUIRE_THAT(twins.cuda->description(), Catch::EndsWith("; host tier: pinned"));

      machine.fail_call(device::Call::host_malloc, device::Status::out_of_memory, 0, true);
      if (!way.advises)
        machine.fail_call(device::Call::advise, device::Status::invalid_value, 0, true);
      if (way.kind.empty()) {
        try {
          twins.append(id, 90);
          FAIL("no refusal");
        } catch (const DeviceError& error) {
          REQUIRE(error.out_of_memory());
          CHECK(error.code() == verkv::ErrorCode::system_memory);
          CHECK_THAT(error.what(), Catch::Contains("bytes of main memory in reach of the device"));
          CHECK_THAT(error.what(), Catch::Contains("cudaHostAlloc: "));
          CHECK_THAT(error.what(), Catch::Contains("cudaHostRegister: not supported"));
          CHECK_THAT(error.what(),
                     Catch::Contains(way.reads_ordinary ? "cudaMemAdvise of ordinary memory: "
                                                        : "the device cannot read it"));
          CHECK_THAT(error.what(), Catch::Contains("cudaMallocManaged: "));
        }
        REQUIRE(twins.cuda->tokens(id, 0) == 60);
        REQUIRE(cudaGetLastError() == cudaSuccess);
        continue;
      }
      twins.append(id, 90);  // the host tier grows
      twins.compress(id);
      twins.attend({id}, 2);
      const bool pageable = way.kind != "pinned";
      REQUIRE((twins.cuda->memory().pageable_bytes > 0) == pageable);
      REQUIRE(twins.cuda->memory(id).pageable_bytes == twins.cuda->memory().pageable_bytes);
      const std::string description = twins.cuda->description();
      if (pageable) {
        CHECK_THAT(description, Catch::Contains(" bytes pageable, " + way.kind + " memory"));
        CHECK_THAT(description, Catch::Contains("pinning was refused: cudaHostAlloc: "));
      } else {
        CHECK_THAT(description, Catch::EndsWith("; host tier: pinned"));
      }
      // A cache that insists on pinned memory.
      if (pageable) {
        CudaOptions strict;
        strict.require_pinned = true;
        Twins others(config, 2, strict);
        const SequenceId other = others.create();
        REQUIRE_THROWS_WITH(others.append(other, 5), Catch::Contains("bytes of pinned memory"));
        REQUIRE(others.cuda->tokens(other, 0) == 0);
      }
      machine.stop_failing();
      twins.append(id, 200);  // grows again, into pinned memory
      REQUIRE(twins.cuda->memory().pageable_bytes == 0);
      twins.redraw(id, 3);
      twins.attend({id}, 2);
      twins.compare({id});
      REQUIRE(twins.moved > 0);
    }
    REQUIRE(machine.live_allocations() == 0);
    Twins::no_faults();
  }
}

TEST_CASE("a fault is no refusal of pinning", "[cpu-device]") {
  device::Device& machine = device::reset_device();
  const auto cache = verkv::make_cuda_cache(small_config());
  const SequenceId id = cache->create_sequence();
  const std::vector<float> rows(2 * 64, 1);
  const TensorView view = verkv::token_major(rows.data(), DType::f32, 1, 2, 64);
  machine.fail_call(device::Call::host_malloc, device::Status::launch_failure);
  try {
    cache->append(id, 0, view, view);
    FAIL("no error");
  } catch (const DeviceError& error) {
    CHECK(error.device_code() == cudaErrorLaunchFailure);
    CHECK(!error.out_of_memory());
    CHECK(error.code() == verkv::ErrorCode::device);
  }
  REQUIRE_NOTHROW(cache->append(id, 0, view, view));
}

TEST_CASE("an error that the caller has pending is neither reported nor taken", "[cpu-device]") {
  device::Device& machine = device::reset_device();
  CacheConfig config = small_config();
  config.layers.resize(1);
  Twins twins(config);
  const SequenceId id = twins.create();
  void* memory = nullptr;
  const cudaError_t own = cudaMalloc(&memory, std::size_t{1} << 60);
  REQUIRE(own == cudaErrorMemoryAllocation);
  twins.append(id, 60);
  twins.compress(id);
  twins.redraw(id, 5);
  twins.append(id, 20);
  twins.attend({id});
  REQUIRE(verkv::cuda_device_count() == 1);
  twins.compare({id});
  REQUIRE(cudaGetLastError() == own);
  REQUIRE(cudaGetLastError() == cudaSuccess);
  // An error of ours is reported by the exception, and by nothing else.
  machine.fail_call(device::Call::launch, device::Status::launch_failure);
  REQUIRE_THROWS_AS(twins.append(id, 1), DeviceError);
  REQUIRE(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("a reservation that finds no memory changes nothing", "[cpu-device]") {
  device::Device& machine = device::reset_device();
  Twins twins(small_config());
  const SequenceId id = twins.create();
  twins.append(id, 60);
  twins.compress(id);
  twins.attend({id}, 2);
  twins.append(id, 16);
  twins.attend({id}, 2);
  const std::int64_t before = twins.cuda->compressed_tokens(id, 0);
  const std::int64_t tokens = twins.cuda->tokens(id, 0);
  int refused = 0;
  for (int skip = 0;; ++skip) {
    machine.fail_call(device::Call::malloc, device::Status::out_of_memory, skip);
    bool done = true;
    try {
      twins.cuda->reserve(id, 3);
    } catch (const DeviceError& error) {
      REQUIRE(error.out_of_memory());
      done = false;
      ++refused;
    }
    machine.stop_failing();
    for (std::size_t layer = 0; layer < twins.config.layers.size(); ++layer) {
      const std::int64_t index = static_cast<std::int64_t>(layer);
      if (!twins.config.layers[layer].cached || twins.config.layers[layer].dense) continue;
      REQUIRE(twins.cuda->tokens(id, index) == tokens);
      REQUIRE((twins.cuda->compressed_tokens(id, index) > before) == done);
    }
    if (done) break;
  }
  REQUIRE(refused > 5);
  twins.cpu->reserve(id, 3);
  // What is reserved allocates nothing.
  machine.fail_call(device::Call::malloc, device::Status::out_of_memory, 0, true);
  twins.append(id, 2);
  twins.append(id, 1);
  machine.stop_failing();
  twins.attend({id}, 2);
  twins.compare({id});
}

// Calls in random order on small sequences: what is empty, shorter than sinks or window, compressed
// twice or not at all.
TEST_CASE("random calls") {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    CAPTURE(seed);
    device::reset_device();
    Random random(seed);
    CacheConfig config;
    config.layers = {layer_config(1 + static_cast<std::int64_t>(random.below(2)), 2, 16, 8)};
    config.layers.push_back(config.layers[0]);
    config.layers[1].dense = random.below(3) == 0;
    config.keep = random.below(4) == 0 ? 1 : 0.25;
    config.compress_from = 0;
    config.local_tokens = static_cast<std::int64_t>(random.below(3)) * 5;
    const std::int64_t chunk = static_cast<std::int64_t>(random.below(3)) * 7;
    config.chunk_tokens = chunk > 0 ? std::optional(chunk) : std::nullopt;
    config.sink_tokens = static_cast<std::int64_t>(random.below(3)) * 3;
    config.pool = seed % 2 == 0 ? Pool::layer : Pool::sequence;
    config.study.estimator = seed % 3 == 0 ? Estimator::plain : Estimator::clusters;
    config.threads = 1;
    Twins twins(config, seed);
    std::vector<SequenceId> ids{twins.create()};
    int attended = 0;
    for (int call = 0; call < 60; ++call) {
      CAPTURE(call);
      const SequenceId id = ids[random.below(ids.size())];
      switch (random.below(8)) {
        case 0:
        case 1:
          twins.append(id, static_cast<std::int64_t>(random.below(30)));
          break;
        case 2:
          for (int i = 0; i < 8; ++i) twins.append(id, 1);
          break;
        case 3:
          twins.compress(id);
          break;
        case 4:
          twins.redraw(id, random.bits());
          break;
        case 5:
          if (ids.size() < 3) ids.push_back(twins.create());
          break;
        case 6:
          if (ids.size() > 1) {
            twins.erase(ids.back());
            ids.pop_back();
          }
          break;
        default:
          if (++attended <= 4) twins.attend(ids, 4);
      }
      twins.compare(ids);
    }
    twins.attend(ids, 4);
    twins.compare(ids);
  }
}

TEST_CASE("a refused launch is an error with its place", "[cpu-device]") {
  device::Device& machine = device::reset_device();
  Twins twins(small_config());
  const SequenceId id = twins.create();
  machine.fail_call(device::Call::launch, device::Status::launch_failure);
  REQUIRE_THROWS_WITH(twins.append(id, 1),
                      Catch::Contains("launch_append") && Catch::Contains("store.cpp:"));
}

TEST_CASE("a recorded cache") {
  device::reset_device();
  const verkv::RecordedCache recorded =
      verkv::RecordedCache::load(std::string(VERKV_TEST_DATA_DIR) + "/essays-4k-small.safetensors");
  const verkv::RecordedLayer& layer = recorded.layers().back();
  constexpr std::int64_t kTokens = 900;
  REQUIRE(recorded.prompt_tokens() >= kTokens);
  CacheConfig config;
  config.layers = {layer_config(layer.kv_heads, layer.query_heads / layer.kv_heads, layer.key_dim,
                                layer.value_dim)};
  config.layers[0].scale = recorded.scale();
  config.threads = 1;
  config.chunk_tokens = 32;
  const auto cpu = verkv::make_cpu_cache(config);
  const auto cuda = verkv::make_cuda_cache(config);
  std::int64_t fetched = 0;
  std::vector<std::vector<float>> outputs[2];
  std::vector<std::vector<QueryHeadReport>> reports[2];
  for (const int which : {0, 1}) {
    KvCacheManager& cache = which == 0 ? *cpu : *cuda;
    const SequenceId id = cache.create_sequence();
    TensorView key = layer.key;
    TensorView value = layer.value;
    key.tokens = kTokens;
    value.tokens = kTokens;
    cache.append(id, 0, key, value);
    ImportanceView importance = layer.importance.at("kvzip_mean");
    importance.tokens = kTokens;
    cache.compress(id, std::span(&importance, 1));
    for (std::int64_t step = 0; step < 2; ++step) {
      const auto one = [step](const TensorView& view) {
        TensorView result = view;
        result.data = view.row(step, 0);
        result.tokens = 1;
        return result;
      };
      cache.append(id, 0, one(layer.new_key), one(layer.new_value));
      AttendBatch batch;
      batch.sequences = std::span(&id, 1);
      batch.queries = one(layer.query);
      outputs[which].emplace_back(size(layer.query_heads * layer.value_dim));
      batch.output = outputs[which].back();
      reports[which].emplace_back(size(layer.query_heads));
      batch.query_reports = reports[which].back();
      cache.attend(0, batch);
    }
    fetched = cache.statistics(0).fetched_tokens;
  }
  REQUIRE(fetched > 0);
  REQUIRE(cpu->statistics(0).moved_tokens == cuda->statistics(0).moved_tokens);
  for (std::size_t step = 0; step < outputs[0].size(); ++step) {
    for (std::size_t h = 0; h < reports[0][step].size(); ++h) {
      REQUIRE(reports[0][step][h].epsilon == reports[1][step][h].epsilon);
      REQUIRE(reports[0][step][h].planned_tokens == reports[1][step][h].planned_tokens);
    }
    float largest = 1;
    for (const float x : outputs[0][step]) largest = std::max(largest, std::fabs(x));
    for (std::size_t i = 0; i < outputs[0][step].size(); ++i) {
      REQUIRE(std::fabs(outputs[0][step][i] - outputs[1][step][i]) <=
              verkv::tolerance::kRowOrder * largest);
    }
  }
  Twins::no_faults();
}
