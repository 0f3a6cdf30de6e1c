// Long because every call of a backend is here; what they do is in other files.
//
// Both tiers in main memory. This backend is the specification: what the device backend computes is
// compared with it.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include <verkv/kv_cache_manager.hpp>
#include <verkv/sample.hpp>
#include <verkv/sketch_error.hpp>

#include "compression.hpp"
#include "cpu/compress_heads.hpp"
#include "cpu/head_store.hpp"
#include "cpu/kernels.hpp"
#include "cpu/sequence_bytes.hpp"
#include "cpu/step.hpp"
#include "cpu/workspace.hpp"
#include "fetch_rules.hpp"
#include "invalid.hpp"
#include "manager_access.hpp"
#include "number_checks.hpp"
#include "settings.hpp"
#include "thread_pool.hpp"

namespace verkv::cpu {
namespace {

// Rows that a thread answers at a time: what they share stays in its caches, and a burst is still
// shared between threads.
constexpr std::int64_t kSliceRows = 8;

struct Sequence {
  std::uint64_t draw = 0;
  LayerStores layers;                   // [layer][KV head]; none before the first tokens
  std::vector<bool> compressed_before;  // [layer]; only then does decode compress by itself
  std::optional<PendingCompression> pending;
};

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const CacheConfig& config)
      : config_(config),
        fast_(config.fast_allocator, true, config.fast_bytes_limit),
        host_(config.host_allocator, false, config.host_bytes_limit),
        compressor_(config),
        kernels_(config.study.vector_code ? vector_kernels() : scalar_kernels()),
        pool_(config.executor ? ThreadPool(config.threads.value_or(0), config.executor)
                              : ThreadPool(config.threads.value_or(0))),
        workspaces_(pool_.size(), fetch_rules(config), &fast_),
        statistics_(config.layers.size()) {
    if (config.host == HostTier::file) file_ = std::make_shared<HostFile>(config.host_directory);
    for (std::size_t i = 0; i < config.layers.size(); ++i) {
      LayerShape shape = layer_shape(config, i);
      shape.fast = &fast_;
      shape.host_memory = &host_;
      shape.file = file_;
      shapes_.push_back(std::move(shape));
      const LayerShape& added = shapes_.back();
      if (added.config.cached) {
        empty_.push_back(std::make_unique<HeadStore>(std::move(make_heads(added).front())));
      } else {
        empty_.push_back(nullptr);
      }
      if (added.config.cached) sizes_.cover(added, workspaces_.rules(), {});
    }
  }

  std::string description() const override {
    return fmt::format("cpu ({}, {} thread{})", kernels_.name, pool_.size(),
                       pool_.size() == 1 ? "" : "s");
  }

  void create(SequenceId id, std::uint64_t draw) override {
    reserve_rows_for_one_more();
    auto sequence = std::make_unique<Sequence>();
    sequence->draw = draw;
    sequence->layers.resize(shapes_.size());
    sequence->compressed_before.resize(shapes_.size(), false);
    sequences_.emplace(id.value, std::move(sequence));
  }

  void release(SequenceId id) noexcept override {
    const auto found = sequences_.find(id.value);
    const std::unique_ptr<Sequence> gone = std::move(found->second);
    sequences_.erase(found);
    if (sequences_.empty() || asks_for_half(*gone)) give_back();
  }

  void fork(SequenceId from, SequenceId to) override {
    reserve_rows_for_one_more();
    Sequence& parent = find(from);
    auto sequence = std::make_unique<Sequence>();
    sequence->draw = parent.draw;
    sequence->layers.resize(shapes_.size());
    sequence->compressed_before = parent.compressed_before;
    if (parent.pending) {
      sequence->pending.emplace(parent.pending->fork());
      // Its codes lie where both may write from now on.
      parent.pending->forget_prepared();
    }
    for (std::size_t layer = 0; layer < shapes_.size(); ++layer) {
      std::vector<HeadStore>& heads = sequence->layers[layer];
      heads = fork_heads(parent.layers[layer]);
      const bool scores = scores_window(from, static_cast<std::int64_t>(layer));
      for (std::size_t h = 0; h < heads.size(); ++h) {
        const std::int64_t spare = parent.layers[layer][h].spare();
        if (spare == 0) continue;
        heads[h].reserve_append(spare, scores);
        heads[h].keep_room();
      }
    }
    sequences_.emplace(to.value, std::move(sequence));
  }

  std::int64_t tokens(SequenceId id, std::int64_t layer) const override {
    return lengths_of(find(id).layers[static_cast<std::size_t>(layer)]).tokens;
  }

