#include "step_buffers.hpp"

#include <algorithm>
#include <utility>

#include "append.hpp"
#include "sizes.hpp"
#include "staging.hpp"
#include "step.hpp"
#include "tuning.hpp"

namespace verkv::cuda {
namespace {

std::int64_t with_room(std::int64_t n) { return round_up(n + n / kLengthRoom, 256); }

}  // namespace

void StepBuffers::Batch::take(DeviceBuffer<StepRow>&& room, std::int64_t rows) {
  device.swap(room);
  written.clear();
  written.reserve(size(rows));
}

StepBuffers::StepBuffers(const std::vector<Layer>& layers, bool staged, const Stream& stream)
    : layers_(layers), staged_(staged), bounds_(layers.size()) {
  for (const Layer& layer : layers) {
    const LayerConfig& c = layer.config;
    sinks_.emplace_back(c.cached ? std::ssize(c.sink_logits) : 0, "sink logits");
    if (!c.cached) continue;
    if (!c.sink_logits.empty())
      stream.copy_in(sinks_.back().data(), c.sink_logits.data(), c.sink_logits.size());
    query_heads_ = std::max(query_heads_, c.query_heads);
    kv_heads_ = std::max(kv_heads_, c.kv_heads);
    query_elements_ = std::max(query_elements_, c.query_heads * c.key_dim);
    output_elements_ = std::max(output_elements_, c.query_heads * c.value_dim);
  }
}

void StepBuffers::reserve_rows(std::int64_t rows, const Stream& stream) {
  if (rows <= rows_) return;
  batch_now_.reserve(size(rows));
  DeviceBuffer<StepRow> batch(rows, "the rows of a step");
  DeviceBuffer<StepRow> captured_batch(rows, "the rows of a captured step");
  DeviceBuffer<QueryHeadReport> query_reports(rows * query_heads_, "reports");
  DeviceBuffer<KvHeadReport> kv_reports(rows * kv_heads_, "reports");
  DeviceBuffer<std::byte> queries;
  DeviceBuffer<float> output;
  DeviceBuffer<float> lse;
  if (staged_) {
    queries = DeviceBuffer<std::byte>(4 * rows * query_elements_, "queries");
    output = DeviceBuffer<float>(rows * output_elements_, "outputs");
    lse = DeviceBuffer<float>(rows * query_heads_, "outputs");
    packed_.reserve(size(4 * rows * query_elements_));
  }
  reserve_workspace(rows, stream);
  // Reports are copied whole, with the bytes between their members.
  stream.clear(query_reports);
  stream.clear(kv_reports);
  stream.synchronize();
  batch_.take(std::move(batch), rows);
  captured_batch_.take(std::move(captured_batch), rows);
  query_reports_.swap(query_reports);
  kv_reports_.swap(kv_reports);
  queries_.swap(queries);
  output_.swap(output);
  lse_.swap(lse);
  rows_ = rows;
  ++generation_;
}

void StepBuffers::reserve_lengths(std::size_t layer, std::int64_t compressed,
                                  std::int64_t residents, const Stream& stream) {
  Bounds& bounds = bounds_[layer];
  if (compressed <= bounds.compressed && residents <= bounds.residents) return;
  const Bounds old = bounds;
  if (compressed > old.compressed) bounds.compressed = with_room(compressed);
  if (residents > old.residents) bounds.residents = with_room(residents);
  try {
    reserve_workspace(rows_, stream);
  } catch (...) {
    bounds = old;
    throw;
  }
  ++generation_;
}

void StepBuffers::tighten_lengths(std::size_t layer, std::int64_t compressed,
                                  std::int64_t residents) {
  Bounds& bounds = bounds_[layer];
  bounds.compressed = std::min(bounds.compressed, with_room(compressed));
  bounds.residents = std::min(bounds.residents, with_room(residents));
}

void StepBuffers::reserve_workspace(std::int64_t rows, const Stream& stream) {
  std::int64_t wanted = 0;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    if (!layers_[i].config.cached) continue;
    wanted = std::max(wanted, step_workspace_bytes(layers_[i].view, static_cast<int>(rows),
                                                   bounds_[i].compressed, bounds_[i].residents));
  }
  if (wanted <= workspace_.size()) return;
  DeviceBuffer<std::byte> larger(wanted, "the workspace of a step");
  stream.synchronize();
  workspace_.swap(larger);
  ++generation_;
}

const StepRow* StepBuffers::write_batch(unsigned long long capture, const Stream& stream) {
  // A graph may be replayed between any two steps, and any number of times. So captured steps have
  // an array of their own, written once in each capture, and the other array stays what it was.
  Batch& batch = capture == 0 ? batch_ : captured_batch_;
  if (capture != 0 && capture != capture_) {
    batch.written.clear();
    capture_ = capture;
  }
  if (batch_now_ != batch.written) {
    batch.written.clear();
    VERKV_CUDA_CHECK(launch_write_rows(batch_now_.data(), static_cast<int>(batch_now_.size()),
                                       batch.device.data(), stream));
    batch.written = batch_now_;
  }
  return batch.device.data();
}

void StepBuffers::fill(StepView& step, std::size_t layer) const {
  step.layer.sink_logits = sinks_[layer].data();
  step.query_reports = query_reports_.data();
  step.kv_reports = kv_reports_.data();
  step.most_compressed = bounds_[layer].compressed;
  step.most_residents = bounds_[layer].residents;
  step.workspace = workspace_.data();
}

void StepBuffers::stage_in(StepView& step, const TensorView& queries, const Stream& stream) {
  pack(queries, 0, queries.tokens, packed_);
  stream.copy_in(queries_.data(), packed_.data(), packed_.size());
  step.queries = queries_.data();
  step.query_row_stride = queries.heads * queries.dim;
  step.query_head_stride = queries.dim;
  step.output = output_.data();
  step.lse = lse_.data();
}

void StepBuffers::stage_out(std::span<float> output, std::span<float> lse,
                            const Stream& stream) const {
  stream.copy_out(output.data(), output_.data(), output.size());
  if (!lse.empty()) stream.copy_out(lse.data(), lse_.data(), lse.size());
}

void StepBuffers::copy_reports(std::span<QueryHeadReport> query_reports,
                               std::span<KvHeadReport> kv_reports, const Stream& stream) const {
  if (!query_reports.empty())
    stream.copy_out(query_reports.data(), query_reports_.data(), query_reports.size());
  if (!kv_reports.empty())
    stream.copy_out(kv_reports.data(), kv_reports_.data(), kv_reports.size());
}

std::int64_t StepBuffers::bytes() const {
  std::int64_t sinks = 0;
  for (const DeviceBuffer<float>& layer : sinks_) sinks += layer.bytes();
  return sinks + workspace_.bytes() + query_reports_.bytes() + kv_reports_.bytes() +
         batch_.device.bytes() + captured_batch_.device.bytes() + queries_.bytes() +
         output_.bytes() + lse_.bytes();
}

}  // namespace verkv::cuda
