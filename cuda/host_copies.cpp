#include "host_copies.hpp"

#include "number_checks.hpp"
#include "staging.hpp"

namespace verkv::cuda {

std::vector<ImportanceView> host_importance(const Compressor& compressor,
                                            std::span<const LayerLengths> lengths,
                                            std::span<const ImportanceView> importance,
                                            const Stream& stream,
                                            std::vector<std::vector<float>>& copies) {
  std::vector<ImportanceView> views(importance.begin(), importance.end());
  for (std::size_t layer = 0; layer < views.size(); ++layer) {
    if (!compressor.compresses(layer)) continue;
    if (lengths[layer].tokens == lengths[layer].compressed) continue;  // its view may be null
    views[layer] = host_copy(views[layer], stream, copies[layer]);
  }
  stream.synchronize();
  return views;
}

std::vector<TensorView> host_queries(const Compressor& compressor,
                                     std::span<const HeadCompression> heads,
                                     std::span<const TensorView> queries, const Stream& stream,
                                     std::vector<std::vector<std::byte>>& copies) {
  std::vector<TensorView> views(queries.begin(), queries.end());
  if (views.empty()) return views;
  for (const HeadCompression& head : heads) {
    TensorView& view = views[head.layer];
    if (head.head != 0 || view.tokens == 0 || !compressor.needs_basis(head)) continue;
    view = host_copy(view, stream, copies[head.layer]);
  }
  return views;
}

void check_device_queries(const AttendBatch& batch, const Stream& stream) {
  std::vector<std::byte> copy;
  AttendBatch on_host = batch;
  on_host.queries = host_copy(batch.queries, stream, copy);
  stream.synchronize();
  check_queries(on_host);
}

}  // namespace verkv::cuda