  std::int64_t compressed_tokens(SequenceId id, std::int64_t layer) const override {
    return lengths_of(find(id).layers[static_cast<std::size_t>(layer)]).compressed;
  }

  std::int64_t left_tokens(SequenceId id, std::int64_t layer) const override {
    const std::vector<HeadStore>& heads = find(id).layers[static_cast<std::size_t>(layer)];
    return heads.empty() ? 0 : heads.front().left();
  }

  bool scores_window(SequenceId id, std::int64_t layer) const override {
    return config_.chunk_tokens && find(id).compressed_before[static_cast<std::size_t>(layer)];
  }

  void reserve(std::span<const Growth> growths, Totals& totals) override {
    reserve(growths, nullptr, totals);
    for (const Growth& growth : growths) {
      for (HeadStore& head : find(growth.sequence).layers[static_cast<std::size_t>(growth.layer)])
        head.keep_room();
    }
  }

  void append(std::int64_t layer_index, std::span<const AppendPart> parts,
              Totals& totals) override {
    for (const AppendPart& part : parts) check_part(part, layer_index);
    // Allocates nothing where there is room already.
    std::vector<Growth> growths;
    for (const AppendPart& part : parts) {
      if (!part.reserved) growths.push_back({part.sequence, layer_index, part.keys.tokens});
    }
    const std::size_t layer = static_cast<std::size_t>(layer_index);
    // Room that has been reserved may be in a page that a fork has tokens in; and where tokens went
    // that were there before it was, there is none for what the queries of others in their place give.
    // First, since what follows may compress.
    for (const AppendPart& part : parts) {
      if (!part.reserved) continue;
      const Booking booking(&totals, part.sequence, layer_index);
      const bool scores = scores_window(part.sequence, layer_index);
      for (HeadStore& head : find(part.sequence).layers[layer]) {
        if (head.has_room(part.keys.tokens, scores)) continue;
        const std::int64_t room = std::max(head.spare(), part.keys.tokens);
        make_room(layer, {head.compressed(), head.drawn_residents(),
                          head.tokens() - head.compressed() + room});
        head.reserve_append(room, scores);
      }
    }
    if (!growths.empty()) reserve(growths, &totals, totals);
    if (file_) write_ahead(layer, parts);
    for (const AppendPart& part : parts) {
      const Booking booking(&totals, part.sequence, layer_index);
      const bool scores = scores_window(part.sequence, layer_index);
      std::vector<HeadStore>& heads = find(part.sequence).layers[layer];
      for (std::size_t h = 0; h < heads.size(); ++h) {
        heads[h].append(shapes_[layer], kernels_, part.keys, part.values,
                        static_cast<std::int64_t>(h), scores);
        // Of tokens that are taken back no room is kept for forks and compressions.
        if (!part.reserved) heads[h].end_room();
      }
    }
  }

  void move(SequenceId id, std::int64_t layer, std::int64_t first, const TensorView& keys,
            const TensorView& values) override {
    AppendPart part{id, keys, values};
    check_part(part, layer, first == 0 && keys.tokens == tokens(id, layer));
    for (HeadStore& head : find(id).layers[static_cast<std::size_t>(layer)])
      head.host().move(first, keys, values);
  }

  std::int64_t changed_row(SequenceId id, std::int64_t layer) const override {
    return first_changed_row(find(id).layers[static_cast<std::size_t>(layer)]);
  }

  bool shorten(SequenceId id, std::span<const std::int64_t> layers, std::int64_t tokens) override {
    Sequence& sequence = find(id);
    std::vector<std::vector<HeadStore>> shorter(layers.size());
    for (std::size_t i = 0; i < layers.size(); ++i) {
      const std::size_t layer = static_cast<std::size_t>(layers[i]);
      for (HeadStore& head : sequence.layers[layer])
        shorter[i].push_back(head.shortened(shapes_[layer], kernels_, tokens));
    }
    for (std::size_t i = 0; i < layers.size(); ++i) {
      std::vector<HeadStore>& heads = sequence.layers[static_cast<std::size_t>(layers[i])];
      heads = std::move(shorter[i]);
      // The rows that are left, now that the longer head no longer shares them, for the totals.
      for (HeadStore& head : heads) head.truncate(tokens);
    }
    return true;
  }

  void truncate(SequenceId id, std::int64_t layer, std::int64_t tokens) override {
    const std::size_t index = static_cast<std::size_t>(layer);
    for (HeadStore& head : find(id).layers[index]) head.truncate(tokens);
  }

