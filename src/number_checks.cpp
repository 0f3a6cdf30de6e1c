#include "number_checks.hpp"

#include <cmath>
#include <limits>

#include "invalid.hpp"

namespace verkv {
namespace {

// Calls found(place, number) for the first number that is larger than `limit` or NaN.
template <class Found>
void find_beyond(float limit, const TensorView& view, Found&& found) {
  with_element(view.type, [&](auto zero) {
    for (std::int64_t t = 0; t < view.tokens; ++t) {
      for (std::int64_t h = 0; h < view.heads; ++h) {
        const auto* row = static_cast<const decltype(zero)*>(view.row(t, h));
        for (std::int64_t j = 0; j < view.dim; ++j) {
          const float x = to_float(row[j]);
          if (!(std::fabs(x) <= limit)) return found(NumberPlace{t, h, j}, x);
        }
      }
    }
  });
}

}  // namespace

void refuse_stored(std::string_view what, std::int64_t layer, const NumberPlace& place,
                   float number, DType storage) {
  invalid(
      ErrorCode::number, {layer, place.row, place.head, place.token},
      "{}: token {}, head {}, coordinate {} is {}; it must be finite and, stored as {}, not above "
      "{} in size",
      what, place.token, place.head, place.coordinate, number, name(storage),
      largest_number(storage));
}

void refuse_query(std::string_view what, std::int64_t layer, const NumberPlace& place,
                  float number) {
  invalid(ErrorCode::number, {layer, place.token, place.head, -1},
          "{}: row {}, head {}, coordinate {} is {}; it must be finite", what, place.token,
          place.head, place.coordinate, number);
}

void check_stored(std::string_view what, const TensorView& view, DType storage,
                  std::int64_t first_row) {
  find_beyond(largest_number(storage), view, [&](NumberPlace place, float number) {
    if (first_row >= 0) place.row = place.token += first_row;
    refuse_stored(what, -1, place, number, storage);
  });
}

void check_queries(const AttendBatch& batch) {
  TensorView row = batch.queries;
  row.tokens = 1;
  for (std::size_t i = 0; i < batch.sequences.size(); ++i) {
    if (!batch.row_status.empty()) batch.row_status[i] = RowStatus::answered;
    if (batch.sequences[i] == kNoSequence) continue;
    row.data = batch.queries.row(static_cast<std::int64_t>(i), 0);
    find_beyond(std::numeric_limits<float>::max(), row, [&](NumberPlace place, float number) {
      if (!batch.row_status.empty()) {
        batch.row_status[i] = RowStatus::bad_query;
        return;
      }
      place.token = static_cast<std::int64_t>(i);
      refuse_query("queries", -1, place, number);
    });
  }
}

}  // namespace verkv
