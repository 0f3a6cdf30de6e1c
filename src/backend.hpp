// The seam between the manager and what computes. Coarse on purpose: one call is a whole decode
// step of a batch, so that a backend on a device needs no round trip between its stages.
//
// The manager has checked everything that does not depend on a backend's state (shapes, ranges,
// known sequences and layers) before it calls. A call that throws leaves the sequence as it was.
#ifndef VERKV_SRC_BACKEND_HPP
#define VERKV_SRC_BACKEND_HPP

#include <cstdint>
#include <span>
#include <string>

#include <verkv/reports.hpp>
#include <verkv/view.hpp>

namespace verkv {

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string description() const = 0;

  virtual void create(SequenceId sequence, std::uint64_t draw) = 0;
  virtual void release(SequenceId sequence) noexcept = 0;
  virtual std::int64_t tokens(SequenceId sequence, std::int64_t layer) const = 0;
  virtual std::int64_t compressed_tokens(SequenceId sequence, std::int64_t layer) const = 0;

  // Throws InvalidArgument on a number that is not finite or does not fit the storage type.
  virtual void append(SequenceId sequence, std::int64_t layer, const TensorView& keys,
                      const TensorView& values) = 0;
  // One view per layer; those of layers that are not compressed are not looked at.
  // prompt_queries: likewise, or empty. Throws InvalidArgument on a query that is used and
  // not finite.
  virtual void compress(SequenceId sequence, std::span<const ImportanceView> importance,
                        std::span<const TensorView> prompt_queries) = 0;
  virtual void redraw(SequenceId sequence, std::uint64_t draw) = 0;

  // Both report spans have their full size. Padding rows are written too (output 0, LSE -infinity,
  // empty reports).
  virtual void attend(std::int64_t layer, const AttendBatch& batch,
                      std::span<QueryHeadReport> query_reports,
                      std::span<KvHeadReport> kv_reports) = 0;

  virtual std::uint64_t graph_generation() const { return 0; }

  // Whether the caller's views, outputs and scores are memory that the host reads. If not, the
  // manager leaves to the backend what it would have to read for: that importance is valid and that
  // queries are finite.
  virtual bool host_views() const { return true; }
  // Whether the backend counts its steps itself. If so, report spans may be empty where the caller
  // wants none, and statistics come from here.
  virtual bool counts_steps() const { return false; }
  virtual LayerStatistics statistics(std::int64_t /*layer*/) const { return {}; }
  virtual void reset_statistics() {}

  // workspace_bytes stays 0 here; reserved_bytes is what the sequence's buffers hold beyond what
  // they use.
  virtual MemoryReport memory(SequenceId sequence) const = 0;
  virtual std::int64_t workspace_bytes() const = 0;
};

}  // namespace verkv

#endif  // VERKV_SRC_BACKEND_HPP