  void compress(SequenceId id, std::span<const ImportanceView> importance,
                std::span<const TensorView> prompt_queries, Totals& totals) override {
    Sequence& sequence = find(id);
    std::vector<HeadCompression> heads = heads_of_prompt(sequence, importance);
    if (config_.keep >= 1) return;  // the budget covers every token: all stay resident and exact
    CompressHeads::Prepared prepared =
        compress_heads_.plan(sequence.layers, std::move(heads), prompt_queries, std::nullopt);
    WorkspaceSizes sizes = sizes_;
    const std::int64_t more = compress_heads_.bytes(prepared, workspaces_.rules(), sizes);
    totals.allow({0, more + workspaces_.bytes_to_reserve(workspaces_.count(), sizes)});
    make_room(sizes);
    compress_heads_.allocate(prepared);
    compress_heads_.commit(prepared);
    mark_compressed(sequence);
    give_back();
  }

  void begin_compress(SequenceId id, std::span<const ImportanceView> importance,
                      std::span<const TensorView> prompt_queries) override {
    Sequence& sequence = find(id);
    std::vector<HeadCompression> heads = heads_of_prompt(sequence, importance);
    if (config_.keep >= 1) return;
    if (!heads.empty()) sequence.pending.emplace(compressor_, std::move(heads), prompt_queries);
    mark_compressed(sequence);
  }

  std::int64_t continue_compress(SequenceId id, std::int64_t heads, Totals&) override {
    Sequence& sequence = find(id);
    PendingCompression& pending = *sequence.pending;
    const std::int64_t done = std::min(heads, pending.left_of_layer());
    compress_heads_.prepare_some(sequence.layers, pending, heads);
    if (pending.left_of_layer() > 0) return done;
    const std::size_t layer = pending.layer();
    compress_heads_.finish(sequence.layers, pending);
    sequence.compressed_before[layer] = true;
    if (!pending.finish_layer()) return done;
    sequence.pending.reset();
    give_back();
    return done;
  }

  void cancel_compress(SequenceId id) noexcept override { find(id).pending.reset(); }

  const PendingCompression* pending(SequenceId id) const override {
    const Sequence& sequence = find(id);
    return sequence.pending ? &*sequence.pending : nullptr;
  }

  void redraw(SequenceId id, std::uint64_t draw) override {
    Sequence& sequence = find(id);
    // All heads are drawn before one changes, so that running out of memory half-way leaves the old
    // draw whole.
    std::vector<Drawn> drawn;
    for (std::size_t layer = 0; layer < sequence.layers.size(); ++layer) {
      for (std::size_t h = 0; h < sequence.layers[layer].size(); ++h) {
        const HeadStore& store = sequence.layers[layer][h];
        drawn.push_back(store.redraw(
            shapes_[layer], draw_places(compressor_.draw_id(draw, layer, h), config_.study.select,
                                        store.all_odds(), 0, store.order())));
        make_room(layer, {store.compressed(), drawn.back().size(),
                          store.tokens() - store.compressed() + store.spare()});
      }
    }
    std::size_t next = 0;
    for (std::vector<HeadStore>& heads : sequence.layers) {
      for (HeadStore& head : heads) head.take(std::move(drawn[next++]));
    }
    sequence.draw = draw;
  }

  void prepare_attend(const AttendBatch& batch) override {
    check_queries(batch);
    const std::int64_t rows = static_cast<std::int64_t>(batch.sequences.size());
    // Only more rows than ever have something to grow.
    if (batch.query_reports.empty()) reserve(query_reports_, rows, &LayerConfig::query_heads);
    if (batch.kv_reports.empty()) reserve(kv_reports_, rows, &LayerConfig::kv_heads);
    cut_into_slices(batch);
    if (rows > rows_) {
      const std::int64_t tasks = static_cast<std::int64_t>(slices_.size()) * most_kv_heads();
      workspaces_.reserve(static_cast<int>(std::min<std::int64_t>(tasks, pool_.size())), sizes_);
    }
  }

  void attend(std::int64_t layer_index, const AttendBatch& batch) override {
    prepare_attend(batch);
    const std::size_t layer = static_cast<std::size_t>(layer_index);
    const LayerConfig& c = shapes_[layer].config;
    Answers answers;
    answers.query_reports =
        batch.query_reports.empty() ? std::span(query_reports_) : batch.query_reports;
    answers.kv_reports = batch.kv_reports.empty() ? std::span(kv_reports_) : batch.kv_reports;
    for (std::size_t row = 0; row < batch.sequences.size(); ++row) {
      if (is_asked(batch, row)) continue;
      for (std::int64_t head = 0; head < c.kv_heads; ++head) {
        answer_nothing(shapes_[layer], arguments_of(shapes_[layer], static_cast<std::int64_t>(row),
                                                    head, batch, answers));
      }
    }
    pool_.run(
        static_cast<std::int64_t>(slices_.size()) * c.kv_heads,
        [&](int worker, std::int64_t index) {
          const RowSlice& slice = slices_[static_cast<std::size_t>(index / c.kv_heads)];
          attend_slice(layer, index % c.kv_heads, slice, batch, answers, workspaces_.of(worker));
        },
        workspaces_.count());
    if (const int error = workspaces_.take_file_error(); error != 0) file_->refuse(error);
    count(layer, batch, answers);
  }

