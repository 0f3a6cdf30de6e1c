// What the host has to read of views in device memory. `copies` keep what was copied.
#ifndef VERKV_CUDA_HOST_COPIES_HPP
#define VERKV_CUDA_HOST_COPIES_HPP

#include <cstddef>
#include <span>
#include <vector>

#include <verkv/reports.hpp>
#include <verkv/view.hpp>

#include "compression.hpp"
#include "stream.hpp"

namespace verkv::cuda {

// The scores of the layers that compress. Waits for the stream.
std::vector<ImportanceView> host_importance(const Compressor& compressor,
                                            std::span<const LayerLengths> lengths,
                                            std::span<const ImportanceView> importance,
                                            const Stream& stream,
                                            std::vector<std::vector<float>>& copies);

// The queries of the layers that make a basis of them now. The numbers are there once the stream
// has been waited for.
std::vector<TensorView> host_queries(const Compressor& compressor,
                                     std::span<const HeadCompression> heads,
                                     std::span<const TensorView> queries, const Stream& stream,
                                     std::vector<std::vector<std::byte>>& copies);

// check_queries of a batch with a row_status. Waits for the stream. Allocates.
void check_device_queries(const AttendBatch& batch, const Stream& stream);

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_HOST_COPIES_HPP
