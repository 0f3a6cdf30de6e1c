#include "cuda_scene.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <future>
#include <span>

#include <verkv/clusters.hpp>

#include "compression.hpp"
#include "fetch_rules.hpp"
#include "sketch_basis.hpp"
#include "step.hpp"
#include "window_score.hpp"

namespace verkv::bench {
namespace {

// Steps whose queries shape the basis of the sketch, beside those of the rows.
constexpr int kPromptSteps = 64;
constexpr std::uint64_t kSeed = 1;

std::int64_t count_of(const std::vector<float>& values) {
  return static_cast<std::int64_t>(values.size());
}

cuda::DeviceBuffer<float> on_device(const std::vector<float>& values, const char* what) {
  cuda::DeviceBuffer<float> buffer(count_of(values), what);
  VERKV_CUDA_CHECK(
      cudaMemcpy(buffer.data(), values.data(), 4 * values.size(), cudaMemcpyHostToDevice));
  // The copy of pageable memory may still be on its way, and other streams do not wait for it.
  VERKV_CUDA_CHECK(cudaDeviceSynchronize());
  return buffer;
}

cuda::LayerView layer_view(const SyntheticShape& shape) {
  cuda::LayerView view;
  view.kv_heads = static_cast<int>(shape.kv_heads);
  view.group = static_cast<int>(shape.group);
  view.key_dim = view.value_dim = static_cast<int>(shape.dim);
  view.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(shape.dim)));
  view.storage = DType::f16;
  view.sketch = largest_sketch_shape(kSketch.kind, kSketch.bits, view.key_dim);
  view.clusters = StudyConfig{}.estimator == Estimator::clusters;
  const FetchRules fetch = fetch_rules(CacheConfig{});
  view.fetch = flags_of(fetch.mode);
  view.rules.log_term = fetch.log_term;
  view.cap = fetch.cap;
  return view;
}

// A cache of `layers` layers of the prompt's shape.
CacheConfig cache_config(const Prompt& prompt, const Rule& rule, int layers) {
  CacheConfig config;
  LayerConfig layer;
  layer.kv_heads = prompt.shape().kv_heads;
  layer.query_heads = prompt.query_heads();
  layer.key_dim = layer.value_dim = prompt.shape().dim;
  config.layers.assign(at(layers), layer);
  config.storage = DType::f16;
  config.keep = kKeep;
  config.sink_tokens = kSinkTokens;
  config.local_tokens = kLocalTokens;
  config.compress_from = 0;
  config.sketch = kSketch;
  config.fetch.epsilon = rule.epsilon;
  config.fetch.risk = rule.risk;
  config.seed = kSeed;
  return config;
}

cuda::LayerView under(const Rule& rule, cuda::LayerView view) {
  view.rules.epsilon = rule.epsilon.value_or(StopRules::kNone);
  view.rules.risk = rule.risk.value_or(StopRules::kNone);
  return view;
}

}  // namespace

// ---- Prompt

Prompt::Prompt(std::int64_t tokens, std::int64_t kv_heads, int rows)
    : rows_(rows),
      cache_({.tokens = tokens,
              .kv_heads = kv_heads,
              .group = kDenseGroup,
              .dim = kDenseDim,
              .steps = rows + kPromptSteps}) {
  keys_ = on_device(cache_.keys, "the prompt's keys");
  cache_.keys = {};
  values_ = on_device(cache_.values, "the prompt's values");
  cache_.values = {};
  queries_ = on_device(cache_.queries, "queries");
  importance_ = on_device(cache_.importance, "importance");
}

TensorView Prompt::rows_view(const cuda::DeviceBuffer<float>& rows) const {
  return head_major(rows.data(), DType::f32, shape().tokens, shape().kv_heads, shape().dim);
}

TensorView Prompt::queries() const {
  return token_major(queries_.data(), DType::f32, rows_, query_heads(), shape().dim);
}

TensorView Prompt::prompt_queries(MemorySpace space) const {
  const float* all = space == MemorySpace::device ? queries_.data() : cache_.queries.data();
  return token_major(all + rows_ * query_heads() * shape().dim, DType::f32, kPromptSteps,
                     query_heads(), shape().dim);
}