  void read(SequenceId id, std::int64_t layer, std::int64_t first, std::int64_t count,
            std::byte* keys, std::byte* values) const override {
    const std::size_t index = static_cast<std::size_t>(layer);
    read_tokens(shapes_[index], find(id).layers[index], first, count, keys, values);
  }

  void save(SequenceId id, SavedWriter& writer) const override {
    const Sequence& sequence = find(id);
    writer.put(sequence.draw);
    for (std::size_t layer = 0; layer < shapes_.size(); ++layer) {
      writer.put(std::uint8_t{sequence.compressed_before[layer]});
      writer.put(std::uint8_t{!sequence.layers[layer].empty()});
    }
    writer.end();
    for (std::size_t layer = 0; layer < shapes_.size(); ++layer) {
      for (const HeadStore& head : sequence.layers[layer]) head.save(shapes_[layer], writer);
    }
  }

  void restore(SequenceId id, SavedReader& reader) override {
    Sequence& sequence = find(id);
    reader.begin("sequence");
    sequence.draw = reader.get<std::uint64_t>();
    std::vector<std::uint8_t> flags(2 * shapes_.size());
    reader.get_all(std::span(flags));
    reader.end();
    for (std::size_t layer = 0; layer < shapes_.size(); ++layer) {
      const LayerShape& shape = shapes_[layer];
      const std::uint8_t before = flags[2 * layer];
      const std::uint8_t has_tokens = flags[2 * layer + 1];
      if (before > 1 || has_tokens > 1 || (has_tokens == 1 && !shape.config.cached) ||
          (before == 1 && !leaves_fast_tier(layer)))
        reader.refuse(fmt::format("layer {} holds what no such layer does", layer));
      sequence.compressed_before[layer] = before == 1;
      if (has_tokens == 1) restore(sequence, layer, reader);
    }
  }

  LayerStatistics statistics(std::int64_t layer) const override {
    return statistics_[static_cast<std::size_t>(layer)];
  }

  void reset_statistics() override {
    std::fill(statistics_.begin(), statistics_.end(), LayerStatistics{});
  }

  MemoryReport memory(SequenceId id, std::int64_t layer) const noexcept override {
    MemoryReport report = held(id, layer, false);
    report.shared_bytes = all_bytes(report) - all_bytes(held(id, layer, true));
    return report;
  }

  MemoryReport own_memory(SequenceId id, std::int64_t layer) const noexcept override {
    return held(id, layer, true);
  }

  std::int64_t file_bytes() const override { return file_ ? file_->size() : 0; }

  std::int64_t workspace_bytes() const override {
    return workspaces_.bytes() +
           static_cast<std::int64_t>(query_reports_.capacity() * sizeof(QueryHeadReport) +
                                     kv_reports_.capacity() * sizeof(KvHeadReport) +
                                     slices_.capacity() * sizeof(RowSlice));
  }

 private:
  MemoryReport held(SequenceId id, std::int64_t layer, bool exclusive) const noexcept {
    const std::vector<HeadStore>& heads = find(id).layers[static_cast<std::size_t>(layer)];
    MemoryReport report;
    report.reserved_bytes = static_cast<std::int64_t>(sizeof heads);
    for (const HeadStore& head : heads) head.add_memory(report, exclusive);
    if (const auto& pending = find(id).pending)
      report.basis_bytes += pending->bytes(static_cast<std::size_t>(layer), exclusive);
    return report;
  }

  // check_stored, which reads number by number, only where there is one that does not fit.
  void check_numbers(const char* what, const TensorView& view, std::int64_t first_row) const {
    const bool together = view.head_stride == view.dim;
    const std::int64_t rows = together ? 1 : view.heads;
    const std::int64_t count = together ? view.heads * view.dim : view.dim;
    const float most = largest_number(config_.storage);
    for (std::int64_t i = 0; i < view.tokens * rows; ++i) {
      if (!kernels_.all_within(view.row(i / rows, i % rows), view.type, count, most))
        check_stored(what, view, config_.storage, first_row);
    }
  }

  static std::int64_t all_bytes(const MemoryReport& report) {
    return report.fast_bytes() + report.host_bytes + report.basis_bytes + report.reserved_bytes;
  }

