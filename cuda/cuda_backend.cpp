// The device backend: the CPU backend (src/cpu/cpu_backend.cpp) over LayerStore and launch_step.
// Inclusion probabilities are solved on the host, which compress waits for anyway, by the very
// function that the CPU backend calls.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <verkv/certificate.hpp>
#include <verkv/cuda_cache.hpp>
#include <verkv/importance.hpp>
#include <verkv/sample.hpp>

#include "backend.hpp"
#include "cpu/calibration.hpp"
#include "cuda_error.hpp"
#include "device_memory.hpp"
#include "fetch_rules.hpp"
#include "inclusion_pool.hpp"
#include "step.hpp"
#include "store.hpp"
#include "tuning.hpp"

namespace verkv::cuda {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

std::int64_t round_up(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; }

// Makes a device current for the calling thread, and gives the thread its own back.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    VERKV_CUDA_CHECK(cudaGetDevice(&before_));
    if (device == before_) return;
    VERKV_CUDA_CHECK(cudaSetDevice(device));
    changed_ = true;
  }
  ~CurrentDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

class Stream {
 public:
  explicit Stream(void* given) : stream_(static_cast<cudaStream_t>(given)) {
    if (given != nullptr) return;
    VERKV_CUDA_CHECK(cudaStreamCreate(&stream_));
    owned_ = true;
  }
  ~Stream() {
    if (owned_) cudaStreamDestroy(stream_);
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
  bool owned_ = false;
};

// The view's rows without gaps, [token][head][dim].
void pack(const TensorView& view, std::int64_t first, std::int64_t count,
          std::vector<std::byte>& out) {
  const std::size_t row = size(view.dim) * size_bytes(view.type);
  out.resize(size(count * view.heads) * row);
  std::byte* to = out.data();
  for (std::int64_t t = first; t < first + count; ++t) {
    for (std::int64_t h = 0; h < view.heads; ++h, to += row) {
      std::memcpy(to, view.row(t, h), row);
    }
  }
}

// What is fixed for a layer, and its table of HeadView [slot][KV head].
struct Layer {
  LayerConfig config;
  LayerView view;
  DeviceBuffer<HeadView> table;
  // Of all sequences, with room to grow: what grids and workspace of a step are made for.
  std::int64_t most_compressed = 0;
  std::int64_t most_residents = 0;
};

struct Sequence {
  std::int64_t slot = 0;
  std::uint64_t draw = 0;
  std::vector<std::unique_ptr<LayerStore>> layers;  // null where the layer is not cached
  std::vector<bool> compressed_before;              // only then does decode compress by itself
};

// The table slots of a batch's rows in device memory, and what has been written there.
struct Slots {
  DeviceBuffer<std::int32_t> device;
  std::vector<std::int32_t> written;

  void take(DeviceBuffer<std::int32_t>&& room, std::int64_t rows) {
    device.swap(room);
    written.clear();
    written.reserve(size(rows));
  }
};

// One layer's share of a compression: positions [begin, begin + count) of all its KV heads.
struct LayerPlan {
  std::size_t layer = 0;
  std::int64_t begin = 0;
  std::int64_t count = 0;
  std::int64_t tokens = 0;
  std::vector<const float*> importance;  // [KV head], of the same positions
  std::vector<Positive16> odds;          // [KV head][count]
};

class CudaBackend final : public Backend {
 public:
  CudaBackend(const CacheConfig& config, const CudaOptions& options)
      : config_(config), options_(options), stream_(options.stream), layers_(config.layers.size()) {
    cudaDeviceProp properties{};
    VERKV_CUDA_CHECK(cudaGetDeviceProperties(&properties, options.device));
    description_ = std::string("cuda (") + properties.name + ", compute capability " +
                   std::to_string(properties.major) + "." + std::to_string(properties.minor) + ")";
    if (properties.major < 8 || properties.canMapHostMemory == 0) {
      throw InvalidArgument(description_ +
                            ": compute capability 8.0 and mapped host memory are needed");
    }
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      Layer& layer = layers_[i];
      layer.config = config.layers[i];
      if (!layer.config.cached) continue;
      describe_layer(layer);
      const std::size_t shared = size(step_shared_bytes(layer.view));
      if (shared > properties.sharedMemPerBlockOptin) {
        throw InvalidArgument("layer " + std::to_string(i) + ": " + std::to_string(shared) +
                              " bytes of shared memory are needed for its head sizes and group; " +
                              description_ + " has " +
                              std::to_string(properties.sharedMemPerBlockOptin));
      }
    }
    const auto zeroed = [this](auto& buffer) {
      VERKV_CUDA_CHECK(cudaMemsetAsync(buffer.data(), 0, size(buffer.bytes()), stream_));
    };
    counters_ =
        DeviceBuffer<LayerStatistics>(static_cast<std::int64_t>(layers_.size()), "statistics");
    bad_ = DeviceBuffer<BadNumber>(1, "the check of appended numbers");
    zeroed(counters_);
    zeroed(bad_);
    synchronize();
  }

