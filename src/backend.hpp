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

#include "pending_compression.hpp"
#include "saved_bytes.hpp"
#include "tier_bytes.hpp"

namespace verkv {

// Tokens that a layer of a sequence is to have room for, beyond those it has.
struct Growth {
  SequenceId sequence;
  std::int64_t layer = 0;
  std::int64_t tokens = 0;
};

// The next tokens of a sequence.
struct AppendPart {
  SequenceId sequence;
  TensorView keys;
  TensorView values;
  // Whether there is room by an earlier reserve; if not, append reserves as that does.
  bool reserved = false;
  std::int64_t row = -1;  // of its batch, where it begins; -1: there is none
};

// The totals of memory, which need to see what each sequence of a call changes by itself: what one of
// them stops sharing with another is the other's own from then on, and no more than before.
class Totals {
 public:
  // What a layer of a sequence holds alone, before it changes; and after.
  virtual MemoryReport own(SequenceId sequence, std::int64_t layer) const noexcept = 0;
  virtual void changed(const MemoryReport& before, SequenceId sequence,
                       std::int64_t layer) noexcept = 0;
  // Throws CapacityError where the tiers may not hold so many bytes more than the totals say.
  virtual void allow(const TierBytes& more) const = 0;

 protected:
  ~Totals() = default;
};

// Lives as long as something changes, also where that ends in an exception. Never two at a time for
// sequences that share memory.
class Booking {
 public:
  Booking(Totals* totals, SequenceId sequence, std::int64_t layer)
      : totals_(totals), sequence_(sequence), layer_(layer) {
    if (totals_ != nullptr) before_ = totals_->own(sequence_, layer_);
  }
  ~Booking() {
    if (totals_ != nullptr) totals_->changed(before_, sequence_, layer_);
  }
  Booking(const Booking&) = delete;
  Booking& operator=(const Booking&) = delete;

 private:
  Totals* totals_;
  SequenceId sequence_;
  std::int64_t layer_;
  MemoryReport before_;
};

// Where a call may need more of a tier than is held, it asks Totals::allow before anything changes.
class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string description() const = 0;

  virtual void create(SequenceId sequence, std::uint64_t draw) = 0;
  virtual void release(SequenceId sequence) noexcept = 0;
  // Makes sequence `to`, which does not exist, continue as `from` would.
  virtual void fork(SequenceId from, SequenceId to) = 0;
  virtual std::int64_t tokens(SequenceId sequence, std::int64_t layer) const = 0;
  virtual std::int64_t compressed_tokens(SequenceId sequence, std::int64_t layer) const = 0;

  // Of the first tokens those that a layer with a sliding window no longer holds.
  virtual std::int64_t left_tokens(SequenceId, std::int64_t) const { return 0; }

  // Whether queries of tokens that come now score the local window.
  virtual bool scores_window(SequenceId sequence, std::int64_t layer) const = 0;