  std::int64_t most_kv_heads() const {
    std::int64_t most = 0;
    for (const LayerShape& shape : shapes_) {
      if (shape.config.cached) most = std::max(most, shape.config.kv_heads);
    }
    return most;
  }

  // As many as a step with one slice of each sequence has tasks.
  int workspaces_for(std::size_t sequences) const {
    return static_cast<int>(std::min<std::int64_t>(
        pool_.size(), static_cast<std::int64_t>(sequences) * most_kv_heads()));
  }

  // What may fail of an append to a file; nothing of it counts yet.
  void write_ahead(std::size_t layer, std::span<const AppendPart> parts) {
    for (const AppendPart& part : parts) {
      std::vector<HeadStore>& heads = find(part.sequence).layers[layer];
      for (std::size_t h = 0; h < heads.size() && heads[h].in_file(); ++h) {
        heads[h].write_ahead(shapes_[layer], kernels_, part.keys, part.values,
                             static_cast<std::int64_t>(h));
      }
    }
  }

  // all: no other token of the layer stays where it is.
  void check_part(const AppendPart& part, std::int64_t layer, bool all = false) const {
    check_numbers("keys", part.keys, part.row);
    check_numbers("values", part.values, part.row);
    if (config_.host != HostTier::engine || all || tokens(part.sequence, layer) == 0) return;
    check_head_strides(find(part.sequence).layers[static_cast<std::size_t>(layer)].front(),
                       part.keys, part.values);
  }

  void reserve_rows_for_one_more() {
    const std::int64_t rows = kRowsPerSequence * (static_cast<std::int64_t>(sequences_.size()) + 1);
    workspaces_.reserve(workspaces_for(sequences_.size() + 1), sizes_);
    slices_.reserve(static_cast<std::size_t>(most_slices(rows)));
    reserve(query_reports_, rows, &LayerConfig::query_heads);
    reserve(kv_reports_, rows, &LayerConfig::kv_heads);
    rows_ = std::max(rows_, rows);
  }

  // Room for a step of this many rows on any layer. heads: of a layer, one report each.
  template <class Report>
  void reserve(AlignedVector<Report>& reports, std::int64_t rows,
               std::int64_t LayerConfig::*heads) const {
    std::int64_t most = 0;
    for (const LayerShape& shape : shapes_) {
      if (shape.config.cached) most = std::max(most, shape.config.*heads);
    }
    const std::size_t count = static_cast<std::size_t>(rows * most);
    if (reports.size() < count) reports.resize(count);
  }

  // Where reports go.
  struct Answers {
    std::span<QueryHeadReport> query_reports;
    std::span<KvHeadReport> kv_reports;
  };

  void cut_into_slices(const AttendBatch& batch) {
    slices_.clear();
    const std::size_t rows = batch.sequences.size();
    for (std::size_t begin = 0; begin < rows;) {
      std::size_t end = begin + 1;
      while (end < rows && batch.sequences[end] == batch.sequences[begin]) ++end;
      bool continues = false;
      for (std::size_t row = begin; row < end; ++row) {
        if (!is_asked(batch, row)) {
          continues = false;
          continue;
        }
        if (continues && slices_.back().rows < kSliceRows) {
          ++slices_.back().rows;
          continue;
        }
        slices_.push_back(
            {static_cast<std::int64_t>(row), 1, static_cast<std::int64_t>(end - 1 - row)});
        continues = true;
      }
      begin = end;
    }
  }

  StepArguments arguments_of(const LayerShape& shape, std::int64_t row, std::int64_t head,
                             const AttendBatch& batch, const Answers& answers) const {
    const LayerConfig& c = shape.config;
    const std::int64_t first_query = row * c.query_heads + head * shape.group;
    StepArguments step;
    step.query = batch.queries.row(row, head * shape.group);
    step.query_type = batch.queries.type;
    step.query_stride = batch.queries.head_stride;
    if (!c.sink_logits.empty()) step.sink_logits = c.sink_logits.data() + head * shape.group;
    step.output = batch.output.data() + first_query * c.value_dim;
    step.lse = batch.lse.empty() ? nullptr : batch.lse.data() + first_query;
    step.query_reports = answers.query_reports.data() + first_query;
    step.kv_report = answers.kv_reports.data() + row * c.kv_heads + head;
    return step;
  }

  static void answer_nothing(const LayerShape& shape, const StepArguments& step) {
    std::fill(step.output, step.output + shape.group * shape.config.value_dim, 0.0f);
    if (step.lse != nullptr)
      std::fill(step.lse, step.lse + shape.group, -std::numeric_limits<float>::infinity());
    std::fill(step.query_reports, step.query_reports + shape.group, QueryHeadReport{});
    *step.kv_report = {};
  }