ImportanceView Prompt::importance(MemorySpace space) const {
  const float* scores =
      space == MemorySpace::device ? importance_.data() : cache_.importance.data();
  return {scores, shape().kv_heads, shape().tokens, shape().tokens};
}

// ---- Scene

Scene::Scene(const Prompt& prompt, int rows, cudaStream_t stream)
    : prompt_(prompt),
      stream_(stream),
      layer_(layer_view(prompt.shape())),
      store_(layer_, true),
      table_(rows * layer_.kv_heads, "the table of heads") {
  append();
  compress();
  copy_rows(rows);
  allocate_step(rows);
}

void Scene::append() {
  const cuda::DeviceBuffer<cuda::BadNumber> bad(1, "the check of appended numbers");
  VERKV_CUDA_CHECK(cudaMemsetAsync(bad.data(), 0, at(bad.bytes()), stream_));
  const std::int64_t count = prompt_.shape().tokens;
  store_.reserve_append(count, false, table_.data(), stream_);
  cuda::AppendArguments step;
  step.keys = prompt_.key_view();
  step.values = prompt_.value_view();
  step.bad = bad.data();
  store_.append_rows(step, 0, true, table_.data(), stream_);
  store_.add_tokens(count);
  VERKV_CUDA_CHECK(cudaStreamSynchronize(stream_));
}

void Scene::compress() {
  const Compressor compressor(cache_config(prompt_, {}, 1));
  const LayerLengths lengths{tokens(), 0};
  const ImportanceView scores = prompt_.importance(MemorySpace::host);
  const TensorView queries = prompt_.prompt_queries(MemorySpace::host);
  std::vector<HeadCompression> heads = compressor.prompt(0, {&lengths, 1}, {&scores, 1});
  compressor.complete(
      heads,
      [this](const HeadCompression& head) {
        const std::int64_t h = static_cast<std::int64_t>(head.head);
        return HeadRows{store_.host_keys(h), store_.host_values(h), &store_.directions(h),
                        store_.positions(h), store_.open_odds(h)};
      },
      {&queries, 1},
      [](std::int64_t count, const Compressor::Task& task) {
        std::vector<std::future<void>> parts;
        for (std::int64_t i = 0; i < count; ++i)
          parts.push_back(std::async(std::launch::async, [&task, i] { task(i); }));
        for (auto& part : parts) part.get();
      });
  store_.take(store_.compress(heads, 0, table_.data(), stream_), table_.data(), stream_);
  // Queries score the local window, as they do in a decode.
  store_.reserve_append(1, true, table_.data(), stream_);
}

std::vector<cuda::HeadView> Scene::copy_row() {
  const std::int64_t row_bytes = pinned_bytes(tokens(), kv_heads(), 1);
  const std::int64_t position_bytes = tokens() * static_cast<std::int64_t>(sizeof(std::uint32_t));
  cuda::HostBuffer host(row_bytes + kv_heads() * position_bytes, "the host tier of a copy", true);
  const auto copy = [&](auto*& array, std::int64_t count) {
    const std::int64_t bytes = count * static_cast<std::int64_t>(sizeof *array);
    cuda::DeviceBuffer<std::byte> buffer(bytes, "the fast tier of a copy");
    VERKV_CUDA_CHECK(
        cudaMemcpyAsync(buffer.data(), array, at(bytes), cudaMemcpyDeviceToDevice, stream_));
    array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(buffer.data());
    device_copies_.push_back(std::move(buffer));
  };
  std::vector<cuda::HeadView> views(store_.views().begin(), store_.views().end());
  for (std::int64_t h = 0; h < kv_heads(); ++h) {
    cuda::HeadView& view = views[at(h)];
    const std::int64_t rows_at = h * tokens() * kRowBytes;
    std::memcpy(host.data() + rows_at, host_rows(0, h), at(tokens() * kRowBytes));
    view.host_rows = host.device() + rows_at;
    const std::vector<std::uint32_t> position = store_.order(h).position;
    const std::int64_t positions_at = row_bytes + h * position_bytes;
    std::memcpy(host.data() + positions_at, position.data(),
                position.size() * sizeof(std::uint32_t));
    view.place_position = reinterpret_cast<std::uint32_t*>(host.device() + positions_at);
    const std::int64_t padded = (view.compressed + kSketchGroup - 1) / kSketchGroup * kSketchGroup;
    const std::int64_t window = view.tokens - view.compressed;
    copy(view.resident_keys, view.residents() * kRowBytes / 2);
    copy(view.resident_values, view.residents() * kRowBytes / 2);
    copy(view.resident_place, view.residents());
    copy(view.codes, code_storage_bytes(sketch_of(layer_, view), view.compressed));
    copy(view.scales, padded);
    copy(view.odds, padded);
    copy(view.channel_means, layer_.key_dim);
    copy(view.basis_query, std::int64_t{view.sketch_dim} * layer_.key_dim);
    if (layer_.clusters) {
      copy(view.centroids, clusters_of(view.compressed) * kRowBytes / 2);
      copy(view.spreads, clusters_of(view.compressed));
    }
    copy(view.window_square, window);
    copy(view.window_steps, window);
    copy(view.given, view.given_stride);
    copy(view.has_given, kMostScoredTokens);
  }
  host_copies_.push_back(std::move(host));
  return views;
}