  ~CudaBackend() override {
    // What is under way may use memory that goes now.
    cudaStreamSynchronize(stream_);
    sequences_.clear();
  }

  std::uint64_t graph_generation() const override { return graph_generation_; }

  std::string description() const override { return description_ + "; host tier: " + host_tier(); }

  void create(SequenceId id, std::uint64_t draw) override {
    const CurrentDevice current(options_.device);
    auto sequence = std::make_unique<Sequence>();
    sequence->draw = draw;
    sequence->layers.resize(layers_.size());
    sequence->compressed_before.resize(layers_.size(), false);
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      if (!layers_[i].config.cached) continue;
      sequence->layers[i] = std::make_unique<LayerStore>(layers_[i].view, options_.require_pinned);
    }
    free_slots_.reserve(sequences_.size() + free_slots_.size() + 1);
    const bool reused = !free_slots_.empty();
    sequence->slot = reused ? free_slots_.back() : next_slot_;
    reserve_tables(sequence->slot + 1);
    reserve_rows(std::max(options_.rows, static_cast<std::int64_t>(sequences_.size()) + 1));
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      if (sequence->layers[i]) sequence->layers[i]->write_table(table(i, *sequence), stream_);
    }
    sequences_.emplace(id.value, std::move(sequence));
    if (reused) {
      free_slots_.pop_back();
    } else {
      ++next_slot_;
    }
  }

  void release(SequenceId id) noexcept override {
    try {
      const CurrentDevice current(options_.device);
      cudaStreamSynchronize(stream_);
      const auto found = sequences_.find(id.value);
      free_slots_.push_back(found->second->slot);  // create has made room for it
      sequences_.erase(found);
    } catch (const Error&) {
      // The device is gone; freeing on it fails quietly.
      sequences_.erase(id.value);
    }
  }

  std::int64_t tokens(SequenceId id, std::int64_t layer) const override {
    return find(id).layers[size(layer)]->tokens();
  }

  std::int64_t compressed_tokens(SequenceId id, std::int64_t layer) const override {
    return find(id).layers[size(layer)]->compressed();
  }

  void append(SequenceId id, std::int64_t layer_index, const TensorView& keys,
              const TensorView& values) override {
    const CurrentDevice current(options_.device);
    const std::size_t layer = size(layer_index);
    Sequence& sequence = find(id);
    LayerStore& store = *sequence.layers[layer];
    HeadView* const entries = table(layer, sequence);
    if (keys.tokens == 0) return;
    const bool compresses =
        sequence.compressed_before[layer] && outgrown_chunks(store, keys.tokens) > 0;
    // Before anything changes, since this call will wait for the device anyway.
    if (compresses && options_.views == MemorySpace::device) check_numbers();
    store.reserve_append(keys.tokens, entries, stream_);
    reserve_lengths(layer, store.compressed(), store.most_residents() + keys.tokens);
    AppendArguments step;
    step.bad = bad_.data();
    step.sequence = id.value;
    step.layer_index = layer_index;
    if (options_.views == MemorySpace::device) {
      step.keys = keys;
      step.values = values;
      store.append_rows(step, 0, true, entries, stream_);
      store.add_tokens(keys.tokens);
    } else {
      append_staged(store, step, keys, values, entries);
      // Until the table is rewritten the new rows lie beyond the end, so a bad number has changed
      // nothing.
      check_numbers();
      store.add_tokens(keys.tokens);
      store.write_table(entries, stream_);
    }
    if (!compresses) return;
    try {
      compress_outgrown_window(sequence, layer);
    } catch (const std::bad_alloc&) {
      // The tokens are in and correct; the window only stays larger until a later append finds the
      // memory.
    } catch (const DeviceError& error) {
      if (!error.out_of_memory()) throw;
    }
  }

  void compress(SequenceId id, std::span<const ImportanceView> importance,
                std::span<const TensorView> prompt_queries) override {
    const CurrentDevice current(options_.device);
    check_numbers();
    std::vector<std::vector<float>> copies(importance.size());
    const std::vector<ImportanceView> views = host_importance(id, importance, copies);
    if (config_.keep >= 1) return;  // the budget covers every token: all stay resident and exact
    Sequence& sequence = find(id);
    std::vector<LayerPlan> plans;
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
      if (!compressible(layer)) continue;
      const LayerStore& store = *sequence.layers[layer];
      const std::int64_t end = store.tokens() - config_.local_tokens;
      if (end <= store.compressed()) continue;
      LayerPlan plan = plan_layer(layer, store, store.compressed(), end - store.compressed());
      for (std::size_t h = 0; h < plan.importance.size(); ++h) {
        plan.importance[h] =
            views[layer].data + static_cast<std::int64_t>(h) * views[layer].head_stride;
      }
      plans.push_back(std::move(plan));
    }
    solve_pools(plans, config_.pool, true);
    run_compression(sequence, plans, prompt_queries);
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
      if (!compressible(layer)) continue;
      // Steps of a batch score all windows or none; what came before does not count.
      if (!sequence.compressed_before[layer]) sequence.layers[layer]->clear_window_scores(stream_);
      sequence.compressed_before[layer] = true;
    }
  }

  void redraw(SequenceId id, std::uint64_t draw) override {
    const CurrentDevice current(options_.device);
    check_numbers();
    Sequence& sequence = find(id);
    std::vector<std::pair<std::size_t, LayerStore::Change>> changes;
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
      const LayerStore* store = sequence.layers[layer].get();
      if (store == nullptr || store->compressed() == 0) continue;
      changes.emplace_back(
          layer, store->redraw(draw_id(draw, layer), spare(), table(layer, sequence), stream_));
      reserve_lengths(layer, store->compressed(), changes.back().second.most_residents);
    }
    for (auto& [layer, change] : changes) {
      sequence.layers[layer]->take(std::move(change), table(layer, sequence), stream_);
    }
    sequence.draw = draw;
  }

  void attend(std::int64_t layer_index, const AttendBatch& batch,
              std::span<QueryHeadReport> query_reports,
              std::span<KvHeadReport> kv_reports) override {
    const std::int64_t rows = static_cast<std::int64_t>(batch.sequences.size());
    if (rows == 0) return;
    const CurrentDevice current(options_.device);
    const std::size_t index = size(layer_index);
    const Layer& layer = layers_[index];
    const unsigned long long capture = capture_under_way();
    if (rows > rows_ && capture != 0) {
      throw CapacityError("a captured batch of " + std::to_string(rows) +
                          " rows, but there is room for " + std::to_string(rows_) +
                          " (CudaOptions::rows)");
    }
    // Padding rows may make the batch larger than the number of sequences; only then is there
    // something to grow.
    reserve_rows(rows);
    StepView step;
    step.layer = layer.view;
    step.heads = layer.table.data();
    step.slots = write_slots(batch, index, capture, step.score_window);
    step.rows = static_cast<int>(rows);
    step.query_type = batch.queries.type;
    step.query_reports = query_reports_.data();
    step.kv_reports = kv_reports_.data();
    step.most_compressed = layer.most_compressed;
    step.most_residents = layer.most_residents;
    step.workspace = workspace_.data();
    step.counters = counters_.data() + index;
    const bool staged = options_.views == MemorySpace::host;
    if (staged) {
      pack(batch.queries, 0, rows, packed_);
      copy_in(query_staging_.data(), packed_.data(), packed_.size());
      step.queries = query_staging_.data();
      step.query_row_stride = layer.config.query_heads * layer.config.key_dim;
      step.query_head_stride = layer.config.key_dim;
      step.output = output_staging_.data();
      step.lse = lse_staging_.data();
    } else {
      step.queries = batch.queries.data;
      step.query_row_stride = batch.queries.token_stride;
      step.query_head_stride = batch.queries.head_stride;
      step.bad = bad_.data();  // the host has looked at its own
      step.layer_index = layer_index;
      step.output = batch.output.data();
      step.lse = batch.lse.empty() ? nullptr : batch.lse.data();
    }
    VERKV_CUDA_CHECK(launch_step(step, stream_));
    if (staged) {
      copy_out(batch.output.data(), output_staging_.data(), batch.output.size());
      if (!batch.lse.empty()) copy_out(batch.lse.data(), lse_staging_.data(), batch.lse.size());
    }
    if (!query_reports.empty()) {
      copy_out(query_reports.data(), query_reports_.data(), query_reports.size());
    }
    if (!kv_reports.empty()) copy_out(kv_reports.data(), kv_reports_.data(), kv_reports.size());
    if (staged || !query_reports.empty() || !kv_reports.empty()) synchronize();
  }

  bool host_views() const override { return options_.views == MemorySpace::host; }
  bool counts_steps() const override { return true; }

  LayerStatistics statistics(std::int64_t layer) const override {
    const CurrentDevice current(options_.device);
    check_numbers();
    LayerStatistics result;
    copy_out(&result, counters_.data() + layer, 1);
    synchronize();
    return result;
  }

  void reset_statistics() override {
    const CurrentDevice current(options_.device);
    VERKV_CUDA_CHECK(cudaMemsetAsync(counters_.data(), 0, size(counters_.bytes()), stream_));
  }

  MemoryReport memory(SequenceId id) const override {
    MemoryReport report;
    for (const auto& store : find(id).layers) {
      if (store) store->add_memory(report);
    }
    return report;
  }

  std::int64_t workspace_bytes() const override {
    std::int64_t sum = workspace_.bytes() + query_reports_.bytes() + kv_reports_.bytes() +
                       slots_.device.bytes() + captured_slots_.device.bytes() +
                       query_staging_.bytes() + output_staging_.bytes() + lse_staging_.bytes() +
                       row_staging_.bytes() + counters_.bytes() + bad_.bytes();
    for (const Layer& layer : layers_) sum += layer.table.bytes();
    return sum;
  }

 private:
  Sequence& find(SequenceId id) { return *sequences_.find(id.value)->second; }
  const Sequence& find(SequenceId id) const { return *sequences_.find(id.value)->second; }

  // How the host tier is held, for the description.
  std::string host_tier() const {
    // With no block yet nobody knows.
    std::int64_t pageable = 0;
    std::int64_t all = 0;
    const HostBuffer* example = nullptr;
    for (const auto& [id, sequence] : sequences_) {
      for (const auto& store : sequence->layers) {
        if (!store) continue;
        const HostBuffer& block = store->host_tier();
        all += block.bytes();
        if (!block.pageable()) continue;
        pageable += block.bytes();
        example = &block;
      }
    }
    if (all == 0) return "none yet";
    if (example == nullptr) return "pinned";
    return std::to_string(pageable) + " of " + std::to_string(all) + " bytes pageable, " +
           (example->kind() == HostMemory::managed ? "managed" : "ordinary") +
           " memory (pinning was refused: " + example->refusal() + ")";
  }

  bool compressible(std::size_t layer) const {
    return layers_[layer].config.cached && !layers_[layer].config.dense;
  }

  HeadView* table(std::size_t layer, const Sequence& sequence) const {
    return layers_[layer].table.data() + sequence.slot * layers_[layer].config.kv_heads;
  }

  std::int64_t spare() const {
    return std::clamp(config_.chunk_tokens.value_or(0), kLeastSpare, kMostSpare);
  }

  DrawId draw_id(std::uint64_t draw, std::size_t layer) const {
    const LayerConfig& c = layers_[layer].config;
    return {config_.seed, draw,
            static_cast<std::uint32_t>(c.global_layer.value_or(static_cast<std::int64_t>(layer))),
            static_cast<std::uint32_t>(c.first_global_kv_head)};
  }

  void synchronize() const { VERKV_CUDA_CHECK(cudaStreamSynchronize(stream_)); }

  // The number of the capture that the stream is in; 0: none.
  unsigned long long capture_under_way() const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    VERKV_CUDA_CHECK(cudaStreamGetCaptureInfo(stream_, &status, &id));
    return status == cudaStreamCaptureStatusActive ? id : 0;
  }

  void copy_in(void* to, const void* from, std::size_t bytes) const {
    VERKV_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_));
  }

  template <class T>
  void copy_out(T* to, const T* from, std::size_t count) const {
    VERKV_CUDA_CHECK(cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyDeviceToHost, stream_));
  }

  void describe_layer(Layer& layer) {
    const LayerConfig& c = layer.config;
    LayerView& view = layer.view;
    view.kv_heads = static_cast<int>(c.kv_heads);
    view.group = static_cast<int>(c.query_heads / c.kv_heads);
    view.key_dim = static_cast<int>(c.key_dim);
    view.value_dim = static_cast<int>(c.value_dim);
    view.scale = logit_scale(c);
    view.soft_cap = static_cast<float>(c.soft_cap.value_or(0));
    view.storage = config_.storage;
    view.sketch = largest_sketch_shape(config_.sketch.kind, config_.sketch.bits, view.key_dim);
    const FetchRules fetch = fetch_rules(config_);
    view.mode = fetch.mode;
    view.rules = fetch;
    view.cap = fetch.cap;
    view.limit_tokens = fetch.limit_tokens;
  }

  // ---- Room

  void reserve_tables(std::int64_t slots) {
    if (slots <= slot_capacity_) return;
    const std::int64_t capacity = std::max<std::int64_t>({4, slots, 2 * slot_capacity_});
    std::vector<DeviceBuffer<HeadView>> tables(layers_.size());
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      if (!layers_[i].config.cached) continue;
      tables[i] =
          DeviceBuffer<HeadView>(capacity * layers_[i].config.kv_heads, "the table of heads");
      const DeviceBuffer<HeadView>& old = layers_[i].table;
      if (old.size() == 0) continue;
      VERKV_CUDA_CHECK(cudaMemcpyAsync(tables[i].data(), old.data(), size(old.bytes()),
                                       cudaMemcpyDeviceToDevice, stream_));
    }
    synchronize();
    for (std::size_t i = 0; i < layers_.size(); ++i) layers_[i].table.swap(tables[i]);
    slot_capacity_ = capacity;
    ++graph_generation_;
  }

  // Buffers of a step of this many rows.
  void reserve_rows(std::int64_t rows) {
    if (rows > rows_) {
      std::int64_t query_heads = 0;
      std::int64_t kv_heads = 0;
      std::int64_t query_elements = 0;
      std::int64_t output_elements = 0;
      for (const Layer& layer : layers_) {
        const LayerConfig& c = layer.config;
        if (!c.cached) continue;
        query_heads = std::max(query_heads, c.query_heads);
        kv_heads = std::max(kv_heads, c.kv_heads);
        query_elements = std::max(query_elements, c.query_heads * c.key_dim);
        output_elements = std::max(output_elements, c.query_heads * c.value_dim);
      }
      slots_now_.reserve(size(rows));
      DeviceBuffer<std::int32_t> slots(rows, "the rows of a step");
      DeviceBuffer<std::int32_t> captured_slots(rows, "the rows of a captured step");
      DeviceBuffer<QueryHeadReport> query_reports(rows * query_heads, "reports");
      DeviceBuffer<KvHeadReport> kv_reports(rows * kv_heads, "reports");
      DeviceBuffer<std::byte> query_staging;
      DeviceBuffer<float> output_staging;
      DeviceBuffer<float> lse_staging;
      if (options_.views == MemorySpace::host) {
        query_staging = DeviceBuffer<std::byte>(4 * rows * query_elements, "queries");
        output_staging = DeviceBuffer<float>(rows * output_elements, "outputs");
        lse_staging = DeviceBuffer<float>(rows * query_heads, "outputs");
        packed_.reserve(size(4 * rows * query_elements));
      }
      reserve_workspace(rows);
      // Reports are copied whole, with the bytes between their members.
      if (query_reports.size() > 0) {
        VERKV_CUDA_CHECK(
            cudaMemsetAsync(query_reports.data(), 0, size(query_reports.bytes()), stream_));
        VERKV_CUDA_CHECK(cudaMemsetAsync(kv_reports.data(), 0, size(kv_reports.bytes()), stream_));
      }
      synchronize();
      slots_.take(std::move(slots), rows);
      captured_slots_.take(std::move(captured_slots), rows);
      query_reports_.swap(query_reports);
      kv_reports_.swap(kv_reports);
      query_staging_.swap(query_staging);
      output_staging_.swap(output_staging);
      lse_staging_.swap(lse_staging);
      rows_ = rows;
      ++graph_generation_;
    }
  }

  // Grids and workspace for these lengths, if they exceed those that are there.
  void reserve_lengths(std::size_t index, std::int64_t compressed, std::int64_t residents) {
    Layer& layer = layers_[index];
    if (compressed <= layer.most_compressed && residents <= layer.most_residents) return;
    const std::int64_t old_compressed = layer.most_compressed;
    const std::int64_t old_residents = layer.most_residents;
    if (compressed > old_compressed) layer.most_compressed = with_room(compressed);
    if (residents > old_residents) layer.most_residents = with_room(residents);
    try {
      reserve_workspace(rows_);
    } catch (...) {
      layer.most_compressed = old_compressed;
      layer.most_residents = old_residents;
      throw;
    }
    ++graph_generation_;
  }

  static std::int64_t with_room(std::int64_t n) { return round_up(n + n / 4, 256); }

  // After lengths have shrunk: a step should not be cut for the prompt that has been compressed.
  void tighten_lengths(std::size_t index) {
    std::int64_t compressed = 0;
    std::int64_t residents = 0;
    for (const auto& [id, sequence] : sequences_) {
      const LayerStore& store = *sequence->layers[index];
      compressed = std::max(compressed, store.compressed());
      residents = std::max(residents, store.most_residents());
    }
    Layer& layer = layers_[index];
    layer.most_compressed = std::min(layer.most_compressed, with_room(compressed));
    layer.most_residents = std::min(layer.most_residents, with_room(residents));
  }

  void reserve_workspace(std::int64_t rows) {
    std::int64_t wanted = 0;
    for (const Layer& layer : layers_) {
      if (!layer.config.cached) continue;
      wanted = std::max(wanted, step_workspace_bytes(layer.view, static_cast<int>(rows),
                                                     layer.most_compressed, layer.most_residents));
    }
    if (wanted <= workspace_.size()) return;
    DeviceBuffer<std::byte> larger(wanted, "the workspace of a step");
    synchronize();
    workspace_.swap(larger);
    ++graph_generation_;
  }

  // ---- Append

  void append_staged(LayerStore& store, AppendArguments step, const TensorView& keys,
                     const TensorView& values, HeadView* entries) {
    const std::int64_t key_row = keys.heads * keys.dim;
    const std::int64_t value_row = values.heads * values.dim;
    const std::int64_t piece =
        std::clamp<std::int64_t>(kStagingBytes / (4 * (key_row + value_row)), 1, keys.tokens);
    const std::int64_t key_bytes = round_up(4 * piece * key_row, 256);
    const std::int64_t wanted = key_bytes + 4 * piece * value_row;
    if (wanted > row_staging_.size()) {
      DeviceBuffer<std::byte> larger(wanted, "appended rows");
      synchronize();
      row_staging_.swap(larger);
    }
    const auto stage = [this](const TensorView& view, std::int64_t first, std::int64_t count,
                              std::byte* to) {
      pack(view, first, count, row_packed_);
      copy_in(to, row_packed_.data(), row_packed_.size());
      return token_major(to, view.type, count, view.heads, view.dim);
    };
    for (std::int64_t first = 0; first < keys.tokens; first += piece) {
      const std::int64_t count = std::min(piece, keys.tokens - first);
      step.keys = stage(keys, first, count, row_staging_.data());
      step.values = stage(values, first, count, row_staging_.data() + key_bytes);
      step.token_offset = first;
      store.append_rows(step, first, false, entries, stream_);
    }
  }

  // Throws what the checks of appended numbers and of queries have found so far. Waits for the
  // stream.
  void check_numbers() const {
    BadNumber bad;
    copy_out(&bad, bad_.data(), 1);
    synchronize();
    if (bad.claimed == 0) return;
    VERKV_CUDA_CHECK(cudaMemsetAsync(bad_.data(), 0, sizeof(BadNumber), stream_));
    const std::string place = std::to_string(bad.token) + ", head " + std::to_string(bad.head) +
                              ", coordinate " + std::to_string(bad.coordinate) + " is " +
                              fmt::format("{}", bad.number) + "; it must be finite";
    if (bad.source == NumberSource::queries) {
      throw InvalidArgument("queries of a step, layer " + std::to_string(bad.layer) + ": row " +
                            place);
    }
    throw InvalidArgument(std::string(bad.source == NumberSource::values ? "values" : "keys") +
                          " of sequence " + std::to_string(bad.sequence) + ", layer " +
                          std::to_string(bad.layer) + ": token " + place + " and, stored as " +
                          name(config_.storage) + ", not above " +
                          fmt::format("{}", largest_number(config_.storage)) + " in size");
  }

  // ---- Compression

  // The scores as the host can read them; `copies` keeps what had to be copied.
  std::vector<ImportanceView> host_importance(SequenceId id,
                                              std::span<const ImportanceView> importance,
                                              std::vector<std::vector<float>>& copies) {
    std::vector<ImportanceView> views(importance.begin(), importance.end());
    if (options_.views == MemorySpace::host) return views;
    const Sequence& sequence = find(id);
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
      if (!compressible(layer)) continue;
      ImportanceView& view = views[layer];
      const LayerStore& store = *sequence.layers[layer];
      if (store.tokens() == store.compressed()) continue;  // its view may be null
      std::vector<float>& copy = copies[layer];
      copy.resize(size(view.heads * view.tokens));
      for (std::int64_t h = 0; h < view.heads; ++h) {
        copy_out(copy.data() + h * view.tokens, view.data + h * view.head_stride,
                 size(view.tokens));
      }
      synchronize();
      for (std::int64_t h = 0; h < view.heads; ++h) {
        const std::span<const float> scores(copy.data() + h * view.tokens, size(view.tokens));
        const std::int64_t bad = first_invalid_importance(scores);
        if (bad < 0) continue;
        throw InvalidArgument("layer " + std::to_string(layer) + ", head " + std::to_string(h) +
                              ", token " + std::to_string(bad) + ": importance " +
                              std::to_string(scores[size(bad)]) +
                              "; scores must be finite and not negative");
      }
      view.data = copy.data();
      view.head_stride = view.tokens;
    }
    return views;
  }

  LayerPlan plan_layer(std::size_t layer, const LayerStore& store, std::int64_t begin,
                       std::int64_t count) const {
    LayerPlan plan;
    plan.layer = layer;
    plan.begin = begin;
    plan.count = count;
    plan.tokens = store.tokens();
    plan.importance.resize(size(layers_[layer].config.kv_heads));
    plan.odds.resize(plan.importance.size() * size(count));
    return plan;
  }

  // Solves inclusion over the pools.
  void solve_pools(std::vector<LayerPlan>& plans, Pool pool, bool pays_window) const {
    std::vector<PoolHead> heads;
    const auto solve = [&] {
      solve_pool(config_, heads, pays_window);
      heads.clear();
    };
    for (LayerPlan& plan : plans) {
      for (std::size_t h = 0; h < plan.importance.size(); ++h) {
        heads.push_back({plan.begin, plan.tokens, plan.importance[h],
                         std::span(plan.odds).subspan(h * size(plan.count), size(plan.count))});
        if (pool == Pool::head) solve();
      }
      if (pool == Pool::layer) solve();
    }
    if (pool == Pool::sequence) solve();
  }

  // Compresses by solved plans. Running out of memory happens before the first layer has changed.
  void run_compression(Sequence& sequence, const std::vector<LayerPlan>& plans,
                       std::span<const TensorView> prompt_queries) {
    std::vector<LayerStore::Change> changes;
    for (const LayerPlan& plan : plans) {
      changes.push_back(sequence.layers[plan.layer]->compress(
          plan.odds, calibrate(*sequence.layers[plan.layer], plan, prompt_queries),
          draw_id(sequence.draw, plan.layer), spare(), !sequence.compressed_before[plan.layer],
          table(plan.layer, sequence), stream_));
      reserve_lengths(plan.layer, plan.begin + plan.count, changes.back().most_residents);
    }
    for (std::size_t i = 0; i < plans.size(); ++i) {
      const std::size_t layer = plans[i].layer;
      sequence.layers[layer]->take(std::move(changes[i]), table(layer, sequence), stream_);
      tighten_lengths(layer);
    }
  }

  // One basis for each KV head at the first compression; none where the sketch has none. On the
  // host, from the rows of the host tier. Waits for the stream.
  std::vector<SketchBasis> calibrate(const LayerStore& store, const LayerPlan& plan,
                                     std::span<const TensorView> prompt_queries) {
    std::vector<SketchBasis> bases;
    if (config_.sketch.kind != SketchKind::calibrated || plan.begin != 0) return bases;
    synchronize();
    const LayerView& view = layers_[plan.layer].view;
    std::vector<std::byte> copy;
    TensorView queries = prompt_queries.empty() ? TensorView{} : prompt_queries[plan.layer];
    if (queries.tokens > 0 && options_.views == MemorySpace::device)
      queries = host_copy(queries, copy);
    for (std::int64_t h = 0; h < view.kv_heads; ++h) {
      const std::span<const Positive16> odds(plan.odds.data() + h * plan.count, size(plan.count));
      bases.push_back(
          calibrate_sketch(config_.sketch.bits,
                           cpu::StoredTokens(store.host_keys(h), odds, plan.importance[size(h)]),
                           cpu::gather_queries(queries, static_cast<std::int64_t>(plan.layer),
                                               h * view.group, view.group),
                           config_.seed));
    }
    return bases;
  }

  // A dense copy that the host can read, in `copy`. Waits for the stream.
  TensorView host_copy(const TensorView& view, std::vector<std::byte>& copy) const {
    const std::size_t row = size(view.dim) * size_bytes(view.type);
    copy.resize(size(view.tokens * view.heads) * row);
    std::byte* to = copy.data();
    for (std::int64_t t = 0; t < view.tokens; ++t) {
      for (std::int64_t h = 0; h < view.heads; ++h, to += row)
        copy_out(to, static_cast<const std::byte*>(view.row(t, h)), row);
    }
    synchronize();
    return token_major(copy.data(), view.type, view.tokens, view.heads, view.dim);
  }

  // By how many tokens, in whole chunks, the local window will have outgrown its size with `added`
  // more.
  std::int64_t outgrown_chunks(const LayerStore& store, std::int64_t added) const {
    if (!config_.chunk_tokens || config_.keep >= 1) return 0;
    const std::int64_t chunk = *config_.chunk_tokens;
    const std::int64_t outgrown =
        store.tokens() + added - store.compressed() - config_.local_tokens;
    return std::max<std::int64_t>(0, outgrown) / chunk * chunk;
  }

  // Decode: the oldest chunks of a local window that has outgrown its size, by the attention they
  // received. The layer's heads share a pool unless each has its own; layers are appended one by
  // one, so they cannot share one here. There is such a chunk. Waits for the stream.
  void compress_outgrown_window(Sequence& sequence, std::size_t layer) {
    const LayerStore& store = *sequence.layers[layer];
    const std::int64_t chunk = *config_.chunk_tokens;
    const std::int64_t outgrown = outgrown_chunks(store, 0);
    // Each chunk has its own budget, but the window is rebuilt once: an append may bring many
    // chunks.
    std::vector<LayerPlan> whole;
    whole.push_back(plan_layer(layer, store, store.compressed(), outgrown));
    const std::vector<float> score = store.window_scores(outgrown, stream_);
    for (std::int64_t at = 0; at + chunk <= outgrown; at += chunk) {
      std::vector<LayerPlan> plans;
      plans.push_back(plan_layer(layer, store, store.compressed() + at, chunk));
      for (std::size_t h = 0; h < plans[0].importance.size(); ++h) {
        plans[0].importance[h] = score.data() + h * size(outgrown) + size(at);
      }
      solve_pools(plans, config_.pool == Pool::head ? Pool::head : Pool::layer, false);
      for (std::size_t h = 0; h < plans[0].importance.size(); ++h) {
        std::copy_n(plans[0].odds.begin() + static_cast<std::ptrdiff_t>(h * size(chunk)), chunk,
                    whole[0].odds.begin() +
                        static_cast<std::ptrdiff_t>(h * size(whole[0].count) + size(at)));
      }
    }
    run_compression(sequence, whole, {});
  }

  // ---- Step

  // The device's slots of the rows; written only when the batch is not the last one, so that the
  // layers of a step share them.
  const std::int32_t* write_slots(const AttendBatch& batch, std::size_t layer,
                                  unsigned long long capture, bool& out_score_window) {
    slots_now_.clear();
    for (const SequenceId id : batch.sequences) {
      if (id == kNoSequence) {
        slots_now_.push_back(-1);
        continue;
      }
      const Sequence& sequence = find(id);
      slots_now_.push_back(static_cast<std::int32_t>(sequence.slot));
      if (sequence.compressed_before[layer] && config_.chunk_tokens) out_score_window = true;
    }
    // A graph may be replayed between any two steps, and any number of times. So captured steps
    // have an array of their own, written once in each capture, and the other stays what it was.
    Slots& slots = capture == 0 ? slots_ : captured_slots_;
    if (capture != 0 && capture != capture_) {
      slots.written.clear();
      capture_ = capture;
    }
    if (slots_now_ != slots.written) {
      slots.written.clear();
      VERKV_CUDA_CHECK(launch_write_slots(slots_now_.data(), static_cast<int>(slots_now_.size()),
                                          slots.device.data(), stream_));
      slots.written = slots_now_;
    }
    return slots.device.data();
  }

  const CacheConfig config_;
  const CudaOptions options_;
  const Stream stream_;
  std::string description_;
  std::vector<Layer> layers_;  // stores point into it: never resized
  std::unordered_map<std::int64_t, std::unique_ptr<Sequence>> sequences_;
  std::vector<std::int64_t> free_slots_;
  std::int64_t next_slot_ = 0;
  std::int64_t slot_capacity_ = 0;

  std::int64_t rows_ = 0;
  DeviceBuffer<std::byte> workspace_;
  std::vector<std::int32_t> slots_now_;
  Slots slots_;
  Slots captured_slots_;
  unsigned long long capture_ = 0;  // the one in which captured_slots_ was written last
  std::uint64_t graph_generation_ = 0;
  DeviceBuffer<QueryHeadReport> query_reports_;
  DeviceBuffer<KvHeadReport> kv_reports_;
  DeviceBuffer<LayerStatistics> counters_;
  DeviceBuffer<BadNumber> bad_;
  // Copies of host views.
  DeviceBuffer<std::byte> query_staging_;
  DeviceBuffer<float> output_staging_;
  DeviceBuffer<float> lse_staging_;
  DeviceBuffer<std::byte> row_staging_;
  std::vector<std::byte> packed_;
  std::vector<std::byte> row_packed_;
};

}  // namespace
}  // namespace verkv::cuda

