// Long because every call of a backend is here; what they do is in other files.
#include "cuda_backend.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <new>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "compression.hpp"
#include "device_check.hpp"
#include "head_tables.hpp"
#include "host_copies.hpp"
#include "invalid.hpp"
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

[[noreturn]] void not_served(const char* call) {
  invalid(ErrorCode::wrong_backend, "the CUDA backend does not serve {}; the CPU backend does",
          call);
}

struct Sequence {
  std::int64_t slot = 0;
  std::uint64_t draw = 0;
  // Null where the layer is not cached.
  std::vector<std::unique_ptr<LayerStore>> layers;
  // Per layer; only then does decode compress by itself.
  std::vector<bool> compressed_before;
  std::optional<PendingCompression> pending;
};

LayerLengths lengths_of(const LayerStore& store) { return {store.tokens(), store.compressed()}; }

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
        buffers_(layers_, options.views == MemorySpace::host, stream_),
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
    auto sequence = make_sequence(draw);
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      if (!layers_[i].config.cached) continue;
      sequence->layers[i] = std::make_unique<LayerStore>(layers_[i].view, options_.require_pinned);
      sequence->layers[i]->write_table(entries(i, *sequence), stream_);
    }
    take(id, std::move(sequence));
  }

  // Copies everything: rows, sketch and host tier. Waits for the stream.
  void fork(SequenceId from, SequenceId to) override {
    const CurrentDevice current(options_.device);
    check_numbers();
    const Sequence& parent = find(from);
    auto sequence = make_sequence(parent.draw);
    sequence->compressed_before = parent.compressed_before;
    if (parent.pending) sequence->pending.emplace(parent.pending->fork());
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      const LayerStore* store = parent.layers[i].get();
      if (store != nullptr) sequence->layers[i] = store->copy(entries(i, *sequence), stream_);
    }
    take(to, std::move(sequence));
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

  bool scores_window(SequenceId id, std::int64_t layer) const override {
    return config_.chunk_tokens && find(id).compressed_before[size(layer)];
  }

  void reserve(std::span<const Growth> growths, Totals& totals) override {
    const CurrentDevice current(options_.device);
    reserve_growths(growths, totals);
  }

  void append(std::int64_t layer_index, std::span<const AppendPart> parts,
              Totals& totals) override {
    const CurrentDevice current(options_.device);
    std::vector<Growth> growths;
    for (const AppendPart& part : parts) {
      if (!part.reserved) growths.push_back({part.sequence, layer_index, part.keys.tokens});
      // Before anything changes, room too. What the device finds of device views it tells later.
      if (options_.views == MemorySpace::device) continue;
      check_stored("keys", part.keys, config_.storage, part.row);
      check_stored("values", part.values, config_.storage, part.row);
    }
    std::vector<std::unique_ptr<Booking>> bookings;
    for (const AppendPart& part : parts)
      bookings.push_back(std::make_unique<Booking>(&totals, part.sequence, layer_index));
    reserve_growths(growths, totals);
    // Where tokens went that were there before a reservation, there is no room for what the queries of
    // others in their place give.
    for (const AppendPart& part : parts) {
      Sequence& sequence = find(part.sequence);
      LayerStore& store = *sequence.layers[size(layer_index)];
      const bool scores = scores_window(part.sequence, layer_index);
      if (!part.reserved || store.has_room(part.keys.tokens, scores)) continue;
      HeadView* table = entries(size(layer_index), sequence);
      store.settle(table, stream_);
      store.reserve_append(std::max(store.spare(), part.keys.tokens), scores, table, stream_);
    }
    for (const AppendPart& part : parts) append_rows(layer_index, part);
  }

  bool shorten(SequenceId, std::span<const std::int64_t>, std::int64_t) override { return false; }

  void truncate(SequenceId id, std::int64_t layer, std::int64_t tokens) override {
    const CurrentDevice current(options_.device);
    Sequence& sequence = find(id);
    sequence.layers[size(layer)]->truncate(tokens, entries(size(layer), sequence), stream_);
  }

  void compress(SequenceId id, std::span<const ImportanceView> importance,
                std::span<const TensorView> prompt_queries, Totals& totals) override {
    const CurrentDevice current(options_.device);
    check_numbers();
    Sequence& sequence = find(id);
    const Prompt prompt = heads_of_prompt(sequence, importance, prompt_queries);
    if (config_.keep >= 1) return;  // the budget covers every token: all stay resident and exact
    std::vector<HeadCompression> heads = prompt.heads;
    std::vector<Prepared> prepared;
    prepare(sequence, heads, prompt.queries, totals, prepared);
    commit(prepared);
    mark_compressed(sequence);
  }

  void begin_compress(SequenceId id, std::span<const ImportanceView> importance,
                      std::span<const TensorView> prompt_queries) override {
    const CurrentDevice current(options_.device);
    check_numbers();
    Sequence& sequence = find(id);
    Prompt prompt = heads_of_prompt(sequence, importance, prompt_queries);
    if (config_.keep >= 1) return;
    if (!prompt.heads.empty()) {
      stream_.synchronize();
      sequence.pending.emplace(compressor_, std::move(prompt.heads), prompt.queries);
    }
    mark_compressed(sequence);
  }

  // A whole layer, since all its heads change hands together.
  std::int64_t continue_compress(SequenceId id, std::int64_t, Totals& totals) override {
    const CurrentDevice current(options_.device);
    check_numbers();
    Sequence& sequence = find(id);
    PendingCompression& pending = *sequence.pending;
    const std::size_t layer = pending.layer();
    LayerStore& store = *sequence.layers[layer];
    HeadView* table = entries(layer, sequence);
    store.settle(table, stream_);
    // Queries of the tokens to come score from now on.
    if (store.spare() > 0)
      store.reserve_append(store.spare(), config_.chunk_tokens.has_value(), table, stream_);
    std::vector<HeadCompression> heads = pending.next(pending.left_of_layer());
    const std::int64_t done = pending.left_of_layer();
    std::vector<Prepared> prepared;
    prepare(sequence, heads, pending.queries(), totals, prepared);
    commit(prepared);
    sequence.compressed_before[layer] = true;
    pending.take(std::move(heads));
    if (pending.finish_layer()) sequence.pending.reset();
    return done;
  }

  void cancel_compress(SequenceId id) noexcept override { find(id).pending.reset(); }

  const PendingCompression* pending(SequenceId id) const override {
    const Sequence& sequence = find(id);
    return sequence.pending ? &*sequence.pending : nullptr;
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

  void prepare_attend(const AttendBatch& batch) override {
    if (options_.views == MemorySpace::host) verkv::check_queries(batch);
  }

  void attend(std::int64_t layer_index, const AttendBatch& batch) override {
    const std::int64_t rows = static_cast<std::int64_t>(batch.sequences.size());
    if (rows == 0) return;
    const bool staged = options_.views == MemorySpace::host;
    const CurrentDevice current(options_.device);
    const unsigned long long capture = stream_.capture();
    if (options_.views == MemorySpace::host) {
      verkv::check_queries(batch);
    } else if (!batch.row_status.empty()) {
      if (capture != 0) throw InvalidArgument("a captured step cannot tell the status of rows");
      check_device_queries(batch, stream_);
    }
    const std::size_t index = size(layer_index);
    const Layer& layer = layers_[index];
    if (rows > buffers_.rows() && capture != 0) {
      throw CapacityError("a captured batch of " + std::to_string(rows) +
                              " rows, but there is room for " + std::to_string(buffers_.rows()) +
                              " (CudaOptions::rows)",
                          ErrorCode::row_limit, {.layer = layer_index});
    }
    // Padding rows may make the batch larger than the number of sequences; only then is there
    // something to grow.
    buffers_.reserve_rows(rows, stream_);
    StepView step;
    step.layer = layer.view;
    step.heads = tables_.table(index);
    fill_rows(batch);
    step.batch = buffers_.write_batch(capture, stream_);
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

  void read(SequenceId, std::int64_t, std::int64_t, std::int64_t, std::byte*,
            std::byte*) const override {
    not_served("read");
  }
  void move(SequenceId, std::int64_t, std::int64_t, const TensorView&, const TensorView&) override {
    not_served("move");
  }
  std::int64_t changed_row(SequenceId, std::int64_t) const override { not_served("changed_row"); }
  bool takes_lists() const override { return false; }
  void require_saving() const override { not_served("save and restore"); }
  void save(SequenceId, SavedWriter&) const override { require_saving(); }
  void restore(SequenceId, SavedReader&) override { require_saving(); }

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
    const Sequence& sequence = find(id);
    sequence.layers[size(layer)]->add_memory(report);
    if (sequence.pending) report.basis_bytes += sequence.pending->bytes(size(layer), false);
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

  // Without stores, with a slot that is free until it is taken, and room for steps with it.
  std::unique_ptr<Sequence> make_sequence(std::uint64_t draw) {
    auto sequence = std::make_unique<Sequence>();
    sequence->draw = draw;
    sequence->layers.resize(layers_.size());
    sequence->compressed_before.resize(layers_.size(), false);
    sequence->slot = tables_.find_free(stream_);
    const std::int64_t rows = static_cast<std::int64_t>(sequences_.size()) + 1;
    buffers_.reserve_rows(std::max(options_.rows.value_or(0), rows), stream_);
    return sequence;
  }

  void take(SequenceId id, std::unique_ptr<Sequence> sequence) {
    const std::int64_t slot = sequence->slot;
    sequences_.emplace(id.value, std::move(sequence));
    tables_.take(slot);
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

  // There is room. With host views it waits for the stream.
  void append_rows(std::int64_t layer_index, const AppendPart& part) {
    Sequence& sequence = find(part.sequence);
    LayerStore& store = *sequence.layers[size(layer_index)];
    HeadView* table = entries(size(layer_index), sequence);
    AppendArguments arguments;
    arguments.bad = numbers_.device();
    arguments.sequence = part.sequence.value;
    arguments.layer_index = layer_index;
    if (options_.views == MemorySpace::device) {
      arguments.keys = part.keys;
      arguments.values = part.values;
      store.append_rows(arguments, 0, true, table, stream_);
      store.add_tokens(part.keys.tokens);
      return;
    }
    rows_.each_piece(
        part.keys, part.values, stream_,
        [&](const TensorView& key_piece, const TensorView& value_piece, std::int64_t first) {
          arguments.keys = key_piece;
          arguments.values = value_piece;
          arguments.token_offset = first;
          store.append_rows(arguments, first, false, table, stream_);
        });
    store.settle(table, stream_);
    store.add_tokens(part.keys.tokens);
    store.write_table(table, stream_);
  }

  // Tokens of the local window that leave it before a layer grows.
  std::int64_t outgrown(const Growth& growth) const {
    const std::size_t layer = size(growth.layer);
    const Sequence& sequence = find(growth.sequence);
    if (!sequence.compressed_before[layer] || is_pending(sequence, layer)) return 0;
    return compressor_.outgrown(layer, lengths_of(*sequence.layers[layer]));
  }

  // Waits for the stream where blocks grow or something is compressed.
  void reserve_growths(std::span<const Growth> growths, const Totals& totals) {
    const auto goes = [this](const Growth& growth) { return outgrown(growth) > 0; };
    // Before anything changes, since this call will wait for the device anyway.
    if (options_.views == MemorySpace::device && std::any_of(growths.begin(), growths.end(), goes))
      check_numbers();
    TierBytes more;
    for (const Growth& growth : growths) {
      more.add(find(growth.sequence)
                   .layers[size(growth.layer)]
                   ->bytes_to_append(growth.tokens, scores_window(growth.sequence, growth.layer)));
    }
    if (more.host > 0 || more.fast > 0) totals.allow(more);
    std::vector<Prepared> prepared;
    for (const Growth& growth : growths) {
      const std::size_t layer = size(growth.layer);
      const LayerConfig& c = layers_[layer].config;
      Sequence& sequence = find(growth.sequence);
      LayerStore& store = *sequence.layers[layer];
      HeadView* table = entries(layer, sequence);
      store.settle(table, stream_);
      const bool scores = scores_window(growth.sequence, growth.layer);
      store.reserve_append(growth.tokens, scores, table, stream_);
      buffers_.reserve_lengths(layer, store.compressed(), store.most_residents() + growth.tokens,
                               stream_);
      if (options_.views == MemorySpace::host)
        rows_.reserve(growth.tokens, c.kv_heads * c.key_dim, c.kv_heads * c.value_dim, stream_);
      if (!goes(growth)) continue;
      const LayerLengths lengths = lengths_of(store);
      const std::vector<float> score = store.window_scores(outgrown(growth), stream_);
      std::vector<HeadCompression> heads = compressor_.window(sequence.draw, layer, lengths, score);
      prepare(sequence, heads, {}, totals, prepared);
    }
    commit(prepared);
  }

  // ---- Compression

  // A compression of a layer that only has to be put in force.
  struct Prepared {
    Sequence* sequence;
    std::size_t layer;
    LayerStore::Change change;
  };

  // The heads of a prompt, and what they refer to, in the host's memory.
  struct Prompt {
    std::vector<HeadCompression> heads;
    std::vector<TensorView> queries;
    std::vector<std::vector<float>> scores;
    std::vector<std::vector<std::byte>> query_rows;
  };

  // Takes in what queries have given. The copies of queries have come once the stream is done.
  Prompt heads_of_prompt(const Sequence& sequence, std::span<const ImportanceView> importance,
                         std::span<const TensorView> prompt_queries) {
    std::vector<LayerLengths> lengths;
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
      const auto& store = sequence.layers[layer];
      lengths.push_back(store ? lengths_of(*store) : LayerLengths{});
      if (store) store->settle(entries(layer, sequence), stream_);
    }
    Prompt result;
    result.scores.resize(importance.size());
    result.query_rows.resize(prompt_queries.size());
    const bool on_host = options_.views == MemorySpace::host;
    const std::vector<ImportanceView> scores =
        on_host ? std::vector<ImportanceView>(importance.begin(), importance.end())
                : host_importance(compressor_, lengths, importance, stream_, result.scores);
    result.heads = compressor_.prompt(sequence.draw, lengths, scores);
    result.queries = on_host ? std::vector<TensorView>(prompt_queries.begin(), prompt_queries.end())
                             : host_queries(compressor_, result.heads, prompt_queries, stream_,
                                            result.query_rows);
    return result;
  }

  // The layers that have been compressed, or had too little for it, are from now on by chunks.
  void mark_compressed(Sequence& sequence) const {
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
      if (compressor_.compresses(layer) && !is_pending(sequence, layer))
        sequence.compressed_before[layer] = true;
    }
  }

  static bool is_pending(const Sequence& sequence, std::size_t layer) {
    return sequence.pending && sequence.pending->covers(layer);
  }

  // Adds the compressions of `heads`, those of whole layers in order. What queries have given must
  // have been taken in. Changes nothing that shows. Waits for the stream.
  void prepare(Sequence& sequence, std::span<HeadCompression> heads,
               std::span<const TensorView> queries, const Totals& totals,
               std::vector<Prepared>& out) {
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
    std::int64_t added = 0;
    for (const HeadCompression& head : heads) {
      added += added_fast_bytes(config_, head,
                                compressor_.needs_basis(head)
                                    ? head.basis.shape
                                    : sequence.layers[head.layer]->codes(head.head));
    }
    if (added > 0) totals.allow({0, added});
    for (std::size_t at = 0; at < heads.size();) {
      const std::size_t layer = heads[at].layer;
      const std::span<HeadCompression> part =
          heads.subspan(at, size(layers_[layer].config.kv_heads));
      LayerStore& store = *sequence.layers[layer];
      out.push_back(
          {&sequence, layer, store.compress(part, spare(), entries(layer, sequence), stream_)});
      buffers_.reserve_lengths(layer, part.front().end(),
                               out.back().change.most_residents + store.spare(), stream_);
      at += part.size();
    }
  }

  void commit(std::vector<Prepared>& prepared) {
    for (auto& [sequence, layer, change] : prepared) {
      sequence->layers[layer]->take(std::move(change), entries(layer, *sequence), stream_);
      tighten_lengths(layer);
    }
  }

  void tighten_lengths(std::size_t layer) {
    std::int64_t compressed = 0;
    std::int64_t residents = 0;
    for (const auto& [id, sequence] : sequences_) {
      const LayerStore& store = *sequence->layers[layer];
      compressed = std::max(compressed, store.compressed());
      residents = std::max(residents, store.most_residents() + store.spare());
    }
    buffers_.tighten_lengths(layer, compressed, residents);
  }

  // ---- Step

  void fill_rows(const AttendBatch& batch) {
    std::vector<StepRow>& rows = buffers_.batch();
    rows.clear();
    for (const SequenceId id : batch.sequences) {
      StepRow row;
      if (is_asked(batch, rows.size())) row.slot = static_cast<std::int32_t>(find(id).slot);
      rows.push_back(row);
    }
    for (std::size_t i = rows.size(); i > 1; --i) {
      if (batch.sequences[i - 2] == batch.sequences[i - 1]) rows[i - 2].back = rows[i - 1].back + 1;
    }
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
    throw InvalidArgument("the cache computes elsewhere: " + backend.description(),
                          ErrorCode::wrong_backend);
  return own->graph_generation();
}

std::unique_ptr<Backend> make_backend(const CacheConfig& config, const CudaOptions& options) {
  return std::make_unique<CudaBackend>(config, options);
}

}  // namespace verkv::cuda