void Scene::copy_rows(int rows) {
  std::vector<cuda::HeadView> views(store_.views().begin(), store_.views().end());
  for (int row = 1; row < rows; ++row) {
    const std::vector<cuda::HeadView> copy = copy_row();
    views.insert(views.end(), copy.begin(), copy.end());
  }
  for (cuda::HeadView& view : views) view.first_scored = view.tokens - 1;
  VERKV_CUDA_CHECK(cudaMemcpyAsync(table_.data(), views.data(), at(table_.bytes()),
                                   cudaMemcpyHostToDevice, stream_));
  VERKV_CUDA_CHECK(cudaStreamSynchronize(stream_));
}

void Scene::allocate_step(int rows) {
  std::vector<cuda::StepRow> batch;
  for (int row = 0; row < rows; ++row) batch.push_back({row, 0});
  batch_ = cuda::DeviceBuffer<cuda::StepRow>(rows, "the rows of a step");
  const std::int64_t query_heads = rows * prompt_.query_heads();
  output_ = cuda::DeviceBuffer<float>(query_heads * layer_.value_dim, "outputs");
  lse_ = cuda::DeviceBuffer<float>(query_heads, "outputs");
  query_reports_ = cuda::DeviceBuffer<QueryHeadReport>(query_heads, "reports");
  kv_reports_ = cuda::DeviceBuffer<KvHeadReport>(rows * kv_heads(), "reports");
  // A rule with a certificate needs the most.
  workspace_ = cuda::DeviceBuffer<std::byte>(
      cuda::step_workspace_bytes(under({"", 0.1, {}}, layer_), rows, store_.compressed(),
                                 store_.most_residents()),
      "the workspace of a step");
  VERKV_CUDA_CHECK(cudaMemcpyAsync(batch_.data(), batch.data(), at(batch_.bytes()),
                                   cudaMemcpyHostToDevice, stream_));
  // Reports are copied whole, with the bytes between their members.
  VERKV_CUDA_CHECK(cudaMemsetAsync(kv_reports_.data(), 0, at(kv_reports_.bytes()), stream_));
  VERKV_CUDA_CHECK(cudaStreamSynchronize(stream_));
}

cuda::StepArguments Scene::step(const Rule& rule, int rows) const {
  cuda::StepArguments arguments;
  cuda::StepView& view = arguments.view;
  view.layer = under(rule, layer_);
  view.heads = table_.data();
  view.batch = batch_.data();
  view.rows = rows;
  const TensorView queries = prompt_.queries();
  view.queries = queries.data;
  view.query_type = queries.type;
  view.query_row_stride = queries.token_stride;
  view.query_head_stride = queries.head_stride;
  view.output = output_.data();
  view.lse = lse_.data();
  view.query_reports = query_reports_.data();
  view.kv_reports = kv_reports_.data();
  view.most_compressed = store_.compressed();
  view.most_residents = store_.most_residents();
  view.workspace = workspace_.data();
  arguments.grid = cuda::step_grid(view.layer, rows, view.most_compressed, view.most_residents);
  cuda::lay_out(view.layer, arguments.grid, rows, view.most_compressed, view.most_residents,
                view.workspace, arguments.workspace);
  return arguments;
}