  // Compresses what the local windows have outgrown, and makes room for the tokens, so that append
  // of them fails for no want of memory. All or nothing. Each (sequence, layer) at most once.
  // totals: not told of what changes.
  virtual void reserve(std::span<const Growth> growths, Totals& totals) = 0;
  // All or nothing; each sequence at most once. Throws InvalidArgument on a number that is not
  // finite or does not fit the storage type. totals: told of all that changes.
  virtual void append(std::int64_t layer, std::span<const AppendPart> parts, Totals& totals) = 0;
  // Of HostTier::engine: tokens from `first` on are at these addresses now; numbers are checked as by
  // append.
  virtual void move(SequenceId sequence, std::int64_t layer, std::int64_t first,
                    const TensorView& keys, const TensorView& values) = 0;
  // The first compressed token whose resident is not the row of the host tier; -1: none.
  virtual std::int64_t changed_row(SequenceId sequence, std::int64_t layer) const = 0;
  // Whether views of keys and values may list their rows.
  virtual bool takes_lists() const { return true; }
  // Keeps the first `tokens`, not fewer than are compressed nor more than there are.
  virtual void truncate(SequenceId sequence, std::int64_t layer, std::int64_t tokens) = 0;
  // Keeps the first `tokens`, fewer than are compressed, in these layers. All or nothing. false:
  // the backend does not serve it, and nothing has changed.
  virtual bool shorten(SequenceId sequence, std::span<const std::int64_t> layers,
                       std::int64_t tokens) = 0;
  // One view per layer; those of layers that are not compressed are not looked at.
  // prompt_queries: likewise, or empty. Throws InvalidArgument on a score that is negative or not
  // finite and on a query that is used and not finite.
  // totals: not told of what changes.
  virtual void compress(SequenceId sequence, std::span<const ImportanceView> importance,
                        std::span<const TensorView> prompt_queries, Totals& totals) = 0;
  // compress in slices. begin_compress takes copies of what it is given and compresses nothing; pending
  // is then what is to be done, null where there is nothing. continue_compress works on up to `heads`
  // heads of the next layer and returns on how many; with its last head the layer is compressed, and room
  // for tokens stays. totals: as above. A call that throws leaves what was pending. fork
  // makes what is pending the fork's too; the manager lets no other compress, redraw or save through
  // meanwhile, and cancels before tokens that are to be compressed go.
  virtual void begin_compress(SequenceId sequence, std::span<const ImportanceView> importance,
                              std::span<const TensorView> prompt_queries) = 0;
  virtual std::int64_t continue_compress(SequenceId sequence, std::int64_t heads,
                                         Totals& totals) = 0;
  virtual void cancel_compress(SequenceId sequence) noexcept = 0;
  virtual const PendingCompression* pending(SequenceId sequence) const = 0;
  virtual void redraw(SequenceId sequence, std::uint64_t draw) = 0;

  // Throws what attend would throw, of the queries' numbers and for want of memory, and fills
  // row_status. A device reads and allocates nothing before it computes.
  virtual void prepare_attend(const AttendBatch& batch) = 0;
  // Padding rows are written too (output 0, LSE -infinity, empty reports), and so are rows with a bad
  // query where there is a row_status. Throws InvalidArgument on a query that is not finite, unless
  // there is.
  virtual void attend(std::int64_t layer, const AttendBatch& batch) = 0;

  // Tokens [first, first + count) of a layer, [token][KV head][dim] as stored.
  virtual void read(SequenceId sequence, std::int64_t layer, std::int64_t first, std::int64_t count,
                    std::byte* keys, std::byte* values) const = 0;
  // Throws where the backend does not serve the next calls.
  virtual void require_saving() const {}
  // What there is of a sequence but reserved room; restore fills one that was just created. Throws
  // FormatError, or what the reader throws, with a part of it restored.
  virtual void save(SequenceId sequence, SavedWriter& writer) const = 0;
  virtual void restore(SequenceId sequence, SavedReader& reader) = 0;

  virtual LayerStatistics statistics(std::int64_t layer) const = 0;
  virtual void reset_statistics() = 0;

  // Of one cached layer of a sequence; workspace_bytes stays 0.
  virtual MemoryReport memory(SequenceId sequence, std::int64_t layer) const noexcept = 0;
  // Likewise, without what other sequences hold too; as it stands: where they share nothing. The sum
  // over all sequences and of what they share changes only in the calls above, by what this changes
  // for the sequence that a call is given (of append: between the two calls of Totals); by all of it
  // for a sequence that fork makes or release frees.
  virtual MemoryReport own_memory(SequenceId sequence, std::int64_t layer) const noexcept {
    return memory(sequence, layer);
  }
  virtual std::int64_t workspace_bytes() const = 0;
  // Of the host tier's file, if there is one.
  virtual std::int64_t file_bytes() const { return 0; }
};

}  // namespace verkv

#endif  // VERKV_SRC_BACKEND_HPP
