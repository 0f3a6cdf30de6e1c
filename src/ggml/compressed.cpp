#include "compressed.hpp"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <iterator>
#include <span>
#include <string>
#include <utility>

namespace verkv_ggml {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// A sequence that was left before it had answered so many rows in one layer was not worth its
// beginning.
constexpr std::int64_t kWorthwhile = 32;
constexpr std::int64_t kMostPatience = 4096;

// Whether a row of the cache has the numbers of its KV heads side by side from its start.
bool lies_in_rows(const verkv::TensorView& view, const ggml_tensor* root) {
  const std::size_t offset = static_cast<std::size_t>(static_cast<const char*>(view.data) -
                                                      static_cast<const char*>(root->data));
  return offset % root->nb[2] == 0 && (view.heads == 1 || view.head_stride == view.dim) &&
         at(view.token_stride) * ggml_type_size(root->type) == root->nb[1];
}

bool is_plain(const Attention& attention) {
  return lies_in_rows(attention.key_view(0), attention.cache.tensor) &&
         lies_in_rows(attention.value_view(0), cache_tensor_of(attention.values)->tensor);
}

}  // namespace

Compressed::Compressed(const Shared& shared, const CacheTensor& tensor)
    : shared_(shared),
      buffer_(tensor.tensor->buffer),
      cells_(tensor.tensor->ne[1]),
      streams_(tensor.tensor->ne[2]),
      time_(at(cells_ * streams_)) {
  watch(buffer_, *this);
}

Compressed::~Compressed() {
  unwatch(*this);
  count();
}

// What the manager has counted goes into the report.
void Compressed::count() {
  if (manager_ == nullptr) return;
  const verkv::LayerStatistics statistics = manager_->statistics();
  shared_.report.decisions += statistics.decisions;
  shared_.report.certified += statistics.certified;
  shared_.report.moved_tokens += statistics.moved_tokens;
  manager_->reset_statistics();
}

// ---- Layers -------------------------------------------------------------------------------------

Layer* Compressed::find(const ggml_tensor* root) {
  for (Layer& layer : layers_)
    if (layer.keys == root || layer.values == root) return &layer;
  return nullptr;
}

Layer& Compressed::learn(const Attention& attention) {
  Layer* layer = find(attention.cache.tensor);
  if (layer == nullptr) {
    layer = &layers_.emplace_back();
    layer->keys = attention.cache.tensor;
    layer->values = cache_tensor_of(attention.values)->tensor;
    layer->config = layer_of(attention);
    layer->config.global_layer = attention.cache.layer;
  }
  layer->is_asked = true;
  return *layer;
}

std::int64_t Compressed::index_of(const Layer& layer) const {
  std::int64_t index = 0;
  for (const Layer& other : layers_) {
    if (&other == &layer) break;
    ++index;
  }
  return index;
}

bool Compressed::is_served(const Layer& layer) const { return index_of(layer) < served_; }

// ---- What is dropped ----------------------------------------------------------------------------

void Compressed::note_write(const ggml_tensor* node, const CacheTensor& tensor) {
  const std::lock_guard lock(mutex_);
  try {
    hear(node, tensor);
  } catch (const std::exception&) {
    // Memory is short: what cannot be shortened goes.
    erase_all();
  }
}

void Compressed::hear(const ggml_tensor* node, const CacheTensor& tensor) {
  Layer* layer = find(tensor.tensor);
  const std::optional<std::vector<Row>> rows = rows_set(node, tensor.tensor);
  if (tensor.is_key && rows) {
    if (clock_tensor_ == nullptr) clock_tensor_ = tensor.tensor;
    if (clock_tensor_ == tensor.tensor)
      for (const Row row : *rows) time_[at(row)] = ++clock_;
    written_[tensor.tensor] = *rows;
  }
  if (layer == nullptr) return;
  if (!rows) {
    for (std::int64_t s = 0; s < streams_; ++s) layer->queries.forget(s);
    drop_rows(*layer, rows_of(tensor.tensor, node, 0, ggml_nbytes(node)));
    return;
  }
  if (tensor.is_key) layer->was_asked = layer->is_asked;
  for (const Row row : *rows)
    drop_row(*layer, row / cells_, static_cast<std::uint32_t>(row % cells_));
}

void Compressed::written(const ggml_tensor* tensor, std::size_t offset, std::size_t size) {
  const std::lock_guard lock(mutex_);
  const ggml_tensor* root = tensor->view_src != nullptr ? tensor->view_src : tensor;
  Layer* layer = find(root);
  if (layer == nullptr || size == 0) return;
  const RowRange rows = rows_of(root, tensor, offset, size);
  for (std::int64_t s = rows.first / cells_; s * cells_ < rows.end; ++s) layer->queries.forget(s);
  for (Row row = rows.first; row < rows.end && root == clock_tensor_; ++row)
    time_[at(row)] = ++clock_;
  try {
    drop_rows(*layer, rows);
  } catch (const std::exception&) {
    // As above; and no exception passes through llama.cpp.
    erase_all();
  }
}

