// A number that has no place among keys, values or queries, as a kernel reports it.
#ifndef VERKV_CUDA_BAD_NUMBER_HPP
#define VERKV_CUDA_BAD_NUMBER_HPP

#include <cstdint>

namespace verkv::cuda {

enum class NumberSource : std::uint32_t { keys, values, queries };

// The first number found that is not finite or does not fit the storage type: by append among keys
// and values, by a step among queries. The thread that sets `claimed` writes the other members.
struct BadNumber {
  std::uint32_t claimed = 0;
  NumberSource source = NumberSource::keys;
  // Of keys and values only.
  std::int64_t sequence = 0;
  std::int64_t layer = 0;
  // Of queries: the row of the batch.
  std::int64_t token = 0;
  std::int64_t head = 0;
  std::int32_t coordinate = 0;
  float number = 0;
};

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_BAD_NUMBER_HPP