const std::byte* Scene::host_rows(int row, std::int64_t head) const {
  if (row == 0) return static_cast<const std::byte*>(store_.host_keys(head).data);
  return host_copies_[at(row - 1)].data() + head * tokens() * kRowBytes;
}

std::int64_t Scene::moved_tokens(int rows) const {
  std::vector<KvHeadReport> reports(at(rows * kv_heads()));
  VERKV_CUDA_CHECK(cudaStreamSynchronize(stream_));
  VERKV_CUDA_CHECK(cudaMemcpy(reports.data(), kv_reports_.data(),
                              reports.size() * sizeof(KvHeadReport), cudaMemcpyDeviceToHost));
  std::int64_t moved = 0;
  for (const KvHeadReport& report : reports) moved += report.moved_tokens;
  return moved;
}

Scene::Sizes Scene::sizes() const {
  Sizes sizes;
  for (const cuda::HeadView& view : store_.views()) {
    sizes.residents += view.residents();
    sizes.sketch +=
        view.compressed * sketch_of(layer_, view).token_bytes() +
        std::int64_t{view.sketch_dim} * layer_.key_dim * static_cast<std::int64_t>(sizeof(Half));
    sizes.odds += view.compressed * static_cast<std::int64_t>(sizeof(Positive16));
    sizes.resident_keys += view.residents() * kRowBytes / 2;
    sizes.resident_values += view.residents() * kRowBytes / 2;
    if (layer_.clusters) sizes.centroids += clusters_of(view.compressed) * kRowBytes / 2;
  }
  return sizes;
}

// ---- CapturedLayers

CapturedLayers::CapturedLayers(const Prompt& prompt, const Rule& rule, int layers,
                               cudaStream_t stream)
    : stream_(stream),
      prompt_(prompt),
      output_(prompt.query_heads() * prompt.shape().dim, "outputs") {
  const CacheConfig config = cache_config(prompt, rule, layers);
  CudaOptions options;
  options.stream = stream;
  options.views = MemorySpace::device;
  options.require_pinned = true;
  cache_ = make_cuda_cache(config, options);
  sequence_ = cache_->create_sequence(0);
  for (std::int64_t i = 0; i < layers; ++i)
    cache_->append(sequence_, i, prompt.key_view(), prompt.value_view());
  const std::vector<ImportanceView> importance(at(layers), prompt.importance(MemorySpace::device));
  const std::vector<TensorView> queries(at(layers), prompt.prompt_queries(MemorySpace::device));
  cache_->compress(sequence_, importance, queries);
  // What a first step prepares must not be captured.
  attend();
  VERKV_CUDA_CHECK(cudaStreamSynchronize(stream));
  graph_.emplace(stream, [this] { attend(); });
}

void CapturedLayers::attend() {
  AttendBatch batch;
  batch.sequences = {&sequence_, 1};
  batch.queries = prompt_.queries();
  batch.queries.tokens = 1;
  batch.output = {output_.data(), at(output_.size())};
  for (std::int64_t i = 0; i < layers(); ++i) cache_->attend(i, batch);
}

std::int64_t CapturedLayers::fast_bytes() const {
  return cache_->memory(sequence_).fast_bytes() / layers();
}

double CapturedLayers::moved_tokens() const {
  double moved = 0;
  for (std::int64_t i = 0; i < layers(); ++i) {
    const LayerStatistics statistics = cache_->statistics(i);
    moved += static_cast<double>(statistics.moved_tokens) / static_cast<double>(statistics.steps);
  }
  return moved / layers();
}

}  // namespace verkv::bench
