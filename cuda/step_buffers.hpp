// Device memory of a step that all sequences share: whose its rows are, workspace, reports, and
// copies of what the host gives and takes. It is made for a number of rows and for upper bounds of
// lengths, so that a step allocates nothing, and that a captured one stays valid while they hold.
//
// Everything that grows waits for the stream. It throws DeviceError and changes nothing if memory
// is short.
#ifndef VERKV_CUDA_STEP_BUFFERS_HPP
#define VERKV_CUDA_STEP_BUFFERS_HPP

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <verkv/reports.hpp>
#include <verkv/view.hpp>

#include "device_memory.hpp"
#include "layer.hpp"
#include "stream.hpp"
#include "views.hpp"

namespace verkv::cuda {

class StepBuffers {
 public:
  // layers: must outlive this object, and stay as they are. staged: queries and outputs are host
  // memory.
  StepBuffers(const std::vector<Layer>& layers, bool staged, const Stream& stream);

  // Most rows of a step.
  std::int64_t rows() const { return rows_; }
  void reserve_rows(std::int64_t rows, const Stream& stream);

  // Makes room for steps on a layer whose heads have these lengths, with a quarter more to grow.
  void reserve_lengths(std::size_t layer, std::int64_t compressed, std::int64_t residents,
                       const Stream& stream);
  // Lowers the bounds to lengths that no head exceeds: a step should not be cut for the prompt that
  // has been compressed. Frees nothing.
  void tighten_lengths(std::size_t layer, std::int64_t compressed, std::int64_t residents);

  // Whose queries the step's rows are: the caller fills the vector, which has room for rows() of
  // them.
  std::vector<StepRow>& batch() { return batch_now_; }
  // The same on the device. Written only when they are not those of the last step, so that the
  // layers of a step share them. capture: the number of the capture under way, 0: none.
  const StepRow* write_batch(unsigned long long capture, const Stream& stream);

  // Points the step at workspace, reports and sinks; bounds are the layer's.
  void fill(StepView& step, std::size_t layer) const;
  // Points the step at copies of the host's queries, and at room for its outputs.
  void stage_in(StepView& step, const TensorView& queries, const Stream& stream);
  // Enqueues the copy of outputs to the host. lse may be empty.
  void stage_out(std::span<float> output, std::span<float> lse, const Stream& stream) const;
  // Enqueues the copy of reports to the host; either may be empty.
  void copy_reports(std::span<QueryHeadReport> query_reports, std::span<KvHeadReport> kv_reports,
                    const Stream& stream) const;

  // How often what a captured step holds on to has been replaced.
  std::uint64_t generation() const { return generation_; }
  std::int64_t bytes() const;

 private:
  // Upper bounds over all sequences.
  struct Bounds {
    std::int64_t compressed = 0;
    std::int64_t residents = 0;
  };
  // A batch in device memory, and what has been written there.
  struct Batch {
    DeviceBuffer<StepRow> device;
    std::vector<StepRow> written;
    void take(DeviceBuffer<StepRow>&& room, std::int64_t rows);
  };

  void reserve_workspace(std::int64_t rows, const Stream& stream);

  const std::vector<Layer>& layers_;
  const bool staged_;
  // The most of any layer, per row.
  std::int64_t query_heads_ = 0;
  std::int64_t kv_heads_ = 0;
  std::int64_t query_elements_ = 0;
  std::int64_t output_elements_ = 0;

  std::vector<DeviceBuffer<float>> sinks_;  // [layer], of its query heads; empty: none
  std::int64_t rows_ = 0;
  std::vector<Bounds> bounds_;
  DeviceBuffer<std::byte> workspace_;
  std::vector<StepRow> batch_now_;
  Batch batch_;
  Batch captured_batch_;
  // The capture in which captured_batch_ was written last.
  unsigned long long capture_ = 0;
  DeviceBuffer<QueryHeadReport> query_reports_;
  DeviceBuffer<KvHeadReport> kv_reports_;
  DeviceBuffer<std::byte> queries_;
  DeviceBuffer<float> output_;
  DeviceBuffer<float> lse_;
  std::vector<std::byte> packed_;
  std::uint64_t generation_ = 0;
};

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_STEP_BUFFERS_HPP
