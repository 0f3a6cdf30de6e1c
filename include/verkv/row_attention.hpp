// Exact attention over keys and values that lie where an engine keeps them. Nothing is copied, and
// nothing is known from one call to the next: for sequences that are too short to be worth
// compressing, for masks of any kind, and for importance from the queries of a prompt.
#ifndef VERKV_ROW_ATTENTION_HPP
#define VERKV_ROW_ATTENTION_HPP

#include <cstdint>
#include <memory>
#include <span>

#include <verkv/config.hpp>
#include <verkv/error.hpp>
#include <verkv/settings.hpp>
#include <verkv/view.hpp>

namespace verkv {

// Query rows over the tokens of one block of memory, of which each row sees some.
struct RowAttentionBatch {
  // [token][KV head][key_dim] and [token][KV head][value_dim]: f32, f16 or bf16, any strides, in the
  // same memory if values are the first numbers of keys.
  // Tokens that no row sees are not read. Numbers are not checked: one that is not finite makes the
  // answers of the rows that see it what arithmetic makes of it.
  TensorView keys = {};
  TensorView values = {};
  // [row][query head][key_dim]; f32, f16 or bf16, any strides.
  TensorView queries = {};
  // [row]: the tokens that the row sees, ascending.
  std::span<const std::span<const std::uint32_t>> visible = {};
  // [row][query head][value_dim], dense.
  std::span<float> output = {};
  // [row][query head], natural logarithm of the softmax denominator; or empty.
  std::span<float> lse = {};
};

// Any thread may call, one at a time. Results depend neither on threads nor on the other rows.
class VERKV_API RowAttention {
 public:
  // Of `config`: layers, threads, executor and StudyConfig::vector_code. Throws as make_cpu_cache.
  explicit RowAttention(const CacheConfig& config);
  ~RowAttention();
  RowAttention(const RowAttention&) = delete;
  RowAttention& operator=(const RowAttention&) = delete;

  // output = sum_i softmax(logit)_i value_i,   logit_i = scale * q.k_i (soft-capped)
  // over the tokens i that a row sees, and the head's sink logit if there is one; a row that sees none
  // has output 0 and LSE -infinity, or the sink. LayerConfig::window is not looked at. Allocates
  // where a batch is larger than any before, and blocks until it is answered.
  // Throws InvalidArgument on an unknown layer, a wrong shape or type, and visible tokens that are
  // not ascending or not there (naming the row); std::bad_alloc.
  void attend(std::int64_t layer, const RowAttentionBatch& batch);

  // Importance from these rows: out [KV head][token of keys], the root mean square, over rows and
  // the query heads of a KV head, of the probability that the token is given (0 by a row that does
  // not see it). batch.values and batch.output may be left out; batch.lse, if it is not, is written
  // as by attend. Throws as attend, and on an `out` of another size.
  void importance(std::int64_t layer, const RowAttentionBatch& batch, std::span<float> out);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace verkv

#endif  // VERKV_ROW_ATTENTION_HPP
