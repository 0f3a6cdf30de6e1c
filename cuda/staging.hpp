// Copies of the caller's views: of host memory for kernels to read, of device memory for the host.
#ifndef VERKV_CUDA_STAGING_HPP
#define VERKV_CUDA_STAGING_HPP

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include <verkv/view.hpp>

#include "device_memory.hpp"
#include "stream.hpp"

namespace verkv::cuda {

// Tokens [first, first + count) of a view in host memory without gaps, [token][head][dim].
void pack(const TensorView& view, std::int64_t first, std::int64_t count,
          std::vector<std::byte>& out);

// A view of device memory as the host can read it, in `copy`: dense, [token][head][dim] and
// [head][token]. Enqueued only: the numbers are there once the stream has been waited for.
TensorView host_copy(const TensorView& view, const Stream& stream, std::vector<std::byte>& copy);
ImportanceView host_copy(const ImportanceView& view, const Stream& stream,
                         std::vector<float>& copy);

// Appended rows of host memory, piece by piece in one block of device memory.
class RowStaging {
 public:
  // Calls f(keys, values, first) for pieces of the views, token `first` and on, in device memory.
  // What f enqueues on the stream has read a piece before the next one takes its place. The block
  // grows to the largest piece, which waits for the stream.
  void each_piece(const TensorView& keys, const TensorView& values, const Stream& stream,
                  const std::function<void(const TensorView&, const TensorView&, std::int64_t)>& f);
  // Room for pieces of so many tokens, of rows of so many numbers; then each_piece of them allocates
  // no device memory. Waits for the stream if the block grows.
  void reserve(std::int64_t tokens, std::int64_t key_row, std::int64_t value_row,
               const Stream& stream);
  std::int64_t bytes() const { return device_.bytes(); }

 private:
  struct Piece {
    std::int64_t tokens;
    std::int64_t key_bytes;
    std::int64_t bytes;
  };
  static Piece piece_of(std::int64_t tokens, std::int64_t key_row, std::int64_t value_row);

  DeviceBuffer<std::byte> device_;
  std::vector<std::byte> packed_;
};

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_STAGING_HPP
