// Numbers that a backend refuses, and the sentences it refuses them with. The manager checks
// shapes; a backend checks numbers, where and when it reads them.
#ifndef VERKV_SRC_NUMBER_CHECKS_HPP
#define VERKV_SRC_NUMBER_CHECKS_HPP

#include <cstdint>
#include <string_view>

#include <verkv/config.hpp>
#include <verkv/reports.hpp>
#include <verkv/types.hpp>
#include <verkv/view.hpp>

namespace verkv {

struct NumberPlace {
  std::int64_t token = 0;  // of queries: the row of the batch
  std::int64_t head = 0;
  std::int64_t coordinate = 0;
  std::int64_t row = -1;  // of a batch of keys or values, whose rows are tokens
};

// Throw InvalidArgument. what: keys, values or queries, and which if that is not plain. layer: -1
// where only the manager knows it.
[[noreturn]] VERKV_API void refuse_stored(std::string_view what, std::int64_t layer,
                                          const NumberPlace& place, float number, DType storage);
[[noreturn]] VERKV_API void refuse_query(std::string_view what, std::int64_t layer,
                                         const NumberPlace& place, float number);

// Throws InvalidArgument unless every number of a view that the host can read is finite and fits the
// storage type. first_row: of a batch whose rows are the view's tokens; -1: of none.
VERKV_API void check_stored(std::string_view what, const TensorView& view, DType storage,
                            std::int64_t first_row = -1);
// Which rows of queries that the host can read are not finite, padding aside: told by the batch's
// row_status, or, where that is empty, thrown as InvalidArgument.
VERKV_API void check_queries(const AttendBatch& batch);

// Whether a row is to be answered: not padding, and not one that check_queries found.
inline bool is_asked(const AttendBatch& batch, std::size_t row) {
  return batch.sequences[row] != kNoSequence &&
         (batch.row_status.empty() || batch.row_status[row] == RowStatus::answered);
}

}  // namespace verkv

#endif  // VERKV_SRC_NUMBER_CHECKS_HPP