  void attend_slice(std::size_t layer, std::int64_t head, const RowSlice& slice,
                    const AttendBatch& batch, const Answers& answers, Workspace& workspace) {
    const LayerShape& shape = shapes_[layer];
    std::vector<HeadStore>& heads =
        find(batch.sequences[static_cast<std::size_t>(slice.first)]).layers[layer];
    HeadStore& store = heads.empty() ? *empty_[layer] : heads[static_cast<std::size_t>(head)];
    const std::int64_t together = rows_together(
        shape.group,
        round_up(std::max(store.compressed(), seen_together(shape, store.residents())), kLanes));
    for (std::int64_t begin = 0; begin < slice.rows; begin += together) {
      std::array<StepArguments, kMaxHeads> rows;
      const std::int64_t count = std::min(together, slice.rows - begin);
      for (std::int64_t i = 0; i < count; ++i) {
        StepArguments& row = rows[static_cast<std::size_t>(i)];
        row = arguments_of(shape, slice.first + begin + i, head, batch, answers);
        row.back = slice.back - begin - i;
      }
      run_step(kernels_, shape, workspaces_.rules(), store, workspace,
               std::span(rows).first(static_cast<std::size_t>(count)));
    }
  }

  // After cut_into_slices.
  void count(std::size_t layer, const AttendBatch& batch, const Answers& answers) {
    const std::size_t query_heads = static_cast<std::size_t>(shapes_[layer].config.query_heads);
    const std::size_t kv_heads = static_cast<std::size_t>(shapes_[layer].config.kv_heads);
    LayerStatistics& statistics = statistics_[layer];
    for (const RowSlice& slice : slices_) {
      const std::size_t first = static_cast<std::size_t>(slice.first);
      const std::size_t rows = static_cast<std::size_t>(slice.rows);
      statistics.steps += slice.rows;
      for (const QueryHeadReport& report :
           answers.query_reports.subspan(first * query_heads, rows * query_heads)) {
        ++statistics.decisions;
        ++statistics.bounds[bound_bucket(report.epsilon)];
        statistics.certified += report.certified;
        statistics.enlarged += enlarges(report.sketch_error);
        statistics.fetching += report.planned_tokens > 0;
        statistics.planned_tokens += report.planned_tokens;
      }
      for (const KvHeadReport& report :
           answers.kv_reports.subspan(first * kv_heads, rows * kv_heads)) {
        statistics.fetched_tokens += report.fetched_tokens;
        statistics.moved_tokens += report.moved_tokens;
        statistics.moved_bytes += report.moved_bytes;
        statistics.resident_tokens += report.resident_tokens;
      }
      const std::int64_t held = tokens(batch.sequences[first], static_cast<std::int64_t>(layer));
      const std::int64_t most = shapes_[layer].config.window.value_or(held);
      for (std::int64_t i = 0; i < slice.rows; ++i) {
        statistics.cached_tokens +=
            std::min(held - slice.back + i, most) * static_cast<std::int64_t>(kv_heads);
      }
    }
  }

  std::vector<HeadCompression> heads_of_prompt(const Sequence& sequence,
                                               std::span<const ImportanceView> importance) const {
    std::vector<LayerLengths> lengths;
    for (const std::vector<HeadStore>& heads : sequence.layers)
      lengths.push_back(lengths_of(heads));
    return compressor_.prompt(sequence.draw, lengths, importance);
  }

  static bool is_pending(const Sequence& sequence, std::size_t layer) {
    return sequence.pending && sequence.pending->covers(layer);
  }

  // The layers that have been compressed, or had too little for it, are from now on by chunks.
  void mark_compressed(Sequence& sequence) const {
    for (std::size_t layer = 0; layer < shapes_.size(); ++layer) {
      if (compressor_.compresses(layer) && !is_pending(sequence, layer))
        sequence.compressed_before[layer] = true;
    }
  }

  Sequence& find(SequenceId id) { return *sequences_.find(id.value)->second; }
  const Sequence& find(SequenceId id) const { return *sequences_.find(id.value)->second; }

  static LayerLengths lengths_of(const std::vector<HeadStore>& heads) {
    if (heads.empty()) return {};
    return {heads.front().tokens(), heads.front().compressed()};
  }

  // Whether tokens of the layer are ever compressed.
  bool leaves_fast_tier(std::size_t layer) const {
    return compressor_.compresses(layer) && config_.keep < 1;
  }

  // Room for steps on a layer of such lengths.
  void make_room(std::size_t layer, const StepLengths& lengths) {
    WorkspaceSizes sizes = sizes_;
    sizes.cover(shapes_[layer], workspaces_.rules(), lengths);
    make_room(sizes);
  }
  void make_room(const WorkspaceSizes& sizes) {
    workspaces_.reserve(workspaces_.count(), sizes);
    sizes_ = sizes;
  }

