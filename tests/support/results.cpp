#include "support/results.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "tolerance.hpp"

namespace verkv::test {

Result attend(KvCacheManager& cache, std::int64_t layer, const std::vector<SequenceId>& sequences,
              const TensorView& queries) {
  const LayerConfig& shape = cache.config().layers[size(layer)];
  const std::size_t rows = sequences.size();
  Result result;
  result.output.assign(rows * size(shape.query_heads * shape.value_dim), kNaN);
  result.lse.assign(rows * size(shape.query_heads), kNaN);
  result.query.resize(rows * size(shape.query_heads));
  result.kv.resize(rows * size(shape.kv_heads));
  AttendBatch batch;
  batch.sequences = sequences;
  batch.queries = queries;
  batch.output = result.output;
  batch.lse = result.lse;
  batch.query_reports = result.query;
  batch.kv_reports = result.kv;
  cache.attend(layer, batch);
  return result;
}

Result attend(KvCacheManager& cache, std::int64_t layer, const std::vector<SequenceId>& sequences,
              const Block& queries) {
  return attend(cache, layer, sequences, queries.view());
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

bool same(const QueryHeadReport& a, const QueryHeadReport& b) {
  return std::memcmp(&a.epsilon, &b.epsilon, sizeof(double)) == 0 &&
         std::memcmp(&a.sketch_error, &b.sketch_error, sizeof(double)) == 0 &&
         a.certified == b.certified && a.planned_tokens == b.planned_tokens;
}

bool same(const KvHeadReport& a, const KvHeadReport& b) {
  return a.fetched_tokens == b.fetched_tokens && a.moved_tokens == b.moved_tokens &&
         a.moved_bytes == b.moved_bytes && a.resident_tokens == b.resident_tokens &&
         a.limited == b.limited;
}

bool same(const Result& a, const Result& b) {
  return same_floats(a.output, b.output) && same_floats(a.lse, b.lse) &&
         same_all(a.query, b.query) && same_all(a.kv, b.kv);
}

bool same(const MemoryReport& a, const MemoryReport& b) {
  return a.resident_bytes == b.resident_bytes && a.sketch_bytes == b.sketch_bytes &&
         a.metadata_bytes == b.metadata_bytes && a.host_bytes == b.host_bytes &&
         a.workspace_bytes == b.workspace_bytes && a.reserved_bytes == b.reserved_bytes &&
         a.basis_bytes == b.basis_bytes && a.shared_bytes == b.shared_bytes &&
         a.engine_bytes == b.engine_bytes && a.fast_reserved_bytes == b.fast_reserved_bytes &&
         a.host_reserved_bytes == b.host_reserved_bytes &&
         a.file_bytes == b.file_bytes;
}

bool same_floats(const std::vector<float>& a, const std::vector<float>& b) {
  if (backend().equal_outputs) return same_bits(a, b);
  float largest = 1;
  for (const float x : a) {
    if (std::isfinite(x)) largest = std::max(largest, std::fabs(x));
  }
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [&](float x, float y) {
           return x == y || std::fabs(x - y) <= static_cast<float>(tolerance::kRowOrder) * largest;
         });
}

Result row_of(const Result& all, std::size_t row, std::size_t rows) {
  const auto part = [row, rows](const auto& x) {
    const std::size_t each = x.size() / rows;
    const auto begin = x.begin() + static_cast<std::ptrdiff_t>(row * each);
    return std::remove_cvref_t<decltype(x)>(begin, begin + static_cast<std::ptrdiff_t>(each));
  };
  return {part(all.output), part(all.lse), part(all.query), part(all.kv)};
}

void append_result(Result& to, const Result& from) {
  to.output.insert(to.output.end(), from.output.begin(), from.output.end());
  to.lse.insert(to.lse.end(), from.lse.begin(), from.lse.end());
  to.query.insert(to.query.end(), from.query.begin(), from.query.end());
  to.kv.insert(to.kv.end(), from.kv.begin(), from.kv.end());
}

}  // namespace verkv::test
