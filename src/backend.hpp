// The seam between the manager and what computes. Coarse on purpose: one call is a whole decode
// step of a batch, so that a backend on a device needs no round trip between its stages.
//
// The manager has checked what can be checked without reading a number: shapes, strides, types,
// names of sequences and layers, byte limits. A backend checks numbers where it reads them
// (number_checks.hpp) and counts its steps. A call that throws leaves the sequence as it was.
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
  // prompt_queries: likewise, or empty. Throws InvalidArgument on a score that is negative or not
  // finite and on a query that is used and not finite.
  virtual void compress(SequenceId sequence, std::span<const ImportanceView> importance,
                        std::span<const TensorView> prompt_queries) = 0;
  virtual void redraw(SequenceId sequence, std::uint64_t draw) = 0;

  // Padding rows are written too (output 0, LSE -infinity, empty reports). Throws InvalidArgument
  // on a query that is not finite.
  virtual void attend(std::int64_t layer, const AttendBatch& batch) = 0;

  virtual LayerStatistics statistics(std::int64_t layer) const = 0;
  virtual void reset_statistics() = 0;

  // Of one cached layer of a sequence; workspace_bytes stays 0. Changes only in the calls above
  // that are given the sequence.
  virtual MemoryReport memory(SequenceId sequence, std::int64_t layer) const noexcept = 0;
  virtual std::int64_t workspace_bytes() const = 0;
};

}  // namespace verkv

#endif  // VERKV_SRC_BACKEND_HPP