  // What steps read of a layer, with what is reserved.
  static StepLengths step_lengths(const std::vector<HeadStore>& heads) {
    StepLengths most;
    for (const HeadStore& head : heads) {
      most.cover({head.compressed(), head.drawn_residents(),
                  head.tokens() - head.compressed() + head.spare()});
    }
    return most;
  }

  // Whether the workspaces might be half as large without the sequence.
  bool asks_for_half(const Sequence& sequence) const {
    WorkspaceSizes sizes;
    for (std::size_t layer = 0; layer < shapes_.size(); ++layer) {
      if (shapes_[layer].config.cached)
        sizes.cover(shapes_[layer], workspaces_.rules(), step_lengths(sequence.layers[layer]));
    }
    return 2 * sizes.bytes() >= sizes_.bytes();
  }

  // The workspaces that the sequences there are do not need.
  void give_back() noexcept {
    WorkspaceSizes needed;
    for (std::size_t layer = 0; layer < shapes_.size(); ++layer) {
      if (!shapes_[layer].config.cached) continue;
      StepLengths most;
      for (const auto& [id, sequence] : sequences_)
        most.cover(step_lengths(sequence->layers[layer]));
      needed.cover(shapes_[layer], workspaces_.rules(), most);
    }
    workspaces_.give_back(workspaces_for(sequences_.size()), needed);
    sizes_ = needed;
  }

  void restore(Sequence& sequence, std::size_t layer, SavedReader& reader) {
    std::vector<HeadStore> heads = restore_heads(shapes_[layer], layer, reader);
    if (heads.front().compressed() > 0 && !sequence.compressed_before[layer])
      reader.refuse("tokens are compressed, though the sequence never was");
    make_room(layer, step_lengths(heads));
    sequence.layers[layer] = std::move(heads);
  }

  // booked: none where the caller keeps the totals.
  void reserve(std::span<const Growth> growths, Totals* booked, const Totals& totals) {
    std::vector<CompressHeads::Prepared> prepared;
    std::vector<Leaving> leaving;
    WorkspaceSizes sizes = sizes_;
    TierBytes more;
    for (const Growth& growth : growths) {
      prepared.push_back(plan_outgrown(growth));
      more.add(bytes_to_grow(growth, sizes));
      more.fast += compress_heads_.bytes(prepared.back(), workspaces_.rules(), sizes);
    }
    more.fast += workspaces_.bytes_to_reserve(workspaces_.count(), sizes);
    if (more.host > 0 || more.fast > 0) totals.allow(more);
    make_room(sizes);
    for (std::size_t i = 0; i < growths.size(); ++i) {
      const Booking booking(booked, growths[i].sequence, growths[i].layer);
      // First, since what a compression leaves of a window keeps its room.
      make_room(growths[i]);
      compress_heads_.allocate(prepared[i]);
      leaving.push_back(prepare_leaving(growths[i]));
    }
    // Nothing fails from here on.
    for (std::size_t i = 0; i < growths.size(); ++i) {
      const Growth& growth = growths[i];
      const Booking booking(booked, growth.sequence, growth.layer);
      for (HeadStore& store : find(growth.sequence).layers[static_cast<std::size_t>(growth.layer)])
        store.window_scores().settle();
      compress_heads_.commit(prepared[i]);
      commit(leaving[i]);
    }
  }

  // Of the blocks that make_room allocates. out_sizes: of workspaces that suffice.
  TierBytes bytes_to_grow(const Growth& growth, WorkspaceSizes& out_sizes) const {
    const std::size_t layer = static_cast<std::size_t>(growth.layer);
    const std::vector<HeadStore>& heads = find(growth.sequence).layers[layer];
    const bool scores = scores_window(growth.sequence, growth.layer);
    TierBytes sum;
    StepLengths lengths;
    if (growth.tokens == 0) return sum;
    for (std::int64_t h = 0; h < shapes_[layer].config.kv_heads; ++h) {
      const HeadStore& head = heads.empty() ? *empty_[layer] : heads[static_cast<std::size_t>(h)];
      sum.add(head.bytes_to_append(growth.tokens, scores));
      if (shapes_[layer].config.window)
        sum.fast += head.bytes_to_leave(shapes_[layer], leaving_tokens(layer, head), growth.tokens);
      lengths.cover({head.compressed(), head.drawn_residents(),
                     head.tokens() - head.compressed() + growth.tokens});
    }
    out_sizes.cover(shapes_[layer], workspaces_.rules(), lengths);
    return sum;
  }

