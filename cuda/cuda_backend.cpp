#include "cuda_backend.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <new>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "compression.hpp"
#include "head_tables.hpp"
#include "layer.hpp"
#include "manager_access.hpp"
#include "number_check.hpp"
#include "number_checks.hpp"
#include "sizes.hpp"
#include "staging.hpp"
#include "step.hpp"
#include "step_buffers.hpp"
#include "store.hpp"
#include "stream.hpp"
#include "tuning.hpp"

namespace verkv::cuda {
namespace {

struct Sequence {
  std::int64_t slot = 0;
  std::uint64_t draw = 0;
  // Null where the layer is not cached.
  std::vector<std::unique_ptr<LayerStore>> layers;
  // Per layer; only then does decode compress by itself.
  std::vector<bool> compressed_before;
};

LayerLengths lengths_of(const LayerStore& store) { return {store.tokens(), store.compressed()}; }

// Throws InvalidArgument if the device cannot serve the layers. Returns its name.
std::string check_device(int device, const std::vector<Layer>& layers) {
  cudaDeviceProp properties{};
  VERKV_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  std::string name = std::string("cuda (") + properties.name + ", compute capability " +
                     std::to_string(properties.major) + "." + std::to_string(properties.minor) +
                     ")";
  if (properties.major < 8 || properties.canMapHostMemory == 0) {
    throw InvalidArgument(name + ": compute capability 8.0 and mapped host memory are needed");
  }
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (!layers[i].config.cached) continue;
    const std::size_t shared = size(step_shared_bytes(layers[i].view));
    if (shared <= properties.sharedMemPerBlockOptin) continue;
    throw InvalidArgument("layer " + std::to_string(i) + ": " + std::to_string(shared) +
                          " bytes of shared memory are needed for its head sizes and group; " +
                          name + " has " + std::to_string(properties.sharedMemPerBlockOptin));
  }
  return name;
}

class CudaBackend final : public Backend {
 public:
  CudaBackend(const CacheConfig& config, const CudaOptions& options)
      : config_(config),
        options_(options),
        compressor_(config),
        layers_(describe_layers(config)),
        device_name_(check_device(options.device, layers_)),
        stream_(options.stream),
        tables_(layers_),
        buffers_(layers_, options.views == MemorySpace::host),
        counters_(static_cast<std::int64_t>(layers_.size()), "statistics"),
        numbers_(stream_) {
    stream_.clear(counters_);
    stream_.synchronize();
  }

  ~CudaBackend() override {
    // What is under way may use memory that goes now.
    cudaStreamSynchronize(stream_);
    sequences_.clear();
  }

  std::uint64_t graph_generation() const { return tables_.generation() + buffers_.generation(); }

