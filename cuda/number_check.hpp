// Numbers that kernels have found to have no place: appended ones that are not finite or do not fit
// the storage type, and queries that are not finite.
#ifndef VERKV_CUDA_NUMBER_CHECK_HPP
#define VERKV_CUDA_NUMBER_CHECK_HPP

#include <cstdint>

#include <verkv/types.hpp>

#include "bad_number.hpp"
#include "device_memory.hpp"
#include "stream.hpp"

namespace verkv::cuda {

class NumberCheck {
 public:
  explicit NumberCheck(const Stream& stream);

  // Where kernels report.
  BadNumber* device() const { return found_.data(); }
  // Throws InvalidArgument with what was found since the last call, and forgets it. storage: the
  // type that numbers had to fit. Waits for the stream.
  void raise(DType storage, const Stream& stream) const;
  std::int64_t bytes() const { return found_.bytes(); }

 private:
  DeviceBuffer<BadNumber> found_;
};

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_NUMBER_CHECK_HPP