  void make_room(const Growth& growth) {
    const std::size_t layer = static_cast<std::size_t>(growth.layer);
    std::vector<HeadStore>& heads = find(growth.sequence).layers[layer];
    if (heads.empty()) {
      if (growth.tokens == 0) return;
      heads = make_heads(shapes_[layer]);
    }
    const bool scores = scores_window(growth.sequence, growth.layer);
    for (HeadStore& head : heads) head.reserve_append(growth.tokens, scores);
  }

  // Decode: the oldest chunks of a local window that has outgrown its size.
  CompressHeads::Prepared plan_outgrown(const Growth& growth) {
    const std::size_t layer = static_cast<std::size_t>(growth.layer);
    Sequence& sequence = find(growth.sequence);
    if (!sequence.compressed_before[layer] || is_pending(sequence, layer)) return {};
    std::vector<HeadStore>& stores = sequence.layers[layer];
    const LayerLengths lengths = lengths_of(stores);
    const std::int64_t outgrown = compressor_.outgrown(layer, lengths);
    if (outgrown == 0) return {};
    std::vector<float> score;
    for (const HeadStore& store : stores) {
      for (std::int64_t i = 0; i < outgrown; ++i)
        score.push_back(store.window_scores().settled_score(i));
    }
    return compress_heads_.plan(sequence.layers,
                                compressor_.window(sequence.draw, layer, lengths, score), {},
                                growth.tokens);
  }

  std::int64_t leaving_tokens(std::size_t layer, const HeadStore& head) const {
    return head.residents() - window_tokens(config_, shapes_[layer].config);
  }

  // Tokens that leave a sliding window.
  struct Leaving {
    std::vector<HeadStore>* heads = nullptr;
    std::int64_t count = 0;
    std::vector<std::optional<Window>> rest;  // [KV head]
  };

  Leaving prepare_leaving(const Growth& growth) {
    const std::size_t layer = static_cast<std::size_t>(growth.layer);
    const LayerShape& shape = shapes_[layer];
    std::vector<HeadStore>& heads = find(growth.sequence).layers[layer];
    if (!shape.config.window || heads.empty()) return {};
    Leaving result;
    result.count = leaving_tokens(layer, heads.front());
    if (result.count <= 0) return {};
    result.heads = &heads;
    for (const HeadStore& head : heads)
      result.rest.push_back(head.reserve_leave(shape, result.count));
    return result;
  }

  static void commit(Leaving& leaving) noexcept {
    for (std::size_t h = 0; h < leaving.rest.size(); ++h)
      (*leaving.heads)[h].leave(leaving.count, std::move(leaving.rest[h]));
  }

  CacheConfig config_;
  // Outlive all that they give.
  const TierMemory fast_;
  const TierMemory host_;
  const Compressor compressor_;
  const Kernels& kernels_;
  ThreadPool pool_;
  std::shared_ptr<HostFile> file_;  // of HostTier::file
  std::vector<LayerShape> shapes_;
  // What a step reads of a sequence that has no tokens in a layer; [layer], null where not cached.
  std::vector<std::unique_ptr<HeadStore>> empty_;
  CompressHeads compress_heads_{config_,
                                compressor_,
                                kernels_,
                                shapes_,
                                pool_,
                                [this](std::size_t layer, const StepLengths& lengths) { make_room(layer, lengths); }};
  Workspaces workspaces_;
  // Of workspaces that suffice for all sequences.
  WorkspaceSizes sizes_;
  std::unordered_map<std::int64_t, std::unique_ptr<Sequence>> sequences_;
  std::vector<LayerStatistics> statistics_;
  // Reports of a step for which the caller gives no room.
  AlignedVector<QueryHeadReport> query_reports_{&fast_};
  AlignedVector<KvHeadReport> kv_reports_{&fast_};
  // There is room for steps of so many rows.
  std::int64_t rows_ = 0;
  // Of a step; with room for as many rows as the reports.
  AlignedVector<RowSlice> slices_{&fast_};
};

}  // namespace
}  // namespace verkv::cpu

namespace verkv {

std::unique_ptr<KvCacheManager> make_cpu_cache(CacheConfig config) {
  check_config(config);
  auto backend = std::make_unique<cpu::CpuBackend>(config);
  return ManagerAccess::make(std::move(config), std::move(backend));
}

SequenceBytes sequence_bytes(const CacheConfig& config, std::int64_t tokens) {
  check_config(config);
  constexpr std::int64_t kMost = (std::int64_t{1} << 32) - 1;
  if (tokens < 0 || tokens > kMost) invalid("{} tokens; a sequence has 0 to {}", tokens, kMost);
  return cpu::estimated_bytes(config, tokens);
}

}  // namespace verkv