void Compressed::written_all(ggml_backend_buffer_t) {
  const std::lock_guard lock(mutex_);
  erase_all();
  for (Layer& layer : layers_)
    for (std::int64_t s = 0; s < streams_; ++s) layer.queries.forget(s);
}

void Compressed::freed(ggml_backend_buffer_t) {
  const std::lock_guard lock(mutex_);
  erase_all();
  count();
  manager_.reset();
  served_ = 0;
  layers_.clear();
  written_.clear();
  is_gone_ = true;
}

void Compressed::give_up() {
  const std::lock_guard lock(mutex_);
  erase_all();
  patience_ = last_patience_ = kMostPatience;
}

// The layer's row, where a sequence already has it there.
void Compressed::drop_row(const Layer& layer, std::int64_t stream, std::uint32_t cell) {
  if (!is_served(layer)) return;
  for (auto sequence = sequences_.begin(); sequence != sequences_.end();) {
    const auto next = std::next(sequence);
    if (sequence->stream == stream && cell < sequence->has.size() && sequence->has[cell]) {
      const std::int64_t place = sequence->place_of(cell);
      if (place < manager_->tokens(sequence->id, index_of(layer))) shorten(sequence, place);
    }
    sequence = next;
  }
}

void Compressed::drop_rows(const Layer& layer, const RowRange& rows) {
  if (!is_served(layer)) return;
  for (auto sequence = sequences_.begin(); sequence != sequences_.end();) {
    const auto next = std::next(sequence);
    const std::int64_t known = manager_->tokens(sequence->id, index_of(layer));
    std::int64_t place = 0;
    while (place < sequence->size()) {
      const Row row = sequence->stream * cells_ + sequence->cells[at(place)];
      if (row >= rows.first && row < rows.end) break;
      ++place;
    }
    if (place < std::min(known, sequence->size())) shorten(sequence, place);
    sequence = next;
  }
}

void Compressed::shorten(std::list<Sequence>::iterator sequence, std::int64_t tokens) {
  if (tokens < shared_.settings.from) {
    erase(sequence);
    return;
  }
  manager_->truncate(sequence->id, tokens);
  sequence->cut(tokens);
  ++epoch_;
}

void Compressed::erase(std::list<Sequence>::iterator sequence) {
  if (sequence->answered < kWorthwhile) {
    last_patience_ = std::min(kMostPatience, 2 * last_patience_ + kWorthwhile);
    patience_ = last_patience_;
  }
  manager_->erase(sequence->id);
  sequences_.erase(sequence);
  ++epoch_;
}

void Compressed::erase_all() {
  for (const Sequence& sequence : sequences_) manager_->erase(sequence.id);
  sequences_.clear();
  ++epoch_;
}

// ---- Answers ------------------------------------------------------------------------------------

void Compressed::note_prompt(const Attention& attention) {
  const std::lock_guard lock(mutex_);
  if (is_plain(attention)) keep_queries(attention, learn(attention), {});
}

// The last queries of each stream, of rows that the library's cache does not answer.
void Compressed::keep_queries(const Attention& attention, Layer& layer,
                              const std::vector<bool>& is_answered) {
  const std::int64_t rows = attention.rows();
  const std::vector<Row>& written = written_[layer.keys];
  if (static_cast<std::int64_t>(written.size()) != rows * attention.streams()) return;
  for (std::int64_t s = 0; s < attention.streams(); ++s) {
    const verkv::TensorView queries = attention.query_view(s);
    for (std::int64_t r = std::max<std::int64_t>(0, rows - LateQueries::kMost); r < rows; ++r) {
      if (!is_answered.empty() && is_answered[at(s * rows + r)]) continue;
      const Row row = written[at(s * rows + r)];
      layer.queries.add(row / cells_, static_cast<std::uint32_t>(row % cells_), time_[at(row)],
                        queries, r);
    }
  }
}

std::vector<bool> Compressed::answer(const Attention& attention, const Visible& visible) {
  const std::lock_guard lock(mutex_);
  const std::int64_t rows = attention.rows() * attention.streams();
  std::vector<bool> answered(at(rows));
  if (!is_plain(attention)) return answered;
  Layer& layer = learn(attention);
  // Of layers that share keys, the others may ask otherwise.
  if (!same_attention(layer.config, layer_of(attention)) ||
      static_cast<std::int64_t>(written_[layer.keys].size()) != rows)
    return answered;
  own_ = written_[layer.keys];
  const Decision& decision = decide(layer, visible);
  std::vector<std::pair<std::int64_t, Place>> asked;
  for (std::int64_t r = 0; r < rows; ++r)
    if (decision.places[at(r)].sequence != nullptr) asked.emplace_back(r, decision.places[at(r)]);
  std::stable_sort(asked.begin(), asked.end(), [](const auto& a, const auto& b) {
    return a.second.sequence->id.value < b.second.sequence->id.value;
  });
  if (is_served(layer)) {
    bring_up(layer, asked);
    if (!asked.empty()) attend(attention, layer, asked, answered);
  }
  keep_queries(attention, layer, answered);
  return answered;
}