namespace verkv {

int cuda_device_count() noexcept {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  cuda::take_back(status);
  return status == cudaSuccess ? count : 0;
}

std::vector<std::string> cuda_unsupported_reasons(const CacheConfig& config) {
  std::vector<std::string> reasons = unsupported_reasons(config);
  if (config.study.order == FetchOrder::exact) {
    reasons.emplace_back("the exact order of fetches; a device orders by worth");
  }
  return reasons;
}

std::unique_ptr<KvCacheManager> make_cuda_cache(CacheConfig config, const CudaOptions& options) {
  std::string text;
  for (const std::string& reason : cuda_unsupported_reasons(config)) {
    text += (text.empty() ? "" : "; ") + reason;
  }
  if (!text.empty()) throw InvalidArgument(text);
  const int devices = cuda_device_count();
  if (options.device < 0 || options.device >= devices) {
    throw InvalidArgument("CUDA device " + std::to_string(options.device) + "; there are " +
                          std::to_string(devices));
  }
  if (options.rows < 0) {
    throw InvalidArgument("CudaOptions::rows is " + std::to_string(options.rows) +
                          "; it cannot be negative");
  }
  const cuda::CurrentDevice current(options.device);
  auto backend = std::make_unique<cuda::CudaBackend>(config, options);
  return std::make_unique<KvCacheManager>(std::move(config), std::move(backend));
}

}  // namespace verkv
