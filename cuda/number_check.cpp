#include "number_check.hpp"

#include <fmt/format.h>

#include "number_checks.hpp"

namespace verkv::cuda {

NumberCheck::NumberCheck(const Stream& stream) : found_(1, "the check of appended numbers") {
  stream.clear(found_);
}

void NumberCheck::raise(DType storage, const Stream& stream) const {
  BadNumber bad;
  stream.copy_out(&bad, found_.data(), 1);
  stream.synchronize();
  if (bad.claimed == 0) return;
  stream.clear(found_);
  const NumberPlace place{bad.token, bad.head, bad.coordinate};
  const auto refuse_appended = [&](const char* what) {
    refuse_stored(fmt::format("{} of sequence {}, layer {}", what, bad.sequence, bad.layer),
                  bad.layer, place, bad.number, storage);
  };
  switch (bad.source) {
    case NumberSource::queries:
      refuse_query(fmt::format("queries of a step, layer {}", bad.layer), bad.layer, place,
                   bad.number);
    case NumberSource::values:
      refuse_appended("values");
      break;
    case NumberSource::keys:
      refuse_appended("keys");
      break;
  }
}

}  // namespace verkv::cuda
