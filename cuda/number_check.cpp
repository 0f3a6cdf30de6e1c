#include "number_check.hpp"

#include <fmt/format.h>

#include <string>

#include <verkv/error.hpp>

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
  const std::string place = fmt::format("{}, head {}, coordinate {} is {}; it must be finite",
                                        bad.token, bad.head, bad.coordinate, bad.number);
  const auto appended = [&](const char* what) {
    return fmt::format(
        "{} of sequence {}, layer {}: token {} and, stored as {}, not above {} in size", what,
        bad.sequence, bad.layer, place, name(storage), largest_number(storage));
  };
  switch (bad.source) {
    case NumberSource::queries:
      throw InvalidArgument(fmt::format("queries of a step, layer {}: row {}", bad.layer, place));
    case NumberSource::values:
      throw InvalidArgument(appended("values"));
    case NumberSource::keys:
      throw InvalidArgument(appended("keys"));
  }
}

}  // namespace verkv::cuda