// Gives the sequences of the rows the cells that the layer is behind; drops the rows of a sequence that
// are not its last ones then, and those of one whose rows the library refuses.
void Compressed::bring_up(const Layer& layer, std::vector<std::pair<std::int64_t, Place>>& rows) {
  std::vector<std::pair<std::int64_t, Place>> kept;
  for (std::size_t begin = 0; begin < rows.size();) {
    Sequence* sequence = rows[begin].second.sequence;
    std::size_t end = begin + 1;
    bool follow = true;
    while (end < rows.size() && rows[end].second.sequence == sequence) {
      follow = follow && rows[end].second.end == rows[end - 1].second.end + 1;
      ++end;
    }
    const std::int64_t last = rows[end - 1].second.end;
    try {
      if (follow && manager_->tokens(sequence->id, index_of(layer)) <= last) {
        append(layer, *sequence, last);
        kept.insert(kept.end(), rows.begin() + static_cast<std::ptrdiff_t>(begin),
                    rows.begin() + static_cast<std::ptrdiff_t>(end));
      }
    } catch (const std::exception& error) {
      shared_.once.info(std::string("a sequence is answered exactly: ") + error.what());
      erase(std::find_if(sequences_.begin(), sequences_.end(),
                         [&](const Sequence& s) { return &s == sequence; }));
    }
    begin = end;
  }
  rows = std::move(kept);
}

void Compressed::append(const Layer& layer, Sequence& sequence, std::int64_t end) {
  const std::int64_t begin = manager_->tokens(sequence.id, index_of(layer));
  if (begin >= end) return;
  std::vector<const void*> keys;
  std::vector<const void*> values;
  layer.list(sequence.stream, std::span(sequence.cells).subspan(at(begin), at(end - begin)), keys,
             values);
  const verkv::LayerConfig& config = layer.config;
  manager_->append(sequence.id, index_of(layer),
                   verkv::listed_rows(keys.data(), layer.type(), end - begin, config.kv_heads,
                                      config.key_dim, config.key_dim),
                   verkv::listed_rows(values.data(), layer.type(), end - begin, config.kv_heads,
                                      config.value_dim, config.value_dim));
}

void Compressed::attend(const Attention& attention, const Layer& layer,
                        const std::vector<std::pair<std::int64_t, Place>>& rows,
                        std::vector<bool>& out_answered) {
  const verkv::LayerConfig& config = layer.config;
  const std::size_t query_numbers = at(config.query_heads * config.key_dim);
  const std::size_t output_numbers = at(config.query_heads * config.value_dim);
  std::vector<verkv::SequenceId> sequences;
  std::vector<float> queries(rows.size() * query_numbers);
  std::vector<float> output(rows.size() * output_numbers);
  std::vector<verkv::RowStatus> status(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto& [row, place] = rows[i];
    sequences.push_back(place.sequence->id);
    const verkv::TensorView view = attention.query_view(row / attention.rows());
    for (std::int64_t h = 0; h < config.query_heads; ++h) {
      std::copy_n(static_cast<const float*>(view.row(row % attention.rows(), h)), config.key_dim,
                  queries.data() + i * query_numbers + at(h * config.key_dim));
    }
  }
  manager_->attend(index_of(layer),
                   {.sequences = sequences,
                    .queries = verkv::token_major(queries.data(), verkv::DType::f32,
                                                  static_cast<std::int64_t>(rows.size()),
                                                  config.query_heads, config.key_dim),
                    .output = output,
                    .row_status = status});
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto& [row, place] = rows[i];
    ++place.sequence->answered;
    if (place.sequence->answered == kWorthwhile) last_patience_ = 0;
    if (status[i] != verkv::RowStatus::answered) continue;
    std::copy_n(output.data() + i * output_numbers, output_numbers,
                attention.output(row / attention.rows(), row % attention.rows()));
    out_answered[at(row)] = true;
    if (shared_.settings.check) check(layer, *place.sequence);
  }
}

void Compressed::check(const Layer& layer, const Sequence& sequence) {
  const std::int64_t row = manager_->changed_row(sequence.id, index_of(layer));
  if (row < 0) return;
  ++shared_.report.stale_rows;
  shared_.once.info("FAULT: a row of the cache has changed and nobody said so");
}

}  // namespace verkv_ggml