  std::string description() const override { return device_name_ + "; host tier: " + host_tier(); }

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
    sequence->slot = tables_.find_free(stream_);
    buffers_.reserve_rows(
        std::max(options_.rows.value_or(0), static_cast<std::int64_t>(sequences_.size()) + 1),
        stream_);
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      if (sequence->layers[i]) sequence->layers[i]->write_table(entries(i, *sequence), stream_);
    }
    const std::int64_t slot = sequence->slot;
    sequences_.emplace(id.value, std::move(sequence));
    tables_.take(slot);
  }

  void release(SequenceId id) noexcept override {
    const auto found = sequences_.find(id.value);
    try {
      const CurrentDevice current(options_.device);
      cudaStreamSynchronize(stream_);
      tables_.give_back(found->second->slot);
      sequences_.erase(found);
    } catch (const Error&) {
      // The device is gone; freeing on it fails quietly.
      sequences_.erase(found);
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
    if (keys.tokens == 0) return;
    const bool compresses = sequence.compressed_before[layer] &&
                            compressor_.outgrown(layer, lengths_of(store), keys.tokens) > 0;
    // Before anything changes, since this call will wait for the device anyway.
    if (compresses && options_.views == MemorySpace::device) check_numbers();
    store.reserve_append(keys.tokens, entries(layer, sequence), stream_);
    buffers_.reserve_lengths(layer, store.compressed(), store.most_residents() + keys.tokens,
                             stream_);
    AppendArguments arguments;
    arguments.bad = numbers_.device();
    arguments.sequence = id.value;
    arguments.layer_index = layer_index;
    append_rows(store, arguments, keys, values, entries(layer, sequence));
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
    Sequence& sequence = find(id);
    std::vector<LayerLengths> lengths;
    for (const auto& store : sequence.layers)
      lengths.push_back(store ? lengths_of(*store) : LayerLengths{});
    std::vector<std::vector<float>> copies(importance.size());
    const std::vector<ImportanceView> scores = host_importance(lengths, importance, copies);
    std::vector<HeadCompression> heads = compressor_.prompt(sequence.draw, lengths, scores);
    if (config_.keep >= 1) return;  // the budget covers every token: all stay resident and exact
    apply(sequence, heads, prompt_queries);
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
      if (!compressor_.compresses(layer)) continue;
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
      std::vector<LayerStore::Places> drawn;
      for (std::size_t h = 0; h < store->views().size(); ++h) {
        const std::int64_t head = static_cast<std::int64_t>(h);
        drawn.push_back(draw_places(compressor_.draw_id(draw, layer, h), config_.study.select,
                                    store->odds(head, stream_), 0, store->order(head)));
      }
      changes.emplace_back(layer, store->redraw(drawn, spare(), entries(layer, sequence), stream_));
      buffers_.reserve_lengths(layer, store->compressed(), changes.back().second.most_residents,
                               stream_);
    }
    for (auto& [layer, change] : changes) {
      sequence.layers[layer]->take(std::move(change), entries(layer, sequence), stream_);
    }
    sequence.draw = draw;
  }

  void attend(std::int64_t layer_index, const AttendBatch& batch) override {
    const std::int64_t rows = static_cast<std::int64_t>(batch.sequences.size());
    if (rows == 0) return;
    const bool staged = options_.views == MemorySpace::host;
    if (staged) check_queries(batch);
    const CurrentDevice current(options_.device);
    const std::size_t index = size(layer_index);
    const Layer& layer = layers_[index];
    const unsigned long long capture = stream_.capture();
    if (rows > buffers_.rows() && capture != 0) {
      throw CapacityError("a captured batch of " + std::to_string(rows) +
                          " rows, but there is room for " + std::to_string(buffers_.rows()) +
                          " (CudaOptions::rows)");
    }
    // Padding rows may make the batch larger than the number of sequences; only then is there
    // something to grow.
    buffers_.reserve_rows(rows, stream_);
    StepView step;
    step.layer = layer.view;
    step.heads = tables_.table(index);
    step.score_window = fill_slots(batch, index);
    step.slots = buffers_.write_slots(capture, stream_);
    step.rows = static_cast<int>(rows);
    step.query_type = batch.queries.type;
    step.counters = counters_.data() + index;
    buffers_.fill(step, index);
    if (staged) {
      buffers_.stage_in(step, batch.queries, stream_);
    } else {
      step.queries = batch.queries.data;
      step.query_row_stride = batch.queries.token_stride;
      step.query_head_stride = batch.queries.head_stride;
      step.bad = numbers_.device();
      step.layer_index = layer_index;
      step.output = batch.output.data();
      step.lse = batch.lse.empty() ? nullptr : batch.lse.data();
    }
    VERKV_CUDA_CHECK(launch_step(step, stream_));
    if (staged) buffers_.stage_out(batch.output, batch.lse, stream_);
    buffers_.copy_reports(batch.query_reports, batch.kv_reports, stream_);
    if (staged || !batch.query_reports.empty() || !batch.kv_reports.empty()) stream_.synchronize();
  }

  LayerStatistics statistics(std::int64_t layer) const override {
    const CurrentDevice current(options_.device);
    check_numbers();
    LayerStatistics result;
    stream_.copy_out(&result, counters_.data() + layer, 1);
    stream_.synchronize();
    return result;
  }

  void reset_statistics() override {
    const CurrentDevice current(options_.device);
    stream_.clear(counters_);
  }

  MemoryReport memory(SequenceId id, std::int64_t layer) const noexcept override {
    MemoryReport report;
    find(id).layers[size(layer)]->add_memory(report);
    return report;
  }

  std::int64_t workspace_bytes() const override {
    return tables_.bytes() + buffers_.bytes() + rows_.bytes() + counters_.bytes() +
           numbers_.bytes();
  }

 private:
  Sequence& find(SequenceId id) { return *sequences_.find(id.value)->second; }
  const Sequence& find(SequenceId id) const { return *sequences_.find(id.value)->second; }

  HeadView* entries(std::size_t layer, const Sequence& sequence) const {
    return tables_.entries(layer, sequence.slot);
  }

  std::int64_t spare() const {
    return std::clamp(config_.chunk_tokens.value_or(0), kLeastSpare, kMostSpare);
  }

  // Throws what the checks of appended numbers and of queries have found so far. Waits for the
  // stream.
  void check_numbers() const { numbers_.raise(config_.storage, stream_); }

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

  // ---- Append

  // There is room. With host views it waits for the stream and throws on a bad number.
  void append_rows(LayerStore& store, AppendArguments arguments, const TensorView& keys,
                   const TensorView& values, HeadView* table) {
    if (options_.views == MemorySpace::device) {
      arguments.keys = keys;
      arguments.values = values;
      store.append_rows(arguments, 0, true, table, stream_);
      store.add_tokens(keys.tokens);
      return;
    }
    rows_.each_piece(
        keys, values, stream_,
        [&](const TensorView& key_piece, const TensorView& value_piece, std::int64_t first) {
          arguments.keys = key_piece;
          arguments.values = value_piece;
          arguments.token_offset = first;
          store.append_rows(arguments, first, false, table, stream_);
        });
    // Until the table is rewritten the new rows lie beyond the end, so a bad number has changed
    // nothing.
    check_numbers();
    store.add_tokens(keys.tokens);
    store.write_table(table, stream_);
  }

  // ---- Compression

  // The scores as the host can read them; `copies` keeps what had to be copied.
  std::vector<ImportanceView> host_importance(std::span<const LayerLengths> lengths,
                                              std::span<const ImportanceView> importance,
                                              std::vector<std::vector<float>>& copies) const {
    std::vector<ImportanceView> views(importance.begin(), importance.end());
    if (options_.views == MemorySpace::host) return views;
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
      if (!compressor_.compresses(layer)) continue;
      if (lengths[layer].tokens == lengths[layer].compressed) continue;  // its view may be null
      views[layer] = host_copy(views[layer], stream_, copies[layer]);
    }
    stream_.synchronize();
    return views;
  }

  // The queries as the host can read them, of the layers that make a basis of them now.
  std::vector<TensorView> host_queries(std::span<const HeadCompression> heads,
                                       std::span<const TensorView> queries,
                                       std::vector<std::vector<std::byte>>& copies) const {
    std::vector<TensorView> views(queries.begin(), queries.end());
    if (options_.views == MemorySpace::host || views.empty()) return views;
    for (const HeadCompression& head : heads) {
      TensorView& view = views[head.layer];
      if (head.head != 0 || view.tokens == 0 || !compressor_.needs_basis(head)) continue;
      view = host_copy(view, stream_, copies[head.layer]);
    }
    return views;
  }

  // heads: those of whole layers, in order. Fails only before the first layer has changed. Waits
  // for the stream.
  void apply(Sequence& sequence, std::span<HeadCompression> heads,
             std::span<const TensorView> prompt_queries) {
    std::vector<std::vector<std::byte>> copies(prompt_queries.size());
    const std::vector<TensorView> queries = host_queries(heads, prompt_queries, copies);
    // Bases and orders are made of those and of the host tier's rows, which must have been written.
    stream_.synchronize();
    compressor_.complete(
        heads,
        [&](const HeadCompression& head) {
          const LayerStore& store = *sequence.layers[head.layer];
          const std::int64_t h = static_cast<std::int64_t>(head.head);
          return HeadRows{store.host_keys(h), store.host_values(h), &store.directions(h),
                          store.positions(h), store.open_odds(h)};
        },
        queries,
        [](std::int64_t count, const Compressor::Task& task) {
          for (std::int64_t i = 0; i < count; ++i) task(i);
        });
    std::vector<std::pair<std::size_t, LayerStore::Change>> changes;
    for (std::size_t at = 0; at < heads.size();) {
      const std::size_t layer = heads[at].layer;
      const std::span<HeadCompression> part =
          heads.subspan(at, size(layers_[layer].config.kv_heads));
      changes.emplace_back(
          layer, sequence.layers[layer]->compress(part, spare(), !sequence.compressed_before[layer],
                                                  entries(layer, sequence), stream_));
      buffers_.reserve_lengths(layer, part.front().end(), changes.back().second.most_residents,
                               stream_);
      at += part.size();
    }
    for (auto& [layer, change] : changes) {
      sequence.layers[layer]->take(std::move(change), entries(layer, sequence), stream_);
      tighten_lengths(layer);
    }
  }

  void tighten_lengths(std::size_t layer) {
    std::int64_t compressed = 0;
    std::int64_t residents = 0;
    for (const auto& [id, sequence] : sequences_) {
      const LayerStore& store = *sequence->layers[layer];
      compressed = std::max(compressed, store.compressed());
      residents = std::max(residents, store.most_residents());
    }
    buffers_.tighten_lengths(layer, compressed, residents);
  }

  // Decode: the oldest chunks of a local window that has outgrown its size; there is such a chunk.
  // Waits for the stream.
  void compress_outgrown_window(Sequence& sequence, std::size_t layer) {
    const LayerStore& store = *sequence.layers[layer];
    const LayerLengths lengths = lengths_of(store);
    const std::vector<float> score =
        store.window_scores(compressor_.outgrown(layer, lengths), stream_);
    std::vector<HeadCompression> heads = compressor_.window(sequence.draw, layer, lengths, score);
    apply(sequence, heads, {});
  }

  // ---- Step

  // The slots of the batch's rows. Whether the step adds to the scores of local windows.
  bool fill_slots(const AttendBatch& batch, std::size_t layer) {
    std::vector<std::int32_t>& slots = buffers_.slots();
    slots.clear();
    bool scores_window = false;
    for (const SequenceId id : batch.sequences) {
      if (id == kNoSequence) {
        slots.push_back(-1);
        continue;
      }
      const Sequence& sequence = find(id);
      slots.push_back(static_cast<std::int32_t>(sequence.slot));
      if (sequence.compressed_before[layer] && config_.chunk_tokens) scores_window = true;
    }
    return scores_window;
  }

  const CacheConfig config_;
  const CudaOptions options_;
  const Compressor compressor_;
  const std::vector<Layer> layers_;  // stores, tables and buffers point into it
  const std::string device_name_;
  const Stream stream_;
  HeadTables tables_;
  StepBuffers buffers_;
  RowStaging rows_;
  DeviceBuffer<LayerStatistics> counters_;
  NumberCheck numbers_;
  std::unordered_map<std::int64_t, std::unique_ptr<Sequence>> sequences_;
};

}  // namespace

std::uint64_t graph_generation(const Backend& backend) {
  const auto* own = dynamic_cast<const CudaBackend*>(&backend);
  if (own == nullptr)
    throw InvalidArgument("the cache computes elsewhere: " + backend.description());
  return own->graph_generation();
}

std::unique_ptr<Backend> make_backend(const CacheConfig& config, const CudaOptions& options) {
  return std::make_unique<CudaBackend>(config, options);
}

}  // namespace verkv::cuda
